"""Jobs as the nodes' records tell of them: what a node knows without the log.

No more than names, ids and the replicas that nodes have: what waits, or has ended, is in no record. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import JobId
from gpulayer.model.record import ReplicaRecord
from gpulayer.model.seen import NodeSeen, Table

CANDIDATES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownReplica:
    """Its newest attempt that a record tells of."""

    attempt: int
    node: NodeSeen
    said: ReplicaRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    id: JobId
    name: str
    replicas: Mapping[int, KnownReplica] = field(default_factory=dict)
    """By index; those that no node tells of are left out."""

    @property
    def newest_start_utc(self) -> float:
        return max((replica.said.status.started_at_utc or 0.0 for replica in self.replicas.values()), default=0.0)

    @property
    def is_verified(self) -> bool:
        return any(replica.node.is_verified for replica in self.replicas.values())


def known_jobs(table: Table) -> dict[JobId, KnownJob]:
    names: dict[JobId, str] = {}
    found: dict[JobId, dict[int, KnownReplica]] = {}
    for seen in table.nodes.values():
        for attempt, said in seen.replicas.items():
            job, index = attempt.replica.job, attempt.replica.index
            names[job] = said.job_name
            replicas = found.setdefault(job, {})
            known = replicas.get(index)
            if known is None or known.attempt < attempt.attempt:
                replicas[index] = KnownReplica(attempt=attempt.attempt, node=seen, said=said)
    return {job: KnownJob(id=job, name=names[job], replicas=replicas) for job, replicas in found.items()}


def resolve_known_job(jobs: Mapping[JobId, KnownJob], text: str) -> KnownJob | None:
    """As core/cluster/resolve.py does with the log: a name, then an id, then a prefix of either; None where no record
    has it. Of jobs of one name, of which the log has one that lives, the one whose nodes are there and that started
    last. InvalidRequest names the candidates of an ambiguous prefix."""
    if not text:
        return None
    named = [job for job in jobs.values() if job.name == text]
    if named:
        return max(named, key=lambda job: (job.is_verified, job.newest_start_utc, job.id))
    by_id = jobs.get(JobId(text))
    if by_id is not None:
        return by_id
    begun = sorted(
        (job for job in jobs.values() if job.id.startswith(text) or job.name.startswith(text)),
        key=lambda job: (job.name, job.id),
    )
    if len(begun) > 1:
        more = len(begun) - CANDIDATES_SHOWN
        shown = ", ".join(f"{job.name} ({job.id})" for job in begun[:CANDIDATES_SHOWN])
        raise InvalidRequest(
            f"{text!r} is the beginning of {len(begun)} jobs: {shown}" + (f" and {more} more" if more > 0 else ""),
            hint="give more of the name or id",
        )
    return begun[0] if begun else None
