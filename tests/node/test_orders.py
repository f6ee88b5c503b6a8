"""Orders from a real log to a real file on a node, and reports back; only the link between the two is short."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gpulayer.core.cluster.commands import CreateCluster, ReplicaAccepted, ReplicaEnded, WithdrawUnaccepted
from gpulayer.core.leader import as_command
from gpulayer.core.orders.messages import FollowOrders, LeaderToNode, NodeToLeader, OrdersConfirmed
from gpulayer.core.placement.plan import plan
from gpulayer.model.errors import Refused, Unreachable
from gpulayer.model.ids import JobId, NodeId
from gpulayer.model.replica import Reason
from gpulayer.node.orders import OrdersGiven, OrdersHere
from gpulayer.node.voter import SoleVoter, open_voter
from gpulayer.runtime import failpoints
from gpulayer.runtime.order_store import open_order_store
from tests.core.cluster.states import admit, batch, gpu, submit, succeeded

LEADER, HERE = NodeId("n-leader"), NodeId("n-n1")


class Pair:
    """A voter that leads, and a node with a link to it that can be cut."""

    def __init__(self, voter: SoleVoter, directory: Path) -> None:
        self.voter = voter
        self.told: list[FollowOrders] = []
        self.registry: frozenset[NodeId] = frozenset()
        self.is_cut = False
        self.drops: Callable[[LeaderToNode], bool] = lambda _: False
        self.asleep = 0.0
        self.store, recovered = open_order_store(directory)
        self.here = OrdersHere(
            self.store,
            recovered.heard,
            send=self._to_leader,
            on_orders=self.told.append,
            on_registry=self._learn,
            uptime=lambda: time.monotonic() + self.asleep,
        )
        self.given = OrdersGiven(send=self._to_node, propose=voter.propose_nowait, state=lambda: voter.state.value)

    def _to_leader(self, node: NodeId, message: NodeToLeader) -> None:
        assert node == LEADER
        if not self.is_cut:
            self.given.from_node(HERE, message)

    def _to_node(self, node: NodeId, message: LeaderToNode) -> None:
        if node == HERE and not self.is_cut and not self.drops(message):
            self.here.from_leader(LEADER, message)

    def _learn(self, nodes: frozenset[NodeId]) -> None:
        self.registry = nodes

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.given.run)
            await nursery.start(self.here.run)
            nursery.start_soon(self._follow_state)

    async def _follow_state(self) -> None:
        seen = self.voter.state.value
        while True:
            seen = await self.voter.state.wait_for(lambda value: value is not seen)  # noqa: B023
            self.given.advanced(seen)

    def lead(self) -> None:
        self.given.led(self.voter.term)
        self.here.leader_reached(LEADER)

    async def place(self, name: str = "train") -> None:
        await self.voter.propose(submit(batch(name, gpus=1)))
        await self.voter.propose(as_command(plan(self.voter.state.value, {})))


@asynccontextmanager
async def pair(directory: Path) -> AsyncIterator[Pair]:
    async def nothing() -> None: ...

    voter = await open_voter(
        directory / "log.db",
        node_id=LEADER,
        now_utc=time.time,
        snapshot_every=10_000,
        disk_free_min_mib=1,
        before_snapshot=nothing,
        on_events=lambda _: None,
    )
    made = Pair(voter, directory)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(voter.run)
            if not voter.state.value.cluster_id:
                await voter.propose(CreateCluster(cluster_id="c-1"))
                await voter.propose(admit("n1", gpu("g0"), gpu("g1")))
            nursery.start_soon(made.run)
            yield made
            nursery.cancel_scope.cancel()
    finally:
        made.store.close()
        await voter.store.close()


async def wait_for(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.005)


async def test_what_is_placed_on_a_node_becomes_its_order_and_its_end_reaches_the_log(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await wait_for(lambda: both.here.is_current)
        assert both.registry == {HERE}
        await both.place()
        await wait_for(lambda: bool(both.here.orders))
        assert both.told[-1].is_current
        [(attempt, order)] = both.here.orders.items()
        assert both.here.devices() == {attempt: order.assignment.devices}
        assert not both.here.is_withdrawn(attempt)
        await wait_for(lambda: both.given.heard_by(HERE) == both.here.stamp)
        ended = ReplicaEnded(job=attempt.replica.job, replica=0, attempt=1, outcome=succeeded(), released=True)
        await both.here.propose_report(ended)
        await wait_for(lambda: not both.here.orders)
        assert both.here.is_withdrawn(attempt)


async def test_after_a_restart_what_was_kept_is_told_first_and_is_not_current(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await both.place()
        await wait_for(lambda: bool(both.here.orders))
        kept = both.told[-1].orders
    async with pair(tmp_path) as both:
        assert tuple(both.here.orders.values()) == kept
        await wait_for(lambda: bool(both.told))
        assert both.told == [FollowOrders(orders=kept, is_current=False)]
        both.lead()
        await wait_for(lambda: both.here.is_current)
        assert both.told[-1] == FollowOrders(orders=kept, is_current=True)


async def test_nothing_is_acted_on_while_the_disk_refuses_and_all_of_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await wait_for(lambda: both.here.is_current)
        with monkeypatch.context() as broken:
            armed = failpoints.parse("orders.before_sync=error,orders.before_replace=error")
            broken.setattr(failpoints, "_armed", armed)
            await both.place("a")
            await both.place("b")
            await wait_for(lambda: bool(both.here.warnings))
            assert "cannot keep the orders of this node" in both.here.warnings[0]
            assert not both.here.orders
        await wait_for(lambda: len(both.here.orders) == 2)
        assert both.here.is_current
        assert both.here.warnings == ()


async def test_a_pause_of_the_host_makes_it_ask_before_it_acts_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await wait_for(lambda: both.here.is_current)
        before = len(both.told)
        both.asleep += 20.0
        await wait_for(lambda: len(both.told) >= before + 2)
        assert [told.is_current for told in both.told[before:]] == [False, True]


async def test_a_message_that_waited_while_this_process_stood_still_is_heard_after_the_pause(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await wait_for(lambda: both.here.is_current)
        before = len(both.told)
        # The link's task may come first when all of them wake.
        both.asleep += 20.0
        both.here.from_leader(LEADER, OrdersConfirmed(stamp=both.here.stamp))
        await wait_for(lambda: len(both.told) > before)
        assert not both.told[before].is_current


async def test_without_confirmations_orders_are_not_current_after_three_seconds(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await wait_for(lambda: both.here.is_current)
        await trio.sleep(3.5)
        assert both.here.is_current
        both.is_cut = True
        await wait_for(lambda: not both.here.is_current)
        await both.place()
        assert not both.here.orders
        both.is_cut = False
        await wait_for(lambda: bool(both.here.orders) and both.here.is_current)


async def test_a_delta_that_was_lost_is_noticed_by_the_next_confirmation(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await wait_for(lambda: both.here.is_current)
        both.drops = lambda message: not isinstance(message, OrdersConfirmed)
        await both.place()
        await wait_for(lambda: not both.here.is_current)
        both.drops = lambda _: False
        await wait_for(lambda: bool(both.here.orders) and both.here.is_current)


async def test_a_report_of_a_node_that_the_assignment_does_not_name_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        await both.voter.propose(admit("n2"))
        both.lead()
        await both.place()
        await wait_for(lambda: bool(both.here.orders))
        await both.voter.propose(submit(batch("other")))
        late = ReplicaEnded(job=JobId("j-train"), replica=0, attempt=2, outcome=succeeded(), released=True)
        with pytest.raises(Refused, match="not any more, one of n-n1"):
            await both.here.propose_report(late)
        assert both.voter.state.value.jobs[JobId("j-train")].outcome is None


async def test_a_recalled_order_is_answered_through_the_log(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await both.place()
        await wait_for(lambda: bool(both.here.orders))
        reason = Reason(code="not_accepted", text="n1 said nothing")
        await both.voter.propose(WithdrawUnaccepted(job=JobId("j-train"), replica=0, attempt=1, reason=reason))

        def recalled() -> bool:
            return any(order.assignment.recalled is not None for order in both.here.orders.values())

        await wait_for(recalled)
        await both.here.propose_report(ReplicaAccepted(job=JobId("j-train"), replica=0, attempt=1))
        await wait_for(lambda: not recalled())


async def test_a_report_without_a_leader_fails_at_once_and_one_over_a_broken_link_with_the_link(tmp_path: Path) -> None:
    report = ReplicaAccepted(job=JobId("j-train"), replica=0, attempt=1)
    async with pair(tmp_path) as both:
        with trio.fail_after(1), pytest.raises(Unreachable, match="no leader"):
            await both.here.propose_report(report)
        both.lead()
        both.is_cut = True
        sent = both.here.report_nowait(report)
        both.here.leader_unreached()
        with trio.fail_after(1), pytest.raises(Unreachable, match="link to the leader broke"):
            await sent.wait()


async def test_who_does_not_lead_takes_no_reports(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.lead()
        await both.place()
        await wait_for(lambda: bool(both.here.orders))
        both.given.leadership_lost()
        await wait_for(lambda: not both.here.is_current)
        with pytest.raises(Unreachable, match="does not lead"):
            await both.here.propose_report(ReplicaAccepted(job=JobId("j-train"), replica=0, attempt=1))
