"""Whatever links, disks, leaders and daemons do: a node never goes back, and is right as soon as it can know better."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulayer.core.base import Tick
from gpulayer.core.leader import StateAdvanced
from gpulayer.core.orders.book import Asked, Heard, LeadershipLost, Led, NodeGone, OrderBook, ToNode
from gpulayer.core.orders.changes import orders_of
from gpulayer.core.orders.follower import Follower
from gpulayer.core.orders.messages import (
    FollowerEffect,
    FollowerEvent,
    FollowOrders,
    FromLeader,
    HeardOrders,
    LeaderReached,
    LeaderToNode,
    LeaderUnreached,
    OrdersAsked,
    OrdersHeard,
    OrdersPersisted,
    OrderStamp,
    Paused,
    Persist,
    ReportAnswered,
    ToLeader,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import NodeId
from gpulayer.model.units import Instant
from tests.core.cluster.states import Act, Cluster, admit, gpu, histories

HERE = NodeId("n-n1")
LEADERS = (NodeId("n-l1"), NodeId("n-l2"))


@dataclass
class World:
    """One node, two nodes that take turns in leading, a link that is slow and breaks, a disk that is slow."""

    rng: Random
    cluster: Cluster = field(default_factory=lambda: Cluster(admit("n1", gpu("g0"), gpu("g1"))))
    now: float = 100.0
    term: int = 1

    def __post_init__(self) -> None:
        self.books = {leader: OrderBook() for leader in LEADERS}
        self.stale: dict[NodeId, Cluster] = {}
        self.leading = LEADERS[0]
        self.reached: NodeId | None = None
        self.to_node: list[LeaderToNode] = []
        self.to_leader: list[OrdersAsked | OrdersHeard] = []
        self.disk: HeardOrders | None = None
        self.writing: list[HeardOrders] = []
        self.highest = OrderStamp(0, 0, 0)
        self.acted: tuple[tuple[Order, ...], bool] | None = None
        self.follower = Follower(None)
        self.tell(self.leading, StateAdvanced(state=self.cluster.state))
        self.tell(self.leading, Led(term=self.term))
        self.hear(Tick())

    # --- the parts --------------------------------------------------------------------------------------------

    def hear(self, event: FollowerEvent) -> None:
        for effect in self.follower.step(event, Instant(self.now)):
            self.perform(effect)
        self.follower.check()
        assert self.follower.stamp >= self.highest, "what was heard is never taken back"
        self.highest = self.follower.stamp

    def perform(self, effect: FollowerEffect) -> None:
        match effect:
            case ToLeader(node=node, message=message):
                assert node == self.reached
                self.to_leader.append(message)
            case Persist(stamp=stamp, orders=orders, registry=registry):
                assert not self.writing, "one at a time"
                self.writing.append(HeardOrders(stamp=stamp, orders=orders, registry=registry))
            case FollowOrders(orders=orders, is_current=is_current):
                kept = self.disk.orders if self.disk is not None else ()
                assert orders == kept, "acted on what is not durable"
                self.acted = orders, is_current
            case _:
                pass

    def tell(
        self, leader: NodeId, event: StateAdvanced | Led | LeadershipLost | Asked | Heard | NodeGone | Tick
    ) -> None:
        told = self.books[leader].step(event, Instant(self.now))
        self.books[leader].check()
        self.arrive(leader, told)

    def arrive(self, leader: NodeId, told: list[ToNode]) -> None:
        if self.reached == leader:
            self.to_node += [each.message for each in told if each.node == HERE]

    # --- what may happen --------------------------------------------------------------------------------------

    def commit(self, act: Act) -> None:
        self.cluster.do(act(self.cluster.state))
        self.tell(self.leading, StateAdvanced(state=self.cluster.state))

    def connect(self) -> None:
        self.cut()
        # To one that does not lead, too, as long as it is not known.
        self.reached = self.rng.choice([self.leading, *LEADERS])
        self.hear(LeaderReached(node=self.reached))

    def cut(self) -> None:
        if self.reached is not None:
            gone, self.reached = self.reached, None
            self.to_node, self.to_leader = [], []
            self.hear(LeaderUnreached())
            self.tell(gone, NodeGone(node=HERE))

    def deliver(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.to_leader and self.reached is not None:
                message = self.to_leader.pop(0)
                match message:
                    case OrdersAsked():
                        self.tell(self.reached, Asked(node=HERE, message=message))
                    case OrdersHeard():
                        self.tell(self.reached, Heard(node=HERE, message=message))
            if self.to_node and self.reached is not None:
                said = self.to_node.pop(0)
                assert not isinstance(said, ReportAnswered)
                self.hear(FromLeader(node=self.reached, message=said))
                if self.rng.random() < 0.2:
                    self.hear(FromLeader(node=self.reached, message=said))  # said twice

    def write(self) -> None:
        if self.writing:
            self.disk = self.writing.pop()
            self.hear(OrdersPersisted(stamp=self.disk.stamp))

    def restart(self) -> None:
        self.cut()
        self.writing = []
        held = self.disk.stamp if self.disk is not None else OrderStamp(0, 0, 0)
        self.follower, self.acted, self.highest = Follower(self.disk), None, held
        self.hear(Tick())
        assert self.acted is not None
        assert not self.acted[1], "current after a start"

    def damage(self) -> None:
        if self.disk is not None:
            stamp = OrderStamp(self.disk.stamp.generation, self.disk.stamp.term, 0)
            self.disk = replace(self.disk, stamp=stamp, orders=(), is_whole=False)
            self.restart()

    def elect(self) -> None:
        """The other one leads; the one before does not know it yet, and goes on with what it has."""
        self.term += 1
        self.leading = LEADERS[1 - LEADERS.index(self.leading)]
        self.tell(self.leading, LeadershipLost())
        self.tell(self.leading, StateAdvanced(state=self.cluster.state))
        self.tell(self.leading, Led(term=self.term))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for leader in LEADERS:
            if self.books[leader].deadline <= self.now:
                self.tell(leader, Tick())
        if self.follower.deadline <= self.now:
            self.hear(Tick())

    def pause(self) -> None:
        self.now += 2.0
        self.hear(Paused(seconds=2.0))
        assert self.acted is not None
        assert not self.acted[1]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.integers(0, 2**32))
def test_a_node_is_never_taken_back_and_right_in_the_end(history: list[Act], seed: int) -> None:
    world = World(Random(seed))
    for act in history:
        world.commit(act)
        for _ in range(world.rng.randint(0, 4)):
            what = world.rng.choice(
                [world.deliver] * 6
                + [world.write] * 4
                + [world.connect] * 2
                + [world.cut, world.restart, world.damage, world.elect, world.pause]
                + [lambda: world.wait(world.rng.choice([0.1, 1.0, 4.0]))] * 3
            )
            what()
    old = LEADERS[1 - LEADERS.index(world.leading)]
    world.tell(old, LeadershipLost(leader=world.leading))
    world.cut()
    world.reached = world.leading
    world.hear(LeaderReached(node=world.leading))
    for _ in range(40):
        world.deliver()
        world.write()
        world.wait(0.3)
    assert world.acted is not None
    orders, is_current = world.acted
    assert is_current
    assert {o.assignment.id: o for o in orders} == {o.assignment.id: o for o in orders_of(world.cluster.state, HERE)}
