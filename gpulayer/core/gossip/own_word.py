"""What this node says of itself: only it makes such words, and a new one overrides what others say of it."""

from __future__ import annotations

from dataclasses import replace

from gpulayer.core.gossip.copies import Copies
from gpulayer.core.gossip.health import Health
from gpulayer.core.gossip.members import Accusation, Members
from gpulayer.core.gossip.messages import Alive, Left, SetSelf
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.spread import Spread
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE, RESTARTING, Member, Run
from gpulayer.model.units import Instant


class OwnWord:
    def __init__(self, members: Members, spread: Spread, copies: Copies, outbox: Outbox, health: Health) -> None:
        self._members = members
        self._spread = spread
        self._copies = copies
        self._outbox = outbox
        self._health = health
        self._answered: tuple[NodeId, int, Instant] | None = None
        """To whom, with which incarnation, and when: one answer is enough for all the accusations of a packet."""

    def speak(self, said: Member, now: Instant, *, above: int = -1) -> None:
        """A new word: `said` with an incarnation that overrides the present one and `above`."""
        incarnation = max(self._members.own.incarnation, above) + 1
        self._members.set_own(replace(said, incarnation=incarnation))
        self._spread.add(self._members.word_of(said.id), now)

    def set(self, event: SetSelf, now: Instant) -> None:
        own = self._members.own
        said = replace(
            own,
            flags=(own.flags | event.flags_on) & ~event.flags_off,
            addresses=own.addresses if event.addresses is None else event.addresses[:4],
            key_ids=own.key_ids if event.key_ids is None else event.key_ids,
        )
        if said == own or own.state == "left":
            return
        self.speak(said, now)
        self._outbox.changed(own, own.id, "said anew what it is", now)
        if event.flags_on & RESTARTING:
            # There may be no next tick.
            self._outbox.gossip(now)

    def hear_accusation(self, word: Accusation, source: Run, at: Address | None, now: Instant) -> None:
        """Somebody doubts us: it hears at once that we live, and so do all."""
        own = self._members.own
        if own.state == "left":
            return
        if word.epoch > own.run.epoch:
            self.notice_double(Run(own.id, word.epoch, 0), now)
            return
        if self._members.accuses_too_far(word, own):
            self._outbox.counters["accusations_refused"] += 1
            return
        if word.epoch == own.run.epoch and word.incarnation >= own.incarnation:
            self._health.worse()
            self._outbox.counters["refutations"] += 1
            self._outbox.tell(own.id, f"accused ({type(word).__name__.lower()}) by {source.node}, and refuted it", now)
            self.speak(own, now, above=word.incarnation)
            if not isinstance(word, Left) and word.reporter != source.node and self._members.is_live(word.reporter):
                self._outbox.datagram(word.reporter, [self._members.word_of(own.id)], now)
        answer = (source.node, self._members.own.incarnation, now)
        if answer == self._answered:
            return
        self._answered = answer
        # The way it came: where datagrams are blocked, the answer is else never read.
        if at is None:
            self._outbox.frame(source.node, [self._members.word_of(own.id)])
        else:
            self._outbox.send(source.node, [self._members.word_of(own.id)], now, at)

    def hear_alive(self, alive: Alive, now: Instant) -> None:
        """Our own words come back; what we have not said is of a copy of us."""
        own = self._members.own
        if alive.run.epoch >= own.run.epoch and alive.run != own.run:
            self.notice_double(alive.run, now)
        elif alive.run == own.run:
            self._copies.outbid((alive.gc_version, alive.version), now)
            if alive.incarnation > own.incarnation and own.state == "alive":
                # Nobody but us makes these: a copy of this process does.
                self.speak(own, now, above=alive.incarnation)

    def notice_double(self, other: Run, now: Instant) -> None:
        """`other` uses our id."""
        own = self._members.own
        text = f"another daemon uses this node's identity {own.id} (its epoch {other.epoch}, ours {own.run.epoch})"
        self._outbox.warn("duplicate_id", own.id, text, now)
        if not own.flags & DUPLICATE and own.state == "alive":
            self._outbox.tell(own.id, text, now)
            self.speak(replace(own, flags=own.flags | DUPLICATE), now)
