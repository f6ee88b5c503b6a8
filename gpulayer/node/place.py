"""This node's place in its cluster: its half of the log, and the peers that it talks to.

node/daemon.py fills it while it starts. Who asks before gets the answers of a node that is alone and knows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpulayer.core.replica.messages import Order
from gpulayer.model.address import Address
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.record import NodeRecord
from gpulayer.node.following import Following
from gpulayer.node.forward import BulkRequests
from gpulayer.node.mesh import Mesh
from gpulayer.node.voting import Voting
from gpulayer.wire.peer import PeerFrame

# Told to a host that joins: more than enough to meet everybody.
PEERS_TOLD_MAX = 16


class Place:
    """Whoever reads it later finds what is there by then."""

    def __init__(self) -> None:
        self.half: Voting | Following | None = None
        self.mesh: Mesh | None = None
        """None for good on a node that is alone."""
        self.bulk: BulkRequests | None = None

    # --- of its half ----------------------------------------------------------------------------------------------

    @property
    def is_voter(self) -> bool:
        return self.half is None or self.half.is_voter

    @property
    def state(self) -> ClusterState:
        return self.half.state if self.half is not None else ClusterState()

    @property
    def orders(self) -> Mapping[AttemptId, Order]:
        """This node's own."""
        return self.half.orders if self.half is not None else {}

    def is_withdrawn(self, attempt: AttemptId) -> bool:
        return self.half is None or self.half.is_withdrawn(attempt)

    @property
    def followed(self) -> NodeId | None:
        """The voter that this node follows; None where it is one itself."""
        return self.half.voter if isinstance(self.half, Following) else None

    # --- of its peers ---------------------------------------------------------------------------------------------

    def record(self, node: NodeId) -> NodeRecord:
        """What another node says of itself."""
        return self.mesh.record(node) if self.mesh is not None else NodeRecord()

    def send(self, node: NodeId, frame: PeerFrame) -> None:
        if self.mesh is not None:
            self.mesh.send(node, frame)

    def tell_all(self, frame: PeerFrame) -> None:
        if self.mesh is not None:
            self.mesh.tell_all(frame)

    async def answers(self, node: NodeId) -> bool:
        """Whether a run of that node is alive now. Gossip is asked, which asks it every half a second."""
        member = self.mesh.gossip.member(node) if self.mesh is not None else None
        return member is not None and member.state in ("alive", "suspect")

    def peers(self) -> tuple[tuple[NodeId, Address], ...]:
        """Where members are reached, this node first."""
        if self.mesh is None:
            return ()
        own = self.mesh.gossip.own.id
        members = sorted(self.mesh.gossip.members().values(), key=lambda member: member.id != own)
        return tuple(
            (member.id, member.addresses[0]) for member in members if member.state != "left" and member.addresses
        )[:PEERS_TOLD_MAX]

    def keys_held(self) -> Mapping[NodeId, tuple[int, ...]]:
        """Of each member that is not dead or gone: the gossip keys that it can open."""
        if self.mesh is None:
            return {}
        members = self.mesh.gossip.members()
        return {id: member.key_ids for id, member in members.items() if member.state in ("alive", "suspect")}
