"""Leaving by one's own will: said to the living until enough of them have heard it, and not to the dead."""

from __future__ import annotations

from collections.abc import Callable

from gpulayer.core.gossip.members import Members
from gpulayer.core.gossip.messages import Ack, Departed, Left
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.units import NEVER, Instant

# Told in one round: twice as many as have to answer, so that one lost packet costs nothing.
TOLD_PER_ROUND = 6


class Departure:
    def __init__(self, members: Members, outbox: Outbox, profile: Profile) -> None:
        self._members = members
        self._outbox = outbox
        self._profile = profile
        self._word: Left | None = None
        self._next_seq: Callable[[], int] | None = None
        self._asked: dict[int, NodeId] = {}
        self._heard: set[NodeId] = set()
        self._next_at: Instant = NEVER
        self._ends_at: Instant = NEVER

    @property
    def deadline(self) -> Instant:
        return min(self._next_at, self._ends_at)

    def begin(self, word: Left, now: Instant, next_seq: Callable[[], int]) -> None:
        self._word, self._next_seq = word, next_seq
        self._ends_at = Instant(now + self._profile.leave_timeout)
        self.tick(now, is_first=True)

    def hear_ack(self, ack: Ack, source: Run) -> None:
        if self._word is not None and self._asked.pop(ack.seq, None) == source.node == ack.node:
            self._heard.add(source.node)
            if len(self._heard) >= self._wanted:
                self._finish()

    def tick(self, now: Instant, *, is_first: bool = False) -> None:
        if self._word is None or self._next_seq is None or self._ends_at == NEVER:
            return
        if self._ends_at <= now or self._wanted <= len(self._heard):
            self._finish()
        elif is_first or self._next_at <= now:
            self._next_at = Instant(now + self._profile.gossip_interval)
            for node in self._outbox.some_live(TOLD_PER_ROUND, without=self._heard):
                seq = self._next_seq()
                self._asked[seq] = node
                ping = self._members.ping_of(seq, self._members.all[node].run)
                self._outbox.datagram(node, [self._word, ping], now)

    @property
    def _wanted(self) -> int:
        return min(self._profile.leave_acks, len(self._members.live))

    def _finish(self) -> None:
        self._next_at = self._ends_at = NEVER
        self._asked.clear()
        self._outbox.do(Departed(acknowledged=len(self._heard)))

    def check(self) -> None:
        assert (self._word is None) == (self._members.own.state != "left")
        assert self._word is not None or not self._asked
