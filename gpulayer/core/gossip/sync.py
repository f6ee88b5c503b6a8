"""Anti-entropy: what two nodes find out about the difference of their tables, at a cost that fits the difference.

Members fall into buckets by their id; a bucket is summed up in one hash, and only buckets that differ are told in
full, as digests. What is better known here is sent, what is better known there is pulled:

    A                                   B
    SyncBuckets (64 hashes)       →     differing()
    compare(), send SyncMembers   ←     SyncDigests of those buckets
    and Deltas; SyncDigests,      →     compare(), send SyncMembers and Deltas
      is_answer

Either side sends what the other lacks, so nothing has to be pulled; Difference names it all the same, for a side that
would rather ask for records than have them all at once. A member's order is (epoch, incarnation, rank of its state).

Pure functions; core.py calls them and knows what a merge may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final, TypeVar

from gpulayer.core.gossip.messages import Digest, Pull, SyncDigests
from gpulayer.model.ids import NodeId
from gpulayer.model.member import MemberState

M = TypeVar("M")

BUCKETS: Final = 64
DIGESTS_MAX: Final = 1000
# A link sends its frames one after the other: probes and orders wait for no more than this.
FRAME_BYTES_MAX: Final = 256 * 1024
# What a frame's envelope (codec, length, class) takes of it.
FRAME_ROOM: Final = FRAME_BYTES_MAX - 1024
RANK: Final[Mapping[MemberState, int]] = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}
"""Of two states at the same (epoch, incarnation) the higher one holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a list of digests tells about the other side; sorted by node."""

    members_lacking: tuple[NodeId, ...] = ()
    """It has them older, or (in buckets that were told completely) not at all: send them."""
    records_lacking: tuple[Pull, ...] = ()
    """As if it had sent these: answer them (Records.answer)."""
    members_wanted: tuple[NodeId, ...] = ()
    """We have them older, or not at all."""
    records_wanted: tuple[Pull, ...] = ()
    """Send it these."""


@lru_cache(maxsize=8192)
def bucket_of(node: NodeId) -> int:
    """The same on every node and in every process, which hash() is not."""
    return sha256(node.encode()).digest()[0] % BUCKETS


def hashes_of(digests: Iterable[Digest]) -> tuple[int, ...]:
    """One number of 64 bits for each bucket, whatever the order of the digests: the sum of its members' hashes."""
    sums = [0] * BUCKETS
    for digest in digests:
        sums[bucket_of(digest.node)] += _hash_of(digest)
    return tuple(total % 2**64 for total in sums)


def differing(mine: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    """The buckets whose hashes differ; all of them where the other side counts buckets in another way."""
    if len(mine) != len(theirs):
        return tuple(range(BUCKETS))
    return tuple(bucket for bucket, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)


def digest_messages(
    seq: int, digests: Iterable[Digest], buckets: Iterable[int], *, is_answer: bool = False
) -> list[SyncDigests]:
    """The digests of these buckets, in messages of DIGESTS_MAX at most. A message names the buckets that it tells
    completely. One whose members are more than a message takes is named by none: of it differences are found, absence
    is not. (64 buckets of 4,096 members have some 64 each.)"""
    by_bucket: dict[int, list[Digest]] = {bucket: [] for bucket in sorted(set(buckets)) if 0 <= bucket < BUCKETS}
    for digest in sorted(digests, key=lambda digest: digest.node):
        if (bucket := bucket_of(digest.node)) in by_bucket:
            by_bucket[bucket].append(digest)
    told: list[tuple[list[int], list[Digest]]] = [([], [])]
    for bucket, found in by_bucket.items():
        pieces = [found[begin : begin + DIGESTS_MAX] for begin in range(0, len(found), DIGESTS_MAX)] or [[]]
        for piece in pieces:
            if len(told[-1][1]) + len(piece) > DIGESTS_MAX:
                told.append(([], []))
            told[-1][1].extend(piece)
        if len(pieces) == 1:
            told[-1][0].append(bucket)
    return [
        SyncDigests(seq=seq, buckets=tuple(named), digests=tuple(found), is_answer=is_answer)
        for named, found in told
        if named or found
    ]


def compare(mine: Mapping[NodeId, Digest], theirs: Iterable[Digest], buckets: Iterable[int]) -> Difference:
    """The difference between all that we have and the digests of the buckets that the other side has told."""
    told = {digest.node: digest for digest in theirs}
    complete = frozenset(buckets)
    members_lacking, members_wanted = [], []
    records_lacking, records_wanted = [], []
    nodes = set(told) | {node for node in mine if bucket_of(node) in complete}
    for node in sorted(nodes):
        ours, other = mine.get(node), told.get(node)
        if _is_newer(ours, other):
            members_lacking.append(node)
        if _is_newer(other, ours):
            members_wanted.append(node)
        if pull := _pull_of(other, ours):
            records_lacking.append(pull)
        if pull := _pull_of(ours, other):
            records_wanted.append(pull)
    return Difference(
        members_lacking=tuple(members_lacking),
        records_lacking=tuple(records_lacking),
        members_wanted=tuple(members_wanted),
        records_wanted=tuple(records_wanted),
    )


def order_of(digest: Digest) -> tuple[int, int, int]:
    return digest.epoch, digest.incarnation, RANK[digest.state]


def frames(
    messages: Iterable[M], size_of: Callable[[M], int], bytes_max: int = FRAME_ROOM, count_max: int = 4096
) -> Iterator[tuple[M, ...]]:
    """Messages in their order, as many to a frame as fit. One that is larger than bytes_max gets a frame of its own:
    whoever made it answers for its size."""
    frame: list[M] = []
    size = 0
    for message in messages:
        more = size_of(message)
        if frame and (size + more > bytes_max or len(frame) >= count_max):
            yield tuple(frame)
            frame, size = [], 0
        frame.append(message)
        size += more
    if frame:
        yield tuple(frame)


def _hash_of(digest: Digest) -> int:
    told = f"{digest.node} {digest.epoch} {digest.incarnation} {digest.state} {digest.gc_version} {digest.version}"
    return int.from_bytes(sha256(told.encode()).digest()[:8], "big")


def _is_newer(one: Digest | None, other: Digest | None) -> bool:
    return one is not None and (other is None or order_of(one) > order_of(other))


def _pull_of(asker: Digest | None, giver: Digest | None) -> Pull | None:
    """What one who has `asker` would ask of one who has `giver`; None: there is nothing to be had."""
    if giver is None or giver.version == 0 or (asker and asker.epoch > giver.epoch):
        return None
    if asker is None or asker.epoch < giver.epoch:
        return Pull(node=giver.node, epoch=giver.epoch, have=(0, 0))
    if asker.version >= giver.version and asker.gc_version >= giver.gc_version:
        return None
    return Pull(node=giver.node, epoch=giver.epoch, have=(asker.gc_version, asker.version))
