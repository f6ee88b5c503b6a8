"""Who asks, and what may they? Tokens are judged by the log, which the voter has; any other node asks it.

What crosses to the voter is the digest of a secret, as the log holds it, never the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import cast

import trio
from starlette.datastructures import Headers

from gpulayer.api.facade import NodeFacade
from gpulayer.api.forwarding import ask_voter
from gpulayer.api.problems import NotAuthenticated
from gpulayer.model.access import APPROVED_SECONDS, APPROVED_SECONDS_ALONE
from gpulayer.model.cluster import ROLES, ClusterState, Role, Token
from gpulayer.model.errors import PermissionDenied, Unreachable
from gpulayer.model.ids import TokenId
from gpulayer.wire.peer import RequestHead

APPROVED_MAX = 1024
# Strangers with made-up tokens must not keep the voter, or the links to it, busy.
QUESTIONS_AT_A_TIME_MAX = 8
TOKEN_PATH = "/v1/local/token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    role: Role
    token: TokenId | None = None
    """None: it needed none."""
    digest: str = ""
    """Of the token's secret."""


ADMIN = Caller(role="admin")
"""Whoever can open the unix socket, here or at the node that passed the request on."""
NODE = Caller(role="admin")
"""Another daemon of the cluster, with a question of its own."""


@dataclass(frozen=True, slots=True)
class _Approved:
    caller: Caller
    at: float


class Tokens:
    """Judges tokens at one node."""

    def __init__(self, node: NodeFacade) -> None:
        self._node = node
        self._approved: OrderedDict[str, _Approved] = OrderedDict()
        self._questions = trio.CapacityLimiter(QUESTIONS_AT_A_TIME_MAX)

    async def judge(self, digest: str) -> Caller:
        """NotAuthenticated for an unknown one; Unreachable where it is not known here and no voter can be asked."""
        if self._node.is_voter:
            return caller_of(digest, self._node.state)
        known = self._known(digest, APPROVED_SECONDS)
        if known is not None:
            return known
        async with self._questions:
            # Somebody else may have asked the same meanwhile.
            known = self._known(digest, APPROVED_SECONDS)
            return known if known is not None else await self._ask(digest)

    async def wait_until_refused(self, caller: Caller) -> None:
        """For what goes on for long: returns once the token is good no more."""
        seen = self._node.version_of_view
        while True:
            if self._node.is_voter:
                if caller.token not in self._node.state.tokens:
                    return
                seen = await self._node.wait_for_change(seen)
                continue
            await trio.sleep(APPROVED_SECONDS)
            try:
                await self.judge(caller.digest)
            except (NotAuthenticated, Unreachable):
                return

    def _known(self, digest: str, seconds: float) -> Caller | None:
        found = self._approved.get(digest)
        return found.caller if found is not None and trio.current_time() - found.at <= seconds else None

    async def _ask(self, digest: str) -> Caller:
        head = RequestHead(method="GET", path=TOKEN_PATH, query="", headers=(), role="node", token_digest=digest)
        try:
            document = json.loads(await ask_voter(self._node, head))
        except NotAuthenticated:
            self._approved.pop(digest, None)
            raise
        except Unreachable:
            known = self._known(digest, APPROVED_SECONDS_ALONE)
            if known is None:
                raise
            return known
        caller = Caller(role=cast(Role, document["role"]), token=TokenId(document["id"]), digest=digest)
        self._approved[digest] = _Approved(caller, trio.current_time())
        self._approved.move_to_end(digest)
        if len(self._approved) > APPROVED_MAX:
            self._approved.popitem(last=False)
        return caller


def digest_in(headers: Headers) -> str:
    """sha256 of the secret that the header brings, hex; NotAuthenticated where there is none."""
    given = headers.getlist("authorization")
    scheme, _, secret = (given[0] if len(given) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise NotAuthenticated(
            "this needs a token", hint="send Authorization: Bearer TOKEN; gpulayer token create makes one"
        )
    return hashlib.sha256(secret.strip().encode("latin-1", "replace")).hexdigest()


def caller_of(digest: str, state: ClusterState) -> Caller:
    found: Token | None = None
    # All of them, so that the time tells nothing about which one it was.
    for token in state.tokens.values():
        if hmac.compare_digest(token.digest, digest):
            found = token
    if found is None:
        raise NotAuthenticated(
            "this token is not known here", hint="it may be revoked; gpulayer token create makes one"
        )
    return Caller(role=found.role, token=found.id, digest=digest)


def check_role(role: Role, method: str, path: str) -> None:
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
