"""Whom to look for that is not here, and which links are worth keeping.

While no other member is known to be alive, or none is heard, every seed and everybody who was once here is called, with
a growing delay. Otherwise, now and then and for ever, one of those who are gone or were never met: so a partition heals
by itself, whatever it has cost both sides.
"""

from __future__ import annotations

from collections import OrderedDict
from random import Random

from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.messages import CloseLink, Contact
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.units import NEVER, Instant

# While alone: the first delay, doubling up to the last. Short enough that who waits for a seed is there soon after it.
ALONE_DELAY = 0.5
ALONE_DELAY_MAX = 4.0
# Called at once while alone; of more a random choice each time.
CALLS_MAX = 32
SEEDS_MAX = 256
# Links opened from here. Above it the one that was idle longest goes.
LINKS_MAX = 64
LEADER_DELAY = 0.5
LEADER_DELAY_MAX = 5.0


class Contacts:
    """`rng`: whom to call next, and the stagger."""

    def __init__(self, members: Members, outbox: Outbox, profile: Profile, rng: Random) -> None:
        self._members = members
        self._outbox = outbox
        self._profile = profile
        self._random = rng
        self._seeds: tuple[Address, ...] = ()
        self._alone_delay = ALONE_DELAY
        self._was_isolated = False
        self._next_at: Instant = NEVER
        self._links: OrderedDict[NodeId, tuple[bool, Instant]] = OrderedDict()
        """(opened from here, used at), the one that is idle longest first."""
        self._leader: NodeId | None = None
        self._leader_at: Instant = NEVER
        self._leader_delay = LEADER_DELAY

    @property
    def deadline(self) -> Instant:
        idle = min((used + self._profile.link_idle for _, used in self._closable()), default=NEVER)
        silence = NEVER if self._was_isolated or not self._members.live else self._silent_from
        return Instant(min(self._next_at, self._leader_at, idle, silence))

    @property
    def is_alone(self) -> bool:
        """Whether nobody else is thought to be alive."""
        return not any(self._members.all[node].state == "alive" for node in self._members.live)

    def is_isolated(self, now: Instant) -> bool:
        """Whether others are known, or should be found, and none of them is alive, or none has been heard for long."""
        if len(self._members.all) == 1 and not self.has_seeds:
            return False
        return self.is_alone or now >= self._silent_from

    @property
    def has_seeds(self) -> bool:
        """Whether there is somebody to be found: a seed that is not ourselves."""
        return any(seed not in self._members.own.addresses for seed in self._seeds)

    def set_seeds(self, addresses: tuple[Address, ...], now: Instant) -> None:
        before, self._seeds = self._seeds, addresses[:SEEDS_MAX]
        if self.is_isolated(now) and set(before) != set(self._seeds):
            self._alone_delay = ALONE_DELAY
            self._next_at = now
        else:
            self.noticed(now)

    def set_leader(self, node: NodeId | None, now: Instant) -> None:
        if node != self._leader:
            self._leader, self._leader_delay = node, LEADER_DELAY
            self._leader_at = now if self._wants_leader else NEVER

    def noticed(self, now: Instant) -> None:
        """The table has changed, or nobody was heard for long."""
        is_isolated = self.is_alone or now >= self._silent_from
        if is_isolated and not self._was_isolated:
            self._alone_delay = ALONE_DELAY
            self._next_at = now
        elif self._next_at == NEVER and (self._seeds or self._members.gone):
            self._next_at = self._later(now)
        self._was_isolated = is_isolated
        if self._leader_at == NEVER and self._wants_leader:
            self._leader_at = Instant(now + self._leader_delay)

    def tick(self, now: Instant) -> None:
        if self._members.live and not self._was_isolated and self._silent_from <= now:
            self.noticed(now)
        if self._next_at <= now:
            self._call(now)
        if self._leader_at <= now:
            self._leader_at = NEVER
            if self._wants_leader and self._leader is not None:
                self._leader_at = Instant(now + self._leader_delay)
                self._leader_delay = min(self._leader_delay * 2, LEADER_DELAY_MAX)
                self._outbox.frame(self._leader, [self._members.word_of(self._members.own.id)])
        for node, used in self._closable():
            if used + self._profile.link_idle <= now:
                self.close(node)

    # --- links ------------------------------------------------------------------------------------------------------

    def link_up(self, node: NodeId, now: Instant, *, is_ours: bool) -> None:
        self._links[node] = (is_ours, now)
        self._links.move_to_end(node)
        if node == self._leader:
            self._leader_delay, self._leader_at = LEADER_DELAY, NEVER
        ours = [one for one, (opened, _) in self._links.items() if opened and one != self._leader]
        if len(ours) > LINKS_MAX:
            self.close(ours[0])

    def link_down(self, node: NodeId, now: Instant) -> None:
        self._links.pop(node, None)
        if self._wants_leader and self._leader_at == NEVER:
            self._leader_at = Instant(now + self._leader_delay)

    @property
    def has_links(self) -> bool:
        return bool(self._links)

    def used(self, node: NodeId, now: Instant) -> None:
        link = self._links.get(node)
        if link is not None:
            self._links[node] = (link[0], now)
            self._links.move_to_end(node)

    def close(self, node: NodeId) -> None:
        if self._links.pop(node, None) is not None:
            self._outbox.do(CloseLink(node=node))

    def check(self) -> None:
        assert sum(opened for opened, _ in self._links.values()) <= LINKS_MAX + 1
        assert len(self._seeds) <= SEEDS_MAX
        assert not (self.is_alone and self._members.gone and self._next_at == NEVER), "nobody is looked for"

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _silent_from(self) -> Instant:
        """By then somebody of the living should have been heard again."""
        return Instant(self._members.heard_anybody_at + self._profile.suspicion_min + self._profile.probe_interval)

    @property
    def _wants_leader(self) -> bool:
        leader = self._leader
        return leader is not None and self._members.is_live(leader) and leader not in self._links

    def _closable(self) -> list[tuple[NodeId, Instant]]:
        """Links of our own making that nobody else needs, the longest idle only: the others are not due before it."""
        for node, (is_ours, used) in self._links.items():
            if is_ours and node != self._leader:
                return [(node, used)]
        return []

    def _call(self, now: Instant) -> None:
        own = self._members.own
        met = {address for member in self._members.all.values() for address in member.addresses}
        gone = [m.addresses[0] for m in self._members.gone if m.state == "dead" and m.addresses]
        self._was_isolated = self.is_alone or now >= self._silent_from
        if self._was_isolated:
            live = [m.addresses[0] for n in self._members.live if (m := self._members.all[n]).addresses]
            found = sorted({*self._seeds, *gone, *live} - set(own.addresses))
            for address in self._random.sample(found, min(CALLS_MAX, len(found))):
                self._outbox.do(Contact(address=address))
            self._next_at = Instant(now + self._alone_delay * self._random.uniform(0.8, 1.2))
            self._alone_delay = min(self._alone_delay * 2, ALONE_DELAY_MAX)
        else:
            found = sorted({*gone, *(set(self._seeds) - met)})
            if found:
                self._outbox.do(Contact(address=self._random.choice(found)))
            self._next_at = self._later(now)
        if not found and not self._members.gone:
            self._next_at = NEVER

    def _later(self, now: Instant) -> Instant:
        return Instant(now + self._profile.reconnect_interval * self._random.uniform(0.9, 1.1))
