"""Where a job serves, by the word of any node: from the log where it is, else from the nodes' records.

A node that is alive, or only suspected, verifies its endpoints itself, once a second. Those of a node that is away are
listed while this node reaches them, as not verified. While a newer word of a node is announced and not here yet, which
may be that a replica has moved, its endpoints are tried too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from urllib.parse import quote

import trio
from starlette.requests import Request
from starlette.responses import Response

from gpulayer.api.forwarding import ask_voter
from gpulayer.api.query import Query
from gpulayer.api.requests import ASKED_BY_PEER, LocalRoute, Moment, Moments, answer, moments_of
from gpulayer.api.streams import KEEPALIVE, KEEPALIVE_SECONDS, Item, Stream
from gpulayer.core.cluster.known_jobs import known_jobs, resolve_known_job
from gpulayer.core.cluster.resolve import resolve_job
from gpulayer.model.errors import NotFound, Unreachable
from gpulayer.model.ids import JobId
from gpulayer.model.replica import Endpoint
from gpulayer.model.seen import NodeSeen
from gpulayer.wire.http import Json
from gpulayer.wire.peer import RequestHead

# The daemon looks at its own sockets once a second (P5); twice that is a look that did not happen.
VERIFIED_SECONDS_MAX = 2.0
LEADER_SECONDS_MAX = 2.0
# How often a stream looks again at what changes without a word: a node that is away, a job that no record has.
LOOK_SECONDS = 1.0
# Whoever watches looks for a tenth of the time at most, however often something changes.
PAUSE_PER_LOOK = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A ready replica."""

    replica: int
    node: NodeSeen
    endpoint: Endpoint


async def endpoints(request: Request) -> Response:
    query = Query(request, ("watch",))
    moments = moments_of(request)
    job = await _resolve(moments.now(), request.path_params["job"], may_ask=ASKED_BY_PEER not in request.scope)
    if query.flag("watch"):
        return Stream(request, _watch(moments, job))
    return answer(await _documents(moments, moments.now(), job))


async def _watch(moments: Moments, job: JobId) -> AsyncIterator[Sequence[Item]]:
    last: list[tuple[int, str, bool]] | None = None
    said_at = trio.current_time()
    while True:
        began = perf_counter()
        moment = moments.now()
        documents = await _documents(moments, moment, job)
        shown = [(each["replica"], each["endpoint"], each["verified"]) for each in documents]
        if shown != last:
            last, said_at = shown, trio.current_time()
            yield [Item.of(documents)]
        elif trio.current_time() - said_at >= KEEPALIVE_SECONDS:
            said_at = trio.current_time()
            yield KEEPALIVE
        if await _has_ended(moment, job):
            return
        await trio.sleep(min(LOOK_SECONDS, (perf_counter() - began) * PAUSE_PER_LOOK))
        with trio.move_on_after(LOOK_SECONDS):
            await moments.node.wait_for_change(moment.version)


# --- which job --------------------------------------------------------------------------------------------------------


async def _resolve(moment: Moment, text: str, *, may_ask: bool) -> JobId:
    if moment.node.is_voter:
        return resolve_job(moment.state, text).id
    known = resolve_known_job(known_jobs(moment.table), text)
    if known is not None:
        return known.id
    # It may wait, be as new as the last second, or have ended.
    try:
        if not may_ask:
            raise Unreachable("a request is passed on once")
        return JobId((await _ask_leader(moment, text))["id"])
    except Unreachable as error:
        raise Unreachable(
            f"no node here runs a job {text!r}, and whoever leads cannot be asked for it: {error.message}",
            hint="gpulayer node list shows whom this node sees; if the job waits or has ended, only the leader knows",
            code="no_leader",
        ) from error


async def _has_ended(moment: Moment, job: JobId) -> bool:
    if moment.node.is_voter:
        found = moment.state.jobs.get(job)
        return found is None or found.outcome is not None
    if job in known_jobs(moment.table):
        return False
    try:
        return (await _ask_leader(moment, job))["ended_at_utc"] is not None
    except NotFound:
        return True
    except Unreachable:
        return False  # nobody knows


async def _ask_leader(moment: Moment, job: str) -> Json:
    path = f"/v1/jobs/{quote(job, safe='')}"
    head = RequestHead(method="GET", path=path, query="", headers=(), role="node", body=b"")
    try:
        with trio.fail_after(LEADER_SECONDS_MAX):
            told: Json = json.loads(await ask_voter(moment.node, head))
            return told
    except trio.TooSlowError:
        raise Unreachable(f"it has not answered for {LEADER_SECONDS_MAX:g}s") from None
    except ValueError:
        raise Unreachable("its answer is not understood here") from None


# --- where it serves --------------------------------------------------------------------------------------------------


async def _documents(moments: Moments, moment: Moment, job: JobId) -> list[Json]:
    listed = _listed(moment, job)
    doubtful = frozenset(seen.id for seen in moment.table.nodes.values() if not seen.is_up_to_date)
    moments.reach.forget_but(doubtful)
    reached = await moments.reach.reached((each.node.id, each.endpoint) for each in listed if each.node.id in doubtful)
    return [
        _document(moment, each)
        for each in listed
        if each.node.id not in doubtful or (each.node.id, each.endpoint) in reached
    ]


def _listed(moment: Moment, job: JobId) -> list[Listed]:
    """By replica. What was told to stop is not among them: the log says so, and so does a node that was told."""
    if moment.node.is_voter:
        found = moment.state.jobs.get(job)
        if found is None:
            return []
        return [
            Listed(replica=view.index, node=seen, endpoint=view.endpoint)
            for view in moment.view(found).replicas
            if view.endpoint is not None and view.node_id is not None
            if (seen := moment.table.nodes.get(view.node_id)) is not None
        ]
    known = known_jobs(moment.table).get(job)
    if known is None:
        return []
    return [
        Listed(replica=index, node=replica.node, endpoint=replica.said.status.endpoint)
        for index, replica in sorted(known.replicas.items())
        if replica.said.status.state == "ready" and replica.said.status.endpoint is not None
        if replica.node.state != "left"
    ]


def _document(moment: Moment, listed: Listed) -> Json:
    seen = listed.node
    age = moment.node.verified_seconds_ago() if seen.is_self else seen.age_seconds
    return {
        "endpoint": str(listed.endpoint),
        "replica": listed.replica,
        "node": seen.name,
        "verified": age <= VERIFIED_SECONDS_MAX if seen.is_self else seen.is_verified,
        "age_seconds": round(age, 3),
    }


ROUTES = [LocalRoute("/v1/jobs/{job}/endpoints", endpoints, methods=["GET"])]
