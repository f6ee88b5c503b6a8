"""What happens on one node, in the feed of the node that keeps the cluster's: each event once, in order per source.

The events are durable where they happen. The keeper says up to which number it has them; the rest is sent to it, a
batch at a time, again after every new link. So neither a cut nor a restart of either loses or doubles one.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from gpulayer.model.errors import StorageFailed
from gpulayer.model.event import Event
from gpulayer.model.ids import NodeId
from gpulayer.runtime.event_store import EventStore, format_offset, is_event
from gpulayer.wire.peer import EventsKept, EventsOffered, EventsTold

log = structlog.get_logger()

# A batch is far below the megabyte that a frame may have.
BATCH_EVENTS = 200
# Without an answer it is said again.
ANSWER_SECONDS = 5.0


class EventRelay:
    """The side where events happen. `run` it; everything else never waits."""

    def __init__(self, events: EventStore, own: NodeId, send: Callable[[EventsOffered | EventsTold], None]) -> None:
        """`send`: to the keeper; dropping it is allowed."""
        self._events, self._own, self._send = events, own, send
        self._kept: tuple[int, int] | None = None
        """The keeper has everything up to this; None: it has not said so since the link stands."""
        self._is_linked = False
        self._news = trio.Event()

    def link(self, is_up: bool) -> None:
        self._is_linked, self._kept = is_up, None
        self._wake()

    def kept(self, answer: EventsKept) -> None:
        self._kept = answer.epoch, answer.seq
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def run(self) -> None:
        """For good."""
        while True:
            if not self._is_linked:
                await self._news.wait()
                continue
            news = self._news
            if self._kept is None:
                self._send(EventsOffered())
            elif not await self._tell_next(self._kept):
                continue
            with trio.move_on_after(ANSWER_SECONDS):
                await news.wait()

    async def _tell_next(self, kept: tuple[int, int]) -> bool:
        """Whether something was told that is answered."""
        written = self._events.written
        try:
            page = await self._events.read_page(format_offset({self._own: kept}), BATCH_EVENTS)
        except StorageFailed as error:
            log.warning("events.not_relayed", reason=error.message)
            await trio.sleep(ANSWER_SECONDS)
            return False
        batch = tuple(event for _, event in page.items if event.source == self._own)
        if batch:
            self._send(EventsTold(events=batch))
            return True
        with trio.move_on_after(ANSWER_SECONDS):
            await self._events.wait_for_more(written)
        return False


def keep_events(events: EventStore, node: NodeId, told: EventsOffered | EventsTold) -> EventsKept:
    """The keeper's answer to a node, after taking what it has told. Nobody speaks for another source."""
    if isinstance(told, EventsTold):
        events.add(_own(told.events, node))
    epoch, seq = events.last(node)
    return EventsKept(epoch=epoch, seq=seq)


def _own(told: tuple[Event, ...], node: NodeId) -> list[Event]:
    return [event for event in told if event.source == node and is_event(event)]
