"""Connections that are no links: streams that peers open for one exchange after another, and hosts that ask to join.

Each kind is bounded; one above the bound is told so and may try again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import structlog
import trio

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.runtime.frame_stream import FrameStream, Limits, LinkEnded
from gpulayer.wire.peer import Goodbye, JoinAccepted, JoinRejected, JoinRequest

log = structlog.get_logger()

OnJoin: TypeAlias = Callable[[JoinRequest, Address], Awaitable[JoinAccepted | JoinRejected]]
OnBulk: TypeAlias = Callable[[Run, FrameStream], Awaitable[None]]


class Guests:
    """`counts` gets joins, bulk_in and refused_busy."""

    def __init__(self, *, on_join: OnJoin, on_bulk: OnBulk, limits: Limits, counts: Counter[str]) -> None:
        self._on_join, self._on_bulk = on_join, on_bulk
        self._limits, self._counts = limits, counts
        self.streams: Counter[NodeId] = Counter()
        """Open now, of each peer that has one."""
        self._joins = 0
        self._scopes: dict[NodeId, set[trio.CancelScope]] = {}
        """Of these streams."""

    def end(self, node: NodeId) -> None:
        """Cuts the streams that this peer has open."""
        for scope in self._scopes.get(node, ()):
            scope.cancel()

    async def serve_bulk(self, stream: FrameStream, run: Run) -> None:
        """Until the callback returns, or the peer is gone."""
        limits = self._limits
        if self.streams[run.node] >= limits.bulk_per_peer_max or self.streams.total() >= limits.bulk_max:
            await self._turn_away(stream, f"{self.streams.total()} streams are open")
            return
        self.streams[run.node] += 1
        self._counts["bulk_in"] += 1
        scope = trio.CancelScope()
        self._scopes.setdefault(run.node, set()).add(scope)
        try:
            with scope:
                await self._on_bulk(run, stream)
                await stream.aclose()
        except LinkEnded:
            pass  # nobody waits for the rest
        except Exception as error:
            # The edge of one stream: what one peer brought about must not end the daemon for all.
            log.error("bulk.failed", node=run.node, exc_info=error)
        finally:
            self._scopes[run.node].discard(scope)
            if not self._scopes[run.node]:
                del self._scopes[run.node]
            self.streams[run.node] -= 1
            self.streams = +self.streams

    async def serve_join(self, stream: FrameStream) -> None:
        """One request, one answer."""
        limits = self._limits
        if self._joins >= limits.joins_max:
            await self._turn_away(stream, f"{self._joins} hosts are joining")
            return
        self._joins += 1
        self._counts["joins"] += 1
        try:
            request = None
            with trio.move_on_after(limits.join_request_seconds):
                request = await stream.receive_frame()
            if request is not None:
                assert isinstance(request, JoinRequest), "the reader takes nothing else"
                with trio.move_on_after(limits.join_answer_seconds):
                    await stream.send_frame(await self._on_join(request, stream.remote))
                    await stream.aclose()
        except LinkEnded:
            pass  # it asks again
        except Exception as error:
            # The edge of one request, as above.
            log.error("join.failed", observed=str(stream.remote), exc_info=error)
        finally:
            self._joins -= 1

    async def _turn_away(self, stream: FrameStream, why: str) -> None:
        self._counts["refused_busy"] += 1
        await stream.aclose(Goodbye(code="busy", message=why, hint="try again"))
