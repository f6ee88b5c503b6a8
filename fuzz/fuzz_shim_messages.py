"""Lines on a shim's socket, in both directions: what the shim is asked, and what the daemon is answered."""

from __future__ import annotations

import functools
import json
import os
import select
import socket
from collections.abc import Callable
from typing import Any, cast

from gpulayer.runtime.shim_link import ShimLink
from gpulayer.shim import requests
from gpulayer.shim.channel import Channel, Connection

# Less than the buffer of a unix socket, so that one thread can be both ends.
BYTES_MAX = 48 * 1024
FIELDS: tuple[Callable[[dict[str, Any]], object], ...] = (
    requests.command,
    requests.names,
    requests.small_note,
    lambda request: requests.seconds(request, "grace_seconds", 10.0),
    lambda request: requests.field(request, "op", str),
    lambda request: requests.signal_number(request.get("signal", "TERM")),
)


def one(data: bytes) -> None:
    _shim(data)
    _daemon(data)


def _answer(_connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    for read in FIELDS:
        try:
            read(request)
        except requests.BadRequest as error:
            refusal = str(error)
        else:
            continue
        assert refusal
    return {"ok": True}


@functools.cache
def _channel() -> tuple[socket.socket, Channel]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(f"\0gpulayer-fuzz-{os.getpid()}")  # abstract: no file is left behind
    listener.listen(8)
    return listener, Channel(listener, select.epoll(), _answer)


def _shim(data: bytes) -> None:
    listener, channel = _channel()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(listener.getsockname())
        channel.handle(listener.fileno(), select.EPOLLIN)
        client.sendall(data[:BYTES_MAX])
        client.shutdown(socket.SHUT_WR)
        client.setblocking(False)
        (fd,) = channel._connections
        while channel.owns(fd):
            channel.handle(fd, select.EPOLLIN | select.EPOLLOUT)
            answered = _received(client)
            for line in answered.splitlines():
                assert isinstance(json.loads(line), dict) or not answered.endswith(b"\n")


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 20)
    except (BlockingIOError, ConnectionResetError):
        return b""


def _daemon(data: bytes) -> None:
    said: list[dict[str, Any]] = []
    link = ShimLink(cast(Any, None), cast(Any, None), said.append)
    link._greeted = True
    link._waiting[1] = said.append
    for line in data.split(b"\n"):
        link._take(line)
    assert all(isinstance(message, dict) for message in said)
