"""Answers without an end known beforehand: NDJSON, or the same as SSE, one document at a time.

Nothing is kept for a client that does not read: the send waits, and with it the one task of that client, until it reads
on or goes away. A client tells a stream that ended from one that was cut (the daemon stops, or failed) by the last
chunk, which only the first has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import structlog
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpulayer.api.requests import REFUSED_LATER
from gpulayer.model.errors import GpulayerError
from gpulayer.wire.http import dump

log = structlog.get_logger()

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
# Shorter than any proxy's or firewall's patience with a silent connection, and how soon a dead peer is noticed.
KEEPALIVE_SECONDS = 15.0
# As much as goes out with one send: large enough to be fast, small enough that 512 clients take 32 MiB together.
CHUNK_BYTES = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item:
    encoded: bytes
    """One document as JSON. Made by whoever has it, because logs are read, and made JSON of, in threads."""
    offset: str = ""
    """Where to go on after this one (`after=`, and SSE's Last-Event-ID)."""

    @classmethod
    def of(cls, document: object, offset: str = "") -> Item:
        return cls(dump(document), offset)


KEEPALIVE: Sequence[Item] = ()
"""Yielded by a source that has nothing to say for a while."""

Source = AsyncIterator[Sequence[Item]]


async def news_or_none(wait: Callable[[], Awaitable[T]]) -> T | None:
    """What `wait` gives, or None after KEEPALIVE_SECONDS; then the source yields KEEPALIVE and asks again."""
    with trio.move_on_after(KEEPALIVE_SECONDS):
        return await wait()
    return None


def wants_sse(request: Request) -> bool:
    return SSE in request.headers.get("accept", "")


def last_event_id(request: Request) -> str:
    """The offset with which a browser's EventSource reconnects, of what it has seen; else empty."""
    return request.headers.get("last-event-id", "")


class Stream(Response):
    """Sends what a source yields. What can be refused is refused before this is made."""

    def __init__(
        self, request: Request, source: Source, *, afterwards: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`afterwards` is done once the source has come to its end and the client was told, or has gone then."""
        self.status_code = 200
        self.background = None
        self._sse = wants_sse(request)
        self._source = source
        self._afterwards = afterwards
        self.init_headers(
            {
                "content-type": SSE if self._sse else NDJSON,
                "cache-control": "no-store",
                # nginx would keep lines back until a buffer is full.
                "x-accel-buffering": "no",
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_ended = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                nursery.start_soon(_cancel_when_stopping, scope, nursery.cancel_scope)
                if REFUSED_LATER in scope:
                    nursery.start_soon(_cancel_when_revoked, scope[REFUSED_LATER], nursery.cancel_scope)
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if scope["method"] != "HEAD":
                    await self._send_all(send)
                has_ended = True
                nursery.cancel_scope.cancel()
        except* GpulayerError as group:
            # Too late for an answer: the stream is cut, and whoever asks again is told.
            log.warning("api.stream_cut", path=scope["path"], reason=str(group.exceptions[0]))
        if has_ended:
            # Not within the nursery: the server makes a disconnect of it, and if that cancelled the sending, a
            # connection that is to be closed would stay open.
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if self._afterwards is not None:
                await self._afterwards()

    async def _send_all(self, send: Send) -> None:
        # aclosing: a generator that holds files is closed here and now, not by the garbage collector.
        async with aclosing(self._source) as source:  # type: ignore[type-var]
            async for items in source:
                for chunk in _chunks(items, self._sse):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _chunks(items: Sequence[Item], sse: bool) -> list[bytes]:
    if not items:
        return [b":\n\n" if sse else b"\n"]
    chunks: list[bytes] = []
    pending: list[bytes] = []
    size = 0
    for item in items:
        encoded = _as_sse(item) if sse else item.encoded + b"\n"
        pending.append(encoded)
        size += len(encoded)
        if size >= CHUNK_BYTES:
            chunks.append(b"".join(pending))
            pending, size = [], 0
    if pending:
        chunks.append(b"".join(pending))
    return chunks


def _as_sse(item: Item) -> bytes:
    # A JSON document has no newline in it, so that one data line is enough.
    offset = f"id: {item.offset}\n".encode() if item.offset else b""
    return offset + b"data: " + item.encoded + b"\n\n"


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _cancel_when_revoked(refused: Callable[[], Awaitable[None]], cancel_scope: trio.CancelScope) -> None:
    """A token that is refused from now on gets nothing more out of what it began before."""
    await refused()
    cancel_scope.cancel()


async def _cancel_when_stopping(scope: Scope, cancel_scope: trio.CancelScope) -> None:
    shutdown = scope.get("state", {}).get("shutdown")
    if shutdown is not None:
        await shutdown.wait()
        cancel_scope.cancel()
