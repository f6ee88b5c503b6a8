"""The event feed, of everything or of one job: every change once, in order per source, to go on from any offset."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.facade import NodeFacade
from gpulayer.api.query import Query
from gpulayer.api.requests import node_of
from gpulayer.api.streams import KEEPALIVE, Item, Stream, last_event_id, news_or_none
from gpulayer.core.cluster.resolve import resolve_job
from gpulayer.model.event import Event
from gpulayer.model.ids import JobId, NodeId
from gpulayer.runtime.event_store import EVENTS_LOST, parse_offset
from gpulayer.wire.http import event_to_json

# Events read at once: a client that does not read holds so many in memory, and no more.
PAGE = 200
LIMIT_MAX = 1_000_000


async def all_events(request: Request) -> Response:
    return await _answer(request, None)


async def job_events(request: Request) -> Response:
    return await _answer(request, resolve_job(node_of(request).state, request.path_params["job"]).id)


async def _answer(request: Request, job: JobId | None) -> Response:
    node = node_of(request)
    query = Query(request, ("after", "follow", "limit"))
    after, last_seen = query.text("after"), last_event_id(request)
    for offset in (after, last_seen):
        if offset:
            parse_offset(offset)
    follow = query.flag("follow")
    limit = query.count("limit", least=1, most=LIMIT_MAX)
    # What this client has done before it asks is to be among what it gets.
    await node.events.flush()
    begin = (last_seen if after is None else after) or None
    return Stream(request, _events(node, begin, job, follow=follow, limit=limit))


async def _events(
    node: NodeFacade, after: str | None, job: JobId | None, *, follow: bool, limit: int | None
) -> AsyncIterator[Sequence[Item]]:
    left = limit
    while left is None or left > 0:
        # Taken before reading, or an event could come in between.
        written = node.events.written
        page = await node.events.read_page(after, PAGE if left is None else min(PAGE, left), job)
        after = page.next
        if page.items:
            if left is not None:
                left -= len(page.items)
            yield [Item.of(_document(node, event, offset), offset) for offset, event in page.items]
        elif not follow:
            return
        elif await news_or_none(partial(node.events.wait_for_more, written)) is None:
            yield KEEPALIVE


def _document(node: NodeFacade, event: Event, offset: str) -> dict[str, object]:
    job = node.state.jobs.get(JobId(event.job))
    known = node.state.nodes.get(NodeId(event.node))
    document = event_to_json(event, offset, job.name if job else "", known.name if known else event.node)
    if event.kind == EVENTS_LOST:
        document["kind"] = "events.lost"  # as the contract has it
    return document


ROUTES = [
    Route("/v1/jobs/{job}/events", job_events, methods=["GET"]),
    Route("/v1/events", all_events, methods=["GET"]),
]
