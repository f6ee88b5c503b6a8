"""This node among its peers: gossip with its socket and links, the keys that close the circle, and the table.

The composition of core/gossip with its shells. It decides nothing: what gossip wants done goes to the sockets, what
comes in goes to gossip, and what neither understands goes to whoever made this (node/daemon.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random

import structlog
import trio

from gpulayer import __version__
from gpulayer.core.cluster.table import make_table
from gpulayer.core.gossip.core import Gossip
from gpulayer.core.gossip.messages import (
    CloseLink,
    Contact,
    Departed,
    GossipEffect,
    GossipEvent,
    LeaveWanted,
    LinkDown,
    LinkUp,
    MemberChanged,
    MemberForgotten,
    Ping,
    Received,
    RecordChanged,
    SendDatagram,
    SendFrame,
    SetLeader,
    SetOwn,
    SetRegistry,
    SetSeeds,
    SetSelf,
    Warned,
)
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.errors import StorageFailed, Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE, RESTARTING, Member, Run
from gpulayer.model.record import NodeRecord
from gpulayer.model.seen import NodeSeen, Table
from gpulayer.model.trust import KeyRing
from gpulayer.node import doubles
from gpulayer.node.config import Seed
from gpulayer.node.joining import resolved
from gpulayer.runtime.drive import Inbox, drive
from gpulayer.runtime.frame_stream import FrameStream, Why
from gpulayer.runtime.gossip_socket import GossipSocket
from gpulayer.runtime.peer_cache import CachedPeer, PeerCache
from gpulayer.runtime.peer_greeting import Refusal
from gpulayer.runtime.peer_links import PeerLinks
from gpulayer.runtime.peer_sockets import PeerSockets
from gpulayer.runtime.trust import Contexts, is_usable
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.runtime.watch import Watch
from gpulayer.wire.codec import DecodeError, EncodeError
from gpulayer.wire.datagram import OVERHEAD
from gpulayer.wire.gate import PacketGate
from gpulayer.wire.gossip import HEAD_BYTES, decode, encode, size_of
from gpulayer.wire.peer import (
    PROTOCOL,
    Goodbye,
    GossipFrame,
    Hello,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    KeyRingGiven,
    KeyRingWanted,
    PeerFrame,
    Use,
)
from gpulayer.wire.record import ReadRecord, read

log = structlog.get_logger()

# Names are looked up again while nobody of the cluster is met.
RESOLVE_SECONDS = 10.0
# While nobody has told this node that it is the only one of its id: the first pause between two askings, doubling.
SURE_DELAY = 0.25
SURE_DELAY_MAX = 2.0
# A table is made for a request, and serves those that come in the same moment.
TABLE_SECONDS = 0.02
WARNINGS_MAX = 16
# A disk that refuses the key ring is asked again.
KEEP_AGAIN_SECONDS = 60.0
# What the members hear at once, before a daemon that was told to stop is gone.
FAREWELL_SECONDS = 0.3
# So long a node that was let go may say goodbye.
PARTING_SECONDS = 5.0


class Mesh:
    """`listen`, then `run`; before that it answers as a node that has met nobody."""

    def __init__(
        self,
        *,
        own: Run,
        name: str,
        cluster_id: str,
        advertise: str,
        sockets: PeerSockets,
        trust: TrustFiles,
        ring: KeyRing,
        registry: Mapping[NodeId, str] | None,
        cache: PeerCache,
        seeds: Sequence[Seed],
        voter: NodeId | None,
        entropy: bytes,
        on_frame: Callable[[Run, PeerFrame], None],
        on_link: Callable[[NodeId, bool], None],
        on_member: Callable[[MemberChanged, str], None],
        on_record: Callable[[NodeId], None],
        on_change: Callable[[], None],
        on_join: Callable[[JoinRequest, Address], Awaitable[JoinAccepted | JoinRejected]],
        on_bulk: Callable[[Run, FrameStream], Awaitable[None]],
        profile: Profile | None = None,
    ) -> None:
        """`registry`: the names of those that are admitted, as far as known. `entropy`: 64 bytes of chance.

        Callbacks without `await` never wait: `on_frame` gets what is not gossip's, `on_link` is told whether a link to
        a node stands, `on_member` of changes and the member's name, `on_record` whose record has changed, `on_change`
        that the table has."""
        profile = profile or Profile()
        self.name, self.cluster_id, self.voter = name, cluster_id, voter
        self._own_run = own
        self._trust, self._cache, self._seeds = trust, cache, tuple(seeds)
        self._on_frame, self._on_link, self._on_member = on_frame, on_link, on_member
        self._on_record, self._on_change, self._on_bulk = on_record, on_change, on_bulk
        self._listening = sockets.links
        self._contexts = trust.contexts()
        self._ring: Watch[KeyRing] = Watch(ring)
        self._gate = PacketGate(own, cluster_id, ring, entropy[:32], packet_bytes_max=profile.packet_bytes_max)
        self._gate.set_allowed(self._is_allowed)
        self._socket = GossipSocket(
            sockets.datagrams, self._gate, on_unknown_key=self._unknown_key, on_duplicate=self._duplicate
        )
        self.gossip = Gossip(
            own=own,
            addresses=(Address(advertise, sockets.port),),
            profile=profile,
            random=Random(entropy[32:]),
            size_of=size_of,
            room=profile.packet_bytes_max - OVERHEAD - HEAD_BYTES,
            key_ids=_ids(ring),
            protocol=PROTOCOL,
        )
        self._inbox: Inbox[GossipEvent] = Inbox()
        self.links = PeerLinks(
            hello=self._hello,
            contexts=lambda: self._contexts,
            is_allowed=self._is_allowed,
            on_up=self._link_up,
            on_down=self._link_down,
            on_frame=self._frame,
            on_join=on_join,
            on_bulk=self._stream_opened,
            on_refused=self._refused,
            doubts=self._doubts,
            members_max=profile.members_max,
        )
        self._records: dict[NodeId, ReadRecord] = {}
        self._registry: Mapping[NodeId, str] | None = None
        self._removed: set[NodeId] = set()
        self._parting: dict[NodeId, float] = {}
        """Removed a moment ago, and until when they are heard still."""
        self._listening_since = 0.0
        self._version = 0
        self._table: tuple[int, float, Table] | None = None
        self._departed = trio.Event()
        self._is_sure = False
        """Whether a member has said that this node does not run elsewhere, or there is none."""
        self._visited = trio.Event()
        self._nameless: dict[NodeId, MemberChanged] = {}
        """Who has come, and is logged when its record says how it is called."""
        self._warned: deque[str] = deque(maxlen=WARNINGS_MAX)
        if registry is not None:
            self.set_registry(registry)

    # --- life -----------------------------------------------------------------------------------------------------

    async def listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Greets whoever comes, for good; nobody is told anything yet. A cancellation breaks every link off, as a kill
        does."""
        await self.links.run(self._listening, task_status=task_status)

    async def make_sure_of_itself(self) -> None:
        """While it listens, and before it runs. Refused (code `duplicate_id`): another daemon is this node."""
        known = self._to_ask()[: doubles.ASKED_MAX]
        self._is_sure = not known or await doubles.make_sure(self.links, known)

    def _to_ask(self) -> list[Sequence[Address]]:
        """Where somebody is who may know. The voter first: it is told of whoever is there."""
        known: dict[NodeId, Sequence[Address]] = {each.id: each.addresses for each in self._cache.peers}
        known |= {each.id: each.addresses for each in self.gossip.members().values() if each.addresses}
        known.pop(self._own_run.node, None)
        return [known[node] for node in sorted(known, key=lambda node: node != self.voter)]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For good, once it listens. Refused as make_sure_of_itself(), where nobody could tell it then."""
        self._listening_since = trio.current_time()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._socket.run, self._inbox.put_nowait)
            nursery.start_soon(self._drive)
            nursery.start_soon(self._cache.run)
            nursery.start_soon(self._part)
            nursery.start_soon(self._keep_ring)
            task_status.started()
            await self._become_sure()
            self._say(SetSeeds(addresses=self._remembered()))
            if self._seeds:
                nursery.start_soon(self._look_up_seeds)
            self.follow(self.voter)

    async def _become_sure(self) -> None:
        """Until a member has answered that this node does not run elsewhere. Whoever comes meanwhile is heard."""
        turn, delay = 0, SURE_DELAY
        while not self._is_sure:
            with trio.move_on_after(delay):
                await self._visited.wait()
            self._visited, delay = trio.Event(), min(delay * 2, SURE_DELAY_MAX)
            known = self._to_ask()
            first = turn % max(1, len(known))
            turn += doubles.ASKED_LATER_MAX
            asked = (known[first:] + known[:first])[: doubles.ASKED_LATER_MAX]
            if await doubles.make_sure(self.links, [*asked, *await self._resolved_seeds()]):
                self._is_sure = True
                self._changed()

    async def _resolved_seeds(self) -> list[Sequence[Address]]:
        found: list[Sequence[Address]] = []
        for seed in self._seeds:
            try:
                found.append(await resolved(seed))
            except OSError as error:
                log.debug("seed.not_found", seed=str(seed), reason=str(error))
        return found

    async def _drive(self) -> None:
        # What has arrived is heard before anybody is blamed for not having answered.
        await drive(self.gossip, self._inbox, self._perform, refill=self._socket.drain)

    async def _look_up_seeds(self) -> None:
        while True:
            if self.gossip.is_isolated:
                found = [*self._remembered()]
                for addresses in await self._resolved_seeds():
                    found += addresses
                self._say(SetSeeds(addresses=tuple(dict.fromkeys(found))))
            await trio.sleep(RESOLVE_SECONDS)

    def _remembered(self) -> tuple[Address, ...]:
        return tuple(dict.fromkeys(address for peer in self._cache.peers for address in peer.addresses))

    async def say_restarting(self) -> None:
        """Told before the end: the replicas go on, and the daemon comes back."""
        self._say(SetSelf(flags_on=RESTARTING))
        await trio.sleep(FAREWELL_SECONDS)
        await trio.to_thread.run_sync(self._cache.write)
        await self.links.close_all(Goodbye(code="restarting", message=f"node {self.name} is restarting"))

    async def leave(self) -> None:
        """LEFT, and who was to hear it has said that it did, as far as that could be waited for."""
        self._say(LeaveWanted())
        await self._departed.wait()
        await trio.to_thread.run_sync(self._cache.forget)
        await self.links.close_all(Goodbye(code="left", message=f"node {self.name} has left"))

    # --- what it is told ------------------------------------------------------------------------------------------

    def _say(self, event: GossipEvent) -> None:
        self._inbox.put_nowait(event)

    def publish(self, values: Mapping[str, bytes | None]) -> None:
        """Keys of our record; None deletes."""
        self._say(SetOwn(values=dict(values)))

    def set_flag(self, flag: int, on: bool) -> None:
        self._say(SetSelf(flags_on=flag if on else 0, flags_off=0 if on else flag))

    def set_registry(self, names: Mapping[NodeId, str]) -> None:
        """Who may exist, as was agreed."""
        gone = self._registry.keys() - names.keys() if self._registry is not None else set[NodeId]()
        self._registry = dict(names)
        self._removed -= names.keys()
        self._parting = {node: until for node, until in self._parting.items() if node not in names}
        for node in gone:
            # It was let go and says so itself in a moment: with LEFT, which is to be heard.
            self._parting.setdefault(node, trio.current_time() + PARTING_SECONDS)
        self._say(SetRegistry(nodes=frozenset(names), parting=frozenset(self._parting)))
        self._changed()

    async def _part(self) -> None:
        """Who is not in the registry any more is not heard any more either, after its last words."""
        while True:
            await trio.sleep(1.0)
            now = trio.current_time()
            over = {node for node, until in self._parting.items() if until <= now}
            if over and self._registry is not None:
                self._removed |= over
                self._parting = {node: until for node, until in self._parting.items() if node not in over}
                self._say(SetRegistry(nodes=frozenset(self._registry), parting=frozenset(self._parting)))
                for node in over:
                    self.links.expel(node)

    def follow(self, leader: NodeId | None) -> None:
        """Whose link is kept, and to whom our record goes at once."""
        self.voter = leader
        self._say(SetLeader(node=leader))
        self.links.keep([leader] if leader is not None and leader != self._own_run.node else [])

    @property
    def ring(self) -> KeyRing:
        """The gossip keys."""
        return self._ring.value

    def set_ring(self, ring: KeyRing) -> None:
        """One that is newer is used at once, and kept."""
        if ring.version <= self.ring.version:
            return
        self._ring.set(ring)
        self._gate.set_ring(ring)
        self._say(SetSelf(key_ids=_ids(ring)))
        log.info("keys.changed", version=ring.version, keys=[f"{key:08x}" for key in _ids(ring)])

    async def _keep_ring(self) -> None:
        # Beside the loop, which answers its peers while a disk takes its time.
        kept = self._ring.value.version
        while True:
            ring = await self._ring.wait_for(lambda ring, kept=kept: ring.version > kept)  # type: ignore[misc]
            try:
                await trio.to_thread.run_sync(self._trust.write_key_ring, ring)
                kept = ring.version
            except StorageFailed as error:
                log.warning("keys.not_kept", reason=error.message)
                await trio.sleep(KEEP_AGAIN_SECONDS)

    def use_contexts(self, contexts: Contexts) -> None:
        """Of another certificate, from the next handshake on."""
        self._contexts = contexts

    def tell_all(self, frame: PeerFrame) -> None:
        """Over every link that stands, to those that are admitted."""
        for node in self.links.links:
            if self._is_admitted(node):
                self.links.send(node, (), frame)

    def send(self, node: NodeId, frame: PeerFrame) -> None:
        """Over the link to it, which is opened if there is none."""
        self.links.send(node, self.addresses(node), frame)

    async def open_stream(self, node: NodeId) -> FrameStream:
        """A bulk stream. LinkEnded, Unreachable."""
        addresses = self.addresses(node)
        if not addresses:
            raise Unreachable(f"no address of node {self.name_of(node)} is known here", hint="see gpulayer node list")
        return await self.links.open_stream(node, addresses)

    # --- what it tells --------------------------------------------------------------------------------------------

    def addresses(self, node: NodeId) -> tuple[Address, ...]:
        member = self.gossip.member(node)
        if member is not None and member.addresses:
            return member.addresses
        return next((peer.addresses for peer in self._cache.peers if peer.id == node), ())

    def name_of(self, node: NodeId) -> str:
        if node == self._own_run.node:
            return self.name
        record = self.record(node)
        if record.facts is not None:
            return record.facts.name
        told = (self._registry or {}).get(node, node)
        if told != node:
            return told
        # One that has been away since before this start: as it was called then.
        return next((peer.name for peer in self._cache.peers if peer.id == node and peer.name), node)

    def record(self, node: NodeId) -> NodeRecord:
        """What a node's record says; an empty one where none is here."""
        values = self.gossip.record(node)
        found = self._records[node] = read(values, self._records.get(node))
        return found.record

    def table(self) -> Table:
        now = trio.current_time()
        if self._table is not None and self._table[0] == self._version and now - self._table[1] < TABLE_SECONDS:
            return self._table[2]
        members = self.gossip.members()
        table = make_table(
            own=self._own_run.node,
            members=members,
            records={node: self.record(node) for node in members},
            registry=None if self._registry is None else {node: self.name_of(node) for node in self._registry},
            now=now,
            heard_at=self.gossip.heard_at,
            is_isolated=not self._is_sure or self.gossip.is_isolated,
            listening_since=self._listening_since,
            leader=self.voter,
            stale=[node for node in members if self.gossip.is_stale(node)],
            announced={node: self.gossip.announced_version(node) for node in members},
        )
        self._table = self._version, now, table
        return table

    def seen(self, node: NodeId) -> NodeSeen | None:
        return self.table().nodes.get(node)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warned)

    def counters(self) -> dict[str, int]:
        return {
            **{f"gossip_{name}": value for name, value in self.gossip.counters().items()},
            **{f"datagrams_{name}": value for name, value in self._socket.counters().items()},
            **{f"links_{name}": value for name, value in self.links.counts.items()},
        }

    # --- what gossip wants ----------------------------------------------------------------------------------------

    def _perform(self, effect: GossipEffect) -> None:
        match effect:
            case SendDatagram(to=to, address=address, messages=messages):
                self._socket.send(to, address, messages)
            case SendFrame(to=to, addresses=addresses, messages=messages):
                is_probe = any(isinstance(message, Ping) for message in messages)
                try:
                    frame = GossipFrame(payload=encode(messages))
                except EncodeError as error:
                    # What one record provokes must not end every daemon that passes it on.
                    log.warning("gossip.frame_unsendable", to=to, reason=str(error))
                else:
                    self.links.send(to, addresses, frame, urgent=is_probe)
            case Contact(address=address):
                self.links.contact(address)
            case CloseLink(node=node):
                self.links.close(node)
            case MemberChanged():
                self._member_changed(effect)
            case MemberForgotten(node=node):
                self._records.pop(node, None)
                self._nameless.pop(node, None)
                self._gate.forget(node)
                self._changed()
            case RecordChanged(node=node):
                if (change := self._nameless.pop(node, None)) is not None:
                    _log_change(change, self.name_of(node))
                self._changed()  # before: who is told of it looks at the table
                self._on_record(node)
            case Departed(acknowledged=acknowledged):
                log.info("member.departed", acknowledged=acknowledged)
                self._departed.set()
            case Warned(code=code, text=text):
                log.warning(f"gossip.{code}", text=text)
                if text not in self._warned:
                    self._warned.append(text)

    def _member_changed(self, change: MemberChanged) -> None:
        before, after = change.before, change.after
        name = self.name_of(after.id)
        if before is None or before.state != after.state or before.run != after.run:
            if (earlier := self._nameless.pop(after.id, None)) is not None:
                _log_change(earlier, name)
            if name == after.id and after.state == "alive":
                self._nameless[after.id] = change
            else:
                _log_change(change, name)
        if after.state != "left" and after.id != self._own_run.node:
            self._remember(after, name)
        elif after.state == "left":
            self._cache.update((), gone={after.id})
        self._changed()
        self._on_member(change, name)

    def _remember(self, member: Member, name: str) -> None:
        if member.addresses:
            peer = CachedPeer(id=member.id, name=name, addresses=member.addresses, epoch=member.run.epoch)
            self._cache.update([peer])

    def _changed(self) -> None:
        self._version += 1
        self._on_change()

    # --- links ----------------------------------------------------------------------------------------------------

    def _is_allowed(self, node: NodeId) -> bool:
        """Whose links and datagrams are taken."""
        if self.voter == self._own_run.node and self._registry is not None:
            return node in self._registry or node in self._parting
        # Its certificate shows that it was admitted once, and the registry may be told us a moment later.
        return node not in self._removed

    def _is_admitted(self, node: NodeId) -> bool:
        """Who may have more than gossip: the keys, and answers."""
        return self._registry is None or node in self._registry

    async def _stream_opened(self, run: Run, stream: FrameStream) -> None:
        if self._is_admitted(run.node) or run.node in self._parting:
            await self._on_bulk(run, stream)
        else:
            log.warning("bulk.refused", node=run.node)
            await stream.aclose(Goodbye(code="not_a_member", message=f"node {run.node} is not in the registry here"))

    def _hello(self, use: Use) -> Hello:
        return Hello(
            use=use,
            protocol=PROTOCOL,
            cluster_id=self.cluster_id,
            run=self._own_run,
            # Who has shown a token only is told no more than it knows.
            addresses=self.gossip.own.addresses if use != "join" else (),
            datagrams_sent=self._gate.datagrams_sent,
            key_ring_version=self.ring.version,
            gpulayer_version=__version__,
        )

    def _link_up(self, hello: Hello, address: Address, is_ours: bool) -> None:
        self._gate.link_verified(hello.run, hello.datagrams_sent)
        self._say(LinkUp(run=hello.run, addresses=hello.addresses, is_ours=is_ours))
        if hello.key_ring_version > self.ring.version:
            self.links.send(hello.run.node, (), KeyRingWanted(have=self.ring.version))
        self._visited.set()
        self._on_link(hello.run.node, True)

    def _link_down(self, node: NodeId | None, address: Address | None, why: Why) -> None:
        self._say(LinkDown(node=node, address=address, why=why))
        if node is not None:
            self._on_link(node, False)

    def _frame(self, run: Run, frame: PeerFrame) -> None:
        match frame:
            case GossipFrame(payload=payload):
                try:
                    messages = decode(payload)
                except DecodeError as error:
                    log.warning("gossip.frame_unreadable", node=run.node, reason=str(error))
                else:
                    self._say(Received(source=run, messages=messages))
            case KeyRingWanted(have=have):
                if self.ring.version > have and self._is_admitted(run.node):
                    self.links.send(run.node, (), KeyRingGiven(ring=self.ring))
            case KeyRingGiven(ring=ring):
                self._take_ring(run.node, ring)
            case _:
                self._on_frame(run, frame)

    def _take_ring(self, node: NodeId, ring: KeyRing) -> None:
        if self.voter == self._own_run.node or not is_usable(ring):
            # What the log says is not told to who has it by anybody else.
            log.warning("keys.not_taken", node=node, version=ring.version)
        else:
            self.set_ring(ring)

    def _unknown_key(self, key_id: int) -> None:
        """Somebody seals with a key that we lack: the leader has it, or whoever else has a link to us."""
        log.info("keys.unknown", key=f"{key_id:08x}")
        for node in [self.voter, *self.links.links][:4]:
            if node is not None and node != self._own_run.node:
                self.send(node, KeyRingWanted(have=self.ring.version))

    async def _doubts(self, hello: Hello) -> Goodbye | None:
        return await doubles.objection(hello, self.gossip, self._socket)

    def _duplicate(self, run: Run, at: Address) -> None:
        self._warn_duplicate(run.node, str(at))

    def _refused(self, refusal: Refusal) -> None:
        if refusal.code == "duplicate_id" and refusal.node is not None:
            self._warn_duplicate(refusal.node, str(refusal.address))

    def _warn_duplicate(self, node: NodeId, at: str) -> None:
        text = (
            f"two processes say that they are node {self.name_of(node)} ({node}), one of them at {at}: "
            "one has a copied data directory"
        )
        if text not in self._warned:
            log.error("member.duplicate", node=node, at=at, text=text)
            self._warned.append(text)
            if node == self._own_run.node:
                self.set_flag(DUPLICATE, True)


def _log_change(change: MemberChanged, name: str) -> None:
    after = change.after
    log.info(
        f"member.{after.state}",
        member=name,
        id=after.id,
        epoch=after.run.epoch,
        text=change.text,
        **({"cause": after.cause} if after.cause else {}),
    )


def _ids(ring: KeyRing) -> tuple[int, ...]:
    return tuple(key.id for key in ring.keys)
