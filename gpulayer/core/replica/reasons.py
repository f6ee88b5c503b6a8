"""Why a run ended, in words: the code, the sentence and the remedy that people see. Decides nothing itself."""

from __future__ import annotations

from gpulayer.core.replica import traps
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import Exit, Reason
from gpulayer.model.units import format_duration

_NAMES_SHOWN = 5


def reason_for_exit(exit: Exit, spec: JobSpec, job_name: str) -> Reason:
    """The reason that an exit gives by itself, without what the daemon knows (a stop that it asked for)."""
    see_log = f"`gpulayer job logs {job_name}{'' if spec.kind == 'batch' else ' --previous'}` shows what it wrote"
    after = f"after {seconds(exit.uptime_seconds)}"
    match exit.ended_by:
        case "timeout":
            limit = format_duration(spec.timeout_seconds) if spec.timeout_seconds is not None else "its limit"
            return Reason(code="timeout", text=f"ended by its timeout of {limit}", hint=f"raise --timeout; {see_log}")
        case "supervisor_killed":
            return _unknown(after)
        case "interrupted":
            return Reason(
                code="interrupted",
                text="its host went down while it ran; how it ended is unknown",
                hint="submit it again if its work is still wanted" if spec.kind == "batch" else "",
            )
        case "shim_terminated":
            return Reason(
                code="interrupted",
                text=f"its supervisor was told to end {after}, as a host does that shuts down",
                hint="to stop a job use `gpulayer job cancel JOB`",
            )
        case "spawn_failed":
            return Reason(code="spawn_failed", text="its command could not be executed", hint=see_log)
        case "stop:never_ready":
            return never_ready(spec, None)
        case "stop:restart_requested":
            return Reason(code="restart_requested", text="a restart was requested")
        case stopped if stopped.startswith("stop:"):
            # Asked for by a daemon that did not live to see it, and not by the order that is known now.
            return Reason(code="interrupted", text=f"it was stopped {after} ({stopped.removeprefix('stop:')})")
        case _:
            pass
    if exit.signal is not None:
        return Reason(code="signal", text=f"signal {exit.signal_text} {after}", hint=see_log)
    if exit.code is None:
        return _unknown(after)
    trap = traps.after_exit(spec, exit)
    if exit.code == 0:
        return Reason(code="exit_zero", text=f"exit code 0 {after}", hint=str(trap or ""))
    return Reason(
        code="exit_nonzero", text=f"exit code {exit.code} {after}", hint=f"{trap}; {see_log}" if trap else see_log
    )


def told(exit: Exit, reason: Reason) -> str:
    """The same as the beginning of a line in the replica's log: `exited with code 1 after 0.3 s`."""
    match reason.code:
        case "exit_zero" | "exit_nonzero":
            told = f"exited with code {exit.code} after {seconds(exit.uptime_seconds)}"
            return f"{told} and left {_left(exit)}" if exit.code == 0 and _has_left(exit) else told
        case "signal" if exit.signal is not None:
            return f"ended by signal {exit.signal_text} after {seconds(exit.uptime_seconds)}"
        case _:
            return reason.text


def timed_out(spec: JobSpec) -> Reason:
    """Its time is over, and no run of it is there that could be ended."""
    limit = f" of {format_duration(spec.timeout_seconds)}" if spec.timeout_seconds is not None else ""
    return Reason(
        code="timeout",
        text=f"its timeout{limit} is over, and it waited for its next start",
        hint="raise --timeout; `gpulayer job logs JOB` shows what the last run wrote",
    )


def never_ready(spec: JobSpec, last_seen: Reason | None) -> Reason:
    """`last_seen`: what the last check of its port found, which is mostly the cause."""
    limit = spec.start_timeout_seconds
    text = "not ready within its start timeout" + (f" of {format_duration(limit)}" if limit is not None else "")
    return Reason(
        code="never_ready",
        text=text + (f": {last_seen.text}" if last_seen is not None and last_seen.text else ""),
        hint=(last_seen.hint if last_seen is not None else "")
        or "it must listen on $HOST:$PORT; if it only needs longer, raise --start-timeout",
    )


def left_in_background(exit: Exit, spec: JobSpec) -> Reason | None:
    """The warning for a run whose first process ended before the processes that it had started."""
    if not _has_left(exit):
        return None
    trap = traps.after_exit(spec, exit) if exit.succeeded else None
    otherwise = "a run ends with its first process: end the script with `exec PROGRAM` or with `wait`, start no daemons"
    return Reason(code="left_background_processes", text=f"it left {_left(exit)}", hint=str(trap or otherwise))


def _has_left(exit: Exit) -> bool:
    # Where the run was ended by us, what it had started was to go as well.
    return exit.left_background > 0 and exit.ended_by == "itself"


def _left(exit: Exit) -> str:
    names = ", ".join(exit.left_names[:_NAMES_SHOWN])
    processes = "1 process" if exit.left_background == 1 else f"{exit.left_background} processes"
    were = "which was ended" if exit.left_background == 1 else "which were ended"
    return f"{processes} in the background{f' ({names})' if names else ''}, {were}"


def unkillable(pids: tuple[int, ...]) -> Reason:
    shown = ", ".join(str(pid) for pid in pids[:_NAMES_SHOWN])
    return Reason(
        code="unkillable",
        text=f"SIGKILL was sent, but pid {shown} is still there",
        hint="it waits in the kernel for a device or a file system (state D in ps); until then its devices stay held",
    )


def devices_not_clear(text: str) -> Reason:
    return Reason(
        code="devices_not_clear",
        text=f"all its processes have ended, and {text}",
        hint="the driver takes its time; after 30 s the device is marked unhealthy, and the replica let go",
    )


def seconds(value: float) -> str:
    """`0.3 s`, `42 s`, `15m`."""
    value = max(0.0, value)
    if value >= 120:
        return format_duration(value)
    return f"{value:.0f} s" if value >= 10 or value == int(value) else f"{value:.1f} s"


def restart_number(number: int, most: int | None) -> str:
    return f"restart {number}" if most is None else f"restart {number} of {most}"


def restarts_used(count: int, most: int | None) -> str:
    """Behind what is said of the next restart, where their number has a limit."""
    return "" if most is None else f" ({count} of {most} restarts used)"


def _unknown(after: str) -> Reason:
    return Reason(
        code="supervisor_killed",
        text=f"its supervisor was killed {after}; how the run itself ended is unknown",
        hint="often the host ran out of memory: look for oom-kill in `dmesg`",
    )
