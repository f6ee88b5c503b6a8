"""How a node learns what it shall run, and knows that it is current: what leader and nodes say to one another.

Messages go over the peer link between a node and the leader; they are wire format (wire/peer.py makes bytes of them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpulayer.core.base import Tick
from gpulayer.core.cluster.commands import ReplicaAccepted, ReplicaEnded, ReplicaRefused, ReplicaReleased
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import AttemptId, NodeId


@dataclass(frozen=True, slots=True, order=True)
class OrderStamp:
    """Where an order comes from. A node acts on none that is lower than the highest it has heard."""

    generation: int
    term: int
    index: int


# --- node -> leader -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersAsked:
    """After connecting, after a change of leader or term, after a gap, and after a pause of one's own above 1 s."""

    serial: int
    """Of this asking; the answer carries it."""
    heard: OrderStamp


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersHeard:
    """These have been made durable here."""

    stamp: OrderStamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A report for the log. `serial` pairs it with its ReportAnswered."""

    serial: int
    report: ReplicaEnded | ReplicaReleased | ReplicaRefused | ReplicaAccepted


# --- leader -> node -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The answer to OrdersAsked, from a state that was current when the asking arrived: all of them, in as many parts
    as it takes. A part is nothing to act on without the others."""

    serial: int
    stamp: OrderStamp
    orders: tuple[Order, ...]
    registry: tuple[NodeId, ...] = ()
    """In the first part."""
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersDelta:
    """What changed between two indexes. A node that is not at `after` asks for all."""

    after: OrderStamp
    stamp: OrderStamp
    changed: tuple[Order, ...] = ()
    gone: tuple[AttemptId, ...] = ()
    admitted: tuple[NodeId, ...] = ()
    removed: tuple[NodeId, ...] = ()
    """Of the registry: what changed and not the whole, for with n nodes joining that would be sent n² times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersConfirmed:
    """I lead still, and nothing changed for you since `stamp`. Said once a second."""

    stamp: OrderStamp


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersDenied:
    """I do not lead. `leader`: who does, as far as I know."""

    serial: int
    leader: NodeId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswered:
    """`code` empty: it is in the log. Else why not; the node says it again later."""

    serial: int
    code: str = ""
    message: str = ""


NodeToLeader: TypeAlias = OrdersAsked | OrdersHeard | Reported
LeaderToNode: TypeAlias = Orders | OrdersDelta | OrdersConfirmed | OrdersDenied | ReportAnswered


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardOrders:
    """What a node holds of its orders, and keeps over its restarts. `is_whole` False: its copy was damaged, and only
    the stamp, below which it must believe nobody, is certain."""

    stamp: OrderStamp
    orders: tuple[Order, ...] = ()
    registry: tuple[NodeId, ...] = ()
    is_whole: bool = True


# --- the node's machine: events and effects -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderReached:
    """A link to the leader stands (again)."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderUnreached:
    """There is no leader, or no link to it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromLeader:
    """One message of it."""

    node: NodeId
    message: Orders | OrdersDelta | OrdersConfirmed | OrdersDenied


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersPersisted:
    """What Persist asked for is durable."""

    stamp: OrderStamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """This process, or its machine, stood still for so long."""

    seconds: float


FollowerEvent: TypeAlias = LeaderReached | LeaderUnreached | FromLeader | OrdersPersisted | Paused | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class ToLeader:
    node: NodeId
    message: OrdersAsked | OrdersHeard


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make the stamp and the orders durable; then say OrdersPersisted."""

    stamp: OrderStamp
    orders: tuple[Order, ...]
    registry: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOrders:
    """For the agent (OrdersChanged). `is_current` False: look after what runs by its policy, start and stop nothing."""

    orders: tuple[Order, ...]
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLearned:
    nodes: frozenset[NodeId]


FollowerEffect: TypeAlias = ToLeader | Persist | FollowOrders | RegistryLearned
