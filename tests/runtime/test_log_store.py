"""The log store keeps what it acknowledged: through kill -9 at every step, torn files, errors and full disks."""

# The files are small and the children short: blocking the one task of a test for them is what is meant here.
# ruff: noqa: ASYNC110, ASYNC221, ASYNC240

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from gpulayer.model.errors import StorageFailed
from gpulayer.model.ids import NodeId
from gpulayer.runtime import failpoints, log_file
from gpulayer.runtime.log_file import filesystem_of
from gpulayer.runtime.log_store import Entry, HardState, LogStore, Recovered, open_store

ME = NodeId("n-1")

# Says what it tries and what was acknowledged. Every 5th append carries a term and a vote, every 7th replaces the entry
# before, every 10th is followed by a snapshot.
CHILD = """
import sys, trio
from gpulayer.runtime.log_store import Entry, HardState, open_store

def say(*words):
    print(*words, flush=True)

async def main(path, free_min):
    store, recovered = await open_store(path, node_id="n-1", reserve_bytes=0, disk_free_min_bytes=free_min)
    try:
        for index in range(1, 81):
            term = index // 5 + 1
            entries, cut = [Entry(index=index, term=term, kind="command", payload=b"%d.a" % index + b"x" * 500)], None
            if index % 7 == 0:
                cut = index - 1
                entries.insert(0, Entry(index=cut, term=term, kind="command", payload=b"%d.b" % cut + b"x" * 500))
            hard = HardState(cluster_id="c", term=term, voted_for="n-1") if index % 5 == 0 else None
            say("try", term if hard else 0, *[entry.payload[:8].strip(b"x").decode() for entry in entries])
            await store.append(entries, hard_state=hard, truncate_from=cut)
            say("ok")
            if index % 10 == 0:
                say("snapshot", index - 3)
                await store.save_snapshot(index - 3, (index - 3) // 5 + 1, b"blob of %d" % (index - 3), keep_entries=4)
                say("ok")
    except Exception as error:
        say("failed", error.code, error.message)
        assert error.code != "storage_failed" or store.failed is not None
        try:
            await store.append([])
            say("written")
        except Exception as again:
            say("refused", again.code)
        try:
            say("snapshot", index - 1)
            await store.save_snapshot(index - 1, (index - 1) // 5 + 1, b"blob of %d" % (index - 1), keep_entries=4)
            say("ok")
        except Exception as again:
            say("refused", again.code)
    await store.close()
    say("closed")

trio.run(main, sys.argv[1], int(sys.argv[2]))
"""


class Told:
    """What a child was told is durable, and what it had asked for when it ended."""

    def __init__(self, output: str) -> None:
        self.payloads: dict[int, str] = {}
        self.term = self.snapshot = 0
        asked: tuple[str, list[str]] = ("", [])
        self.asked_payloads: dict[int, str] = {}
        self.asked_term = self.asked_snapshot = 0
        for what, *words in (line.split() for line in output.splitlines()):
            if what in ("try", "snapshot"):
                asked = (what, words)
                if what == "try":
                    self.asked_term = max(self.asked_term, int(words[0]))
                    self.asked_payloads = {int(word.split(".")[0]): word for word in words[1:]}
                else:
                    self.asked_snapshot = int(words[0])
            elif what == "ok" and asked[0] == "try":
                self.payloads |= self.asked_payloads
                self.term = self.asked_term
            elif what == "ok":
                self.snapshot = self.asked_snapshot

    def check(self, recovered: Recovered) -> None:
        snapshot = recovered.snapshot[0] if recovered.snapshot else 0
        assert snapshot in (self.snapshot, self.asked_snapshot)
        if recovered.snapshot:
            assert recovered.snapshot[2] == b"blob of %d" % snapshot
        term = recovered.hard_state.term if recovered.hard_state else 0
        assert term in (self.term, self.asked_term)
        found = {entry.index: entry.payload.decode().rstrip("x") for entry in recovered.entries}
        for index, payload in self.payloads.items():
            if index > snapshot - 4:  # else a snapshot may have dropped it
                assert found.get(index) in (payload, self.asked_payloads.get(index, payload)), f"entry {index} is lost"


def run_child(path: Path, failpoints: str = "", free_min: int = 0, *, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", CHILD, str(path), str(free_min)],
        env={**os.environ, "GPULAYER_FAILPOINTS": failpoints},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


async def reopened(path: Path) -> Recovered:
    store, recovered = await open_store(path, node_id=ME, reserve_bytes=0)
    await store.close()
    return recovered


async def opened(path: Path, **options: int) -> LogStore:
    store, _ = await open_store(path, node_id=ME, **{"reserve_bytes": 0, **options})
    return store


def entry(index: int, term: int = 1, payload: bytes = b"payload") -> Entry:
    return Entry(index=index, term=term, kind="command", payload=payload)


def vote(term: int, voted_for: str | None = "n-1") -> HardState:
    return HardState(cluster_id="c", term=term, voted_for=NodeId(voted_for) if voted_for else None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


# What it keeps


async def test_a_new_store_is_empty_and_a_closed_one_gives_back_what_was_written(path: Path) -> None:
    store, recovered = await open_store(path, node_id=ME)
    assert recovered == Recovered()
    await store.append([entry(1), entry(2)], hard_state=vote(1))
    await store.append([entry(3, term=2)], hard_state=vote(2, None))
    await store.close()
    assert await reopened(path) == Recovered(hard_state=vote(2, None), entries=(entry(1), entry(2), entry(3, term=2)))


async def test_a_truncation_and_what_replaces_it_are_one_write(path: Path) -> None:
    store = await opened(path)
    await store.append([entry(1), entry(2), entry(3)])
    await store.append([entry(2, term=2)], truncate_from=2, hard_state=vote(2))
    await store.close()
    assert (await reopened(path)).entries == (entry(1), entry(2, term=2))


async def test_a_snapshot_replaces_the_older_one_and_drops_old_entries(path: Path) -> None:
    store = await opened(path)
    await store.append([entry(index) for index in range(1, 21)])
    await store.save_snapshot(10, 1, b"ten", keep_entries=2)
    await store.save_snapshot(15, 1, b"fifteen", keep_entries=5)
    stats = store.stats()
    assert (stats.first_index, stats.last_index, stats.snapshot_index) == (11, 20, 15)
    await store.append([entry(21)])
    await store.close()
    recovered = await reopened(path)
    assert recovered.snapshot == (15, 1, b"fifteen")
    assert [found.index for found in recovered.entries] == list(range(11, 22))


@pytest.mark.parametrize(("index", "term"), [(30, 2), (10, 2)])
async def test_a_snapshot_that_the_log_does_not_lead_to_replaces_the_log(path: Path, index: int, term: int) -> None:
    """Installed from a leader: beyond our end, or where our entry is of another term."""
    store = await opened(path)
    await store.append([entry(index) for index in range(1, 21)])
    await store.save_snapshot(index, term, b"theirs")
    await store.append([entry(index + 1, term=term)])
    await store.close()
    assert await reopened(path) == Recovered(snapshot=(index, term, b"theirs"), entries=(entry(index + 1, term=term),))


async def test_a_log_that_is_only_a_snapshot_goes_on_after_it(path: Path) -> None:
    store = await opened(path)
    await store.append([entry(1)])
    await store.save_snapshot(1, 1, b"one", keep_entries=0)
    await store.close()
    store = await opened(path)
    assert store.stats().last_index == 1
    await store.append([entry(2)])
    await store.close()


async def test_what_would_break_the_log_is_refused_and_changes_nothing(path: Path) -> None:
    store = await opened(path)
    await store.append([entry(index) for index in range(1, 6)], hard_state=vote(3, "n-2"))
    await store.save_snapshot(2, 1, b"two")
    for wrong in (
        {"entries": [entry(7)]},
        {"entries": [entry(6, term=2), entry(7, term=1)]},
        {"entries": [entry(3)]},
        {"entries": [], "truncate_from": 2},
        {"entries": [], "hard_state": vote(2)},
        {"entries": [entry(6)], "hard_state": vote(3, "n-3")},
        {"entries": [], "hard_state": HardState(cluster_id="other", term=4)},
    ):
        with pytest.raises(ValueError, match=r"\d|cluster"):
            await store.append(**wrong)
    with pytest.raises(ValueError, match="snapshot at index 1"):
        await store.save_snapshot(1, 1, b"one")
    assert store.failed is None
    await store.append([entry(6)], hard_state=vote(4, None))
    await store.close()
    assert (await reopened(path)).hard_state == vote(4, None)


# Together


async def test_writes_that_wait_for_one_sync_share_the_next(path: Path) -> None:
    store = await opened(path)
    acknowledged: list[int] = []
    last = 0

    async def one() -> None:
        nonlocal last
        last += 1
        mine = last
        await store.append([entry(mine)])
        acknowledged.append(mine)

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(one)
    # Order within one answered transaction is trio's choice of task, not the store's.
    assert sorted(acknowledged) == list(range(1, 65))
    assert store.stats().commits < 32
    await store.close()
    assert len((await reopened(path)).entries) == 64


async def test_a_write_that_is_wrong_does_not_harm_those_beside_it(path: Path) -> None:
    store = await opened(path)
    answers: list[object] = []
    for one in (entry(1), entry(3), entry(2), entry(3)):
        store.append_soon([one], done=answers.append)
    await store.append([])
    assert [type(answer) for answer in answers] == [type(None), ValueError, type(None), type(None)]
    await store.close()


async def test_a_cancelled_write_is_written_all_the_same(path: Path) -> None:
    store = await opened(path)
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.append([entry(1)])
    assert scope.cancelled_caught
    await store.close()
    assert (await reopened(path)).entries == (entry(1),)


async def test_the_write_ahead_log_is_emptied_when_idle_and_when_large(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(path)
    await store.append([entry(1, payload=b"x" * 100_000)])
    with trio.fail_after(10):
        while path.stat().st_size < 100_000:
            await trio.sleep(0.05)
    monkeypatch.setattr(log_file, "WAL_BYTES_MAX", 300_000)
    for index in range(2, 12):
        await store.append([entry(index, payload=b"x" * 100_000)])
        assert store.stats().wal_bytes < 420_000
    await store.close()


# Killed


POINTS = [
    "log.before_begin",
    "log.after_begin",
    "log.after_hard_state",
    "log.after_truncate",
    "log.after_insert",
    "log.before_commit",
    "log.after_commit",
    "snapshot.before_blob",
    "snapshot.after_blob",
    "snapshot.after_complete",
    "snapshot.before_truncate",
]


@pytest.mark.parametrize("point", POINTS)
async def test_nothing_acknowledged_is_missing_after_a_kill_at(point: str, path: Path) -> None:
    turn = 3 if point.startswith("snapshot") or "hard_state" in point or "truncate" in point else 37
    returncode, output = run_child(path, f"{point}=kill:{turn}")
    assert returncode == -signal.SIGKILL
    told = Told(output)
    assert told.payloads
    told.check(await reopened(path))
    if point == "log.after_commit":  # it was durable before anyone was told
        assert told.payloads != told.payloads | told.asked_payloads


async def test_a_store_that_was_killed_while_it_was_made_is_made_again(path: Path) -> None:
    sqlite3.connect(path).execute("PRAGMA journal_mode=WAL")
    assert path.stat().st_size > 0
    assert await reopened(path) == Recovered()


async def test_any_loss_at_the_end_of_the_write_ahead_log_leaves_whole_writes(path: Path, tmp_path: Path) -> None:
    """As after a power cut that kept only a part of what was not synced: the file opens, and no write is half there.
    In particular a term is never there without its vote and its entry (a double vote otherwise)."""
    store = await opened(path)
    for term in range(1, 9):
        await store.append([entry(term, term=term)], hard_state=vote(term, f"n-{term}"))
    saved = {name: Path(f"{path}{name}").read_bytes() for name in ("", "-wal")}
    await store.close()
    whole = len(saved["-wal"])
    lengths = set()
    for cut in sorted({*range(0, whole, whole // 40 + 1), whole - 1, whole}):
        for tail in (b"", os.urandom(64)):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            (copy / "log.db").write_bytes(saved[""])
            (copy / "log.db-wal").write_bytes(saved["-wal"][:cut] + tail)
            recovered = await reopened(copy / "log.db")
            count = len(recovered.entries)
            lengths.add(count)
            assert recovered.entries == tuple(entry(term, term=term) for term in range(1, count + 1))
            assert recovered.hard_state == (vote(count, f"n-{count}") if count else None)
    assert lengths == set(range(9))


# Broken


async def test_a_failed_write_ends_the_store(path: Path) -> None:
    _, output = run_child(path, "log.before_commit=error:9")
    assert "failed storage_failed voter: storage failed" in output
    assert "Input/output error" in output
    assert output.splitlines()[-4:] == ["refused storage_failed", "snapshot 8", "refused storage_failed", "closed"]
    told = Told(output)
    assert len(told.payloads) == 8
    told.check(await reopened(path))


async def test_a_file_that_cannot_grow_ends_the_store(path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), "0"], preexec_fn=limit, capture_output=True, text=True, timeout=60
    )
    assert not done.stderr
    assert "failed storage_failed voter: storage failed" in done.stdout
    Told(done.stdout).check(await reopened(path))


async def test_what_waits_is_told_of_the_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened(path)
    answers: list[object] = []
    await store.append([entry(1)])
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("log.before_begin=error"))
    for index in (2, 3):
        store.append_soon([entry(index)], done=answers.append)
    with trio.fail_after(5):
        while len(answers) < 2:
            await trio.sleep(0.01)
    assert all(isinstance(answer, StorageFailed) for answer in answers)
    with pytest.raises(StorageFailed, match="voter: storage failed"):
        await store.append([entry(2)])
    assert store.failed is not None
    await store.close()


async def test_a_store_that_is_closed_says_so(path: Path) -> None:
    store = await opened(path)
    await store.close()
    await store.close()
    with pytest.raises(StorageFailed, match="is closed"):
        await store.append([entry(1)])


async def test_a_disk_that_fills_up_stops_new_entries_only(path: Path) -> None:
    store = await opened(path)
    await store.append([entry(1), entry(2)])
    await store.close()
    store = await opened(path, disk_free_min_bytes=2**62)
    with pytest.raises(StorageFailed, match="nothing was written") as caught:
        await store.append([entry(3)], hard_state=vote(1))
    assert caught.value.code == "disk_full"
    assert store.disk_low
    assert store.failed is None
    await store.append([], hard_state=vote(2))
    await store.save_snapshot(2, 1, b"two", keep_entries=0)
    await store.close()
    assert await reopened(path) == Recovered(hard_state=vote(2), snapshot=(2, 1, b"two"))


async def test_room_on_the_disk_is_noticed_without_a_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened(path, disk_free_min_bytes=2**62)
    with pytest.raises(StorageFailed):
        await store.append([entry(1)])
    monkeypatch.setattr(store._file, "_disk_free_min_bytes", 0)
    with trio.fail_after(5):
        while store.disk_low:
            await trio.sleep(0.05)
    await store.append([entry(1)])
    await store.close()


async def test_the_reserve_is_kept_for_what_ends_something(path: Path) -> None:
    """With it gone at the first alarm, a job that filled the disk could not even be cancelled."""
    await (await opened(path, reserve_bytes=100_000)).close()
    assert (path.parent / "reserve").stat().st_size == 100_000
    store = await opened(path, reserve_bytes=100_000, disk_free_min_bytes=2**62)
    with pytest.raises(StorageFailed):
        await store.append([entry(1)])
    await store.append([entry(1)], ends_something=True)
    assert (path.parent / "reserve").exists(), "there is room without it yet"
    await store.close()


def full_disk(path: Path, free_min: int) -> str:
    """Run the child on a file system of 700 KiB of its own, print what it said, and check what is left there."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("needs the right to mount (root), to have a disk that is really full")
    check = "import sys, trio; from tests.runtime.test_log_store import *\n" + (
        "told = Told(open(sys.argv[2]).read()); told.check(trio.run(reopened, Path(sys.argv[1])))"
    )
    (path.parent / "disk").mkdir()
    script = (
        'mount -t tmpfs -o size=700k tmpfs "$0" || exit 9; "$1" -c "$2" "$0/log.db" "$4" > "$5" || exit 8;'
        ' rm -f "$0/filler"; mount -o remount,size=10m "$0"; exec "$1" -c "$3" "$0/log.db" "$5"'
    )
    told = path.parent / "told"
    arguments = [str(path.parent / "disk"), sys.executable, CHILD, check, str(free_min), str(told)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, *arguments], capture_output=True, text=True, timeout=60, cwd=Path.cwd()
    )
    if done.returncode == 9:
        pytest.skip("needs the right to mount")
    assert (done.returncode, done.stderr) == (0, "")
    return told.read_text()


def test_a_disk_that_is_really_full_ends_the_store_and_loses_nothing(path: Path) -> None:
    output = full_disk(path, free_min=0)
    assert "failed storage_failed" in output
    assert "full" in output


def test_a_disk_that_is_almost_full_is_refused_in_time(path: Path) -> None:
    output = full_disk(path, free_min=300_000)
    assert "failed disk_full" in output
    assert "written\nsnapshot" in output
    assert output.endswith("ok\nclosed\n")


# Refused when it is opened


async def refusal(path: Path, node_id: NodeId = ME) -> StorageFailed:
    with pytest.raises(StorageFailed) as caught:
        await open_store(path, node_id=node_id, reserve_bytes=0)
    assert caught.value.hint
    return caught.value


async def written(path: Path) -> sqlite3.Connection:
    store = await opened(path)
    await store.append([entry(index) for index in range(1, 9)], hard_state=vote(1))
    await store.save_snapshot(4, 1, b"four")
    await store.close()
    return sqlite3.connect(path, isolation_level=None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE log SET payload = x'00' WHERE \"index\" = 3", "checksum of entry 3"),
        ('UPDATE log SET term = 2 WHERE "index" = 3', "checksum of entry 3"),
        ('DELETE FROM log WHERE "index" = 6', "entry 6 is missing"),
        ('DELETE FROM log WHERE "index" > 3', "do not join the snapshot"),
        ("UPDATE hard_state SET term = 9", "hard state"),
        ("UPDATE snapshot_blob SET blob = x'00'", "snapshot at index 4"),
        ("DELETE FROM snapshot_blob", "snapshot at index 4"),
        ("PRAGMA user_version=2", r"newer gpulayer \(format 2, this one reads 1\)"),
        ("PRAGMA application_id=77", "not a gpulayer log"),
        ("DROP TABLE log", "no such table"),
    ],
)
async def test_a_damaged_or_foreign_log_is_refused_with_its_name(path: Path, damage: str, words: str) -> None:
    db = await written(path)
    db.execute(damage)
    db.close()
    error = await refusal(path)
    assert error.message.startswith((str(path), f"cannot open {path}"))
    with pytest.raises(StorageFailed, match=words):
        raise error


async def test_an_incomplete_snapshot_is_not_used(path: Path) -> None:
    db = await written(path)
    db.execute("INSERT INTO snapshot VALUES (6, 1, 0, 0)")
    db.execute("INSERT INTO snapshot_blob VALUES (6, x'00')")
    db.close()
    assert (await reopened(path)).snapshot == (4, 1, b"four")


async def test_a_flipped_bit_is_found_or_harmless(path: Path, tmp_path: Path) -> None:
    (await written(path)).close()
    good, whole = await reopened(path), path.read_bytes()
    refused = 0
    copy = tmp_path / "copy.db"
    for position in range(0, len(whole), len(whole) // 60):
        copy.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        Path(f"{copy}-wal").unlink(missing_ok=True)
        try:
            assert await reopened(copy) == good
        except StorageFailed:
            refused += 1
    assert refused


async def test_a_log_of_another_node_is_refused(path: Path) -> None:
    (await written(path)).close()
    assert "belongs to node n-1" in (await refusal(path, NodeId("n-2"))).message


async def test_something_else_is_refused(path: Path) -> None:
    path.write_bytes(b"this is not a database, but long enough to be read as one" * 20)
    assert "damaged" in (await refusal(path)).message


async def test_a_log_in_use_is_refused(path: Path) -> None:
    store = await opened(path)
    assert "in use by another process" in (await refusal(path)).message
    await store.close()


async def test_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "directory" in (await refusal(tmp_path / "directory")).message
    assert "No such file" in (await refusal(tmp_path / "missing" / "log.db")).message
    assert "symbolic link" in (await refusal(tmp_path / "link")).hint


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount() -> None:
    mountinfo = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 22 0:40 / /srv rw - nfs4 server:/srv rw\n"
        "31 30 0:41 / /srv/local rw - xfs /dev/vdb rw\n"
        "32 22 0:42 / /mnt/a\\040b rw - fuse.sshfs host: rw\n"
        "33 22 0:43 / /over rw - ext4 /dev/vdc rw\n"
        "34 33 0:44 / /over rw - cifs //server/share rw\n"
        "garbage\n"
    )
    for where, kind in {
        "/var/lib/gpulayer": "ext4",
        "/srv/gpulayer": "nfs4",
        "/srvx": "ext4",
        "/srv/local/data": "xfs",
        "/mnt/a b/data": "fuse.sshfs",
        "/over/data": "cifs",
    }.items():
        assert filesystem_of(Path(where), mountinfo) == kind


async def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = filesystem_of(path.parent.resolve(), Path("/proc/self/mountinfo").read_text())
    monkeypatch.setattr(log_file, "NETWORK_FILESYSTEMS", (here,))
    assert "network file system" in (await refusal(path)).message
    assert not path.exists()
