"""Is it there, does it serve: for load balancers and for people in a hurry. No token, no JSON."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gpulayer.api.requests import LocalRoute, node_of


async def healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    reason = node_of(request).not_ready
    if reason:
        return PlainTextResponse(reason + "\n", status_code=503, headers={"Retry-After": "1"})
    return PlainTextResponse("ready\n")


ROUTES = [LocalRoute("/healthz", healthz), LocalRoute("/readyz", readyz)]
