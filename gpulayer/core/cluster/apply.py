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
from typing import TypeAlias, assert_never

from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    CommitPlan,
    CreateCluster,
    CreateToken,
    ForgetJobs,
    LogEntry,
    Placement,
    ReplicaEnded,
    ReplicaRefused,
    ReplicaReleased,
    RestartReplicas,
    RevokeToken,
    StopJob,
    SubmitJob,
)
from gpulayer.model.cluster import ROLES, ClusterState, Job, KeyedAnswer, Replica, Token
from gpulayer.model.event import Event
from gpulayer.model.ids import NAME_PATTERN, JobId, NodeId, ReplicaId
from gpulayer.model.job import Requirements
from gpulayer.model.node import Accelerator, Capabilities, Node, excluded_by
from gpulayer.model.replica import Assignment, Outcome, Reason
from gpulayer.model.units import MILLI, format_duration, format_gpus, format_size

# Event.seq is index * 1000 + k: the feed stays ordered by one number, and an entry has room for this many events.
EVENTS_PER_ENTRY_MAX = 1000
NAME_LENGTH_MAX = 63
# One event has a sentence for each of so many devices.
DEVICES_TOLD_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Done, or done before (`replayed`, and every command that says again what is so already)."""

    job: JobId | None = None
    name: str = ""
    replayed: bool = False
    dropped: tuple[Placement, ...] = ()
    """Of a plan: what no longer held, and is back in the queue."""
    skipped: tuple[str, ...] = ()
    """Of a restart: a sentence for each replica that could not be restarted, while others were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Nothing was changed. The fields are those of the error that people see (model/errors.py)."""

    code: str
    message: str
    hint: str = ""


Result: TypeAlias = Accepted | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    state: ClusterState
    result: Result
    events: tuple[Event, ...] = ()


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
            return _create_cluster(state, command)
        case AdmitNode():
            return _admit_node(state, command)
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
        case ForgetJobs():
            return _forget_jobs(state, command)
        case CreateToken():
            return _create_token(state, command)
        case RevokeToken():
            return _revoke_token(state, command)
        case _:
            assert_never(command)


# --- the cluster and its nodes ------------------------------------------------------------------------------------


def _create_cluster(state: ClusterState, command: CreateCluster) -> Applied:
    if state.cluster_id:
        return _rejected(state, "refused", f"this log belongs to cluster {state.cluster_id} already")
    if not command.cluster_id:
        return _rejected(state, "invalid_request", "a cluster needs an id")
    created = replace(state, cluster_id=command.cluster_id)
    event = _event(created, "cluster.created", f"cluster {command.cluster_id} created")
    return Applied(state=created, result=Accepted(), events=(event,))


def _admit_node(state: ClusterState, command: AdmitNode) -> Applied:
    if not NAME_PATTERN.fullmatch(command.name) or not command.node:
        return _rejected(
            state, "invalid_request", f"node name {command.name!r} is not a name", "use 1 to 63 of a-z, 0-9 and -"
        )
    namesake = next((n for n in state.nodes.values() if n.name == command.name and n.id != command.node), None)
    if namesake is not None:
        return _rejected(
            state,
            "refused",
            f"node name {command.name} is in use by {namesake.id}",
            "start this node with another --name",
        )
    wrong = _nonsense_in(command.capabilities)
    if wrong:
        return _rejected(state, "invalid_request", f"node {command.name}: {wrong}", "check its configuration")
    known = state.nodes.get(command.node)
    node = Node(
        id=command.node,
        name=command.name,
        capabilities=command.capabilities,
        advertise=command.advertise,
        admitted_at_utc=known.admitted_at_utc if known else state.time_utc,
        marks=known.marks if known else (),
    )
    if node == known:
        return Applied(state=state, result=Accepted(name=node.name))
    admitted = replace(state, nodes={**state.nodes, node.id: node})
    kind, text = ("node.changed", _what_changed(known, node)) if known else ("node.admitted", _what_it_has(node))
    event = _event(admitted, kind, text, node=node.name, data=(("id", node.id),))
    return Applied(state=admitted, result=Accepted(name=node.name), events=(event,))


def _nonsense_in(capabilities: Capabilities) -> str:
    uuids = Counter(device.uuid for device in capabilities.accelerators)
    twice = sorted(uuid for uuid, count in uuids.items() if count > 1)
    if twice:
        return f"accelerator {twice[0]} is there twice"
    if capabilities.cpus_milli < 0 or capabilities.memory_mib < 0:
        return f"{capabilities.cpus_milli} milli-CPUs and {capabilities.memory_mib} MiB of memory are no amounts"
    return ""


def _what_it_has(node: Node) -> str:
    gpus = len([device for device in node.capabilities.accelerators if device.kind != "cpu"])
    text = f"node {node.name} joined at {node.advertise} with {_count(gpus, 'GPU')}"
    has = node.capabilities
    if has.gpu_detect == "error":
        text += f"; gpu_detect=error: {'; '.join(has.undetected)}"
    return text


def _what_changed(old: Node, new: Node) -> str:
    changes = []
    if old.name != new.name:
        changes.append(f"it was called {old.name}")
    if old.advertise != new.advertise:
        changes.append(f"it is reached at {new.advertise}, was {old.advertise}")
    changes += _what_changed_in_devices(old.capabilities, new.capabilities)
    if not changes:
        changes.append("its CPUs, memory, labels or drivers are others")
    return f"node {new.name} changed: " + "; ".join(changes)


def _what_changed_in_devices(old: Capabilities, new: Capabilities) -> list[str]:
    """What people want to hear of devices: which one, and why. The rest is counted."""
    before = {device.uuid: device for device in old.accelerators}
    after = {device.uuid: device for device in new.accelerators}
    told = []
    if _detection(old) != _detection(new):
        told.append(_detection(new))
    if before.keys() != after.keys():
        told.append(f"it has {_count(len(after), 'accelerator')}, had {len(before)}")
    for uuid, device in sorted(after.items()):
        was = before.get(uuid)
        name = _called(device)
        if device.unhealthy != (was.unhealthy if was is not None else ""):
            told.append(f"{name} is unhealthy: {device.unhealthy}" if device.unhealthy else f"{name} is well again")
        if device.foreign != (was.foreign if was is not None else ""):
            told.append(
                f"{name} is used by others: {device.foreign}" if device.foreign else f"{name} is free of others"
            )
    if not told and old.accelerators != new.accelerators:
        facts = {uuid: _what_changed_in_facts(before[uuid], device) for uuid, device in sorted(after.items())}
        told = [f"{_called(after[uuid])} has {text}" for uuid, text in facts.items() if text]
        told = told or ["facts of its accelerators are others"]
    if len(told) > DEVICES_TOLD_MAX:
        told = [*told[:DEVICES_TOLD_MAX], f"and {len(told) - DEVICES_TOLD_MAX} more"]
    return told


def _called(device: Accelerator) -> str:
    """`GPU-ecdd… (GPU 0, A100)`: the whole UUID, as a log is searched for it."""
    number = f"GPU {device.index}" if device.index is not None else ""
    known_as = ", ".join(word for word in (number, device.model) if word)
    return f"{device.uuid} ({known_as})" if known_as else device.uuid


def _what_changed_in_facts(was: Accelerator, now: Accelerator) -> str:
    """`memory 40GiB, was 80GiB`. Health and who uses it are told otherwise."""
    pairs = [
        ("kind", was.kind, now.kind),
        ("vendor", was.vendor, now.vendor),
        ("model", was.model, now.model),
        ("memory", format_size(was.memory_mib), format_size(now.memory_mib)),
        ("source", was.source, now.source),
        ("number", was.index, now.index),
        ("compute capability", was.compute_capability, now.compute_capability),
        ("PCI address", was.pci_bus_id, now.pci_bus_id),
        ("NUMA node", was.numa_node, now.numa_node),
        ("NVLink to", ", ".join(was.nvlink_peers), ", ".join(now.nvlink_peers)),
        ("parent", was.parent, now.parent),
        ("used by others", format_gpus(was.foreign_milli), format_gpus(now.foreign_milli)),
    ]
    none = (None, "")
    return ", ".join(
        f"{what} {'none' if after in none else after}, was {'none' if before in none else before}"
        for what, before, after in pairs
        if before != after
    )


def _detection(capabilities: Capabilities) -> str:
    why = "; ".join(capabilities.undetected) if capabilities.gpu_detect == "error" else ""
    return f"gpu_detect={capabilities.gpu_detect}" + (f": {why}" if why else "")


# --- jobs ---------------------------------------------------------------------------------------------------------


def _submit_job(state: ClusterState, command: SubmitJob) -> Applied:
    key = command.idempotency_key
    answer = state.answers.get(key) if key else None
    if answer is not None:
        return _replayed(state, command, answer)
    if not NAME_PATTERN.fullmatch(command.job):
        return _rejected(state, "invalid_request", f"{command.job!r} is not a job id")
    if command.job in state.jobs:
        return _rejected(state, "refused", f"job id {command.job} is in use", "submit again")
    namesake = state.live_job_named(command.spec.name)
    if namesake is not None and not command.name_is_derived:
        return _rejected(
            state,
            "refused",
            f"name {namesake.name} is in use by job {namesake.id}",
            f"choose another --name, or end it first: gpulayer job cancel --wait 1m {namesake.id}"
            if namesake.stopping is None
            else f"it is stopping: submit again when gpulayer job wait {namesake.id} returns, or choose another --name",
        )
    name = command.spec.name if namesake is None else _free_name(state, command.spec.name)
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
    event = _event(
        submitted,
        "job.submitted",
        f"{spec.kind} {name} submitted with {_count(spec.replicas, 'replica')}",
        job=job.id,
        data=(("name", name), ("revision", "1")),
    )
    return Applied(state=submitted, result=Accepted(job=job.id, name=name), events=(event,))


def _replayed(state: ClusterState, command: SubmitJob, answer: KeyedAnswer) -> Applied:
    if answer.request_digest != command.request_digest:
        return _rejected(
            state,
            "idempotency_conflict",
            f"Idempotency-Key {command.idempotency_key} was used for another request, which made job {answer.job}",
            "use a new key for a new request",
        )
    first = state.jobs.get(answer.job)
    name = first.name if first else command.spec.name
    return Applied(state=state, result=Accepted(job=answer.job, name=name, replayed=True))


def _free_name(state: ClusterState, wanted: str) -> str:
    taken = {job.name for job in state.jobs.values() if job.is_live}
    number = 2
    while True:
        suffix = f"-{number}"
        name = wanted[: NAME_LENGTH_MAX - len(suffix)] + suffix
        if name not in taken:
            return name
        number += 1


def _stop_job(state: ClusterState, command: StopJob) -> Applied:
    job = state.jobs.get(command.job)
    if job is None:
        return _no_such_job(state, command.job)
    if job.outcome is not None:
        ago = format_duration(max(0.0, state.time_utc - (job.ended_at_utc or 0.0)))
        return _rejected(
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
    event = _event(
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
        return _rejected(state, "refused", "; ".join(skipped[:5]), "only a replica that is placed can be restarted")
    replicas = list(job.replicas)
    for index in chosen:
        replicas[index] = _with_new_serial(replicas[index])
    restarted = replace(job, replicas=tuple(replicas))
    events = tuple(
        _event(
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
        return _rejected(state, "invalid_request", f"a plan based on index {command.based_on} at {state.index}")
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
    return _event(
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
        assignment=None if command.released else assignment,
    )
    job = _with_replica(job, ended)
    events: tuple[Event, ...] = (
        _event(
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
    return _rejected(
        state, "refused", f"replica {replica.index} of {job.name} ended already ({_told(replica.outcome)})"
    )


def _replica_released(state: ClusterState, command: ReplicaReleased) -> Applied:
    found = _find(state, command.job, command.replica)
    if isinstance(found, Rejected):
        return Applied(state=state, result=found)
    job, replica = found
    if command.attempt != replica.attempts or command.attempt == 0:
        return _not_that_attempt(state, job, replica, command.attempt)
    if replica.outcome is None:
        return _rejected(
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
    event = _event(
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
    event = _event(state, "node.changed", _what_changed(node, changed), node=node.name, data=(("id", node.id),))
    return replace(state, nodes={**state.nodes, node.id: changed}), (event,)


def _release(state: ClusterState, job: Job, replica: Replica, assignment: Assignment) -> Applied:
    freed = _with_replica(job, replace(replica, assignment=None))
    return _finish(state, freed, (_released_event(state, job, assignment),))


def _released_event(state: ClusterState, job: Job, assignment: Assignment) -> Event:
    index = assignment.replica.index
    return _event(
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
            _event(
                state,
                "job.ended",
                f"{job.name} {job.outcome.result}: {_told(job.stopping or job.outcome)}",
                job=job.id,
                data=(("result", job.outcome.result), ("reason", job.outcome.reason.code)),
            ),
        )
    return Applied(state=_with_job(state, job), result=Accepted(job=job.id, name=job.name), events=events)


def _forget_jobs(state: ClusterState, command: ForgetJobs) -> Applied:
    """Those of the named that are there and have ended; a live job is never forgotten, whoever asks (P1)."""
    gone = {id for id in command.jobs if id in state.jobs and not state.jobs[id].is_live}
    answers = {key for key in command.answers if key in state.answers}
    if not gone and not answers:
        return _rejected(state, "refused", "none of these is an ended job or a kept answer")
    kept = replace(
        state,
        jobs={id: job for id, job in state.jobs.items() if id not in gone},
        answers={key: answer for key, answer in state.answers.items() if key not in answers},
    )
    events = (
        (_event(kept, "jobs.forgotten", f"{_count(len(gone), 'ended job')} past the keeping time forgotten"),)
        if gone
        else ()
    )
    return Applied(state=kept, result=Accepted(), events=events)


# --- tokens -------------------------------------------------------------------------------------------------------


def _create_token(state: ClusterState, command: CreateToken) -> Applied:
    if command.role not in ROLES:
        return _rejected(state, "invalid_request", f"role {command.role!r} is unknown", "use " + ", ".join(ROLES))
    if not command.token or not command.digest:
        return _rejected(state, "invalid_request", "a token needs an id and a digest")
    if command.token in state.tokens:
        return _rejected(state, "refused", f"token id {command.token} is in use", "create it again")
    token = Token(
        id=command.token,
        role=command.role,
        digest=command.digest,
        label=command.label,
        created_at_utc=state.time_utc,
    )
    created = replace(state, tokens={**state.tokens, token.id: token})
    label = f" ({token.label})" if token.label else ""
    event = _event(created, "token.created", f"token {token.id}{label} with role {token.role} created")
    return Applied(state=created, result=Accepted(), events=(event,))


def _revoke_token(state: ClusterState, command: RevokeToken) -> Applied:
    if command.token not in state.tokens:
        return _rejected(state, "not_found", f"there is no token {command.token}", "see gpulayer token list")
    revoked = replace(state, tokens={id: token for id, token in state.tokens.items() if id != command.token})
    event = _event(revoked, "token.revoked", f"token {command.token} revoked")
    return Applied(state=revoked, result=Accepted(), events=(event,))


# --- parts --------------------------------------------------------------------------------------------------------


def _rejected(state: ClusterState, code: str, message: str, hint: str = "") -> Applied:
    return Applied(state=state, result=Rejected(code=code, message=message, hint=hint))


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
    return _rejected(state, "refused", f"replica {replica.index} of {job.name} {now}")


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
        text += f" after {_count(outcome.restarts, 'restart')}"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _event(
    state: ClusterState,
    kind: str,
    text: str,
    *,
    job: str = "",
    replica: int | None = None,
    node: str = "",
    data: tuple[tuple[str, str], ...] = (),
) -> Event:
    return Event(
        source="log",
        epoch=0,
        seq=0,
        at_utc=state.time_utc,
        kind=kind,
        job=job,
        replica=replica,
        node=node,
        text=text,
        data=data,
    )


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
    _check_devices(state.jobs)


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
