"""A few gossip cores that are connected in virtual time: packets of the real codec, links with an order, refusals.

Small on purpose: it is for tests of single rules; faults in all their mixtures are the simulator's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gpulayer.core.base import Tick
from gpulayer.core.gossip.core import Gossip
from gpulayer.core.gossip.messages import (
    CloseLink,
    Contact,
    DatagramRefused,
    Departed,
    GossipEffect,
    GossipEvent,
    LinkDown,
    LinkUp,
    MemberChanged,
    MemberForgotten,
    Message,
    Received,
    RecordChanged,
    SendDatagram,
    SendFailed,
    SendFrame,
    SetSeeds,
    Warned,
)
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member, Run
from gpulayer.model.units import Instant
from gpulayer.wire.gossip import HEAD_BYTES, decode, encode, size_of

# A sealed packet's header and tag, and those of UDP and IP.
OVERHEAD = 60 + 28
ROOM = 1100


def node_id(number: int) -> NodeId:
    return NodeId(f"n-{number:016x}")


def address_of(number: int) -> Address:
    return Address(f"10.0.{number // 250}.{number % 250 + 1}", 7451)


@dataclass
class Host:
    number: int
    gossip: Gossip
    address: Address
    is_up: bool = True
    """Its daemon runs."""
    is_on: bool = True
    """The host answers: refuses, where the daemon is not up."""
    is_paused: bool = False
    waiting: list[GossipEvent] = field(default_factory=list)
    """What came while it was paused."""
    links: set[NodeId] = field(default_factory=set)
    opening: dict[NodeId, list[SendFrame]] = field(default_factory=dict)
    changes: list[tuple[float, MemberChanged]] = field(default_factory=list)
    others: list[tuple[float, GossipEffect]] = field(default_factory=list)
    bytes_sent: int = 0
    packets_sent: int = 0
    tick_at: float = float("inf")

    @property
    def id(self) -> NodeId:
        return self.gossip.own.id

    def sees(self, other: NodeId) -> str:
        member = self.gossip.member(other)
        return member.state if member else "unknown"

    def member(self, other: NodeId) -> Member:
        member = self.gossip.member(other)
        assert member is not None, (self.id, other)
        return member


Filter = Callable[[Host, Host, str], bool]


class Net:
    """`latency`: one way, in seconds, uniform. `loss`: of datagrams."""

    def __init__(self, seed: int = 1, *, latency: tuple[float, float] = (0.0005, 0.0015), loss: float = 0.0) -> None:
        self.random = Random(seed)
        self.latency = latency
        self.loss = loss
        self.now = 100.0
        self.hosts: dict[NodeId, Host] = {}
        self.by_address: dict[Address, Host] = {}
        self.is_cut: Filter = lambda a, b, kind: False
        """(from, to, "datagram" or "stream") -> nothing gets through."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last: dict[tuple[NodeId, NodeId], float] = {}
        self.kinds: Counter[str] = Counter()

    # --- building -----------------------------------------------------------------------------------------------

    def add(self, number: int, *, epoch: int = 1, profile: Profile | None = None, **more: Any) -> Host:
        own = Run(node_id(number), epoch, self.random.getrandbits(64))
        address = more.pop("address", address_of(number))
        gossip = Gossip(
            own=own,
            addresses=(address,),
            profile=profile or Profile(),
            random=Random(self.random.getrandbits(64)),
            size_of=size_of,
            room=ROOM - HEAD_BYTES,
            **more,
        )
        host = Host(number, gossip, address)
        self.hosts[own.node] = host
        self.by_address[address] = host
        return host

    def start(self, count: int, *, settle: float = 3.0, **more: Any) -> list[Host]:
        """A cluster of so many, who all know the first as their seed, after they have found one another."""
        hosts = [self.add(number, **more) for number in range(count)]
        for host in hosts:
            self.give(host, SetSeeds(addresses=(hosts[0].address,)))
        self.run(settle)
        return hosts

    # --- doing --------------------------------------------------------------------------------------------------

    def give(self, host: Host, event: GossipEvent) -> list[GossipEffect]:
        if not host.is_up:
            return []
        if host.is_paused:
            host.waiting.append(event)
            return []
        effects = host.gossip.step(event, Instant(self.now))
        host.gossip.check()
        for effect in effects:
            self._do(host, effect)
        self._plan_tick(host)
        return effects

    def kill(self, host: Host) -> None:
        """The daemon; its host goes on and refuses."""
        host.is_up = False
        for peer in sorted(host.links):
            self._break(self.hosts[peer], host, "closed")
        host.links.clear()

    def power_off(self, host: Host) -> None:
        host.is_up = host.is_on = False

    def restart(self, host: Host, **more: Any) -> Host:
        """A new run of it, at the same address."""
        if host.is_up:
            self.kill(host)
        again = self.add(host.number, epoch=host.gossip.own.run.epoch + 1, **more)
        for peer in self.hosts.values():
            peer.links.discard(again.id)
        return again

    def pause(self, host: Host, seconds: float) -> None:
        host.is_paused = True

        def wake() -> None:
            host.is_paused = False
            waiting, host.waiting = host.waiting, []
            for event in waiting:  # input before timers, as the shell does it
                self.give(host, event)
            self._plan_tick(host)

        self._at(self.now + seconds, wake)

    def run(self, seconds: float) -> None:
        self.run_until(lambda: False, seconds)

    def run_until(self, condition: Callable[[], bool], seconds: float) -> float:
        """-> seconds that it took; as many as given, if it never came true."""
        begun, end = self.now, self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
            if condition():
                return self.now - begun
        self.now = end
        return seconds

    def up(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.is_up]

    def all_see(self, node: NodeId, *states: str) -> bool:
        return all(host.sees(node) in states for host in self.up() if host.id != node)

    def is_settled(self) -> bool:
        """Everybody who is up is alive to everybody who is up."""
        return all(self.all_see(host.id, "alive") for host in self.up())

    # --- inside -------------------------------------------------------------------------------------------------

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), act))

    def _plan_tick(self, host: Host) -> None:
        deadline = max(host.gossip.deadline, self.now)
        if deadline >= host.tick_at or deadline == float("inf"):
            return
        host.tick_at = deadline

        def tick() -> None:
            if host.tick_at != deadline or self.hosts.get(host.id) is not host:
                return
            host.tick_at = float("inf")
            if host.is_up and not host.is_paused:
                self.give(host, Tick())

        self._at(deadline, tick)

    def _do(self, host: Host, effect: GossipEffect) -> None:
        match effect:
            case SendDatagram():
                self._send(host, effect)
            case SendFrame():
                self._frame(host, effect)
            case Contact(address=address):
                target = self.by_address.get(address)
                self._open(host, target, None, address)
            case CloseLink(node=node):
                host.links.discard(node)
                peer = self.hosts.get(node)
                if peer is not None and host.id in peer.links:
                    self._break(peer, host, "goodbye")
            case MemberChanged():
                host.changes.append((self.now, effect))
            case MemberForgotten() | RecordChanged() | Departed() | Warned():
                host.others.append((self.now, effect))

    def _delay(self) -> float:
        return self.random.uniform(*self.latency)

    def _send(self, host: Host, effect: SendDatagram) -> None:
        data = encode(effect.messages)
        assert len(data) <= ROOM, (len(data), effect)
        host.bytes_sent += len(data) + OVERHEAD
        host.packets_sent += 1
        self.kinds.update(type(message).__name__ for message in effect.messages)
        target = self.by_address.get(effect.address)
        if target is None or self.random.random() < self.loss or self.is_cut(host, target, "datagram"):
            return
        source = host.gossip.own.run

        def arrive() -> None:
            if target.is_up and target.id != effect.to:
                return  # a packet is sealed for its receiver, and nobody else can open it
            if target.is_up and self.by_address[effect.address] is target:
                self.give(target, Received(source=source, messages=decode(data), at=host.address))
            elif target.is_on and not self.is_cut(target, host, "datagram"):
                self._at(self.now + self._delay(), lambda: self._give(host, DatagramRefused(address=effect.address)))

        self._at(self.now + self._delay(), arrive)

    def _give(self, host: Host, event: GossipEvent) -> None:
        if self.hosts.get(host.id) is host:
            self.give(host, event)

    def fail_to_send(self, host: Host, address: Address) -> None:
        self.give(host, SendFailed(address=address))

    def _frame(self, host: Host, effect: SendFrame) -> None:
        if effect.to in host.links:
            self._deliver(host, self.hosts[effect.to], effect.messages)
            return
        waiting = host.opening.setdefault(effect.to, [])
        waiting.append(effect)
        if len(waiting) == 1:
            target = self.by_address.get(effect.addresses[0]) if effect.addresses else None
            self._open(host, target, effect.to, effect.addresses[0] if effect.addresses else None)

    def _deliver(self, host: Host, peer: Host, messages: tuple[Message, ...]) -> None:
        data = encode(messages)
        host.bytes_sent += len(data) + OVERHEAD
        source = host.gossip.own.run
        when = max(self.now + self._delay(), self._last.get((host.id, peer.id), 0.0))
        self._last[host.id, peer.id] = when

        def arrive() -> None:
            if host.id in peer.links and not self.is_cut(host, peer, "stream"):
                self._give(peer, Received(source=source, messages=decode(data)))

        self._at(when, arrive)

    def _open(self, host: Host, target: Host | None, node: NodeId | None, address: Address | None) -> None:
        def fail(why: Any) -> None:
            if node is not None:
                host.opening.pop(node, None)
            self._give(host, LinkDown(node=node, address=address, why=why))

        is_cut = target is None or self.is_cut(host, target, "stream") or self.is_cut(target, host, "stream")
        if target is None or is_cut or not target.is_on:
            self._at(self.now + 2.0, lambda: fail("timeout"))
            return

        def connect() -> None:
            assert target is not None
            if not host.is_up or self.hosts.get(host.id) is not host:
                return
            if not target.is_up or self.hosts.get(target.id) is not target:
                fail("refused")
                return
            waiting = host.opening.pop(target.id, [])
            if target.id not in host.links:
                host.links.add(target.id)
                target.links.add(host.id)
                self._last.pop((host.id, target.id), None)
                ours, theirs = host.gossip.own, target.gossip.own
                self._give(target, LinkUp(run=ours.run, addresses=ours.addresses, is_ours=False))
                self._give(host, LinkUp(run=theirs.run, addresses=theirs.addresses, is_ours=True))
            for frame in waiting:
                self._deliver(host, target, frame.messages)

        self._at(self.now + 3 * self._delay(), connect)

    def _break(self, host: Host, peer: Host, why: Any) -> None:
        host.links.discard(peer.id)
        gone = LinkDown(node=peer.id, address=peer.address, why=why)
        self._at(self.now + self._delay(), lambda: self._give(host, gone))
