"""Which daemon to ask: an address, found from what the caller gave, the environment, and where daemons keep their
socket.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.places import API_PORT, SOCKET_NAME, default_data_dir


@dataclass(frozen=True, slots=True)
class UnixSocket:
    path: str

    @property
    def is_local(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class Loopback:
    """Plain HTTP, and so loopback only: nothing crosses a network in clear text."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """A loopback port may be the end of a tunnel to another host, so it says nothing about whose files are
        meant.
        """
        return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


Address: TypeAlias = UnixSocket | Loopback


def find_address(url: str | None, data_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Address:
    """What is said wins over the environment, a URL over a data directory; else the socket where this user's daemon
    has it.

    Raises InvalidRequest for a URL that is none, or that would send a token over a network in clear text.
    """
    if data_dir is not None and not isinstance(data_dir, str | os.PathLike):
        raise InvalidRequest(
            f"data_dir: {data_dir!r:.80} is not a path", hint='write it like data_dir="/var/lib/gpulayer"'
        )
    if url:
        return parse_url(url)
    if not data_dir and environ.get("GPULAYER_URL"):
        return parse_url(environ["GPULAYER_URL"], "$GPULAYER_URL")
    directory = data_dir or default_data_dir(environ, os.getuid())
    return UnixSocket(os.path.join(os.path.abspath(os.path.expanduser(directory)), SOCKET_NAME))


def parse_url(url: str, what: str = "url") -> Address:
    """`unix:///path`, or `http://127.0.0.1:7450` (the port may be left out)."""
    if not isinstance(url, str):
        raise InvalidRequest(f"{what}: {url!r:.80} is not text", hint="write unix:///path or http://127.0.0.1:7450")
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "unix":
        if not rest.startswith("/"):
            raise InvalidRequest(
                f"{what}: {url!r} names no absolute path", hint="write it like unix:///path/gpulayer.sock"
            )
        return UnixSocket(rest)
    if separator and scheme == "http":
        host, port = _host_and_port(rest, url, what)
        if not _is_loopback(host):
            raise InvalidRequest(
                f"{what}: {url!r} would send the token over a network in clear text",
                hint=f"make a tunnel, as in ssh -L {port}:127.0.0.1:{port} {host}, and use http://127.0.0.1:{port}",
            )
        return Loopback("127.0.0.1" if host == "localhost" else host, port)
    if separator and scheme == "https":
        raise InvalidRequest(
            f"{what}: {url!r} asks for TLS, which this version does not have yet",
            hint="make a tunnel, as in ssh -L 7450:127.0.0.1:7450 HOST, and use http://127.0.0.1:7450",
        )
    raise InvalidRequest(
        f"{what}: {url!r} is not a URL of a node", hint="write unix:///path/gpulayer.sock or http://127.0.0.1:7450"
    )


def _host_and_port(rest: str, url: str, what: str) -> tuple[str, int]:
    authority, _, path = rest.partition("/")
    host, port_text = authority, ""
    if authority.startswith("["):
        host, _, after = authority[1:].partition("]")
        port_text = after.removeprefix(":")
    elif ":" in authority:
        host, _, port_text = authority.rpartition(":")
    is_port = not port_text or (port_text.isdecimal() and 1 <= int(port_text[:6]) <= 65535)
    if not host or path or not is_port or "@" in host:
        raise InvalidRequest(f"{what}: {url!r} is not host and port", hint="write it like http://127.0.0.1:7450")
    return host, int(port_text) if port_text else API_PORT


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
