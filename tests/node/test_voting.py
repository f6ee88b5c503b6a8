"""What other nodes may make the voter do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
import trio.testing

from gpulayer.core.cluster.commands import CreateCluster
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.node.admission import Admission
from gpulayer.node.voter import open_voter
from gpulayer.node.voting import FORWARDED_MAX, Outside, Voting
from gpulayer.wire.peer import JoinForwardAnswered, JoinForwarded, JoinRejected, PeerFrame
from tests.runtime.test_peer_links import join_request, wait_for

OWN, OTHER = NodeId("n-0000000000000001"), NodeId("n-0000000000000002")
HERE = Address("127.0.0.1", 50000)


@dataclass
class House:
    voting: Voting
    admission: Admission
    sent: list[PeerFrame] = field(default_factory=list)

    def answers(self) -> list[JoinForwardAnswered]:
        return [frame for frame in self.sent if isinstance(frame, JoinForwardAnswered)]


async def _not_there(node: NodeId) -> bool:
    await trio.lowlevel.checkpoint()
    return False


async def _nothing() -> None:
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def voting(path: Path) -> AsyncIterator[House]:
    sent: list[PeerFrame] = []
    voter = await open_voter(
        path / "log.db",
        node_id=OWN,
        now_utc=time.time,
        snapshot_every=1000,
        disk_free_min_mib=0,
        before_snapshot=_nothing,
        on_events=lambda events: None,
    )
    outside = Outside(
        orders=lambda orders: None,
        changed=lambda: None,
        placeable=dict,
        send=lambda node, frame: sent.append(frame),
        tell_all=sent.append,
        answers=_not_there,
        peers=tuple,
        keys_held=dict,
    )
    half = Voting(voter, node=OWN, observed_seconds=1.0, outside=outside)
    admission = Admission(
        voter=OWN,
        voter_name="n1",
        advertise="127.0.0.1",
        state=lambda: half.state,
        propose=half.propose,
        answers=_not_there,
        peers=tuple,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(half.run_log)
            await half.propose(CreateCluster(cluster_id="c-1"))
            nursery.start_soon(half.run, admission)
            await trio.testing.wait_all_tasks_blocked()
            yield House(half, admission, sent)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await voter.store.close()


async def test_no_node_makes_the_voter_hold_more_requests_to_join_than_a_few(tmp_path: Path) -> None:
    async with voting(tmp_path) as house:
        for _ in range(house.admission.limiter.total_tokens):  # who is judged just now takes long
            await house.admission.limiter.acquire_on_behalf_of(object())
        for serial in range(FORWARDED_MAX + 3):
            assert house.voting.from_peer(OTHER, JoinForwarded(serial=serial, observed=HERE, request=join_request()))
        assert [answer.serial for answer in house.answers()] == [FORWARDED_MAX, FORWARDED_MAX + 1, FORWARDED_MAX + 2]
        refused = house.answers()[0].answer
        assert isinstance(refused, JoinRejected)
        assert refused.code == "no_leader", "it is tried again"

        house.admission.limiter.total_tokens *= 2
        await wait_for(lambda: len(house.answers()) == FORWARDED_MAX + 3)
        house.voting.from_peer(OTHER, JoinForwarded(serial=0, observed=HERE, request=join_request()))
        await wait_for(lambda: len(house.answers()) == FORWARDED_MAX + 4)
