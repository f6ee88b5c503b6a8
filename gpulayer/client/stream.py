"""Streams of documents: how bytes become documents, how long one waits for them, and when one asks again.

A daemon may be restarted while somebody follows a log; replicas go on, and so does the stream, from the last offset.
Pure: transport.py and aio_transport.py read, sleep, and say what time it is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gpulayer.client.calls import Feed
from gpulayer.client.exchange import NoAnswer
from gpulayer.model.errors import GpulayerError, Unreachable, WaitTimeout

# The daemon sends an empty line after 15 s without a document; three of them missing is a peer that is gone.
IDLE_SECONDS_MAX = 45.0
LINE_BYTES_MAX = 16 * 2**20

# Whoever waits for no time at all asks how it is now, and the daemon needs a moment to say it.
FIRST_SECONDS_LEAST = 1.0
# A daemon that is restarted or upgraded is back in seconds; one that is not after a minute needs a person.
RECONNECT_SECONDS_MAX = 60.0
# A connection that lasted so long was no failed try of one.
_LASTED_SECONDS = 1.0
_RECONNECT_DELAY_SECONDS = 0.1
_RECONNECT_DELAY_SECONDS_MAX = 2.0
# Never zero: that would make a socket non-blocking.
_PATIENCE_SECONDS_LEAST = 0.001

# A restart of the daemon takes about a second; what takes longer is worth a word to whoever waits.
ABSENCE_TOLD_AFTER_SECONDS = 2.0


class Absence:
    """Tells once that no daemon answers for a while, and once that one does again. The streams of a client share it,
    so that two of them do not say it twice.
    """

    def __init__(self, tell: Callable[[bool], None]) -> None:
        """`tell(True)`: it is away; `tell(False)`: it is back. Called in the thread of the stream that notices."""
        self._tell = tell
        self._is_told = False
        self._lock = threading.Lock()

    def lasts(self, seconds: float) -> None:
        with self._lock:
            if seconds >= ABSENCE_TOLD_AFTER_SECONDS and not self._is_told:
                self._is_told = True
                self._tell(True)

    def is_over(self) -> None:
        with self._lock:
            if self._is_told:
                self._is_told = False
                self._tell(False)


class StreamLost(Unreachable):
    """The connection ended before the stream did."""

    def __init__(self, message: str = "the daemon went away") -> None:
        super().__init__(message, hint="see its log")


class Lines:
    """The documents in what one connection brings. An empty line only says that the daemon is there."""

    def __init__(self) -> None:
        self._pending = b""

    def documents(self, chunk: bytes) -> Iterator[Any]:
        """Those that are complete with this chunk."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield _document(line)
        if len(self._pending) > LINE_BYTES_MAX:
            raise GpulayerError(f"a line of the stream is longer than {LINE_BYTES_MAX} bytes", hint="report this")

    def rest(self) -> Iterator[Any]:
        """What the daemon ended without a newline."""
        if self._pending.strip():
            yield _document(self._pending)


def _document(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise GpulayerError(f"a line of the stream is not JSON ({line[:60]!r})", hint="check --url") from error


class Following:
    """One feed over any number of connections: where to go on, until when, and whether once more.

    The first connection is tried once, so that a daemon that is not there is said at once; a later one for a minute.
    WaitTimeout after `seconds`, but not before there was time for the first document. `now` is on any monotonic clock,
    always the same one.
    """

    def __init__(self, feed: Feed[Any], seconds: float, now: float, absence: Absence | None) -> None:
        self._feed = feed
        self._absence = absence
        self._deadline = now + seconds
        self._first_by = max(self._deadline, now + FIRST_SECONDS_LEAST)
        self._last: Any = None
        self._opened_at: float | None = None
        self._lost_at: float | None = None
        self._delay_seconds = _RECONNECT_DELAY_SECONDS

    def path(self) -> str:
        """Where to ask now."""
        self._opened_at = None
        return self._feed.path_after(self._last)

    def opened(self, now: float) -> None:
        self._opened_at = now
        if self._absence is not None:
            self._absence.is_over()

    def got(self, document: Any) -> None:
        self._last, self._lost_at, self._delay_seconds = document, None, _RECONNECT_DELAY_SECONDS

    def patience(self, now: float) -> float:
        """Seconds that one wait may take. Raises WaitTimeout where none is left."""
        if now >= self._until and self._opened_at is not None:
            raise _waited()
        return max(_PATIENCE_SECONDS_LEAST, min(IDLE_SECONDS_MAX, self._until - now))

    def silence(self, now: float) -> GpulayerError:
        """What it means that nothing came for as long as there was patience."""
        return _waited() if now >= self._until else StreamLost("the daemon has been silent for too long")

    def pause_after(self, error: Unreachable, now: float) -> float:
        """Seconds until the next try. Raises the error where there is to be none, WaitTimeout where time is over."""
        if isinstance(error, NoAnswer) and now >= self._until:
            raise _waited() from None
        was_open, is_first = self._opened_at is not None, self._lost_at is None and self._last is None
        if not self._feed.is_resumed or (is_first and not was_open):
            raise error
        if self._lost_at is None or (self._opened_at is not None and now - self._opened_at > _LASTED_SECONDS):
            # It was there for a while, silent: what is lost now is lost anew.
            self._lost_at, self._delay_seconds = now, _RECONNECT_DELAY_SECONDS
        away_seconds = now - self._lost_at
        if away_seconds > RECONNECT_SECONDS_MAX:
            raise error
        if now >= self._deadline:
            raise _waited() from None
        if self._absence is not None:
            self._absence.lasts(away_seconds)
        pause_seconds = min(_until_told(self._delay_seconds, away_seconds), self._deadline - now)
        self._delay_seconds = min(self._delay_seconds * 2, _RECONNECT_DELAY_SECONDS_MAX)
        return pause_seconds

    @property
    def _until(self) -> float:
        return self._first_by if self._last is None else self._deadline


def _until_told(delay_seconds: float, away_seconds: float) -> float:
    """Until the next try, or until it is time to say that there is nobody."""
    left_seconds = ABSENCE_TOLD_AFTER_SECONDS - away_seconds
    return min(delay_seconds, left_seconds) if left_seconds > 0 else delay_seconds


def _waited() -> WaitTimeout:
    return WaitTimeout("waited long enough", hint="what was waited for goes on")
