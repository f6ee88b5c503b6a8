"""Jobs: submit, list, look, watch, cancel, restart, explain. Endpoints and logs have files of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.facade import NodeFacade
from gpulayer.api.owners import Details
from gpulayer.api.query import Query
from gpulayer.api.requests import Moment, Moments, answer, body_of, moment_of, moments_of, node_of
from gpulayer.api.streams import KEEPALIVE, Item, Stream, news_or_none
from gpulayer.core.cluster.commands import RestartReplicas, StopJob, SubmitJob
from gpulayer.core.cluster.hints import beside_explanation, with_hint
from gpulayer.core.cluster.resolve import resolve_job, resolve_job_or_replica
from gpulayer.core.cluster.view import JobView, ReplicaView
from gpulayer.core.placement.plan import ReplicaExplained, explain_job, obstacle
from gpulayer.core.placement.refusal import code_of, explain, summary
from gpulayer.model.cluster import ClusterState, Job, Replica
from gpulayer.model.errors import InvalidRequest, NotFound, Refused
from gpulayer.model.ids import AttemptId, JobId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import Reason
from gpulayer.wire.http import (
    Json,
    checked_idempotency_key,
    devices_to_json,
    job_status,
    job_summary,
    parse_empty,
    parse_restart,
    parse_submit,
    reason_to_json,
    shown,
    spec_to_json,
)

# Of how many replicas a status shows the last lines; each takes a look into its log files.
REPLICAS_WITH_LINES_MAX = 16
# A busy node changes hundreds of times a second, and a look at a job of 10,000 replicas takes 0.1 s: whoever watches
# one looks for a tenth of the time at most. At a job of a few replicas that is a millisecond.
PAUSE_PER_LOOK = 9.0


async def submit(request: Request) -> Response:
    node = node_of(request)
    query = Query(request, ("dry_run",))
    key = _idempotency_key(request)
    asked = parse_submit(body_of(request))
    if query.flag("dry_run"):
        return answer(_dry_run(node, asked.spec))
    command = SubmitJob(
        job=node.new_job_id(),
        spec=asked.spec,
        name_is_derived=asked.name_is_derived,
        idempotency_key=key,
        request_digest=asked.digest if key else "",
    )
    accepted = await node.propose(command)
    job = node.state.jobs.get(accepted.job)
    document = {
        "id": accepted.job,
        "name": accepted.name,
        # A job may be forgotten before the answer to its key is.
        "revision": job.revision if job is not None else 1,
        "replayed": accepted.replayed,
        "warning": _warning(node, asked.spec, accepted.name),
    }
    return answer(document, 200 if accepted.replayed else 201, {"Location": f"/v1/jobs/{accepted.job}"})


def _warning(node: NodeFacade, spec: JobSpec, name: str) -> Json | None:
    """What whoever submits has to hear, since nothing but a person can change it."""
    reason = obstacle(node.observed_state, spec)
    return reason_to_json(with_hint(reason, name) if reason is not None else None)


def _idempotency_key(request: Request) -> str:
    """Empty where there is none."""
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise InvalidRequest("Idempotency-Key is given twice", hint="leave out one of them")
    return checked_idempotency_key(keys[0]) if keys else ""


async def list_jobs(request: Request) -> Response:
    query = Query(request, ("state", "limit", "cursor"))
    wanted = query.one_of("state", ("live", "ended", "all"), "live")
    # Newest first; no two jobs have the same index, so that it says where a page ends.
    before = query.count("cursor", most=2**63)
    limit = query.limit()
    moment = moment_of(request)
    jobs = [
        job
        for job in moment.state.jobs.values()
        if (wanted == "all" or job.is_live == (wanted == "live"))
        and (before is None or job.submitted_at_index < before)
    ]
    jobs.sort(key=lambda job: job.submitted_at_index, reverse=True)
    page = jobs[:limit]
    summaries = [job_summary(moment.view(job), job.spec) for job in page]
    return answer({"jobs": summaries, "next": str(page[-1].submitted_at_index) if len(jobs) > limit else None})


async def get_job(request: Request) -> Response:
    Query(request, ())
    moment = moment_of(request)
    job = resolve_job(moment.state, request.path_params["job"])
    return answer(await _status(moment, job))


async def watch_job(request: Request) -> Response:
    Query(request, ())
    job = resolve_job(node_of(request).state, request.path_params["job"])
    return Stream(request, _statuses(moments_of(request), job.id))


async def _statuses(moments: Moments, job_id: JobId) -> AsyncIterator[Sequence[Item]]:
    shown_last: JobView | None = None
    while True:
        began = perf_counter()
        moment = moments.now()
        job = moment.state.jobs.get(job_id)
        if job is None:
            return  # ended, and forgotten since
        view = _without_countdown(moment.view(job))
        is_news, took_seconds = view != shown_last, perf_counter() - began
        if is_news:
            shown_last = view
            yield [Item.of(await _status(moment, job))]
        if job.outcome is not None:
            return
        await trio.sleep(took_seconds * PAUSE_PER_LOOK)
        if await news_or_none(partial(moments.node.wait_for_change, moment.version)) is None:
            yield KEEPALIVE


def _without_countdown(view: JobView) -> JobView:
    """What is compared to find a change: not the seconds that are left, or that a node is away, which always change."""
    return replace(view, replicas=tuple(_without_seconds(replica) for replica in view.replicas))


def _without_seconds(replica: ReplicaView) -> ReplicaView:
    warning = replica.warning
    if warning is not None and warning.code.startswith("node_"):
        warning = Reason(code=warning.code)
    return replace(replica, next="", warning=warning)


async def _status(moment: Moment, job: Job) -> Json:
    view = moment.view(job)
    placed = {_attempt(job.id, replica): replica for replica in view.replicas if replica.attempt}
    owners = {attempt: replica.node_id or moment.node.node_id for attempt, replica in placed.items()}
    wanted = [attempt for attempt, replica in placed.items() if _shows_lines(replica)][:REPLICAS_WITH_LINES_MAX]
    details = await moment.owners.details({attempt: (owners[attempt], placed[attempt].run) for attempt in wanted})
    sandboxes = await moment.owners.sandboxes(owners)
    return job_status(
        view,
        job.spec,
        sandboxes={attempt.replica.index: path for attempt, path in sandboxes.items() if path is not None},
        last_lines={attempt.replica.index: list(each.lines) or _missing(each) for attempt, each in details.items()},
    )


def _missing(details: Details) -> list[str]:
    return [f"({details.missing})"] if details.missing else []


def _attempt(job: JobId, replica: ReplicaView) -> AttemptId:
    return AttemptId(ReplicaId(job, replica.index), replica.attempt)


def _shows_lines(replica: ReplicaView) -> bool:
    """Where something went wrong, or has not come so far yet."""
    code = replica.reason.code if replica.reason is not None else "exit_zero"
    if replica.state == "ended":
        return code not in ("exit_zero", "cancelled")
    return replica.state != "ready" and code not in ("cancelled", "restart_requested")


async def get_spec(request: Request) -> Response:
    Query(request, ())
    job = resolve_job(node_of(request).state, request.path_params["job"])
    return answer(spec_to_json(job.spec) | {"revision": job.revision})


async def cancel(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    parse_empty(body_of(request))
    job = resolve_job(node.state, request.path_params["job"])
    await node.propose(StopJob(job=job.id, reason=Reason(code="cancelled", text="cancelled by a user")))
    moment = moment_of(request)
    now = moment.state.jobs.get(job.id, job)
    return answer({"id": job.id, "name": job.name, "state": moment.view(now).state}, 202)


async def restart(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    listed = parse_restart(body_of(request))
    job, index = resolve_job_or_replica(node.state, request.path_params["job"])
    if index is not None and listed is not None and listed != (index,):
        raise InvalidRequest(
            f"replicas: {shown(list(listed))} and {job.name}.{index} are not the same", hint="leave out one of them"
        )
    if job.spec.kind == "batch" and job.is_live:
        raise Refused(
            f"{job.name} is a batch, which runs once", hint="cancel it and submit it again; only a service is restarted"
        )
    replicas = (index,) if index is not None else listed
    missing = [number for number in replicas or () if number >= len(job.replicas)]
    if missing:
        raise NotFound(f"{job.name} has no replica {missing[0]}", hint=f"it has {len(job.replicas)}, counted from 0")
    if replicas is None:
        replicas = _restartable(job)
    accepted = await node.propose(RestartReplicas(job=job.id, replicas=replicas))
    document: Json = {"id": job.id, "name": job.name, "replicas": list(replicas)}
    if accepted.skipped:
        document["skipped"] = list(accepted.skipped)
    return answer(document, 202)


def _restartable(job: Job) -> tuple[int, ...]:
    placed = tuple(
        replica.index for replica in job.replicas if replica.assignment is not None and replica.outcome is None
    )
    if placed:
        return placed
    raise Refused(
        f"no replica of {job.name} runs" + ("" if job.is_live else ", it has ended"),
        hint="gpulayer job explain says why nothing was placed" if job.is_live else "submit it again",
    )


# --- why ------------------------------------------------------------------------------------------------------------


def _dry_run(node: NodeFacade, spec: JobSpec) -> Json:
    """Where it would go if it were submitted now; nothing is kept of it."""
    state = node.state
    job = Job(
        id=JobId("j-dry-run"),
        name=spec.name,
        revision=1,
        spec=spec,
        submitted_at_utc=node.now_utc(),
        submitted_at_index=state.index + 1,
        replicas=tuple(Replica(index=index) for index in range(spec.replicas)),
    )
    explained = explain_job(state, job, node.placeable())
    refused = [
        verdict.refusal
        for each in explained
        if each.node is None
        for verdict in each.verdicts
        if verdict.refusal is not None
    ]
    fits = all(each.node is not None for each in explained)
    if fits:
        names = sorted({_node_name(state, each.node) for each in explained})
        said = f"fits now: {len(explained)} on {', '.join(names[:5])}" + (" and others" if len(names) > 5 else "")
    else:
        waiting = sum(each.node is None for each in explained)
        said = f"{waiting} of {len(explained)} would wait: {summary(refused)}"
    return {
        "fits": fits,
        "replicas": [
            {
                "index": each.replica,
                "node": _node_name(state, each.node) or None,
                "devices": devices_to_json(each.devices),
                "refusals": _refusals(each),
            }
            for each in explained
        ],
        "summary": said,
        "warning": _reason_beside_explanation(obstacle(node.observed_state, spec)),
    }


async def explain_handler(request: Request) -> Response:
    Query(request, ())
    moment = moment_of(request)
    job, index = resolve_job_or_replica(moment.state, request.path_params["job"])
    view = moment.view(job)
    explained = {each.replica: each for each in explain_job(moment.state, job, moment.node.placeable())}
    chosen = [replica for replica in view.replicas if index in (None, replica.index)]
    placed = {_attempt(job.id, replica): replica for replica in chosen if replica.attempt}
    details = await moment.owners.details(
        {attempt: (replica.node_id or moment.node.node_id, None) for attempt, replica in placed.items()}
    )
    history = {attempt.replica.index: _history(each) for attempt, each in details.items()}
    replicas = [_explained(replica, explained.get(replica.index), history.get(replica.index, [])) for replica in chosen]
    return answer(
        {
            "id": job.id,
            "name": job.name,
            "state": view.state,
            "reason": _reason_beside_explanation(view.reason),
            "replicas": replicas,
        }
    )


def _reason_beside_explanation(reason: Reason | None) -> Json | None:
    return reason_to_json(replace(reason, hint=beside_explanation(reason.hint)) if reason is not None else None)


def _history(details: Details) -> list[Json]:
    told = details.history or (((0.0, details.missing),) if details.missing else ())
    return [{"ago_seconds": round(ago, 3), "text": text} for ago, text in told]


def _explained(replica: ReplicaView, explained: ReplicaExplained | None, history: list[Json]) -> Json:
    return {
        "index": replica.index,
        "state": replica.state,
        "reason": _reason_beside_explanation(replica.reason),
        "node": replica.node or None,
        "devices": devices_to_json(replica.devices),
        "why": list(_why(replica, explained)),
        "refusals": _refusals(explained) if explained is not None else [],
        "history": history,
    }


def _why(replica: ReplicaView, explained: ReplicaExplained | None) -> Iterable[str]:
    """In sentences: where it is or would be, and what happens next."""
    if explained is None:
        yield f"it has ended{f' on {replica.node}' if replica.node else ''}"
    elif explained.is_placed:
        held = ", ".join(device.uuid for device in explained.devices)
        yield f"it is placed on {replica.node}" + (f" with {held}" if held else "")
    elif explained.node is None:
        yield "it waits: no node can take it now"
    else:
        yield "it is about to be placed"
    if explained is not None:
        fitting = [verdict.node_name for verdict in explained.verdicts if verdict.refusal is None]
        if fitting:
            yield f"it fits on {', '.join(fitting[:5])}" + (f" and {len(fitting) - 5} more" if len(fitting) > 5 else "")
    if replica.warning is not None:
        yield replica.warning.text
    if replica.next:
        yield replica.next


def _refusals(explained: ReplicaExplained) -> list[Json]:
    return [
        {"node": verdict.node_name, "code": code_of(verdict.refusal), "text": explain(verdict.refusal)}
        for verdict in explained.verdicts
        if verdict.refusal is not None
    ]


def _node_name(state: ClusterState, node_id: object) -> str:
    return next((node.name for node in state.nodes.values() if node.id == node_id), "")


def _route(path: str, handler: Callable[..., object], method: str) -> Route:
    return Route(path, handler, methods=[method])


ROUTES = [
    _route("/v1/jobs", submit, "POST"),
    _route("/v1/jobs", list_jobs, "GET"),
    _route("/v1/jobs/{job}", get_job, "GET"),
    _route("/v1/jobs/{job}/watch", watch_job, "GET"),
    _route("/v1/jobs/{job}/spec", get_spec, "GET"),
    _route("/v1/jobs/{job}/cancel", cancel, "POST"),
    _route("/v1/jobs/{job}/restart", restart, "POST"),
    _route("/v1/jobs/{job}/explain", explain_handler, "GET"),
]
