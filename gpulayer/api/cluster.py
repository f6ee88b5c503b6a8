"""The node and the cluster as a whole: status on one screen, the nodes and what is free on them."""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer import __version__
from gpulayer.api.query import Query
from gpulayer.api.requests import Moment, answer, moment_of
from gpulayer.core.placement.fit import free_of
from gpulayer.wire.http import Json, gpu_stock, job_summary, node_to_json, reason_to_json

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


ROUTES = [
    Route("/v1/status", status, methods=["GET"]),
    Route("/v1/nodes", nodes, methods=["GET"]),
]
