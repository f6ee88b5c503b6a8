"""Anti-entropy: differences are found, whatever the order, and cost what they are worth."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.core.gossip.messages import Alive, Digest, Pull, SyncBuckets, SyncDigests, SyncMembers
from gpulayer.core.gossip.sync import (
    BUCKETS,
    DIGESTS_MAX,
    FRAME_BYTES_MAX,
    RANK,
    Difference,
    bucket_of,
    compare,
    differing,
    digest_messages,
    frames,
    hashes_of,
    order_of,
)
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.wire.gossip import encode, size_of

EVERYTHING = range(BUCKETS)


def node(number: int) -> NodeId:
    return NodeId(f"n-{number:016x}")


def digest(number: int, **changes: int | str) -> Digest:
    plain = Digest(node=node(number), epoch=1, incarnation=0, state="alive", gc_version=0, version=0)
    return replace(plain, **changes)  # type: ignore[arg-type]


digests = st.builds(
    Digest,
    node=st.integers(0, 30).map(node),
    epoch=st.integers(1, 3),
    incarnation=st.integers(0, 3),
    state=st.sampled_from(list(RANK)),
    gc_version=st.integers(0, 2),
    version=st.integers(2, 4),
)
tables = st.lists(digests, max_size=30, unique_by=lambda one: one.node).map(
    lambda found: {one.node: one for one in found}
)


def test_a_bucket_is_the_same_in_every_process() -> None:
    code = "from gpulayer.core.gossip.sync import bucket_of; print([bucket_of(f'n-{n:016x}') for n in range(50)])"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{[bucket_of(node(number)) for number in range(50)]}\n"}


def test_members_spread_over_all_buckets() -> None:
    counts = [0] * BUCKETS
    for number in range(4096):
        counts[bucket_of(node(number))] += 1
    assert min(counts) > 30
    assert max(counts) < 110


@given(tables, st.randoms(use_true_random=False))
def test_hashes_do_not_depend_on_the_order(table: dict[NodeId, Digest], rng: random.Random) -> None:
    shuffled = list(table.values())
    rng.shuffle(shuffled)
    assert hashes_of(shuffled) == hashes_of(table.values())


@pytest.mark.parametrize(
    "change", [{"epoch": 2}, {"incarnation": 1}, {"state": "suspect"}, {"gc_version": 1}, {"version": 1}]
)
def test_any_change_of_a_member_shows_in_its_bucket_alone(change: dict[str, int | str]) -> None:
    before = [digest(number) for number in range(100)]
    after = [digest(7, **change), *before[:7], *before[8:]]
    assert differing(hashes_of(before), hashes_of(after)) == (bucket_of(node(7)),)


def test_fields_do_not_run_into_one_another() -> None:
    assert hashes_of([digest(1, epoch=1, incarnation=11)]) != hashes_of([digest(1, epoch=11, incarnation=1)])


def test_one_that_counts_buckets_in_another_way_is_told_everything() -> None:
    assert differing(hashes_of([]), (0,) * 32) == tuple(EVERYTHING)
    assert differing(hashes_of([]), ()) == tuple(EVERYTHING)


def test_the_order_is_epoch_then_incarnation_then_state() -> None:
    rising = [
        digest(1, state="alive"),
        digest(1, state="suspect"),
        digest(1, state="dead"),
        digest(1, state="left"),
        digest(1, incarnation=1),
        digest(1, epoch=2),
    ]
    assert sorted(reversed(rising), key=order_of) == rising


def test_what_either_side_lacks_is_named() -> None:
    mine = {
        node(1): digest(1, incarnation=5, version=3),
        node(2): digest(2, version=9, gc_version=4),
        node(3): digest(3, version=2),
    }
    theirs = [digest(1, state="dead", version=4), digest(2, epoch=2, version=1), digest(4, version=6)]
    found = compare(mine, theirs, EVERYTHING)
    assert found.members_lacking == (node(1), node(3))
    assert found.members_wanted == (node(2), node(4))
    assert found.records_lacking == (Pull(node=node(3), epoch=1, have=(0, 0)),)
    assert found.records_wanted == (
        Pull(node=node(1), epoch=1, have=(0, 3)),
        Pull(node=node(2), epoch=2, have=(0, 0)),
        Pull(node=node(4), epoch=1, have=(0, 0)),
    )


def test_a_later_collection_alone_is_a_difference() -> None:
    found = compare({node(1): digest(1, version=9, gc_version=4)}, [digest(1, version=9)], EVERYTHING)
    assert found.records_lacking == (Pull(node=node(1), epoch=1, have=(0, 9)),)
    assert not found.records_wanted


def test_absence_counts_only_in_buckets_that_were_told_completely() -> None:
    mine = {node(number): digest(number) for number in range(100)}
    bucket = bucket_of(node(7))
    found = compare(mine, [], [bucket])
    assert set(found.members_lacking) == {one for one in mine if bucket_of(one) == bucket}
    assert compare(mine, [], []) == Difference()


@given(tables, tables)
def test_the_two_sides_see_the_same_difference(mine: dict[NodeId, Digest], theirs: dict[NodeId, Digest]) -> None:
    here, there = compare(mine, theirs.values(), EVERYTHING), compare(theirs, mine.values(), EVERYTHING)
    assert here.members_lacking == there.members_wanted
    assert here.members_wanted == there.members_lacking
    assert here.records_lacking == there.records_wanted
    assert here.records_wanted == there.records_lacking
    told = {name: (one.epoch, one.incarnation, one.state, one.gc_version, one.version) for name, one in mine.items()}
    other = {name: (one.epoch, one.incarnation, one.state, one.gc_version, one.version) for name, one in theirs.items()}
    assert (here == Difference()) == (told == other)


@given(tables, tables)
def test_two_tables_that_exchange_what_differs_are_equal(
    mine: dict[NodeId, Digest], theirs: dict[NodeId, Digest]
) -> None:
    buckets = differing(hashes_of(mine.values()), hashes_of(theirs.values()))
    (asked, *none) = digest_messages(1, theirs.values(), buckets) or [SyncDigests(seq=1, buckets=(), digests=())]
    assert not none
    found = compare(mine, asked.digests, asked.buckets)
    merged_mine, merged_theirs = dict(mine), dict(theirs)
    for name in found.members_lacking:
        merged_theirs[name] = mine[name]
    for name in found.members_wanted:
        merged_mine[name] = theirs[name]
    assert {name: order_of(one) for name, one in merged_mine.items()} == {
        name: order_of(one) for name, one in merged_theirs.items()
    }


def test_a_thousand_members_are_told_in_messages_that_name_whole_buckets() -> None:
    table = {node(number): digest(number) for number in range(2500)}
    messages = digest_messages(9, table.values(), EVERYTHING, is_answer=True)
    assert max(len(message.digests) for message in messages) <= DIGESTS_MAX
    assert sorted(bucket for message in messages for bucket in message.buckets) == list(EVERYTHING)
    assert {one.node for message in messages for one in message.digests} == table.keys()
    for message in messages:
        assert (message.seq, message.is_answer) == (9, True)
        assert {bucket_of(one.node) for one in message.digests} <= set(message.buckets)
        assert compare(table, message.digests, message.buckets) == Difference()


def test_an_empty_bucket_is_told_too() -> None:
    """Else the other side would not learn that its members are missing here."""
    (message,) = digest_messages(1, [], [3, 5, 3, 64, -1])
    assert message.buckets == (3, 5)


def test_a_bucket_too_large_for_a_message_is_told_in_parts_that_claim_nothing_about_absence() -> None:
    crowded = [digest(number) for number in range(140_000) if bucket_of(node(number)) == 11][: DIGESTS_MAX + 500]
    assert len(crowded) > DIGESTS_MAX
    messages = digest_messages(1, crowded, [10, 11, 12])
    assert max(len(message.digests) for message in messages) <= DIGESTS_MAX
    assert [message.buckets for message in messages] == [(10,), (12,)]
    assert sum(len(message.digests) for message in messages) == len(crowded)


def alive(number: int) -> Alive:
    addresses = tuple(Address(f"2001:db8:85a3:8d3:1319:8a2e:{n:x}:7348", 65000) for n in range(1, 5))
    return Alive(
        run=Run(node(number), 2**62, 2**63), incarnation=2**62, addresses=addresses, gc_version=2**61, version=2**61,
        flags=31, key_ids=(2**32 - 1,) * 4,
    )  # fmt: skip


def test_no_frame_of_a_sync_is_larger_than_links_carry() -> None:
    large = [digest(n, epoch=2**62, incarnation=2**62, gc_version=2**61, version=2**61) for n in range(4096)]
    for message in digest_messages(2**62, large, EVERYTHING):
        assert len(encode([message])) < FRAME_BYTES_MAX
    assert len(encode([SyncBuckets(seq=2**62, hashes=(2**64 - 1,) * BUCKETS)])) < 700
    members = [SyncMembers(members=((alive(number), "dead", "silent"),)) for number in range(4096)]
    cut = list(frames(members, size_of))
    assert [message for frame in cut for message in frame] == members
    assert max(len(encode(frame)) for frame in cut) < FRAME_BYTES_MAX
    assert len(cut) == -(-sum(map(size_of, members)) // (FRAME_BYTES_MAX - 1024))


def test_a_message_that_is_too_large_travels_alone() -> None:
    assert list(frames("aaBBBBa", lambda letter: 5 if letter == "B" else 1, 4)) == [
        ("a", "a"),
        ("B",),
        ("B",),
        ("B",),
        ("B",),
        ("a",),
    ]
    assert list(frames("", len)) == []
    assert list(frames("abc", len, count_max=2)) == [("a", "b"), ("c",)]
