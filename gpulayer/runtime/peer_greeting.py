"""How two daemons meet: the first frames of a connection, and what has to be right about them.

The opener says hello, the other end judges it and answers with its own, the opener judges that. Whoever finds something
wrong says so in a goodbye, and both know why. Dialler is the opener's part, Reception the other end's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

import structlog
import trio

from gpulayer.model.address import Address
from gpulayer.model.errors import PermissionDenied
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.runtime.frame_stream import FrameStream, Limits, LinkEnded, address_of, connect, secure
from gpulayer.runtime.trust import Contexts, Identity, client_context, fetch_authority
from gpulayer.wire.frames import FRAME_BYTES_MAX, JOIN_BYTES_MAX
from gpulayer.wire.peer import Goodbye, Hello, JoinAccepted, JoinRejected, JoinRequest, PeerFrame, Use

log = structlog.get_logger()

HELLO_ADDRESSES_MAX = 4
TEXT_MAX = 64
# To be met where another was expected is no trouble of anybody: addresses are shared and change hands.
NOT_WANTED = ("self", "other_node")
# The other end is well, and will take a link at another time.
FOR_NOW = ("restarting", "busy", "too_many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A connection that was not taken as a link, by us or (`by_us` False) by the other end. Codes: foreign_cluster,
    identity, not_a_member, other_node, protocol, bad_certificate, certificate_expired, bad_frame, no_tls, tls_version,
    tls, too_many, busy, old_run; self: we have met ourselves; duplicate_id: another process with our id, or a second
    one with a peer's: the data directory was copied."""

    code: str
    text: str
    hint: str
    node: NodeId | None
    address: Address
    by_us: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which this daemon meets others; PeerLinks says what each is."""

    hello: Callable[[Use], Hello]
    contexts: Callable[[], Contexts]
    is_allowed: Callable[[NodeId], bool]
    unwelcome: Callable[[Hello], Goodbye | None]
    """Why not now, of one who is right in everything else."""
    doubts: Callable[[Hello], Awaitable[Goodbye | None]]
    """Why not, after a look around."""
    refused: Callable[[Refusal], None]
    limits: Limits


def objection(
    hello: Hello, identity: Identity | None, own: Hello, is_allowed: Callable[[NodeId], bool]
) -> Goodbye | None:
    """What is wrong with the other end's hello, in words for it; None: nothing. A joiner, who shows no certificate, is
    judged by its request, later."""
    node, (lowest, highest), (least, most) = hello.run.node, hello.protocol, own.protocol
    if not _is_sane(hello):
        return Goodbye(code="bad_frame", message="this hello makes no sense")
    if identity is None and hello.use != "join":
        return Goodbye(code="identity", message="only a node with a certificate of this cluster may say that")
    if lowest > most or highest < least:
        return Goodbye(
            code="protocol",
            message=f"node {own.run.node} (gpulayer {own.gpulayer_version}) speaks peer protocol {least}-{most}, "
            f"node {node} (gpulayer {hello.gpulayer_version}) {lowest}-{highest}",
            hint="upgrade the older of the two",
        )
    if hello.use == "join":
        return None
    if hello.cluster_id != own.cluster_id:
        return Goodbye(
            code="foreign_cluster",
            message=f"node {node} is of cluster {hello.cluster_id}, node {own.run.node} of {own.cluster_id}",
            hint="was the address once another cluster's?",
        )
    if identity != Identity(hello.cluster_id, node):
        return Goodbye(
            code="identity",
            message=f"the hello is of node {node}, the certificate of {identity}",
            hint="restart that node; if that does not help, join it again",
        )
    if hello.run == own.run:
        return Goodbye(code="self", message=f"node {node} has met itself")
    if node == own.run.node:
        return Goodbye(
            code="duplicate_id",
            message=f"two daemons run as node {node} (epochs {hello.run.epoch} and {own.run.epoch})",
            hint="one data directory is a copy of the other: stop one daemon, and start it with --abandon-state",
        )
    if not is_allowed(node):
        return Goodbye(
            code="not_a_member",
            message=f"node {node} is not in the registry of cluster {own.cluster_id}",
            hint="it was removed: join it again, with --abandon-state",
        )
    return None


class Dialler:
    """Opens connections to peers, greeted and judged."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms

    async def dial(
        self, addresses: Sequence[Address], use: Use, wanted: NodeId | None, *, seconds: float
    ) -> FrameStream:
        """To the wanted node (None: to whoever is there), at the first of its addresses where it is met.

        `seconds`: for a TCP connection. LinkEnded: `timeout` if any of them was silent, `refused` only if nobody of
        our cluster was met and none was silent."""
        left, found = list(addresses), list[LinkEnded]()
        while left:
            try:
                plain, address = await connect(left, seconds=seconds)
            except LinkEnded as ended:
                found.append(ended)
                break
            left.remove(address)
            try:
                return await self._greeted(plain, address, use, wanted)
            except LinkEnded as ended:
                found.append(ended)
        raise _summary(wanted, found)

    async def _greeted(
        self, plain: trio.SocketStream, address: Address, use: Use, wanted: NodeId | None
    ) -> FrameStream:
        limits = self._terms.limits
        with trio.move_on_after(limits.hello_seconds):
            try:
                stream = await secure(
                    plain,
                    self._terms.contexts().client,
                    address,
                    server_side=False,
                    write_seconds=limits.write_seconds,
                )
                await self._greet(stream, self._terms.hello(use), wanted)
                return stream
            except LinkEnded as ended:
                if ended.code not in (LinkEnded.default_code, *NOT_WANTED, *FOR_NOW):
                    self._terms.refused(
                        Refusal(
                            code=ended.code,
                            text=ended.message,
                            hint=ended.hint,
                            node=wanted,
                            address=address,
                            by_us=ended.is_ours,
                        )
                    )
                raise
        raise LinkEnded("timeout", f"{address} was connected and said nothing for {limits.hello_seconds:g} s")

    async def _greet(self, stream: FrameStream, own: Hello, wanted: NodeId | None) -> None:
        try:
            hello = await exchange_hello(stream, own)
            wrong = objection(hello, stream.identity, own, self._terms.is_allowed)
            if wrong is None and hello.use != own.use:
                wrong = Goodbye(code="bad_frame", message=f"an answer for {hello.use} to a hello for {own.use}")
            if wrong is None and wanted is not None and hello.run.node != wanted:
                wrong = Goodbye(code="other_node", message=f"node {wanted} was expected at this address")
            if wrong is not None:
                await stream.aclose(wrong)
                raise LinkEnded(
                    "failed", f"{stream.remote}: {wrong.message}", hint=wrong.hint, code=wrong.code, is_ours=True
                )
        except BaseException:
            stream.close()
            raise


async def exchange_hello(stream: FrameStream, own: Hello) -> Hello:
    """The opener's first frame, and the answer, not judged yet. LinkEnded; a goodbye in place of a hello is `failed`
    with its code, unless the other end is only about to restart."""
    await stream.send_frame(own)
    try:
        answer = await stream.receive_frame()
    except LinkEnded as ended:
        if ended.why == "goodbye" and ended.code in FOR_NOW:
            raise
        if ended.why in ("goodbye", "closed"):
            words = ended.message if ended.why == "goodbye" else "closed before it said who it is"
            raise LinkEnded("failed", f"{stream.remote}: {words}", hint=ended.hint, code=ended.code) from ended
        raise
    if not isinstance(answer, Hello):
        raise LinkEnded("failed", f"{stream.remote} began with {type(answer).__name__}", code="bad_frame")
    stream.hello = answer
    stream.reader.bytes_max = FRAME_BYTES_MAX
    return answer


class Reception:
    """Takes connections as they come and lets in those that are greeted well, a bounded number of them at a time."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._handshakes = trio.CapacityLimiter(terms.limits.handshakes_max)
        self._sources: dict[str, trio.CapacityLimiter] = {}
        self.arrivals = 0

    async def greet(self, plain: trio.SocketStream) -> FrameStream | None:
        """The connection, with its hello answered; None: it is closed, and whoever had to be told was told."""
        try:
            remote = address_of(plain.socket.getpeername())
        except OSError:  # gone already
            plain.socket.close()
            return None
        limits = self._terms.limits
        source = self._sources.setdefault(remote.host, trio.CapacityLimiter(limits.handshakes_per_source_max))
        # No source may fill the queue, so that others still find a place in it.
        if self.arrivals >= limits.arrivals_max or _users(source) >= limits.arrivals_max // 2:
            plain.socket.close()
            return None
        self.arrivals += 1
        try:
            with trio.move_on_after(limits.hello_seconds) as patience:
                # Its source's place first: who sends many holds no place of all while waiting for one of its own.
                async with source, self._handshakes:
                    patience.deadline = trio.current_time() + limits.hello_seconds
                    return await self._greeted(plain, remote)
            plain.socket.close()
            return None
        except LinkEnded as ended:
            if ended.code != LinkEnded.default_code:
                self._terms.refused(
                    Refusal(
                        code=ended.code,
                        text=ended.message,
                        hint=ended.hint,
                        node=None,
                        address=remote,
                        by_us=ended.is_ours,
                    )
                )
            return None
        finally:
            self.arrivals -= 1
            if not _users(source):
                self._sources.pop(remote.host, None)

    async def _greeted(self, plain: trio.SocketStream, remote: Address) -> FrameStream | None:
        limits = self._terms.limits
        stream = await secure(
            plain, self._terms.contexts().server, remote, server_side=True, write_seconds=limits.write_seconds
        )
        try:
            stream.reader.kind = Hello
            with trio.move_on_after(limits.header_seconds):
                await stream.receive_header()
            if not stream.reader.has_header:
                stream.close()
                return None
            hello = await stream.receive_frame()
            assert isinstance(hello, Hello), "the reader takes nothing else"
            own = self._terms.hello(hello.use)
            wrong = objection(hello, stream.identity, own, self._terms.is_allowed) or self._terms.unwelcome(hello)
            if wrong is None and hello.use != "join":
                wrong = await self._terms.doubts(hello)
            if wrong is not None:
                await self._turn_away(stream, hello, wrong)
                return None
            stream.hello = hello
            if hello.use == "join":
                stream.reader.kind, stream.reader.bytes_max = JoinRequest, JOIN_BYTES_MAX
            else:
                stream.reader.kind, stream.reader.bytes_max = PeerFrame, FRAME_BYTES_MAX
            await stream.send_frame(own)
            return stream
        except BaseException:
            stream.close()
            raise

    async def _turn_away(self, stream: FrameStream, hello: Hello, wrong: Goodbye) -> None:
        if wrong.code not in (*NOT_WANTED, *FOR_NOW):
            self._terms.refused(
                Refusal(
                    code=wrong.code,
                    text=wrong.message,
                    hint=wrong.hint,
                    node=stream.identity.node if stream.identity else None,
                    address=stream.remote,
                    by_us=True,
                )
            )
        await stream.aclose(wrong)


async def ask_to_join(
    address: Address, pinned: str, request: JoinRequest, *, limits: Limits | None = None
) -> JoinAccepted | JoinRejected:
    """What the node at the address answers. `pinned`: of the cluster's CA (trust.pin), which must have certified it:
    the request, with its token, is shown to nobody else.

    Unreachable: nobody answers; PermissionDenied (code `wrong_authority`): it is not of that cluster."""
    limits = limits or Limits()
    authority_pem = await trio.to_thread.run_sync(
        partial(fetch_authority, address.host, address.port, pinned, seconds=limits.connect_seconds),
        abandon_on_cancel=True,
    )
    context = client_context(authority_pem, check_names=False)
    plain, _ = await connect((address,), seconds=limits.connect_seconds)
    hello = Hello(
        use="join",
        protocol=request.protocol,
        cluster_id="",
        run=Run(node=request.node, epoch=0, run_id=0),
        addresses=(),
        gpulayer_version=request.gpulayer_version,
    )
    stream = None
    try:
        with trio.move_on_after(limits.hello_seconds):
            stream = await secure(plain, context, address, server_side=False, write_seconds=limits.write_seconds)
            await exchange_hello(stream, hello)
        if stream is None or stream.hello is None:
            raise LinkEnded("timeout", f"{address} said nothing for {limits.hello_seconds:g} s")
        with trio.move_on_after(limits.join_answer_seconds):
            await stream.send_frame(request)
            answer = await stream.receive_frame()
            if not isinstance(answer, JoinAccepted | JoinRejected):
                raise LinkEnded("failed", f"{address} answered with {type(answer).__name__}", code="bad_frame")
            await stream.aclose()
            return answer
        raise LinkEnded("timeout", f"{address} has not answered in {limits.join_answer_seconds:g} s")
    except LinkEnded as ended:
        if ended.code == "foreign_cluster":
            raise PermissionDenied(
                f"{address} shows the authority that the token names, and is not certified by it",
                hint="someone is in between; do not use this network before you know who",
                code="wrong_authority",
            ) from ended
        raise
    finally:
        if stream is not None:
            stream.close()
        plain.socket.close()


def _users(limiter: trio.CapacityLimiter) -> int:
    return limiter.borrowed_tokens + limiter.statistics().tasks_waiting


def _is_sane(hello: Hello) -> bool:
    try:
        for address in hello.addresses:
            if "%" in address.host:  # whatever is behind it, it means nothing here
                return False
            ip_address(address.host)
    except ValueError:
        return False
    return (
        len(hello.addresses) <= HELLO_ADDRESSES_MAX
        and all(0 < address.port < 65536 for address in hello.addresses)
        and min(hello.run.epoch, hello.run.run_id, hello.datagrams_sent, hello.key_ring_version, *hello.protocol) >= 0
        and hello.protocol[0] <= hello.protocol[1]
        and max(map(len, (hello.run.node, hello.cluster_id, hello.gpulayer_version))) <= TEXT_MAX
    )


def _summary(wanted: NodeId | None, found: Sequence[LinkEnded]) -> LinkEnded:
    """What became of an attempt, of what became of each of its addresses."""
    if not found:
        return LinkEnded("failed", f"node {wanted} has no address", hint="it has told none yet")
    # Greetings come first, the failure to connect to the addresses that were left is the last.
    telling = [ended for ended in found if ended.code not in NOT_WANTED] or list(found)
    chosen = next((ended for ended in telling if ended.why == "timeout"), telling[0])
    return LinkEnded(chosen.why, "; ".join(ended.message for ended in found), hint=chosen.hint, code=chosen.code)
