"""The spawner: forks shims. One small process per daemon, which has imported everything a shim will ever need.

A forked shim is there in 3 ms and shares its memory with its siblings; an executed one would take 15 ms and twice the
memory (docs/decisions/0001). That all is imported here also means that a shim never reads a file of this package
again: an upgrade may replace them while it runs.

    request  {"op": "spawn", "dir": <attempt directory>, "nofile": [soft, hard]?}
    answer   {"ok": true, "pid", "start_time"}, once the shim listens, or {"ok": false, "error": {"code", "message",
    "errno"}}

One JSON object per SEQPACKET message, answered in order; any `id` comes back. It ends when the daemon's end of the
pair is closed; the shims go on, unless they were given a tether (shim.py).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import time
from typing import Any, NamedTuple, NoReturn, TypeAlias

from gpulayer.shim import shim
from gpulayer.shim.channel import failure

Json: TypeAlias = dict[str, Any]

REQUEST_BYTES_MAX = 128 * 1024
# A shim makes a few small files before it listens; a disk that takes longer than this is in trouble.
READY_SECONDS_MAX = 20.0
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Wanted(NamedTuple):
    """A shim that is to be made."""

    directory: str
    version: str
    nofile: tuple[int, int] | None
    tether_fd: int
    """-1: it has none."""


def serve(fd: int, *, version: str, tether_fd: int = -1) -> None:
    """Answers requests until the daemon's end is closed. Every shim keeps a copy of `tether_fd`, if there is one."""
    _set_name(b"gpulayer-spawn")
    daemon = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    if tether_fd >= 0:
        os.set_inheritable(tether_fd, False)
    daemon.setblocking(True)
    _leave_terminal()
    # What is there now is there for good: no collector should touch, and so copy, these pages in a shim. (Not collected
    # first: that would leave holes, which each shim would fill, and so copy, for itself.)
    gc.disable()
    gc.freeze()
    while True:
        try:
            message = daemon.recv(REQUEST_BYTES_MAX)
        except ConnectionError:
            return
        if not message or _is_closed(daemon):
            return
        try:
            daemon.send(json.dumps(_answer(message, version, tether_fd)).encode())
        except OSError:
            return  # the daemon is gone; its successor finds the shim by its directory


def _is_closed(daemon: socket.socket) -> bool:
    """Nobody waits for an answer any more: we were stopped, and a shim made now would be nobody's."""
    poll = select.poll()
    poll.register(daemon, 0)
    return bool(poll.poll(0))


def _answer(message: bytes, version: str, tether_fd: int) -> Json:
    try:
        request = json.loads(message)
    except (ValueError, RecursionError):
        return failure("bad_request", "not a JSON object")
    if not isinstance(request, dict):
        return failure("bad_request", "not a JSON object")
    return {"id": request.get("id"), **_spawn_on_request(request, version, tether_fd)}


def _spawn_on_request(request: Json, version: str, tether_fd: int) -> Json:
    directory, nofile = request.get("dir"), request.get("nofile")
    if request.get("op") != "spawn":
        return failure("unknown_op", f"the spawner does not know {request.get('op')!r:.100}")
    if not isinstance(directory, str) or not directory.startswith("/") or "\0" in directory:
        return failure("bad_request", "dir must be an absolute path")
    if nofile is not None and not (
        isinstance(nofile, list) and len(nofile) == 2 and all(type(limit) is int for limit in nofile)
    ):
        return failure("bad_request", "nofile must be [soft, hard]")
    try:
        limits = None if nofile is None else (nofile[0], nofile[1])
        return _spawn(_Wanted(directory, version, limits, tether_fd))
    except OSError as error:
        return failure("spawn_failed", f"cannot fork a shim: {error.strerror}", error.errno)


def _spawn(wanted: _Wanted) -> Json:
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    try:
        # Twice, so that the shim is a child of init (or of whoever reaps for it) and not of a daemon that may go away.
        between = os.fork()
        if between == 0:
            _fork_shim(wanted, ready_write)
    except BaseException:
        os.close(ready_read)
        raise
    finally:
        os.close(ready_write)
    try:
        os.waitpid(between, 0)
        return _wait_until_ready(ready_read)
    finally:
        os.close(ready_read)


def _wait_until_ready(ready_fd: int) -> Json:
    deadline = time.monotonic() + READY_SECONDS_MAX
    poll = select.poll()
    poll.register(ready_fd, select.POLLIN)
    said = b""
    while not said.endswith(b"\n"):
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            return failure("timeout", f"the shim was not ready after {READY_SECONDS_MAX:g} s: is the disk in trouble?")
        part = os.read(ready_fd, 65536)
        if not part:
            return failure("shim_failed", "the shim ended before it was ready; see shim.crash in its directory")
        said += part
    answer: Json = json.loads(said)
    return answer


def _fork_shim(wanted: _Wanted, ready_fd: int) -> NoReturn:
    try:
        if os.fork() == 0:
            _become_shim(wanted, ready_fd)
    except OSError as error:
        os.write(ready_fd, json.dumps(failure("spawn_failed", "cannot fork a shim", error.errno)).encode() + b"\n")
    finally:
        os._exit(0)


def _become_shim(wanted: _Wanted, ready_fd: int) -> NoReturn:
    try:
        os.setsid()
        gc.enable()
        _set_name(b"gpulayer-shim")
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _keep_only(ready_fd, wanted.tether_fd)
        os.umask(0o077)
        os.chdir("/")  # not the sandbox: it may be removed
        _prefer_to_live()
        shim.serve(wanted.directory, ready_fd, version=wanted.version, nofile=wanted.nofile, tether_fd=wanted.tether_fd)
    except BaseException as error:  # noqa: BLE001
        _leave_trace(wanted.directory, error)
        os._exit(1)
    finally:
        os._exit(0)


def _keep_only(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:
                pass  # the listing's own
    # In order, so that they get 0, 1 and 2: nothing that is opened later may be taken for them. (What is kept is above
    # 2, since the spawner has all three.)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY):
        os.set_inheritable(os.open("/dev/null", flags), True)  # 0 is the run's, too


def _leave_terminal() -> None:
    """Ctrl-C at a daemon in the foreground is for the daemon; and 0, 1 and 2 are occupied, whatever we were given."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    # Whoever started the daemon may have ignored it, and then there would be no child to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(null, fd)
    if null > 2:
        os.close(null)


def _prefer_to_live() -> None:
    """When memory runs out the run should be killed, not its parent: without it nobody would note the exit."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, b"-500")
    except OSError:
        pass  # not privileged
    finally:
        os.close(fd)


def _set_name(name: bytes) -> None:
    _LIBC.prctl(_PR_SET_NAME, name, 0, 0, 0)


def _leave_trace(directory: str, error: BaseException) -> None:
    """A mistake of ours, for the next reader of the sandbox. (traceback would be a late import.)"""
    lines = [f"{type(error).__name__}: {error}"]
    step = error.__traceback__
    while step is not None:
        lines.append(f"  {step.tb_frame.f_code.co_filename}:{step.tb_lineno} {step.tb_frame.f_code.co_name}")
        step = step.tb_next
    try:
        fd = os.open(f"{directory}/shim.crash", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, "\n".join(lines).encode("utf-8", "replace") + b"\n")
        os.close(fd)
    except OSError:
        pass  # nowhere to say it
