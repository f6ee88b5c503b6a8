"""What tests and measurements want to know of a simulated cluster: who was thought to fail, when, by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulayer.core.gossip.messages import MemberChanged
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DeathCause, Run
from tests.sim.cluster import Cluster
from tests.sim.processes import Host, Process


@dataclass(frozen=True, slots=True)
class Opinion:
    at: float
    observer: Process
    run: Run
    state: str
    cause: DeathCause | None
    is_true: bool
    """Whether that run does not live, if it is said to be dead."""


class Opinions:
    """Every change of a member's state, anywhere, from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.all: list[Opinion] = []
        cluster.change_listeners.append(self._changed)

    def _changed(self, process: Process, effect: MemberChanged) -> None:
        before, after = effect.before, effect.after
        if before is not None and (before.state, before.run) == (after.state, after.run):
            return
        lives = any(
            each.run == after.run and each.host.is_on and not each.is_leaving for each in self.cluster.processes()
        )
        self.all.append(Opinion(self.cluster.now, process, after.run, after.state, after.cause, not lives))

    def of(self, node: NodeId, *states: str, since: float = 0.0) -> list[Opinion]:
        return [each for each in self.all if each.run.node == node and each.state in states and each.at >= since]

    def deaths(self) -> list[Opinion]:
        return [each for each in self.all if each.state == "dead"]

    def false_deaths(self) -> list[Opinion]:
        return [each for each in self.deaths() if not each.is_true]

    def told(self, opinions: Sequence[Opinion]) -> str:
        return "\n".join(
            f"{o.at:.3f} {o.observer}: {self.cluster.name_of(o.run)} {o.state} {o.cause or ''}" for o in opinions
        )


def first(opinions: Sequence[Opinion]) -> float:
    return min(opinion.at for opinion in opinions)


def last_of_each(opinions: Sequence[Opinion]) -> float:
    """When the last observer had its first such opinion."""
    by_observer: dict[Process, float] = {}
    for opinion in opinions:
        by_observer.setdefault(opinion.observer, opinion.at)
    return max(by_observer.values())


def observers(cluster: Cluster, subject: Host) -> int:
    return sum(host.is_live and host is not subject for host in cluster.hosts)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of all do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(part * 1000) * len(ranked) // 1000) - 1))]
