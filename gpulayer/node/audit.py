"""Does the host run what the log says, and nothing else? Read from /proc, cgroups, sockets and sandboxes.

It does not believe the daemon's own tables: what they claim (an endpoint) is compared with the host too. Whatever is in
the middle of changing looks wrong for a moment, so only what is found twice, a moment apart, is a difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import trio

from gpulayer.api.facade import AuditReport, Difference
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import AttemptId
from gpulayer.model.replica import Endpoint, ReplicaStatus
from gpulayer.runtime.found import cgroup_of
from gpulayer.runtime.listeners import ListeningSocket, accepting, inodes_of, listening, owner_of
from gpulayer.runtime.processes import attempt_of
from gpulayer.runtime.sandboxes import Sandboxes
from gpulayer.runtime.shim_link import lock_holders
from gpulayer.shim import notes, tree
from gpulayer.shim.tree import ProcessStat

# Longer than a step of any life cycle that is on its way: exec to report, exit to the note.
SECOND_LOOK_SECONDS = 0.4


@dataclass(slots=True)
class _Sandbox:
    """One attempt as its directory and the processes of the host show it."""

    shim: ProcessStat | None
    tree: dict[int, ProcessStat] = field(default_factory=dict)
    """Descendants of the living shim."""
    marked: dict[int, ProcessStat] = field(default_factory=dict)
    """Processes that carry its environment or are in its cgroup, wherever they hang in the process tree."""
    run: notes.RunRecord | None = None


_Found: TypeAlias = tuple[AttemptId | None, Difference]
# What names a difference, so that the second look knows it from the first.
_Key: TypeAlias = tuple[str, AttemptId | None, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Host:
    """One look: what the log orders, what the daemon says of it, and what is there."""

    orders: Mapping[AttemptId, Order]
    claimed: Mapping[AttemptId, ReplicaStatus]
    processes: Mapping[int, ProcessStat]
    sandboxes: Mapping[AttemptId, _Sandbox]
    sockets: Sequence[ListeningSocket]

    def differences(self) -> dict[_Key, Difference]:
        found: dict[_Key, Difference] = {}
        for attempt, each in (*self._strays(), *self._missing(), *self._port_troubles(), *self._zombies()):
            found[each.kind, attempt, each.pids] = each
        return found

    @property
    def processes_seen(self) -> int:
        return sum(len(sandbox.tree) + (sandbox.shim is not None) for sandbox in self.sandboxes.values())

    def _strays(self) -> Iterator[_Found]:
        """What runs, and nobody ordered."""
        for attempt, sandbox in self.sandboxes.items():
            shim_pid = {sandbox.shim.pid} if sandbox.shim else set()
            if attempt not in self.orders and sandbox.shim is not None:
                yield _difference(
                    "stray_supervisor",
                    attempt,
                    f"{attempt} is not assigned here, but its supervisor runs (pid {sandbox.shim.pid})",
                    shim_pid | set(sandbox.tree),
                    "the daemon ends it within seconds; if it stays, report it",
                )
            for pid, stat in sandbox.marked.items():
                if pid not in sandbox.tree and pid not in shim_pid and not stat.is_zombie:
                    yield _difference(
                        "stray_process",
                        attempt,
                        f"pid {pid} ({stat.comm}) belongs to {attempt}, but not to the tree of its supervisor",
                        {pid},
                        f"look at it with ps -fp {pid}; end it with kill {pid}",
                    )

    def _missing(self) -> Iterator[_Found]:
        """What is ordered, or said to run, and does not."""
        for attempt in self.orders:
            status, sandbox = self.claimed.get(attempt), self.sandboxes.get(attempt)
            if status is None:
                yield _difference(
                    "not_supervised", attempt, f"{attempt} is assigned here, but the daemon does not follow it"
                )
            elif status.state not in ("ready", "unready"):
                continue
            elif sandbox is None or sandbox.shim is None:
                text = f"{attempt} is said to be {status.state}, but no supervisor process runs"
                yield _difference("no_supervisor", attempt, text)
            elif not sandbox.tree:
                text = f"{attempt} is said to be {status.state}, but no process of it runs"
                yield _difference("no_process", attempt, text)

    def _port_troubles(self) -> Iterator[_Found]:
        """Others on a replica's port, and an endpoint that is listed without the replica behind it."""
        for attempt, order in self.orders.items():
            status, sandbox = self.claimed.get(attempt), self.sandboxes.get(attempt)
            if status is None or sandbox is None or sandbox.run is None or sandbox.run.exit is not None:
                continue
            port = sandbox.run.marker.get("port")
            if not isinstance(port, int):
                continue
            owned = inodes_of(sandbox.tree)
            for socket in self.sockets:
                if socket.port == port and socket.inode not in owned:
                    yield self._foreign_listener(attempt, order, socket)
            if status.endpoint is not None and not self._is_served(status.endpoint, owned):
                text = f"{status.endpoint} is listed, but no process of {attempt} listens there"
                yield _difference("dead_endpoint", attempt, text)

    def _foreign_listener(self, attempt: AttemptId, order: Order, socket: ListeningSocket) -> _Found:
        holders = owner_of(socket.inode)
        names = [
            f"pid {pid} ({self.processes[pid].comm})" if pid in self.processes else f"pid {pid}" for pid in holders
        ]
        return _difference(
            "foreign_listener",
            attempt,
            f"port {socket.port} is {order.job_name}.{attempt.replica.index}'s, but "
            f"{', '.join(names) or 'a process that cannot be seen'} listens on it",
            holders,
            "end that process, or `gpulayer job restart` the replica to give it another port",
        )

    def _is_served(self, endpoint: Endpoint, owned: Container[int]) -> bool:
        on_port = [socket for socket in self.sockets if socket.port == endpoint.port]
        return any(socket.inode in owned for socket in accepting(on_port, endpoint.address))

    def _zombies(self) -> Iterator[_Found]:
        """Children of this daemon that it has not reaped."""
        for stat in self.processes.values():
            if stat.ppid == os.getpid() and stat.is_zombie:
                text = f"pid {stat.pid} ({stat.comm}) has ended and the daemon has not reaped it"
                yield _difference("zombie", None, text, {stat.pid})


def _difference(kind: str, attempt: AttemptId | None, text: str, pids: Iterable[int] = (), hint: str = "") -> _Found:
    return attempt, Difference(
        kind=kind,
        text=text,
        pids=tuple(sorted(pids)),
        job=attempt.replica.job if attempt else "",
        replica=attempt.replica.index if attempt else None,
        hint=hint,
    )


async def audit_host(
    *,
    data_dir: Path,
    orders: Callable[[], tuple[Order, ...]],
    statuses: Callable[[], Mapping[AttemptId, ReplicaStatus]],
    now_utc: Callable[[], float],
) -> AuditReport:
    """Two looks; what both show is reported. The reading of /proc is done in a thread."""

    async def look() -> tuple[dict[_Key, Difference], _Host]:
        ordered = {order.assignment.id: order for order in orders()}
        return await trio.to_thread.run_sync(_look, Sandboxes(data_dir), ordered, dict(statuses()))

    first, host = await look()
    second = first
    if first:
        await trio.sleep(SECOND_LOOK_SECONDS)
        second, host = await look()
    found = [difference for key, difference in second.items() if key in first]
    return AuditReport(
        checked_at_utc=now_utc(),
        differences=tuple(sorted(found, key=lambda each: (each.kind, each.job, each.replica or 0, each.pids))),
        replicas_checked=len(host.orders),
        processes_seen=host.processes_seen,
    )


def _look(
    sandboxes: Sandboxes, orders: Mapping[AttemptId, Order], claimed: Mapping[AttemptId, ReplicaStatus]
) -> tuple[dict[_Key, Difference], _Host]:
    processes = {stat.pid: stat for stat in tree.all_processes()}
    host = _Host(orders, claimed, processes, _sandboxes(sandboxes, processes), listening())
    return host.differences(), host


def _sandboxes(on_disk: Sandboxes, processes: Mapping[int, ProcessStat]) -> dict[AttemptId, _Sandbox]:
    """Every attempt that has a directory or a process."""
    found: dict[AttemptId, _Sandbox] = {}
    children: dict[int, list[ProcessStat]] = {}
    for stat in processes.values():
        children.setdefault(stat.ppid, []).append(stat)
    # By the locks that they hold: what a file says may be of yesterday, or the sandbox removed by hand.
    shims = {
        holder.attempt: processes[holder.shim.pid]
        for holder in sorted(lock_holders(on_disk.root), key=lambda holder: holder.is_in_place)
        if holder.shim.pid in processes
    }
    for attempt in sorted({*on_disk.attempts(), *shims}):
        shim = shims.get(attempt)
        sandbox = _Sandbox(shim)
        if shim is not None:
            sandbox.tree = {stat.pid: stat for stat in _below(shim.pid, children) if not stat.is_zombie}
            sandbox.run = next(reversed(on_disk.runs(attempt)), None)
        cgroup = cgroup_of(attempt, on_disk.read_attempt(attempt))
        for pid in tree.cgroup_pids(cgroup) if cgroup is not None else ():
            if pid in processes:
                sandbox.marked[pid] = processes[pid]
        found[attempt] = sandbox
    for pid, stat in processes.items():
        owner = attempt_of(pid, on_disk.root)
        if owner is not None:
            found.setdefault(owner, _Sandbox(None)).marked[pid] = stat
    return found


def _below(pid: int, children: Mapping[int, list[ProcessStat]]) -> list[ProcessStat]:
    """All of a tree, however deep: no recursion."""
    below = list(children.get(pid, ()))
    for stat in below:
        below.extend(children.get(stat.pid, ()))
    return below
