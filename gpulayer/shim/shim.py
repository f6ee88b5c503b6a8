"""The shim: one process per attempt, parent of its runs, one event loop without a timer that is not needed.

It executes what it is told to, captures the output, notes the exit, and leaves nothing of the run's tree behind. It
decides nothing about restarts or ports: that is the daemon's, which may be killed and come back at any time. What
must happen without a daemon is here: reading the pipes, noting exits, the attempt's timeout, the end of a stop that
was begun.

A shim with a tether (a pipe whose other end the daemon has open as long as it lives) does not outlive its daemon: at
the end of that it stops its run and ends, too. That is for `submit --target local`, where nobody comes back.

Whether the tree is gone is not a guess: the shim is a child subreaper, so every orphan of the tree becomes its
child, and as long as any process of the tree lives the shim has a child. No child left (and an empty cgroup) is the
proof.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import select
import signal
import time
from typing import Any, TypeAlias

from gpulayer.shim import launch, log_format, notes, requests, tree
from gpulayer.shim.channel import SOCKET_NAME, Channel, Connection, failure, listen
from gpulayer.shim.log_writer import LogWriter
from gpulayer.shim.requests import BadAttempt, BadRequest

Json: TypeAlias = dict[str, Any]

PROTOCOL = 1
# "Make your socket anew." Ignored by default, so an older shim takes no harm.
LISTEN_AGAIN = signal.SIGURG
# One read of a pipe takes all that is in it. 256 KiB is a quarter of what a user may ask for without privileges
# (pipe-max-size), so that the pipes of dozens of replicas still fit below that user's limit (pipe-user-pages-soft).
PIPE_BYTES = 256 * 1024
# What a run leaves behind when it ends by itself gets the stop signal and this long, or its stop grace if that is less.
LEFTOVER_GRACE_SECONDS_MAX = 10.0
# How often a kill is repeated for what is still there; a death is noticed at once in any case.
SWEEP_PAUSE_SECONDS = (0.01, 1.0)
# How often one sweep looks again because new processes had appeared: a chain of forks is outrun, the socket not
# starved.
SWEEP_LOOKS_MAX = 64
UNKILLABLE_AFTER_SECONDS = 5.0
UNKILLABLE_AGAIN_SECONDS = 30.0
LEFT_NAMES_MAX = 5
CAUSE_CHARACTERS_MAX = 200
# Of which each may take twelve bytes in JSON, and all of an exit note must fit into its half (notes.HALF_BYTES).
MESSAGE_CHARACTERS_MAX = 250

_LIBC = ctypes.CDLL(None, use_errno=True)
_TIMERFD_ABSOLUTE = 1


class AlreadyRunning(Exception):
    """Another shim lives in this directory."""


class Run:
    """One process of the attempt, from its marker until nothing of its tree is left."""

    def __init__(self, number: int, marker: Json, note_fd: int) -> None:
        self.number = number
        self.marker = marker
        self.note_fd = note_fd
        self.pid = 0
        self.start_time = 0
        self.pipes: dict[int, int] = {}
        """Read end -> stream."""
        self.report_fd = -1
        """Open until the command has been executed."""
        self.report = b""
        self.asked_by: tuple[Connection, object] | None = None
        self.command: launch.Command | None = None
        self.ended_by = "itself"
        self.stopping: str | None = None
        self.stop_signal = 0
        self.has_exited = False


def serve(directory: str, ready_fd: int, *, version: str, nofile: tuple[int, int] | None, tether_fd: int = -1) -> None:
    """The life of a shim, in a fresh process. Says on ready_fd, in one JSON object, that it listens or why it does
    not."""
    lock_fd = -1
    try:
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock_fd = _lock(directory_fd)
        shim = Shim(directory, directory_fd, lock_fd, version=version, nofile=nofile, tether_fd=tether_fd)
    except (AlreadyRunning, BadAttempt, OSError) as error:
        if lock_fd >= 0:
            os.close(lock_fd)  # before the answer: whoever has it may try again
        _say(ready_fd, _why_not(error, directory))
        return
    if not _say(ready_fd, {"ok": True, "pid": os.getpid(), "start_time": shim.start_time}):
        shim.leave()  # nobody waits for us any more, and nothing has been started
        return
    os.close(ready_fd)
    shim.serve()


class Shim:
    def __init__(
        self,
        directory: str,
        directory_fd: int,
        lock_fd: int,
        *,
        version: str,
        nofile: tuple[int, int] | None,
        tether_fd: int = -1,
    ) -> None:
        self._version = version
        self._pid = os.getpid()
        self._directory_fd = directory_fd
        self._lock_fd = lock_fd
        self._attempt = requests.read_attempt(self._directory_fd, directory)
        self._nofile = self._attempt.nofile or nofile
        self._tether_fd = tether_fd
        """-1: it has none, or that has ended."""
        self._runs_fd = self._open_directory("runs")
        self._log = LogWriter(
            self._open_directory("logs"), max_bytes=self._attempt.log_max_bytes, keep=self._attempt.log_keep
        )
        self._boot_id = _boot_id()
        stat = tree.process_stat(self._pid)
        assert stat is not None, "/proc is not mounted"
        self.start_time = stat.start_time

        self._run: Run | None = None
        self._last_run = 0
        self._prepared: tuple[int, int] | None = None
        """The number and the descriptor of the next run's file, made while there was time."""
        self._last_exit: Json | None = None
        self._attempt_started_boottime: float | None = None
        self._timeout_seconds = self._attempt.timeout_seconds
        self._recall()
        self._lease_until_boottime: float | None = None
        self._held: dict[str, int] = {}
        """Name -> descriptor: locks that the daemon shares with us, so that they outlive it."""

        self._kill_at: float | None = None
        """When the stop signal's grace is over (monotonic); from then on everything is killed."""
        self._is_killing = False
        self._sweep_at: float | None = None
        self._sweep_pause_seconds = SWEEP_PAUSE_SECONDS[0]
        self._unkillable_at: float | None = None
        self._leaving = False
        self._terminating = False

        # Not a bytearray: these pages cost nothing until output comes.
        self._buffer = memoryview(mmap.mmap(-1, PIPE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._epoll = select.epoll()
        self._wakeup_fd, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watch_signals()
        self._timer_fd = _LIBC.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._timer_fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create: " + os.strerror(ctypes.get_errno()))
        for fd in (self._wakeup_fd, self._timer_fd, self._tether_fd):
            if fd >= 0:
                self._epoll.register(fd, select.EPOLLIN)
        self._channel = Channel(listen(self._directory_fd), self._epoll, self._answer)
        self._publish()

    # The loop

    def serve(self) -> None:
        while not self._leaving:
            self._turn()
        self.leave()

    def leave(self) -> None:
        self._remove_traces()
        self._channel.close()

    def _remove_traces(self) -> None:
        """All that the next shim of this directory could stumble over."""
        if self._lock_fd < 0:
            return
        for name in (SOCKET_NAME, "shim.json"):
            try:
                os.unlink(name, dir_fd=self._directory_fd)
            except OSError:
                pass  # removed with the sandbox, or by hand
        if self._attempt.cgroup is not None:
            tree.remove_cgroup(self._attempt.cgroup)
            try:
                os.rmdir(os.path.dirname(self._attempt.cgroup))  # the daemon's, which may be dead for good
            except OSError:
                pass  # others are in it
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _turn(self) -> None:
        ready = self._epoll.poll(self._seconds_to_wait())
        child_changed = False
        # Signals first: if the host goes down, the run may die of the same SIGTERM that tells us why.
        for fd, _ in ready:
            if fd == self._wakeup_fd:
                child_changed = self._take_signals()
        for fd, events in ready:
            if self._channel.owns(fd):
                self._channel.handle(fd, events)
            elif self._run is not None and fd in self._run.pipes:
                self._read_pipe(self._run, fd)
            elif self._run is not None and fd == self._run.report_fd:
                self._read_report(self._run)
            elif fd == self._timer_fd:
                self._timer_rang()
            elif fd == self._tether_fd:
                self._tether_ended()
        if child_changed:
            self._look_after_children()
        now = time.monotonic()
        if self._kill_at is not None and not self._is_killing and now >= self._kill_at:
            self._is_killing = True
            self._unkillable_at = now + UNKILLABLE_AFTER_SECONDS
            self._sweep()
        elif self._sweep_at is not None and now >= self._sweep_at:
            self._sweep()
        if self._unkillable_at is not None and now >= self._unkillable_at:
            self._unkillable_at = now + UNKILLABLE_AGAIN_SECONDS
            self._channel.tell_all({"event": "unkillable", "pids": [stat.pid for stat in self._tree()]})

    def _seconds_to_wait(self) -> float | None:
        """None, for ever, unless something is being stopped: an idle shim never wakes up."""
        times = [at for at in (self._sweep_at, self._unkillable_at) if at is not None]
        if self._kill_at is not None and not self._is_killing:
            times.append(self._kill_at)
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _take_signals(self) -> bool:
        numbers = set(os.read(self._wakeup_fd, 4096))
        if numbers & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            self._terminate("the supervisor was told to end")
        if LISTEN_AGAIN in numbers:
            self._listen_again()
        return signal.SIGCHLD in numbers

    def _tether_ended(self) -> None:
        self._epoll.unregister(self._tether_fd)
        os.close(self._tether_fd)
        self._tether_fd = -1
        self._terminate("the daemon that it belongs to has ended")

    def _terminate(self, why: str) -> None:
        """Stops the run as its job says, and ends when nothing of it is left."""
        if self._terminating:
            return
        self._terminating = True
        self._log.note(log_format.SUPERVISOR, self._last_run, f"{why}: stopping the run")
        self._stop("shim_terminated", self._attempt.stop_signal, self._attempt.stop_grace_seconds, "shim_terminated")
        self._leaving = self._is_tree_gone()

    def _listen_again(self) -> None:
        """The daemon knows that we live and does not reach us: someone removed the socket or shim.json by hand."""
        try:
            if not os.path.exists(f"/proc/self/fd/{self._directory_fd}/{SOCKET_NAME}"):
                self._channel.listen_on(listen(self._directory_fd))
            self._publish()
        except OSError:
            pass  # a full disk, or the sandbox is gone too: we shall be asked again

    # Requests

    def _answer(self, connection: Connection, request: Json) -> Json | None:
        try:
            match request.get("op"):
                case "hello":
                    return self._hello()
                case "start":
                    return self._start(connection, request)
                case "stop":
                    return self._stop_on_request(request)
                case "pids":
                    return {"ok": True, "pids": [_shown(stat) for stat in self._tree()]}
                case "log":
                    self._log.note(log_format.SUPERVISOR, self._last_run, requests.field(request, "text", str))
                    return {"ok": True}
                case "lease":
                    return self._renew_lease(request)
                case "hold":
                    return self._hold(connection, request)
                case "held":
                    named = requests.names(request) if "names" in request else sorted(self._held)
                    names = [name for name in named if name in self._held]
                    answer = {"ok": True, "names": names}
                    fds = [self._held[name] for name in names]
                    self._channel.reply_with_fds(connection, request.get("id"), answer, fds)
                    return None
                case "release":
                    return self._release(requests.names(request))
                case "quit":
                    return self._quit()
                case unknown:
                    return failure("unknown_op", f"this shim (protocol {PROTOCOL}) does not know {unknown!r:.100}")
        except BadRequest as error:
            return failure("bad_request", str(error))
        except Exception as error:  # noqa: BLE001
            # The edge of one request: a mistake of ours in one must not take the run's parent away.
            return failure("internal", f"{type(error).__name__}: {error}")

    def _hello(self) -> Json:
        run = self._run
        return {
            "ok": True,
            "protocol": PROTOCOL,
            "version": self._version,
            "pid": self._pid,
            "start_time": self.start_time,
            "boot_id": self._boot_id,
            "attempt": self._attempt.identity,
            "run": _shown_run(run) if run is not None and not run.has_exited else None,
            "last_run": self._last_run,
            "last_exit": self._last_exit,
            "gone": self._is_tree_gone(),
            "pids": [_shown(stat) for stat in self._tree()],
            "held": sorted(self._held),
            "lease_until_boottime": self._lease_until_boottime,
            "logs": {"lost_bytes": self._log.lost_bytes, "lost_lines": self._log.lost_lines},
        }

    def _start(self, connection: Connection, request: Json) -> Json | None:
        command = requests.command(request)
        number = requests.field(request, "run", int)
        if self._terminating:
            return failure("stopping", "the supervisor has been told to end")
        self._look_after_children()
        if self._run is not None or not self._is_tree_gone():
            return failure("busy", f"processes of run {self._last_run} are still there")
        if number <= self._last_run:
            return failure("stale_run", f"run {number} is not newer than the last one, {self._last_run}")
        if request.get("timeout_seconds") is not None:
            self._timeout_seconds = requests.seconds(request, "timeout_seconds")
        if _is_over(self._deadline_boottime()):
            return failure("timed_out", f"the attempt's {self._timeout_seconds:g} s are over")
        if _is_over(self._lease_until_boottime):
            return failure("lease_expired", "no current orders: the lease is over, and has not been renewed")
        try:
            self._make_directories_again()
            run = self._mark(number, request)
        except ValueError as error:
            return failure("bad_request", str(error))
        except OSError as error:
            code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "spawn_failed"
            return failure(
                code, f"cannot write the run's marker, so it was not executed: {error.strerror}", error.errno
            )
        self._last_run, self._last_exit, self._run = number, None, run
        run.command, run.asked_by = command, (connection, request.get("id"))
        self._log.note(log_format.RUN_STARTED, number, json.dumps(_started_for_log(run.marker)))
        return self._execute(run, command)

    def _mark(self, number: int, request: Json) -> Run:
        started_boottime = _boottime()
        marker = {
            **self._attempt.identity,
            "run": number,
            "boot_id": self._boot_id,
            "port": request.get("port"),
            "cause": str(request.get("cause", ""))[:CAUSE_CHARACTERS_MAX],
            "restart_serial": request.get("restart_serial"),
            "started_at_utc": time.time(),
            "started_boottime": started_boottime,
            "note": requests.small_note(request),
            # In every marker, since that of the first run may be pruned: what the timeout counts from.
            "attempt_started_boottime": self._attempt_started_boottime or started_boottime,
            "pid": None,
            "start_time": None,
        }
        prepared = self._take_prepared(number)
        if prepared is None:
            notes.prune(self._runs_fd, keep=notes.RUNS_KEPT - 1)
        return Run(number, marker, notes.create(self._runs_fd, number, marker, prepared))

    def _prepare_next(self) -> None:
        """While nobody waits: what a restart would have to wait for."""
        try:
            notes.prune(self._runs_fd)
            self._prepared = self._last_run + 1, notes.prepare(self._runs_fd, self._last_run + 1)
        except OSError:
            pass  # then the start makes it, or says why it cannot

    def _take_prepared(self, number: int) -> int | None:
        """The descriptor of the file that was prepared for this run, if it was for this one."""
        if self._prepared is None:
            return None
        run, fd = self._prepared
        self._prepared = None
        if run == number:
            return fd
        notes.discard(self._runs_fd, run, fd)
        return None

    def _make_directories_again(self) -> None:
        """Someone may have removed them by hand. OSError: the sandbox itself is gone."""
        if not self._is_in_place("runs", self._runs_fd):
            os.close(self._runs_fd)
            self._runs_fd = self._open_directory("runs")
        if not self._is_in_place("logs", self._log.logs_fd):
            self._log.move_to(self._open_directory("logs"))

    def _is_in_place(self, name: str, fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(name, dir_fd=self._directory_fd), os.fstat(fd))
        except FileNotFoundError:
            return False

    def _execute(self, run: Run, command: launch.Command) -> Json | None:
        pipes: list[int] = []
        try:
            stdout_read, stdout_write = _pipe(pipes)
            stderr_read, stderr_write = _pipe(pipes)
            if self._attempt.cgroup is not None:
                tree.renew_cgroup(self._attempt.cgroup)
            launched = launch.launch(
                command,
                stdout_fd=stdout_write,
                stderr_fd=stderr_write,
                cgroup=self._attempt.cgroup,
                nofile=self._nofile,
            )
        except OSError as error:
            for fd in pipes:
                os.close(fd)
            message = f"cannot start {command.argv[0]!r}: {error.strerror}"
            self._not_executed(run, "spawn_failed", message)
            return failure("spawn_failed", message, error.errno)
        os.close(stdout_write)
        os.close(stderr_write)
        run.pid, run.report_fd = launched
        run.pipes = {stdout_read: log_format.STDOUT, stderr_read: log_format.STDERR}
        for fd in (*run.pipes, run.report_fd):
            self._epoll.register(fd, select.EPOLLIN)
        stat = tree.process_stat(run.pid)
        run.start_time = stat.start_time if stat is not None else 0
        run.marker.update(pid=run.pid, start_time=run.start_time)
        self._amend(run)
        self._attempt_started_boottime = run.marker["attempt_started_boottime"]
        self._set_timer()
        return None  # the answer follows when the command has been executed, see _read_report()

    def _read_report(self, run: Run) -> None:
        """The answer to `start`: the child has executed its command, or said why it cannot."""
        try:
            part = os.read(run.report_fd, 65536)
        except BlockingIOError:
            return
        if part:
            run.report += part
            return
        self._epoll.unregister(run.report_fd)
        os.close(run.report_fd)
        run.report_fd = -1
        report = launch.parse_report(run.report)
        assert run.command is not None
        assert run.asked_by is not None
        if report.failed_step:
            code, message = launch.explain(run.command, report)
            answer = failure(code, message, report.failed_errno)
            if not run.has_exited:
                os.waitpid(run.pid, 0)  # it exits right after it has said so
            self._not_executed(run, code, message)
        else:
            answer = {"ok": True, "pid": run.pid, "start_time": run.start_time}
        if report.cgroup_errno:
            answer["cgroup_error"] = f"{self._attempt.cgroup}: {os.strerror(report.cgroup_errno)}"
        self._channel.reply(*run.asked_by, answer)
        run.command = run.asked_by = None

    def _not_executed(self, run: Run, code: str, message: str) -> None:
        """Noted like an exit, so that nobody takes the marker for a run that was interrupted."""
        if run.marker["attempt_started_boottime"] == run.marker["started_boottime"]:
            self._attempt_started_boottime = run.marker["attempt_started_boottime"] = None
            self._amend(run)
            self._set_timer()
        run.ended_by = "spawn_failed"
        self._note_exit(run, code=None, signal_number=None, core_dumped=False, left=[], not_executed=(code, message))
        self._close_run(run)
        self._settle()

    def _stop_on_request(self, request: Json) -> Json:
        number = requests.signal_number(request.get("signal", self._attempt.stop_signal))
        grace = requests.seconds(request, "grace_seconds", self._attempt.stop_grace_seconds)
        reason = str(request.get("reason", "request"))[:CAUSE_CHARACTERS_MAX]
        self._stop(f"stop:{reason}", number, grace, reason)
        return {"ok": True}

    def _quit(self) -> Json:
        self._look_after_children()
        if self._run is not None or not self._is_tree_gone():
            return failure("busy", f"processes of run {self._last_run} are still there")
        self._leaving = True
        self._take_prepared(0)
        self._remove_traces()  # before the answer: whoever has it may start the next shim
        return {"ok": True}

    def _renew_lease(self, request: Json) -> Json:
        """`--stop-after`: from then on the run is stopped, unless the lease is renewed; null ends it."""
        until = request.get("until_boottime")
        self._lease_until_boottime = None if until is None else requests.seconds(request, "until_boottime")
        self._set_timer()
        return {"ok": True}

    def _hold(self, connection: Connection, request: Json) -> Json:
        """Keeps the descriptors that came with the request, one per name, until they are released or this shim ends."""
        names = requests.names(request)
        if len(connection.received_fds) < len(names):
            return failure("bad_request", f"{len(names)} names, and {len(connection.received_fds)} descriptors")
        self._release(names)
        for name in names:
            self._held[name] = connection.received_fds.pop(0)
        return {"ok": True}

    def _release(self, names: list[str]) -> Json:
        for name in names:
            if name in self._held:
                os.close(self._held.pop(name))
        return {"ok": True}

    # Output

    def _read_pipe(self, run: Run, fd: int) -> int:
        """What is in a pipe now, at most a buffer full; the number of bytes. The descriptor is closed at the end."""
        try:
            size = os.readv(fd, [self._buffer])
        except BlockingIOError:
            return 0
        if size:
            self._log.output(run.pipes[fd], run.number, self._buffer[:size])
            return size
        self._close_pipe(run, fd)
        return 0

    def _drain(self, run: Run) -> None:
        """What the main process wrote before it ended: no more than the pipes hold, however much others go on
        writing."""
        for fd in list(run.pipes):
            unread = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
            while unread > 0 and fd in run.pipes:
                size = self._read_pipe(run, fd)
                unread = unread - size if size else 0

    def _close_pipe(self, run: Run, fd: int) -> None:
        self._epoll.unregister(fd)
        os.close(fd)
        del run.pipes[fd]

    # Exits

    def _look_after_children(self) -> None:
        """Reaps what has ended, notes the run's exit, goes on killing where that has begun, and sees whether all is
        gone."""
        self._reap()
        if self._is_killing and not self._is_tree_gone():
            self._sweep()
        self._settle()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self._run
            if run is not None and pid == run.pid and not run.has_exited:
                self._main_ended(run, status)

    def _main_ended(self, run: Run, status: int) -> None:
        run.has_exited = True
        if run.report_fd >= 0:
            os.set_blocking(run.report_fd, True)  # its end has come: the only other copy was the dead child's
        while run.report_fd >= 0:
            self._read_report(run)
        if self._run is not run:
            return  # it had not been executed
        left = [stat for stat in self._tree() if not stat.is_zombie]
        self._drain(run)
        is_signal = os.WIFSIGNALED(status)
        self._note_exit(
            run,
            code=None if is_signal else os.WEXITSTATUS(status),
            signal_number=os.WTERMSIG(status) if is_signal else None,
            core_dumped=os.WCOREDUMP(status),
            left=left,
        )
        assert self._last_exit is not None
        self._channel.tell_all({"event": "exited", **self._last_exit})
        if left and not self._is_killing:
            # Where a stop had begun, those of the main process's group have had the signal; twice may mean "at once".
            uninformed = [stat for stat in left if run.stopping is None or stat.pgrp != run.pid]
            self._send_signal(run.stop_signal or self._attempt.stop_signal, uninformed)
            if self._kill_at is None:
                grace = min(self._attempt.stop_grace_seconds, LEFTOVER_GRACE_SECONDS_MAX)
                self._kill_at = time.monotonic() + grace

    def _note_exit(
        self,
        run: Run,
        *,
        code: int | None,
        signal_number: int | None,
        core_dumped: bool,
        left: list[tree.ProcessStat],
        not_executed: tuple[str, str] | None = None,
    ) -> None:
        note = {
            "run": run.number,
            "code": code,
            "signal": signal_number,
            "ended_by": run.ended_by,
            "ended_at_utc": time.time(),
            "uptime_seconds": round(_boottime() - run.marker["started_boottime"], 6),
            "left_background": len(left),
            "left_names": [stat.comm for stat in left[:LEFT_NAMES_MAX]],
            "core_dumped": core_dumped,
        }
        if not_executed is not None:
            note["error"], note["message"] = not_executed[0], not_executed[1][:MESSAGE_CHARACTERS_MAX]
        self._log.note(log_format.RUN_ENDED, run.number, json.dumps(note))
        try:
            notes.write_exit(run.note_fd, note)
        except (OSError, ValueError) as error:
            # Reserved, so a full disk is no reason; a broken one is. Whoever is connected hears of the exit all the
            # same.
            note["not_noted"] = str(error)
        self._last_exit = note

    def _settle(self) -> None:
        """The end of a run, and of a stop: nothing of the tree is left."""
        if not self._is_tree_gone() or (self._run is not None and not self._run.has_exited):
            return
        was_stopping = self._kill_at is not None
        self._kill_at = self._sweep_at = self._unkillable_at = None
        self._is_killing = False
        self._sweep_pause_seconds = SWEEP_PAUSE_SECONDS[0]
        run = self._run
        if run is not None:
            self._drain(run)
            self._close_run(run)
        if run is not None or was_stopping:
            self._channel.tell_all({"event": "gone", "run": self._last_run})
        if self._terminating:
            self._leaving = True
        elif run is not None:
            self._prepare_next()

    def _close_run(self, run: Run) -> None:
        # A pipe may still be open in a process outside of the tree that was handed it; that one writes into the void.
        for fd in list(run.pipes):
            self._close_pipe(run, fd)
        os.close(run.note_fd)
        self._run = None
        self._set_timer()

    # Stopping

    def _stop(self, ended_by: str, signal_number: int, grace_seconds: float, reason: str) -> None:
        """The signal now, to the run's group and main process; what is left after the grace is killed. A second stop
        may shorten the grace, not lengthen it."""
        self._reap()
        self._settle()
        if self._is_tree_gone():
            return
        kill_at = time.monotonic() + (0.0 if signal_number == signal.SIGKILL else grace_seconds)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        run = self._run
        if run is None or run.has_exited:
            self._send_signal(signal_number, [stat for stat in self._tree() if not stat.is_zombie])
            return
        if run.stopping is None:
            run.ended_by, run.stopping = ended_by, reason
        if run.stop_signal != signal_number:
            run.stop_signal = signal_number
            _signal_group_of(run.pid, signal_number)

    def _send_signal(self, signal_number: int, to: list[tree.ProcessStat]) -> None:
        for number in (signal_number, signal.SIGCONT):
            tree.signal_own_tree(number, members=to, cgroup=self._attempt.cgroup)

    def _sweep(self) -> None:
        """SIGKILL to all there is, and again to what appeared meanwhile, in bounded steps."""
        signalled: set[tuple[int, int]] = set()
        for _ in range(SWEEP_LOOKS_MAX):
            if self._attempt.cgroup is not None:
                tree.kill_cgroup(self._attempt.cgroup)
            alive = [stat for stat in self._tree() if not stat.is_zombie]
            fresh = {(stat.pid, stat.start_time) for stat in alive} - signalled
            if not fresh:
                break
            tree.signal_own_tree(signal.SIGKILL, members=alive, whole_groups=True, cgroup=self._attempt.cgroup)
            signalled |= fresh
            self._reap()
        self._reap()
        self._settle()
        if self._is_killing:
            self._sweep_at = time.monotonic() + self._sweep_pause_seconds
            self._sweep_pause_seconds = min(self._sweep_pause_seconds * 2, SWEEP_PAUSE_SECONDS[1])

    def _tree(self) -> list[tree.ProcessStat]:
        found = {stat.pid: stat for stat in tree.descendants(self._pid)}
        if self._attempt.cgroup is not None:
            for pid in tree.cgroup_pids(self._attempt.cgroup):
                stat = tree.process_stat(pid) if pid not in found and pid != self._pid else None
                if stat is not None:
                    found[pid] = stat
        return list(found.values())

    def _is_tree_gone(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return False
        except ChildProcessError:
            return self._attempt.cgroup is None or not tree.cgroup_pids(self._attempt.cgroup)

    # What ends a run by itself: the attempt's timeout, and the lease

    def _deadline_boottime(self) -> float | None:
        if self._timeout_seconds is None or self._attempt_started_boottime is None:
            return None
        return self._attempt_started_boottime + self._timeout_seconds

    def _set_timer(self) -> None:
        """On CLOCK_BOOTTIME, so that a suspended host's sleep counts, and without a wakeup before it is due."""
        is_running = self._run is not None and not self._run.has_exited and self._run.stopping is None
        deadlines = [
            at for at in (self._deadline_boottime(), self._lease_until_boottime) if at is not None and is_running
        ]
        fraction, whole = math.modf(max(min(deadlines), 0.001)) if deadlines else (0.0, 0.0)
        # struct itimerspec: interval (none), then the instant; all zero disarms.
        setting = (ctypes.c_long * 4)(0, 0, int(whole), int(fraction * 1e9))
        if _LIBC.timerfd_settime(self._timer_fd, _TIMERFD_ABSOLUTE, ctypes.byref(setting), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime: " + os.strerror(ctypes.get_errno()))

    def _timer_rang(self) -> None:
        try:
            os.read(self._timer_fd, 8)
        except BlockingIOError:
            return  # set anew meanwhile
        run = self._run
        if run is None or run.has_exited or run.stopping is not None:
            return
        if _is_over(self._deadline_boottime()):
            text, ended_by, reason = (
                f"the attempt's timeout of {self._timeout_seconds:g} s is over",
                "timeout",
                "timeout",
            )
        elif _is_over(self._lease_until_boottime):
            text, ended_by, reason = "the lease was not renewed in time", "stop:lease_expired", "lease_expired"
        else:
            self._set_timer()
            return
        self._log.note(log_format.SUPERVISOR, run.number, f"{text}: stopping the run")
        self._stop(ended_by, self._attempt.stop_signal, self._attempt.stop_grace_seconds, reason)

    # Set-up

    def _open_directory(self, name: str) -> int:
        try:
            os.mkdir(name, 0o700, dir_fd=self._directory_fd)
        except FileExistsError:
            pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._directory_fd)

    def _recall(self) -> None:
        """What an earlier shim of this attempt left: run numbers go on, and so does the timeout within one boot."""
        notes.drop_unmarked(self._runs_fd)
        numbers = notes.numbers(self._runs_fd)
        self._last_run = numbers[-1] if numbers else 0
        for record in notes.read_all(f"/proc/self/fd/{self._runs_fd}"):
            self._last_exit = record.exit if record.run == self._last_run else None
            if record.marker.get("boot_id") == self._boot_id:
                self._attempt_started_boottime = record.marker.get("attempt_started_boottime")

    def _publish(self) -> None:
        content = {
            "pid": self._pid,
            "start_time": self.start_time,
            "boot_id": self._boot_id,
            "protocol": PROTOCOL,
            "version": self._version,
        }
        fd = os.open(
            "shim.json.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self._directory_fd
        )
        try:
            os.write(fd, json.dumps(content).encode() + b"\n")
        finally:
            os.close(fd)
        os.rename("shim.json.new", "shim.json", src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd)

    def _watch_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for number in launch.HANDLED:
            signal.signal(number, _noted_by_the_wakeup_pipe)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _amend(self, run: Run) -> None:
        try:
            notes.amend_marker(run.note_fd, run.marker)
        except OSError:
            pass  # the marker itself is safe; the pid is a convenience


def _lock(directory_fd: int) -> int:
    lock_fd = os.open("shim.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyRunning("a shim is already running in this directory") from None
    return lock_fd


def _why_not(error: Exception, directory: str) -> Json:
    if isinstance(error, AlreadyRunning):
        return failure("already_running", str(error))
    if isinstance(error, OSError):
        code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "shim_failed"
        return failure(code, f"cannot set up the shim in {directory}: {error}", error.errno)
    return failure("bad_attempt", str(error))


def _shown(stat: tree.ProcessStat) -> Json:
    return {"pid": stat.pid, "start_time": stat.start_time, "comm": stat.comm, "state": stat.state}


def _shown_run(run: Run) -> Json:
    shown = (
        "run",
        "pid",
        "start_time",
        "port",
        "cause",
        "restart_serial",
        "started_at_utc",
        "started_boottime",
        "note",
    )
    return {**{key: run.marker[key] for key in shown}, "stopping": run.stopping}


def _started_for_log(marker: Json) -> Json:
    return {key: marker[key] for key in ("run", "cause", "port", "restart_serial")}


def _signal_group_of(main_pid: int, signal_number: int) -> None:
    """To the group that the main process began, and to itself wherever it is now, once. It is our child and not
    reaped, so neither number can have gone to others. SIGCONT after it: a stopped process takes a signal only when
    it goes on."""
    for number in (signal_number, signal.SIGCONT):
        is_in_group = False
        try:
            is_in_group = os.getpgid(main_pid) == main_pid
            os.killpg(main_pid, number)
        except OSError:
            pass  # an empty group, or one with processes of other users only
        if not is_in_group:
            try:
                os.kill(main_pid, number)
            except OSError:
                pass  # of another user


def _pipe(opened: list[int]) -> tuple[int, int]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    opened += (read_fd, write_fd)
    os.set_blocking(read_fd, False)
    try:
        fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # beyond the user's limit of pipe pages: 64 KiB do as well, with more wakeups
    return read_fd, write_fd


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _is_over(deadline_boottime: float | None) -> bool:
    # The timer's own instant was cut to nanoseconds, a float's rounding further down.
    return deadline_boottime is not None and _boottime() >= deadline_boottime - 1e-6


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _say(fd: int, message: Json) -> bool:
    try:
        os.write(fd, json.dumps(message).encode() + b"\n")
        return True
    except OSError:
        return False


def _noted_by_the_wakeup_pipe(number: int, frame: object) -> None:
    """A handler must exist for the signal's number to be written to the wakeup pipe; the loop does the rest."""
