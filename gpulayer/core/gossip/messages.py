"""What gossip says to peers (messages), hears (events) and wants done (effects).

Messages are wire format: a new meaning is a new message or a new last field with a default, never a changed one.
wire/gossip.py makes bytes of them. Who sent a message is never one of its fields: that is the authenticated run it came
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpulayer.core.base import Tick
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DeathCause, Member, MemberState, Run

# --- messages: probes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Are you there? `target` and `epoch`: whom I mean; another run at that address does not acknowledge. The headline
    (`incarnation`, `version`) is the sender's own."""

    seq: int
    target: NodeId
    epoch: int
    incarnation: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """`node` of `epoch` is there: the sender itself, or the one that a relay was asked about."""

    seq: int
    node: NodeId
    epoch: int
    incarnation: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PingRequest:
    """Ping it for me. The relay answers with its Ack, or with a Nack at 80 % of the indirect window."""

    seq: int
    target: NodeId
    epoch: int
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """The relay is well and has heard nothing of the target (`refused`: its host refused the relay)."""

    seq: int
    refused: bool = False


# --- messages: rumours ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """What a member says of itself; passed on by all. Only its owner makes one with a higher incarnation or version."""

    run: Run
    incarnation: int
    addresses: tuple[Address, ...]
    gc_version: int = 0
    version: int = 0
    """max_version of its record."""
    flags: int = 0
    key_ids: tuple[int, ...] = ()
    protocol: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """`reporter` got no answer from it, in any way (`timeout`), or its host refused (`refused`)."""

    node: NodeId
    epoch: int
    incarnation: int
    cause: Literal["refused", "timeout"]
    reporter: NodeId
    reporter_health: int = 0
    """The reporter's local health score: from 4 on its word counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A suspicion of it ran out (`silent`), or two members were refused (`daemon`)."""

    node: NodeId
    epoch: int
    incarnation: int
    cause: DeathCause
    reporter: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """It has left by its own will, and says nothing more in that epoch; if it does, another said this of it."""

    node: NodeId
    epoch: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouch:
    """`witness` had an authenticated packet from it after the suspicion began."""

    node: NodeId
    epoch: int
    incarnation: int
    witness: NodeId


# --- messages: records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a record. `value` None: deleted (a tombstone until gc_version passes it)."""

    key: str
    version: int
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Entries with versions in (from_version, to_version], in version order, all of them that are still current.

    `reset`: forget what you hold of this run first (a new run, or your copy is older than gc_version); from_version is
    0 then. A receiver that is not at `from_version` or above cannot apply it, and pulls."""

    node: NodeId
    epoch: int
    gc_version: int
    from_version: int
    to_version: int
    entries: tuple[Entry, ...] = ()
    reset: bool = False
    max_version: int = 0
    """What the sender has in all; above to_version where there is more to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer:
    """The record of this run is at (gc_version, version): what an Alive says of it too, at a quarter of the bytes."""

    node: NodeId
    epoch: int
    gc_version: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Send me what you have of this node's record above `have` (gc_version, max_version; (0, 0): nothing)."""

    node: NodeId
    epoch: int
    have: tuple[int, int]


# --- messages: anti-entropy (over links only) -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Digest:
    """One member in a table sync."""

    node: NodeId
    epoch: int
    incarnation: int
    state: MemberState
    gc_version: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBuckets:
    """Opens a sync: one hash (64 bits) for each of the buckets that members fall into by their id."""

    seq: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncDigests:
    """Members of the buckets that differ. The receiver answers with what it knows better (SyncMembers and Deltas) and,
    unless `is_answer`, with digests of its own for the same buckets."""

    seq: int
    buckets: tuple[int, ...]
    digests: tuple[Digest, ...]
    is_answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMembers:
    """Whole members: the newest Alive of each with its state. A merge is no probe: a dead one becomes a suspicion at
    the receiver, and confirms nothing."""

    members: tuple[tuple[Alive, MemberState, DeathCause | None], ...]


Rumour: TypeAlias = Alive | Suspect | Dead | Left | Vouch | Delta | Newer
Message: TypeAlias = Ping | Ack | PingRequest | Nack | Rumour | Pull | SyncBuckets | SyncDigests | SyncMembers


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Messages of one packet or frame, authenticated, fresh (no replay) and decoded. `at`: where a datagram came from;
    None for a link."""

    source: Run
    messages: tuple[Message, ...]
    at: Address | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """A peer link stands, both ends shown by certificate. `is_ours`: opened from here."""

    run: Run
    addresses: tuple[Address, ...]
    is_ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """A link has ended, or could not be opened. `node` None: it was a Contact to an address alone."""

    node: NodeId | None
    address: Address | None
    why: Literal["refused", "timeout", "closed", "failed", "goodbye"]
    """`refused`: its host answered that nobody listens; `closed`: the other end broke off without a goodbye."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatagramRefused:
    """The network says that nobody listens where a datagram was sent (port unreachable)."""

    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """This host could not send to it at all (no route, no buffer, not permitted)."""

    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOwn:
    """Keys of our own record; None deletes. Setting what is there already changes nothing."""

    values: dict[str, bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSelf:
    """What we say of ourselves. None leaves a field as it is."""

    addresses: tuple[Address, ...] | None = None
    flags_on: int = 0
    flags_off: int = 0
    key_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRegistry:
    """Who may exist, as was agreed; None: not known here yet, links decide. `parting`: let go a moment ago; of these
    the run that is known here is heard still, for its last words, and no later one."""

    nodes: frozenset[NodeId] | None
    parting: frozenset[NodeId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLeader:
    """To whom our record goes at once, over a link that is kept."""

    node: NodeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSeeds:
    """Addresses to try while we are alone, and those of remembered peers; resolved anew by the shell each time."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """The whole machine slept for so long (monotonic time stood still)."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWanted:
    """Announce LEFT; answered by Departed."""


GossipEvent: TypeAlias = (
    Received
    | LinkUp
    | LinkDown
    | DatagramRefused
    | SendFailed
    | SetOwn
    | SetSelf
    | SetRegistry
    | SetLeader
    | SetSeeds
    | Suspended
    | LeaveWanted
    | Tick
)


# --- effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDatagram:
    """One packet; what is in it fits. `to` tells whose keys it is for."""

    to: NodeId
    address: Address
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFrame:
    """Over the link to `to`, which is opened if there is none. `urgent`: a probe; says LinkDown if it cannot be."""

    to: NodeId
    addresses: tuple[Address, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Open a link to whoever of the cluster is at this address; ends in LinkUp or LinkDown."""

    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLink:
    """No longer needed."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChanged:
    """`before` None: it is new (joined)."""

    before: Member | None
    after: Member
    text: str
    """Why, for its history and the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberForgotten:
    """Its tombstone is over."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChanged:
    """Keys of a node's record that changed or went away here; `is_complete`: all that was announced is here."""

    node: NodeId
    keys: tuple[str, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """LEFT was announced: to so many that have acknowledged it."""

    acknowledged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something a person should know: a stable code and a sentence."""

    code: str
    text: str


GossipEffect: TypeAlias = (
    SendDatagram | SendFrame | Contact | CloseLink | MemberChanged | MemberForgotten | RecordChanged | Departed | Warned
)
