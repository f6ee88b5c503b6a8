"""What a driver says of the devices of this host at one moment: read by a shell, judged by core/inventory.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The driver takes a moment to give back what a killed process had; after this it is a fault.
CONFIRM_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that the driver lists on a device."""

    pid: int
    memory_mib: int | None = None
    """None: the driver does not tell (WSL, MIG without the right to see others')."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """One device, or MIG instance, as it answered. Only `index` is always there."""

    index: int
    """The driver's number; a MIG instance has that of its GPU."""
    uuid: str = ""
    """Empty: not even that could be read, see `problems`."""
    model: str = ""
    memory_mib: int = 0
    compute_capability: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None
    nvlink_peers: tuple[str, ...] = ()
    parent: str = ""
    """Of a MIG instance: the UUID of its GPU."""
    is_split: bool = False
    """MIG mode is on: nothing runs on the GPU itself, only on its instances."""
    processes: tuple[DeviceProcess, ...] | None = None
    """Up to PROCESSES_MAX, without those that only draw and hold next to nothing (runtime/accelerators/nvml_child.py);
    None: the driver cannot tell."""
    process_count: int = 0
    """How many it lists, also where that is more than `processes` holds."""
    problems: tuple[str, ...] = ()
    """Why it is not well, in a sentence each: lost, ECC errors, pages to retire, answers that cannot be true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One whole answer of a driver."""

    driver_version: str = ""
    cuda_version: str = ""
    devices: tuple[DeviceReading, ...] = ()
    notes: tuple[str, ...] = ()
    """What it could not tell, and why; for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingFailed:
    """There was no answer that could be used."""

    code: str
    """`no_driver` (there is no library), `failed` (it said why), `hangs` (no answer in time), `crashed` (its process
    ended), `garbage` (an answer that is none)."""
    text: str
    hint: str = ""
