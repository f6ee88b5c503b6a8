"""The table of members: who is in it, and which word about one of them is newer.

Holds the order of (epoch, incarnation, state) and nothing of time but tombstones: when somebody is suspected or dead is
suspicion's business. Besides itself a node keeps `live` members (alive or suspect), gone ones (dead or left) until
their tombstone ends, and pending ones, of whom it has heard but who have not shown yet that they were let in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto

from gpulayer.core.gossip.messages import Alive, Dead, Left, Newer, Ping, Suspect
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DeathCause, Member, Run
from gpulayer.model.units import NEVER, Instant

# Known by hearsay, let in by nobody yet: a few racing joins are normal, more is a flood.
PENDING_MAX = 256
# Nodes that were taken out of the registry: what is said of them is not believed, whoever says it.
REMOVED_MAX = 4096

Accusation = Suspect | Dead | Left


class News(Enum):
    """What an Alive turned out to be."""

    JOINED = auto()
    """Somebody new, or a new run of somebody known."""
    CHANGED = auto()
    """A higher incarnation: it lives, whatever was said."""
    KNOWN = auto()
    STALE = auto()
    """It is held to be suspect or gone at this incarnation or a higher one: it should be told."""
    OLD = auto()
    """Of a run that is over."""
    CLONE = auto()
    """Of another run with the same epoch: a copied data directory."""
    PENDING = auto()
    """Not let in, as far as is known here; kept apart."""
    FULL = auto()


class Members:
    def __init__(self, own: Member, profile: Profile) -> None:
        self._profile = profile
        self._own = own.id
        self._members: dict[NodeId, Member] = {own.id: own}
        self._words: dict[NodeId, Alive] = {}
        """The newest that each of the others said of itself: only this is passed on in its name, while an accusation
        that we believe may be of a higher incarnation."""
        self._live: dict[NodeId, None] = {}
        """Others that are alive or suspect."""
        self.suspects: set[NodeId] = set()
        self._gone: dict[NodeId, None] = {}
        """Others that are dead or have left."""
        self._pending: dict[NodeId, Alive] = {}
        self._provisional: set[NodeId] = set()
        """Known from a link alone: their own Alive, whatever its incarnation, is news."""
        self._registry: frozenset[NodeId] | None = None
        self._linked: set[NodeId] = set()
        """Shown by certificate that they were let in."""
        self._removed: dict[NodeId, None] = {}
        self._parting: dict[NodeId, int] = {}
        """Taken out of the registry a moment ago, and the epoch that is heard still."""
        self._reap_at: Instant = NEVER
        self._claims: dict[NodeId, tuple[tuple[Address, ...], Instant]] = {}
        """The address that each of the live ones is reached at, and since when it says so."""
        self._claimants: dict[tuple[Address, ...], set[NodeId]] = {}
        self.heard_anybody_at: Instant = Instant(0.0)
        """When the last authenticated packet or frame came, of anybody; 0.0: never."""

    @property
    def own(self) -> Member:
        return self._members[self._own]

    @property
    def all(self) -> Mapping[NodeId, Member]:
        return self._members

    @property
    def live(self) -> tuple[NodeId, ...]:
        """Other members that are alive or suspect."""
        return tuple(self._live)

    @property
    def count(self) -> int:
        """N of the formulas: live members, this one too."""
        return len(self._live) + 1

    @property
    def well(self) -> int:
        """Live members that are not suspected, this one too."""
        return 1 + len(self._live) - len(self.suspects)

    @property
    def gone(self) -> list[Member]:
        """Others that are dead or have left."""
        return [self._members[node] for node in self._gone]

    @property
    def reap_at(self) -> Instant:
        """When the first tombstone ends."""
        return self._reap_at

    def get(self, node: NodeId) -> Member | None:
        return self._members.get(node)

    def word_of(self, node: NodeId) -> Alive:
        """What is passed on in its name, with the newest version of its record that is known of."""
        member = self._members[node]
        if node == self._own:
            return Alive(
                run=member.run,
                incarnation=member.incarnation,
                addresses=member.addresses,
                gc_version=member.version[0],
                version=member.version[1],
                flags=member.flags,
                key_ids=member.key_ids,
                protocol=member.protocol,
            )
        word = self._words[node]
        if (word.gc_version, word.version) != member.version:
            word = self._words[node] = replace(word, gc_version=member.version[0], version=member.version[1])
        return word

    def ping_of(self, seq: int, target: Run) -> Ping:
        """Are you there? With the headline of our own record."""
        own = self.own
        return Ping(
            seq=seq, target=target.node, epoch=target.epoch, incarnation=own.incarnation, version=own.version[1]
        )

    def newer_of(self, node: NodeId) -> Newer:
        """How far its record is."""
        member = self._members[node]
        gc_version, version = member.version
        return Newer(node=node, epoch=member.run.epoch, gc_version=gc_version, version=version)

    def is_live(self, node: NodeId) -> bool:
        return node in self._live

    def twins_of(self, node: NodeId) -> list[NodeId]:
        """Other live members that are reached at the address of this one; sorted."""
        member, own = self._members[node], self.own
        address = member.addresses[:1]
        if not address:
            return []
        ours = {own.id} if own.addresses[:1] == address else set()
        there = self._claimants.get(address, set())
        return sorted((there | ours) - {node}) if ours or len(there) > 1 else []

    def claimed_at(self, node: NodeId) -> Instant:
        """Since when a live member is reached at its present address, as far as known here; 0.0 for ourselves."""
        return self._claims[node][1] if node in self._claims else Instant(0.0)

    def is_provisional(self, node: NodeId) -> bool:
        return node in self._provisional

    def is_let_go(self, run: Run) -> bool:
        """Whether nothing that it says, or that is said of it, is believed any more."""
        return run.node in self._removed or self._parting.get(run.node, run.epoch) != run.epoch

    def is_admitted(self, node: NodeId) -> bool:
        """Whether a word about an unknown `node` makes it a member."""
        if node in self._removed or node in self._parting:
            return False
        return self._registry is None or node in self._registry or node in self._linked

    def check(self) -> None:
        own = self.own
        assert own.state in ("alive", "left"), own
        assert self._own not in self._live
        assert not self._pending.keys() & self._members.keys(), self._pending.keys() & self._members.keys()
        assert len(self._pending) <= PENDING_MAX
        assert len(self._removed) <= REMOVED_MAX
        assert len(self._members) <= self._profile.members_max
        assert self._provisional <= self._live.keys(), self._provisional
        assert self.suspects == {node for node in self._live if self._members[node].state == "suspect"}
        assert self._claims.keys() == self._live.keys()
        assert all(node in self._claimants[address] for node, (address, _) in self._claims.items())
        assert sum(map(len, self._claimants.values())) == len(self._claims)
        assert self._gone.keys() == self._members.keys() - self._live.keys() - {self._own}
        assert self._words.keys() == self._members.keys() - {self._own}
        for node, member in self._members.items():
            assert member.id == node, member
            assert (node in self._live) == (node != self._own and member.state in ("alive", "suspect")), member
            assert (member.cause is not None) == (member.state == "dead"), member
            assert len(member.addresses) <= 4, member
            if node != self._own:
                word = self._words[node]
                assert word.run == member.run, (word, member)
                assert word.incarnation <= member.incarnation, (word, member)

    # --- who may be here --------------------------------------------------------------------------------------------

    def set_registry(
        self, nodes: frozenset[NodeId] | None, parting: frozenset[NodeId] = frozenset()
    ) -> tuple[list[NodeId], list[Alive]]:
        """-> members that the registry has dropped (to be forgotten), what pending ones said that it now holds."""
        before = (self._registry or frozenset()) | self._parting.keys()
        self._registry = nodes
        if nodes is None:
            return [], []
        for node in nodes & self._removed.keys():
            del self._removed[node]
        self._parting = {
            node: self._parting.get(node) or (self._members[node].run.epoch if node in self._members else 0)
            for node in parting - nodes - {self._own}
        }
        dropped = sorted(before - nodes - self._parting.keys() - {self._own})
        for node in dropped:
            self._linked.discard(node)
            self._removed[node] = None
            self._pending.pop(node, None)
            if len(self._removed) > REMOVED_MAX:
                del self._removed[next(iter(self._removed))]
        admitted = [self._pending.pop(node) for node in sorted(nodes & self._pending.keys())]
        return [node for node in dropped if node in self._members], admitted

    def admit(self, node: NodeId) -> Alive | None:
        """A link with it stands, and it was not let go -> what it was heard to say before."""
        self._linked.add(node)
        return self._pending.pop(node, None)

    # --- words about others -----------------------------------------------------------------------------------------

    def hear_alive(self, alive: Alive, now: Instant) -> News:
        """Judge and apply what a member says of itself; never called with our own run."""
        node = alive.run.node
        assert node != self._own, alive
        held = self._members.get(node)
        if held is None:
            return self._hear_of_unknown(alive, now)
        if self.is_let_go(alive.run):
            return News.PENDING
        if alive.run.epoch < held.run.epoch:
            return News.OLD
        if alive.run.epoch > held.run.epoch:
            self._provisional.discard(node)
            self._join(alive, now)
            return News.JOINED
        if alive.run.run_id != held.run.run_id:
            return News.CLONE
        is_provisional = node in self._provisional
        if alive.incarnation < self._words[node].incarnation + (not is_provisional):
            stale = held.state in ("suspect", "dead") and alive.incarnation <= held.incarnation
            return News.STALE if stale else News.KNOWN
        self._words[node] = alive
        self._provisional.discard(node)
        said = replace(
            held,
            addresses=alive.addresses[:4],
            flags=alive.flags,
            key_ids=alive.key_ids,
            protocol=alive.protocol,
            version=max(held.version, (alive.gc_version, alive.version)),
        )
        if held.state != "alive" and alive.incarnation <= held.incarnation:
            if held.state == "left":
                return News.KNOWN
            self._put(said, now)
            return News.STALE
        changed_at = held.changed_at if held.state == "alive" else now
        self._put(replace(said, incarnation=alive.incarnation, state="alive", cause=None, changed_at=changed_at), now)
        return News.CHANGED

    def hear_version(self, node: NodeId, epoch: int, version: tuple[int, int]) -> bool:
        """Its record is at `version` -> whether that is news."""
        held = self._members.get(node)
        if held is None or held.run.epoch != epoch or version <= held.version:
            return False
        self._members[node] = replace(held, version=version)
        return True

    def meet(self, alive: Alive, now: Instant) -> News:
        """A link with this run stands; `alive` is the little that it shows of it."""
        news = self.hear_alive(alive, now)
        if news is News.JOINED:
            self._provisional.add(alive.run.node)
        return news

    def accuses_too_far(self, word: Accusation, held: Member) -> bool:
        """An accusation that its subject could never refute, or only by a leap (at 2^64 - 1, say)."""
        return word.incarnation > held.incarnation + self._profile.incarnation_jump_max

    def suspect(self, node: NodeId, incarnation: int, now: Instant) -> None:
        held = self._members[node]
        assert node in self._live, held
        assert incarnation >= held.incarnation, (held, incarnation)
        if held.state != "suspect":
            held = replace(held, changed_at=now, doubted_at=now)
        self._put(replace(held, state="suspect", incarnation=incarnation), now)

    def bury(self, node: NodeId, incarnation: int, cause: DeathCause, now: Instant) -> None:
        held = self._members[node]
        assert node in self._live, held
        assert incarnation >= held.incarnation, (held, incarnation)
        if held.state != "suspect":
            held = replace(held, doubted_at=now)
        self._put(replace(held, state="dead", incarnation=incarnation, cause=cause, changed_at=now), now)

    def leave(self, node: NodeId, incarnation: int, now: Instant) -> None:
        held = self._members[node]
        incarnation = max(incarnation, held.incarnation)
        left = replace(held, state="left", incarnation=incarnation, cause=None, changed_at=now)
        if node == self._own:
            self._members[node] = left
        else:
            self._put(left, now)

    def heard(self, node: NodeId, now: Instant) -> None:
        self._members[node] = replace(self._members[node], heard_at=now)

    def mark(self, node: NodeId, flags: int) -> bool:
        """Set flags on our view of a member -> whether any is new; gone with its next own word."""
        held = self._members[node]
        if held.flags | flags == held.flags:
            return False
        self._members[node] = replace(held, flags=held.flags | flags)
        return True

    def unmark(self, node: NodeId, flags: int) -> bool:
        """Take back flags that were marked here -> whether any was; what the member says of itself stays."""
        held = self._members[node]
        own_word = self._words[node].flags
        after = held.flags & ~flags | own_word & flags
        self._members[node] = replace(held, flags=after)
        return after != held.flags

    # --- ourselves, and the end -------------------------------------------------------------------------------------

    def set_own(self, own: Member) -> None:
        assert own.run == self.own.run, own
        assert own.incarnation >= self.own.incarnation, own
        self._members[self._own] = own

    def hear_own_version(self, version: tuple[int, int]) -> None:
        assert version >= self.own.version, (version, self.own.version)
        self._members[self._own] = replace(self.own, version=version)

    def forget(self, node: NodeId) -> None:
        assert node != self._own
        del self._members[node]
        del self._words[node]
        self._live.pop(node, None)
        self.suspects.discard(node)
        self._unclaim(node)
        self._gone.pop(node, None)
        self._provisional.discard(node)
        # Of whoever is in no registry nothing but a new link shows again that it was let in.
        self._linked.discard(node)

    def reap(self, now: Instant) -> list[NodeId]:
        """Forget those whose tombstone is over."""
        if now < self._reap_at:
            return []
        over = [m.id for m in self.gone if m.changed_at + self._profile.tombstone <= now]
        for node in over:
            self.forget(node)
        rest = [m.changed_at + self._profile.tombstone for m in self.gone]
        self._reap_at = Instant(min(rest, default=NEVER))
        return over

    # --- inside -----------------------------------------------------------------------------------------------------

    def _hear_of_unknown(self, alive: Alive, now: Instant) -> News:
        node = alive.run.node
        if not self.is_admitted(node):
            if not self.is_let_go(alive.run) and (node in self._pending or len(self._pending) < PENDING_MAX):
                known = self._pending.get(node)
                if known is None or (alive.run.epoch, alive.incarnation) > (known.run.epoch, known.incarnation):
                    self._pending[node] = alive
            return News.PENDING
        if len(self._members) >= self._profile.members_max:
            return News.FULL
        self._pending.pop(node, None)
        self._join(alive, now)
        return News.JOINED

    def _join(self, alive: Alive, now: Instant) -> None:
        self._words[alive.run.node] = alive
        self._put(
            Member(
                run=alive.run,
                incarnation=alive.incarnation,
                state="alive",
                addresses=alive.addresses[:4],
                flags=alive.flags,
                key_ids=alive.key_ids,
                protocol=alive.protocol,
                version=(alive.gc_version, alive.version),
                changed_at=now,
            ),
            now,
        )

    def _claim(self, member: Member, now: Instant) -> None:
        address = member.addresses[:1]
        if member.id in self._claims and self._claims[member.id][0] == address:
            return
        self._unclaim(member.id)
        self._claims[member.id] = address, now
        self._claimants.setdefault(address, set()).add(member.id)

    def _unclaim(self, node: NodeId) -> None:
        address, _ = self._claims.pop(node, ((), 0.0))
        there = self._claimants.get(address, set())
        there.discard(node)
        if not there:
            self._claimants.pop(address, None)

    def _put(self, member: Member, now: Instant) -> None:
        self._members[member.id] = member
        if member.state == "suspect":
            self.suspects.add(member.id)
        else:
            self.suspects.discard(member.id)
        if member.state in ("alive", "suspect"):
            self._live[member.id] = None
            self._gone.pop(member.id, None)
            self._claim(member, now)
        else:
            self._live.pop(member.id, None)
            self._unclaim(member.id)
            self._gone[member.id] = None
            self._provisional.discard(member.id)
            self._reap_at = Instant(min(self._reap_at, member.changed_at + self._profile.tombstone))
