"""Whose the processes are that a driver lists on a device: by their place below a shim, never by their own name."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable

from gpulayer.core.inventory import SeenProcess
from gpulayer.shim import tree

# /proc/self/ns/pid of the host's first namespace has this inode (PROC_PID_INIT_INO, include/linux/proc_ns.h).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
ANCESTORS_MAX = 64
COMMAND_CHARACTERS_MAX = 40


def sees_host_pids() -> bool:
    """False in a container: the driver lists the host's pids, which mean nothing in a namespace of our own."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class DeviceUsers:
    """Asked every second about mostly the same processes: what was found out is kept as long as the process lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, SeenProcess]] = {}

    def look(self, pids: Iterable[int]) -> dict[int, SeenProcess]:
        known, self._known = self._known, {}
        found = {}
        for pid in pids:
            stat = tree.process_stat(pid)
            before = known.get(pid)
            if stat is None or stat.is_zombie:
                found[pid] = _without_stat(pid) if stat is None else SeenProcess(kind="gone")
                if before is not None:
                    self._known[pid] = before
                continue
            # What was managed may have lost its shim since; what was foreign never gets one.
            if before is not None and before[0] == stat.start_time and before[1].kind == "foreign":
                seen = before[1]
            else:
                seen = SeenProcess(kind="managed" if _is_below_a_shim(stat) else "foreign", name=described(stat))
            self._known[pid] = stat.start_time, seen
            found[pid] = seen
        return found

    def was_foreign(self, pid: int) -> bool:
        """Whether a process that is gone was somebody else's when it was last looked at."""
        return pid in self._known and self._known[pid][1].kind == "foreign"


def described(stat: tree.ProcessStat) -> str:
    """`python of user anna`."""
    try:
        uid = os.stat(f"/proc/{stat.pid}").st_uid
    except OSError:
        return stat.comm[:COMMAND_CHARACTERS_MAX]
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"{stat.comm[:COMMAND_CHARACTERS_MAX]} of user {user}"


def _without_stat(pid: int) -> SeenProcess:
    """No entry in /proc: gone, or hidden from us (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return SeenProcess(kind="gone")
    except (OSError, OverflowError):
        pass
    return SeenProcess(kind="foreign")


def _is_below_a_shim(stat: tree.ProcessStat) -> bool:
    """Also below another daemon's: what that holds is told by the locks."""
    ancestor: tree.ProcessStat | None = stat
    for _ in range(ANCESTORS_MAX):
        if ancestor is None or ancestor.pid <= 1:
            return False
        if ancestor.comm == "gpulayer-shim":
            return True
        ancestor = tree.process_stat(ancestor.ppid)
    return False
