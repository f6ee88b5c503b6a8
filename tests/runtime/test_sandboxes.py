"""Directories on a real disk: made durable, listed, pruned, and never left."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import AttemptId, JobId, ReplicaId
from gpulayer.runtime.sandboxes import Sandboxes, attempt_id
from gpulayer.shim import notes

NOW = 1_800_000_000.0
DAY = 86400.0


def an_attempt(number: int = 1, job: str = "j-aaaaaaaaaa") -> AttemptId:
    return AttemptId(ReplicaId(JobId(job), 0), number)


def ended(sandboxes: Sandboxes, number: int, *, at_utc: float, megabytes: int = 0) -> AttemptId:
    attempt = an_attempt(number)
    path = sandboxes.make(attempt, {})
    (path / "runs").mkdir()
    runs_fd = os.open(path / "runs", os.O_RDONLY)
    note_fd = notes.create(runs_fd, 1, {"run": 1})
    notes.write_exit(note_fd, {"run": 1, "code": 0, "ended_at_utc": at_utc})
    os.close(note_fd)
    os.close(runs_fd)
    (path / "work" / "model.bin").write_bytes(os.urandom(1024) * 1024 * megabytes)
    return attempt


def test_a_sandbox_is_private_and_says_what_it_is_for(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path)
    path = sandboxes.make(an_attempt(), {"job_name": "llm"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "work").stat().st_mode) == 0o700
    assert sandboxes.read_attempt(an_attempt()) == {"format": 1, "job_name": "llm"}
    assert sandboxes.attempts() == [an_attempt()]


def test_making_it_again_brings_back_what_was_removed_by_hand(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path)
    path = sandboxes.make(an_attempt(), {})
    (path / "work").rmdir()
    sandboxes.make(an_attempt(), {"job_name": "llm"})
    assert (path / "work").is_dir()
    assert not list(path.glob("*.new"))


def test_strangers_are_left_alone(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path)
    sandboxes.make(an_attempt(), {})
    for name in ("lost+found", "j-aaaaaaaaaa.0", "j-aaaaaaaaaa.0.0", "j-AAAAAAAAAA.0.1", "j-aaaaaaaaaa.00.1"):
        (sandboxes.root / name).mkdir()
        assert attempt_id(name) is None
    (sandboxes.root / "j-bbbbbbbbbb.0.1").write_text("a file")
    (sandboxes.root / "j-cccccccccc.0.1").symlink_to("/etc")
    assert sandboxes.attempts() == [an_attempt()]
    assert sandboxes.prune((), now_utc=NOW + 1000 * DAY, kept_bytes=0) == [an_attempt()]
    assert (sandboxes.root / "lost+found").is_dir()
    assert os.path.exists("/etc/passwd")


@pytest.mark.parametrize("job", ["../../etc", "j-a/../b", "", "j-aaaaaaaaaa\n", ".."])
def test_no_id_leads_out_of_the_directory(tmp_path: Path, job: str) -> None:
    with pytest.raises(InvalidRequest):
        Sandboxes(tmp_path).path(an_attempt(job=job))


def test_what_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path)
    path = sandboxes.make(an_attempt(), {})
    for content in (b"", b"\0" * 100, b"[1]", b'{"job', b"[" * 100_000):
        (path / "attempt.json").write_bytes(content)
        assert sandboxes.read_attempt(an_attempt()) is None
    (path / "shim.json").write_text(json.dumps({"pid": 1}))
    assert sandboxes.read_shim(an_attempt()) == {"pid": 1}
    assert sandboxes.read_shim(an_attempt(2)) is None


def test_the_old_go_and_the_living_stay(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path)
    old, living, young = (
        ended(sandboxes, number, at_utc=NOW - days * DAY) for number, days in ((1, 8), (2, 30), (3, 6))
    )
    assert sandboxes.prune({living}, now_utc=NOW, kept_bytes=2**40) == [old]
    assert sandboxes.attempts() == [living, young]


def test_beyond_the_bound_the_oldest_go_first(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path)
    attempts = [ended(sandboxes, number, at_utc=NOW - (10 - number), megabytes=1) for number in range(1, 5)]
    assert sandboxes.prune((), now_utc=NOW, kept_bytes=int(2.5 * 2**20)) == attempts[:2]
    assert sandboxes.prune((), now_utc=NOW, kept_bytes=int(2.5 * 2**20)) == []


def test_a_link_in_a_sandbox_is_not_followed(tmp_path: Path) -> None:
    """What a replica leaves in its directory must not lead the daemon, which may be root, elsewhere."""
    sandboxes = Sandboxes(tmp_path)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    attempt = ended(sandboxes, 1, at_utc=NOW - 30 * DAY)
    (sandboxes.work(attempt) / "link").symlink_to(precious)
    assert sandboxes.prune((), now_utc=NOW) == [attempt]
    assert (precious / "file").read_text() == "keep"
