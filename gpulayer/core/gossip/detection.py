"""Who lives: probes, makes suspicions of failures and deaths of suspicions, and weighs what others say of that.

SWIM (Das, Gupta, Motivala 2002) with Lifeguard (Dadgar, Phillips, Currey 2018), and three things of our own: members
that have heard a suspect vouch for it, refusals of two members prove that a daemon is gone, and after a pause of our
own nobody is blamed for answers that we could not have read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Literal

from gpulayer.core.gossip.health import Health
from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.messages import (
    Ack,
    CloseLink,
    Dead,
    Message,
    Nack,
    Ping,
    PingRequest,
    Suspect,
    Vouch,
)
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.paths import Paths
from gpulayer.core.gossip.probe import Probes, Round
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.relaying import Relaying
from gpulayer.core.gossip.spread import Spread
from gpulayer.core.gossip.suspicion import Suspicion, Suspicions
from gpulayer.core.gossip.twins import Twins
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import IMPAIRED, DeathCause, Member, MemberState, Run
from gpulayer.model.units import NEVER, Instant


class Detection:
    """`rng`: who is a witness; `order`: who is probed when, and through whom."""

    def __init__(
        self,
        members: Members,
        suspicions: Suspicions,
        spread: Spread,
        outbox: Outbox,
        health: Health,
        profile: Profile,
        *,
        rng: Random,
        order: Random,
    ) -> None:
        self._members = members
        self._suspicions = suspicions
        self._spread = spread
        self._outbox = outbox
        self._health = health
        self._profile = profile
        self._random = rng
        self.probes = Probes(profile, order)
        self._relaying = Relaying(members, outbox, self.probes)
        self._paths = Paths(outbox)
        self._twins = Twins(members, outbox, profile)
        self._hold_until: Instant = Instant(0.0)
        """After a pause, or when nobody was heard: nobody is declared dead before."""
        self._deaf_from: Instant = NEVER
        """When somebody was last heard, since a round in which nobody was."""

    @property
    def deadline(self) -> Instant:
        if self._members.own.state != "alive":
            return self.probes.deadline
        death = NEVER if self._is_deaf else self._suspicions.deadline(self._members.count)
        return min(self.probes.deadline, max(death, self._hold_until), self._suspicions.pings_at(), self._impaired_at())

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: Instant) -> None:
        self._relaying.tick(now)
        for round_ in self.probes.due(now):
            if round_.is_indirect:
                self._end_round(round_, now)
            else:
                self._ask_around(round_, now)
        if self._members.own.state != "alive":
            return
        self._begin_turn(now)
        for suspicion in self._suspicions:
            while suspicion.pings and suspicion.pings[0] <= now:
                suspicion.pings.popleft()
                self._ping_as_witness(suspicion.node, now)
        if now >= self._hold_until and not self._is_deaf:
            for suspicion in self._suspicions:
                if self._suspicions.ends_at(suspicion, self._members.count) <= now:
                    self._declare_dead(suspicion, now)
        self._mark_impaired(now)

    def paused(self, seconds: float, now: Instant, *, is_clock_stopped: bool) -> None:
        """This process was away for so long: answers may have come and gone, and nobody is blamed for that."""
        self.probes.cancel_overdue(now)
        if not is_clock_stopped:
            self._suspicions.shift(seconds)
        self._hold_until = Instant(now + self._profile.probe_interval)
        self._health.worse()
        if seconds > self._profile.suspicion_bounds(self._members.count)[0]:
            # The others have buried us by now: they hear first that we live.
            self.probes.next_at = max(self.probes.next_at, self._hold_until)

    # --- rounds -----------------------------------------------------------------------------------------------------

    def joined(self, node: NodeId, now: Instant) -> None:
        self.probes.joined(node)
        if self.probes.next_at == NEVER and self._members.own.state == "alive":
            self.probes.schedule(now, self._health.probe_interval * self._random.random())

    def stop(self) -> None:
        """We are leaving: we still answer, and ask nobody."""
        self.probes.next_at = NEVER

    def probe_now(self, node: NodeId, now: Instant) -> Round | None:
        """Out of turn: something says that it may be gone."""
        member = self._members.get(node)
        if member is None or not self._members.is_live(node) or self._members.own.state != "alive":
            return None
        return self.probes.of(node) or self._begin(member, now, is_in_turn=False)

    def _begin_turn(self, now: Instant) -> None:
        if now < self.probes.next_at:
            return
        target = self.probes.next_target(self._members.live)
        if target is None:
            self.probes.next_at = NEVER
            return
        self.probes.schedule(now, self._health.probe_interval)
        self._begin(self._members.all[target], now, is_in_turn=True)

    def _begin(self, member: Member, now: Instant, *, is_in_turn: bool) -> Round | None:
        round_ = self.probes.begin(member, now, self._health.probe_interval, is_in_turn=is_in_turn)
        if round_ is not None:
            self._outbox.counters["probes"] += 1
            round_.sent += 1
            self._outbox.datagram(member.id, [self._members.ping_of(round_.seq, member.run)], now)
        return round_

    def _ask_around(self, round_: Round, now: Instant) -> None:
        """No direct answer: ask through others, at its other addresses, and over a stream."""
        member = self._members.get(round_.target.node)
        if member is None or member.run != round_.target or not self._members.is_live(member.id):
            self.probes.end(round_)
            return
        round_.asked_at = now
        request = PingRequest(seq=round_.seq, target=member.id, epoch=member.run.epoch, addresses=member.addresses)
        for relay in self.probes.relays_for(member.id, self._members.live):
            round_.relays[relay] = False
            round_.sent += 1
            self._outbox.datagram(relay, [request], now)
        ping = self._members.ping_of(round_.seq, member.run)
        for address in self._outbox.other_addresses_of(member.id):
            round_.sent += 1
            self._outbox.datagram(member.id, [ping], now, address)
        self._outbox.frame(member.id, [ping])
        if round_.is_refused_by_stream:
            self._refused(member, now)

    def _end_round(self, round_: Round, now: Instant) -> None:
        self.probes.end(round_)
        member = self._members.get(round_.target.node)
        if member is None or member.run != round_.target or not self._members.is_live(member.id):
            return
        self._outbox.counters["probes_failed"] += 1
        if round_.is_our_fault:
            self._health.worse()
            self._outbox.warn("cannot_send", "", "this host cannot send to any member: no route, or not permitted", now)
            return
        if self._members.well > 2 and self._members.heard_anybody_at < round_.asked_at:
            self._health.worse()
            self._outbox.counters["rounds_deaf"] += 1
            if self._deaf_from == NEVER:
                self._deaf_from = self._members.heard_anybody_at
                self._outbox.tell(self._members.own.id, "nobody at all is heard: nobody is accused meanwhile", now)
            return
        if not self._twins.excuse(member.id, now):
            self._health.worse(self._missing_nacks(round_))
            self._accuse(member, "timeout", now)

    @property
    def _is_deaf(self) -> bool:
        """Several others are thought to be alive, and not one of them was heard when several were asked: what fails is
        between us and all of them, and who of them lives cannot be known here."""
        return self._deaf_from != NEVER and self._members.well > 2

    def heard_anybody(self, now: Instant) -> None:
        """A packet or frame came, of whomever."""
        if self._deaf_from != NEVER:
            self._suspicions.shift(now - self._deaf_from)
            self._deaf_from = NEVER
            self._hold_until = max(self._hold_until, Instant(now + self._profile.probe_interval))
        self._members.heard_anybody_at = now

    def _missing_nacks(self, round_: Round) -> int:
        """How much a failed round speaks against ourselves (Lifeguard's local health): for each relay that should be
        well and said nothing. One that is suspected is as likely to be gone as the target, above all in a cut."""
        silent = [node for node, nacked in round_.relays.items() if not nacked]
        missing = sum((member := self._members.get(node)) is not None and member.state == "alive" for node in silent)
        return missing if missing or len(silent) < len(round_.relays) else 1

    # --- answers ----------------------------------------------------------------------------------------------------

    def hear_ping(self, ping: Ping, source: Run, at: Address | None, now: Instant) -> None:
        own = self._members.own
        if (ping.target, ping.epoch) != (own.id, own.run.epoch):
            # Somebody else was here before, or another run of us: who asks should know.
            self._outbox.counters["pings_for_others"] += 1
            self._answer(source.node, [self._members.word_of(own.id)], at, now)
            return
        ack = Ack(seq=ping.seq, node=own.id, epoch=own.run.epoch, incarnation=own.incarnation, version=own.version[1])
        self._answer(source.node, [ack], at, now)

    def hear_ping_request(self, request: PingRequest, source: Run, now: Instant) -> None:
        self._relaying.hear_request(request, source, now)

    def hear_ack(self, ack: Ack, source: Run, at: Address | None, now: Instant) -> None:
        if self._relaying.pass_on(ack, source, now):
            return
        round_ = self.probes.get(ack.seq)
        if round_ is None or (round_.target.node, round_.target.epoch) != (ack.node, ack.epoch):
            return
        if source == round_.target:
            self._paths.answered(source.node, now, by_stream=at is None)
        elif source.node in round_.relays:
            self._paths.answered(ack.node, now, by_stream=False)
            # The relay has heard it just now.
            self._hear_vouch(ack.node, source.node, now, is_direct=True)
        else:
            return
        self.probes.end(round_)
        self._health.better()

    def hear_nack(self, nack: Nack, source: Run) -> None:
        round_ = self.probes.get(nack.seq)
        if round_ is not None and source.node in round_.relays:
            round_.relays[source.node] = True

    def heard(self, node: NodeId, now: Instant) -> None:
        """A packet or frame of its present run came directly from it."""
        self._members.heard(node, now)
        self._twins.heard(node, now)
        suspicion = self._suspicions.get(node)
        if suspicion is None:
            return
        is_refused = bool(suspicion.refused)
        if not self._hear_vouch(node, self._members.own.id, now, is_direct=True):
            return
        vouch = Vouch(
            node=node,
            epoch=suspicion.run.epoch,
            incarnation=suspicion.incarnation,
            witness=self._members.own.id,
        )
        self._spread.add(vouch, now)
        if is_refused:
            # The grace of refusals may be over before gossip is due again.
            self._outbox.gossip(now, without=(node,))

    # --- refusals ---------------------------------------------------------------------------------------------------

    def datagram_refused(self, address: Address, now: Instant) -> None:
        for member in self._live_at(address):
            self._refused(member, now)

    def stream_refused(self, node: NodeId, now: Instant) -> None:
        """Nobody accepts connections. Alone that may be a firewall's word: it counts with an unanswered ping."""
        round_ = self.probe_now(node, now)
        if round_ is None:
            return
        round_.is_refused_by_stream = True
        if round_.is_indirect:
            self._refused(self._members.all[node], now)

    def send_failed(self, address: Address, now: Instant) -> None:
        for member in self._live_at(address):
            for round_ in self.probes.with_packets_to(member.id):
                round_.failed.add(address)
                if not round_.is_indirect and round_.target == member.run:
                    self._ask_around(round_, now)  # a failed step; nothing is gained by waiting

    def _live_at(self, address: Address) -> list[Member]:
        return [m for n in self._members.live if address in (m := self._members.all[n]).addresses]

    def _refused(self, member: Member, now: Instant) -> None:
        """Its host has answered that its daemon is not there: the probe is over, and the relays are asked at once."""
        if self._members.own.state != "alive" or self._twins.excuse(member.id, now):
            return
        self._relaying.refused(self._suspect(member, "refused"), now)
        round_ = self.probe_now(member.id, now)
        if round_ is not None and not round_.is_indirect:
            self._ask_around(round_, now)
        self._accuse(self._members.all[member.id], "refused", now)

    # --- suspicions -------------------------------------------------------------------------------------------------

    def _suspect(self, member: Member, cause: Literal["refused", "timeout"]) -> Suspect:
        return Suspect(
            node=member.id,
            epoch=member.run.epoch,
            incarnation=member.incarnation,
            cause=cause,
            reporter=self._members.own.id,
            reporter_health=self._health.score,
        )

    def _accuse(self, member: Member, cause: Literal["refused", "timeout"], now: Instant) -> None:
        """On our own observation."""
        held = self._suspicions.get(member.id)
        if held is None:
            if not self._suspicions.may_begin(self._members.count, now):
                self._outbox.counters["accusations_suppressed"] += 1
                self._outbox.warn(
                    "suspects_too_many", "", "so many members do not answer that the trouble is taken to be here", now
                )
                self._health.worst()
                return
            self._suspicions.begun(now)
        self.hear_suspect(self._suspect(member, cause), now)

    def hear_suspect(self, word: Suspect, now: Instant, *, merged: MemberState | None = None) -> None:
        """About a live member, of its present run, at its incarnation or a higher one. `merged`: its state in
        somebody's table, which is no observation and is not passed on."""
        before = self._members.all[word.node]
        own = self._members.own.id
        needed = min(2, self._members.count - 1)
        said = self._suspicions.hear(word, before.run, needed, now, merged=merged)
        if said == "nothing":
            return
        suspicion = self._suspicions.get(word.node)
        assert suspicion is not None
        self._members.suspect(word.node, word.incarnation, now)
        if merged is None:
            self._spread.add(word, now)
        if said == "confirmed":
            self._outbox.tell(word.node, f"{word.reporter} says so too ({word.cause})", now)
            return
        self._outbox.counters["suspicions"] += 1
        why = {"refused": "its host refused", "timeout": "no answer"}[word.cause]
        if merged is not None:
            why = f"{merged} in its table"
        self._outbox.changed(before, word.node, f"suspected by {word.reporter}: {why}", now)
        # A merge is told to nobody else, so nobody else would ask.
        if word.reporter == own or merged or self._random.random() < self._profile.witnesses / self._members.count:
            least, _ = self._profile.suspicion_bounds(self._members.count)
            suspicion.pings.extend(Instant(now + least * part / 3) for part in range(3))

    def hear_vouch(self, word: Vouch, source: Run, now: Instant) -> None:
        if word.witness in (self._members.own.id, word.node) or word.witness not in self._members.all:
            return
        suspicion = self._suspicions.get(word.node)
        if suspicion is None or suspicion.run.epoch != word.epoch or word.incarnation < suspicion.incarnation:
            return
        if self._hear_vouch(word.node, word.witness, now, is_direct=source.node == word.witness):
            self._spread.add(word, now)

    def _hear_vouch(self, node: NodeId, witness: NodeId, now: Instant, *, is_direct: bool) -> bool:
        suspicion = self._suspicions.get(node)
        if suspicion is None:
            return False
        news = self._suspicions.vouch(node, suspicion.incarnation, witness, now, is_direct=is_direct)
        if news:
            self._outbox.tell(node, f"{witness} has heard it since", now)
        return news

    def _ping_as_witness(self, node: NodeId, now: Instant) -> None:
        """The suspicion goes first in the packet; whatever comes back makes us vouch for it."""
        member = self._members.get(node)
        if member is None or not self._members.is_live(node):
            return
        ping = self._members.ping_of(self.probes.next_seq(), member.run)
        self._outbox.datagram(node, [ping], now)
        self._outbox.frame(node, [ping])

    def _declare_dead(self, suspicion: Suspicion, now: Instant) -> None:
        member = self._members.all[suspicion.node]
        # Those who could have been refused too: a member that is suspected itself may be gone with it.
        is_refused = len(suspicion.refused) >= min(2, self._members.well)
        cause: DeathCause = "daemon" if is_refused else "silent"
        word = Dead(
            node=member.id,
            epoch=member.run.epoch,
            incarnation=member.incarnation,
            cause=cause,
            reporter=self._members.own.id,
        )
        self.hear_dead(word, now)

    def hear_dead(self, word: Dead, now: Instant) -> None:
        """About a live member, of its present run, at its incarnation or a higher one."""
        before = self._members.all[word.node]
        self._suspicions.end(word.node)
        self.probes.end_of(word.node)
        self._members.bury(word.node, word.incarnation, word.cause, now)
        self._spread.add(word, now)
        self._outbox.counters["deaths"] += 1
        self._paths.forget(word.node)
        self._twins.forget(word.node)
        why = {"daemon": "its host refuses, its daemon is gone", "silent": "nothing answers"}[word.cause]
        self._outbox.changed(before, word.node, f"dead, says {word.reporter}: {why}", now)
        self._outbox.do(CloseLink(node=word.node))

    def alive_again(self, node: NodeId) -> None:
        """Its own newer word, or a new run: what was held against it is over."""
        self._suspicions.end(node)

    def gone(self, node: NodeId) -> None:
        """It left, is forgotten, or was replaced by a new run."""
        self._suspicions.end(node)
        self.probes.end_of(node)
        self._paths.forget(node)
        self._twins.forget(node)

    # --- half-heard members -------------------------------------------------------------------------------------------

    def _impaired_at(self) -> Instant:
        waiting = [
            s.since + self._profile.impaired_after
            for s in self._suspicions
            if s.vouches and not self._members.all[s.node].flags & IMPAIRED
        ]
        return Instant(min(waiting, default=math.inf))

    def _mark_impaired(self, now: Instant) -> None:
        if now < self._impaired_at():
            return
        for suspicion in self._suspicions:
            before = self._members.all[suspicion.node]
            is_due = suspicion.vouches and suspicion.since + self._profile.impaired_after <= now
            if is_due and self._members.mark(suspicion.node, IMPAIRED):
                self._outbox.changed(before, suspicion.node, "heard only in part, for long", now)

    def _answer(self, to: NodeId, messages: Sequence[Message], at: Address | None, now: Instant) -> None:
        """The way it was asked."""
        if at is None:
            self._outbox.frame(to, messages)
        else:
            self._outbox.datagram(to, messages, now, at)

    def check(self) -> None:
        self.probes.check()
        self._suspicions.check()
        self._health.check()
        for suspicion in self._suspicions:
            member = self._members.get(suspicion.node)
            assert member is not None, suspicion
            assert member.state == "suspect", (suspicion, member)
            assert (member.run, member.incarnation) == (suspicion.run, suspicion.incarnation), (suspicion, member)
        suspected = sum(m.state == "suspect" for m in self._members.all.values())
        assert suspected == len(self._suspicions), (suspected, len(self._suspicions))
