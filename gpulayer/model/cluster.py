"""ClusterState: everything agreed, one frozen value with its log index. Changed only by core/cluster's apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpulayer.model.ids import JobId, NodeId, TokenId
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Node
from gpulayer.model.replica import Assignment, Outcome, Reason
from gpulayer.model.trust import Authority, JoinToken, KeyRing

Role = Literal["admin", "submit", "read"]
ROLES: tuple[str, ...] = ("admin", "submit", "read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of a job as the log knows it: waiting (no assignment, no outcome), assigned, or ended."""

    index: int
    attempts: int = 0
    """Attempts made so far; the next one is this + 1."""
    assignment: Assignment | None = None
    outcome: Outcome | None = None
    """Ended for good. With an assignment still here its capacity is not released yet."""
    restart_serial: int = 0
    last_node: NodeId | None = None
    """Where its newest attempt was placed; still known after the release, for its logs are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: JobId
    name: str
    revision: int
    spec: JobSpec
    submitted_at_utc: float
    submitted_at_index: int
    replicas: tuple[Replica, ...]
    stopping: Outcome | None = None
    """Set once the job shall end: what its outcome will be when every replica is released."""
    outcome: Outcome | None = None
    ended_at_utc: float | None = None

    @property
    def is_live(self) -> bool:
        return self.outcome is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An API token; the secret itself is known only to whoever was given it."""

    id: TokenId
    role: Role
    digest: str
    """sha256 of the secret, hex. The secret has 256 bits of chance, so a slow hash would add nothing."""
    label: str = ""
    created_at_utc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedAnswer:
    """The first answer given under an Idempotency-Key, and the digest of what was asked."""

    at_utc: float
    request_digest: str
    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    cluster_id: str = ""
    index: int = 0
    term: int = 0
    time_utc: float = 0.0
    """Cluster time: the highest committed stamp."""
    nodes: Mapping[NodeId, Node] = field(default_factory=dict)
    jobs: Mapping[JobId, Job] = field(default_factory=dict)
    tokens: Mapping[TokenId, Token] = field(default_factory=dict)
    answers: Mapping[str, KeyedAnswer] = field(default_factory=dict)
    authority: Authority | None = None
    """None: a log from before nodes could join; the first start founds one."""
    key_ring: KeyRing = field(default_factory=KeyRing)
    join_tokens: Mapping[TokenId, JoinToken] = field(default_factory=dict)
    generation: int = 1
    """cluster_generation: rises only when the cluster is recovered by hand."""
    planned_at: int = 0
    """`based_on` of the newest plan that was applied: how a leader knows that its plan is through."""

    def live_job_named(self, name: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.is_live and job.name == name), None)

    def assignments(self, node: NodeId) -> list[Assignment]:
        return [
            replica.assignment
            for job in self.jobs.values()
            for replica in job.replicas
            if replica.assignment is not None and replica.assignment.node == node
        ]


__all__ = ["ROLES", "ClusterState", "Job", "KeyedAnswer", "Reason", "Replica", "Role", "Token"]
