"""A node leaves: nothing of its work is left, the log knows it no more, its daemon ends. In that order.

The node that leaves asks the voter again and again until that has let it go; the voter does a step with each asking.
Whatever is interrupted can be begun anew.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.facade import NodeFacade
from gpulayer.api.forwarding import ask_voter
from gpulayer.api.query import Query
from gpulayer.api.requests import LocalRoute, answer, body_of, node_of
from gpulayer.api.streams import KEEPALIVE, KEEPALIVE_SECONDS, Item, Stream
from gpulayer.core.cluster.commands import RemoveNode, StopJob
from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.errors import NotFound, Refused, Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.replica import Reason
from gpulayer.wire.http import Json, dump, parse_leave, parse_node_leaves
from gpulayer.wire.peer import RequestHead

PATH = "/v1/local/leave"
# How long the voter keeps an asking that has nothing new to be told.
WAIT_SECONDS = 1.0
# Between two askings nothing new is placed on the node.
KEPT_EMPTY_SECONDS = 10.0
# A voter that restarts is back by then; what was begun is not lost, and `leave` can be said again.
WITHOUT_VOTER_SECONDS_MAX = 30.0

_LEAVING = Reason(code="cancelled", text="its node is leaving the cluster")


async def leave(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    stop_all = parse_leave(body_of(request))
    if not node.is_voter:
        # The first step is here and not in the stream: a refusal is an answer of its own.
        first = await _ask(node, stop_all)
        return Stream(request, _leave_others(node, stop_all, first), afterwards=node.leave)
    others = len(node.state.nodes.keys() - {node.node_id})
    if others:
        raise Refused(
            f"{node.node_name} holds the log of the cluster, which {others} other {'node' if others == 1 else 'nodes'} "
            "cannot do without",
            hint="let the others leave first, with gpulayer leave on each; a restart of the daemon needs no leave",
        )
    live = _live(node.state)
    _check_may_stop(live, stop_all)
    await _stop(node, live)
    # The end of the daemon would cut the stream that says so.
    return Stream(request, _leave_alone(node), afterwards=node.leave)


async def _leave_alone(node: NodeFacade) -> AsyncIterator[Sequence[Item]]:
    """Stops what lives until nothing is left, also what is submitted meanwhile; then the daemon may go."""
    progress = _Progress()
    while True:
        seen = node.version_of_view
        live = _live(node.state)
        await _stop(node, live)
        if not _live(node.state):
            break
        yield progress.items(sum(replica.assignment is not None for job in live for replica in job.replicas))
        with trio.move_on_after(KEEPALIVE_SECONDS):
            await node.wait_for_change(seen)
    yield [Item.of({"state": "left"})]


async def _leave_others(node: NodeFacade, stop_all: bool, first: Json) -> AsyncIterator[Sequence[Item]]:
    progress, step = _Progress(), first
    heard_at = trio.current_time()
    while step["state"] != "left":
        yield progress.items(step["left"])
        try:
            step, heard_at = await _ask(node, stop_all), trio.current_time()
        except Unreachable:
            if trio.current_time() - heard_at > WITHOUT_VOTER_SECONDS_MAX:
                raise
            await trio.sleep(WAIT_SECONDS)
    yield [Item.of({"state": "left"})]


async def _ask(node: NodeFacade, stop_all: bool) -> Json:
    body = dump({"node": node.node_id, "stop_all": stop_all})
    headers = (("content-type", "application/json"),)
    head = RequestHead(method="POST", path=PATH, query="", headers=headers, role="node", body=body)
    step: Json = json.loads(await ask_voter(node, head))
    return step


async def node_leaves(request: Request) -> Response:
    """The voter's part: one step, and how many replicas are left after it."""
    node = node_of(request)
    Query(request, ())
    leaving, stop_all = parse_node_leaves(body_of(request))
    if leaving not in node.state.nodes:
        return answer({"state": "left", "left": 0})
    live = _live_on(node.state, leaving)
    _check_may_stop(live, stop_all, leaving)
    node.keep_empty(leaving, KEPT_EMPTY_SECONDS)
    with trio.move_on_after(WAIT_SECONDS):
        while live := _live_on(node.state, leaving):
            seen = node.version_of_view
            await _stop(node, live)
            await node.wait_for_change(seen)
    left = len(node.state.assignments(leaving))
    if not left:
        with suppress(NotFound):
            await node.propose(RemoveNode(node=leaving))
    return answer({"state": "stopping" if left else "left", "left": left})


class _Progress:
    """What the reader is told: each number once, and that it goes on."""

    def __init__(self) -> None:
        self._last = -1

    def items(self, left: int) -> Sequence[Item]:
        if left == self._last:
            return KEEPALIVE
        self._last = left
        return [Item.of({"state": "stopping", "left": left})]


def _check_may_stop(live: list[Job], stop_all: bool, leaving: NodeId | None = None) -> None:
    """`leaving`: of several nodes, the one whose jobs these are."""
    if live and not stop_all:
        shown = ", ".join(_told(job, leaving) for job in live[:5]) + (" and more" if len(live) > 5 else "")
        what = f"{len(live)} {'job has' if len(live) == 1 else 'jobs have'}"
        raise Refused(
            f"{what} not ended{'' if leaving is None else ' here'} ({shown})",
            hint="end them first, or say --stop-all to end them now"
            + ("" if leaving is None else ", their replicas on other nodes too")
            + "; a restart of the daemon needs no leave",
        )


def _told(job: Job, leaving: NodeId | None) -> str:
    """`web`, or `web with 2 of its 3 replicas`."""
    here = sum(each.assignment is not None and each.assignment.node == leaving for each in job.replicas)
    if leaving is None or here == len(job.replicas):
        return job.name
    return f"{job.name} with {here} of its {len(job.replicas)} replicas"


async def _stop(node: NodeFacade, live: list[Job]) -> None:
    for job in live:
        if job.stopping is None:
            with suppress(Refused, NotFound):  # it ended meanwhile
                await node.propose(StopJob(job=job.id, reason=_LEAVING))


def _live(state: ClusterState) -> list[Job]:
    return [job for job in state.jobs.values() if job.is_live]


def _live_on(state: ClusterState, node: NodeId) -> list[Job]:
    """Jobs with a replica there that is not released."""
    return [
        job
        for job in _live(state)
        if any(replica.assignment is not None and replica.assignment.node == node for replica in job.replicas)
    ]


ROUTES = [LocalRoute("/v1/leave", leave, methods=["POST"])]
PEER_ROUTES = [Route(PATH, node_leaves, methods=["POST"])]
"""Asked by nodes only (local.py)."""
