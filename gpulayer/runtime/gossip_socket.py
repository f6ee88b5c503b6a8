"""The UDP sockets of gossip: bytes in, through the gate, to the core's inbox; messages out, sealed. Decides nothing.

One socket for each family, IPv6 alone on its own, so that no address has two spellings. What the network says about
datagrams of ours (port unreachable: nobody listens there) is read from the sockets' error queues (ip(7), IP_RECVERR).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import structlog
import trio

from gpulayer.core.gossip.messages import DatagramRefused, GossipEvent, Message, SendFailed
from gpulayer.model.address import Address
from gpulayer.model.errors import GpulayerError, InvalidRequest, Refused
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.runtime.listeners import owner_of
from gpulayer.wire.codec import EncodeError
from gpulayer.wire.gate import PacketGate

log = structlog.get_logger()

# What comes while the process stands still for some seconds must be there after it, or peers that answered look silent.
RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024
# Of one socket, read in one go before others run: a turn of some milliseconds at the very most.
DATAGRAMS_PER_TURN = 512
ERRORS_PER_TURN = 64
BIND_TRIES = 16
COMPLAIN_SECONDS = 60.0

# linux/in.h, linux/in6.h, asm-generic/socket.h: not in Python's socket module.
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_SO_RCVBUFFORCE = 33
_ORIGIN_ICMP, _ORIGIN_ICMP6 = 2, 3
_EXTENDED_ERROR = struct.Struct("=IBBBBII")  # struct sock_extended_err, linux/errqueue.h

Deliver: TypeAlias = Callable[[GossipEvent], None]


# --- the sockets ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DatagramSockets:
    """Bound: what is sent to them waits until somebody reads."""

    by_family: dict[int, socket.socket]
    port: int
    receive_buffer_bytes: int
    """Of the smaller one."""


@contextmanager
def bind_datagrams(hosts: Sequence[str], port: int) -> Iterator[DatagramSockets]:
    """A socket at each of these IP addresses, one of a family at most, all on the same port (0: any that is free).

    Refused says who has the port, InvalidRequest or GpulayerError what else is wrong. `::` is left out where there is
    no IPv6."""
    sockets = _bind_free(hosts) if port == 0 else _bind_all(hosts, port)
    with ExitStack() as stack:
        for each in sockets.values():
            stack.enter_context(each)
        if not sockets:
            raise GpulayerError(
                f"cannot listen for datagrams on {', '.join(hosts) or 'no address'}: this host has no such family",
                hint="name an address of this host with --bind",
            )
        had = min(map(_widen, sockets.values()))
        if had < RECEIVE_BUFFER_BYTES:
            log.warning(
                "gossip.receive_buffer_small",
                bytes=had,
                wanted=RECEIVE_BUFFER_BYTES,
                hint=f"sysctl net.core.rmem_max={RECEIVE_BUFFER_BYTES}, or CAP_NET_ADMIN",
            )
        bound = next(iter(sockets.values())).getsockname()[1]
        yield DatagramSockets(by_family=sockets, port=bound, receive_buffer_bytes=had)


def _bind_free(hosts: Sequence[str]) -> dict[int, socket.socket]:
    # A port that is free in one family may be taken in the other.
    for _ in range(BIND_TRIES - 1):
        with suppress(Refused):
            return _bind_all(hosts, 0)
    return _bind_all(hosts, 0)


def _bind_all(hosts: Sequence[str], port: int) -> dict[int, socket.socket]:
    by_family: dict[int, socket.socket] = {}
    with ExitStack() as opened:
        for host in hosts:
            bound = _bind(host, port)
            if bound is None:
                continue
            opened.enter_context(bound)
            if bound.family in by_family:
                raise InvalidRequest(
                    f"{', '.join(hosts)}: two addresses of one family to listen on",
                    hint="name one of IPv4 and one of IPv6, or 0.0.0.0 and ::",
                )
            by_family[bound.family] = bound
            port = bound.getsockname()[1]
        opened.pop_all()
    return by_family


def _bind(host: str, port: int) -> socket.socket | None:
    """None: a wildcard of a family that this host does not have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        if host == "::" and error.errno == errno.EAFNOSUPPORT:
            return None
        raise GpulayerError(
            f"cannot open a socket for {host}: {error.strerror}", hint="name another address with --bind"
        ) from error
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        else:
            bound.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        # No SO_REUSEADDR: for UDP it lets two daemons share a port, each hearing some of what is said.
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if host == "::" and error.errno == errno.EADDRNOTAVAIL:
            return None  # a kernel with IPv6, and IPv6 switched off
        if error.errno != errno.EADDRINUSE:
            raise GpulayerError(
                f"cannot listen for datagrams on {host} port {port}: {os.strerror(error.errno or 0)}",
                hint="choose another port with --peer-port"
                if error.errno == errno.EACCES
                else "name an address of this host with --bind",
                code="port_taken",
            ) from error
        raise Refused(
            f"UDP port {port} on {host} is in use{_by_whom(family, port)}",
            hint="stop that program, or choose another port with --peer-port",
            code="port_taken",
        ) from error
    return bound


def _by_whom(family: socket.AddressFamily, port: int) -> str:
    """Best effort: another user's process cannot be looked into."""
    try:
        lines = Path("/proc/net/udp6" if family == socket.AF_INET6 else "/proc/net/udp").read_text().splitlines()[1:]
        found = [words for words in map(str.split, lines) if int(words[1].rsplit(":", 1)[1], 16) == port]
        if not found:
            return ""
        pids = owner_of(int(found[0][9]))
        if not pids:
            return f" by a process of uid {found[0][7]}"
        return f" by pid {pids[0]} ({Path(f'/proc/{pids[0]}/comm').read_text().strip()})"
    except (OSError, ValueError, IndexError):
        return ""


def _widen(bound: socket.socket) -> int:
    """What its receive buffer has in the end."""
    try:
        bound.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    except PermissionError:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    # The kernel takes, and tells, twice what was asked for: half is for its own book-keeping (socket(7)).
    return bound.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2


# --- in and out -----------------------------------------------------------------------------------------------------


class GossipSocket:
    """Both directions. The gate is shared with whoever runs the links (link_verified, set_ring, forget)."""

    def __init__(
        self,
        sockets: DatagramSockets,
        gate: PacketGate,
        *,
        on_unknown_key: Callable[[int], None] = lambda key_id: None,
        on_duplicate: Callable[[Run, Address], None] = lambda run, at: None,
    ) -> None:
        """`on_unknown_key`: somebody seals with a key that is not on the ring (Opened.unknown_key). `on_duplicate`:
        that run, at that address, has our node's id, or another's."""
        self._sockets = list(sockets.by_family.values())
        self._by_family = sockets.by_family
        self._gate = gate
        self._on_unknown_key = on_unknown_key
        self._on_duplicate = on_duplicate
        self._deliver: Deliver | None = None
        self._counters: dict[str, int] = {}
        self._complained_at: dict[str, float] = {}
        self.port = sockets.port

    async def run(self, deliver: Deliver, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For good. `deliver` never waits; what it raises ends this."""
        self._deliver = deliver
        async with trio.open_nursery() as nursery:
            for each in self._sockets:
                nursery.start_soon(self._read_on, each)
            task_status.started()

    async def _read_on(self, bound: socket.socket) -> None:
        while True:
            # Woken by an error, too. Always a checkpoint: others run between two turns.
            await trio.lowlevel.wait_readable(bound)
            self.drain()

    def drain(self) -> int:
        """Read what is there, up to a turn's worth, without waiting; how many datagrams that were. For whoever
        is about to look at the core's timers: an answer that has arrived must be heard before its asker is blamed."""
        return sum(map(self._drain_one, self._sockets))

    def _drain_one(self, bound: socket.socket) -> int:
        if self._deliver is None:
            return 0
        now = trio.current_time()
        self._read_errors(bound)
        for count in range(DATAGRAMS_PER_TURN):
            try:
                # A byte more than there may be, so that what is longer is seen to be.
                data, source = bound.recvfrom(self._gate.packet_bytes_max + 1)
            except BlockingIOError:
                return count
            except OSError as error:
                # Of a datagram that was sent earlier; whichever call comes next tells it, and so does the queue.
                self._count(f"errno_{error.errno}")
                self._read_errors(bound)
            else:
                self._take(data, source, now)
        return DATAGRAMS_PER_TURN

    def send(self, to: NodeId, address: Address, messages: Sequence[Message]) -> None:
        """One datagram, which only `to` can read. Where this host cannot send it, SendFailed is delivered."""
        try:
            packet = self._gate.seal(messages, to)
        except EncodeError as error:
            # Of our own making; but what one record provokes must not end every daemon that passes it on.
            self._count("unsendable")
            self._complain("gossip.unsendable", error)
            return
        if not self._transmit(address, packet) and self._deliver is not None:
            self._deliver(SendFailed(address=address))

    def counters(self) -> dict[str, int]:
        """The gate's, and what the sockets had to say."""
        return {**self._gate.counters(), **self._counters}

    # --- one datagram ---------------------------------------------------------------------------------------------

    def _take(self, data: bytes, source: tuple[object, ...], now: float) -> None:
        assert self._deliver is not None
        try:
            at = _address(source)
            opened = self._gate.open(data, at, now)
            for reply in opened.replies:
                self._transmit(at, reply)
            if opened.unknown_key is not None:
                self._on_unknown_key(opened.unknown_key)
            if opened.duplicate is not None:
                self._on_duplicate(opened.duplicate, at)
        except Exception as error:  # noqa: BLE001
            # The edge of one packet: whatever it brought about, the next one is heard.
            self._count("failed")
            self._complain("gossip.packet_failed", error, traceback=True)
            return
        for each in opened.received:
            self._deliver(each)

    def _transmit(self, address: Address, packet: bytes) -> bool:
        bound = self._by_family.get(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        if bound is None:
            self._count("no_such_family")
            return False
        for is_last in (False, True):
            try:
                # An IP address as text needs no resolver; sendto() looks none up for it.
                bound.sendto(packet, (address.host, address.port))
                return True
            except OSError as error:
                self._count(f"errno_{error.errno}")
                # It may be the error of an earlier datagram, to somebody else. Then this one was not tried at all.
                self._read_errors(bound)
                if is_last:
                    self._complain("gossip.send_failed", error, to=str(address))
        return False

    def _read_errors(self, bound: socket.socket) -> None:
        for _ in range(ERRORS_PER_TURN):
            try:
                packet, ancillary, _, target = bound.recvmsg(self._gate.packet_bytes_max, 512, socket.MSG_ERRQUEUE)
            except OSError:
                return  # there are none
            # Anyone can forge an ICMP message, but only who saw a datagram of ours can quote it.
            if not self._gate.is_own(packet):
                self._count("errors_not_ours")
            elif self._deliver is not None and any(map(_is_refusal, ancillary)):
                self._count("refused")
                self._deliver(DatagramRefused(address=_address(target)))

    # --- counting -------------------------------------------------------------------------------------------------

    def _count(self, what: str) -> None:
        self._counters[what] = self._counters.get(what, 0) + 1

    def _complain(self, event: str, error: Exception, *, traceback: bool = False, **about: str) -> None:
        now = trio.current_time()
        if now < self._complained_at.get(event, float("-inf")) + COMPLAIN_SECONDS:
            return
        self._complained_at[event] = now
        log.warning(event, reason=str(error), exc_info=error if traceback else None, **about)


def _address(source: tuple[object, ...]) -> Address:
    # A link-local address has its scope behind a %; which of our interfaces that was means nothing to others.
    return Address(str(source[0]).partition("%")[0], cast(int, source[1]))


def _is_refusal(ancillary: tuple[int, int, bytes]) -> bool:
    """Port unreachable, and said by the network: not that the host is, and not what this kernel thinks itself."""
    level, kind, data = ancillary
    if (level, kind) not in ((socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)):
        return False
    if len(data) < _EXTENDED_ERROR.size:
        return False
    number, origin, *_ = _EXTENDED_ERROR.unpack_from(data)
    return bool(number == errno.ECONNREFUSED and origin in (_ORIGIN_ICMP, _ORIGIN_ICMP6))
