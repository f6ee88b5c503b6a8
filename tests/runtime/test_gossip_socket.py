"""Gossip's sockets, with real datagrams: what arrives, what the network says, and what cannot end the loop."""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from gpulayer.core.gossip.messages import (
    DatagramRefused,
    Delta,
    Entry,
    GossipEvent,
    Message,
    Nack,
    Received,
    SendFailed,
)
from gpulayer.model.address import Address
from gpulayer.model.errors import GpulayerError, InvalidRequest, Refused
from gpulayer.model.ids import NodeId, node_id
from gpulayer.model.member import Run
from gpulayer.model.trust import GossipKey, KeyRing
from gpulayer.runtime import gossip_socket
from gpulayer.runtime.gossip_socket import GossipSocket, bind_datagrams
from gpulayer.wire.gate import PacketGate

RING = KeyRing(version=1, keys=(GossipKey(id=7, secret=bytes(range(32))),))
N1, N2, N3 = (node_id(bytes([number]) * 8) for number in (1, 2, 3))
V4, V6 = "127.0.0.1", "::1"


def gate_of(node: NodeId, epoch: int = 1) -> PacketGate:
    return PacketGate(Run(node, epoch, epoch), "c-1", RING, bytes([epoch]) * 32)


class Peer:
    """A gate on its sockets, and what came in."""

    def __init__(self, sockets: GossipSocket, gate: PacketGate, host: str) -> None:
        self.sockets = sockets
        self.gate = gate
        self.address = Address(host, sockets.port)
        self.events: list[GossipEvent] = []

    def heard(self) -> list[Message]:
        return [message for event in self.events if isinstance(event, Received) for message in event.messages]


async def wait_for(holds: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.005)


@asynccontextmanager
async def peer(
    gate: PacketGate, *hosts: str, port: int = 0, on_duplicate: Callable[[Run, Address], None] | None = None
) -> AsyncIterator[Peer]:
    with bind_datagrams(hosts, port) as bound:
        own = GossipSocket(bound, gate, **({"on_duplicate": on_duplicate} if on_duplicate else {}))
        made = Peer(own, gate, hosts[0])
        async with trio.open_nursery() as nursery:
            await nursery.start(own.run, made.events.append)
            yield made
            nursery.cancel_scope.cancel()
    gate.check()


@contextmanager
def closed_port(host: str) -> Iterator[Address]:
    """Nobody listens there: it was bound a moment ago, and the kernel gives ports away by chance."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.bind((host, 0))
        port = udp.getsockname()[1]
    yield Address(host, port)


has_ipv6 = (
    Path("/proc/net/if_inet6").exists() and "00000000000000000000000000000001" in Path("/proc/net/if_inet6").read_text()
)
families = pytest.mark.parametrize(
    "host", [V4, pytest.param(V6, marks=pytest.mark.skipif(not has_ipv6, reason="no IPv6 here"))]
)


# --- in and out -------------------------------------------------------------------------------------------------


@families
async def test_two_that_never_met_hear_each_other(host: str) -> None:
    async with peer(gate_of(N1), host) as a, peer(gate_of(N2), host) as b:
        a.sockets.send(N2, b.address, (Nack(seq=1),))
        await wait_for(lambda: b.heard() == [Nack(seq=1)])
        b.sockets.send(N1, a.address, (Nack(seq=2),))
        await wait_for(lambda: a.heard() == [Nack(seq=2)])
        assert Received(source=Run(N1, 1, 1), messages=(Nack(seq=1),), at=a.address) in b.events


@pytest.mark.skipif(not has_ipv6, reason="no IPv6 here")
async def test_both_families_have_the_same_port_and_do_not_mix() -> None:
    async with peer(gate_of(N1), V4, V6) as a, peer(gate_of(N2), "0.0.0.0", "::") as b:
        for number, host in enumerate((V4, V6)):
            a.sockets.send(N2, Address(host, b.address.port), (Nack(seq=number),))
            await wait_for(lambda number=number: Nack(seq=number) in b.heard())
        sources = {event.at for event in b.events if isinstance(event, Received)}
        assert sources == {Address(V4, a.address.port), Address(V6, a.address.port)}


async def test_what_came_while_nobody_looked_is_all_there_before_a_timer_is() -> None:
    """A process that stood still: datagrams wait, and one turn after the other takes its part of them."""
    async with peer(gate_of(N1), V4) as a, peer(gate_of(N2), V4) as b:
        a.gate.link_verified(Run(N2, 1, 1), 0)
        b.gate.link_verified(Run(N1, 1, 1), 0)
        for number in range(520):
            a.sockets.send(N2, b.address, (Nack(seq=number),))
        assert [b.sockets.drain() for _ in range(3)] == [512, 8, 0]
        assert b.heard() == [Nack(seq=number) for number in range(520)]


async def test_a_flood_in_one_family_does_not_silence_the_other() -> None:
    if not has_ipv6:
        pytest.skip("no IPv6 here")
    async with peer(gate_of(N1), V4, V6) as a, peer(gate_of(N2), V4, V6) as b:
        a.gate.link_verified(Run(N2, 1, 1), 0)
        b.gate.link_verified(Run(N1, 1, 1), 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
            for _ in range(1000):
                flood.sendto(b"garbage" * 20, (V4, b.address.port))
        a.sockets.send(N2, Address(V6, b.address.port), (Nack(seq=1),))
        assert b.sockets.drain() == 513
        assert b.heard() == [Nack(seq=1)]


async def test_no_bytes_end_the_loop() -> None:
    chance = random.Random(1)
    async with peer(gate_of(N1), V4) as a, peer(gate_of(N2), V4) as b:
        a.sockets.send(N2, b.address, (Nack(seq=1),))
        await wait_for(b.heard)
        good = a.gate.seal((Nack(seq=2),), N2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect((V4, b.address.port))
            stranger.setblocking(False)
            stranger.send(b"")
            stranger.send(bytes(9000))
            for size in range(300):
                stranger.send(chance.randbytes(size * 4))
                stranger.send(good[:size])
                await trio.lowlevel.checkpoint()
            a.sockets.send(N2, b.address, (Nack(seq=3),))
            await wait_for(lambda: Nack(seq=3) in b.heard())
            with pytest.raises(BlockingIOError):
                stranger.recv(2048)  # nobody answered any of that
        counters = b.sockets.counters()
        assert counters["oversize"] == 1
        assert counters["truncated"] > 50


async def test_whatever_one_packet_brings_about_the_next_one_is_heard() -> None:
    def broken(_run: Run, _at: Address) -> None:
        raise KeyError("no such thing")

    async with (
        peer(gate_of(N1), V4) as a,
        peer(gate_of(N2), V4, on_duplicate=broken) as b,
        peer(gate_of(N2, 9), V4) as c,
    ):
        c.sockets.send(N2, b.address, (Nack(seq=1),))
        await wait_for(lambda: b.sockets.counters().get("failed"))
        a.sockets.send(N2, b.address, (Nack(seq=2),))
        await wait_for(lambda: b.heard() == [Nack(seq=2)])


async def test_a_message_that_fits_into_no_packet_is_not_sent_and_ends_nothing() -> None:
    huge = Delta(node=N1, epoch=1, gc_version=0, from_version=0, to_version=1, entries=(Entry("node", 1, bytes(2000)),))
    async with peer(gate_of(N1), V4) as a, peer(gate_of(N2), V4) as b:
        a.sockets.send(N2, b.address, (huge,))
        a.sockets.send(N2, b.address, (Nack(seq=1),))
        await wait_for(lambda: b.heard() == [Nack(seq=1)])
        assert a.sockets.counters()["unsendable"] == 1


async def test_an_inbox_that_takes_nothing_any_more_ends_it_loudly() -> None:
    class Full(Exception):
        pass

    def full(_event: GossipEvent) -> None:
        raise Full

    async with peer(gate_of(N1), V4) as a:
        with bind_datagrams([V4], 0) as bound:
            with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
                async with trio.open_nursery() as nursery:
                    await nursery.start(GossipSocket(bound, gate_of(N2)).run, full)
                    a.sockets.send(N2, Address(V4, bound.port), (Nack(seq=1),))
                    await trio.sleep(10)
            assert caught.group_contains(Full)


# --- what the network says --------------------------------------------------------------------------------------


@families
async def test_a_port_where_nobody_listens_is_told(host: str) -> None:
    async with peer(gate_of(N1), host) as a:
        with closed_port(host) as closed:
            a.sockets.send(N2, closed, (Nack(seq=1),))
            await wait_for(lambda: a.events)
            assert a.events == [DatagramRefused(address=closed)]


@families
async def test_a_refusal_is_not_taken_for_that_of_the_next_one(host: str) -> None:
    """The kernel tells the error of one datagram at the next call, whomever that is about, and then sends nothing."""
    async with peer(gate_of(N1), host) as a, peer(gate_of(N2), host) as b:
        a.gate.link_verified(Run(N2, 1, 1), 0)
        b.gate.link_verified(Run(N1, 1, 1), 0)
        with closed_port(host) as closed:
            for number in range(20):
                a.sockets.send(N2, closed, (Nack(seq=0),))
                a.sockets.send(N2, b.address, (Nack(seq=number),))
            await wait_for(lambda: len(b.heard()) == 20)
            assert {type(event) for event in a.events} == {DatagramRefused}
            assert {event.address for event in a.events if isinstance(event, DatagramRefused)} == {closed}


async def test_an_error_that_quotes_nothing_of_ours_is_believed_by_nobody() -> None:
    """ICMP can be forged by who knows two addresses; but not our run's 64 random bits."""
    with bind_datagrams([V4], 0) as bound, closed_port(V4) as closed:
        gate = gate_of(N1)
        own = GossipSocket(bound, gate)
        events: list[GossipEvent] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(own.run, events.append)
            forged = gate_of(N2).seal((Nack(seq=1),), N1)
            bound.by_family[socket.AF_INET].sendto(forged, (closed.host, closed.port))
            await wait_for(lambda: own.counters().get("errors_not_ours"))
            assert events == []
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "address",
    [Address("fd00::1", 7451), Address("255.255.255.255", 7451)],
    ids=["a family that we have no socket of", "not permitted"],
)
async def test_what_this_host_cannot_send_is_told(address: Address) -> None:
    async with peer(gate_of(N1), V4) as a:
        a.sockets.send(N2, address, (Nack(seq=1),))
        assert a.events == [SendFailed(address=address)]


# --- binding ----------------------------------------------------------------------------------------------------


@families
def test_who_has_the_port_is_named(host: str) -> None:
    with bind_datagrams([host], 0) as bound, pytest.raises(Refused) as caught, bind_datagrams([host], bound.port):
        pass
    comm = Path("/proc/self/comm").read_text().strip()
    assert f"UDP port {bound.port} on {host} is in use by pid {os.getpid()} ({comm})" in caught.value.message
    assert "--peer-port" in caught.value.hint
    assert caught.value.code == "port_taken"


def test_an_address_of_another_host_is_refused_with_what_to_do() -> None:
    with pytest.raises(GpulayerError) as caught, bind_datagrams(["192.0.2.1"], 0):
        pass
    assert "192.0.2.1" in caught.value.message
    assert "--bind" in caught.value.hint


def test_two_addresses_of_one_family_are_one_too_many() -> None:
    with pytest.raises(InvalidRequest, match="one family"), bind_datagrams([V4, "127.0.0.2"], 0):
        pass


@pytest.mark.skipif(not has_ipv6, reason="no IPv6 here")
def test_a_free_port_is_free_in_both_families_or_another_is_taken() -> None:
    with bind_datagrams([V4, V6], 0) as bound:
        assert {each.getsockname()[1] for each in bound.by_family.values()} == {bound.port}
        with pytest.raises(Refused), bind_datagrams([V4, V6], bound.port):
            pass
    with bind_datagrams([V4, V6], bound.port):
        pass  # what was bound is given back, also after the refusal


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_NET_ADMIN, or a large net.core.rmem_max")
def test_the_receive_buffer_holds_what_comes_while_we_stand_still() -> None:
    with bind_datagrams([V4], 0) as bound:
        assert bound.receive_buffer_bytes >= gossip_socket.RECEIVE_BUFFER_BYTES


# --- a third party on the wire ------------------------------------------------------------------------------------


def _payloads(capture: bytes) -> list[bytes]:
    """The UDP payloads of a pcap file of a loopback interface (Ethernet and IPv4 headers before them)."""
    magic, *_, link = struct.unpack_from("=IHHiIII", capture)
    assert magic == 0xA1B2C3D4
    assert link == 1
    found, at = [], 24
    while at + 16 <= len(capture):
        _, _, size, _ = struct.unpack_from("=IIII", capture, at)
        frame = capture[at + 16 : at + 16 + size]
        found.append(frame[14 + 4 * (frame[14] & 15) + 8 :])
        at += 16 + size
    return found


@asynccontextmanager
async def captured(path: Path, port: int) -> AsyncIterator[None]:
    with subprocess.Popen(  # noqa: ASYNC220
        ["tcpdump", "-i", "lo", "-U", "-Z", "root", "--immediate-mode", "-w", str(path), "udp", "port", str(port)],
        stderr=subprocess.PIPE,
    ) as tcpdump:
        try:
            assert tcpdump.stderr is not None
            said = b""
            while b"listening on" not in said:
                line = await trio.to_thread.run_sync(tcpdump.stderr.readline, abandon_on_cancel=True)
                assert line, said
                said += line
            yield
        finally:
            tcpdump.terminate()
            tcpdump.wait(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="capturing needs root")
@pytest.mark.skipif(shutil.which("tcpdump") is None, reason="there is no tcpdump here")
async def test_who_captures_reads_nothing_and_changes_nothing_by_sending_it_again(tmp_path: Path) -> None:
    record = b'{"name":"n1","endpoint":"10.0.0.5:20001","job":"llama-70b"}' * 4
    delta = Delta(
        node=N1, epoch=1, gc_version=0, from_version=0, to_version=3, entries=(Entry("r/j-abcdefghij.0.1", 3, record),)
    )
    path = tmp_path / "capture"
    with trio.fail_after(60):
        async with peer(gate_of(N1), V4) as a, peer(gate_of(N2), V4) as b:
            async with captured(path, b.address.port):
                for number in range(10):
                    a.sockets.send(N2, b.address, (delta, Nack(seq=number)))
                    b.sockets.send(N1, a.address, (Nack(seq=number),))
                    await trio.sleep(0.01)
                await wait_for(lambda: len(b.heard()) == 20)
                sent = a.gate.datagrams_sent + b.gate.datagrams_sent
                await wait_for(lambda: path.exists() and len(_payloads(path.read_bytes())) == sent)
            payloads = _payloads(path.read_bytes())
            clear = (record, b"r/j-abcdefghij.0.1", N1.encode())
            readable = {text[at : at + 5] for text in clear for at in range(len(text) - 4)}
            assert not [text for text in readable for payload in payloads if text in payload]

            before = len(b.events), len(a.events)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
                thief.setblocking(False)
                for payload in payloads * 2:
                    thief.sendto(payload, (V4, b.address.port))
                    thief.sendto(payload, (V4, a.address.port))
                counted = 4 * len(payloads)
                await wait_for(lambda: _passed_over(a) + _passed_over(b) == counted)
                with pytest.raises(BlockingIOError):
                    thief.recv(2048)
            assert (len(b.events), len(a.events)) == before
        # One that has restarted knows nobody. It asks whether the run still lives, and nobody can say so.
        async with peer(gate_of(N2, 2), V4) as again:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
                for payload in payloads:
                    thief.sendto(payload, (V4, again.address.port))
                await wait_for(lambda: again.gate.counters().get("challenged"))
                for payload in payloads:  # also the answer that is among them
                    thief.sendto(payload, (V4, again.address.port))
                await wait_for(lambda: again.gate.counters().get("wrong_token", 0) >= 1)
            assert again.events == []


def _passed_over(one: Peer) -> int:
    counters = one.gate.counters()
    return counters.get("replayed", 0) + counters.get("own", 0)
