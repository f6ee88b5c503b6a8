"""The life of one attempt: when a run starts, is ready, is stopped, is followed by another, and what its end means.

Pure: events in, effects out. Knows no processes, files or clocks; agent.py owns one `Lifecycle` per assignment and
routes events to it, runtime/supervisor.py does what the effects say and tells what came of it.

    Launching ── RunStarted ──> Starting ── listener / alive 1 s ──> Ready <──> Unready
        │                          └──────────┬───────────────────────┘
        │ StartFailed                         │ RunExited, ShimDied            StopRun was sent: Stopping
        └───────────────> BackingOff <────────┴────────> Ended
                              └── until, and TreeGone ──> Launching (next run)

What holds in every order of events (tests/core/replica/test_laws.py):
- a run is started only when no process of the one before is left (TreeGone), so at most one lives at any time;
- a batch is never executed again once a process of it may have been (P4);
- an endpoint is listed only while Ready (P5); whoever stops, loses or doubts a run takes it away in the same step;
- `released` is said only after TreeGone (P7), and after it nothing but Discard;
- an event of another run than the newest changes nothing, and an event that comes twice does nothing the second time.

The shell owes: one answer to each StartRun (RunStarted, StartFailed, StartRefused, or ShimDied with that run's number),
the events of a run in the order in which they happened, and TreeGone after every RunExited and ShimDied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

from gpulayer.core.base import Tick
from gpulayer.core.replica import backoff, reasons
from gpulayer.core.replica.messages import (
    Announce,
    DevicesNotClear,
    Discard,
    FoundAttempt,
    FoundRun,
    ListenerFound,
    ListenerMissing,
    Note,
    Order,
    Owed,
    ReplicaEffect,
    ReplicaEvent,
    Report,
    ReportAccepted,
    ReportRefused,
    ReportReleased,
    RestartRequested,
    RunExited,
    RunStarted,
    ShimDied,
    StartFailed,
    StartRefused,
    StartRun,
    StopRun,
    TreeGone,
    Unkillable,
    Withdrawn,
)
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Accelerator
from gpulayer.model.replica import Endpoint, Exit, Outcome, Reason, ReplicaState, ReplicaStatus
from gpulayer.model.units import NEVER, Instant

# Without a port there is nothing to look at: what is still alive after a second has at least found its files and
# libraries.
READY_WITHOUT_PORT_AFTER = 1.0

# Enough for ten restarts with all that belongs to them; `job explain` shows it.
HISTORY_MAX = 50

# --- phases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What was exec'd, and is not known to have ended."""

    pid: int | None
    port: int | None
    started: Instant
    started_at_utc: float
    tree_gone: bool = False
    """TreeGone came before the exit did. The exit follows; there will be no second TreeGone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """StartRun is out, its answer is not here. What shall be stopped now is stopped when it is known what it is."""

    cancelled: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    process: Process
    reason: Reason
    """What is still missing."""
    ready_at: Instant = NEVER
    """Without a port: ready then."""
    given_up_at: Instant = NEVER
    """With a port and a start timeout: never ready, then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    process: Process
    since_utc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unready:
    process: Process
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """StopRun is out. `cancelled`: the attempt was taken back, nothing follows. Else only this run must end."""

    process: Process
    reason: Reason
    cancelled: bool
    exit: Exit | None = None
    """Only if cancelled: its first process has ended, but not all of its tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackingOff:
    """Another run follows: not before `until`, and not before the tree of the last one is gone."""

    until: Instant
    next_start_at_utc: float | None
    gone: bool
    counts: bool
    """A restart of the policy. What a person asked for, or a reboot made necessary, is none."""
    reason: Reason
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """For good. `gone`: nothing is left of it."""

    outcome: Outcome | None
    """None: it is in the log, and was decided before this daemon started; or it was refused."""
    gone: bool
    refused: ReportRefused | None = None
    """The order could not be carried out here, and the replica waits to be placed again."""


Phase: TypeAlias = Launching | Starting | Ready | Unready | Stopping | BackingOff | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """One attempt. `run` is the number of its newest run, 0 before the first."""

    order: Order
    advertise: str
    """The address that its endpoint carries."""
    phase: Phase
    run: int = 0
    run_serial: int = 0
    """The restart_serial under which the newest run was started."""
    serial_wanted: int = 0
    restarts: int = 0
    failures: int = 0
    over_at: Instant = NEVER
    """When its timeout is over, once something of it was executed. A run is ended by its shim, which must do that
    without a daemon too; here it ends the waiting for the next one."""
    last_exit: Exit | None = None
    start_warning: Reason | None = None
    exit_warning: Reason | None = None
    unkillable: tuple[int, ...] = ()
    not_clear: str = ""
    """What the driver still lists on its devices, after all its processes have ended."""
    history: tuple[tuple[Instant, str], ...] = ()

    @property
    def spec(self) -> JobSpec:
        return self.order.spec

    @property
    def has_port(self) -> bool:
        """Whether ready means listening. A batch is awaited by nobody."""
        return self.spec.kind == "service" and self.spec.port

    def check(self) -> None:
        """What must hold between two steps."""
        assert 0 <= self.restarts <= max(0, self.run - 1), (self.restarts, self.run)
        assert self.run_serial <= self.serial_wanted
        most = self.spec.max_restarts
        assert most is None or self.restarts <= most, (self.restarts, most)
        assert self.spec.kind == "service" or self.restarts == 0
        assert len(self.history) <= HISTORY_MAX
        if isinstance(self.phase, BackingOff):
            assert self.spec.kind == "service", "a batch is never executed again"
        if isinstance(self.phase, Stopping):
            assert self.phase.cancelled or self.phase.exit is None


Step: TypeAlias = tuple[Lifecycle, list[ReplicaEffect]]

# --- beginnings -------------------------------------------------------------------------------------------------


def begin(order: Order, now: Instant, *, advertise: str) -> Step:
    """An order for which there is nothing here yet: its first run."""
    serial = order.assignment.restart_serial
    life = Lifecycle(order=order, advertise=advertise, phase=Launching(), serial_wanted=serial, run_serial=serial)
    if order.outcome_known:
        return release(order, None, now, advertise=advertise)
    if order.assignment.withdrawn is not None:
        return _told(life, _cancelled(life, order.assignment.withdrawn, None, gone=True), now)
    if order.assignment.recalled is not None:
        return _told(life, _declined(life, order.assignment.recalled, ()), now)
    return _told(life, _launch(life, "first start"), now)


def adopt(order: Order, found: FoundAttempt, now: Instant, *, advertise: str) -> Step:
    """An order whose attempt an earlier daemon has begun: carries on with what is there, starts nothing twice (P8)."""
    if order.outcome_known:
        return release(order, found, now, advertise=advertise)
    last = found.last
    if last is None:
        # Not even a marker: nothing was executed, so this is safe for a batch too.
        return begin(order, now, advertise=advertise)
    life = _as_found(order, last, now, advertise)
    if found.first_started_seconds_ago is not None:
        life = _with_time(life, Instant(now - found.first_started_seconds_ago))
    if last.start_failure is not None:
        failed = StartFailed(run=last.run, reason=last.start_failure, at_utc=_exit_found(last).ended_at_utc)
        life = replace(life, phase=Launching(cancelled=order.assignment.withdrawn))
        return _told(life, _start_failed(life, failed, now, ended=_process_found(last, now).started), now)
    if last.alive and found.shim_alive:
        return _told(life, _take_over(life, last, now), now)
    # Its first process is gone, or nobody is left who could tell how it ends.
    process = _process_found(last, now)
    withdrawn = order.assignment.withdrawn
    if withdrawn is not None:
        life = replace(life, phase=Stopping(process=process, reason=withdrawn, cancelled=True))
    life, effects = _exited(life, process, _exit_found(last), now)
    if not last.gone and not found.shim_alive:
        effects.insert(0, _sweep(last.run))
    return _told(life, (life, [_announce(life, "replica.adopted", _found_text(last)), *effects]), now)


def release(order: Order, found: FoundAttempt | None, now: Instant, *, advertise: str) -> Step:
    """An order whose end is in the log: ends what is left of it and reports the release."""
    last = found.last if found is not None else None
    life = Lifecycle(order=order, advertise=advertise, phase=Ended(outcome=None, gone=True))
    if last is None or found is None:
        return _told(life, (life, [ReportReleased(), Discard()]), now)
    life = _as_found(order, last, now, advertise)
    life = replace(life, phase=Ended(outcome=None, gone=last.gone), last_exit=last.exit)
    if last.gone:
        return _told(life, (life, [ReportReleased(), Discard()]), now)
    if not found.shim_alive:
        return _told(life, (life, [_sweep(last.run)]), now)
    stop = [_stop_run(life, "leftover")] if last.alive and not last.stopping else []
    return _told(life, (life, list[ReplicaEffect](stop)), now)


def refuse(order: Order, reason: Reason, now: Instant, *, advertise: str) -> Step:
    """An order that must not be begun here, because it may have been carried out before: failed, with that reason."""
    life = Lifecycle(order=order, advertise=advertise, phase=Ended(outcome=None, gone=True))
    return _told(life, _end(life, "failed", reason, None, gone=True), now)


# --- the machine ------------------------------------------------------------------------------------------------


def step(life: Lifecycle, event: ReplicaEvent, now: Instant) -> Step:
    if not isinstance(event, Withdrawn | RestartRequested | Tick) and _run_of(event) != life.run:
        return life, []  # a late word about an older process
    stepped = _step(life, event, now)
    return _told(life, stepped, now)


def _step(life: Lifecycle, event: ReplicaEvent, now: Instant) -> Step:
    match event:
        case RunStarted():
            return _started(life, event, now)
        case StartFailed():
            return _start_failed(life, event, now, ended=now)
        case StartRefused():
            return _start_refused(life, event)
        case RunExited(exit=exit):
            return _process_ended(life, exit, now)
        case ShimDied():
            return _shim_died(life, event, now)
        case TreeGone():
            return _tree_gone(life, now)
        case ListenerFound(at_utc=at_utc):
            return _listener_found(life, at_utc)
        case ListenerMissing(reason=reason):
            return _listener_missing(life, reason)
        case Unkillable(pids=pids):
            return _unkillable(life, pids)
        case DevicesNotClear(text=text):
            return _not_clear(life, text)
        case Withdrawn(reason=reason):
            return _withdrawn(life, reason)
        case RestartRequested(serial=serial):
            return _restart_requested(life, serial, now)
        case Tick():
            return _proceed(life, now)
        case _:
            assert_never(event)


def deadline(life: Lifecycle) -> Instant:
    """When a Tick is due."""
    match life.phase:
        case Starting(ready_at=ready_at, given_up_at=given_up_at):
            return min(ready_at, given_up_at)
        case BackingOff(until=until, gone=gone):
            return min(until if gone else NEVER, life.over_at)
        case Launching() | Ready() | Unready() | Stopping() | Ended():
            return NEVER
        case _:
            assert_never(life.phase)


def _proceed(life: Lifecycle, now: Instant) -> Step:
    """What time alone brings."""
    match life.phase:
        case Starting(process=process, ready_at=ready_at) if ready_at <= now:
            return _ready(life, process, process.started_at_utc + READY_WITHOUT_PORT_AFTER)
        case Starting(process=process, reason=seen, given_up_at=given_up_at) if given_up_at <= now:
            return _stop(life, process, reasons.never_ready(life.spec, seen), cancelled=False)
        case BackingOff(gone=gone) if life.over_at <= now:
            return _end(life, "failed", reasons.timed_out(life.spec), life.last_exit, gone=gone)
        case BackingOff(until=until, gone=True, cause=cause, counts=counts) if until <= now:
            return _launch(life, cause, counts=counts)
        case Launching() | Starting() | Ready() | Unready() | Stopping() | BackingOff() | Ended():
            return life, []
        case _:
            assert_never(life.phase)


# --- starting ---------------------------------------------------------------------------------------------------


def _launch(life: Lifecycle, cause: str, *, counts: bool = False) -> Step:
    life = replace(
        life,
        phase=Launching(),
        run=life.run + 1,
        run_serial=life.serial_wanted,
        restarts=life.restarts + (1 if counts else 0),
        start_warning=None,
        unkillable=(),
        not_clear="",
    )
    start = StartRun(
        run=life.run,
        cause=cause,
        restarts=life.restarts,
        failures=life.failures,
        restart_serial=life.run_serial,
    )
    return life, [start, _announce(life, "replica.starting", f"run {life.run} is started: {cause}", cause=cause)]


def _started(life: Lifecycle, event: RunStarted, now: Instant) -> Step:
    match life.phase:
        case Launching(cancelled=cancelled):
            process = Process(pid=event.pid, port=event.port, started=now, started_at_utc=event.at_utc)
            life = replace(_with_time(life, now), phase=_starting(life, process, now), start_warning=event.warning)
            if cancelled is not None:
                return _stop(life, process, cancelled, cancelled=True)
            if life.serial_wanted > life.run_serial:
                return _stop(life, process, _RESTART_REQUESTED, cancelled=False)
            return life, []
        case Starting() | Ready() | Unready() | Stopping() | BackingOff() | Ended():
            return life, []  # said before
        case _:
            assert_never(life.phase)


def _with_time(life: Lifecycle, first_started: Instant) -> Lifecycle:
    limit = life.spec.timeout_seconds
    if limit is None or life.over_at != NEVER:
        return life
    return replace(life, over_at=Instant(first_started + limit))


def _starting(life: Lifecycle, process: Process, counted_from: Instant) -> Starting:
    if not life.has_port:
        return Starting(
            process=process,
            reason=Reason(code="starting", text="it was started less than a second ago"),
            ready_at=Instant(process.started + READY_WITHOUT_PORT_AFTER),
        )
    limit = life.spec.start_timeout_seconds
    return Starting(
        process=process,
        reason=Reason(
            code="not_listening",
            text=f"it does not listen on port {process.port} yet",
            hint="it must listen on $HOST:$PORT; a model that loads needs its time",
        ),
        given_up_at=Instant(counted_from + limit) if limit is not None else NEVER,
    )


def _ready(life: Lifecycle, process: Process, since_utc: float) -> Step:
    life = replace(life, phase=Ready(process=process, since_utc=since_utc))
    endpoint = _endpoint(life)
    where = f" at {endpoint}" if endpoint is not None else ""
    data = {"endpoint": str(endpoint)} if endpoint is not None else {}
    return life, [_announce(life, "replica.ready", f"run {life.run} is ready{where}", **data)]


def _listener_found(life: Lifecycle, at_utc: float) -> Step:
    match life.phase:
        case Starting(process=process) | Unready(process=process) if life.has_port:
            return _ready(life, process, at_utc)
        case Launching() | Starting() | Ready() | Unready() | Stopping() | BackingOff() | Ended():
            return life, []
        case _:
            assert_never(life.phase)


def _listener_missing(life: Lifecycle, reason: Reason) -> Step:
    if not life.has_port:
        return life, []
    match life.phase:
        case Starting(reason=before) as phase:
            life = replace(life, phase=replace(phase, reason=reason))
            # Still loading is no news. That it listens somewhere else, or that its port is held, is what the user must
            # hear now instead of waiting for a port that will never open.
            if reason.code == before.code or reason.code == "not_listening":
                return life, []
            return life, [_announce(life, "replica.port_trouble", reason.text or reason.code, reason=reason.code)]
        case Ready(process=process):
            life = replace(life, phase=Unready(process=process, reason=reason))
            text = f"run {life.run} is not ready any more: {reason.text or reason.code}"
            return life, [_announce(life, "replica.unready", text, reason=reason.code)]
        case Unready(process=process):
            return replace(life, phase=Unready(process=process, reason=reason)), []
        case Launching() | Stopping() | BackingOff() | Ended():
            return life, []
        case _:
            assert_never(life.phase)


# --- stopping ---------------------------------------------------------------------------------------------------

_RESTART_REQUESTED = Reason(code="restart_requested", text="a restart was requested")


def _stop(life: Lifecycle, process: Process, reason: Reason, *, cancelled: bool) -> Step:
    life = replace(life, phase=Stopping(process=process, reason=reason, cancelled=cancelled))
    text = f"run {life.run} is stopped: {reason.text or reason.code}"
    return life, [
        _stop_run(life, reason.code),
        Note(text=f"stopping: {reason.text or reason.code}"),
        _announce(life, "replica.stopping", text, reason=reason.code),
    ]


def _stop_run(life: Lifecycle, why: str) -> StopRun:
    return StopRun(run=life.run, signal=life.spec.stop_signal, grace_seconds=life.spec.stop_grace_seconds, why=why)


def _sweep(run: int) -> StopRun:
    """Where the shim is dead nobody can watch a process end well, nor say how it did."""
    return StopRun(run=run, signal="KILL", grace_seconds=0.0, why="supervisor_killed")


def _withdrawn(life: Lifecycle, reason: Reason) -> Step:
    match life.phase:
        case Launching(cancelled=None):
            return replace(life, phase=Launching(cancelled=reason)), []
        case Starting(process=process) | Ready(process=process) | Unready(process=process):
            return _stop(life, process, reason, cancelled=True)
        case Stopping(process=process, cancelled=False):
            # The signal is sent, its grace runs; only what follows is another thing now.
            return replace(life, phase=Stopping(process=process, reason=reason, cancelled=True)), []
        case BackingOff(gone=True):
            return _cancelled(life, reason, life.last_exit, gone=True)
        case BackingOff(gone=False):
            nothing = Process(pid=None, port=None, started=Instant(0.0), started_at_utc=0.0)
            exit = life.last_exit if life.last_exit is not None else Exit(run=life.run)
            return replace(life, phase=Stopping(process=nothing, reason=reason, cancelled=True, exit=exit)), []
        case Launching() | Stopping() | BackingOff() | Ended():
            return life, []  # said before, or over
        case _:
            assert_never(life.phase)


def _restart_requested(life: Lifecycle, serial: int, now: Instant) -> Step:
    if serial <= life.serial_wanted or life.spec.kind == "batch":
        return life, []
    life = replace(life, serial_wanted=serial)
    match life.phase:
        case Starting(process=process) | Ready(process=process) | Unready(process=process):
            return _stop(life, process, _RESTART_REQUESTED, cancelled=False)
        case BackingOff() as phase:
            # A person has looked at it: no wait, not counted, and should it fail again it waits a second, not thirty.
            waiting = replace(
                phase,
                until=now,
                next_start_at_utc=None,
                counts=False,
                reason=_RESTART_REQUESTED,
                cause="a restart was requested",
            )
            return _proceed(replace(life, phase=waiting, failures=0), now)
        case Launching() | Stopping() | Ended():
            return life, []  # the wanted serial decides when this run's start is answered, or when it has ended
        case _:
            assert_never(life.phase)


def _unkillable(life: Lifecycle, pids: tuple[int, ...]) -> Step:
    if pids == life.unkillable or not pids or _is_gone(life.phase):
        return life, []
    life = replace(life, unkillable=pids)
    return life, [_announce(life, "replica.unkillable", reasons.unkillable(pids).text)]


def _not_clear(life: Lifecycle, text: str) -> Step:
    if text == life.not_clear or _is_gone(life.phase):
        return life, []
    # All of its processes have ended, so none of them is unkillable any more.
    life = replace(life, not_clear=text, unkillable=())
    return life, [_announce(life, "replica.devices_not_clear", reasons.devices_not_clear(text).text)]


# --- endings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunEnd:
    """How a run ended, or failed to begin, as far as the policy is concerned."""

    reason: Reason
    told: str
    failed: bool
    is_our_doing: bool
    """The host went down, not the program: another run follows as the policy says, but is not counted."""
    waits: bool
    exit: Exit | None
    ended: Instant
    ended_at_utc: float | None
    uptime_seconds: float
    gone: bool


def _start_failed(life: Lifecycle, event: StartFailed, now: Instant, *, ended: Instant) -> Step:
    match life.phase:
        case Launching(cancelled=None):
            life = replace(life, exit_warning=None)
            text = event.reason.text or event.reason.code
            end = _RunEnd(
                reason=event.reason,
                told=f"run {life.run} could not be started: {text}",
                failed=True,
                is_our_doing=False,
                waits=True,
                exit=None,
                ended=ended,
                ended_at_utc=event.at_utc,
                uptime_seconds=0.0,
                gone=True,
            )
            announce = _announce(life, "replica.start_failed", end.told, reason=event.reason.code)
            if event.reason.code == "timeout":  # the shim's clock was a little faster than ours
                return _after([announce], _end(life, "failed", reasons.timed_out(life.spec), life.last_exit, gone=True))
            if life.serial_wanted > life.run_serial:
                return _after([announce], _renew(life, now, gone=True))
            return _after([announce], _follow(life, end, now))
        case Launching(cancelled=reason) if reason is not None:
            return _cancelled(life, reason, None, gone=True)
        case Launching() | Starting() | Ready() | Unready() | Stopping() | BackingOff() | Ended():
            return life, []
        case _:
            assert_never(life.phase)


def _start_refused(life: Lifecycle, event: StartRefused) -> Step:
    """Not a failure of the job, so no policy is asked: it waits for its turn again, here or elsewhere."""
    match life.phase:
        case Launching(cancelled=None):
            return _declined(life, event.reason, event.observed)
        case Launching(cancelled=reason) if reason is not None:
            return _cancelled(life, reason, None, gone=True)
        case Launching() | Starting() | Ready() | Unready() | Stopping() | BackingOff() | Ended():
            return life, []
        case _:
            assert_never(life.phase)


def _declined(life: Lifecycle, reason: Reason, observed: tuple[Accelerator, ...]) -> Step:
    refused = ReportRefused(reason=reason, observed=observed)
    text = f"run {max(1, life.run)} is not started here: {reason.text or reason.code}"
    life = replace(life, phase=Ended(outcome=None, gone=True, refused=refused))
    announce = _announce(life, "replica.refused", text, reason=reason.code)
    return life, [Note(text=f"{text}; it waits to be placed again"), announce, refused, Discard()]


def _process_ended(life: Lifecycle, exit: Exit, now: Instant) -> Step:
    match life.phase:
        case Launching(cancelled=cancelled):
            # It ended before its start was told.
            process = Process(
                pid=None,
                port=None,
                started=Instant(now - exit.uptime_seconds),
                started_at_utc=exit.ended_at_utc - exit.uptime_seconds,
            )
            if cancelled is not None:
                life = replace(life, phase=Stopping(process=process, reason=cancelled, cancelled=True))
            return _exited(life, process, exit, now)
        case Starting(process=process) | Ready(process=process) | Unready(process=process):
            return _exited(life, process, exit, now)
        case Stopping(process=process, exit=None):
            return _exited(life, process, exit, now)
        case Stopping() | BackingOff() | Ended():
            return life, []  # said before
        case _:
            assert_never(life.phase)


def _shim_died(life: Lifecycle, event: ShimDied, now: Instant) -> Step:
    match life.phase:
        case Starting(process=process) | Ready(process=process) | Unready(process=process) | Stopping(process=process):
            uptime = max(0.0, now - process.started)
        case Launching():
            uptime = 0.0  # whether it was executed is unknown, so it counts as executed
        case BackingOff() | Ended():
            return life, []  # the run's end is known; its tree is being ended by the shell
        case _:
            assert_never(life.phase)
    exit = Exit(run=life.run, ended_by="supervisor_killed", ended_at_utc=event.at_utc, uptime_seconds=uptime)
    return _process_ended(life, exit, now)


def _exited(life: Lifecycle, process: Process, exit: Exit, now: Instant) -> Step:
    """The run's first process is gone: what follows? In this order: the attempt was taken back; its time is over; a
    person wants a new run; the policy."""
    phase = life.phase
    life = replace(life, last_exit=exit, exit_warning=reasons.left_in_background(exit, life.spec))
    stopped_for = phase.reason if isinstance(phase, Stopping) and not phase.cancelled else None
    end = _run_end(life, process, exit, stopped_for, now)
    kind = "replica.supervisor_killed" if end.reason.code == "supervisor_killed" else "replica.exited"
    announce = _announce(life, kind, f"run {life.run}: {end.told}", **_exit_data(exit))
    if isinstance(phase, Stopping) and phase.cancelled:
        if life.spec.kind == "batch" and exit.ended_by in ("itself", "timeout"):
            # It was faster than the stop: an attempt that ended keeps its outcome.
            return _after([announce], _follow(life, end, now))
        if process.tree_gone:
            return _after([announce], _cancelled(life, phase.reason, exit, gone=True))
        return replace(life, phase=replace(phase, exit=exit)), [announce]
    if exit.ended_by == "timeout":
        return _after([announce], _end(life, "failed", end.reason, exit, gone=end.gone))
    is_requested = life.serial_wanted > life.run_serial or exit.ended_by == "stop:restart_requested"
    if life.spec.kind == "service" and is_requested:
        return _after([announce], _renew(life, now, gone=end.gone))
    return _after([announce], _follow(life, end, now))


def _run_end(life: Lifecycle, process: Process, exit: Exit, stopped_for: Reason | None, now: Instant) -> _RunEnd:
    reason = reasons.reason_for_exit(exit, life.spec, life.order.job_name)
    if stopped_for is not None and stopped_for.code in ("never_ready", "interrupted") and exit.ended_by != "timeout":
        reason = stopped_for
    uptime = exit.uptime_seconds
    return _RunEnd(
        reason=reason,
        told=reasons.told(exit, reason),
        # 0 is success only if it was its own end: many programs exit with 0 when they are told to stop.
        failed=not exit.succeeded or exit.ended_by != "itself" or reason.code != "exit_zero",
        is_our_doing=exit.ended_by in ("interrupted", "shim_terminated"),
        # After a reboot there is nothing to wait for. Who ends shims in a loop must not be answered by a loop.
        waits=exit.ended_by != "interrupted",
        exit=exit,
        # The exit itself, not the moment at which it is heard of: a daemon that was away adds no wait of its own.
        ended=min(now, Instant(process.started + uptime)),
        ended_at_utc=exit.ended_at_utc or process.started_at_utc + uptime,
        uptime_seconds=uptime,
        gone=process.tree_gone,
    )


def _follow(life: Lifecycle, end: _RunEnd, now: Instant) -> Step:
    """The policy's answer to the end of a run."""
    spec = life.spec
    if spec.kind == "batch" or spec.restart == "never" or (spec.restart == "on_failure" and not end.failed):
        return _end(life, "failed" if end.failed else "succeeded", end.reason, end.exit, gone=end.gone)
    if not end.is_our_doing and spec.max_restarts is not None and life.restarts >= spec.max_restarts:
        count = "1 restart" if life.restarts == 1 else f"{life.restarts} restarts"
        reason = replace(end.reason, text=f"{end.reason.text or end.reason.code}, after {count}")
        return _end(life, "failed" if end.failed else "succeeded", reason, end.exit, gone=end.gone)
    return _back_off(life, end, now)


def _back_off(life: Lifecycle, end: _RunEnd, now: Instant) -> Step:
    failures = backoff.failures_after(life.failures, end.uptime_seconds)
    delay = backoff.delay(failures) if end.waits else 0.0
    until = Instant(end.ended + delay)
    if end.is_our_doing:
        cause = end.reason.text
        then = "starts again" + (f" in {reasons.seconds(delay)}" if delay else "")
    else:
        number = reasons.restart_number(life.restarts + 1, life.spec.max_restarts)
        cause = f"{end.reason.text or end.reason.code}; {number}"
        then = f"restarts in {reasons.seconds(delay)}{reasons.restarts_used(life.restarts, life.spec.max_restarts)}"
    note = f"{end.told}; {then}"
    waiting = BackingOff(
        until=until,
        next_start_at_utc=end.ended_at_utc + delay if end.ended_at_utc is not None else None,
        gone=end.gone,
        counts=not end.is_our_doing,
        reason=replace(end.reason, text=note),
        cause=cause,
    )
    life = replace(life, phase=waiting, failures=failures if end.waits else life.failures)
    data = {"reason": end.reason.code, "delay_seconds": f"{delay:g}", "failures": str(life.failures)}
    said: list[ReplicaEffect] = [Note(text=then), _announce(life, "replica.backing_off", note, **data)]
    return _after(said, _proceed(life, now))


def _renew(life: Lifecycle, now: Instant, *, gone: bool) -> Step:
    """A new run because a person wants it: at once, and not counted."""
    waiting = BackingOff(
        until=now,
        next_start_at_utc=None,
        gone=gone,
        counts=False,
        reason=_RESTART_REQUESTED,
        cause="a restart was requested",
    )
    note = Note(text="restarts: a restart was requested")
    return _after([note], _proceed(replace(life, phase=waiting, failures=0), now))


def _tree_gone(life: Lifecycle, now: Instant) -> Step:
    phase = life.phase
    match phase:
        case Starting(process=process) | Ready(process=process) | Unready(process=process):
            process = replace(process, tree_gone=True)
            return replace(life, phase=replace(phase, process=process), unkillable=(), not_clear=""), []
        case Stopping(process=process, exit=None):
            process = replace(process, tree_gone=True)
            return replace(life, phase=replace(phase, process=process), unkillable=(), not_clear=""), []
        case Stopping(reason=reason, exit=exit):
            return _cancelled(life, reason, exit, gone=True)
        case BackingOff(gone=False):
            return _proceed(replace(life, phase=replace(phase, gone=True), unkillable=(), not_clear=""), now)
        case Ended(gone=False):
            return replace(life, phase=replace(phase, gone=True), unkillable=(), not_clear=""), [
                ReportReleased(),
                Discard(),
            ]
        case Launching() | BackingOff() | Ended():
            return life, []
        case _:
            assert_never(phase)


def _cancelled(life: Lifecycle, reason: Reason, exit: Exit | None, *, gone: bool) -> Step:
    return _end(life, "lost" if reason.code == "node_lost" else "cancelled", reason, exit, gone=gone)


def _end(
    life: Lifecycle,
    result: Literal["succeeded", "failed", "cancelled", "lost"],
    reason: Reason,
    exit: Exit | None,
    *,
    gone: bool,
) -> Step:
    warning = life.exit_warning
    if warning is not None and exit is not None and result != "cancelled":
        # A success has no other reason worth telling; a failure keeps its own, and the warning may explain it.
        code = warning.code if result == "succeeded" else reason.code
        text = f"{reason.text or reason.code}; {warning.text}"
        reason = Reason(
            code=code, text=text, hint=warning.hint if result == "succeeded" else reason.hint or warning.hint
        )
    outcome = Outcome(result=result, reason=reason, exit=exit, restarts=life.restarts)
    life = replace(life, phase=Ended(outcome=outcome, gone=gone))
    if gone:
        life = replace(life, unkillable=(), not_clear="")
    text = f"ended, {result}: {reason.text or reason.code}"
    effects: list[ReplicaEffect] = [
        _announce(life, "replica.ended", text, result=result, reason=reason.code),
        Report(outcome=outcome, released=gone),
    ]
    if result != "succeeded":
        effects.insert(0, Note(text=text))
    return life, [*effects, Discard()] if gone else effects


def owed(life: Lifecycle, *, outcome_known: bool, is_recalled: bool = False) -> Owed | None:
    """What the log must still hear of an attempt; agent.py says it again until the log shows it. `is_recalled`: the log
    thinks that it has not begun."""
    if not isinstance(life.phase, Ended):
        return ReportAccepted() if is_recalled and not outcome_known else None
    if not outcome_known and life.phase.refused is not None:
        return life.phase.refused
    if not outcome_known and life.phase.outcome is not None:
        return Report(outcome=life.phase.outcome, released=life.phase.gone)
    return ReportReleased() if life.phase.gone else None


def is_over(life: Lifecycle) -> bool:
    """Ended for good, and nothing is left of it."""
    return isinstance(life.phase, Ended) and life.phase.gone


# --- what a starting daemon finds -------------------------------------------------------------------------------


def _as_found(order: Order, last: FoundRun, now: Instant, advertise: str) -> Lifecycle:
    spec = order.spec
    wanted = order.assignment.restart_serial if spec.kind == "service" else 0
    # A marker is a file that anything may have happened to: its numbers are bounded, not believed.
    restarts_most = max(0, last.run - 1) if spec.kind == "service" else 0
    if spec.max_restarts is not None:
        restarts_most = min(restarts_most, spec.max_restarts)
    life = Lifecycle(
        order=order,
        advertise=advertise,
        phase=Ended(outcome=None, gone=False),  # replaced by whoever calls
        run=last.run,
        run_serial=last.restart_serial,
        serial_wanted=max(wanted, last.restart_serial),
        restarts=min(max(0, last.restarts), restarts_most),
        failures=max(0, last.failures),
    )
    # Counted from now: whether it was ready before cannot be known, and a replica that serves must not be ended for a
    # start that lies hours back.
    return replace(life, phase=_starting(life, _process_found(last, now), now))


def _process_found(last: FoundRun, now: Instant) -> Process:
    return Process(
        pid=last.pid,
        port=last.port,
        started=Instant(now - max(0.0, last.started_seconds_ago)),
        started_at_utc=last.started_at_utc,
        tree_gone=last.gone,
    )


def _exit_found(last: FoundRun) -> Exit:
    """The note, or what is said without one. When it ended nobody saw: now, so that no backoff is cut short."""
    if (
        last.exit is not None
        and not last.alive
        and (last.exit.ended_by != "supervisor_killed" or last.exit.ended_at_utc)
    ):
        return replace(last.exit, run=last.run)
    return Exit(
        run=last.run,
        ended_by="supervisor_killed",
        ended_at_utc=last.started_at_utc + last.started_seconds_ago,
        uptime_seconds=max(0.0, last.started_seconds_ago),
    )


def _take_over(life: Lifecycle, last: FoundRun, now: Instant) -> Step:
    """Its process runs and its shim answers."""
    announce = _announce(life, "replica.adopted", _found_text(last))
    process = _process_found(last, now)
    withdrawn = life.order.assignment.withdrawn
    if last.stopping:
        if withdrawn is not None:
            phase = Stopping(process=process, reason=withdrawn, cancelled=True)
        else:
            phase = Stopping(process=process, reason=_reason_to_stop(life, last.stopping), cancelled=False)
        return replace(life, phase=phase), [announce]
    if withdrawn is not None:
        return _after([announce], _stop(life, process, withdrawn, cancelled=True))
    if life.serial_wanted > life.run_serial:
        return _after([announce], _stop(life, process, _RESTART_REQUESTED, cancelled=False))
    if isinstance(life.phase, Starting) and life.has_port:
        reason = Reason(
            code="not_listening", text=f"taken over from an earlier daemon; port {last.port} is being checked"
        )
        life = replace(life, phase=replace(life.phase, reason=reason))
    return _after([announce], _proceed(life, now))


def _reason_to_stop(life: Lifecycle, why: str) -> Reason:
    match why:
        case "never_ready":
            return reasons.never_ready(life.spec, None)
        case "restart_requested":
            return _RESTART_REQUESTED
        case _:
            return Reason(code="interrupted", text=f"an earlier daemon was stopping it ({why})")


def _found_text(last: FoundRun) -> str:
    if last.alive:
        return (
            f"run {last.run} (pid {last.pid}), up for {reasons.seconds(last.started_seconds_ago)}, is supervised again"
        )
    return f"run {last.run} ended while the daemon was away"


# --- what is told -----------------------------------------------------------------------------------------------


def status(life: Lifecycle) -> ReplicaStatus:
    """What people see; there is a reason for everything but ready (P9)."""
    state, reason, process = _state(life)
    phase = life.phase
    return ReplicaStatus(
        attempt=life.order.assignment.id,
        state=state,
        reason=reason,
        run=life.run,
        pid=process.pid if process is not None else None,
        port=process.port if process is not None else None,
        endpoint=_endpoint(life),
        restarts=life.restarts,
        next_start_at_utc=phase.next_start_at_utc if isinstance(phase, BackingOff) else None,
        ready_since_utc=phase.since_utc if isinstance(phase, Ready) else None,
        started_at_utc=process.started_at_utc if process is not None else None,
        last_exit=life.last_exit,
        warning=life.exit_warning or life.start_warning,
    )


def _state(life: Lifecycle) -> tuple[ReplicaState, Reason | None, Process | None]:
    stuck = reasons.unkillable(life.unkillable) if life.unkillable else None
    if stuck is None and life.not_clear:
        stuck = reasons.devices_not_clear(life.not_clear)
    match life.phase:
        case Launching(cancelled=None):
            return "starting", Reason(code="starting", text=f"run {life.run} is being started"), None
        case Launching(cancelled=reason):
            return "stopping", reason, None
        case Starting(process=process, reason=reason):
            return "starting", reason, process
        case Ready(process=process):
            return "ready", None, process
        case Unready(process=process, reason=reason):
            return "unready", reason, process
        case Stopping(process=process, reason=reason, exit=exit):
            return "stopping", stuck or reason, process if exit is None else None
        case BackingOff(gone=gone, counts=counts, reason=reason):
            # Until its tree is gone nothing is waited for but that.
            is_stopping = not gone and (stuck is not None or not counts)
            return "stopping" if is_stopping else "backing_off", stuck or reason, None
        case Ended(refused=ReportRefused(reason=refusal)):
            return "waiting", refusal, None
        case Ended(outcome=outcome, gone=gone):
            if not gone and stuck is not None:
                return "stopping", stuck, None
            known = Reason(code="replica_ended", text="its end is known; what it left is released")
            return "ended", outcome.reason if outcome is not None else known, None
        case _:
            assert_never(life.phase)


def _endpoint(life: Lifecycle) -> Endpoint | None:
    match life.phase:
        case Ready(process=Process(port=int(port))) if life.has_port:
            return Endpoint(address=life.advertise, port=port)
        case _:
            return None


def _told(before: Lifecycle, stepped: Step, now: Instant) -> Step:
    """Keeps what was announced as the attempt's own story, and looks whether the result can be true."""
    life, effects = stepped
    said = tuple((now, effect.text) for effect in effects if isinstance(effect, Announce))
    life = replace(life, history=(before.history + said)[-HISTORY_MAX:])
    life.check()
    if isinstance(before.phase, Ended) and before.run == life.run:
        assert not any(isinstance(effect, StartRun) for effect in effects)
    return life, effects


def _announce(life: Lifecycle, kind: str, text: str, **data: str) -> Announce:
    return Announce(kind=kind, text=text, data=(("run", str(life.run)), *data.items()))


def _after(before: list[ReplicaEffect], then: Step) -> Step:
    return then[0], [*before, *then[1]]


def _exit_data(exit: Exit) -> dict[str, str]:
    how = {"code": exit.code, "signal": exit.signal}
    data = {name: str(number) for name, number in how.items() if number is not None}
    return {**data, "ended_by": exit.ended_by, "uptime_seconds": f"{exit.uptime_seconds:.3f}"}


def _is_gone(phase: Phase) -> bool:
    """Nothing of the newest run can be left."""
    return isinstance(phase, BackingOff | Ended) and phase.gone


def _run_of(
    event: RunStarted
    | StartFailed
    | StartRefused
    | RunExited
    | TreeGone
    | ListenerFound
    | ListenerMissing
    | ShimDied
    | Unkillable
    | DevicesNotClear,
) -> int:
    return event.exit.run if isinstance(event, RunExited) else event.run
