"""Gossip's view of a node, in the words that everything above gossip uses too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId

MemberState: TypeAlias = Literal["alive", "suspect", "dead", "left"]
# Of a death: `daemon`: its host refused us, so it is up and its replicas may be; `silent`: nothing answered at all.
DeathCause: TypeAlias = Literal["daemon", "silent"]

# Flags of a member about itself (Alive.flags), as bits.
SLUGGISH = 1
"""Its supervision does not turn: nothing new may be placed on it."""
RESTARTING = 2
"""Its daemon was told to stop; its replicas go on."""
IMPAIRED = 4
"""It hears or is heard only in part, for long: nothing new may be placed on it."""
TCP_IMPAIRED = 8
"""Datagrams reach it, connections do not."""
DUPLICATE = 16
"""Two live runs claim its id, or two members its address."""
DISK_LOW = 32
"""The disk of its data directory is nearly full: nothing new may be placed on it."""


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One process of a node's daemon. `epoch` rises with every start; `run_id` is 64 bits of chance, so that a copied
    data directory, which has the same node and may have the same epoch, is told apart."""

    node: NodeId
    epoch: int
    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one node holds of another (or of itself) at a moment."""

    run: Run
    incarnation: int
    state: MemberState
    addresses: tuple[Address, ...]
    """Peer addresses, the preferred one first; four at most."""
    flags: int = 0
    cause: DeathCause | None = None
    """Of a dead one."""
    key_ids: tuple[int, ...] = ()
    """Gossip keys that it can open."""
    protocol: tuple[int, int] = (1, 1)
    version: tuple[int, int] = (0, 0)
    """(gc_version, max_version) of its record, as far as announced."""
    heard_at: float = 0.0
    """Instant of the last authenticated packet or frame that came directly from this run; 0.0: never."""
    changed_at: float = 0.0
    """Instant of the last change of state here."""
    doubted_at: float = 0.0
    """Instant at which it was suspected last: of one that is suspect or dead, since when it has not answered at all."""

    @property
    def id(self) -> NodeId:
        return self.run.node
