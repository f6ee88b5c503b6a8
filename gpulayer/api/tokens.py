"""Tokens: of the API, for clients; of joining, for hosts. A secret is shown once, in the answer that makes it; the log
holds its digest."""

from __future__ import annotations

from ipaddress import ip_address

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.facade import NodeFacade
from gpulayer.api.query import Query
from gpulayer.api.requests import answer, body_of, node_of
from gpulayer.core.cluster.commands import CreateJoinToken, CreateToken, RevokeToken
from gpulayer.model.errors import NotFound, Refused
from gpulayer.model.ids import TokenId
from gpulayer.runtime import trust
from gpulayer.wire.http import join_token_to_json, parse_join_token_request, parse_token, shown, token_to_json
from gpulayer.wire.join_token import JoinTokenText


async def list_tokens(request: Request) -> Response:
    Query(request, ())
    state = node_of(request).state
    found = [*map(token_to_json, state.tokens.values()), *map(join_token_to_json, state.join_tokens.values())]
    return answer({"tokens": sorted(found, key=lambda token: (token["created_at_utc"], token["id"]))})


async def create_token(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    role, label = parse_token(body_of(request))
    token_id, secret, digest = node.new_token()
    await node.propose(CreateToken(token=TokenId(token_id), role=role, digest=digest, label=label))
    document = {"id": token_id, "role": role, "label": label, "token": secret}
    return answer(document, 201, {"Cache-Control": "no-store"})


async def create_join_token(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    uses, seconds, advertise = parse_join_token_request(body_of(request))
    host, port = _seed(node, advertise)
    authority = node.state.authority
    if authority is None:
        raise Refused(
            "this cluster has no certificate authority yet, so nobody can join", hint="start its daemon again"
        )
    token = JoinTokenText(secret=node.new_secret(), pin=trust.pin(authority.certificate_pem))
    token_id = TokenId("t-" + node.new_secret()[:4].hex())
    expires_at_utc = max(node.now_utc(), node.state.time_utc) + seconds
    await node.propose(CreateJoinToken(token=token_id, digest=token.digest, uses=uses, expires_at_utc=expires_at_utc))
    document = {
        "id": token_id,
        "token": token.text,
        "uses_left": uses,
        "expires_at_utc": expires_at_utc,
        "seed": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "bind": _bind_for(host),
    }
    return answer(document, 201, {"Cache-Control": "no-store"})


def _seed(node: NodeFacade, advertise: str) -> tuple[str, int]:
    """What the next host is told to join by: host and peer port."""
    own = node.table().nodes[node.node_id].peer_address
    if own is None:
        raise Refused(
            f"{node.node_name} speaks to no other nodes",
            hint="start its daemon with gpulayer up, which listens for them",
        )
    if advertise:
        if own.is_usable_elsewhere and _bind_for(advertise) is None:
            raise Refused(
                f"{node.node_name} is reached at {own.host} by other hosts, and so must be whoever joins it",
                hint="leave out --advertise; for a second node on this host, add --data-dir DIR, --api-port 0 and "
                "--peer-port 0 to the command that it prints",
            )
        return advertise, own.port
    if not own.is_usable_elsewhere:
        raise Refused(
            f"{node.node_name} is reached at {own.host} only, by this host alone",
            hint="restart it with gpulayer up --bind 0.0.0.0; for a cluster on this one host say "
            "gpulayer token create --join --advertise 127.0.0.1",
        )
    return own.host, own.port


def _bind_for(host: str) -> str | None:
    """What the next host has to listen on, to be reached by a cluster at `host`; None: loopback, as it does anyway."""
    try:
        address = ip_address(host)
    except ValueError:
        return None if host == "localhost" else "0.0.0.0"
    if address.is_loopback:
        return None
    return "::" if address.version == 6 else "0.0.0.0"


async def revoke_token(request: Request) -> Response:
    node = node_of(request)
    Query(request, ())
    token_id = TokenId(request.path_params["token_id"])
    if token_id not in node.state.tokens and token_id not in node.state.join_tokens:
        raise NotFound(f"there is no token {shown(token_id)}", hint="gpulayer token list shows the ids")
    await node.propose(RevokeToken(token=token_id))
    return Response(status_code=204)


ROUTES = [
    Route("/v1/tokens", list_tokens, methods=["GET"]),
    Route("/v1/tokens", create_token, methods=["POST"]),
    Route("/v1/join-tokens", create_join_token, methods=["POST"]),
    Route("/v1/tokens/{token_id}", revoke_token, methods=["DELETE"]),
]
