"""Processes as /proc shows them: who belongs to a replica, and how to end them all without touching anyone else.

The shim asks about its own descendants, the daemon about what a killed shim left. Nothing here waits, but kill_all().
Processes are never found by name; a pid alone is never trusted, since it may belong to another program by now: a signal
goes through a pidfd that was opened first and checked (start time, parentage) afterwards. The exception are the
caller's own children: as long as they are not reaped their pid cannot be given to anyone else.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What identifies a process, and where it stands. (A tuple: dataclasses would cost each shim 1.5 MiB of
    imports.)"""

    pid: int
    ppid: int
    pgrp: int
    session: int
    state: str
    start_time: int
    """Field 22 of /proc/<pid>/stat: clock ticks since boot. With the pid it names a process for good."""
    comm: str

    @property
    def is_zombie(self) -> bool:
        return self.state in "ZX"


def parse_stat(raw: bytes) -> ProcessStat:
    """A line of /proc/<pid>/stat. The name stands in parentheses and may itself hold any byte, parentheses too."""
    name_start, name_end = raw.index(b"("), raw.rindex(b")")
    fields = raw[name_end + 1 :].split()
    return ProcessStat(
        pid=int(raw[:name_start]),
        ppid=int(fields[1]),
        pgrp=int(fields[2]),
        session=int(fields[3]),
        state=fields[0].decode("ascii"),
        start_time=int(fields[19]),
        # It stands in reasons and log lines, which are one line each.
        comm=printable(raw[name_start + 1 : name_end].decode("utf-8", "replace")),
    )


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def process_stat(pid: int) -> ProcessStat | None:
    """None if there is no such process (any more), or none that we may see."""
    raw = _read(f"/proc/{pid}/stat")
    return parse_stat(raw) if raw else None


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies too."""
    if not _HAS_CHILDREN_FILES:
        return [stat.pid for stat in all_processes() if stat.ppid == pid]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        found.extend(map(int, _read(f"/proc/{pid}/task/{thread}/children").split()))
    return found


def descendants(pid: int) -> list[ProcessStat]:
    """Everything below a process, nearest first, zombies too. One look: what forks meanwhile may be missing."""
    if not _HAS_CHILDREN_FILES:
        return _descendants_by_scan(pid)
    found: dict[int, ProcessStat] = {}
    unvisited = [pid]
    for parent in unvisited:
        for child in children(parent):
            stat = process_stat(child)
            if stat is not None and child not in found and child != pid:
                found[child] = stat
                unvisited.append(child)
    return list(found.values())


def all_processes() -> Iterable[ProcessStat]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = process_stat(int(name))
            if stat is not None:
                yield stat


def cgroup_pids(path: str) -> list[int]:
    """The processes of a cgroup (v2) and of those below it; none if it does not exist."""
    pids = list(map(int, _read(f"{path}/cgroup.procs").split()))
    try:
        with os.scandir(path) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return pids
    for directory in below:
        pids.extend(cgroup_pids(directory))
    return [pid for pid in pids if pid != 0]  # 0: a process of a pid namespace that we cannot see into


def kill_cgroup(path: str) -> bool:
    """SIGKILL to all of a cgroup in one step that no fork escapes (Linux 5.14). False where the kernel cannot."""
    if os.getpid() in cgroup_pids(path):
        return False
    try:
        _write(f"{path}/cgroup.kill", b"1")
    except OSError:
        return False
    return True


def remove_cgroup(path: str) -> bool:
    """Removes a cgroup and those below it, if they are empty."""
    try:
        with os.scandir(path) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for directory in below:
            remove_cgroup(directory)
        os.rmdir(path)
    except OSError:
        return False
    return True


def renew_cgroup(path: str) -> None:
    """The same cgroup, if it is empty, without its past: what is born in one that was ever killed is killed as well
    (seen on Linux 6.18; docs/decisions/0006)."""
    if remove_cgroup(path):
        try:
            os.makedirs(path, 0o755, exist_ok=True)  # its parent may have gone meanwhile, as an empty one
        except OSError:
            pass  # the run will say that it has none


def signal_process(
    stat: ProcessStat, signal_number: int, *, is_still_ours: Callable[[ProcessStat], bool] | None = None
) -> bool:
    """Sends a signal to exactly this process; False if it is gone, if it is no longer ours, or if we may not."""
    try:
        pidfd = os.pidfd_open(stat.pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENFILE):
            return False
        pidfd = -1  # an old kernel, a seccomp filter or no descriptor left: the check is all there is
    try:
        now = process_stat(stat.pid)
        if now is None or now.start_time != stat.start_time or (is_still_ours is not None and not is_still_ours(now)):
            return False
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, signal_number)
        else:
            os.kill(stat.pid, signal_number)
        return True
    except OSError:
        return False
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def signal_own_tree(
    signal_number: int, *, members: Iterable[ProcessStat], whole_groups: bool = False, cgroup: str | None = None
) -> None:
    """Signals members: descendants of the calling process, which must be their reaper and not reap meanwhile, or
    processes of the cgroup.

    With whole_groups each process group that a child leads or is in gets the signal as well: the kernel does that in
    one step against fork(), so that a group that multiplies faster than we can look is ended all the same.
    """
    me = os.getpid()
    known = {stat.pid for stat in members if stat.ppid != 1} | {me}

    def is_still_ours(now: ProcessStat) -> bool:
        return now.ppid in known or (cgroup is not None and now.pid in cgroup_pids(cgroup))

    own_group = os.getpgid(0)
    groups_done: set[int] = set()
    for stat in members:
        if stat.is_zombie:
            continue
        if stat.ppid != me:
            signal_process(stat, signal_number, is_still_ours=is_still_ours)
            continue
        # A child of ours: pinned, and its group with it, until we reap it. A group can hold nobody from outside of the
        # tree: it lies in one session, and the run began its own.
        if whole_groups and stat.pgrp not in groups_done and stat.pgrp not in (0, own_group):
            groups_done.add(stat.pgrp)
            _ignore_missing(os.killpg, stat.pgrp, signal_number)
        _ignore_missing(os.kill, stat.pid, signal_number)


def kill_all(
    find: Callable[[], Iterable[ProcessStat]],
    *,
    signal_number: int = signal.SIGKILL,
    timeout_seconds: float = 5.0,
    cgroup: str | None = None,
) -> list[ProcessStat]:
    """Signals what find() gives, again and again, until it gives nothing or the time is over; returns what is left.

    For the tree of a shim that died. Blocks: call it in a thread. Zombies count as gone: they are their parent's to
    reap.
    """
    deadline = time.monotonic() + timeout_seconds
    pause_seconds = 0.002
    while True:
        if cgroup is not None and signal_number == signal.SIGKILL:
            kill_cgroup(cgroup)
        found = {stat.pid: stat for stat in find() if not stat.is_zombie and stat.pid != os.getpid()}
        for pid in cgroup_pids(cgroup) if cgroup is not None else ():
            stat = process_stat(pid)
            if stat is not None and not stat.is_zombie and pid != os.getpid():
                found[pid] = stat
        if not found or time.monotonic() >= deadline:
            return list(found.values())
        for stat in found.values():
            signal_process(stat, signal_number)
        time.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 2, 0.1)


def _descendants_by_scan(pid: int) -> list[ProcessStat]:
    below: dict[int, list[ProcessStat]] = {}
    for stat in all_processes():
        below.setdefault(stat.ppid, []).append(stat)
    found: list[ProcessStat] = []
    unvisited = [pid]
    for parent in unvisited:
        for stat in below.pop(parent, []):
            found.append(stat)
            unvisited.append(stat.pid)
    return found


def _read(path: str) -> bytes:
    """The whole of a /proc or cgroup file; empty if it cannot be read: its process may end at any time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _write(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


def _ignore_missing(send: Callable[[int, int], None], target: int, signal_number: int) -> None:
    try:
        send(target, signal_number)
    except (ProcessLookupError, PermissionError):
        pass  # gone meanwhile, or of another user (setuid): the next look tells which


# CONFIG_PROC_CHILDREN: in every distribution kernel; without it, all of /proc is searched instead.
_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
