"""Which port a run gets: one that no run of ours still holds, that this replica has not just had, and that is free at
bind.

New for every run, so that a client of the old run is refused and not answered by someone else, and so that a new run
never fails on what the old one has not let go of. Between the bind that proves it free and the
service's own bind anyone may take it; the listener checks then name who did, and the next run gets another one.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable
from random import Random

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import AttemptId, ReplicaId
from gpulayer.model.replica import Reason

# Below the kernel's ephemeral range (net.ipv4.ip_local_port_range, 32768 on), or outgoing connections would take them.
PORTS_DEFAULT = range(20000, 30000)
# A client that keeps an address of a run this long ago has had many refusals to learn from.
REMEMBERED_PER_REPLICA = 16
REPLICAS_REMEMBERED_MAX = 4096


class NoPort(Exception):
    """None is free; `reason` says why in the words that people see."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class Ports:
    """`rng` decides where the search begins, so that two daemons on one host do not run after each other."""

    def __init__(self, *, address: str, rng: Random, ports: range = PORTS_DEFAULT) -> None:
        if not ports or ports.step != 1 or ports[0] < 1 or ports[-1] > 65535:
            raise InvalidRequest(
                f"service ports: {ports} is not a range within 1-65535", hint="write it like 20000-29999"
            )
        self._ports = ports
        self._address = address
        self._cursor = rng.randrange(len(ports))
        self._held: dict[int, AttemptId] = {}
        self._recent: dict[ReplicaId, deque[int]] = {}

    def take(self, attempt: AttemptId, *, in_use: Iterable[int]) -> int:
        """A port that is the attempt's until it is given back. `in_use`: the ports of the kernel's listening table."""
        listening = set(in_use)
        recent = set(self._recent.get(attempt.replica, ()))
        held = had = taken = 0
        for step in range(len(self._ports)):
            port = self._ports[(self._cursor + step) % len(self._ports)]
            if port in self._held:
                held += 1
            elif port in recent:
                had += 1
            elif port in listening or not can_bind(self._address, port):
                taken += 1
            else:
                self._cursor = (self._cursor + step + 1) % len(self._ports)
                self.hold(attempt, port)
                return port
        raise NoPort(
            Reason(
                code="port_taken",
                text=f"no port is free in {self._ports[0]}-{self._ports[-1]}: {held} are held by replicas of this node,"
                f" {taken} by other programs, {had} were this replica's a moment ago",
                hint="widen the range of service ports on this node, or end what holds them",
            )
        )

    def hold(self, attempt: AttemptId, port: int) -> None:
        """It is in use by a run of this attempt: just chosen, or found at the daemon's start."""
        self._held[port] = attempt
        self.remember(attempt.replica, port)

    def remember(self, replica: ReplicaId, port: int) -> None:
        """A run of this replica had it."""
        recent = self._recent.pop(replica, deque(maxlen=REMEMBERED_PER_REPLICA))
        recent.append(port)
        self._recent[replica] = recent  # at the end, so that the first is the one not heard of for longest
        if len(self._recent) > REPLICAS_REMEMBERED_MAX:
            del self._recent[next(iter(self._recent))]

    def release(self, attempt: AttemptId, port: int | None) -> None:
        """No process of the run is left."""
        if port is not None and self._held.get(port) == attempt:
            del self._held[port]


def can_bind(address: str, port: int) -> bool:
    """Whether a service could, on this address and on all. Without SO_REUSEADDR: not even an old connection is left."""
    wildcard = "::" if ":" in address or _HAS_IPV6 else "0.0.0.0"
    return _is_free(address, port) and _is_free(wildcard, port)


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if address == "::":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _has_ipv6() -> bool:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


_HAS_IPV6 = _has_ipv6()
