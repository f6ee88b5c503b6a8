"""Sends calls with http.client, over a unix socket, loopback or TLS, with every wait bounded and every failure a
GpulayerError.

http.client, because a command line is over sooner than httpx is imported. A connection is made per request; on one host
that costs a tenth of a millisecond, and nothing has to be shared between threads.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

from gpulayer.client.address import Address, Loopback, Secure, UnixSocket
from gpulayer.client.calls import Call, Feed
from gpulayer.client.exchange import (
    ANSWER_BYTES_MAX,
    ANSWER_SECONDS_MAX,
    CONNECT_SECONDS_MAX,
    NoAnswer,
    connectable,
    document_in,
    encoded,
    error_in,
    no_answer,
    not_connected,
    understanding,
)
from gpulayer.client.stream import Absence, Following, Lines, StreamLost
from gpulayer.client.ways import Way, Ways, wrong_authority
from gpulayer.model.errors import GpulayerError, PermissionDenied, Unreachable

T = TypeVar("T")

_READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Open:
    """An answer whose body is still coming. `socket` is there so that a reader can bound each of its waits."""

    response: http.client.HTTPResponse
    socket: socket.socket
    connection: http.client.HTTPConnection

    def close(self) -> None:
        self.response.close()
        self.connection.close()


class Transport:
    """Where requests go, and as whom. Keeps nothing between them, so threads may share it."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address = address
        self._ways = Ways(address, token)

    def call(self, call: Call[T]) -> T:
        """What is answered; raises what the answer says went wrong."""
        opened = self.open(call, call.path)
        try:
            content = _whole(opened.response)
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        finally:
            opened.close()
        document = document_in(content, self.address)
        with understanding(self.address):
            return call.read(document)

    def follow(self, feed: Feed[T], seconds: float, absence: Absence | None) -> Generator[T, None, None]:
        """What the feed brings; WaitTimeout after `seconds`. The connection is closed with the generator."""
        following = Following(feed, seconds, time.monotonic(), absence)
        while True:
            try:
                opened = self.open(feed, following.path(), following.patience(time.monotonic()))
                following.opened(time.monotonic())
                with closing(_documents(opened, following)) as documents:
                    for document in documents:
                        following.got(document)
                        with understanding(self.address):
                            read, is_last = feed.read(document), feed.is_last(document)
                        yield read
                        if is_last:
                            return
                return
            except Unreachable as error:
                pause_seconds = following.pause_after(error, time.monotonic())
            time.sleep(pause_seconds)

    def open(self, asked: Call[Any] | Feed[Any], path: str, seconds: float = ANSWER_SECONDS_MAX) -> Open:
        """Ask, and return once the answer has begun and is a good one; the caller reads and closes."""
        connection, way = self._connected()
        try:
            connection.sock.settimeout(seconds)
            connected = connection.sock
            headers = way.headers | (dict(asked.headers) if isinstance(asked, Call) else {})
            content = None
            if asked.body is not None:
                content = encoded(asked.body)
                headers["Content-Type"] = "application/json"
            try:
                connection.request(asked.method, path, body=content, headers=headers)
                response = connection.getresponse()
                if response.status < 400:
                    return Open(response, connected, connection)
                content = _whole(response)
            except (OSError, http.client.HTTPException) as error:
                raise self._no_answer(error) from error
        except BaseException:
            connection.close()
            raise
        connection.close()
        raise error_in(content, response.status)

    def peer_pid(self) -> int | None:
        """The process behind the socket, where there is one: the kernel says it (SO_PEERCRED, unix(7))."""
        if not isinstance(self.address, UnixSocket):
            return None
        connection, _ = self._connected()
        try:
            return pid_behind(connection.sock)
        finally:
            connection.close()

    def _connected(self) -> tuple[http.client.HTTPConnection, Way]:
        failed: list[GpulayerError] = []
        for way in self._ways:
            try:
                connected = _connect(way)
            except (PermissionDenied, Unreachable) as error:
                failed.append(error)
                continue
            self._ways.led_there(way)
            # The name is only for http.client, which puts it nowhere: the Host header is our own.
            connection = http.client.HTTPConnection("localhost", timeout=CONNECT_SECONDS_MAX)
            connection.sock = connected
            return connection, way
        raise self._ways.nowhere(failed)

    def _no_answer(self, error: Exception) -> NoAnswer:
        return no_answer(self.address, in_time=not isinstance(error, TimeoutError))


def pid_behind(connected: socket.socket) -> int | None:
    """The process at the other end of a unix socket."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    # 0: a process of another pid namespace.
    return pid or None


def _documents(opened: Open, following: Following) -> Generator[Any, None, None]:
    """What one connection brings. Ends where the daemon ends it."""
    lines = Lines()
    try:
        while True:
            opened.socket.settimeout(following.patience(time.monotonic()))
            try:
                chunk = opened.response.read1(_READ_BYTES)
            except TimeoutError:
                raise following.silence(time.monotonic()) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                # ValueError: http.client's words for a chunk whose length was cut off.
                raise StreamLost() from error
            if not chunk:
                break
            yield from lines.documents(chunk)
        yield from lines.rest()
    finally:
        opened.close()


def _whole(response: http.client.HTTPResponse) -> bytes:
    """The body. http.client says nothing of one that breaks off, where it was told how much to read."""
    content = response.read(ANSWER_BYTES_MAX)
    if response.length:
        raise http.client.IncompleteRead(content, response.length)
    return content


def _connect(way: Way) -> socket.socket:
    try:
        match way.address:
            case UnixSocket(path=path):
                return _connect_unix(path)
            case Loopback(host=host, port=port):
                return _connect_tcp(host, port)
            case Secure():
                return _connect_tls(way)
            case _:
                assert_never(way.address)
    except ssl.SSLCertVerificationError as error:
        raise wrong_authority(way) from error
    except OSError as error:
        raise not_connected(way.address, error) from error


def _connect_tcp(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port), timeout=CONNECT_SECONDS_MAX)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _connect_tls(way: Way) -> socket.socket:
    context = way.context  # a CA that is none is said before anything is tried
    connected = _connect_tcp(*way.endpoint)
    try:
        return context.wrap_socket(connected, server_hostname=way.endpoint[0])
    except BaseException:
        connected.close()
        raise


def _connect_unix(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(CONNECT_SECONDS_MAX)
    try:
        with connectable(path) as name:
            connected.connect(name)
        return connected
    except BaseException:
        connected.close()
        raise
