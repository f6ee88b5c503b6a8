"""How many CPUs and how much memory this daemon may hand out: what the host has, less what it was itself denied."""

from __future__ import annotations

import os
from typing import NamedTuple

from gpulayer.model.units import MILLI
from gpulayer.runtime.cgroups import find_mount, own_path

_MIB = 2**20


class Host(NamedTuple):
    cpus_milli: int
    memory_mib: int


def detect_host() -> Host:
    """Reads /proc and the cgroups; what cannot be read limits nothing."""
    mountinfo, cgroup = _read("/proc/self/mountinfo"), _read("/proc/self/cgroup")
    cpus_milli = len(os.sched_getaffinity(0)) * MILLI
    memory_mib = _memory_total_mib(_read("/proc/meminfo"))
    for directory in _cgroup_v2_directories(mountinfo, cgroup):
        cpus_milli = min(cpus_milli, _cpu_quota_milli(_read(f"{directory}/cpu.max")) or cpus_milli)
        memory_mib = min(memory_mib, _limit_mib(_read(f"{directory}/memory.max")) or memory_mib)
    for directory in _memory_v1_directories(mountinfo, cgroup):
        memory_mib = min(memory_mib, _limit_mib(_read(f"{directory}/memory.limit_in_bytes")) or memory_mib)
    return Host(cpus_milli, memory_mib)


def _memory_total_mib(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB


def _cpu_quota_milli(cpu_max: str) -> int | None:
    """`200000 100000` are two CPUs; `max 100000` is no limit."""
    words = cpu_max.split()
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit() or int(words[1]) == 0:
        return None
    return max(int(words[0]) * MILLI // int(words[1]), 1)


def _limit_mib(text: str) -> int | None:
    # Version 1 writes "no limit" as a number near 2**63.
    return int(text) // _MIB if text.strip().isdigit() and int(text) < 2**60 else None


def _cgroup_v2_directories(mountinfo: str, cgroup: str) -> list[str]:
    mount, path = find_mount(mountinfo), own_path(cgroup)
    return _from_mount_down(*mount, path) if mount is not None and path is not None else []


def _memory_v1_directories(mountinfo: str, cgroup: str) -> list[str]:
    path = next((line.split(":", 2)[2] for line in cgroup.splitlines() if "memory" in _controllers(line)), None)
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if path and len(fields) >= 5 and len(kinds) >= 3 and kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            return _from_mount_down(fields[4], fields[3], path)
    return []


def _controllers(line: str) -> list[str]:
    words = line.split(":", 2)
    return words[1].split(",") if len(words) == 3 else []


def _from_mount_down(mount_point: str, root: str, path: str) -> list[str]:
    """The mount point and every directory below it on the way to our own: a limit anywhere on it is ours, too."""
    if root != "/" and path != root and not path.startswith(root + "/"):
        return [mount_point]  # a container that sees only its own part
    below = path[len(root) :] if root != "/" else path
    directories = [mount_point]
    for name in below.split("/"):
        if name in ("", ".", ".."):
            continue
        directories.append(f"{directories[-1]}/{name}")
    return directories


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
