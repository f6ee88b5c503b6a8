"""The node, as the HTTP handlers see it: api.facade.NodeFacade, of what the parts of the daemon know and do."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import structlog
import trio

from gpulayer.api.facade import AuditReport, PeerAnswer
from gpulayer.core.agent import Agent
from gpulayer.core.cluster.applied import Accepted
from gpulayer.core.cluster.commands import Command
from gpulayer.core.cluster.table import make_table
from gpulayer.model import ids
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import Unreachable
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.member import DISK_LOW
from gpulayer.model.replica import ReplicaStatus
from gpulayer.model.seen import Table
from gpulayer.node.audit import audit_host
from gpulayer.node.certificates import Certificates
from gpulayer.node.config import Config
from gpulayer.node.following import Following
from gpulayer.node.own_record import OwnRecord
from gpulayer.node.place import Place
from gpulayer.node.placeable import Placeable
from gpulayer.node.voting import Voting
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.event_store import EventStore
from gpulayer.runtime.identity import DataDir, forget_membership
from gpulayer.runtime.lag import LagMonitor
from gpulayer.runtime.supervisor import Supervisor
from gpulayer.runtime.watch import Watch
from gpulayer.wire.peer import RequestHead

log = structlog.get_logger()

# A shim answers `quit` at once; one that hangs must not keep the daemon.
LEAVE_SECONDS = 15.0


class Facade:
    def __init__(
        self,
        *,
        config: Config,
        data: DataDir,
        place: Place,
        own_record: OwnRecord,
        placeable: Placeable,
        certificates: Certificates,
        agent: Agent,
        supervisor: Supervisor,
        devices: Devices,
        events: EventStore,
        view: Watch[int],
        lag: LagMonitor,
    ) -> None:
        """`view`: rises with every change of what is shown."""
        self.node_id: NodeId = data.node_id
        self.node_name = config.name
        self.started_at_utc = time.time()
        self.events = events
        self.stop_requested = trio.Event()
        self.is_ready = False
        self.has_left = False
        self._config, self._data, self._place = config, data, place
        self._own_record, self._placeable = own_record, placeable
        self._certificates, self._agent, self._supervisor, self._devices = certificates, agent, supervisor, devices
        self._view, self._lag = view, lag
        self._observed: tuple[ClusterState, int, ClusterState] | None = None

    # --- what is known --------------------------------------------------------------------------------------------

    @property
    def is_voter(self) -> bool:
        return self._place.is_voter

    @property
    def state(self) -> ClusterState:
        return self._place.state

    @property
    def observed_state(self) -> ClusterState:
        """The state, with every node as it is seen now: what a node says of itself is committed a little later."""
        state, view = self.state, self._view.value
        made = self._observed
        if made is None or made[0] is not state or made[1] != view:
            nodes = dict(state.nodes)
            for id, node in state.nodes.items():
                facts = self._own_record.facts() if id == self.node_id else self._place.record(id).facts
                if facts is not None and facts.capabilities != node.capabilities:
                    nodes[id] = replace(node, capabilities=facts.capabilities)
            made = self._observed = state, view, replace(state, nodes=nodes)
        return made[2]

    @property
    def leader_name(self) -> str:
        if isinstance(self._place.half, Voting):
            return self.node_name if not self.not_ready else ""
        table = self.table()
        return table.nodes[table.leader].name if table.leader is not None else ""

    @property
    def ca_pem(self) -> str:
        return self._certificates.ca_pem

    def table(self) -> Table:
        if self._place.mesh is not None:
            table = self._place.mesh.table()
        else:
            table = make_table(
                own=self.node_id,
                members={},
                records={self.node_id: self._own_record.now()},
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
        record = self._own_record.now()
        fresh = replace(own, name=self.node_name, facts=record.facts, load=record.load, replicas=record.replicas)
        return replace(table, nodes={**table.nodes, self.node_id: replace(fresh, is_voter=self.is_voter)})

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [*self._config.warnings, *self._supervisor.warnings, *self._devices.warnings]
        if self._devices.inventory.gpu_detect == "error":
            found += self._devices.inventory.undetected
        match self._place.half:
            case Voting(voter=voter) if voter.failed is not None:
                found.append(f"voter: storage failed: {voter.failed.message}")
            case Voting(voter=voter) if voter.store.disk_low:
                found.append(
                    f"the disk of {self._data.path} is nearly full: nothing new is accepted until there is room"
                )
            case Following(warnings=warnings):
                found += warnings
                if self._says_of_itself(DISK_LOW):
                    found.append(
                        f"the disk of {self._data.path} is nearly full: nothing new is placed here until there is room"
                    )
        if self._place.mesh is not None:
            found += self._place.mesh.warnings
        return tuple(found)

    def _says_of_itself(self, flag: int) -> bool:
        own = self._place.mesh.gossip.member(self.node_id) if self._place.mesh is not None else None
        return own is not None and bool(own.flags & flag)

    @property
    def not_ready(self) -> str:
        if isinstance(self._place.half, Voting) and self._place.half.voter.failed is not None:
            return f"storage failed: {self._place.half.voter.failed.message}"
        return "" if self.is_ready else "starting"

    @property
    def version_of_view(self) -> int:
        return self._view.value

    async def wait_for_change(self, seen: int) -> int:
        return await self._view.wait_for(lambda version: version > seen)

    def statuses(self) -> Mapping[AttemptId, ReplicaStatus]:
        if self._place.mesh is None:
            return self._agent.statuses()
        found: dict[AttemptId, ReplicaStatus] = {}
        for node in self._place.mesh.table().nodes.values():
            if not node.is_self:
                found.update({attempt: replica.status for attempt, replica in node.replicas.items()})
        return found | self._agent.statuses()

    def history(self, attempt: AttemptId) -> tuple[tuple[float, str], ...]:
        now = trio.current_time()
        return tuple((now - at, text) for at, text in self._agent.history(attempt))

    def placeable(self) -> Mapping[NodeId, str]:
        return self._placeable.now()

    def verified_seconds_ago(self) -> float:
        return self._supervisor.listeners_checked_seconds_ago()

    def sandbox(self, attempt: AttemptId) -> Path:
        return self._supervisor.sandbox_path(attempt)

    def log_dir(self, attempt: AttemptId) -> Path:
        return self._supervisor.log_dir(attempt)

    def store_stats(self) -> object:
        return self._place.half.voter.store.stats() if isinstance(self._place.half, Voting) else None

    def counters(self) -> Mapping[str, int]:
        return self._place.mesh.counters() if self._place.mesh is not None else {}

    def loop_lag_seconds(self, part: float) -> float:
        return self._lag.quantile(part)

    # --- time and chance ------------------------------------------------------------------------------------------

    def now_utc(self) -> float:
        return time.time()

    def new_job_id(self) -> JobId:
        return ids.job_id(secrets.token_bytes(8))

    def new_token(self) -> tuple[str, str, str]:
        secret = "gpl_" + secrets.token_urlsafe(32)
        return "t-" + secrets.token_hex(4), secret, sha256(secret.encode()).hexdigest()

    def new_secret(self) -> bytes:
        return secrets.token_bytes(32)

    # --- what is asked for ----------------------------------------------------------------------------------------

    def ask(self, node: NodeId, head: RequestHead) -> AbstractAsyncContextManager[PeerAnswer]:
        if self._place.bulk is None:
            raise Unreachable("this node speaks to no other one", hint="it is starting, or it is a private node")
        return self._place.bulk.ask(node, head)

    async def propose(self, command: Command) -> Accepted:
        if not isinstance(self._place.half, Voting):
            raise Unreachable("the log is not here", hint="report this", code="no_leader")
        return await self._place.half.propose(command)

    def keep_empty(self, node: NodeId, seconds: float) -> None:
        self._placeable.keep_empty(node, seconds)

    async def audit(self) -> AuditReport:
        return await audit_host(
            data_dir=self._data.path,
            orders=lambda: tuple(self._place.orders.values()),
            statuses=self._agent.statuses,
            now_utc=self.now_utc,
        )

    async def leave(self) -> None:
        # Released is the log's word; the shims are still being told to go, and one that is not told stays.
        with trio.move_on_after(LEAVE_SECONDS):
            await self._supervisor.wait_for_nothing()
        if self._place.mesh is not None and not self.is_voter:
            self.has_left = True
            await self._place.mesh.leave()
            try:
                forget_membership(self._data)
                self._certificates.files.remove()
            except OSError as error:
                log.warning("leave.not_forgotten", path=str(self._data.path), reason=error.strerror)
        self.stop_requested.set()
