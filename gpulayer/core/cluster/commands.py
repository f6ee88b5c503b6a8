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
from gpulayer.model.trust import Authority, GossipKey


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
class FoundTrust:
    """Once, by the first voter: the cluster's CA and its first gossip key."""

    authority: Authority
    key: GossipKey


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinNode:
    """A host shows a join token and becomes a node; one use of the token is spent in the same entry.

    Again for a node that is known, with a token that has uses left: it is the same node (its certificate was lost).
    `name_is_derived`: a name in use gets a suffix instead of a refusal. Answered by the name it has.
    `key_digest`: of the public key that it wants certified. The same node with the same key may ask again with a token
    that it has spent, and no further use is spent: an answer that was lost on its way costs nobody a new token."""

    node: NodeId
    name: str
    name_is_derived: bool
    advertise: str
    capabilities: Capabilities
    token_digest: str
    key_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNode:
    """It left, or a person removed it: nothing of it is in the registry any more. Refused while it has assignments."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateJoinToken:
    token: TokenId
    digest: str
    uses: int
    expires_at_utc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallKey:
    """First step of a rotation: every node shall be able to open what this key seals; nobody seals with it yet."""

    key: GossipKey


@dataclass(frozen=True, slots=True, kw_only=True)
class UseKey:
    """Second step, once every live member has it: seal with it."""

    key_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireKey:
    """Last step: an old key opens nothing any more."""

    key_id: int


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
class WithdrawUnaccepted:
    """A node has said nothing of an order for too long. It shall not begin with it any more: if it has not, it refuses
    it (ReplicaRefused) and the replica waits again; if it has, it says so (ReplicaAccepted) and goes on."""

    job: JobId
    replica: int
    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAccepted:
    """The node has begun with the attempt: a WithdrawUnaccepted of it is void."""

    job: JobId
    replica: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJobs:
    """Ended jobs, old idempotency answers and expired join tokens that are past their keeping time."""

    jobs: tuple[JobId, ...] = ()
    answers: tuple[str, ...] = ()
    join_tokens: tuple[TokenId, ...] = ()


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
    | FoundTrust
    | JoinNode
    | RemoveNode
    | CreateJoinToken
    | InstallKey
    | UseKey
    | RetireKey
    | SubmitJob
    | StopJob
    | RestartReplicas
    | CommitPlan
    | ReplicaEnded
    | ReplicaReleased
    | ReplicaRefused
    | WithdrawUnaccepted
    | ReplicaAccepted
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
