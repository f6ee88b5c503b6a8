"""What a handler may ask of its node. node/daemon.py is the only one that fulfils it.

Reads are of one moment: take `state` once and go on with that value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpulayer.core.cluster.commands import Command
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.replica import ReplicaStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something on the host that is not as the log says."""

    kind: str
    text: str
    pids: tuple[int, ...] = ()
    job: str = ""
    replica: int | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    checked_at_utc: float
    differences: tuple[Difference, ...]
    replicas_checked: int
    processes_seen: int


class NodeFacade(Protocol):
    """The daemon, as the HTTP handlers see it. All of it is called in the daemon's trio thread."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def node_name(self) -> str: ...
    @property
    def state(self) -> ClusterState: ...
    @property
    def observed_state(self) -> ClusterState:
        """`state`, with this node as it is seen now; what is seen is committed a little later."""
        ...

    @property
    def started_at_utc(self) -> float: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...
    @property
    def not_ready(self) -> str:
        """Empty when the node serves; else why not."""
        ...

    @property
    def events(self) -> Any:
        """runtime.event_store.EventStore."""
        ...

    @property
    def version_of_view(self) -> int:
        """Rises with every change of state or statuses."""
        ...

    async def wait_for_change(self, seen: int) -> int:
        """Return the version_of_view once it is above `seen`."""
        ...

    def now_utc(self) -> float: ...
    def new_job_id(self) -> JobId: ...
    def new_token(self) -> tuple[str, str, str]:
        """(token id, secret `gpl_…`, sha256 hex digest of the secret)."""
        ...

    def statuses(self) -> Mapping[AttemptId, ReplicaStatus]: ...
    def history(self, attempt: AttemptId) -> tuple[tuple[float, str], ...]:
        """(seconds ago, text) of what the attempt's life cycle remembers, oldest first."""
        ...

    def placeable(self) -> Mapping[NodeId, str]:
        """Per node why nothing may be placed there now; empty text: it may."""
        ...

    def verified_seconds_ago(self) -> float:
        """Age of the newest look at the listening sockets."""
        ...

    async def propose(self, command: Command) -> Any:
        """Commit; returns core.cluster.apply.Accepted. Raises the error that fits a Rejected, or StorageFailed."""
        ...

    def store_stats(self) -> Any:
        """runtime.log_file.LogStats: numbers for /metrics."""
        ...

    def sandbox(self, attempt: AttemptId) -> Path: ...
    def log_dir(self, attempt: AttemptId) -> Path: ...
    async def audit(self) -> AuditReport: ...
    async def leave(self) -> None:
        """Every replica has ended and is released: let the daemon stop after this answer was sent."""
        ...
