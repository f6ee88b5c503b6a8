"""Who the voter lets in: asked as a joining host asks, committed to a real log, tried over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from gpulayer.core.cluster.commands import AdmitNode, CreateCluster, CreateJoinToken, FoundTrust
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId, TokenId
from gpulayer.model.node import Capabilities
from gpulayer.model.trust import Authority
from gpulayer.node.admission import Admission
from gpulayer.node.voter import SoleVoter, open_voter
from gpulayer.runtime import trust
from gpulayer.wire.join_token import JoinTokenText
from gpulayer.wire.peer import PROTOCOL, JoinAccepted, JoinRejected, JoinRequest

VOTER = NodeId("n-0000000000000001")
HERE = Address("127.0.0.1", 50000)
KEYS = trust.new_key_pair()
HAS = Capabilities(cpus_milli=4000, memory_mib=1024)


@dataclass
class Gatehouse:
    """A voter on loopback, and what the tests say of the nodes around it."""

    voter: SoleVoter
    token: JoinTokenText
    alive: set[NodeId] = field(default_factory=set)
    peers: tuple[tuple[NodeId, Address], ...] = ((VOTER, Address("127.0.0.1", 7451)),)
    advertise: str = "127.0.0.1"

    async def admit(self, request: JoinRequest, observed: Address = HERE) -> JoinAccepted | JoinRejected:
        async def answers(node: NodeId) -> bool:
            return node in self.alive

        admission = Admission(
            voter=VOTER,
            voter_name="n1",
            advertise=self.advertise,
            state=lambda: self.voter.state.value,
            propose=self.voter.propose,
            answers=answers,
            peers=lambda: self.peers,
        )
        return await admission.admit(request, observed)

    async def refused(self, request: JoinRequest, observed: Address = HERE) -> JoinRejected:
        index = self.voter.state.value.index
        answer = await self.admit(request, observed)
        assert isinstance(answer, JoinRejected), answer
        assert self.voter.state.value.index == index, "what is refused leaves no trace in the log"
        assert answer.hint
        return answer

    async def accepted(self, request: JoinRequest, observed: Address = HERE) -> JoinAccepted:
        answer = await self.admit(request, observed)
        assert isinstance(answer, JoinAccepted), answer
        return answer


@asynccontextmanager
async def gatehouse(path: Path, *, uses: int = 3) -> AsyncIterator[Gatehouse]:
    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    voter = await open_voter(
        path / "log.db",
        node_id=VOTER,
        now_utc=time.time,
        snapshot_every=1000,
        disk_free_min_mib=0,
        before_snapshot=nothing,
        on_events=lambda events: None,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(voter.run)
            founded = voter.state.value.authority
            authority = founded or trust.new_authority("c-1")
            token = JoinTokenText(secret=b"s" * 32, pin=trust.pin(authority.certificate_pem))
            if founded is None:
                await _found(voter, authority, token, uses)
            yield Gatehouse(voter, token)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await voter.store.close()


async def _found(voter: SoleVoter, authority: Authority, token: JoinTokenText, uses: int) -> None:
    for command in (
        CreateCluster(cluster_id="c-1"),
        AdmitNode(node=VOTER, name="n1", advertise="127.0.0.1", capabilities=HAS),
        FoundTrust(authority=authority, key=trust.new_gossip_key(b"k" * 32)),
        CreateJoinToken(token=TokenId("t-1"), digest=token.digest, uses=uses, expires_at_utc=time.time() + 60),
    ):
        await voter.propose(command)


@pytest.fixture
def listening() -> Any:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def request(house: Gatehouse, port: int, **changes: Any) -> JoinRequest:
    made = JoinRequest(
        protocol=PROTOCOL,
        gpulayer_version="0",
        node=NodeId("n-0000000000000002"),
        name="n2",
        name_is_derived=False,
        advertise="127.0.0.1",
        peer_address=Address("127.0.0.1", port),
        api_names=("127.0.0.1",),
        capabilities=HAS,
        public_key_pem=KEYS.public_pem,
        token=house.token.text,
    )
    return replace(made, **changes)


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


async def test_a_host_with_a_token_gets_a_certificate_the_keys_and_the_peers(
    tmp_path: Path, listening: socket.socket
) -> None:
    async with gatehouse(tmp_path) as house:
        answer = await house.accepted(request(house, port_of(listening)))
        state = house.voter.state.value
        assert state.nodes[NodeId("n-0000000000000002")].name == answer.name == "n2"
        assert trust.pin(answer.ca_certificate_pem) == house.token.pin
        trust.check_issued(answer.certificate_pem, answer.ca_certificate_pem)
        trust.check_pair(answer.certificate_pem, KEYS.private_pem)
        identity = trust.identity_of(answer.certificate_pem)
        assert (identity.node, identity.cluster_id) == ("n-0000000000000002", "c-1")
        assert answer.key_ring == state.key_ring
        assert answer.peers == house.peers
        assert answer.warnings == ()


async def test_an_answer_that_was_lost_is_given_again_for_the_same_use(
    tmp_path: Path, listening: socket.socket
) -> None:
    async with gatehouse(tmp_path, uses=1) as house:
        asked = request(house, port_of(listening))
        await house.accepted(asked)
        await house.accepted(asked)
        other = replace(asked, public_key_pem=trust.new_key_pair().public_pem)
        assert (await house.refused(other)).code == "token_used_up"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token": "gpj_nothing"}, "bad_token"),
        ({"token": JoinTokenText(secret=b"x" * 32, pin="sha256:" + "00" * 32).text}, "bad_token"),
        ({"protocol": (7, 9)}, "protocol"),
        ({"protocol": (0, 0)}, "protocol"),
        ({"name": "n1"}, "duplicate_name"),
        ({"name": "UPPER"}, "refused"),
        ({"public_key_pem": "no key"}, "refused"),
        ({"advertise": "n2.example"}, "refused"),
        ({"peer_address": Address("n2.example", 1)}, "refused"),
        ({"peer_address": Address("127.0.0.1", 0)}, "refused"),
        ({"api_names": ("http://x",)}, "refused"),
        ({"api_names": tuple(f"a{number}" for number in range(100))}, "refused"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_its_code(
    tmp_path: Path, listening: socket.socket, changes: dict[str, Any], code: str
) -> None:
    async with gatehouse(tmp_path) as house:
        assert (await house.refused(request(house, port_of(listening), **changes))).code == code


async def test_nothing_is_connected_to_for_who_has_no_token(tmp_path: Path, listening: socket.socket) -> None:
    async with gatehouse(tmp_path) as house:
        await house.refused(request(house, port_of(listening), token="gpj_nothing"))
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


async def test_a_copy_of_a_living_node_is_refused_with_what_to_do(tmp_path: Path, listening: socket.socket) -> None:
    """A disk image with a data directory in it, started on a second host."""
    async with gatehouse(tmp_path) as house:
        asked = request(house, port_of(listening))
        await house.accepted(asked)
        house.alive.add(NodeId("n-0000000000000002"))
        refused = await house.refused(asked)
        assert refused.code == "duplicate_id"
        assert "n2" in refused.message
        assert "--abandon-state" in refused.hint
        house.alive.clear()
        await house.accepted(asked)


async def test_the_address_of_another_living_node_is_refused(tmp_path: Path, listening: socket.socket) -> None:
    async with gatehouse(tmp_path) as house:
        house.peers = (*house.peers, (NodeId("n-0000000000000003"), Address("127.0.0.1", port_of(listening))))
        house.alive.add(NodeId("n-0000000000000003"))
        assert "n-0000000000000003" in (await house.refused(request(house, port_of(listening)))).message


async def test_what_another_node_is_called_by_is_not_certified(tmp_path: Path, listening: socket.socket) -> None:
    """Clients would take the one for the other. A host name that two hosts have is no reason to refuse one of them."""
    async with gatehouse(tmp_path) as house:
        await house.voter.propose(
            AdmitNode(node=NodeId("n-0000000000000003"), name="n3", advertise="10.0.0.3", capabilities=HAS)
        )
        asked = request(
            house,
            port_of(listening),
            name="n3",
            name_is_derived=True,
            api_names=("n3", "10.0.0.3", "127.0.0.1", "gpu.example"),
        )
        answer = await house.accepted(asked)
        assert answer.name == "n3-2"
        assert set(trust.names_of(answer.certificate_pem)) == {"127.0.0.1", "n3-2", "gpu.example"}


async def test_a_port_that_nobody_listens_on_is_a_warning(tmp_path: Path, listening: socket.socket) -> None:
    """It may be that it only cannot be reached from here."""
    port = port_of(listening)
    listening.close()
    async with gatehouse(tmp_path) as house:
        answer = await house.accepted(request(house, port))
        (warning,) = answer.warnings
        assert warning.startswith(f"n1 cannot reach 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("address", "observed", "advertise"),
    [
        ("127.0.0.1", "10.0.0.9", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "10.0.0.1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
        ("169.254.1.2", "10.0.0.9", "10.0.0.1"),
    ],
)
async def test_an_address_that_means_another_host_elsewhere_is_refused(
    tmp_path: Path, listening: socket.socket, address: str, observed: str, advertise: str
) -> None:
    async with gatehouse(tmp_path) as house:
        house.advertise = advertise
        asked = request(house, 1, advertise=address, peer_address=Address(address, port_of(listening)))
        refused = await house.refused(asked, Address(observed, 1))
        assert refused.code == "unreachable"
        assert "--advertise" in refused.hint


@pytest.mark.parametrize("address", ["2001:db8::1%eth0", "2001:db8::1%a\0b", "fe80::1%1"])
async def test_an_address_with_a_scope_is_refused(tmp_path: Path, address: str) -> None:
    """Behind the % is any text; to connect there may raise what nobody expects."""
    async with gatehouse(tmp_path) as house:
        for changes in ({"advertise": address}, {"peer_address": Address(address, 7451)}):
            refused = await house.refused(request(house, 7451, **changes))
            assert refused.code == "refused"
            assert "not an IP address" in refused.message


@pytest.mark.parametrize("node", ["", "n-9", "n-00000000000000AB", "../x", "n-0000000000000001\n"])
async def test_an_id_that_gossip_cannot_carry_is_refused(tmp_path: Path, listening: socket.socket, node: str) -> None:
    """Each word about such a node would be one that nobody can send."""
    async with gatehouse(tmp_path) as house:
        refused = await house.refused(request(house, port_of(listening), node=NodeId(node)))
        assert refused.code == "refused"
        assert "is not the id of a node" in refused.message


async def test_no_secret_stands_in_the_log_lines(
    tmp_path: Path, listening: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    async with gatehouse(tmp_path) as house:
        await house.accepted(request(house, port_of(listening)))
        await house.refused(request(house, port_of(listening), token="gpj_" + "z" * 43 + "." + "z" * 43))
        said = "".join(capfd.readouterr())
        assert "join.accepted" in said
        assert house.token.text not in said
        assert "zzzz" not in said
        assert house.token.text not in repr(request(house, 1))
