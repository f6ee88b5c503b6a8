"""A node among its peers: a real mesh, and the links of others, who say to it what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.trust import GossipKey, KeyRing
from gpulayer.node.mesh import Mesh
from gpulayer.runtime import trust
from gpulayer.runtime.frame_stream import FrameStream, LinkEnded
from gpulayer.runtime.peer_cache import CachedPeer, PeerCache
from gpulayer.runtime.peer_sockets import bind_peer_sockets
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.peer import JoinAccepted, JoinRejected, JoinRequest, KeyRingGiven, KeyRingWanted, PeerFrame
from tests.runtime.test_peer_links import CLUSTER, End, contexts_of, echo, end, wait_for

OWN, VOTER, OTHER = (NodeId(f"n-{number:016x}") for number in (1, 2, 3))
FIRST, SECOND = trust.new_gossip_key(b"1" * 32), trust.new_gossip_key(b"2" * 32)
RING = KeyRing(version=1, keys=(FIRST,))
NEWER = KeyRing(version=2, keys=(FIRST, SECOND), rotation="installing")
NO_SECRET = GossipKey(id=1, secret=b"")


async def _no_join(request: JoinRequest, observed: Address) -> JoinAccepted | JoinRejected:
    return JoinRejected(code="refused", message="not here")


@asynccontextmanager
async def running(
    directory: Path, *, voter: NodeId = VOTER, registry: tuple[NodeId, ...] = (OWN, VOTER, OTHER)
) -> AsyncIterator[tuple[Mesh, Address]]:
    """The mesh of OWN, and where it is."""
    contexts_of(directory / OWN, OWN)

    def heard(run: Run, frame: PeerFrame) -> None:
        raise AssertionError(f"{run} said {frame}")

    async def bulk(run: Run, stream: FrameStream) -> None:
        await echo(run, stream)

    with bind_peer_sockets(["127.0.0.1"], 0) as sockets:
        mesh = Mesh(
            own=Run(node=OWN, epoch=1, run_id=5),
            name="one",
            cluster_id=CLUSTER,
            advertise="127.0.0.1",
            sockets=sockets,
            trust=TrustFiles(directory / OWN),
            ring=RING,
            registry={node: str(node) for node in registry},
            cache=PeerCache(directory / "peers.json"),
            seeds=(),
            voter=voter,
            entropy=bytes(64),
            on_frame=heard,
            on_link=lambda node, is_up: None,
            on_member=lambda change, name: None,
            on_record=lambda node: None,
            on_change=lambda: None,
            on_join=_no_join,
            on_bulk=bulk,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(mesh.listen)
            await mesh.make_sure_of_itself()
            await nursery.start(mesh.run)
            yield mesh, Address("127.0.0.1", sockets.port)
            nursery.cancel_scope.cancel()


def tell(peer: End, at: Address, *frames: PeerFrame) -> None:
    for frame in frames:
        peer.links.send(OWN, (at,), frame)


def rings_of(peer: End) -> list[KeyRing]:
    return [frame.ring for _, frame in peer.frames if isinstance(frame, KeyRingGiven)]


async def test_a_newer_key_ring_is_used_kept_and_passed_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (mesh, at), end(tmp_path, VOTER) as voter:
        tell(voter, at, KeyRingGiven(ring=NEWER), KeyRingWanted(have=1))
        await wait_for(lambda: rings_of(voter))
        assert rings_of(voter) == [NEWER]
        assert mesh.ring == NEWER
        await wait_for(lambda: TrustFiles(tmp_path / OWN).read(OWN).key_ring == NEWER)


@pytest.mark.parametrize(
    "keys", [(), (NO_SECRET,), (GossipKey(id=7, secret=b"1" * 32),), (FIRST, SECOND) * 1000], ids=len
)
async def test_a_key_ring_that_seals_nothing_is_not_taken_and_hurts_nobody(
    tmp_path: Path, keys: tuple[GossipKey, ...]
) -> None:
    async with running(tmp_path) as (mesh, at), end(tmp_path, OTHER) as other:
        tell(other, at, KeyRingGiven(ring=KeyRing(version=9, keys=keys)), KeyRingWanted(have=0))
        await wait_for(lambda: rings_of(other))
        assert mesh.ring == RING


async def test_who_has_the_log_takes_its_key_ring_from_nobody_else(tmp_path: Path) -> None:
    async with running(tmp_path, voter=OWN) as (mesh, at), end(tmp_path, OTHER) as other:
        tell(other, at, KeyRingGiven(ring=NEWER), KeyRingWanted(have=0))
        await wait_for(lambda: rings_of(other))
        assert mesh.ring == RING


async def test_a_certificate_alone_opens_no_link_to_who_has_the_log(tmp_path: Path) -> None:
    """Of a node that was removed it is good still, also after a restart of those who knew of it."""
    async with running(tmp_path, voter=OWN, registry=(OWN, VOTER)) as (_, at), end(tmp_path, OTHER) as other:
        tell(other, at, KeyRingWanted(have=0))
        await wait_for(lambda: other.refusals)
        assert [refusal.code for refusal in other.refusals] == ["not_a_member"]


async def test_who_is_in_no_registry_gets_neither_keys_nor_answers(tmp_path: Path) -> None:
    """A node may hear of an admission a little later than the host that was admitted: gossip between them is taken."""
    async with running(tmp_path, registry=(OWN, VOTER)) as (mesh, at), end(tmp_path, OTHER) as other:
        tell(other, at, KeyRingWanted(have=0))
        await wait_for(lambda: OTHER in mesh.links.links)
        stream = await other.links.open_stream(OWN, (at,))
        with trio.fail_after(10), pytest.raises(LinkEnded) as caught:
            await stream.receive_frame()
        assert caught.value.code == "not_a_member"
        assert rings_of(other) == []

        mesh.set_registry({node: str(node) for node in (OWN, VOTER, OTHER)})
        tell(other, at, KeyRingWanted(have=0))
        await wait_for(lambda: rings_of(other))


async def test_who_has_been_away_since_before_this_start_is_called_as_it_was(tmp_path: Path) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    cache.update([CachedPeer(id=OTHER, name="n7", addresses=(Address("127.0.0.1", 1),))])
    cache.write()
    async with running(tmp_path) as (mesh, _):
        assert (mesh.table().nodes[OTHER].name, mesh.table().nodes[OTHER].state) == ("n7", "silent")
        assert mesh.table().nodes[VOTER].name == VOTER
