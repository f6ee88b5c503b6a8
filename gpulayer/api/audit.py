"""GET /v1/audit: does a host run what it should? Of the node that is asked, or with `all=1` of every node."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response

from gpulayer.api.facade import AuditReport, NodeFacade
from gpulayer.api.forwarding import ask_node
from gpulayer.api.query import Query
from gpulayer.api.requests import LocalRoute, answer, node_of
from gpulayer.model.errors import GpulayerError, Unreachable
from gpulayer.model.seen import NodeSeen
from gpulayer.wire.http import Json
from gpulayer.wire.peer import RequestHead

PATH = "/v1/audit"
# Two looks at all processes of a busy host take a second.
NODE_SECONDS_MAX = 15.0
NODES_AT_A_TIME_MAX = 32


async def audit(request: Request) -> Response:
    query = Query(request, ("all",))
    node = node_of(request)
    if not query.flag("all"):
        return answer(_of_one(node.node_name, await node.audit()))
    others = [seen for seen in node.table().nodes.values() if not seen.is_self and seen.state != "left"]
    found: list[Json] = []
    limit = trio.CapacityLimiter(NODES_AT_A_TIME_MAX)

    async def ask(seen: NodeSeen) -> None:
        async with limit:
            found.append(await _of_other(node, seen))

    async with trio.open_nursery() as nursery:
        for seen in others:
            nursery.start_soon(ask, seen)
        found.append(_of_one(node.node_name, await node.audit()))
    return answer(_merged(found))


def _of_one(name: str, report: AuditReport) -> Json:
    return {
        "checked_at_utc": report.checked_at_utc,
        "differences": [{"node": name, **asdict(difference)} for difference in report.differences],
        "replicas_checked": report.replicas_checked,
        "processes_seen": report.processes_seen,
        "nodes": [{"node": name, "error": None}],
    }


async def _of_other(node: NodeFacade, seen: NodeSeen) -> Json:
    name = seen.name or str(seen.id)
    why = f"no answer within {NODE_SECONDS_MAX:g} s"
    try:
        if seen.state not in ("alive", "suspect"):
            raise Unreachable(f"{name} is {seen.state}")
        with trio.move_on_after(NODE_SECONDS_MAX):
            head = RequestHead(method="GET", path=PATH, query="", headers=(), role="node")
            return _checked(json.loads(await ask_node(node, seen.id, head)))
    except GpulayerError as error:
        why = error.message
    return {
        "checked_at_utc": node.now_utc(),
        "differences": [],
        "replicas_checked": 0,
        "processes_seen": 0,
        "nodes": [{"node": name, "error": why}],
    }


def _checked(document: Any) -> Json:
    try:
        return {
            "checked_at_utc": float(document["checked_at_utc"]),
            "differences": [dict(each) for each in document["differences"]],
            "replicas_checked": int(document["replicas_checked"]),
            "processes_seen": int(document["processes_seen"]),
            "nodes": [dict(each) for each in document["nodes"]],
        }
    except (LookupError, TypeError, ValueError) as error:
        raise Unreachable("what it answers is no report", hint="upgrade the older node") from error


def _merged(found: list[Json]) -> Json:
    ordered = sorted(found, key=lambda each: str(each["nodes"][0]["node"]))
    return {
        "checked_at_utc": min(each["checked_at_utc"] for each in found),
        "differences": [difference for each in ordered for difference in each["differences"]],
        "replicas_checked": sum(each["replicas_checked"] for each in found),
        "processes_seen": sum(each["processes_seen"] for each in found),
        "nodes": [entry for each in ordered for entry in each["nodes"]],
    }


ROUTES = [LocalRoute(PATH, audit, methods=["GET"])]
