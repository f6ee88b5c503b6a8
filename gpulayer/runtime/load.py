"""How busy this host is, in steps of ten percent: proc(5), statvfs(3)."""

from __future__ import annotations

import os
from pathlib import Path

from gpulayer.model.record import Load

_STEP = 10


class LoadMeter:
    """Each look is at the time since the one before."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._before = _cpu_ticks()

    def look(self) -> Load:
        busy, total = _cpu_ticks()
        was_busy, was_total = self._before
        self._before = busy, total
        return Load(
            cpu_percent=_steps(busy - was_busy, total - was_total),
            memory_percent=_steps(*_memory()),
            disk_percent=_steps(*_disk(self._data_dir)),
        )


def disk_free_mib(directory: Path) -> int | None:
    """What its user may still write there; None where nobody knows."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // 2**20


def _steps(part: float, whole: float) -> int:
    """Percent, to the nearest step; 0 where nobody knows."""
    if whole <= 0:
        return 0
    return min(100, max(0, round(100 * part / whole / _STEP) * _STEP))


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) since the start of the host."""
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    idle = sum(fields[3:5])  # idle and waiting for a disk
    return sum(fields) - idle, sum(fields)


def _memory() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
        return kib["MemTotal"] - kib["MemAvailable"], kib["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return 0, 0


def _disk(path: Path) -> tuple[int, int]:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0, 0
    return found.f_blocks - found.f_bavail, found.f_blocks
