"""The shim's unix socket: JSON lines, from as many clients as come (the daemon, and its successor), each within bounds.

Nothing here waits for a client: one that does not read what it is sent is disconnected, one that sends nonsense too.
What requests mean is not known here.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

LINE_BYTES_MAX = 4 * 1024 * 1024
# Two of the longest answers: a client that is further behind is not reading.
UNSENT_BYTES_MAX = 2 * LINE_BYTES_MAX
# The daemon holds one, its successor another; the rest is for people with a debugger.
CONNECTIONS_MAX = 32
READ_BYTES = 64 * 1024
# A request brings the locks of one replica's devices, which are a handful.
FDS_MAX = 64
SOCKET_NAME = "shim.sock"
_RIGHTS_BYTES = socket.CMSG_SPACE(FDS_MAX * 4)
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Connection:
    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.fd = peer.fileno()
        self.received = bytearray()
        self.unsent = bytearray()
        self.is_open = True
        self.closes_when_sent = False
        self.received_fds: list[int] = []
        """Descriptors that came with requests (SCM_RIGHTS), not yet taken by one."""
        self.is_behind = False
        """Whether epoll is to say when more can be sent."""


class Channel:
    """`answer` gets each request and its connection; what it returns is sent, None is for later (see reply())."""

    def __init__(self, listener: socket.socket, epoll: select.epoll, answer: Callable[[Connection, Json], Json | None]):
        self._listener = listener
        self._epoll = epoll
        self._answer = answer
        self._connections: dict[int, Connection] = {}
        epoll.register(listener.fileno(), select.EPOLLIN)

    def listen_on(self, listener: socket.socket) -> None:
        """From now on, instead of the listener that nobody can find any more; connections stay."""
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._listener.close()  # which takes it out of epoll, too
        self._listener = listener

    def owns(self, fd: int) -> bool:
        return fd in self._connections or fd == self._listener.fileno()

    def handle(self, fd: int, events: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            self._accept()
            return
        if events & select.EPOLLOUT:
            self._flush(connection)
        if connection.is_open and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._receive(connection)

    def reply(self, connection: Connection, request_id: object, answer: Json) -> None:
        self._send(connection, {"id": request_id, **answer})

    def reply_with_fds(self, connection: Connection, request_id: object, answer: Json, fds: list[int]) -> None:
        """The descriptors travel with the first byte of the answer."""
        if not fds:
            self.reply(connection, request_id, answer)
            return
        if connection.unsent:
            self.reply(connection, request_id, failure("busy", "read what was sent before, and ask again"))
            return
        encoded = _encoded({"id": request_id, **answer})
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
            sent = connection.socket.sendmsg([encoded], [rights])
        except OSError:
            self._close(connection)
            return
        connection.unsent += encoded[sent:]
        self._flush(connection)

    def tell_all(self, event: Json) -> None:
        for connection in list(self._connections.values()):
            self._send(connection, event)

    def close(self) -> None:
        """What is still unsent gets a moment: the answer to `quit` should arrive."""
        for connection in list(self._connections.values()):
            if connection.unsent:
                connection.socket.settimeout(0.5)
                try:
                    connection.socket.sendall(connection.unsent)
                except OSError:
                    pass
            self._close(connection)
        self._listener.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # it changed its mind, or we have no descriptor to spare
        peer.setblocking(False)
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        if uid not in (0, os.geteuid()) or len(self._connections) >= CONNECTIONS_MAX:
            peer.close()
            return
        connection = Connection(peer)
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)

    def _receive(self, connection: Connection) -> None:
        try:
            part, ancillary, flags, _ = connection.socket.recvmsg(READ_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                connection.received_fds += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
        if not part or flags & socket.MSG_CTRUNC or len(connection.received_fds) > FDS_MAX:
            self._close(connection)
            return
        connection.received += part
        if b"\n" not in part:
            if len(connection.received) > LINE_BYTES_MAX:
                self._reject(connection, f"a request longer than {LINE_BYTES_MAX} bytes")
            return
        *lines, rest = connection.received.split(b"\n")
        connection.received = rest
        for line in lines:
            if connection.is_open and not connection.closes_when_sent and line.strip():
                self._take(connection, line)

    def _take(self, connection: Connection, line: bytearray) -> None:
        try:
            request = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            self._reject(connection, "not a JSON object on a line of its own")
            return
        answer = self._answer(connection, request)
        if answer is not None:
            self.reply(connection, request.get("id"), answer)

    def _reject(self, connection: Connection, why: str) -> None:
        connection.closes_when_sent = True
        self._send(connection, {"id": None, **failure("bad_request", why)})

    def _send(self, connection: Connection, message: Json) -> None:
        if not connection.is_open:
            return
        connection.unsent += _encoded(message)
        if len(connection.unsent) > UNSENT_BYTES_MAX:
            self._close(connection)
        else:
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if connection.closes_when_sent and not connection.unsent:
            self._close(connection)
            return
        if connection.is_behind != bool(connection.unsent):
            connection.is_behind = bool(connection.unsent)
            self._epoll.modify(connection.fd, select.EPOLLIN | (select.EPOLLOUT if connection.is_behind else 0))

    def _close(self, connection: Connection) -> None:
        if connection.is_open:
            connection.is_open = False
            del self._connections[connection.fd]
            connection.socket.close()  # which takes it out of epoll, too
            for fd in connection.received_fds:
                os.close(fd)
            connection.received_fds.clear()


def _encoded(message: Json) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def failure(code: str, message: str, error_number: int | None = None) -> Json:
    return {"ok": False, "error": {"code": code, "message": message, "errno": error_number}}


def listen(directory_fd: int) -> socket.socket:
    """Binds shim.sock, in place of one that a dead shim left; the caller holds the lock that says so.

    Through /proc/self/fd, since a socket's path may have no more than 107 bytes and a data directory may.
    """
    try:
        os.unlink(SOCKET_NAME, dir_fd=directory_fd)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}")
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener
