"""The sockets of the peer port: for each address one for links (TCP) and one for datagrams, all on one number.

Bound before anything else of a daemon starts, so that a port in use is an error and not a half start.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpulayer.model.errors import GpulayerError, Refused
from gpulayer.runtime.gossip_socket import DatagramSockets, bind_datagrams
from gpulayer.runtime.listeners import listening, owner_of

BACKLOG = 256
# With port 0 the kernel chooses a number that is free for datagrams; for TCP somebody may have it.
TRIES_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSockets:
    links: tuple[socket.socket, ...]
    """Listening: who connects now waits until PeerLinks.run begins."""
    datagrams: DatagramSockets
    port: int


@contextmanager
def bind_peer_sockets(hosts: Sequence[str], port: int) -> Iterator[PeerSockets]:
    """`hosts`: IP addresses, one of a family at most; `0.0.0.0` and `::` are all of theirs. `port`: 0 for one that is
    free. Closed at the end, if nobody has closed them before.

    Refused (code `port_taken`) says who has it where that can be told; GpulayerError what else is wrong."""
    with ExitStack() as bound:
        for last in reversed(range(TRIES_MAX)):
            try:
                sockets = _bind_all(bound, hosts, port)
                break
            except Refused:
                bound.close()
                if port != 0 or not last:
                    raise
        yield sockets


def _bind_all(bound: ExitStack, hosts: Sequence[str], port: int) -> PeerSockets:
    datagrams = bound.enter_context(bind_datagrams(hosts, port))
    links = []
    for host in hosts:
        # Where a family is missing, bind_datagrams has judged whether that matters.
        if (socket.AF_INET6 if ":" in host else socket.AF_INET) in datagrams.by_family:
            links.append(bound.enter_context(_bind(host, datagrams.port)))
    return PeerSockets(links=tuple(links), datagrams=datagrams, port=datagrams.port)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Only over connections in TIME_WAIT of an earlier daemon; Linux refuses it while another socket listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise GpulayerError(
                f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}",
                hint="choose another port with --peer-port, or another address with --bind",
                code="port_taken",
            ) from error
        raise Refused(
            f"TCP port {port} on {host} is in use{_by_whom(port)}",
            hint="stop that program, or choose another port with --peer-port",
            code="port_taken",
        ) from error
    return bound


def _by_whom(port: int) -> str:
    """Best effort: another user's process cannot be looked into."""
    try:
        found = [each for each in listening() if each.port == port]
        pids = owner_of(found[0].inode) if found else []
        if not pids:
            return f" by a process of uid {found[0].uid}" if found else ""
        return f" by pid {pids[0]} ({Path(f'/proc/{pids[0]}/comm').read_text().strip()})"
    except OSError:
        return ""
