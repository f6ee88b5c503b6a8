"""Who is let in: the voter's side of joining.py. One request, one commit, one certificate.

Until the token has been found good nothing is done for whoever asks: nobody can make a node connect somewhere, or wait.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address

import structlog
import trio

from gpulayer.core.cluster.applied import Accepted, Rejected
from gpulayer.core.cluster.commands import Command, JoinNode
from gpulayer.core.cluster.registry import join_node
from gpulayer.model.address import Address
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import GpulayerError, InvalidRequest, StorageFailed, Unreachable
from gpulayer.model.ids import NODE_ID_PATTERN, NodeId
from gpulayer.runtime import trust
from gpulayer.wire.join_token import parse_join_token
from gpulayer.wire.peer import PROTOCOL, JoinAccepted, JoinRejected, JoinRequest

log = structlog.get_logger()

REACH_SECONDS = 2.0
AT_A_TIME_MAX = 16
# No route to there from here, no matter how long is waited. (EHOSTUNREACH may be a host that is slow to answer ARP.)
_UNROUTABLE = frozenset({errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the voter needs to let somebody in."""

    voter: NodeId
    voter_name: str
    advertise: str
    """The voter's own address."""
    state: Callable[[], ClusterState]
    propose: Callable[[Command], Awaitable[Accepted]]
    """Raises the error that fits a Rejected, or StorageFailed."""
    answers: Callable[[NodeId], Awaitable[bool]]
    """Whether a run of this node is alive now, asked and not remembered."""
    peers: Callable[[], tuple[tuple[NodeId, Address], ...]]
    """Where the members are reached, the voter first."""
    limiter: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(AT_A_TIME_MAX))

    async def admit(self, request: JoinRequest, observed: Address) -> JoinAccepted | JoinRejected:
        """`observed`: where the request came from. Never raises for what a joiner may have got wrong."""
        async with self.limiter:
            try:
                answer = await self._judge(request, observed)
            except (StorageFailed, Unreachable) as error:
                answer = JoinRejected(code="no_leader", message=error.message, hint=error.hint)
            except GpulayerError as error:
                code = error.code if error.code in _CODES else "refused"
                answer = JoinRejected(code=code, message=error.message, hint=error.hint)
        if isinstance(answer, JoinRejected):
            log.warning(
                "join.rejected", node=request.node, name=request.name, observed=str(observed), code=answer.code,
                reason=answer.message,
            )  # fmt: skip
        else:
            log.info("join.accepted", node=request.node, name=answer.name, observed=str(observed))
        return answer

    async def _judge(self, request: JoinRequest, observed: Address) -> JoinAccepted | JoinRejected:
        if request.protocol[0] > PROTOCOL[1] or request.protocol[1] < PROTOCOL[0]:
            return _another_protocol(request)
        command = _command(request)
        foreseen = join_node(self.state(), command).result
        if isinstance(foreseen, Rejected):
            return _of(foreseen)
        certificate_pem = self._certificate(request, foreseen.name)
        if request.node in self.state().nodes and await self.answers(request.node):
            return _cloned(request, self.state().nodes[request.node].name)
        namesake = await self._live_at(request)
        if namesake is not None:
            return namesake
        trouble, is_final = await self._trouble_reaching(request, observed)
        if is_final:
            return JoinRejected(
                code="unreachable",
                message=trouble,
                hint="start it with --bind, and with --advertise ADDRESS, one that the other nodes reach it at",
            )
        accepted = await self.propose(command)
        state = self.state()
        assert state.authority is not None
        return JoinAccepted(
            cluster_id=state.cluster_id,
            node=request.node,
            name=accepted.name,
            certificate_pem=certificate_pem,
            ca_certificate_pem=state.authority.certificate_pem,
            key_ring=state.key_ring,
            voter=self.voter,
            peers=self.peers(),
            warnings=(trouble,) if trouble else (),
        )

    def _certificate(self, request: JoinRequest, name: str) -> str:
        """Made before anything is committed: a use is not spent on a key that is none. InvalidRequest.

        It names the node as it will be called. What other nodes are called by is left out of it: clients would take the
        one for the other. Its own address may be another's too, who listens on another port of one host."""
        state = self.state()
        assert state.authority is not None, "a join token without an authority"
        others = [node for node in state.nodes.values() if node.id != request.node]
        taken = {node.name for node in others} | {node.advertise for node in others}
        names = trust.checked_names((*request.api_names, request.advertise))
        wanted = dict.fromkeys((request.advertise, name, *(each for each in names if each not in taken)))
        return trust.issue(
            state.authority, request.node, state.cluster_id, request.public_key_pem, trust.checked_names(tuple(wanted))
        )

    async def _live_at(self, request: JoinRequest) -> JoinRejected | None:
        """A refusal, where another member answers at its address."""
        for node, address in self.peers():
            if node != request.node and address == request.peer_address and await self.answers(node):
                known = self.state().nodes.get(node)
                return JoinRejected(
                    code="refused",
                    message=f"{address} is where {known.name if known else node} is reached, and it answers there",
                    hint="give this node an address of its own with --advertise, or another --peer-port",
                )
        return None

    async def _trouble_reaching(self, request: JoinRequest, observed: Address) -> tuple[str, bool]:
        """A sentence where its peer port does not answer from here, and whether it never will."""
        there = request.peer_address
        is_on_one_host = all(map(_is_loopback, (there.host, observed.host, self.advertise)))
        if not there.is_usable_elsewhere and not is_on_one_host:
            return f"no other host can reach {there}, which it advertises", True
        reason, is_final = await _refusal_to_connect(there)
        return (f"{self.voter_name} cannot reach {there}: {reason}" if reason else ""), is_final


_CODES = frozenset(
    {
        *("bad_token", "token_expired", "token_used_up", "duplicate_id", "duplicate_name"),
        *("protocol", "unreachable", "no_leader", "refused"),
    }
)


def _command(request: JoinRequest) -> JoinNode:
    """InvalidRequest for what makes no sense; a text that is no token has the code of one that nobody knows."""
    if not NODE_ID_PATTERN.fullmatch(request.node):  # gossip has no room for any other
        raise InvalidRequest(f"{request.node!r:.100} is not the id of a node", hint="is this a gpulayer?")
    for host in (request.advertise, request.peer_address.host):
        if _address(host) is None:
            raise InvalidRequest(f"{host!r:.100} is not an IP address", hint="name one with --advertise")
    if not 1 <= request.peer_address.port <= 65535:
        raise InvalidRequest(f"{request.peer_address.port} is not a port", hint="--peer-port says which one")
    try:
        token = parse_join_token(request.token)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, hint=error.hint, code="bad_token") from None
    return JoinNode(
        node=request.node,
        name=request.name,
        name_is_derived=request.name_is_derived,
        advertise=str(ip_address(request.advertise)),
        capabilities=request.capabilities,
        token_digest=token.digest,
        key_digest=sha256(request.public_key_pem.encode()).hexdigest(),
    )


def _of(refused: Rejected) -> JoinRejected:
    code = refused.code if refused.code in _CODES else "refused"
    return JoinRejected(code=code, message=refused.message, hint=refused.hint)


def _another_protocol(request: JoinRequest) -> JoinRejected:
    low, high = request.protocol
    return JoinRejected(
        code="protocol",
        message=f"gpulayer {request.gpulayer_version} speaks protocol {low} to {high} with other nodes, this cluster "
        f"{PROTOCOL[0]} to {PROTOCOL[1]}",
        hint="install the version of the cluster's nodes: gpulayer --version tells it",
    )


def _cloned(request: JoinRequest, name: str) -> JoinRejected:
    return JoinRejected(
        code="duplicate_id",
        message=f"node {request.node} is a member under the name {name}, and it is alive",
        hint="this data directory is a copy of its one, as in a cloned disk image: start here with --abandon-state, "
        "and make images without a data directory",
    )


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Without a scope, which means nothing on another host."""
    try:
        return ip_address(text) if "%" not in text else None
    except ValueError:
        return None


def _is_loopback(text: str) -> bool:
    address = _address(text)
    return address is not None and address.is_loopback


async def _refusal_to_connect(there: Address) -> tuple[str, bool]:
    """Why a connection is not possible, if it is not, and whether that is for good."""
    family = socket.AF_INET6 if ":" in there.host else socket.AF_INET
    try:
        with trio.fail_after(REACH_SECONDS), trio.socket.socket(family, socket.SOCK_STREAM) as sock:
            await sock.connect((there.host, there.port))
    except trio.TooSlowError:
        return f"no answer within {REACH_SECONDS:g} s; is a firewall between them?", False
    except OSError as error:
        return error.strerror or str(error), error.errno in _UNROUTABLE
    return "", False
