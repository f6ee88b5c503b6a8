"""Members that claim one address. Which of them a packet reaches is chance, and it is sealed for one of them alone: so
what they do not answer says nothing of whether they live, nor does what is not answered to us, if we are one of them.

A host whose data directory was wiped has a new id at its old address, too. Its former id is no twin: it is not heard
any more once the new one has come, and dies as everybody does.
"""

from __future__ import annotations

from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE
from gpulayer.model.units import Instant

# A twin that has not been heard for so long is gone after all. In a large cluster each hears from each only now and
# then; where that is less often than this, twins are doubted at times, and refute it.
HEARD_WITHIN = 60.0


class Twins:
    def __init__(self, members: Members, outbox: Outbox, profile: Profile) -> None:
        self._members = members
        self._outbox = outbox
        self._profile = profile
        self._flagged: set[NodeId] = set()

    def heard(self, node: NodeId, now: Instant) -> None:
        """A packet or frame came directly from `node`. If another at its address was heard since, both live."""
        twins = self._members.twins_of(node)
        if node in self._flagged and not twins:
            self._flagged.discard(node)
            before = self._members.all[node]
            if self._members.unmark(node, DUPLICATE):
                self._outbox.changed(before, node, "alone at its address again", now)
        for twin in twins:
            if self._both_live(node, twin):
                self._flag(node, twin, now)

    def excuse(self, node: NodeId, now: Instant) -> bool:
        """Whether that `node` does not answer, or its host refuses, is no ground to accuse it."""
        own = self._members.own.id
        for ours in self._members.twins_of(own):
            # We cannot hear it: what it sends to our address does not leave its host. A former id of ours would be dead
            # by now, by the word of others.
            _, longest = self._profile.suspicion_bounds(self._members.count)
            if self._members.claimed_at(ours) + longest <= now:
                self._flag(own, ours, now)
            if self._members.count > 2:
                return True
        return any(
            twin != own
            and self._both_live(node, twin)
            and min(self._members.all[node].heard_at, self._members.all[twin].heard_at) + HEARD_WITHIN > now
            for twin in self._members.twins_of(node)
        )

    def forget(self, node: NodeId) -> None:
        """It is gone, or another run."""
        self._flagged.discard(node)

    def _both_live(self, one: NodeId, other: NodeId) -> bool:
        """Both were heard after the second of them came to claim the address."""
        since = max(self._members.claimed_at(one), self._members.claimed_at(other))
        own = self._members.own.id
        return all(node == own or self._members.all[node].heard_at > since for node in (one, other))

    def _flag(self, one: NodeId, other: NodeId, now: Instant) -> None:
        first, second = sorted((one, other))
        address = self._members.all[first].addresses[0]
        text = f"members {first} and {second} both claim the address {address}: give each host one of its own"
        self._outbox.warn("duplicate_address", f"{first} {second}", text, now)
        for node in (first, second):
            before = self._members.all[node]
            if node != self._members.own.id and self._members.mark(node, DUPLICATE):
                self._flagged.add(node)
                self._outbox.changed(before, node, f"not alone at its address: {text}", now)
