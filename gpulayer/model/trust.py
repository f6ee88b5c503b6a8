"""What makes a cluster a closed circle: its certificate authority, its gossip keys, its join tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpulayer.model.ids import NodeId, TokenId

# Of a join token.
JOIN_USES_MAX = 1000
JOIN_SECONDS = 3600.0
JOIN_SECONDS_MAX = 30 * 86400.0

Rotation: TypeAlias = Literal["", "installing", "using"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The cluster's CA, made once. Held by voters only, in the log; never shown, never in an API answer."""

    certificate_pem: str
    private_key_pem: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipKey:
    """`id` is derived from the secret (its first four bytes of sha256, big endian), so it needs no agreement."""

    id: int
    secret: bytes = field(repr=False)
    """32 bytes of chance."""
    installed_at_utc: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """The first key seals, all of them open. `version` rises with every change."""

    version: int = 0
    keys: tuple[GossipKey, ...] = ()
    rotation: Rotation = ""
    """`installing`: the newest key is last and nobody seals with it; `using`: it is first, the old one opens still."""
    changed_at_utc: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """Lets `uses_left` more hosts in until it expires. The secret is known only to whoever was given it."""

    id: TokenId
    digest: str
    """sha256 of the secret, hex."""
    uses_left: int
    created_at_utc: float
    expires_at_utc: float
    spent: tuple[tuple[NodeId, str], ...] = ()
    """(node, digest of its public key) of each use."""
