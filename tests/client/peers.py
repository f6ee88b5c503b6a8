"""What a client may meet in place of a daemon: one whose answers break off, and a line that loses them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.daemon import Daemon


@contextmanager
def answering(path: Path, answers: list[bytes], *, pause_seconds: float = 0) -> Iterator[list[bytes]]:
    """One connection after the other gets the next of `answers`, and is closed. Yields what was asked. With a pause,
    each five bytes of a body come after one.
    """
    asked: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                asked.append(_request(connection))
                if not pause_seconds:
                    connection.sendall(answer)
                    continue
                with suppress(OSError):  # whoever asked may have enough
                    head, end, body = answer.partition(b"\r\n\r\n")
                    connection.sendall(head + end)
                    for begin in range(0, len(body), 5):
                        time.sleep(pause_seconds)
                        connection.sendall(body[begin : begin + 5])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        listener.close()
        thread.join(10)


@contextmanager
def answers_lost(daemon: Daemon, path: Path, count: int) -> Iterator[list[bytes]]:
    """A socket in front of the daemon's that hands requests on, and drops the first `count` answers."""
    requests: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                asked, _ = listener.accept()
            except OSError:
                return
            with asked, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as real:
                asked.settimeout(10)
                real.settimeout(10)
                real.connect(str(daemon.socket))
                request = _request(asked)
                requests.append(request)
                real.sendall(request)
                answer = real.recv(1 << 20)
                if len(requests) > count:
                    while b"}" not in answer:
                        answer += real.recv(1 << 20)
                    asked.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def _request(connection: socket.socket) -> bytes:
    """A GET, or a POST with a body in JSON."""
    request = connection.recv(1 << 20)
    while not (request.endswith(b"\r\n\r\n") if request.startswith(b"GET") else request.endswith(b"}")):
        request += connection.recv(1 << 20)
    return request


def open_sockets() -> set[str]:
    """Those of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def port_of(daemon: Daemon) -> int:
    """Where it serves http."""
    return int(json.loads((daemon.data_dir / "api.json").read_text())["port"])
