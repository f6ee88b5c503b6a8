"""The part of a node that holds the log: the voter, what it owes the cluster as its leader, and whom it lets in.

Every node of a cluster has this half or the other one, node/following.py; node/place.py holds either. Until
consensus is there a cluster has one voter, its first node.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
import trio

from gpulayer.core.cluster.applied import Accepted
from gpulayer.core.cluster.commands import AdmitNode, Command, CreateCluster, FoundTrust, RetireKey, UseKey
from gpulayer.core.leader import Leader, LeaderEvent, NodeSaid, PlaceableChanged, ProposalFailed, Propose, StateAdvanced
from gpulayer.core.orders.changes import order_changes, orders_of
from gpulayer.core.orders.messages import OrdersAsked, OrdersHeard, Reported
from gpulayer.core.replica.messages import Order
from gpulayer.model.address import Address
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import GpulayerError
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.record import NodeFacts
from gpulayer.model.units import Duration
from gpulayer.node.admission import Admission
from gpulayer.node.orders import LogReport, OrdersGiven
from gpulayer.node.voter import Proposal, SoleVoter
from gpulayer.runtime import trust
from gpulayer.runtime.drive import Inbox, drive
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.peer import (
    CertificateGiven,
    CertificateWanted,
    JoinAccepted,
    JoinForwardAnswered,
    JoinForwarded,
    JoinRejected,
    JoinRequest,
    KeyRingGiven,
    PeerFrame,
)

log = structlog.get_logger()

# A key that was replaced opens what was sealed with it for another day: for nodes that are away, and slow to hear.
OLD_KEY_SECONDS = 24 * 3600.0
ROTATION_LOOKS_SECONDS = 1.0
# As many as one node passes on at a time; of all of them, a few are judged at once (Admission).
FORWARDED_MAX = 64
_BUSY = JoinRejected(code="no_leader", message=f"{FORWARDED_MAX} hosts are joining", hint="it is tried again")
_STARTING = JoinRejected(code="no_leader", message="this node is starting", hint="try again in a second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a voter asks of the rest of its node. None of it waits, but `answers`."""

    orders: Callable[[tuple[Order, ...]], None]
    """For the agent, whenever they change."""
    changed: Callable[[], None]
    """There is a newer state."""
    placeable: Callable[[], Mapping[NodeId, str]]
    send: Callable[[NodeId, PeerFrame], None]
    tell_all: Callable[[PeerFrame], None]
    answers: Callable[[NodeId], Awaitable[bool]]
    """Whether a run of that node is alive now, asked and not remembered."""
    peers: Callable[[], tuple[tuple[NodeId, Address], ...]]
    """Where members are reached, this node first."""
    keys_held: Callable[[], Mapping[NodeId, tuple[int, ...]]]
    """Of each member that is not dead or gone: the gossip keys that it can open."""


class Voting:
    is_voter = True

    def __init__(self, voter: SoleVoter, *, node: NodeId, observed_seconds: float, outside: Outside) -> None:
        self.voter = voter
        self._node = node
        self._outside = outside
        self._leader = Leader(log_end=voter.state.value.index, observed_interval=Duration(observed_seconds))
        self._leader_inbox: Inbox[LeaderEvent] = Inbox()
        self._given = OrdersGiven(send=outside.send, propose=voter.propose_nowait, state=lambda: self.voter.state.value)
        self._orders: Mapping[AttemptId, Order] = {}
        self._admission: Admission | None = None
        self._forwarded = 0
        """Requests to join that other nodes have passed on, under way."""
        self._plan_trouble = ""
        """Why plans are not committed now: said once, not with every try."""
        self._nursery: trio.Nursery | None = None

    # --- what is known --------------------------------------------------------------------------------------------

    @property
    def state(self) -> ClusterState:
        return self.voter.state.value

    @property
    def orders(self) -> Mapping[AttemptId, Order]:
        """This node's own."""
        return self._orders

    def is_withdrawn(self, attempt: AttemptId) -> bool:
        """Whether nothing of it is wanted here any more."""
        job = self.state.jobs.get(attempt.replica.job)
        assignment = job.replicas[attempt.replica.index].assignment if job is not None else None
        return assignment is None or assignment.attempt != attempt.attempt or assignment.withdrawn is not None

    @property
    def trouble(self) -> str:
        """Why nothing can be written into the log; empty while it can."""
        if self.voter.failed is not None:
            return "its storage failed, and a placement has to be written down"
        if self.voter.store.disk_low:
            return "its disk is nearly full, and a placement has to be written down"
        return ""

    # --- what it is told ------------------------------------------------------------------------------------------

    async def propose(self, command: Command) -> Accepted:
        return await self.voter.propose(command)

    def report_nowait(self, report: LogReport) -> Proposal:
        return self.voter.propose_nowait(report)

    def node_said(
        self, node: NodeId, facts: NodeFacts | None, attempts: frozenset[AttemptId], *, is_heard: bool
    ) -> None:
        """What a node says of itself, this one included, and whether it is alive."""
        self._leader_inbox.put_nowait(NodeSaid(node=node, facts=facts, attempts=attempts, is_heard=is_heard))

    def placeable_changed(self) -> None:
        self._leader_inbox.put_nowait(PlaceableChanged(placeable=self._outside.placeable()))

    def link(self, node: NodeId, is_up: bool) -> None:
        if not is_up:
            self._given.node_gone(node)

    def from_peer(self, node: NodeId, frame: PeerFrame) -> bool:
        """One frame of a node, whom its certificate has shown; whether it was for this half."""
        match frame:
            case OrdersAsked() | OrdersHeard() | Reported():
                self._given.from_node(node, frame)
            case JoinForwarded():
                if self._nursery is None or self._forwarded >= FORWARDED_MAX:
                    answer = _STARTING if self._nursery is None else _BUSY
                    self._outside.send(node, JoinForwardAnswered(serial=frame.serial, answer=answer))
                else:
                    self._forwarded += 1
                    self._nursery.start_soon(self._forwarded_join, node, frame)
            case CertificateWanted():
                self._certify(node, frame)
            case _:
                return False
        return True

    # --- life -----------------------------------------------------------------------------------------------------

    async def run_log(self) -> None:
        await self.voter.run()

    async def found(self, wanted: AdmitNode, *, closes_the_circle: bool) -> None:
        """What the log begins with: the cluster, its authority and first key, this node."""
        if not self.state.cluster_id:
            await self.propose(CreateCluster(cluster_id="c-" + secrets.token_hex(8)))
        if closes_the_circle and self.state.authority is None:
            key = trust.new_gossip_key(secrets.token_bytes(32), self.state.time_utc)
            await self.propose(FoundTrust(authority=trust.new_authority(self.state.cluster_id), key=key))
        known = self.state.nodes.get(wanted.node)
        if known is None or (known.name, known.advertise, known.capabilities) != (
            wanted.name,
            wanted.advertise,
            wanted.capabilities,
        ):
            await self.propose(wanted)

    def certify_self(self, files: TrustFiles, names: tuple[str, ...]) -> None:
        """Its own certificate, where there is none yet or it does not do any more. StorageFailed."""
        authority = self.state.authority
        assert authority is not None
        if files.exist:
            held = files.read(self._node, may_be_expired=True)
            is_ours = held.ca_certificate_pem == authority.certificate_pem
            if is_ours and not trust.needs_renewal(held.certificate_pem, names):
                if held.key_ring.version < self.state.key_ring.version:
                    files.write_key_ring(self.state.key_ring)
                return
        keys = trust.new_key_pair()
        files.write(
            certificate_pem=trust.issue(authority, self._node, self.state.cluster_id, keys.public_pem, names),
            private_key_pem=keys.private_pem,
            ca_certificate_pem=authority.certificate_pem,
            key_ring=self.state.key_ring,
        )

    def first_orders(self) -> tuple[Order, ...]:
        """As they are at the start."""
        orders = orders_of(self.state, self._node)
        self._orders = {order.assignment.id: order for order in orders}
        return orders

    async def run(self, admission: Admission | None) -> None:
        """For good, once the log runs and what this node's sandboxes hold is known."""
        self._admission = admission
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(drive, self._leader, self._leader_inbox, self._perform)
            self._nursery.start_soon(self._given.run)
            self._nursery.start_soon(self._follow_state)
            self._given.led(self.voter.term)
            self.placeable_changed()
            await self._look_after_keys()

    async def _follow_state(self) -> None:
        """A new state goes to whoever works from it: the leader's plans, the nodes' orders, the readers."""
        seen: ClusterState | None = None
        while True:
            state = await self.voter.state.wait_for(lambda value, seen=seen: value is not seen)  # type: ignore[misc]
            ring_is_new = seen is not None and seen.key_ring.version != state.key_ring.version
            before, seen = seen, state
            self._leader_inbox.put_nowait(StateAdvanced(state=state))
            self._given.advanced(state)
            self._take_orders(before, state)
            self._outside.changed()
            if ring_is_new:
                self._outside.tell_all(KeyRingGiven(ring=state.key_ring))

    def _take_orders(self, before: ClusterState | None, state: ClusterState) -> None:
        """What has changed of this node's own goes to the agent. `before`: None at the start."""
        if before is None:
            orders = {order.assignment.id: order for order in orders_of(state, self._node)}
        elif (changes := order_changes(before, state).get(self._node)) is not None:
            kept = {attempt: order for attempt, order in self._orders.items() if attempt not in changes.gone}
            orders = kept | changes.changed
        else:
            return
        if orders != self._orders:
            self._orders = orders
            self._outside.orders(tuple(orders.values()))

    # --- plans ----------------------------------------------------------------------------------------------------

    def _perform(self, effect: Propose) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._plan_answered, self.voter.propose_nowait(effect.command))

    async def _plan_answered(self, proposal: Proposal) -> None:
        try:
            await proposal.wait()
            self._plan_trouble = ""
        except GpulayerError as error:
            if self.voter.failed is None:
                if error.code != self._plan_trouble:
                    log.warning("plan.not_committed", reason=error.message)
                self._plan_trouble = error.code
            else:
                # For good, and said already: nothing can be placed any more.
                self.placeable_changed()
            self._leader_inbox.put_nowait(ProposalFailed(command=proposal.command))

    # --- who is let in --------------------------------------------------------------------------------------------

    async def admit(self, request: JoinRequest, observed: Address) -> JoinAccepted | JoinRejected:
        if self._admission is None:
            return _STARTING
        return await self._admission.admit(request, observed)

    async def _forwarded_join(self, node: NodeId, frame: JoinForwarded) -> None:
        try:
            answer = await self.admit(frame.request, frame.observed)
        finally:
            self._forwarded -= 1
        self._outside.send(node, JoinForwardAnswered(serial=frame.serial, answer=answer))

    def _certify(self, node: NodeId, wanted: CertificateWanted) -> None:
        """A member's new certificate, for the names that are its own."""
        state = self.state
        if node not in state.nodes or state.authority is None:
            return
        others = {name for other in state.nodes.values() if other.id != node for name in (other.name, other.advertise)}
        try:
            names = tuple(name for name in trust.checked_names(wanted.names) if name not in others)
            pem = trust.issue(state.authority, node, state.cluster_id, wanted.public_key_pem, names)
        except GpulayerError as error:
            log.warning("certificate.refused", node=node, reason=error.message)
            return
        log.info("certificate.issued", node=node, names=names)
        self._outside.send(node, CertificateGiven(certificate_pem=pem))

    # --- gossip keys ----------------------------------------------------------------------------------------------

    async def _look_after_keys(self) -> None:
        """The steps of a rotation that a person has begun (`gpulayer cluster rotate-keys`)."""
        while True:
            await self.voter.state.wait_for(lambda state: bool(state.key_ring.rotation))
            command = self._next_step()
            if command is not None:
                try:
                    await self.propose(command)
                except GpulayerError as error:
                    log.warning("keys.not_rotated", reason=error.message)
            await trio.sleep(ROTATION_LOOKS_SECONDS)

    def _next_step(self) -> Command | None:
        ring = self.state.key_ring
        if ring.rotation == "installing":
            newest = ring.keys[-1].id
            lacking = [node for node, keys in self._outside.keys_held().items() if newest not in keys]
            return UseKey(key_id=newest) if not lacking else None
        if ring.rotation == "using" and self.voter.now_utc() >= ring.changed_at_utc + OLD_KEY_SECONDS:
            return RetireKey(key_id=ring.keys[-1].id)
        return None
