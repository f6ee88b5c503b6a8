"""The links between this daemon and its peers: one for each peer, opened when there is something to say.

Every link is TLS 1.3 with both ends' certificates of the cluster's CA; the hello that comes first on it must be of the
certificate's node. A connection without a certificate may hand in one request to join and nothing else. What is said
over links is the callers'; here is who may, how many, how long, and how a link's end is told:

    refused   the host says that nobody listens there    timeout   nothing answered, or read, in time
    closed    broken off without a goodbye               goodbye   the other end said why, or we closed it
    failed    anything else: another cluster, a broken frame, no route

Two links of one peer come about when both ends open at once. The one opened by the smaller node id stays; the other is
read to its end, so nothing is lost.
"""

from __future__ import annotations

import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import structlog
import trio

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.runtime.frame_stream import FrameStream, Limits, LinkEnded, Why
from gpulayer.runtime.outbox import Outbox
from gpulayer.runtime.peer_greeting import Dialler, Reception, Refusal, Terms
from gpulayer.runtime.peer_guests import Guests, OnBulk, OnJoin
from gpulayer.runtime.trust import Contexts
from gpulayer.wire.codec import EncodeError
from gpulayer.wire.frames import encode_frame
from gpulayer.wire.peer import (
    Goodbye,
    GossipFrame,
    Hello,
    JoinRequest,
    PeerFrame,
    Use,
)

log = structlog.get_logger()

# Of the refusals that were told once and are not told again.
SAID_MAX = 1024
CLOSE_ALL_SECONDS = 1.0
IDLE_LOOKS_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    run: Run
    address: Address
    """Of an inbound one the port is not one that it listens on."""
    is_ours: bool
    since: float
    waiting_bytes: int


class _Link:
    """A greeted connection of use "peer", from then on until it is closed."""

    def __init__(self, stream: FrameStream, hello: Hello, opener: NodeId, outbox: Outbox, now: float) -> None:
        self.stream, self.hello, self.opener, self.outbox = stream, hello, opener, outbox
        self.since = self.active_at = now
        self.why: Why | None = None
        self.reason = ""
        self.last_words: Goodbye | None = None
        """Set: `rest` and then these are sent, nothing else, and what still comes is read to its end."""
        self.rest = b""
        self.is_mute = False
        """Its end was told already: what comes is not."""
        self.scope = trio.CancelScope()


class _Peer:
    """What is kept of a node while it has a link, or is about to have one."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.link: _Link | None = None
        self.opening: trio.CancelScope | None = None
        self.why_not: Why | None = None
        """Why the opening was given up here."""


class PeerLinks:
    """`hello` gives our own first frame for a use; `contexts` the TLS contexts of now, asked for at every handshake, so
    that a renewed certificate is used without a restart. Callbacks without `await` never wait.

    on_up(hello, address, is_ours)     a link with hello.run stands; also the answer to a contact() that found one
    on_down(node, address, why)        it has ended or was not opened, and what the other end has not answered may
                                       be lost; node None: of a contact() alone
    on_frame(run, frame)               anything but hello and goodbye
    on_join(request, observed)         -> the answer; where the request came from
    on_bulk(run, stream)               serves a stream that a peer opened, until it returns
    on_refused(refusal)                what was not taken as a link; said once per address and code
    doubts(hello)                      -> words for a member that greets us and is not to be believed, or None
    """

    def __init__(
        self,
        *,
        hello: Callable[[Use], Hello],
        contexts: Callable[[], Contexts],
        is_allowed: Callable[[NodeId], bool],
        on_up: Callable[[Hello, Address, bool], None],
        on_down: Callable[[NodeId | None, Address | None, Why], None],
        on_frame: Callable[[Run, PeerFrame], None],
        on_join: OnJoin,
        on_bulk: OnBulk,
        on_refused: Callable[[Refusal], None] = lambda _: None,
        doubts: Callable[[Hello], Awaitable[Goodbye | None]] | None = None,
        members_max: int = 4096,
        limits: Limits | None = None,
    ) -> None:
        self._hello, self._is_allowed = hello, is_allowed
        self._on_up, self._on_down, self._on_frame = on_up, on_down, on_frame
        self._on_refused = on_refused
        self._members_max = members_max
        self._limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        """For metrics: opened, accepted, joins, bulk_in, bulk_out, frames_in, bytes_in, bytes_out, gossip_dropped,
        too_large, down_<why>, refused_<code>."""
        self._guests = Guests(on_join=on_join, on_bulk=on_bulk, limits=self._limits, counts=self.counts)
        terms = Terms(
            hello=hello,
            contexts=contexts,
            is_allowed=is_allowed,
            unwelcome=self._unwelcome,
            doubts=doubts or _no_doubts,
            refused=self._refused,
            limits=self._limits,
        )
        self._dialler, self._reception = Dialler(terms), Reception(terms)
        self._peers: dict[NodeId, _Peer] = {}
        self._links: set[_Link] = set()
        """All that live, those that say goodbye included."""
        self._contacts: set[Address] = set()
        self._kept: frozenset[NodeId] = frozenset()
        self._said: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._nursery: trio.Nursery | None = None
        self._is_closing = False
        self._all_gone = trio.lowlevel.ParkingLot()

    # --- what callers do ------------------------------------------------------------------------------------------

    async def run(
        self,
        listening: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves for good, until cancelled or after close_all(). `listening`: bound TCP sockets, this task's from now
        on. Cancelling closes every link without a goodbye."""
        listeners = []
        for each in listening:
            each.setblocking(False)
            listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(each)))
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._close_idle_ones)
                # serve_listeners waits out EMFILE and the like instead of ending.
                await nursery.start(partial(trio.serve_listeners, self._arrive, listeners, handler_nursery=nursery))
                task_status.started()
        finally:
            self._nursery = None
            self._is_closing = True

    def send(self, node: NodeId, addresses: Sequence[Address], frame: PeerFrame, *, urgent: bool = False) -> None:
        """Over the link to it, which is opened if there is none. `urgent`: ahead of what waits, and with a short
        timeout if it has to be opened."""
        assert node != self._own.node, "a node has no link to itself"
        if self._is_closing:
            return
        try:
            data = encode_frame(frame)
        except EncodeError as error:
            self.counts["too_large"] += 1
            log.error("peer.frame_not_sent", node=node, frame=type(frame).__name__, reason=str(error))
            return
        peer = self._peer(node)
        if isinstance(frame, GossipFrame):
            self.counts["gossip_dropped"] += peer.outbox.put_gossip(data, urgent=urgent)
        elif not peer.outbox.put_kept(data):
            log.warning("peer.outbox_full", node=node, waiting_bytes=peer.outbox.waiting_bytes)
            self._break(node, peer)
            return
        if peer.link is None and peer.opening is None:
            self._open(node, peer, addresses, urgent=urgent)

    def contact(self, address: Address) -> None:
        """Opens a link to whoever of our cluster is there. Ends in on_up, or on_down with node None."""
        if self._is_closing or address in self._contacts:
            return
        if len(self._contacts) >= self._limits.opened_max:
            self._down(None, address, "failed")
            return
        self._contacts.add(address)
        self._start(self._contact, address)

    def close(self, node: NodeId) -> None:
        """Says goodbye, after what is still to be sent. on_down follows at once, if there was a link."""
        peer = self._peers.get(node)
        if peer is not None and peer.opening is not None:
            peer.why_not = "goodbye"
            peer.opening.cancel()
        if peer is not None and peer.link is not None:
            self._retire(peer.link, Goodbye(code="idle"), told="goodbye")

    def expel(self, node: NodeId) -> None:
        """It is allowed no more: ends its link as close() does, and cuts the streams that it has open."""
        self.close(node)
        self._guests.end(node)

    def keep(self, nodes: Iterable[NodeId]) -> None:
        """Links that are not closed when idle: to the leader, between voters. Replaces what was said before."""
        self._kept = frozenset(nodes)

    async def open_stream(self, node: NodeId | None, addresses: Sequence[Address], *, use: Use = "bulk") -> FrameStream:
        """A stream of its own, for the caller to close; to the node, or (None) to whoever of our cluster is there.
        LinkEnded (an Unreachable)."""
        stream = await self._dialler.dial(addresses, use, node, seconds=self._limits.connect_seconds)
        self.counts["bulk_out"] += 1
        return stream

    async def close_all(self, goodbye: Goodbye | None = None) -> None:
        """Takes nothing new, says goodbye to all within a second, and ends run(). Nothing is told by on_down."""
        self._is_closing = True
        words = goodbye or Goodbye(code="restarting", message=f"node {self._own.node} is restarting")
        for link in list(self._links):
            self._retire(link, words)
            self._abandon(link)
        with trio.move_on_after(CLOSE_ALL_SECONDS):
            while self._links:
                await self._all_gone.park()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    @property
    def links(self) -> dict[NodeId, LinkSeen]:
        """Those that stand now."""
        return {
            node: LinkSeen(
                run=peer.link.hello.run,
                address=peer.link.stream.remote,
                is_ours=peer.link.opener == self._own.node,
                since=peer.link.since,
                waiting_bytes=peer.outbox.waiting_bytes,
            )
            for node, peer in self._peers.items()
            if peer.link is not None
        }

    def check(self) -> None:
        """The invariants."""
        for node, peer in self._peers.items():
            assert peer.link is None or (peer.link in self._links and peer.link.hello.run.node == node)
            assert peer.link is None or peer.link.last_words is None
            assert peer.link is not None or peer.opening is not None, f"{node} has neither link nor opening"
        assert self._opened() <= self._limits.opened_max
        assert all(0 < streams <= self._limits.bulk_per_peer_max for streams in self._guests.streams.values())

    # --- opening --------------------------------------------------------------------------------------------------

    @cached_property
    def _own(self) -> Run:
        return self._hello("peer").run

    def _peer(self, node: NodeId) -> _Peer:
        peer = self._peers.get(node)
        if peer is None:
            limits = self._limits
            outbox = Outbox(
                frames=limits.outbox_frames,
                bytes_max=limits.outbox_bytes,
                kept_frames=limits.outbox_kept_frames,
                kept_bytes=limits.outbox_kept_bytes,
            )
            peer = self._peers[node] = _Peer(outbox)
        return peer

    def _start(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        assert self._nursery is not None, "run() is not running"
        self._nursery.start_soon(task, *arguments)

    def _opened(self) -> int:
        """Ours: those that stand and those that are being opened."""
        own = self._own.node
        return sum(
            peer.opening is not None or (peer.link is not None and peer.link.opener == own)
            for peer in self._peers.values()
        )

    def _open(self, node: NodeId, peer: _Peer, addresses: Sequence[Address], *, urgent: bool) -> None:
        peer.opening, peer.why_not = trio.CancelScope(), None
        if self._opened() > self._limits.opened_max and not self._make_room():
            log.warning("peer.too_many_links", node=node, most=self._limits.opened_max)
            self._not_opened(node, peer, addresses, "failed")
            return
        limits = self._limits
        seconds = limits.connect_urgent_seconds if urgent else limits.connect_seconds
        self._start(self._open_now, node, peer, tuple(addresses), seconds)

    def _make_room(self) -> bool:
        """Closes the link of ours that has been quiet for longest."""
        own = self._own.node
        quiet = [
            peer.link
            for node, peer in self._peers.items()
            if peer.link is not None and peer.link.opener == own and node not in self._kept and not peer.outbox
        ]
        if quiet:
            self._retire(min(quiet, key=lambda link: link.active_at), Goodbye(code="idle"), told="goodbye")
        return bool(quiet)

    async def _open_now(self, node: NodeId, peer: _Peer, addresses: tuple[Address, ...], seconds: float) -> None:
        assert peer.opening is not None
        stream, why = None, None
        with peer.opening:
            try:
                stream = await self._dialler.dial(addresses, "peer", node, seconds=seconds)
            except LinkEnded as ended:
                why = ended.why
                log.debug("peer.not_opened", node=node, why=why, reason=ended.message)
        if stream is None:
            self._not_opened(node, peer, addresses, peer.why_not or why or "failed")
        else:
            peer.opening = None
            await self._serve(stream, self._own.node)

    def _not_opened(self, node: NodeId, peer: _Peer, addresses: Sequence[Address], why: Why) -> None:
        peer.opening = None
        if peer.link is None:  # else the other end has opened one meanwhile, and what waits goes over that
            self._peers.pop(node, None)
            self._down(node, addresses[0] if addresses else None, why)

    async def _contact(self, address: Address) -> None:
        try:
            stream = await self._dialler.dial((address,), "peer", None, seconds=self._limits.connect_seconds)
        except LinkEnded as ended:
            self._contacts.discard(address)
            self._down(None, address, ended.why)
            return
        self._contacts.discard(address)
        assert stream.hello is not None
        own = self._own.node
        known = self._peers.get(stream.hello.run.node)
        old = known.link if known is not None else None
        if old is not None and old.hello.run == stream.hello.run:
            self._on_up(stream.hello, address, True)  # which of the two stays is told to nobody
        elif self._opened() >= self._limits.opened_max and not self._make_room():
            await stream.aclose()
            self._down(None, address, "failed")
            return
        await self._serve(stream, own)

    # --- arriving -------------------------------------------------------------------------------------------------

    async def _arrive(self, plain: trio.SocketStream) -> None:
        stream = await self._reception.greet(plain)
        if stream is None:
            return
        try:
            assert stream.hello is not None
            match stream.hello.use:
                case "peer":
                    self.counts["accepted"] += 1
                    await self._serve(stream, stream.hello.run.node)
                case "bulk" if (words := self._unwelcome(stream.hello)) is not None:
                    await stream.aclose(words)
                case "bulk":
                    await self._guests.serve_bulk(stream, stream.hello.run)
                case "join":
                    await self._guests.serve_join(stream)
                case "raft":
                    await stream.aclose(Goodbye(code="refused", message="no consensus between nodes here yet"))
        finally:
            stream.close()

    # --- a link's life ----------------------------------------------------------------------------------------------

    async def _serve(self, stream: FrameStream, opener: NodeId) -> None:
        """From the hellos to the end."""
        hello = stream.hello
        assert hello is not None
        node = hello.run.node
        link = _Link(stream, hello, opener, self._peer(node).outbox, trio.current_time())
        self._links.add(link)
        try:
            self._adopt(link)
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, link)
                    await self._read(link)
                    # Where both ends have turned to another link, what was on its way on this one is still sent.
                    if link.last_words is None or link.why != "goodbye":
                        nursery.cancel_scope.cancel()
            self._end(link)
            if link.why == "failed":
                # Else it would look as if this daemon had been killed.
                await stream.aclose(Goodbye(code="broken", message=link.reason))
        finally:
            self._links.discard(link)
            self._all_gone.unpark_all()
            stream.close()
            self.counts["bytes_in"] += stream.bytes_in
            self.counts["bytes_out"] += stream.bytes_out

    def _unwelcome(self, hello: Hello) -> Goodbye | None:
        """Why the link of this hello cannot be its node's, as things are."""
        if self._is_closing:
            return Goodbye(code="restarting", message=f"node {self._own.node} is restarting")
        if hello.use != "join" and not self._is_allowed(hello.run.node):  # it was, when its hello was judged
            return Goodbye(code="not_a_member", message=f"node {hello.run.node} was removed")
        peer = self._peers.get(hello.run.node)
        if hello.use != "peer" or peer is None or peer.link is None:
            return None
        node, epoch, known = hello.run.node, hello.run.epoch, peer.link.hello.run
        if epoch == known.epoch and hello.run != known:
            return Goodbye(
                code="duplicate_id",
                message=f"two daemons run as node {node}, both in epoch {epoch}",
                hint="one data directory is a copy of the other: stop one daemon, and start it with --abandon-state",
            )
        if epoch < known.epoch:
            return Goodbye(code="old_run", message=f"node {node} has started again since (epoch {known.epoch})")
        return None

    def _adopt(self, link: _Link) -> None:
        """It becomes the peer's link, or says goodbye at once."""
        node = link.hello.run.node
        peer = self._peers[node]
        old = peer.link
        words = self._unwelcome(link.hello)  # once more: another link may have come up since its hello
        if words is not None:
            link.is_mute = True
            self._retire(link, words)
        elif old is None:
            self._take(peer, link)
        elif old.hello.run != link.hello.run:
            self._retire(old, Goodbye(code="old_run", message=f"node {node} has started again"), told="closed")
            self._take(self._peer(node), link)
        elif self._replaces(link, old):
            peer.link = link
            self._retire(old, Goodbye(code="known"))
        else:
            self._retire(link, Goodbye(code="known"))

    def _take(self, peer: _Peer, link: _Link) -> None:
        ours = link.opener == self._own.node
        if not ours and sum(each.opener != self._own.node for each in self._links) > self._members_max:
            link.is_mute = True
            self._retire(link, Goodbye(code="too_many", message=f"{self._members_max} links are open"))
            self._forget_if_unused(link.hello.run.node)
            return
        peer.link = link
        link.outbox = peer.outbox
        self.counts["opened"] += ours
        log.debug("peer.up", node=link.hello.run.node, address=str(link.stream.remote), ours=ours)
        self._on_up(link.hello, link.stream.remote, ours)

    def _replaces(self, new: _Link, old: _Link) -> bool:
        """Of two links of the same run. Both ends must choose the same one."""
        if new.opener == old.opener:
            return True  # it would not have opened another if it still had the first
        limits = self._limits
        if new.since - old.since > limits.connect_seconds + limits.hello_seconds:
            return True  # begun after the first stood, so that one is lost to the other end
        return new.opener == min(new.hello.run.node, self._own.node)

    async def _write(self, link: _Link) -> None:
        try:
            while data := await link.outbox.take(lambda: link.last_words is not None):
                await self._put(link, data)
            assert link.last_words is not None
            if link.rest:
                await self._put(link, link.rest)
            await link.stream.send_frame(link.last_words)
        except LinkEnded as ended:
            if ended.why == "closed":
                # Its goodbye may be here and not read yet.
                link.scope.deadline = min(link.scope.deadline, trio.current_time() + 1.0)
            else:
                link.why = link.why or ended.why
                link.scope.cancel()

    async def _put(self, link: _Link, data: bytes) -> None:
        await link.stream.send_encoded(data)
        link.active_at = trio.current_time()

    async def _read(self, link: _Link) -> None:
        run, stream = link.hello.run, link.stream
        try:
            while True:
                frame = await stream.receive_frame()
                link.active_at = trio.current_time()
                self.counts["frames_in"] += 1
                if isinstance(frame, Hello | JoinRequest):
                    raise LinkEnded("failed", f"{type(frame).__name__} in the middle of a link", code="bad_frame")
                if not link.is_mute:
                    self._on_frame(run, frame)
        except LinkEnded as ended:
            link.why, link.reason = link.why or ended.why, ended.message
            if ended.why == "goodbye" and ended.code == "known":
                self._follow(link)
            elif ended.why == "failed":
                log.warning("peer.broken", node=run.node, reason=ended.message)

    def _follow(self, link: _Link) -> None:
        """The other end has turned to a link that we are opening just now: what waits is for that one."""
        peer = self._peers.get(link.hello.run.node)
        if peer is not None and peer.link is link and peer.opening is not None:
            peer.link = None
            link.last_words = Goodbye(code="known")
            link.scope.deadline = min(link.scope.deadline, trio.current_time() + self._limits.hello_seconds)
            link.outbox.wake()

    def _end(self, link: _Link) -> None:
        node = link.hello.run.node
        peer = self._peers.get(node)
        if peer is not None and peer.link is link:
            self._abandon(link)
            self._down(node, link.stream.remote if link.opener == self._own.node else None, link.why or "closed")
        else:
            self._forget_if_unused(node)

    def _abandon(self, link: _Link) -> None:
        """It is the peer's link no more."""
        peer = self._peers.get(link.hello.run.node)
        if peer is not None and peer.link is link:
            peer.link = None
            peer.outbox.take_all()
        self._forget_if_unused(link.hello.run.node)

    def _forget_if_unused(self, node: NodeId) -> None:
        peer = self._peers.get(node)
        if peer is not None and peer.link is None and peer.opening is None:
            del self._peers[node]

    def _retire(self, link: _Link, words: Goodbye, *, told: Why | None = None) -> None:
        """Lets it say what waits, if it is its peer's link, and then `words`, and end. `told`: by on_down, now."""
        if link.last_words is not None:
            return
        node = link.hello.run.node
        peer = self._peers.get(node)
        link.last_words = words
        link.scope.deadline = min(link.scope.deadline, trio.current_time() + self._limits.hello_seconds)
        if peer is not None and peer.link is link:
            link.rest = peer.outbox.take_all()
            self._abandon(link)
        link.outbox.wake()
        if told is not None:
            link.is_mute = True
            self._down(node, link.stream.remote if link.opener == self._own.node else None, told)

    def _break(self, node: NodeId, peer: _Peer) -> None:
        """Gives up the link, or the opening, of a peer that takes nothing: it starts anew with what is asked then."""
        if peer.opening is not None:
            peer.why_not = "failed"
            peer.opening.cancel()
        if peer.link is not None:
            peer.link.why, peer.link.reason = "failed", "it takes too little of what it is told"
            peer.link.scope.cancel()

    async def _close_idle_ones(self) -> None:
        while True:
            await trio.sleep(min(self._limits.idle_seconds / 4, IDLE_LOOKS_SECONDS_MAX))
            late = trio.current_time() - self._limits.idle_seconds
            for node, peer in list(self._peers.items()):
                if peer.link is not None and peer.link.active_at <= late and node not in self._kept and not peer.outbox:
                    self._retire(peer.link, Goodbye(code="idle"), told="goodbye")

    # --- telling ----------------------------------------------------------------------------------------------------

    def _down(self, node: NodeId | None, address: Address | None, why: Why) -> None:
        self.counts[f"down_{why}"] += 1
        if not self._is_closing:
            self._on_down(node, address, why)

    def _refused(self, refusal: Refusal) -> None:
        self.counts[f"refused_{refusal.code}"] += 1
        # Whoever tries again has another port each time.
        key = (refusal.node or refusal.address.host, refusal.code, refusal.by_us)
        if key in self._said:
            self._said.move_to_end(key)
            return
        self._said[key] = None
        if len(self._said) > SAID_MAX:
            self._said.popitem(last=False)
        log.warning(
            "peer.refused",
            address=str(refusal.address),
            node=refusal.node,
            code=refusal.code,
            reason=refusal.text,
            hint=refusal.hint,
            by_us=refusal.by_us,
        )
        self._on_refused(refusal)


async def _no_doubts(_: Hello) -> None:
    return None
