"""Does the host run what the log says, and nothing else? Read from /proc, cgroups, sockets and sandboxes.

It does not believe the daemon's own tables: what they claim (an endpoint) is compared with the host too. Whatever is in
the middle of changing looks wrong for a moment, so only what is found twice, a moment apart, is a difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

from gpulayer.api.facade import AuditReport, Difference
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.replica import ReplicaStatus
from gpulayer.runtime.listeners import accepting, inodes_of, listening
from gpulayer.runtime.processes import attempt_of
from gpulayer.runtime.sandboxes import attempt_id
from gpulayer.runtime.shim_link import lock_holders
from gpulayer.shim import notes, tree
from gpulayer.shim.tree import ProcessStat

# Longer than a step of any life cycle that is on its way: exec to report, exit to the note.
SECOND_LOOK_SECONDS = 0.4


@dataclass(slots=True)
class _Sandbox:
    """One attempt as its directory and the processes of the host show it."""

    attempt: AttemptId
    shim: ProcessStat | None
    tree: dict[int, ProcessStat] = field(default_factory=dict)
    """Descendants of the living shim."""
    marked: dict[int, ProcessStat] = field(default_factory=dict)
    """Processes that carry its environment or are in its cgroup, wherever they hang in the process tree."""
    run: notes.RunRecord | None = None


async def audit_host(
    *,
    data_dir: Path,
    node_id: NodeId,
    orders: Callable[[], tuple[Order, ...]],
    statuses: Callable[[], Mapping[AttemptId, ReplicaStatus]],
    now_utc: Callable[[], float],
) -> AuditReport:
    """Two looks; what both show is reported. The reading of /proc is done in a thread."""

    async def look() -> tuple[dict[tuple[object, ...], Difference], int, int]:
        ordered, claimed = orders(), dict(statuses())
        return await trio.to_thread.run_sync(_look, data_dir, ordered, claimed, os.getpid())

    first, _, _ = await look()
    if first:
        await trio.sleep(SECOND_LOOK_SECONDS)
    second, replicas, processes = await look()
    found = [difference for key, difference in second.items() if key in first]
    return AuditReport(
        checked_at_utc=now_utc(),
        differences=tuple(sorted(found, key=lambda each: (each.kind, each.job, each.replica or 0, each.pids))),
        replicas_checked=replicas,
        processes_seen=processes,
    )


def _look(
    data_dir: Path, orders: tuple[Order, ...], claimed: Mapping[AttemptId, ReplicaStatus], daemon_pid: int
) -> tuple[dict[tuple[object, ...], Difference], int, int]:
    ordered = {order.assignment.id: order for order in orders}
    processes = {stat.pid: stat for stat in tree.all_processes()}
    sandboxes = _sandboxes(data_dir / "sandboxes", processes)
    sockets = listening()
    differences: dict[tuple[object, ...], Difference] = {}

    def add(kind: str, attempt: AttemptId | None, text: str, pids: Iterable[int] = (), hint: str = "") -> None:
        held = tuple(sorted(pids))
        differences[(kind, attempt, held)] = Difference(
            kind=kind,
            text=text,
            pids=held,
            job=attempt.replica.job if attempt else "",
            replica=attempt.replica.index if attempt else None,
            hint=hint,
        )

    for attempt, sandbox in sandboxes.items():
        shim_pid = {sandbox.shim.pid} if sandbox.shim else set()
        if attempt not in ordered and sandbox.shim is not None:
            add(
                "stray_supervisor",
                attempt,
                f"{attempt} is not assigned here, but its supervisor runs (pid {sandbox.shim.pid})",
                shim_pid | set(sandbox.tree),
                "the daemon ends it within seconds; if it stays, report it",
            )
        strays = {
            pid: stat
            for pid, stat in sandbox.marked.items()
            if pid not in sandbox.tree and pid not in shim_pid and not stat.is_zombie
        }
        for pid, stat in strays.items():
            add(
                "stray_process",
                attempt,
                f"pid {pid} ({stat.comm}) belongs to {attempt}, but not to the tree of its supervisor",
                {pid},
                f"look at it with ps -fp {pid}; end it with kill {pid}",
            )
    for attempt, order in ordered.items():
        found = sandboxes.get(attempt)
        status = claimed.get(attempt)
        if status is None:
            add("not_supervised", attempt, f"{attempt} is assigned here, but the daemon does not follow it")
            continue
        should_run = status.state in ("ready", "unready")
        if should_run and (found is None or found.shim is None):
            add("no_supervisor", attempt, f"{attempt} is said to be {status.state}, but no supervisor process runs")
        elif should_run and found is not None and not found.tree:
            add("no_process", attempt, f"{attempt} is said to be {status.state}, but no process of it runs")
        if found is None or found.run is None or found.run.exit is not None:
            continue
        port = found.run.marker.get("port")
        if not isinstance(port, int):
            continue
        owned = inodes_of(found.tree)
        for held in (each for each in sockets if each.port == port and each.inode not in owned):
            holders = [pid for pid in _owners(held.inode, processes)]
            names = (
                ", ".join(f"pid {pid} ({processes[pid].comm})" for pid in holders) or "a process that cannot be seen"
            )
            add(
                "foreign_listener",
                attempt,
                f"port {port} is {order.job_name}.{attempt.replica.index}'s, but {names} listens on it",
                holders,
                "end that process, or `gpulayer job restart` the replica to give it another port",
            )
        if status.endpoint is not None:
            mine = accepting([each for each in sockets if each.port == status.endpoint.port], status.endpoint.address)
            if not any(each.inode in owned for each in mine):
                add("dead_endpoint", attempt, f"{status.endpoint} is listed, but no process of {attempt} listens there")
    for stat in processes.values():
        if stat.ppid == daemon_pid and stat.is_zombie:
            add("zombie", None, f"pid {stat.pid} ({stat.comm}) has ended and the daemon has not reaped it", {stat.pid})
    seen = sum(len(sandbox.tree) + (sandbox.shim is not None) for sandbox in sandboxes.values())
    return differences, len(ordered), seen


def _sandboxes(root: Path, processes: Mapping[int, ProcessStat]) -> dict[AttemptId, _Sandbox]:
    """Every attempt that has a directory or a process."""
    found: dict[AttemptId, _Sandbox] = {}
    children: dict[int, list[ProcessStat]] = {}
    for stat in processes.values():
        children.setdefault(stat.ppid, []).append(stat)
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        names = set()
    # By the locks that they hold: what a file says may be of yesterday, or the sandbox removed by hand.
    shims = {
        holder.attempt: processes[holder.shim.pid]
        for holder in sorted(lock_holders(root), key=lambda holder: holder.is_in_place)
        if holder.shim.pid in processes
    }
    for name in sorted(names | {str(attempt) for attempt in shims}):
        attempt = attempt_id(name)
        if attempt is None:
            continue
        shim = shims.get(attempt)
        sandbox = _Sandbox(attempt=attempt, shim=shim)
        if shim is not None:
            sandbox.tree = {stat.pid: stat for stat in _below(shim.pid, children) if not stat.is_zombie}
            sandbox.run = next(reversed(notes.read_all(str(root / name / "runs"))), None)
        cgroup = _json(root / name / "attempt.json").get("cgroup")
        for pid in tree.cgroup_pids(cgroup) if isinstance(cgroup, str) else ():
            if pid in processes:
                sandbox.marked[pid] = processes[pid]
        found[attempt] = sandbox
    for pid, stat in processes.items():
        owner = attempt_of(pid, root)
        if owner is not None:
            found.setdefault(owner, _Sandbox(attempt=owner, shim=None)).marked[pid] = stat
    return found


def _below(pid: int, children: Mapping[int, list[ProcessStat]]) -> list[ProcessStat]:
    """All of a tree, however deep: no recursion."""
    below = list(children.get(pid, ()))
    for stat in below:
        below.extend(children.get(stat.pid, ()))
    return below


def _owners(inode: int, processes: Mapping[int, ProcessStat]) -> list[int]:
    return [pid for pid in processes if inode in inodes_of([pid])]


def _json(path: Path) -> dict[str, object]:
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # the last for what is nested without end
        return {}
    return told if isinstance(told, dict) else {}
