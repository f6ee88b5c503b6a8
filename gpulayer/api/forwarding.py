"""What only the voter can answer is passed on to it, once, and its answer streamed back. Also: what this node itself
has to ask another one.

Nothing of an answer is kept here but the part that is on its way: a client that reads slowly slows the other node down,
one that goes away ends its work there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import structlog
import trio
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gpulayer.api.facade import NodeFacade
from gpulayer.api.problems import NotAuthenticated
from gpulayer.model.errors import GpulayerError, Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.seen import NodeSeen, Table
from gpulayer.model.units import format_duration
from gpulayer.wire.http import error_from_json
from gpulayer.wire.peer import RequestHead

log = structlog.get_logger()

# What the other node's handlers look at. Above all not Authorization: a secret goes no further than where it was sent.
REQUEST_HEADERS = ("accept", "content-type", "idempotency-key", "last-event-id")
RESPONSE_HEADERS = frozenset(
    {
        *("allow", "cache-control", "content-length", "content-type", "location", "retry-after"),
        *("www-authenticate", "x-accel-buffering"),
    }
)
# Of a question of our own. The largest answers are batches of log lines, of a quarter of a megabyte of text.
ANSWER_BYTES_MAX = 16 * 2**20


class NoLeader(Unreachable):
    """Nobody can commit anything now, or say what is committed."""

    default_code = "no_leader"


def voter_in(table: Table) -> NodeId:
    """Whom to ask for what is in the log. NoLeader, with what is known of it, where it is not there."""
    if table.leader is not None:
        return table.leader
    voter = next((node for node in table.nodes.values() if node.is_voter), None)
    if voter is not None and voter.state in ("alive", "suspect"):
        return voter.id
    raise _no_leader(voter)


def _no_leader(voter: NodeSeen | None) -> NoLeader:
    if voter is None:
        return NoLeader(
            "this node does not know yet which node of its cluster leads",
            hint="try again in a few seconds; gpulayer node list shows whom it sees",
        )
    why = f": {voter.reason}" if voter.reason else f" since {_ago(voter.age_seconds)}"
    return NoLeader(
        f"{voter.name}, which leads the cluster, is {voter.state}{why}",
        hint=f"services run on, and gpulayer job endpoints answers here; see to gpulayer up on {voter.name}",
    )


def _ago(seconds: float) -> str:
    return format_duration(max(1, round(seconds)))


async def ask_voter(node: NodeFacade, head: RequestHead) -> bytes:
    """The whole answer to a question of this node's own; raises what the voter says is wrong."""
    return await ask_node(node, voter_in(node.table()), head)


async def ask_node(node: NodeFacade, asked: NodeId, head: RequestHead) -> bytes:
    """The whole answer; raises what the other node says is wrong, and Unreachable where it says nothing."""
    parts: list[bytes] = []
    size = 0
    async with node.ask(asked, head) as answer:
        async for part in answer.parts():
            size += len(part)
            if size > ANSWER_BYTES_MAX:
                raise Unreachable(
                    f"the answer of {asked} to {head.path} is longer than {ANSWER_BYTES_MAX} bytes", hint="report this"
                )
            parts.append(part)
        status = answer.status
    content = b"".join(parts)
    if status >= 400:
        raise _error_in(content, status)
    return content


def _error_in(content: bytes, status: int) -> GpulayerError:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    error = error_from_json(document, status)
    return NotAuthenticated(error.message, hint=error.hint, code=error.code) if status == 401 else error


async def pass_on(
    node: NodeFacade, scope: Scope, body: bytes, receive: Receive, send: Send, *, role: str, token_digest: str
) -> None:
    """Answers the request with what the voter answers. Raises NoLeader while nothing has been sent; a stream that
    breaks off there is cut here, so that its client knows that there is more."""
    voter = voter_in(node.table())
    head = _head(scope, body, role, token_digest)
    refused: Unreachable | None = None
    has_ended = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
        nursery.start_soon(_cancel_when_stopping, scope.get("state", {}), nursery.cancel_scope)
        try:
            has_ended = await _relay(node, voter, head, send)
        except Unreachable as error:
            refused = error
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise _not_passed_on(node.table(), voter, refused) from refused
    if has_ended:
        # Not within the nursery: the server makes a disconnect of it.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _relay(node: NodeFacade, voter: NodeId, head: RequestHead, send: Send) -> bool:
    """All but the last chunk. False where the answer broke off; Unreachable where it did not even begin."""
    has_started = False
    try:
        async with node.ask(voter, head) as answer:
            kept = [(key.encode(), value.encode("latin-1")) for key, value in answer.headers if key in RESPONSE_HEADERS]
            has_started = True
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for part in answer.parts():
                if part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
    except Unreachable as error:
        if not has_started:
            raise
        log.warning("api.stream_cut", path=head.path, reason=str(error))
        return False
    return True


def _not_passed_on(table: Table, voter: NodeId, error: Unreachable) -> Unreachable:
    seen = table.nodes.get(voter)
    name = seen.name if seen is not None else voter
    if error.code == "no_answer":
        return Unreachable(
            f"{name}, which leads the cluster, went away before it had answered",
            hint="it may have done what was asked; look before you ask again",
            code="no_answer",
        )
    said = f", heard last {_ago(seen.age_seconds)} ago" if seen is not None and seen.age_seconds >= 1 else ""
    return NoLeader(
        f"{name}, which leads the cluster, cannot be reached{said}: {error.message}",
        hint=f"see to gpulayer up on {name}, and that its peer port is open to this node",
    )


def _head(scope: Scope, body: bytes, role: str, token_digest: str) -> RequestHead:
    headers = Headers(scope=scope)
    return RequestHead(
        method=scope["method"],
        path=scope["raw_path"].decode("ascii"),
        query=scope["query_string"].decode("latin-1"),
        headers=tuple((key, value) for key in REQUEST_HEADERS for value in headers.getlist(key)),
        role=role,
        token_digest=token_digest,
        body=body,
    )


async def _cancel_when_gone(receive: Receive, cancel_scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    cancel_scope.cancel()


async def _cancel_when_stopping(state: Mapping[str, trio.Event], cancel_scope: trio.CancelScope) -> None:
    shutdown = state.get("shutdown")
    if shutdown is not None:
        await shutdown.wait()
        cancel_scope.cancel()
