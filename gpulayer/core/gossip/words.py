"""What is said of members: which words are believed, who is told of them, and who of the wrong ones.

Members judges the order of two words, Detection what an accusation does; here is what follows for everybody else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import assert_never

from gpulayer.core.gossip.copies import Copies
from gpulayer.core.gossip.detection import Detection
from gpulayer.core.gossip.members import Accusation, Members, News
from gpulayer.core.gossip.messages import Alive, CloseLink, Dead, Left, MemberChanged, Suspect, SyncMembers
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.own_word import OwnWord
from gpulayer.core.gossip.spread import Spread
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE, Member, Run
from gpulayer.model.units import Instant

# Accusations of nodes that are not known here: kept for when they are, the oldest goes first.
STRANGERS_MAX = 64
# How often a subject is told by us what is held against it, beside what its own packets are answered with.
TELL_INTERVAL = 0.2


class Words:
    def __init__(
        self,
        members: Members,
        detection: Detection,
        spread: Spread,
        copies: Copies,
        outbox: Outbox,
        own: OwnWord,
    ) -> None:
        self._members = members
        self._detection = detection
        self._spread = spread
        self._copies = copies
        self._outbox = outbox
        self._own = own
        self._strangers: OrderedDict[NodeId, Accusation] = OrderedDict()
        self._told: dict[NodeId, Instant] = {}
        """When a subject was last told by us that it is accused."""

    def hear_alive(self, alive: Alive, source: Run, now: Instant, *, is_passed_on: bool = True) -> None:
        node = alive.run.node
        if node == self._members.own.id:
            self._own.hear_alive(alive, now)
            return
        before = self._members.get(node)
        news = self._members.hear_alive(alive, now)
        match news:
            case News.JOINED:
                self.joined(before, node, now)
            case News.CHANGED:
                assert before is not None
                self._detection.alive_again(node)
                text = (
                    "alive" if before.state == "alive" else f"alive again: it has answered to being held {before.state}"
                )
                self._outbox.changed(before, node, f"{text} (incarnation {alive.incarnation})", now)
                if before.state not in ("alive", "suspect"):
                    self._detection.joined(node, now)
            case News.STALE:
                member = self._members.all[node]
                if source != alive.run:
                    self.tell_subject(member, None, now)
            case News.CLONE:
                assert before is not None
                self._notice_clone(before, alive, now)
                return
            case News.FULL:
                self._outbox.warn("members_too_many", "", f"the table is full: {node} is not taken in", now)
                return
            case News.OLD | News.PENDING:
                self._outbox.counters[f"words_{news.name.lower()}"] += 1
                return
            case News.KNOWN:
                pass
            case _:
                assert_never(news)
        if news in (News.JOINED, News.CHANGED) and is_passed_on:
            self._spread.add(self._members.word_of(node), now)
        self._copies.hear_version(node, alive.run.epoch, (alive.gc_version, alive.version), source.node, now)
        if news is News.JOINED and (stranger := self._strangers.pop(node, None)):
            self.hear_accusation(stranger, source, None, now)

    def joined(self, before: Member | None, node: NodeId, now: Instant) -> None:
        """Somebody new; or a new run, which ends the old one whatever its state was."""
        after = self._members.all[node]
        if before is not None:
            self._detection.gone(node)
            self._spread.forget(node)
            self._told.pop(node, None)
            if before.state in ("alive", "suspect"):
                text = f"replaced by its epoch {after.run.epoch}"
                self._outbox.tell(node, text, now)
                self._outbox.do(MemberChanged(before=before, after=replace(before, state="left"), text=text))
        self._outbox.changed(None, node, f"joined (epoch {after.run.epoch})", now)
        self._detection.joined(node, now)
        self._copies.joined(now)

    def hear_accusation(self, word: Accusation, source: Run, at: Address | None, now: Instant) -> None:
        if word.node == self._members.own.id:
            self._own.hear_accusation(word, source, at, now)
            return
        if isinstance(word, Suspect) and word.reporter not in self._members.all:
            self._outbox.counters["accusations_refused"] += 1
            return
        member = self._members.get(word.node)
        if member is None:
            self._keep_stranger(word, now)
            return
        if word.epoch != member.run.epoch or self._members.accuses_too_far(word, member):
            self._outbox.counters["accusations_refused"] += word.epoch >= member.run.epoch
            return
        if isinstance(word, Left):
            # Who has left says nothing more: a newer word of it shows that it has not.
            if member.state != "left" and word.incarnation >= member.incarnation:
                self._left(member, word, now)
        elif self._members.is_live(word.node) and word.incarnation >= member.incarnation:
            if isinstance(word, Dead):
                self._detection.hear_dead(word, now)
            else:
                self._detection.hear_suspect(word, now)

    def _left(self, before: Member, word: Left, now: Instant) -> None:
        self._detection.gone(before.id)
        self._members.leave(before.id, word.incarnation, now)
        self._spread.add(word, now)
        self._outbox.changed(before, before.id, "left by its own will", now)
        self._outbox.do(CloseLink(node=before.id))

    def _keep_stranger(self, word: Accusation, now: Instant) -> None:
        """Passed on once, so that it reaches a subject that others know, and answers."""
        if not self._members.is_admitted(word.node) or self._strangers.get(word.node) == word:
            return
        is_first = word.node not in self._strangers
        self._strangers[word.node] = word
        if len(self._strangers) > STRANGERS_MAX:
            self._strangers.popitem(last=False)
        if is_first:
            for node in self._outbox.some_live(1):
                self._outbox.datagram(node, [word], now)

    def hear_members(self, told: SyncMembers, source: Run, now: Instant) -> None:
        """A merge is no probe: who is gone there becomes a suspect here, and may refute that."""
        for alive, state, _ in told.members:
            self.hear_alive(alive, source, now, is_passed_on=state == "alive")
            member = self._members.get(alive.run.node)
            if member is None or member.run != alive.run or state == "alive" or member.id == self._members.own.id:
                continue
            if state == "left":
                # Told because it is the newer there; its last word may have come later than this one of it.
                word = Left(node=member.id, epoch=member.run.epoch, incarnation=member.incarnation)
                self.hear_accusation(word, source, None, now)
            elif self._members.is_live(member.id) and alive.incarnation >= member.incarnation:
                suspect = Suspect(
                    node=member.id,
                    epoch=member.run.epoch,
                    incarnation=alive.incarnation,
                    cause="timeout",
                    reporter=source.node,
                )
                self._detection.hear_suspect(suspect, now, merged=state)

    def tell_subject(self, member: Member, at: Address | None, now: Instant, *, by_link: bool = False) -> None:
        """It is held to be suspect or gone, and seems not to know."""
        if now < self._told.get(member.id, Instant(-TELL_INTERVAL)) + TELL_INTERVAL:
            return
        self._told[member.id] = now
        if by_link:
            self._outbox.frame(member.id, [])
        else:
            self._outbox.datagram(member.id, [], now, at)

    def _notice_clone(self, held: Member, alive: Alive, now: Instant) -> None:
        """Two runs of one id and epoch: each should know of the other, and nothing may be placed on either."""
        if self._members.mark(held.id, DUPLICATE):
            self._outbox.changed(held, held.id, "two runs claim its identity", now)
        self._outbox.warn("duplicate_id", held.id, f"two daemons claim to be {held.id}", now)
        if now < self._told.get(held.id, Instant(-TELL_INTERVAL)) + TELL_INTERVAL:
            return
        self._told[held.id] = now
        self._outbox.datagram(held.id, [alive], now)
        for address in alive.addresses[:1]:
            self._outbox.datagram(held.id, [self._members.word_of(held.id)], now, address)

    def forget(self, node: NodeId) -> None:
        """It is in the table no more."""
        self._told.pop(node, None)

    def check(self) -> None:
        assert len(self._strangers) <= STRANGERS_MAX
        assert not self._strangers.keys() & self._members.all.keys()
        assert self._told.keys() <= self._members.all.keys(), self._told.keys() - self._members.all.keys()
