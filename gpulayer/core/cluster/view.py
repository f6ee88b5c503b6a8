"""What people see of a job: what was agreed joined with what nodes say, in the words of the states and their reasons.

Every state that is not a good one has a reason, and where something happens by itself, a sentence that says what (P9).
Pure: the caller brings the statuses, the reasons for waiting (placement.plan.waiting_reasons) and the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from gpulayer.core.cluster.hints import with_hint
from gpulayer.model.cluster import Job, Replica
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.inventory import CONFIRM_SECONDS
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Node
from gpulayer.model.replica import DeviceShare, Endpoint, Exit, Outcome, Reason, ReplicaState, ReplicaStatus
from gpulayer.model.seen import NodeSeen, NodeState
from gpulayer.model.units import format_duration

JobState: TypeAlias = Literal[
    "waiting", "starting", "running", "degraded", "stopping", "succeeded", "failed", "cancelled", "lost"
]
JOB_STATES: tuple[JobState, ...] = (
    "waiting",
    "starting",
    "running",
    "degraded",
    "stopping",
    "succeeded",
    "failed",
    "cancelled",
    "lost",
)
_CODE_OF_NODE: Mapping[NodeState, str] = {
    "suspect": "node_suspect",
    "unsupervised": "node_unsupervised",
    "silent": "node_silent",
}
WaitingReasons: TypeAlias = Callable[[int], Reason | None] | Mapping[tuple[JobId, int], Reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    index: int
    state: ReplicaState
    reason: Reason | None
    """Always there unless it is ready, or a batch that succeeded."""
    next: str = ""
    """What happens next by itself, as a sentence; empty when nothing does."""
    node: str = ""
    """The node's name: where it is, or after its end where it was."""
    node_id: NodeId | None = None
    endpoint: Endpoint | None = None
    attempt: int = 0
    run: int = 0
    pid: int | None = None
    restarts: int = 0
    last_exit: Exit | None = None
    started_at_utc: float | None = None
    ready_since_utc: float | None = None
    next_start_at_utc: float | None = None
    warning: Reason | None = None
    devices: tuple[DeviceShare, ...] = ()
    is_verified: bool = True
    """Whether its node is there to say that all this still is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    id: JobId
    name: str
    kind: Literal["service", "batch"]
    revision: int
    state: JobState
    reason: Reason | None
    """Always there unless it is running, or a batch that succeeded."""
    replicas: tuple[ReplicaView, ...]
    restarts: int
    submitted_at_utc: float
    ended_at_utc: float | None = None

    @property
    def ready(self) -> int:
        return sum(replica.state == "ready" for replica in self.replicas)


def job_view(
    job: Job,
    statuses: Mapping[AttemptId, ReplicaStatus],
    waiting_reasons: WaitingReasons,
    *,
    node_names: Mapping[NodeId, str],
    nodes: Mapping[NodeId, Node] = MappingProxyType({}),
    seen: Mapping[NodeId, NodeSeen] = MappingProxyType({}),
    now_utc: float,
) -> JobView:
    """`node_names` may lack nodes (their id is shown); `waiting_reasons` may lack replicas (they are queued); `nodes`
    are as they are seen now, and `seen` says which of them are there at all."""
    replicas = tuple(
        _away(_replica_view(job, replica, statuses, waiting_reasons, node_names, nodes, now_utc), job, replica, seen)
        for replica in job.replicas
    )
    state = _job_state(job, replicas)
    reason = _job_reason(job, state, replicas)
    return JobView(
        id=job.id,
        name=job.name,
        kind=job.spec.kind,
        revision=job.revision,
        state=state,
        reason=with_hint(reason, job.name) if reason is not None else None,
        replicas=replicas,
        restarts=sum(replica.restarts for replica in replicas),
        submitted_at_utc=job.submitted_at_utc,
        ended_at_utc=job.ended_at_utc,
    )


# --- one replica --------------------------------------------------------------------------------------------------


def _replica_view(
    job: Job,
    replica: Replica,
    statuses: Mapping[AttemptId, ReplicaStatus],
    waiting_reasons: WaitingReasons,
    node_names: Mapping[NodeId, str],
    nodes: Mapping[NodeId, Node],
    now_utc: float,
) -> ReplicaView:
    assignment = replica.assignment
    status = statuses.get(assignment.id) if assignment is not None else None
    node_id = assignment.node if assignment is not None else replica.last_node
    base = ReplicaView(
        index=replica.index,
        state="waiting",
        reason=None,
        node=node_names.get(node_id, node_id) if node_id is not None else "",
        node_id=node_id,
        attempt=replica.attempts,
        devices=assignment.devices if assignment is not None else (),
    )
    if status is not None:
        base = _with_status(base, status)
    if replica.outcome is not None:
        view = _ended(base, job.spec, replica, status)
    elif assignment is None:
        view = replace(base, reason=_reason_to_wait(job, replica.index, waiting_reasons))
    elif status is None:
        not_reported = Reason(code="starting", text=f"{base.node} has not reported it yet")
        view = replace(base, state="assigned", reason=assignment.recalled or not_reported)
    else:
        state: ReplicaState = "assigned" if status.state == "waiting" else status.state
        view = replace(base, state=state, reason=_reason_of(base, status))
    if replica.outcome is None and assignment is not None and assignment.withdrawn is not None:
        # What its node said last may be older than the order to stop.
        said = status.reason if status is not None and status.state == "stopping" else None
        view = replace(view, state="stopping", reason=said or assignment.withdrawn, endpoint=None)
    elif replica.outcome is None and assignment is not None and assignment.node in nodes:
        view = replace(view, warning=_unhealthy_device(job.spec, view, nodes[assignment.node]) or view.warning)
    if assignment is not None and assignment.recalled is not None and view.state == "assigned":
        view = replace(view, next=f"placed again as soon as {base.node} says that it has not begun with it")
    else:
        view = replace(view, next=_next(job.spec, view, now_utc))
    return replace(
        view,
        reason=with_hint(view.reason, job.name) if view.reason is not None else None,
        warning=with_hint(view.warning, job.name) if view.warning is not None else None,
    )


def _away(view: ReplicaView, job: Job, replica: Replica, seen: Mapping[NodeId, NodeSeen]) -> ReplicaView:
    """With the warning that its node is not there to look after it. What was said of it last is shown all the same: it
    goes on without its daemon, and mostly also without its host's network."""
    node = seen.get(replica.assignment.node) if replica.assignment is not None else None
    if node is None:
        return view
    code = _CODE_OF_NODE.get(node.state)
    if code is None:
        return replace(view, is_verified=node.is_verified)
    warning = Reason(code=code, text=f"{view.node}, where it is, is {node.state}: {node.reason}")
    return replace(view, is_verified=node.is_verified, warning=with_hint(warning, job.name))


def _with_status(view: ReplicaView, status: ReplicaStatus) -> ReplicaView:
    return replace(
        view,
        endpoint=status.endpoint if status.state == "ready" else None,
        run=status.run,
        pid=status.pid,
        restarts=status.restarts,
        last_exit=status.last_exit,
        started_at_utc=status.started_at_utc,
        ready_since_utc=status.ready_since_utc if status.state == "ready" else None,
        next_start_at_utc=status.next_start_at_utc if status.state == "backing_off" else None,
        warning=status.warning,
    )


def _ended(view: ReplicaView, spec: JobSpec, replica: Replica, status: ReplicaStatus | None) -> ReplicaView:
    outcome = replica.outcome
    assert outcome is not None
    ended = replace(
        view,
        state="ended",
        reason=_reason_of_outcome(spec, outcome),
        endpoint=None,
        pid=None,
        next_start_at_utc=None,
        ready_since_utc=None,
        restarts=outcome.restarts,
        last_exit=outcome.exit or view.last_exit,
        run=outcome.exit.run if outcome.exit is not None else view.run,
        started_at_utc=_started_at_utc(outcome.exit) or view.started_at_utc,
    )
    if replica.assignment is None:
        return ended
    # Its end is known, but a process of it is left, or was when its node last said something: it still holds its place.
    said = status.reason if status is not None and status.reason is not None else outcome.reason
    return replace(ended, state="stopping", reason=said, pid=view.pid)


def _unhealthy_device(spec: JobSpec, view: ReplicaView, node: Node) -> Reason | None:
    """The warning that what it runs on has failed. That is no reason to end it: it may not have noticed."""
    held = {share.uuid for share in view.devices}
    unwell = [device for device in node.capabilities.accelerators if device.uuid in held and device.unhealthy]
    if not unwell:
        return None
    first, more = unwell[0], len(unwell) - 1
    others = f" (and {more} more of its GPUs {'is' if more == 1 else 'are'})" if more else ""
    if spec.kind == "service":
        remedy = "`gpulayer job restart JOB` moves it to another GPU, as soon as one is free"
    else:
        remedy = "if it does not go on, cancel it and submit it again: it gets another GPU"
    return Reason(
        code="device_unhealthy",
        text=f"{first.label}, which it holds, is unhealthy{others}: {first.unhealthy}",
        hint=f"{remedy}; `gpulayer resources detect` on {node.name} says what to do about this one",
    )


def _started_at_utc(exit: Exit | None) -> float | None:
    """When the run began that ended so; None where nobody knows."""
    return exit.ended_at_utc - exit.uptime_seconds if exit is not None and exit.ended_at_utc else None


def _reason_of_outcome(spec: JobSpec, outcome: Outcome) -> Reason | None:
    """A batch that did what it was to do needs no words; one that left processes behind does."""
    is_as_wished = spec.kind == "batch" and outcome.result == "succeeded" and outcome.reason.code == "exit_zero"
    return None if is_as_wished else outcome.reason


def _reason_to_wait(job: Job, index: int, reasons: WaitingReasons) -> Reason:
    found = reasons.get((job.id, index)) if isinstance(reasons, Mapping) else reasons(index)
    return found or Reason(code="queued", text="waits for its turn to be placed")


def _reason_of(view: ReplicaView, status: ReplicaStatus) -> Reason | None:
    if status.state == "ready" or status.reason is not None:
        return status.reason
    match status.state:
        case "stopping":
            return Reason(code="cancelled", text="is being stopped")
        case "backing_off" if status.last_exit is not None:
            return _reason_of_exit(status.last_exit)
        case "ended" if status.last_exit is not None:
            return _reason_of_exit(status.last_exit)
        case "unready":
            return Reason(code="not_listening", text=_not_listening(status))
        case "starting" if status.run:
            pid = f", pid {status.pid}" if status.pid is not None else ""
            return Reason(code="starting", text=f"run {status.run} was started on {view.node}{pid}")
        case _:
            return Reason(code="starting", text=f"{view.node} is about to start it")


def _not_listening(status: ReplicaStatus) -> str:
    return f"does not listen on port {status.port}" if status.port is not None else "is not ready any more"


def _reason_of_exit(exit: Exit) -> Reason:
    if exit.code is not None:
        return Reason(code="exit_zero" if exit.code == 0 else "exit_nonzero", text=f"exit code {exit.code}")
    if exit.signal is not None:
        return Reason(code="signal", text=f"ended by signal {exit.signal_text}")
    return Reason(code="supervisor_killed", text="how it ended is unknown")


def _next(spec: JobSpec, view: ReplicaView, now_utc: float) -> str:
    match view.state:
        case "waiting" if view.reason is not None and view.reason.code == "never_fits":
            return "starts when a node has what it needs"
        case "waiting":
            return "starts as soon as there is room"
        case "assigned":
            return f"starts on {view.node}"
        case "starting" if spec.kind == "batch":
            return "runs to its end"
        case "starting" if spec.port:
            limit = spec.start_timeout_seconds
            until = f"; ended as never_ready after {format_duration(limit)}" if limit is not None else ""
            return f"ready as soon as it listens on $HOST:$PORT{until}"
        case "starting":
            return "ready when it has run for 1 s"
        case "unready":
            return "listed again as soon as it listens"
        case "backing_off" if view.next_start_at_utc is not None and view.next_start_at_utc > now_utc:
            return f"restarts in {math.ceil(view.next_start_at_utc - now_utc)} s"
        case "backing_off":
            return "restarts now"
        case "stopping" if view.reason is not None and view.reason.code == "devices_not_clear":
            return f"goes on when its GPUs are confirmed free, after {format_duration(CONFIRM_SECONDS)} at most"
        case "stopping":
            return (
                f"killed when it has not ended {format_duration(spec.stop_grace_seconds)} after SIG{spec.stop_signal}"
            )
        case "ready" if spec.kind == "batch":
            return "runs to its end"
        case _:
            return ""


# --- the job ------------------------------------------------------------------------------------------------------


def _job_state(job: Job, replicas: tuple[ReplicaView, ...]) -> JobState:
    if job.outcome is not None:
        return job.outcome.result
    if job.stopping is not None:
        return "stopping"
    if all(replica.assignment is None and replica.outcome is None for replica in job.replicas):
        return "waiting"
    if job.spec.kind == "batch":
        return _batch_state(job, replicas)
    has_ended = any(replica.outcome is not None for replica in job.replicas)
    ready = sum(view.state == "ready" for view in replicas)
    if has_ended:
        return "degraded"
    if ready == len(replicas):
        return "running"
    return "degraded" if ready else "starting"


def _batch_state(job: Job, replicas: tuple[ReplicaView, ...]) -> JobState:
    """A batch is never awaited to be ready: it runs once every replica has been started."""
    if any(replica.outcome is not None and replica.outcome.result != "succeeded" for replica in job.replicas):
        return "degraded"
    return "running" if all(_has_started(view) for view in replicas) else "starting"


def _has_started(view: ReplicaView) -> bool:
    return view.state in ("ready", "unready", "stopping", "ended") or (
        view.state == "starting" and view.pid is not None
    )


def _job_reason(job: Job, state: JobState, replicas: tuple[ReplicaView, ...]) -> Reason | None:
    if job.outcome is not None:
        return _reason_of_outcome(job.spec, job.outcome)
    if job.stopping is not None:
        return job.stopping.reason
    if state == "running":
        return None
    worst = min((view for view in replicas if _is_in_the_way(job, view)), key=_urgency, default=None)
    if worst is None or worst.reason is None:
        return Reason(code="starting", text="its state is not reported yet")
    if len(replicas) == 1:
        return worst.reason
    told = f"{_ready_of(job, replicas)}; replica {worst.index}: {worst.reason.text or worst.reason.code}"
    return replace(worst.reason, text=told)


def _is_in_the_way(job: Job, view: ReplicaView) -> bool:
    if job.spec.kind == "batch":
        outcome = job.replicas[view.index].outcome
        return not _has_started(view) or (outcome is not None and outcome.result != "succeeded")
    return view.state != "ready"


def _urgency(view: ReplicaView) -> tuple[int, int]:
    """What went wrong says more than what is on its way; then by index."""
    order = ("ended", "backing_off", "unready", "stopping", "waiting", "starting", "assigned", "ready")
    return (order.index(view.state), view.index)


def _ready_of(job: Job, replicas: tuple[ReplicaView, ...]) -> str:
    if job.spec.kind == "batch":
        return f"{sum(map(_has_started, replicas))} of {len(replicas)} replicas started"
    return f"{sum(view.state == 'ready' for view in replicas)} of {len(replicas)} replicas ready"
