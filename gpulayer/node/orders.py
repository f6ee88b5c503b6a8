"""Orders between a node and its leader, on both sides: what the machines of core/orders hear, and what they want done.

`OrdersHere` runs on every node, `OrdersGiven` on one that may lead. Neither knows links: the daemon hands in what comes
from the other side, and `send` is called with what goes there. A node that leads is no other case: what one of its
halves sends to this node is handed to the other one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, assert_never

import structlog
import trio

from gpulayer.core.cluster.commands import ReplicaAccepted, ReplicaEnded, ReplicaRefused, ReplicaReleased
from gpulayer.core.leader import StateAdvanced
from gpulayer.core.orders.book import (
    Asked,
    BookEvent,
    Heard,
    LeadershipLost,
    Led,
    NodeGone,
    OrderBook,
    ToNode,
    whose_report,
)
from gpulayer.core.orders.follower import PAUSE_SECONDS_MAX, Follower
from gpulayer.core.orders.messages import (
    FollowerEffect,
    FollowerEvent,
    FollowOrders,
    FromLeader,
    HeardOrders,
    LeaderReached,
    LeaderToNode,
    LeaderUnreached,
    NodeToLeader,
    OrdersAsked,
    OrdersHeard,
    OrdersPersisted,
    OrderStamp,
    Paused,
    Persist,
    RegistryLearned,
    ReportAnswered,
    Reported,
    ToLeader,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import BY_CODE, GpulayerError, Refused, StorageFailed, Unreachable
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.replica import DeviceShare
from gpulayer.runtime.drive import Inbox, drive
from gpulayer.runtime.order_store import OrderStore

log = structlog.get_logger()

LogReport: TypeAlias = ReplicaEnded | ReplicaReleased | ReplicaRefused | ReplicaAccepted

# How often this process looks whether it stood still.
BEAT_SECONDS = 0.5
# A disk that refuses is asked again; what it is asked to keep is the newest by then.
PERSIST_AGAIN_SECONDS = 1.0
# The agent says everything that is owed again after as long.
REPORT_SECONDS = 5.0
# Reports of one node that wait for the disk of the leader; it says what is refused again.
REPORTS_WAITING_MAX = 1024
# Linux's goes on while the machine sleeps.
UPTIME_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


# --- the node's side --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SentReport:
    """A report on its way to the log."""

    report: LogReport
    _answered: trio.Event = field(default_factory=trio.Event)
    _error: GpulayerError | None = None

    def resolve(self, error: GpulayerError | None) -> None:
        if not self._answered.is_set():
            self._error = error
            self._answered.set()

    async def wait(self) -> None:
        """Until it is in the log. Raises what the leader's log said against it; Unreachable: it is not known."""
        with trio.move_on_after(REPORT_SECONDS):
            await self._answered.wait()
        if not self._answered.is_set():
            raise Unreachable(
                f"the leader has not answered for {REPORT_SECONDS:g} s", hint="it is reported again by itself"
            )
        if self._error is not None:
            raise self._error


class OrdersHere:
    """The orders of this node. `run` it once; everything else never waits.

    send(leader, message)   to the leader; dropping it is allowed, for it is said again
    on_orders(told)         for the agent, in order: what to do, and whether it is current
    on_registry(nodes)      who may exist
    """

    def __init__(
        self,
        store: OrderStore,
        heard: HeardOrders | None,
        *,
        send: Callable[[NodeId, NodeToLeader], None],
        on_orders: Callable[[FollowOrders], None],
        on_registry: Callable[[frozenset[NodeId]], None],
        uptime: Callable[[], float] = lambda: time.clock_gettime(UPTIME_CLOCK),
    ) -> None:
        """`heard`: what the store has recovered. `uptime`: of the machine, in seconds, its sleep included."""
        self._store = store
        self._send, self._on_orders, self._on_registry = send, on_orders, on_registry
        self._uptime = uptime
        self._follower = Follower(heard)
        self._inbox: Inbox[FollowerEvent] = Inbox()
        self._orders: Mapping[AttemptId, Order] = _by_attempt(heard.orders if heard is not None else ())
        self._to_write, self._write_wanted = trio.open_memory_channel[HeardOrders](1)
        self._leader: NodeId | None = None
        self._serial = 0
        self._reports: dict[int, SentReport] = {}
        self._beat = uptime()
        self._trouble = ""

    # --- what is known --------------------------------------------------------------------------------------------

    @property
    def orders(self) -> Mapping[AttemptId, Order]:
        """What the agent was told last, and before that, what was kept. Durable."""
        return self._orders

    @property
    def is_current(self) -> bool:
        return self._follower.is_current

    @property
    def stamp(self) -> OrderStamp:
        return self._follower.stamp

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the operator should know, in a sentence each."""
        return tuple(text for text in (self._follower.refused, self._trouble) if text)

    def is_withdrawn(self, attempt: AttemptId) -> bool:
        """Whether nothing of it is wanted here any more."""
        order = self._orders.get(attempt)
        return order is None or order.assignment.withdrawn is not None

    def devices(self) -> Mapping[AttemptId, tuple[DeviceShare, ...]]:
        """What of this node's devices is held by orders."""
        return {id: order.assignment.devices for id, order in self._orders.items() if order.assignment.devices}

    # --- what is heard --------------------------------------------------------------------------------------------

    def leader_reached(self, node: NodeId) -> None:
        """A link to it stands. Said for every new one, also to the same leader."""
        self._give_up_reports()
        self._leader = node
        self._inbox.put_nowait(LeaderReached(node=node))

    def leader_unreached(self) -> None:
        self._give_up_reports()
        self._leader = None
        self._inbox.put_nowait(LeaderUnreached())

    def from_leader(self, node: NodeId, message: LeaderToNode) -> None:
        """One message of `node`, whom its certificate has shown. Nobody but the leader is listened to."""
        if isinstance(message, ReportAnswered):
            sent = self._reports.pop(message.serial, None) if node == self._leader else None
            if sent is not None:
                sent.resolve(_error_of(message))
            return
        # What has waited while we stood still must not be taken for news.
        self._look_at_clock()
        self._inbox.put_nowait(FromLeader(node=node, message=message))

    # --- reports --------------------------------------------------------------------------------------------------

    def report_nowait(self, report: LogReport) -> SentReport:
        """Send a report: the order of the calls is the order at the leader. The answer is the report's to tell."""
        sent = SentReport(report)
        if self._leader is None:
            sent.resolve(Unreachable("no leader is reached", hint="it is reported again by itself"))
            return sent
        self._serial += 1
        self._reports[self._serial] = sent
        while len(self._reports) > REPORTS_WAITING_MAX:
            oldest = self._reports.pop(next(iter(self._reports)))
            oldest.resolve(Unreachable("too many reports wait", hint="it is reported again by itself"))
        self._send(self._leader, Reported(serial=self._serial, report=report))
        return sent

    async def propose_report(self, report: LogReport) -> None:
        """Send it, and wait until it is in the log; errors like SentReport.wait."""
        await self.report_nowait(report).wait()

    def _give_up_reports(self) -> None:
        """Their answers went over a link that is gone."""
        reports, self._reports = self._reports, {}
        for sent in reports.values():
            sent.resolve(Unreachable("the link to the leader broke", hint="it is reported again by itself"))

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For good. Started: the agent has been told what was kept."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._watch_clock)
            nursery.start_soon(drive, self._follower, self._inbox, self._perform)
            task_status.started()

    def _perform(self, effect: FollowerEffect) -> None:
        match effect:
            case ToLeader(node=node, message=message):
                self._send(node, message)
            case Persist(stamp=stamp, orders=orders, registry=registry):
                # One at a time is on its way: there is always room.
                self._to_write.send_nowait(HeardOrders(stamp=stamp, orders=orders, registry=registry))
            case FollowOrders(orders=orders):
                self._orders = _by_attempt(orders)
                self._on_orders(effect)
            case RegistryLearned(nodes=nodes):
                self._on_registry(nodes)
            case _:
                assert_never(effect)

    async def _write(self) -> None:
        async for heard in self._write_wanted:
            while True:
                try:
                    await trio.to_thread.run_sync(self._store.persist, heard)
                    break
                except StorageFailed as error:
                    if error.message != self._trouble:
                        log.error("orders.not_kept", reason=error.message, hint=error.hint)
                    self._trouble = error.message
                await trio.sleep(PERSIST_AGAIN_SECONDS)
            self._trouble = ""
            self._inbox.put_nowait(OrdersPersisted(stamp=heard.stamp))

    async def _watch_clock(self) -> None:
        while True:
            await trio.sleep(BEAT_SECONDS)
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        now = self._uptime()
        stood_still, self._beat = now - self._beat - BEAT_SECONDS, now
        if stood_still > PAUSE_SECONDS_MAX:
            self._inbox.put_nowait(Paused(seconds=stood_still))


def _by_attempt(orders: tuple[Order, ...]) -> Mapping[AttemptId, Order]:
    return {order.assignment.id: order for order in orders}


def _error_of(answer: ReportAnswered) -> GpulayerError | None:
    if not answer.code:
        return None
    return BY_CODE.get(answer.code, Refused)(answer.message, code=answer.code)


# --- the leader's side ------------------------------------------------------------------------------------------------


class Proposed(Protocol):
    """A command on its way into the log."""

    def wait(self) -> Awaitable[object]:
        """Until it is applied; raises a GpulayerError that says why it is not."""


class OrdersGiven:
    """What a leader tells the nodes, and hears from them. `run` it once; everything else never waits.

    send(node, message)   over a link to it; where there is none it may be dropped, for the node asks again
    propose(report)       into the log, in the order of the calls
    state()               the newest that is applied
    """

    def __init__(
        self,
        *,
        send: Callable[[NodeId, LeaderToNode], None],
        propose: Callable[[LogReport], Proposed],
        state: Callable[[], ClusterState],
    ) -> None:
        self._send, self._propose, self._state = send, propose, state
        self._book = OrderBook()
        self._inbox: Inbox[BookEvent] = Inbox()
        self._is_leading = False
        self._waiting: Counter[NodeId] = Counter()
        self._nursery: trio.Nursery | None = None

    def led(self, term: int) -> None:
        """This node leads, and its log is applied up to its election."""
        self._is_leading = True
        self._inbox.put_nowait(StateAdvanced(state=self._state()))
        self._inbox.put_nowait(Led(term=term))

    def leadership_lost(self, leader: NodeId | None = None) -> None:
        self._is_leading = False
        self._inbox.put_nowait(LeadershipLost(leader=leader))

    def advanced(self, state: ClusterState) -> None:
        """A newer state is applied. Some may be skipped."""
        self._inbox.put_nowait(StateAdvanced(state=state))

    def node_gone(self, node: NodeId) -> None:
        """The link to it is down."""
        self._inbox.put_nowait(NodeGone(node=node))

    def heard_by(self, node: NodeId) -> OrderStamp | None:
        """What that node has made durable, as far as it has said."""
        return self._book.heard(node)

    def from_node(self, node: NodeId, message: NodeToLeader) -> None:
        """One message of `node`, whom its certificate has shown."""
        match message:
            case OrdersAsked():
                # What is answered must be no older than the asking.
                self._inbox.put_nowait(StateAdvanced(state=self._state()))
                self._inbox.put_nowait(Asked(node=node, message=message))
            case OrdersHeard():
                self._inbox.put_nowait(Heard(node=node, message=message))
            case Reported():
                self._reported(node, message)
            case _:
                assert_never(message)

    async def run(self) -> None:
        """For good."""
        async with trio.open_nursery() as self._nursery:
            await drive(self._book, self._inbox, self._perform)

    def _perform(self, effect: ToNode) -> None:
        self._send(effect.node, effect.message)

    def _reported(self, node: NodeId, message: Reported) -> None:
        if not self._is_leading or self._nursery is None:
            self._answer(node, message, code="unreachable", text="this node does not lead")
        elif whose_report(self._state(), message) != node:
            # Late words of a daemon that was given up, or a node that speaks for another.
            text = f"the attempt is not, or not any more, one of {node}"
            log.warning("report.refused", node=node, report=type(message.report).__name__, job=message.report.job)
            self._answer(node, message, code="refused", text=text)
        elif self._waiting[node] >= REPORTS_WAITING_MAX:
            self._answer(node, message, code="unreachable", text=f"{REPORTS_WAITING_MAX} of its reports wait already")
        else:
            self._waiting[node] += 1
            self._nursery.start_soon(self._committed, node, message, self._propose(message.report))

    async def _committed(self, node: NodeId, message: Reported, proposal: Proposed) -> None:
        try:
            await proposal.wait()
            self._answer(node, message)
        except GpulayerError as error:
            self._answer(node, message, code=error.code, text=error.message)
        finally:
            self._waiting[node] -= 1
            if not self._waiting[node]:
                del self._waiting[node]

    def _answer(self, node: NodeId, message: Reported, *, code: str = "", text: str = "") -> None:
        self._send(node, ReportAnswered(serial=message.serial, code=code, message=text))
