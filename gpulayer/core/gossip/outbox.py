"""What gossip wants done: collects the effects of a step, fills packets up with rumours, remembers members' stories.

Knows the table and the rumours, and decides nothing about either.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from random import Random

from gpulayer.core.gossip.members import Accusation, Members
from gpulayer.core.gossip.messages import (
    Alive,
    Dead,
    GossipEffect,
    Left,
    MemberChanged,
    MemberForgotten,
    Message,
    SendDatagram,
    SendFrame,
    Suspect,
    Warned,
)
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.spread import Spread
from gpulayer.core.gossip.suspicion import Suspicions
from gpulayer.core.gossip.sync import frames
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member
from gpulayer.model.units import Instant

STORY_LINES = 64
# Of those that are members no more: for whoever asks soon after.
STORIES_MAX = 4096
# A warning about the same thing is said again after so long.
WARNING_INTERVAL = 300.0
WARNINGS_MAX = 256


class Outbox:
    """`room`: bytes of messages in one packet. `rng`: to whom rumours go."""

    def __init__(
        self,
        members: Members,
        suspicions: Suspicions,
        spread: Spread,
        profile: Profile,
        *,
        size_of: Callable[[Message], int],
        room: int,
        rng: Random,
    ) -> None:
        self._members = members
        self._suspicions = suspicions
        self._spread = spread
        self._profile = profile
        self._size_of = size_of
        self._room = room
        self._random = rng
        self._effects: list[GossipEffect] = []
        self._stories: dict[NodeId, deque[tuple[Instant, str]]] = {}
        self._warned: dict[tuple[str, str], Instant] = {}
        self._observed: dict[NodeId, Address] = {}
        """Where datagrams of a member come from, where that is none of its addresses (a NAT on the way)."""
        self.over_stream: set[NodeId] = set()
        """Members that datagrams do not reach: what is meant for them goes over a link."""
        self.counters: Counter[str] = Counter()

    def take(self) -> list[GossipEffect]:
        effects, self._effects = self._effects, []
        return effects

    def do(self, effect: GossipEffect) -> None:
        self._effects.append(effect)

    # --- to members -------------------------------------------------------------------------------------------------

    def datagram(self, to: NodeId, messages: Sequence[Message], now: Instant, at: Address | None = None) -> None:
        """One packet to a member (`at`: to where it has just spoken from), filled up with rumours."""
        address = at or self.address_of(to)
        if address is None:
            return
        packed = self._with_accusation(to, messages)
        room = self._room - sum(map(self._size_of, packed))
        assert room >= 0, (room, packed)
        # Who is suspected may be gone: to tell it is no loss, and counts as nothing where somebody else can be told.
        is_heard = self._members.get(to) is None or self._members.all[to].state == "alive" or self._members.well == 1
        packed += self._spread.pack(room, self._members.count, now, tuple(packed), is_heard=is_heard)
        if packed:
            self.counters["datagrams_sent"] += 1
            self.do(SendDatagram(to=to, address=address, messages=tuple(packed)))

    def frame(self, to: NodeId, messages: Sequence[Message]) -> None:
        """Over the link, which is opened where there is none; in as many frames as it takes."""
        member = self._members.get(to)
        addresses = member.addresses if member else ()
        for packed in frames(self._with_accusation(to, messages), self._size_of):
            self.counters["frames_sent"] += 1
            self.do(SendFrame(to=to, addresses=addresses, messages=packed))

    def send(self, to: NodeId, messages: Sequence[Message], now: Instant, at: Address | None = None) -> None:
        """In one packet where they fit into one and datagrams reach it, else over a link."""
        fits = sum(map(self._size_of, self._with_accusation(to, messages))) <= self._room
        if fits and to not in self.over_stream and (at or self.address_of(to)):
            self.datagram(to, messages, now, at)
        else:
            self.frame(to, messages)

    def fits(self, message: Message, bytes_max: int) -> bool:
        return self._size_of(message) <= min(bytes_max, self._room)

    def gossip(self, now: Instant, without: Collection[NodeId] = ()) -> None:
        """Rumours to a few live members, for their own sake; to suspects only where nobody else is left."""
        if self._members.well > 1:
            without = {*without, *self._members.suspects}
        for node in self.some_live(self._profile.gossip_fanout, without):
            if not self._spread.is_pressing:
                return
            if node in self.over_stream:
                self.frame(node, self._spread.pack(self._room, self._members.count, now))
            else:
                self.datagram(node, (), now)

    def some_live(self, count: int, without: Collection[NodeId] = ()) -> list[NodeId]:
        live = [node for node in self._members.live if node not in without] if without else self._members.live
        return self._random.sample(live, min(count, len(live)))

    def address_of(self, node: NodeId) -> Address | None:
        member = self._members.get(node)
        if member is None or not member.addresses:
            return self._observed.get(node)
        return member.addresses[0]

    def other_addresses_of(self, node: NodeId) -> list[Address]:
        """Where else it may be reached."""
        member = self._members.get(node)
        known = list(member.addresses[1:]) if member else []
        observed = self._observed.get(node)
        return [*known, observed] if observed and observed not in known else known

    def observed_at(self, node: NodeId, address: Address) -> None:
        member = self._members.get(node)
        if member is None:
            return
        if address in member.addresses:
            self._observed.pop(node, None)
        else:
            self._observed[node] = address

    def accusation_of(self, member: Member) -> Accusation | None:
        """What is held against it here, and it can refute."""
        if member.state == "left":
            return Left(node=member.id, epoch=member.run.epoch, incarnation=member.incarnation)
        if member.state == "dead" and member.cause is not None:
            return Dead(
                node=member.id,
                epoch=member.run.epoch,
                incarnation=member.incarnation,
                cause=member.cause,
                reporter=self._members.own.id,
            )
        suspicion = self._suspicions.get(member.id)
        if member.state == "suspect" and suspicion is not None:
            return Suspect(
                node=member.id,
                epoch=member.run.epoch,
                incarnation=member.incarnation,
                cause="refused" if suspicion.refused else "timeout",
                reporter=suspicion.first,
            )
        return None

    # --- upwards ----------------------------------------------------------------------------------------------------

    def changed(self, before: Member | None, node: NodeId, text: str, now: Instant) -> None:
        after = self._members.get(node)
        assert after is not None, node
        self.tell(node, text, now)
        self.do(MemberChanged(before=before, after=after, text=text))

    def forgotten(self, node: NodeId, text: str, now: Instant) -> None:
        self._observed.pop(node, None)
        self.over_stream.discard(node)
        self.tell(node, text, now)
        self.do(MemberForgotten(node=node))

    def warn(self, code: str, subject: str, text: str, now: Instant) -> None:
        """Once in a while about the same subject."""
        if now < self._warned.get((code, subject), Instant(-WARNING_INTERVAL)) + WARNING_INTERVAL:
            return
        self._warned[code, subject] = now
        if len(self._warned) > WARNINGS_MAX:
            del self._warned[next(iter(self._warned))]
        self.do(Warned(code=code, text=text))

    def tell(self, node: NodeId, text: str, now: Instant) -> None:
        """A line of its story."""
        story = self._stories.pop(node, None)
        if story is None:
            story = deque(maxlen=STORY_LINES)
            if len(self._stories) >= STORIES_MAX:
                del self._stories[next(iter(self._stories))]
        story.append((now, text))
        self._stories[node] = story

    def story(self, node: NodeId) -> tuple[tuple[Instant, str], ...]:
        return tuple(self._stories.get(node, ()))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _with_accusation(self, to: NodeId, messages: Sequence[Message]) -> list[Message]:
        """Who is suspected or gone here hears of it first, in everything that goes to it (Lifeguard's buddy system);
        and who has never heard from us hears who we are."""
        member = self._members.get(to)
        packed = list(messages)
        if member is None or member.heard_at == 0.0:
            own = self._members.word_of(self._members.own.id)
            if self._members.own.state == "alive" and not any(
                isinstance(m, Alive) and m.run == own.run for m in packed
            ):
                packed.insert(0, own)
        accusation = self.accusation_of(member) if member else None
        if accusation is not None and not any(_same_accusation(accusation, m) for m in packed):
            packed.insert(0, accusation)
        return packed


def _same_accusation(accusation: Accusation, message: Message) -> bool:
    return isinstance(message, Suspect | Dead | Left) and message.node == accusation.node
