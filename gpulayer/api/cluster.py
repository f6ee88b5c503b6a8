"""The node and the cluster as a whole: status on one screen, the nodes and what is free on them, audit, leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer import __version__
from gpulayer.api.facade import NodeFacade
from gpulayer.api.query import Query
from gpulayer.api.requests import Moment, answer, body_of, moment_of, node_of
from gpulayer.api.streams import KEEPALIVE, KEEPALIVE_SECONDS, Item, Stream
from gpulayer.core.cluster.commands import StopJob
from gpulayer.core.placement.fit import free_of
from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.errors import NotFound, Refused
from gpulayer.model.replica import Reason
from gpulayer.wire.http import Json, gpu_stock, job_summary, node_to_json, parse_leave, reason_to_json

# Status is one screen: what is more than this is a matter for the lists.
SHOWN_MAX = 100


async def status(request: Request) -> Response:
    Query(request, ())
    moment = moment_of(request)
    node, state = moment.node, moment.state
    views = [(job, moment.view(job)) for job in state.jobs.values() if job.is_live]
    views.sort(key=lambda pair: pair[0].submitted_at_index)
    by_state = Counter(view.state for _, view in views)
    by_state.update(job.outcome.result for job in state.jobs.values() if job.outcome is not None)
    queued = [
        {"id": view.id, "name": view.name, "reason": reason_to_json(view.reason)}
        for _, view in views
        if view.state == "waiting"
    ]
    unhealthy = [job_summary(view, job.spec) for job, view in views if view.state not in ("running", "waiting")]
    return answer(
        {
            "cluster_id": state.cluster_id,
            # The one voter leads; a storage failure ends that.
            "leader": node.node_name if not node.not_ready else None,
            "version": __version__,
            "node": node.node_name,
            "uptime_seconds": round(moment.now_utc - node.started_at_utc, 3),
            "index": state.index,
            "nodes": _nodes(moment),
            "gpus": gpu_stock(state, free_of(state)),
            "jobs": dict(sorted(by_state.items())),
            "queued": queued[:SHOWN_MAX],
            "unhealthy": unhealthy[:SHOWN_MAX],
            "warnings": list(node.warnings),
        }
    )


async def nodes(request: Request) -> Response:
    Query(request, ())
    return answer(_nodes(moment_of(request)))


def _nodes(moment: Moment) -> list[Json]:
    free = free_of(moment.state)
    ordered = sorted(moment.state.nodes.values(), key=lambda node: node.name)
    # Whoever answers is alive, and there is no other node yet.
    return [node_to_json(node, moment.state, free[node.id], "alive") for node in ordered]


async def audit(request: Request) -> Response:
    Query(request, ())
    report = await node_of(request).audit()
    return answer(
        {
            "checked_at_utc": report.checked_at_utc,
            "differences": [asdict(difference) for difference in report.differences],
            "replicas_checked": report.replicas_checked,
            "processes_seen": report.processes_seen,
        }
    )


async def leave(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    stop_all = parse_leave(body_of(request))
    live = _live(node.state)
    if live and not stop_all:
        shown = ", ".join(job.name for job in live[:5]) + (" and more" if len(live) > 5 else "")
        raise Refused(
            f"{len(live)} {'job has' if len(live) == 1 else 'jobs have'} not ended ({shown})",
            hint="end them first, or say --stop-all to end them now; a restart of the daemon needs no leave",
        )
    # The first round is here and not in the stream: a log that cannot be written is an answer of its own.
    await _stop_all(node)
    # The end of the daemon would cut the stream that says so.
    return Stream(request, _leave(node), afterwards=node.leave)


async def _leave(node: NodeFacade) -> AsyncIterator[Sequence[Item]]:
    """Stops what lives until nothing is left, also what is submitted meanwhile; then the daemon may go."""
    last_said, said_at = -1, trio.current_time()
    while True:
        seen = node.version_of_view
        await _stop_all(node)
        left = sum(replica.assignment is not None for job in _live(node.state) for replica in job.replicas)
        if not _live(node.state):
            break
        if left != last_said:
            last_said, said_at = left, trio.current_time()
            yield [Item.of({"state": "stopping", "left": left})]
        elif trio.current_time() - said_at >= KEEPALIVE_SECONDS:
            said_at = trio.current_time()
            yield KEEPALIVE
        with trio.move_on_after(KEEPALIVE_SECONDS):
            await node.wait_for_change(seen)
    yield [Item.of({"state": "left"})]


async def _stop_all(node: NodeFacade) -> None:
    why = Reason(code="cancelled", text="its node is leaving the cluster")
    for job in _live(node.state):
        if job.stopping is None:
            with suppress(Refused, NotFound):  # it ended meanwhile
                await node.propose(StopJob(job=job.id, reason=why))


def _live(state: ClusterState) -> list[Job]:
    return [job for job in state.jobs.values() if job.is_live]


ROUTES = [
    Route("/v1/status", status, methods=["GET"]),
    Route("/v1/nodes", nodes, methods=["GET"]),
    Route("/v1/audit", audit, methods=["GET"]),
    Route("/v1/leave", leave, methods=["POST"]),
]
