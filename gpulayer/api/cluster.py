"""The cluster as a whole: status on one screen, the nodes and what is free on them. Answered by any node."""

from __future__ import annotations

import json
from collections import Counter

import structlog
import trio
from starlette.requests import Request
from starlette.responses import Response

from gpulayer import __version__
from gpulayer.api.forwarding import ask_voter
from gpulayer.api.query import Query
from gpulayer.api.requests import ASKED_BY_PEER, LocalRoute, Moment, answer, moments_of
from gpulayer.core.cluster.resolve import resolve_node
from gpulayer.model.errors import GpulayerError
from gpulayer.wire.http import Json, job_summary, reason_to_json
from gpulayer.wire.nodes import away_to_json, gpu_stock, node_status, nodes_by_state
from gpulayer.wire.peer import RequestHead

log = structlog.get_logger()

PATH = "/v1/status"
# Status is one screen: what is more than this is a matter for the lists.
SHOWN_MAX = 100
# A person waits for it; whoever leads answers within milliseconds, or not at all.
LEADER_SECONDS_MAX = 1.0
# What only the log knows.
_OF_THE_LOG = ("cluster_id", "index", "jobs", "queued", "unhealthy")


async def status(request: Request) -> Response:
    Query(request, ())
    moment = moments_of(request).lately()
    node, stock = moment.node, moment.stock
    if node.is_voter:
        jobs = _jobs_of_log(moment)
    else:
        jobs = await _jobs_elsewhere(moment, may_ask=ASKED_BY_PEER not in request.scope)
    return answer(
        {
            "leader": node.leader_name or None,
            "version": __version__,
            "node": node.node_name,
            "uptime_seconds": round(moment.now_utc - node.started_at_utc, 3),
            "nodes_by_state": nodes_by_state(stock),
            "away": away_to_json(stock),
            "nodes": moment.node_documents,
            "gpus": gpu_stock(stock),
            "warnings": list(node.warnings),
        }
        | jobs
    )


def _jobs_of_log(moment: Moment) -> Json:
    state = moment.state
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
    return {
        "cluster_id": state.cluster_id,
        "index": state.index,
        "jobs": dict(sorted(by_state.items())),
        "queued": queued[:SHOWN_MAX],
        "unhealthy": unhealthy[:SHOWN_MAX],
        "log_unknown": None,
    }


async def _jobs_elsewhere(moment: Moment, *, may_ask: bool) -> Json:
    """By the leader's word where it answers in time; else what runs by the nodes' records, and why there is no more."""
    why = "no node that is asked leads"
    if may_ask:
        head = RequestHead(method="GET", path=PATH, query="", headers=(), role="node", body=b"")
        try:
            with trio.fail_after(LEADER_SECONDS_MAX):
                told = json.loads(await ask_voter(moment.node, head))
            return {key: told[key] for key in _OF_THE_LOG} | {"log_unknown": None}
        except trio.TooSlowError:
            why = f"the leader has not answered for {LEADER_SECONDS_MAX:g}s"
        except GpulayerError as error:
            why = error.message
        except (ValueError, KeyError, TypeError) as error:
            why = "the leader's answer is not understood here"
            log.warning("status.answer_not_understood", reason=repr(error))
    return {
        "cluster_id": moment.state.cluster_id,
        "index": moment.state.index,
        "jobs": _jobs_of_records(moment),
        "queued": [],
        "unhealthy": [],
        "log_unknown": why,
    }


def _jobs_of_records(moment: Moment) -> dict[str, int]:
    """Jobs that nodes have replicas of. How many replicas a job should have is only in the log: it runs where all that
    are known do, and a batch runs once it was started."""
    is_well: dict[str, list[bool]] = {}
    for seen in moment.table.nodes.values():
        for attempt, said in seen.replicas.items():
            status = said.status
            runs = status.state == "ready" or (said.kind == "batch" and status.pid is not None)
            is_well.setdefault(attempt.replica.job, []).append(runs and seen.is_verified)
    counts = Counter("running" if all(each) else "degraded" if any(each) else "starting" for each in is_well.values())
    return dict(sorted(counts.items()))


async def nodes(request: Request) -> Response:
    Query(request, ())
    return answer(moments_of(request).lately().node_documents)


async def node(request: Request) -> Response:
    Query(request, ())
    stock = {each.node.id: each for each in moments_of(request).lately().stock}
    names = {each.node.id: each.node.name for each in stock.values()}
    return answer(node_status(stock[resolve_node(names, request.path_params["node"])]))


ROUTES = [
    LocalRoute(PATH, status, methods=["GET"]),
    LocalRoute("/v1/nodes", nodes, methods=["GET"]),
    LocalRoute("/v1/nodes/{node}", node, methods=["GET"]),
]
