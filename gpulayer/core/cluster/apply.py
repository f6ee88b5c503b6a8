"""What a log entry does to the cluster's state. Pure, and total: a command that no longer makes sense is Rejected.

Every voter runs this on the same entries and must end with the same state, so what a command does here is wire format:
a new meaning is a new command. It decides nothing that could be decided before (placement, when to forget): it checks
what was decided against the state as it is now, and keeps the promises that only the log can keep (P1, P3, P4).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpulayer.core.cluster import registry, trust
from gpulayer.core.cluster.applied import Accepted, Applied, Rejected, counted, event_of, free_name, rejected
from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    CommitPlan,
    CreateCluster,
    CreateJoinToken,
    CreateToken,
    ForgetJobs,
    FoundTrust,
    InstallKey,
    JoinNode,
    LogEntry,
    Placement,
    RemoveNode,
    ReplicaAccepted,
    ReplicaEnded,
    ReplicaRefused,
    ReplicaReleased,
    RestartReplicas,
    RetireKey,
    RevokeToken,
    StopJob,
    SubmitJob,
    UseKey,
    WithdrawUnaccepted,
)
from gpulayer.model.cluster import ClusterState, Job, KeyedAnswer, Replica
from gpulayer.model.event import Event
from gpulayer.model.ids import NAME_PATTERN, JobId, NodeId, ReplicaId
from gpulayer.model.job import Requirements
from gpulayer.model.node import Accelerator, Node, excluded_by
from gpulayer.model.replica import Assignment, Outcome, Reason
from gpulayer.model.units import MILLI, format_duration, format_gpus

# Event.seq is index * 1000 + k: the feed stays ordered by one number, and an entry has room for this many events.
EVENTS_PER_ENTRY_MAX = 1000

__all__ = ["Accepted", "Applied", "Rejected", "apply", "check"]


def apply(state: ClusterState, entry: LogEntry) -> Applied:
    """The state after `entry`. Never raises for a command that could be decoded; entries come in order, each once."""
    assert entry.index == state.index + 1, f"entry {entry.index} applied to a state at {state.index}"
    # Cluster time never goes back, whatever the clock of a new leader says.
    at_utc = max(state.time_utc, entry.at_utc) if math.isfinite(entry.at_utc) else state.time_utc
    stamped = replace(state, index=entry.index, term=entry.term, time_utc=at_utc)
    applied = _applied(stamped, entry.command)
    return replace(applied, events=_numbered(applied.events, entry.index))


def _applied(state: ClusterState, command: Command) -> Applied:
    match command:
        case CreateCluster():
            return registry.create_cluster(state, command)
        case AdmitNode():
            return registry.admit_node(state, command)
        case JoinNode():
            return registry.join_node(state, command)
        case RemoveNode():
            return registry.remove_node(state, command)
        case FoundTrust():
            return trust.found_trust(state, command)
        case InstallKey():
            return trust.install_key(state, command)
        case UseKey():
            return trust.use_key(state, command)
        case RetireKey():
            return trust.retire_key(state, command)
        case SubmitJob():
            return _submit_job(state, command)
        case StopJob():
            return _stop_job(state, command)
        case RestartReplicas():
            return _restart_replicas(state, command)
        case CommitPlan():
            return _commit_plan(state, command)
        case ReplicaEnded():
            return _replica_ended(state, command)
        case ReplicaReleased():
            return _replica_released(state, command)
        case ReplicaRefused():
            return _replica_refused(state, command)
        case WithdrawUnaccepted():
            return _withdraw_unaccepted(state, command)
        case ReplicaAccepted():
            return _replica_accepted(state, command)
        case ForgetJobs():
            return _forget_jobs(state, command)
        case CreateToken():
            return trust.create_token(state, command)
        case CreateJoinToken():
            return trust.create_join_token(state, command)
        case RevokeToken():
            return trust.revoke_token(state, command)
        case _:
            assert_never(command)


# --- jobs ---------------------------------------------------------------------------------------------------------


def _submit_job(state: ClusterState, command: SubmitJob) -> Applied:
    key = command.idempotency_key
    answer = state.answers.get(key) if key else None
    if answer is not None:
        return _replayed(state, command, answer)
    if not NAME_PATTERN.fullmatch(command.job):
        return rejected(state, "invalid_request", f"{command.job!r} is not a job id")
    if command.job in state.jobs:
        return rejected(state, "refused", f"job id {command.job} is in use", "submit again")
    namesake = state.live_job_named(command.spec.name)
    if namesake is not None and not command.name_is_derived:
        return rejected(
            state,
            "refused",
            f"name {namesake.name} is in use by job {namesake.id}",
            f"choose another --name, or end it first: gpulayer job cancel --wait 1m {namesake.id}"
            if namesake.stopping is None
            else f"it is stopping: submit again when gpulayer job wait {namesake.id} returns, or choose another --name",
        )
    name = (
        command.spec.name
        if namesake is None
        else free_name({job.name for job in state.jobs.values() if job.is_live}, command.spec.name)
    )
    spec = command.spec.named(name)
    job = Job(
        id=command.job,
        name=name,
        revision=1,
        spec=spec,
        submitted_at_utc=state.time_utc,
        submitted_at_index=state.index,
        replicas=tuple(Replica(index=index) for index in range(spec.replicas)),
    )
    submitted = _with_job(state, job)
    if key:
        kept = KeyedAnswer(at_utc=state.time_utc, request_digest=command.request_digest, job=job.id)
        submitted = replace(submitted, answers={**state.answers, key: kept})
    event = event_of(
        submitted,
        "job.submitted",
        f"{spec.kind} {name} submitted with {counted(spec.replicas, 'replica')}",
        job=job.id,
        data=(("name", name), ("revision", "1")),
    )
    return Applied(state=submitted, result=Accepted(job=job.id, name=name), events=(event,))


def _replayed(state: ClusterState, command: SubmitJob, answer: KeyedAnswer) -> Applied:
    if answer.request_digest != command.request_digest:
        return rejected(
            state,
            "idempotency_conflict",
            f"Idempotency-Key {command.idempotency_key} was used for another request, which made job {answer.job}",
            "use a new key for a new request",
        )
    first = state.jobs.get(answer.job)
    name = first.name if first else command.spec.name
    return Applied(state=state, result=Accepted(job=answer.job, name=name, replayed=True))


def _stop_job(state: ClusterState, command: StopJob) -> Applied:
    job = state.jobs.get(command.job)
    if job is None:
        return _no_such_job(state, command.job)
    if job.outcome is not None:
        ago = format_duration(max(0.0, state.time_utc - (job.ended_at_utc or 0.0)))
        return rejected(
            state,
            "refused",
            f"job {job.name} ended already ({job.outcome.result} {ago} ago: {_told(job.outcome)})",
            "nothing of it runs any more",
        )
    if job.stopping is not None:
        return Applied(state=state, result=Accepted(job=job.id, name=job.name))
    outcome = Outcome(result="cancelled", reason=command.reason)
    stopping, events = _stopping(state, job, outcome, command.reason)
    return _finish(state, stopping, events)


def _stopping(state: ClusterState, job: Job, outcome: Outcome, why: Reason) -> tuple[Job, tuple[Event, ...]]:
    """The job with everything of it told to stop; what was never placed has nothing to wait for and ends at once."""
    told = replace(job, stopping=outcome, replicas=tuple(_told_to_stop(replica, why) for replica in job.replicas))
    event = event_of(
        state,
        "job.stopping",
        f"{job.name} is stopping: {outcome.reason.text or outcome.reason.code}",
        job=job.id,
        data=(("result", outcome.result), ("reason", outcome.reason.code)),
    )
    return told, (event,)


def _told_to_stop(replica: Replica, why: Reason) -> Replica:
    if replica.outcome is not None:
        return replica
    if replica.assignment is None:
        return replace(replica, outcome=Outcome(result="cancelled", reason=why))
    return replace(replica, assignment=replace(replica.assignment, withdrawn=why))


def _restart_replicas(state: ClusterState, command: RestartReplicas) -> Applied:
    job = state.jobs.get(command.job)
    if job is None:
        return _no_such_job(state, command.job)
    named = sorted(set(command.replicas)) or list(range(len(job.replicas)))
    obstacles = {index: _obstacle_to_restart(job, index) for index in named}
    skipped = tuple(words for words in obstacles.values() if words)
    chosen = [index for index, words in obstacles.items() if not words]
    if not chosen:
        # All are named, up to a bound: the message travels to a terminal.
        return rejected(state, "refused", "; ".join(skipped[:5]), "only a replica that is placed can be restarted")
    replicas = list(job.replicas)
    for index in chosen:
        replicas[index] = _with_new_serial(replicas[index])
    restarted = replace(job, replicas=tuple(replicas))
    events = tuple(
        event_of(
            state,
            "replica.restart_requested",
            f"a new run of replica {index} of {job.name} was asked for",
            job=job.id,
            replica=index,
            data=(("restart_serial", str(replicas[index].restart_serial)),),
        )
        for index in chosen
    )
    return Applied(
        state=_with_job(state, restarted),
        result=Accepted(job=job.id, name=job.name, skipped=skipped),
        events=events,
    )


def _with_new_serial(replica: Replica) -> Replica:
    assert replica.assignment is not None
    serial = max(replica.restart_serial, replica.assignment.restart_serial) + 1
    return replace(replica, restart_serial=serial, assignment=replace(replica.assignment, restart_serial=serial))


def _obstacle_to_restart(job: Job, index: int) -> str:
    """Why this replica cannot be given a new run; empty when it can."""
    if job.outcome is not None:
        return f"job {job.name} has ended ({job.outcome.result})"
    if job.stopping is not None:
        return f"job {job.name} is stopping"
    if not 0 <= index < len(job.replicas):
        return f"job {job.name} has no replica {index}"
    replica = job.replicas[index]
    if replica.outcome is not None:
        return f"replica {index} of {job.name} has ended ({_told(replica.outcome)})"
    if replica.assignment is None:
        return f"replica {index} of {job.name} waits for a place and has nothing to restart"
    return ""


# --- plans --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """What assignments hold, per node; kept up to date while the placements of one plan are gone through."""

    gpu_milli: Counter[tuple[NodeId, str]] = field(default_factory=Counter)
    cpus_milli: Counter[NodeId] = field(default_factory=Counter)
    memory_mib: Counter[NodeId] = field(default_factory=Counter)
    replicas: Counter[tuple[NodeId, JobId]] = field(default_factory=Counter)

    def add(self, assignment: Assignment) -> None:
        for share in assignment.devices:
            self.gpu_milli[assignment.node, share.uuid] += share.milli
        self.cpus_milli[assignment.node] += assignment.cpus_milli
        self.memory_mib[assignment.node] += assignment.memory_mib
        self.replicas[assignment.node, assignment.replica.job] += 1


def _held(state: ClusterState) -> _Held:
    held = _Held()
    for job in state.jobs.values():
        if job.is_live:  # an ended job holds nothing: check() says so
            for replica in job.replicas:
                if replica.assignment is not None:
                    held.add(replica.assignment)
    return held


def _commit_plan(state: ClusterState, command: CommitPlan) -> Applied:
    if not 0 <= command.based_on < state.index:
        return rejected(state, "invalid_request", f"a plan based on index {command.based_on} at {state.index}")
    held = _held(state)
    changed: dict[JobId, list[Replica]] = {}
    dropped = []
    events = []
    for placement in command.placements:
        job = state.jobs.get(placement.job)
        node = state.nodes.get(placement.node)
        replicas = changed.get(placement.job) or (list(job.replicas) if job else [])
        if job is None or node is None or not _still_holds(placement, job, replicas, node, held):
            dropped.append(placement)
            continue
        assignment = _assignment(placement, job, replicas[placement.replica])
        held.add(assignment)
        replicas[placement.replica] = replace(
            replicas[placement.replica], attempts=placement.attempt, assignment=assignment, last_node=node.id
        )
        changed[job.id] = replicas
        events.append(_assigned_event(state, job, assignment, node))
    jobs = {job: replace(state.jobs[job], replicas=tuple(replicas)) for job, replicas in changed.items()}
    return Applied(
        state=replace(state, jobs={**state.jobs, **jobs}, planned_at=command.based_on),
        result=Accepted(dropped=tuple(dropped)),
        events=tuple(events),
    )


def _still_holds(placement: Placement, job: Job, replicas: list[Replica], node: Node, held: _Held) -> bool:
    """What keeps the promises (P3, P4) and what may have moved since the plan was made. Models, labels and the like are
    the planner's business: a placement that ignores them wastes a device, but shares it with nobody."""
    if job.outcome is not None or job.stopping is not None or job.revision != placement.revision or node.marks:
        return False
    if not 0 <= placement.replica < len(replicas):
        return False
    replica = replicas[placement.replica]
    if replica.assignment is not None or replica.outcome is not None or placement.attempt != replica.attempts + 1:
        return False
    if job.spec.spread == "node" and held.replicas[node.id, job.id]:
        return False
    needs = job.spec.requirements
    capabilities = node.capabilities
    if needs.cpus_milli and needs.cpus_milli > capabilities.cpus_milli - held.cpus_milli[node.id]:
        return False
    if needs.memory_mib and needs.memory_mib > capabilities.memory_mib - held.memory_mib[node.id]:
        return False
    return _devices_hold(placement, needs, node, held)


def _devices_hold(placement: Placement, needs: Requirements, node: Node, held: _Held) -> bool:
    wanted = [MILLI] * (needs.gpus_milli // MILLI) if needs.gpus_milli >= MILLI else [needs.gpus_milli]
    if [share.milli for share in placement.devices] != ([] if needs.gpus_milli == 0 else wanted):
        return False
    if len({share.uuid for share in placement.devices}) != len(placement.devices):
        return False
    accelerators = node.capabilities.accelerators
    usable = {device.uuid: device.usable_milli for device in accelerators}
    together = {share.uuid for share in placement.devices}
    for share in placement.devices:
        if held.gpu_milli[node.id, share.uuid] + share.milli > usable.get(share.uuid, 0):
            return False
        if any(uuid in together or held.gpu_milli[node.id, uuid] for uuid in excluded_by(share.uuid, accelerators)):
            return False
    return True


def _assignment(placement: Placement, job: Job, replica: Replica) -> Assignment:
    return Assignment(
        replica=ReplicaId(job.id, placement.replica),
        attempt=placement.attempt,
        node=placement.node,
        revision=placement.revision,
        devices=placement.devices,
        cpus_milli=job.spec.requirements.cpus_milli,
        memory_mib=job.spec.requirements.memory_mib,
        restart_serial=replica.restart_serial,
    )


def _assigned_event(state: ClusterState, job: Job, assignment: Assignment, node: Node) -> Event:
    gpus = sum(share.milli for share in assignment.devices)
    with_gpus = f" with {format_gpus(gpus)} GPU{'s' if gpus > MILLI else ''}" if gpus else ""
    return event_of(
        state,
        "replica.assigned",
        f"replica {assignment.replica.index} of {job.name} placed on {node.name}{with_gpus}",
        job=job.id,
        replica=assignment.replica.index,
        node=node.name,
        data=(
            ("attempt", str(assignment.attempt)),
            ("devices", ",".join(f"{share.uuid}:{share.milli}" for share in assignment.devices)),
        ),
    )


# --- ends ---------------------------------------------------------------------------------------------------------


def _replica_ended(state: ClusterState, command: ReplicaEnded) -> Applied:
    found = _find(state, command.job, command.replica)
    if isinstance(found, Rejected):
        return Applied(state=state, result=found)
    job, replica = found
    if replica.outcome is not None:
        return _ended_again(state, job, replica, command)
    assignment = replica.assignment
    if assignment is None or assignment.attempt != command.attempt:
        return _not_that_attempt(state, job, replica, command.attempt)
    ended = replace(
        replica,
        outcome=command.outcome,
        assignment=None if command.released else replace(assignment, recalled=None),
    )
    job = _with_replica(job, ended)
    events: tuple[Event, ...] = (
        event_of(
            state,
            "replica.ended",
            f"replica {replica.index} of {job.name} ended on {_node_name(state, assignment.node)}: "
            + _told(command.outcome),
            job=job.id,
            replica=replica.index,
            node=_node_name(state, assignment.node),
            data=(
                ("attempt", str(command.attempt)),
                ("result", command.outcome.result),
                ("reason", command.outcome.reason.code),
            ),
        ),
    )
    if command.released:
        events += (_released_event(state, job, assignment),)
    job, stopping_events = _by_policy(state, job, replica.index, command.outcome)
    return _finish(state, job, events + stopping_events)


def _by_policy(state: ClusterState, job: Job, index: int, outcome: Outcome) -> tuple[Job, tuple[Event, ...]]:
    """What the end of one replica means for its job. A stopping job keeps the outcome it stops for."""
    if job.stopping is not None:
        return job, ()
    if _takes_the_job_along(job, outcome):
        told = _told_of_replica(index, outcome)
        whole = replace(outcome, reason=replace(outcome.reason, text=told))
        if all(replica.outcome is not None for replica in job.replicas):
            return replace(job, stopping=whole), ()  # nobody is left who would have to be stopped
        return _stopping(state, job, whole, Reason(code="replica_ended", text=told))
    if all(replica.outcome is not None for replica in job.replicas):
        return replace(job, stopping=_overall(job)), ()
    return job, ()


def _takes_the_job_along(job: Job, outcome: Outcome) -> bool:
    if job.spec.on_replica_end == "keep":
        return False
    return job.spec.kind == "service" or outcome.result != "succeeded"


def _overall(job: Job) -> Outcome:
    """The outcome of a job whose replicas have all ended: succeeded if all of them did, else the first failure by index
    (a cancelled replica is one only where nothing failed)."""
    outcomes = [replica.outcome for replica in job.replicas if replica.outcome is not None]
    for results in (("failed", "lost"), ("cancelled",)):
        for index, outcome in enumerate(outcomes):
            if outcome.result in results:
                return replace(outcome, reason=replace(outcome.reason, text=_told_of_replica(index, outcome)))
    if len(outcomes) == 1:
        return outcomes[0]
    reason = Reason(code="exit_zero", text=f"all {len(outcomes)} replicas ended with exit code 0")
    return Outcome(result="succeeded", reason=reason)


def _ended_again(state: ClusterState, job: Job, replica: Replica, command: ReplicaEnded) -> Applied:
    """A report that was repeated. The first outcome stays, but that nothing is left is news, and
    losing it would hold the devices for ever."""
    accepted = Applied(state=state, result=Accepted(job=job.id, name=job.name))
    if command.attempt != replica.attempts:
        return _not_that_attempt(state, job, replica, command.attempt)
    if command.released and replica.assignment is not None:
        return _release(state, job, replica, replica.assignment)
    if command.outcome == replica.outcome:
        return accepted
    assert replica.outcome is not None
    return rejected(state, "refused", f"replica {replica.index} of {job.name} ended already ({_told(replica.outcome)})")


def _replica_released(state: ClusterState, command: ReplicaReleased) -> Applied:
    found = _find(state, command.job, command.replica)
    if isinstance(found, Rejected):
        return Applied(state=state, result=found)
    job, replica = found
    if command.attempt != replica.attempts or command.attempt == 0:
        return _not_that_attempt(state, job, replica, command.attempt)
    if replica.outcome is None:
        return rejected(
            state, "refused", f"replica {replica.index} of {job.name} has not ended", "report its end first"
        )
    if replica.assignment is None:
        return Applied(state=state, result=Accepted(job=job.id, name=job.name))
    return _release(state, job, replica, replica.assignment)


def _replica_refused(state: ClusterState, command: ReplicaRefused) -> Applied:
    """The replica is back in the queue, and what its node saw of the devices is what the next plan is made from."""
    found = _find(state, command.job, command.replica)
    if isinstance(found, Rejected):
        return Applied(state=state, result=found)
    job, replica = found
    assignment = replica.assignment
    if assignment is None and command.attempt == replica.attempts > 0:  # said before
        return Applied(state=state, result=Accepted(job=job.id, name=job.name))
    if assignment is None or assignment.attempt != command.attempt:
        return _not_that_attempt(state, job, replica, command.attempt)
    state, observed_events = _with_observed(state, assignment.node, command.observed)
    if replica.outcome is not None:  # its end was known, and what was asked for was only the release
        released = _release(state, job, replica, assignment)
        return replace(released, events=released.events + observed_events)
    name = _node_name(state, assignment.node)
    event = event_of(
        state,
        "replica.refused",
        f"{name} cannot run replica {replica.index} of {job.name}, which waits again: "
        f"{command.reason.text or command.reason.code}",
        job=job.id,
        replica=replica.index,
        node=name,
        data=(("attempt", str(command.attempt)), ("reason", command.reason.code)),
    )
    freed = replace(replica, assignment=None)
    if job.stopping is not None:
        why = assignment.withdrawn or command.reason
        freed = replace(freed, outcome=Outcome(result="cancelled", reason=why))
    events = (event, _released_event(state, job, assignment), *observed_events)
    return _finish(state, _with_replica(job, freed), events)


def _withdraw_unaccepted(state: ClusterState, command: WithdrawUnaccepted) -> Applied:
    """The assignment stays, and holds its capacity, until its node has said whether it had begun with it."""
    found = _unfinished(state, command.job, command.replica, command.attempt)
    if isinstance(found, Applied):
        return found
    job, replica, assignment = found
    if assignment.recalled is not None or assignment.withdrawn is not None:
        return Applied(state=state, result=Accepted(job=job.id, name=job.name))
    name = _node_name(state, assignment.node)
    event = event_of(
        state,
        "replica.recalled",
        f"replica {replica.index} of {job.name} is placed anew unless {name} has begun with it: "
        f"{command.reason.text or command.reason.code}",
        job=job.id,
        replica=replica.index,
        node=name,
        data=(("attempt", str(command.attempt)), ("reason", command.reason.code)),
    )
    recalled = replace(replica, assignment=replace(assignment, recalled=command.reason))
    return _finish(state, _with_replica(job, recalled), (event,))


def _replica_accepted(state: ClusterState, command: ReplicaAccepted) -> Applied:
    found = _unfinished(state, command.job, command.replica, command.attempt)
    if isinstance(found, Applied):
        return found
    job, replica, assignment = found
    if assignment.recalled is None:
        return Applied(state=state, result=Accepted(job=job.id, name=job.name))
    name = _node_name(state, assignment.node)
    event = event_of(
        state,
        "replica.accepted",
        f"{name} had begun with replica {replica.index} of {job.name}, which stays there",
        job=job.id,
        replica=replica.index,
        node=name,
        data=(("attempt", str(command.attempt)),),
    )
    kept = replace(replica, assignment=replace(assignment, recalled=None))
    return _finish(state, _with_replica(job, kept), (event,))


def _unfinished(
    state: ClusterState, job_id: JobId, index: int, attempt: int
) -> tuple[Job, Replica, Assignment] | Applied:
    """The replica with its assignment, if that is of this attempt and its end is not known; else the answer."""
    found = _find(state, job_id, index)
    if isinstance(found, Rejected):
        return Applied(state=state, result=found)
    job, replica = found
    if replica.assignment is None or replica.assignment.attempt != attempt:
        return _not_that_attempt(state, job, replica, attempt)
    if replica.outcome is not None:
        return rejected(state, "refused", f"replica {index} of {job.name} ended already ({_told(replica.outcome)})")
    return job, replica, replica.assignment


def _with_observed(
    state: ClusterState, node_id: NodeId, observed: tuple[Accelerator, ...]
) -> tuple[ClusterState, tuple[Event, ...]]:
    """The node with these of its devices as it sees them now."""
    node = state.nodes.get(node_id)
    if node is None:
        return state, ()
    seen = {device.uuid: device for device in observed}
    devices = tuple(seen.get(device.uuid, device) for device in node.capabilities.accelerators)
    changed = replace(node, capabilities=replace(node.capabilities, accelerators=devices))
    if changed == node:
        return state, ()
    event = event_of(
        state, "node.changed", registry.what_changed(node, changed), node=node.name, data=(("id", node.id),)
    )
    return replace(state, nodes={**state.nodes, node.id: changed}), (event,)


def _release(state: ClusterState, job: Job, replica: Replica, assignment: Assignment) -> Applied:
    freed = _with_replica(job, replace(replica, assignment=None))
    return _finish(state, freed, (_released_event(state, job, assignment),))


def _released_event(state: ClusterState, job: Job, assignment: Assignment) -> Event:
    index = assignment.replica.index
    return event_of(
        state,
        "replica.released",
        f"nothing of replica {index} of {job.name} is left on {_node_name(state, assignment.node)}; "
        "what it held is free",
        job=job.id,
        replica=index,
        node=_node_name(state, assignment.node),
        data=(("attempt", str(assignment.attempt)),),
    )


def _finish(state: ClusterState, job: Job, events: tuple[Event, ...]) -> Applied:
    """The changed job put back, and ended if it shall end and holds nothing any more."""
    if job.stopping is not None and all(replica.assignment is None for replica in job.replicas):
        restarts = sum(replica.outcome.restarts for replica in job.replicas if replica.outcome is not None)
        job = replace(job, outcome=replace(job.stopping, restarts=restarts), ended_at_utc=state.time_utc)
        assert job.outcome is not None
        events += (
            event_of(
                state,
                "job.ended",
                f"{job.name} {job.outcome.result}: {_told(job.stopping or job.outcome)}",
                job=job.id,
                data=(("result", job.outcome.result), ("reason", job.outcome.reason.code)),
            ),
        )
    return Applied(state=_with_job(state, job), result=Accepted(job=job.id, name=job.name), events=events)


def _forget_jobs(state: ClusterState, command: ForgetJobs) -> Applied:
    """Those of the named that are there, and have ended or expired; a live job is never forgotten (P1)."""
    gone = {id for id in command.jobs if id in state.jobs and not state.jobs[id].is_live}
    answers = {key for key in command.answers if key in state.answers}
    tokens = {
        id
        for id in command.join_tokens
        if id in state.join_tokens and state.join_tokens[id].expires_at_utc <= state.time_utc
    }
    if not gone and not answers and not tokens:
        return rejected(state, "refused", "none of these is an ended job, a kept answer or an expired join token")
    kept = replace(
        state,
        jobs={id: job for id, job in state.jobs.items() if id not in gone},
        answers={key: answer for key, answer in state.answers.items() if key not in answers},
        join_tokens={id: token for id, token in state.join_tokens.items() if id not in tokens},
    )
    events = (
        (event_of(kept, "jobs.forgotten", f"{counted(len(gone), 'ended job')} past the keeping time forgotten"),)
        if gone
        else ()
    )
    return Applied(state=kept, result=Accepted(), events=events)


# --- parts --------------------------------------------------------------------------------------------------------


def _no_such_job(state: ClusterState, job: JobId) -> Applied:
    return Applied(state=state, result=_unknown_job(job))


def _unknown_job(job: JobId) -> Rejected:
    return Rejected(code="not_found", message=f"there is no job {job}", hint="see gpulayer job list")


def _not_that_attempt(state: ClusterState, job: Job, replica: Replica, attempt: int) -> Applied:
    if replica.attempts == attempt > 0:
        now = f"waits again after attempt {attempt}"
    elif replica.attempts:
        now = f"is at attempt {replica.attempts}, not at attempt {attempt}"
    else:
        now = f"is not placed yet, so not at attempt {attempt}"
    return rejected(state, "refused", f"replica {replica.index} of {job.name} {now}")


def _find(state: ClusterState, job_id: JobId, index: int) -> tuple[Job, Replica] | Rejected:
    job = state.jobs.get(job_id)
    if job is None:
        return _unknown_job(job_id)
    if not 0 <= index < len(job.replicas):
        return Rejected(code="not_found", message=f"job {job.name} has no replica {index}")
    return job, job.replicas[index]


def _with_job(state: ClusterState, job: Job) -> ClusterState:
    return replace(state, jobs={**state.jobs, job.id: job})


def _with_replica(job: Job, replica: Replica) -> Job:
    return replace(job, replicas=(*job.replicas[: replica.index], replica, *job.replicas[replica.index + 1 :]))


def _node_name(state: ClusterState, node: NodeId) -> str:
    known = state.nodes.get(node)
    return known.name if known else node


def _told_of_replica(index: int, outcome: Outcome) -> str:
    return f"replica {index} ended: {_told(outcome)}"


def _told(outcome: Outcome) -> str:
    """An outcome in words: `exit code 3 after 3 restarts`."""
    text = outcome.reason.text or outcome.reason.code
    if not outcome.reason.text and outcome.exit is not None:
        if outcome.exit.code is not None:
            text = f"exit code {outcome.exit.code}"
        elif outcome.exit.signal is not None:
            text = f"signal {outcome.exit.signal}"
    # Whoever wrote the reason may have counted already.
    if outcome.restarts and "restart" not in text:
        text += f" after {counted(outcome.restarts, 'restart')}"
    return text


def _numbered(events: tuple[Event, ...], index: int) -> tuple[Event, ...]:
    """Events with their place in the feed; more than there is room for become one that says how many."""
    if len(events) > EVENTS_PER_ENTRY_MAX:
        kept = events[: EVENTS_PER_ENTRY_MAX - 1]
        left = len(events) - len(kept)
        rest = replace(events[-1], kind="events.folded", text=f"and {left} more of the same", replica=None, data=())
        events = (*kept, rest)
    return tuple(replace(event, seq=index * EVENTS_PER_ENTRY_MAX + k) for k, event in enumerate(events))


# --- what must hold -----------------------------------------------------------------------------------------------


def check(state: ClusterState) -> None:
    """Asserts what every state must hold. Not that capacities are kept: a node may have shrunk under its work."""
    for node_id, node in state.nodes.items():
        assert node.id == node_id, f"node {node.id} is kept under {node_id}"
    assert len({node.name for node in state.nodes.values()}) == len(state.nodes), "two nodes share a name"
    live_names = Counter(job.name for job in state.jobs.values() if job.is_live)
    assert all(count == 1 for count in live_names.values()), f"live jobs share a name: {live_names}"
    for job_id, job in state.jobs.items():
        assert job.id == job_id, f"job {job.id} is kept under {job_id}"
        _check_job(job)
    held_by = {
        replica.assignment.node
        for job in state.jobs.values()
        for replica in job.replicas
        if replica.assignment is not None
    }
    assert held_by <= state.nodes.keys(), f"assigned to nodes that are not there: {held_by - state.nodes.keys()}"
    _check_devices(state.jobs)
    trust.check_trust(state)


def _check_job(job: Job) -> None:
    assert len(job.replicas) == job.spec.replicas, f"{job.id}: {len(job.replicas)} of {job.spec.replicas} replicas"
    assert job.name == job.spec.name, f"{job.id}: named {job.name} and {job.spec.name}"
    assert (job.outcome is None) == (job.ended_at_utc is None), f"{job.id}: outcome without an end, or the reverse"
    holds = any(replica.assignment is not None for replica in job.replicas)
    ended = all(replica.outcome is not None for replica in job.replicas)
    if job.outcome is not None:
        assert not holds, f"{job.id} has ended and holds an assignment"
        assert ended, f"{job.id} has ended and a replica of it has not"
        assert job.stopping is not None, f"{job.id} ended without stopping"
    elif job.stopping is not None:
        assert holds, f"{job.id} is stopping, holds nothing and has not ended"
    else:
        assert not ended, f"all replicas of {job.id} have ended and it goes on"
    for index, replica in enumerate(job.replicas):
        where = f"{job.id}.{index}"
        assert replica.index == index, f"{where} says it is {replica.index}"
        assignment = replica.assignment
        if assignment is None:
            assert replica.outcome is not None or job.stopping is None, f"{where} waits while its job is stopping"
            continue
        assert assignment.replica == ReplicaId(job.id, index), f"{where} has the assignment of {assignment.replica}"
        assert assignment.attempt == replica.attempts >= 1, f"{where}: attempt {assignment.attempt}"
        assert assignment.restart_serial == replica.restart_serial, f"{where}: restart serials differ"
        assert 1 <= assignment.revision <= job.revision, f"{where}: revision {assignment.revision}"
        assert replica.last_node == assignment.node, f"{where}: last node {replica.last_node}"
        assert replica.outcome is None or assignment.recalled is None, f"{where} has ended and is recalled"
        if job.stopping is not None and replica.outcome is None:
            assert assignment.withdrawn is not None, f"{where} was not told to stop"


def _check_devices(jobs: Mapping[JobId, Job]) -> None:
    """P3: shares of a device add up to one at most; so a whole one has one holder."""
    held: Counter[tuple[NodeId, str]] = Counter()
    for job in jobs.values():
        for replica in job.replicas:
            if replica.assignment is not None:
                for share in replica.assignment.devices:
                    assert 0 < share.milli <= MILLI, f"{job.id}.{replica.index} holds {share.milli} of {share.uuid}"
                    held[replica.assignment.node, share.uuid] += share.milli
    for (node, uuid), milli in held.items():
        assert milli <= MILLI, f"device {uuid} of {node} is held {milli} times a thousandth"
