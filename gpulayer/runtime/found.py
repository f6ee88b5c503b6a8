"""What a sandbox and a shim's hello tell a starting daemon about an attempt, in the words of the core. Pure, but for
the clocks.

Files and answers may be of another version of the shim: what is missing or strange is taken for what is safe.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from gpulayer.core.replica.messages import (
    FoundRun,
    Order,
)
from gpulayer.model.ids import AttemptId
from gpulayer.model.replica import DeviceShare, Exit, Reason
from gpulayer.model.units import MILLI
from gpulayer.runtime.processes import Leftovers
from gpulayer.runtime.shim_link import (
    ShimProcess,
    boot_id,
)
from gpulayer.shim import notes

Json: TypeAlias = dict[str, Any]

# What can keep a run from being executed, by code, and what to do about it.
START_HINTS = {
    "bad_command": "check the words after --, and that the program is on this node; a name without / is looked up in "
    "the PATH of the job, which is the daemon's unless --env PATH gives yours; --workdir says where a path counts from",
    "bad_workdir": "check --workdir on this node; without it the run starts in its sandbox",
    "disk_full": "make room on the disk of the data directory",
    "timeout": "raise --timeout if it needs longer",
    "spawn_failed": "look at the node's limits (processes, memory, open files) and at its disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """One sandbox as a starting daemon reads it."""

    attempt: AttemptId
    content: Json
    shim: ShimProcess | None
    """Living, if that process is indeed a shim (the link finds out)."""
    is_certain: bool
    """It is: it holds the sandbox's lock."""
    records: list[notes.RunRecord]

    def is_of_boot(self, this_boot: str) -> bool:
        return bool(self.records) and self.records[-1].marker.get("boot_id") == this_boot

    def leftovers(self) -> Leftovers:
        last = self.records[-1]
        return Leftovers(
            run_id=run_id_from(self.attempt, last.run, last.marker),
            pid=_whole(last.marker.get("pid")),
            start_time=_whole(last.marker.get("start_time")),
            cgroup=self.cgroup,
        )

    @property
    def devices(self) -> tuple[DeviceShare, ...]:
        """What it was given of devices, as far as that can be read."""
        listed = self.content.get("devices")
        return tuple(
            DeviceShare(uuid=each["uuid"], milli=each["milli"])
            for each in (listed if isinstance(listed, list) else ())
            if isinstance(each, dict)
            and isinstance(each.get("uuid"), str)
            and each["uuid"]
            and isinstance(each.get("milli"), int)
            and 0 < each["milli"] <= MILLI
        )

    @property
    def cgroup(self) -> str | None:
        return cgroup_of(self.attempt, self.content)

    def first_started_seconds_ago(self, this_boot: str) -> float | None:
        """What the attempt's timeout counts from; as in the shim, within one boot."""
        began = self.records[-1].marker.get("attempt_started_boottime") if self.is_of_boot(this_boot) else None
        return max(_boottime() - began, 0.0) if _is_number(began) else None


def cgroup_of(attempt: AttemptId, content: Json | None) -> str | None:
    """The cgroup that attempt.json names. Believed only if it is this attempt's: all that is in it will be ended."""
    path = content.get("cgroup") if content is not None else None
    return path if isinstance(path, str) and path.endswith(f"/{attempt}") else None


def run_id_of(attempt: AttemptId, run: int, boot: str) -> str:
    """New for every run, and after a reboot; can be told from a run's marker alone."""
    return f"{attempt}.{run}-{boot[:8]}"


def wants_port(order: Order) -> bool:
    """A batch is awaited by nobody, so nobody would know its port."""
    return order.spec.kind == "service" and order.spec.port


def exit_of(run: int, note: Mapping[str, Any]) -> Exit:
    """An exit note, from the file or an event, of this or another version of the shim."""
    names = note.get("left_names")
    return Exit(
        run=run,
        code=_whole(note.get("code")),
        signal=_whole(note.get("signal")),
        ended_by=str(note.get("ended_by", "itself")),
        ended_at_utc=number(note.get("ended_at_utc"), 0.0),
        uptime_seconds=number(note.get("uptime_seconds"), 0.0),
        left_background=int(number(note.get("left_background"), 0)),
        left_names=tuple(str(name) for name in names) if isinstance(names, list) else (),
    )


def not_executed(note: Mapping[str, Any]) -> Reason | None:
    """Why a run was not executed, from its exit note; None if it was. The codes are those of the shim's answer to
    `start`."""
    if note.get("ended_by") != "spawn_failed":
        return None
    code = str(note.get("error"))
    code = code if code in START_HINTS else "spawn_failed"
    text = str(note.get("message") or "its command could not be executed")
    return Reason(code=code, text=text, hint=START_HINTS[code])


def found_run(disk: OnDisk, hello: Json | None) -> FoundRun | None:
    """The newest run of an attempt whose shim lives."""
    if hello is None:  # it does not answer; what it wrote is all there is
        return _found_from_marker(disk)
    current, number = hello.get("run"), hello.get("last_run")
    record = next((each for each in disk.records if each.run == number), None)
    if not isinstance(number, int) or number < 1:
        return None
    marker = {**(record.marker if record is not None else {}), **(current if isinstance(current, dict) else {})}
    last_exit = hello.get("last_exit")
    alive = isinstance(current, dict)
    return _found(
        number,
        marker,
        alive=alive,
        exit=exit_of(number, last_exit) if not alive and isinstance(last_exit, dict) else None,
        start_failure=not_executed(last_exit) if not alive and isinstance(last_exit, dict) else None,
        gone=hello.get("gone") is True and not alive,
        stopping=str(marker.get("stopping") or "") if alive else "",
    )


def found_dead_run(disk: OnDisk, this_boot: str, *, gone: bool) -> FoundRun | None:
    """The newest run of an attempt whose shim does not live: its note, or what is known without one."""
    if not disk.records:
        return None
    run, marker, note = disk.records[-1]
    if note is not None:
        exit = exit_of(run, note)
    elif marker.get("boot_id") != this_boot:
        exit = Exit(run=run, ended_by="interrupted", ended_at_utc=time.time())
    else:
        ago = _seconds_ago(marker)
        exit = Exit(run=run, ended_by="supervisor_killed", ended_at_utc=time.time(), uptime_seconds=ago)
    failure = not_executed(note) if note is not None else None
    return _found(run, marker, alive=False, exit=exit, start_failure=failure, gone=gone, stopping="")


def _found_from_marker(disk: OnDisk) -> FoundRun | None:
    """Alive unless its end is noted."""
    if not disk.records:
        return None
    run, marker, note = disk.records[-1]
    exit = exit_of(run, note) if note is not None else None
    failure = not_executed(note) if note is not None else None
    return _found(run, marker, alive=exit is None, exit=exit, start_failure=failure, gone=False, stopping="")


def _found(
    run: int,
    marker: Mapping[str, Any],
    *,
    alive: bool,
    exit: Exit | None,
    start_failure: Reason | None,
    gone: bool,
    stopping: str,
) -> FoundRun:
    note = marker.get("note")
    counts = note if isinstance(note, dict) else {}
    # A shim that keeps no note: each run but the first was a restart, as far as anyone knows.
    restarts = int(number(counts.get("restarts"), run - 1))
    port = _whole(marker.get("port"))
    return FoundRun(
        run=run,
        pid=_whole(marker.get("pid")),
        port=port if port is not None and 0 < port < 65536 else None,
        started_at_utc=number(marker.get("started_at_utc"), 0.0),
        started_seconds_ago=_seconds_ago(marker),
        restarts=max(0, min(restarts, run - 1)),
        failures=max(0, int(number(counts.get("failures"), 0))),
        restart_serial=int(number(marker.get("restart_serial"), 0)),
        alive=alive,
        exit=exit,
        start_failure=start_failure,
        gone=gone,
        stopping=stopping,
    )


def run_id_from(attempt: AttemptId, run: int, marker: Mapping[str, Any]) -> str:
    return run_id_of(attempt, run, str(marker.get("boot_id", "")))


def _seconds_ago(marker: Mapping[str, Any]) -> float:
    """By the clock that goes on while the host sleeps, where the run is of this boot; else by the calendar."""
    started = marker.get("started_boottime")
    if _is_number(started) and marker.get("boot_id", boot_id()) == boot_id():
        return max(_boottime() - float(started), 0.0)
    return max(time.time() - number(marker.get("started_at_utc"), time.time()), 0.0)


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def number(value: object, default: float) -> float:
    return float(value) if _is_number(value) else float(default)


def _whole(value: object) -> int | None:
    return value if type(value) is int and abs(value) < 2**63 else None


def _is_number(value: object) -> TypeGuard[int | float]:
    """One that can be reckoned with: JSON as Python reads it knows NaN, Infinity and integers without end."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 and math.isfinite(value)


def signal_number(name: object) -> int:
    known = getattr(signal, f"SIG{name}", None) if isinstance(name, str) else None
    return int(known) if isinstance(known, signal.Signals) else int(signal.SIGTERM)
