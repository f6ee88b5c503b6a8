"""Datagrams: bytes of anybody, which get no answer, and the bodies of peers that hold the cluster's key."""

from __future__ import annotations

from gpulayer.model.address import Address
from gpulayer.model.ids import node_id
from gpulayer.model.member import Run
from gpulayer.model.trust import GossipKey, KeyRing
from gpulayer.wire.datagram import OVERHEAD, RunKeys
from gpulayer.wire.gate import PacketGate

# The seeds were sealed with another secret, under the same key id: they get as far as anybody's bytes may.
KEY = GossipKey(id=7, secret=b"not that of the seeds".ljust(32))
OWN, PEER, STRANGER = (Run(node_id(bytes([number]) * 8), 1, number) for number in (1, 2, 3))
AT = Address("10.0.0.2", 7451)
KINDS = range(4)


def gate() -> PacketGate:
    made = PacketGate(OWN, "c-fuzz", KeyRing(version=1, keys=(KEY,)), bytes(32))
    made.link_verified(PEER, 0)
    return made


def one(data: bytes) -> None:
    _of_anybody(data)
    _of_a_peer(data)


def _of_anybody(data: bytes) -> None:
    here = gate()
    opened = here.open(data, AT, 1.0)
    assert (opened.received, opened.replies, opened.duplicate) == ((), (), None)
    assert here.datagrams_sent == 0
    assert not here.is_own(data)
    here.check()


def _of_a_peer(body: bytes) -> None:
    here = gate()
    for run in (PEER, STRANGER, Run(OWN.node, 1, 9)):
        cipher = RunKeys(KEY, "c-fuzz").cipher(run)
        for kind in KINDS:
            packet = cipher.seal(kind, kind + 1, body, OWN.node)
            opened = here.open(packet, AT, 1.0)
            # Nothing that is sent under a false address is multiplied.
            assert len(opened.replies) <= 1
            assert all(len(reply) <= len(packet) + OVERHEAD for reply in opened.replies)
            assert run == PEER or not opened.received
            assert here.open(packet, AT, 1.0).received == ()
            here.check()
    assert here.is_known(PEER)
    assert not here.is_known(STRANGER)
