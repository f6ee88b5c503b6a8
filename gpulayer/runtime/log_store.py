"""The Raft log, the vote and the snapshots, durable in one SQLite file. Payloads are opaque bytes here.

One thread owns the file. Whoever asks is answered when what it asked for is on the disk: term, vote, truncation and
entries in one transaction, with everything that was queued while the last one was being synced. The first write that
fails ends the store for good, since nobody knows then what is on the disk; a disk that is merely filling up only stops
new entries. Decides nothing about terms or entries: it refuses what breaks its own rules, and that is our mistake then.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread

import trio

from gpulayer.model.errors import StorageFailed
from gpulayer.model.ids import NodeId
from gpulayer.runtime.log_file import BROKEN, Entry, HardState, LogFile, LogStats, Recovered, Write, words

# One transaction takes this much of what is queued: enough to share a sync among many, and an answer is never more than
# some milliseconds of writing away.
BATCH_ENTRIES_MAX = 256
BATCH_BYTES_MAX = 1024 * 1024
IDLE_SECONDS = 0.5
# Callers keep few writes in flight; more than this waiting means that nobody looks at the answers.
QUEUE_MAX = 10_000
# A stop of the daemon is not held up longer by a disk that does not answer; what was acknowledged is safe.
CLOSE_SECONDS_MAX = 10.0
RESERVE_BYTES = 8 * 1024 * 1024
DISK_FREE_MIN_BYTES = 64 * 1024 * 1024

Done = Callable[[StorageFailed | ValueError | None], None]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A write on its way; `done` is called in the trio thread, once."""

    write: Write
    done: Done
    queued_at: float = field(default_factory=time.monotonic)


async def open_store(
    path: str | os.PathLike[str],
    *,
    node_id: NodeId,
    reserve_bytes: int = RESERVE_BYTES,
    disk_free_min_bytes: int = DISK_FREE_MIN_BYTES,
) -> tuple[LogStore, Recovered]:
    """Open or create the log at `path` and read it all. StorageFailed says what is wrong with it and what to do."""
    store = LogStore(
        Path(path),
        node_id=node_id,
        reserve_bytes=reserve_bytes,
        disk_free_min_bytes=disk_free_min_bytes,
        token=trio.lowlevel.current_trio_token(),
    )
    # Not to be cancelled half-way: the thread would keep the file locked for whoever tries again.
    with trio.CancelScope(shield=True):
        recovered = await store._start()
    return store, recovered


class LogStore:
    """Made by `open_store`. All methods are called in the trio thread; `close` it before that ends."""

    def __init__(
        self,
        path: Path,
        *,
        node_id: NodeId,
        reserve_bytes: int,
        disk_free_min_bytes: int,
        token: trio.lowlevel.TrioToken,
    ) -> None:
        self.path = path
        self.failed: StorageFailed | None = None
        """The first failure, once there was one. Nothing is written after it."""
        self.disk_low = False
        """Less is free than `disk_free_min_bytes`: entries are refused, but for those that end something."""
        self._token = token
        self._file = LogFile(path, node_id, reserve_bytes, disk_free_min_bytes)
        self._queue: deque[_Waiting] = deque()
        self._changed = Condition()
        self._writing: tuple[_Waiting, ...] = ()
        self._closing = False
        self._thread = Thread(target=self._run, name="gpulayer-log", daemon=True)
        self._opened = trio.Event()
        self._outcome: Recovered | StorageFailed | None = None

    # In the trio thread

    async def _start(self) -> Recovered:
        self._thread.start()
        await self._opened.wait()
        if isinstance(self._outcome, Recovered):
            recovered, self._outcome = self._outcome, None
            return recovered
        await trio.to_thread.run_sync(self._thread.join)
        assert isinstance(self._outcome, StorageFailed)
        raise self._outcome

    async def append(
        self,
        entries: Iterable[Entry],
        *,
        hard_state: HardState | None = None,
        truncate_from: int | None = None,
        ends_something: bool = False,
    ) -> None:
        """Entries `truncate_from` and later go, `entries` follow the last one left, the hard state is replaced: all
        of it durable on return, or none. Cancelled, it may still happen.

        `ends_something`: they are written while the disk is low too, out of the reserve.

        StorageFailed with code `disk_full`: nothing was written and the store goes on; any other: see `failed`.
        ValueError: it would break the log (a gap, a term or vote that changes back); nothing was written.
        """
        await self._wait_for(
            lambda done: self.append_soon(
                entries, hard_state=hard_state, truncate_from=truncate_from, ends_something=ends_something, done=done
            )
        )

    def append_soon(
        self,
        entries: Iterable[Entry],
        *,
        hard_state: HardState | None = None,
        truncate_from: int | None = None,
        ends_something: bool = False,
        done: Done,
    ) -> None:
        """Like `append`, for callers that may not wait: `done` is called in the trio thread with None or the error.
        Writes happen, and are answered, in the order in which they were asked for."""
        write = Write(
            entries=tuple(entries),
            hard_state=hard_state,
            truncate_from=truncate_from,
            ends_something=ends_something,
        )
        self._put(write, done)

    async def save_snapshot(self, index: int, term: int, blob: bytes, *, keep_entries: int = 10_000) -> None:
        """Replace the snapshot, and drop entries up to `index - keep_entries`. Durable on return, or the old one stays.

        A log that does not contain (index, term) is not a continuation of the snapshot and is dropped whole: the next
        entry is `index + 1` (Raft §7, InstallSnapshot). Allowed while `disk_low`: it is what frees space.
        """
        await self._wait_for(
            lambda done: self._put(Write(snapshot=(index, term, blob), keep_entries=keep_entries), done)
        )

    def stats(self) -> LogStats:
        with self._changed:
            oldest = min((waiting.queued_at for waiting in (*self._writing, *self._queue)), default=math.inf)
            pending = len(self._writing) + len(self._queue)
        return self._file.stats(pending=pending, oldest_pending_seconds=max(0.0, time.monotonic() - oldest))

    async def close(self) -> None:
        """Write what is queued, then let go of the file. Twice does no harm. A disk that hangs is not waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join, CLOSE_SECONDS_MAX)

    async def _wait_for(self, ask: Callable[[Done], None]) -> None:
        finished = trio.Event()
        outcome: list[StorageFailed | ValueError | None] = []

        def done(error: StorageFailed | ValueError | None) -> None:
            outcome.append(error)
            finished.set()

        ask(done)
        await finished.wait()
        if outcome[0] is not None:
            raise outcome[0]

    def _put(self, write: Write, done: Done) -> None:
        with self._changed:
            if self.failed is not None:
                raise _again(self.failed)
            if self._closing:
                raise StorageFailed(f"{self.path} is closed", hint="the daemon is stopping; try again when it is back")
            if len(self._queue) >= QUEUE_MAX:
                raise StorageFailed(
                    f"{QUEUE_MAX} writes wait for {self.path} already", hint="wait until the disk answers"
                )
            self._queue.append(_Waiting(write, done))
            self._changed.notify()

    # In the store's own thread

    def _run(self) -> None:
        try:
            outcome: Recovered | StorageFailed = self._file.open()
        except StorageFailed as error:
            outcome = error
        except BaseException as error:
            bug = StorageFailed(f"cannot open {self.path}: {words(error)}")
            self._tell(lambda: self._set_opened(bug))
            raise
        self._tell(lambda: self._set_opened(outcome))
        if isinstance(outcome, StorageFailed):
            return
        try:
            while batch := self._take():
                self._answer(batch, self._file.write([waiting.write for waiting in batch]))
            self._file.close()
        except BROKEN as error:
            self._latch(error)
        except BaseException as error:
            # A bug: nobody may wait for ever for an answer, and the thread ends loudly.
            self._latch(error)
            raise

    def _set_opened(self, outcome: Recovered | StorageFailed) -> None:
        self._outcome = outcome
        self._opened.set()

    def _take(self) -> tuple[_Waiting, ...]:
        """What shall be written next, together; empty when the store is closing and everything has been written."""
        while True:
            with self._changed:
                self._writing = ()
                if not self._queue and not self._closing:
                    has_chores = self._file.wants_checkpoint or self._file.disk_low
                    self._changed.wait(IDLE_SECONDS if has_chores else None)
                if self._queue:
                    self._writing = _joined(self._queue)
                    return self._writing
                if self._closing:
                    return ()
            # Nothing came for a while, or the wake-up was spurious: either way nobody is waiting.
            was_low = self._file.disk_low
            self._file.idle()
            if was_low and not self._file.disk_low:
                self._tell(self._set_disk_has_room)

    def _set_disk_has_room(self) -> None:
        self.disk_low = False

    def _answer(self, batch: tuple[_Waiting, ...], answers: list[StorageFailed | ValueError | None]) -> None:
        low = self._file.disk_low

        def tell() -> None:
            self.disk_low = low
            for waiting, error in zip(batch, answers, strict=True):
                waiting.done(error)

        self._tell(tell)

    def _latch(self, cause: BaseException) -> None:
        failure = StorageFailed(
            f"voter: storage failed: cannot write {self.path}: {words(cause)}",
            hint="this node votes no more until it is restarted; look at the disk first. Replicas go on running",
        )
        self._file.abandon()
        with self._changed:
            self.failed = failure
            unanswered = (*self._writing, *self._queue)
            self._queue.clear()
            self._writing = ()

        def tell() -> None:
            for waiting in unanswered:
                waiting.done(_again(failure))

        self._tell(tell)

    def _tell(self, act: Callable[[], None]) -> None:
        # After the end of trio there is nobody left to be told.
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(act)


def _joined(queue: deque[_Waiting]) -> tuple[_Waiting, ...]:
    """Take from the queue what goes into one transaction: a snapshot alone, else appends up to the limits."""
    taken = [queue.popleft()]
    if taken[0].write.snapshot is not None:
        return tuple(taken)
    entries, size = len(taken[0].write.entries), taken[0].write.payload_bytes
    while queue and queue[0].write.snapshot is None:
        entries += len(queue[0].write.entries)
        size += queue[0].write.payload_bytes
        if entries > BATCH_ENTRIES_MAX or size > BATCH_BYTES_MAX:
            break
        taken.append(queue.popleft())
    return tuple(taken)


def _again(error: StorageFailed) -> StorageFailed:
    """A new exception with the same words: one raised twice collects both tracebacks."""
    return StorageFailed(error.message, hint=error.hint, code=error.code)


__all__ = ["Entry", "HardState", "LogStats", "LogStore", "Recovered", "open_store"]
