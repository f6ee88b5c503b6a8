"""Simulated hosts and the daemons on them: the product's core, gate and codec, driven as runtime/drive.py does it.

Only the shells are simulated: a process takes what has arrived before it looks at its timers, and a process that was
asleep finds all of it in its receive buffer when it wakes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpulayer.core.base import Tick
from gpulayer.core.gossip.core import Gossip
from gpulayer.core.gossip.messages import (
    CloseLink,
    Contact,
    DatagramRefused,
    Departed,
    GossipEffect,
    GossipEvent,
    LeaveWanted,
    LinkDown,
    LinkUp,
    MemberChanged,
    MemberForgotten,
    Message,
    Ping,
    Received,
    RecordChanged,
    SendDatagram,
    SendFailed,
    SendFrame,
    SetLeader,
    SetOwn,
    SetRegistry,
    SetSeeds,
    SetSelf,
    Suspended,
    Warned,
)
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE, Run
from gpulayer.model.trust import KeyRing
from gpulayer.model.units import Instant
from gpulayer.wire import gossip as codec
from gpulayer.wire.datagram import OVERHEAD
from gpulayer.wire.gate import PacketGate
from tests.sim.network import HANDSHAKE_BYTES, RECEIVE_BUFFER_PACKETS, Captured, Link

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

CONNECT_TIMEOUT = 3.0
URGENT_TIMEOUT = 1.0
OUTBOX_FRAMES = 256
PEERS_REMEMBERED = 64
# A ring is fetched anew at most so often, however many packets came under keys that are not known.
RING_RETRY = 1.0


@dataclass(slots=True)
class Disk:
    """What a host keeps when its daemon is gone."""

    node: NodeId
    epoch: int = 0
    ring: KeyRing = field(default_factory=KeyRing)
    peers: tuple[Address, ...] = ()


@dataclass(slots=True)
class Clock:
    """A host's monotonic clock: runs at its own rate, stands still while the host is suspended."""

    rate: float = 1.0
    _base: float = 0.0
    _since: float = 0.0

    def local(self, now: float) -> Instant:
        return Instant(self._base + self.rate * (now - self._since))

    def due(self, instant: float) -> float:
        """The simulated time at which this clock shows `instant`."""
        return self._since + (instant - self._base) / self.rate

    def stand_still(self, since: float, until: float) -> None:
        self._base, self._since = self.local(since), until


class Host:
    """A machine with an address, a disk and, mostly, a running daemon."""

    def __init__(self, cluster: Cluster, index: int, disk: Disk, address: Address) -> None:
        self.cluster = cluster
        self.index = index
        self.disk = disk
        self.address = address
        self.seen_at = address
        """Where its datagrams seem to come from; another port behind address translation."""
        self.clock = Clock(_base=1000.0 + 10.0 * index)
        self.is_on = True
        self.cannot_send = False
        self.refuses: set[int] = set()
        """Hosts that its firewall rejects, by index."""
        self.process: Process | None = None
        self.bytes_sent = 0
        self.packets_sent = 0

    @property
    def name(self) -> str:
        return f"h{self.index}"

    @property
    def reached_at(self) -> tuple[Address, ...]:
        return (self.address,) if self.seen_at == self.address else (self.address, self.seen_at)

    @property
    def is_live(self) -> bool:
        return self.process is not None and self.is_on

    def count_sent(self, size: int) -> None:
        self.bytes_sent += size
        self.packets_sent += 1

    def __repr__(self) -> str:
        return f"{self.name}({self.disk.node})"


class Attempt:
    """To open a link to whoever is at one of some addresses."""

    def __init__(self, process: Process, node: NodeId | None, addresses: tuple[Address, ...]) -> None:
        self.process = process
        self.node = node
        self.addresses = addresses
        self.waiting = len(addresses)
        self.is_over = False


class Process:
    """One run of a daemon."""

    def __init__(self, host: Host, run: Run, chance: random.Random) -> None:
        self.cluster = host.cluster
        self.host = host
        self.run = run
        self.chance = chance
        profile = self.cluster.profile
        self.gate = PacketGate(
            own=run, cluster_id=self.cluster.id, ring=host.disk.ring, challenge_secret=chance.randbytes(32)
        )
        self.gossip = self.cluster.make_core(
            own=run,
            addresses=(host.address,),
            profile=profile,
            random=random.Random(chance.getrandbits(64)),
            size_of=codec.size_of,
            room=profile.packet_bytes_max - OVERHEAD - codec.HEAD_BYTES,
            key_ids=tuple(key.id for key in host.disk.ring.keys),
        )
        self.has_ended = False
        self.is_asleep = False
        self.links: dict[NodeId, Link] = {}
        self.warnings: list[Warned] = []
        self.departed: Departed | None = None
        self.is_leaving = False
        self.registry: frozenset[NodeId] | None = None
        self.dropped = 0
        """Datagrams for which its receive buffer had no room."""
        self._asleep_until = 0.0
        self._outboxes: dict[NodeId, deque[bytes]] = {}
        self._inbox: deque[tuple[Any, ...]] = deque()
        self._datagrams_waiting = 0
        self._wake_at = float("inf")
        self._ring_asked_at = -RING_RETRY
        self._leader: NodeId | None = None

    def __repr__(self) -> str:
        return f"{self.host.name}/{self.run.epoch}"

    @property
    def local_now(self) -> Instant:
        return self.host.clock.local(self.cluster.timeline.now)

    # --- what arrives -------------------------------------------------------------------------------------------

    def take_datagram(self, source: Address, data: bytes, injected: bool = False) -> None:
        if self.is_asleep and self._datagrams_waiting >= RECEIVE_BUFFER_PACKETS:
            self.dropped += 1
            return
        self._datagrams_waiting += 1
        self._put(self._open_datagram, source, data, injected)

    def take_refusal(self, address: Address) -> None:
        self._put(self._step, DatagramRefused(address=address))

    def take_frame(self, link: Link, payload: bytes | KeyRing) -> None:
        self._put(self._read_frame, link, payload)

    def take_link_end(self, link: Link, why: str) -> None:
        self._put(self._lose_link, link, why)

    def tell(self, event: GossipEvent) -> None:
        """From the rest of the daemon."""
        self._put(self._hear, event)

    def _put(self, *item: Any) -> None:
        if self.has_ended:
            return
        self._inbox.append(item)
        if not self.is_asleep:
            self._turn()

    def _hear(self, event: GossipEvent) -> None:
        if isinstance(event, SetRegistry):
            self.registry = event.nodes
        elif isinstance(event, SetLeader):
            self._leader = event.node
        self._step(event)

    # --- its loop -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        inbox = self._inbox
        while inbox:
            call, *arguments = inbox.popleft()
            call(*arguments)
            if self.has_ended:
                return
        if self.local_now >= self.gossip.deadline:
            self._step(Tick())
        self._sleep_until_due()

    def _sleep_until_due(self) -> None:
        deadline = self.gossip.deadline
        if deadline == float("inf"):
            return
        # A hair later, so that a rounding error does not make it early.
        due = max(self.host.clock.due(deadline), self.cluster.timeline.now) + 1e-6
        if due < self._wake_at:
            self._wake_at = due
            self.cluster.timeline.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if due >= self._wake_at:
            self._wake_at = float("inf")
        if not self.has_ended and not self.is_asleep:
            self._turn()

    def pause(self, seconds: float) -> None:
        """Stopped (SIGSTOP, or a step that takes so long): its kernel goes on receiving."""
        until = self.cluster.timeline.now + seconds
        self.is_asleep = True
        self._asleep_until = max(self._asleep_until, until)
        self.cluster.timeline.at(until, self._resume)

    def _resume(self) -> None:
        if self.is_asleep and not self.has_ended and self.cluster.timeline.now >= self._asleep_until:
            self.is_asleep = False
            self._turn()

    def suspend(self, seconds: float) -> None:
        """The whole host sleeps: nothing is received, and its monotonic clock stands still."""
        now = self.cluster.timeline.now
        self.is_asleep = True
        self.host.is_on = False
        self._asleep_until = max(self._asleep_until, now + seconds)
        self.cluster.timeline.after(seconds, self._resume_host, now)

    def _resume_host(self, since: float) -> None:
        if self.has_ended:
            return
        now = self.cluster.timeline.now
        self.host.is_on = True
        self.host.clock.stand_still(since, now)
        self._wake_at = float("inf")
        self._inbox.appendleft((self._step, Suspended(seconds=now - since)))
        self._resume()

    def start(self, seeds: tuple[Address, ...]) -> None:
        cluster = self.cluster
        if cluster.registry is not None:
            self.tell(SetRegistry(nodes=frozenset(cluster.registry)))
        known = tuple(
            dict.fromkeys(address for address in seeds + self.host.disk.peers if address != self.host.address)
        )
        self.tell(SetSeeds(addresses=known))
        if cluster.leader is not None:
            self.tell(SetLeader(node=cluster.leader.disk.node))
        self.tell(SetOwn(values=dict(cluster.first_record(self.host))))
        self._turn()

    def end(self, why: str = "closed") -> None:
        """The process is gone; its kernel closes what it had open."""
        self.remember_peers()
        for link in self.links.values():
            link.close(self, why)
        self.has_ended = True
        self._inbox.clear()
        if self.host.process is self:
            self.host.process = None

    def remember_peers(self) -> None:
        addresses = [
            member.addresses[0]
            for node, member in sorted(self.gossip.members().items())
            if node != self.run.node and member.addresses and member.state != "left"
        ]
        self.host.disk.peers = tuple(addresses[:PEERS_REMEMBERED])

    # --- the core -----------------------------------------------------------------------------------------------

    def _step(self, event: GossipEvent) -> None:
        effects = self.gossip.step(event, self.local_now)
        if self.cluster.checks is not None:
            self.cluster.checks.stepped(self, event, effects)
        for effect in effects:
            self._PERFORM[type(effect)](self, effect)

    def _send_datagram(self, effect: SendDatagram) -> None:
        if self.host.cannot_send:
            self.cluster.timeline.after(1e-4, self._put, self._step, SendFailed(address=effect.address))
            return
        self.cluster.network.send(self.host, effect.address, self.gate.seal(effect.messages, effect.to))

    def _send_frame(self, effect: SendFrame) -> None:
        payload = codec.encode(effect.messages)
        link = self.links.get(effect.to)
        if link is not None:
            link.send(self, payload)
            return
        outbox = self._outboxes.get(effect.to)
        if outbox is not None:
            outbox.append(payload)
            return
        self._outboxes[effect.to] = deque((payload,), maxlen=OUTBOX_FRAMES)
        self._connect(Attempt(self, effect.to, effect.addresses), _is_urgent(effect.messages))

    def _contact(self, effect: Contact) -> None:
        self._connect(Attempt(self, None, (effect.address,)), False)

    def _close_link(self, effect: CloseLink) -> None:
        link = self.links.pop(effect.node, None)
        if link is not None:
            link.close(self, "goodbye")

    def _member_changed(self, effect: MemberChanged) -> None:
        self.cluster.tell_change(self, effect)

    def _member_forgotten(self, effect: MemberForgotten) -> None:
        self.gate.forget(effect.node)

    def _record_changed(self, effect: RecordChanged) -> None:
        self.cluster.tell_record(self, effect)

    def _depart(self, effect: Departed) -> None:
        self.departed = effect
        self.cluster.timeline.after(1e-3, self.end, "goodbye")

    def _warn(self, effect: Warned) -> None:
        self.warnings.append(effect)
        self.cluster.say(f"{self}: warns {effect.code}: {effect.text}")

    _PERFORM: ClassVar[dict[type[GossipEffect], Callable[[Process, Any], None]]] = {
        SendDatagram: _send_datagram,
        SendFrame: _send_frame,
        Contact: _contact,
        CloseLink: _close_link,
        MemberChanged: _member_changed,
        MemberForgotten: _member_forgotten,
        RecordChanged: _record_changed,
        Departed: _depart,
        Warned: _warn,
    }

    # --- datagrams ----------------------------------------------------------------------------------------------

    def _open_datagram(self, source: Address, data: bytes, injected: bool) -> None:
        self._datagrams_waiting -= 1
        opened = self.gate.open(data, source, self.local_now)
        if injected and self.cluster.checks is not None:
            self.cluster.checks.injected(self, data, opened)
        captured = self.cluster.network.captured
        if captured is not None and opened.received and not injected:
            captured.append(Captured(source, self.host.address, data))
        for reply in opened.replies:
            if not self.host.cannot_send:
                self.cluster.network.send(self.host, source, reply)
        if opened.duplicate is not None:
            self._hear_of_double(opened.duplicate)
        if opened.unknown_key is not None:
            self._fetch_ring(source)
        for received in opened.received:
            self._step(received)

    def _hear_of_double(self, run: Run) -> None:
        """Another live run has our own id: both say so of themselves."""
        if run.node == self.run.node and run != self.run and not self.gossip.own.flags & DUPLICATE:
            self.cluster.say(f"{self}: its id is claimed by another run too")
            self._step(SetSelf(flags_on=DUPLICATE))

    # --- the key ring -------------------------------------------------------------------------------------------

    def take_ring(self, ring: KeyRing) -> None:
        """A newer ring, kept on disk and passed on to whoever is linked."""
        if ring.version <= self.host.disk.ring.version:
            return
        self.host.disk.ring = ring
        self.gate.set_ring(ring)
        self._step(SetSelf(key_ids=tuple(key.id for key in ring.keys)))
        for link in self.links.values():
            link.send(self, ring)

    def _fetch_ring(self, source: Address) -> None:
        now = self.cluster.timeline.now
        if now - self._ring_asked_at >= RING_RETRY:
            self._ring_asked_at = now
            self._connect(Attempt(self, None, (source,)), False)

    # --- links --------------------------------------------------------------------------------------------------

    def _read_frame(self, link: Link, payload: bytes | KeyRing) -> None:
        peer = link.other(self).run
        if isinstance(payload, KeyRing):
            self.take_ring(payload)
        else:
            self._step(Received(source=peer, messages=codec.decode(payload)))

    def _lose_link(self, link: Link, why: str) -> None:
        peer = link.other(self)
        if self.links.get(peer.run.node) is link:
            del self.links[peer.run.node]
            self._step(LinkDown(node=peer.run.node, address=peer.host.address, why=why))  # type: ignore[arg-type]

    def _connect(self, attempt: Attempt, is_urgent: bool) -> None:
        timeline, network = self.cluster.timeline, self.cluster.network
        timeline.after(URGENT_TIMEOUT if is_urgent else CONNECT_TIMEOUT, self._fail, attempt, "timeout", True)
        self.host.count_sent(HANDSHAKE_BYTES)
        for address in attempt.addresses:
            target = network.host_at(address)
            if self.host.cannot_send:
                timeline.after(1e-4, self._fail, attempt, "failed", False)
            elif target is None or not network.can_stream(self.host, target):
                continue
            elif target.process is None or self.host.index in target.refuses:
                there_and_back = network.latency(self.host, target) + network.latency(target, self.host)
                timeline.after(there_and_back, self._fail, attempt, "refused", False)
            else:
                wait = network.latency(self.host, target) + network.retransmissions(self.host, target)
                timeline.after(wait, target.process._put, target.process._accept, attempt, address)

    def _fail(self, attempt: Attempt, why: str, is_all: bool) -> None:
        attempt.waiting -= 1
        if attempt.is_over or self.has_ended or (attempt.waiting > 0 and not is_all):
            return
        attempt.is_over = True
        self._put(self._give_up, attempt, why)

    def _give_up(self, attempt: Attempt, why: str) -> None:
        if attempt.node is not None:
            self._outboxes.pop(attempt.node, None)
        self._step(LinkDown(node=attempt.node, address=attempt.addresses[0], why=why))  # type: ignore[arg-type]

    def _accept(self, attempt: Attempt, address: Address) -> None:
        """The certificate of whoever connects names its node; then its word for the rest of its run counts."""
        network, opener = self.cluster.network, attempt.process
        if attempt.is_over or opener.has_ended or not network.can_stream(self.host, opener.host):
            return
        self.host.count_sent(HANDSHAKE_BYTES)
        both_ways = network.latency(self.host, opener.host) + network.latency(opener.host, self.host)
        if opener.run.node == self.run.node:
            self._hear_of_double(opener.run)
            self.cluster.timeline.after(both_ways, opener._put, opener._hear_of_double, self.run)
            self.cluster.timeline.after(both_ways, opener._fail, attempt, "failed", False)
        elif self.registry is not None and opener.run.node not in self.registry:
            self.cluster.timeline.after(both_ways, opener._fail, attempt, "failed", False)
        else:
            self.cluster.timeline.after(both_ways, opener._put, opener._accepted, attempt, self)

    def _accepted(self, attempt: Attempt, acceptor: Process) -> None:
        if attempt.is_over or acceptor.has_ended:
            return
        if attempt.node is not None and acceptor.run.node != attempt.node:
            self._fail(attempt, "failed", False)
            return
        attempt.is_over = True
        link = Link(self.cluster.network, self, acceptor)
        # The acceptor has the opener's hello before anything that follows on the link.
        link.send_up()
        self.cluster.timeline.after(self.cluster.profile.link_idle, self._close_idle, link)
        self._take_link(link)
        for payload in self._outboxes.pop(acceptor.run.node, ()):
            self.links[acceptor.run.node].send(self, payload)

    def take_link(self, link: Link) -> None:
        self._put(self._take_link, link)

    def _take_link(self, link: Link) -> None:
        peer = link.other(self)
        node = peer.run.node
        old = self.links.get(node)
        if old is not None and old.other(self) is not peer:
            self._lose_link(old, "closed")
            old = None
        self.gate.link_verified(peer.run, peer.gate.datagrams_sent)
        if old is not None and old.opener is not link.opener and old.opener.run.node < link.opener.run.node:
            return  # both opened one at once: the one opened by the smaller id is used
        self.links[node] = link
        ring = self.host.disk.ring
        if ring.version > peer.host.disk.ring.version:
            link.send(self, ring)
        if old is None:
            self._step(LinkUp(run=peer.run, addresses=(peer.host.address,), is_ours=link.opener is self))

    def _close_idle(self, link: Link) -> None:
        node = link.other(self).run.node
        if self.has_ended or self.links.get(node) is not link:
            return
        idle = self.cluster.timeline.now - link.used_at
        if idle >= self.cluster.profile.link_idle and self._leader not in (node, self.run.node):
            link.close(self, "goodbye")
            self._put(self._lose_link, link, "goodbye")
        else:
            again = max(self.cluster.profile.link_idle - idle, 1.0)
            self.cluster.timeline.after(again, self._close_idle, link)

    # --- what its user does -------------------------------------------------------------------------------------

    def leave(self) -> None:
        self.is_leaving = True
        self.tell(LeaveWanted())

    def set_own(self, values: dict[str, bytes | None]) -> None:
        self.tell(SetOwn(values=values))


def _is_urgent(messages: tuple[Message, ...]) -> bool:
    return any(isinstance(message, Ping) for message in messages)


CoreMaker = Callable[..., Gossip]
