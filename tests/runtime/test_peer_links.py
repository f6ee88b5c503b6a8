"""Links between daemons: real sockets, real certificates, several ends in one process."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from gpulayer.core.orders.messages import OrdersConfirmed, OrderStamp
from gpulayer.model.address import Address
from gpulayer.model.errors import PermissionDenied, Refused
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.node import Capabilities
from gpulayer.model.trust import Authority, KeyRing
from gpulayer.runtime import trust
from gpulayer.runtime.frame_stream import FrameStream, Limits, LinkEnded, Why
from gpulayer.runtime.peer_greeting import Refusal, ask_to_join
from gpulayer.runtime.peer_links import PeerLinks
from gpulayer.runtime.peer_sockets import bind_peer_sockets
from gpulayer.runtime.trust import Contexts
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.frames import encode_frame
from gpulayer.wire.peer import (
    PROTOCOL,
    GossipFrame,
    Hello,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    PeerFrame,
    RequestHead,
    ResponsePart,
    Use,
)

CLUSTER = "c-1"
AUTHORITY = trust.new_authority(CLUSTER)
WAIT_SECONDS = 20.0
ABOUT_NOTHING = GossipFrame(payload=b"x")


@dataclass
class End:
    """One daemon's links, and what it was told."""

    run: Run
    links: PeerLinks
    address: Address
    scope: trio.CancelScope
    ups: list[tuple[Hello, bool]] = field(default_factory=list)
    downs: list[tuple[NodeId | None, Why]] = field(default_factory=list)
    frames: list[tuple[NodeId, PeerFrame]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    joins: list[tuple[JoinRequest, Address]] = field(default_factory=list)
    contexts: Contexts | None = None

    @property
    def node(self) -> NodeId:
        return self.run.node

    def say(self, other: End, payload: bytes = b"x", *, urgent: bool = False) -> None:
        self.links.send(other.node, (other.address,), GossipFrame(payload=payload), urgent=urgent)

    def heard(self) -> list[bytes]:
        return [frame.payload for _, frame in self.frames if isinstance(frame, GossipFrame)]


def contexts_of(
    directory: Path,
    node: str,
    *,
    authority: Authority = AUTHORITY,
    cluster_id: str = CLUSTER,
    days: int = 30,
    at: datetime | None = None,
) -> Contexts:
    keys = trust.new_key_pair()
    directory.mkdir(exist_ok=True)
    files = TrustFiles(directory)
    files.write(
        certificate_pem=trust.issue(
            authority, NodeId(node), cluster_id, keys.public_pem, ["127.0.0.1", "::1"], days, at=at
        ),
        private_key_pem=keys.private_pem,
        ca_certificate_pem=authority.certificate_pem,
        key_ring=KeyRing(),
    )
    return files.contexts()


async def echo(run: Run, stream: FrameStream) -> None:
    """Until the other end has gone, which ends it with LinkEnded."""
    while True:
        frame = await stream.receive_frame()
        assert isinstance(frame, RequestHead)
        await stream.send_frame(ResponsePart(data=frame.body, is_last=True))


@asynccontextmanager
async def end(
    directory: Path,
    node: str,
    *,
    limits: Limits | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    run: Run | None = None,
    contexts: Contexts | None = None,
    cluster_id: str = CLUSTER,
    protocol: tuple[int, int] = PROTOCOL,
    is_allowed: Callable[[NodeId], bool] = lambda node: True,
    on_bulk: Callable[[Run, FrameStream], Awaitable[None]] = echo,
    members_max: int = 4096,
) -> AsyncIterator[End]:
    run = run or Run(node=NodeId(node), epoch=1, run_id=hash(node) & 0xFFFF)
    contexts = contexts or contexts_of(directory / node, node)
    with bind_peer_sockets([host], port) as sockets:
        address = Address(host, sockets.port)

        def hello(use: Use) -> Hello:
            return Hello(use=use, protocol=protocol, cluster_id=cluster_id, run=run, addresses=(address,))

        async def join(request: JoinRequest, observed: Address) -> JoinAccepted | JoinRejected:
            it.joins.append((request, observed))
            return JoinRejected(code="bad_token", message="no such token")

        links = PeerLinks(
            hello=hello,
            contexts=lambda: it.contexts or contexts,
            is_allowed=is_allowed,
            on_up=lambda hello, address, is_ours: it.ups.append((hello, is_ours)),
            on_down=lambda node, address, why: it.downs.append((node, why)),
            on_frame=lambda run, frame: it.frames.append((run.node, frame)),
            on_join=join,
            on_bulk=on_bulk,
            on_refused=lambda refusal: it.refusals.append(refusal),
            members_max=members_max,
            limits=limits,
        )
        with trio.CancelScope() as scope:
            it = End(run=run, links=links, address=address, scope=scope)
            async with trio.open_nursery() as nursery:
                await nursery.start(links.run, sockets.links)
                yield it
                links.check()
                nursery.cancel_scope.cancel()


async def wait_for(condition: Callable[[], object]) -> None:
    with trio.fail_after(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


# --- links ------------------------------------------------------------------------------------------------------


async def test_both_ends_of_a_link_send(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        n1.say(n2, b"there")
        await wait_for(lambda: n2.heard() == [b"there"])
        n2.say(n1, b"and back")
        await wait_for(lambda: n1.heard() == [b"and back"])
        assert [is_ours for _, is_ours in n1.ups] == [True]
        assert [is_ours for _, is_ours in n2.ups] == [False]
        assert n1.ups[0][0].run == n2.run
        assert n2.ups[0][0].addresses == (n1.address,)
        assert n1.links.links[NodeId("n2")].is_ours
        assert n1.downs == n2.downs == []


async def test_links_stand_on_ipv6_too(tmp_path: Path) -> None:
    async with end(tmp_path, "n1", host="::1") as n1, end(tmp_path, "n2", host="::1") as n2:
        n1.say(n2)
        await wait_for(n2.heard)


async def test_a_killed_peer_is_told_as_closed(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1:
        async with end(tmp_path, "n2") as n2:
            n1.say(n2)
            await wait_for(n2.heard)
        await wait_for(lambda: n1.downs == [("n2", "closed")])
        n1.say(n2)
        await wait_for(lambda: n1.downs == [("n2", "closed"), ("n2", "refused")])
        assert n1.links.links == {}


async def test_a_peer_that_restarts_says_goodbye(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        n1.say(n2)
        await wait_for(n2.heard)
        await n2.links.close_all()
        await wait_for(lambda: n1.downs == [("n2", "goodbye")])


async def test_what_waits_is_sent_before_the_goodbye(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        n1.say(n2)
        await wait_for(n2.heard)
        for number in range(50):
            n1.say(n2, bytes([number]) * 1000)
        n1.links.close(n2.node)
        assert n1.downs == [("n2", "goodbye")]
        await wait_for(lambda: n2.downs == [("n1", "goodbye")])
        assert len(n2.heard()) == 51


async def test_a_port_without_a_listener_is_told_as_refused(tmp_path: Path) -> None:
    with bind_peer_sockets(["127.0.0.1"], 0) as sockets:
        gone = Address("127.0.0.1", sockets.port)
    async with end(tmp_path, "n1") as n1:
        n1.links.send(NodeId("n2"), (gone,), ABOUT_NOTHING)
        await wait_for(lambda: n1.downs == [("n2", "refused")])
        n1.links.contact(gone)
        await wait_for(lambda: n1.downs[1:] == [(None, "refused")])


async def test_a_daemon_that_stands_still_is_told_as_timeout(tmp_path: Path) -> None:
    """Its kernel takes the connection, and nobody says anything on it."""
    limits = Limits(hello_seconds=0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with end(tmp_path, "n1", limits=limits) as n1:
            n1.links.send(NodeId("n2"), (Address("127.0.0.1", silent.getsockname()[1]),), ABOUT_NOTHING, urgent=True)
            await wait_for(lambda: n1.downs == [("n2", "timeout")])


async def test_a_host_that_answers_nothing_is_told_as_timeout_though_another_address_refuses(tmp_path: Path) -> None:
    """The other address may be one that every host has, of a bridge; then it is this host that refuses."""
    full = full_listener()
    with bind_peer_sockets(["127.0.0.1"], 0) as sockets:
        gone = Address("127.0.0.1", sockets.port)
    with full as silent:
        async with end(tmp_path, "n1", limits=Limits(connect_urgent_seconds=0.3)) as n1:
            n1.links.send(NodeId("n2"), (silent, gone), ABOUT_NOTHING, urgent=True)
            await wait_for(lambda: n1.downs == [("n2", "timeout")])


@contextmanager
def full_listener() -> Iterator[Address]:
    """A port whose queue of connections is full, so that nothing more is answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        name = listener.getsockname()
        waiting = []
        for _ in range(4):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(name)
            waiting.append(each)
        try:
            yield Address("127.0.0.1", name[1])
        finally:
            for each in waiting:
                each.close()


async def test_the_next_address_is_tried_when_one_refuses(tmp_path: Path) -> None:
    with bind_peer_sockets(["127.0.0.1"], 0) as sockets:
        gone = Address("127.0.0.1", sockets.port)
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        n1.links.send(n2.node, (gone, n2.address), ABOUT_NOTHING)
        await wait_for(n2.heard)
        assert n1.downs == []


async def test_another_node_at_an_address_is_passed_over(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2, end(tmp_path, "n3") as n3:
        n1.links.send(n2.node, (n3.address, n1.address, n2.address), ABOUT_NOTHING)
        await wait_for(n2.heard)
        assert n3.frames == []
        assert n1.downs == []
        assert n1.refusals == n3.refusals == []


async def test_a_contact_finds_out_who_is_there(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        n1.links.contact(n2.address)
        await wait_for(lambda: n1.ups and n2.ups)
        assert n1.ups[0][0].run == n2.run
        n1.links.contact(n2.address)
        await wait_for(lambda: len(n1.ups) == 2)
        n1.say(n2)
        await wait_for(n2.heard)
        assert n1.downs == n2.downs == []


async def test_a_contact_with_oneself_makes_no_link(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1:
        n1.links.contact(n1.address)
        await wait_for(lambda: n1.downs == [(None, "failed")])
        assert n1.ups == []
        assert n1.refusals == []


async def test_links_opened_by_both_at_once_become_one(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        for number in range(20):
            n1.say(n2, b"%d" % number)
            n2.say(n1, b"%d" % number)
        await wait_for(lambda: len(n1.heard()) == len(n2.heard()) == 20)
        await wait_for(lambda: len(n1.links._links) == len(n2.links._links) == 1)
        assert n1.links.links[n2.node].is_ours
        assert not n2.links.links[n1.node].is_ours
        assert n1.downs == n2.downs == []
        n1.links.check()
        n2.links.check()


async def test_a_new_run_of_a_peer_replaces_the_old_link(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", contexts=contexts) as n2:
        n2.say(n1)
        await wait_for(n1.heard)
        async with end(tmp_path, "n2", contexts=contexts, run=replace(n2.run, epoch=2, run_id=9)) as again:
            again.say(n1, b"again")
            await wait_for(lambda: n1.heard() == [b"x", b"again"])
            assert n1.downs == [("n2", "closed")]
            assert [hello.run.epoch for hello, _ in n1.ups] == [1, 2]
            await wait_for(lambda: n2.downs)
            # The old run, which is still there in this test, is not taken any more.
            n2.say(n1, b"late")
            await wait_for(lambda: len(n2.downs) == 2)
            assert b"late" not in n1.heard()


async def test_a_link_that_nobody_uses_is_closed(tmp_path: Path) -> None:
    limits = Limits(idle_seconds=0.2)
    async with end(tmp_path, "n1", limits=limits) as n1, end(tmp_path, "n2") as n2, end(tmp_path, "n3") as n3:
        n1.links.keep([n3.node])
        n1.say(n2)
        n1.say(n3)
        await wait_for(lambda: n1.downs == [("n2", "goodbye")])
        await wait_for(lambda: n2.downs == [("n1", "goodbye")])
        await trio.sleep(0.5)
        assert list(n1.links.links) == ["n3"]


async def test_no_more_links_are_opened_than_may_be_and_the_quietest_goes(tmp_path: Path) -> None:
    async with (
        end(tmp_path, "n1", limits=Limits(opened_max=2)) as n1,
        end(tmp_path, "n2") as n2,
        end(tmp_path, "n3") as n3,
        end(tmp_path, "n4") as n4,
    ):
        n1.say(n2)
        await wait_for(n2.heard)
        n1.say(n3)
        await wait_for(n3.heard)
        n1.say(n4)
        await wait_for(n4.heard)
        assert n1.downs == [("n2", "goodbye")]
        n1.links.keep([n3.node, n4.node])
        n1.say(n2)
        assert n1.downs[1:] == [("n2", "failed")]


# --- who is no peer ---------------------------------------------------------------------------------------------


async def test_another_cluster_is_refused_by_its_certificate(tmp_path: Path) -> None:
    foreign = trust.new_authority("c-2")
    contexts = contexts_of(tmp_path / "n2", "n2", authority=foreign, cluster_id="c-2")
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", contexts=contexts, cluster_id="c-2") as n2:
        n1.links.contact(n2.address)
        await wait_for(lambda: n1.downs == [(None, "failed")])
        n1.links.contact(n2.address)
        await wait_for(lambda: len(n1.downs) == 2)
        assert [refusal.code for refusal in n1.refusals] == ["foreign_cluster"]  # said once
        assert n1.ups == n2.ups == []


async def test_a_certificate_of_an_authority_that_is_not_ours_lets_nobody_in(tmp_path: Path) -> None:
    """It says our cluster's id; the opener does not look at who answers."""
    forged = contexts_of(tmp_path / "n2", "n2", authority=trust.new_authority(CLUSTER))
    blind = replace(forged, client=trusting_anybody(tmp_path / "n2"))
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", contexts=blind) as n2:
        n2.say(n1)
        await wait_for(lambda: n2.downs == [("n1", "failed")])
        await wait_for(lambda: n1.refusals and n2.refusals)
        assert [refusal.code for refusal in n1.refusals + n2.refusals] == ["foreign_cluster", "foreign_cluster"]
        assert [n1.refusals[0].by_us, n2.refusals[0].by_us] == [True, False]
        assert n1.ups == []


def trusting_anybody(directory: Path) -> ssl.SSLContext:
    context = trust.join_context()
    context.load_cert_chain(directory / "trust" / "node.pem", directory / "trust" / "node.key")
    return context


async def test_an_expired_certificate_is_said_by_both(tmp_path: Path) -> None:
    old = contexts_of(tmp_path / "n2", "n2", days=30, at=datetime.now(UTC) - timedelta(days=60))
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", contexts=old) as n2:
        n2.say(n1)
        await wait_for(lambda: n2.downs == [("n1", "failed")])
        n1.say(n2)
        await wait_for(lambda: n1.downs == [("n2", "failed")])
        await wait_for(lambda: n1.refusals and n2.refusals)
        assert {refusal.code for refusal in n1.refusals + n2.refusals} == {"certificate_expired"}
        assert n1.ups == n2.ups == []


async def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    old = contexts_of(tmp_path / "n2", "n2", days=30, at=datetime.now(UTC) - timedelta(days=60))
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", contexts=old) as n2:
        n1.say(n2)
        await wait_for(lambda: n1.downs == [("n2", "failed")])
        n2.contexts = contexts_of(tmp_path / "n2", "n2")
        n1.say(n2)
        await wait_for(n2.heard)


async def test_a_hello_of_another_node_than_the_certificate_is_refused(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n3", contexts=contexts) as liar:
        liar.say(n1)
        await wait_for(lambda: liar.downs == [("n1", "failed")])
        assert [(refusal.code, refusal.by_us) for refusal in n1.refusals] == [("identity", True)]
        assert [(refusal.code, refusal.by_us) for refusal in liar.refusals] == [("identity", False)]
        assert n1.ups == []


async def test_a_node_that_was_removed_is_told_so(tmp_path: Path) -> None:
    async with end(tmp_path, "n1", is_allowed=lambda node: node != "n2") as n1, end(tmp_path, "n2") as n2:
        n2.say(n1)
        await wait_for(lambda: n2.downs == [("n1", "failed")])
        assert [refusal.code for refusal in n2.refusals] == ["not_a_member"]
        assert "removed" in n2.refusals[0].hint
        assert n1.ups == []


async def test_protocols_that_do_not_overlap_are_said_with_both_versions(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", protocol=(7, 9)) as n2:
        n1.say(n2)
        await wait_for(lambda: n1.downs == [("n2", "failed")])
        await wait_for(lambda: n1.refusals and n2.refusals)
        assert [refusal.code for refusal in n1.refusals + n2.refusals] == ["protocol", "protocol"]
        assert "1-1" in n1.refusals[0].text
        assert "7-9" in n1.refusals[0].text


async def test_a_copy_of_a_data_directory_is_found_by_itself(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path / "n1", "n1")
    async with (
        end(tmp_path, "n1", contexts=contexts) as n1,
        end(tmp_path, "n1", contexts=contexts, run=replace(n1.run, run_id=77)) as clone,
    ):
        clone.links.contact(n1.address)
        await wait_for(lambda: clone.downs == [(None, "failed")])
        assert [refusal.code for refusal in n1.refusals] == ["duplicate_id"]
        assert [refusal.code for refusal in clone.refusals] == ["duplicate_id"]


async def test_the_second_of_two_runs_with_one_id_is_refused(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", contexts=contexts) as n2:
        n2.say(n1)
        await wait_for(n1.heard)
        async with end(tmp_path, "n2", contexts=contexts, run=replace(n2.run, run_id=77)) as clone:
            clone.say(n1, b"clone")
            await wait_for(lambda: clone.downs == [("n1", "failed")])
            assert [refusal.code for refusal in n1.refusals] == ["duplicate_id"]
            assert [refusal.code for refusal in clone.refusals] == ["duplicate_id"]
            assert n1.heard() == [b"x"]
            assert n1.downs == []


# --- what is no frame -------------------------------------------------------------------------------------------


async def connected(address: Address, source: str | None = None) -> trio.SocketStream:
    return await trio.open_tcp_stream(address.host, address.port, local_address=source)


async def raw_link(address: Address, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    stream = trio.SSLStream(await connected(address), context, https_compatible=True)
    await stream.do_handshake()
    return stream


async def rest_of(stream: trio.abc.ReceiveStream) -> bytes:
    data = b""
    with trio.fail_after(WAIT_SECONDS):
        try:
            while part := await stream.receive_some(65536):
                data += part
        except trio.BrokenResourceError:
            pass
    return data


async def test_garbage_before_tls_gets_no_answer_and_hurts_nobody(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 70000):
            stream = await connected(n1.address)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
            answer = await rest_of(stream)
            assert len(answer) <= 7  # a TLS alert at most
            await stream.aclose()
        n2.say(n1)
        await wait_for(n1.heard)


@pytest.mark.parametrize(
    "first",
    [b"\xff\xff\xff\xff" + bytes(100), b"\0\0\0\0", b"\0\0\0\x04\xff\xff\xff\xff", encode_frame(ABOUT_NOTHING)],
    ids=["too long", "empty", "no CBOR", "no hello"],
)
async def test_what_is_no_hello_ends_the_connection(tmp_path: Path, first: bytes) -> None:
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1") as n1:
        stream = await raw_link(n1.address, contexts.client)
        await stream.send_all(first)
        assert await rest_of(stream) == b""
        assert [refusal.code for refusal in n1.refusals] == ["bad_frame"]
        assert n1.ups == []


async def test_a_hello_with_an_address_that_means_nothing_elsewhere_is_refused(tmp_path: Path) -> None:
    """Behind the % is any text, and to connect there would raise what no link expects."""
    hello = Hello(
        use="peer",
        protocol=PROTOCOL,
        cluster_id=CLUSTER,
        run=Run(node=NodeId("n1"), epoch=1, run_id=1),
        addresses=(Address("2001:db8::1%a\0b", 7451),),
    )
    async with end(tmp_path, "n2") as n2:
        stream = await raw_link(n2.address, contexts_of(tmp_path / "n1", "n1").client)
        await stream.send_all(encode_frame(hello))
        assert b"makes no sense" in await rest_of(stream)
        assert n2.ups == []


async def test_a_frame_that_is_too_long_ends_a_link_and_no_other(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n3") as n3:
        n3.say(n1)
        stream = await raw_link(n1.address, contexts.client)
        hello = Hello(use="peer", protocol=PROTOCOL, cluster_id=CLUSTER, run=Run(NodeId("n2"), 1, 1), addresses=())
        await stream.send_all(encode_frame(hello))
        await wait_for(lambda: len(n1.ups) == 2)
        await stream.send_all(b"\x10\0\0\0")
        await rest_of(stream)
        await wait_for(lambda: n1.downs == [("n2", "failed")])
        assert list(n1.links.links) == ["n3"]


async def test_who_sends_slowly_does_not_keep_others_out(tmp_path: Path) -> None:
    limits = Limits(hello_seconds=5.0, header_seconds=0.2)
    async with end(tmp_path, "n1", limits=limits) as n1, end(tmp_path, "n3") as n3:
        loris = [await connected(n1.address, "127.0.0.2") for _ in range(12)]
        for stream in loris:
            await stream.send_all(b"\x16\x03")
        await wait_for(lambda: n1.links._reception.arrivals == 12)
        n3.say(n1)
        await wait_for(n1.heard)
        assert n1.links._reception.arrivals == 12
        for stream in loris:
            await stream.aclose()
        await wait_for(lambda: n1.links._reception._sources == {})


async def test_a_hello_must_come_in_time(tmp_path: Path) -> None:
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1", limits=Limits(hello_seconds=1.0, header_seconds=0.2)) as n1:
        plain = await connected(n1.address)  # not even TLS
        silent = await raw_link(n1.address, contexts.client)  # after the handshake: no header
        assert await rest_of(silent) == b""
        assert n1.links._reception.arrivals == 1
        assert await rest_of(plain) == b""
        await wait_for(lambda: n1.links._reception._sources == {})


async def test_no_source_fills_the_queue_of_those_that_wait(tmp_path: Path) -> None:
    async with end(tmp_path, "n1", limits=Limits(arrivals_max=8)) as n1, end(tmp_path, "n3") as n3:
        many = [await connected(n1.address, "127.0.0.2") for _ in range(12)]
        for stream in many[4:]:
            assert await rest_of(stream) == b""
        assert n1.links._reception.arrivals == 4
        n3.say(n1)
        await wait_for(n1.heard)


async def test_a_peer_that_reads_nothing_is_given_up_and_costs_a_bounded_outbox(tmp_path: Path) -> None:
    limits = Limits(write_seconds=0.5, outbox_frames=20)
    contexts = contexts_of(tmp_path / "n2", "n2")
    async with end(tmp_path, "n1", limits=limits) as n1:
        stream = await raw_link(n1.address, contexts.client)
        run = Run(NodeId("n2"), 1, 1)
        await stream.send_all(
            encode_frame(Hello(use="peer", protocol=PROTOCOL, cluster_id=CLUSTER, run=run, addresses=()))
        )
        await wait_for(lambda: n1.ups)
        for _ in range(200):
            n1.links.send(run.node, (), GossipFrame(payload=bytes(100_000)))
            await trio.lowlevel.checkpoint()
        assert n1.links.links[run.node].waiting_bytes <= limits.outbox_bytes
        assert n1.links.counts["gossip_dropped"] > 0
        await wait_for(lambda: n1.downs == [("n2", "timeout")])


async def test_orders_are_never_dropped_a_full_outbox_ends_the_link(tmp_path: Path) -> None:
    limits = Limits(outbox_kept_frames=10)
    async with end(tmp_path, "n1", limits=limits) as n1, end(tmp_path, "n2") as n2:
        order = OrdersConfirmed(stamp=OrderStamp(generation=1, term=1, index=1))
        for _ in range(10):
            n1.links.send(n2.node, (n2.address,), order)
        n1.say(n2)
        await wait_for(n2.heard)
        assert sum(frame == order for _, frame in n2.frames) == 10
        for _ in range(11):
            n1.links.send(n2.node, (n2.address,), order)
        await wait_for(lambda: n1.downs == [("n2", "failed")])
        await wait_for(lambda: n2.downs == [("n1", "goodbye")])  # "closed" would look like a kill


async def test_a_frame_that_is_too_long_is_not_sent_and_the_link_goes_on(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        n1.say(n2, bytes(2 * 1024 * 1024))
        n1.say(n2, b"small")
        await wait_for(lambda: n2.heard() == [b"small"])
        assert n1.links.counts["too_large"] == 1


async def test_links_that_peers_open_are_bounded(tmp_path: Path) -> None:
    async with end(tmp_path, "n1", members_max=1) as n1, end(tmp_path, "n2") as n2, end(tmp_path, "n3") as n3:
        n2.say(n1)
        await wait_for(n1.heard)
        n3.say(n1)
        await wait_for(lambda: n3.downs)
        assert list(n1.links.links) == ["n2"]


# --- streams ----------------------------------------------------------------------------------------------------


def request(body: bytes = b"") -> RequestHead:
    return RequestHead(method="GET", path="/", query="", headers=(), role="admin", body=body)


async def test_a_stream_of_its_own_answers_and_is_used_again(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2") as n2:
        stream = await n1.links.open_stream(n2.node, (n2.address,))
        for number in range(3):
            assert stream.is_fresh
            await stream.send_frame(request(b"%d" % number))
            assert await stream.receive_frame() == ResponsePart(data=b"%d" % number, is_last=True)
        await stream.aclose()
        assert not stream.is_fresh
        assert n2.ups == []


async def test_a_kept_stream_whose_other_end_is_gone_is_not_fresh(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1:
        async with end(tmp_path, "n2") as n2:
            stream = await n1.links.open_stream(n2.node, (n2.address,))
            assert stream.is_fresh
        await wait_for(lambda: not stream.is_fresh)
        with pytest.raises(LinkEnded):
            await n1.links.open_stream(n2.node, (n2.address,))


async def test_streams_of_a_peer_are_bounded(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", limits=Limits(bulk_per_peer_max=2)) as n2:
        first = await n1.links.open_stream(n2.node, (n2.address,))
        second = await n1.links.open_stream(n2.node, (n2.address,))
        third = await n1.links.open_stream(n2.node, (n2.address,))
        with pytest.raises(LinkEnded, match="streams are open") as caught:
            await third.receive_frame()
        assert caught.value.code == "busy"
        await first.aclose()
        await wait_for(lambda: n2.links._guests.streams == {"n1": 1})
        await second.aclose()


async def test_streams_of_a_node_that_was_removed_are_cut(tmp_path: Path) -> None:
    """They may be asked over whatever their node might ask before."""
    removed = set[NodeId]()
    async with (
        end(tmp_path, "n1") as n1,
        end(tmp_path, "n3") as n3,
        end(tmp_path, "n2", is_allowed=lambda node: node not in removed) as n2,
    ):
        stream = await n1.links.open_stream(n2.node, (n2.address,))
        other = await n3.links.open_stream(n2.node, (n2.address,))
        await wait_for(lambda: n2.links._guests.streams == {"n1": 1, "n3": 1})
        removed.add(n1.node)
        n2.links.expel(n1.node)
        with trio.fail_after(WAIT_SECONDS), pytest.raises(LinkEnded):
            await stream.receive_frame()
        await other.send_frame(request(b"still here"))
        assert await other.receive_frame() == ResponsePart(data=b"still here", is_last=True)
        with pytest.raises(LinkEnded) as caught:
            await n1.links.open_stream(n2.node, (n2.address,))
        assert caught.value.code == "not_a_member"
        stream.close()


async def test_a_mistake_in_the_answer_to_one_stream_ends_that_stream_alone(tmp_path: Path) -> None:
    async def fails(run: Run, stream: FrameStream) -> None:
        await stream.receive_frame()
        raise ZeroDivisionError

    async with end(tmp_path, "n1") as n1, end(tmp_path, "n2", on_bulk=fails) as n2:
        stream = await n1.links.open_stream(n2.node, (n2.address,))
        await stream.send_frame(request(b"x"))
        with trio.fail_after(WAIT_SECONDS), pytest.raises(LinkEnded):
            await stream.receive_frame()
        n1.say(n2)
        await wait_for(lambda: n2.heard() == [b"x"])


# --- joining ----------------------------------------------------------------------------------------------------


def join_request() -> JoinRequest:
    return JoinRequest(
        protocol=PROTOCOL,
        gpulayer_version="1",
        node=NodeId("n9"),
        name="n9",
        name_is_derived=True,
        advertise="127.0.0.1",
        peer_address=Address("127.0.0.1", 1),
        api_names=(),
        capabilities=Capabilities(cpus_milli=1000, memory_mib=1024),
        public_key_pem=trust.new_key_pair().public_pem,
        token="gpj_secret",
    )


async def test_a_host_without_a_certificate_may_ask_to_join(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1:
        asked = join_request()
        answer = await ask_to_join(n1.address, trust.pin(AUTHORITY.certificate_pem), asked)
        assert answer == JoinRejected(code="bad_token", message="no such token")
        [(heard, observed)] = n1.joins
        assert heard == asked
        assert observed.host == "127.0.0.1"
        assert "gpj_secret" not in repr(heard)


async def test_the_token_is_not_shown_to_a_cluster_that_it_does_not_pin(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1:
        with pytest.raises(PermissionDenied) as caught:
            await ask_to_join(n1.address, trust.pin(trust.new_authority(CLUSTER).certificate_pem), join_request())
        assert caught.value.code == "wrong_authority"
        assert n1.joins == []


async def test_a_server_that_shows_the_pinned_authority_without_its_certificate_learns_nothing(tmp_path: Path) -> None:
    other = trust.new_authority(CLUSTER)
    contexts = contexts_of(tmp_path / "n1", "n1", authority=other)
    chain = tmp_path / "n1" / "trust" / "node.pem"
    chain.write_text(trust.first_of(chain.read_text()) + AUTHORITY.certificate_pem)
    contexts.server.load_cert_chain(chain, tmp_path / "n1" / "trust" / "node.key")
    async with end(tmp_path, "n1", contexts=contexts) as n1:
        with pytest.raises(PermissionDenied) as caught:
            await ask_to_join(n1.address, trust.pin(AUTHORITY.certificate_pem), join_request())
        assert caught.value.code == "wrong_authority"
        assert n1.joins == []


@pytest.mark.parametrize("use", ["peer", "bulk", "raft"])
async def test_without_a_certificate_nothing_but_a_join_is_taken(tmp_path: Path, use: Use) -> None:
    async with end(tmp_path, "n1") as n1:
        stream = await raw_link(n1.address, trust.client_context(AUTHORITY.certificate_pem, check_names=False))
        run = Run(NodeId("n2"), 1, 1)
        await stream.send_all(
            encode_frame(Hello(use=use, protocol=PROTOCOL, cluster_id=CLUSTER, run=run, addresses=()))
        )
        assert b"Goodbye" in await rest_of(stream)
        assert n1.ups == []


async def test_a_joiner_may_say_nothing_but_its_request(tmp_path: Path) -> None:
    async with end(tmp_path, "n1") as n1:
        stream = await raw_link(n1.address, trust.client_context(AUTHORITY.certificate_pem, check_names=False))
        run = Run(NodeId("n2"), 1, 1)
        hello = Hello(use="join", protocol=PROTOCOL, cluster_id="", run=run, addresses=())
        await stream.send_all(encode_frame(hello) + encode_frame(request(b"x")))
        await rest_of(stream)
        assert n1.joins == []
        assert n1.frames == []


# --- sockets ----------------------------------------------------------------------------------------------------


def test_links_and_datagrams_share_one_number() -> None:
    with bind_peer_sockets(["127.0.0.1", "::1"], 0) as sockets:
        assert {each.getsockname()[1] for each in sockets.links} == {sockets.port}
        assert {each.getsockname()[1] for each in sockets.datagrams.by_family.values()} == {sockets.port}
        assert len(sockets.links) == 2


def test_a_taken_peer_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(Refused, match=rf"TCP port {port} on 127.0.0.1 is in use by pid \d+") as caught,
            bind_peer_sockets(["127.0.0.1"], port),
        ):
            pass
    assert caught.value.code == "port_taken"
