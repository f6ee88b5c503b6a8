"""Rumours: how often they are told, and which ends which."""

from __future__ import annotations

from gpulayer.core.gossip.messages import Alive, Dead, Delta, Message, Newer, Suspect, Vouch
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.spread import RUMOURS_MAX, VOUCH_LIFE, Spread
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.units import Instant

A = NodeId("n-00000000000000aa")
B = NodeId("n-00000000000000bb")
NOW = Instant(1.0)


def spread(size: int = 40) -> Spread:
    def size_of(message: Message) -> int:
        return size

    return Spread(Profile(), size_of)


def alive(incarnation: int = 0, node: NodeId = B, version: int = 0) -> Alive:
    addresses = (Address("10.0.0.2", 7451),)
    return Alive(run=Run(node, 1, 1), incarnation=incarnation, addresses=addresses, version=version)


def suspect(incarnation: int = 0, reporter: NodeId = A) -> Suspect:
    return Suspect(node=B, epoch=1, incarnation=incarnation, cause="timeout", reporter=reporter)


def dead(incarnation: int = 0) -> Dead:
    return Dead(node=B, epoch=1, incarnation=incarnation, cause="silent", reporter=A)


def newer(version: int, epoch: int = 1) -> Newer:
    return Newer(node=B, epoch=epoch, gc_version=0, version=version)


def told(queue: Spread, members: int = 16, room: int = 1000) -> list[Message]:
    return list(queue.pack(room, members, NOW))


def test_a_rumour_is_told_a_bounded_number_of_times() -> None:
    queue = spread()
    queue.add(dead(), NOW)
    times = 0
    while told(queue):
        times += 1
        queue.check()
    assert times == Profile().transmissions(16) == 12
    assert not queue.is_pressing


def test_what_fits_is_packed_the_least_told_first() -> None:
    queue = spread(size=40)
    nodes = [NodeId(f"n-{number:016x}") for number in range(10)]
    for node in nodes:
        queue.add(alive(node=node), NOW)
    first = told(queue, room=200)
    second = told(queue, room=200)
    assert len(first) == len(second) == 5
    assert not set(map(repr, first)) & set(map(repr, second))
    queue.check()


def test_what_does_not_fit_waits_and_lets_smaller_ones_pass() -> None:
    def size_of(message: Message) -> int:
        return 500 if isinstance(message, Delta) else 40

    queue = Spread(Profile(), size_of)
    queue.add(Delta(node=A, epoch=1, gc_version=0, from_version=0, to_version=1, max_version=1), NOW)
    queue.add(alive(), NOW)
    assert queue.pack(100, 16, NOW) == [alive()]
    assert len(queue) == 2


def test_a_newer_word_ends_the_older_ones_about_the_same_member() -> None:
    queue = spread()
    queue.add(suspect(0), NOW)
    queue.add(alive(1), NOW)
    assert told(queue) == [alive(1)]
    queue.add(suspect(1), NOW)
    assert told(queue) == [suspect(1)]
    queue.add(dead(1), NOW)
    assert told(queue) == [dead(1)]
    queue.add(alive(2), NOW)
    assert told(queue) == [alive(2)]
    queue.check()


def test_that_a_record_moved_does_not_end_an_accusation() -> None:
    queue = spread()
    queue.add(suspect(0), NOW)
    queue.add(alive(0, version=3), NOW)
    assert suspect(0) in told(queue)


def test_that_a_record_moved_is_said_apart_from_life_and_death() -> None:
    queue = spread()
    queue.add(newer(3), NOW)
    queue.add(suspect(0), NOW)
    assert set(told(queue)) == {newer(3), suspect(0)}
    queue.add(dead(0), NOW)
    assert set(told(queue)) == {newer(3), dead(0)}


def test_how_far_a_record_is_is_said_once_and_as_far_as_is_known() -> None:
    queue = spread()
    queue.add(newer(3), NOW)
    queue.add(newer(4), NOW)
    assert told(queue) == [newer(4)]
    queue.add(alive(1, version=3), NOW)
    assert set(told(queue)) == {newer(4), alive(1, version=3)}
    queue.add(alive(2, version=4), NOW)
    assert told(queue) == [alive(2, version=4)]
    queue.add(newer(9, epoch=0), NOW)
    queue.add(alive(3, version=1), NOW)
    assert told(queue) == [alive(3, version=1)]
    queue.check()


def test_a_rumour_may_be_given_a_bound_of_its_own() -> None:
    queue = spread()
    queue.add(newer(3), NOW, is_urgent=False, times=2)
    assert [told(queue), told(queue), told(queue)] == [[newer(3)], [newer(3)], []]
    assert not queue.is_pressing


def test_each_reporter_of_a_suspicion_is_told_of() -> None:
    queue = spread()
    queue.add(suspect(0, A), NOW)
    queue.add(suspect(0, NodeId("n-00000000000000cc")), NOW)
    assert len(told(queue)) == 2


def test_a_vouch_is_news_for_a_moment_only() -> None:
    queue = spread()
    queue.add(Vouch(node=B, epoch=1, incarnation=0, witness=A), NOW)
    assert queue.pack(1000, 16, Instant(NOW + VOUCH_LIFE)) == []
    assert len(queue) == 0
    queue.check()


def test_what_is_not_urgent_gets_packets_of_its_own_only_at_first() -> None:
    queue = spread()
    queue.add(alive(0, version=1), NOW, is_urgent=False)
    assert queue.is_pressing
    for _ in range(2):
        told(queue)
    assert not queue.is_pressing
    assert told(queue) == [alive(0, version=1)]


def test_hearing_a_routine_rumour_again_counts_as_telling_it() -> None:
    queue = spread()
    queue.add(alive(0, version=1), NOW, is_urgent=False)
    for _ in range(Profile().transmissions(16)):
        queue.heard_again(alive(0, version=1), 16)
    assert len(queue) == 0
    queue.add(dead(), NOW)
    for _ in range(100):
        queue.heard_again(dead(), 16)
    assert len(queue) == 1
    queue.check()


def test_the_queue_is_bounded() -> None:
    queue = spread()
    for number in range(RUMOURS_MAX + 100):
        queue.add(alive(node=NodeId(f"n-{number:016x}")), NOW)
    assert len(queue) == RUMOURS_MAX
    queue.check()
