"""Who is let in, and what keeps others out: the cluster's authority, its gossip keys and their rotation, its tokens.

A secret never stands in an event or in a refusal: ids, roles and numbers do.
"""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import sha256

from gpulayer.core.cluster.applied import Accepted, Applied, counted, event_of, rejected
from gpulayer.core.cluster.commands import (
    CreateJoinToken,
    CreateToken,
    FoundTrust,
    InstallKey,
    RetireKey,
    RevokeToken,
    UseKey,
)
from gpulayer.model.cluster import ROLES, ClusterState, Token
from gpulayer.model.ids import TokenId
from gpulayer.model.trust import JOIN_SECONDS_MAX, JOIN_USES_MAX, GossipKey, JoinToken, KeyRing, Rotation
from gpulayer.model.units import format_duration

KEY_BYTES = 32


def key_id(secret: bytes) -> int:
    """The id of the gossip key with this secret."""
    return int.from_bytes(sha256(secret).digest()[:4], "big")


def shown_key(id: int) -> str:
    """As people are told of a key: `1a2b3c4d`."""
    return f"{id:08x}"


# --- the authority and the key ring ---------------------------------------------------------------------------------


def found_trust(state: ClusterState, command: FoundTrust) -> Applied:
    if state.authority is not None:
        return rejected(state, "refused", "this cluster has its certificate authority already")
    if not command.authority.certificate_pem or not command.authority.private_key_pem:
        return rejected(state, "invalid_request", "a certificate authority needs a certificate and its key")
    wrong = _wrong_with(command.key)
    if wrong:
        return rejected(state, "invalid_request", wrong)
    key = replace(command.key, installed_at_utc=state.time_utc)
    ring = KeyRing(version=1, keys=(key,), changed_at_utc=state.time_utc)
    founded = replace(state, authority=command.authority, key_ring=ring)
    text = f"the cluster has a certificate authority; gossip is sealed with key {shown_key(key.id)}"
    event = event_of(founded, "trust.founded", text, data=(("key", shown_key(key.id)),))
    return Applied(state=founded, result=Accepted(), events=(event,))


def install_key(state: ClusterState, command: InstallKey) -> Applied:
    ring = state.key_ring
    if state.authority is None:
        return rejected(state, "refused", "this cluster has no gossip key to be replaced", "start its daemon again")
    if ring.rotation:
        step = "is being given to every node" if ring.rotation == "installing" else "is in use, the old one opens still"
        newest = ring.keys[-1 if ring.rotation == "installing" else 0]
        return rejected(
            state,
            "refused",
            f"a rotation goes on since {format_duration(max(0.0, state.time_utc - ring.changed_at_utc))}: "
            f"key {shown_key(newest.id)} {step}",
            "gpulayer cluster status tells how far it is",
        )
    wrong = _wrong_with(command.key)
    if wrong:
        return rejected(state, "invalid_request", wrong)
    if any(key.id == command.key.id for key in ring.keys):
        return rejected(state, "refused", f"key {shown_key(command.key.id)} is in the ring already", "make another one")
    key = replace(command.key, installed_at_utc=state.time_utc)
    text = f"gossip key {shown_key(key.id)} is given to every node; it is used once all that are alive have it"
    return _turned(state, (*ring.keys, key), "installing", "key.installed", text, key.id)


def use_key(state: ClusterState, command: UseKey) -> Applied:
    ring = state.key_ring
    if ring.keys and ring.keys[0].id == command.key_id:
        return Applied(state=state, result=Accepted())
    if ring.rotation != "installing" or ring.keys[-1].id != command.key_id:
        return rejected(state, "refused", f"key {shown_key(command.key_id)} was not installed", "install it first")
    text = f"gossip is sealed with key {shown_key(command.key_id)}; the old one opens still"
    return _turned(state, (ring.keys[-1], *ring.keys[:-1]), "using", "key.used", text, command.key_id)


def retire_key(state: ClusterState, command: RetireKey) -> Applied:
    ring = state.key_ring
    if all(key.id != command.key_id for key in ring.keys):
        return Applied(state=state, result=Accepted())
    if ring.rotation != "using" or ring.keys[0].id == command.key_id:
        return rejected(
            state,
            "refused",
            f"key {shown_key(command.key_id)} cannot be retired: "
            + ("it is the one in use" if ring.keys[0].id == command.key_id else "it is not in use yet"),
            "use another key first",
        )
    left = tuple(key for key in ring.keys if key.id != command.key_id)
    text = f"gossip key {shown_key(command.key_id)} opens nothing any more"
    return _turned(state, left, "using" if len(left) > 1 else "", "key.retired", text, command.key_id)


def _turned(
    state: ClusterState, keys: tuple[GossipKey, ...], rotation: Rotation, kind: str, text: str, key: int
) -> Applied:
    ring = replace(
        state.key_ring,
        version=state.key_ring.version + 1,
        keys=keys,
        rotation=rotation,
        changed_at_utc=state.time_utc,
    )
    turned = replace(state, key_ring=ring)
    event = event_of(turned, kind, text, data=(("key", shown_key(key)), ("version", str(ring.version))))
    return Applied(state=turned, result=Accepted(), events=(event,))


def _wrong_with(key: GossipKey) -> str:
    if len(key.secret) != KEY_BYTES:
        return f"a gossip key has {KEY_BYTES} bytes, not {len(key.secret)}"
    if key.id != key_id(key.secret):
        return f"key {shown_key(key.id)} is not the id that its secret gives"
    return ""


# --- tokens -----------------------------------------------------------------------------------------------------------


def create_token(state: ClusterState, command: CreateToken) -> Applied:
    if command.role not in ROLES:
        return rejected(state, "invalid_request", f"role {command.role!r} is unknown", "use " + ", ".join(ROLES))
    wrong = _wrong_with_token(state, command.token, command.digest)
    if wrong is not None:
        return wrong
    token = Token(
        id=command.token,
        role=command.role,
        digest=command.digest,
        label=command.label,
        created_at_utc=state.time_utc,
    )
    created = replace(state, tokens={**state.tokens, token.id: token})
    label = f" ({token.label})" if token.label else ""
    event = event_of(created, "token.created", f"token {token.id}{label} with role {token.role} created")
    return Applied(state=created, result=Accepted(), events=(event,))


def create_join_token(state: ClusterState, command: CreateJoinToken) -> Applied:
    if state.authority is None:
        return rejected(
            state, "refused", "this cluster has no certificate authority, so nobody can join", "start its daemon again"
        )
    if not 1 <= command.uses <= JOIN_USES_MAX:
        return rejected(
            state,
            "invalid_request",
            f"{command.uses} uses are not between 1 and {JOIN_USES_MAX}",
            "--uses says how many",
        )
    lasts = command.expires_at_utc - state.time_utc
    if not (math.isfinite(lasts) and 0 < lasts <= JOIN_SECONDS_MAX):
        return rejected(
            state,
            "invalid_request",
            "a join token is good for some time, and for 30 days at most",
            "say for how long, as in --for 1h",
        )
    wrong = _wrong_with_token(state, command.token, command.digest)
    if wrong is not None:
        return wrong
    token = JoinToken(
        id=command.token,
        digest=command.digest,
        uses_left=command.uses,
        created_at_utc=state.time_utc,
        expires_at_utc=command.expires_at_utc,
    )
    created = replace(state, join_tokens={**state.join_tokens, token.id: token})
    text = f"join token {token.id} created: lets {counted(token.uses_left, 'host')} in within {format_duration(lasts)}"
    return Applied(state=created, result=Accepted(), events=(event_of(created, "join_token.created", text),))


def revoke_token(state: ClusterState, command: RevokeToken) -> Applied:
    if command.token in state.tokens:
        tokens = {id: token for id, token in state.tokens.items() if id != command.token}
        revoked = replace(state, tokens=tokens)
        event = event_of(revoked, "token.revoked", f"token {command.token} revoked")
        return Applied(state=revoked, result=Accepted(), events=(event,))
    if command.token in state.join_tokens:
        join_tokens = {id: token for id, token in state.join_tokens.items() if id != command.token}
        revoked = replace(state, join_tokens=join_tokens)
        event = event_of(revoked, "join_token.revoked", f"join token {command.token} revoked: it lets nobody in")
        return Applied(state=revoked, result=Accepted(), events=(event,))
    return rejected(state, "not_found", f"there is no token {command.token}", "see gpulayer token list")


def _wrong_with_token(state: ClusterState, id: TokenId, digest: str) -> Applied | None:
    if not id or not digest:
        return rejected(state, "invalid_request", "a token needs an id and a digest")
    if id in state.tokens or id in state.join_tokens:
        return rejected(state, "refused", f"token id {id} is in use", "create it again")
    return None


# --- what must hold -------------------------------------------------------------------------------------------------


def check_trust(state: ClusterState) -> None:
    """Asserts what every state must hold of keys and tokens."""
    ring = state.key_ring
    assert (state.authority is None) == (not ring.keys), "an authority without a gossip key, or the reverse"
    assert (ring.version > 0) == bool(ring.keys), f"key ring version {ring.version} with {len(ring.keys)} keys"
    ids = [key.id for key in ring.keys]
    assert len(set(ids)) == len(ids), f"a key is in the ring twice: {ids}"
    assert (len(ids) > 1) == bool(ring.rotation), f"{len(ids)} keys, rotation {ring.rotation!r}"
    assert len(ids) <= 2, f"{len(ids)} keys in the ring"
    assert not state.tokens.keys() & state.join_tokens.keys(), "a token id is used for both kinds"
    for id, token in state.join_tokens.items():
        assert token.id == id, f"join token {token.id} is kept under {id}"
        assert token.uses_left >= 0, f"join token {id} has {token.uses_left} uses left"
        named = [use for use in token.spent if use[1]]
        assert len(set(named)) == len(named), f"join token {id} was spent twice by one node for one key"
