"""Requests between nodes over bulk links: asked here, answered there, one at a time on a link.

BulkRequests asks, and keeps links for the next question. PeerApi answers: it runs the application of this process as
the HTTP server would. What is asked, and who may, is api/forwarding.py's and api/app.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote

import structlog
import trio
from starlette.types import ASGIApp, Message, Scope

from gpulayer.api.requests import ASKED_BY_PEER
from gpulayer.model.errors import Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.runtime.frame_stream import FrameStream, LinkEnded
from gpulayer.wire.peer import Goodbye, RequestHead, ResponseHead, ResponsePart

log = structlog.get_logger()

# As the clients have it: the daemon commits a write within milliseconds; half a minute covers a disk that stalls.
ANSWER_SECONDS_MAX = 30.0
# A stream that has nothing to say says so every 15 s; three times missing is a peer that is gone.
SILENCE_SECONDS_MAX = 45.0
# A handshake costs more than most requests; a kept link costs a descriptor at both ends.
KEPT_SECONDS = 60.0
KEPT_PER_NODE_MAX = 8
KEPT_MAX = 128
# Below what a peer takes of one node (64), so that it is said here, and at once, what the matter is.
UNDER_WAY_PER_NODE_MAX = 60
# A client may rest while it reads (`| less`), and with it all that is between it and the source. The other ends of
# links that are dead are found by gossip, and by the kernel where something waits to be sent.
READER_RESTS_SECONDS_MAX = 3600.0
PART_BYTES_MAX = 256 * 1024


class BulkRequests:
    """Asks other nodes. Fulfils facade.ask()."""

    def __init__(self, open_stream: Callable[[NodeId], Awaitable[FrameStream]]) -> None:
        """`open_stream`: a new bulk link to a node; LinkEnded where there is none."""
        self._open_stream = open_stream
        self._kept: list[_Kept] = []
        """The one that was used last is the last."""
        self._under_way: Counter[NodeId] = Counter()
        self._has_kept = trio.Event()

    async def run(self) -> None:
        """Closes what nobody has used for a while; at its end, all."""
        try:
            while True:
                await self._has_kept.wait()
                self._has_kept = trio.Event()
                while self._kept:
                    await trio.sleep_until(self._kept[0].since + KEPT_SECONDS)
                    await self._close_idle()
        finally:
            for kept in self._kept:
                kept.stream.close()
            self._kept.clear()

    @asynccontextmanager
    async def ask(self, node: NodeId, head: RequestHead) -> AsyncIterator[_Answer]:
        """As NodeFacade.ask()."""
        if self._under_way[node] >= UNDER_WAY_PER_NODE_MAX:
            raise Unreachable(
                f"{UNDER_WAY_PER_NODE_MAX} requests to {node} are under way, no more are begun",
                hint="try again, or ask that node itself",
            )
        self._under_way[node] += 1
        try:
            answer = await self._ask(node, head)
            try:
                yield answer
            finally:
                if answer.is_over:
                    self._keep(node, answer.stream)
                else:
                    # Without a goodbye, which would be waited for: the other side ends its work.
                    answer.stream.close()
        finally:
            self._under_way[node] -= 1

    async def _ask(self, node: NodeId, head: RequestHead) -> _Answer:
        kept = self._take(node)
        if kept is not None:
            try:
                return await _asked(node, kept, head)
            except Unreachable:
                # It may have been closed there in this moment. Only what may be done twice is asked twice.
                if not _is_repeatable(head):
                    raise
        return await _asked(node, await self._open_stream(node), head)

    def _take(self, node: NodeId) -> FrameStream | None:
        for kept in reversed(self._kept):
            if kept.node == node:
                self._kept.remove(kept)
                if kept.stream.is_fresh:
                    return kept.stream
                kept.stream.close()
                return self._take(node)
        return None

    def _keep(self, node: NodeId, stream: FrameStream) -> None:
        if len(self._kept) >= KEPT_MAX or sum(kept.node == node for kept in self._kept) >= KEPT_PER_NODE_MAX:
            stream.close()
            return
        self._kept.append(_Kept(node, stream, trio.current_time()))
        self._has_kept.set()

    async def _close_idle(self) -> None:
        until = trio.current_time() - KEPT_SECONDS
        idle = [kept for kept in self._kept if kept.since <= until]
        self._kept = [kept for kept in self._kept if kept.since > until]
        async with trio.open_nursery() as nursery:
            for kept in idle:
                nursery.start_soon(kept.stream.aclose, Goodbye(code="idle"))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    node: NodeId
    stream: FrameStream
    since: float


class _Answer:
    """Fulfils facade.PeerAnswer."""

    def __init__(self, node: NodeId, stream: FrameStream, head: ResponseHead) -> None:
        self.stream = stream
        self.status = head.status
        self.headers = head.headers
        self.is_over = False
        """All of it has been read: the link is good for the next one."""
        self._node = node

    async def parts(self) -> AsyncIterator[bytes]:
        while not self.is_over:
            part = await self._next()
            self.is_over = part.is_last
            yield part.data

    async def _next(self) -> ResponsePart:
        with trio.move_on_after(SILENCE_SECONDS_MAX):
            frame = await self.stream.receive_frame()
            if isinstance(frame, ResponsePart):
                return frame
            raise _broken(self._node, f"it sent a {type(frame).__name__}")
        raise _broken(self._node, f"nothing came for {SILENCE_SECONDS_MAX:g} s")


def _broken(node: NodeId, why: str) -> Unreachable:
    return Unreachable(f"the answer of {node} broke off: {why}", hint="ask again", code="no_answer")


async def _asked(node: NodeId, stream: FrameStream, head: RequestHead) -> _Answer:
    """Once its answer has begun."""
    try:
        with trio.move_on_after(ANSWER_SECONDS_MAX):
            await stream.send_frame(head)
            frame = await stream.receive_frame()
            if isinstance(frame, ResponseHead):
                return _Answer(node, stream, frame)
            raise _broken(node, f"it sent a {type(frame).__name__}")
    except LinkEnded as error:
        stream.close()
        raise Unreachable(
            f"{node} did not answer: {error.message}", hint="see its daemon's log", code="no_answer"
        ) from error
    except BaseException:
        stream.close()
        raise
    stream.close()
    raise Unreachable(
        f"{node} did not answer within {ANSWER_SECONDS_MAX:g} s", hint="see its daemon's log", code="no_answer"
    )


def _is_repeatable(head: RequestHead) -> bool:
    # Questions of a node's own change nothing.
    has_key = any(name == "idempotency-key" for name, _ in head.headers)
    return head.method in ("GET", "HEAD") or head.role == "node" or has_key


# --- the other side -------------------------------------------------------------------------------------------------


class PeerApi:
    """Answers what other nodes ask. `app`: of api.app.make_peer_app(); `shutdown`: set when the daemon stops."""

    def __init__(self, app: ASGIApp, shutdown: trio.Event) -> None:
        self._app = app
        self._shutdown = shutdown

    async def serve(self, run: Run, stream: FrameStream) -> None:
        """The requests on one link, until its end or that of the daemon. Only links of admitted nodes come here."""
        stream.be_patient(READER_RESTS_SECONDS_MAX)
        # One may be there while the answer before it is just ending; more would be another protocol.
        sender, heads = trio.open_memory_channel[RequestHead](1)
        gone = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_read, stream, sender, gone)
                async for head in heads:
                    if not await _Exchange(run, stream, head, gone).answer(self._app, self._shutdown):
                        break
                nursery.cancel_scope.cancel()
        finally:
            stream.close()


async def _read(stream: FrameStream, sender: trio.MemorySendChannel[RequestHead], gone: trio.Event) -> None:
    try:
        with sender:
            while True:
                frame = await stream.receive_frame()
                if not isinstance(frame, RequestHead):
                    return
                sender.send_nowait(frame)
    except (LinkEnded, trio.WouldBlock):
        pass
    finally:
        gone.set()


class _Exchange:
    """One request, as ASGI."""

    def __init__(self, run: Run, stream: FrameStream, head: RequestHead, gone: trio.Event) -> None:
        self._run = run
        self._stream = stream
        self._head = head
        self._gone = gone
        self._is_read = False
        self._is_whole = False

    async def answer(self, app: ASGIApp, shutdown: trio.Event) -> bool:
        """Whether all of it was sent, and the link is good for the next one."""
        try:
            await app(self._scope(shutdown), self._receive, self._send)
        except LinkEnded as error:
            log.info("bulk.asker_gone", node=self._run.node, path=self._head.path, reason=error.message)
        return self._is_whole and not self._gone.is_set()

    def _scope(self, shutdown: trio.Event) -> Scope:
        head = self._head
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": head.method,
            "scheme": "https",
            "path": unquote(head.path),
            "raw_path": _latin(head.path),
            "query_string": _latin(head.query),
            "root_path": "",
            "headers": [(_latin(name), _latin(value)) for name, value in head.headers],
            "client": (str(self._run.node), 0),
            "server": None,
            "state": {"shutdown": shutdown},
            ASKED_BY_PEER: head,
        }

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._head.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple((key.decode("latin-1"), value.decode("latin-1")) for key, value in message["headers"])
            await self._stream.send_frame(ResponseHead(status=int(message["status"]), headers=headers))
            return
        body: bytes = b"" if self._head.method == "HEAD" else bytes(message.get("body", b""))
        is_last = not message.get("more_body", False)
        for start in range(0, max(len(body), 1), PART_BYTES_MAX):
            data = body[start : start + PART_BYTES_MAX]
            ends = is_last and start + PART_BYTES_MAX >= len(body)
            await self._stream.send_frame(ResponsePart(data=data, is_last=ends))
        self._is_whole = self._is_whole or is_last


def _latin(text: str) -> bytes:
    return text.encode("latin-1", "replace")
