"""A latest value that tasks can wait on. For what has a state worth reading at any time (leader, capabilities, table of
replicas); events that must each be seen go through an Inbox instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Watch(Generic[T]):
    """One task sets, any number read or wait. Values should be frozen: readers keep what they were given."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value
        self._waiting.unpark_all()

    async def wait_for(self, predicate: Callable[[T], bool]) -> T:
        """The first value seen for which the predicate holds. A value that was replaced before this task ran is not
        seen: wait for a state, not for a moment. Bounded by the caller's cancel scope."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not predicate(value := self._value):
            await self._waiting.park()
        return value
