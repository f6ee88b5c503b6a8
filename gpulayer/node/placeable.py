"""Where the leader may place something now, and why not elsewhere. Of the node that has the log; any other knows none.

What changes it is looked at as it happens; what ends by itself, once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from gpulayer.model.ids import NodeId
from gpulayer.model.seen import Table
from gpulayer.node.place import Place
from gpulayer.node.voting import Voting

LOOKS_SECONDS = 1.0


class Placeable:
    def __init__(self, node: NodeId, place: Place, table: Callable[[], Table]) -> None:
        self._node, self._place, self._table = node, place, table
        self._kept_empty: dict[NodeId, float] = {}
        """Until when."""
        self._told: Mapping[NodeId, str] = {}

    def now(self) -> Mapping[NodeId, str]:
        """Per node why nothing may be placed there; empty text: it may."""
        half = self._place.half
        if not isinstance(half, Voting):
            return {}
        if half.trouble:
            return dict.fromkeys(half.state.nodes, half.trouble) or {self._node: half.trouble}
        now = trio.current_time()
        found = {self._node: ""}
        for node in self._table().nodes.values():
            if self._kept_empty.get(node.id, 0.0) > now:
                found[node.id] = "it is about to leave"
            elif node.is_self:
                found[node.id] = ""
            elif node.state != "alive":
                found[node.id] = f"it is {node.state}" + (f": {node.reason}" if node.reason else "")
            elif node.conditions:
                found[node.id] = f"it is {', '.join(node.conditions)}"
            elif node.facts is None or node.is_stale:
                found[node.id] = "it has not said yet what it has and runs"
            else:
                found[node.id] = ""
        return found

    def keep_empty(self, node: NodeId, seconds: float) -> None:
        self._kept_empty[node] = trio.current_time() + seconds
        self.look()

    def look(self) -> None:
        """Tells the leader what has changed."""
        now = self.now()
        if isinstance(self._place.half, Voting) and now != self._told:
            self._told = now
            self._place.half.placeable_changed()

    async def run(self) -> None:
        """For good: what comes to an end by itself, as a node that was to be kept empty and did not leave."""
        while True:
            await trio.sleep(LOOKS_SECONDS)
            now = trio.current_time()
            self._kept_empty = {node: until for node, until in self._kept_empty.items() if until > now}
            self.look()
