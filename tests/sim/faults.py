"""What can go wrong, as values: each begins at an instant, lasts a while, and is then over.

A plan of them is made from a seed before anything runs, so that a failing plan can be tried again with parts left out.
`excused`: the hosts that may be thought dead because of it, while it lasts and for a while after.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from gpulayer.model.trust import KeyRing
from tests.sim.cluster import Cluster
from tests.sim.network import BOTH, Cut, Kind

# A host whose pauses are all within this is never buried.
PAUSE_FORGIVEN = 2.5
# Rumours of a death that was right go around for a while after what caused it.
AFTERMATH = 25.0
# Between two steps of a key rotation, at least.
ROTATION_STEP = 5.0
# Work of a run that is starved: awake a tenth of the time.
STARVED_AWAKE = (0.01, 0.09)
STARVED_ASLEEP = (0.1, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at: float
    seconds: float = 0.0

    def begin(self, cluster: Cluster) -> None:
        raise NotImplementedError

    def end(self, cluster: Cluster) -> None:
        """Undo it. Called once, `seconds` after `begin`."""

    def excused(self, cluster: Cluster) -> Iterable[int]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Fault):
    """Of all datagrams."""

    part: float

    def begin(self, cluster: Cluster) -> None:
        cluster.network.weather.loss = self.part

    def end(self, cluster: Cluster) -> None:
        cluster.network.weather.loss = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disorder(Fault):
    """Datagrams come twice, and one after a later one."""

    part: float

    def begin(self, cluster: Cluster) -> None:
        cluster.network.weather.duplicate = cluster.network.weather.reorder = self.part

    def end(self, cluster: Cluster) -> None:
        cluster.network.weather.duplicate = cluster.network.weather.reorder = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCable(Fault):
    """One host loses a part of what it sends and hears, and the rest is late."""

    host: int
    part: float
    delay: float

    def begin(self, cluster: Cluster) -> None:
        cluster.network.host_loss[self.host] = self.part
        cluster.network.host_delay[self.host] = self.delay

    def end(self, cluster: Cluster) -> None:
        cluster.network.host_loss.pop(self.host, None)
        cluster.network.host_delay.pop(self.host, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Fault):
    """`sources` cannot reach `targets`; unless `is_one_way` nor the other way round."""

    sources: frozenset[int]
    targets: frozenset[int]
    kinds: frozenset[Kind] = BOTH
    is_one_way: bool = False

    def _cuts(self) -> list[Cut]:
        there = Cut(sources=self.sources, targets=self.targets, kinds=self.kinds)
        back = Cut(sources=self.targets, targets=self.sources, kinds=self.kinds)
        return [there] if self.is_one_way else [there, back]

    def begin(self, cluster: Cluster) -> None:
        cluster.network.cuts.extend(self._cuts())

    def end(self, cluster: Cluster) -> None:
        for cut in self._cuts():
            cluster.network.cuts.remove(cut)

    def excused(self, cluster: Cluster) -> Iterable[int]:
        """All where somebody loses the way to most of the others: each side is then right about the other."""
        everyone = frozenset(range(len(cluster.hosts)))
        if self.kinds != BOTH:
            return ()
        for host in everyone:
            unreached = (self.targets if host in self.sources else frozenset()) | (
                self.sources if host in self.targets else frozenset()
            )
            if 2 * len(unreached - {host}) >= len(everyone) - 1:
                return everyone
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Fault):
    host: int

    def begin(self, cluster: Cluster) -> None:
        cluster.pause(cluster.hosts[self.host], self.seconds)

    def excused(self, cluster: Cluster) -> Iterable[int]:
        return (self.host,) if self.seconds > PAUSE_FORGIVEN else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(Fault):
    host: int

    def begin(self, cluster: Cluster) -> None:
        cluster.suspend(cluster.hosts[self.host], self.seconds)

    def excused(self, cluster: Cluster) -> Iterable[int]:
        return (self.host,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starve(Fault):
    """A host whose daemon gets a tenth of the time."""

    host: int

    def begin(self, cluster: Cluster) -> None:
        self._slice(cluster, cluster.now + self.seconds, cluster.stream(f"starve {self.host} {self.at}"))

    def _slice(self, cluster: Cluster, until: float, chance: random.Random) -> None:
        process = cluster.hosts[self.host].process
        if cluster.now >= until:
            return
        asleep = min(chance.uniform(*STARVED_ASLEEP), until - cluster.now)
        if process is not None and not process.is_asleep:
            process.pause(asleep)
        cluster.timeline.after(asleep + chance.uniform(*STARVED_AWAKE), self._slice, cluster, until, chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Fault):
    """kill -9; started again when it is over."""

    host: int

    def begin(self, cluster: Cluster) -> None:
        cluster.kill(cluster.hosts[self.host])

    def end(self, cluster: Cluster) -> None:
        host = cluster.hosts[self.host]
        if host.process is None:
            cluster.start(host)

    def excused(self, cluster: Cluster) -> Iterable[int]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOff(Kill):
    def begin(self, cluster: Cluster) -> None:
        cluster.power_off(cluster.hosts[self.host])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wipe(Kill):
    """Comes back with an empty data directory: another node."""

    def begin(self, cluster: Cluster) -> None:
        cluster.wipe(cluster.hosts[self.host])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Kill):
    """By its own will; started again when it is over, as the same node."""

    def begin(self, cluster: Cluster) -> None:
        cluster.leave(cluster.hosts[self.host])

    def end(self, cluster: Cluster) -> None:
        cluster.kill(cluster.hosts[self.host])
        cluster.start(cluster.hosts[self.host])


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute(Fault):
    """Nothing can be sent by a host, and it is told so; it still receives."""

    host: int

    def begin(self, cluster: Cluster) -> None:
        cluster.hosts[self.host].cannot_send = True

    def end(self, cluster: Cluster) -> None:
        cluster.hosts[self.host].cannot_send = False

    def excused(self, cluster: Cluster) -> Iterable[int]:
        return (self.host,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Firewall(Fault):
    """One host rejects all that comes from some others, as if no daemon ran there."""

    host: int
    rejects: frozenset[int]

    def begin(self, cluster: Cluster) -> None:
        cluster.hosts[self.host].refuses |= self.rejects

    def end(self, cluster: Cluster) -> None:
        cluster.hosts[self.host].refuses -= self.rejects


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Fault):
    """Recorded packets come again, long after, where they came before; and damaged ones."""

    per_second: float

    def begin(self, cluster: Cluster) -> None:
        chance = cluster.stream(f"replay {self.at}")
        self._one(cluster, cluster.now + self.seconds, chance)

    def _one(self, cluster: Cluster, until: float, chance: random.Random) -> None:
        captured = cluster.network.captured
        if cluster.now >= until or captured is None:
            return
        if captured:
            packet = captured[chance.randrange(len(captured))]
            data = packet.data if chance.random() < 0.5 else damaged(packet.data, chance)
            cluster.network.inject(packet.source, packet.target, data)
        cluster.timeline.after(chance.expovariate(self.per_second), self._one, cluster, until, chance)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Cut short, a bit turned, made longer, or nothing of it kept."""
    match chance.randrange(4):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            at = chance.randrange(len(data))
            return data[:at] + bytes((data[at] ^ (1 << chance.randrange(8)),)) + data[at + 1 :]
        case 2:
            return data + chance.randbytes(chance.randrange(1, 64))
        case _:
            return chance.randbytes(chance.randrange(0, 1500))


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes(Fault):
    """Hosts change their records: keys set, set anew and deleted, small and large."""

    per_second: float

    def begin(self, cluster: Cluster) -> None:
        self._one(cluster, cluster.now + self.seconds, cluster.stream(f"changes {self.at}"))

    def _one(self, cluster: Cluster, until: float, chance: random.Random) -> None:
        if cluster.now >= until:
            return
        process = chance.choice(cluster.hosts).process
        size = chance.choice((40, 300, 300, 2000, 8000))
        key, value = f"r/{chance.randrange(8)}", chance.randbytes(size)
        if process is not None:
            process.set_own({key: None if chance.random() < 0.2 else value})
        cluster.timeline.after(chance.expovariate(self.per_second), self._one, cluster, until, chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateKeys(Fault):
    """A key rotation, begun by the leader: each step only when the one before has reached all that live, as a leader
    sees from the keys that they say they can open."""

    def begin(self, cluster: Cluster) -> None:
        self._next(cluster, list(cluster.rotation()), cluster.now + self.seconds)

    def _next(self, cluster: Cluster, rings: list[KeyRing], until: float) -> None:
        live = [host for host in cluster.hosts if host.is_live]
        if cluster.now >= until or not rings:
            return
        if live and all(host.disk.ring.version == cluster.ring.version for host in live):
            cluster.set_ring(rings.pop(0), live[0])
        cluster.timeline.after(ROTATION_STEP, self._next, cluster, rings, until)
