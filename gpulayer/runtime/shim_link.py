"""Talking to shims: a link to one shim's socket, and the spawner that makes them.

A link says nothing about what to do. Replies and events are handed over in the order in which the shim sent them, so
that no exit is heard before the start that it follows. The peer is who it should be before a word is exchanged: a pid
from a file may belong to another program by now, and so may a socket (see `living_shim`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import structlog
import trio

import gpulayer
from gpulayer.model.ids import AttemptId
from gpulayer.runtime.sandboxes import attempt_id
from gpulayer.shim import notes, tree
from gpulayer.shim.shim import LISTEN_AGAIN

Json: TypeAlias = dict[str, Any]

log = structlog.get_logger()

# The shim's own bound (shim/channel.py); a peer that sends more is no shim.
LINE_BYTES_MAX = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
REQUESTS_WAITING_MAX = 256
HELLO_SECONDS_MAX = 5.0
# A shim syncs a few files before it listens, and gives up after 20 s by itself (shim/spawner.py).
SPAWN_SECONDS_MAX = 25.0
SPAWNER_END_SECONDS_MAX = 2.0
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# The shim's bound for one message is 64 (shim/channel.py).
FDS_MAX = 48
_RIGHTS_BYTES = socket.CMSG_SPACE(FDS_MAX * 4)


class ShimGone(Exception):
    """The link is down; whether the shim is, too, is for the caller to find out."""


class ShimSilent(Exception):
    """Connected, and no answer in time."""


class SpawnFailed(Exception):
    """There is no new shim; `code` and the text are the spawner's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ShimProcess:
    """A shim, named for good by pid and start time."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        stat = tree.process_stat(self.pid)
        if stat is None:
            # Not to be read does not mean dead: we may be out of descriptors. (A look at the path takes none.)
            return os.path.exists(f"/proc/{self.pid}")
        return stat.start_time == self.start_time and not stat.is_zombie


@cache
def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def living_shim(shim_json: Mapping[str, Any] | None, this_boot: str) -> ShimProcess | None:
    """The shim that shim.json names, if that process still runs: same boot, same pid, same start time."""
    if shim_json is None or shim_json.get("boot_id") != this_boot:
        return None
    pid, start_time = shim_json.get("pid"), shim_json.get("start_time")
    if type(pid) is not int or type(start_time) is not int or pid <= 1:
        return None
    shim = ShimProcess(pid, start_time)
    return shim if shim.is_alive() else None


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A living shim, known by the lock that it holds, whatever became of its files."""

    attempt: AttemptId
    shim: ShimProcess
    is_in_place: bool
    """Its sandbox is where it was, so it can be reached, or asked to listen again."""


def lock_holders(sandboxes: Path) -> list[LockHolder]:
    """Every shim that holds the shim.lock of a sandbox here. The name only spares the look at everyone's descriptors;
    the lock is the proof: no run inherits it."""
    prefix = f"{os.path.realpath(sandboxes)}/"
    found: dict[int, LockHolder] = {}
    parents: dict[int, int] = {}
    for stat in tree.all_processes():
        if stat.comm != "gpulayer-shim" or stat.is_zombie:
            continue
        for target in _open_files(stat.pid):
            name, _, file = target.removeprefix(prefix).partition("/")
            attempt = attempt_id(name) if target.startswith(prefix) else None
            if attempt is not None and file in ("shim.lock", "shim.lock (deleted)"):
                shim = ShimProcess(stat.pid, stat.start_time)
                found[stat.pid] = LockHolder(attempt, shim, is_in_place=file == "shim.lock")
                parents[stat.pid] = stat.ppid
    return [holder for pid, holder in found.items() if parents[pid] not in found]  # a run that is about to be executed


def _open_files(pid: int) -> list[str]:
    targets = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass  # it has ended, or is another user's
    return targets


def ask_to_listen(shim: ShimProcess) -> None:
    """Its socket or shim.json was removed by hand: it makes them anew."""
    stat = tree.process_stat(shim.pid)
    if stat is not None and stat.start_time == shim.start_time:
        tree.signal_process(stat, LISTEN_AGAIN)


def end_with_tree(shim: ShimProcess) -> None:
    """Kills a shim that is of no use any more, its tree first: as long as it lives all of that hangs below it, also
    what has no environment to be found by. Blocks."""
    stat = tree.process_stat(shim.pid)
    if stat is not None and stat.start_time == shim.start_time:
        tree.kill_all(lambda: tree.descendants(shim.pid))
        tree.signal_process(stat, signal.SIGKILL)


class ShimLink:
    """One connection. `run` reads it until it ends; `on_event` gets what the shim tells unasked, after the first
    hello."""

    def __init__(self, stream: trio.SocketStream, shim: ShimProcess, on_event: Callable[[Json], None]) -> None:
        self.shim = shim
        self._stream = stream
        self._on_event = on_event
        self._next_id = 0
        self._waiting: dict[int, Callable[[Json], None]] = {}
        self._received_fds: list[int] = []
        """Descriptors that came along with an answer (SCM_RIGHTS), until whoever asked has taken them."""
        self._send_lock = trio.Lock()
        self._greeted = False
        self.ended = trio.Event()

    @classmethod
    async def connect(cls, directory: Path, shim: ShimProcess, on_event: Callable[[Json], None]) -> ShimLink:
        """ShimGone if nothing answers there, or somebody else."""
        try:
            directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ShimGone(f"{directory}: {error.strerror}") from error
        try:
            connection = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            os.close(directory_fd)
            raise ShimGone(f"{directory}: {error.strerror}") from error
        try:
            with trio.fail_after(HELLO_SECONDS_MAX):
                # A socket's path has 107 bytes at most, and a data directory may have more.
                await connection.connect(f"/proc/self/fd/{directory_fd}/shim.sock")
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
            if pid != shim.pid or uid not in (0, os.geteuid()) or not shim.is_alive():
                raise ShimGone(f"{directory}/shim.sock belongs to pid {pid} of uid {uid}, not to shim {shim.pid}")
            return cls(trio.SocketStream(connection), shim, on_event)
        except (OSError, trio.TooSlowError) as error:
            connection.close()
            raise ShimGone(f"{directory}/shim.sock: {error or 'no answer'}") from error
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(directory_fd)

    async def run(self) -> None:
        """Returns when the shim has closed the connection, or was closed to for talking nonsense."""
        received = bytearray()
        try:
            while part := await self._receive():
                received += part
                if b"\n" not in part:
                    if len(received) > LINE_BYTES_MAX:
                        return
                    continue
                *lines, received = received.split(b"\n")
                for line in lines:
                    if not self._take(line):
                        return
        except (OSError, trio.ClosedResourceError):
            return
        finally:
            await self.close()

    async def _receive(self) -> bytes:
        part, ancillary, _, _ = await self._stream.socket.recvmsg(READ_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._received_fds += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
        return part

    async def hold(self, fds: Mapping[str, int], *, timeout_seconds: float) -> None:
        """The shim keeps these open, by name, as long as it lives: what is locked through them outlives us."""
        try:
            # Ours may be closed, and their numbers used anew, while this waits for its turn to send.
            copies = _copies(fds)
        except OSError as error:
            raise ShimSilent(f"shim {self.shim.pid} was not given {', '.join(fds)}: {error.strerror}") from error
        try:
            for names in _batches(list(copies)):
                reply = await self.request(
                    "hold", timeout_seconds=timeout_seconds, fds=[copies[name] for name in names], names=names
                )
                if reply.get("ok") is not True:
                    raise ShimSilent(f"shim {self.shim.pid} does not hold {', '.join(names)}: {reply.get('error')}")
        finally:
            _close_all(copies.values())

    async def held(self, names: Iterable[str], *, timeout_seconds: float) -> dict[str, int]:
        """Copies of those of the named descriptors that the shim holds. The caller closes them."""
        found: dict[str, int] = {}
        taken: list[int] = []

        def take(reply: Json) -> None:  # in the reader's step, before another answer can bring others
            taken[:], self._received_fds = self._received_fds, []

        try:
            for batch in _batches(list(names)):
                reply = await self.request("held", timeout_seconds=timeout_seconds, on_reply=take, names=batch)
                given = reply.get("names")
                if not isinstance(given, list) or len(given) != len(taken):
                    raise ShimSilent(f"shim {self.shim.pid} does not give what it holds: {str(reply)[:200]}")
                found |= {str(name): fd for name, fd in zip(given, taken, strict=True)}
                taken.clear()
        except BaseException:
            _close_all([*found.values(), *taken])
            raise
        return found

    async def request(
        self,
        op: str,
        *,
        timeout_seconds: float,
        on_sent: Callable[[], None] | None = None,
        on_reply: Callable[[Json], None] | None = None,
        slow_seconds: float = float("inf"),
        on_slow: Callable[[], Awaitable[None]] | None = None,
        fds: Sequence[int] = (),
        **fields: Any,
    ) -> Json:
        """The reply. `on_reply` is called with it before any later event is heard. ShimGone, ShimSilent.

        `on_slow`: awaited when there is no reply after `slow_seconds`; then the reply is waited for again.
        `fds` travel along with the first byte of it.
        """
        if self.ended.is_set() or len(self._waiting) >= REQUESTS_WAITING_MAX:
            raise ShimGone(f"no link to shim {self.shim.pid}")
        self._next_id += 1
        number = self._next_id
        answered = trio.Event()
        answers: list[Json] = []

        def take(reply: Json) -> None:
            answers.append(reply)
            if on_reply is not None and reply:
                on_reply(reply)
            answered.set()

        self._waiting[number] = take
        try:
            with trio.fail_after(timeout_seconds):
                async with self._send_lock:
                    line = json.dumps({"id": number, "op": op, **fields}, separators=(",", ":")).encode() + b"\n"
                    if fds:
                        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
                        line = line[await self._stream.socket.sendmsg([line], [rights]) :]
                    await self._stream.send_all(line)
                if on_sent is not None:
                    on_sent()
                if on_slow is not None:
                    with trio.move_on_after(slow_seconds) as patience:
                        await answered.wait()
                    if patience.cancelled_caught:
                        await on_slow()
                await answered.wait()
        except trio.TooSlowError:
            raise ShimSilent(f"shim {self.shim.pid} did not answer {op!r} within {timeout_seconds:g} s") from None
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ShimGone(f"shim {self.shim.pid} closed the connection") from error
        finally:
            self._waiting.pop(number, None)
        if not answers[0]:
            raise ShimGone(f"shim {self.shim.pid} ended before it answered {op!r}")
        return answers[0]

    async def hello(
        self, *, timeout_seconds: float = HELLO_SECONDS_MAX, on_reply: Callable[[Json], None] | None = None
    ) -> Json:
        """What the shim knows. What happened before it is in it; what happens after it comes as events."""

        def greet(reply: Json) -> None:
            self._greeted = True
            if on_reply is not None:
                on_reply(reply)

        return await self.request("hello", timeout_seconds=timeout_seconds, on_reply=greet)

    async def close(self) -> None:
        self.ended.set()
        waiting, self._waiting = self._waiting, {}
        for take in waiting.values():
            take({})
        _close_all(self._received_fds)
        self._received_fds = []
        with trio.CancelScope(shield=True):  # does not wait: aclose() of a socket is a checkpoint and no more
            await self._stream.aclose()

    def _take(self, line: bytes | bytearray) -> bool:
        """False for what no shim says."""
        message = notes.parse(line)
        if message is None:
            return False
        if "event" in message:
            if self._greeted:
                self._on_event(message)
        elif type(number := message.get("id")) is int and number in self._waiting:
            self._waiting.pop(number)(message)
        return True


def _batches(names: list[str]) -> list[list[str]]:
    return [names[start : start + FDS_MAX] for start in range(0, len(names), FDS_MAX)]


def _copies(fds: Mapping[str, int]) -> dict[str, int]:
    """Descriptors of the same files. OSError, and then there is none."""
    copies: dict[str, int] = {}
    try:
        for name, fd in fds.items():
            copies[name] = os.dup(fd)
    except OSError:
        _close_all(copies.values())
        raise
    return copies


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class Spawner:
    """The process that forks shims; made when the first is asked for, and again when it has died."""

    def __init__(self, nofile: tuple[int, int] | None = None, *, tethered: bool = False) -> None:
        """`tethered`: the shims end, and their runs before them, when this process does, however it ends."""
        self._nofile = nofile
        # Nobody else has its other end, and nothing is ever written into it.
        self._tether = os.pipe2(os.O_CLOEXEC) if tethered else None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: trio.socket.SocketType | None = None
        self._lock = trio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def spawn(self, directory: Path) -> ShimProcess:
        """A shim that listens in this directory. SpawnFailed; code `spawner_died` leaves open whether there is one."""
        request: Json = {"op": "spawn", "dir": str(directory)}
        if self._nofile is not None:
            request["nofile"] = list(self._nofile)
        async with self._lock:
            answer = await self._ask(request)
        if answer.get("ok") is True:
            return ShimProcess(int(answer["pid"]), int(answer["start_time"]))
        error = answer.get("error") or {}
        raise SpawnFailed(str(error.get("code", "spawn_failed")), str(error.get("message", "no reason was given")))

    async def _ask(self, request: Json) -> Json:
        if self._process is not None and self._process.poll() is not None:
            log.warning("spawner.died", pid=self._process.pid, returncode=self._process.returncode)
            self.close()
        self.start()
        connection = self._socket
        assert connection is not None
        try:
            with trio.fail_after(SPAWN_SECONDS_MAX):
                await connection.send(json.dumps(request).encode())
                answer = await connection.recv(READ_BYTES)
            if not answer:
                raise ConnectionResetError("it ended")
            decoded = json.loads(answer)
        except (OSError, ValueError, trio.TooSlowError) as error:
            if self._process is not None:
                self._process.kill()  # it may be stopped; a shim that it was making ends when nobody hears of it
            await self.aclose()
            raise SpawnFailed("spawner_died", f"the spawner did not answer: {error or 'too slow'}") from error
        except trio.Cancelled:
            self.close()  # its answer would be taken for that of the next request
            raise
        return decoded if isinstance(decoded, dict) else {}

    def start(self) -> None:
        """Unless it is there; so that the first shim need not wait for it."""
        if self._socket is not None:
            return
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        main = Path(gpulayer.__file__).parent / "shim" / "__main__.py"
        passed, words = [its.fileno()], ["--fd", str(its.fileno()), "--version", gpulayer.__version__]
        if self._tether is not None:
            passed.append(self._tether[0])
            words += ["--tether", str(self._tether[0])]
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(main), *words],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Its own, so that a reader of the daemon's output sees the end when the daemon ends.
                stderr=subprocess.DEVNULL,
                cwd="/",
                # Nothing of the daemon's, but what its interpreter may need to be loaded at all.
                env={key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ},
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(ours)
        log.debug("spawner.started", pid=self._process.pid)

    def close(self) -> None:
        """Its end of the pair is closed, so it ends; the shims go on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            _reap_later.append(process)
        _reap_later[:] = [each for each in _reap_later if each.poll() is None]

    async def aclose(self) -> None:
        """As close(), and waits, briefly, until it has ended."""
        process = self._process
        self.close()
        if process is None:
            return
        with trio.CancelScope(shield=True):  # _wait has a bound of its own
            await trio.to_thread.run_sync(_wait, process)


# Processes that were told to end and had not yet; each is reaped at the next chance.
_reap_later: list[subprocess.Popen[bytes]] = []


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=SPAWNER_END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
