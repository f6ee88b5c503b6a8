"""Simulated time: a heap of calls, each due at an instant. Nothing here sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """`now` in seconds since the simulation began. Calls due at the same instant run in the order of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._made += 1
        heapq.heappush(self._due, (when if when > self.now else self.now, self._made, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def run_until(self, end: float, stop: Callable[[], bool] | None = None) -> bool:
        """Runs what is due up to `end`; earlier, and True, as soon as `stop()` holds after a call."""
        due = self._due
        while due and due[0][0] <= end:
            self.now, _, call, arguments = heapq.heappop(due)
            call(*arguments)
            if stop is not None and stop():
                return True
        self.now = end
        return False
