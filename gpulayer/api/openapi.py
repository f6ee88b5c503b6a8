"""GET /v1/openapi.json: every request that the API takes, and every answer, as an OpenAPI 3.1 document.

Written here, and not made from the handlers: it is the contract that they are held to (tests/api/test_openapi.py).
Like all under /v1/ it needs a token over TCP, of any role: who may ask nothing else has no use for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from gpulayer import __version__
from gpulayer.api.authority import PEM
from gpulayer.api.log_merge import REPLICAS_MAX as LOGS_REPLICAS_MAX
from gpulayer.api.query import LIMIT_DEFAULT, LIMIT_MAX, Query
from gpulayer.api.requests import LocalRoute, answer
from gpulayer.api.schemas import ANSWERS, REQUESTS, TRUTH, array, number, one_of, ref, text, whole
from gpulayer.api.streams import NDJSON, SSE
from gpulayer.model.cluster import Role
from gpulayer.model.job import REPLICAS_MAX
from gpulayer.wire.http import IDEMPOTENCY_KEY, Json

_JSON = "application/json"
_PLAIN = "text/plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path."""

    method: str = "get"
    path: str
    id: str
    summary: str
    role: Role | None = "read"
    """None: no token is asked for."""
    query: Mapping[str, Json] = field(default_factory=dict)
    headers: Mapping[str, Json] = field(default_factory=dict)
    body: str | None = None
    """Name of its schema."""
    needs_body: bool = False
    answers: Mapping[int, Json]
    """By status: what it says (`_document`, `_stream`, `_plain`)."""
    errors: tuple[int, ...] = ()
    """Beside those that any request may get."""


# --- what operations share --------------------------------------------------------------------------------------------

_MARK = r"[A-Za-z0-9-]{1,64}\.[0-9]{1,18}\.[0-9]{1,18}"
_PLACE = r"[0-9]{1,5}\.[0-9]{1,6}\.[0-9]{1,10}\.[0-9]{1,15}\.[0-9]{1,15}"
_AFTER_EVENT = text("Go on after this offset; empty: from the oldest.", pattern=f"^(?:start|{_MARK}(?:_{_MARK})*)?$")
_AFTER_LINE = text("Go on after this offset; empty: from the oldest.", pattern=f"^(?:{_PLACE}(?:_{_PLACE})*)?$")
_FOLLOW = TRUTH | {"default": False, "description": "Go on with what comes."}
_WATCH = TRUTH | {"default": False, "description": "A stream: now and after every change, until the job has ended."}
_FEED: dict[str, Json] = {"after": _AFTER_EVENT, "follow": _FOLLOW, "limit": whole(1, 1_000_000)}
_LAST_EVENT_ID = "Taken where `after` is left out: browsers send it when they reconnect."

_PARAMETERS: dict[str, Json] = {
    "job": text(
        "A name, an id, or an unambiguous beginning of one; JOB.2 where a replica may be meant.",
        minLength=1,
        pattern=r"^[a-z0-9-]+(?:\.[0-9]{1,6})?$",
    ),
    "node": text("A name, an id, or an unambiguous beginning of one.", minLength=1, pattern=r"^[a-z0-9-]+$"),
    "token_id": text(minLength=1),
}

_ERRORS: dict[int, tuple[str, str]] = {
    400: ("InvalidRequest", "The words were wrong; nothing was changed."),
    401: ("NotAuthenticated", "No token, or one that is not known."),
    403: ("PermissionDenied", "The token's role does not allow this."),
    404: ("NotFound", "There is no such thing."),
    408: ("RequestTimeout", "The body did not arrive in time."),
    409: ("Refused", "Understood and declined; nothing was changed."),
    413: ("TooLarge", "The body is too large."),
    415: ("UnsupportedMediaType", "A body that is not application/json."),
    431: ("HeaderTooLarge", "The header is too large."),
    500: ("Internal", "A mistake of the node's own, which its log has."),
    503: ("Unreachable", "The node does not serve now."),
    507: ("StorageFailed", "The node's disk refused; nothing was changed."),
}
_ANY_REQUEST = (400, 401, 403, 408, 413, 415, 431, 500, 503)
_ERROR_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"required": True, "schema": text()}},
    503: {"Retry-After": {"schema": whole(description="Seconds.")}},
    507: {"Retry-After": {"required": True, "schema": whole(description="Seconds.")}},
}


def _document(schema: Json, description: str, headers: Mapping[str, Json] | None = None) -> Json:
    return {
        "description": description,
        **({"headers": dict(headers)} if headers else {}),
        "content": {_JSON: {"schema": schema}},
    }


def _stream(of: Json, description: str) -> Json:
    return {
        "description": f"{description} One document a line, empty lines between; with Accept: {SSE} as SSE.",
        "content": {
            NDJSON: {"schema": array(of) | {"description": "The lines, as they come: no JSON array."}},
            SSE: {"schema": text()},
        },
    }


def _either(one: Json, other: Json) -> Json:
    return one | {"content": one["content"] | other["content"]}


def _plain(description: str) -> Json:
    return {"description": description, "content": {_PLAIN: {"schema": text()}}}


# --- every operation --------------------------------------------------------------------------------------------------

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/jobs",
        id="submit",
        summary="Submit a job; with dry_run, ask where it would go now.",
        role="submit",
        query={"dry_run": TRUTH | {"default": False}},
        headers={
            "Idempotency-Key": text(
                "The same key with the same body is one job, for 24 h.", pattern=f"^{IDEMPOTENCY_KEY.pattern}$"
            )
        },
        body="Specification",
        needs_body=True,
        answers={
            200: _document({"anyOf": [ref("DryRun"), ref("Submitted")]}, "A dry run, or what the key was used for."),
            201: _document(
                ref("Submitted"), "It is accepted, durably.", {"Location": {"required": True, "schema": text()}}
            ),
        },
        errors=(409, 507),
    ),
    Operation(
        path="/v1/jobs",
        id="jobs",
        summary="A page of the jobs, newest first.",
        query={
            "state": one_of(("live", "ended", "all")) | {"default": "live"},
            "limit": whole(1, LIMIT_MAX) | {"default": LIMIT_DEFAULT},
            "cursor": text("`next` of the page before.", pattern="^[0-9]{1,18}$"),
        },
        answers={200: _document(ref("Jobs"), "The page.")},
    ),
    Operation(
        path="/v1/jobs/{job}",
        id="job_status",
        summary="How a job and each of its replicas is.",
        answers={200: _document(ref("JobStatus"), "Its status.")},
        errors=(404,),
    ),
    Operation(
        path="/v1/jobs/{job}/watch",
        id="watch",
        summary="How it is now and after every change; ends after the status with which it has ended.",
        answers={200: _stream(ref("JobStatus"), "Its statuses.")},
        errors=(404,),
    ),
    Operation(
        path="/v1/jobs/{job}/spec",
        id="spec",
        summary="The specification in force; the environment in it may hold secrets.",
        role="submit",
        answers={200: _document(ref("SpecificationInForce"), "Every key of it.")},
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/jobs/{job}/cancel",
        id="cancel",
        summary="Stop every replica, for good.",
        role="submit",
        body="Nothing",
        answers={202: _document(ref("Cancelled"), "They are being stopped.")},
        errors=(404, 409, 507),
    ),
    Operation(
        method="post",
        path="/v1/jobs/{job}/restart",
        id="restart",
        summary="A new run of each of these replicas, on the same node.",
        role="submit",
        body="Restart",
        answers={202: _document(ref("Restarted"), "They are being restarted.")},
        errors=(404, 409, 507),
    ),
    Operation(
        path="/v1/jobs/{job}/endpoints",
        id="endpoints",
        summary="Where the ready replicas serve.",
        query={"watch": _WATCH},
        answers={
            200: _either(
                _document(ref("Endpoints"), "Of the ready ones."), _stream(ref("Endpoints"), "Of the ready ones.")
            )
        },
        errors=(404,),
    ),
    Operation(
        path="/v1/jobs/{job}/logs",
        id="logs",
        summary="What its replicas wrote, merged by time; with follow until nothing more will be written.",
        query={
            "replica": whole(0, REPLICAS_MAX - 1, f"Left out: all; {LOGS_REPLICAS_MAX} at most."),
            "previous": TRUTH | {"default": False, "description": "Of every run that has ended; not with run."},
            "run": whole(1, 2**31),
            "since": number("UTC seconds.", minimum=0, maximum=1e12),
            "tail": whole(0, 1_000_000, "The last so many lines."),
            "follow": _FOLLOW,
            "after": _AFTER_LINE,
        },
        headers={"Last-Event-ID": _AFTER_LINE | {"description": _LAST_EVENT_ID}},
        answers={200: _stream(ref("LogLine"), "The lines.")},
        errors=(404,),
    ),
    Operation(
        path="/v1/jobs/{job}/events",
        id="job_events",
        summary="What happened to it, each change once.",
        query=_FEED,
        headers={"Last-Event-ID": _AFTER_EVENT | {"description": _LAST_EVENT_ID}},
        answers={200: _stream(ref("Event"), "The events.")},
        errors=(404,),
    ),
    Operation(
        path="/v1/jobs/{job}/explain",
        id="explain",
        summary="Why each replica is where and how it is.",
        answers={200: _document(ref("Explanation"), "Replica by replica, node by node.")},
        errors=(404,),
    ),
    Operation(
        path="/v1/events",
        id="events",
        summary="What happened in the cluster, each change once, in order per source.",
        query=_FEED,
        headers={"Last-Event-ID": _AFTER_EVENT | {"description": _LAST_EVENT_ID}},
        answers={200: _stream(ref("Event"), "The events.")},
    ),
    Operation(
        path="/v1/status",
        id="status",
        summary="The cluster at a glance.",
        answers={200: _document(ref("Status"), "Its status.")},
    ),
    Operation(
        path="/v1/nodes",
        id="nodes",
        summary="Each node, its devices, and what is free on it.",
        answers={200: _document(array(ref("Node")), "The nodes, by name.")},
    ),
    Operation(
        path="/v1/nodes/{node}",
        id="node",
        summary="All that is known of one node, also what runs there by its own word.",
        answers={200: _document(ref("NodeStatus"), "The node, by name, id, or an unambiguous beginning of one.")},
        errors=(404,),
    ),
    Operation(
        path="/v1/resources",
        id="resources",
        summary="What there is of everything, and how much of it is idle.",
        answers={200: _document(ref("Resources"), "By model, and by node.")},
    ),
    Operation(
        path="/v1/audit",
        id="audit",
        summary="What runs on the host against what should.",
        query={"all": TRUTH | {"default": False, "description": "Of every node, and not only of the one asked."}},
        answers={200: _document(ref("Audit"), "Every difference.")},
    ),
    Operation(
        path="/v1/tokens",
        id="tokens",
        summary="The tokens of the API and of joining, without their secrets.",
        answers={200: _document(ref("Tokens"), "All of them.")},
    ),
    Operation(
        method="post",
        path="/v1/tokens",
        id="create_token",
        summary="Make an API token.",
        role="admin",
        body="TokenRequest",
        needs_body=True,
        answers={201: _document(ref("NewToken"), "The only time that its secret is shown.")},
        errors=(507,),
    ),
    Operation(
        method="post",
        path="/v1/join-tokens",
        id="create_join_token",
        summary="Make a token that lets hosts join the cluster.",
        role="admin",
        body="JoinTokenRequest",
        answers={201: _document(ref("NewJoinToken"), "The only time that it is shown.")},
        errors=(409, 507),
    ),
    Operation(
        method="delete",
        path="/v1/tokens/{token_id}",
        id="revoke_token",
        summary="Refuse that token from now on, of either kind.",
        role="admin",
        answers={204: {"description": "It is refused."}},
        errors=(404, 507),
    ),
    Operation(
        path="/v1/cluster",
        id="cluster",
        summary="Who leads and who votes, how far the log is, and the keys by their ids.",
        answers={200: _document(ref("Cluster"), "As it is agreed now.")},
    ),
    Operation(
        method="post",
        path="/v1/cluster/rotate-keys",
        id="rotate_keys",
        summary="Begin to replace the key that gossip is sealed with.",
        role="admin",
        body="Nothing",
        answers={200: _document(ref("Keys"), "The new one is there, and used once every living node has it.")},
        errors=(409, 507),
    ),
    Operation(
        method="post",
        path="/v1/leave",
        id="leave",
        summary="Let the daemon leave and end.",
        role="admin",
        body="Leave",
        answers={200: _stream(ref("Left"), "What is left to be stopped; at last that it has left.")},
        errors=(409, 507),
    ),
    Operation(
        path="/v1/openapi.json",
        id="openapi",
        summary="This document.",
        answers={200: _document({"type": "object"}, "OpenAPI 3.1.")},
    ),
    Operation(
        path="/v1/ca",
        id="ca",
        summary="The certificate of the cluster's authority, in PEM: whose certificates its nodes have.",
        role=None,
        answers={200: {"description": "PEM.", "content": {PEM: {"schema": text()}}}},
        errors=(404,),
    ),
    Operation(
        path="/healthz",
        id="healthz",
        summary="Whether the process serves.",
        role=None,
        answers={200: _plain("It does.")},
    ),
    Operation(
        path="/readyz",
        id="readyz",
        summary="Whether the node serves.",
        role=None,
        # In JSON where so many connections are open that this one is turned away.
        answers={200: _plain("It does."), 503: _either(_document(ref("Error"), "It does not."), _plain("Why not."))},
    ),
    Operation(
        path="/metrics",
        id="metrics",
        summary="Its numbers, in Prometheus' text format.",
        answers={200: _plain("The numbers.")},
    ),
)


# --- the document -----------------------------------------------------------------------------------------------------


@cache
def document() -> Json:
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _as_json(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpulayer",
            "version": __version__,
            "description": "Services and batch jobs on GPU hosts. HEAD is answered wherever GET is.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "Any node; on its unix socket no token is asked for."}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "An API token, gpl_…"}},
            "responses": {
                name: _document(ref("Error"), description, _ERROR_HEADERS.get(status))
                for status, (name, description) in _ERRORS.items()
            },
            "schemas": REQUESTS | ANSWERS,
        },
    }


def _as_json(operation: Operation) -> Json:
    in_path = [name for name in _PARAMETERS if f"{{{name}}}" in operation.path]
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": _PARAMETERS[name]} for name in in_path),
        *({"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()),
        *({"name": name, "in": "header", "schema": schema} for name, schema in operation.headers.items()),
    ]
    made: Json = {"operationId": operation.id, "summary": operation.summary}
    if operation.role is None:
        made["security"] = []
    else:
        made["description"] = f"Needs a token with the role {operation.role}, or one that may do more."
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        made["requestBody"] = {
            "required": operation.needs_body,
            "content": {_JSON: {"schema": ref(operation.body)}},
        }
    statuses = {*_ANY_REQUEST, *operation.errors} - ({401, 403} if operation.role is None else set())
    refused = {status: {"$ref": f"#/components/responses/{_ERRORS[status][0]}"} for status in statuses}
    made["responses"] = {str(status): said for status, said in sorted((refused | dict(operation.answers)).items())}
    return made


async def openapi(request: Request) -> Response:
    Query(request, ())
    return answer(document())


ROUTES = [LocalRoute("/v1/openapi.json", openapi, methods=["GET"])]
