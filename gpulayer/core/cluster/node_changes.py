"""Nodes as they say they are, against nodes as the log has them: which changes are to be committed, and when. The
leader's, and pure.

Plans are made from committed capabilities only. A node's first change is committed at once, the next ones at most once
in a while, so that a device that comes and goes does not fill the log.
"""

from __future__ import annotations

from gpulayer.core.cluster.commands import AdmitNode
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import NodeId
from gpulayer.model.record import NodeFacts
from gpulayer.model.units import NEVER, Duration, Instant

OBSERVED_SECONDS = Duration(10.0)


class NodeChanges:
    """Which nodes differ from their entry in the registry."""

    def __init__(self, interval: Duration = OBSERVED_SECONDS) -> None:
        self._interval = interval
        self._facts: dict[NodeId, NodeFacts] = {}
        """Of nodes that are heard."""
        self._differing: dict[NodeId, Instant] = {}
        """And when that may be committed."""
        self._proposed: dict[NodeId, Instant] = {}

    @property
    def deadline(self) -> Instant:
        return min(self._differing.values(), default=NEVER)

    def follow(self, before: ClusterState, after: ClusterState, now: Instant) -> None:
        """A newer state is applied. A refusal puts into it what was seen then; when that is over it must not stay."""
        if after.nodes is before.nodes:
            return
        for node_id, node in after.nodes.items():
            if before.nodes.get(node_id) is not node:
                self._compare(node_id, after, now)
        for node_id in before.nodes.keys() - after.nodes.keys():
            self._differing.pop(node_id, None)
            self._proposed.pop(node_id, None)

    def hear(self, node: NodeId, facts: NodeFacts | None, state: ClusterState, now: Instant) -> None:
        """What a node's record says of it; None: it says nothing now."""
        if facts is None:
            self._facts.pop(node, None)
        else:
            self._facts[node] = facts
        self._compare(node, state, now)

    def due(self, now: Instant) -> list[AdmitNode]:
        """What is to be committed now. What comes to nothing is given again after the interval."""
        found: list[AdmitNode] = []
        for node, at in sorted(self._differing.items()):
            if at <= now:
                self._proposed[node] = now
                self._differing[node] = Instant(now + self._interval)
                facts = self._facts[node]
                found.append(
                    AdmitNode(node=node, name=facts.name, advertise=facts.advertise, capabilities=facts.capabilities)
                )
        return found

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        assert self._differing.keys() <= self._facts.keys(), "differs, and has said nothing"
        for node, at in self._differing.items():
            assert at >= self._proposed.get(node, Instant(-NEVER)) + self._interval, "sooner than is allowed"

    def _compare(self, node: NodeId, state: ClusterState, now: Instant) -> None:
        known, facts = state.nodes.get(node), self._facts.get(node)
        if known is None or facts is None:
            self._differing.pop(node, None)  # it joins first
        elif (known.name, known.advertise, known.capabilities) == (facts.name, facts.advertise, facts.capabilities):
            self._differing.pop(node, None)
        elif node not in self._differing:
            last = self._proposed.get(node)
            self._differing[node] = now if last is None else max(now, Instant(last + self._interval))
