"""A data directory has one daemon, one identity, and an epoch that only rises."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulayer.model.errors import GpulayerError, Refused, StorageFailed
from gpulayer.runtime import identity
from gpulayer.runtime.identity import (
    DataDir,
    Membership,
    atomic_write,
    check_cluster,
    forget_membership,
    known_node_id,
    membership,
    note_membership,
    open_data_dir,
    this_machine,
)

HOLDER = """
import sys
from gpulayer.runtime.identity import open_data_dir
data = open_data_dir(sys.argv[1])
print(data.node_id, data.epoch, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


def opened(path: Path, **options: object) -> DataDir:
    """Open and close it, as a daemon that starts and ends."""
    with open_data_dir(path, **{"machine_id": "m-1", **options}) as data:
        return data


def refusal(path: Path, kind: type[GpulayerError] = StorageFailed, **options: object) -> GpulayerError:
    with pytest.raises(kind) as caught:
        opened(path, **options)
    assert str(path) in caught.value.message
    assert caught.value.hint
    return caught.value


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_new_directory_is_private_and_a_node_keeps_its_id(path: Path) -> None:
    first = opened(path / "deep")
    second = opened(path / "deep")
    assert stat.S_IMODE((path / "deep").stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "deep" / "node.json").stat().st_mode) == 0o600
    assert first.is_new
    assert not second.is_new
    assert first.node_id == second.node_id
    assert first.node_id.startswith("n-")
    assert first.created_at_utc == second.created_at_utc
    assert opened(path / "other").node_id != first.node_id


def test_the_epoch_rises_at_each_start_and_is_on_the_disk_first(path: Path) -> None:
    for epoch in (1, 2, 3):
        with open_data_dir(path) as data:
            assert data.epoch == epoch
            assert (path / "epoch").read_text() == f"{epoch}\n"


def test_a_second_daemon_is_refused_and_told_by_whom(path: Path) -> None:
    with holder(path) as process:
        error = refusal(path, Refused)
        assert f"in use by pid {process.pid}" in error.message
        assert "--data-dir" in error.hint
        assert error.code == "data_dir_in_use"
        assert (path / "epoch").read_text() == "1\n"
    assert opened(path, machine_id=this_machine()).epoch == 2  # the lock ends with its process


def test_a_daemon_that_is_gone_is_not_taken_for_the_one_that_has_just_got_the_lock(path: Path) -> None:
    """Two that are started at once: the first has the lock and has not written its pid yet."""
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    path.mkdir(mode=0o700)
    (path / "lock").write_text(f"{gone.pid}\n")
    lock = os.open(path / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "in use by another process" in refusal(path, Refused).message
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        assert f"in use by pid {os.getpid()}" in refusal(path, Refused).message
    finally:
        os.close(lock)
    opened(path)


def test_what_a_daemon_starts_does_not_hold_its_lock(path: Path) -> None:
    data = open_data_dir(path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        data.close()
        opened(path, machine_id=this_machine())
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)


def test_a_copy_is_refused_and_the_original_is_not(path: Path, tmp_path: Path) -> None:
    opened(path)
    shutil.copytree(path, tmp_path / "copy")
    error = refusal(tmp_path / "copy", Refused)
    assert error.code == "cloned_data_dir"
    assert "--abandon-state" in error.hint
    assert opened(path).epoch == 2
    path.rename(tmp_path / "moved")  # the same directory under another name is no copy
    assert opened(tmp_path / "moved").epoch == 3


def test_a_directory_from_another_machine_is_refused(path: Path) -> None:
    opened(path)
    assert "another machine" in refusal(path, Refused, machine_id="m-2").message
    assert opened(path, machine_id="").epoch == 2  # a machine without an id cannot tell


def test_abandoned_state_is_kept_aside_and_the_node_is_new(path: Path) -> None:
    old = opened(path)
    (path / "log.db").write_text("old log")
    (path / "sandboxes").mkdir()
    new = opened(path, abandon_state=True, machine_id="m-2")
    assert (new.is_new, new.epoch) == (True, 1)
    assert new.node_id != old.node_id
    (kept,) = path.glob("abandoned-*")
    assert (kept / "log.db").read_text() == "old log"
    assert (kept / "sandboxes").is_dir()
    assert json.loads((kept / "node.json").read_text())["node_id"] == old.node_id
    assert not (path / "log.db").exists()
    assert str(kept) in new.warnings[0]
    assert opened(path, machine_id="m-2").node_id == new.node_id
    opened(path, abandon_state=True)
    assert len(list(path.glob("abandoned-*"))) == 2


def test_abandoned_state_leaves_local_runs_and_their_locks_where_they_are(path: Path) -> None:
    """They are not the node's that is given up, and go on."""
    opened(path)
    for name in ("local", "devices"):
        (path / name).mkdir()
        (path / name / "kept").touch()
    opened(path, abandon_state=True)
    assert (path / "local" / "kept").exists()
    assert (path / "devices" / "kept").exists()


def test_whose_directory_it_is_can_be_asked_without_opening_it(path: Path) -> None:
    assert known_node_id(path) is None
    assert opened(path).node_id == known_node_id(path)
    (path / "node.json").write_text("{")
    with pytest.raises(StorageFailed, match="damaged"):
        known_node_id(path)


def test_a_directory_that_is_open_to_others_is_tightened_with_a_warning(path: Path) -> None:
    opened(path)
    path.chmod(0o755)
    assert "0755" in opened(path).warnings[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert opened(path).warnings == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_directory_of_another_user_is_refused(path: Path) -> None:
    opened(path)
    os.chown(path, 12345, -1)
    assert "belongs to user 12345" in refusal(path, Refused).message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("node.json", None, "lost its node.json"),
        ("node.json", b"", "node.json is damaged"),
        ("node.json", b"[]", "node.json is damaged"),
        ("node.json", b"[" * 60_000, "node.json is damaged"),
        ("node.json", b'{"format": 1}', "no usable node_id"),
        ("node.json", b'{"format": 2}', r"newer gpulayer \(format 2, this one reads 1\)"),
        ("epoch", None, "epoch is damaged: it is missing"),
        ("epoch", b"", "epoch is damaged"),
        ("epoch", b"-1", "not a number"),
        ("epoch", b"9" * 30, "not a number"),
    ],
)
def test_what_is_damaged_or_newer_is_refused_by_name(path: Path, name: str, content: bytes | None, words: str) -> None:
    opened(path)
    (path / "log.db").touch()
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)
    with pytest.raises(StorageFailed, match=words):
        raise refusal(path)
    assert opened(path, abandon_state=True).is_new


def test_a_first_start_that_was_cut_short_is_begun_again(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "lock").touch()
    (path / "epoch").write_text("0\n")
    (path / ".node.json.1-1.tmp").touch()
    assert opened(path).is_new


def test_what_is_not_a_usable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refusal(tmp_path / "file").message
    assert "Not a directory" in refusal(tmp_path / "file" / "below").message
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refusal(tmp_path / "loop")
    if Path("/proc/self").exists():
        refusal(Path("/proc/gpulayer"))


@pytest.mark.parametrize(
    ("options", "code", "hint"), [("ro", "storage_failed", "read-only"), ("size=4k", "disk_full", "free some space")]
)
def test_a_read_only_or_full_disk_is_refused(path: Path, options: str, code: str, hint: str) -> None:
    program = (
        "import sys\nfrom gpulayer.runtime.identity import open_data_dir\n"
        "from gpulayer.model.errors import GpulayerError\n"
        "try:\n    open_data_dir(sys.argv[1])\nexcept GpulayerError as error:\n    print(error.code, error)\n"
    )
    script = 'mount -t tmpfs -o "$3" tmpfs "$0" || exit 9; exec "$1" -c "$2" "$0"'
    path.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(path), sys.executable, program, f"mode=700,{options}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode in (1, 9) and "Traceback" not in done.stderr:
        pytest.skip("needs the right to mount (root)")
    assert done.stdout.startswith(code), done.stdout + done.stderr
    assert hint in done.stdout


# atomic_write


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    target = tmp_path / "file"
    atomic_write(target, b"one")
    atomic_write(target, b"two", mode=0o640)
    assert target.read_bytes() == b"two"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    atomic_write(target, b"old")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(identity.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        atomic_write(target, b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


# --- whose cluster it is ----------------------------------------------------------------------------------------------


def test_what_cluster_it_is_of_is_known_after_a_restart(path: Path) -> None:
    data = opened(path)
    assert membership(path) is None
    for member in (
        Membership(cluster_id="c-1", is_voter=False, name="n2"),
        Membership(cluster_id="c-1", is_voter=False, name="n3"),
    ):
        note_membership(data, member)
        assert membership(path) == member
    forget_membership(data)
    assert membership(path) is None


def test_a_note_of_an_older_version_is_that_of_a_voter(path: Path) -> None:
    opened(path)
    (path / "cluster.json").write_text('{"cluster_id": "c-1"}')
    assert membership(path) == Membership(cluster_id="c-1", is_voter=True, name="")


@pytest.mark.parametrize("text", ["{}", '{"cluster_id": ""}', '{"cluster_id": "c-1", "is_voter": 1}', "["])
def test_a_damaged_note_is_told(path: Path, text: str) -> None:
    opened(path)
    (path / "cluster.json").write_text(text)
    with pytest.raises(StorageFailed, match=r"cluster\.json"):
        membership(path)


def test_a_lost_log_is_missed_only_where_one_has_to_be(path: Path) -> None:
    data = opened(path)
    note_membership(data, Membership(cluster_id="c-1", is_voter=False))
    check_cluster(data, "")
    note_membership(data, Membership(cluster_id="c-1"))
    check_cluster(data, "c-1")
    with pytest.raises(StorageFailed, match="lost its log"):
        check_cluster(data, "")


@pytest.mark.parametrize("trace", ["log.db", "cluster.json", "trust"])
def test_a_directory_that_has_lost_its_identity_makes_no_new_one(path: Path, trace: str) -> None:
    opened(path)
    (path / "node.json").unlink()
    (path / trace).mkdir()
    assert trace in refusal(path).message
