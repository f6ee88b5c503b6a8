"""The ASGI application: who asks, may they, is there such a thing, how much do they send; then the handler of the noun.

All of that is judged by the header, before any body is read. One plain ASGI function does it (a layer of
BaseHTTPMiddleware costs more than a whole handler). Handlers raise GpulayerError; problems.py says it in HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulayer.api import cluster, events, health, jobs, logs, metrics, openapi, resources, tokens
from gpulayer.api.facade import NodeFacade
from gpulayer.api.problems import (
    MethodNotAllowed,
    NotAuthenticated,
    answer_for,
    answer_for_bug,
    no_such_path,
)
from gpulayer.api.requests import BODY, MOMENTS, TOKEN, Moments
from gpulayer.model.cluster import ROLES, ClusterState, Role, Token
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied
from gpulayer.wire.http import BODY_BYTES_MAX, shown

# A megabyte at 35 kB/s; a client that is slower than that is not one of ours.
BODY_SECONDS_MAX = 30.0
# How much of a refused body is read away, so that the client, still sending, gets to read why.
DISCARDED_BYTES_MAX = 256 * 1024 * 1024
LOCAL_NAMES = frozenset({"localhost"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


def make_app(node: NodeFacade, *, trusted: bool, names: Iterable[str] = ()) -> Starlette:
    """`trusted`: for the unix socket, where whoever can connect is the admin. `names`: further ones that this node is
    called by in a Host header."""
    routes = [
        *health.ROUTES,
        *jobs.ROUTES,
        *logs.ROUTES,
        *events.ROUTES,
        *cluster.ROUTES,
        *resources.ROUTES,
        *tokens.ROUTES,
        *metrics.ROUTES,
        *openapi.ROUTES,
    ]
    allowed = None if trusted else LOCAL_NAMES | {name.lower() for name in names}
    guard = Middleware(_Guard, node=node, routes=routes, allowed_hosts=allowed)
    return Starlette(routes=routes, middleware=[guard])


class _Guard:
    """Every request comes through here; what it lets through goes straight to its route."""

    def __init__(
        self, app: ASGIApp, *, node: NodeFacade, routes: list[Route], allowed_hosts: frozenset[str] | None
    ) -> None:
        self._node = node
        self._moments = Moments(node)
        self._routes = routes
        self._allowed_hosts = allowed_hosts
        """None: the trusted side, which asks for no token either."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            route, matched = self._judge(scope)
            body = await _read_body(scope, receive)
            scope.update(matched)
            scope[MOMENTS], scope[BODY] = self._moments, body
            await route.handle(scope, receive, watched_send)
        except GpulayerError as error:
            await _refuse(answer_for(error), scope, receive, send)
        except Exception as error:  # noqa: BLE001
            # The edge of one request. A stream that began is cut, so that its client knows that there is more.
            answer = answer_for_bug(error, scope["method"], scope["path"])
            if not has_started:
                await _refuse(answer, scope, receive, send)

    def _judge(self, scope: Scope) -> tuple[Route, Mapping[str, Any]]:
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        if self._allowed_hosts is not None:
            _check_host(headers.get("host", ""), self._allowed_hosts)
            if path not in OPEN_PATHS:
                token = _token_of(headers, self._node.state)
                _check_role(token.role, method, path)
                scope[TOKEN] = token.id
        route, matched = self._find_route(scope)
        length = headers.get("content-length", "0")
        if int(length) > BODY_BYTES_MAX:
            raise _too_large(length)
        return route, matched

    def _find_route(self, scope: Scope) -> tuple[Route, Mapping[str, Any]]:
        allowed: set[str] = set()
        for route in self._routes:
            match, matched = route.matches(scope)
            if match is Match.FULL:
                return route, matched
            if match is Match.PARTIAL:
                allowed |= (route.methods or set()) - {"HEAD"}
        if allowed:
            raise MethodNotAllowed(scope["method"][:20], scope["path"][:200], sorted(allowed))
        raise no_such_path(scope["path"])


def _check_host(host: str, allowed: frozenset[str]) -> None:
    """A web page can make a browser reach 127.0.0.1 under its own name (DNS rebinding), and its requests carry that."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() not in allowed and not _is_loopback(name):
        raise InvalidRequest(
            f"this node is not called {shown(host)}",
            hint=f"use 127.0.0.1, [::1] or {', '.join(sorted(allowed))} in the URL",
        )


def _is_loopback(name: str) -> bool:
    """Addresses cannot be rebound, only names; --bind takes any of the loopback ones."""
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _token_of(headers: Headers, state: ClusterState) -> Token:
    given = headers.getlist("authorization")
    scheme, _, secret = (given[0] if len(given) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise NotAuthenticated(
            "this needs a token", hint="send Authorization: Bearer TOKEN; gpulayer token create makes one"
        )
    digest = hashlib.sha256(secret.strip().encode("latin-1", "replace")).hexdigest()
    found: Token | None = None
    # All of them, so that the time tells nothing about which one it was.
    for token in state.tokens.values():
        if hmac.compare_digest(token.digest, digest):
            found = token
    if found is None:
        raise NotAuthenticated(
            "this token is not known here", hint="it may be revoked; gpulayer token create makes one"
        )
    return found


def _check_role(role: Role, method: str, path: str) -> None:
    needed = _role_needed(method, path)
    if ROLES.index(role) > ROLES.index(needed):
        raise PermissionDenied(
            f"{method[:20]} {path[:200]} needs the role {needed}, this token has {role}",
            hint=f"ask an admin for a token: gpulayer token create --role {needed}",
        )


def _role_needed(method: str, path: str) -> Role:
    if method in ("GET", "HEAD"):
        # A specification has the job's environment, and so its secrets.
        return "submit" if path.startswith("/v1/jobs/") and path.rstrip("/").endswith("/spec") else "read"
    return "submit" if path == "/v1/jobs" or path.startswith("/v1/jobs/") else "admin"


def _too_large(length: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body has {length} bytes, {BODY_BYTES_MAX} at most",
        hint="put large values into a file and pass its path",
        code="too_large",
    )


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body, which is small; so `receive` has nothing left for the handlers but the end of the connection."""
    parts: list[bytes] = []
    size = 0
    with trio.move_on_after(BODY_SECONDS_MAX):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the connection ended within the body", hint="send all of it")
            part = message.get("body", b"")
            size += len(part)
            if size > BODY_BYTES_MAX:
                raise _too_large(f"more than {BODY_BYTES_MAX}")
            parts.append(part)
            if not message.get("more_body", False):
                body = b"".join(parts)
                if body:
                    _check_media_type(Headers(scope=scope).get("content-type", ""))
                return body
    raise InvalidRequest(
        f"the body did not arrive within {BODY_SECONDS_MAX:g} s", hint="send it again", code="request_timeout"
    )


def _check_media_type(content_type: str) -> None:
    """Also what keeps a form on a web page from being a request: a browser asks before it sends this type elsewhere."""
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in ("", "utf-8"):
        raise InvalidRequest(
            f"Content-Type {shown(content_type)} is not taken",
            hint="send Content-Type: application/json",
            code="unsupported_media_type",
        )


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers while what the client still sends is read away: the server's queue for it is short, and an answer that
    waits behind a full one would never end."""
    if BODY in scope or not _has_body(Headers(scope=scope)):
        await response(scope, receive, send)
        return
    # What follows on this connection is the rest of the body.
    response.headers["Connection"] = "close"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_discard, receive)
        await response(scope, receive, send)
        nursery.cancel_scope.cancel()


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _discard(receive: Receive) -> None:
    left = DISCARDED_BYTES_MAX
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        left -= len(message.get("body", b""))
