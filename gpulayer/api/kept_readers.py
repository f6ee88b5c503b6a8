"""Readers of logs that another node reads on in a moment, kept where they stand.

A reader that is made anew for each piece begins at the last record before which no line was unfinished, and in a log
whose writes end within lines that may be its beginning: to read such a log in pieces would take the square of its
length.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

import trio
import trio.lowlevel

from gpulayer.runtime.replica_logs import Cursor, LogReader

# Each keeps a descriptor, and with it the space of a segment that was removed meanwhile.
KEPT_MAX = 64
KEPT_SECONDS = 30.0


class Place(NamedTuple):
    """Where a reader stands, and what it leaves out."""

    directory: str
    run: int | None
    since_utc: float | None
    cursor: Cursor


class KeptReaders:
    """For worker threads: a reader is either here, or has been taken and is its taker's alone."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, tuple[LogReader, float]] = OrderedDict()
        """The oldest first."""
        self._lock = Lock()
        self._is_watched = False

    def take(self, place: Place) -> LogReader | None:
        with self._lock:
            found = self._kept.pop(place, None)
        return found[0] if found is not None else None

    def keep(self, place: Place, reader: LogReader) -> None:
        """Its caller must not use it any more."""
        before = self.take(place)
        if before is not None:
            before.close()
        with self._lock:
            self._kept[place] = reader, time.monotonic()
        self._drop(KEPT_MAX, KEPT_SECONDS)

    def drop_later(self) -> None:
        """In the trio thread, after something may have been kept: it is not kept for longer than is good."""
        if self._kept and not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(self._watch)

    async def _watch(self) -> None:
        try:
            while self._kept:
                await trio.sleep(KEPT_SECONDS / 2)
                self._drop(KEPT_MAX, KEPT_SECONDS)
        finally:
            self._is_watched = False

    def _drop(self, count: int, seconds: float) -> None:
        """All but the newest `count`, and those that are older than `seconds`."""
        dropped: list[LogReader] = []
        with self._lock:
            while self._kept:
                reader, since = next(iter(self._kept.values()))
                if len(self._kept) <= count and time.monotonic() - since <= seconds:
                    break
                self._kept.popitem(last=False)
                dropped.append(reader)
        for each in dropped:
            each.close()
