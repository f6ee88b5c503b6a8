"""Probe rounds: whose turn it is, who is asked, what is due when."""

from __future__ import annotations

from random import Random

from gpulayer.core.gossip.probe import RELAYED_MAX, RELAYED_PER_ASKER_MAX, ROUNDS_MAX, Probes
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member, Run
from gpulayer.model.units import Instant

N = [NodeId(f"n-{number:016x}") for number in range(20)]
NOW = Instant(50.0)


def member(node: NodeId) -> Member:
    return Member(run=Run(node, 1, 1), incarnation=0, state="alive", addresses=(Address("10.0.0.1", 7451),))


def probes(seed: int = 1) -> Probes:
    return Probes(Profile(), Random(seed))


def test_every_member_has_its_turn_once_in_a_pass() -> None:
    turns = probes()
    for _ in range(3):
        one_pass = [turns.next_target(N[:7]) for _ in range(7)]
        assert set(one_pass) == set(N[:7])
    turns.check()


def test_a_newcomer_has_its_turn_within_the_present_pass() -> None:
    turns = probes()
    turns.next_target(N[:7])
    turns.joined(N[7])
    rest = [turns.next_target(N[:8]) for _ in range(7)]
    assert N[7] in rest


def test_who_is_gone_has_no_turn_any_more() -> None:
    turns = probes()
    turns.next_target(N[:7])
    assert {turns.next_target(N[3:5]) for _ in range(6)} == set(N[3:5])
    assert turns.next_target([]) is None


def test_in_a_small_cluster_everybody_else_is_a_relay() -> None:
    """A random choice would miss the only one with a working path now and then."""
    for seed in range(50):
        assert probes(seed).relays_for(N[0], N[:2]) == [N[1]]
        assert set(probes(seed).relays_for(N[0], N[:4])) == set(N[1:4])


def test_a_round_asks_directly_then_around_and_ends() -> None:
    turns = probes()
    round_ = turns.begin(member(N[0]), NOW, 0.5, is_in_turn=True)
    assert round_ is not None
    assert turns.deadline == NOW + 0.2
    assert turns.due(Instant(NOW + 0.2)) == [round_]
    round_.asked_at = Instant(round_.indirect_at)
    assert turns.deadline == NOW + 0.5
    turns.end(round_)
    assert turns.due(Instant(NOW + 1)) == []
    turns.check()


def test_one_member_is_probed_once_at_a_time_and_a_few_at_once() -> None:
    turns = probes()
    begun = [turns.begin(member(node), NOW, 0.5, is_in_turn=False) for node in [*N, N[0]]]
    assert sum(round_ is not None for round_ in begun) == ROUNDS_MAX
    assert begun[-1] is None
    turns.check()


def test_a_relay_says_in_time_that_it_has_heard_nothing() -> None:
    """At 80 % of the window in which the asker, if it is well, still listens."""
    turns = probes()
    relayed = turns.relay(Run(N[1], 1, 1), 5, N[2], 1, NOW)
    assert relayed is not None
    assert abs(relayed.nack_at - (NOW + 0.8 * 0.2)) < 1e-9
    assert turns.take_unanswered(Instant(NOW + 0.15)) == []
    assert turns.take_unanswered(Instant(NOW + 0.17)) == [relayed]


def test_only_the_one_that_was_asked_about_answers_a_relayed_question() -> None:
    turns = probes()
    relayed = turns.relay(Run(N[1], 1, 1), 5, N[2], 3, NOW)
    assert relayed is not None
    assert turns.take_relayed(relayed.seq, Run(N[4], 3, 1)) is None
    assert turns.take_relayed(relayed.seq, Run(N[2], 2, 1)) is None
    assert turns.take_relayed(relayed.seq, Run(N[2], 3, 1)) == relayed


def test_questions_on_behalf_of_others_are_bounded() -> None:
    turns = probes()
    for seq in range(2 * RELAYED_MAX):
        turns.relay(Run(N[1], 1, seq), seq, N[2], 1, NOW)
    turns.check()
    assert turns.relay(Run(N[3], 1, 1), 10**6, N[2], 1, NOW) is None


def test_one_that_asks_much_leaves_room_for_the_questions_of_others() -> None:
    turns = probes()
    taken = [turns.relay(Run(N[1], 1, 1), seq, N[2], 1, NOW) is not None for seq in range(2 * RELAYED_MAX)]
    assert sum(taken) == RELAYED_PER_ASKER_MAX
    assert turns.relay(Run(N[3], 1, 1), 1, N[2], 1, NOW) is not None


def test_after_a_pause_rounds_whose_answers_were_missed_blame_nobody() -> None:
    turns = probes()
    turns.begin(member(N[0]), NOW, 0.5, is_in_turn=True)
    assert turns.cancel_overdue(Instant(NOW + 2.0)) == 1
    assert turns.due(Instant(NOW + 3.0)) == []
