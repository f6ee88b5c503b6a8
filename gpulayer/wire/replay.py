"""Which packets of one run were there already: the sliding window of IPsec (RFC 4303 §3.4.3). Pure."""

from __future__ import annotations

# As many as may overtake one another on their way, for 128 bytes per run.
WINDOW_PACKETS = 1024
_ALL = (1 << WINDOW_PACKETS) - 1


class ReplayWindow:
    """Counters that were accepted, and all that are too far below the highest, count as seen."""

    __slots__ = ("_seen", "_top")

    def __init__(self, above: int) -> None:
        """`above`: that counter and all below it count as seen."""
        self._top = above
        self._seen = _ALL

    def is_fresh(self, counter: int) -> bool:
        behind = self._top - counter
        return behind < 0 or (behind < WINDOW_PACKETS and not self._seen >> behind & 1)

    def accept(self, counter: int) -> bool:
        """False: it was there already, and nothing has changed."""
        if not self.is_fresh(counter):
            return False
        behind = self._top - counter
        if behind < 0:
            # A counter far ahead must not become a number of that many bits.
            self._seen = (self._seen << -behind | 1) & _ALL if -behind < WINDOW_PACKETS else 1
            self._top = counter
        else:
            self._seen |= 1 << behind
        return True
