"""A sealed datagram: who can open it, what is readable of it, and that every bit of it counts."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.trust import GossipKey
from gpulayer.wire.datagram import (
    ANSWER,
    CHALLENGE,
    HEADER_BYTES,
    MESSAGES,
    OVERHEAD,
    Header,
    RunKeys,
    read_header,
)

RUN = Run(NodeId("n-0123456789abcdef"), 7, 0xFEDCBA9876543210)
TO = NodeId("n-00000000000000aa")
KEY = GossipKey(id=0x01020304, secret=bytes(range(32)))
BODY = b"attempt j-abc.0.1 listens on 10.0.0.5:20001"


def sealed(kind: int = MESSAGES, counter: int = 5, body: bytes = BODY, cluster: str = "c-1") -> bytes:
    return RunKeys(KEY, cluster).cipher(RUN).seal(kind, counter, body, TO)


def test_what_was_sealed_is_opened_by_who_has_the_key() -> None:
    packet = sealed()
    assert read_header(packet) == Header(kind=MESSAGES, key_id=KEY.id, run=RUN, counter=5)
    assert RunKeys(KEY, "c-1").cipher(RUN).open(packet, 5, TO) == BODY
    assert len(packet) == len(BODY) + OVERHEAD


def test_nothing_of_the_body_can_be_read_without_the_key() -> None:
    packet = sealed()
    assert not any(BODY[at : at + 4] in packet for at in range(len(BODY) - 3))


def test_any_bit_that_is_changed_spoils_it() -> None:
    packet = sealed()
    cipher = RunKeys(KEY, "c-1").cipher(RUN)
    for at in range(len(packet)):
        for bit in range(8):
            changed = bytearray(packet)
            changed[at] ^= 1 << bit
            assert cipher.open(bytes(changed), 5, TO) is None


def test_only_whom_it_is_for_opens_it_as_of_its_run_and_cluster_and_key() -> None:
    packet = sealed()
    others = [
        RunKeys(KEY, "c-2").cipher(RUN),
        RunKeys(GossipKey(id=KEY.id, secret=bytes(32)), "c-1").cipher(RUN),
        RunKeys(KEY, "c-1").cipher(Run(RUN.node, 8, RUN.run_id)),
        RunKeys(KEY, "c-1").cipher(Run(RUN.node, 7, RUN.run_id + 1)),
        RunKeys(KEY, "c-1").cipher(Run(NodeId("n-0123456789abcdee"), 7, RUN.run_id)),
    ]
    assert all(cipher.open(packet, 5, TO) is None for cipher in others)
    assert RunKeys(KEY, "c-1").cipher(RUN).open(packet, 6, TO) is None
    assert RunKeys(KEY, "c-1").cipher(RUN).open(packet, 5, NodeId("n-00000000000000ab")) is None


def test_the_same_body_looks_different_each_time() -> None:
    assert sealed(counter=5)[HEADER_BYTES:] != sealed(counter=6)[HEADER_BYTES:]


def test_it_is_what_the_documents_say() -> None:
    """HKDF-SHA256 and ChaCha20-Poly1305 as another implementation has them."""
    packet = sealed(kind=ANSWER, counter=9)
    run = bytes.fromhex("0123456789abcdef") + (7).to_bytes(8, "big") + RUN.run_id.to_bytes(8, "big")
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=run + b"gpulayer gossip datagram 1").derive(KEY.secret)
    head = b"gG\x01\x21\x01\x02\x03\x04" + run + (9).to_bytes(8, "big")
    nonce = b"\0\0\0\x01" + (9).to_bytes(8, "big")
    assert packet == head + ChaCha20Poly1305(key).encrypt(nonce, BODY, head + bytes(7) + b"\xaa" + b"c-1")


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"", "truncated"),
        (sealed()[: OVERHEAD - 1], "truncated"),
        (b"GET / HTTP/1.1\r\n" * 10, "other_protocol"),
        (sealed()[:2] + b"\x02" + sealed()[3:], "other_version"),
        (sealed()[:3] + b"\x02" + sealed()[4:], "other_channel"),
        (sealed()[:3] + b"\x00" + sealed()[4:], "other_channel"),
    ],
)
def test_what_is_no_datagram_of_ours_says_why(packet: bytes, why: str) -> None:
    assert read_header(packet) == why


@pytest.mark.parametrize("kind", [MESSAGES, CHALLENGE, ANSWER])
@pytest.mark.parametrize("body", [b"", b"x", b"x" * 1144])
def test_every_kind_carries_any_body(kind: int, body: bytes) -> None:
    packet = sealed(kind=kind, body=body)
    header = read_header(packet)
    assert isinstance(header, Header)
    assert header.kind == kind
    assert RunKeys(KEY, "c-1").cipher(RUN).open(packet, 5, TO) == body


def test_no_secret_is_shown_by_accident() -> None:
    keys = RunKeys(KEY, "c-1")
    shown = repr(KEY) + repr(keys) + repr(keys.cipher(RUN))
    assert KEY.secret.hex() not in shown
    assert repr(KEY.secret) not in shown
