"""A node's observed state: what gossip carries about it. Its node is the only writer; everybody has a copy.

A record is a small map from key to value, each value with the version at which its owner set it. The keys:

    node            NodeFacts
    load            Load
    r/<attempt>     ReplicaRecord, one for each attempt that its daemon knows
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpulayer.model.address import Address
from gpulayer.model.ids import AttemptId
from gpulayer.model.node import Capabilities
from gpulayer.model.replica import DeviceShare, ReplicaStatus

NODE_KEY = "node"
LOAD_KEY = "load"
REPLICA_KEYS = "r/"
# Above these the owner is told; nothing is cut silently.
RECORD_BYTES_MAX = 256 * 1024
RECORDS_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What changes rarely."""

    name: str
    advertise: str
    """The address that its endpoints carry."""
    capabilities: Capabilities
    api: Address | None = None
    """Where its API is reached from other hosts; None where it is not."""
    gpulayer_version: str = ""
    is_voter: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """In steps of 10 %, so that it is not told with every tremor."""

    cpu_percent: int = 0
    memory_percent: int = 0
    disk_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """One attempt, with what is needed to find it and to count what it holds without the log."""

    status: ReplicaStatus
    job_name: str
    kind: str
    """`service` or `batch`."""
    revision: int = 1
    devices: tuple[DeviceShare, ...] = ()
    cpus_milli: int = 0
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A whole record, read."""

    facts: NodeFacts | None = None
    """None until the owner's first complete copy is here."""
    load: Load | None = None
    replicas: dict[AttemptId, ReplicaRecord] = field(default_factory=dict)
