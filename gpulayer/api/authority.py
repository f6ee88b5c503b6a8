"""Whose certificate to expect: the CA of this cluster. Open, because it is public, and what `gpulayer login` begins
with; whether it is the right one its fingerprint says, which people bring from elsewhere."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpulayer.api.query import Query
from gpulayer.api.requests import LocalRoute, node_of
from gpulayer.model.errors import NotFound

PATH = "/v1/ca"
PEM = "application/x-pem-file"


async def ca(request: Request) -> Response:
    Query(request, ())
    pem = node_of(request).ca_pem
    if not pem:
        raise NotFound("this cluster has no certificate authority yet", hint="the next start of its daemon makes one")
    return Response(pem, media_type=PEM)


ROUTES = [LocalRoute(PATH, ca, methods=["GET"])]
