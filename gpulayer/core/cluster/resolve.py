"""Which job, replica or node somebody means: by name, by id or by an unambiguous prefix of one; JOB.2 is a replica."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.errors import InvalidRequest, NotFound
from gpulayer.model.ids import JobId, NodeId

CANDIDATES_SHOWN = 5
# Names that are looked through for near ones, live jobs first: comparing costs some 20 µs each.
NEAR_NAMES_MAX = 500


def resolve_job(state: ClusterState, text: str) -> Job:
    """The name of a live job, then an id, then the name of ended jobs (the newest of them), then a prefix of an id or
    of a live job's name. InvalidRequest names the candidates of an ambiguous prefix, NotFound names that are near."""
    if not text:
        raise InvalidRequest("no job was named", hint="give a name or an id; see `gpulayer job list`")
    live = state.live_job_named(text)
    if live is not None:
        return live
    by_id = state.jobs.get(JobId(text))
    if by_id is not None:
        return by_id
    ended = [job for job in state.jobs.values() if job.name == text]
    if ended:
        return max(ended, key=lambda job: (job.submitted_at_index, job.id))
    begun = [
        job for job in state.jobs.values() if job.id.startswith(text) or (job.is_live and job.name.startswith(text))
    ]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise InvalidRequest(
            f"{text!r} is the beginning of {len(begun)} jobs: {_candidates(begun)}", hint="give more of the name or id"
        )
    raise NotFound(f"there is no job {text!r}", hint=_near(state, text))


def resolve_replica(state: ClusterState, text: str) -> tuple[Job, int]:
    """`JOB.2` as the job and the index of its replica."""
    job_text, dot, index_text = text.rpartition(".")
    if not dot or not index_text.isascii() or not index_text.isdecimal() or len(index_text) > 6:
        raise InvalidRequest(f"{text!r} is not a replica", hint="write JOB.N, like web.0")
    job, index = resolve_job(state, job_text), int(index_text)
    if index >= len(job.replicas):
        last = len(job.replicas) - 1
        there = "only replica 0" if last == 0 else f"replicas 0 to {last}"
        raise NotFound(f"job {job.name} has no replica {index}", hint=f"it has {there}")
    return job, index


def resolve_job_or_replica(state: ClusterState, text: str) -> tuple[Job, int | None]:
    """`JOB` or `JOB.2`; neither names nor ids contain a dot."""
    if "." in text:
        return resolve_replica(state, text)
    return resolve_job(state, text), None


def resolve_node(names: Mapping[NodeId, str], text: str) -> NodeId:
    """A name, then an id, then a prefix of either. InvalidRequest names the candidates of an ambiguous one, NotFound
    names that are near."""
    if not text:
        raise InvalidRequest("no node was named", hint="give a name or an id; see `gpulayer node list`")
    found = [id for id, name in names.items() if name == text]
    if not found and text in names:
        return NodeId(text)
    found = found or [id for id, name in names.items() if name.startswith(text) or id.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        ordered = sorted(f"{names[id]} ({id})" for id in found)
        more = len(ordered) - CANDIDATES_SHOWN
        shown = ", ".join(ordered[:CANDIDATES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise InvalidRequest(f"{text!r} may be {len(found)} nodes: {shown}", hint="give more of the name, or the id")
    near = get_close_matches(text, sorted(set(names.values()))[:NEAR_NAMES_MAX], n=3, cutoff=0.6)
    raise NotFound(
        f"there is no node {text!r}", hint=f"did you mean {' or '.join(near)}?" if near else "see `gpulayer node list`"
    )


def _candidates(jobs: list[Job]) -> str:
    ordered = sorted(jobs, key=lambda job: (not job.is_live, job.name, job.id))
    shown = ", ".join(f"{job.name} ({job.id})" for job in ordered[:CANDIDATES_SHOWN])
    more = len(ordered) - CANDIDATES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _near(state: ClusterState, text: str) -> str:
    ordered = sorted(state.jobs.values(), key=lambda job: (not job.is_live, -job.submitted_at_index, job.id))
    names = list(dict.fromkeys(job.name for job in ordered[:NEAR_NAMES_MAX]))
    # A job that has ended is mostly not the one that is meant.
    live = list(dict.fromkeys(job.name for job in ordered[:NEAR_NAMES_MAX] if job.is_live))
    near = get_close_matches(text, live, n=3, cutoff=0.6) or get_close_matches(text, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else "see `gpulayer job list`"
