"""Records: what an owner tells of itself, and what others hold of it, whatever the network does to its deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulayer.core.gossip.messages import Delta, Entry, Pull
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.record_copy import ENTRIES_MAX, VALUE_BYTES_MAX, bytes_of
from gpulayer.core.gossip.records import SERIES_SECONDS_MAX, Applied, Records
from gpulayer.model.errors import Refused
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.record import RECORD_BYTES_MAX, RECORDS_BYTES_MAX
from gpulayer.model.units import NEVER, Instant
from gpulayer.wire.gossip import HEAD_BYTES, decode, encode, size_of

PROFILE = Profile()
NOW = Instant(1000.0)
A, B, C, D = (NodeId(f"n-{number:016x}") for number in range(1, 5))


def records_of(node: NodeId, epoch: int = 1, profile: Profile = PROFILE) -> Records:
    return Records(Run(node, epoch, 7), profile)


def owner_with(values: Mapping[str, bytes | None], epoch: int = 1) -> Records:
    owner = records_of(A, epoch)
    owner.set_own(values, NOW)
    return owner


def sent(delta: Delta) -> Delta:
    """As the other end has it: what only lives in memory hides what a codec would do to it."""
    (received,) = decode(encode([delta]))
    assert isinstance(received, Delta)
    return received


def give(giver: Records, taker: Records, node: NodeId = A, bytes_max: int = 10_000) -> list[Applied]:
    pull = taker.pull(node, giver.version_of(node)[0])
    return [taker.apply(sent(delta), NOW) for delta in giver.answer(pull, bytes_max)]


# --- the owner ------------------------------------------------------------------------------------------------------


def test_set_and_delete_both_take_the_next_version() -> None:
    owner = records_of(A)
    assert owner.set_own({"a": b"1", "b": b"2"}, NOW) == ("a", "b")
    assert owner.own_version == (0, 2)
    assert owner.set_own({"a": None}, NOW) == ("a",)
    assert owner.own_version == (0, 3)
    assert owner.values(A) == {"b": b"2"}
    owner.check()


def test_writing_the_same_value_again_takes_no_version() -> None:
    owner = owner_with({"a": b"1"})
    assert owner.set_own({"a": b"1", "never": None}, NOW) == ()
    assert owner.own_version == (0, 1)


def test_what_was_given_out_never_changes() -> None:
    owner = owner_with({"a": b"1"})
    before = owner.values(A)
    owner.set_own({"a": b"2"}, NOW)
    assert before == {"a": b"1"}
    assert owner.values(A) is owner.values(A)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"a": bytes(VALUE_BYTES_MAX + 1)}, f"{VALUE_BYTES_MAX} may be"),
        ({"a": bytes(VALUE_BYTES_MAX), "b": bytes(9000)}, f"{RECORD_BYTES_MAX} bytes may be"),
        ({f"k{n}": b"" for n in range(ENTRIES_MAX + 1)}, f"{ENTRIES_MAX} may be"),
        ({"": b""}, "128 ASCII characters"),
        ({"k" * 129: b""}, "128 ASCII characters"),
        ({"ü": b""}, "128 ASCII characters"),
    ],
)
def test_a_change_beyond_a_bound_is_refused_whole_and_says_so(values: dict[str, bytes], told: str) -> None:
    owner = owner_with({"old": b"1"})
    with pytest.raises(Refused, match=told) as refused:
        owner.set_own({"fine": b"1", **values}, NOW)
    assert refused.value.code == "record_too_large"
    assert owner.values(A) == {"old": b"1"}
    assert owner.own_version == (0, 1)
    owner.check()


def test_what_fits_is_told_where_not_everything_does_and_deletes_come_first() -> None:
    """What is gone must not stay listed because something else is too large."""
    owner = owner_with({"gone": bytes(VALUE_BYTES_MAX), "r": b"starting"})
    values = {f"k{n}": bytes(60_000) for n in range(6)} | {"r": b"ready", "gone": None, "huge": bytes(RECORD_BYTES_MAX)}
    changed, why = owner.set_own_as_fits(values, NOW)
    assert changed == ("gone", "r", "k0", "k1", "k2", "k3")
    assert f"{RECORD_BYTES_MAX} bytes may be" in why
    assert "run fewer replicas" in why
    assert "gone" not in owner.values(A)
    assert owner.values(A)["r"] == b"ready"
    assert owner.set_own_as_fits({"r": b"unready"}, NOW) == (("r",), "")
    owner.check()


def test_tombstones_give_way_before_a_change_is_refused() -> None:
    owner = records_of(A)
    owner.set_own({f"k{n}": b"" for n in range(ENTRIES_MAX)}, NOW)
    owner.set_own({f"k{n}": None for n in range(ENTRIES_MAX)}, NOW)
    owner.set_own({"new": b"1"}, NOW)
    assert owner.values(A) == {"new": b"1"}
    assert owner.own_version[0] == owner.own_version[1]
    assert owner.deadline == NEVER
    owner.check()


def test_a_record_of_the_largest_size_is_told_and_taken() -> None:
    owner = owner_with({"a": bytes(VALUE_BYTES_MAX), "b": bytes(RECORD_BYTES_MAX - VALUE_BYTES_MAX - 60)})
    observer = records_of(B)
    assert give(owner, observer)[-1].is_complete
    assert observer.values(A) == owner.values(A)
    observer.check()


def test_all_records_together_are_bounded_too() -> None:
    observer = records_of(B, profile=replace(PROFILE, members_max=400))
    for number in range(400):
        node = NodeId(f"n-{number + 16:016x}")
        # Not written by an owner 400 times over: a whole record in one delta.
        entry = Entry("a", 1, bytes(VALUE_BYTES_MAX))
        delta = Delta(node=node, epoch=1, gc_version=0, from_version=0, to_version=1, entries=(entry,), max_version=1)
        applied = observer.apply(delta, NOW)
        if applied.refused:
            break
    assert f"leave room for {RECORDS_BYTES_MAX % bytes_of(entry)}" in applied.refused
    assert number == RECORDS_BYTES_MAX // bytes_of(entry)
    with pytest.raises(Refused, match="leave room for"):
        observer.set_own({"a": bytes(VALUE_BYTES_MAX)}, NOW)
    observer.check()


def test_records_of_more_nodes_than_members_may_be_are_refused() -> None:
    observer = records_of(B, profile=replace(PROFILE, members_max=1))
    assert not give(owner_with({"a": b"1"}), observer)[0].refused
    other = records_of(C)
    other.set_own({"a": b"1"}, NOW)
    assert "records of 1 nodes are here, 1 may be" in give(other, observer, C)[0].refused
    assert "1 may be" in observer.announced(D, 1, (0, 1)).refused
    observer.forget(A)
    assert not give(other, observer, C)[0].refused


# --- tombstones -----------------------------------------------------------------------------------------------------


def test_a_delete_is_remembered_for_a_while_and_then_collected() -> None:
    owner = owner_with({"a": b"1", "b": b"2"})
    owner.set_own({"a": None}, NOW)
    assert owner.deadline == NOW + PROFILE.record_tombstone
    assert not owner.tick(Instant(NOW + PROFILE.record_tombstone - 1))
    assert owner.tick(Instant(NOW + PROFILE.record_tombstone))
    assert owner.own_version == (3, 3)
    assert owner.deadline == NEVER
    owner.check()


def test_collections_that_are_due_soon_go_along_with_the_first() -> None:
    """Each is told to everybody."""
    owner = owner_with({f"k{n}": b"" for n in range(10)})
    for n in range(10):
        owner.set_own({f"k{n}": None}, Instant(NOW + n))
    assert owner.tick(Instant(NOW + PROFILE.record_tombstone))
    assert owner.own_version == (20, 20)


def test_an_observer_follows_a_collection_without_asking_for_anything() -> None:
    owner, observer = owner_with({"a": b"1", "b": b"2"}), records_of(B)
    owner.set_own({"a": None}, NOW)
    give(owner, observer)
    assert observer.version_of(A) == (1, 0, 3)
    owner.tick(Instant(NOW + 1e6))
    assert observer.announced(A, 1, owner.own_version) == Applied(is_complete=True)
    assert observer.version_of(A) == (1, 3, 3)
    observer.check()


def test_a_collection_alone_travels_as_an_empty_delta() -> None:
    owner, observer = owner_with({"a": b"1", "b": b"2"}), records_of(B)
    owner.set_own({"a": None}, NOW)
    give(owner, observer)
    owner.tick(Instant(NOW + 1e6))
    (delta,) = owner.deltas(A, (0, 3), 1000)
    assert (delta.entries, delta.reset, delta.gc_version) == ((), False, 3)
    observer.apply(delta, NOW)
    assert observer.version_of(A) == (1, 3, 3)


def test_one_who_missed_a_delete_for_too_long_is_given_everything_anew() -> None:
    owner, observer = owner_with({"a": b"1", "b": b"2"}), records_of(B)
    give(owner, observer)
    owner.set_own({"a": None, "c": b"3"}, NOW)
    owner.tick(Instant(NOW + 1e6))
    (delta,) = owner.deltas(A, (0, 2), 1000)
    assert delta.reset
    assert observer.apply(delta, NOW).changed == ("a", "c")
    assert observer.values(A) == {"b": b"2", "c": b"3"}


def test_a_deleted_key_does_not_come_back_from_one_who_has_not_collected_it() -> None:
    """Observers that drop tombstones at times of their own give a dead node's keys back to one another for ever."""
    owner, early, late = owner_with({"a": b"1", "b": b"2"}), records_of(B), records_of(C)
    give(owner, late)
    owner.set_own({"a": None}, NOW)
    give(owner, early)
    owner.tick(Instant(NOW + 1e6))
    early.announced(A, 1, owner.own_version)
    for _ in range(3):
        give(late, early)
        give(early, late)
    assert early.values(A) == late.values(A) == {"b": b"2"}
    assert early.version_of(A) == late.version_of(A)


def test_a_reset_hides_nothing_before_all_of_it_is_here() -> None:
    owner, observer = owner_with({"a": b"1", "b": b"2"}), records_of(B)
    give(owner, observer)
    owner.set_own({"a": None, "c": b"3", "d": b"4"}, NOW)
    owner.tick(Instant(NOW + 1e6))
    first, *rest = owner.deltas(A, (0, 2), 1)
    assert observer.apply(first, NOW) == Applied()
    assert observer.values(A) == {"a": b"1", "b": b"2"}
    observer.check()
    applied = [observer.apply(delta, NOW) for delta in rest]
    assert applied[-1] == Applied(changed=("a", "c", "d"), is_complete=True)
    assert observer.values(A) == owner.values(A)


# --- deltas ---------------------------------------------------------------------------------------------------------


def test_a_delta_is_cut_only_between_versions_and_a_large_value_travels_alone() -> None:
    owner = owner_with({"a": bytes(10), "b": bytes(10), "c": bytes(500), "d": bytes(10)})
    found = owner.deltas(A, (0, 0), 160)
    assert [[entry.key for entry in delta.entries] for delta in found] == [["a", "b"], ["c"], ["d"]]
    assert [(delta.from_version, delta.to_version) for delta in found] == [(0, 2), (2, 3), (3, 4)]
    assert [delta.reset for delta in found] == [True, False, False]
    assert {delta.max_version for delta in found} == {4}


@pytest.mark.parametrize("bytes_max", [200, 600, 1200, 200_000])
def test_no_delta_is_larger_on_the_wire_than_was_asked_for(bytes_max: int) -> None:
    owner = records_of(A, epoch=2**63)
    owner.set_own({f"r/j-abcdefghij.{n}.1": bytes(n % 90) for n in range(2000)}, NOW)
    found = owner.deltas(A, (0, 0), bytes_max)
    assert max(size_of(delta) + HEAD_BYTES for delta in found) <= bytes_max
    assert sum(len(delta.entries) for delta in found) == 2000


def test_a_gap_is_answered_by_what_would_close_it() -> None:
    owner, observer = owner_with({"a": b"1"}), records_of(B)
    give(owner, observer)
    owner.set_own({"b": b"2"}, NOW)
    owner.set_own({"c": b"3"}, NOW)
    (later,) = owner.deltas(A, (0, 2), 1000)
    applied = observer.apply(later, NOW)
    assert applied == Applied(wanted=Pull(node=A, epoch=1, have=(0, 1)))
    assert applied.wanted
    (both,) = owner.answer(applied.wanted, 1000)
    assert observer.apply(both, NOW) == Applied(changed=("b", "c"), is_complete=True)


def test_an_old_or_doubled_delta_changes_nothing() -> None:
    owner, observer = owner_with({"a": b"1"}), records_of(B)
    (old,) = owner.deltas(A, (0, 0), 1000)
    owner.set_own({"a": b"2"}, NOW)
    give(owner, observer)
    for delta in (old, *owner.deltas(A, (0, 0), 1000), *owner.deltas(A, (0, 1), 1000)):
        assert observer.apply(delta, NOW) == Applied(is_complete=True)
    assert observer.values(A) == {"a": b"2"}


def test_parts_of_different_states_make_no_state_that_never_was() -> None:
    """`k` was written anew between two parts: neither has it. A copy that took each part as it came, and called itself
    up to date, would lack it for ever once the owner is gone."""
    owner, witness, observer = owner_with({"k": b"1", "x": b"1", "y": b"1"}), records_of(C), records_of(B)
    give(owner, witness)
    owner.set_own({"k": b"2"}, NOW)
    first, *_ = owner.deltas(A, (0, 0), 1)
    assert [entry.key for entry in first.entries] == ["x"]
    observer.apply(first, NOW)
    # The owner dies. The witness has version 3, the observer a part of version 4.
    pull = observer.pull(A, 1)
    for _ in range(3):
        for delta in witness.answer(pull, 1):
            pull = observer.apply(delta, NOW).wanted or pull
    assert observer.values(A) == witness.values(A) == {"k": b"1", "x": b"1", "y": b"1"}
    observer.check()


def test_a_lost_part_is_asked_for_where_the_series_ended() -> None:
    owner, observer = owner_with({f"k{n}": bytes(100) for n in range(9)}), records_of(B)
    first, second, third, *_ = owner.deltas(A, (0, 0), 300)
    observer.apply(first, NOW)
    assert observer.apply(third, NOW).wanted == Pull(node=A, epoch=1, have=(0, first.to_version))
    assert observer.apply(second, NOW) == Applied()
    assert observer.pull(A, 1).have == (0, second.to_version)
    give(owner, observer)
    assert observer.values(A) == owner.values(A)


def test_a_series_that_is_not_gone_on_with_is_dropped_after_a_while() -> None:
    owner, observer = owner_with({f"k{n}": bytes(100) for n in range(9)}), records_of(B)
    observer.apply(owner.deltas(A, (0, 0), 300)[0], NOW)
    assert observer.deadline == NOW + SERIES_SECONDS_MAX
    assert not observer.tick(observer.deadline)
    assert observer.deadline == NEVER
    assert observer.pull(A, 1).have == (0, 0)
    observer.check()


@pytest.mark.parametrize(
    "delta",
    [
        Delta(node=A, epoch=1, gc_version=0, from_version=5, to_version=4, max_version=5),
        Delta(node=A, epoch=1, gc_version=9, from_version=0, to_version=4, max_version=4),
        Delta(node=A, epoch=1, gc_version=0, from_version=0, to_version=4, max_version=3),
        Delta(node=A, epoch=1, gc_version=0, from_version=1, to_version=4, max_version=4, reset=True),
        Delta(node=A, epoch=1, gc_version=0, from_version=0, to_version=2**63, max_version=2**63),
        Delta(node=A, epoch=1, gc_version=0, from_version=-1, to_version=1, max_version=1),
        Delta(
            node=A, epoch=1, gc_version=0, from_version=0, to_version=2, max_version=2,
            entries=(Entry("a", 2, b""), Entry("b", 1, b"")),
        ),
        Delta(
            node=A, epoch=1, gc_version=0, from_version=0, to_version=2, max_version=2,
            entries=(Entry("a", 1, b""), Entry("a", 2, b"")),
        ),
        Delta(
            node=A, epoch=1, gc_version=0, from_version=0, to_version=2, max_version=2, entries=(Entry("a", 3, b""),)
        ),
        Delta(
            node=A, epoch=1, gc_version=0, from_version=0, to_version=2, max_version=2,
            entries=(Entry("a" * 129, 1, b""),),
        ),
        Delta(
            node=A, epoch=1, gc_version=0, from_version=0, to_version=2, max_version=2,
            entries=(Entry("a", 1, bytes(VALUE_BYTES_MAX + 1)),),
        ),
        Delta(
            node=A, epoch=1, gc_version=0, from_version=0, to_version=9999, max_version=9999,
            entries=tuple(Entry(f"k{n}", n + 1, b"") for n in range(ENTRIES_MAX + 1)),
        ),
    ],
)  # fmt: skip
def test_a_delta_that_cannot_be_is_refused_and_changes_nothing(delta: Delta) -> None:
    observer = records_of(B)
    assert observer.apply(delta, NOW).refused.startswith(f"{A}'s record: ")
    assert observer.version_of(A) == (0, 0, 0)
    observer.check()


def test_a_record_that_outgrows_its_bound_delta_by_delta_is_refused() -> None:
    observer = records_of(B)
    for n in range(1, 20):
        entry = Entry(f"k{n}", n, bytes(60_000))
        step = Delta(node=A, epoch=1, gc_version=0, from_version=n - 1, to_version=n, entries=(entry,), max_version=n)
        applied = observer.apply(step, NOW)
        observer.check()
    assert applied.wanted == Pull(node=A, epoch=1, have=(0, RECORD_BYTES_MAX // 60_000))
    assert len(observer.values(A)) == RECORD_BYTES_MAX // 60_000


def test_a_series_that_outgrows_its_bound_is_refused() -> None:
    observer = records_of(B)
    refused = ""
    for n in range(1, 20):
        entry = Entry(f"k{n}", n, bytes(60_000))
        step = Delta(node=A, epoch=1, gc_version=0, from_version=n - 1, to_version=n, entries=(entry,), max_version=100)
        refused = refused or observer.apply(step, NOW).refused
        observer.check()
    assert "far above" in refused


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_new_run_replaces_the_old_ones_map_when_it_is_here_completely() -> None:
    observer = records_of(B)
    give(owner_with({"a": b"1", "b": b"2"}, epoch=1), observer)
    assert not observer.is_stale(A)
    again = owner_with({"b": b"2", "c": b"3"}, epoch=2)
    observer.announced(A, 2, (0, 0))
    assert observer.is_stale(A)
    first, last = again.deltas(A, (0, 0), 1)
    observer.apply(first, NOW)
    assert observer.values(A) == {"a": b"1", "b": b"2"}
    assert observer.is_stale(A)
    applied = observer.apply(last, NOW)
    assert applied == Applied(changed=("a", "c"), is_complete=True, is_new_run=True)
    assert observer.values(A) == {"b": b"2", "c": b"3"}
    assert not observer.is_stale(A)
    observer.check()


def test_a_new_run_that_says_the_same_is_told_all_the_same() -> None:
    observer = records_of(B)
    give(owner_with({"a": b"1"}, epoch=1), observer)
    (applied,) = give(owner_with({"a": b"1"}, epoch=2), observer)
    assert applied == Applied(is_complete=True, is_new_run=True)


def test_nothing_of_an_older_run_is_taken_beside_a_newer() -> None:
    observer = records_of(B)
    give(owner_with({"a": b"new"}, epoch=2), observer)
    old = owner_with({f"k{n}": b"old" for n in range(9)}, epoch=1)
    assert [observer.apply(delta, NOW) for delta in old.deltas(A, (0, 0), 1000)] == [Applied(is_complete=True)]
    assert observer.values(A) == {"a": b"new"}
    assert old.answer(Pull(node=A, epoch=2, have=(0, 0)), 1000) == []


def test_one_who_has_a_newer_run_than_was_asked_for_sends_it_whole() -> None:
    newer = owner_with({"a": b"1"}, epoch=2)
    (delta,) = newer.answer(Pull(node=A, epoch=1, have=(0, 50)), 1000)
    assert (delta.epoch, delta.from_version, delta.reset) == (2, 0, True)


def test_a_part_of_an_older_run_does_not_displace_one_of_the_newer() -> None:
    observer = records_of(B)
    newer, older = (owner_with({f"k{n}": bytes(9) for n in range(4)}, epoch=epoch) for epoch in (2, 1))
    first, *rest = newer.deltas(A, (0, 0), 1)
    observer.apply(first, NOW)
    assert observer.apply(older.deltas(A, (0, 0), 1)[0], NOW) == Applied()
    assert [observer.apply(delta, NOW) for delta in rest][-1].is_complete


def test_an_older_runs_whole_record_is_taken_while_the_newers_is_here_only_in_part() -> None:
    observer = records_of(B)
    newer, older = (owner_with({f"k{n}": bytes([epoch]) for n in range(4)}, epoch=epoch) for epoch in (2, 1))
    first, *rest = newer.deltas(A, (0, 0), 1)
    observer.apply(first, NOW)
    assert give(older, observer)[-1].is_new_run
    assert observer.values(A) == older.values(A)
    observer.check()
    assert [observer.apply(delta, NOW) for delta in rest][-1].is_new_run
    assert observer.values(A) == newer.values(A)


def test_a_series_is_not_gone_on_with_past_deletes_that_it_may_have_missed() -> None:
    owner, observer = owner_with({f"k{n}": b"" for n in range(9)}), records_of(B)
    give(owner, observer)
    owner.set_own({f"x{n}": b"" for n in range(3)}, NOW)
    observer.apply(owner.deltas(A, (0, 9), 1)[0], NOW)
    owner.set_own({"k0": None, "x2": b"1"}, NOW)
    owner.tick(Instant(NOW + 1e6))
    (pushed,) = owner.deltas(A, (13, 10), 1000)
    assert (pushed.from_version, pushed.gc_version, pushed.reset) == (10, 13, False)
    applied = observer.apply(pushed, NOW)
    assert applied.wanted == Pull(node=A, epoch=1, have=(0, 10))
    for delta in owner.answer(applied.wanted, 1000):
        observer.apply(delta, NOW)
    assert observer.values(A) == owner.values(A)


def test_nobody_else_writes_our_own_record() -> None:
    owner = owner_with({"a": b"1"})
    other = owner_with({"a": b"2", "b": b"2"})
    for delta in other.deltas(A, (0, 0), 1000):
        owner.apply(delta, NOW)
    owner.announced(A, 1, (0, 2))
    assert owner.values(A) == {"a": b"1"}
    assert owner.own_version == (0, 1)
    owner.check()


def test_what_a_copied_data_directory_said_in_our_name_is_outbid() -> None:
    owner, twin, observer = owner_with({"a": b"1"}), owner_with({f"k{n}": b"" for n in range(9)}), records_of(B)
    give(twin, observer)
    assert not owner.outbid(owner.own_version)
    owner.set_own({"b": b"", "c": None}, NOW)
    owner.set_own({"b": None}, NOW)
    assert owner.outbid((0, 9))
    assert owner.deadline == NEVER
    applied = observer.announced(A, 1, owner.own_version)
    assert applied.wanted
    for delta in owner.answer(applied.wanted, 1000):
        observer.apply(delta, NOW)
    assert observer.values(A) == {"a": b"1"}
    owner.set_own({"a": b"2"}, NOW)
    give(owner, observer)
    assert observer.values(A) == {"a": b"2"}
    owner.check()
    observer.check()


@pytest.mark.parametrize("version", [(0, 2**62 + 1), (5, 4), (-1, 7), (2**63, 2**63)])
def test_a_version_that_no_owner_can_have_reached_is_refused_and_not_outbid(version: tuple[int, int]) -> None:
    owner, observer = owner_with({"a": b"1"}), records_of(B)
    assert not owner.outbid(version)
    assert owner.own_version == (0, 1)
    assert observer.announced(A, 1, version).refused


def test_an_announcement_asks_for_what_is_not_here_and_for_nothing_else() -> None:
    owner, observer = owner_with({"a": b"1"}), records_of(B)
    assert observer.announced(A, 1, (0, 0)) == Applied()
    assert observer.announced(A, 1, (0, 1)).wanted == Pull(node=A, epoch=1, have=(0, 0))
    give(owner, observer)
    assert observer.announced(A, 1, (0, 1)) == Applied(is_complete=True)
    assert observer.announced(A, 1, (0, 2)).wanted == Pull(node=A, epoch=1, have=(0, 1))
    assert observer.announced(B, 1, (0, 5)) == Applied(is_complete=True)


def test_digests_say_what_is_held_of_the_run_that_they_name() -> None:
    observer = records_of(B)
    give(owner_with({"a": b"1"}, epoch=3), observer)
    assert observer.version_at(A, 3) == (0, 1)
    assert observer.version_at(A, 4) == observer.version_at(C, 1) == (0, 0)


def test_a_forgotten_node_leaves_nothing_behind() -> None:
    observer = records_of(B)
    give(owner_with({"a": b"1"}), observer)
    observer.forget(A)
    observer.forget(A)
    assert observer.values(A) == {}
    assert observer.is_stale(A)
    assert observer.deltas(A, (0, 0), 1000) == []
    observer.check()


# --- the law --------------------------------------------------------------------------------------------------------


KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
# Arrives, arrives twice, later (or never: what is later at the end is lost), is lost.
FATES = st.lists(st.sampled_from(["now", "now", "now", "twice", "later", "lost"]), min_size=6, max_size=6)


class Gossiping(RuleBasedStateMachine):
    """An owner that restarts, observers, and a network that loses, doubles, reorders and cuts. Every copy is at all
    times a state that the owner was in at that version, and with an honest exchange at the end all are equal."""

    observers = (B, C, D)

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.epoch = 1
        self.owner = records_of(A)
        self.others = {node: records_of(node) for node in self.observers}
        self.history: dict[tuple[int, int], dict[str, bytes]] = {}
        self.late: list[tuple[NodeId, Delta]] = []
        self.seen: dict[NodeId, tuple[int, int, int]] = {}
        self.owner_writes({"a": b"1", "b": b"1", "c": b"1"})

    def owner_writes(self, values: Mapping[str, bytes | None]) -> None:
        self.owner.set_own(values, Instant(self.now))
        self.history[self.epoch, self.owner.own_version[1]] = dict(self.owner.values(A))

    def arrives(self, taker: NodeId, delta: Delta) -> Applied:
        applied = self.others[taker].apply(sent(delta), Instant(self.now))
        assert not applied.refused
        return applied

    def holder(self, node: NodeId) -> Records:
        return self.owner if node == A else self.others[node]

    @rule(values=st.dictionaries(KEYS, st.binary(max_size=30), min_size=1, max_size=3))
    def write(self, values: dict[str, bytes]) -> None:
        self.owner_writes(values)

    @rule(key=KEYS, forgets=st.booleans())
    def delete(self, key: str, forgets: bool) -> None:
        self.owner_writes({key: None})
        if forgets:
            self.wait(121.0)

    @rule(seconds=st.sampled_from([1.0, 61.0, 121.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for records in (self.owner, *self.others.values()):
            if records.deadline <= self.now:
                records.tick(Instant(self.now))

    @precondition(lambda self: self.owner.own_version[1] > 12)
    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.owner = records_of(A, self.epoch)

    @rule(
        giver=st.sampled_from([A, A, *observers]),
        taker=st.sampled_from(observers),
        bytes_max=st.sampled_from([1, 120, 150, 1000]),
        have=st.sampled_from(["all", "all", "copy", "nothing"]),
        fates=FATES,
    )
    def pull(self, giver: NodeId, taker: NodeId, bytes_max: int, have: str, fates: list[str]) -> None:
        epoch = self.holder(giver).version_of(A)[0]
        pull: Pull | None = self.others[taker].pull(A, epoch)
        assert pull
        if have != "all":
            pull = replace(pull, have=(0, 0) if have == "nothing" else self.others[taker].version_at(A, epoch))
        while pull and fates:
            deltas, pull = self.holder(giver).answer(pull, bytes_max), None
            for delta in deltas:
                fate = fates.pop() if fates else "lost"
                if fate == "later":
                    self.late.append((taker, delta))
                for _ in range({"now": 1, "twice": 2}.get(fate, 0)):
                    pull = self.arrives(taker, delta).wanted or pull

    @rule(back=st.integers(1, 3), takers=st.lists(st.sampled_from(observers), max_size=3))
    def push(self, back: int, takers: list[NodeId]) -> None:
        """The last few changes, to some who may not have got there yet."""
        gc_version, max_version = self.owner.own_version
        for delta in self.owner.deltas(A, (gc_version, max(0, max_version - back)), 1000):
            for taker in takers:
                self.arrives(taker, delta)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_arrival(self, data: st.DataObject) -> None:
        self.arrives(*self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    @rule(taker=st.sampled_from(observers))
    def announce(self, taker: NodeId) -> None:
        self.others[taker].announced(A, self.epoch, self.owner.own_version)

    @invariant()
    def every_copy_is_a_state_the_owner_was_in(self) -> None:
        for node, records in self.others.items():
            records.check()
            epoch, gc_version, max_version = records.version_of(A)
            if max_version:
                assert records.values(A) == self.history[epoch, max_version]
            before = self.seen.get(node, (0, 0, 0))
            assert (epoch, max_version) >= (before[0], before[2])
            assert epoch > before[0] or gc_version >= before[1]
            self.seen[node] = (epoch, gc_version, max_version)
        self.owner.check()

    def teardown(self) -> None:
        """The faults are over: an exchange or two with anybody who has it, and all are equal."""
        if not hasattr(self, "owner"):
            return
        for _ in range(2):
            for node in self.observers:
                records = self.others[node]
                epoch, *version = self.owner.version_of(A)
                records.announced(A, epoch, (version[0], version[1]))
                pull: Pull | None = records.pull(A, epoch)
                for _ in range(3):
                    deltas = self.owner.answer(pull, 100) if pull else []
                    pull = None
                    for delta in deltas:
                        pull = records.apply(sent(delta), Instant(self.now)).wanted or pull
        if self.owner.own_version[1]:
            for records in self.others.values():
                assert records.values(A) == self.owner.values(A)
                assert records.version_of(A) == self.owner.version_of(A)
                assert not records.is_stale(A)


TestGossiping = Gossiping.TestCase
TestGossiping.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
