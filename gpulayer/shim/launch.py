"""From fork to exec: a run starts clean, and a start that fails says what was wrong with what.

The child owes its run: a session of its own, default signals and an empty mask, an empty stdin, no descriptor but 0,
1 and 2, oom_score_adj 0, nice 0, umask 022, the daemon's original limit of open files, its cgroup. What it could not
do, and why an exec failed, comes back through a pipe that closes by itself when the exec succeeds.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import resource
import signal
import stat
import struct
from typing import Any, NamedTuple, NoReturn, TypeAlias

from gpulayer.shim import tree

Json: TypeAlias = dict[str, Any]

# Where a command is looked for if its environment has no PATH.
PATH_DEFAULT = "/usr/local/bin:/usr/bin:/bin"
_ALL_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
# Those that the shim handles. Few, because the signal module makes an enum of each one, which for all of them took
# an eighth of a start.
HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGURG)


class Command(NamedTuple):
    argv: list[str]
    env: dict[str, str]
    cwd: str


class Launched(NamedTuple):
    pid: int
    report_fd: int
    """Reads the child's report; at its end the command has been executed, or the child is dead."""


class Report(NamedTuple):
    """What the child said between fork and exec."""

    cgroup_errno: int
    failed_step: str
    """Empty if the command was executed, else "chdir", "exec" or "prepare"."""
    failed_errno: int
    failed_path: str


def launch(
    command: Command, *, stdout_fd: int, stderr_fd: int, cgroup: str | None, nofile: tuple[int, int] | None
) -> Launched:
    """Forks. The caller closes stdout_fd and stderr_fd. OSError: there is no child."""
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    # Blocked across the fork: a signal in the child would be handled by the shim's handlers, which share its wakeup
    # pipe.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    not_default = _not_default()
    try:
        pid = _fork_into(cgroup) if cgroup is not None else None
        is_born_there = pid is not None
        if pid is None:
            pid = os.fork()
        if pid == 0:
            _become(command, stdout_fd, stderr_fd, report_write, None if is_born_there else cgroup, nofile, not_default)
    except BaseException:
        os.close(report_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(report_write)
    os.set_blocking(report_read, False)
    return Launched(pid, report_read)


# The same number on every architecture, as for all calls newer than 5.1.
_SYS_CLONE3 = 435
_CLONE_INTO_CGROUP = 0x200000000
_CLONE_ARGS = struct.Struct("=11Q")
# PyDLL keeps the interpreter's lock: the child must find it held, as after os.fork().
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def _fork_into(cgroup: str) -> int | None:
    """fork(), with the child born in the cgroup (Linux 5.7). None where that cannot be done: join it after the fork.

    Moving a process makes the kernel wait for all CPUs, 10 to 30 ms each and one at a time; being born there costs
    nothing. What os.fork() does beyond the system call (other threads' locks) has no object here: a shim has one
    thread, and the child only goes on to exec.
    """
    try:
        cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        arguments = _CLONE_ARGS.pack(_CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup_fd)
        pid = int(_syscall(ctypes.c_long(_SYS_CLONE3), arguments, ctypes.c_size_t(len(arguments))))
    finally:
        # In the child too, which closes all it does not need anyway.
        os.close(cgroup_fd)
    return pid if pid >= 0 else None


def parse_report(raw: bytes) -> Report:
    report: Json = {}
    for line in raw.splitlines():
        report.update(json.loads(line))
    return Report(
        cgroup_errno=report.get("cgroup_errno", 0),
        failed_step=report.get("step", ""),
        failed_errno=report.get("errno", 0),
        failed_path=report.get("path", ""),
    )


def explain(command: Command, report: Report) -> tuple[str, str]:
    """The code and the sentence for a run that was not executed."""
    name, why = command.argv[0], os.strerror(report.failed_errno)
    if report.failed_step == "chdir":
        return "bad_workdir", f"cannot enter the working directory {command.cwd}: {why}"
    if report.failed_step != "exec" or report.failed_errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return "spawn_failed", f"cannot start {name!r}: {why}"
    return "bad_command", _explain_exec(command, report.failed_path, report.failed_errno)


def _explain_exec(command: Command, path: str, error: int) -> str:
    name = command.argv[0]
    if not path:
        return f"command {name!r} was not found in PATH{_instead_of(name)}"
    seen_from_cwd = os.path.join(command.cwd, path)
    try:
        status = os.stat(seen_from_cwd)
    except OSError as reason:
        relative = "" if os.path.isabs(path) else f" (working directory {command.cwd})"
        return f"command {path!r}{relative}: {os.strerror(reason.errno or error)}"
    if stat.S_ISDIR(status.st_mode):
        return f"command {path!r} is a directory, not a program"
    if error == errno.ENOENT:
        interpreter = _interpreter(seen_from_cwd)
        if _first_line(seen_from_cwd).endswith(b"\r\n"):
            return (
                f"command {path!r} has Windows line ends, so that its interpreter {interpreter} is not found: "
                f"sed -i 's/\\r$//' {tree.printable(path)}"
            )
        if interpreter:
            gone = " (is its environment moved, or gone?)" if "/bin/python" in interpreter else ""
            return f"command {path!r} begins with #!{interpreter}, and there is no such interpreter{gone}"
        return f"command {path!r} needs a loader that is not on this host (built for another system?)"
    if error == errno.EACCES:
        if not status.st_mode & 0o111:
            read_by = _interpreter(seen_from_cwd) or _READ_BY.get(os.path.splitext(path)[1], "")
            also = f", or write {read_by} {tree.printable(path)}" if read_by else ""
            return f"command {path!r} is not executable (mode {stat.S_IMODE(status.st_mode):04o}): chmod +x it{also}"
        interpreter = _interpreter(seen_from_cwd)
        also = f", or its interpreter {interpreter} may not" if interpreter else ""
        return f"command {path!r} may not be executed{also}: permission denied, or on a file system mounted noexec"
    if error == errno.ENOEXEC and not _is_text(_first_line(seen_from_cwd)):
        return f"command {path!r} is not a program for this host: built for another architecture?"
    if error == errno.ENOEXEC:
        read_by = _READ_BY.get(os.path.splitext(path)[1], "sh")
        written = f"{read_by} {tree.printable(path)}"
        return f"command {path!r} has no #! line, so that only a shell would run it: write {written}"
    if error == errno.E2BIG:
        return f"command {path!r}: its arguments and environment are too long for this host"
    return f"cannot execute {path!r}: {os.strerror(error)}"


# What a file without a #! line is mostly meant for.
_READ_BY = {".py": "python", ".sh": "sh"}
_OF_A_SHELL = frozenset(("cd", "source", ".", "export", "set", "unset", "alias", "ulimit", "umask", "eval", "trap"))


def _instead_of(name: str) -> str:
    """What is said of a word that is found in no PATH at all."""
    if any(char.isspace() for char in name):
        return ": it is one word with a blank in it; give each word by itself, or have a shell read it: sh -c '…'"
    if "=" in name:
        return ": no shell reads the command, so that it sets no variable; --env does"
    return ": it is a word of the shell; write sh -c '…'" if name in _OF_A_SHELL else ""


def _first_line(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.readline(256)
    except OSError:
        return b""


def _is_text(line: bytes) -> bool:
    text = line.decode("utf-8", "replace").strip()
    return tree.printable(text) == text


def _interpreter(path: str) -> str:
    first_line = _first_line(path)
    words = first_line[2:].split() if first_line.startswith(b"#!") else []
    # It stands in reasons and log lines, which are one line of text each; a script may hold any byte.
    return tree.printable(words[0].decode("utf-8", "replace")) if words else ""


def _become(
    command: Command,
    stdout_fd: int,
    stderr_fd: int,
    report_fd: int,
    cgroup: str | None,
    nofile: tuple[int, int] | None,
    not_default: list[int],
) -> NoReturn:
    """The child's way to exec. Never returns and never raises: two shims on one socket would be a disaster."""
    step, path = "prepare", ""
    try:
        os.setsid()
        # 0 is /dev/null already; the others are above 2, since the shim keeps 0, 1 and 2 occupied.
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        # Before anything that may hang (a dead network file system): the child must not hold the shim's lock or socket.
        _close_all_but(report_fd)
        _reset_signals(not_default)
        if cgroup is not None:
            _join(cgroup, report_fd)
        _reset_priorities()
        if nofile is not None:
            _restore_nofile(nofile)
        os.umask(0o022)
        step = "chdir"
        os.chdir(command.cwd)
        step = "exec"
        _execute(command)
    except _NotExecuted as failure:
        path = failure.path
        _tell(report_fd, {"step": step, "errno": failure.errno, "path": path})
    except OSError as error:
        _tell(report_fd, {"step": step, "errno": error.errno or 0, "path": path})
    except BaseException:  # noqa: BLE001
        _tell(report_fd, {"step": step, "errno": 0, "path": path})
    finally:
        os._exit(127)


class _NotExecuted(Exception):
    def __init__(self, path: str, errno_: int) -> None:
        super().__init__(path)
        self.path = path
        self.errno = errno_


def _execute(command: Command) -> NoReturn:
    name = command.argv[0]
    if "/" in name:
        candidates = [name]
    else:
        directories = command.env.get("PATH", PATH_DEFAULT).split(":")
        candidates = [os.path.join(directory or ".", name) for directory in directories if name]
    refused = _NotExecuted(name if "/" in name else "", errno.ENOENT)
    for candidate in candidates:
        try:
            os.execve(candidate, command.argv, command.env)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                # Not there: look on. There, but it cannot be executed: the user should hear of it if nothing better
                # comes.
                is_there = not refused.path and os.path.exists(candidate) and not os.path.isdir(candidate)
                if is_there or "/" in name:
                    refused = _NotExecuted(candidate, error.errno)
                continue
            refused = _NotExecuted(candidate, error.errno or 0)
            break
    raise refused


def _close_all_but(kept_fd: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != kept_fd:
            try:
                os.close(fd)
            except OSError:
                pass  # the listing's own


@functools.cache
def _not_default() -> list[int]:
    """What exec does not reset by itself (ignored signals), and what must not be handled before it. The
    shim changes none once it serves."""
    return [number for number in _ALL_SIGNALS if signal.getsignal(number) is not signal.SIG_DFL]


def _reset_signals(not_default: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in not_default:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass  # kept by the C library for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _join(cgroup: str, report_fd: int) -> None:
    try:
        fd = os.open(f"{cgroup}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)
    except OSError as error:
        _tell(report_fd, {"cgroup_errno": error.errno})


def _reset_priorities() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except OSError:
        pass  # a lower priority than 0 was given to the daemon, and only root may take that back
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)
    except OSError:
        pass  # as above


def _restore_nofile(nofile: tuple[int, int]) -> None:
    soft, hard = nofile
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY:
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _tell(report_fd: int, report: Json) -> None:
    os.write(report_fd, json.dumps(report).encode() + b"\n")
