"""What a handler may ask of its node. node/facade.py is the only one that fulfils it.

Reads are of one moment: take `state` once and go on with that value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpulayer.core.cluster.commands import Command
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.replica import ReplicaStatus
from gpulayer.model.seen import Table
from gpulayer.wire.peer import RequestHead


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


class PeerAnswer(Protocol):
    """What another node answers, while it still comes."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> tuple[tuple[str, str], ...]: ...
    def parts(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises Unreachable where it breaks off."""
        ...


class NodeFacade(Protocol):
    """The daemon, as the HTTP handlers see it. All of it is called in the daemon's trio thread."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def node_name(self) -> str: ...
    @property
    def is_voter(self) -> bool:
        """Whether the log is here. Elsewhere `state` holds nothing to answer from, and `propose` is not for handlers:
        requests that need either are passed on to the voter (forwarding.py)."""
        ...

    @property
    def leader_name(self) -> str:
        """Who can commit now; empty where none is known, or none that is there."""
        ...

    @property
    def ca_pem(self) -> str:
        """The certificate of the cluster's authority, which is public; empty where it has none yet."""
        ...

    def table(self) -> Table:
        """Every node as it is seen from here, without asking anybody."""
        ...

    def ask(self, node: NodeId, head: RequestHead) -> AbstractAsyncContextManager[PeerAnswer]:
        """Ask another node, over a bulk link; the block is entered once its answer has begun, and leaving it early
        ends the other side's work. Raises Unreachable, with code `no_answer` where it was asked already and may have
        done it. node/forward.py does it."""
        ...

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

    def new_secret(self) -> bytes:
        """32 bytes of chance."""
        ...

    def keep_empty(self, node: NodeId, seconds: float) -> None:
        """Plans leave this node out for so long, for it is about to leave."""
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
        """runtime.log_file.LogStats: numbers for /metrics; None where the log is not here."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Of gossip, its socket and links, by name."""
        ...

    def loop_lag_seconds(self, part: float) -> float:
        """How late the event loop was in the last minute, at this quantile (0 to 1)."""
        ...

    def sandbox(self, attempt: AttemptId) -> Path: ...
    def log_dir(self, attempt: AttemptId) -> Path: ...
    async def audit(self) -> AuditReport: ...
    async def leave(self) -> None:
        """Nothing of this node's work is left, and the log, unless it lies here, knows it no more: announce that, and
        let the daemon stop after this answer was sent."""
        ...
