"""The API beyond loopback: TLS with the cluster's certificates and nothing else, and a token for every request."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from gpulayer.api import server
from gpulayer.model.ids import NodeId
from gpulayer.runtime import trust
from gpulayer.runtime.trust_files import TrustFiles
from tests.node.nodes import Node, running
from tests.runtime.test_peer_links import AUTHORITY, CLUSTER

SECONDS_MAX = 15.0
EVERYWHERE = "0.0.0.0"


def believing(pem: str = AUTHORITY.certificate_pem) -> ssl.SSLContext:
    return trust.client_context(pem, check_names=True)


def ask(node: Node, request: str, context: ssl.SSLContext | None = None) -> bytes:
    """What comes back until the node closes."""
    with secured(node, context) as sock:
        sock.sendall(request.encode())
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


@contextmanager
def secured(node: Node, context: ssl.SSLContext | None = None) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", node.port), timeout=SECONDS_MAX) as plain,
        (context or believing()).wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        yield sock


def get(path: str, token: str = "", host: str = "127.0.0.1") -> str:
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{authorization}\r\n"


async def in_thread(call: Any, *arguments: Any, **keywords: Any) -> Any:
    with trio.fail_after(2 * SECONDS_MAX):
        return await trio.to_thread.run_sync(partial(call, *arguments, **keywords), abandon_on_cancel=True)


async def test_a_request_over_tls_needs_a_token(tmp_path: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        token = await node.token("read")
        assert (await in_thread(ask, node, get("/v1/jobs", token))).startswith(b"HTTP/1.1 200 ")
        assert (await in_thread(ask, node, get("/v1/jobs"))).startswith(b"HTTP/1.1 401 ")
        assert (await in_thread(ask, node, get("/healthz"))).endswith(b"ok\n")


async def test_the_authority_is_told_to_anybody(tmp_path: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        answered = await in_thread(ask, node, get("/v1/ca"))
        assert answered.partition(b"\r\n\r\n")[2].decode() == AUTHORITY.certificate_pem
        assert b"PRIVATE" not in answered


async def test_plain_http_is_told_so_and_gets_nothing(tmp_path: Path) -> None:
    def plain(node: Node) -> bytes:
        with socket.create_connection(("127.0.0.1", node.port), timeout=SECONDS_MAX) as sock:
            sock.sendall(get("/healthz").encode())
            return sock.recv(65536)

    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        answered = await in_thread(plain, node)
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["hint"] == "use https:// in the URL"


async def test_an_older_tls_is_refused(tmp_path: Path) -> None:
    context = believing()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        with pytest.raises(ssl.SSLError):
            await in_thread(ask, node, get("/healthz"), context)


async def test_another_authority_does_not_believe_it(tmp_path: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        with pytest.raises(ssl.SSLCertVerificationError):
            await in_thread(ask, node, get("/healthz"), believing(trust.new_authority("c-2").certificate_pem))


async def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    def serial(node: Node) -> str:
        with secured(node) as sock:
            return str((sock.getpeercert() or {})["serialNumber"])

    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        before = await in_thread(serial, node)
        assert await in_thread(serial, node) == before
        files = TrustFiles(node.directory)
        keys = trust.new_key_pair()
        files.write(
            certificate_pem=trust.issue(AUTHORITY, NodeId(str(node.node_id)), CLUSTER, keys.public_pem, ["127.0.0.1"]),
            private_key_pem=keys.private_pem,
            ca_certificate_pem=AUTHORITY.certificate_pem,
            key_ring=files.read(node.node_id).key_ring,
        )
        assert await in_thread(serial, node) != before


async def test_names_that_are_not_the_nodes_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        token = await node.token("read")
        for host in ("n1.example", "N1.EXAMPLE:7450", "10.0.0.5:7450", "[fd00::5]:7450", "localhost"):
            answered = await in_thread(ask, node, get("/v1/jobs", token, host))
            assert answered.startswith(b"HTTP/1.1 200 "), host
        for host in ("evil.example", "n1.example.evil.example", "10.0.0.5.evil.example"):
            answered = await in_thread(ask, node, get("/v1/jobs", token, host))
            assert answered.startswith(b"HTTP/1.1 400 "), host


async def test_who_is_slow_with_the_handshake_loses_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS_MAX", 0.2)

    def slow(node: Node, begun: bytes) -> float:
        with socket.create_connection(("127.0.0.1", node.port), timeout=SECONDS_MAX) as sock:
            sock.sendall(begun)
            since = time.monotonic()
            try:
                assert sock.recv(1) == b""
            except ConnectionResetError:
                pass
            return time.monotonic() - since

    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        for begun in (b"", b"\x16\x03\x01\x02\x00\x01\x00"):
            assert await in_thread(slow, node, begun) < 5
        assert (await in_thread(ask, node, get("/healthz"))).endswith(b"ok\n")


async def test_garbage_is_no_handshake(tmp_path: Path) -> None:
    def garbage(node: Node, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", node.port), timeout=SECONDS_MAX) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            try:
                return sock.recv(65536)
            except ConnectionResetError:
                return b""

    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        for sent in (b"\x00" * 1000, b"\xff" * 70_000, b"\x16\x03\x01\xff\xff" + b"a" * 1000):
            assert b"HTTP" not in await in_thread(garbage, node, sent)
        assert (await in_thread(ask, node, get("/healthz"))).endswith(b"ok\n")


async def test_one_address_does_not_take_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_PER_ADDRESS_MAX", 3)

    def crowd(node: Node) -> None:
        silent = [socket.create_connection(("127.0.0.1", node.port), timeout=SECONDS_MAX) for _ in range(3)]
        try:
            time.sleep(0.2)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                ask(node, get("/healthz"))
        finally:
            for each in silent:
                each.close()

    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        await in_thread(crowd, node)
        with trio.fail_after(SECONDS_MAX):
            while True:
                try:
                    assert (await in_thread(ask, node, get("/healthz"))).endswith(b"ok\n")
                    break
                except (ssl.SSLError, ConnectionError):
                    await trio.sleep(0.05)


async def test_what_was_answered_arrives_although_a_body_was_refused(tmp_path: Path) -> None:
    """The client is still sending; closing on it would reset the connection before it has read why."""

    def refused(node: Node, token: str) -> bytes:
        size = 30_000_000
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        )
        with secured(node) as sock:
            sock.sendall(head.encode() + b" " * size)
            return sock.recv(65536)

    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        assert (await in_thread(refused, node, await node.token("admin"))).startswith(b"HTTP/1.1 413 ")


async def test_a_large_answer_comes_whole(tmp_path: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        job = await node.place("web", node)
        node.write(job, 0, "".join(f"{number}\n" for number in range(20_000)))
        answered = await in_thread(ask, node, get(f"/v1/jobs/{job}/logs", await node.token("read")))
        assert answered.endswith(b"0\r\n\r\n")
        assert answered.count(b'"text":') == 20_000


async def test_a_stream_over_tls_ends_with_the_daemon(tmp_path: Path) -> None:
    def follow(node: Node, token: str) -> bytes:
        with secured(node) as sock, closing(sock):
            sock.sendall(get(f"/v1/jobs/{job}/watch", token).encode())
            parts = [sock.recv(65536)]
            started.append(True)
            try:
                while part := sock.recv(65536):
                    parts.append(part)
            except (ssl.SSLError, ConnectionError):
                pass  # the transport was closed under it
            return b"".join(parts)

    started: list[bool] = []
    found: list[bytes] = []
    async with trio.open_nursery() as nursery, running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        job = await node.place("web", node)
        token = await node.token("read")

        async def reading() -> None:
            found.append(await in_thread(follow, node, token))

        nursery.start_soon(reading)
        with trio.fail_after(SECONDS_MAX):
            while not started:  # noqa: ASYNC110
                await trio.sleep(0.02)
    assert b"HTTP/1.1 200" in found[0]
    assert not found[0].endswith(b"0\r\n\r\n")


def test_beyond_loopback_there_is_no_way_without_tls(tmp_path: Path) -> None:
    with server.bind_sockets(unix_path=tmp_path / "s", host=EVERYWHERE, port=0) as sockets:
        assert sockets.needs_tls
    with server.bind_sockets(unix_path=tmp_path / "s", host="::", port=0) as sockets:
        assert sockets.needs_tls
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        with server.bind_sockets(unix_path=tmp_path / "s", host=host, port=0) as sockets:
            assert not sockets.needs_tls
