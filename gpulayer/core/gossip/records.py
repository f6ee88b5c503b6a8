"""The nodes' records as one node holds them: its own, which it alone writes, and a copy of every other's.

A record is a map from key to value. Set and delete both take the owner's next version, so (epoch, gc_version,
max_version) only grows, and what a copy lacks is told by one number: all entries above it (van Renesse, Dumitriu,
Gough, Thomas: "Efficient Reconciliation and Flow Control for Anti-Entropy Protocols", 2008).

- A delete leaves a tombstone. The owner drops tombstones after a while and raises gc_version to the last of them;
  others follow it, and drop none by themselves. Whoever has not got as far as gc_version may have missed a delete, and
  is given everything anew (`reset`).
- Deltas are cut between versions, never within one. What came of a cut one is kept aside as a *series*, and takes
  effect when it has reached all that its sender had: a copy is always a state that its owner was in. Without that, two
  nodes at the same version could differ for good once the owner is gone, because an entry that was written anew between
  two parts is in neither.
- A new run's map replaces the old run's when it is here completely, and not before.

Nothing here says who is alive: core.py alone decides that, and asks this module for Deltas and Pulls to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpulayer.core.gossip.messages import Delta, Entry, Pull
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.record_copy import (
    DELTA_BYTES,
    VERSION_MAX,
    RecordCopy,
    Series,
    broken_bound_of,
    malformed,
    parts,
)
from gpulayer.model.errors import Refused
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.record import RECORDS_BYTES_MAX
from gpulayer.model.units import NEVER, Instant

# Of which nothing more came for so long: its sender is gone, and it only takes room.
SERIES_SECONDS_MAX = 60.0
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a delta, or an announcement, did."""

    changed: tuple[str, ...] = ()
    """Keys whose value is another one now, or gone; sorted."""
    is_complete: bool = False
    """All that was announced of the newest run is here."""
    is_new_run: bool = False
    """This run's map took the place of the one of the run before, or of none; `changed` may be empty all the same."""
    wanted: Pull | None = None
    """Something is missing here: ask the sender for this."""
    refused: str = ""
    """It broke a bound, in a sentence; nothing was changed."""


class _Peer:
    """One other node's record here."""

    __slots__ = ("announced", "counted", "held", "node", "series")

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.held: RecordCopy | None = None
        self.series: Series | None = None
        self.announced = (0, 0)
        """(epoch, max_version): the newest that anybody said there is."""
        self.counted = 0
        """Its part of Records' bytes."""

    @property
    def bytes(self) -> int:
        return (self.held.bytes if self.held else 0) + (self.series.bytes if self.series else 0)

    @property
    def is_complete(self) -> bool:
        return self.held is not None and (self.held.epoch, self.held.max_version) >= self.announced


class Records:
    """All records at one node. A version, unless said otherwise, is (gc_version, max_version)."""

    def __init__(self, own: Run, profile: Profile) -> None:
        self._run = own
        self._profile = profile
        self._own = RecordCopy(own.epoch)
        self._tombstones: deque[tuple[float, int]] = deque()
        """(made at, version) of our own, in the order of both; some have been replaced by a value since."""
        self._peers: dict[NodeId, _Peer] = {}
        self._unfinished: dict[NodeId, _Peer] = {}
        """Those with a series."""
        self._bytes = 0

    # --- our own ------------------------------------------------------------------------------------------------------

    @property
    def own_version(self) -> tuple[int, int]:
        return self._own.version

    def set_own(self, values: Mapping[str, bytes | None], now: Instant) -> tuple[str, ...]:
        """Sets keys of our record; None deletes. Gives the keys that changed, in the order of their new versions: what
        has its value already takes no version. Refused where a bound would be broken: then nothing was changed."""
        own = self._own
        changes: dict[str, bytes | None] = {}
        for key, value in values.items():
            present = own.entries.get(key)
            if value != (present.value if present else None):
                if why := broken_bound_of(key, value):
                    raise _too_large(why)
                changes[key] = value
        if not changes:
            return ()
        entries = [Entry(key, own.max_version + n, value) for n, (key, value) in enumerate(changes.items(), start=1)]
        after = own.after(entries, own.gc_version, own.max_version + len(entries))
        if after.broken_bound():
            # Tombstones only spare a whole copy to those who are behind.
            after = own.after(entries, after.max_version, after.max_version)
        if why := after.broken_bound():
            raise _too_large(why)
        if (room := RECORDS_BYTES_MAX - self._bytes + own.bytes) < after.bytes:
            raise _too_large(f"{after.bytes} bytes, but all nodes' records together leave room for {room}")
        self._set_own_copy(after)
        if own.gc_version < after.gc_version:
            self._tombstones.clear()
        else:
            self._tombstones.extend((now, entry.version) for entry in entries if entry.value is None)
        return tuple(changes)

    def set_own_as_fits(self, values: Mapping[str, bytes | None], now: Instant) -> tuple[tuple[str, ...], str]:
        """set_own(); where a bound would be broken, of what fits: one thing too much must not keep an endpoint listed
        that is gone. Deletes come first, then what is told already, then what is new. Gives the keys that changed, and
        why the rest did not (empty: there is none)."""
        items = sorted(values.items(), key=lambda item: (item[1] is not None, item[0] not in self._own.entries))
        changed: list[str] = []
        why = ""
        # Halves of what was refused, so that few keys too many cost few tries.
        waiting = [items]
        while waiting:
            part = waiting.pop()
            try:
                changed += self.set_own(dict(part), now)
            except Refused as exc:
                if len(part) == 1:
                    why = why or str(exc)
                else:
                    middle = len(part) // 2
                    waiting += [part[middle:], part[:middle]]
        return tuple(changed), why

    def outbid(self, version: tuple[int, int]) -> bool:
        """Somebody has a record of our run at `version`. Where that is above ours, another daemon with a copy of our
        data directory wrote it: ours goes above it, and from there to everybody anew. False: it is not above ours."""
        gc_version, max_version = version
        if gc_version <= self._own.gc_version and max_version <= self._own.max_version:
            return False
        if not 0 <= gc_version <= max_version < VERSION_MAX:
            return False
        above = max(max_version, self._own.max_version) + 1
        self._set_own_copy(self._own.after((), above, above))
        self._tombstones.clear()
        return True

    @property
    def deadline(self) -> Instant:
        """When tick() has something to do."""
        due = [peer.series.moved_at + SERIES_SECONDS_MAX for peer in self._unfinished.values() if peer.series]
        if self._tombstones:
            due.append(self._tombstones[0][0] + self._profile.record_tombstone)
        return Instant(min(due, default=NEVER))

    def tick(self, now: Instant) -> bool:
        """Drops what is due. True: own_version has moved, and is to be told."""
        for peer in list(self._unfinished.values()):
            if peer.series and peer.series.moved_at + SERIES_SECONDS_MAX <= now:
                self._put(peer, peer.held, None)
        keep = self._profile.record_tombstone
        if not self._tombstones or self._tombstones[0][0] + keep > now:
            return False
        # Those of half the age go along: everybody is told of a collection, so there are two within that time at most.
        gc_version = self._own.gc_version
        while self._tombstones and self._tombstones[0][0] + keep / 2 <= now:
            gc_version = self._tombstones.popleft()[1]
        self._set_own_copy(self._own.after((), gc_version, self._own.max_version))
        return True

    # --- all ----------------------------------------------------------------------------------------------------------

    def values(self, node: NodeId) -> Mapping[str, bytes]:
        """Its record; of a new run the old run's, until the new one's is here. What was given never changes."""
        copy = self._copy(node)
        return copy.values if copy else _NOTHING

    def is_stale(self, node: NodeId) -> bool:
        """Whether values() are none, or those of an older run than is known of."""
        copy = self._copy(node)
        return copy is None or (node in self._peers and copy.epoch < self._peers[node].announced[0])

    def announced_version(self, node: NodeId) -> int:
        """The version of its newest run's record that was announced and is not here yet; 0: nothing is missing."""
        peer = self._peers.get(node)
        return 0 if peer is None or peer.is_complete else peer.announced[1]

    def version_of(self, node: NodeId) -> tuple[int, int, int]:
        """(epoch, gc_version, max_version) of values(), zeros for none. Equal for equal values, so that what was made
        of them can be kept."""
        copy = self._copy(node)
        return (copy.epoch, *copy.version) if copy else (0, 0, 0)

    def version_at(self, node: NodeId, epoch: int) -> tuple[int, int]:
        """What is held of this run of it, as a digest says it; (0, 0): nothing."""
        copy = self._copy(node)
        return copy.version if copy and copy.epoch == epoch else (0, 0)

    def deltas(self, node: NodeId, have: tuple[int, int], bytes_max: int) -> list[Delta]:
        """What is here above `have` (of the run that is held here), in version order, each delta of bytes_max on the
        wire at most; an entry that alone is larger travels alone. Empty: nothing is above it."""
        copy = self._copy(node)
        if copy is None or copy.max_version == 0:
            return []
        have_gc, have_max = have
        # Who has followed gc_version so far, or is past it, has missed no delete of which nothing is left here.
        reset = have_max == 0 or max(have) < copy.gc_version
        begin = 0 if reset else min(have_max, copy.max_version)
        if begin == copy.max_version and have_gc >= copy.gc_version:
            return []
        found: list[Delta] = []
        for part, is_last in parts(copy.above(begin), bytes_max - DELTA_BYTES):
            end = copy.max_version if is_last else part[-1].version
            found.append(
                Delta(
                    node=node,
                    epoch=copy.epoch,
                    gc_version=copy.gc_version,
                    from_version=begin,
                    to_version=end,
                    entries=tuple(part),
                    reset=reset and not found,
                    max_version=copy.max_version,
                )
            )
            begin = end
        return found

    def answer(self, pull: Pull, bytes_max: int) -> list[Delta]:
        """deltas() for a Pull, which may mean another run than the one that is held here."""
        copy = self._copy(pull.node)
        if copy is None or copy.epoch < pull.epoch:
            return []
        return self.deltas(pull.node, pull.have if copy.epoch == pull.epoch else (0, 0), bytes_max)

    # --- others' ------------------------------------------------------------------------------------------------------

    def announced(self, node: NodeId, epoch: int, version: tuple[int, int]) -> Applied:
        """Somebody says that this run of `node` has its record at this version (a gc_version of 0 says nothing).
        `wanted`: what of it is not here. Cheap where nothing is new."""
        gc_version, max_version = version
        if node == self._run.node:
            return Applied(is_complete=True)
        if not 0 <= gc_version <= max_version <= VERSION_MAX:
            return Applied(refused=f"{node}'s record at version {max_version}, collected to {gc_version}: impossible")
        peer = self._peer(node)
        if peer is None:
            return Applied(refused=self._too_many(node))
        peer.announced = max(peer.announced, (epoch, max_version))
        held = peer.held
        if held and (held.epoch, held.max_version) >= (epoch, max_version):
            if held.epoch == epoch:
                self._follow(peer, held, gc_version)
            return Applied(is_complete=peer.is_complete)
        return Applied(wanted=self.pull(node, epoch) if max_version else None)

    def pull(self, node: NodeId, epoch: int) -> Pull:
        """What to ask for to have this run's record: what is above the copy, or above the series that has come
        further."""
        peer = self._peers.get(node)
        if peer and peer.series and peer.series.epoch == epoch:
            return Pull(node=node, epoch=epoch, have=(peer.series.gc_version, peer.series.to_version))
        return Pull(node=node, epoch=epoch, have=self.version_at(node, epoch))

    def apply(self, delta: Delta, now: Instant) -> Applied:
        """Takes what raises (epoch, gc_version, max_version) here and drops anything else. The bounds hold, whatever it
        says."""
        node = delta.node
        if node == self._run.node:
            return Applied(is_complete=True)
        if why := malformed(delta):
            return Applied(refused=f"{node}'s record: {why}")
        peer = self._peer(node)
        if peer is None:
            return Applied(refused=self._too_many(node))
        peer.announced = max(peer.announced, (delta.epoch, delta.max_version))
        held = peer.held
        if held and (delta.epoch, delta.max_version) <= (held.epoch, held.max_version):
            # Late, or said before. A collection may be news in it, and needs nothing of what it carries.
            if delta.epoch == held.epoch:
                self._follow(peer, held, delta.gc_version)
            return Applied(is_complete=peer.is_complete)
        base = held if held and held.epoch == delta.epoch else None
        series = self._series_for(peer, base, delta)
        if series is None:
            return Applied(wanted=self._way_on(peer, base, delta))
        series.add(delta, now)
        if series.is_complete:
            return self._commit(peer, series)
        why = series.broken_bound() or self._broken_total(peer, (held.bytes if held else 0) + series.bytes)
        self._put(peer, held, None if why else series)
        return Applied(refused=f"{node}'s record: {why}" if why else "")

    def forget(self, node: NodeId) -> None:
        """Everything of it: its tombstone as a member is over."""
        peer = self._peers.get(node)
        if peer:
            self._put(peer, None, None)
            del self._peers[node]

    def check(self) -> None:
        """Asserts what must always hold."""
        assert self._own.epoch == self._run.epoch
        assert self._run.node not in self._peers
        assert len(self._peers) <= self._profile.members_max
        assert self._bytes == self._own.bytes + sum(peer.bytes for peer in self._peers.values())
        assert self._bytes <= RECORDS_BYTES_MAX
        assert self._unfinished == {node: peer for node, peer in self._peers.items() if peer.series}
        self._own.check()
        for peer in self._peers.values():
            held, series = peer.held, peer.series
            if held:
                held.check()
                assert (held.epoch, held.max_version) <= peer.announced
            if series:
                assert not series.broken_bound()
                assert not series.is_complete
                assert (series.epoch, series.view) <= peer.announced
                assert held is None or (held.epoch, held.max_version) < (series.epoch, series.view)
        made = [version for _, version in self._tombstones]
        assert made == sorted(set(made))

    # --- within -------------------------------------------------------------------------------------------------------

    def _copy(self, node: NodeId) -> RecordCopy | None:
        if node == self._run.node:
            return self._own
        peer = self._peers.get(node)
        return peer.held if peer else None

    def _peer(self, node: NodeId) -> _Peer | None:
        """What is here of it, new if need be; None: there are too many."""
        peer = self._peers.get(node)
        if peer is None and len(self._peers) < self._profile.members_max:
            peer = self._peers[node] = _Peer(node)
        return peer

    def _series_for(self, peer: _Peer, base: RecordCopy | None, delta: Delta) -> Series | None:
        """The series that this delta goes on with, or a new one that it begins; None: it joins on to nothing here."""
        begun = None
        if base and delta.from_version <= base.max_version and delta.gc_version <= base.max_version:
            begun = Series(delta.epoch, is_whole=False, from_version=base.max_version)
        elif delta.from_version == 0:
            begun = Series(delta.epoch, is_whole=True, from_version=0)
        if begun and delta.to_version == delta.max_version:
            return begun  # all there is, at once
        if peer.series and peer.series.goes_on_with(delta):
            return peer.series
        if peer.series and peer.series.epoch > delta.epoch:
            return None  # parts of an older run do not displace those of the newer
        return begun

    def _way_on(self, peer: _Peer, base: RecordCopy | None, delta: Delta) -> Pull | None:
        """What to ask the sender of a delta that joined on to nothing, so that its answer does."""
        series = peer.series
        if series and series.epoch > delta.epoch:
            return None
        if series and series.epoch == delta.epoch and delta.max_version < series.view:
            # It lacks something that the series needs; what it has is taken up where the copy ends.
            return Pull(node=delta.node, epoch=delta.epoch, have=base.version if base else (0, 0))
        return self.pull(delta.node, delta.epoch)

    def _commit(self, peer: _Peer, series: Series) -> Applied:
        """A complete series takes effect: the copy moves on to a later state of its owner."""
        held = peer.held
        base = held if held and held.epoch == series.epoch else None
        is_whole = base is None or series.is_whole
        start = RecordCopy(series.epoch, base.gc_version if base else 0) if base is None or is_whole else base
        after = start.after(series.entries.values(), series.gc_version, series.view)
        left = peer.series
        if left and (left.epoch, left.to_version) <= (after.epoch, after.max_version):
            left = None
        if why := after.broken_bound() or self._broken_total(peer, after.bytes + (left.bytes if left else 0)):
            self._put(peer, held, None)
            return Applied(refused=f"{peer.node}'s record: {why}")
        before = held.values if held else _NOTHING
        self._put(peer, after, left)
        touched = {*before, *after.values} if is_whole else set(series.entries)
        return Applied(
            changed=tuple(sorted(key for key in touched if before.get(key) != after.values.get(key))),
            is_complete=peer.is_complete,
            is_new_run=base is None,
        )

    def _follow(self, peer: _Peer, held: RecordCopy, gc_version: int) -> None:
        """Its owner has dropped the tombstones up to gc_version, and this copy is past that: so can it."""
        assert gc_version <= held.max_version, (gc_version, held.max_version)
        if held.gc_version < gc_version:
            self._put(peer, held.after((), gc_version, held.max_version), peer.series)

    def _put(self, peer: _Peer, held: RecordCopy | None, series: Series | None) -> None:
        peer.held, peer.series = held, series
        if series:
            self._unfinished[peer.node] = peer
        else:
            self._unfinished.pop(peer.node, None)
        self._bytes += peer.bytes - peer.counted
        peer.counted = peer.bytes

    def _set_own_copy(self, own: RecordCopy) -> None:
        self._bytes += own.bytes - self._own.bytes
        self._own = own

    def _broken_total(self, peer: _Peer, bytes_wanted: int) -> str:
        room = RECORDS_BYTES_MAX - self._bytes + peer.counted
        return f"{bytes_wanted} bytes, but all records together leave room for {room}" if bytes_wanted > room else ""

    def _too_many(self, node: NodeId) -> str:
        return f"{node}'s record: records of {len(self._peers)} nodes are here, {self._profile.members_max} may be"


def _too_large(why: str) -> Refused:
    return Refused(
        f"not all of this node's record can be told to others: {why}",
        hint="run fewer replicas on this node",
        code="record_too_large",
    )
