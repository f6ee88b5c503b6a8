"""The composition root: which effect of which core becomes which event of which other. The only place that knows all.

Start: configuration, ports, data directory and its lock, the log or the orders, this node's place in its cluster, its
peers, what its sandboxes hold, then serve. Stop (SIGTERM): tell the peers, answer nobody any more, leave the replicas
running, close. A crash of any part ends the daemon loudly; the shims, and so the replicas, go on.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from random import Random
from ssl import SSLContext

import structlog
import trio

from gpulayer import __version__
from gpulayer.api.app import make_app, make_peer_app
from gpulayer.api.facade import AuditReport, PeerAnswer
from gpulayer.api.server import BoundSockets, bind_sockets, serve
from gpulayer.core.agent import Agent
from gpulayer.core.cluster.applied import Accepted
from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    ReplicaAccepted,
    ReplicaEnded,
    ReplicaRefused,
    ReplicaReleased,
)
from gpulayer.core.cluster.table import make_table
from gpulayer.core.gossip.messages import MemberChanged
from gpulayer.core.inventory import Inventory
from gpulayer.core.orders.messages import FollowOrders
from gpulayer.core.replica.messages import (
    AgentEffect,
    AgentEvent,
    Announce,
    AttemptsFound,
    Order,
    OrdersChanged,
    Report,
    ReportAccepted,
    ReportRefused,
    ReportReleased,
)
from gpulayer.model import ids
from gpulayer.model.address import Address
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import GpulayerError, InvalidRequest, Unreachable
from gpulayer.model.event import Event
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.member import SLUGGISH, Run
from gpulayer.model.node import Capabilities
from gpulayer.model.places import SOCKET_NAME
from gpulayer.model.record import Load, NodeFacts, NodeRecord, ReplicaRecord
from gpulayer.model.replica import DeviceShare, ReplicaStatus
from gpulayer.model.seen import Table
from gpulayer.model.units import Instant
from gpulayer.node.admission import Admission
from gpulayer.node.audit import audit_host
from gpulayer.node.config import Config, Neighbour, UpOptions, load_config
from gpulayer.node.event_relay import EventRelay, keep_events
from gpulayer.node.following import Following
from gpulayer.node.forward import BulkRequests, PeerApi
from gpulayer.node.joining import Applicant, join, keep, shown_to, way_in
from gpulayer.node.mesh import Mesh
from gpulayer.node.notify import ServiceNotifier
from gpulayer.node.orders import SentReport
from gpulayer.node.voter import Proposal, SoleVoter, open_voter
from gpulayer.node.voting import Outside, Voting
from gpulayer.runtime import trust
from gpulayer.runtime.accelerators.declared import declared_accelerators
from gpulayer.runtime.accelerators.device_locks import SHARED_DIRECTORIES, DeviceLocks, shared_directory
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.accelerators.exclude import is_excluded
from gpulayer.runtime.accelerators.nvml import pci_gpus
from gpulayer.runtime.accelerators.survey import DriverAsked, cards_of_other_vendors, survey
from gpulayer.runtime.drive import Inbox, drive
from gpulayer.runtime.event_store import EventStore, open_event_store
from gpulayer.runtime.frame_stream import FrameStream
from gpulayer.runtime.host import detect_host
from gpulayer.runtime.identity import (
    DataDir,
    Membership,
    atomic_write,
    check_cluster,
    forget_membership,
    membership,
    note_membership,
    open_data_dir,
)
from gpulayer.runtime.lag import LagMonitor
from gpulayer.runtime.load import LoadMeter
from gpulayer.runtime.order_store import open_order_store
from gpulayer.runtime.peer_cache import PeerCache
from gpulayer.runtime.peer_greeting import ask_to_join
from gpulayer.runtime.peer_sockets import PeerSockets, bind_peer_sockets
from gpulayer.runtime.supervisor import Supervisor
from gpulayer.runtime.telemetry import configure_logs
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.runtime.watch import Watch
from gpulayer.wire.peer import (
    CertificateGiven,
    CertificateWanted,
    EventsKept,
    EventsOffered,
    EventsTold,
    PeerFrame,
    RequestHead,
)
from gpulayer.wire.record import changes, entries_of

log = structlog.get_logger()

# How long the last answers may take once the daemon was told to stop; systemd waits much longer (TimeoutStopSec).
SHUTDOWN_SECONDS = 3.0
# A shim answers `quit` at once; one that hangs must not keep the daemon.
LEAVE_SECONDS = 15.0
# A change of the record waits so long for others that come with it: a replica's start is three within milliseconds.
PUBLISH_SECONDS = 0.02
LOAD_SECONDS = 10.0
CERTIFICATE_LOOKS_SECONDS = 6 * 3600.0
# Told to a host that joins: more than enough to meet everybody.
PEERS_TOLD_MAX = 16
REACH_SECONDS = 1.0
# Supervision that has not turned for so long gets nothing new.
SLUGGISH_SECONDS = 5.0
SLUGGISH_LOOKS_SECONDS = 1.0


class Daemon:
    """One node, running. Fulfils api.facade.NodeFacade for the handlers."""

    def __init__(
        self, config: Config, data: DataDir, voter: SoleVoter | None, events: EventStore, nofile: tuple[int, int]
    ) -> None:
        """`voter`: of the log that lies here; None on a node that follows another one's."""
        self.config = config
        self.events = events
        self.node_id: NodeId = data.node_id
        self.node_name = config.name
        self.started_at_utc = time.time()
        self.stop_requested = trio.Event()
        self._data = data
        self._run_id = secrets.randbits(63)
        self._half: Voting | Following | None = None
        if voter is not None:
            self._half = Voting(
                voter,
                node=data.node_id,
                observed_seconds=config.observed_seconds,
                outside=Outside(
                    orders=self._take_orders,
                    changed=self._state_changed,
                    placeable=self.placeable,
                    send=self._send_to,
                    tell_all=self._tell_all,
                    answers=self._answers,
                    peers=self._peers,
                    keys_held=self._keys_held,
                ),
            )
        self._mesh: Mesh | None = None
        self._bulk: BulkRequests | None = None
        self._relay: EventRelay | None = None
        self._lag = LagMonitor()
        self._peer_api: PeerApi | None = None
        self._peers_served = trio.Event()
        self._trust = TrustFiles(data.path)
        self._tls: SSLContext | None = None
        self._leaving = False
        self._ready = False
        self._view: Watch[int] = Watch(0)
        self._seen_state: tuple[ClusterState, int, ClusterState] | None = None
        self._assigned: tuple[Mapping[AttemptId, Order], Mapping[AttemptId, tuple[DeviceShare, ...]]] | None = None
        self._kept_empty: dict[NodeId, float] = {}
        self._placeable_told: Mapping[NodeId, str] = {}
        self._event_seq = 0
        self._agent = Agent(self.node_id, config.advertise)
        self._agent_inbox: Inbox[AgentEvent] = Inbox()
        self._observed: Watch[int] = Watch(0)
        """Rises when the devices have something new to say."""
        self._said: Watch[int] = Watch(0)
        """Rises when this node's record may have changed."""
        self._host = detect_host(data.path)
        self._cards = pci_gpus()
        known = self.state.nodes.get(self.node_id)
        owner = config.shares_devices_with or Neighbour(data_dir=data.path, node_id=self.node_id)
        self._devices = Devices(
            inventory=Inventory(
                declared=declared_accelerators(config.accelerators, node_id=owner.node_id),
                known=known.capabilities.accelerators if known is not None else (),
                is_excluded=lambda device: is_excluded(device, config.devices_excluded),
                foreign_processes=config.foreign_processes,
            ),
            locks=DeviceLocks(_lock_directory(), owner.data_dir),
            assigned=self._assigned_devices,
            changed=self._devices_changed,
            cards=self._cards,
        )
        self._supervisor = Supervisor(
            data_dir=data.path,
            node_id=self.node_id,
            node_name=config.name,
            advertise=config.advertise,
            emit=self._agent_inbox.put_nowait,
            log_max_bytes=config.log_max_bytes,
            log_keep=config.log_keep,
            cgroups=config.cgroups,
            base_env=os.environ,
            devices=self._devices,
            ports=config.service_ports,
            nofile=nofile,
            wanted=lambda: self._orders,
            is_withdrawn=self._is_withdrawn,
            tethered=config.tethered,
        )
        self._agent_turned_at = 0.0
        self._load: Load | None = None
        self._api_address: Address | None = None
        self._registry_told: Mapping[NodeId, str] | None = None
        self._nursery: trio.Nursery | None = None

    # --- the facade: what is known ----------------------------------------------------------------------------------

    @property
    def is_voter(self) -> bool:
        return self._half is None or self._half.is_voter

    @property
    def state(self) -> ClusterState:
        return self._half.state if self._half is not None else ClusterState()

    @property
    def observed_state(self) -> ClusterState:
        """The state, with every node as it is seen now: what a node says of itself is committed a little later."""
        state = self.state
        made = self._seen_state
        if made is None or made[0] is not state or made[1] != self._said.value:
            nodes = dict(state.nodes)
            for id, node in state.nodes.items():
                facts = self._facts() if id == self.node_id else self._record_of(id).facts
                if facts is not None and facts.capabilities != node.capabilities:
                    nodes[id] = replace(node, capabilities=facts.capabilities)
            made = self._seen_state = state, self._said.value, replace(state, nodes=nodes)
        return made[2]

    @property
    def leader_name(self) -> str:
        if isinstance(self._half, Voting):
            return self.node_name if not self.not_ready else ""
        table = self.table()
        return table.nodes[table.leader].name if table.leader is not None else ""

    @property
    def ca_pem(self) -> str:
        if not self._trust.exist:
            return ""
        try:
            return self._trust.ca_path.read_text("ascii")
        except OSError:
            return ""

    def table(self) -> Table:
        if self._mesh is not None:
            table = self._mesh.table()
        else:
            table = make_table(
                own=self.node_id,
                members={},
                records={self.node_id: self._own_record()},
                registry={id: node.name for id, node in self.state.nodes.items()},
                now=trio.current_time(),
                heard_at=trio.current_time(),
                is_isolated=False,
                leader=self.node_id,
            )
        own = table.nodes.get(self.node_id)
        if own is None:
            return table
        # What is said here is heard by gossip a moment later.
        record = self._own_record()
        fresh = replace(own, name=self.node_name, facts=record.facts, load=record.load, replicas=record.replicas)
        return replace(table, nodes={**table.nodes, self.node_id: replace(fresh, is_voter=self.is_voter)})

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [*self.config.warnings, *self._supervisor.warnings, *self._devices.warnings]
        if self._devices.inventory.gpu_detect == "error":
            found += self._devices.inventory.undetected
        match self._half:
            case Voting(voter=voter) if voter.failed is not None:
                found.append(f"voter: storage failed: {voter.failed.message}")
            case Voting(voter=voter) if voter.store.disk_low:
                found.append(
                    f"the disk of {self._data.path} is nearly full: nothing new is accepted until there is room"
                )
            case Following(warnings=warnings):
                found += warnings
        if self._mesh is not None:
            found += self._mesh.warnings
        return tuple(found)

    @property
    def not_ready(self) -> str:
        if isinstance(self._half, Voting) and self._half.voter.failed is not None:
            return f"storage failed: {self._half.voter.failed.message}"
        return "" if self._ready else "starting"

    @property
    def version_of_view(self) -> int:
        return self._view.value

    async def wait_for_change(self, seen: int) -> int:
        return await self._view.wait_for(lambda version: version > seen)

    def now_utc(self) -> float:
        return time.time()

    def new_job_id(self) -> JobId:
        return ids.job_id(secrets.token_bytes(8))

    def new_token(self) -> tuple[str, str, str]:
        secret = "gpl_" + secrets.token_urlsafe(32)
        return "t-" + secrets.token_hex(4), secret, sha256(secret.encode()).hexdigest()

    def new_secret(self) -> bytes:
        return secrets.token_bytes(32)

    def statuses(self) -> Mapping[AttemptId, ReplicaStatus]:
        if self._mesh is None:
            return self._agent.statuses()
        found: dict[AttemptId, ReplicaStatus] = {}
        for node in self._mesh.table().nodes.values():
            if not node.is_self:
                found.update({attempt: replica.status for attempt, replica in node.replicas.items()})
        return found | self._agent.statuses()

    def history(self, attempt: AttemptId) -> tuple[tuple[float, str], ...]:
        now = trio.current_time()
        return tuple((now - at, text) for at, text in self._agent.history(attempt))

    def placeable(self) -> Mapping[NodeId, str]:
        if not isinstance(self._half, Voting):
            return {}
        if self._half.trouble:
            return dict.fromkeys(self.state.nodes, self._half.trouble) or {self.node_id: self._half.trouble}
        now = trio.current_time()
        found = {self.node_id: ""}
        for node in self.table().nodes.values():
            if self._kept_empty.get(node.id, 0.0) > now:
                found[node.id] = "it is about to leave"
            elif node.is_self:
                found[node.id] = ""
            elif node.state != "alive":
                found[node.id] = f"it is {node.state}" + (f": {node.reason}" if node.reason else "")
            elif node.conditions:
                found[node.id] = f"it is {', '.join(node.conditions)}"
            elif node.facts is None or node.is_stale:
                found[node.id] = "it has not said yet what it has and runs"
            else:
                found[node.id] = ""
        return found

    def verified_seconds_ago(self) -> float:
        return self._supervisor.listeners_checked_seconds_ago()

    # --- the facade: what is asked for --------------------------------------------------------------------------------

    def ask(self, node: NodeId, head: RequestHead) -> AbstractAsyncContextManager[PeerAnswer]:
        if self._bulk is None:
            raise Unreachable("this node speaks to no other one", hint="it is starting, or it is a private node")
        return self._bulk.ask(node, head)

    async def propose(self, command: Command) -> Accepted:
        if not isinstance(self._half, Voting):
            raise Unreachable("the log is not here", hint="report this", code="no_leader")
        return await self._half.propose(command)

    def keep_empty(self, node: NodeId, seconds: float) -> None:
        self._kept_empty[node] = trio.current_time() + seconds
        self._look_who_is_placeable()

    def sandbox(self, attempt: AttemptId) -> Path:
        return self._supervisor.sandbox_path(attempt)

    def log_dir(self, attempt: AttemptId) -> Path:
        return self._supervisor.log_dir(attempt)

    def store_stats(self) -> object:
        return self._half.voter.store.stats() if isinstance(self._half, Voting) else None

    def counters(self) -> Mapping[str, int]:
        """Of gossip, its socket and links."""
        return self._mesh.counters() if self._mesh is not None else {}

    def loop_lag_seconds(self, part: float) -> float:
        """How late the event loop was in the last minute, at this quantile."""
        return self._lag.quantile(part)

    async def audit(self) -> AuditReport:
        return await audit_host(
            data_dir=self._data.path,
            orders=lambda: tuple(self._orders.values()),
            statuses=self._agent.statuses,
            now_utc=self.now_utc,
        )

    async def leave(self) -> None:
        # Released is the log's word; the shims are still being told to go, and one that is not told stays.
        with trio.move_on_after(LEAVE_SECONDS):
            await self._supervisor.wait_for_nothing()
        if self._mesh is not None and not self.is_voter:
            self._leaving = True
            await self._mesh.leave()
            try:
                forget_membership(self._data)
                self._trust.remove()
            except OSError as error:
                log.warning("leave.not_forgotten", path=str(self._data.path), reason=error.strerror)
        self.stop_requested.set()

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self, sockets: BoundSockets, peers: PeerSockets | None, notifier: ServiceNotifier) -> None:
        """Until `stop_requested`. Replicas are adopted before anyone is served, so that the first answer is true."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if sockets.port is not None:
                self._api_address = Address(self.config.advertise, sockets.port)
            await nursery.start(self._devices.run)
            await self._take_its_place(nursery, peers, sockets.port)
            await nursery.start(self._supervisor.run)
            if isinstance(self._half, Voting):
                self._agent_inbox.put_nowait(OrdersChanged(orders=self._half.first_orders()))
            found = await self._supervisor.find_attempts()
            self._agent_inbox.put_nowait(AttemptsFound(found=found))
            self._supervisor.start_events()
            nursery.start_soon(drive, _Observed(self._agent, self._agent_stepped), self._agent_inbox, self._perform)
            # What runs is looked after by now. Whoever asks what there is should not hear of half a host.
            await self._look_at_devices()
            shutdown = trio.Event()
            if self._mesh is not None:
                self._peer_api = PeerApi(make_peer_app(self), shutdown)
                self._peers_served.set()
                await nursery.start(self._mesh.run)
                nursery.start_soon(self._look_after_certificate, sockets.port)
            nursery.start_soon(self._publish)
            nursery.start_soon(self._lag.run)
            if self._mesh is not None:
                nursery.start_soon(self._look_whether_sluggish)
            if isinstance(self._half, Voting):
                nursery.start_soon(self._half.run, self._admission() if self._mesh is not None else None)
                self._tell_leader_of_itself()
                nursery.start_soon(self._watch_placeable)
            port = await nursery.start(self._serve, sockets, shutdown)
            api = str(Address(self.config.bind, port)) if port is not None else str(self._data.path / SOCKET_NAME)
            self._write_address(port)
            self._ready = True
            self._bump()
            log.info(
                "daemon.ready",
                node=self.node_name,
                api=api,
                **({"peers": str(Address(self.config.advertise, peers.port))} if peers is not None else {}),
                data_dir=str(self._data.path),
                adopted=sum(1 for attempt in found if attempt.shim_alive),
                pid=os.getpid(),
                version=__version__,
            )
            notifier.send("READY=1", f"STATUS=serving on {api}")
            if notifier.watchdog_interval_seconds is not None:
                nursery.start_soon(_feed_watchdog, notifier)
            await self.stop_requested.wait()
            notifier.send("STOPPING=1")
            log.info("daemon.stopping", replicas_left_running=len(self._orders))
            if self._mesh is not None and not self._leaving:
                await self._mesh.say_restarting()
            shutdown.set()
            with trio.move_on_after(SHUTDOWN_SECONDS):
                await self._served.wait()
            nursery.cancel_scope.cancel()

    async def _take_its_place(self, nursery: trio.Nursery, peers: PeerSockets | None, api_port: int | None) -> None:
        """The log or the orders, and the circle of those that this node talks to."""
        if isinstance(self._half, Voting):
            nursery.start_soon(self._half.run_log)
            known = self.state.nodes.get(self.node_id)
            if known is None:  # nothing runs here that would wait for it
                await self._look_at_devices()
            wanted = AdmitNode(
                node=self.node_id,
                name=self.node_name,
                advertise=self.config.advertise,
                capabilities=known.capabilities if known is not None else self._capabilities(),
            )
            await self._half.found(wanted, closes_the_circle=peers is not None)
            self._note_membership(self.state.cluster_id)
            if peers is None:
                return
            self._half.certify_self(self._trust, self._certificate_names())
            ring, cluster_id, voter = self.state.key_ring, self.state.cluster_id, self.node_id
        else:
            assert peers is not None, "who follows has to hear"
            member = membership(self._data.path)
            assert member is not None, "joined before"
            held = self._trust.read(self.node_id)
            ring, cluster_id, voter = held.key_ring, member.cluster_id, NodeId(member.voter)
            store, recovered = open_order_store(self._data.path)
            for text in recovered.warnings:
                log.warning("orders.recovered", text=text)
            self._half = Following(
                store,
                recovered.heard,
                cluster_id=cluster_id,
                voter=voter,
                send=self._send_to,
                on_orders=self._follow_orders,
                on_registry=self._registry_learned,
            )
            self._relay = EventRelay(self.events, self.node_id, partial(self._send_to, voter))
            nursery.start_soon(self._relay.run)
        self._bulk = BulkRequests(self._open_stream)
        nursery.start_soon(self._bulk.run)
        self._mesh = Mesh(
            own=Run(node=self.node_id, epoch=self._data.epoch, run_id=self._run_id),
            name=self.node_name,
            cluster_id=cluster_id,
            advertise=self.config.advertise,
            sockets=peers,
            trust=self._trust,
            ring=ring,
            cache=PeerCache(self._data.path / "peers.json"),
            seeds=self.config.seeds,
            voter=voter,
            entropy=secrets.token_bytes(64),
            on_frame=self._peer_frame,
            on_link=self._link_changed,
            on_member=self._member_changed,
            on_record=self._record_changed,
            on_change=self._bump,
            on_join=self._half.admit,
            on_bulk=self._serve_peer,
        )
        await nursery.start(self._mesh.listen)
        # Before anything that runs here is looked after: what it has to do is done there.
        await self._mesh.make_sure_of_itself()
        if isinstance(self._half, Following):
            await nursery.start(self._half.run)

    async def _serve(
        self, sockets: BoundSockets, shutdown: trio.Event, *, task_status: trio.TaskStatus[int | None]
    ) -> None:
        self._served = trio.Event()
        try:
            await serve(
                make_app(self, trusted=True),
                make_app(self, trusted=False, names=self._certificate_names()) if sockets.tcp is not None else None,
                sockets,
                shutdown=shutdown,
                tls=self._api_tls if sockets.needs_tls else None,
                task_status=task_status,
            )
        finally:
            self._served.set()

    def _write_address(self, port: int | None) -> None:
        """Where the API is, for whoever looks into the data directory. A full disk must not keep the daemon from its
        replicas for that (P10); what an earlier daemon wrote would be wrong."""
        path = self._data.path / "api.json"
        if port is None:
            return
        try:
            atomic_write(path, json.dumps({"host": self.config.bind, "port": port}).encode())
        except OSError as error:
            log.warning("api.address_not_written", path=str(path), reason=error.strerror)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    async def _look_at_devices(self) -> None:
        with trio.move_on_after(self.config.first_look_seconds):
            await self._devices.first_look()

    def _note_membership(self, cluster_id: str) -> None:
        try:
            known = membership(self._data.path)
            if known is None:
                note_membership(self._data, Membership(cluster_id=cluster_id, name=self.node_name))
        except OSError as error:
            log.warning("cluster.not_noted", path=str(self._data.path), reason=error.strerror)

    def _capabilities(self) -> Capabilities:
        host, inventory = self._host, self._devices.inventory
        return Capabilities(
            accelerators=inventory.accelerators,
            cpus_milli=self.config.cpus_milli or host.cpus_milli,
            memory_mib=self.config.memory_mib or host.memory_mib,
            labels=self.config.labels,
            undetected=(
                *host.undetected,
                *inventory.undetected,
                *cards_of_other_vendors(self._cards, inventory.accelerators),
            ),
            gpu_detect=inventory.gpu_detect,
            # The module's own version, where the library does not tell: after an upgrade they may differ.
            drivers=tuple(sorted({**dict(host.drivers), **dict(inventory.drivers)}.items())),
            disk_mib=host.disk_mib,
            gpus_excluded=len(inventory.excluded),
            numa=host.numa,
        )

    # --- what this node says of itself ----------------------------------------------------------------------------

    def _facts(self) -> NodeFacts:
        return NodeFacts(
            name=self.node_name,
            advertise=self.config.advertise,
            capabilities=self._capabilities(),
            api=self._api_address,
            gpulayer_version=__version__,
            is_voter=self.is_voter,
            warnings=self._devices.warnings,
        )

    def _own_record(self) -> NodeRecord:
        replicas = {}
        orders = self._orders
        for attempt, status in self._agent.statuses().items():
            order = orders.get(attempt)
            if order is None:
                continue  # a leftover that is being ended
            replicas[attempt] = ReplicaRecord(
                status=status,
                job_name=order.job_name,
                kind=order.spec.kind,
                revision=order.assignment.revision,
                devices=order.assignment.devices,
                cpus_milli=order.assignment.cpus_milli,
                memory_mib=order.assignment.memory_mib,
            )
        return NodeRecord(facts=self._facts(), load=self._load, replicas=replicas)

    def _record_of(self, node: NodeId) -> NodeRecord:
        return self._mesh.record(node) if self._mesh is not None else NodeRecord()

    async def _publish(self) -> None:
        """Changes of the record go to the peers, and to the leader's plans where it leads itself."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._measure_load)
            seen = -1
            while True:
                seen = await self._said.wait_for(lambda value, seen=seen: value != seen)  # type: ignore[misc]
                self._publish_now()
                self._tell_leader_of_itself()
                await trio.sleep(PUBLISH_SECONDS)

    def _publish_now(self) -> None:
        if self._mesh is None:
            return
        record = self._own_record()
        entries = entries_of(facts=record.facts, load=record.load, replicas=record.replicas.values())
        # Against what gossip took, so that what was too large once is tried again.
        changed = changes(self._mesh.gossip.record(self.node_id), entries)
        if changed:
            self._mesh.publish(changed)

    def _tell_leader_of_itself(self) -> None:
        if isinstance(self._half, Voting):
            attempts = frozenset(self._agent.statuses())
            self._half.node_said(self.node_id, self._facts(), attempts, is_heard=True)

    async def _look_whether_sluggish(self) -> None:
        """Gossip that is alive must not hide a supervision that stands still."""
        assert self._mesh is not None
        was_sluggish = False
        while True:
            await trio.sleep(SLUGGISH_LOOKS_SECONDS)
            waiting = trio.current_time() - self._agent_turned_at if len(self._agent_inbox) else 0.0
            is_sluggish = max(waiting, self._supervisor.listeners_checked_seconds_ago()) > SLUGGISH_SECONDS
            if is_sluggish != was_sluggish:
                log.warning("daemon.sluggish" if is_sluggish else "daemon.not_sluggish_any_more")
                self._mesh.set_flag(SLUGGISH, is_sluggish)
                was_sluggish = is_sluggish

    async def _measure_load(self) -> None:
        meter = LoadMeter(self._data.path)
        while True:
            await trio.sleep(LOAD_SECONDS)
            load = meter.look()
            if load != self._load:
                self._load = load
                self._say_something()

    def _say_something(self) -> None:
        self._said.set(self._said.value + 1)
        self._bump()

    def _devices_changed(self) -> None:
        self._say_something()

    def _agent_stepped(self) -> None:
        self._agent_turned_at = trio.current_time()
        self._say_something()

    def _bump(self) -> None:
        self._view.set(self._view.value + 1)

    # --- orders -----------------------------------------------------------------------------------------------------

    @property
    def _orders(self) -> Mapping[AttemptId, Order]:
        return self._half.orders if self._half is not None else {}

    def _take_orders(self, orders: tuple[Order, ...]) -> None:
        """Of the log that lies here: they are always current."""
        self._agent_inbox.put_nowait(OrdersChanged(orders=orders))

    def _follow_orders(self, told: FollowOrders) -> None:
        self._agent_inbox.put_nowait(OrdersChanged(orders=told.orders, is_current=told.is_current))

    def _registry_learned(self, nodes: frozenset[NodeId]) -> None:
        if self._mesh is not None:
            self._mesh.set_registry({node: self._mesh.name_of(node) for node in nodes})

    def _assigned_devices(self) -> Mapping[AttemptId, tuple[DeviceShare, ...]]:
        """What of this node's devices is held by orders. Asked every second, so it is made once for all of them."""
        orders = self._orders
        if self._assigned is None or self._assigned[0] is not orders:
            found = {id: order.assignment.devices for id, order in orders.items() if order.assignment.devices}
            self._assigned = orders, found
        return self._assigned[1]

    def _is_withdrawn(self, attempt: AttemptId) -> bool:
        return self._half is None or self._half.is_withdrawn(attempt)

    def _state_changed(self) -> None:
        """A newer state of the log that lies here."""
        if self._mesh is not None:
            state = self.state
            registry = {id: node.name for id, node in state.nodes.items()}
            if registry != self._registry_told:
                self._registry_told = registry
                self._mesh.set_registry(registry)
            try:
                self._mesh.set_ring(state.key_ring)
            except GpulayerError as error:
                log.warning("keys.not_kept", reason=error.message)
        self._bump()

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
                self._announce(attempt, done, to_feed=not is_told)
            case _:
                self._supervisor.perform(effect)

    def _announce(self, attempt: AttemptId, said: Announce, *, to_feed: bool) -> None:
        log.info(
            said.kind, job=attempt.replica.job, replica=attempt.replica.index, attempt=attempt.attempt, text=said.text
        )
        if not to_feed:
            return
        self._event_seq += 1
        self.events.add(
            [
                Event(
                    source=self.node_id,
                    epoch=self._data.epoch,
                    seq=self._event_seq,
                    at_utc=time.time(),
                    kind=said.kind,
                    job=attempt.replica.job,
                    replica=attempt.replica.index,
                    node=self.node_name,
                    text=said.text,
                    data=(*said.data, ("attempt", str(attempt.attempt))),
                )
            ]
        )

    def _report(self, command: ReplicaEnded | ReplicaReleased | ReplicaRefused | ReplicaAccepted) -> None:
        """In the order of the effects: a release that overtakes its end would be refused."""
        assert self._nursery is not None
        assert self._half is not None
        self._nursery.start_soon(self._report_answered, command, self._half.report_nowait(command))

    async def _report_answered(self, command: Command, sent: Proposal | SentReport) -> None:
        try:
            await sent.wait()
        except GpulayerError as error:
            # The agent says it again while the log does not show it.
            log.warning("report.not_committed", report=repr(command)[:200], reason=error.message)

    # --- peers --------------------------------------------------------------------------------------------------------

    def _send_to(self, node: NodeId, frame: PeerFrame) -> None:
        if self._mesh is not None:
            self._mesh.send(node, frame)

    def _tell_all(self, frame: PeerFrame) -> None:
        if self._mesh is not None:
            self._mesh.tell_all(frame)

    def _peer_frame(self, run: Run, frame: PeerFrame) -> None:
        match frame:
            case CertificateGiven() if run.node == self._mesh_voter:
                self._certificate_given(frame)
            case EventsOffered() | EventsTold() if self.is_voter:
                self._send_to(run.node, keep_events(self.events, run.node, frame))
            case EventsKept() if self._relay is not None and run.node == self._mesh_voter:
                self._relay.kept(frame)
            case _:
                if self._half is None or not self._half.from_peer(run.node, frame):
                    log.warning("peer.frame_unexpected", node=run.node, frame=type(frame).__name__)

    def _link_changed(self, node: NodeId, is_up: bool) -> None:
        assert self._half is not None
        self._half.link(node, is_up)
        if self._relay is not None and node == self._mesh_voter:
            self._relay.link(is_up)
        if not is_up and node == self._mesh_voter and self._nursery is not None:
            self._nursery.start_soon(self._reach_voter)

    @property
    def _mesh_voter(self) -> NodeId | None:
        return self._half.voter if isinstance(self._half, Following) else None

    async def _reach_voter(self) -> None:
        """The link to the voter is kept: opened again until it stands."""
        voter = self._mesh_voter
        if voter is None or self._mesh is None:
            return
        await trio.sleep(REACH_SECONDS)
        if voter not in self._mesh.links.links:
            for address in self._mesh.addresses(voter)[:1]:
                self._mesh.links.contact(address)

    def _member_changed(self, change: MemberChanged, name: str) -> None:
        self._record_changed(change.after.id)
        if isinstance(self._half, Voting) and change.after.id != self.node_id:
            self._tell_of_member(change, name)

    def _tell_of_member(self, change: MemberChanged, name: str) -> None:
        """Into the feed, by the voter alone, so that each change is told once."""
        before, after = change.before, change.after
        if before is not None and before.state == after.state and before.run == after.run:
            return
        kind = {"dead": "unsupervised" if after.cause == "daemon" else "silent"}.get(after.state, after.state)
        self._event_seq += 1
        self.events.add(
            [
                Event(
                    source=self.node_id,
                    epoch=self._data.epoch,
                    seq=self._event_seq,
                    at_utc=time.time(),
                    kind=f"node.{kind}",
                    node=name,
                    text=f"node {name} is {kind}: {change.text}",
                    data=(("id", after.id), ("epoch", str(after.run.epoch))),
                )
            ]
        )

    def _record_changed(self, node: NodeId) -> None:
        if isinstance(self._half, Voting) and self._mesh is not None and node != self.node_id:
            member, record = self._mesh.gossip.member(node), self._mesh.record(node)
            is_heard = member is not None and member.state == "alive" and not self._mesh.gossip.is_stale(node)
            self._half.node_said(node, record.facts, frozenset(record.replicas), is_heard=is_heard)
            self._look_who_is_placeable()
        self._said.set(self._said.value + 1)

    def _look_who_is_placeable(self) -> None:
        placeable = self.placeable()
        if isinstance(self._half, Voting) and placeable != self._placeable_told:
            self._placeable_told = placeable
            self._half.placeable_changed()

    async def _watch_placeable(self) -> None:
        """What comes to an end by itself: a node that was to be kept empty and did not leave."""
        while True:
            await trio.sleep(1.0)
            now = trio.current_time()
            self._kept_empty = {node: until for node, until in self._kept_empty.items() if until > now}
            self._look_who_is_placeable()

    async def _open_stream(self, node: NodeId) -> FrameStream:
        assert self._mesh is not None
        return await self._mesh.open_stream(node)

    async def _serve_peer(self, run: Run, stream: FrameStream) -> None:
        await self._peers_served.wait()
        assert self._peer_api is not None
        await self._peer_api.serve(run, stream)

    # --- who is let in, keys and certificates -------------------------------------------------------------------------

    def _admission(self) -> Admission:
        assert isinstance(self._half, Voting)
        half = self._half
        return Admission(
            voter=self.node_id,
            voter_name=self.node_name,
            advertise=self.config.advertise,
            state=lambda: half.state,
            propose=half.propose,
            answers=self._answers,
            peers=self._peers,
        )

    async def _answers(self, node: NodeId) -> bool:
        """Whether a run of that node is alive now. Gossip is asked, which asks it every half a second."""
        member = self._mesh.gossip.member(node) if self._mesh is not None else None
        return member is not None and member.state in ("alive", "suspect")

    def _peers(self) -> tuple[tuple[NodeId, Address], ...]:
        if self._mesh is None:
            return ()
        members = sorted(self._mesh.gossip.members().values(), key=lambda member: member.id != self.node_id)
        return tuple(
            (member.id, member.addresses[0]) for member in members if member.state != "left" and member.addresses
        )[:PEERS_TOLD_MAX]

    def _keys_held(self) -> Mapping[NodeId, tuple[int, ...]]:
        if self._mesh is None:
            return {}
        members = self._mesh.gossip.members()
        return {id: member.key_ids for id, member in members.items() if member.state in ("alive", "suspect")}

    def _certificate_names(self) -> tuple[str, ...]:
        """What others call this node, for its certificate and the Host header."""
        names = [self.config.advertise, self.node_name]
        if not ip_address(self.config.bind).is_unspecified:
            names.append(self.config.bind)
        return trust.checked_names(tuple(dict.fromkeys(names)))

    def _api_tls(self) -> SSLContext:
        if self._tls is None:
            self._tls = self._trust.server_context(ask_for_client_certificate=False)
        return self._tls

    async def _look_after_certificate(self, api_port: int | None) -> None:
        """A new one in time, and when this node is called by another name."""
        while True:
            try:
                held = self._trust.read(self.node_id, may_be_expired=True)
                if trust.needs_renewal(held.certificate_pem, self._certificate_names()):
                    self._renew_certificate()
            except GpulayerError as error:
                log.warning("certificate.not_looked_at", reason=error.message)
            await trio.sleep(CERTIFICATE_LOOKS_SECONDS)

    def _renew_certificate(self) -> None:
        assert self._mesh is not None
        if isinstance(self._half, Voting):
            self._half.certify_self(self._trust, self._certificate_names())
            self._mesh.refresh_contexts()
            self._tls = None
        elif isinstance(self._half, Following) and self._half.voter is not None:
            self._mesh.send(
                self._half.voter,
                CertificateWanted(public_key_pem=self._trust.public_key_pem(), names=self._certificate_names()),
            )

    def _certificate_given(self, given: CertificateGiven) -> None:
        assert self._mesh is not None
        try:
            self._mesh.renew_certificate(given.certificate_pem)
        except GpulayerError as error:
            log.warning("certificate.not_taken", reason=error.message)
            return
        self._tls = None
        log.info("certificate.renewed", names=trust.names_of(given.certificate_pem))


def _lock_directory() -> Path:
    """Where there is none, no GPU can be locked, which each says for itself; everything else works."""
    try:
        return shared_directory()
    except GpulayerError as error:
        log.warning("device_locks.no_directory", reason=error.message, hint=error.hint)
        return Path(SHARED_DIRECTORIES[0])


class _Observed:
    """The agent, with a word to the readers after each step: what it has heard may have changed a status."""

    def __init__(self, agent: Agent, stepped: Callable[[], None]) -> None:
        self._agent = agent
        self._stepped = stepped

    @property
    def deadline(self) -> Instant:
        return self._agent.deadline

    def step(self, event: AgentEvent, now: Instant) -> list[AgentEffect]:
        effects = self._agent.step(event, now)
        self._stepped()
        return effects


async def _feed_watchdog(notifier: ServiceNotifier) -> None:
    """Said from the event loop that does everything else: a daemon whose loop hangs is restarted, its replicas stay."""
    assert notifier.watchdog_interval_seconds is not None
    while True:
        notifier.send("WATCHDOG=1")
        await trio.sleep(notifier.watchdog_interval_seconds)


def run(options: UpOptions) -> int:
    """`gpulayer up`: returns the exit code, or raises a GpulayerError that says why it could not start."""
    # A signal that the caller blocked would never end us.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    config = load_config(options, os.environ, uid=os.getuid())
    # Whatever the caller's is: nobody else may write where the data directory lies, and we ourselves always may.
    os.umask(0o077)
    configure_logs(config.log_format)
    notifier = ServiceNotifier(os.environ)
    return trio.run(_main, config, notifier)


async def _main(config: Config, notifier: ServiceNotifier) -> int:
    # What can be refused without touching anything comes first: no half start.
    declared_accelerators(config.accelerators, node_id=NodeId("n-0"))
    with (
        open_data_dir(config.data_dir, abandon_state=config.abandon_state) as data,
        bind_sockets(unix_path=data.path / SOCKET_NAME, host=config.bind, port=config.api_port) as sockets,
        _peer_sockets(config) as peers,
    ):
        for text in data.warnings:
            log.warning("data_dir.changed", text=text)
        if peers is not None and way_in(config, data) == "join":
            notifier.send("STATUS=asking to be let into the cluster")
            config = await _join(config, data, peers.port)
        return await run_node(_settled(config, data), data, sockets, peers, notifier, beside=_stop_on_signal)


@contextmanager
def _peer_sockets(config: Config) -> Iterator[PeerSockets | None]:
    if config.peer_port is None:
        yield None
        return
    # Of a wildcard both families, where there are both.
    hosts = ("0.0.0.0", "::") if config.bind == "::" else (config.bind,)
    with bind_peer_sockets(hosts, config.peer_port) as bound:
        yield bound


async def _join(config: Config, data: DataDir, peer_port: int) -> Config:
    assert config.join_token is not None
    keys = trust.new_key_pair()
    applicant = Applicant(
        node=data.node_id,
        name=config.name,
        name_is_derived=config.name_is_derived,
        advertise=config.advertise,
        peer_port=peer_port,
        api_names=(config.name,),
        capabilities=await trio.to_thread.run_sync(_surveyed, config, data.path),
        keys=keys,
    )
    joined = await join(applicant, config.seeds, config.join_token, rng=Random(secrets.randbits(64)), ask=ask_to_join)
    keep(data, joined, keys)
    return replace(config, name=joined.accepted.name, advertise=joined.advertise)


def _surveyed(config: Config, data_dir: Path) -> Capabilities:
    """What this host has, for the request to be let in. Its daemon looks again."""
    found = survey(
        DriverAsked(),
        data_dir=data_dir,
        declared=config.accelerators,
        excluded=config.devices_excluded,
        foreign_processes=config.foreign_processes,
    )
    host = detect_host(data_dir)
    return Capabilities(
        accelerators=tuple(each.device for each in found.devices if each.state != "excluded"),
        cpus_milli=config.cpus_milli or host.cpus_milli,
        memory_mib=config.memory_mib or host.memory_mib,
        labels=config.labels,
        undetected=(*host.undetected, *found.undetected),
        gpu_detect=found.gpu_detect,
        drivers=tuple(sorted({**dict(host.drivers), **dict(found.drivers)}.items())),
        disk_mib=host.disk_mib,
        numa=host.numa,
    )


def _settled(config: Config, data: DataDir) -> Config:
    """With the name that the cluster knows this node by, and an address that others reach it at."""
    member = membership(data.path)
    if member is not None and member.name and config.name_is_derived:
        config = replace(config, name=member.name)
    if not config.advertise:
        known = [address for peer in PeerCache(data.path / "peers.json").peers for address in peer.addresses]
        found = next((shown for shown in map(shown_to, known) if shown), "")
        if not found:
            raise InvalidRequest(
                f"advertise: bind is {config.bind}, and no way to another node tells which address others reach",
                hint="name it with --advertise",
            )
        config = replace(config, advertise=found)
    return config


async def run_node(
    config: Config,
    data: DataDir,
    sockets: BoundSockets,
    peers: PeerSockets | None,
    notifier: ServiceNotifier,
    *,
    beside: Callable[[Daemon], Awaitable[None]],
) -> int:
    """A node, from its log to its end. `beside` runs as long as it does, and says when it is to stop. `peers`: None for
    a node that is alone for good."""
    member = membership(data.path)
    events = await open_event_store(data.path / "events.db")
    try:
        if member is not None and not member.is_voter:
            daemon = Daemon(config, data, None, events, _raise_open_files_limit())
            await _run_daemon(daemon, sockets, peers, notifier, beside)
        else:
            await _run_voter(config, data, events, sockets, peers, notifier, beside)
    finally:
        await _closed(events.close)
    log.info("daemon.stopped")
    return 0


async def _run_voter(
    config: Config,
    data: DataDir,
    events: EventStore,
    sockets: BoundSockets,
    peers: PeerSockets | None,
    notifier: ServiceNotifier,
    beside: Callable[[Daemon], Awaitable[None]],
) -> None:
    voter = await open_voter(
        data.path / "log.db",
        node_id=data.node_id,
        now_utc=time.time,
        snapshot_every=config.snapshot_every,
        disk_free_min_mib=config.disk_free_min_mib,
        before_snapshot=events.flush,
        on_events=events.add,
    )
    try:
        check_cluster(data, voter.state.value.cluster_id)
        daemon = Daemon(config, data, voter, events, _raise_open_files_limit())
        await _run_daemon(daemon, sockets, peers, notifier, beside)
    finally:
        await _closed(voter.store.close)


async def _run_daemon(
    daemon: Daemon,
    sockets: BoundSockets,
    peers: PeerSockets | None,
    notifier: ServiceNotifier,
    beside: Callable[[Daemon], Awaitable[None]],
) -> None:
    refused: list[GpulayerError] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside, daemon)
            await daemon.run(sockets, peers, notifier)
            nursery.cancel_scope.cancel()
    except* GpulayerError as group:
        # Words for a person, such as a full disk that the node cannot be entered on; not a crash.
        refused = _leaves(group)
    if refused:
        raise refused[0]


def _leaves(group: BaseExceptionGroup[GpulayerError]) -> list[GpulayerError]:
    found: list[GpulayerError] = []
    for each in group.exceptions:
        found += _leaves(each) if isinstance(each, BaseExceptionGroup) else [each]
    return found


async def _closed(close: Callable[[], Awaitable[None]]) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_SECONDS):
        await close()


async def _stop_on_signal(daemon: Daemon) -> None:
    """SIGHUP too, which is the end of the terminal that it was started in; unless nohup has said to ignore it."""
    wanted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    with trio.open_signal_receiver(*wanted) as received:
        async for number in received:
            log.info("daemon.signalled", signal=signal.Signals(number).name)
            daemon.stop_requested.set()


def _raise_open_files_limit() -> tuple[int, int]:
    """Three descriptors a replica. Returns the limits there were, which the runs get back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard
