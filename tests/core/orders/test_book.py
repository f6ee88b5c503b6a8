"""What a leader tells nodes: all to who asks, afterwards what changed, and a word each second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulayer.core.base import Tick
from gpulayer.core.cluster.commands import RemoveNode, ReplicaEnded, ReplicaRefused, ReplicaReleased, StopJob
from gpulayer.core.leader import StateAdvanced
from gpulayer.core.orders import book as book_module
from gpulayer.core.orders import changes
from gpulayer.core.orders.book import (
    CONFIRM_BATCH,
    CONFIRM_SECONDS,
    MESSAGE_BYTES,
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
from gpulayer.core.orders.changes import all_orders, orders_of
from gpulayer.core.orders.messages import (
    Orders,
    OrdersAsked,
    OrdersConfirmed,
    OrdersDelta,
    OrdersDenied,
    OrdersHeard,
    OrderStamp,
    Reported,
)
from gpulayer.model.ids import JobId, NodeId
from gpulayer.model.replica import Reason
from gpulayer.model.units import NEVER, Instant
from tests.core.cluster.states import CANCELLED, Cluster, admit, batch, ended, gpu, service, submit, succeeded

N1, N2 = NodeId("n-n1"), NodeId("n-n2")
TERM = 4


class Led_:
    """A book with its cluster: what is committed is told."""

    def __init__(self, *commands: Any) -> None:
        self.cluster = Cluster(admit("n1", gpu("g1")), admit("n2", gpu("g2")), *commands)
        self.book = OrderBook()
        self.now = 100.0
        self.told: list[ToNode] = []
        self.step(StateAdvanced(state=self.cluster.state))
        self.step(Led(term=TERM))

    def step(self, event: BookEvent) -> list[ToNode]:
        self.told = self.book.step(event, Instant(self.now))
        self.book.check()
        return self.told

    def do(self, *commands: Any) -> list[ToNode]:
        self.cluster.do(*commands)
        return self.step(StateAdvanced(state=self.cluster.state))

    def plan(self) -> list[ToNode]:
        self.cluster.plan()
        return self.step(StateAdvanced(state=self.cluster.state))

    def ask(self, node: NodeId, serial: int = 1) -> list[ToNode]:
        return self.step(Asked(node=node, message=OrdersAsked(serial=serial, heard=OrderStamp(0, 0, 0))))

    @property
    def stamp(self) -> OrderStamp:
        return OrderStamp(1, TERM, self.cluster.state.index)


def test_who_asks_hears_its_own_orders_and_the_registry() -> None:
    led = Led_(submit(service(replicas=2, gpus=1)))
    led.plan()
    [told] = led.ask(N1, serial=7)
    orders = orders_of(led.cluster.state, N1)
    assert [order.assignment.node for order in orders] == [N1]
    assert told == ToNode(node=N1, message=Orders(serial=7, stamp=led.stamp, orders=orders, registry=(N1, N2)))


def test_only_nodes_whose_orders_changed_are_told_and_each_what_changed() -> None:
    led = Led_()
    led.ask(N1)
    led.ask(N2)
    asked_at = led.stamp
    assert led.do(submit(service(gpus=1))) == []
    [told] = led.plan()
    chosen = led.cluster.job().replicas[0].assignment
    assert chosen is not None
    assert told.node == chosen.node
    assert told.message == OrdersDelta(
        after=asked_at, stamp=led.stamp, changed=orders_of(led.cluster.state, chosen.node)
    )
    placed_at = led.stamp
    [told] = led.do(StopJob(job=JobId("j-web"), reason=CANCELLED))
    assert isinstance(told.message, OrdersDelta)
    assert told.message.after == placed_at
    assert [order.assignment.withdrawn for order in told.message.changed] == [CANCELLED]
    [told] = led.do(ended(replace(succeeded(), result="cancelled"), released=True))
    assert isinstance(told.message, OrdersDelta)
    assert told.message.gone == (chosen.id,)


def test_an_end_that_is_not_released_is_told_as_known() -> None:
    led = Led_(submit(batch(gpus=1)))
    led.plan()
    node = led.cluster.job("j-train").replicas[0].last_node
    assert node is not None
    led.ask(node)
    [told] = led.do(ended(succeeded(), job="j-train", released=False))
    assert isinstance(told.message, OrdersDelta)
    assert [order.outcome_known for order in told.message.changed] == [True]
    [told] = led.do(ReplicaReleased(job=JobId("j-train"), replica=0, attempt=1))
    assert isinstance(told.message, OrdersDelta)
    assert len(told.message.gone) == 1


def test_states_that_were_skipped_are_told_as_one() -> None:
    led = Led_(submit(service(gpus=1)))
    led.ask(N1)
    led.ask(N2)
    led.cluster.plan()
    node = led.cluster.job().replicas[0].last_node
    led.cluster.do(StopJob(job=JobId("j-web"), reason=CANCELLED))
    [told] = led.do(submit(service("other")))
    assert told.node == node
    assert isinstance(told.message, OrdersDelta)
    assert [order.assignment.withdrawn for order in told.message.changed] == [CANCELLED]


def test_who_joins_and_who_leaves_concerns_every_node() -> None:
    led = Led_()
    led.ask(N1)
    led.ask(N2)
    told = led.do(admit("n3"))
    assert [(each.node, each.message.admitted) for each in told if isinstance(each.message, OrdersDelta)] == [
        (N1, (NodeId("n-n3"),)),
        (N2, (NodeId("n-n3"),)),
    ]
    told = led.do(RemoveNode(node=NodeId("n-n3")))
    assert [each.message.removed for each in told if isinstance(each.message, OrdersDelta)] == [(NodeId("n-n3"),)] * 2


def test_a_change_of_devices_is_no_order() -> None:
    led = Led_()
    led.ask(N1)
    assert led.do(admit("n1", gpu("g1"), gpu("g9"))) == []


def test_each_is_confirmed_once_a_second_with_what_it_was_told_last() -> None:
    led = Led_()
    led.ask(N1)
    asked_at = led.stamp
    led.do(submit(service("other", gpus=9)))
    led.now += 0.5
    led.ask(N2)
    assert led.book.deadline == 100.0 + CONFIRM_SECONDS
    led.now = led.book.deadline
    assert led.step(Tick()) == [ToNode(node=N1, message=OrdersConfirmed(stamp=asked_at))]
    led.now = led.book.deadline
    assert led.step(Tick()) == [ToNode(node=N2, message=OrdersConfirmed(stamp=led.stamp))]
    assert led.step(Tick()) == []


def test_many_confirmations_are_said_in_turns_that_let_others_run() -> None:
    led = Led_()
    for number in range(200):
        led.ask(NodeId(f"n-{number:03}"))
    led.now += CONFIRM_SECONDS
    seen: list[NodeId] = []
    while told := led.step(Tick()):
        assert len(told) <= CONFIRM_BATCH
        seen += [each.node for each in told]
    assert len(seen) == len(set(seen)) == 200
    assert led.book.deadline == led.now + CONFIRM_SECONDS


def test_a_node_that_asks_often_is_confirmed_as_often_as_others() -> None:
    led = Led_()
    for serial in range(50):
        led.ask(N1, serial)
    led.now += CONFIRM_SECONDS
    assert len(led.step(Tick())) == 1


def test_a_node_without_a_link_is_forgotten_until_it_asks() -> None:
    led = Led_(submit(service(gpus=1)))
    led.ask(N1)
    led.ask(N2)
    for node in (N1, N2):
        led.step(NodeGone(node=node))
    assert led.plan() == []
    led.now += CONFIRM_SECONDS
    assert led.step(Tick()) == []
    assert led.book.deadline == NEVER
    [told] = led.ask(N1)
    assert isinstance(told.message, Orders)


def test_who_does_not_lead_denies_and_says_who_does() -> None:
    led = Led_()
    led.ask(N1, serial=5)
    assert led.step(LeadershipLost(leader=N2)) == [ToNode(node=N1, message=OrdersDenied(serial=5, leader=N2))]
    assert led.ask(N1, serial=6) == [ToNode(node=N1, message=OrdersDenied(serial=6, leader=N2))]
    assert led.do(submit(service(gpus=1))) == []
    assert led.plan() == []
    led.step(Led(term=TERM + 2))
    [told] = [
        each for node in (N1, N2) for each in led.ask(node) if isinstance(each.message, Orders) and each.message.orders
    ]
    assert isinstance(told.message, Orders)
    assert told.message.stamp == OrderStamp(1, TERM + 2, led.cluster.state.index)


def test_before_it_has_a_state_nobody_is_told_anything() -> None:
    book = OrderBook()
    [told] = book.step(Asked(node=N1, message=OrdersAsked(serial=1, heard=OrderStamp(0, 0, 0))), Instant(0))
    assert told.message == OrdersDenied(serial=1)
    book.step(Led(term=1), Instant(0))
    book.check()


def test_what_a_node_has_made_durable_is_known() -> None:
    led = Led_()
    assert led.book.heard(N1) is None
    led.ask(N1)
    led.step(Heard(node=N1, message=OrdersHeard(stamp=led.stamp)))
    led.step(Heard(node=N1, message=OrdersHeard(stamp=OrderStamp(1, TERM, 1))))
    assert led.book.heard(N1) == led.stamp


def big(name: str) -> Any:
    return service(name, env=tuple((f"V{number}", "x" * 100_000) for number in range(4)))


def test_orders_that_fit_no_message_are_answered_in_parts_and_never_in_a_delta() -> None:
    led = Led_(*(submit(big(f"b{number}")) for number in range(4)), admit("n2"), RemoveNode(node=N2))
    led.ask(N1)
    asked_at = led.stamp
    told = led.plan()
    # It asks when it hears of a stamp that it was not told of.
    assert told == [ToNode(node=N1, message=OrdersConfirmed(stamp=led.stamp))]
    assert led.stamp > asked_at
    answers = [each.message for each in led.ask(N1) if isinstance(each.message, Orders)]
    assert [(answer.part, answer.parts) for answer in answers] == [(part, 4) for part in range(4)]
    assert sum((answer.orders for answer in answers), ()) == orders_of(led.cluster.state, N1)
    assert [bool(answer.registry) for answer in answers] == [True, False, False, False]
    assert MESSAGE_BYTES > 400_000


def test_a_state_costs_what_changed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    led = Led_(submit(service("a", replicas=50)), submit(service("b", replicas=50)))
    looked: list[JobId] = []
    real = changes._order
    monkeypatch.setattr(changes, "_order", lambda job, replica: looked.append(job.id) or real(job, replica))
    monkeypatch.setattr(book_module, "all_orders", None)
    led.book.step(StateAdvanced(state=led.cluster.do(submit(service("c"))).state), Instant(led.now))
    assert looked == ["j-c"]


# --- reports --------------------------------------------------------------------------------------------------------


def report(attempt: int = 1) -> Reported:
    return Reported(
        serial=1,
        report=ReplicaEnded(job=JobId("j-web"), replica=0, attempt=attempt, outcome=succeeded(), released=True),
    )


def test_a_report_is_its_nodes_to_make_and_nobody_elses() -> None:
    cluster = Cluster(admit("n1", gpu("g1")), submit(service(gpus=1)))
    assert whose_report(cluster.state, report()) is None, "it was never placed"
    cluster.plan()
    assert whose_report(cluster.state, report()) == N1
    assert whose_report(cluster.state, report(attempt=2)) is None


def test_a_report_of_an_attempt_that_is_over_is_nobodys() -> None:
    cluster = Cluster(admit("n1", gpu("g1")), submit(service(gpus=1)))
    cluster.plan()
    cluster.do(ReplicaRefused(job=JobId("j-web"), replica=0, attempt=1, reason=Reason(code="device_unavailable")))
    assert whose_report(cluster.state, report()) == N1, "it may say it twice"
    cluster.plan()
    assert whose_report(cluster.state, report()) is None
    assert whose_report(cluster.state, report(attempt=2)) == N1
    assert whose_report(Cluster().state, report()) is None


def test_orders_of_all_nodes_are_those_of_each() -> None:
    led = Led_(submit(service(replicas=2, gpus=1)))
    led.plan()
    assert {node: tuple(orders.values()) for node, orders in all_orders(led.cluster.state).items()} == {
        node: orders_of(led.cluster.state, node) for node in (N1, N2)
    }
