"""A host joins a cluster over real links: by any seed that answers, however late, and by none that is another's."""

from __future__ import annotations

import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from gpulayer.model.address import Address
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied, Refused, Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.node.config import Config, Seed
from gpulayer.node.joining import Applicant, Joined, join, keep, way_in
from gpulayer.runtime import trust
from gpulayer.runtime.identity import DataDir, Membership, membership, note_membership, open_data_dir
from gpulayer.runtime.peer_cache import CachedPeer, PeerCache
from gpulayer.runtime.peer_links import PeerLinks
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.join_token import JoinTokenText
from gpulayer.wire.peer import PROTOCOL, Hello, JoinAccepted, JoinRejected, JoinRequest, Use
from tests.node.test_admission import HAS, KEYS, VOTER, Gatehouse, gatehouse

SECONDS_MAX = 20.0
NODE = NodeId("n-0000000000000002")


@contextmanager
def bound() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def a_free_port() -> int:
    with bound() as sock:
        return port_of(sock)


@dataclass
class Cluster:
    house: Gatehouse
    port: int
    protocol: tuple[int, int] = PROTOCOL

    @property
    def seed(self) -> Seed:
        return Seed("127.0.0.1", self.port)

    @property
    def token(self) -> JoinTokenText:
        return self.house.token


def _nothing(*_: object) -> None:
    pass


@asynccontextmanager
async def serving(path: Path, *, port: int = 0, protocol: tuple[int, int] = PROTOCOL) -> AsyncIterator[Cluster]:
    """A voter that listens for other nodes, as the daemon does."""
    path.mkdir(exist_ok=True)  # noqa: ASYNC240
    async with gatehouse(path) as house, trio.open_nursery() as nursery:
        state = house.voter.state.value
        assert state.authority is not None
        files = TrustFiles(path)
        files.write(
            certificate_pem=trust.issue(state.authority, VOTER, state.cluster_id, KEYS.public_pem, ["127.0.0.1"]),
            private_key_pem=KEYS.private_pem,
            ca_certificate_pem=state.authority.certificate_pem,
            key_ring=state.key_ring,
        )
        contexts = files.contexts()

        def hello(use: Use) -> Hello:
            run = Run(node=VOTER, epoch=1, run_id=1)
            return Hello(use=use, protocol=protocol, cluster_id=state.cluster_id, run=run, addresses=())

        async def no_bulk(*_: Any) -> None:
            raise AssertionError("a joiner opens no stream")

        links = PeerLinks(
            hello=hello,
            contexts=lambda: contexts,
            is_allowed=lambda node: True,
            on_up=_nothing,
            on_down=_nothing,
            on_frame=_nothing,
            on_join=house.admit,
            on_bulk=no_bulk,
        )
        listening = socket.create_server(("127.0.0.1", port))
        port = port_of(listening)
        await nursery.start(links.run, [listening])
        yield Cluster(house, port)
        nursery.cancel_scope.cancel()


def applicant(peer_port: int, **changes: Any) -> Applicant:
    made = Applicant(
        node=NODE,
        name="n2",
        name_is_derived=True,
        advertise="127.0.0.1",
        peer_port=peer_port,
        capabilities=HAS,
        keys=KEYS,
    )
    return replace(made, **changes)


async def joined(*seeds: Seed, token: JoinTokenText, **changes: Any) -> Joined:
    with bound() as own, trio.fail_after(SECONDS_MAX):
        return await join(applicant(port_of(own), **changes), seeds, token, rng=Random(1))


async def refusal(kind: type[GpulayerError], *seeds: Seed, token: JoinTokenText, **changes: Any) -> GpulayerError:
    with pytest.raises(kind) as caught:
        await joined(*seeds, token=token, **changes)
    return caught.value


async def test_a_host_joins_by_a_seed_and_its_token(tmp_path: Path) -> None:
    async with serving(tmp_path / "n1") as cluster:
        found = await joined(cluster.seed, token=cluster.token)
        assert (found.accepted.cluster_id, found.accepted.name, found.advertise) == ("c-1", "n2", "127.0.0.1")
        assert NODE in cluster.house.voter.state.value.nodes


async def test_one_seed_that_answers_is_enough(tmp_path: Path) -> None:
    async with serving(tmp_path / "n1") as cluster:
        others = (Seed("127.0.0.1", a_free_port()), Seed("no-such-host.invalid", 7451))
        assert (await joined(*others, cluster.seed, token=cluster.token)).accepted.cluster_id == "c-1"


async def test_several_seeds_of_one_cluster_cost_one_use(tmp_path: Path) -> None:
    async with serving(tmp_path / "n1") as cluster:
        await joined(cluster.seed, Seed("localhost", cluster.port), token=cluster.token)
        (left,) = cluster.house.voter.state.value.join_tokens.values()
        assert left.uses_left == 2


async def test_a_cluster_that_starts_later_is_joined_then(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hosts of a rack get power in any order. The token was made while the cluster ran before."""
    async with serving(tmp_path / "n1") as cluster:
        token, port = cluster.token, cluster.port
    async with trio.open_nursery() as nursery:
        found: list[Joined] = []

        async def ask(*_: Any) -> None:
            found.append(await joined(Seed("127.0.0.1", port), token=token))

        nursery.start_soon(ask)
        await trio.sleep(1.5)
        assert not found
        async with serving(tmp_path / "n1", port=port), trio.open_nursery() as until_joined:
            until_joined.start_soon(_until, lambda: bool(found))
    said = "".join(capfd.readouterr())
    assert said.count("join.no_answer") == 1, "said once, and not with every try"
    assert f"127.0.0.1:{port}" in said


async def _until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(SECONDS_MAX):
        while not is_so():  # noqa: ASYNC110
            await trio.sleep(0.05)


class _LateNames(trio.abc.HostnameResolver):
    """A name server that knows nothing at first."""

    def __init__(self, misses: int) -> None:
        self._misses = misses

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self._misses -= 1
        if self._misses >= 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def getnameinfo(self, *_: Any) -> Any:
        raise AssertionError("nobody asks for names")


async def test_a_name_that_is_not_there_yet_is_looked_up_anew(tmp_path: Path) -> None:
    """A seed that did not resolve at boot left its host an island for good."""
    async with serving(tmp_path / "n1") as cluster:
        trio.socket.set_custom_hostname_resolver(_LateNames(2))
        found = await joined(Seed("n1.example", cluster.port), token=cluster.token)
        assert found.accepted.cluster_id == "c-1"


async def test_a_rejection_ends_it_at_once_with_its_words(tmp_path: Path) -> None:
    async with serving(tmp_path / "n1") as cluster:
        wrong = replace(cluster.token, secret=b"x" * 32)
        error = await refusal(PermissionDenied, cluster.seed, token=wrong)
        assert error.code == "bad_token"
        assert error.hint
        error = await refusal(Refused, cluster.seed, token=cluster.token, name="n1", name_is_derived=False)
        assert error.code == "duplicate_name"


async def test_another_protocol_ends_it_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path / "n1", protocol=(7, 9)) as cluster:
        error = await refusal(Refused, cluster.seed, token=cluster.token)
        assert error.code == "protocol"


async def test_a_foreign_cluster_at_the_address_hears_no_token(tmp_path: Path) -> None:
    """An address is given to another host, of another cluster."""
    async with serving(tmp_path / "n1") as cluster:
        foreign = replace(cluster.token, pin="sha256:" + "00" * 32)
        error = await refusal(PermissionDenied, cluster.seed, token=foreign)
        assert error.code == "wrong_authority"
        assert NODE not in cluster.house.voter.state.value.nodes


async def test_no_leader_is_waited_for() -> None:
    answers: list[JoinAccepted | JoinRejected] = [
        JoinRejected(code="no_leader", message="n1, which leads, is silent"),
        JoinRejected(code="token_expired", message="too late"),
    ]

    async def ask(address: Address, pin: str, request: JoinRequest) -> JoinAccepted | JoinRejected:
        await trio.lowlevel.checkpoint()
        return answers.pop(0)

    token = JoinTokenText(secret=b"s" * 32, pin="sha256:" + "00" * 32)
    with pytest.raises(PermissionDenied, match="too late"):
        await join(applicant(1), [Seed("127.0.0.1", 1)], token, rng=Random(1), ask=ask)
    assert not answers


async def test_it_tries_on_for_an_hour_without_asking_more_than_it_should(autojump_clock: object) -> None:
    asked: list[float] = []

    async def ask(address: Address, pin: str, request: JoinRequest) -> JoinAccepted | JoinRejected:
        await trio.lowlevel.checkpoint()
        asked.append(trio.current_time())
        raise Unreachable("nobody there")

    token = JoinTokenText(secret=b"s" * 32, pin="sha256:" + "00" * 32)
    with trio.move_on_after(3600.0):
        await join(applicant(1), [Seed("127.0.0.1", 1)], token, rng=Random(1), ask=ask)
    gaps = [after - before for before, after in pairwise(asked)]
    assert min(gaps) >= 1.0
    assert max(gaps) <= 30.0
    assert gaps[0] < 2.5
    assert 3600 / 30 <= len(asked) <= 3600 / 12


async def test_the_way_to_a_loopback_seed_shows_no_address_for_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It listens on all addresses, and the one that the way shows is loopback."""
    async with serving(tmp_path / "n1") as cluster:
        with trio.move_on_after(0.5):
            await joined(cluster.seed, token=cluster.token, advertise="")
        assert "--advertise" in "".join(capfd.readouterr())
        assert NODE not in cluster.house.voter.state.value.nodes


# --- what is kept, and the next start ---------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDir]:
    with open_data_dir(tmp_path / "data", machine_id="m-1") as opened:
        yield opened


def config(data: DataDir, *seeds: Seed, token: JoinTokenText | None = None) -> Config:
    return Config(data_dir=data.path, name="n2", seeds=seeds, join_token=token)


A_SEED = Seed("n1", 7451)
A_TOKEN = JoinTokenText(secret=b"s" * 32, pin="sha256:" + "00" * 32)


def test_an_empty_directory_founds_a_cluster_or_joins_one(data: DataDir) -> None:
    assert way_in(config(data), data) == "found"
    assert way_in(config(data, A_SEED, token=A_TOKEN), data) == "join"
    with pytest.raises(InvalidRequest, match="token"):
        way_in(config(data, A_SEED), data)


def test_a_token_without_an_address_makes_no_cluster_by_mistake(data: DataDir) -> None:
    """The host would have to give that cluster up again, before it could join the one that was meant."""
    with pytest.raises(InvalidRequest) as caught:
        way_in(config(data, token=A_TOKEN), data)
    assert "--join" in caught.value.hint


def test_a_node_with_others_elsewhere_does_not_come_back_on_loopback_alone(data: DataDir) -> None:
    """`gpulayer up` without the --bind of before: it was alive to all, and its endpoints were 127.0.0.1:PORT."""
    note_membership(data, Membership(cluster_id="c-own", is_voter=False))
    cache = PeerCache(data.path / "peers.json")
    cache.update([CachedPeer(id=NodeId("n-3"), name="n3", addresses=(Address("127.0.0.1", 7452),))])
    cache.write()
    assert way_in(config(data), data) == "return", "all of them are on this host"
    cache.update([CachedPeer(id=NodeId("n-1"), name="n1", addresses=(Address("10.0.0.5", 7451),))])
    cache.write()
    with pytest.raises(Refused, match="n1") as caught:
        way_in(config(data), data)
    assert "--bind" in caught.value.hint
    for advertise in ("10.0.0.6", ""):
        assert way_in(replace(config(data), bind="0.0.0.0", advertise=advertise), data) == "return"


def test_a_node_with_a_cluster_joins_no_other(data: DataDir) -> None:
    """Two clusters' work would be mixed on one host."""
    note_membership(data, Membership(cluster_id="c-own"))
    assert way_in(config(data), data) == "return"
    assert way_in(config(data, A_SEED), data) == "return"
    with pytest.raises(Refused, match="c-own") as caught:
        way_in(config(data, A_SEED, token=A_TOKEN), data)
    assert caught.value.code == "other_cluster"
    assert "--abandon-state" in caught.value.hint


async def test_what_was_joined_is_kept_and_joined_no_second_time(
    tmp_path: Path, data: DataDir, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path / "n1") as cluster:
        found = await joined(cluster.seed, token=cluster.token, node=data.node_id)
        keep(data, found, KEYS)
        assert membership(data.path) == Membership(cluster_id="c-1", is_voter=False, name="n2", voter=VOTER)
        kept = TrustFiles(data.path).read(data.node_id)
        assert kept.key_ring == found.accepted.key_ring
        (peer,) = PeerCache(data.path / "peers.json").peers
        assert peer.id == VOTER
        for path in data.path.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} is open to others"
        again = config(data, cluster.seed, token=cluster.token)
        assert way_in(again, data) == "return"
        said = "".join(capfd.readouterr())
        assert "join.ignored" in said
        assert cluster.token.text not in said

        TrustFiles(data.path).certificate_path.unlink()
        assert way_in(again, data) == "join", "it has lost its certificate, and may get a new one"
        with pytest.raises(Refused):
            way_in(config(data, cluster.seed, token=A_TOKEN), data)


async def test_an_answer_of_another_cluster_is_not_kept(tmp_path: Path, data: DataDir) -> None:
    note_membership(data, Membership(cluster_id="c-own", is_voter=False))
    async with serving(tmp_path / "n1") as cluster:
        found = await joined(cluster.seed, token=cluster.token, node=data.node_id)
        with pytest.raises(Refused, match="c-own"):
            keep(data, found, KEYS)
    assert not TrustFiles(data.path).exist
