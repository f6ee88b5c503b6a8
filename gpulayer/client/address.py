"""Which daemon to ask: an address, found from what the caller gave, the environment, where daemons keep their socket,
and what `gpulayer login` has kept.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gpulayer.model.errors import InvalidRequest, PermissionDenied
from gpulayer.model.places import API_PORT, SOCKET_NAME, default_data_dir

_CA_CHARS_MAX = 64 * 1024


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """A certificate authority that is believed, and the token for whoever shows a certificate of it."""

    cluster: str
    """Its id; empty where it is not known."""
    ca_pem: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Secure:
    """TLS. Any node of a cluster is as good as another: which host it is does not matter, who issued its certificate
    does."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of nodes of one cluster; the first that answers is asked."""
    trusts: tuple[Trust, ...] = ()
    """One where the cluster is known; else those that it may be."""

    @property
    def is_local(self) -> bool:
        return False

    def __str__(self) -> str:
        host, port = self.endpoints[0]
        return https_url(host, port)


Address: TypeAlias = UnixSocket | Loopback | Secure


def https_url(host: str, port: int) -> str:
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def find_address(url: str | None, data_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Address:
    """What is said wins over the environment, a URL over a data directory; else the socket where this user's daemon
    has it; else, where there is none, the cluster that this user is logged in to.

    Raises InvalidRequest for a URL that is none, or that would send a token over a network in clear text;
    PermissionDenied for an https one of a cluster that nobody has logged in to.
    """
    if data_dir is not None and not isinstance(data_dir, str | os.PathLike):
        raise InvalidRequest(
            f"data_dir: {data_dir!r:.80} is not a path", hint='write it like data_dir="/var/lib/gpulayer"'
        )
    if url:
        return _trusted(url, "url", environ)
    if not data_dir and environ.get("GPULAYER_URL"):
        return _trusted(environ["GPULAYER_URL"], "$GPULAYER_URL", environ)
    directory = data_dir or default_data_dir(environ, os.getuid())
    found = UnixSocket(os.path.join(os.path.abspath(os.path.expanduser(directory)), SOCKET_NAME))
    if data_dir or environ.get("GPULAYER_DATA_DIR") or not _is_absent(found.path):
        return found
    return _only_login(environ) or found


def _is_absent(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # it is not for us to see: whoever asks there hears why
    return False


def _only_login(environ: Mapping[str, str]) -> Address | None:
    from gpulayer.client.logins import read_logins

    logins = read_logins(environ)
    if len(logins) > 1:
        raise InvalidRequest(
            f"no daemon runs here, and you are logged in to {len(logins)} clusters",
            hint="say which: " + " or ".join(f"--url {login.address}" for login in logins[:5]),
        )
    return logins[0].address if logins else None


def _trusted(url: str, what: str, environ: Mapping[str, str]) -> Address:
    """The address, with whom to believe there. A cluster's id stands for all of its nodes."""
    if isinstance(url, str) and "://" not in url:
        from gpulayer.client.logins import read_logins

        named = next((login for login in read_logins(environ) if login.cluster == url), None)
        if named is not None:
            return named.address
    address = parse_url(url, what)
    if not isinstance(address, Secure):
        return address
    if environ.get("GPULAYER_CA_FILE"):
        return replace(address, trusts=(Trust(cluster="", ca_pem=_ca_in(environ["GPULAYER_CA_FILE"])),))
    from gpulayer.client.logins import read_logins

    logins = read_logins(environ)
    # Of a node that is not known, its certificate says whose it is.
    known = [login for login in logins if address.endpoints[0] in login.endpoints] or logins
    if not known:
        raise not_logged_in(address)
    return replace(address, trusts=tuple(login.trust for login in known))


def not_logged_in(address: Address) -> PermissionDenied:
    return PermissionDenied(
        f"you are not logged in to a cluster of {address}",
        hint=f"gpulayer login {address} (or $GPULAYER_CA_FILE, with the cluster's CA in PEM)",
        code="not_logged_in",
    )


def _ca_in(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(_CA_CHARS_MAX)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not PEM"
        raise InvalidRequest(f"$GPULAYER_CA_FILE: cannot read {path}: {why}", hint="name a file in PEM") from error


def parse_url(url: str, what: str = "url") -> Address:
    """`unix:///path`, `http://127.0.0.1:7450` or `https://HOST:7450` (the port may be left out)."""
    if not isinstance(url, str):
        raise InvalidRequest(f"{what}: {url!r:.80} is not text", hint="write https://HOST:7450 or unix:///path")
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
                hint=f"use {https_url(host, port)}: a daemon that other hosts can reach speaks TLS",
            )
        return Loopback("127.0.0.1" if host == "localhost" else host, port)
    if separator and scheme == "https":
        return Secure((_host_and_port(rest, url, what),))
    raise InvalidRequest(
        f"{what}: {url!r} is not a URL of a node",
        hint="write https://HOST:7450, http://127.0.0.1:7450 or unix:///path/gpulayer.sock",
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
        raise InvalidRequest(f"{what}: {url!r} is not host and port", hint="write it like https://10.0.0.5:7450")
    return host, int(port_text) if port_text else API_PORT


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
