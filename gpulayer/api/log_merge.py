"""The logs of several replicas as one: in order of time, each line with the offset from which to go on after it.

No waiting: what lies on other nodes log_fetch.py brings, the rest are files; logs.py calls this in a worker thread,
because a disk may hang and the daemon must not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from gpulayer.api.remote_log import RemoteLog
from gpulayer.model.errors import InvalidRequest
from gpulayer.runtime.replica_logs import Cursor, LogLine, LogReader, newest_end, tail_cursor
from gpulayer.wire.http import Json, shown

# Each followed replica costs a descriptor and a place in every offset.
REPLICAS_MAX = 100
BATCH_LINES = 1000
BATCH_CHARS = 256 * 1024
_PLACE = re.compile(r"([0-9]{1,5})\.([0-9]{1,6})\.([0-9]{1,10}\.[0-9]{1,15}\.[0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class Place:
    """How far one replica's log was read."""

    attempt: int
    cursor: Cursor


def _format_place(replica: int, place: Place) -> str:
    return f"{replica}.{place.attempt}.{place.cursor}"


def format_offset(places: Mapping[int, Place]) -> str:
    return "_".join(_format_place(replica, place) for replica, place in sorted(places.items()))


def parse_offset(text: str) -> dict[int, Place]:
    """InvalidRequest for anything that no line came with."""
    places: dict[int, Place] = {}
    if not text:
        return places
    parts = text.split("_")
    for part in parts if len(parts) <= REPLICAS_MAX else ():
        match = _PLACE.fullmatch(part)
        if match is None:
            break
        places[int(match[1])] = Place(int(match[2]), Cursor.parse(match[3]))
    if len(places) != len(parts):
        raise InvalidRequest(
            f"after: {shown(text)} is no offset of a log", hint="give the offset of a line as it was sent"
        )
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of one replica."""

    replica: int
    attempt: int
    where: Path | RemoteLog
    """Its directory here, or its log on another node, not begun yet."""
    run: int | None = None


class FileLog:
    """One attempt's log in a directory of this node."""

    is_behind = False
    """What is there can be read at once."""

    def __init__(self, directory: Path, *, since_utc: float | None, run: int | None, cursor: Cursor | None) -> None:
        self._directory = directory
        self._reader = LogReader(directory, since_utc=since_utc, run=run, cursor=cursor)
        self._size = self._seen = (0, -1)
        """Newest segment and its size: before the present reading, and when it was last read to the end."""

    @property
    def cursor(self) -> Cursor:
        return self._reader.cursor

    def next_line(self) -> LogLine | None:
        found = self._reader.read_available(1)
        return found[0] if found else None

    def unfinished(self) -> list[LogLine]:
        return self._reader.unfinished()

    def has_grown(self) -> bool:
        return newest_end(self._directory) != self._seen

    def look(self) -> None:
        """From before the reading: what comes meanwhile is news next time."""
        self._size = newest_end(self._directory)

    def was_read(self) -> None:
        self._seen = self._size

    def stop_at_present_end(self) -> None:
        self._reader.stop_at_present_end()

    def go_on(self) -> None:
        self._reader.go_on()
        self._seen = (0, -1)

    def close(self) -> None:
        self._reader.close()


Log: TypeAlias = FileLog | RemoteLog


@dataclass(slots=True)
class _Reading:
    """One attempt's log on its way; `head` is its next line that was not given yet."""

    wanted: Wanted
    log: Log
    before: Cursor
    """After the last line that was given."""
    head: LogLine | None = None
    after_head: Cursor | None = None
    at_utc: float = 0.0
    """Of its newest line; never goes back, so that a stepped clock reorders nothing within a replica."""

    def peek(self) -> bool:
        """Is there a next line?"""
        if self.head is None:
            self.head = self.log.next_line()
            if self.head is not None:
                self.after_head = self.log.cursor
                self.at_utc = max(self.at_utc, self.head.at_utc)
        return self.head is not None

    @property
    def is_behind(self) -> bool:
        return self.head is None and self.log.is_behind


def _has_grown(reading: _Reading) -> bool:
    return reading.head is not None or reading.log.has_grown()


class Merge:
    """Reads on where it stands at each call of batch()."""

    def __init__(self, *, since_utc: float | None, places: dict[int, Place]) -> None:
        self._since_utc = since_utc
        self._places = dict(places)
        self._offset_parts = {replica: _format_place(replica, place) for replica, place in sorted(places.items())}
        """By replica, in order: an offset is made for every line, and only one part of it changes."""
        self._reading: dict[int, _Reading] = {}
        # A thread that a disk holds is left behind; whoever has this lock may still use the files.
        self._in_use = Lock()
        self._is_closed = False

    @property
    def attempts(self) -> dict[int, int]:
        return {replica: reading.wanted.attempt for replica, reading in self._reading.items()}

    def add(self, wanted: Wanted, *, tail: int | None = None) -> None:
        """From its beginning; or from where the offset says; or from its last `tail` lines (or a few more)."""
        with self._using():
            self._add(wanted, tail)

    def _add(self, wanted: Wanted, tail: int | None) -> None:
        self._drop(wanted.replica)
        place = self._places.get(wanted.replica)
        cursor = place.cursor if place is not None and place.attempt == wanted.attempt else None
        if isinstance(wanted.where, RemoteLog):
            wanted.where.begin(since_utc=self._since_utc, run=wanted.run, cursor=cursor, tail=tail)
            log: Log = wanted.where
        else:
            if cursor is None and tail is not None:
                cursor = tail_cursor(wanted.where, tail, wanted.run)
            log = FileLog(wanted.where, since_utc=self._since_utc, run=wanted.run, cursor=cursor)
        self._reading[wanted.replica] = _Reading(wanted, log, cursor or Cursor(0, 0, 0))

    def _drop(self, replica: int) -> None:
        reading = self._reading.pop(replica, None)
        if reading is not None:
            reading.log.close()

    @property
    def remote(self) -> list[RemoteLog]:
        """Those that somebody has to fetch from their nodes."""
        return [reading.log for reading in self._readings if isinstance(reading.log, RemoteLog)]

    def close(self) -> None:
        """Now, or when the thread that was left behind with the files is done with them."""
        self._is_closed = True
        if self._in_use.acquire(blocking=False):
            for replica in list(self._reading):
                self._drop(replica)
            self._in_use.release()

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            with self._in_use:
                yield
        finally:
            # Looked at after the lock was let go: who closed before that did not get it.
            if self._is_closed:
                self.close()

    def until_now(self) -> None:
        """Let batch() come to an end with what is there now, however fast the replicas write; until go_on()."""
        with self._using():
            for reading in self._readings:
                reading.log.stop_at_present_end()

    def go_on(self) -> None:
        with self._using():
            for reading in self._readings:
                reading.log.go_on()

    def news(self) -> list[Json]:
        """As batch(), but looks at sizes first: cheap enough to ask ten times a second."""
        with self._using():
            return self._batch() if any(map(_has_grown, self._readings)) else []

    @property
    def _readings(self) -> Iterable[_Reading]:
        return self._reading.values()

    def batch(self) -> list[Json]:
        """The next lines of all, by time; [] when there are none now."""
        with self._using():
            return self._batch()

    def _batch(self) -> list[Json]:
        lines: list[Json] = []
        chars = 0
        for reading in self._readings:
            reading.log.look()
        queue = [(reading.at_utc, replica) for replica, reading in self._reading.items() if reading.peek()]
        heapify(queue)
        # What comes next of a log that is still on its way may be older than all that is here.
        is_behind = any(reading.is_behind for reading in self._readings)
        while queue and not is_behind and len(lines) < BATCH_LINES and chars < BATCH_CHARS:
            _, replica = queue[0]
            reading = self._reading[replica]
            assert reading.head is not None
            assert reading.after_head is not None
            line, reading.head, reading.before = reading.head, None, reading.after_head
            lines.append(self._document(reading, line))
            chars += len(line.text) + 100
            if reading.peek():
                heapreplace(queue, (reading.at_utc, replica))
            else:
                heappop(queue)
                is_behind = reading.is_behind
        if not queue and not is_behind:
            for reading in self._readings:
                reading.log.was_read()
        return lines

    def rest(self) -> list[Json]:
        """The beginnings of lines that will not be ended any more, or not while anyone waits."""
        with self._using():
            return [
                self._document(reading, line)
                for reading in sorted(self._readings, key=lambda reading: reading.wanted.replica)
                for line in reading.log.unfinished()
            ]

    def _document(self, reading: _Reading, line: LogLine) -> Json:
        wanted = reading.wanted
        is_new = wanted.replica not in self._offset_parts
        self._offset_parts[wanted.replica] = _format_place(wanted.replica, Place(wanted.attempt, reading.before))
        if is_new:
            self._offset_parts = dict(sorted(self._offset_parts.items()))
        return {
            "at_utc": line.at_utc or reading.at_utc,
            "replica": wanted.replica,
            "attempt": wanted.attempt,
            "run": line.run,
            "stream": line.stream,
            "kind": line.kind,
            "text": line.text,
            "offset": "_".join(self._offset_parts.values()),
        }
