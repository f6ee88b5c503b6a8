"""Which of this host's addresses others see: the kernel's routing table is asked, no packet is sent.

A datagram socket that is connected has a source address, chosen by the route to the other side (connect(2), udp(7)).
"""

from __future__ import annotations

import socket
from ipaddress import ip_address

from gpulayer.model.address import Address

# Set aside for documentation, so they are nobody's: the way to them is the default route (RFC 5737, RFC 3849).
_SOMEWHERE = (Address("192.0.2.1", 9), Address("2001:db8::1", 9))


def source_towards(there: Address) -> str | None:
    """The address of this host that `there` would see; None where no route leads to it."""
    family = socket.AF_INET6 if ip_address(there.host).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect((there.host, there.port))
            host: str = sock.getsockname()[0]
    except OSError:
        return None
    return str(ip_address(host.partition("%")[0]))


def default_source() -> str | None:
    """The address of this host that the rest of the world would see, of IPv4 before IPv6; None where it has no
    default route, or only one from an address that is of no use elsewhere."""
    for somewhere in _SOMEWHERE:
        host = source_towards(somewhere)
        if host is not None and Address(host, 1).is_usable_elsewhere:
            return host
    return None
