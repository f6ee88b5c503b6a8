"""The node's event feed, durable in a SQLite file of its own. Written by its own thread: nothing waits for it.

What readers may rely on: the events of one source come in their order and once each, also across a
restart and however often they are added again; whoever comes back too late is told that events were lost. The feed is a
convenience: a file that is damaged is moved aside and begun anew, and the daemon goes on.

An offset says per source what was read, so that it means the same on every node: `log.0.41000_n-8c1f.3.17`. To everyone
else it is opaque.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Generic, NewType, TypeVar

import structlog
import trio

from gpulayer.model.errors import InvalidRequest, StorageFailed
from gpulayer.model.event import Event
from gpulayer.runtime.failpoints import failpoint

T = TypeVar("T")
Offset = NewType("Offset", str)
_Number = tuple[int, int]

log = structlog.get_logger()

FORMAT = 1
APPLICATION_ID = 0x67706C45  # "gplE"
KEEP = 10_000
# As many as are kept: what is dropped from a longer queue would be pruned anyway.
QUEUE_MAX = 10_000
BATCH_MAX = 1_000
# At most fifty syncs a second, so that a storm of events leaves the disk to the log; a person sees no delay.
COMMIT_INTERVAL_SECONDS = 0.02
READ_MAX = 1_000
# A file that is damaged again and again lies on a disk that is; after this the feed is off until the next start.
RESETS_MAX = 3
CLOSE_SECONDS_MAX = 10.0
OFFSET_LENGTH_MAX = 64 * 1024
_START = "start"
_BEFORE_ALL: _Number = (-1, -1)
_SOURCE = re.compile(r"[A-Za-z0-9-]{1,64}")
_MARK = re.compile(r"([A-Za-z0-9-]{1,64})\.([0-9]{1,18})\.([0-9]{1,18})")
# Who says that events were lost: the feed itself, since their sources do not know.
FEED = "feed"
EVENTS_LOST = "events_lost"

_SCHEMA = (
    # AUTOINCREMENT: a position is not given again, even after everything was pruned.
    "CREATE TABLE events (position INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL, epoch INTEGER NOT NULL,"
    " seq INTEGER NOT NULL, at_utc REAL NOT NULL, kind TEXT NOT NULL, job TEXT NOT NULL, replica INTEGER,"
    " node TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL, UNIQUE (source, epoch, seq))",
    "CREATE TABLE sources (source TEXT PRIMARY KEY, epoch INTEGER NOT NULL, seq INTEGER NOT NULL,"
    " pruned_epoch INTEGER NOT NULL DEFAULT -1, pruned_seq INTEGER NOT NULL DEFAULT -1,"
    " pruned_count INTEGER NOT NULL DEFAULT 0)",
)
_COLUMNS = "source, epoch, seq, at_utc, kind, job, replica, node, text, data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some events, each with the offset after it. `next` is the place to go on: beyond the last of them where a filter
    has passed over others."""

    items: list[tuple[Offset, Event]]
    next: Offset


def format_offset(marks: Mapping[str, _Number]) -> Offset:
    return Offset("_".join(f"{source}.{epoch}.{seq}" for source, (epoch, seq) in sorted(marks.items())) or _START)


def parse_offset(text: str) -> dict[str, _Number]:
    """What was read, per source; InvalidRequest for anything that `format_offset` does not make."""
    marks: dict[str, _Number] = {}
    if text == _START:
        return marks
    for part in text.split("_") if len(text) <= OFFSET_LENGTH_MAX else [""]:
        match = _MARK.fullmatch(part)
        if match is None or match[1] in marks:
            raise InvalidRequest(
                f"offset {text[:80]!r} is not one of this feed's",
                hint="use one that came with an event, or none",
            )
        marks[match[1]] = (int(match[2]), int(match[3]))
    return marks


async def open_event_store(path: str | os.PathLike[str], *, keep: int = KEEP) -> EventStore:
    """Open or create the feed at `path`. A damaged one is moved to `<path>.corrupt-<n>`; StorageFailed only where no
    file can be written at all."""
    store = EventStore(Path(path), keep=keep, token=trio.lowlevel.current_trio_token())
    with trio.CancelScope(shield=True):
        await store._start()
    return store


def is_event(event: Event) -> bool:
    """Whether the store takes it: who has it from another node has to ask."""
    number = (event.epoch, event.seq)
    return bool(_SOURCE.fullmatch(event.source)) and min(number) >= 0 and max(number) < 10**18


class EventStore:
    """Made by `open_event_store`. All methods are called in the trio thread; `close` it before that ends."""

    def __init__(self, path: Path, *, keep: int, token: trio.lowlevel.TrioToken) -> None:
        self.path = path
        self.written = 0
        """Rises whenever something was added for readers to find; see `wait_for_more`."""
        self._token = token
        self._file = _Feed(path, keep)
        self._last: dict[str, _Number] = {}
        self._more = trio.Event()
        self._changed = Condition()
        # Under the lock of _changed:
        self._pending: deque[Event] = deque()
        self._requests: deque[_Request[Any]] = deque()
        self._added = self._done = self._dropped = 0
        self._closing = False
        self._thread = Thread(target=self._run, name="gpulayer-events", daemon=True)

    # In the trio thread

    async def _start(self) -> None:
        request = _Request(self._file.open)
        self._requests.append(request)
        self._thread.start()
        try:
            self._last = await request.result()
        except BaseException:
            await self.close()
            raise

    def last(self, source: str) -> _Number:
        """(epoch, seq) of the newest event of a source ever added, queued ones too; (0, 0) without one."""
        return self._last.get(source, (0, 0))

    def add(self, events: Iterable[Event]) -> None:
        """Queue events; never waits. An event that is not newer than the last of its source is known already and left
        out. With QUEUE_MAX waiting the oldest are dropped, and the feed will say so."""
        fresh = []
        for event in events:
            number = (event.epoch, event.seq)
            if not is_event(event):
                raise ValueError(f"event of source {event.source!r} with number {number}")
            if number > self._last.get(event.source, _BEFORE_ALL):
                self._last[event.source] = number
                fresh.append(event)
        with self._changed:
            self._pending.extend(fresh)
            self._added += len(fresh)
            while len(self._pending) > QUEUE_MAX:
                self._pending.popleft()
                self._done += 1
                self._dropped += 1
            self._changed.notify()

    async def flush(self) -> None:
        """Returns when all that was added before is durable, or was given up with a warning. Never raises."""
        with suppress(StorageFailed):  # closed: what was queued has been written by then
            await self._ask(lambda: None, after=self._added)

    async def read(
        self, after: Offset | str | None = None, limit: int = 100, job: str | None = None
    ) -> list[tuple[Offset, Event]]:
        """Events after an offset, oldest first; each with the offset after it. None: from the oldest that is kept.

        If some after the offset are kept no longer, the first item is an event of kind `events_lost`, whose data has
        their `count` (at most so many). InvalidRequest for an offset that is none.
        """
        return (await self.read_page(after, limit, job)).items

    async def read_page(self, after: Offset | str | None = None, limit: int = 100, job: str | None = None) -> Page:
        """Like `read`, for readers with a filter who come back: from `next` nothing is passed over twice."""
        marks = None if after is None else parse_offset(after)
        return await self._ask(lambda: self._file.read(marks, max(1, min(limit, READ_MAX)), job))

    async def now(self) -> Offset:
        """The offset of a reader who has read all that there is: for those who want only what comes."""
        return await self._ask(self._file.end)

    async def wait_for_more(self, since: int | None = None) -> int:
        """Wait until `written` is above `since`, and return it. Take `written` before you read, or an event could come
        in between; None: what it is now."""
        since = self.written if since is None else since
        while self.written <= since:
            await self._more.wait()
        return self.written

    async def close(self) -> None:
        """Write what is queued, then let go of the file. Twice does no harm. A disk that hangs is not waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join, CLOSE_SECONDS_MAX)

    async def _ask(self, act: Callable[[], T], after: int = 0) -> T:
        request = _Request(act, after=after)
        with self._changed:
            if self._closing:
                raise self._closed()
            self._requests.append(request)
            self._changed.notify()
        return await request.result()

    def _closed(self) -> StorageFailed:
        return StorageFailed(f"{self.path} is closed", hint="the daemon is stopping; try again when it is back")

    def _tell_more(self) -> None:
        self.written += 1
        self._more.set()
        self._more = trio.Event()

    # In the store's own thread

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            # A bug: nobody may wait for ever for an answer, and the thread ends loudly.
            self._give_up()
            raise
        finally:
            self._file.close()

    def _work(self) -> None:
        """Until the store is closed and everything has been written."""
        not_before = 0.0
        while True:
            batch, dropped, requests = self._take(not_before)
            if batch:
                if self._file.write(batch, dropped):
                    self._tell(self._tell_more)
                not_before = time.monotonic() + COMMIT_INTERVAL_SECONDS
                with self._changed:
                    self._done += len(batch)
            for request in requests:
                request.perform(self._tell)
            with self._changed:
                if self._closing and not self._pending and not self._requests:
                    return

    def _give_up(self) -> None:
        with self._changed:
            self._closing = True
            unanswered = list(self._requests)
            self._requests.clear()
        for request in unanswered:
            request.refuse(self._closed(), self._tell)

    def _take(self, not_before: float) -> tuple[list[Event], int, list[_Request[Any]]]:
        """What to do next: events to write, once it is time, and requests that need not wait for any more of them."""
        with self._changed:
            while not (ready := self._ready()) and not self._closing:
                if self._pending and any(request.after > self._done for request in self._requests):
                    break  # somebody waits for a flush
                wait = not_before - time.monotonic() if self._pending else None
                if wait is not None and wait <= 0:
                    break
                self._changed.wait(wait)
            for request in ready:
                self._requests.remove(request)
            batch: list[Event] = []
            if not ready or time.monotonic() >= not_before:
                batch = [self._pending.popleft() for _ in range(min(BATCH_MAX, len(self._pending)))]
            dropped = 0
            if batch:
                dropped, self._dropped = self._dropped, 0
            return batch, dropped, ready

    def _ready(self) -> list[_Request[Any]]:
        return [request for request in self._requests if request.after <= self._done]

    def _tell(self, act: Callable[[], None]) -> None:
        # After the end of trio there is nobody left to be told.
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(act)


class _Request(Generic[T]):
    """Something for the thread to do, and its outcome. `after`: only when so many events have been dealt with."""

    def __init__(self, act: Callable[[], T], *, after: int = 0) -> None:
        self.after = after
        self._act = act
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._finished = trio.Event()

    def perform(self, tell: Callable[[Callable[[], None]], None]) -> None:
        try:
            self._outcome.append(self._act())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            self._error = error
        tell(self._finished.set)

    def refuse(self, error: StorageFailed, tell: Callable[[Callable[[], None]], None]) -> None:
        self._error = error
        tell(self._finished.set)

    async def result(self) -> T:
        await self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class _Feed:
    """The file, used by one thread. Trouble with it ends here: moved aside, given up, or an error for one reader."""

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._keep = keep
        self._db: sqlite3.Connection | None = None
        self._resets = 0
        self._lost = 0
        self._is_failing = False

    # Opening, and beginning anew

    def open(self) -> dict[str, _Number]:
        """The newest number per source."""
        try:
            return self._open()
        except (sqlite3.Error, OSError, _Foreign) as exc:
            if not _is_damage(exc) or not self._begin_anew(exc):
                self._abandon()
                raise StorageFailed(
                    f"cannot open {self._path}: {exc}", hint="look whether it is in use, and at the disk"
                ) from exc
        return self._numbers()

    def _open(self) -> dict[str, _Number]:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        db = self._db = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (found,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if not application_id and not found and not tables:
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={FORMAT}")
        elif (application_id, found) != (APPLICATION_ID, FORMAT):
            raise _Foreign(f"it is of another program or version (format {found}, this one reads {FORMAT})")
        db.execute("COMMIT")
        (check,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if check != "ok":
            raise sqlite3.DatabaseError(str(check).replace("\n", " "))
        return self._numbers()

    def _numbers(self) -> dict[str, _Number]:
        rows = self._connection.execute("SELECT source, epoch, seq FROM sources")
        return {source: (epoch, seq) for source, epoch, seq in rows}

    def _begin_anew(self, cause: Exception) -> bool:
        """Move the file aside and make a new one, whose first event says so. False: the feed is off from here on."""
        self._abandon()
        self._resets += 1
        try:
            if self._resets > RESETS_MAX:
                raise OSError(f"damaged {self._resets} times") from cause
            aside = self._move_aside()
            log.warning("events.moved_aside", path=str(self._path), to=aside, reason=str(cause))
            self._open()
            db = self._connection
            db.execute("BEGIN IMMEDIATE")
            self._insert(db, [self._loss("the event store was damaged and begun anew; what it held is lost", ())])
            db.execute("COMMIT")
        except (sqlite3.Error, OSError, _Foreign) as exc:
            self._abandon()
            log.error("events.off", path=str(self._path), reason=str(exc), cause=str(cause))
            return False
        return True

    def _move_aside(self) -> str:
        number = 1
        while os.path.lexists(f"{self._path}.corrupt-{number}"):
            number += 1
        aside = f"{self._path}.corrupt-{number}"
        os.replace(self._path, aside)
        with suppress(FileNotFoundError):
            os.replace(f"{self._path}-wal", f"{aside}-wal")
        return aside

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StorageFailed(f"the event feed {self._path} is off", hint="its disk fails; see the daemon's log")
        return self._db

    def _abandon(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def close(self) -> None:
        self._abandon()

    # Writing

    def write(self, events: list[Event], dropped: int) -> bool:
        """Add events, prune old ones. False: they could not be written, and the feed says so when it can again."""
        self._lost += dropped
        for _ in range(2):
            if self._db is None:
                break
            try:
                self._write(self._db, events)
            except (sqlite3.Error, OSError) as exc:
                self._roll_back()
                if _is_damage(exc) and self._begin_anew(exc):
                    continue
                self._warn(exc, len(events))
                break
            self._lost = 0
            if self._is_failing:
                self._is_failing = False
                log.info("events.written_again", path=str(self._path))
            return True
        self._lost += len(events)
        return False

    def _write(self, db: sqlite3.Connection, events: list[Event]) -> None:
        db.execute("BEGIN IMMEDIATE")
        if self._lost:
            self._insert(
                db,
                [self._loss(f"{self._lost} events could not be written and are lost", (("count", str(self._lost)),))],
            )
        self._insert(db, events)
        (count,) = db.execute("SELECT count(*) FROM events").fetchone()
        # A tenth more than is promised, so that not every batch prunes.
        if count > self._keep + self._keep // 10:
            self._prune(db, count - self._keep)
        failpoint("events.before_commit")
        db.execute("COMMIT")

    def _insert(self, db: sqlite3.Connection, events: list[Event]) -> None:
        db.executemany(
            f"INSERT OR IGNORE INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_as_row, events)
        )
        db.executemany(
            "INSERT INTO sources (source, epoch, seq) VALUES (?, ?, ?) ON CONFLICT (source) DO UPDATE"
            " SET epoch = excluded.epoch, seq = excluded.seq WHERE (excluded.epoch, excluded.seq) > (epoch, seq)",
            [(source, *number) for source, number in {e.source: (e.epoch, e.seq) for e in events}.items()],
        )

    def _prune(self, db: sqlite3.Connection, surplus: int) -> None:
        (upto,) = db.execute(
            "SELECT position FROM events ORDER BY position LIMIT 1 OFFSET ?", (surplus - 1,)
        ).fetchone()
        # With max() SQLite takes the other columns from the row that has it: the newest of each source that goes.
        gone = db.execute(
            "SELECT source, epoch, seq, count(*), max(position) FROM events WHERE position <= ? GROUP BY source",
            (upto,),
        ).fetchall()
        db.executemany(
            "UPDATE sources SET pruned_epoch = ?, pruned_seq = ?, pruned_count = pruned_count + ? WHERE source = ?",
            [(epoch, seq, count, source) for source, epoch, seq, count, _ in gone],
        )
        db.execute("DELETE FROM events WHERE position <= ?", (upto,))

    def _loss(self, text: str, details: tuple[tuple[str, str], ...]) -> Event:
        now = time.time()
        epoch, _ = self._numbers().get(FEED, _BEFORE_ALL)
        # Numbered by the clock, and above the one before: a feed that was begun anew does not repeat its numbers.
        return Event(
            source=FEED,
            epoch=max(epoch + 1, int(now * 1000)),
            seq=0,
            at_utc=now,
            kind=EVENTS_LOST,
            text=text,
            data=details,
        )

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            if self._db is not None and self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _warn(self, exc: Exception, count: int) -> None:
        if not self._is_failing:  # once, not per batch
            self._is_failing = True
            log.warning("events.not_written", path=str(self._path), reason=str(exc), count=count)

    # Reading

    def read(self, marks: dict[str, _Number] | None, limit: int, job: str | None) -> Page:
        try:
            return self._read(marks, limit, job)
        except sqlite3.Error as exc:
            if _is_damage(exc):
                self._begin_anew(exc)
            raise StorageFailed(f"cannot read {self._path}: {exc}", hint="try again; see the daemon's log") from exc

    def _read(self, after: dict[str, _Number] | None, limit: int, job: str | None) -> Page:
        db = self._connection
        marks = dict(after or {})
        items: list[tuple[Offset, Event]] = []
        start: int | None = None
        lost = 0
        for source, pruned, count in self._pruned(db):
            mark = marks.get(source, _BEFORE_ALL)
            if mark < pruned:
                same_epoch = mark[0] == pruned[0]
                lost += min(count, pruned[1] - mark[1]) if same_epoch else count
                marks[source] = mark = pruned
            row = db.execute(
                "SELECT position FROM events WHERE source = ? AND (epoch, seq) > (?, ?) ORDER BY epoch, seq LIMIT 1",
                (source, *mark),
            ).fetchone()
            if row is not None:
                start = row[0] if start is None else min(start, row[0])
        if lost and after is not None:  # who asks from the beginning has missed nothing
            text = f"up to {lost} events are not kept any more"
            items.append((format_offset(marks), self._loss(text, (("count", str(lost)),))))
        if start is not None:
            with closing(
                db.execute(f"SELECT {_COLUMNS} FROM events WHERE position >= ? ORDER BY position", (start,))
            ) as rows:
                for row in rows:
                    if len(items) >= limit:
                        break
                    source, number = row[0], (row[1], row[2])
                    if number <= marks.get(source, _BEFORE_ALL):
                        continue
                    marks[source] = number
                    if job is None or row[5] == job:
                        items.append((format_offset(marks), _as_event(row)))
        return Page(items=items, next=format_offset(marks))

    def _pruned(self, db: sqlite3.Connection) -> list[tuple[str, _Number, int]]:
        rows = db.execute("SELECT source, pruned_epoch, pruned_seq, pruned_count FROM sources ORDER BY source")
        return [(source, (epoch, seq), count) for source, epoch, seq, count in rows.fetchall()]

    def end(self) -> Offset:
        return format_offset(self._numbers())


class _Foreign(Exception):
    """A good database, but not one of ours."""


def _is_damage(exc: Exception) -> bool:
    """Of the file itself; a full disk, a lock or an error of the device (OperationalError) may pass, and it is good."""
    return isinstance(exc, sqlite3.DatabaseError | _Foreign) and not isinstance(exc, sqlite3.OperationalError)


def _as_row(event: Event) -> tuple[object, ...]:
    return (
        event.source,
        event.epoch,
        event.seq,
        event.at_utc,
        event.kind,
        event.job,
        event.replica,
        event.node,
        event.text,
        json.dumps(event.data),
    )


def _as_event(row: tuple[Any, ...]) -> Event:
    source, epoch, seq, at_utc, kind, job, replica, node, text, data = row
    return Event(
        source=source,
        epoch=epoch,
        seq=seq,
        at_utc=at_utc,
        kind=kind,
        job=job,
        replica=replica,
        node=node,
        text=text,
        data=tuple((key, value) for key, value in json.loads(data)),
    )
