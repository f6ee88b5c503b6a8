"""What a node has, and what it was told about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import NodeId

ACCELERATOR_KINDS: tuple[str, ...] = ("cuda", "rocm", "mps", "cpu")
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
    """Who says so: `declared` (the configuration file) or the name of a driver's inventory."""
    unhealthy: str = ""
    """Why nothing new may be placed on it; empty when it is well."""

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
