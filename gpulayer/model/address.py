"""Where a peer is reached: an IP address and a port. Names are resolved before they become one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from gpulayer.model.errors import InvalidRequest


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """`10.0.0.5:7451`, `[fd00::5]:7451`. `host` is an IP address without brackets and without a scope."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_usable_elsewhere(self) -> bool:
        """Whether another host could reach it: not loopback, not link-local, not "any address"."""
        address = ip_address(self.host)
        return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def split_host_port(text: str, default_port: int, what: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT`, `[V6]`, `[V6]:PORT` or a bare V6 -> (host, port); InvalidRequest naming `what`."""
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d{1,5}))?", text)
    plain = re.fullmatch(r"([^\s:\[\]/@]{1,253})(?::(\d{1,5}))?", text)
    if match := bracketed or plain:
        host, port = match[1], int(match[2]) if match[2] else default_port
    else:
        host, port = text, default_port
    if (bracketed or not plain) and not _is_address(host):
        raise InvalidRequest(
            f"{what}: {text!r:.300} is not HOST:PORT", hint="write it like 10.0.0.5:7451 or [fd00::5]:7451"
        )
    if not 1 <= port <= 65535:
        raise InvalidRequest(
            f"{what}: port {port} of {text!r:.300} is not between 1 and 65535", hint="7451 is the usual one"
        )
    return host, port


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
