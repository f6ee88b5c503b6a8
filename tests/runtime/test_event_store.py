"""The feed: once each, in order per source, across restarts; and what is lost is said."""

# The files are small: blocking the one task of a test for them is what is meant here.
# ruff: noqa: ASYNC240

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.model.errors import InvalidRequest, StorageFailed
from gpulayer.model.event import Event
from gpulayer.runtime import event_store, failpoints
from gpulayer.runtime.event_store import (
    EVENTS_LOST,
    EventStore,
    Offset,
    format_offset,
    open_event_store,
    parse_offset,
)


def event(seq: int, source: str = "log", epoch: int = 0, job: str = "j-1") -> Event:
    return Event(source=source, epoch=epoch, seq=seq, at_utc=1e9 + seq, kind="job.submitted", job=job)


async def everything(store: EventStore, after: Offset | None = None, job: str | None = None) -> list[Event]:
    """All that there is, read in small pages."""
    found: list[Event] = []
    while items := await store.read(after, limit=3, job=job):
        found.extend(one for _, one in items)
        after = items[-1][0]
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


async def test_what_was_added_is_read_back_whole(path: Path) -> None:
    store = await open_event_store(path)
    whole = Event(
        source="n-1",
        epoch=2,
        seq=3,
        at_utc=1.5,
        kind="replica.ready",
        job="j-1",
        replica=0,
        node="gpu-a",
        text="listening on 10.0.0.1:20000 ✓",
        data=(("port", "20000"), ("port", "twice")),
    )
    store.add([whole])
    await store.flush()
    assert [one for _, one in await store.read()] == [whole]
    await store.close()


async def test_an_event_that_is_added_again_is_there_once(path: Path) -> None:
    """The log is replayed at every start, and its events with it."""
    for _ in range(3):
        store = await open_event_store(path)
        store.add([event(seq) for seq in range(10)])
        store.add([event(seq) for seq in range(10)])
        await store.flush()
        assert [one.seq for one in await everything(store)] == list(range(10))
        assert store.last("log") == (0, 9)
        await store.close()


async def test_a_new_epoch_is_newer_whatever_its_numbers(path: Path) -> None:
    store = await open_event_store(path)
    store.add([event(5, "n-1", epoch=1), event(1, "n-1", epoch=2), event(6, "n-1", epoch=1)])
    await store.flush()
    assert [(one.epoch, one.seq) for one in await everything(store)] == [(1, 5), (2, 1)]
    assert store.last("n-1") == (2, 1)
    assert store.last("n-2") == (0, 0)
    await store.close()


async def test_a_reader_goes_on_where_it_was_for_every_source_and_after_a_restart(path: Path) -> None:
    store = await open_event_store(path)
    store.add([event(1), event(1, "n-1"), event(2), event(2, "n-1")])
    await store.flush()
    first = await store.read(limit=3)
    await store.close()
    store = await open_event_store(path)
    store.add([event(3), event(1, "n-2")])
    await store.flush()
    rest = await everything(store, first[-1][0])
    assert [(one.source, one.seq) for one in rest] == [("n-1", 2), ("log", 3), ("n-2", 1)]
    assert await store.read(await store.now()) == []
    await store.close()


async def test_one_job_can_be_read_alone_and_the_others_are_passed_over_once(path: Path) -> None:
    store = await open_event_store(path, keep=10)
    store.add([event(seq, job="j-2" if seq == 2 else "j-1") for seq in range(5)])
    await store.flush()
    assert [one.seq for one in await everything(store, job="j-2")] == [2]
    page = await store.read_page(job="j-2")
    store.add([event(seq) for seq in range(5, 30)])
    await store.flush()
    assert (await store.read_page(page.next, job="j-2")).items[0][1].kind == EVENTS_LOST
    page = await store.read_page((await store.read_page(page.next, job="j-2")).next, job="j-2")
    assert page.items == []
    await store.close()


async def test_only_the_newest_are_kept_and_a_late_reader_is_told(path: Path) -> None:
    store = await open_event_store(path, keep=100)
    store.add([event(1), event(1, "n-1")])
    await store.flush()
    early = (await store.read())[-1][0]
    for start in range(2, 502, 50):
        store.add([event(seq) for seq in range(start, start + 50)])
        await store.flush()
    items = await store.read(early, limit=1000)
    lost, kept = items[0][1], [one for _, one in items[1:]]
    assert lost.kind == EVENTS_LOST
    assert 100 <= len(kept) <= 110
    assert dict(lost.data)["count"] == str(500 - len(kept))
    assert [one.seq for one in kept] == list(range(502 - len(kept), 502))
    # Said once: whoever goes on from there, or comes for the first time, has missed nothing.
    assert [one.kind for _, one in await store.read(items[0][0], limit=2)] == ["job.submitted"] * 2
    assert EVENTS_LOST not in [one.kind for one in await everything(store)]
    await store.close()
    store = await open_event_store(path, keep=100)
    store.add([event(seq) for seq in range(1, 502)])  # replayed: what was pruned does not come back
    await store.flush()
    assert await everything(store) == kept
    await store.close()


async def test_a_waiting_reader_is_woken_and_misses_nothing(path: Path) -> None:
    store = await open_event_store(path)
    found: list[int] = []

    async def follow() -> None:
        after: Offset | None = None
        while len(found) < 50:
            seen = store.written
            items = await store.read(after)
            if not items:
                await store.wait_for_more(seen)
            for after, one in items:  # noqa: B007 - the offset is for the next read
                found.append(one.seq)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            for seq in range(50):
                store.add([event(seq)])
                await trio.sleep(0.001)
    assert found == list(range(50))
    await store.close()


async def test_a_storm_is_cut_at_the_old_end_and_the_feed_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_store, "QUEUE_MAX", 20)
    store = await open_event_store(path)
    store.add([event(seq) for seq in range(1000)])
    with trio.fail_after(10):
        await store.flush()
    found = await everything(store)
    assert dict(found[0].data)["count"] == "980"
    assert [one.seq for one in found[1:]] == list(range(980, 1000))
    await store.close()


async def test_what_was_flushed_survives_a_kill(path: Path) -> None:
    program = (
        "import os, sys, trio\n"
        "from tests.runtime.test_event_store import *\n"
        "async def main():\n"
        "    store = await open_event_store(sys.argv[1])\n"
        "    store.add([event(seq) for seq in range(100)])\n"
        "    await store.flush()\n"
        "    store.add([event(100)])\n"
        "    os.kill(os.getpid(), 9)\n"
        "trio.run(main)\n"
    )
    done = subprocess.run(  # noqa: ASYNC221 - bounded
        [sys.executable, "-c", program, str(path)], timeout=60, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = await open_event_store(path)
    assert [one.seq for one in await everything(store)][:100] == list(range(100))
    await store.close()


# Trouble


@pytest.mark.parametrize("damage", ["garbage", "foreign", "newer", "torn"])
async def test_a_damaged_file_is_moved_aside_and_the_feed_begins_anew(path: Path, damage: str) -> None:
    store = await open_event_store(path)
    store.add([event(seq) for seq in range(200)])
    await store.flush()
    offset = await store.now()
    await store.close()
    if damage == "garbage":
        path.write_bytes(os.urandom(50_000))
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA application_id=1" if damage == "foreign" else "PRAGMA user_version=9")
    for number in (1, 2):
        store = await open_event_store(path)
        store.add([event(200)])
        await store.flush()
        assert [one.kind for one in await everything(store, offset)] == [EVENTS_LOST, "job.submitted"]
        await store.close()
        assert Path(f"{path}.corrupt-1").exists()
        assert not Path(f"{path}.corrupt-{number + 1}").exists()


async def test_damage_while_it_runs_is_survived(path: Path) -> None:
    store = await open_event_store(path)
    store.add([event(seq) for seq in range(2000)])
    await store.flush()
    await store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) // 2))
    store = await open_event_store(path)
    store.add([event(2000)])
    await store.flush()
    assert [one.kind for one in await everything(store)] == [EVENTS_LOST, "job.submitted"]
    # Now behind its back, as a disk would.
    with open(path, "r+b") as file:  # noqa: ASYNC230
        file.write(b"\xff" * 40_000)
    with open(f"{path}-wal", "r+b") as file:  # noqa: ASYNC230
        file.write(b"\xff" * 40_000)
    store.add([event(seq) for seq in range(2001, 5000)])
    await store.flush()
    with trio.fail_after(5):
        for _ in range(3):
            try:
                await everything(store)
            except StorageFailed:
                await trio.lowlevel.checkpoint()
    store.add([event(5000)])
    await store.flush()
    assert (await everything(store))[-1].seq == 5000
    await store.close()


async def test_a_disk_that_fails_for_a_while_loses_events_and_the_feed_says_how_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_event_store(path)
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("events.before_commit=error"))
    store.add([event(1), event(2)])
    await store.flush()
    monkeypatch.setattr(failpoints, "_armed", {})
    store.add([event(3)])
    await store.flush()
    found = await everything(store)
    assert [one.kind for one in found] == [EVENTS_LOST, "job.submitted"]
    assert dict(found[0].data)["count"] == "2"
    await store.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_mistake_of_ours_lets_nobody_wait_for_ever(path: Path) -> None:
    """Text that SQLite cannot store ended the thread, and the next snapshot of the state waited for it for good."""
    store = await open_event_store(path)
    with trio.fail_after(10):
        store.add([replace(event(1), text="\ud800")])
        await store.flush()
        with pytest.raises(StorageFailed):
            await store.read()
        await store.close()


async def test_a_file_in_use_is_an_error_and_is_left_alone(path: Path) -> None:
    store = await open_event_store(path)
    with pytest.raises(StorageFailed, match="in use"):
        await open_event_store(path)
    store.add([event(1)])
    await store.flush()
    assert len(await everything(store)) == 1
    await store.close()
    with pytest.raises(StorageFailed, match="is closed"):
        await store.read()


# Offsets


NUMBERS = st.tuples(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))


@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9-]{1,20}", fullmatch=True), NUMBERS, max_size=5))
def test_an_offset_says_what_was_read(marks: dict[str, tuple[int, int]]) -> None:
    assert parse_offset(format_offset(marks)) == marks


@given(st.text(max_size=40))
def test_any_text_is_an_offset_or_refused(text: str) -> None:
    try:
        marks = parse_offset(text)
    except InvalidRequest:
        return
    assert parse_offset(format_offset(marks)) == marks


@pytest.mark.parametrize(
    "text",
    ["", "log", "log.1", "log.1.2.3", "log.-1.2", "log.1.2_", "log.1.2_log.1.3", "l g.1.2", "log.1.²", "x" * 70_000],
)
def test_garbage_is_no_offset(text: str) -> None:
    with pytest.raises(InvalidRequest, match="offset"):
        parse_offset(text)


async def test_a_reader_with_garbage_is_refused(path: Path) -> None:
    store = await open_event_store(path)
    with pytest.raises(InvalidRequest):
        await store.read(Offset("what?"))
    await store.close()
