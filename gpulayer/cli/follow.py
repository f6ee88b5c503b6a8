"""Staying with a job that was just submitted: a service until it is ready, a batch to its end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpulayer.cli.failure import NOT_THE_JOBS_OWN, Interrupted
from gpulayer.cli.jobs import exit_text, log_text
from gpulayer.cli.render import clean, note, reason_sentence, say, say_json
from gpulayer.client.calls import Document
from gpulayer.client.logs import LogLine
from gpulayer.client.sync import Job
from gpulayer.client.waits import ENDED_STATES, ended, is_all_ready, waiting_for
from gpulayer.model.errors import GpulayerError, JobEnded, Unreachable, WaitTimeout
from gpulayer.model.units import format_duration

# Reasons that every healthy start passes through; worth words only when they stay.
_AS_EVERY_START = frozenset(("starting", "not_listening", "queued"))
# How a run ends that nothing is wrong with.
_NO_FAILURES = frozenset(("restart_requested", "interrupted"))
# Most services are ready by then, and need no words about how they got there.
_QUIET_SECONDS = 1.0
_REMIND_SECONDS = 5.0
# In the same words.
_REPEAT_SECONDS = 60.0
_NAMED_MAX = 5
_LAST_LINES = 5
# Around the last lines of a run there are its start, its end, and what follows from it.
_LINES_ABOUT_A_RUN = 4

# The last lines are on their way when the job is said to have ended; after this the rest is fetched.
_LOG_END_SECONDS_MAX = 2.0


def until_ready(
    job: Job, wait_seconds: float | None, *, is_restarted_for_ever: bool, json: bool, in_foreground: bool = False
) -> None:
    """Tell on stderr how a service gets on; at last its id and one host:port per replica on stdout.

    Raises JobEnded with the reason where it ends, WaitTimeout with what it still waits for, Interrupted on Ctrl-C;
    the service itself goes on in the last two. `in_foreground`: its log is shown anyway, and Ctrl-C stops it.
    """
    status: Document | None = None
    progress = _ServiceProgress(job, is_restarted_for_ever=is_restarted_for_ever, in_foreground=in_foreground)
    progress.begin()
    try:
        for status in job.watch(wait_seconds):
            progress.tell(status)
            if status["state"] in ENDED_STATES:
                if not in_foreground:
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
                    f"job {job.name} is {status['state']}: replica {gone[0]['index']} has ended for good"
                    f" ({reason_sentence(gone[0]['reason'])})",
                    hint=f"the others go on; see gpulayer job status {job.name}",
                )
    except WaitTimeout:
        raise WaitTimeout(
            f"job {job.name} is not ready after {format_duration(wait_seconds or 0)}: {waiting_for(status)}",
            hint=f"{_hint_of(status)}it goes on: gpulayer job status {job.name}; "
            f"stop it with: gpulayer job cancel {job.name}",
        ) from None
    except KeyboardInterrupt:
        raise left_running(job) from None
    finally:
        progress.end()


def _hint_of(status: Document | None) -> str:
    """What to do about what is waited for, to be followed by more."""
    replicas = status["replicas"] if status is not None else ()
    hints = [replica["reason"]["hint"] for replica in replicas if replica["state"] != "ready" and replica["reason"]]
    return f"{clean(hints[0])}; " if hints and hints[0] else ""


def left_running(job: Job) -> Interrupted:
    """Ctrl-C while it was stayed with."""
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
            note(f"replica {replica['index']}: last exit: {exit_text(replica['last_exit'])}")
        for line in replica["last_lines"]:
            note(f"  {clean(line)}")


class Words(NamedTuple):
    """What is said behind `replica 0`; empty: nothing is."""

    text: str = ""
    hint: str = ""
    is_warning: bool = False
    """Nothing but a person can change it."""


def waiting_words(replica: Mapping[str, Any]) -> Words:
    """Of one that was not placed, unless it will be in a moment."""
    reason = replica["reason"]
    if replica["state"] != "waiting" or not reason or reason["code"] in _AS_EVERY_START:
        return Words()
    sentence = reason_sentence(reason)
    if reason["code"] == "never_fits":
        return Words(sentence, reason["hint"], is_warning=True)
    return Words(f"waits: {sentence}", reason["hint"])


class _Progress(ABC):
    """What people hear, once each: what is wrong, and what to do about it; where nothing happens for long, what is
    waited for.
    """

    prefix = ""

    def __init__(self) -> None:
        self._told: dict[int, object] = {}
        self._hints: set[str] = set()
        self._latest: Mapping[str, Any] | None = None
        self._news_at = time.monotonic()
        self._is_late = False
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    def begin(self) -> None:
        """From now on, until `end()`, say what is waited for whenever there was no news for a while."""
        threading.Thread(target=self._remind, name="remind", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def tell(self, status: Mapping[str, Any]) -> None:
        with self._lock:
            self._latest = status
            self._tell(status)

    def _tell(self, status: Mapping[str, Any]) -> None:
        # Where several say the same, it is said once.
        news: dict[Words, list[int]] = {}
        for replica in status["replicas"]:
            words = self._words(replica)
            if words.text and self._told.get(replica["index"]) != (replica["attempt"], replica["run"], words.text):
                news.setdefault(words, []).append(replica["index"])
            self._told[replica["index"]] = (replica["attempt"], replica["run"], words.text)
        for words, indexes in news.items():
            self._say(indexes, words)

    def _say(self, indexes: list[int], words: Words) -> None:
        self._news_at = time.monotonic()
        said = f"warning: {_named(indexes)} {words.text}" if words.is_warning else f"{_named(indexes)}: {words.text}"
        note(f"{self.prefix}{said}")
        self._advise(words.hint)

    def _advise(self, hint: str) -> None:
        if hint and hint not in self._hints:
            self._hints.add(hint)
            note(f"hint: {clean(hint)}")

    @abstractmethod
    def _words(self, replica: Mapping[str, Any]) -> Words:
        """What the state of a replica is worth a line for, and the hint that goes with it."""

    @abstractmethod
    def _is_held(self, replica: Mapping[str, Any]) -> bool:
        """Whether it is one that is waited for, and of which nothing else is heard."""

    def _hint_for_waiting(self, held: list[Mapping[str, Any]]) -> str:
        """What whoever waits long for `held` may want to know; empty for nothing."""
        return ""

    def _remind(self) -> None:
        said, said_at = "", self._news_at
        while not self._has_ended.wait(_QUIET_SECONDS):
            with self._lock:
                if self._latest is None:
                    continue
                if not self._is_late:
                    self._is_late = True
                    self._tell(self._latest)
                held = [replica for replica in self._latest["replicas"] if self._is_held(replica)]
                words = clean(waiting_for({"replicas": held}))
                quiet_seconds = time.monotonic() - max(self._news_at, said_at)
                if held and quiet_seconds >= (_REPEAT_SECONDS if words == said else _REMIND_SECONDS):
                    said, said_at = words, time.monotonic()
                    note(f"{self.prefix}still waiting: {words}")
                    self._advise(self._hint_for_waiting(held))


def _named(indexes: Iterable[int]) -> str:
    listed = [str(index) for index in indexes]
    if len(listed) == 1:
        return f"replica {listed[0]}"
    if len(listed) > _NAMED_MAX:
        return f"replicas {', '.join(listed[:_NAMED_MAX])} and {len(listed) - _NAMED_MAX} more"
    return f"replicas {', '.join(listed[:-1])} and {listed[-1]}"


class _ServiceProgress(_Progress):
    """Also where each replica is, once it takes longer than most; that it is ready; how its runs end."""

    def __init__(self, job: Job, *, is_restarted_for_ever: bool, in_foreground: bool) -> None:
        super().__init__()
        self._job = job
        self._is_restarted_for_ever = is_restarted_for_ever
        self._in_foreground = in_foreground
        self._exits: dict[int, tuple[int, int]] = {}
        self._placed: dict[int, int] = {}
        """The attempt whose place was said, or needs no saying any more."""
        self._is_explained = False

    def _tell(self, status: Mapping[str, Any]) -> None:
        super()._tell(status)
        for replica in status["replicas"]:
            failed_run = self._ended_run(replica)
            if failed_run and not self._is_explained:
                self._is_explained = True
                self._explain(replica["index"], failed_run, replica["reason"])

    def _ended_run(self, replica: Mapping[str, Any]) -> int:
        """The run that failed, where that is news and another follows; told, where the state does not tell it."""
        last_exit, state = replica["last_exit"], replica["state"]
        if state == "backing_off":
            is_failure = not replica["reason"] or replica["reason"]["code"] not in _NO_FAILURES
            self._exits[replica["index"]] = (replica["attempt"], replica["run"])
            return int(replica["run"]) if is_failure else 0
        if last_exit is None or state in ("stopping", "ended"):
            return 0
        which = (replica["attempt"], last_exit["run"])
        is_told = self._exits.get(replica["index"]) == which
        self._exits[replica["index"]] = which
        if is_told:
            return 0
        self._say([replica["index"]], Words(clean(last_exit["text"])))
        return int(last_exit["run"]) if last_exit["ended_by"] == "itself" else 0

    def _explain(self, index: int, run: int, reason: Mapping[str, Any] | None) -> None:
        """The first run that failed: its last words, and what happens from here on."""
        if not self._in_foreground:
            self._say_last_words(index, run)
        if reason and reason["hint"] and reason["code"] not in _AS_EVERY_START:
            self._hints.add(reason["hint"])
            note(f"hint: {clean(reason['hint'])}")
        if self._is_restarted_for_ever:
            note(
                "it is restarted until Ctrl-C stops it"
                if self._in_foreground
                else "it is restarted until it is cancelled: Ctrl-C leaves it, "
                f"`gpulayer job cancel {self._job.name}` stops it"
            )

    def _say_last_words(self, index: int, run: int) -> None:
        try:
            lines = list(self._job.logs(replica=index, run=run, tail=_LAST_LINES + _LINES_ABOUT_A_RUN))
        except GpulayerError:
            lines = []
        for line in [line for line in lines if line.kind == "output"][-_LAST_LINES:]:
            note(f"  {clean(line.text)}")

    def _words(self, replica: Mapping[str, Any]) -> Words:
        reason = replica["reason"]
        match replica["state"]:
            case "ready":
                return Words(f"ready at {replica['endpoint']}" if replica["endpoint"] else "ready")
            case "waiting":
                return waiting_words(replica)
            case "assigned" | "starting" if not reason or reason["code"] in _AS_EVERY_START:
                if not self._is_late or self._placed.get(replica["index"]) == replica["attempt"]:
                    return Words()
                self._placed[replica["index"]] = replica["attempt"]
                return Words(f"placed on {replica['node']}")
            case "assigned" | "starting":
                return Words(reason_sentence(reason), reason["hint"])
            case "backing_off":
                self._placed[replica["index"]] = replica["attempt"]
                # Its hint comes behind its last words.
                return Words(reason_sentence(reason) or "restarts")
            case "stopping" if reason and reason["code"] == "never_ready":
                # The same is said in a moment, when it has ended.
                return Words()
            case state:
                words = state.replace("_", " ")
                hint = reason["hint"] if reason and state == "unready" else ""
                return Words(f"{words}: {reason_sentence(reason)}" if reason else words, hint)

    def _is_held(self, replica: Mapping[str, Any]) -> bool:
        # Of one that fails again and again there is a line for each time.
        return replica["state"] not in ("ready", "backing_off", "ended")

    def _hint_for_waiting(self, held: list[Mapping[str, Any]]) -> str:
        if self._in_foreground or all(replica["state"] != "starting" for replica in held):
            return ""
        return f"see what it does with: gpulayer job logs {self._job.name} -f; Ctrl-C ends only the waiting"


class _BatchProgress(_Progress):
    """Only of what keeps it from being started: all else a batch says itself. Marked as ours, for it comes between its
    own lines.
    """

    prefix = "gpulayer: "

    def __init__(self, job: Job, *, in_foreground: bool) -> None:
        super().__init__()
        self._job = job
        self._in_foreground = in_foreground

    def _words(self, replica: Mapping[str, Any]) -> Words:
        return waiting_words(replica)

    def _say(self, indexes: list[int], words: Words) -> None:
        super()._say(indexes, words)
        if words.is_warning and not self._in_foreground:
            self._advise(
                f"it stays in the queue; Ctrl-C leaves it there, `gpulayer job cancel {self._job.name}` removes it"
            )

    def _is_held(self, replica: Mapping[str, Any]) -> bool:
        return bool(replica["state"] == "waiting")


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
        except OSError as error:
            # Nobody reads any more, or there is no room: the main thread ends the command. A signal, because it is
            # inside a system call.
            self.failed = error
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)
        except Unreachable as error:
            # The rest is fetched at the end.
            self.failed = error
        except GpulayerError as error:
            note(f"{_BatchProgress.prefix}its output is not shown here: {clean(error.message)}")
            if error.hint:
                note(f"hint: {clean(error.hint)}")

    def finish(self) -> None:
        """Show what is left; nothing is shown after this returned. Raises nothing of the daemon's: the batch has ended,
        and its exit code is known.
        """
        self.join(_LOG_END_SECONDS_MAX)
        with self._lock:
            self._is_over = True
        if isinstance(self.failed, OSError):
            raise self.failed
        if self.is_alive() or self.failed is not None:
            try:
                for line in self._job.logs(after=self._last):
                    self._show(line)
            except GpulayerError as error:
                note(f"{_BatchProgress.prefix}the end of its output is not shown: {clean(error.message)}")

    def _show(self, line: LogLine) -> None:
        self._last = line.offset
        if line.kind not in ("output", "gap"):
            # Starts and ends: the exit code, and the last line of this command, say the same.
            return
        text = log_text(line, self._prefixed) + "\n"
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        stream.write(text)
        stream.flush()


def until_ended(job: Job, wait_seconds: float | None, *, replicas: int, in_foreground: bool = False) -> int:
    """Show a batch's output until its end, and return its own exit code: 128+n for signal n, 125 where it has none.

    Raises WaitTimeout and Interrupted as `until_ready` does; the batch goes on then. `in_foreground`: Ctrl-C stops it.
    """
    output = _Output(job, prefixed=replicas > 1)
    output.start()
    progress = _BatchProgress(job, in_foreground=in_foreground)
    progress.begin()
    status: Document | None = None
    try:
        for status in job.watch(wait_seconds):
            progress.tell(status)
            if status["state"] in ENDED_STATES:
                progress.end()
                output.finish()
                return _own_exit_code(status)
    except WaitTimeout:
        is_waiting = status is not None and status["state"] == "waiting"
        raise WaitTimeout(
            f"job {job.name} has not ended after {format_duration(wait_seconds or 0)}"
            + (f": {waiting_for(status)}" if is_waiting else ""),
            hint=f"{_hint_of(status) if is_waiting else ''}it goes on: gpulayer job logs -f {job.name}; "
            f"stop it with: gpulayer job cancel {job.name}",
        ) from None
    except KeyboardInterrupt:
        if isinstance(output.failed, OSError):
            raise output.failed from None
        raise left_running(job) from None
    finally:
        progress.end()
    raise AssertionError("a watch ends with an ended state")


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
