"""NDJSON streams: documents as they come, with each wait bounded, going on after the connection was lost.

A daemon may be restarted while somebody follows a log; replicas go on, and so does the stream, from the last offset.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpulayer.client.transport import NoAnswer, Open, Transport
from gpulayer.model.errors import GpulayerError, Unreachable, WaitTimeout

# The daemon sends an empty line after 15 s without a document; three of them missing is a peer that is gone.
IDLE_SECONDS_MAX = 45.0
LINE_BYTES_MAX = 16 * 2**20
_READ_BYTES = 256 * 1024

# Whoever waits for no time at all asks how it is now, and the daemon needs a moment to say it.
FIRST_SECONDS_LEAST = 1.0
# A daemon that is restarted or upgraded is back in seconds; one that is not after a minute needs a person.
RECONNECT_SECONDS_MAX = 60.0
# A connection that lasted so long was no failed try of one.
_LASTED_SECONDS = 1.0
_RECONNECT_DELAY_SECONDS = 0.1
_RECONNECT_DELAY_SECONDS_MAX = 2.0


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


def documents(transport: Transport, path: str, *, deadline: float = math.inf) -> Iterator[Any]:
    """What one connection brings. Ends where the daemon ends it; StreamLost where it breaks off; WaitTimeout at
    `deadline`.

    `deadline` is on time.monotonic().
    """
    yield from _documents(transport.open("GET", path, timeout_seconds=_patience(deadline)), deadline)


def posted_documents(transport: Transport, path: str, body: object) -> Iterator[Any]:
    """The same for a POST that answers with a stream; never repeated."""
    yield from _documents(transport.open("POST", path, body=body, timeout_seconds=IDLE_SECONDS_MAX), math.inf)


def resumed_documents(
    transport: Transport,
    path_after: Callable[[Any], str],
    *,
    deadline: float = math.inf,
    is_last: Callable[[Any], bool] = lambda document: False,
    absence: Absence | None = None,
) -> Iterator[Any]:
    """The same over any number of connections. `path_after(last)` says where to go on; `last` is None before the first.

    Ends after a document that `is_last`, or where the daemon ends the stream; one that stops, or dies, cuts it. The
    first connection is tried once, so that a daemon that is not there is said at once; a later one for a minute.
    WaitTimeout at `deadline`, but not before there was time for the first document.
    """
    last: Any = None
    lost_at: float | None = None
    delay_seconds = _RECONNECT_DELAY_SECONDS
    first_by = max(deadline, time.monotonic() + FIRST_SECONDS_LEAST)
    while True:
        opened_at: float | None = None
        until = first_by if last is None else deadline
        try:
            opened = transport.open("GET", path_after(last), timeout_seconds=_patience(until))
            opened_at = time.monotonic()
            if absence is not None:
                absence.is_over()
            for document in _documents(opened, deadline, first_by=until):
                last, lost_at, delay_seconds = document, None, _RECONNECT_DELAY_SECONDS
                yield document
                if is_last(document):
                    return
            return
        except Unreachable as error:
            if isinstance(error, NoAnswer) and time.monotonic() >= until:
                raise _waited() from None
            if lost_at is None and opened_at is None and last is None:
                raise
            failure = error
        now = time.monotonic()
        if lost_at is None or (opened_at is not None and now - opened_at > _LASTED_SECONDS):
            # It was there for a while, silent: what is lost now is lost anew.
            lost_at, delay_seconds = now, _RECONNECT_DELAY_SECONDS
        if now - lost_at > RECONNECT_SECONDS_MAX:
            raise failure
        if now >= deadline:
            raise _waited()
        if absence is not None:
            absence.lasts(now - lost_at)
        time.sleep(min(_pause(delay_seconds, now - lost_at), max(0.0, deadline - now)))
        delay_seconds = min(delay_seconds * 2, _RECONNECT_DELAY_SECONDS_MAX)


def _pause(delay_seconds: float, away_seconds: float) -> float:
    """Until the next try, or until it is time to say that there is nobody."""
    left_seconds = ABSENCE_TOLD_AFTER_SECONDS - away_seconds
    return min(delay_seconds, left_seconds) if left_seconds > 0 else delay_seconds


def _patience(deadline: float) -> float:
    # Never zero: that would make the socket non-blocking.
    return max(0.001, min(IDLE_SECONDS_MAX, deadline - time.monotonic()))


def _waited() -> WaitTimeout:
    return WaitTimeout("waited long enough", hint="what was waited for goes on")


def _documents(opened: Open, deadline: float, *, first_by: float = -math.inf) -> Iterator[Any]:
    """`first_by`: how long the first document may take, if that is later than `deadline`."""
    pending = b""
    until = max(deadline, first_by)
    try:
        while True:
            if time.monotonic() >= until:
                raise _waited()
            opened.socket.settimeout(_patience(until))
            try:
                chunk = opened.response.read1(_READ_BYTES)
            except TimeoutError:
                if time.monotonic() >= until:
                    raise _waited() from None
                raise StreamLost("the daemon has been silent for too long", hint="see its log") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                # ValueError: http.client's words for a chunk whose length was cut off.
                raise StreamLost("the daemon went away", hint="see its log") from error
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    until = deadline
                    yield _document(line)
            if len(pending) > LINE_BYTES_MAX:
                raise GpulayerError(f"a line of the stream is longer than {LINE_BYTES_MAX} bytes", hint="report this")
        if pending.strip():
            yield _document(pending)
    finally:
        opened.close()


def _document(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise GpulayerError(f"a line of the stream is not JSON ({line[:60]!r})", hint="check --url") from error
