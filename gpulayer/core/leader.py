"""What a leader owes the cluster: plans as soon as one could help, nodes as they are now, an end to orders that nobody
takes up, and to what is kept too long.

Stands on cluster, placement and orders, and decides only when: where things go is placement's business, what is agreed
is cluster's. A leader that is not one any more does no harm: apply checks everything again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from gpulayer.core.base import Tick
from gpulayer.core.cluster.commands import Command, CommitPlan, ForgetJobs, Placement
from gpulayer.core.cluster.node_changes import OBSERVED_SECONDS, NodeChanges
from gpulayer.core.orders.acceptance import Acceptance
from gpulayer.core.placement.fit import Free, free_of
from gpulayer.core.placement.plan import Plan, plan, waiting_jobs, waiting_replicas
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.node import Node
from gpulayer.model.record import NodeFacts
from gpulayer.model.units import NEVER, Duration, Instant

# How long things are kept, in seconds of cluster time.
ENDED_JOBS_KEPT_SECONDS = 7 * 86400.0
ENDED_JOBS_MAX = 10_000
ANSWERS_KEPT_SECONDS = 24 * 3600.0
# So long after its expiry a host that shows it is told that it has expired, and not that nobody knows it.
JOIN_TOKENS_KEPT_SECONDS = 24 * 3600.0
FORGET_INTERVAL = Duration(60.0)
# One entry of the log with this many ids and keys stays far below 1 MiB.
FORGET_BATCH = 1000
# After a proposal that failed: long enough not to spin on a full disk, short enough that nobody notices a lost race.
RETRY_DELAY = Duration(1.0)
# After a plan that came to nothing although the state says that it fits: its node has refused it, and its record, which
# says why, is committed once in ten seconds at most.
REFUSED_DELAY = Duration(10.0)
# Replicas that are refused in turn take turns in plans; so many of these are remembered.
TRIED_MAX = 16
_NOT_SEEN = "it was let in, and has not been seen yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAdvanced:
    """A newer state was applied. Some may be skipped, the newest is always told."""

    state: ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceableChanged:
    """Why nothing may be placed on a node now; empty text: it may. A node that is left out is closed. Before the first
    of these all are open."""

    placeable: Mapping[NodeId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSaid:
    """What a node's record says now: itself, and the attempts that it has something to say about. `is_heard`: gossip
    calls it alive; while it does not, nothing new is expected of it."""

    node: NodeId
    facts: NodeFacts | None
    attempts: frozenset[AttemptId]
    is_heard: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalFailed:
    """What was proposed was rejected, or is not known to be committed."""

    command: Command


LeaderEvent: TypeAlias = StateAdvanced | PlaceableChanged | NodeSaid | ProposalFailed | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Commit this; answered by a StateAdvanced that has it, or by ProposalFailed."""

    command: Command


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All that a plan is made from: an equal one would give an equal plan."""

    waiting: tuple[tuple[JobId, int, tuple[int, ...]], ...]
    free: Mapping[NodeId, Free]
    nodes: Mapping[NodeId, Node]
    placeable: Mapping[NodeId, str] = field(default_factory=dict)


class Leader:
    """Events in, proposals out. One plan is in flight at a time, and one ForgetJobs. A new one for each election."""

    def __init__(self, *, log_end: int = 0, observed_interval: Duration = OBSERVED_SECONDS) -> None:
        """`log_end`: the index of the last entry of the log at the election. Before that is applied the state is not
        yet what was agreed, and nothing is proposed. `observed_interval`: between two entries about one node."""
        self._log_end = log_end
        self._acceptance = Acceptance()
        self._node_changes = NodeChanges(observed_interval)
        self._state = ClusterState()
        self._placeable_told: Mapping[NodeId, str] = {}
        self._planned: _Inputs | None = None
        self._tried: deque[tuple[_Inputs, Instant]] = deque(maxlen=TRIED_MAX)
        """What the newest plans with placements were made from, and when, while the nodes are as they are. Inputs that
        come back have come to nothing."""
        self._again_at: Instant = NEVER
        self._plan_in_flight: CommitPlan | None = None
        self._retry_at: Instant = NEVER
        self._forget_in_flight: ForgetJobs | None = None
        self._forget_at: Instant = NEVER

    @property
    def deadline(self) -> Instant:
        if self._state.index < self._log_end:
            return NEVER
        return min(
            self._retry_at, self._again_at, self._forget_at, self._acceptance.deadline, self._node_changes.deadline
        )

    def step(self, event: LeaderEvent, now: Instant) -> list[Propose]:
        match event:
            case StateAdvanced(state=state):
                if state.index >= self._state.index:
                    before, self._state = self._state, state
                    self._acceptance.follow(before, state, now)
                    self._node_changes.follow(before, state, now)
                    self._notice_commits(now)
            case PlaceableChanged(placeable=placeable):
                self._placeable_told = dict(placeable)
            case NodeSaid(node=node, facts=facts, attempts=attempts, is_heard=is_heard):
                self._acceptance.hear(node, attempts if is_heard else None, now)
                self._node_changes.hear(node, facts if is_heard else None, self._state, now)
            case ProposalFailed(command=command):
                self._notice_failure(command, now)
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._state.index < self._log_end:
            return []
        # What a node has and what it does not take up come before the plan, which may depend on them.
        first: list[Command] = [*self._node_changes.due(now), *self._acceptance.overdue(self._state, now)]
        said = [Propose(command=command) for command in first]
        if isinstance(event, NodeSaid):
            return said  # often, and no input of a plan before it is committed
        return [*said, *self._plan(now), *self._forget(now)]

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        self._acceptance.check()
        self._node_changes.check()
        if self._plan_in_flight is not None:
            assert self._state.planned_at < self._plan_in_flight.based_on, "a plan that is through counts as in flight"
            assert self._planned is not None, "a plan is in flight that was never made"

    # --- plans ----------------------------------------------------------------------------------------------------

    def _plan(self, now: Instant) -> list[Propose]:
        if now >= self._retry_at:
            self._retry_at, self._planned = NEVER, None
        self._again_at = NEVER
        if self._plan_in_flight is not None or self._retry_at != NEVER:
            return []
        inputs = self._inputs()
        if inputs == self._planned:
            return []
        if inputs.waiting and (tried_at := self._when_tried(inputs)) + REFUSED_DELAY > now:
            self._again_at = Instant(tried_at + REFUSED_DELAY)
            return []
        self._planned = inputs
        if not inputs.waiting:
            return []
        made = plan(self._state, inputs.placeable)
        if not made.placements:
            return []
        self._tried.append((inputs, now))
        self._plan_in_flight = as_command(made)
        return [Propose(command=self._plan_in_flight)]

    def _when_tried(self, inputs: _Inputs) -> float:
        if self._tried and self._tried[-1][0].nodes != inputs.nodes:
            self._tried.clear()
        return max((at for tried, at in self._tried if tried == inputs), default=-math.inf)

    def _inputs(self) -> _Inputs:
        waiting = tuple((job.id, job.revision, tuple(waiting_replicas(job))) for job in waiting_jobs(self._state))
        if not waiting:  # nothing else matters then, and most of the time nothing waits
            return _Inputs(waiting=(), free={}, nodes={})
        return _Inputs(waiting=waiting, free=free_of(self._state), nodes=self._state.nodes, placeable=self._placeable())

    def _placeable(self) -> Mapping[NodeId, str]:
        """A node that the log has and whoever looks has not yet seen may have died in its join, and never begin."""
        told = self._placeable_told
        return {node: told.get(node, _NOT_SEEN) for node in self._state.nodes} if told else {}

    def _notice_commits(self, now: Instant) -> None:
        if self._plan_in_flight is not None and self._state.planned_at >= self._plan_in_flight.based_on:
            # What was placed may wait again already, as if nothing had happened: states between are not always told.
            self._plan_in_flight = self._planned = None
        if self._forget_in_flight is not None and not self._still_has(self._forget_in_flight):
            was_full = _size(self._forget_in_flight) >= FORGET_BATCH
            self._forget_in_flight = None
            if was_full:
                self._forget_at = now
        if self._forget_at == NEVER and self._keeps_something():
            self._forget_at = now  # a new leader looks at once; after that every FORGET_INTERVAL

    def _notice_failure(self, command: Command, now: Instant) -> None:
        if command == self._plan_in_flight:
            self._plan_in_flight = None
            self._tried.pop()
            self._retry_at = Instant(now + RETRY_DELAY)
        elif command == self._forget_in_flight:
            self._forget_in_flight = None  # tried again with the next interval

    # --- what is kept too long ------------------------------------------------------------------------------------

    def _forget(self, now: Instant) -> list[Propose]:
        if now < self._forget_at:
            return []
        self._forget_at = Instant(now + FORGET_INTERVAL) if self._keeps_something() else NEVER
        if self._forget_in_flight is not None:
            return []
        command = overdue(self._state)
        if not _size(command):
            return []
        self._forget_in_flight = command
        return [Propose(command=command)]

    def _keeps_something(self) -> bool:
        return bool(self._state.jobs or self._state.answers or self._state.join_tokens)

    def _still_has(self, command: ForgetJobs) -> bool:
        return (
            any(job in self._state.jobs for job in command.jobs)
            or any(key in self._state.answers for key in command.answers)
            or any(token in self._state.join_tokens for token in command.join_tokens)
        )


def _size(command: ForgetJobs) -> int:
    return len(command.jobs) + len(command.answers) + len(command.join_tokens)


def as_command(made: Plan) -> CommitPlan:
    """What the log records of a plan."""
    return CommitPlan(
        based_on=made.based_on,
        placements=tuple(
            Placement(
                job=placed.job,
                revision=placed.revision,
                replica=placed.replica,
                attempt=placed.attempt,
                node=placed.node,
                devices=placed.devices,
            )
            for placed in made.placements
        ),
    )


def overdue(state: ClusterState) -> ForgetJobs:
    """Ended jobs beyond their keeping time or their number, old answers and join tokens: the oldest first, FORGET_BATCH
    at most."""
    ended = sorted((job.ended_at_utc, job.id) for job in state.jobs.values() if job.ended_at_utc is not None)
    surplus = max(0, len(ended) - ENDED_JOBS_MAX)
    jobs = [
        job
        for place, (ended_at_utc, job) in enumerate(ended)
        if place < surplus or ended_at_utc + ENDED_JOBS_KEPT_SECONDS <= state.time_utc
    ][:FORGET_BATCH]
    answers = sorted(
        (answer.at_utc, key)
        for key, answer in state.answers.items()
        if answer.at_utc + ANSWERS_KEPT_SECONDS <= state.time_utc
    )[: FORGET_BATCH - len(jobs)]
    tokens = sorted(
        (token.expires_at_utc, id)
        for id, token in state.join_tokens.items()
        if token.expires_at_utc + JOIN_TOKENS_KEPT_SECONDS <= state.time_utc
    )[: FORGET_BATCH - len(jobs) - len(answers)]
    return ForgetJobs(
        jobs=tuple(jobs), answers=tuple(key for _, key in answers), join_tokens=tuple(id for _, id in tokens)
    )
