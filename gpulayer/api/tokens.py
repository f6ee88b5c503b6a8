"""API tokens. A secret is shown once, in the answer that makes it; the log holds its digest."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.query import Query
from gpulayer.api.requests import answer, body_of, node_of
from gpulayer.core.cluster.commands import CreateToken, RevokeToken
from gpulayer.model.errors import NotFound
from gpulayer.model.ids import TokenId
from gpulayer.wire.http import parse_token, shown, token_to_json


async def list_tokens(request: Request) -> Response:
    Query(request, ())
    tokens = node_of(request).state.tokens.values()
    ordered = sorted(tokens, key=lambda token: (token.created_at_utc, token.id))
    return answer({"tokens": [token_to_json(token) for token in ordered]})


async def create_token(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    role, label = parse_token(body_of(request))
    token_id, secret, digest = node.new_token()
    await node.propose(CreateToken(token=TokenId(token_id), role=role, digest=digest, label=label))
    document = {"id": token_id, "role": role, "label": label, "token": secret}
    return answer(document, 201, {"Cache-Control": "no-store"})


async def revoke_token(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    token_id = TokenId(request.path_params["token_id"])
    if token_id not in node.state.tokens:
        raise NotFound(f"there is no token {shown(token_id)}", hint="gpulayer token list shows the ids")
    await node.propose(RevokeToken(token=token_id))
    return Response(status_code=204)


ROUTES = [
    Route("/v1/tokens", list_tokens, methods=["GET"]),
    Route("/v1/tokens", create_token, methods=["POST"]),
    Route("/v1/tokens/{token_id}", revoke_token, methods=["DELETE"]),
]
