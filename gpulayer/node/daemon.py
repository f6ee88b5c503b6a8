"""The composition root: which effect of which core becomes which event of which other. The only place that knows all.

Start: this node's place in its cluster, its peers, what its sandboxes hold, then serve. Stop: tell the peers, answer
nobody any more, leave the replicas running. A crash of any part ends the daemon loudly; the shims, and so the replicas,
go on. starting.py makes one; what handlers see of it is facade.py.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog
import trio

from gpulayer import __version__
from gpulayer.api.app import make_app, make_peer_app
from gpulayer.api.server import BoundSockets, serve
from gpulayer.core.agent import Agent
from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    ReplicaAccepted,
    ReplicaEnded,
    ReplicaRefused,
    ReplicaReleased,
)
from gpulayer.core.gossip.messages import MemberChanged
from gpulayer.core.inventory import Inventory
from gpulayer.core.orders.messages import FollowOrders
from gpulayer.core.replica.messages import (
    AgentEffect,
    Announce,
    AttemptsFound,
    Order,
    OrdersChanged,
    Report,
    ReportAccepted,
    ReportRefused,
    ReportReleased,
)
from gpulayer.model.address import Address
from gpulayer.model.errors import GpulayerError
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.member import DISK_LOW, SLUGGISH, Run
from gpulayer.model.places import SOCKET_NAME
from gpulayer.model.replica import DeviceShare
from gpulayer.node.admission import Admission
from gpulayer.node.agent_loop import AgentLoop
from gpulayer.node.certificates import Certificates
from gpulayer.node.config import Config, Neighbour
from gpulayer.node.event_relay import EventRelay, keep_events
from gpulayer.node.facade import Facade
from gpulayer.node.following import Following
from gpulayer.node.forward import BulkRequests, PeerApi
from gpulayer.node.mesh import Mesh
from gpulayer.node.notify import ServiceNotifier
from gpulayer.node.orders import SentReport
from gpulayer.node.own_events import OwnEvents
from gpulayer.node.own_record import OwnRecord
from gpulayer.node.place import Place
from gpulayer.node.placeable import Placeable
from gpulayer.node.voter import Proposal, SoleVoter
from gpulayer.node.voting import Outside, Voting
from gpulayer.runtime.accelerators.declared import declared_accelerators
from gpulayer.runtime.accelerators.device_locks import SHARED_DIRECTORIES, DeviceLocks, shared_directory
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.accelerators.exclude import is_excluded
from gpulayer.runtime.accelerators.nvml import pci_gpus
from gpulayer.runtime.event_store import EventStore
from gpulayer.runtime.frame_stream import FrameStream
from gpulayer.runtime.host import detect_host
from gpulayer.runtime.identity import DataDir, Membership, atomic_write, membership, note_membership
from gpulayer.runtime.known_devices import KnownDevices
from gpulayer.runtime.lag import LagMonitor
from gpulayer.runtime.load import disk_free_mib
from gpulayer.runtime.order_store import open_order_store
from gpulayer.runtime.peer_cache import PeerCache
from gpulayer.runtime.peer_sockets import PeerSockets
from gpulayer.runtime.supervisor import Supervisor
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.runtime.watch import Watch
from gpulayer.wire.peer import CertificateGiven, EventsKept, EventsOffered, EventsTold, PeerFrame

log = structlog.get_logger()

# How long the last answers may take once the daemon was told to stop; systemd waits much longer (TimeoutStopSec).
SHUTDOWN_SECONDS = 3.0
REACH_SECONDS = 1.0
# Supervision that has not turned for so long gets nothing new.
SLUGGISH_SECONDS = 5.0
SLUGGISH_LOOKS_SECONDS = 1.0
DISK_LOOKS_SECONDS = 1.0


class Daemon:
    """One node, running: made, then `run` once."""

    def __init__(
        self, config: Config, data: DataDir, voter: SoleVoter | None, events: EventStore, nofile: tuple[int, int]
    ) -> None:
        """`voter`: of the log that lies here; None on a node that follows another one's. `nofile`: what its runs get
        as their limits of open files."""
        self._config, self._data, self._events = config, data, events
        self._node: NodeId = data.node_id
        self._run = Run(node=data.node_id, epoch=data.epoch, run_id=secrets.randbits(63))
        self._nursery: trio.Nursery | None = None
        self._view: Watch[int] = Watch(0)
        self._lag = LagMonitor()

        self._place = Place()
        self._placeable = Placeable(self._node, self._place, table=lambda: self.facade.table())
        if voter is not None:
            self._place.half = self._voting(voter)
        self._relay: EventRelay | None = None
        self._peer_api: PeerApi | None = None
        self._peers_served = trio.Event()
        self._registry_told: Mapping[NodeId, str] | None = None
        self._trust = TrustFiles(data.path)
        self._certificates = Certificates(node=self._node, config=config, files=self._trust, place=self._place)

        self._agent = Agent(self._node, config.advertise)
        self._agent_loop = AgentLoop(self._agent, perform=self._perform, on_stepped=lambda: self._own_record.say())
        self._assigned: tuple[Mapping[AttemptId, Order], Mapping[AttemptId, tuple[DeviceShare, ...]]] | None = None
        cards = pci_gpus()
        known = self._place.state.nodes.get(self._node)
        self._known_devices = KnownDevices(data.path)
        owner = config.shares_devices_with or Neighbour(data_dir=data.path, node_id=self._node)
        self._devices = Devices(
            inventory=Inventory(
                declared=declared_accelerators(config.accelerators, node_id=owner.node_id),
                known=known.capabilities.accelerators if known is not None else self._known_devices.accelerators,
                is_excluded=lambda device: is_excluded(device, config.devices_excluded),
                foreign_processes=config.foreign_processes,
            ),
            locks=DeviceLocks(_lock_directory(), owner.data_dir),
            assigned=self._assigned_devices,
            changed=lambda: self._own_record.say(),
            cards=cards,
        )
        self._supervisor = Supervisor(
            data_dir=data.path,
            node_id=self._node,
            node_name=config.name,
            advertise=config.advertise,
            emit=self._agent_loop.put_nowait,
            log_max_bytes=config.log_max_bytes,
            log_keep=config.log_keep,
            cgroups=config.cgroups,
            base_env=os.environ,
            devices=self._devices,
            ports=config.service_ports,
            nofile=nofile,
            wanted=lambda: self._place.orders,
            is_withdrawn=self._place.is_withdrawn,
            tethered=config.tethered,
        )

        self._own_record = OwnRecord(
            node=self._node,
            config=config,
            data_dir=data.path,
            host=detect_host(data.path),
            cards=cards,
            devices=self._devices,
            statuses=self._agent.statuses,
            place=self._place,
            on_said=self._bump,
        )
        self._own_events = OwnEvents(events, node=self._node, name=config.name, epoch=data.epoch)
        self.facade = Facade(
            config=config,
            data=data,
            place=self._place,
            own_record=self._own_record,
            placeable=self._placeable,
            certificates=self._certificates,
            agent=self._agent,
            supervisor=self._supervisor,
            devices=self._devices,
            events=events,
            view=self._view,
            lag=self._lag,
        )

    def _voting(self, voter: SoleVoter) -> Voting:
        return Voting(
            voter,
            node=self._node,
            observed_seconds=self._config.observed_seconds,
            outside=Outside(
                orders=self._take_orders,
                changed=self._state_changed,
                placeable=self._placeable.now,
                send=self._place.send,
                tell_all=self._place.tell_all,
                answers=self._place.answers,
                peers=self._place.peers,
                keys_held=self._place.keys_held,
            ),
        )

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self, sockets: BoundSockets, peers: PeerSockets | None, notifier: ServiceNotifier) -> None:
        """Until the facade's `stop_requested`. Replicas are adopted before anyone is served, so that the first answer
        is true. `peers`: None for a node that is alone for good."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if sockets.port is not None:
                self._own_record.api_address = Address(self._config.advertise, sockets.port)
            await nursery.start(self._devices.run)
            await self._take_its_place(nursery, peers)
            half, mesh = self._place.half, self._place.mesh
            await nursery.start(self._supervisor.run)
            if isinstance(half, Voting):
                self._take_orders(half.first_orders())
            found = await self._supervisor.find_attempts()
            self._agent_loop.put_nowait(AttemptsFound(found=found))
            self._supervisor.start_events()
            nursery.start_soon(self._agent_loop.run)
            # What runs is looked after by now. Whoever asks what there is should not hear of half a host.
            await self._look_at_devices()
            shutdown = trio.Event()
            if mesh is not None:
                self._peer_api = PeerApi(make_peer_app(self.facade), shutdown)
                self._peers_served.set()
                await nursery.start(mesh.run)
                nursery.start_soon(self._certificates.run)
                nursery.start_soon(self._look_whether_sluggish, mesh)
                nursery.start_soon(self._look_whether_disk_is_low, mesh)
            nursery.start_soon(self._own_record.run)
            nursery.start_soon(self._lag.run)
            if not self._place.is_voter:
                nursery.start_soon(self._known_devices.run, lambda: self._devices.inventory.accelerators)
            if isinstance(half, Voting):
                nursery.start_soon(half.run, self._admission(half) if mesh is not None else None)
                self._own_record.tell_leader()
                nursery.start_soon(self._placeable.run)
            served = trio.Event()
            port = await nursery.start(self._serve, sockets, shutdown, served)
            api = str(Address(self._config.bind, port)) if port is not None else str(self._data.path / SOCKET_NAME)
            self._write_address(port)
            self.facade.is_ready = True
            self._bump()
            log.info(
                "daemon.ready",
                node=self._config.name,
                api=api,
                **({"peers": str(Address(self._config.advertise, peers.port))} if peers is not None else {}),
                data_dir=str(self._data.path),
                adopted=sum(1 for attempt in found if attempt.shim_alive),
                pid=os.getpid(),
                version=__version__,
            )
            notifier.send("READY=1", f"STATUS=serving on {api}")
            if notifier.watchdog_interval_seconds is not None:
                nursery.start_soon(_feed_watchdog, notifier)
            await self.facade.stop_requested.wait()
            notifier.send("STOPPING=1")
            log.info("daemon.stopping", replicas_left_running=len(self._place.orders))
            if mesh is not None and not self.facade.has_left:
                await mesh.say_restarting()
            shutdown.set()
            with trio.move_on_after(SHUTDOWN_SECONDS):
                await served.wait()
            nursery.cancel_scope.cancel()

    async def _take_its_place(self, nursery: trio.Nursery, peers: PeerSockets | None) -> None:
        """The log or the orders, and the circle of those that this node talks to."""
        registry: Mapping[NodeId, str] | None
        if isinstance(self._place.half, Voting):
            await self._found(self._place.half, nursery, closes_the_circle=peers is not None)
            if peers is None:
                return
            state = self._place.half.state
            ring, cluster_id, voter = state.key_ring, state.cluster_id, self._node
            registry = {id: node.name for id, node in state.nodes.items()}
        else:
            assert peers is not None, "who follows has to hear"
            member = membership(self._data.path)
            assert member is not None, "joined before"
            ring, cluster_id, voter = self._trust.read(self._node).key_ring, member.cluster_id, NodeId(member.voter)
            store, recovered = open_order_store(self._data.path)
            for text in recovered.warnings:
                log.warning("orders.recovered", text=text)
            heard = recovered.heard
            registry = {node: str(node) for node in heard.registry} if heard is not None and heard.registry else None
            self._place.half = Following(
                store,
                heard,
                cluster_id=cluster_id,
                voter=voter,
                send=self._place.send,
                on_orders=self._follow_orders,
                on_registry=self._registry_learned,
            )
            self._relay = EventRelay(self._events, self._node, partial(self._place.send, voter))
            nursery.start_soon(self._relay.run)
        mesh = Mesh(
            own=self._run,
            name=self._config.name,
            cluster_id=cluster_id,
            advertise=self._config.advertise,
            sockets=peers,
            trust=self._trust,
            ring=ring,
            registry=registry,
            cache=PeerCache(self._data.path / "peers.json"),
            seeds=self._config.seeds,
            voter=voter,
            entropy=secrets.token_bytes(64),
            on_frame=self._peer_frame,
            on_link=self._link_changed,
            on_member=self._member_changed,
            on_record=self._record_changed,
            on_change=self._bump,
            on_join=self._place.half.admit,
            on_bulk=self._serve_peer,
        )
        self._place.mesh, self._place.bulk = mesh, BulkRequests(mesh.open_stream)
        nursery.start_soon(self._place.bulk.run)
        await nursery.start(mesh.listen)
        # Before anything that runs here is looked after: what it has to do is done there.
        await mesh.make_sure_of_itself()
        if isinstance(self._place.half, Following):
            await nursery.start(self._place.half.run)

    async def _found(self, half: Voting, nursery: trio.Nursery, *, closes_the_circle: bool) -> None:
        nursery.start_soon(half.run_log)
        known = half.state.nodes.get(self._node)
        if known is None:  # nothing runs here that would wait for it
            await self._look_at_devices()
        wanted = AdmitNode(
            node=self._node,
            name=self._config.name,
            advertise=self._config.advertise,
            capabilities=known.capabilities if known is not None else self._own_record.capabilities(),
        )
        await half.found(wanted, closes_the_circle=closes_the_circle)
        self._note_membership(half.state.cluster_id)
        if closes_the_circle:
            half.certify_self(self._trust, self._certificates.names)

    async def _serve(
        self,
        sockets: BoundSockets,
        shutdown: trio.Event,
        served: trio.Event,
        *,
        task_status: trio.TaskStatus[int | None],
    ) -> None:
        names = self._certificates.names
        try:
            await serve(
                make_app(self.facade, trusted=True),
                make_app(self.facade, trusted=False, names=names) if sockets.tcp is not None else None,
                sockets,
                shutdown=shutdown,
                tls=self._certificates.api_tls if sockets.needs_tls else None,
                task_status=task_status,
            )
        finally:
            served.set()

    def _write_address(self, port: int | None) -> None:
        """Where the API is, for whoever looks into the data directory. A full disk must not keep the daemon from its
        replicas for that (P10); what an earlier daemon wrote would be wrong."""
        path = self._data.path / "api.json"
        if port is None:
            return
        try:
            atomic_write(path, json.dumps({"host": self._config.bind, "port": port}).encode())
        except OSError as error:
            log.warning("api.address_not_written", path=str(path), reason=error.strerror)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _note_membership(self, cluster_id: str) -> None:
        try:
            known = membership(self._data.path)
            if known is None:
                note_membership(self._data, Membership(cluster_id=cluster_id, name=self._config.name))
        except OSError as error:
            log.warning("cluster.not_noted", path=str(self._data.path), reason=error.strerror)

    async def _look_at_devices(self) -> None:
        with trio.move_on_after(self._config.first_look_seconds):
            await self._devices.first_look()

    async def _look_whether_sluggish(self, mesh: Mesh) -> None:
        """Gossip that is alive must not hide a supervision that stands still."""
        was_sluggish = False
        while True:
            await trio.sleep(SLUGGISH_LOOKS_SECONDS)
            waits = max(self._agent_loop.waits_seconds(), self._supervisor.listeners_checked_seconds_ago())
            is_sluggish = waits > SLUGGISH_SECONDS
            if is_sluggish != was_sluggish:
                log.warning("daemon.sluggish" if is_sluggish else "daemon.not_sluggish_any_more")
                mesh.set_flag(SLUGGISH, is_sluggish)
                was_sluggish = is_sluggish

    async def _look_whether_disk_is_low(self, mesh: Mesh) -> None:
        """What cannot even be prepared fails at once, so that a node without room would take all that is queued."""
        was_low = False
        while True:
            await trio.sleep(DISK_LOOKS_SECONDS)
            free_mib = disk_free_mib(self._data.path)
            # A quarter more until it is well again, so that what comes and goes is not told each time.
            least_mib = self._config.disk_free_min_mib * (1.25 if was_low else 1.0)
            is_low = free_mib is not None and free_mib < least_mib
            if is_low != was_low:
                log.warning(
                    "disk.low" if is_low else "disk.not_low_any_more", path=str(self._data.path), free_mib=free_mib
                )
                mesh.set_flag(DISK_LOW, is_low)
                was_low = is_low

    def _bump(self) -> None:
        self._view.set(self._view.value + 1)

    # --- the log ----------------------------------------------------------------------------------------------------

    def _state_changed(self) -> None:
        """A newer state of the log that lies here."""
        mesh = self._place.mesh
        if mesh is not None:
            state = self._place.state
            registry = {id: node.name for id, node in state.nodes.items()}
            if registry != self._registry_told:
                self._registry_told = registry
                mesh.set_registry(registry)
            mesh.set_ring(state.key_ring)
        self._bump()

    def _registry_learned(self, nodes: frozenset[NodeId]) -> None:
        """Of the log that lies elsewhere."""
        mesh = self._place.mesh
        if mesh is not None:
            mesh.set_registry({node: mesh.name_of(node) for node in nodes})

    def _admission(self, half: Voting) -> Admission:
        return Admission(
            voter=self._node,
            voter_name=self._config.name,
            advertise=self._config.advertise,
            state=lambda: half.state,
            propose=half.propose,
            answers=self._place.answers,
            peers=self._place.peers,
        )

    # --- orders and what becomes of them ----------------------------------------------------------------------------

    def _take_orders(self, orders: tuple[Order, ...]) -> None:
        """Of the log that lies here: they are always current."""
        self._agent_loop.put_nowait(OrdersChanged(orders=orders))

    def _follow_orders(self, told: FollowOrders) -> None:
        self._agent_loop.put_nowait(OrdersChanged(orders=told.orders, is_current=told.is_current))

    def _assigned_devices(self) -> Mapping[AttemptId, tuple[DeviceShare, ...]]:
        """What of this node's devices is held by orders. Asked every second, so it is made once for all of them."""
        orders = self._place.orders
        if self._assigned is None or self._assigned[0] is not orders:
            found = {id: order.assignment.devices for id, order in orders.items() if order.assignment.devices}
            self._assigned = orders, found
        return self._assigned[1]

    def _perform(self, effect: AgentEffect) -> None:
        attempt, done = effect.attempt, effect.effect
        job, replica, number = attempt.replica.job, attempt.replica.index, attempt.attempt
        match done:
            case Report(outcome=outcome, released=released):
                self._report(ReplicaEnded(job=job, replica=replica, attempt=number, outcome=outcome, released=released))
            case ReportReleased():
                self._report(ReplicaReleased(job=job, replica=replica, attempt=number))
            case ReportRefused(reason=reason, observed=observed):
                self._report(ReplicaRefused(job=job, replica=replica, attempt=number, reason=reason, observed=observed))
            case ReportAccepted():
                self._report(ReplicaAccepted(job=job, replica=replica, attempt=number))
            case Announce():
                # The end of what was ordered is told by the log, among the other things that are agreed.
                is_told = done.kind in ("replica.ended", "replica.refused") and effect.order is not None
                self._own_events.announce(attempt, done, to_feed=not is_told)
            case _:
                self._supervisor.perform(effect)

    def _report(self, command: ReplicaEnded | ReplicaReleased | ReplicaRefused | ReplicaAccepted) -> None:
        """In the order of the effects: a release that overtakes its end would be refused."""
        assert self._nursery is not None
        assert self._place.half is not None
        self._nursery.start_soon(self._report_answered, command, self._place.half.report_nowait(command))

    async def _report_answered(self, command: Command, sent: Proposal | SentReport) -> None:
        try:
            await sent.wait()
        except GpulayerError as error:
            # The agent says it again while the log does not show it.
            log.warning("report.not_committed", report=repr(command)[:200], reason=error.message)

    # --- peers --------------------------------------------------------------------------------------------------------

    def _peer_frame(self, run: Run, frame: PeerFrame) -> None:
        half = self._place.half
        assert half is not None, "before its peers"
        is_of_voter = run.node == self._place.followed
        match frame:
            case CertificateGiven() if is_of_voter:
                assert self._nursery is not None, "peers come while it runs"
                self._nursery.start_soon(self._certificates.take, frame)
            case EventsOffered() | EventsTold() if half.is_voter:
                self._place.send(run.node, keep_events(self._events, run.node, frame))
            case EventsKept() if self._relay is not None and is_of_voter:
                self._relay.kept(frame)
            case _:
                if not half.from_peer(run.node, frame):
                    log.warning("peer.frame_unexpected", node=run.node, frame=type(frame).__name__)

    def _link_changed(self, node: NodeId, is_up: bool) -> None:
        assert self._place.half is not None, "before its peers"
        self._place.half.link(node, is_up)
        if node != self._place.followed:
            return
        if self._relay is not None:
            self._relay.link(is_up)
        if not is_up and self._nursery is not None:
            self._nursery.start_soon(self._reach, node)

    async def _reach(self, voter: NodeId) -> None:
        """The link to the voter is kept: opened again until it stands."""
        await trio.sleep(REACH_SECONDS)
        mesh = self._place.mesh
        if mesh is not None and voter not in mesh.links.links:
            for address in mesh.addresses(voter)[:1]:
                mesh.links.contact(address)

    def _member_changed(self, change: MemberChanged, name: str) -> None:
        self._record_changed(change.after.id)
        if self._place.is_voter and change.after.id != self._node:
            self._own_events.tell_of_member(change, name)

    def _record_changed(self, node: NodeId) -> None:
        half, mesh = self._place.half, self._place.mesh
        if isinstance(half, Voting) and mesh is not None and node != self._node:
            member, record = mesh.gossip.member(node), mesh.record(node)
            is_heard = member is not None and member.state == "alive" and not mesh.gossip.is_stale(node)
            half.node_said(node, record.facts, frozenset(record.replicas), is_heard=is_heard)
            self._placeable.look()

    async def _serve_peer(self, run: Run, stream: FrameStream) -> None:
        await self._peers_served.wait()
        assert self._peer_api is not None
        await self._peer_api.serve(run, stream)


def _lock_directory() -> Path:
    """Where there is none, no GPU can be locked, which each says for itself; everything else works."""
    try:
        return shared_directory()
    except GpulayerError as error:
        log.warning("device_locks.no_directory", reason=error.message, hint=error.hint)
        return Path(SHARED_DIRECTORIES[0])


async def _feed_watchdog(notifier: ServiceNotifier) -> None:
    """Said from the event loop that does everything else: a daemon whose loop hangs is restarted, its replicas stay."""
    assert notifier.watchdog_interval_seconds is not None
    while True:
        notifier.send("WATCHDOG=1")
        await trio.sleep(notifier.watchdog_interval_seconds)
