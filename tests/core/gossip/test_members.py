"""Which word about a member is newer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.core.gossip.members import PENDING_MAX, Members, News
from gpulayer.core.gossip.messages import Alive, Dead, Suspect
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member, Run
from gpulayer.model.units import Instant

ME = NodeId("n-00000000000000aa")
B = NodeId("n-00000000000000bb")
NOW = Instant(10.0)


def members(profile: Profile | None = None) -> Members:
    own = Member(run=Run(ME, 1, 1), incarnation=0, state="alive", addresses=(Address("10.0.0.1", 7451),))
    return Members(own, profile or Profile())


def alive(incarnation: int = 0, *, epoch: int = 1, run_id: int = 7, node: NodeId = B, version: int = 0) -> Alive:
    run = Run(node, epoch, run_id)
    return Alive(run=run, incarnation=incarnation, addresses=(Address("10.0.0.2", 7451),), version=version)


def test_a_first_word_makes_a_member() -> None:
    table = members()
    assert table.hear_alive(alive(), NOW) is News.JOINED
    assert table.live == (B,)
    assert table.count == 2
    table.check()


def test_the_same_word_again_is_no_news() -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    assert table.hear_alive(alive(3), NOW) is News.KNOWN
    assert table.hear_alive(alive(2), NOW) is News.KNOWN


@pytest.mark.parametrize("state", ["suspect", "dead"])
def test_only_a_higher_incarnation_brings_a_member_back(state: str) -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    if state == "suspect":
        table.suspect(B, 5, NOW)
    else:
        table.bury(B, 5, "silent", NOW)
    assert table.hear_alive(alive(5), NOW) is News.STALE
    assert table.hear_alive(alive(6), NOW) is News.CHANGED
    member = table.get(B)
    assert member is not None
    assert (member.state, member.incarnation, member.cause) == ("alive", 6, None)
    table.check()


def test_what_is_passed_on_in_a_members_name_is_what_it_said_itself() -> None:
    """Not the incarnation of an accusation that we happen to have heard: only the owner raises that."""
    table = members()
    table.hear_alive(alive(3), NOW)
    table.suspect(B, 9, NOW)
    assert table.word_of(B).incarnation == 3


def test_a_word_that_is_too_old_to_clear_a_suspicion_still_tells_where_the_member_is() -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    table.suspect(B, 9, NOW)
    moved = Alive(run=Run(B, 1, 7), incarnation=8, addresses=(Address("10.0.0.9", 7451),))
    assert table.hear_alive(moved, NOW) is News.STALE
    assert table.all[B].addresses == moved.addresses
    assert table.all[B].state == "suspect"


def test_leaving_is_final_for_the_run_and_not_for_the_node() -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    table.leave(B, 3, NOW)
    assert table.hear_alive(alive(3), NOW) is News.KNOWN
    assert table.all[B].state == "left"
    assert table.hear_alive(alive(0, epoch=2, run_id=8), NOW) is News.JOINED
    assert table.all[B].state == "alive"


def test_who_says_anything_newer_has_not_left_whoever_said_so() -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    table.leave(B, 3, NOW)
    assert table.hear_alive(alive(4), NOW) is News.CHANGED
    assert table.all[B].state == "alive"
    table.check()


def test_a_higher_epoch_replaces_a_run_whatever_its_state_and_a_lower_one_changes_nothing() -> None:
    table = members()
    table.hear_alive(alive(3, epoch=5), NOW)
    table.bury(B, 7, "daemon", NOW)
    assert table.hear_alive(alive(99, epoch=4, run_id=3), NOW) is News.OLD
    assert table.hear_alive(alive(0, epoch=6, run_id=9), NOW) is News.JOINED
    assert (table.all[B].incarnation, table.all[B].run) == (0, Run(B, 6, 9))
    table.check()


def test_a_second_run_of_the_same_epoch_is_a_clone_and_changes_nothing() -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    assert table.hear_alive(alive(9, run_id=8), NOW) is News.CLONE
    assert table.all[B].run.run_id == 7


def test_an_accusation_that_nobody_could_refute_is_refused() -> None:
    table = members()
    table.hear_alive(alive(3), NOW)
    held = table.all[B]
    far = Dead(node=B, epoch=1, incarnation=2**64 - 1, cause="silent", reporter=ME)
    near = Suspect(node=B, epoch=1, incarnation=1003, cause="timeout", reporter=ME)
    assert table.accuses_too_far(far, held)
    assert not table.accuses_too_far(near, held)


def test_who_is_not_in_the_registry_waits_until_it_is_or_until_a_link_shows_it() -> None:
    table = members()
    table.set_registry(frozenset({ME}))
    assert table.hear_alive(alive(4), NOW) is News.PENDING
    assert B not in table.all
    dropped, admitted = table.set_registry(frozenset({ME, B}))
    assert (dropped, admitted) == ([], [alive(4)])
    c = NodeId("n-00000000000000cc")
    assert table.hear_alive(alive(node=c), NOW) is News.PENDING
    assert table.admit(c) == alive(node=c)
    assert table.hear_alive(alive(node=c), NOW) is News.JOINED
    table.check()


def test_pending_members_are_bounded() -> None:
    table = members()
    table.set_registry(frozenset({ME}))
    for number in range(3 * PENDING_MAX):
        table.hear_alive(alive(node=NodeId(f"n-{number + 4096:016x}")), NOW)
    table.check()


def test_who_was_taken_out_of_the_registry_does_not_come_back_by_a_link() -> None:
    table = members()
    table.set_registry(frozenset({ME, B}))
    table.hear_alive(alive(), NOW)
    dropped, _ = table.set_registry(frozenset({ME}))
    assert dropped == [B]
    table.forget(B)
    assert table.admit(B) is None
    assert table.hear_alive(alive(9), NOW) is News.PENDING
    table.set_registry(frozenset({ME, B}))
    assert table.hear_alive(alive(9), NOW) is News.JOINED


def test_of_whom_is_parting_only_the_run_that_is_known_is_heard_and_nothing_when_that_is_over() -> None:
    table = members()
    table.set_registry(frozenset({ME, B}))
    table.hear_alive(alive(), NOW)
    assert table.set_registry(frozenset({ME}), frozenset({B})) == ([], [])
    assert not table.is_let_go(table.all[B].run)
    assert table.hear_alive(alive(1), NOW) is News.CHANGED
    again = alive(1, epoch=2, run_id=5)
    assert table.is_let_go(again.run)
    assert table.hear_alive(again, NOW) is News.PENDING
    table.check()
    dropped, _ = table.set_registry(frozenset({ME}))
    assert dropped == [B]
    assert table.is_let_go(table.all[B].run)


def test_who_is_parting_and_was_never_met_is_not_met_any_more_and_is_when_it_was_let_in_again() -> None:
    table = members()
    table.set_registry(frozenset({ME, B}))
    table.set_registry(frozenset({ME}), frozenset({B}))
    assert table.hear_alive(alive(), NOW) is News.PENDING
    table.set_registry(frozenset({ME, B}))
    assert table.hear_alive(alive(), NOW) is News.JOINED
    table.check()


def test_a_member_that_only_a_link_has_shown_takes_its_first_word_whatever_its_incarnation() -> None:
    table = members()
    assert table.meet(alive(0), NOW) is News.JOINED
    assert table.is_provisional(B)
    assert table.hear_alive(alive(0, version=3), NOW) is News.CHANGED
    assert table.all[B].version == (0, 3)
    assert not table.is_provisional(B)
    table.check()


def test_the_table_is_bounded() -> None:
    table = members(Profile(members_max=4))
    for number in range(3):
        assert table.hear_alive(alive(node=NodeId(f"n-{number:016x}")), NOW) is News.JOINED
    assert table.hear_alive(alive(), NOW) is News.FULL
    table.check()


def test_a_tombstone_ends_when_it_should_and_not_before() -> None:
    table = members(Profile(tombstone=100.0))
    table.hear_alive(alive(), NOW)
    table.bury(B, 0, "silent", Instant(20.0))
    assert table.reap_at == 120.0
    assert table.reap(Instant(119.0)) == []
    assert table.reap(Instant(120.0)) == [B]
    assert B not in table.all
    table.check()


words = st.builds(
    lambda epoch, incarnation, version: alive(incarnation, epoch=epoch, run_id=epoch, version=version),
    st.integers(1, 3),
    st.integers(0, 4),
    st.just(0),
)


@given(st.lists(words, max_size=8), st.randoms(use_true_random=False))
def test_the_order_in_which_words_come_does_not_matter(said: list[Alive], rng: object) -> None:
    shuffled = list(said)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = members(), members()
    for word in said:
        one.hear_alive(word, NOW)
    for word in shuffled:
        other.hear_alive(word, NOW)
    assert one.all == other.all
    one.check()
