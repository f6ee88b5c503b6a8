"""What a node has, and what it was told about itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import NodeId
from gpulayer.model.units import MILLI

ACCELERATOR_KINDS: tuple[str, ...] = ("cuda", "rocm", "mps", "cpu")
GpuDetect: TypeAlias = Literal["ok", "none", "error"]
VENDOR_OF_KIND = {"cuda": "nvidia", "rocm": "amd", "mps": "apple", "cpu": "cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device that replicas can hold, whole or in milli-GPU shares."""

    uuid: str
    kind: str
    vendor: str
    model: str
    memory_mib: int
    source: str = "declared"
    """Who says so: `declared` (the configuration file) or `nvml` (NVIDIA's driver)."""
    index: int | None = None
    """The driver's number for it, which is not CUDA's and may change with a reboot; for people, never to choose by."""
    compute_capability: str = ""
    """As `9.0`; empty where nobody said."""
    pci_bus_id: str = ""
    numa_node: int | None = None
    nvlink_peers: tuple[str, ...] = ()
    """UUIDs of the devices of this node that it has a direct NVLink to; sorted."""
    parent: str = ""
    """Of a MIG instance: the UUID of the GPU that it is a part of. The two exclude one another."""
    unhealthy: str = ""
    """Why nothing new may be placed on it; empty when it is well."""
    foreign: str = ""
    """Who else holds some of it: processes that gpulayer did not start, another daemon of this host, a local run."""
    foreign_milli: int = 0
    """How much of it that is: 1000 where it cannot be told apart."""

    def __post_init__(self) -> None:
        if self.kind not in ACCELERATOR_KINDS:
            raise InvalidRequest(
                f"accelerator kind {self.kind!r} is unknown", hint="use one of " + ", ".join(ACCELERATOR_KINDS)
            )
        if not self.uuid or self.memory_mib < 0:
            raise InvalidRequest(
                f"accelerator {self.model!r}: uuid {self.uuid!r}, memory {self.memory_mib} MiB",
                hint="give it a uuid and a memory size",
            )
        if not 0 <= self.foreign_milli <= MILLI or bool(self.foreign) != bool(self.foreign_milli):
            raise InvalidRequest(
                f"accelerator {self.uuid}: {self.foreign_milli} milli-GPUs are held by {self.foreign!r}",
                hint=f"both or neither, up to {MILLI}",
            )

    @property
    def label(self) -> str:
        """What people know it by: `GPU 0 (GPU-ecdd1234)`, which CUDA understands too, else the UUID."""
        if self.index is None:
            return self.uuid
        return f"GPU {self.index} ({_beginning_of(self.uuid)})"

    @property
    def usable_milli(self) -> int:
        """What gpulayer may hand out of it now, held or not."""
        return 0 if self.unhealthy else MILLI - self.foreign_milli


def _beginning_of(uuid: str) -> str:
    """As far as people tell them apart: `GPU-ecdd1234`."""
    return "-".join(uuid.split("-")[:2]) if uuid.startswith(("GPU-", "MIG-")) else uuid


def excluded_by(uuid: str, devices: Iterable[Accelerator]) -> frozenset[str]:
    """Of these devices those that cannot be used beside `uuid`: a GPU and its MIG instances exclude one another."""
    devices = tuple(devices)
    parent = next((device.parent for device in devices if device.uuid == uuid), "")
    related = {device.uuid for device in devices if device.parent == uuid or (parent and device.uuid == parent)}
    return frozenset(related - {uuid})


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """CPUs and the memory that is near to them."""

    id: int
    cpus: str
    """As the kernel lists them: `0-15,32-47`."""
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What plans are made from. `cpus_milli` and `memory_mib` are what replicas may ask for, not what is free."""

    accelerators: tuple[Accelerator, ...] = ()
    cpus_milli: int
    memory_mib: int
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted by key."""
    undetected: tuple[str, ...] = ()
    """What could not be found out, and why; shown to people."""
    gpu_detect: GpuDetect = "none"
    """`ok`: a driver told what there is. `none`: no sign of a GPU. `error`: it could not be asked, see `undetected`."""
    drivers: tuple[tuple[str, str], ...] = ()
    """Versions by name, sorted: `cuda` is the newest CUDA that the driver can serve, `nvidia` the driver itself."""
    disk_mib: int = 0
    """All of the file system that the data directory is on."""
    numa: tuple[NumaNode, ...] = ()
    gpus_excluded: int = 0
    """GPUs that are there and that its configuration takes out: not among `accelerators`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as it was admitted: the registry's entry."""

    id: NodeId
    name: str
    capabilities: Capabilities
    advertise: str
    """The address that its endpoints carry."""
    admitted_at_utc: float
    marks: tuple[str, ...] = field(default=())
