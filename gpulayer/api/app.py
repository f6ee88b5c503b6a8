"""The ASGI application: who asks, may they, is there such a thing, how much do they send; then the handler of the noun.

All of that is judged by the header, before any body is read. One plain ASGI function does it (a layer of
BaseHTTPMiddleware costs more than a whole handler). Handlers raise GpulayerError; problems.py says it in HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeAlias

import trio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulayer.api import (
    agreement,
    audit,
    authority,
    cluster,
    endpoints,
    events,
    health,
    jobs,
    leave,
    local,
    logs,
    metrics,
    openapi,
    resources,
    tokens,
)
from gpulayer.api.access import ADMIN, NODE, Caller, Tokens, caller_of, check_role, digest_in
from gpulayer.api.facade import NodeFacade
from gpulayer.api.forwarding import NoLeader, pass_on
from gpulayer.api.owners import LOCAL_PREFIX
from gpulayer.api.problems import MethodNotAllowed, answer_for, answer_for_bug, no_such_path
from gpulayer.api.requests import ASKED_BY_PEER, BODY, MOMENTS, REFUSED_LATER, LocalRoute, Moments
from gpulayer.model.errors import GpulayerError, InvalidRequest
from gpulayer.wire.http import BODY_BYTES_MAX, shown
from gpulayer.wire.peer import RequestHead

# A megabyte at 35 kB/s; a client that is slower than that is not one of ours.
BODY_SECONDS_MAX = 30.0
# How much of a refused body is read away, so that the client, still sending, gets to read why.
DISCARDED_BYTES_MAX = 256 * 1024 * 1024
LOCAL_NAMES = frozenset({"localhost"})
# Asked before there is any trust: whether it serves, and whose certificate to expect of it.
OPEN_PATHS = frozenset({"/healthz", "/readyz", authority.PATH})
ROUTES: tuple[Route, ...] = (
    *health.ROUTES,
    *authority.ROUTES,
    *jobs.ROUTES,
    *endpoints.ROUTES,
    *logs.ROUTES,
    *events.ROUTES,
    *audit.ROUTES,
    *cluster.ROUTES,
    *agreement.ROUTES,
    *leave.ROUTES,
    *resources.ROUTES,
    *tokens.ROUTES,
    *metrics.ROUTES,
    *openapi.ROUTES,
)

Gate: TypeAlias = Callable[[Scope, Headers], Awaitable[Caller | None]]
"""Says who asks, or raises; None for whoever needs not say it."""


def make_app(node: NodeFacade, *, trusted: bool, names: Iterable[str] = ()) -> Starlette:
    """`trusted`: for the unix socket, where whoever can connect is the admin. `names`: further ones, and addresses,
    that this node is called by in a Host header."""
    gate: Gate = _at_socket if trusted else _AtTcp(node, LOCAL_NAMES | {name.lower() for name in names})
    return _guarded(node, gate, ROUTES)


def make_peer_app(node: NodeFacade) -> Starlette:
    """For what other nodes of the cluster pass on, and ask of their own."""
    return _guarded(node, partial(_of_peer, node), (*ROUTES, *local.ROUTES, *leave.PEER_ROUTES))


def _guarded(node: NodeFacade, gate: Gate, routes: tuple[Route, ...]) -> Starlette:
    return Starlette(routes=routes, middleware=[Middleware(_Guard, node=node, gate=gate, routes=routes)])


# --- who asks -------------------------------------------------------------------------------------------------------


async def _at_socket(scope: Scope, headers: Headers) -> Caller:
    return ADMIN


class _AtTcp:
    """At a TCP port a token says it."""

    def __init__(self, node: NodeFacade, names: frozenset[str]) -> None:
        self._tokens = Tokens(node)
        self._names = names

    async def __call__(self, scope: Scope, headers: Headers) -> Caller | None:
        path = scope["path"]
        _check_host(headers.get("host", ""), self._names)
        if path in OPEN_PATHS:
            return None
        caller = await self._tokens.judge(digest_in(headers))
        check_role(caller.role, scope["method"], path)
        scope[REFUSED_LATER] = partial(self._tokens.wait_until_refused, caller)
        return caller


async def _of_peer(node: NodeFacade, scope: Scope, headers: Headers) -> Caller:
    """Its certificate was judged by its link. A token it passes on is judged here, where the log is."""
    head: RequestHead = scope[ASKED_BY_PEER]
    if head.role == "node":
        return NODE
    if scope["path"].startswith(LOCAL_PREFIX):
        raise no_such_path(scope["path"])
    if head.role == "admin":
        return ADMIN
    caller = caller_of(head.token_digest, node.state)
    check_role(caller.role, scope["method"], scope["path"])
    scope[REFUSED_LATER] = partial(Tokens(node).wait_until_refused, caller)
    return caller


# --- the guard ------------------------------------------------------------------------------------------------------


class _Guard:
    """Every request comes through here; what it lets through goes straight to its route."""

    def __init__(self, app: ASGIApp, *, node: NodeFacade, gate: Gate, routes: tuple[Route, ...]) -> None:
        self._node = node
        self._gate = gate
        self._moments = Moments(node)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            caller, route, matched = await self._judge(scope)
            body = await _read_body(scope, receive)
            scope.update(matched)
            scope[MOMENTS], scope[BODY] = self._moments, body
            if isinstance(route, LocalRoute) or self._node.is_voter:
                await route.handle(scope, receive, watched_send)
            else:
                assert caller is not None
                await self._pass_on(caller, scope, receive, watched_send)
        except Exception as error:  # noqa: BLE001
            # The edge of one request. A stream that began is cut, so that its client knows that there is more.
            if isinstance(error, GpulayerError):
                answer = answer_for(error)
            else:
                answer = answer_for_bug(error, scope["method"], scope["path"])
            if not has_started:
                await _refuse(answer, scope, receive, send)

    async def _judge(self, scope: Scope) -> tuple[Caller | None, Route, Mapping[str, Any]]:
        headers = Headers(scope=scope)
        caller = await self._gate(scope, headers)
        route, matched = self._find_route(scope)
        length = headers.get("content-length", "0")
        if int(length) > BODY_BYTES_MAX:
            raise _too_large(length)
        return caller, route, matched

    async def _pass_on(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        if ASKED_BY_PEER in scope:
            raise NoLeader(
                f"{self._node.node_name} does not lead the cluster either, and a request is passed on once",
                hint="try again in a few seconds, when the node that was asked knows who leads",
            )
        # A token goes along by its digest; the role that goes without one is the socket's.
        role = "token" if caller.digest else "admin"
        await pass_on(self._node, scope, scope[BODY], receive, send, role=role, token_digest=caller.digest)

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


def _check_host(host: str, names: frozenset[str]) -> None:
    """A web page can make a browser reach this node under the page's own name (DNS rebinding), and its requests carry
    that. Addresses cannot be rebound, only names."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() not in names and not _is_address(name):
        raise InvalidRequest(
            f"this node is not called {shown(host)}",
            hint=f"use its IP address, or {', '.join(sorted(names))}, in the URL",
        )


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


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
