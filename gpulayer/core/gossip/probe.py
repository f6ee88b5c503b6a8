"""Probes: whom to ask, who has answered, and who is asked on others' behalf.

A round (SWIM §3.1 with Lifeguard's nacks): a direct ping; without an answer by the direct timeout the same question
through relays and, at the same time, over a stream; without any answer by the end it has failed. What a failure means
is detection's business. Sends nothing itself: says which steps are due.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member, Run
from gpulayer.model.units import NEVER, Instant

# Rounds at once: the one whose turn it is and those out of turn (a broken link, a refusal). More would be a storm.
ROUNDS_MAX = 16
# Questions of others at once, in all and of one asker; above it they are not answered, which costs the asker a nack.
RELAYED_MAX = 256
RELAYED_PER_ASKER_MAX = ROUNDS_MAX


@dataclass(slots=True)
class Round:
    seq: int
    target: Run
    is_in_turn: bool
    indirect_at: Instant
    ends_at: Instant
    asked_at: Instant = NEVER
    """When others were asked; NEVER: not yet."""
    is_refused_by_stream: bool = False
    relays: dict[NodeId, bool] = field(default_factory=dict)
    """Asked -> whether it said that it is there, at least (a nack)."""
    sent: int = 0
    """Packets of this round."""
    failed: set[Address] = field(default_factory=set)
    """To whom nothing could leave this host meanwhile, of this round or not; it sends one packet to an address."""

    @property
    def is_indirect(self) -> bool:
        return self.asked_at != NEVER

    @property
    def deadline(self) -> Instant:
        return self.ends_at if self.is_indirect else self.indirect_at

    @property
    def is_our_fault(self) -> bool:
        """Nothing of it has left this host."""
        return self.sent > 0 and len(self.failed) >= self.sent


@dataclass(frozen=True, slots=True)
class Relayed:
    """A ping for somebody else."""

    seq: int
    """Ours, towards the target."""
    asker: Run
    asked_seq: int
    target: NodeId
    epoch: int
    nack_at: Instant


class Probes:
    """`random`: for the order of targets, the choice of relays and the stagger of rounds."""

    def __init__(self, profile: Profile, rng: Random) -> None:
        self._profile = profile
        self._random = rng
        self._seq = 0
        self._order: list[NodeId] = []
        """This pass, the next target last."""
        self._rounds: dict[int, Round] = {}
        self._relayed: dict[int, Relayed] = {}
        self.next_at: Instant = NEVER
        """When the next round in turn begins."""

    # --- turns ------------------------------------------------------------------------------------------------------

    def joined(self, node: NodeId) -> None:
        """Into the present pass, at a random place: a newcomer waits for half a pass on average (SWIM §4.3)."""
        if node not in self._order:
            self._order.insert(self._random.randint(0, len(self._order)), node)

    def schedule(self, now: Instant, interval: float) -> None:
        """The next round: one interval, staggered, from now."""
        jitter = self._profile.probe_jitter
        self.next_at = Instant(now + interval * self._random.uniform(1 - jitter, 1 + jitter))

    def next_target(self, live: Collection[NodeId]) -> NodeId | None:
        """Every live member once in each pass, in an order that is drawn anew for each."""
        members = set(live)
        while members:
            if not self._order:
                self._order = sorted(members)
                self._random.shuffle(self._order)
            target = self._order.pop()
            if target in members:
                return target
        return None

    # --- rounds -----------------------------------------------------------------------------------------------------

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def begin(self, target: Member, now: Instant, interval: float, *, is_in_turn: bool) -> Round | None:
        """None: it is being probed already, or too many are."""
        if len(self._rounds) >= ROUNDS_MAX or self.of(target.id) is not None:
            return None
        seq = self.next_seq()
        round_ = Round(
            seq,
            target.run,
            is_in_turn,
            indirect_at=Instant(now + min(self._profile.direct_timeout, interval)),
            ends_at=Instant(now + interval),
        )
        self._rounds[seq] = round_
        return round_

    def of(self, node: NodeId) -> Round | None:
        return next((r for r in self._rounds.values() if r.target.node == node), None)

    def get(self, seq: int) -> Round | None:
        return self._rounds.get(seq)

    def with_packets_to(self, node: NodeId) -> list[Round]:
        return [r for r in self._rounds.values() if r.target.node == node or node in r.relays]

    def end(self, round_: Round) -> None:
        self._rounds.pop(round_.seq, None)

    def end_of(self, node: NodeId) -> None:
        round_ = self.of(node)
        if round_ is not None:
            self.end(round_)

    def due(self, now: Instant) -> list[Round]:
        """Rounds whose next step is due: the indirect one, or the end."""
        return [r for r in self._rounds.values() if r.deadline <= now]

    def relays_for(self, target: NodeId, live: Collection[NodeId]) -> list[NodeId]:
        """All others where they are few: a random choice could miss the only one with a working path."""
        others = [node for node in live if node != target]
        return self._random.sample(others, min(self._profile.relays, len(others)))

    # --- on behalf of others ------------------------------------------------------------------------------------------

    def relay(self, asker: Run, asked_seq: int, target: NodeId, epoch: int, now: Instant) -> Relayed | None:
        """None: too many are being asked for, or this very question already."""
        if len(self._relayed) >= RELAYED_MAX:
            return None
        asked = [r.asked_seq for r in self._relayed.values() if r.asker == asker]
        if asked_seq in asked or len(asked) >= RELAYED_PER_ASKER_MAX:
            return None
        # Of the unscaled window: whoever waits longer is not helped by a later nack, and who does not would miss it.
        window = self._profile.probe_interval - self._profile.direct_timeout
        nack_at = Instant(now + self._profile.nack_part * window)
        relayed = Relayed(self.next_seq(), asker, asked_seq, target, epoch, nack_at)
        self._relayed[relayed.seq] = relayed
        return relayed

    def take_relayed(self, seq: int, by: Run) -> Relayed | None:
        """The question that `by`'s ack answers, if it does."""
        relayed = self._relayed.get(seq)
        if relayed is None or (relayed.target, relayed.epoch) != (by.node, by.epoch):
            return None
        return self._relayed.pop(seq)

    def take_relayed_for(self, target: NodeId) -> list[Relayed]:
        """All questions about it: its host has refused."""
        found = [r for r in self._relayed.values() if r.target == target]
        for relayed in found:
            del self._relayed[relayed.seq]
        return found

    def take_unanswered(self, now: Instant) -> list[Relayed]:
        found = [r for r in self._relayed.values() if r.nack_at <= now]
        for relayed in found:
            del self._relayed[relayed.seq]
        return found

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> Instant:
        steps = min((r.deadline for r in self._rounds.values()), default=NEVER)
        nacks = min((r.nack_at for r in self._relayed.values()), default=NEVER)
        return min(self.next_at, steps, nacks)

    def cancel_overdue(self, now: Instant) -> int:
        """After a pause: answers to these may have come and gone unread. Nobody is to be blamed -> how many."""
        overdue = self.due(now)
        for round_ in overdue:
            self.end(round_)
        self.take_unanswered(now)
        return len(overdue)

    def check(self) -> None:
        assert len(self._rounds) <= ROUNDS_MAX
        assert len(self._relayed) <= RELAYED_MAX
        targets = [r.target.node for r in self._rounds.values()]
        assert len(targets) == len(set(targets)), targets
        assert len(self._order) == len(set(self._order))
        for round_ in self._rounds.values():
            assert not round_.relays or round_.is_indirect, round_
