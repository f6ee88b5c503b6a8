"""A seed: a cluster, faults for two minutes during which nothing that was promised may break, then quiet, in which all
that live must come to one view. Run again from the seed alone, and with faults left out until only those are left that
break it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.sim.checkers import Broken, Checks
from tests.sim.cluster import Cluster
from tests.sim.faults import (
    AFTERMATH,
    BadCable,
    Changes,
    Disorder,
    Fault,
    Firewall,
    Kill,
    Leave,
    Loss,
    NoRoute,
    Partition,
    Pause,
    PowerOff,
    Replay,
    RotateKeys,
    Starve,
    Suspend,
    Wipe,
)

SAFETY_SECONDS = 120.0
SETTLE_SECONDS = 15.0
# A death that was just caused takes so long at most to be known, once the network is well.
BURIAL_SECONDS = 25.0
START_SECONDS = 10.0
SIZES = (5, 50)


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    size: int
    faults: tuple[Fault, ...]

    def told(self) -> str:
        lines = [f"seed {self.seed}: {self.size} hosts, {len(self.faults)} faults"]
        lines += [f"  {number:3} {fault}" for number, fault in enumerate(self.faults)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Outcome:
    broken: str
    """Empty where everything held."""
    node_seconds: float
    cluster: Cluster


def draw(seed: int) -> Plan:
    """Which faults, how often, when, and of whom: from the seed alone."""
    chance = random.Random(f"{seed}/plan")
    size = chance.randint(*SIZES)
    kinds = chance.sample(sorted(_KINDS), chance.randint(3, 7))
    faults: list[Fault] = []
    for kind in kinds:
        faults += _KINDS[kind](chance, size)
    return Plan(seed, size, tuple(sorted(faults, key=lambda fault: fault.at)))


def play(plan: Plan, only: Sequence[int] | None = None) -> Outcome:
    """`only`: the faults, by number, that happen; all where it is None."""
    checks = Checks()
    rates: Callable[[random.Random], float] = lambda chance: chance.uniform(0.95, 1.05)  # noqa: E731
    cluster = Cluster(plan.seed, plan.size, checks=checks, clock_rates=rates)
    broken = ""
    try:
        _play(cluster, checks, [plan.faults[i] for i in (range(len(plan.faults)) if only is None else only)])
    except AssertionError as exc:
        broken = str(exc) or repr(exc)
        if not isinstance(exc, Broken):
            broken += f"\n{cluster.tail()}"
    return Outcome(broken, plan.size * cluster.now, cluster)


def _play(cluster: Cluster, checks: Checks, faults: Sequence[Fault]) -> None:
    cluster.network.capture(any(isinstance(fault, Replay) for fault in faults))
    cluster.start_all()
    cluster.run(START_SECONDS)
    began = cluster.now
    for fault in faults:
        cluster.timeline.at(began + fault.at, _begin, cluster, checks, fault)
    cluster.run(SAFETY_SECONDS + 1.0)
    cluster.say("everything is healed")
    try:
        cluster.settle(SETTLE_SECONDS + BURIAL_SECONDS if _someone_died(cluster) else SETTLE_SECONDS)
    except AssertionError:
        raise Broken(
            f"after the faults all that live come to one view: {_why_apart(cluster)}\n{cluster.tail()}"
        ) from None


def _begin(cluster: Cluster, checks: Checks, fault: Fault) -> None:
    cluster.say(f"{fault}")
    excused = tuple(fault.excused(cluster))
    if excused:
        checks.excuse(excused, cluster.now + fault.seconds + AFTERMATH)
    fault.begin(cluster)
    cluster.timeline.after(fault.seconds, _end, cluster, fault)


def _end(cluster: Cluster, fault: Fault) -> None:
    cluster.say(f"over: {type(fault).__name__}")
    fault.end(cluster)


def _someone_died(cluster: Cluster) -> bool:
    return any(not host.is_live for host in cluster.hosts)


def _why_apart(cluster: Cluster) -> str:
    """The first disagreement, with what the observer remembers of the subject."""
    text = cluster.disagreement()
    words = text.replace("/", " ").split()
    named = [host for word in words for host in cluster.hosts if word == host.name]
    if len(named) >= 2:
        text += f"\n{cluster.history(named[0], named[1])}"
    return text


def shrink(plan: Plan, tries: int = 60) -> tuple[int, ...]:
    """The numbers of the faults that it takes, found by leaving out halves, then single ones."""
    kept = list(range(len(plan.faults)))
    part = max(1, len(kept) // 2)
    while tries > 0:
        left_out = False
        for start in range(0, len(kept), part):
            fewer = kept[:start] + kept[start + part :]
            tries -= 1
            if play(plan, fewer).broken:
                kept, left_out = fewer, True
                break
            if tries <= 0:
                break
        if not left_out:
            if part == 1:
                break
            part = max(1, part // 2)
    return tuple(kept)


# --- kinds of fault --------------------------------------------------------------------------------------------------


def _times(chance: random.Random, most: int, longest: float) -> list[tuple[float, float]]:
    """(at, seconds) of some faults, none beyond the safety phase; those of one kind do not overlap."""
    count = chance.randint(1, most)
    slot = SAFETY_SECONDS / count
    found = []
    for number in range(count):
        seconds = min(longest, slot * 0.9) * chance.random()
        found.append((number * slot + chance.random() * (slot - seconds), seconds))
    return found


def _some(chance: random.Random, size: int, most: int) -> frozenset[int]:
    return frozenset(chance.sample(range(size), chance.randint(1, max(1, min(most, size - 1)))))


def _draw_loss(chance: random.Random, size: int) -> list[Fault]:
    return [Loss(at=at, seconds=s, part=chance.uniform(0.01, 0.2)) for at, s in _times(chance, 3, 60.0)]


def _draw_disorder(chance: random.Random, size: int) -> list[Fault]:
    return [Disorder(at=at, seconds=s, part=chance.uniform(0.01, 0.3)) for at, s in _times(chance, 3, 60.0)]


def _draw_cables(chance: random.Random, size: int) -> list[Fault]:
    return [
        BadCable(
            at=at, seconds=s, host=chance.randrange(size), part=chance.uniform(0.05, 0.3), delay=chance.uniform(0, 0.05)
        )
        for at, s in _times(chance, 4, 40.0)
    ]


def _draw_partitions(chance: random.Random, size: int) -> list[Fault]:
    found: list[Fault] = []
    for at, seconds in _times(chance, 3, 40.0):
        side = _some(chance, size, size // 2)
        found.append(
            Partition(
                at=at,
                seconds=seconds,
                sources=side,
                targets=frozenset(range(size)) - side,
                is_one_way=chance.random() < 0.3,
            )
        )
    return found


def _draw_broken_paths(chance: random.Random, size: int) -> list[Fault]:
    """Single paths, which the others can relay around."""
    most = max(1, size // 4)
    return [
        Partition(
            at=at,
            seconds=seconds,
            sources=_some(chance, size, 1),
            targets=_some(chance, size, most),
            is_one_way=chance.random() < 0.5,
        )
        for at, seconds in _times(chance, 4, 30.0)
    ]


def _draw_blocks(chance: random.Random, size: int) -> list[Fault]:
    """A firewall that lets only datagrams, or only connections, through to one host."""
    found: list[Fault] = []
    for at, seconds in _times(chance, 2, 60.0):
        host = frozenset((chance.randrange(size),))
        kind = frozenset((chance.choice(("udp", "tcp")),))
        found.append(
            Partition(at=at, seconds=seconds, sources=host, targets=frozenset(range(size)) - host, kinds=kind)  # type: ignore[arg-type]
        )
    return found


def _draw_pauses(chance: random.Random, size: int) -> list[Fault]:
    return [Pause(at=at, seconds=s, host=chance.randrange(size)) for at, s in _times(chance, 40, 2.5)]


def _draw_long_pauses(chance: random.Random, size: int) -> list[Fault]:
    return [Pause(at=at, seconds=s, host=chance.randrange(size)) for at, s in _times(chance, 4, 60.0)]


def _draw_suspends(chance: random.Random, size: int) -> list[Fault]:
    return [Suspend(at=at, seconds=s, host=chance.randrange(size)) for at, s in _times(chance, 3, 60.0)]


def _draw_starved(chance: random.Random, size: int) -> list[Fault]:
    hosts = _some(chance, size, max(1, size // 10))
    return [Starve(at=at, seconds=s, host=host) for host in sorted(hosts) for at, s in _times(chance, 2, 60.0)]


def _draw_kills(chance: random.Random, size: int) -> list[Fault]:
    return [Kill(at=at, seconds=s, host=chance.randrange(size)) for at, s in _times(chance, 8, 30.0)]


def _draw_power(chance: random.Random, size: int) -> list[Fault]:
    return [PowerOff(at=at, seconds=s, host=chance.randrange(size)) for at, s in _times(chance, 4, 40.0)]


def _draw_wipes(chance: random.Random, size: int) -> list[Fault]:
    return [Wipe(at=at, seconds=s, host=chance.randrange(1, size)) for at, s in _times(chance, 2, 30.0)]


def _draw_leaves(chance: random.Random, size: int) -> list[Fault]:
    return [Leave(at=at, seconds=s + 4.0, host=chance.randrange(1, size)) for at, s in _times(chance, 3, 20.0)]


def _draw_no_route(chance: random.Random, size: int) -> list[Fault]:
    return [NoRoute(at=at, seconds=s, host=chance.randrange(size)) for at, s in _times(chance, 3, 20.0)]


def _draw_firewalls(chance: random.Random, size: int) -> list[Fault]:
    """One host rejects one other, whose word about it is then wrong."""
    return [
        Firewall(at=at, seconds=s, host=chance.randrange(size), rejects=_some(chance, size, 1))
        for at, s in _times(chance, 3, 30.0)
    ]


def _draw_replays(chance: random.Random, size: int) -> list[Fault]:
    return [Replay(at=30.0, seconds=SAFETY_SECONDS - 30.0, per_second=chance.uniform(5.0, 50.0))]


def _draw_changes(chance: random.Random, size: int) -> list[Fault]:
    return [Changes(at=0.0, seconds=SAFETY_SECONDS, per_second=chance.uniform(0.2, 5.0))]


def _draw_rotations(chance: random.Random, size: int) -> list[Fault]:
    return [RotateKeys(at=chance.uniform(5.0, 40.0), seconds=chance.uniform(20.0, 70.0))]


_KINDS: dict[str, Callable[[random.Random, int], list[Fault]]] = {
    "broken paths": _draw_broken_paths,
    "cables": _draw_cables,
    "changes": _draw_changes,
    "blocks": _draw_blocks,
    "disorder": _draw_disorder,
    "firewalls": _draw_firewalls,
    "kills": _draw_kills,
    "leaves": _draw_leaves,
    "long pauses": _draw_long_pauses,
    "loss": _draw_loss,
    "no route": _draw_no_route,
    "partitions": _draw_partitions,
    "pauses": _draw_pauses,
    "power": _draw_power,
    "replays": _draw_replays,
    "rotations": _draw_rotations,
    "starved": _draw_starved,
    "suspends": _draw_suspends,
    "wipes": _draw_wipes,
}
