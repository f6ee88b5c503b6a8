"""Which orders their nodes have not taken up yet, and which of them for too long. The leader's, and pure.

An order is taken up once its attempt is in its node's record. A node that hears us and says nothing of it has not got
the order, or cannot do it; the replica should not wait for that. Time counts only while the node is heard itself: what
becomes of the work on a silent one is decided by the rules for lost nodes.
"""

from __future__ import annotations

from gpulayer.core.cluster.commands import WithdrawUnaccepted
from gpulayer.core.orders.changes import order_changes
from gpulayer.core.replica.messages import Order
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.replica import Reason
from gpulayer.model.units import NEVER, Duration, Instant

# An order and the record that answers it take milliseconds each; a node that was paused asks again within one second.
ACCEPT_SECONDS = Duration(5.0)


class Acceptance:
    """The orders that wait to be taken up."""

    def __init__(self) -> None:
        self._said: dict[NodeId, frozenset[AttemptId]] = {}
        """Of nodes that are heard: the attempts in their record."""
        self._open: dict[NodeId, set[AttemptId]] = {}
        """Ordered, and not in the record of their node."""
        self._since: dict[AttemptId, tuple[Instant, NodeId]] = {}
        """Of those whose time counts; the oldest first, because whatever gets a new time goes to the end."""

    @property
    def deadline(self) -> Instant:
        for since, _ in self._since.values():
            return Instant(since + ACCEPT_SECONDS)
        return NEVER

    def follow(self, before: ClusterState, after: ClusterState, now: Instant) -> None:
        """A newer state is applied; the first one follows an empty one."""
        for node, changes in order_changes(before, after).items():
            for attempt in changes.gone:
                self._close(node, attempt)
            for attempt, order in changes.changed.items():
                if _is_open(order) and attempt not in self._said.get(node, ()):
                    self._open.setdefault(node, set()).add(attempt)
                    if node in self._said and attempt not in self._since:
                        self._count(node, attempt, now)
                else:
                    self._close(node, attempt)

    def hear(self, node: NodeId, attempts: frozenset[AttemptId] | None, now: Instant) -> None:
        """What a node's record says of attempts; None: it is not heard any more."""
        waiting = sorted(self._open.get(node, ()))
        if attempts is None:
            self._said.pop(node, None)
            for attempt in waiting:
                self._since.pop(attempt, None)
            return
        was_heard = node in self._said
        self._said[node] = attempts
        for attempt in waiting:
            if attempt in attempts:
                self._close(node, attempt)
            elif not was_heard:
                self._count(node, attempt, now)

    def overdue(self, state: ClusterState, now: Instant) -> list[WithdrawUnaccepted]:
        """What shall be recalled now. Each is given once; again, should that have come to nothing, as long after."""
        found: list[WithdrawUnaccepted] = []
        while self.deadline <= now:
            attempt, (_, node) = next(iter(self._since.items()))
            self._count(node, attempt, now)
            name = state.nodes[node].name if node in state.nodes else node
            found.append(
                WithdrawUnaccepted(
                    job=attempt.replica.job,
                    replica=attempt.replica.index,
                    attempt=attempt.attempt,
                    reason=Reason(
                        code="not_accepted",
                        text=f"{name} is alive and has said nothing of this order for {ACCEPT_SECONDS:g} s",
                        hint=f"look at the daemon's log on {name}",
                    ),
                )
            )
        return found

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        times = [since for since, _ in self._since.values()]
        assert times == sorted(times), "the oldest is not the first"
        for attempt, (_, node) in self._since.items():
            assert attempt in self._open[node], f"{attempt} is timed and not open"
            assert node in self._said, f"the time of {attempt} counts although {node} is not heard"

    def _count(self, node: NodeId, attempt: AttemptId, now: Instant) -> None:
        self._since.pop(attempt, None)
        self._since[attempt] = now, node

    def _close(self, node: NodeId, attempt: AttemptId) -> None:
        self._since.pop(attempt, None)
        waiting = self._open.get(node)
        if waiting is not None:
            waiting.discard(attempt)
            if not waiting:
                del self._open[node]


def _is_open(order: Order) -> bool:
    assignment = order.assignment
    return not order.outcome_known and assignment.withdrawn is None and assignment.recalled is None
