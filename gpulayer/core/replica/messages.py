"""What the life cycle of a replica hears (events) and wants done (effects), for one attempt.

The agent routes events to the attempt they are about and hands effects on with the attempt's id;
runtime/supervisor.py does them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpulayer.core.base import Tick
from gpulayer.model.ids import AttemptId
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Accelerator
from gpulayer.model.replica import Assignment, Exit, Outcome, Reason

# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The shim has exec'd the run's process."""

    run: int
    pid: int
    port: int | None
    at_utc: float
    warning: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """Nothing was exec'd: bad command, missing directory, full disk, no port, the shim could not be made."""

    run: int
    reason: Reason
    at_utc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRefused:
    """Nothing was exec'd, because the assignment cannot be had here: a device of it is not well, or others hold it.
    The replica goes back to the queue; `observed` is what this node sees of those devices."""

    run: int
    reason: Reason
    observed: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExited:
    """The run's first process is reaped and its exit noted on disk; some of its tree may be left."""

    exit: Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeGone:
    """No process of the run is left, and its devices are clear where the driver can tell."""

    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerFound:
    """The run's own process accepts connections on the advertise address and its port."""

    run: int
    at_utc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerMissing:
    """It does not (any more). `reason` says what was found instead: listens_elsewhere, port_taken, not_listening."""

    run: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimDied:
    """The supervisor of the run is gone. The shell is ending what it left; TreeGone follows (run = the last known)."""

    run: int
    at_utc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkillable:
    """SIGKILL was sent and these are still there (uninterruptible sleep)."""

    run: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesNotClear:
    """All processes of the run have ended, and the driver still lists some on its devices. TreeGone follows when it
    does not any more, or has not confirmed it in time."""

    run: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The order was taken back: end it, release everything."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested:
    """A person wants a new run: `serial` is the assignment's restart_serial."""

    serial: int


ReplicaEvent: TypeAlias = (
    RunStarted
    | StartFailed
    | StartRefused
    | RunExited
    | TreeGone
    | ListenerFound
    | ListenerMissing
    | ShimDied
    | Unkillable
    | DevicesNotClear
    | Withdrawn
    | RestartRequested
    | Tick
)

# --- effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """Make a shim if there is none, choose a port if the job wants one, exec. `restarts`, `failures` and `serial` are
    stored in the run's marker, so that a daemon that comes back knows them (FoundRun)."""

    run: int
    cause: str
    restarts: int
    failures: int
    restart_serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """Stop signal, grace, kill, until nothing is left. RunExited and TreeGone follow."""

    run: int
    signal: str
    grace_seconds: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A supervisor's line in the replica's log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Ended for good. To be committed. With `released` false a ReportReleased follows."""

    outcome: Outcome
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReleased:
    """Every process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRefused:
    """The order cannot be carried out here; nothing of it is left. To be committed: the replica waits again."""

    reason: Reason
    observed: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAccepted:
    """The order was recalled, and is being carried out here already. To be committed: it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Nothing will run here any more: let the shim go. Logs and sandbox stay for their keeping time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A line for the event feed, `kind` as noun.verb."""

    kind: str
    text: str
    data: tuple[tuple[str, str], ...] = ()


Owed: TypeAlias = Report | ReportReleased | ReportRefused | ReportAccepted
"""What is said again until the log shows it."""
ReplicaEffect: TypeAlias = StartRun | StopRun | Note | Owed | Discard | Announce

# --- what a starting daemon finds -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """The newest run of an attempt, as its marker, its exit note and its shim tell. `alive`: its first process runs."""

    run: int
    pid: int | None
    port: int | None
    started_at_utc: float
    started_seconds_ago: float
    restarts: int
    failures: int
    restart_serial: int
    alive: bool
    exit: Exit | None = None
    """The note on disk; for a run that has neither note nor process, one with ended_by `interrupted` (the host
    rebooted) or `supervisor_killed`."""
    start_failure: Reason | None = None
    """It was not executed, and why."""
    gone: bool = False
    """No process of its tree is left."""
    stopping: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAttempt:
    """A sandbox with the attempt it was made for."""

    attempt: AttemptId
    shim_alive: bool
    first_started_seconds_ago: float | None
    last: FoundRun | None


# --- agent ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One assignment to this node with the specification of its revision."""

    assignment: Assignment
    spec: JobSpec
    job_name: str
    outcome_known: bool = False
    """The log has its outcome already; what is owed is only the release, and nothing of it is ever started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersChanged:
    """The full list of what this node shall run, as the log has it now. `is_current` False: as it was when the leader
    was last heard; nothing new is begun from it and nothing stopped."""

    orders: tuple[Order, ...]
    is_current: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsFound:
    """Once, at the start of the daemon, after the first OrdersChanged: what its sandboxes hold."""

    found: tuple[FoundAttempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent:
    attempt: AttemptId
    event: ReplicaEvent


AgentEvent: TypeAlias = OrdersChanged | AttemptsFound | AttemptEvent | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEffect:
    """`order` carries what the shell needs to know of the job."""

    attempt: AttemptId
    order: Order | None
    """None for an attempt that is in no order any more (a leftover that is being ended)."""
    effect: ReplicaEffect


AgentEffect: TypeAlias = AttemptEffect
