"""One sealed datagram: its header, and the keys with which its body is sealed and opened. Pure: counters are handed in.

    magic 2 | version 1 | flags 1 | key id 4 | node 8 | epoch 8 | run id 8 | counter 8 | body … | tag 16

Numbers are big endian. The header goes in clear, and is authenticated together with the cluster's id and the
node that it is for: what was caught on its way to one node is nothing to another. The body is sealed with
ChaCha20-Poly1305 (RFC 8439) under a key that only this run of this node seals with, so that a counter is a nonce that
never comes twice. That key is HKDF-SHA256 (RFC 5869) of the cluster's gossip key over the run and a purpose.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.trust import GossipKey
from gpulayer.wire.gossip import pack_node_id, unpack_node_id

MAGIC = b"gG"
VERSION = 1
CHANNEL = 1
"""Of the low four bits of the flags: a datagram. What was sealed for another channel opens on none but that."""
MESSAGES = 0
"""Of the high four bits: the body is a payload of gossip (wire/gossip.py)."""
CHALLENGE = 1
"""The body is a token: whoever sealed as this run just now can send it back."""
ANSWER = 2
"""The body is that token, and from which counter on packets are recent."""

_HEADER = struct.Struct(">2sBB4s8sQQQ")
_COUNTER = struct.Struct(">Q")
HEADER_BYTES = _HEADER.size
TAG_BYTES = 16
OVERHEAD = HEADER_BYTES + TAG_BYTES
"""What a datagram takes beside its body."""
# Fits the smallest MTU of IPv6 (1,280 bytes, RFC 8200 §5) with its headers and a tunnel's around it.
DATAGRAM_BYTES_MAX = 1200

_RUN = struct.Struct(">8sQQ")
_PURPOSE = b"gpulayer gossip datagram 1"
_NO_SALT = bytes(32)
_CHANNEL_IN_NONCE = CHANNEL.to_bytes(4, "big")

Malformed: TypeAlias = Literal["truncated", "other_protocol", "other_version", "other_channel"]


@dataclass(frozen=True, slots=True)
class Header:
    """What a datagram says in clear. Nothing of it is true before the body was opened."""

    kind: int
    key_id: int
    run: Run
    counter: int


def read_header(packet: bytes) -> Header | Malformed:
    """Without any look at the body."""
    if len(packet) < OVERHEAD:
        return "truncated"
    magic, version, flags, key_id, node, epoch, run_id, counter = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        return "other_protocol"
    if version != VERSION:
        return "other_version"
    if flags & 0x0F != CHANNEL:
        return "other_channel"
    return Header(flags >> 4, int.from_bytes(key_id, "big"), Run(unpack_node_id(node), epoch, run_id), counter)


def packed_run(run: Run) -> bytes:
    return _RUN.pack(pack_node_id(run.node), run.epoch, run.run_id)


class RunCipher:
    """Seals or opens what one run sends under one gossip key in one cluster."""

    __slots__ = ("_aead", "_cluster_id", "_key_id", "_run")

    def __init__(self, key: bytes, key_id: int, run: Run, cluster_id: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self._key_id = key_id.to_bytes(4, "big")
        self._run = packed_run(run)
        self._cluster_id = cluster_id

    def seal(self, kind: int, counter: int, body: bytes, to: NodeId) -> bytes:
        """A whole datagram. `counter`: never twice in the life of the run, whatever the kind, the key and `to`."""
        head = b"".join((MAGIC, bytes((VERSION, CHANNEL | kind << 4)), self._key_id, self._run, _COUNTER.pack(counter)))
        return head + self._aead.encrypt(_nonce(counter), body, head + pack_node_id(to) + self._cluster_id)

    def open(self, packet: bytes, counter: int, to: NodeId) -> bytes | None:
        """The body; None if it was not sealed by this run for `to`, or changed since. `counter`: as its header says."""
        head = packet[:HEADER_BYTES]
        try:
            return self._aead.decrypt(
                _nonce(counter), packet[HEADER_BYTES:], head + pack_node_id(to) + self._cluster_id
            )
        except InvalidTag:
            return None


def _nonce(counter: int) -> bytes:
    return _CHANNEL_IN_NONCE + _COUNTER.pack(counter)


class RunKeys:
    """The keys of all runs under one gossip key, each made when it is asked for."""

    __slots__ = ("_cluster_id", "_extracted", "key_id")

    def __init__(self, key: GossipKey, cluster_id: str) -> None:
        self.key_id = key.id
        self._cluster_id = cluster_id.encode()
        self._extracted = hmac.digest(_NO_SALT, key.secret, "sha256")

    def cipher(self, run: Run) -> RunCipher:
        # HKDF's expansion to 32 bytes is one HMAC (RFC 5869 §2.3): cheap enough for a packet that turns out forged.
        key = hmac.digest(self._extracted, packed_run(run) + _PURPOSE + b"\x01", "sha256")
        return RunCipher(key, self.key_id, run, self._cluster_id)
