"""Whose the processes are that a driver lists on a device: by their place below a shim, never by their own name."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpulayer.core.inventory import SeenProcess
from gpulayer.model.inventory import Reading
from gpulayer.shim import tree

# /proc/self/ns/pid of the host's first namespace has this inode (PROC_PID_INIT_INO, include/linux/proc_ns.h).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_BLIND = (
    "processes on the GPUs: the driver tells pids of the host, which mean nothing in a pid namespace of our own, as in "
    "a container: foreign processes are not seen"
)
ANCESTORS_MAX = 64
COMMAND_CHARACTERS_MAX = 40


def sees_host_pids() -> bool:
    """False in a container: the driver lists the host's pids, which mean nothing in a namespace of our own."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def without_strange_pids(reading: Reading) -> Reading:
    """The reading, without its lists of processes where those say nothing here."""
    if sees_host_pids():
        return reading
    blind = tuple(replace(device, processes=None, process_count=0) for device in reading.devices)
    return replace(reading, devices=blind, notes=(*reading.notes, _BLIND))


def pids_of(reading: Reading) -> set[int]:
    return {process.pid for device in reading.devices for process in device.processes or ()}


@dataclass(frozen=True, slots=True)
class _Known:
    start_time: int
    seen: SeenProcess


class DeviceUsers:
    """Asked every second about mostly the same processes: what was found out is kept as long as the process lives."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._users: dict[int, str] = {}

    def knows(self, pids: Iterable[int]) -> bool:
        """Whether `look` finds all of them known: else it asks for the names of users, which may take long (LDAP)."""
        return all(pid in self._known for pid in pids)

    def look(self, pids: Iterable[int]) -> dict[int, SeenProcess]:
        """May be called in a thread, one call at a time."""
        known, now = self._known, {}
        found = {}
        for pid in pids:
            stat, before = tree.process_stat(pid), known.get(pid)
            if stat is None or stat.is_zombie:
                found[pid] = _without_stat(pid) if stat is None else SeenProcess(kind="gone")
                if before is not None:
                    now[pid] = before
                continue
            if before is None or before.start_time != stat.start_time:
                before = _Known(stat.start_time, SeenProcess(kind="managed", name=self._described(stat)))
            # What was managed may have lost its shim since; what was foreign never gets one.
            if before.seen.kind == "managed" and not _is_below_a_shim(stat):
                before = replace(before, seen=replace(before.seen, kind="foreign"))
            now[pid], found[pid] = before, before.seen
        self._known = now
        return found

    def was_foreign(self, pid: int) -> bool:
        """Whether a process that is gone was somebody else's when it was last looked at."""
        known = self._known.get(pid)
        return known is not None and known.seen.kind == "foreign"

    def _described(self, stat: tree.ProcessStat) -> str:
        """`python of user anna`."""
        command = stat.comm[:COMMAND_CHARACTERS_MAX]
        try:
            uid = os.stat(f"/proc/{stat.pid}").st_uid
        except OSError:
            return command
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return f"{command} of user {self._users[uid]}"


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
