"""A replica where it is placed: assignment, runs, phase, endpoint, outcome, and the reasons people see."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpulayer.model.ids import AttemptId, NodeId, ReplicaId

REASON_CODES: tuple[str, ...] = (
    "queued",
    "no_capacity",
    "never_fits",
    "starting",
    "bad_command",
    "bad_workdir",
    "spawn_failed",
    "disk_full",
    "exit_nonzero",
    "exit_zero",
    "signal",
    "never_ready",
    "listens_elsewhere",
    "port_taken",
    "not_listening",
    "only_shell_left",
    "timeout",
    "interrupted",
    "supervisor_killed",
    "unkillable",
    "devices_not_clear",
    "device_unavailable",
    "device_unhealthy",
    "cancelled",
    "replica_ended",
    "restart_requested",
    "left_background_processes",
    "cgroup_unavailable",
    "not_accepted",
    "no_current_orders",
    "node_suspect",
    "node_unsupervised",
    "node_silent",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something is as it is: a stable code, a sentence with numbers, and what to do about it."""

    code: str
    text: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one run ended: exactly one of `code` and `signal`, or neither when nobody saw it (supervisor killed)."""

    run: int
    code: int | None = None
    signal: int | None = None
    ended_by: str = "itself"
    """itself, stop:<why>, timeout, shim_terminated, spawn_failed, interrupted, supervisor_killed (shim/protocol.py)."""
    ended_at_utc: float = 0.0
    uptime_seconds: float = 0.0
    left_background: int = 0
    left_names: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        return self.code == 0

    @property
    def signal_text(self) -> str:
        """`9 (SIGKILL)`; empty where no signal ended it."""
        if self.signal is None:
            return ""
        try:
            return f"{self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return str(self.signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a replica, or of a job, for good."""

    result: Literal["succeeded", "failed", "cancelled", "lost"]
    reason: Reason
    exit: Exit | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What a replica holds of one device: 1000 is all of it."""

    uuid: str
    milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Replica -> node: the order that one attempt of it shall run there."""

    replica: ReplicaId
    attempt: int
    node: NodeId
    revision: int
    devices: tuple[DeviceShare, ...] = ()
    cpus_milli: int = 0
    memory_mib: int = 0
    restart_serial: int = 0
    """Raised by `job restart`; a run started under a lower one is to be replaced by a new run."""
    withdrawn: Reason | None = None
    """Set: stop it. The assignment stays, and holds its capacity, until its node reports it released."""
    recalled: Reason | None = None
    """Set: do not begin with it any more. A node that has not begun refuses it, and the replica waits again; one that
    has says so (ReplicaAccepted), and this is None again."""

    @property
    def id(self) -> AttemptId:
        return AttemptId(self.replica, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a node says about one assignment of its own: observed, not agreed. Part of the node's record."""

    attempt: AttemptId
    state: ReplicaState
    reason: Reason | None = None
    run: int = 0
    pid: int | None = None
    port: int | None = None
    endpoint: Endpoint | None = None
    """Listed: the replica's own process listens there, as verified at most a second ago."""
    restarts: int = 0
    next_start_at_utc: float | None = None
    """While backing off: when the next run starts."""
    ready_since_utc: float | None = None
    started_at_utc: float | None = None
    last_exit: Exit | None = None
    warning: Reason | None = None
    """Something the user should know although it runs (left_background_processes, a cgroup that could not be used)."""


ReplicaState: TypeAlias = Literal[
    "waiting", "assigned", "starting", "ready", "unready", "backing_off", "stopping", "ended"
]
