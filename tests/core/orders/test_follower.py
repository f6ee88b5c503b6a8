"""How a node learns what it shall run: nothing before it is durable, nothing from below, nothing new when it is old."""

from __future__ import annotations

from typing import TypeVar

import pytest

from gpulayer.core.base import Tick
from gpulayer.core.orders.follower import ASK_AGAIN_SECONDS, CURRENT_SECONDS, Follower
from gpulayer.core.orders.messages import (
    FollowerEffect,
    FollowerEvent,
    FollowOrders,
    FromLeader,
    HeardOrders,
    LeaderReached,
    LeaderUnreached,
    Orders,
    OrdersAsked,
    OrdersConfirmed,
    OrdersDelta,
    OrdersDenied,
    OrdersHeard,
    OrdersPersisted,
    OrderStamp,
    Paused,
    Persist,
    RegistryLearned,
    ToLeader,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import Assignment
from gpulayer.model.units import NEVER, Instant

E = TypeVar("E")
LEADER, OTHER, HERE = NodeId("n-1"), NodeId("n-2"), NodeId("n-3")


def order(name: str, *, restart_serial: int = 0) -> Order:
    assignment = Assignment(
        replica=ReplicaId(JobId(f"j-{name}"), 0), attempt=1, node=HERE, revision=1, restart_serial=restart_serial
    )
    return Order(assignment=assignment, spec=JobSpec(kind="service", name=name, argv=("serve",)), job_name=name)


def at(index: int, term: int = 1) -> OrderStamp:
    return OrderStamp(1, term, index)


A, B, C = order("a"), order("b"), order("c")


class Node:
    """A follower with its clock and a disk that is done when the test says so."""

    def __init__(self, kept: HeardOrders | None = None) -> None:
        self.follower = Follower(kept)
        self.now = 50.0
        self.effects: list[FollowerEffect] = []
        self.hear(Tick())

    def hear(self, event: FollowerEvent) -> list[FollowerEffect]:
        self.effects = self.follower.step(event, Instant(self.now))
        self.follower.check()
        return self.effects

    def say(
        self, message: Orders | OrdersDelta | OrdersConfirmed | OrdersDenied, node: NodeId = LEADER
    ) -> list[FollowerEffect]:
        return self.hear(FromLeader(node=node, message=message))

    def wait(self, seconds: float) -> list[FollowerEffect]:
        """Ticks only when they are due, and everything that they said."""
        end, told = self.now + seconds, list[FollowerEffect]()
        while self.follower.deadline <= end:
            self.now = max(self.now, self.follower.deadline)
            told += self.hear(Tick())
        self.now, self.effects = end, told
        return told

    def write(self) -> list[FollowerEffect]:
        """The disk does what it was asked last."""
        [wanted] = self.asked(Persist)
        return self.hear(OrdersPersisted(stamp=wanted.stamp))

    def asked(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def serials(self) -> list[int]:
        """Of what was just asked."""
        return [e.message.serial for e in self.asked(ToLeader) if isinstance(e.message, OrdersAsked)]

    def answer(self, *orders: Order, stamp: OrderStamp, registry: tuple[NodeId, ...] = ()) -> list[FollowerEffect]:
        """The leader's, to what was just asked; the disk takes its time."""
        return self.say(Orders(serial=self.serials[-1], stamp=stamp, orders=orders, registry=registry))

    def follow(self, *orders: Order, stamp: OrderStamp) -> None:
        """Reached, answered, durable."""
        self.hear(LeaderReached(node=LEADER))
        self.answer(*orders, stamp=stamp)
        self.write()
        assert self.told == FollowOrders(orders=orders, is_current=True)

    @property
    def told(self) -> FollowOrders | None:
        told = self.asked(FollowOrders)
        return told[-1] if told else None


def test_a_node_that_never_heard_anything_says_so_and_asks_nobody() -> None:
    node = Node()
    assert node.effects == [FollowOrders(orders=(), is_current=False)]
    assert node.follower.deadline == NEVER


def test_orders_are_durable_before_anybody_acts_on_them() -> None:
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    assert node.effects == [ToLeader(node=LEADER, message=OrdersAsked(serial=1, heard=OrderStamp(0, 0, 0)))]
    node.answer(A, stamp=at(7), registry=(LEADER, HERE))
    assert node.asked(Persist) == [Persist(stamp=at(7), orders=(A,), registry=(LEADER, HERE))]
    assert node.asked(RegistryLearned) == [RegistryLearned(nodes=frozenset({LEADER, HERE}))]
    assert node.told is None
    node.hear(OrdersPersisted(stamp=at(7)))
    assert node.effects == [
        ToLeader(node=LEADER, message=OrdersHeard(stamp=at(7))),
        FollowOrders(orders=(A,), is_current=True),
    ]


def test_it_asks_every_second_until_it_is_answered() -> None:
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    node.wait(3.5)
    assert node.serials == [1, 1, 1]
    node.answer(A, stamp=at(7))
    node.write()
    node.say(OrdersConfirmed(stamp=at(7)))
    assert node.wait(CURRENT_SECONDS - 0.1) == []


def test_what_was_kept_is_followed_after_a_restart_but_is_not_current() -> None:
    node = Node(HeardOrders(stamp=at(7), orders=(A,), registry=(LEADER,)))
    assert node.effects == [
        RegistryLearned(nodes=frozenset({LEADER})),
        FollowOrders(orders=(A,), is_current=False),
    ]
    node.hear(LeaderReached(node=LEADER))
    node.answer(A, stamp=at(7), registry=(LEADER,))
    # Nothing is new but that it is current, and the disk has it already.
    assert node.effects == [FollowOrders(orders=(A,), is_current=True)]


@pytest.mark.parametrize("lower", [at(6, term=2), at(99, term=1), OrderStamp(0, 9, 9)])
def test_orders_from_below_the_highest_stamp_are_refused_also_after_a_restart(lower: OrderStamp) -> None:
    """A leader that was away, or a voter put back from a backup, must not start anything."""
    node = Node(HeardOrders(stamp=at(7, term=2), orders=(A,)))
    node.hear(LeaderReached(node=OTHER))
    node.say(Orders(serial=1, stamp=lower, orders=(B,)), node=OTHER)
    assert node.effects == []
    assert "not followed" in node.follower.refused
    node.wait(ASK_AGAIN_SECONDS)
    assert node.serials == [1], "somebody who knows what we know may answer yet"
    node.say(Orders(serial=1, stamp=at(8, term=2), orders=(B,)), node=OTHER)
    node.write()
    assert node.told == FollowOrders(orders=(B,), is_current=True)
    assert node.follower.refused == ""


def test_a_delta_changes_what_it_names_and_is_durable_first() -> None:
    node = Node()
    node.follow(A, B, stamp=at(7))
    changed = order("b", restart_serial=1)
    node.say(OrdersDelta(after=at(7), stamp=at(9), changed=(changed, C), gone=(A.assignment.id,)))
    assert node.asked(Persist) == [Persist(stamp=at(9), orders=(changed, C), registry=())]
    assert node.told is None
    node.write()
    assert node.told == FollowOrders(orders=(changed, C), is_current=True)


def test_the_registry_follows_without_being_sent_whole() -> None:
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    node.answer(stamp=at(7), registry=(LEADER, HERE))
    node.write()
    node.say(OrdersDelta(after=at(7), stamp=at(8), admitted=(OTHER,), removed=(HERE,)))
    assert node.asked(RegistryLearned) == [RegistryLearned(nodes=frozenset({LEADER, OTHER}))]
    node.write()
    assert node.told is None, "the orders are as they were"


def test_a_delta_that_comes_twice_or_late_changes_nothing() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    delta = OrdersDelta(after=at(7), stamp=at(9), changed=(B,))
    node.say(delta)
    node.write()
    assert node.say(delta) == []
    assert node.say(OrdersDelta(after=at(5), stamp=at(7), gone=(A.assignment.id,))) == []
    assert node.say(Orders(serial=0, stamp=at(5), orders=())) == []
    assert node.follower.is_current


def test_a_gap_makes_it_ask_and_is_not_current_until_answered() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.say(OrdersDelta(after=at(8), stamp=at(9), gone=(A.assignment.id,)))
    assert node.told == FollowOrders(orders=(A,), is_current=False)
    assert len(node.serials) == 1
    node.answer(B, stamp=at(9))
    node.write()
    assert node.told == FollowOrders(orders=(B,), is_current=True)


def test_a_confirmation_of_what_never_came_is_a_gap() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.say(OrdersConfirmed(stamp=at(8)))
    assert node.told == FollowOrders(orders=(A,), is_current=False)
    assert len(node.serials) == 1


def test_confirmations_keep_it_current_and_three_seconds_without_one_end_it() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    for _ in range(5):
        assert node.wait(1.0) == []
        node.say(OrdersConfirmed(stamp=at(7)))
    node.wait(CURRENT_SECONDS)
    assert node.told == FollowOrders(orders=(A,), is_current=False)
    assert len(node.serials) == 1
    # It was on its way for as long: it says nothing about now.
    node.say(OrdersConfirmed(stamp=at(7)))
    assert node.told is None
    node.wait(ASK_AGAIN_SECONDS)
    node.answer(A, stamp=at(7))
    assert node.told == FollowOrders(orders=(A,), is_current=True)


def test_deltas_that_waited_in_a_buffer_are_not_acted_on_after_a_pause() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.now += 2.0
    node.hear(Paused(seconds=2.0))
    assert node.told == FollowOrders(orders=(A,), is_current=False)
    serial = node.serials
    node.say(OrdersDelta(after=at(7), stamp=at(9), changed=(B,)))
    node.say(OrdersConfirmed(stamp=at(9)))
    assert node.effects == []
    node.say(Orders(serial=serial[0], stamp=at(9), orders=(A, B)))
    node.write()
    assert node.told == FollowOrders(orders=(A, B), is_current=True)


def test_a_short_pause_is_no_reason_to_ask() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    assert node.hear(Paused(seconds=0.8)) == []
    assert node.follower.is_current


def test_a_link_that_comes_back_within_the_time_is_no_lapse_but_asked_over() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    assert node.hear(LeaderUnreached()) == []
    node.now += 1.0
    node.hear(LeaderReached(node=LEADER))
    assert node.told is None
    assert len(node.serials) == 1
    node.now += 1.0
    node.answer(A, stamp=at(7))
    assert node.told is None
    assert node.wait(CURRENT_SECONDS - 0.1) == []


def test_without_a_leader_what_runs_is_looked_after_and_nobody_is_asked() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.hear(LeaderUnreached())
    node.wait(60.0)
    assert node.effects == [FollowOrders(orders=(A,), is_current=False)]
    assert node.follower.deadline == NEVER


def test_a_leader_that_does_not_lead_any_more_is_asked_again_after_a_second() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.say(OrdersDenied(serial=1, leader=OTHER))
    assert node.effects == [FollowOrders(orders=(A,), is_current=False)]
    node.wait(ASK_AGAIN_SECONDS)
    assert len(node.serials) == 1


def test_the_next_leader_is_believed_and_the_last_one_is_not_any_more() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.hear(LeaderReached(node=OTHER))
    node.say(Orders(serial=2, stamp=at(8, term=2), orders=(B,)), node=OTHER)
    node.write()
    assert node.told == FollowOrders(orders=(B,), is_current=True)
    assert node.say(OrdersDelta(after=at(8, term=2), stamp=at(9, term=2), gone=(B.assignment.id,)), node=LEADER) == []
    assert node.say(OrdersDelta(after=at(7), stamp=at(8), changed=(C,)), node=LEADER) == []


def test_while_the_disk_is_busy_what_comes_is_written_at_once_afterwards() -> None:
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    node.answer(A, stamp=at(7))
    for index in (8, 9, 10):
        node.say(OrdersDelta(after=at(index - 1), stamp=at(index), changed=(order(f"x{index}"),)))
        assert node.asked(Persist) == []
    node.hear(OrdersPersisted(stamp=at(7)))
    assert node.told == FollowOrders(orders=(A,), is_current=True)
    [wanted] = node.asked(Persist)
    assert (wanted.stamp, len(wanted.orders)) == (at(10), 4)
    node.hear(OrdersPersisted(stamp=at(10)))
    assert node.told == FollowOrders(orders=wanted.orders, is_current=True)


def test_what_was_on_its_way_to_the_disk_before_the_answer_is_not_current() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.say(OrdersDelta(after=at(7), stamp=at(8), changed=(B,)))
    node.hear(Paused(seconds=5.0))
    node.answer(C, stamp=at(9))
    node.hear(OrdersPersisted(stamp=at(8)))
    assert node.told == FollowOrders(orders=(A, B), is_current=False)
    node.hear(OrdersPersisted(stamp=at(9)))
    assert node.told == FollowOrders(orders=(C,), is_current=True)


def test_orders_that_became_durable_too_late_are_told_as_not_current() -> None:
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    node.answer(A, stamp=at(7))
    node.wait(CURRENT_SECONDS)
    node.hear(OrdersPersisted(stamp=at(7)))
    assert node.told == FollowOrders(orders=(A,), is_current=False)


def test_after_damage_equal_orders_are_written_again() -> None:
    node = Node(HeardOrders(stamp=at(0), orders=(), is_whole=False))
    node.hear(LeaderReached(node=LEADER))
    node.answer(stamp=at(0))
    assert node.told is None
    node.write()
    assert node.told == FollowOrders(orders=(), is_current=True)


def test_an_answer_in_parts_is_acted_on_when_all_are_here() -> None:
    """With a part of them a node would end as leftovers what the rest orders."""
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    parts = [
        Orders(serial=1, stamp=at(7), orders=(each,), registry=(LEADER,) if part == 0 else (), part=part, parts=3)
        for part, each in enumerate((A, B, C))
    ]
    node.say(parts[0])
    node.say(parts[2])
    assert node.effects == []
    for part in parts:
        assert node.asked(Persist) == []
        node.say(part)
    assert node.asked(Persist) == [Persist(stamp=at(7), orders=(A, B, C), registry=(LEADER,))]


def test_parts_of_two_answers_are_not_mixed() -> None:
    node = Node()
    node.hear(LeaderReached(node=LEADER))
    node.say(Orders(serial=1, stamp=at(7), orders=(A,), part=0, parts=2))
    node.say(Orders(serial=1, stamp=at(8), orders=(B,), part=1, parts=2))
    assert node.effects == []
    node.wait(ASK_AGAIN_SECONDS)
    assert node.serials == [1]


def test_it_tells_its_story() -> None:
    node = Node()
    node.follow(A, stamp=at(7))
    node.wait(CURRENT_SECONDS)
    story = " | ".join(text for _, text in node.follower.history())
    assert "the leader n-1 is reached" in story
    assert "heard term 1 index 7: 1 orders" in story
    assert "nothing was confirmed for 3 s" in story
