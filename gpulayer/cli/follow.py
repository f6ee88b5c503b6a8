"""Staying with a job that was just submitted: a service until it is ready, a batch to its end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from gpulayer.cli.failure import NOT_THE_JOBS_OWN, Interrupted
from gpulayer.cli.jobs import exit_text, log_text
from gpulayer.cli.render import clean, note, reason_text, say, say_json
from gpulayer.client.logs import LogLine
from gpulayer.client.sync import ENDED_STATES, Document, Job, ended, is_all_ready, waiting_for
from gpulayer.model.errors import GpulayerError, JobEnded, WaitTimeout
from gpulayer.model.units import format_duration

# Reasons that every healthy start passes through; worth words only when they stay.
_AS_EVERY_START = frozenset(("starting", "not_listening"))
_REMIND_SECONDS = 5.0
_REMIND_SECONDS_MAX = 60.0

# The last lines are on their way when the job is said to have ended; after this the rest is fetched.
_LOG_END_SECONDS_MAX = 2.0


def until_ready(job: Job, wait_seconds: float | None, *, json: bool) -> None:
    """Tell on stderr how a service gets on; at last its id and one host:port per replica on stdout.

    Raises JobEnded with the reason where it ends, WaitTimeout with what it still waits for, Interrupted on Ctrl-C;
    the service itself goes on in the last two.
    """
    status: Document | None = None
    progress = _Progress()
    progress.remind()
    try:
        for status in job.watch(wait_seconds):
            progress.tell(status)
            if status["state"] in ENDED_STATES:
                _say_last_lines(status)
                raise ended(status)
            if is_all_ready(status):
                _say_ready(status, json=json)
                return
            gone = [replica for replica in status["replicas"] if replica["state"] == "ended"]
            others_are_ready = all(replica["state"] in ("ready", "ended") for replica in status["replicas"])
            if gone and others_are_ready and status["on_replica_end"] == "keep":
                _say_last_lines({"replicas": gone})
                raise JobEnded(
                    f"job {job.name} is {status['state']}: task {gone[0]['index']} has ended for good"
                    f" ({reason_text(gone[0]['reason'])})",
                    hint=f"the others go on; see gpulayer job status {job.name}",
                )
    except WaitTimeout:
        raise WaitTimeout(
            f"job {job.name} is not ready after {format_duration(wait_seconds or 0)}: {waiting_for(status)}",
            hint=f"it goes on: gpulayer job status {job.name}; stop it with: gpulayer job cancel {job.name}",
        ) from None
    except KeyboardInterrupt:
        raise _left_running(job) from None
    finally:
        progress.end()


def _left_running(job: Job) -> Interrupted:
    return Interrupted(
        f"job {job.name} ({job.id}) goes on",
        hint=f"see it with: gpulayer job status {job.name}; stop it with: gpulayer job cancel {job.name}",
    )


def _say_ready(status: Mapping[str, Any], *, json: bool) -> None:
    if json:
        say_json(status)
        return
    say(status["id"])
    for replica in status["replicas"]:
        if replica["endpoint"]:
            say(replica["endpoint"])


def _say_last_lines(status: Mapping[str, Any]) -> None:
    """The end of the log of each replica that failed."""
    for replica in status["replicas"]:
        if replica["last_exit"]:
            note(f"task={replica['index']} last exit: {exit_text(replica['last_exit'])}")
        for line in replica["last_lines"]:
            note(f"  {clean(line)}")


class _Progress:
    """One line per replica as it gets on, nothing twice; and where nothing happens for long, what it waits for."""

    def __init__(self) -> None:
        self._told: dict[int, str] = {}
        self._exits: dict[int, tuple[int, int]] = {}
        self._nodes: dict[int, tuple[str, int]] = {}
        self._latest: Mapping[str, Any] | None = None
        self._news_at = time.monotonic()
        self._has_ended = threading.Event()

    def tell(self, status: Mapping[str, Any]) -> None:
        self._latest = status
        for replica in status["replicas"]:
            for words in self._news(replica):
                self._news_at = time.monotonic()
                note(f"task={replica['index']} {words}")

    def remind(self) -> None:
        """From now on, until `end()`, say what is waited for whenever there was no news for a while."""
        threading.Thread(target=self._remind, name="remind", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def _remind(self) -> None:
        patience_seconds = _REMIND_SECONDS
        reminded_of = self._news_at
        while not self._has_ended.wait(1.0):
            if self._news_at != reminded_of:
                reminded_of, patience_seconds = self._news_at, _REMIND_SECONDS
            if self._latest is not None and time.monotonic() - self._news_at >= patience_seconds:
                note(f"still waiting: {clean(waiting_for(self._latest))}")
                patience_seconds += min(patience_seconds, _REMIND_SECONDS_MAX)

    def _news(self, replica: Mapping[str, Any]) -> list[str]:
        index = replica["index"]
        news = []
        placed = (replica["node"] or "", replica["attempt"])
        if replica["node"] and self._nodes.get(index) != placed:
            news.append(f"placed on {replica['node']}")
        self._nodes[index] = placed
        last_exit = replica["last_exit"]
        if last_exit:
            which = (replica["attempt"], last_exit["run"])
            if self._exits.get(index) != which and replica["state"] not in ("backing_off", "ended"):
                # In those two states the reason says it.
                news.append(f"exited: {clean(last_exit['text'])}")
            self._exits[index] = which
        words = _state_words(replica)
        if words != self._told.get(index):
            news.append(words)
        self._told[index] = words
        return [word for word in news if word]


def _state_words(replica: Mapping[str, Any]) -> str:
    """What its state is worth a line for; empty where the line above said it."""
    reason = reason_text(replica["reason"])
    match replica["state"]:
        case "ready":
            return f"ready at {replica['endpoint']}" if replica["endpoint"] else "ready"
        case "assigned":
            return ""
        case "waiting":
            return f"waiting: {reason}" if reason else ""
        case "starting" if not reason or replica["reason"]["code"] in _AS_EVERY_START:
            return f"starting, run {replica['run']}" if replica["run"] else ""
        case "backing_off":
            return f"restarting: {reason or 'it ended'}"
        case state:
            return f"{state}: {reason}" if reason else str(state)


class _Output(threading.Thread):
    """Shows what a batch writes, stdout on stdout and stderr on stderr, while the main thread waits for its end."""

    def __init__(self, job: Job, prefixed: bool) -> None:
        super().__init__(name="output", daemon=True)
        self._job = job
        self._prefixed = prefixed
        self._lock = threading.Lock()
        self._is_over = False
        self._last: str | None = None
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            for line in self._job.logs(follow=True):
                with self._lock:
                    if self._is_over:
                        return
                    self._show(line)
        except BrokenPipeError as error:
            # Nobody reads any more: the main thread ends the command. A signal, because it is inside a system call.
            self.failed = error
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)
        except GpulayerError as error:
            self.failed = error

    def finish(self) -> None:
        """Show what is left; nothing is shown after this returned."""
        self.join(_LOG_END_SECONDS_MAX)
        with self._lock:
            self._is_over = True
        if self.is_alive() or self.failed is not None:
            for line in self._job.logs(after=self._last):
                self._show(line)

    def _show(self, line: LogLine) -> None:
        self._last = line.offset
        if line.kind not in ("output", "gap"):
            # Starts and ends: the exit code, and the last line of this command, say the same.
            return
        text = log_text(line, self._prefixed) + "\n"
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        stream.write(text)
        stream.flush()


def until_ended(job: Job, wait_seconds: float | None, *, replicas: int) -> int:
    """Show a batch's output until its end, and return its own exit code: 128+n for signal n, 125 where it has none.

    Raises WaitTimeout and Interrupted as `until_ready` does; the batch goes on then.
    """
    output = _Output(job, prefixed=replicas > 1)
    output.start()
    waits_for: dict[int, str] = {}
    status: Document | None = None
    try:
        for status in job.watch(wait_seconds):
            _tell_waiting(status, waits_for)
            if status["state"] in ENDED_STATES:
                output.finish()
                return _own_exit_code(status)
    except WaitTimeout:
        why = f": {waiting_for(status)}" if status is not None and status["state"] == "waiting" else ""
        raise WaitTimeout(
            f"job {job.name} has not ended after {format_duration(wait_seconds or 0)}{why}",
            hint=f"it goes on: gpulayer job logs -f {job.name}; stop it with: gpulayer job cancel {job.name}",
        ) from None
    except KeyboardInterrupt:
        if isinstance(output.failed, BrokenPipeError):
            raise output.failed from None
        raise _left_running(job) from None
    raise AssertionError("a watch ends with an ended state")


def _tell_waiting(status: Mapping[str, Any], told: dict[int, str]) -> None:
    for replica in status["replicas"]:
        reason = reason_text(replica["reason"]) if replica["state"] == "waiting" else ""
        if reason and told.get(replica["index"]) != reason:
            note(f"gpulayer: task={replica['index']} waiting: {reason}")
        told[replica["index"]] = reason


def _own_exit_code(status: Mapping[str, Any]) -> int:
    if status["state"] == "succeeded":
        return 0
    error = ended(status)
    note(f"gpulayer: {clean(error.message)}")
    exits = [replica["last_exit"] for replica in status["replicas"] if replica["last_exit"]]
    failed = [found for found in exits if found["code"] or found["signal"]]
    # The one that ended by itself is the cause; the others were stopped because of it.
    failed.sort(key=lambda found: found["ended_by"] != "itself")
    if not failed:
        if error.hint:
            note(f"hint: {clean(error.hint)}")
        return NOT_THE_JOBS_OWN
    first = failed[0]
    return int(first["code"]) if first["code"] else 128 + int(first["signal"])
