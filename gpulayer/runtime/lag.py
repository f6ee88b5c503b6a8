"""How late the event loop is: what everything that it runs suffers from together."""

from __future__ import annotations

from collections import deque

import trio

LOOK_SECONDS = 0.25
# The looks of a minute.
LOOKS_KEPT = 240


class LagMonitor:
    """`run` it in the loop that is to be looked at."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=LOOKS_KEPT)

    async def run(self) -> None:
        """For good."""
        while True:
            due = trio.current_time() + LOOK_SECONDS
            await trio.sleep_until(due)
            self._late.append(max(0.0, trio.current_time() - due))

    def quantile(self, part: float) -> float:
        """Of the last minute, in seconds; 0.0 before the first look."""
        if not self._late:
            return 0.0
        ordered = sorted(self._late)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
