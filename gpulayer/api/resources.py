"""What the cluster has of everything, and how much of it is idle."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpulayer.api.query import Query
from gpulayer.api.requests import LocalRoute, answer, moments_of
from gpulayer.wire.nodes import resources_to_json


async def resources(request: Request) -> Response:
    Query(request, ())
    return answer(resources_to_json(moments_of(request).lately().stock))


ROUTES = [LocalRoute("/v1/resources", resources, methods=["GET"])]
