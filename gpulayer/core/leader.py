"""What a leader owes the cluster: plans as soon as one could help, and an end to what is kept too long.

Stands on cluster and placement, and decides only when: where things go is placement's business, what is agreed is
cluster's. A leader that is not one any more does no harm: apply checks everything again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from gpulayer.core.base import Tick
from gpulayer.core.cluster.commands import Command, CommitPlan, ForgetJobs, Placement
from gpulayer.core.placement.fit import Free, free_of
from gpulayer.core.placement.plan import Plan, plan, waiting_jobs, waiting_replicas
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import JobId, NodeId
from gpulayer.model.node import Node
from gpulayer.model.units import NEVER, Duration, Instant

# How long things are kept, in seconds of cluster time.
ENDED_JOBS_KEPT_SECONDS = 7 * 86400.0
ENDED_JOBS_MAX = 10_000
ANSWERS_KEPT_SECONDS = 24 * 3600.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAdvanced:
    """A newer state was applied. Some may be skipped, the newest is always told."""

    state: ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceableChanged:
    """Why nothing may be placed on a node now; a node that is left out is open."""

    placeable: Mapping[NodeId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalFailed:
    """What was proposed was rejected, or is not known to be committed."""

    command: Command


LeaderEvent: TypeAlias = StateAdvanced | PlaceableChanged | ProposalFailed | Tick


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
    """Events in, proposals out. One plan is in flight at a time, and one ForgetJobs."""

    def __init__(self) -> None:
        self._state = ClusterState()
        self._placeable: Mapping[NodeId, str] = {}
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
        return min(self._retry_at, self._again_at, self._forget_at)

    def step(self, event: LeaderEvent, now: Instant) -> list[Propose]:
        match event:
            case StateAdvanced(state=state):
                if state.index >= self._state.index:
                    self._state = state
                    self._notice_commits(now)
            case PlaceableChanged(placeable=placeable):
                self._placeable = dict(placeable)
            case ProposalFailed(command=command):
                self._notice_failure(command, now)
            case Tick():
                pass
            case _:
                assert_never(event)
        return [*self._plan(now), *self._forget(now)]

    def check(self) -> None:
        """Asserts what must hold between two steps."""
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
        made = plan(self._state, self._placeable)
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
        return _Inputs(waiting=waiting, free=free_of(self._state), nodes=self._state.nodes, placeable=self._placeable)

    def _notice_commits(self, now: Instant) -> None:
        if self._plan_in_flight is not None and self._state.planned_at >= self._plan_in_flight.based_on:
            # What was placed may wait again already, as if nothing had happened: states between are not always told.
            self._plan_in_flight = self._planned = None
        if self._forget_in_flight is not None and not self._still_has(self._forget_in_flight):
            was_full = len(self._forget_in_flight.jobs) + len(self._forget_in_flight.answers) >= FORGET_BATCH
            self._forget_in_flight = None
            if was_full:
                self._forget_at = now
        if self._forget_at == NEVER and (self._state.jobs or self._state.answers):
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
        has_any = bool(self._state.jobs or self._state.answers)
        self._forget_at = Instant(now + FORGET_INTERVAL) if has_any else NEVER
        if self._forget_in_flight is not None:
            return []
        command = overdue(self._state)
        if not command.jobs and not command.answers:
            return []
        self._forget_in_flight = command
        return [Propose(command=command)]

    def _still_has(self, command: ForgetJobs) -> bool:
        return any(job in self._state.jobs for job in command.jobs) or any(
            key in self._state.answers for key in command.answers
        )


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
    """Ended jobs beyond their keeping time or their number, and old answers: the oldest first, FORGET_BATCH at most."""
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
    return ForgetJobs(jobs=tuple(jobs), answers=tuple(key for _, key in answers))
