"""Small words to make states with, and random histories that are half sense and half nonsense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from gpulayer.core.cluster.apply import Accepted, Applied, apply, check
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
from gpulayer.core.cluster.trust import key_id
from gpulayer.core.leader import as_command
from gpulayer.core.placement.plan import plan
from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId, TokenId
from gpulayer.model.job import JobSpec, Requirements
from gpulayer.model.node import VENDOR_OF_KIND, Accelerator, Capabilities
from gpulayer.model.replica import DeviceShare, Exit, Outcome, Reason
from gpulayer.model.trust import Authority, GossipKey

GIB = 1024
CANCELLED = Reason(code="cancelled", text="cancelled by a person")


def gpu(
    uuid: str,
    *,
    model: str = "A100",
    gib: int = 80,
    kind: str = "cuda",
    unhealthy: str = "",
    foreign_milli: int = 0,
    foreign: str = "pid 7 (python of user bob) holds 20GiB",
    parent: str = "",
    index: int | None = None,
) -> Accelerator:
    return Accelerator(
        uuid=uuid,
        kind=kind,
        vendor=VENDOR_OF_KIND[kind],
        model=model,
        memory_mib=gib * GIB,
        unhealthy=unhealthy,
        foreign=foreign if foreign_milli else "",
        foreign_milli=foreign_milli,
        parent=parent,
        index=index,
    )


def capabilities(*gpus: Accelerator, cpus: int = 16, gib: int = 64, **labels: str) -> Capabilities:
    return Capabilities(
        accelerators=gpus, cpus_milli=cpus * 1000, memory_mib=gib * GIB, labels=tuple(sorted(labels.items()))
    )


def admit(name: str, *gpus: Accelerator, **more: Any) -> AdmitNode:
    return AdmitNode(
        node=NodeId(f"n-{name}"), name=name, advertise="127.0.0.1", capabilities=capabilities(*gpus, **more)
    )


def service(name: str = "web", *, replicas: int = 1, gpus: float = 0, **more: Any) -> JobSpec:
    return _spec("service", name, replicas, gpus, more)


def batch(name: str = "train", *, replicas: int = 1, gpus: float = 0, **more: Any) -> JobSpec:
    return _spec("batch", name, replicas, gpus, {"restart": "never", **more})


def _spec(kind: Any, name: str, replicas: int, gpus: float, more: dict[str, Any]) -> JobSpec:
    fields = set(Requirements.__dataclass_fields__)
    needs = {key: more.pop(key) for key in list(more) if key in fields}
    requirements = Requirements(gpus_milli=round(gpus * 1000), **needs)
    return JobSpec(kind=kind, name=name, argv=("/bin/true",), replicas=replicas, requirements=requirements, **more)


def submit(spec: JobSpec, job: str | None = None, **more: Any) -> SubmitJob:
    return SubmitJob(job=JobId(job or f"j-{spec.name}"), spec=spec, **more)


def ended(
    outcome: Outcome, *, job: str = "j-web", replica: int = 0, attempt: int = 1, released: bool = True
) -> Command:
    return ReplicaEnded(job=JobId(job), replica=replica, attempt=attempt, outcome=outcome, released=released)


def refused(
    *observed: Accelerator, job: str = "j-web", replica: int = 0, attempt: int = 1, reason: Reason | None = None
) -> ReplicaRefused:
    reason = reason or Reason(code="device_unavailable", text="g0 is used by others: pid 7")
    return ReplicaRefused(job=JobId(job), replica=replica, attempt=attempt, reason=reason, observed=observed)


def succeeded() -> Outcome:
    return Outcome(result="succeeded", reason=Reason(code="exit_zero"), exit=Exit(run=1, code=0))


def failed(code: int = 3, *, restarts: int = 0) -> Outcome:
    return Outcome(result="failed", reason=Reason(code="exit_nonzero"), exit=Exit(run=1, code=code), restarts=restarts)


class Cluster:
    """A state that commands are applied to, checked after each."""

    def __init__(self, *commands: Command) -> None:
        self.state = ClusterState()
        self.applied: list[Applied] = []
        self.do(*commands)

    def do(self, *commands: Command, seconds_later: float = 1.0) -> Applied:
        """Apply them and give what came of the last one."""
        for command in commands:
            entry = LogEntry(
                index=self.state.index + 1, term=1, at_utc=self.state.time_utc + seconds_later, command=command
            )
            applied = apply(self.state, entry)
            check(applied.state)
            self.state = applied.state
            self.applied.append(applied)
        return self.applied[-1] if self.applied else Applied(state=self.state, result=Accepted())

    def plan(self) -> Applied:
        """Place what can be placed."""
        return self.do(as_command(plan(self.state, {})))

    def job(self, job: str = "j-web") -> Job:
        return self.state.jobs[JobId(job)]

    @property
    def kinds(self) -> list[str]:
        """Of the events of the last command."""
        return [event.kind for event in self.applied[-1].events]


def shuffled(state: ClusterState, seed: int) -> ClusterState:
    """The same state, every mapping filled in another order."""
    rng = Random(seed)

    def mixed(mapping: Any) -> Any:
        items = list(mapping.items())
        rng.shuffle(items)
        return dict(items)

    return replace(
        state,
        nodes=mixed(state.nodes),
        jobs=mixed(state.jobs),
        tokens=mixed(state.tokens),
        join_tokens=mixed(state.join_tokens),
        answers=mixed(state.answers),
    )


# --- random histories: an act is a function of the state as it is, so that most of it makes sense ------------------

Act = Callable[[ClusterState], Command]

_names = st.sampled_from(["a", "b", "c", "long" + "x" * 59])
_job_ids = st.sampled_from([JobId(f"j-{letter}") for letter in "abcdefgh"])
_shares = st.sampled_from([0, 0, 250, 500, 1000, 1000, 2000])
_small = st.integers(-1, 3)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    gpus_milli = draw(_shares)
    requirements = Requirements(
        gpus_milli=gpus_milli,
        gpu_models=draw(st.sampled_from([(), (), ("a*",), ("H100", "a100")])) if gpus_milli else (),
        gpu_memory_mib=draw(st.sampled_from([0, 0, 20 * GIB, 80 * GIB])) if gpus_milli else 0,
        cpus_milli=draw(st.sampled_from([0, 500, 4000])),
        memory_mib=draw(st.sampled_from([0, 16 * GIB])),
        labels=draw(st.sampled_from([(), (), (), (("zone", "east"),)])),
    )
    kind = draw(st.sampled_from(["service", "batch"]))
    return JobSpec(
        kind=kind,  # type: ignore[arg-type]
        name=draw(_names),
        argv=("/bin/true",),
        replicas=draw(st.integers(1, 3)),
        requirements=requirements,
        restart="always" if kind == "service" else "never",
        spread=draw(st.sampled_from(["node", "any"])),
        priority=draw(st.sampled_from([10, 50, 90])),
        on_replica_end=draw(st.sampled_from(["stop", "keep"])),
    )


outcomes = st.one_of(
    st.builds(succeeded),
    st.builds(failed, st.integers(1, 3), restarts=st.integers(0, 2)),
    st.just(Outcome(result="cancelled", reason=CANCELLED)),
    st.just(Outcome(result="lost", reason=Reason(code="interrupted"))),
)
gpus = st.lists(
    st.builds(
        gpu,
        st.sampled_from(["g0", "g1", "g2", "g3"]),
        model=st.sampled_from(["A100", "H100", "T4"]),
        gib=st.sampled_from([16, 24, 80]),
        kind=st.sampled_from(["cuda", "cuda", "rocm", "cpu"]),
        unhealthy=st.sampled_from(["", "", "", "too hot"]),
        foreign_milli=st.sampled_from([0, 0, 0, 300, 1000]),
        parent=st.sampled_from(["", "", "", "g0", "g1"]),
    ),
    max_size=4,
    unique_by=lambda device: device.uuid,
)


@st.composite
def admissions(draw: st.DrawFn, number: int | None = None) -> AdmitNode:
    """Of one of three nodes, now and then under the name of another."""
    if number is None:
        number = draw(st.integers(1, 3))
    name = draw(st.sampled_from([f"n{number}", f"n{number}", f"n{number}", "n1"]))
    labels = draw(st.sampled_from([{}, {"zone": "east"}]))
    return replace(admit(name, *draw(gpus), cpus=draw(st.integers(0, 16)), **labels), node=NodeId(f"n-{number}"))


def _placed(state: ClusterState, seed: int) -> AttemptId | None:
    """One of those that have an assignment."""
    ids = sorted(
        replica.assignment.id
        for job in state.jobs.values()
        for replica in job.replicas
        if replica.assignment is not None
    )
    return ids[seed % len(ids)] if ids else None


def _ends_something(seed: int, outcome: Outcome, released: bool) -> Act:
    def act(state: ClusterState) -> Command:
        found = _placed(state, seed)
        if found is None:
            return ended(outcome, job="j-a")
        replica, attempt = found.replica, found.attempt
        if seed % 3 == 0:
            return ReplicaReleased(job=replica.job, replica=replica.index, attempt=attempt)
        return ReplicaEnded(job=replica.job, replica=replica.index, attempt=attempt, outcome=outcome, released=released)

    return act


def _refuses_something(seed: int, observed: list[Accelerator]) -> Act:
    def act(state: ClusterState) -> Command:
        found = _placed(state, seed)
        if found is None:
            return refused(*observed, job="j-a")
        return refused(
            *observed, job=found.replica.job, replica=found.replica.index, attempt=found.attempt + (seed % 7 == 0)
        )

    return act


def _recalls_something(seed: int, accepts: bool) -> Act:
    def act(state: ClusterState) -> Command:
        found = _placed(state, seed) or AttemptId(ReplicaId(JobId("j-a"), 0), 1)
        job, index = found.replica.job, found.replica.index
        if accepts:
            return ReplicaAccepted(job=job, replica=index, attempt=found.attempt)
        reason = Reason(code="no_answer", text="its node says nothing")
        return WithdrawUnaccepted(job=job, replica=index, attempt=found.attempt, reason=reason)

    return act


def _always(command: Command) -> Act:
    return lambda _: command


def _plans(state: ClusterState) -> Command:
    return as_command(plan(state, {}))


_nonsense: st.SearchStrategy[Command] = st.one_of(
    st.builds(
        CommitPlan,
        based_on=st.integers(-1, 20),
        placements=st.lists(
            st.builds(
                Placement,
                job=_job_ids,
                revision=st.integers(0, 2),
                replica=_small,
                attempt=_small,
                node=st.sampled_from([NodeId("n-1"), NodeId("n-2"), NodeId("n-9")]),
                devices=st.lists(
                    st.builds(
                        DeviceShare,
                        uuid=st.sampled_from(["g0", "g1", "g9"]),
                        milli=st.sampled_from([-5, 0, 500, 1000, 2000]),
                    ),
                    max_size=2,
                ).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(ReplicaEnded, job=_job_ids, replica=_small, attempt=_small, outcome=outcomes, released=st.booleans()),
    st.builds(ReplicaReleased, job=_job_ids, replica=_small, attempt=_small),
    st.builds(
        ReplicaRefused,
        job=_job_ids,
        replica=_small,
        attempt=_small,
        reason=st.just(Reason(code="device_unavailable")),
        observed=gpus.map(tuple),
    ),
    st.builds(SubmitJob, job=st.sampled_from([JobId(""), JobId("J.1")]), spec=specs()),
    admissions().map(lambda command: replace(command, capabilities=capabilities(gpu("g0"), gpu("g0")))),
    st.builds(CreateCluster, cluster_id=st.sampled_from(["", "c-1"])),
    st.builds(RevokeToken, token=st.sampled_from([TokenId("t-1"), TokenId("t-2")])),
)

_ends = st.builds(_ends_something, st.integers(0, 100), outcomes, st.booleans())
_refusals = st.builds(_refuses_something, st.integers(0, 100), gpus)
_recalls = st.builds(_recalls_something, st.integers(0, 100), st.booleans())
_keys = st.sampled_from([GossipKey(id=key_id(letter * 32), secret=letter * 32) for letter in (b"a", b"b", b"c")])
_join_token_ids = st.sampled_from([TokenId("t-1"), TokenId("t-2")])
_trust: st.SearchStrategy[Command] = st.one_of(
    st.builds(FoundTrust, authority=st.just(Authority(certificate_pem="c", private_key_pem="k")), key=_keys),
    st.builds(InstallKey, key=_keys),
    st.builds(UseKey, key_id=_keys.map(lambda key: key.id)),
    st.builds(RetireKey, key_id=_keys.map(lambda key: key.id)),
    st.builds(
        CreateJoinToken,
        token=_join_token_ids,
        digest=st.sampled_from(["d1", "d2"]),
        uses=st.integers(0, 3),
        expires_at_utc=st.sampled_from([3.0, 10.0, 1000.0]),
    ),
    st.builds(
        lambda node, derived, digest, key: JoinNode(
            node=node.node,
            name=node.name,
            name_is_derived=derived,
            advertise=node.advertise,
            capabilities=node.capabilities,
            token_digest=digest,
            key_digest=key,
        ),
        admissions(),
        st.booleans(),
        st.sampled_from(["d1", "d2", "d3"]),
        st.sampled_from(["", "k1", "k2"]),
    ),
    st.builds(RemoveNode, node=st.sampled_from([NodeId("n-1"), NodeId("n-2"), NodeId("n-9")])),
    st.builds(ForgetJobs, join_tokens=st.lists(_join_token_ids, max_size=2).map(tuple)),
)
_others: st.SearchStrategy[Act] = st.one_of(
    admissions().map(_always),
    st.builds(StopJob, job=_job_ids, reason=st.just(CANCELLED)).map(_always),
    st.builds(RestartReplicas, job=_job_ids, replicas=st.lists(_small, max_size=3).map(tuple)).map(_always),
    st.builds(
        ForgetJobs,
        jobs=st.lists(_job_ids, max_size=2).map(tuple),
        answers=st.lists(st.sampled_from(["k1", "k2"]), max_size=1).map(tuple),
    ).map(_always),
    st.builds(
        CreateToken,
        token=st.sampled_from([TokenId("t-1"), TokenId("")]),
        role=st.sampled_from(["admin", "emperor"]),
        digest=st.sampled_from(["d", ""]),
    ).map(_always),
    _nonsense.map(_always),
)
_submits = st.builds(
    SubmitJob,
    job=_job_ids,
    spec=specs(),
    name_is_derived=st.booleans(),
    idempotency_key=st.sampled_from(["", "", "k1", "k2"]),
    request_digest=st.sampled_from(["d1", "d2"]),
).map(_always)
# What moves work on is the most common: histories of refusals only would prove little. (Not one_of, which takes equal
# branches for one.)
acts: st.SearchStrategy[Act] = st.sampled_from([*"eeeeepppprrcsoot"]).flatmap(
    lambda letter: {
        "e": _ends,
        "p": st.just(_plans),
        "r": _refusals,
        "c": _recalls,
        "s": _submits,
        "o": _others,
        "t": _trust.map(_always),
    }[letter]
)


@st.composite
def histories(draw: st.DrawFn) -> list[Act]:
    """Nodes and jobs first, so that there is something to go wrong with; then whatever comes."""
    opening: list[Command] = [CreateCluster(cluster_id="c-1")]
    opening += [draw(admissions(number)) for number in range(1, draw(st.integers(1, 3)) + 1)]
    opening += [
        SubmitJob(job=JobId(f"j-{letter}"), spec=draw(specs()), name_is_derived=True)
        for letter in "abc"[: draw(st.integers(1, 3))]
    ]
    return [*map(_always, opening), _plans, *draw(st.lists(acts, min_size=3, max_size=25))]


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    """A state that a random history leads to."""
    cluster = Cluster()
    for act in draw(histories()):
        cluster.do(act(cluster.state))
    return cluster.state
