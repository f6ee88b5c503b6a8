"""What two daemons say over a peer link, beside gossip: one union, so that a frame is decoded by what it says it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpulayer.core.orders.messages import LeaderToNode, NodeToLeader
from gpulayer.model.address import Address
from gpulayer.model.event import Event
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.node import Capabilities
from gpulayer.model.trust import KeyRing

PROTOCOL = (1, 1)
"""(lowest, highest) version of everything between peers that this gpulayer speaks."""

Use: TypeAlias = Literal["peer", "raft", "bulk", "join"]


# --- first frames -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame in both directions of every link. Its run is believed if the certificate is of that node."""

    use: Use
    protocol: tuple[int, int]
    cluster_id: str
    run: Run
    addresses: tuple[Address, ...]
    datagrams_sent: int = 0
    """Sealed datagrams of this run so far: an older one that arrives after this is a replay."""
    key_ring_version: int = 0
    gpulayer_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The last frame, and why: an end without it is a daemon that was killed."""

    code: str = "idle"
    message: str = ""
    hint: str = ""


# --- joining (use "join": the one link without a client certificate) -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    protocol: tuple[int, int]
    gpulayer_version: str
    node: NodeId
    name: str
    name_is_derived: bool
    advertise: str
    peer_address: Address
    """Where it will be reached by peers; tried from the other side before it is let in."""
    api_names: tuple[str, ...]
    """IP addresses and names for its certificate."""
    capabilities: Capabilities
    public_key_pem: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAccepted:
    cluster_id: str
    node: NodeId
    name: str
    certificate_pem: str
    ca_certificate_pem: str
    key_ring: KeyRing
    voter: NodeId
    peers: tuple[tuple[NodeId, Address], ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRejected:
    """Codes: bad_token, token_expired, token_used_up, duplicate_id, duplicate_name, protocol, unreachable, no_leader,
    refused."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinForwarded:
    """A node that is not the voter passes a JoinRequest on; it is answered by a JoinAccepted or JoinRejected in a
    JoinForwardAnswered. `observed`: the address that the joining host came from."""

    serial: int
    observed: Address
    request: JoinRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinForwardAnswered:
    serial: int
    answer: JoinAccepted | JoinRejected


# --- keys and certificates -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRingWanted:
    """Yours is newer than mine: send it."""

    have: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRingGiven:
    ring: KeyRing


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateWanted:
    """A new certificate for the sender, whose old one runs out or does not name its address. To the voter."""

    public_key_pem: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateGiven:
    certificate_pem: str


# --- gossip ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipFrame:
    """Gossip's messages, as wire/gossip.py packs them."""

    payload: bytes


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsOffered:
    """Up to which of my events do you have them?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsTold:
    """The next of the sender's own events, in order; answered by EventsKept."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsKept:
    """All of yours up to this one."""

    epoch: int
    seq: int


# --- requests that are passed on (use "bulk": one at a time on a link) ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """An API request that another node answers.

    `role`: `admin` came in at a unix socket, `node` is a question of the node's own, `token` is judged where it
    arrives, by the digest of its secret; the secret itself is shown to no node but the first."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    role: str
    token_digest: str = ""
    """sha256 of the token's secret, hex."""
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePart:
    data: bytes
    is_last: bool = False


PeerFrame: TypeAlias = (
    Hello
    | Goodbye
    | JoinRequest
    | JoinAccepted
    | JoinRejected
    | JoinForwarded
    | JoinForwardAnswered
    | KeyRingWanted
    | KeyRingGiven
    | CertificateWanted
    | CertificateGiven
    | GossipFrame
    | EventsOffered
    | EventsTold
    | EventsKept
    | RequestHead
    | ResponseHead
    | ResponsePart
    | NodeToLeader
    | LeaderToNode
)
