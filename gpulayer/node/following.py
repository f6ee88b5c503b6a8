"""The part of a node that holds no log: what it is told to run, what it reports, whom it passes joining hosts on to.

Every node of a cluster has this half or the other one, node/voting.py; node/place.py holds either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import trio

from gpulayer.core.orders.messages import (
    FollowOrders,
    HeardOrders,
    Orders,
    OrdersConfirmed,
    OrdersDelta,
    OrdersDenied,
    ReportAnswered,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.address import Address
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.node.orders import LogReport, OrdersHere, SentReport
from gpulayer.runtime.order_store import OrderStore
from gpulayer.wire.peer import (
    JoinAccepted,
    JoinForwardAnswered,
    JoinForwarded,
    JoinRejected,
    JoinRequest,
    PeerFrame,
)

log = structlog.get_logger()

JOIN_SECONDS = 15.0
JOINS_MAX = 64


@dataclass(slots=True, eq=False)
class _Joining:
    answered: trio.Event
    answer: JoinAccepted | JoinRejected | None = None


class Following:
    is_voter = False

    def __init__(
        self,
        store: OrderStore,
        heard: HeardOrders | None,
        *,
        cluster_id: str,
        voter: NodeId | None,
        send: Callable[[NodeId, PeerFrame], None],
        on_orders: Callable[[FollowOrders], None],
        on_registry: Callable[[frozenset[NodeId]], None],
    ) -> None:
        self.voter = voter
        self.state = ClusterState(cluster_id=cluster_id)
        """Nothing to answer from: the log is elsewhere."""
        self._send = send
        self._here = OrdersHere(store, heard, send=send, on_orders=on_orders, on_registry=on_registry)
        self._joins: dict[int, _Joining] = {}
        self._serial = 0

    @property
    def orders(self) -> Mapping[AttemptId, Order]:
        return self._here.orders

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._here.warnings

    def is_withdrawn(self, attempt: AttemptId) -> bool:
        return self._here.is_withdrawn(attempt)

    def report_nowait(self, report: LogReport) -> SentReport:
        return self._here.report_nowait(report)

    def link(self, node: NodeId, is_up: bool) -> None:
        """A link to the voter carries orders as long as it stands."""
        if node != self.voter:
            return
        if is_up:
            self._here.leader_reached(node)
        else:
            self._here.leader_unreached()
            for joining in self._joins.values():
                joining.answered.set()

    def from_peer(self, node: NodeId, frame: PeerFrame) -> bool:
        """One frame of a node, whom its certificate has shown; whether it was for this half."""
        match frame:
            case Orders() | OrdersDelta() | OrdersConfirmed() | OrdersDenied() | ReportAnswered():
                self._here.from_leader(node, frame)
            case JoinForwardAnswered(serial=serial, answer=answer) if node == self.voter:
                joining = self._joins.get(serial)
                if joining is not None:
                    joining.answer = answer
                    joining.answered.set()
            case _:
                return False
        return True

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For good. Started: the agent has been told what was kept."""
        await self._here.run(task_status)

    async def admit(self, request: JoinRequest, observed: Address) -> JoinAccepted | JoinRejected:
        """Passed on to the voter."""
        if self.voter is None or len(self._joins) >= JOINS_MAX:
            return _no_leader("does not know the voter" if self.voter is None else f"{JOINS_MAX} hosts join already")
        self._serial += 1
        serial, joining = self._serial, _Joining(trio.Event())
        self._joins[serial] = joining
        try:
            self._send(self.voter, JoinForwarded(serial=serial, observed=observed, request=request))
            with trio.move_on_after(JOIN_SECONDS):
                await joining.answered.wait()
        finally:
            del self._joins[serial]
        return joining.answer or _no_leader("the voter does not answer")


def _no_leader(why: str) -> JoinRejected:
    return JoinRejected(code="no_leader", message=f"nobody can be let in here now: {why}", hint="it is tried again")
