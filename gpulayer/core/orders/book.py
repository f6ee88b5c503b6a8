"""The leader's side of orders: what each node shall run, told when it changes, and confirmed once a second.

Pure. Knows which nodes have asked, and what each was told last; a node that it does not know asks again. Where replicas
go is core/leader.py's business, and what became of them the log's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from gpulayer.core.base import Tick
from gpulayer.core.leader import StateAdvanced
from gpulayer.core.orders.changes import OrderChanges, all_orders, bytes_of, order_changes
from gpulayer.core.orders.messages import (
    LeaderToNode,
    Orders,
    OrdersAsked,
    OrdersConfirmed,
    OrdersDelta,
    OrdersDenied,
    OrdersHeard,
    OrderStamp,
    Reported,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.units import NEVER, Duration, Instant

CONFIRM_SECONDS = Duration(1.0)
# With a thousand nodes that have all asked at once, others get their turn between two of these (some milliseconds).
CONFIRM_BATCH = 64
# A frame on a link has room for twice as much: one order has 512 KiB at most for its command and its environment.
MESSAGE_BYTES = 512 * 1024
NODE_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """This node leads in that term, and its log is applied up to its election."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipLost:
    """`leader`: who leads now, if that is known."""

    leader: NodeId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A node asks over a link that it has shown its certificate on. The newest state was told before this."""

    node: NodeId
    message: OrdersAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    node: NodeId
    message: OrdersHeard


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """Its link is down: it asks when it has another."""

    node: NodeId


BookEvent: TypeAlias = Led | LeadershipLost | StateAdvanced | Asked | Heard | NodeGone | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class ToNode:
    node: NodeId
    message: LeaderToNode


@dataclass(slots=True)
class _Line:
    """What one node was told last. `heard`: what it has said is durable there."""

    node: NodeId
    serial: int
    stamp: OrderStamp
    confirm_at: Instant
    heard: OrderStamp


class OrderBook:
    """Events in, messages to nodes out."""

    def __init__(self) -> None:
        self._state: ClusterState | None = None
        self._term: int | None = None
        self._leader: NodeId | None = None
        self._orders: dict[NodeId, dict[AttemptId, Order]] = {}
        """By node, while leading."""
        self._lines: dict[NodeId, _Line] = {}
        self._due: deque[_Line] = deque()
        """Lines in the order of their confirm_at; some may be gone."""

    @property
    def deadline(self) -> Instant:
        return self._due[0].confirm_at if self._due else NEVER

    def heard(self, node: NodeId) -> OrderStamp | None:
        """What that node has made durable, as far as it has said; None where it has not asked."""
        line = self._lines.get(node)
        return line.heard if line is not None else None

    def step(self, event: BookEvent, now: Instant) -> list[ToNode]:
        match event:
            case Led(term=term):
                self._lines.clear()
                self._due.clear()
                self._term, self._leader = term, None
                self._orders = all_orders(self._state) if self._state is not None else {}
                return []
            case LeadershipLost(leader=leader):
                return self._lost(leader)
            case StateAdvanced(state=state):
                return self._advanced(state)
            case Asked(node=node, message=message):
                return [ToNode(node=node, message=each) for each in self._answers(node, message, now)]
            case Heard(node=node, message=OrdersHeard(stamp=stamp)):
                if (line := self._lines.get(node)) is not None:
                    line.heard = max(line.heard, stamp)
                return []
            case NodeGone(node=node):
                self._lines.pop(node, None)
                return []
            case Tick():
                return self._confirm(now)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        assert self._term is not None or not (self._lines or self._orders), "only who leads gives orders"
        waiting = {id(line) for line in self._due}
        for node, line in self._lines.items():
            assert line.node == node
            assert id(line) in waiting, f"{node} is never confirmed"
            assert self._stamp() >= line.stamp, f"{node} was told of a state that is not there yet"
        assert all(a.confirm_at <= b.confirm_at for a, b in zip(self._due, list(self._due)[1:], strict=False))
        if self._term is not None and self._state is not None:
            assert self._orders == all_orders(self._state), "the table follows the state"

    # --- asked, confirmed -----------------------------------------------------------------------------------------

    def _stamp(self) -> OrderStamp:
        assert self._term is not None
        assert self._state is not None
        return OrderStamp(self._state.generation, self._term, self._state.index)

    def _answers(self, node: NodeId, asked: OrdersAsked, now: Instant) -> Sequence[LeaderToNode]:
        if self._term is None or self._state is None:
            return [OrdersDenied(serial=asked.serial, leader=self._leader)]
        stamp = self._stamp()
        line = self._lines.get(node)
        if line is None:
            line = _Line(node, asked.serial, stamp, Instant(now + CONFIRM_SECONDS), asked.heard)
            self._lines[node] = line
            self._due.append(line)
        line.serial, line.stamp, line.heard = asked.serial, stamp, asked.heard
        registry = tuple(sorted(self._state.nodes))
        parts = _parts(self._orders.get(node, {}).values(), taken=len(registry) * NODE_BYTES)
        return [
            Orders(
                serial=asked.serial,
                stamp=stamp,
                orders=orders,
                registry=registry if part == 0 else (),
                part=part,
                parts=len(parts),
            )
            for part, orders in enumerate(parts)
        ]

    def _confirm(self, now: Instant) -> list[ToNode]:
        told: list[ToNode] = []
        while self._due and self._due[0].confirm_at <= now and len(told) < CONFIRM_BATCH:
            line = self._due.popleft()
            if self._lines.get(line.node) is line:
                told.append(ToNode(node=line.node, message=OrdersConfirmed(stamp=line.stamp)))
                line.confirm_at = Instant(now + CONFIRM_SECONDS)
                self._due.append(line)
        return told

    def _lost(self, leader: NodeId | None) -> list[ToNode]:
        denied = [
            ToNode(node=line.node, message=OrdersDenied(serial=line.serial, leader=leader))
            for line in self._lines.values()
        ]
        self._term, self._leader = None, leader
        self._lines.clear()
        self._due.clear()
        self._orders = {}
        return denied

    # --- what changed ---------------------------------------------------------------------------------------------

    def _advanced(self, state: ClusterState) -> list[ToNode]:
        before = self._state
        if before is not None and state.index <= before.index:
            return []
        self._state = state
        if self._term is None:
            return []
        if before is None:
            self._orders = all_orders(state)
            return []
        changes = order_changes(before, state)
        self._take_over(changes)
        admitted, removed = _registry_changes(before, state)
        # Who is in the registry concerns every node, an order only its own.
        concerned = self._lines.keys() if admitted or removed else changes.keys() & self._lines.keys()
        stamp = self._stamp()
        told: list[ToNode] = []
        for node in sorted(concerned):
            line, own = self._lines[node], changes.get(node) or OrderChanges()
            delta = OrdersDelta(
                after=line.stamp,
                stamp=stamp,
                changed=tuple(own.changed.values()),
                gone=tuple(own.gone),
                admitted=admitted,
                removed=removed,
            )
            line.stamp = stamp
            # What does not fit a frame is asked for as a whole, in parts.
            fits = sum(map(bytes_of, delta.changed)) <= MESSAGE_BYTES
            told.append(ToNode(node=node, message=delta if fits else OrdersConfirmed(stamp=stamp)))
        return told

    def _take_over(self, changes: Mapping[NodeId, OrderChanges]) -> None:
        for node, change in changes.items():
            orders = self._orders.setdefault(node, {})
            for attempt in change.gone:
                del orders[attempt]
            orders |= change.changed
            if not orders:
                del self._orders[node]


def _parts(orders: Iterable[Order], *, taken: int) -> list[tuple[Order, ...]]:
    """At least one; the first has room for what is `taken` of it."""
    parts: list[list[Order]] = [[]]
    for order in orders:
        size = bytes_of(order)
        if taken and taken + size > MESSAGE_BYTES:
            parts.append([])
            taken = 0
        parts[-1].append(order)
        taken += size
    return [tuple(part) for part in parts]


def whose_report(state: ClusterState, report: Reported) -> NodeId | None:
    """The only node that may say so: the one that the assignment names, or, once it is released, had named. None:
    nobody, for it is about an attempt that is over, and maybe of a daemon that was given up for dead."""
    said = report.report
    job = state.jobs.get(said.job)
    if job is None or not 0 <= said.replica < len(job.replicas):
        return None
    replica = job.replicas[said.replica]
    if replica.assignment is not None:
        return replica.assignment.node if replica.assignment.attempt == said.attempt else None
    return replica.last_node if replica.attempts == said.attempt else None


def _registry_changes(before: ClusterState, after: ClusterState) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
    if before.nodes is after.nodes or before.nodes.keys() == after.nodes.keys():
        return (), ()
    return (
        tuple(sorted(after.nodes.keys() - before.nodes.keys())),
        tuple(sorted(before.nodes.keys() - after.nodes.keys())),
    )
