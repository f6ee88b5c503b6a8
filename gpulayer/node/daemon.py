"""The composition root: which effect of which core becomes which event of which other. The only place that knows all.

Start: configuration, ports, data directory and its lock, log and state, this node's admission, what its sandboxes hold,
then serve. Stop (SIGTERM): answer nobody any more, leave the replicas running, close. A crash of any part ends the
daemon loudly; the shims, and so the replicas, go on.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import structlog
import trio

from gpulayer import __version__
from gpulayer.api.app import make_app
from gpulayer.api.facade import AuditReport
from gpulayer.api.server import BoundSockets, bind_sockets, serve
from gpulayer.core.agent import Agent
from gpulayer.core.cluster.apply import Accepted
from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    CreateCluster,
    ReplicaEnded,
    ReplicaRefused,
    ReplicaReleased,
)
from gpulayer.core.inventory import Inventory
from gpulayer.core.leader import Leader, LeaderEvent, PlaceableChanged, ProposalFailed, Propose, StateAdvanced
from gpulayer.core.replica.messages import (
    AgentEffect,
    AgentEvent,
    Announce,
    AttemptsFound,
    Order,
    OrdersChanged,
    Report,
    ReportRefused,
    ReportReleased,
)
from gpulayer.model import ids
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import GpulayerError
from gpulayer.model.event import Event
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.node import Capabilities
from gpulayer.model.places import SOCKET_NAME
from gpulayer.model.replica import DeviceShare, ReplicaStatus
from gpulayer.model.units import Instant
from gpulayer.node.audit import audit_host
from gpulayer.node.config import Config, Neighbour, UpOptions, load_config
from gpulayer.node.notify import ServiceNotifier
from gpulayer.node.voter import Proposal, SoleVoter, open_voter
from gpulayer.runtime.accelerators.declared import declared_accelerators
from gpulayer.runtime.accelerators.device_locks import SHARED_DIRECTORIES, DeviceLocks, shared_directory
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.accelerators.exclude import is_excluded
from gpulayer.runtime.accelerators.nvml import pci_gpus
from gpulayer.runtime.accelerators.survey import cards_of_other_vendors
from gpulayer.runtime.drive import Inbox, drive
from gpulayer.runtime.event_store import EventStore, open_event_store
from gpulayer.runtime.host import detect_host
from gpulayer.runtime.identity import DataDir, atomic_write, check_cluster, note_cluster, open_data_dir
from gpulayer.runtime.supervisor import Supervisor
from gpulayer.runtime.telemetry import configure_logs
from gpulayer.runtime.watch import Watch

log = structlog.get_logger()

# How long the last answers may take once the daemon was told to stop; systemd waits much longer (TimeoutStopSec).
SHUTDOWN_SECONDS = 3.0
# A shim answers `quit` at once; one that hangs must not keep the daemon.
LEAVE_SECONDS = 15.0


class Daemon:
    """One node, running. Fulfils api.facade.NodeFacade for the handlers."""

    def __init__(
        self, config: Config, data: DataDir, voter: SoleVoter, events: EventStore, nofile: tuple[int, int]
    ) -> None:
        self.config = config
        self.events = events
        self.node_id: NodeId = data.node_id
        self.node_name = config.name
        self.started_at_utc = time.time()
        self.stop_requested = trio.Event()
        self._data = data
        self._voter = voter
        self._ready = False
        self._view: Watch[int] = Watch(0)
        self._seen_state: tuple[ClusterState, int, ClusterState] | None = None
        self._assigned: tuple[ClusterState, Mapping[AttemptId, tuple[DeviceShare, ...]]] | None = None
        self._event_seq = 0
        self._agent = Agent(self.node_id, config.advertise)
        self._agent_inbox: Inbox[AgentEvent] = Inbox()
        self._leader = Leader()
        self._leader_inbox: Inbox[LeaderEvent] = Inbox()
        self._observed: Watch[int] = Watch(0)
        """Rises when the devices have something new to say."""
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
        self._plan_trouble = ""
        """Why plans are not committed now: said once, not with every try."""
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
            wanted=lambda: {order.assignment.id for order in self._orders(self.state)},
            is_withdrawn=self._is_withdrawn,
            tethered=config.tethered,
        )
        self._nursery: trio.Nursery | None = None

    # --- the facade ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ClusterState:
        return self._voter.state.value

    @property
    def observed_state(self) -> ClusterState:
        """The state, with this node as it is seen now: what its devices say is committed a little later."""
        state = self.state
        node = state.nodes.get(self.node_id)
        if node is None:
            return state
        made = self._seen_state
        if made is None or made[0] is not state or made[1] != self._observed.value:
            seen = replace(state, nodes={**state.nodes, node.id: replace(node, capabilities=self._capabilities())})
            made = self._seen_state = state, self._observed.value, seen
        return made[2]

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [*self.config.warnings, *self._supervisor.warnings, *self._devices.warnings]
        if self._devices.inventory.gpu_detect == "error":
            found += self._devices.inventory.undetected
        if self._voter.failed is not None:
            found.append(f"voter: storage failed: {self._voter.failed.message}")
        elif self._voter.store.disk_low:
            found.append(f"the disk of {self._data.path} is nearly full: nothing new is accepted until there is room")
        return tuple(found)

    @property
    def not_ready(self) -> str:
        if self._voter.failed is not None:
            return f"storage failed: {self._voter.failed.message}"
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

    def statuses(self) -> Mapping[AttemptId, ReplicaStatus]:
        return self._agent.statuses()

    def history(self, attempt: AttemptId) -> tuple[tuple[float, str], ...]:
        now = trio.current_time()
        return tuple((now - at, text) for at, text in self._agent.history(attempt))

    def placeable(self) -> Mapping[NodeId, str]:
        if self._voter.failed is not None:
            return {self.node_id: "its storage failed, and a placement has to be written down"}
        if self._voter.store.disk_low:
            return {self.node_id: "its disk is nearly full, and a placement has to be written down"}
        return {self.node_id: ""}

    def verified_seconds_ago(self) -> float:
        return self._supervisor.listeners_checked_seconds_ago()

    async def propose(self, command: Command) -> Accepted:
        return await self._voter.propose(command)

    def sandbox(self, attempt: AttemptId) -> Path:
        return self._supervisor.sandbox_path(attempt)

    def log_dir(self, attempt: AttemptId) -> Path:
        return self._supervisor.log_dir(attempt)

    def store_stats(self) -> object:
        return self._voter.store.stats()

    async def audit(self) -> AuditReport:
        return await audit_host(
            data_dir=self._data.path,
            orders=lambda: self._orders(self.state),
            statuses=self.statuses,
            now_utc=self.now_utc,
        )

    async def leave(self) -> None:
        # Released is the log's word; the shims are still being told to go, and one that is not told stays.
        with trio.move_on_after(LEAVE_SECONDS):
            await self._supervisor.wait_for_nothing()
        self.stop_requested.set()

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self, sockets: BoundSockets, notifier: ServiceNotifier) -> None:
        """Until `stop_requested`. Replicas are adopted before anyone is served, so that the first answer is true."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._voter.run)
            await nursery.start(self._devices.run)
            known = self.state.nodes.get(self.node_id)
            if known is None:  # nothing runs here that would wait for it
                await self._look_at_devices()
            await self._admit(known.capabilities if known is not None else self._capabilities())
            await nursery.start(self._supervisor.run)
            self._agent_inbox.put_nowait(OrdersChanged(orders=self._orders(self.state)))
            found = await self._supervisor.find_attempts()
            self._agent_inbox.put_nowait(AttemptsFound(found=found))
            self._supervisor.start_events()
            nursery.start_soon(drive, _Observed(self._agent, self._bump), self._agent_inbox, self._perform)
            nursery.start_soon(drive, self._leader, self._leader_inbox, self._perform_leader)
            nursery.start_soon(self._follow_state)
            # What runs is looked after by now. Whoever asks what there is should not hear of half a host.
            await self._look_at_devices()
            nursery.start_soon(self._follow_devices)
            shutdown = trio.Event()
            port = await nursery.start(self._serve, sockets, shutdown)
            api = f"{self.config.bind}:{port}" if port is not None else str(self._data.path / SOCKET_NAME)
            self._write_address(port)
            self._ready = True
            self._bump()
            log.info(
                "daemon.ready",
                node=self.node_name,
                api=api,
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
            log.info("daemon.stopping", replicas_left_running=len(self.state.assignments(self.node_id)))
            shutdown.set()
            with trio.move_on_after(SHUTDOWN_SECONDS):
                await self._served.wait()
            nursery.cancel_scope.cancel()

    async def _serve(
        self, sockets: BoundSockets, shutdown: trio.Event, *, task_status: trio.TaskStatus[int | None]
    ) -> None:
        self._served = trio.Event()
        try:
            await serve(
                make_app(self, trusted=True),
                make_app(self, trusted=False) if sockets.tcp is not None else None,
                sockets,
                shutdown=shutdown,
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

    async def _admit(self, capabilities: Capabilities) -> None:
        """Enter the log what this node is, if that is news."""
        if not self.state.cluster_id:
            await self.propose(CreateCluster(cluster_id="c-" + secrets.token_hex(8)))
        try:
            note_cluster(self._data, self.state.cluster_id)
        except OSError as error:
            log.warning("cluster.not_noted", path=str(self._data.path), reason=error.strerror)
        known = self.state.nodes.get(self.node_id)
        wanted = AdmitNode(
            node=self.node_id, name=self.node_name, advertise=self.config.advertise, capabilities=capabilities
        )
        if known is None or (known.name, known.advertise, known.capabilities) != (
            wanted.name,
            wanted.advertise,
            wanted.capabilities,
        ):
            await self.propose(wanted)

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

    async def _follow_devices(self) -> None:
        """What the node has becomes part of the log when it changes: the first change at once, then one in
        `observed_seconds`, so that a device that comes and goes does not fill the log."""
        told = ""
        while True:
            seen = self._observed.value
            try:
                await self._admit(self._capabilities())
                told = ""
            except GpulayerError as error:
                if self._voter.failed is not None:
                    return  # for good
                seen = -1  # to be tried again, whether anything changes or not
                if error.code != told:
                    log.warning("node.change_not_committed", reason=error.message)
                told = error.code
            await trio.sleep(self.config.observed_seconds)
            await self._observed.wait_for(lambda value, seen=seen: value != seen)  # type: ignore[misc]

    def _devices_changed(self) -> None:
        self._observed.set(self._observed.value + 1)
        self._bump()

    def _assigned_devices(self) -> Mapping[AttemptId, tuple[DeviceShare, ...]]:
        """What of this node's devices is held by orders. Asked every second, so it is made once per state."""
        state = self.state
        if self._assigned is None or self._assigned[0] is not state:
            found = {each.id: each.devices for each in state.assignments(self.node_id) if each.devices}
            self._assigned = state, found
        return self._assigned[1]

    def _is_withdrawn(self, attempt: AttemptId) -> bool:
        job = self.state.jobs.get(attempt.replica.job)
        assignment = job.replicas[attempt.replica.index].assignment if job is not None else None
        return assignment is None or assignment.attempt != attempt.attempt or assignment.withdrawn is not None

    # --- routes -------------------------------------------------------------------------------------------------

    def _orders(self, state: ClusterState) -> tuple[Order, ...]:
        return tuple(
            Order(
                assignment=found.assignment, spec=job.spec, job_name=job.name, outcome_known=found.outcome is not None
            )
            for job in state.jobs.values()
            if job.is_live
            for found in job.replicas
            if found.assignment is not None and found.assignment.node == self.node_id
        )

    async def _follow_state(self) -> None:
        """A new state goes to whoever works from it: the leader's plans, the agent's orders, the readers."""
        seen, orders = None, None
        while True:
            state = await self._voter.state.wait_for(lambda value, seen=seen: value is not seen)  # type: ignore[misc]
            if seen is None or state.nodes.get(self.node_id) is not seen.nodes.get(self.node_id):
                # A refusal has put into the log what was seen then; when that is over it must not stay there.
                self._observed.set(self._observed.value + 1)
            seen = state
            self._leader_inbox.put_nowait(StateAdvanced(state=state))
            now_ordered = self._orders(state)
            if now_ordered != orders:
                orders = now_ordered
                self._agent_inbox.put_nowait(OrdersChanged(orders=orders))
            self._bump()

    def _bump(self) -> None:
        self._view.set(self._view.value + 1)

    def _perform(self, effect: AgentEffect) -> None:
        attempt, done = effect.attempt, effect.effect
        match done:
            case Report(outcome=outcome, released=released):
                self._commit_report(
                    ReplicaEnded(
                        job=attempt.replica.job,
                        replica=attempt.replica.index,
                        attempt=attempt.attempt,
                        outcome=outcome,
                        released=released,
                    )
                )
            case ReportReleased():
                self._commit_report(
                    ReplicaReleased(job=attempt.replica.job, replica=attempt.replica.index, attempt=attempt.attempt)
                )
            case ReportRefused(reason=reason, observed=observed):
                self._commit_report(
                    ReplicaRefused(
                        job=attempt.replica.job,
                        replica=attempt.replica.index,
                        attempt=attempt.attempt,
                        reason=reason,
                        observed=observed,
                    )
                )
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

    def _commit_report(self, command: ReplicaEnded | ReplicaReleased | ReplicaRefused) -> None:
        """In the order of the effects: a release that overtakes its end would be refused."""
        assert self._nursery is not None
        self._nursery.start_soon(self._report_answered, self._voter.propose_nowait(command))

    async def _report_answered(self, proposal: Proposal) -> None:
        try:
            await proposal.wait()
        except GpulayerError as error:
            # The agent says it again while the log does not show it.
            log.warning("report.not_committed", report=repr(proposal.command)[:200], reason=error.message)

    def _perform_leader(self, effect: Propose) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._plan_answered, self._voter.propose_nowait(effect.command))

    async def _plan_answered(self, proposal: Proposal) -> None:
        try:
            await proposal.wait()
            self._plan_trouble = ""
        except GpulayerError as error:
            if self._voter.failed is None:
                if error.code != self._plan_trouble:
                    log.warning("plan.not_committed", reason=error.message)
                self._plan_trouble = error.code
            else:
                # For good, and said already: nothing can be placed any more.
                self._leader_inbox.put_nowait(PlaceableChanged(placeable=self.placeable()))
            self._leader_inbox.put_nowait(ProposalFailed(command=proposal.command))


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
    ):
        for text in data.warnings:
            log.warning("data_dir.changed", text=text)
        return await run_node(config, data, sockets, notifier, beside=_stop_on_signal)


async def run_node(
    config: Config,
    data: DataDir,
    sockets: BoundSockets,
    notifier: ServiceNotifier,
    *,
    beside: Callable[[Daemon], Awaitable[None]],
) -> int:
    """A node, from its log to its end. `beside` runs as long as it does, and says when it is to stop."""
    events = await open_event_store(data.path / "events.db")
    try:
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
            refused: list[GpulayerError] = []
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(beside, daemon)
                    await daemon.run(sockets, notifier)
                    nursery.cancel_scope.cancel()
            except* GpulayerError as group:
                # Words for a person, such as a full disk that the node cannot be entered on; not a crash.
                refused = _leaves(group)
            if refused:
                raise refused[0]
        finally:
            await _closed(voter.store.close)
    finally:
        await _closed(events.close)
    log.info("daemon.stopped")
    return 0


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
