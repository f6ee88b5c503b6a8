"""The loop that every core runs in: events to the core, its effects out in order, a Tick at its deadline.

The clock is trio's, so that a test with an autojump clock and the product read the same one. An idle core costs
nothing: the loop wakes when there is an event or the deadline has passed, and for nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import trio

from gpulayer.core.base import Tick
from gpulayer.model.units import Instant

E = TypeVar("E")
F_co = TypeVar("F_co", covariant=True)
F = TypeVar("F")
E_contra = TypeVar("E_contra", contravariant=True)

# What one turn of the loop may take before it looks at the clock and lets others run.
EVENTS_PER_TURN = 512
# Far above what any shell can have on its way (some events per replica); reached only when the core stands still, and
# then an end with a reason is better than memory without one.
INBOX_MAX = 100_000


class InboxFull(Exception):
    """The core does not take its events any more."""


class Core(Protocol[E_contra, F_co]):
    """`deadline`: when a Tick is wanted; infinite when idle."""

    @property
    def deadline(self) -> float: ...

    def step(self, event: E_contra | Tick, now: Instant) -> Sequence[F_co]: ...


class Inbox(Generic[E]):
    """Many may put, one takes, in the order of putting."""

    def __init__(self, most: int = INBOX_MAX) -> None:
        self._events: deque[E] = deque()
        self._most = most
        self._taker = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._events)

    def put_nowait(self, event: E) -> None:
        """Never waits. InboxFull: the events are not taken, and this one was not put."""
        if len(self._events) >= self._most:
            raise InboxFull(f"{len(self._events)} events wait; the next would be {type(event).__name__}")
        self._events.append(event)
        self._taker.unpark()

    async def take(self, *, at_most: int, until: float) -> list[E]:
        """What is there, at least one event; empty once `until` has passed."""
        if self._events:
            await trio.lowlevel.checkpoint()
        else:
            with trio.move_on_at(until):
                while not self._events:
                    await self._taker.park()
        return self.take_nowait(at_most)

    def take_nowait(self, at_most: int) -> list[E]:
        """What is there."""
        return [self._events.popleft() for _ in range(min(at_most, len(self._events)))]


def now() -> Instant:
    """The clock of everything that `drive` runs."""
    return Instant(trio.current_time())


async def drive(
    core: Core[E, F],
    inbox: Inbox[E],
    perform: Callable[[F], None],
    *,
    refill: Callable[[], object] | None = None,
) -> None:
    """Runs for good. `perform` never waits; what it starts comes back as an event. `refill`: puts what has arrived and
    was not read yet into the inbox, asked for before each Tick."""
    while True:
        events = await inbox.take(at_most=EVENTS_PER_TURN, until=core.deadline)
        if refill is not None and now() >= core.deadline:
            refill()
            events += inbox.take_nowait(EVENTS_PER_TURN)
        for event in events:
            for effect in core.step(event, now()):
                perform(effect)
        # Only after the inbox was read: a loop that is late accuses nobody of being silent.
        if now() >= core.deadline:
            for effect in core.step(Tick(), now()):
                perform(effect)
