"""Who listens where: the kernel's table of listening TCP sockets, and whether a run's own processes are in it.

A replica is listed only while a socket of its own tree accepts on its port (P5 of docs/architecture.md). The kernel
tells sockets (by inode) and processes (by descriptor) apart, so a socket is followed to its owner once, when it first
appears, with one connect on the advertise address; after that its inode in the table is proof enough, and a check of
any number of runs costs one dump of the table. Events go out only when something changed.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import structlog
import trio

from gpulayer.core.replica import traps
from gpulayer.core.replica.messages import AttemptEvent, ListenerFound, ListenerMissing
from gpulayer.model.ids import AttemptId
from gpulayer.model.replica import Endpoint, Reason
from gpulayer.shim import tree
from gpulayer.shim.tree import ProcessStat

log = structlog.get_logger()

# P5: what is listed was verified at most a second ago.
CHECK_INTERVAL_SECONDS = 1.0
# After a start, so that a service that listens after 40 ms is seen after 50 and not after a second.
FIRST_CHECKS_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
# A listen queue that is full lets a connect wait for a retransmission, which takes a second.
CONNECT_SECONDS_MAX = 1.0
# How often a new socket is looked up in a tree before it is taken for a stranger's: the tree may have forked meanwhile.
LOOKS_MAX = 3
# So long must nothing but a shell be alive of a run before that is said: a script runs one program after the other.
ONLY_SHELL_SECONDS = 1.0

_SOCK_DIAG_BY_FAMILY = 20
_NETLINK_SOCK_DIAG = 4
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_LISTEN = 10
_INET_DIAG_SKV6ONLY = 11
_REQUEST = struct.Struct("=IHHIIBBBBI48x")
_MESSAGE_HEADER = struct.Struct("=IHHII")
_SOCKET_HEADER = struct.Struct("=BBBB")
_SOCKET_TAIL = struct.Struct("=IIIII")  # expires, rqueue, wqueue, uid, inode
_SOCKET_BYTES = 72
_ANSWER_BYTES_MAX = 64 * 1024
# Of another process's command line, which it may make as long as it likes.
ARGUMENTS_BYTES_MAX = 16 * 1024


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    address: str
    """As the kernel has it: 0.0.0.0 and :: are all addresses."""
    port: int
    inode: int
    uid: int
    v6only: bool | None = None
    """Whether :: leaves IPv4 out; None where that is not known, or not IPv6."""

    def __str__(self) -> str:
        return str(Endpoint(address=self.address, port=self.port))


# --- the table --------------------------------------------------------------------------------------------------


def listening() -> list[ListeningSocket]:
    """Every listening TCP socket of this network namespace; from sock_diag, else (an old kernel, a filter) from
    /proc. OSError: it cannot be known now, e.g. for want of a descriptor."""
    try:
        return _listening_by_sock_diag()
    except OSError:
        return _listening_by_proc()


def _listening_by_sock_diag() -> list[ListeningSocket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        found: list[ListeningSocket] = []
        for sequence, family in enumerate((socket.AF_INET, socket.AF_INET6), start=1):
            netlink.send(
                _REQUEST.pack(
                    _REQUEST.size,
                    _SOCK_DIAG_BY_FAMILY,
                    _NLM_F_REQUEST_DUMP,
                    sequence,
                    0,
                    family,
                    socket.IPPROTO_TCP,
                    0,
                    0,
                    1 << _LISTEN,
                )
            )
            while not _take_answer(netlink.recv(_ANSWER_BYTES_MAX), sequence, found):
                pass
        return found


def _take_answer(answer: bytes, sequence: int, found: list[ListeningSocket]) -> bool:
    """True at the end of the dump."""
    at = 0
    while at + _MESSAGE_HEADER.size <= len(answer):
        size, kind, _, answers, _ = _MESSAGE_HEADER.unpack_from(answer, at)
        if size < _MESSAGE_HEADER.size:
            raise OSError(errno.EBADMSG, "sock_diag: a message without a length")
        if answers == sequence:
            if kind == _NLMSG_DONE:
                return True
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", answer, at + _MESSAGE_HEADER.size)[0]
                if code == errno.ENOENT:
                    return True  # a kernel without IPv6
                raise OSError(code, f"sock_diag: {os.strerror(code)}")
            found.append(_parse_socket(answer[at + _MESSAGE_HEADER.size : at + size]))
        at += (size + 3) & ~3
    return False


def _parse_socket(message: bytes) -> ListeningSocket:
    family, _, _, _ = _SOCKET_HEADER.unpack_from(message)
    (port,) = struct.unpack_from("!H", message, 4)
    raw = message[8:12] if family == socket.AF_INET else message[8:24]
    _, _, _, uid, inode = _SOCKET_TAIL.unpack_from(message, 52)
    v6only: bool | None = None
    at = _SOCKET_BYTES
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_SKV6ONLY and size >= 5:
            v6only = bool(message[at + 4])
        at += (max(size, 4) + 3) & ~3
    return ListeningSocket(socket.inet_ntop(family, raw), port, inode, uid, v6only)


def _listening_by_proc() -> list[ListeningSocket]:
    found = []
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        try:
            with open(path) as table:
                lines = table.readlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without IPv6
        for line in lines:
            words = line.split()
            if words[3] != "0A":
                continue
            address, port = words[1].split(":")
            # 32-bit words in the host's byte order, each printed as a number.
            raw = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
            found.append(
                ListeningSocket(socket.inet_ntop(family, raw), int(port, 16), int(words[9]), uid=int(words[7]))
            )
    return found


# --- owners -----------------------------------------------------------------------------------------------------


def inodes_of(pids: Iterable[int]) -> dict[int, int]:
    """Socket inode -> pid, for the descriptors of these processes; those that we may not look into are left out."""
    owners: dict[int, int] = {}
    for pid in pids:
        directory = f"/proc/{pid}/fd"
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"{directory}/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                owners.setdefault(int(target[8:-1]), pid)
    return owners


def owner_of(inode: int) -> list[int]:
    """The processes that hold a socket. Walks all of /proc: for a reason that a person will read, not for every
    check."""
    wanted = f"socket:[{inode}]"
    pids = []
    for stat in tree.all_processes():
        directory = f"/proc/{stat.pid}/fd"
        try:
            if any(_link(f"{directory}/{name}") == wanted for name in os.listdir(directory)):
                pids.append(stat.pid)
        except OSError:
            continue
    return pids


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


# --- what accepts where -----------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def accepting(sockets: Iterable[ListeningSocket], address: str) -> list[ListeningSocket]:
    """Of sockets on one port, those that get connections to `address`: the most exact bind wins, as in the kernel."""
    sockets = list(sockets)
    exact = [each for each in sockets if each.address in (address, f"::ffff:{address}")]
    if exact:
        return exact
    wildcard = "0.0.0.0" if _version(address) == 4 else "::"
    same_family = [each for each in sockets if each.address == wildcard]
    if same_family or wildcard == "::":
        return same_family
    return [each for each in sockets if each.address == "::" and not each.v6only]


async def refusal(address: str, port: int) -> str:
    """Empty if a connect succeeds, else why it does not."""
    family = socket.AF_INET if _version(address) == 4 else socket.AF_INET6
    try:
        with trio.socket.socket(family, socket.SOCK_STREAM) as connection, trio.fail_after(CONNECT_SECONDS_MAX):
            await connection.connect((address, port))
    except trio.TooSlowError:
        return f"no answer within {CONNECT_SECONDS_MAX:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


# --- what is alive ----------------------------------------------------------------------------------------------


def _only_shell(watched: _Watched) -> traps.OnlyShell | None:
    """Whether nothing but a shell, and what it waits for, has been alive of the run for a while."""
    found = traps.only_shell(_commands(watched)) if watched.may_be_shell else None
    if found is None:
        watched.only_shell_since = None
        return None
    now = trio.current_time()
    if watched.only_shell_since is None:
        watched.only_shell_since = now
    return found if now - watched.only_shell_since >= ONLY_SHELL_SECONDS else None


def _commands(watched: _Watched) -> list[list[str]]:
    """Of the living processes, the first one first; none where that one is no shell."""
    commands: list[list[str]] = []
    for pid in dict.fromkeys(watched.tree()):
        stat = tree.process_stat(pid)
        if stat is None or stat.is_zombie:
            continue
        commands.append(_arguments(pid))
        if len(commands) == 1 and not traps.is_shell(commands[0]):
            # Early on it may still be `env`, or another that only starts a shell.
            watched.may_be_shell = bool(watched.first_checks)
            return []
    return commands


def _arguments(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            raw = file.read(ARGUMENTS_BYTES_MAX)
    except OSError:
        return []
    return [each.decode("utf-8", "replace") for each in raw.split(b"\0")[:-1]]


def _ended(listener: ProcessStat | None) -> str:
    """What is said behind `nothing listens on …` of who did; empty if it is still there, or nobody did."""
    if listener is None:
        return ""
    now = tree.process_stat(listener.pid)
    if now is not None and now.start_time == listener.start_time and not now.is_zombie:
        return ""
    return f": pid {listener.pid} ({listener.comm}), which did, has ended"


# --- checks -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Watched:
    attempt: AttemptId
    run: int
    port: int
    tree: Callable[[], Iterable[int]]
    first_checks: list[float]
    """When (trio's clock) it is looked at out of turn; soonest last."""
    found_inode: int = 0
    said: object = None
    """The last outcome that was told: True for found, else the reason. None: nothing yet."""
    is_settling: bool = False
    looks: dict[int, int] = field(default_factory=dict)
    """Sockets that were not this tree's, and how often they were looked up."""
    listener: ProcessStat | None = None
    """Who held the socket that was found last."""
    may_be_shell: bool = True
    """Its first process is a shell, or was not looked at. What is none will not become one."""
    only_shell_since: float | None = None


class ListenerChecks:
    """Looks once a second while there is a run to look at, sooner after a start, and else sleeps."""

    def __init__(self, *, advertise: str, emit: Callable[[AttemptEvent], None]) -> None:
        self._advertise = advertise
        self._emit = emit
        self._watched: dict[AttemptId, _Watched] = {}
        self._changed = trio.Event()
        self._next_round = 0.0
        self._last_round = 0.0

    @property
    def checked_seconds_ago(self) -> float:
        """How old the last look at all of them is; 0 while there is none to look at."""
        return trio.current_time() - self._last_round if self._watched else 0.0

    def watch(
        self, attempt: AttemptId, *, run: int, port: int, pids: Callable[[], Iterable[int]], fresh: bool = True
    ) -> None:
        """From now on, until forget(). `pids`: the run's tree, asked only when a new socket appears."""
        now = trio.current_time()
        if not self._watched:
            self._last_round = now
        checks = [now + seconds for seconds in reversed(FIRST_CHECKS_SECONDS)] if fresh else [now]
        self._watched[attempt] = _Watched(attempt=attempt, run=run, port=port, tree=pids, first_checks=checks)
        self._changed.set()

    def forget(self, attempt: AttemptId, run: int | None = None) -> None:
        """`run`: only if that is the one being watched."""
        watched = self._watched.get(attempt)
        if watched is not None and run in (None, watched.run):
            del self._watched[attempt]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                with trio.move_on_at(self._due()):
                    await self._changed.wait()
                now = trio.current_time()
                if now < self._due():
                    continue
                is_round = now >= self._next_round
                if is_round:
                    self._next_round = now + CHECK_INTERVAL_SECONDS
                has_looked = self._check(
                    [
                        watched
                        for watched in self._watched.values()
                        if is_round or (watched.first_checks and watched.first_checks[-1] <= now)
                    ],
                    nursery,
                )
                if is_round and has_looked:
                    self._last_round = now

    def _due(self) -> float:
        if not self._watched:
            return float("inf")
        first_checks = [watched.first_checks[-1] for watched in self._watched.values() if watched.first_checks]
        return min([self._next_round, *first_checks])

    def _check(self, due: list[_Watched], nursery: trio.Nursery) -> bool:
        """One dump for all; False if it could not be had. What needs a connect or a walk through /proc goes on beside
        the rounds, once per run."""
        now = trio.current_time()
        for watched in due:
            while watched.first_checks and watched.first_checks[-1] <= now:
                watched.first_checks.pop()
        try:
            table = listening()
        except OSError as error:
            # Nothing is known, so nothing is said; how old the last look is everyone can see.
            log.warning("listeners.not_read", error=str(error))
            return False
        by_port: dict[int, list[ListeningSocket]] = {}
        for each in table:
            by_port.setdefault(each.port, []).append(each)
        for watched in due:
            candidates = accepting(by_port.get(watched.port, ()), self._advertise)
            # The same inode is the same socket, and whoever holds it got it from the tree that made it.
            is_known = watched.found_inode and any(each.inode == watched.found_inode for each in candidates)
            if not is_known and not watched.is_settling:
                watched.is_settling = True
                nursery.start_soon(self._settle, watched, candidates, table)
        return True

    async def _settle(self, watched: _Watched, candidates: list[ListeningSocket], table: list[ListeningSocket]) -> None:
        try:
            self._say(watched, await self._outcome(watched, candidates, table))
        finally:
            watched.is_settling = False

    async def _outcome(
        self, watched: _Watched, candidates: list[ListeningSocket], table: list[ListeningSocket]
    ) -> Reason | None:
        """None: its own socket accepts. Else what was found instead."""
        watched.found_inode = 0
        fresh = {each.inode for each in table if watched.looks.get(each.inode, 0) < LOOKS_MAX}
        fresh |= {each.inode for each in candidates}
        owned = inodes_of(watched.tree()) if fresh else {}
        watched.looks = {each.inode: watched.looks.get(each.inode, 0) + 1 for each in table if each.inode not in owned}
        ours = [each for each in candidates if each.inode in owned]
        if ours:
            refused = await refusal(self._advertise, watched.port)
            if not refused:
                watched.found_inode = ours[0].inode
                watched.listener = tree.process_stat(owned[ours[0].inode])
                return None
            return Reason(
                code="not_listening",
                text=f"pid {owned[ours[0].inode]} listens on {ours[0]}, but a connection to "
                f"{self._endpoint(watched)} failed: {refused}",
                hint="is the host's firewall in the way, or the service too busy to accept?",
            )
        if candidates:
            return await self._taken(watched, candidates[0])
        return self._elsewhere(watched, table, owned)

    async def _taken(self, watched: _Watched, holder: ListeningSocket) -> Reason:
        # A walk through all of /proc: tens of milliseconds on a busy host, so not in the loop's thread.
        pids = await trio.to_thread.run_sync(owner_of, holder.inode, abandon_on_cancel=True)
        if pids:
            stat = tree.process_stat(pids[0])
            who = f"pid {pids[0]} ({stat.comm if stat else 'gone'})"
        else:
            who = f"a process of uid {holder.uid} that this daemon may not look into"
        return Reason(
            code="port_taken",
            text=f"port {watched.port} is held by {who}, which is not of this replica",
            hint="end it, or keep other programs out of the range of service ports; the replica should listen on $PORT "
            f"({watched.port}) itself and not through another program",
        )

    def _elsewhere(self, watched: _Watched, table: list[ListeningSocket], owned: dict[int, int]) -> Reason:
        """Nothing accepts on its port at the advertise address; does the tree listen anywhere else?"""
        others = [each for each in table if each.inode in owned]
        on_port = [each for each in others if each.port == watched.port]
        if on_port:
            where = ", ".join(sorted({each.address for each in on_port}))
            return Reason(
                code="listens_elsewhere",
                text=f"listens on {where} only, and not on {self._endpoint(watched)}",
                hint=f"let it listen on $HOST ({self._advertise}) or on 0.0.0.0",
            )
        if others:
            where = ", ".join(sorted({str(each) for each in others})[:4])
            trap = traps.fixed_port(_arguments(owned[others[0].inode]), others[0].port)
            return Reason(
                code="listens_elsewhere",
                text=f"listens on {where} instead of $PORT {watched.port}",
                hint=str(
                    trap or "let it listen on $PORT, e.g. --port $PORT in a shell command, or submit it with --no-port"
                ),
            )
        return self._nowhere(watched)

    def _nowhere(self, watched: _Watched) -> Reason:
        endpoint, left = self._endpoint(watched), _only_shell(watched)
        ended = _ended(watched.listener)
        if left is not None and (ended or left.has_background):
            return Reason(
                code="only_shell_left",
                text=f"nothing listens on {endpoint}{ended}; what is left of it: {left.names}",
                hint="the program has ended, and its shell hides that by waiting for something else: start it last, "
                "without &, and with exec",
            )
        if ended:
            return Reason(code="not_listening", text=f"nothing listens on {endpoint} any more{ended}")
        return Reason(
            code="not_listening",
            text=f"nothing listens on {endpoint} yet" + (f"; what runs of it: {left.names}" if left else ""),
            hint="a service must listen on $HOST and $PORT; submit it with --no-port if it does not listen at all",
        )

    def _endpoint(self, watched: _Watched) -> Endpoint:
        return Endpoint(address=self._advertise, port=watched.port)

    def _say(self, watched: _Watched, reason: Reason | None) -> None:
        outcome: object = True if reason is None else reason
        if self._watched.get(watched.attempt) is not watched or watched.said == outcome:
            return  # forgotten while it was looked at, or known
        watched.said = outcome
        if reason is None:
            watched.first_checks.clear()
            event: ListenerFound | ListenerMissing = ListenerFound(run=watched.run, at_utc=time.time())
        else:
            event = ListenerMissing(run=watched.run, reason=reason)
        self._emit(AttemptEvent(attempt=watched.attempt, event=event))
