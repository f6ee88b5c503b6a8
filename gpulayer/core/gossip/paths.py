"""Which way answers come: members that connections reach and datagrams do not are spoken to over links."""

from __future__ import annotations

from gpulayer.core.gossip.outbox import Outbox
from gpulayer.model.ids import NodeId
from gpulayer.model.units import Instant

# Rounds in a row that only a stream answered, before datagrams are taken as blocked; and answers by datagram in a row
# that show that they are not any more. One lost packet moves nothing.
BLOCKED_AFTER = 3


class Paths:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._rows: dict[NodeId, int] = {}
        """Rounds in a row that were answered over the stream alone (above 0), or by datagram (below 0)."""

    def answered(self, node: NodeId, now: Instant, *, by_stream: bool) -> None:
        row = self._rows.get(node, 0)
        row = max(row, 0) + 1 if by_stream else min(row, 0) - 1
        if row >= BLOCKED_AFTER:
            self._outbox.over_stream.add(node)
            blocked = len(self._outbox.over_stream)
            if blocked <= 2:
                text = f"datagrams do not reach {node}, connections do: is UDP blocked to or from it?"
                self._outbox.warn("datagrams_blocked", node, text, now)
            else:
                text = f"datagrams do not reach {blocked} members, connections do: is UDP blocked here?"
                self._outbox.warn("datagrams_blocked", "", text, now)
        if row <= -BLOCKED_AFTER:
            self._outbox.over_stream.discard(node)
        self._rows[node] = max(-BLOCKED_AFTER, min(row, BLOCKED_AFTER))

    def forget(self, node: NodeId) -> None:
        self._rows.pop(node, None)
