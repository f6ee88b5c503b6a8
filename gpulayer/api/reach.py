"""Whether somebody still listens where a node that is away said that a replica of its serves: this node's own try.

That is no proof: another program may have got the port. It is enough to go on listing an endpoint as not verified while
nothing says otherwise; a refusal, which its host gives, says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import trio

from gpulayer.model.ids import NodeId
from gpulayer.model.replica import Endpoint

REACH_SECONDS_MAX = 2.0
# Everybody who asks within this is answered from one try.
KEPT_SECONDS = 1.0
TRIES_AT_A_TIME_MAX = 128

Found: TypeAlias = Literal["reached", "silent", "refused"]
_Place: TypeAlias = tuple[NodeId, Endpoint]


@dataclass(slots=True, eq=False)
class _Try:
    done: trio.Event = field(default_factory=trio.Event)
    found: Found | None = None
    """None while it lasts, and where it was given up."""
    at: float = 0.0


class Reach:
    """Remembers what was found: for a second, and a refusal as long as its node stays away."""

    def __init__(self) -> None:
        self._tries: dict[_Place, _Try] = {}
        self._limit = trio.CapacityLimiter(TRIES_AT_A_TIME_MAX)

    async def reached(self, places: Iterable[_Place]) -> frozenset[_Place]:
        """Those of the endpoints, each with the node that is away, that could be connected to just now. Takes
        REACH_SECONDS_MAX at most."""
        wanted = frozenset(places)
        with trio.move_on_after(REACH_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for place in wanted:
                    nursery.start_soon(self._look, place)
        return frozenset(place for place in wanted if place in self._tries and self._tries[place].found == "reached")

    def forget_but(self, away: frozenset[NodeId]) -> None:
        """What was found of nodes that are here again says nothing for their next absence."""
        for place in [place for place in self._tries if place[0] not in away]:
            del self._tries[place]

    async def _look(self, place: _Place) -> None:
        while True:
            known = self._tries.get(place)
            if known is None:
                break
            if not known.done.is_set():
                await known.done.wait()
                continue
            if known.found == "refused" or (known.found is not None and trio.current_time() - known.at < KEPT_SECONDS):
                return
            break
        mine = self._tries[place] = _Try()
        try:
            async with self._limit:
                mine.found = "silent"
                mine.found = await _connect(place[1])
        finally:
            mine.at = trio.current_time()
            mine.done.set()


async def _connect(endpoint: Endpoint) -> Found:
    family = trio.socket.AF_INET6 if ":" in endpoint.address else trio.socket.AF_INET
    with trio.socket.socket(family, trio.socket.SOCK_STREAM) as tried:
        try:
            await tried.connect((endpoint.address, endpoint.port))
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "silent"
        # Nobody listens, and the kernel has put the two ends of one socket together.
        return "refused" if tried.getsockname()[:2] == tried.getpeername()[:2] else "reached"
