"""The cluster as one node sees it, without asking anybody: what gossip and the nodes' records have told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpulayer.model.address import Address
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.record import Load, NodeFacts, ReplicaRecord

# suspect: may not answer any more. unsupervised: its host is up, its daemon is not (or says that it is restarting).
# silent: nothing of it answers. lost: its replicas were given up. left: by its own will.
NodeState: TypeAlias = Literal["alive", "suspect", "unsupervised", "silent", "lost", "left"]
NODE_STATES: tuple[NodeState, ...] = ("alive", "suspect", "unsupervised", "silent", "lost", "left")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    id: NodeId
    name: str
    state: NodeState
    reason: str = ""
    """Why it is not alive, in a sentence."""
    age_seconds: float
    """How old this is: 0 for oneself; of a living node the time since anything at all was heard from the cluster, of
    any other the time since it was heard itself."""
    facts: NodeFacts | None
    """None while its record is not here yet (or was never)."""
    load: Load | None = None
    replicas: Mapping[AttemptId, ReplicaRecord] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    """sluggish, impaired, tcp_impaired, isolated, restarting, duplicate."""
    is_self: bool = False
    is_voter: bool = False
    epoch: int = 0
    incarnation: int = 0
    peer_address: Address | None = None
    is_stale: bool = False
    """Its record is that of the run before, or none: this run's is not here yet."""
    announced_version: int = 0
    """Of its record, the newest one that was announced and is not here yet; 0: nothing is missing."""

    @property
    def is_verified(self) -> bool:
        """Whether what it says of its endpoints still holds, as far as anybody knows."""
        return self.state in ("alive", "suspect") and not self.is_stale

    @property
    def is_up_to_date(self) -> bool:
        """Whether that is all that it has said, too. A newer word that is on its way may be that an endpoint moved."""
        return self.is_verified and not self.announced_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    seen_by: NodeId
    nodes: Mapping[NodeId, NodeSeen]
    leader: NodeId | None
    """The voter, if it is believed to be there."""
