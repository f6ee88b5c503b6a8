"""What the cluster has of everything, and how much of it is idle."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.query import Query
from gpulayer.api.requests import answer, moment_of
from gpulayer.core.placement.fit import free_of
from gpulayer.wire.http import resources_to_json


async def resources(request: Request) -> Response:
    Query(request, ())
    state = moment_of(request).state
    return answer(resources_to_json(state, free_of(state)))


ROUTES = [Route("/v1/resources", resources, methods=["GET"])]
