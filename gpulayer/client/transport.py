"""One request, one answer: HTTP over a unix socket or loopback, with every wait bounded and every failure a
GpulayerError.

http.client, because a command line is over sooner than httpx is imported. A connection is made per request; on one host
that costs a tenth of a millisecond, and nothing has to be shared between threads. Repeating is for the callers.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpulayer.client.address import Address, Loopback, UnixSocket
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied, Unreachable
from gpulayer.model.places import API_PORT, SOCKET_NAME

CONNECT_SECONDS_MAX = 5.0
# The daemon commits a write within milliseconds; half a minute covers a disk that stalls.
ANSWER_SECONDS_MAX = 30.0
# The largest answer is a page of 1,000 jobs, about 400 bytes each; a status of 10,000 replicas is some 10 MB.
ANSWER_BYTES_MAX = 64 * 2**20
# sun_path holds 108 bytes, the last of them NUL (unix(7)).
_SOCKET_PATH_BYTES_MAX = 107


class NoAnswer(Unreachable):
    """The daemon was reached, and then did not answer: what was asked for may have happened, or not."""


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
        host = str(address).removeprefix("http://") if isinstance(address, Loopback) else "localhost"
        self._headers = {"Accept": "application/json", "Host": host}
        if token and isinstance(address, Loopback):
            # The socket needs no token: whoever may open it is the admin.
            self._headers["Authorization"] = f"Bearer {_checked_token(token)}"

    def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = ANSWER_SECONDS_MAX,
    ) -> Any:
        """The document that is answered, None where there is none; raises what the answer says went wrong."""
        opened = self.open(method, path, body=body, headers=headers, timeout_seconds=timeout_seconds)
        try:
            content = _whole(opened.response)
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        finally:
            opened.close()
        return self._document(content) if content else None

    def open(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = ANSWER_SECONDS_MAX,
    ) -> Open:
        """Ask, and return once the answer has begun and is a good one; the caller reads and closes."""
        connection = self._connected()
        try:
            connection.sock.settimeout(timeout_seconds)
            connected = connection.sock
            sent = dict(self._headers) | dict(headers or {})
            content = None
            if body is not None:
                content = json.dumps(body, separators=(",", ":")).encode()
                sent["Content-Type"] = "application/json"
            try:
                connection.request(method, path, body=content, headers=sent)
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
        raise self._error(response.status, content)

    def peer_pid(self) -> int | None:
        """The process behind the socket, where there is one: the kernel says it (SO_PEERCRED, unix(7))."""
        if not isinstance(self.address, UnixSocket):
            return None
        connection = self._connected()
        try:
            credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        finally:
            connection.close()
        pid: int = struct.unpack("3i", credentials)[0]
        # 0: a process of another pid namespace.
        return pid or None

    def _connected(self) -> http.client.HTTPConnection:
        # The name is only for http.client, which puts it nowhere: the Host header is our own.
        connection = http.client.HTTPConnection("localhost", timeout=CONNECT_SECONDS_MAX)
        try:
            match self.address:
                case UnixSocket(path=path):
                    connection.sock = _connect_unix(path)
                case Loopback(host=host, port=port):
                    connection.sock = socket.create_connection((host, port), timeout=CONNECT_SECONDS_MAX)
                    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except PermissionError as error:
            raise PermissionDenied(
                f"the daemon's socket {self.address} belongs to another user",
                hint="run this as that user (sudo), or use --url http://127.0.0.1:7450 with --token",
            ) from error
        except OSError as error:
            raise Unreachable(
                f"no daemon answers at {self.address} ({error.strerror or error})", hint=start_hint(self.address)
            ) from error
        return connection

    def _no_answer(self, error: Exception) -> NoAnswer:
        what = "did not answer in time" if isinstance(error, TimeoutError) else "went away before it had answered"
        return NoAnswer(
            f"the daemon at {self.address} {what}", hint="see its log; gpulayer status says whether it is back"
        )

    def _document(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError as error:
            raise GpulayerError(
                f"what answers at {self.address} is not a gpulayer daemon ({content[:40]!r})", hint="check --url"
            ) from error

    def _error(self, status: int, content: bytes) -> GpulayerError:
        # Only here, so that what goes well does not pay for the model.
        from gpulayer.wire.http import error_from_json

        try:
            document = json.loads(content)
        except ValueError:
            document = None
        error = error_from_json(document, status)
        if status == 401:
            # The node speaks of headers; people do not write those.
            error.hint = "give --token or set GPULAYER_TOKEN; gpulayer token create, on the node itself, makes one"
        return error


def _whole(response: http.client.HTTPResponse) -> bytes:
    """The body. http.client says nothing of one that breaks off, where it was told how much to read."""
    content = response.read(ANSWER_BYTES_MAX)
    if response.length:
        raise http.client.IncompleteRead(content, response.length)
    return content


def _connect_unix(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(CONNECT_SECONDS_MAX)
    try:
        if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES_MAX:
            connected.connect(path)
            return connected
        # A longer path does not fit into the kernel's structure; a path through the open directory always does.
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connected.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
        return connected
    except BaseException:
        connected.close()
        raise


def start_hint(address: Address) -> str:
    """What to do where no daemon answers: mostly the command that starts the one which was looked for."""
    match address:
        case UnixSocket(path=path) if os.path.basename(path) == SOCKET_NAME:
            directory = os.path.dirname(path)
            is_default = directory in ("/var/lib/gpulayer", os.path.expanduser("~/.local/state/gpulayer"))
            return "start it with: gpulayer up" if is_default else f"start it with: gpulayer up --data-dir {directory}"
        case Loopback(port=port) if port != API_PORT:
            return f"check the port in the URL: a daemon listens on {API_PORT}, or on what its --api-port says"
        case _:
            return "start it with: gpulayer up"


def _checked_token(token: str) -> str:
    cleaned = token.strip()
    if not cleaned.isascii() or not cleaned.isprintable() or " " in cleaned:
        raise InvalidRequest("token: it is not a token", hint="it is one word that begins with gpl_")
    return cleaned
