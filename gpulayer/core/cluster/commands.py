"""The log's vocabulary: what can be agreed. Each is wire format: a new meaning is a new command, never a changed one.

Whoever proposes a command has looked at the state first; apply looks again, because the state may have moved on since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpulayer.model.cluster import Role
from gpulayer.model.ids import JobId, NodeId, TokenId
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Accelerator, Capabilities
from gpulayer.model.replica import DeviceShare, Outcome, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCluster:
    """The first entry of every log."""

    cluster_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitNode:
    """A node is known from here on; again for a node that is known: its name, address or capabilities changed."""

    node: NodeId
    name: str
    advertise: str
    capabilities: Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitJob:
    """`name_is_derived`: a name in use gets a suffix instead of a refusal."""

    job: JobId
    spec: JobSpec
    name_is_derived: bool = False
    idempotency_key: str = ""
    request_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """Cancel: every replica is stopped, the job ends `cancelled`."""

    job: JobId
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartReplicas:
    """New runs for these replicas, where they are. Does not count as a restart of the policy."""

    job: JobId
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One choice of a plan."""

    job: JobId
    revision: int
    replica: int
    attempt: int
    node: NodeId
    devices: tuple[DeviceShare, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPlan:
    """A plan made from the state at `based_on`; apply checks each placement again and drops what no longer holds."""

    based_on: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnded:
    """A node reports that an attempt ended for good. `released`: no process is left and its devices are clear."""

    job: JobId
    replica: int
    attempt: int
    outcome: Outcome
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReleased:
    """The rest of a ReplicaEnded that was not released yet."""

    job: JobId
    replica: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRefused:
    """A node cannot carry out an order, and has executed nothing of the attempt's newest run: the replica waits again.

    `observed`: the devices that were in the way, as the node sees them now. They are part of the same entry, so that
    no plan between the two can choose them again."""

    job: JobId
    replica: int
    attempt: int
    reason: Reason
    observed: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJobs:
    """Ended jobs and old idempotency answers that are past their keeping time."""

    jobs: tuple[JobId, ...] = ()
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateToken:
    token: TokenId
    role: Role
    digest: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeToken:
    token: TokenId


Command: TypeAlias = (
    CreateCluster
    | AdmitNode
    | SubmitJob
    | StopJob
    | RestartReplicas
    | CommitPlan
    | ReplicaEnded
    | ReplicaReleased
    | ReplicaRefused
    | ForgetJobs
    | CreateToken
    | RevokeToken
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """What is stored per index. `at_utc` is cluster time, stamped by the leader."""

    index: int
    term: int
    at_utc: float
    command: Command
