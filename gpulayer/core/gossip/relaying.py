"""Pings on behalf of others: a member that got no answer asks whether we do."""

from __future__ import annotations

from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.messages import Ack, Nack, PingRequest, Suspect
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.probe import Probes
from gpulayer.model.member import Run
from gpulayer.model.units import Instant


class Relaying:
    def __init__(self, members: Members, outbox: Outbox, probes: Probes) -> None:
        self._members = members
        self._outbox = outbox
        self._probes = probes

    def tick(self, now: Instant) -> None:
        """Who has asked hears that we are well, where the target has not answered us."""
        for relayed in self._probes.take_unanswered(now):
            self._outbox.datagram(relayed.asker.node, [Nack(seq=relayed.asked_seq)], now)

    def hear_request(self, request: PingRequest, source: Run, now: Instant) -> None:
        member = self._members.get(request.target)
        if request.target == self._members.own.id:
            return
        if member is None or member.run.epoch != request.epoch or member.state in ("dead", "left"):
            # Of no help, but well; and perhaps with news of the target.
            news = [self._members.word_of(member.id)] if member and member.run.epoch > request.epoch else []
            self._outbox.datagram(source.node, [Nack(seq=request.seq), *news], now)
            return
        relayed = self._probes.relay(source, request.seq, request.target, request.epoch, now)
        if relayed is not None:
            self._outbox.datagram(member.id, [self._members.ping_of(relayed.seq, member.run)], now)

    def pass_on(self, ack: Ack, source: Run, now: Instant) -> bool:
        """Whether it answers a question of somebody else, who then has it."""
        relayed = self._probes.take_relayed(ack.seq, source)
        if relayed is None:
            return False
        passed = Ack(
            seq=relayed.asked_seq, node=ack.node, epoch=ack.epoch, incarnation=ack.incarnation, version=ack.version
        )
        self._outbox.datagram(relayed.asker.node, [passed], now)
        return True

    def refused(self, word: Suspect, now: Instant) -> None:
        """The target's host refused us, as `word` says: nobody has to wait any longer."""
        for relayed in self._probes.take_relayed_for(word.node):
            words = [word] if relayed.epoch == word.epoch else []
            self._outbox.datagram(relayed.asker.node, [*words, Nack(seq=relayed.asked_seq, refused=True)], now)
