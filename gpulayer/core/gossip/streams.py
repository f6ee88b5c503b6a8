"""Whether connections work from here: a host whose TCP is blocked looks well to everybody who only sends it datagrams.

Some links that cannot be opened are their other end's trouble. Several, to members whose datagrams go on arriving,
while not one link stands, are ours, and the node says so of itself: nothing new should be placed on it.
"""

from __future__ import annotations

from gpulayer.core.gossip.contacts import Contacts
from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.messages import SetSelf
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.own_word import OwnWord
from gpulayer.model.ids import NodeId
from gpulayer.model.member import TCP_IMPAIRED
from gpulayer.model.units import NEVER, Instant

# Members that could not be reached by a link before it is taken as our trouble; all others where they are fewer, and
# never one alone.
UNREACHED_MIN = 3
# Of these failures the older ones say nothing about now.
UNREACHED_LIFE = 60.0
# After a failure others are tried, so that it is known soon whose trouble it is.
TRY_DELAY = 1.0
# While connections are taken as blocked: how often that is tried.
TRY_AGAIN = 10.0


class Streams:
    def __init__(self, members: Members, contacts: Contacts, outbox: Outbox, own: OwnWord) -> None:
        self._members = members
        self._contacts = contacts
        self._outbox = outbox
        self._own = own
        self._unreached: dict[NodeId, Instant] = {}
        """Live members to which no link could be opened, and when."""
        self._try_at: Instant = NEVER

    @property
    def deadline(self) -> Instant:
        return self._try_at

    def opened(self, now: Instant) -> None:
        """A link stands."""
        self._unreached.clear()
        self._try_at = NEVER
        if self._members.own.flags & TCP_IMPAIRED:
            self._own.set(SetSelf(flags_off=TCP_IMPAIRED), now)

    def failed(self, node: NodeId, now: Instant) -> None:
        """A link to a live member could not be opened, and not because it was refused."""
        self._unreached[node] = now
        if self._try_at == NEVER:
            self._try_at = Instant(now + TRY_DELAY)

    def tick(self, now: Instant) -> None:
        if now < self._try_at:
            return
        self._try_at = NEVER
        for node, at in list(self._unreached.items()):
            if at + UNREACHED_LIFE <= now or not self._members.is_live(node):
                del self._unreached[node]
        if self._members.own.state == "left" or not self._unreached or self._contacts.has_links:
            return
        is_blocked = bool(self._members.own.flags & TCP_IMPAIRED)
        # A datagram of it since: it lives, and the network between us works for datagrams at least.
        proofs = sum(self._members.all[node].heard_at > at for node, at in self._unreached.items())
        if not is_blocked and proofs >= max(2, min(UNREACHED_MIN, len(self._members.live))):
            is_blocked = True
            text = f"no connection to any of {proofs} members can be opened, though their datagrams arrive"
            self._outbox.warn("streams_blocked", "", f"{text}: is TCP blocked here?", now)
            self._own.set(SetSelf(flags_on=TCP_IMPAIRED), now)
        self._try_at = Instant(now + (TRY_AGAIN if is_blocked else TRY_DELAY))
        for node in self._outbox.some_live(1, without=() if is_blocked else self._unreached):
            self._outbox.frame(node, [self._members.word_of(self._members.own.id)])

    def check(self) -> None:
        assert len(self._unreached) <= len(self._members.all)
        assert self._members.own.id not in self._unreached
