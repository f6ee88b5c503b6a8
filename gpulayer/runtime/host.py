"""What this host has besides GPUs, and how much of it this process may hand out.

Read from /proc, /sys and the cgroups. What cannot be read, or says what cannot be true, is a reason in `undetected`:
nothing here fails, and nothing that was not read limits anything.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from gpulayer.model.node import NumaNode
from gpulayer.model.units import MIB_MAX, MILLI
from gpulayer.runtime.cgroups import find_mount, own_path

_MIB = 2**20
# A host with thousands of containers has as many mounts, of some 300 bytes each; no other file is near this.
READ_BYTES_MAX = 4 * _MIB
# The first CPU's paragraph names the model. All of them may be a megabyte, and each asks its CPU for its frequency.
CPUINFO_BYTES = 4096
# CONFIG_NODES_SHIFT is at most 10.
NUMA_NODES_MAX = 1024
_CPU_LIST_CHARS_MAX = 4096
_PATH_CHARS_MAX = 4096  # PATH_MAX
_NOTE_CHARS_MAX = 400
# Modules that tell their version. The drivers of the kernel's own tree have none.
_MODULES = ("amdgpu", "nvidia")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Amounts are what there is; `cpus_milli` and `memory_mib` are what this process may use of it."""

    hostname: str
    kernel: str
    """As `Linux 6.1.0-18-amd64`."""
    cpu_model: str
    """The architecture, where the kernel names no model (ARM)."""
    cpus: int
    cpus_milli: int
    memory_all_mib: int
    memory_mib: int
    memory_available_mib: int | None
    """What programs could still have without swapping; None: not known."""
    disk_path: str
    """What was looked at: the data directory, or of those above it the first that exists."""
    disk_mib: int
    """Of the file system; 0: not known."""
    disk_free_mib: int
    """What this user may still fill."""
    numa: tuple[NumaNode, ...]
    drivers: tuple[tuple[str, str], ...]
    """Versions of the GPU drivers that the kernel has loaded and that tell one; sorted by name."""
    undetected: tuple[str, ...]


def detect_host(data_dir: str | os.PathLike[str], *, proc: str = "/proc", sys: str = "/sys") -> Host:
    """One look. `proc` and `sys` are where the kernel's files are; tests bring their own."""
    look = _Look(proc, sys)
    system = os.uname()
    memory_all_mib, memory_available_mib = look.memory()
    cpus_milli, memory_mib = look.limits(len(os.sched_getaffinity(0)) * MILLI, memory_all_mib)
    disk_path, disk_mib, disk_free_mib = look.disk(os.path.abspath(data_dir))
    return Host(
        hostname=system.nodename,
        kernel=f"{system.sysname} {system.release}",
        cpu_model=look.cpu_model() or system.machine,
        cpus=os.cpu_count() or len(os.sched_getaffinity(0)),
        cpus_milli=cpus_milli,
        memory_all_mib=memory_all_mib,
        memory_mib=memory_mib,
        memory_available_mib=memory_available_mib,
        disk_path=disk_path,
        disk_mib=disk_mib,
        disk_free_mib=disk_free_mib,
        numa=look.numa(),
        drivers=look.drivers(),
        undetected=tuple(look.undetected),
    )


class _Look:
    """Reads, and notes what it could not."""

    def __init__(self, proc: str, sys: str) -> None:
        self._proc, self._sys = proc, sys
        self.undetected: list[str] = []

    def memory(self) -> tuple[int, int | None]:
        """All, and what is available."""
        path = f"{self._proc}/meminfo"
        text = self._read(path, "memory")
        all_mib, available_mib = (_mib_of(text, key) for key in ("MemTotal", "MemAvailable"))
        if not all_mib:
            if text:
                self._note(f"memory: {path} tells no MemTotal that can be true")
            all_mib = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB, MIB_MAX)
        return all_mib, available_mib

    def limits(self, cpus_milli: int, memory_mib: int) -> tuple[int, int]:
        """What the cgroups of this process leave of it."""
        mountinfo = self._read(f"{self._proc}/self/mountinfo", "limits of the cgroups")
        cgroup = self._read(f"{self._proc}/self/cgroup", "limits of the cgroups")
        for directory in _cgroup_v2_directories(mountinfo, cgroup):
            cpus_milli = min(cpus_milli, self._cpu_quota_milli(f"{directory}/cpu.max") or cpus_milli)
            memory_mib = min(memory_mib, self._memory_limit_mib(f"{directory}/memory.max") or memory_mib)
        for directory in _memory_v1_directories(mountinfo, cgroup):
            memory_mib = min(memory_mib, self._memory_limit_mib(f"{directory}/memory.limit_in_bytes") or memory_mib)
        return cpus_milli, memory_mib

    def _cpu_quota_milli(self, path: str) -> int | None:
        """`200000 100000` are two CPUs; `max 100000` is no limit."""
        text = self._read(path, "CPU quota", is_needed=False)
        quota, period = [*map(_number, text.split()), None, None][:2]
        if quota is not None and period:
            return max(quota * MILLI // period, 1)
        if text and not text.startswith("max"):
            self._note(f"CPU quota: {path} says {_shown(text)}")
        return None

    def _memory_limit_mib(self, path: str) -> int | None:
        text = self._read(path, "memory limit", is_needed=False).strip()
        number = _number(text)
        if number is None and text not in ("", "max"):
            self._note(f"memory limit: {path} says {_shown(text)}")
        # Version 1 writes "no limit" as a number near 2**63.
        return None if number is None or number >= 2**60 else max(number // _MIB, 1)

    def cpu_model(self) -> str:
        for line in self._read(f"{self._proc}/cpuinfo", "CPU model", bytes_max=CPUINFO_BYTES).splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "cpu model", "cpu") and value.strip():
                return " ".join(value.split())[:100]
        return ""

    def disk(self, path: str) -> tuple[str, int, int]:
        """The file system of a directory that may not exist yet."""
        while True:
            try:
                found = os.statvfs(path)
            except (FileNotFoundError, NotADirectoryError):
                path = os.path.dirname(path)
            except (OSError, ValueError) as error:
                self._note(f"disk: cannot ask for the file system of {path} ({_why(error)})")
                return path, 0, 0
            else:
                mib = found.f_blocks * found.f_frsize // _MIB, found.f_bavail * found.f_frsize // _MIB
                return path, *mib

    def numa(self) -> tuple[NumaNode, ...]:
        root = f"{self._sys}/devices/system/node"
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            self._note(f"NUMA nodes: no {root}; this kernel was built without them")
            return ()
        except OSError as error:
            self._note(f"NUMA nodes: cannot read {root} ({_why(error)})")
            return ()
        numbers = sorted(int(name[4:]) for name in names if re.fullmatch(r"node[0-9]{1,4}", name))
        if not numbers:
            self._note(f"NUMA nodes: {root} lists none")
        found = [self._numa_node(root, number) for number in numbers[:NUMA_NODES_MAX]]
        # The memory of a GPU may be a node of its own, without CPUs, and empty while the driver keeps it.
        return tuple(node for node in found if node is not None and (node.cpus or node.memory_mib))

    def _numa_node(self, root: str, number: int) -> NumaNode | None:
        what, directory = f"NUMA node {number}", f"{root}/node{number}"
        cpus = self._read(f"{directory}/cpulist", what).strip()
        meminfo = self._read(f"{directory}/meminfo", what)
        memory_mib = _mib_of(meminfo, "MemTotal")
        if len(cpus) > _CPU_LIST_CHARS_MAX or not re.fullmatch(r"[0-9,-]*", cpus):
            self._note(f"{what}: {directory}/cpulist says {_shown(cpus)}")
            return None
        if memory_mib is None and meminfo:
            self._note(f"{what}: {directory}/meminfo tells no MemTotal that can be true")
        return NumaNode(id=number, cpus=cpus, memory_mib=memory_mib or 0)

    def drivers(self) -> tuple[tuple[str, str], ...]:
        found = []
        for name in _MODULES:
            path = f"{self._sys}/module/{name}/version"
            version = self._read(path, f"version of the {name} driver", is_needed=False).strip()
            if re.fullmatch(r"[\w.+-]{1,64}", version):
                found.append((name, version))
            elif version:
                self._note(f"version of the {name} driver: {path} says {_shown(version)}")
        return tuple(found)

    def _read(self, path: str, what: str, *, bytes_max: int | None = None, is_needed: bool = True) -> str:
        """Its text; empty and noted where there is none. `bytes_max`: the beginning is enough."""
        try:
            with open(path, "rb") as file:
                content = file.read(bytes_max or READ_BYTES_MAX)
        except FileNotFoundError:
            if is_needed:
                self._note(f"{what}: no {path}")
            return ""
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
            self._note(f"{what}: cannot read {path} ({_why(error)})")
            return ""
        if is_needed and not content.strip():
            self._note(f"{what}: {path} is empty")
        if len(content) == READ_BYTES_MAX:
            self._note(f"{what}: only the first {READ_BYTES_MAX // _MIB} MiB of {path} were read")
        return content.decode("utf-8", "replace")

    def _note(self, text: str) -> None:
        printable = "".join(char if char.isprintable() else "?" for char in text[:_NOTE_CHARS_MAX])
        if printable not in self.undetected:
            self.undetected.append(printable)


def _mib_of(meminfo: str, key: str) -> int | None:
    """`MemTotal:  16384 kB` as MiB, also behind `Node 0`; None where that is missing or cannot be true."""
    match = re.search(rf"^(?:Node +[0-9]+ +)?{key}: +([0-9]{{1,18}}) kB$", meminfo, re.MULTILINE)
    mib = int(match[1]) // 1024 if match else MIB_MAX + 1
    return mib if mib <= MIB_MAX else None


def _number(text: str) -> int | None:
    """Digits of the kernel: ASCII, and no more than 64 bits hold."""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shown(text: str) -> str:
    return repr(text.strip()[:60])


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
    if len(path) > _PATH_CHARS_MAX or (root != "/" and path != root and not path.startswith(root + "/")):
        return [mount_point]  # a container that sees only its own part
    below = path[len(root) :] if root != "/" else path
    directories = [mount_point]
    for name in below.split("/"):
        if name in ("", ".", ".."):
            continue
        directories.append(f"{directories[-1]}/{name}")
    return directories
