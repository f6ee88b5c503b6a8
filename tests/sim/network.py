"""The simulated network: datagrams that may be lost, late, doubled, out of order or replayed, and streams that are not.

It knows hosts by their addresses and says nothing about what is in a packet. What a kernel would do for a host is done
here: refuse a datagram or a connection where nobody listens, retransmit a stream's data, give a stream up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from gpulayer.model.address import Address
from gpulayer.model.trust import KeyRing
from tests.sim.timeline import Timeline

if TYPE_CHECKING:
    from tests.sim.processes import Host, Process

Kind: TypeAlias = Literal["udp", "tcp"]
BOTH: frozenset[Kind] = frozenset(("udp", "tcp"))

# What goes around a payload: IP and UDP headers; IP, TCP and TLS record headers with the frame's own length.
DATAGRAM_HEADERS = 28
FRAME_HEADERS = 40 + 22 + 4
# Bytes that a mutually authenticated TLS 1.3 handshake moves in each direction, about.
HANDSHAKE_BYTES = 1800
# Linux limits port-unreachable errors to one peer: a bucket of six, one more each second (net.ipv4.icmp_ratelimit).
REFUSALS_BURST = 6
REFUSALS_PER_SECOND = 1.0
# A stream whose data nobody acknowledges for so long is given up.
STREAM_TIMEOUT = 10.0
# First retransmission of a stream's segment; doubles.
RETRANSMIT_AFTER = 0.2
# What a receive buffer of 4 MiB holds, in packets of the size that the kernel accounts for each.
RECEIVE_BUFFER_PACKETS = 1800
# Packets kept for whoever wants to replay them.
CAPTURE_MAX = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing of `kinds` gets from one of `sources` to one of `targets`."""

    sources: frozenset[int]
    targets: frozenset[int]
    kinds: frozenset[Kind] = BOTH


@dataclass(slots=True)
class Captured:
    """A packet that was taken once, for a replay; of one that was not, a copy is only late."""

    source: Address
    target: Address
    data: bytes


@dataclass(slots=True, kw_only=True)
class Weather:
    """What happens to datagrams on their way, as parts of 1."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_seconds_max: float = 0.05
    latency_seconds: tuple[float, float] = (0.0005, 0.0015)


class Network:
    def __init__(self, timeline: Timeline, chance: random.Random) -> None:
        self.timeline = timeline
        self.weather = Weather()
        self.cuts: list[Cut] = []
        self.host_loss: dict[int, float] = {}
        """Of datagrams to or from a host, by its index."""
        self.host_delay: dict[int, float] = {}
        """Seconds more at most, for what goes to or from a host."""
        self.captured: deque[Captured] | None = None
        self.packet_bytes_max = 0
        """The largest datagram so far."""
        self.mtu = 1472
        self.on_datagram: Callable[[Host, Address, bytes], None] | None = None
        self._hosts: dict[Address, list[Host]] = {}
        self._chance = chance
        self._refusals: dict[tuple[int, int], tuple[float, float]] = {}

    def capture(self, is_wanted: bool) -> None:
        """Keep what is delivered, for replays."""
        self.captured = deque(maxlen=CAPTURE_MAX) if is_wanted else None

    # --- who is where -------------------------------------------------------------------------------------------

    def attach(self, host: Host) -> None:
        for address in host.reached_at:
            self._hosts.setdefault(address, []).append(host)

    def detach(self, host: Host) -> None:
        for address in host.reached_at:
            self._hosts[address].remove(host)

    def host_at(self, address: Address) -> Host | None:
        """Where two claim an address, either may get what is sent to it."""
        there = self._hosts.get(address)
        if not there:
            return None
        return there[0] if len(there) == 1 else self._chance.choice(there)

    def is_cut(self, source: Host, target: Host, kind: Kind) -> bool:
        a, b = source.index, target.index
        return any(kind in cut.kinds and a in cut.sources and b in cut.targets for cut in self.cuts)

    def latency(self, source: Host, target: Host) -> float:
        least, most = self.weather.latency_seconds
        seconds = least + (most - least) * self._chance.random()
        if self.host_delay:
            more = max(self.host_delay.get(source.index, 0.0), self.host_delay.get(target.index, 0.0))
            seconds += more * self._chance.random()
        return seconds

    # --- datagrams ----------------------------------------------------------------------------------------------

    def send(self, source: Host, to: Address, data: bytes) -> None:
        source.count_sent(len(data) + DATAGRAM_HEADERS)
        if len(data) > self.packet_bytes_max:
            self.packet_bytes_max = len(data)
        if self.on_datagram is not None:
            self.on_datagram(source, to, data)
        if len(data) > self.mtu:
            return
        target = self.host_at(to)
        if target is None or not target.is_on or (self.cuts and self.is_cut(source, target, "udp")):
            return
        weather, chance = self.weather, self._chance
        lost = weather.loss
        if self.host_loss:
            through = 1.0 - self.host_loss.get(source.index, 0.0)
            lost = 1.0 - (1.0 - lost) * through * (1.0 - self.host_loss.get(target.index, 0.0))
        if lost and chance.random() < lost:
            return
        copies = 2 if weather.duplicate and chance.random() < weather.duplicate else 1
        for _ in range(copies):
            seconds = self.latency(source, target)
            if weather.reorder and chance.random() < weather.reorder:
                seconds += chance.random() * weather.reorder_seconds_max
            self.timeline.after(seconds, self._arrive, source, target, to, data)

    def inject(self, source: Address, to: Address, data: bytes) -> None:
        """A packet that nobody of the cluster sends now; it is delivered marked, for whoever checks what it did."""
        target = self.host_at(to)
        if target is not None and target.process is not None and target.is_on:
            target.process.take_datagram(source, data, injected=True)

    def _arrive(self, source: Host, target: Host, to: Address, data: bytes) -> None:
        process = target.process
        if not target.is_on:
            return
        if process is None or source.index in target.refuses:
            self._refuse(source, target, to)
            return
        process.take_datagram(source.seen_at, data)

    def _refuse(self, source: Host, target: Host, to: Address) -> None:
        """Nobody listens: the host says so, within the kernel's limit of such answers to one peer."""
        key = (target.index, source.index)
        tokens, counted_at = self._refusals.get(key, (float(REFUSALS_BURST), self.timeline.now))
        tokens = min(REFUSALS_BURST, tokens + (self.timeline.now - counted_at) * REFUSALS_PER_SECOND)
        if tokens < 1.0:
            self._refusals[key] = (tokens, self.timeline.now)
            return
        self._refusals[key] = (tokens - 1.0, self.timeline.now)
        if not self.is_cut(target, source, "udp"):
            self.timeline.after(self.latency(target, source), _tell_refused, source, to)

    # --- streams ------------------------------------------------------------------------------------------------

    def can_stream(self, a: Host, b: Host) -> bool:
        """Whether a stream's data and its acknowledgements get through now."""
        if a.cannot_send or b.cannot_send:
            return False
        return b.is_on and a.is_on and not (self.cuts and (self.is_cut(a, b, "tcp") or self.is_cut(b, a, "tcp")))

    def retransmissions(self, source: Host, target: Host) -> float:
        """Seconds that losses add to one segment of a stream."""
        lost = self.weather.loss
        if self.host_loss:
            lost = max(lost, self.host_loss.get(source.index, 0.0), self.host_loss.get(target.index, 0.0))
        seconds, wait = 0.0, RETRANSMIT_AFTER
        while lost and self._chance.random() < lost and seconds < STREAM_TIMEOUT:
            seconds, wait = seconds + wait, wait * 2
        return seconds


def _tell_refused(source: Host, to: Address) -> None:
    if source.process is not None and source.is_on:
        source.process.take_refusal(to)


class Link:
    """A reliable, ordered stream between two processes. Each end is told when it is over, if anything can tell it."""

    def __init__(self, network: Network, opener: Process, acceptor: Process) -> None:
        self.network = network
        self.opener = opener
        self.acceptor = acceptor
        self.is_open = {opener: True, acceptor: True}
        """Whether an end still believes in it."""
        self.used_at = network.timeline.now
        self._last_arrival = {opener: 0.0, acceptor: 0.0}
        self._waiting: dict[Process, deque[bytes | KeyRing]] = {opener: deque(), acceptor: deque()}
        self._waiting_since: dict[Process, float] = {}

    def other(self, end: Process) -> Process:
        return self.acceptor if end is self.opener else self.opener

    def send_up(self) -> None:
        """The opener's hello: to the acceptor the link is there when it arrives."""
        self.network.timeline.at(self._arrival(self.opener), self.acceptor.take_link, self)

    def send(self, end: Process, payload: bytes | KeyRing) -> None:
        size = 256 if isinstance(payload, KeyRing) else len(payload)
        end.host.count_sent(size + FRAME_HEADERS)
        self.used_at = self.network.timeline.now
        if self._waiting[end]:
            self._waiting[end].append(payload)
        elif self.network.can_stream(end.host, self.other(end).host):
            self._deliver(end, payload)
        else:
            self._waiting[end].append(payload)
            self._waiting_since[end] = self.network.timeline.now
            self.network.timeline.after(RETRANSMIT_AFTER, self._retransmit, end, RETRANSMIT_AFTER)

    def close(self, end: Process, why: str) -> None:
        """`end` is done with it. The other end hears `why`, if the network lets it."""
        if not self.is_open[end]:
            return
        self.is_open[end] = False
        other = self.other(end)
        if self.network.can_stream(end.host, other.host):
            self.network.timeline.at(self._arrival(end), self._hear_end, other, why)

    def _deliver(self, end: Process, payload: bytes | KeyRing) -> None:
        self.network.timeline.at(self._arrival(end), self._arrive, end, payload)

    def _arrival(self, end: Process) -> float:
        """Never before what was sent earlier."""
        a, b = end.host, self.other(end).host
        when = self.network.timeline.now + self.network.latency(a, b) + self.network.retransmissions(a, b)
        self._last_arrival[end] = max(when, self._last_arrival[end])
        return self._last_arrival[end]

    def _arrive(self, end: Process, payload: bytes | KeyRing) -> None:
        other = self.other(end)
        if not other.host.is_on:
            return
        if not self.is_open[other] or other.has_ended:
            # The host answers for a stream that it does not know: reset.
            if self.network.can_stream(other.host, end.host):
                self.network.timeline.after(self.network.latency(other.host, end.host), self._hear_end, end, "closed")
            return
        other.take_frame(self, payload)

    def _hear_end(self, end: Process, why: str) -> None:
        if self.is_open[end] and not end.has_ended and end.host.is_on:
            self.is_open[end] = False
            end.take_link_end(self, why)

    def _retransmit(self, end: Process, waited: float) -> None:
        if not self.is_open[end] or end.has_ended:
            return
        if self.network.can_stream(end.host, self.other(end).host):
            waiting = self._waiting[end]
            while waiting:
                self._deliver(end, waiting.popleft())
        elif self.network.timeline.now - self._waiting_since[end] >= STREAM_TIMEOUT:
            self._hear_end(end, "timeout")
        else:
            self.network.timeline.after(waited * 2, self._retransmit, end, waited * 2)
