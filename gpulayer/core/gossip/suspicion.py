"""Suspicions: who is held to be failing, on whose word, and until when.

The timeout shrinks as others confirm, independently, from T_max towards T_min (Lifeguard's suspicion). Each reporter
counts once for each incarnation, and a word from a merge never. Refusals of two members, neither of whom nor we have
heard from that run since, prove that its daemon is gone, and end the wait at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from gpulayer.core.gossip.messages import Suspect
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.ids import NodeId
from gpulayer.model.member import MemberState, Run
from gpulayer.model.units import NEVER, Instant

# A witness says it again while it lasts, and not more often.
VOUCH_INTERVAL = 1.0
# The same word of the same witness, passed on by others: an echo, unless this much later.
VOUCH_ECHO = 5.0
LONG_AGO = Instant(-math.inf)


@dataclass(slots=True)
class Suspicion:
    run: Run
    incarnation: int
    began: Instant
    since: Instant
    """When the member was last alive here: a suspicion of a higher incarnation goes on from a lower one's."""
    timer_from: Instant
    first: NodeId
    """Whose word began it; it does not confirm itself."""
    counted: set[NodeId] = field(default_factory=set)
    """Reporters that have had their say."""
    confirmed: set[NodeId] = field(default_factory=set)
    refused: set[NodeId] = field(default_factory=set)
    refused_at: Instant = NEVER
    """When the refusals became enough."""
    vouches: dict[NodeId, Instant] = field(default_factory=dict)
    """By witness, when its word was last believed."""
    vouched_at: Instant = LONG_AGO
    """When any was."""
    pings: deque[Instant] = field(default_factory=deque)
    """When we, a witness, ask it directly."""
    merged: MemberState | None = None
    """Only somebody's table said so; dead there, it has had its time, and waits here no longer than to be refuted."""

    @property
    def node(self) -> NodeId:
        return self.run.node

    def proves(self, word: Suspect, now: Instant) -> bool:
        """Whether it is a refusal that counts as one. What is told soon after a vouch may be from before it, and goes
        around still; who is refused then will be refused again."""
        return word.cause == "refused" and now >= self.vouched_at + VOUCH_ECHO

    def has_counted(self, word: Suspect, now: Instant) -> bool:
        """A reporter counts once; one that was refused after all counts for that too."""
        return word.reporter in (self.refused if self.proves(word, now) else self.counted)


Said = Literal["began", "renewed", "confirmed", "nothing"]


class Suspicions:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._all: dict[NodeId, Suspicion] = {}
        self._own: deque[Instant] = deque()
        """When suspicions began on our own word."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Suspicion]:
        return iter(list(self._all.values()))

    def get(self, node: NodeId) -> Suspicion | None:
        return self._all.get(node)

    def hear(self, word: Suspect, run: Run, needed: int, now: Instant, *, merged: MemberState | None = None) -> Said:
        """Take a reporter's word. `needed`: how many must be refused before that proves a death. The caller has seen
        that it is not about a lower incarnation than is known."""
        assert (word.node, word.epoch) == (run.node, run.epoch), (word, run)
        held = self._all.get(word.node)
        is_reliable = word.reporter_health < self._profile.health_unreliable
        said: Said
        if held is None or held.run != run or word.incarnation > held.incarnation:
            said = "began" if held is None else "renewed"
            since = now if held is None or held.run != run else held.since
            held = Suspicion(run, word.incarnation, now, since, timer_from=now, first=word.reporter)
            held.merged = merged
            self._all[word.node] = held
        elif merged or not is_reliable or word.incarnation < held.incarnation or held.has_counted(word, now):
            return "nothing"
        else:
            said = "confirmed"
            if word.reporter not in held.counted and word.reporter != held.first:
                if held.merged == "suspect":
                    # The first real word: the table that began it was nobody's observation.
                    held.merged, held.first = None, word.reporter
                else:
                    held.confirmed.add(word.reporter)
        if not merged:
            held.counted.add(word.reporter)
        if held.proves(word, now) and is_reliable and not merged:
            held.refused.add(word.reporter)
            if len(held.refused) >= needed and held.refused_at == NEVER:
                held.refused_at = now
        return said

    def vouch(self, node: NodeId, incarnation: int, witness: NodeId, now: Instant, *, is_direct: bool) -> bool:
        """Somebody heard it after we began to suspect it: the timer starts anew, and all that was confirmed or refused
        before is void. The suspicion stays: only its subject ends it. -> whether the word was news."""
        held = self._all.get(node)
        if held is None or incarnation < held.incarnation:
            return False
        last = held.vouches.get(witness)
        if last is not None and now < last + (VOUCH_INTERVAL if is_direct else VOUCH_ECHO):
            return False
        held.vouches[witness] = held.vouched_at = now
        held.timer_from = now
        held.confirmed.clear()
        held.refused.clear()
        held.refused_at = NEVER
        held.merged = None
        return True

    def end(self, node: NodeId) -> None:
        self._all.pop(node, None)

    # --- time -------------------------------------------------------------------------------------------------------

    def ends_at(self, held: Suspicion, members: int) -> Instant:
        """When it becomes a death, if nothing is said any more. `members`: the live ones, suspects and this one too."""
        timeout = self._profile.suspicion_timeout(members, members - len(self._all), len(held.confirmed))
        if held.merged == "dead":
            timeout, _ = self._profile.suspicion_bounds(members)
        slow = held.timer_from + timeout
        return Instant(min(slow, held.refused_at + self._profile.refusal_grace))

    def deadline(self, members: int) -> Instant:
        """The first death."""
        return Instant(min((self.ends_at(held, members) for held in self._all.values()), default=NEVER))

    def pings_at(self) -> Instant:
        """The first ping of a witness."""
        return Instant(min((held.pings[0] for held in self._all.values() if held.pings), default=NEVER))

    def shift(self, seconds: float) -> None:
        """We were away for so long, and heard nothing that would have spoken for anybody."""
        for held in self._all.values():
            held.timer_from = Instant(held.timer_from + seconds)
            held.refused_at = Instant(held.refused_at + seconds)

    # --- our own ------------------------------------------------------------------------------------------------------

    def may_begin(self, members: int, now: Instant) -> bool:
        """Whether one more suspicion on our word alone is credible."""
        while self._own and self._own[0] + self._profile.accusations_window <= now:
            self._own.popleft()
        most = max(self._profile.accusations_min, self._profile.accusations_part * members)
        return len(self._own) + 1 <= most

    def begun(self, now: Instant) -> None:
        self._own.append(now)

    def check(self) -> None:
        for node, held in self._all.items():
            assert held.node == node
            assert held.first not in held.confirmed, held
            assert held.confirmed | held.refused <= held.counted, held
            assert held.since <= held.began, held
