"""What a killed shim left running, found and ended: by cgroup, by GPULAYER_RUN_ID, by the session that the run began.

Never by name, and never by a pid alone: the next process of that number is somebody else's. Everything here reads /proc
and waits; the supervisor calls it in threads.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from gpulayer.model.ids import AttemptId
from gpulayer.runtime.sandboxes import attempt_id
from gpulayer.shim import tree

RUN_ID = "GPULAYER_RUN_ID"
KILL_SECONDS_MAX = 5.0
_ENVIRON_PREFIX = RUN_ID.encode() + b"="


@dataclass(frozen=True, slots=True)
class Leftovers:
    """How the tree of one attempt's newest run is recognised when its shim is dead."""

    run_id: str
    pid: int | None = None
    start_time: int | None = None
    """Of the run's first process; with its pid it names it for good."""
    cgroup: str | None = None


def run_ids() -> dict[str, list[tree.ProcessStat]]:
    """Every process that carries a GPULAYER_RUN_ID, by it. One walk through /proc, for any number of attempts."""
    found: dict[str, list[tree.ProcessStat]] = {}
    for stat in tree.all_processes():
        run_id = _run_id(stat.pid)
        if run_id and stat.pid != os.getpid():
            found.setdefault(run_id, []).append(stat)
    return found


def find(left: Leftovers, by_run_id: dict[str, list[tree.ProcessStat]] | None = None) -> list[tree.ProcessStat]:
    """The living processes of the tree: those with its run id, in its cgroup or in its session, and all below them."""
    if by_run_id is None:
        by_run_id = run_ids()
    roots = {stat.pid: stat for stat in by_run_id.get(left.run_id, ())}
    if left.cgroup is not None:
        for pid in tree.cgroup_pids(left.cgroup):
            stat = tree.process_stat(pid)
            if stat is not None:
                roots[pid] = stat
    first = tree.process_stat(left.pid) if left.pid else None
    if first is not None and first.start_time == left.start_time:
        roots[first.pid] = first
        # As long as the leader lives its session's number is no one else's.
        roots |= {stat.pid: stat for stat in tree.all_processes() if stat.session == first.pid}
    found = dict(roots)
    for pid in roots:
        found |= {stat.pid: stat for stat in tree.descendants(pid)}
    found.pop(os.getpid(), None)
    return [stat for stat in found.values() if not stat.is_zombie]


def end(left: Leftovers, *, signal_number: int, grace_seconds: float) -> list[tree.ProcessStat]:
    """The stop signal once to each, the grace, then SIGKILL until nothing is left or five seconds are over; what is
    left."""
    deadline = time.monotonic() + grace_seconds
    signalled: set[tuple[int, int]] = set()
    pause_seconds = 0.005
    while signal_number != signal.SIGKILL:
        alive = find(left)
        if not alive:
            return []
        if time.monotonic() >= deadline:
            break
        for stat in alive:
            if (stat.pid, stat.start_time) not in signalled:
                signalled.add((stat.pid, stat.start_time))
                tree.signal_process(stat, signal_number)
                tree.signal_process(stat, signal.SIGCONT)  # a stopped process takes a signal only when it goes on
        time.sleep(min(pause_seconds, max(deadline - time.monotonic(), 0)))
        pause_seconds = min(pause_seconds * 2, 0.2)
    return tree.kill_all(lambda: find(left), cgroup=left.cgroup, timeout_seconds=KILL_SECONDS_MAX)


def runs_below(sandboxes: Path) -> dict[AttemptId, int]:
    """The attempts of these sandboxes of which processes are there, as their environment says, and the newest run."""
    found: dict[AttemptId, int] = {}
    for stat in tree.all_processes():
        attempt = attempt_of(stat.pid, sandboxes) if not stat.is_zombie else None
        if attempt is not None:
            run = _run_id(stat.pid).removeprefix(f"{attempt}.").partition("-")[0]
            found[attempt] = max(found.get(attempt, 1), int(run) if run.isascii() and run.isdigit() else 1)
    return found


def attempt_of(pid: int, sandboxes: Path) -> AttemptId | None:
    """Whose process it is, by the sandbox named in its environment."""
    named = _variable(pid, b"GPULAYER_SANDBOX=")
    attempt = attempt_id(os.path.basename(named))
    # The same directory by another path, after the daemon was started with another spelling of it, is the same.
    is_here = attempt is not None and os.path.realpath(os.path.dirname(named)) == os.path.realpath(sandboxes)
    return attempt if is_here else None


def _run_id(pid: int) -> str:
    return _variable(pid, _ENVIRON_PREFIX)


def _variable(pid: int, assignment: bytes) -> str:
    """The value of a variable in the environment that a process was executed with; empty if it has none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = b"\0" + file.read()
    except OSError:
        return ""
    _, found, value = environment.partition(b"\0" + assignment)
    return os.fsdecode(value.partition(b"\0")[0]) if found else ""
