"""The sockets of the API, and hypercorn's HTTP/1.1 on them. Knows connections and their bounds, no request.

On loopback it is plain HTTP; on any other address TLS, and nothing else: there is no switch, so nobody can forget it.

The sockets are made before anything else of the daemon starts, so that a port in use is an error and not a half start.
hypercorn's protocol is used below its own `serve`, for what that leaves open: how many connections there may be, a
client that sends a body nobody reads, one that reads nothing, and an end within a second.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias, cast

import h11
import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr
from starlette.applications import Starlette

from gpulayer.model.errors import GpulayerError, Refused, StorageFailed
from gpulayer.runtime.listeners import listening, owner_of

log = structlog.get_logger()

# Each costs a descriptor and about 30 KB. A full TCP side leaves the unix socket, and so the local admin, in.
CONNECTIONS_MAX = 512
# Of these one address may have a part, where others than this host's own users come in.
CONNECTIONS_PER_ADDRESS_MAX = 128
# A handshake takes a few round trips; who needs longer for it keeps a place from others.
HANDSHAKE_SECONDS_MAX = 5.0
# A header must be there within this time, also the next one of a kept connection (hypercorn calls it keep-alive).
HEADER_SECONDS_MAX = 10.0
HEADER_BYTES_MAX = 32 * 1024
# How long requests under way may still take once the daemon shall stop; streams end at once.
GRACE_SECONDS = 0.8
# Closing a socket with unread input resets the connection, and the client may never see the answer (RFC 9112 §9.6).
# So what still comes is read away, within these bounds.
LINGER_SECONDS = 2.0
LINGER_BYTES_MAX = 256 * 1024 * 1024
BACKLOG = 128
# sockaddr_un holds 108 bytes with the zero at the end (unix(7)).
UNIX_PATH_BYTES_MAX = 107

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)

Tls: TypeAlias = Callable[[], ssl.SSLContext]
"""Asked for each connection, so that a certificate is replaced without a restart. Making one anew costs a millisecond;
whoever gives it keeps it."""


# --- the sockets ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundSockets:
    """Bound, and listening: who connects now waits until serve() begins."""

    unix: socket.socket
    tcp: socket.socket | None
    """None: the unix socket is all there is."""

    @property
    def port(self) -> int | None:
        return None if self.tcp is None else cast(int, self.tcp.getsockname()[1])

    @property
    def needs_tls(self) -> bool:
        """Whether others than this host can come in."""
        return self.tcp is not None and not ip_address(self.tcp.getsockname()[0].partition("%")[0]).is_loopback


@contextmanager
def bind_sockets(*, unix_path: Path, host: str, port: int | None) -> Iterator[BoundSockets]:
    """Both sockets, or a GpulayerError that says who has the port. The socket file goes at the end. `port`: 0 for any
    that is free, None for no TCP at all.

    A socket file that is there already is taken for a stale one: the caller holds the lock of the data directory.
    """
    tcp = None if port is None else _bind_tcp(host, port)
    try:
        unix = _bind_unix(unix_path)
        try:
            yield BoundSockets(unix, tcp)
        finally:
            unix.close()
            try:
                unix_path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("api.socket_file_left", path=str(unix_path), reason=error.strerror)
    finally:
        if tcp is not None:
            tcp.close()


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # Only over connections in TIME_WAIT of an earlier daemon; Linux refuses it while another socket listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise GpulayerError(
                f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}",
                hint=_hint_for(error),
                code="port_taken",
            ) from error
        raise Refused(
            f"port {port} on {host} is in use{_by_whom(port)}",
            hint="stop that program, or choose another port with --api-port",
            code="port_taken",
        ) from error
    return bound


def _hint_for(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "--bind takes an address that this host has (ip address shows them), or 0.0.0.0 for all of them"
    return "choose another port with --api-port"


def _by_whom(port: int) -> str:
    """Best effort: another user's process cannot be looked into."""
    try:
        found = [each for each in listening() if each.port == port]
        pids = owner_of(found[0].inode) if found else []
        if not pids:
            return f" by a process of uid {found[0].uid}" if found else ""
        name = Path(f"/proc/{pids[0]}/comm").read_text().strip()
        return f" by pid {pids[0]} ({name})"
    except OSError:
        return ""


def _bind_unix(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    directory = -1
    try:
        _remove_stale(path)
        address = str(path)
        if len(os.fsencode(address)) > UNIX_PATH_BYTES_MAX:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            address = f"/proc/self/fd/{directory}/{path.name}"
        # bind() makes the file, so the mask, and not a later chmod, keeps others out from its first moment.
        before = os.umask(0o177)
        try:
            bound.bind(address)
        finally:
            os.umask(before)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise StorageFailed(
            f"cannot make the socket {path}: {error.strerror}", hint="choose another directory with --data-dir"
        ) from error
    finally:
        if directory >= 0:
            os.close(directory)
    return bound


def _remove_stale(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file of that name that is no socket")
    os.unlink(path)


# --- serving --------------------------------------------------------------------------------------------------------


async def serve(
    app_trusted: Starlette,
    app_tcp: Starlette | None,
    sockets: BoundSockets,
    *,
    shutdown: trio.Event,
    tls: Tls | None = None,
    task_status: trio.TaskStatus[int | None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Until `shutdown` is set and what was under way has ended, a second at most. Reports the TCP port, if there is
    one; then there is an `app_tcp`, too, and `tls` if others than this host can come in."""
    assert tls is not None or not sockets.needs_tls, "nothing crosses a network in clear text"
    async with trio.open_nursery() as nursery:
        sides = [_Side(app_trusted, sockets.unix, shutdown, nursery, None)]
        if sockets.tcp is not None:
            assert app_tcp is not None
            sides.append(_Side(app_tcp, sockets.tcp, shutdown, nursery, tls if sockets.needs_tls else None))
        accepting = [await nursery.start(side.accept) for side in sides]
        task_status.started(sockets.port)
        await shutdown.wait()
        for scope in accepting:
            scope.cancel()
        for side in sides:
            side.hurry()
            await side.context.terminated.set()
        with trio.move_on_after(GRACE_SECONDS):
            for side in sides:
                await side.wait_for_none()
        for side in sides:
            side.abort()
        nursery.cancel_scope.cancel()


def _config() -> Config:
    config = Config()
    # Its lines would be of another form than the daemon's. What goes wrong in a request is logged by the app.
    config.errorlog = None
    config.accesslog = None
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADER_BYTES_MAX
    config.keep_alive_timeout = HEADER_SECONDS_MAX
    config.keep_alive_max_requests = 1_000_000
    return config


class _Side:
    """One listening socket and its connections."""

    def __init__(
        self, app: Starlette, listener: socket.socket, shutdown: trio.Event, nursery: trio.Nursery, tls: Tls | None
    ) -> None:
        self.context = WorkerContext(None)
        self.streams: set[_Stream] = set()
        self._app = ASGIWrapper(cast(Any, app))
        self._config = _config()
        self._listener = listener
        self._nursery = nursery
        self._tls = tls
        self._sources: Counter[str] = Counter()
        self._gone = trio.lowlevel.ParkingLot()
        # Handlers find it in scope["state"]: what streams without an end wait for beside their news.
        self._state = ConnectionState({"shutdown": shutdown})

    async def accept(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        # A copy of the descriptor, since trio closes what it was given; the original is the caller's.
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        with trio.CancelScope() as scope:
            task_status.started(scope)
            # serve_listeners waits out EMFILE and the like instead of ending.
            await trio.serve_listeners(self._handle, [listener], handler_nursery=self._nursery)

    async def _handle(self, connection: trio.SocketStream) -> None:
        source = _source_of(connection)
        if len(self.streams) >= CONNECTIONS_MAX or (
            self._tls is not None and self._sources[source] >= CONNECTIONS_PER_ADDRESS_MAX
        ):
            await _turn_away(connection, is_plain=self._tls is None)
            return
        stream = _Stream(connection)
        self.streams.add(stream)
        self._sources[source] += 1
        try:
            if self._tls is None or await stream.secure(self._tls()):
                await _Connection(self._app, self._config, self.context, self._state, cast(Any, stream))
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # the client is gone
        except* Exception:
            # The edge of one connection: what a client brought about here must not end the daemon.
            log.exception("api.connection_failed")
        finally:
            self.streams.discard(stream)
            self._sources[source] -= 1
            if not self._sources[source]:
                del self._sources[source]
            self._gone.unpark_all()
            connection.socket.close()

    async def wait_for_none(self) -> None:
        while self.streams:
            await self._gone.park()

    def hurry(self) -> None:
        for stream in self.streams:
            stream.linger_seconds = 0.1

    def abort(self) -> None:
        for stream in self.streams:
            stream.abort()


def _source_of(connection: trio.SocketStream) -> str:
    try:
        name = connection.socket.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""


async def _turn_away(connection: trio.SocketStream, *, is_plain: bool) -> None:
    if is_plain:  # a handshake for a refusal would cost more than the request
        message = f"{CONNECTIONS_MAX} connections are open, no more are taken"
        await _say(connection, _BUSY, {"code": "unreachable", "message": message, "hint": "try again"})
    connection.socket.close()


async def _say(connection: trio.SocketStream, answer: bytes, document: object) -> None:
    body = json.dumps(document).encode()
    with trio.move_on_after(1):
        try:
            await connection.send_all(answer % (len(body), body))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


class _Stream:
    """A connection as hypercorn's TCPServer uses it, that closes without losing its last answer and can be aborted.

    hypercorn sends within a shield. A client that reads nothing would hold that send, and the daemon's end, for ever.
    """

    def __init__(self, connection: trio.SocketStream) -> None:
        self.linger_seconds = LINGER_SECONDS
        self.is_secure = False
        self._connection = connection
        self._channel: trio.SocketStream | trio.SSLStream[trio.SocketStream] = connection
        """What is sent and read; closing is the connection's, below it."""
        self._sending = trio.CancelScope()
        self._aborted = False
        self._closing = False
        self._is_reading = False
        self._peer_ended = trio.Event()
        self._drained_bytes = 0

    @property
    def socket(self) -> trio.socket.SocketType:
        return self._connection.socket

    async def secure(self, context: ssl.SSLContext) -> bool:
        """The TLS handshake; False where there came none in time."""
        # Compatible: clients close without TLS's own words for it, and HTTP says itself what is whole.
        channel = trio.SSLStream(self._connection, context, server_side=True, https_compatible=True)
        with trio.move_on_after(HANDSHAKE_SECONDS_MAX):
            try:
                await channel.do_handshake()
                self._channel, self.is_secure = channel, True
            except trio.BrokenResourceError as error:
                if isinstance(error.__cause__, ssl.SSLError) and error.__cause__.reason == "HTTP_REQUEST":
                    message = "this port speaks TLS, and what came was plain HTTP"
                    document = {"code": "invalid_request", "message": message, "hint": "use https:// in the URL"}
                    await _say(self._connection, _PLAIN, document)
        return self.is_secure

    async def send_all(self, data: bytes) -> None:
        if self._aborted:
            raise trio.BrokenResourceError
        # A scope of its own for each call, so that one that was cancelled is never entered again.
        self._sending = trio.CancelScope()
        with self._sending as scope:
            await self._channel.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError

    async def receive_some(self, max_bytes: int) -> bytes:
        self._is_reading = True
        try:
            while True:
                data = bytes(await self._channel.receive_some(max_bytes))
                if not data:
                    self._peer_ended.set()
                if not self._closing:
                    return data
                if not self._goes_on_draining(data):
                    self._peer_ended.set()
                    raise trio.ClosedResourceError
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._peer_ended.set()
            raise
        finally:
            self._is_reading = False

    async def send_eof(self) -> None:
        await self._connection.send_eof()

    async def aclose(self) -> None:
        if self._closing:
            return
        self._closing = True
        with trio.move_on_after(self.linger_seconds):
            try:
                await self._connection.send_eof()
                if self._is_reading:
                    await self._peer_ended.wait()
                while not self._peer_ended.is_set() and self._goes_on_draining(
                    bytes(await self._connection.receive_some(65536))
                ):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                pass
        self._connection.socket.close()

    def abort(self) -> None:
        self._aborted = True
        self._sending.cancel()
        self._peer_ended.set()
        self._connection.socket.close()

    def _goes_on_draining(self, data: bytes) -> bool:
        self._drained_bytes += len(data)
        return bool(data) and self._drained_bytes <= LINGER_BYTES_MAX


class _Connection(TCPServer):
    """hypercorn's connection, with HTTP/1.1 and nothing else: no upgrade to HTTP/2 or WebSocket to keep safe."""

    async def run(self) -> None:
        server_stream = cast(Any, self.stream)
        try:
            family = server_stream.socket.family
            client = parse_socket_addr(family, server_stream.socket.getpeername())
            server = parse_socket_addr(family, server_stream.socket.getsockname())
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = _Protocol(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    server_stream.is_secure,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.protocol.initiate()
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
                # Else a client that is gone would hold its place until the time for its next header is over.
                await self.idle_task.stop()
        finally:
            await self._close()


def _origin_form(target: bytes) -> bytes:
    """A client that takes us for a proxy sends the whole URL, and a server has to take it (RFC 9112 §3.2.2)."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    return b"/" + rest.partition(b"/")[2]


class _Protocol(ProtocolWrapper):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.protocol = _Http1(*arguments)


class _Http1(H11Protocol):
    async def _check_protocol(self, event: h11.Request) -> None:
        """An upgrade may be ignored (RFC 9110 §7.8), and is."""

    async def _create_stream(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii"),
                raw_path=_origin_form(request.target),
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _send_error_response(self, status_code: int) -> None:
        """What is no HTTP gets an answer of the same form as every other error."""
        reason = HTTPStatus(status_code).phrase
        hint = f"headers have at most {HEADER_BYTES_MAX // 1024} KiB" if status_code == 431 else "send HTTP/1.1"
        body = json.dumps(
            {"code": "invalid_request", "message": f"not a request that can be read: {reason}", "hint": hint}
        ).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
