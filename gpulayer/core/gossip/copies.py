"""How a change of one node's record gets to all others: pushed while small, pulled when not, compared now and then.

The rules of a record itself are records.py's, of a comparison sync.py's; here is when, to whom, and over what.
A node passes on that a record has moved once it has it itself. So whoever hears of it can ask the one who said so, and
a large record goes down a tree of many instead of being drawn from its owner by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.messages import (
    Delta,
    Digest,
    Message,
    Newer,
    Pull,
    RecordChanged,
    SyncBuckets,
    SyncDigests,
    SyncMembers,
)
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.records import Applied, Records
from gpulayer.core.gossip.spread import Spread
from gpulayer.core.gossip.sync import FRAME_ROOM, compare, differing, digest_messages, hashes_of
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.units import NEVER, Instant

# A pull is asked again after so long, doubling; then the next comparison of tables has to find the difference. Of the
# hundreds of pulls that a change causes in a large cluster some are lost, and the last one is when it is everywhere.
PULL_RETRY = 0.25
PULL_TRIES_MAX = 6
# Pulls that leave in one step; the rest wait a moment, for the answers.
PULLS_PER_STEP = 64
PULL_PAUSE = 0.02
# Seconds in which the rumours of a join are through, at any size that a cluster has.
SYNC_SOON = 1.0
MEMBERS_PER_MESSAGE = 64
# Records that one answer to a sync carries; what is left is pulled.
SYNC_RECORDS_BYTES_MAX = 4 * 1024 * 1024


@dataclass(slots=True)
class _Pull:
    source: NodeId
    """Who said that there is something."""
    due: Instant
    tries: int = 0


class Copies:
    """`rng`: when to pull, and with whom to compare."""

    def __init__(
        self,
        members: Members,
        outbox: Outbox,
        spread: Spread,
        records: Records,
        profile: Profile,
        *,
        size_of: Callable[[Message], int],
        rng: Random,
    ) -> None:
        self._members = members
        self._outbox = outbox
        self._spread = spread
        self._records = records
        self._profile = profile
        self._size_of = size_of
        self._random = rng
        self.leader: NodeId | None = None
        self._pulls: dict[NodeId, _Pull] = {}
        self._untold: set[NodeId] = set()
        """Members whose record is known to have moved; it is passed on when it is here."""
        self._behind: dict[NodeId, Instant] = {}
        """Members of whose record something is missing here, and since when."""
        self._sync_seq = 0
        self._sync_at: Instant = NEVER

    @property
    def deadline(self) -> Instant:
        pull = min((pull.due for pull in self._pulls.values()), default=NEVER)
        return Instant(min(pull, self._sync_at, self._records.deadline))

    def tick(self, now: Instant) -> None:
        if self._records.deadline <= now and self._records.tick(now):
            self._tell_own_version(now)
        due = [node for node, pull in self._pulls.items() if pull.due <= now]
        for node in due[:PULLS_PER_STEP]:
            self._ask(node, now)
        for node in due[PULLS_PER_STEP:]:
            self._pulls[node].due = Instant(now + PULL_PAUSE)
        if self._sync_at <= now:
            self._sync_at = NEVER
            if others := self._outbox.some_live(1):
                self.schedule_sync(now)
                self.open_sync(others[0], now)

    # --- our own ------------------------------------------------------------------------------------------------------

    def set_own(self, values: Mapping[str, bytes | None], now: Instant) -> None:
        own = self._members.own
        before = self._records.own_version
        keys, why = self._records.set_own_as_fits(values, now)
        if why:
            self._outbox.warn("record_too_large", own.id, why, now)
        if not keys:
            return
        self._outbox.do(RecordChanged(node=own.id, keys=keys, is_complete=True))
        self._tell_own_version(now)
        deltas = self._records.deltas(own.id, before, FRAME_ROOM)
        if self.leader is not None and self.leader != own.id and self._members.is_live(self.leader):
            self._outbox.frame(self.leader, [self._members.word_of(own.id), *deltas])
        # One that is still being told is told again from where it began, or those who missed it could not go on.
        pending = self._spread.pending(own.id, Delta)
        if isinstance(pending, Delta):
            base = (min(before[0], pending.gc_version), pending.from_version)
            longer = self._records.deltas(own.id, base, FRAME_ROOM)
            deltas = longer if self._rides_along(longer) else deltas
        if self._rides_along(deltas):
            self._spread.add(deltas[0], now, is_urgent=False, times=self._profile.delta_owner_transmissions)

    def outbid(self, version: tuple[int, int], now: Instant) -> None:
        """Somebody has a record of our run that is newer than ours."""
        if self._records.outbid(version):
            self._tell_own_version(now)

    def _tell_own_version(self, now: Instant) -> None:
        self._members.hear_own_version(self._records.own_version)
        self._spread.add(self._members.newer_of(self._members.own.id), now, is_urgent=False)

    def _rides_along(self, deltas: Sequence[Delta]) -> bool:
        return len(deltas) == 1 and self._outbox.fits(deltas[0], self._profile.delta_bytes_max)

    # --- others' ------------------------------------------------------------------------------------------------------

    def hear_newer(self, newer: Newer, source: NodeId, now: Instant) -> None:
        version = newer.gc_version, newer.version
        if newer.node != self._members.own.id:
            self.hear_version(newer.node, newer.epoch, version, source, now)
        elif newer.epoch == self._members.own.run.epoch:
            self.outbid(version, now)

    def hear_version(self, node: NodeId, epoch: int, version: tuple[int, int], source: NodeId, now: Instant) -> None:
        """`source` says how far the record of a member is."""
        member = self._members.get(node)
        if member is None or member.run.epoch != epoch or node == self._members.own.id:
            return
        if self._members.hear_version(node, epoch, version):
            self._untold.add(node)
        applied = self._records.announced(node, epoch, version)
        if applied.wanted is not None and node not in self._pulls:
            # Long enough that what rides in the same packet is there before.
            self._pulls[node] = _Pull(source, Instant(now + self._jitter(node, source)))
        self._settle(node, applied, now)

    def hear_delta(self, delta: Delta, source: NodeId, now: Instant) -> None:
        member = self._members.get(delta.node)
        if member is None or member.run.epoch != delta.epoch or delta.node == self._members.own.id:
            return
        if self._members.hear_version(delta.node, delta.epoch, (delta.gc_version, delta.max_version)):
            self._untold.add(delta.node)
        was_asked = delta.node in self._pulls and self._pulls[delta.node].tries > 0
        applied = self._records.apply(delta, now)
        if applied.refused:
            self._outbox.warn("record_refused", delta.node, applied.refused, now)
            return
        if applied.changed or applied.is_new_run:
            self._outbox.do(RecordChanged(node=delta.node, keys=applied.changed, is_complete=applied.is_complete))
            if not (delta.reset or was_asked) and self._rides_along([delta]):
                self._spread.add(delta, now, is_urgent=False, times=self._profile.delta_transmissions)
        pull = self._pulls.get(delta.node)
        if applied.wanted is not None and pull is None:
            self._pulls[delta.node] = _Pull(source, Instant(now + self._jitter(delta.node, source)))
        elif pull is not None and pull.tries and not applied.is_complete:
            pull.due = max(pull.due, Instant(now + PULL_RETRY))
        self._settle(delta.node, applied, now)

    def hear_pull(self, pull: Pull, source: NodeId, at: Address | None, now: Instant) -> None:
        self._give(source, self._records.answer(pull, FRAME_ROOM), at, now)

    def forget(self, node: NodeId) -> None:
        self._records.forget(node)
        self._pulls.pop(node, None)
        self._untold.discard(node)
        self._behind.pop(node, None)

    def behind_since(self, node: NodeId) -> Instant | None:
        """Since when the copy of its record has not been what was announced; None: nothing is missing."""
        return self._behind.get(node)

    def _settle(self, node: NodeId, applied: Applied, now: Instant) -> None:
        if not applied.is_complete:
            if self._records.announced_version(node):
                self._behind.setdefault(node, now)
            return
        self._behind.pop(node, None)
        self._pulls.pop(node, None)
        if node in self._untold:
            self._untold.discard(node)
            if self._members.is_live(node):
                self._spread.add(self._members.newer_of(node), now, is_urgent=False)

    def _jitter(self, node: NodeId, source: NodeId) -> float:
        """An owner may be asked by all at once; who passes it on is asked by a few."""
        most = self._profile.pull_jitter
        if self.leader == self._members.own.id:
            return 0.0
        return self._random.uniform(0.0, most if source == node else most / 10)

    def _ask(self, node: NodeId, now: Instant) -> None:
        member = self._members.get(node)
        pull = self._pulls[node]
        if member is None or pull.tries >= PULL_TRIES_MAX:
            del self._pulls[node]
            return
        others = self._outbox.some_live(1, without=(node,))
        # Who said so, then the owner, then anybody.
        sources = ([pull.source, node], [node, *others], [*others, node])[min(pull.tries, 2)]
        to = next((one for one in [*sources, *others] if self._members.is_live(one)), None)
        if to is None:
            del self._pulls[node]
            return
        pull.due = Instant(now + PULL_RETRY * 2**pull.tries)
        pull.tries += 1
        self._outbox.counters["pulls"] += 1
        self._outbox.send(to, [self._records.pull(node, member.run.epoch)], now)

    # --- comparing ----------------------------------------------------------------------------------------------------

    def joined(self, now: Instant) -> None:
        """Somebody is new. Where many are at once, rumours miss some pair or other: tables are compared as soon as the
        rumours are through, and not only when that is due anyway."""
        soon = Instant(now + SYNC_SOON * self._random.uniform(1.0, 2.0))
        self._sync_at = min(self._sync_at, soon)

    def schedule_sync(self, now: Instant) -> None:
        """The next one by itself, if none is to come."""
        if self._sync_at == NEVER:
            self._sync_at = Instant(now + self._profile.sync_interval * self._random.uniform(0.8, 1.2))

    def open_sync(self, to: NodeId, now: Instant, *, by_link: bool = False) -> None:
        """Most often the tables are equal, and one packet shows it: no stream is opened for that."""
        self._sync_seq += 1
        self._outbox.counters["syncs"] += 1
        opening = SyncBuckets(seq=self._sync_seq, hashes=hashes_of(self._digests().values()))
        if by_link:
            self._outbox.frame(to, [self._members.word_of(self._members.own.id), opening])
        else:
            self._outbox.send(to, [opening], now)

    def hear_buckets(self, opening: SyncBuckets, source: NodeId, at: Address | None, now: Instant) -> None:
        mine = self._digests()
        buckets = differing(hashes_of(mine.values()), opening.hashes)
        if buckets:
            self._outbox.counters["syncs_differing"] += 1
            self._give(source, digest_messages(opening.seq, mine.values(), buckets), at, now)

    def hear_digests(self, told: SyncDigests, source: NodeId, at: Address | None, now: Instant) -> None:
        mine = self._digests()
        found = compare(mine, told.digests, told.buckets)
        given: list[Message] = list(self._whole(found.members_lacking))
        room = SYNC_RECORDS_BYTES_MAX
        for pull in found.records_lacking:
            if room <= 0:
                break
            deltas = self._records.answer(pull, FRAME_ROOM)
            room -= sum(map(self._size_of, deltas))
            given.extend(deltas)
        if not told.is_answer and (found.members_wanted or found.records_wanted):
            given.extend(digest_messages(told.seq, mine.values(), told.buckets, is_answer=True))
        self._give(source, given, at, now)

    def _digests(self) -> dict[NodeId, Digest]:
        digests = {}
        for node, member in self._members.all.items():
            if self._members.is_provisional(node):
                continue
            gc_version, version = self._records.version_at(node, member.run.epoch)
            digests[node] = Digest(node, member.run.epoch, member.incarnation, member.state, gc_version, version)
        return digests

    def _whole(self, nodes: Iterable[NodeId]) -> list[SyncMembers]:
        told = [
            (self._members.word_of(node), self._members.all[node].state, self._members.all[node].cause)
            for node in nodes
            if node in self._members.all
        ]
        return [
            SyncMembers(members=tuple(told[begin : begin + MEMBERS_PER_MESSAGE]))
            for begin in range(0, len(told), MEMBERS_PER_MESSAGE)
        ]

    def _give(self, to: NodeId, messages: Sequence[Message], at: Address | None, now: Instant) -> None:
        """The way that was used, if it fits."""
        if not messages:
            return
        if at is not None:
            self._outbox.send(to, messages, now, at)
        else:
            self._outbox.frame(to, messages)

    def check(self) -> None:
        own = self._members.own
        assert self._records.own_version == own.version, (self._records.own_version, own.version)
        assert own.id not in self._pulls
        assert own.id not in self._untold
        assert self._behind.keys() <= self._members.all.keys(), self._behind.keys() - self._members.all.keys()
        assert self._pulls.keys() <= self._members.all.keys(), self._pulls.keys() - self._members.all.keys()
