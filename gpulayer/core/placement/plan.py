"""Which waiting replica goes where now, and for the others why not. Knows capacities and rules, not processes.

plan() is a pure function of the state and the facts given with it; two leaders with the same state make the same plan,
so a plan proposed twice after an election does no harm. It runs when something changed, not by a timer (leader.py).

The queue is by priority, then by time of submission. A job that does not fit lets those behind it pass, within two
bounds. On one node, the one nearest to having room for it, what it lacks there (GPUs, CPUs or memory) is kept from jobs
of a lower priority at once, and from those of its own after PASSED_OVER_MAX of them have passed. What it does not lack,
and all other nodes, are for everybody.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

from gpulayer.core.placement.fit import Choice, fit, free_of, left_of
from gpulayer.core.placement.refusal import (
    DevicesInUse,
    HeldForEarlier,
    NoShareFree,
    NotEnoughGpusFree,
    NotPlaceable,
    Refusal,
    SameJobAlreadyThere,
    TooFewCpus,
    TooLittleMemory,
    is_permanent,
    waiting_reason,
)
from gpulayer.core.placement.score import Score
from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.ids import JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec, Requirements
from gpulayer.model.node import Node
from gpulayer.model.replica import Assignment, DeviceShare, Reason
from gpulayer.model.units import MILLI

# Each placement is an event with a place in its entry (1,000 at most) and the whole is one entry of the log (1 MiB).
PLACEMENTS_MAX = 500
# Replicas of later jobs of the same priority that may start while one waits. Enough for short work to fill the gaps,
# few enough that a job for a whole node gets one while who submitted it still cares.
PASSED_OVER_MAX = 20

ReplicaKey: TypeAlias = tuple[JobId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One choice, with what decided it. What the log records of it is cluster.commands.Placement."""

    job: JobId
    revision: int
    replica: int
    attempt: int
    node: NodeId
    devices: tuple[DeviceShare, ...]
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    based_on: int
    placements: tuple[Placed, ...]
    refusals: Mapping[ReplicaKey, tuple[Refusal, ...]]
    """For every waiting replica that was not placed: one per node, by the node's name."""
    is_complete: bool = True
    """False: PLACEMENTS_MAX was reached, and what comes behind it in the queue has neither place nor refusal yet."""


def plan(state: ClusterState, placeable: Mapping[NodeId, str]) -> Plan:
    """`placeable` says why nothing may be placed on a node now; a node with an empty text, or none, is open."""
    draft = _Draft(state, placeable)
    for job in waiting_jobs(state):
        if len(draft.placements) >= PLACEMENTS_MAX:
            break
        draft.add(job)
    return Plan(
        based_on=state.index,
        placements=tuple(draft.placements),
        refusals=draft.refusals,
        is_complete=len(draft.placements) < PLACEMENTS_MAX,
    )


def waiting_jobs(state: ClusterState) -> list[Job]:
    """The queue: live jobs with a replica that waits, the first to be served first."""
    waiting = [job for job in state.jobs.values() if job.is_live and job.stopping is None and waiting_replicas(job)]
    return sorted(waiting, key=lambda job: (-job.spec.priority, job.submitted_at_index, job.id))


def waiting_replicas(job: Job) -> list[int]:
    return [replica.index for replica in job.replicas if replica.assignment is None and replica.outcome is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    """What is kept on one node for a job at the head of the queue."""

    job: str
    priority: int
    is_firm: bool
    """Passed over too often: kept from its own priority too."""
    lacks: str

    def keeps_from(self, job: Job) -> bool:
        return (self.is_firm or job.spec.priority < self.priority) and _asks_for(job.spec.requirements, self.lacks)


class _Draft:
    """A plan in the making: what is free after the choices made so far, and the answers that still hold."""

    def __init__(self, state: ClusterState, placeable: Mapping[NodeId, str]) -> None:
        self.placements: list[Placed] = []
        self.refusals: dict[ReplicaKey, tuple[Refusal, ...]] = {}
        # By name: ties are broken by it, and people read it in this order.
        self._nodes = sorted(state.nodes.values(), key=lambda node: (node.name, node.id))
        self._free = free_of(state)
        self._closed = {node.id: why for node in self._nodes if (why := _why_closed(node, placeable))}
        self._passed = _PassedOver(state)
        self._held: dict[NodeId, _Hold] = {}
        self._fits: dict[NodeId, dict[Requirements, Choice | Refusal]] = {node.id: {} for node in self._nodes}
        # Refused on every node, for a job that has nothing placed: holds for each such job with the same requirements
        # until something is placed or held. This is what makes a long queue cheap.
        self._refused: dict[Requirements, tuple[Refusal, ...]] = {}

    def add(self, job: Job) -> None:
        needs = job.spec.requirements
        refused: tuple[Refusal, ...] | None = None
        if all(replica.assignment is None for replica in job.replicas):
            refused = self._refused.get(needs)
        may_remember = refused is None
        for index in waiting_replicas(job):
            if len(self.placements) >= PLACEMENTS_MAX:
                return
            if refused is None:
                found = self._place(job, index)
                if found is None:
                    may_remember = False
                    continue
                refused = found
            # Replicas of a job are alike: what refuses one refuses those after it.
            self.refusals[job.id, index] = refused
        if refused is not None:
            if may_remember and all(replica.assignment is None for replica in job.replicas):
                self._refused[needs] = refused
            self._hold_for(job, refused)

    def verdicts(self, job: Job) -> dict[NodeId, Choice | Refusal]:
        """Per node, in order of name."""
        return {node.id: self._verdict(job, node) for node in self._nodes}

    def verdicts_without(self, job: Job, assignment: Assignment) -> dict[NodeId, Choice | Refusal]:
        """The same as if this assignment of the job had given back its part."""
        node, free, fits = assignment.node, self._free, self._fits
        if node in free:
            self._free = {**free, node: free[node].given_back(assignment)}
            self._fits = {**fits, node: {}}
        try:
            return self.verdicts(job)
        finally:
            self._free, self._fits = free, fits

    def _place(self, job: Job, index: int) -> tuple[Refusal, ...] | None:
        """Take the best place for the replica, or give the refusals."""
        verdicts = self.verdicts(job)
        choices = [(found.score, node_id) for node_id, found in verdicts.items() if isinstance(found, Choice)]
        if not choices:
            return tuple(found for found in verdicts.values() if not isinstance(found, Choice))
        # min() takes the first of equals, and verdicts are by name.
        score, node_id = min(choices, key=lambda choice: choice[0])
        chosen = verdicts[node_id]
        assert isinstance(chosen, Choice)
        self._take(job, index, node_id, chosen.devices, score)
        return None

    def _take(self, job: Job, index: int, node: NodeId, devices: tuple[DeviceShare, ...], score: Score) -> None:
        placed = Placed(
            job=job.id,
            revision=job.revision,
            replica=index,
            attempt=job.replicas[index].attempts + 1,
            node=node,
            devices=devices,
            score=score,
        )
        self.placements.append(placed)
        needs = job.spec.requirements
        self._free[node] = self._free[node].without(
            Assignment(
                replica=ReplicaId(job.id, index),
                attempt=placed.attempt,
                node=node,
                revision=job.revision,
                devices=devices,
                cpus_milli=needs.cpus_milli,
                memory_mib=needs.memory_mib,
            )
        )
        self._fits[node] = {}
        self._refused = {}

    def _verdict(self, job: Job, node: Node) -> Choice | Refusal:
        if node.id in self._closed:
            return NotPlaceable(node=node.name, reason=self._closed[node.id])
        own = self._free[node.id].replicas.get(job.id, ())
        if own and job.spec.spread == "node":
            return SameJobAlreadyThere(node=node.name, replica=own[0])
        found = self._fit(job.spec.requirements, node)
        if not isinstance(found, Choice):
            return found
        hold = self._held.get(node.id)
        if hold is not None and hold.keeps_from(job):
            return HeldForEarlier(node=node.name, job=hold.job)
        return replace(found, score=replace(found.score, own_replicas=len(own))) if own else found

    def _fit(self, needs: Requirements, node: Node) -> Choice | Refusal:
        known = self._fits[node.id]
        found = known.get(needs)
        if found is None:
            found = known[needs] = fit(needs, node, self._free[node.id])
        return found

    def _hold_for(self, job: Job, refused: tuple[Refusal, ...]) -> None:
        """Keep one node for a job that has to wait: of those where it could run if they were empty, the one that is
        nearest to having room. It only gets emptier, so the choice settles. A firm hold takes the place of one that
        is not, since the job behind that has not waited as long."""
        is_firm = self._passed.too_often(job)
        taken = {node for node, hold in self._held.items() if hold.is_firm or not is_firm}
        if len(taken) == len(self._nodes):
            return
        by_name = {refusal.node: refusal for refusal in refused}
        candidates = [
            node
            for node in self._nodes
            if node.id not in taken and _lacks(by_name[node.name]) and self._fits_empty(job, node)
        ]
        if candidates:
            kept = min(candidates, key=lambda node: (_missing(by_name[node.name]), node.name))
            self._held[kept.id] = _Hold(
                job=job.name, priority=job.spec.priority, is_firm=is_firm, lacks=_lacks(by_name[kept.name])
            )
            self._refused = {}

    def _fits_empty(self, job: Job, node: Node) -> bool:
        return isinstance(fit(job.spec.requirements, node, left_of(node)), Choice)


def _lacks(refusal: Refusal) -> str:
    """What of a node it waits for, if that is something that others may give back."""
    if is_permanent(refusal):
        return ""
    match refusal:
        case NotEnoughGpusFree() | NoShareFree() | DevicesInUse():
            return "gpus"
        case TooFewCpus():
            return "cpus"
        case TooLittleMemory():
            return "memory"
        case _:
            return ""


def _asks_for(needs: Requirements, what: str) -> bool:
    return bool({"gpus": needs.gpus_milli, "cpus": needs.cpus_milli, "memory": needs.memory_mib}[what])


def _missing(refusal: Refusal) -> int:
    """GPUs that have to become free; other shortages count as one."""
    match refusal:
        case NotEnoughGpusFree(needed=needed, free=free):
            return needed - free
        case DevicesInUse(needed_milli=needed_milli, free=free):
            return max(1, needed_milli // MILLI - free)
        case _:
            return 1


def _why_closed(node: Node, placeable: Mapping[NodeId, str]) -> str:
    return ", ".join(node.marks) or placeable.get(node.id, "")


class _PassedOver:
    """How many replicas of later jobs, of the same or a lower priority, were placed while a job waited. From the state
    alone: every attempt of a job that was submitted later began later.
    Jobs that were forgotten do not count."""

    def __init__(self, state: ClusterState) -> None:
        by_priority: dict[int, list[tuple[int, int]]] = {}
        for job in state.jobs.values():
            attempts = sum(replica.attempts for replica in job.replicas)
            if attempts:
                by_priority.setdefault(job.spec.priority, []).append((job.submitted_at_index, attempts))
        self._levels = []
        for priority, jobs in by_priority.items():
            jobs.sort()
            sums = [0, *accumulate(attempts for _, attempts in jobs)]
            self._levels.append((priority, [submitted for submitted, _ in jobs], sums))

    def too_often(self, job: Job) -> bool:
        passed = 0
        for priority, submitted, sums in self._levels:
            if priority <= job.spec.priority:
                passed += sums[-1] - sums[bisect_right(submitted, job.submitted_at_index)]
        return passed >= PASSED_OVER_MAX


def waiting_reasons(state: ClusterState, placeable: Mapping[NodeId, str]) -> dict[ReplicaKey, Reason]:
    """Why each waiting replica waits, as people read it."""
    made = plan(state, placeable)
    known: dict[int, Reason] = {}
    reasons: dict[ReplicaKey, Reason] = {}
    for key, refusals in made.refusals.items():
        # Equal refusals of a long queue are one and the same tuple, which `made` keeps alive.
        if id(refusals) not in known:
            known[id(refusals)] = waiting_reason(refusals)
        reasons[key] = known[id(refusals)]
    for placed in made.placements:
        text = f"is about to be placed on {state.nodes[placed.node].name}"
        reasons[placed.job, placed.replica] = Reason(code="queued", text=text)
    return reasons


def obstacle(state: ClusterState, spec: JobSpec) -> Reason | None:
    """What will keep a replica of a new job waiting until a person does something, however empty the nodes get; None
    where time alone may help. Cheap: asks each node once, and makes no plan."""
    found = [fit(spec.requirements, node, left_of(node)) for _, node in sorted(state.nodes.items())]
    refusals = [each for each in found if not isinstance(each, Choice) and is_permanent(each)]
    able = len(found) - len(refusals)
    if found and not able:
        return waiting_reason(refusals)
    if found and spec.spread == "node" and spec.replicas > able:
        on = "1 node" if able == 1 else f"{able} nodes"
        return Reason(
            code="no_capacity",
            text=f"{spec.replicas} replicas need as many nodes (spread=node), and {on} can run one",
            hint="add a node, or submit with --spread any so that replicas may share one",
        )
    return None


# --- explained ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one node says to one replica: a score where it would fit, else a refusal."""

    node: NodeId
    node_name: str
    score: Score | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaExplained:
    """Where a replica is, or would go now (`node`, None: nowhere), and what each node says.

    For a placed one the verdicts are as of now, with its own part given back, not as of when it was placed.
    """

    replica: int
    is_placed: bool
    node: NodeId | None
    devices: tuple[DeviceShare, ...]
    verdicts: tuple[Verdict, ...]


def explain_job(state: ClusterState, job: Job, placeable: Mapping[NodeId, str]) -> tuple[ReplicaExplained, ...]:
    """Per replica that has not ended: why it is where it is, or why it waits. For the waiting ones a plan is made, so
    that who comes before them in the queue counts.

    Works for a job that is not in the state too, as if it had just been submitted (`submit --dry-run`).
    """
    submitted = state if job.id in state.jobs else replace(state, jobs={**state.jobs, job.id: job})
    made = plan(submitted, placeable)
    placed = {found.replica: found for found in made.placements if found.job == job.id}
    now = _Draft(submitted, placeable)
    explained = []
    for replica in job.replicas:
        if replica.outcome is not None:
            continue
        if replica.assignment is not None:
            explained.append(_explain_placed(submitted, job, replica.assignment, now))
        elif replica.index in placed:
            explained.append(_explain_choice(submitted, placed[replica.index]))
        else:
            explained.append(_explain_waiting(submitted, replica.index, made.refusals.get((job.id, replica.index), ())))
    return tuple(explained)


def _explain_placed(state: ClusterState, job: Job, assignment: Assignment, now: _Draft) -> ReplicaExplained:
    verdicts = now.verdicts_without(job, assignment)
    return ReplicaExplained(
        replica=assignment.replica.index,
        is_placed=True,
        node=assignment.node,
        devices=assignment.devices,
        verdicts=tuple(
            Verdict(
                node=node_id,
                node_name=state.nodes[node_id].name,
                score=found.score if isinstance(found, Choice) else None,
                refusal=None if isinstance(found, Choice) else found,
            )
            for node_id, found in verdicts.items()
        ),
    )


def _explain_choice(state: ClusterState, placed: Placed) -> ReplicaExplained:
    verdict = Verdict(node=placed.node, node_name=state.nodes[placed.node].name, score=placed.score)
    return ReplicaExplained(
        replica=placed.replica, is_placed=False, node=placed.node, devices=placed.devices, verdicts=(verdict,)
    )


def _explain_waiting(state: ClusterState, index: int, refusals: tuple[Refusal, ...]) -> ReplicaExplained:
    ids = {node.name: node.id for node in state.nodes.values()}
    return ReplicaExplained(
        replica=index,
        is_placed=False,
        node=None,
        devices=(),
        verdicts=tuple(
            Verdict(node=ids[refusal.node], node_name=refusal.node, refusal=refusal) for refusal in refusals
        ),
    )
