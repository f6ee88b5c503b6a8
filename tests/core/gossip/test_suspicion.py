"""Suspicions: how long they last, who confirms them, and what ends them early."""

from __future__ import annotations

import math

from gpulayer.core.gossip.messages import Suspect
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.suspicion import VOUCH_ECHO, Suspicion, Suspicions
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.units import Instant

S = NodeId("n-00000000000000ff")
RUN = Run(S, 1, 7)
R = [NodeId(f"n-{number:016x}") for number in range(8)]
PROFILE = Profile()
N = 16
T_MIN, T_MAX = PROFILE.suspicion_bounds(N)
BEGAN = Instant(100.0)


def word(reporter: NodeId, incarnation: int = 0, *, refused: bool = False, health: int = 0) -> Suspect:
    cause = "refused" if refused else "timeout"
    return Suspect(node=S, epoch=1, incarnation=incarnation, cause=cause, reporter=reporter, reporter_health=health)


def begun(*words: Suspect) -> tuple[Suspicions, Suspicion]:
    suspicions = Suspicions(PROFILE)
    for one in words:
        suspicions.hear(one, RUN, 2, BEGAN)
    held = suspicions.get(S)
    assert held is not None
    suspicions.check()
    return suspicions, held


def test_without_confirmation_it_lasts_longest() -> None:
    suspicions, held = begun(word(R[0]))
    assert suspicions.ends_at(held, N) == BEGAN + T_MAX


def test_each_confirmation_shortens_it_by_the_logarithm_of_their_number() -> None:
    suspicions, held = begun(word(R[0]), word(R[1]))
    one = T_MAX - (T_MAX - T_MIN) * math.log(2) / math.log(3)
    assert suspicions.ends_at(held, N) == BEGAN + one
    suspicions.hear(word(R[2]), RUN, 2, BEGAN)
    assert suspicions.ends_at(held, N) == BEGAN + T_MIN


def test_in_a_small_cluster_fewer_confirmations_are_enough() -> None:
    suspicions, held = begun(word(R[0]))
    assert suspicions.ends_at(held, 3) == BEGAN + PROFILE.suspicion_bounds(3)[0]
    suspicions.hear(word(R[1]), RUN, 2, BEGAN)
    assert suspicions.ends_at(held, 5) == BEGAN + PROFILE.suspicion_bounds(5)[0]


def test_a_reporter_counts_once() -> None:
    suspicions, _ = begun(word(R[0]), word(R[1]))
    assert suspicions.hear(word(R[1]), RUN, 2, BEGAN) == "nothing"
    assert suspicions.hear(word(R[0]), RUN, 2, BEGAN) == "nothing"


def test_the_word_of_an_unwell_reporter_confirms_nothing() -> None:
    suspicions, held = begun(word(R[0]))
    assert suspicions.hear(word(R[1], health=4), RUN, 2, BEGAN) == "nothing"
    assert suspicions.hear(word(R[1], health=3), RUN, 2, BEGAN) == "confirmed"
    assert held.confirmed == {R[1]}


def test_a_merge_confirms_nothing_and_can_begin_one() -> None:
    suspicions, held = begun(word(R[0]))
    assert suspicions.hear(word(R[1]), RUN, 2, BEGAN, merged="suspect") == "nothing"
    assert held.confirmed == set()
    fresh = Suspicions(PROFILE)
    assert fresh.hear(word(R[1]), RUN, 2, BEGAN, merged="suspect") == "began"
    assert fresh.hear(word(R[2]), RUN, 2, BEGAN) == "confirmed"
    only = fresh.get(S)
    assert only is not None
    assert (only.first, only.confirmed) == (R[2], set()), "the first who saw it does not confirm a table"
    fresh.check()


def test_who_is_dead_in_a_merged_table_has_time_to_refute_and_no_more() -> None:
    suspicions = Suspicions(PROFILE)
    suspicions.hear(word(R[1]), RUN, 2, BEGAN, merged="dead")
    held = suspicions.get(S)
    assert held is not None
    assert suspicions.ends_at(held, N) == BEGAN + T_MIN


def test_a_higher_incarnation_begins_a_fresh_timer() -> None:
    suspicions, _ = begun(word(R[0]), word(R[1]), word(R[2]))
    later = Instant(BEGAN + 2.0)
    assert suspicions.hear(word(R[1], 1), RUN, 2, later) == "renewed"
    held = suspicions.get(S)
    assert held is not None
    assert suspicions.ends_at(held, N) == later + T_MAX
    assert held.since == BEGAN


def test_two_refusals_end_it_after_a_grace() -> None:
    suspicions, held = begun(word(R[0], refused=True))
    assert suspicions.ends_at(held, N) == BEGAN + T_MAX
    suspicions.hear(word(R[1], refused=True), RUN, 2, Instant(BEGAN + 0.5))
    assert suspicions.ends_at(held, N) == BEGAN + 0.5 + PROFILE.refusal_grace


def test_a_reporter_that_got_no_answer_and_then_a_refusal_counts_as_refused() -> None:
    suspicions, held = begun(word(R[0]), word(R[1], refused=True))
    assert suspicions.hear(word(R[0], refused=True), RUN, 2, BEGAN) == "confirmed"
    assert held.refused == {R[0], R[1]}
    assert held.confirmed == {R[1]}
    suspicions.check()


def test_the_refusal_of_an_unwell_reporter_proves_nothing() -> None:
    suspicions, held = begun(word(R[0], refused=True, health=5), word(R[1], refused=True))
    assert held.refused == {R[1]}
    assert suspicions.ends_at(held, N) == BEGAN + PROFILE.suspicion_timeout(N, N - 1, 1)


def test_a_vouch_starts_the_timer_anew_and_voids_what_was_said_before() -> None:
    suspicions, held = begun(word(R[0], refused=True), word(R[1], refused=True), word(R[2]))
    later = Instant(BEGAN + 0.05)
    assert suspicions.vouch(S, 0, R[5], later, is_direct=True)
    assert suspicions.ends_at(held, N) == later + T_MAX
    assert suspicions.hear(word(R[2]), RUN, 2, later) == "nothing", "a reporter has had its say"
    suspicions.check()


def test_an_echo_of_a_vouch_is_no_news() -> None:
    suspicions, _ = begun(word(R[0]))
    assert suspicions.vouch(S, 0, R[5], BEGAN, is_direct=False)
    assert not suspicions.vouch(S, 0, R[5], Instant(BEGAN + VOUCH_ECHO - 0.1), is_direct=False)
    assert suspicions.vouch(S, 0, R[5], Instant(BEGAN + VOUCH_ECHO), is_direct=False)


def test_a_vouch_for_an_older_incarnation_is_none() -> None:
    suspicions, _ = begun(word(R[0], 3))
    assert not suspicions.vouch(S, 2, R[5], BEGAN, is_direct=True)


def test_a_pause_of_ours_is_given_back_to_the_suspect() -> None:
    suspicions, held = begun(word(R[0]), word(R[1]), word(R[2]))
    suspicions.shift(10.0)
    assert suspicions.ends_at(held, N) == BEGAN + 10.0 + T_MIN


def test_more_suspicions_of_our_own_than_is_credible_are_not_begun() -> None:
    suspicions = Suspicions(PROFILE)
    for _ in range(3):
        assert suspicions.may_begin(N, BEGAN)
        suspicions.begun(BEGAN)
    assert not suspicions.may_begin(N, BEGAN)
    assert suspicions.may_begin(100, BEGAN), "a fifth of the cluster may fail at once"
    assert suspicions.may_begin(N, Instant(BEGAN + PROFILE.accusations_window))
