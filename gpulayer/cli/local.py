"""gpulayer submit --target local: the job runs on this machine, in the foreground, by the same rules, without a daemon.

A node of its own (gpulayer/node/private.py) is started for the command, asked as any daemon is, and gone with it, with
all that ran on it. Most of what is told of the job is told by follow.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Literal

from gpulayer.cli.connection import Connection
from gpulayer.cli.follow import until_ended, until_ready, waiting_words
from gpulayer.cli.forewarn import forewarn
from gpulayer.cli.jobs import log_text
from gpulayer.cli.render import clean, note, say
from gpulayer.client.calls import Document
from gpulayer.client.requests import JobRequest
from gpulayer.client.stream import Absence
from gpulayer.client.sync import Client, Job, connect
from gpulayer.client.waits import ENDED_STATES, ended, waiting_for
from gpulayer.model.errors import BY_CODE, GpulayerError, JobEnded, Refused, Unreachable, WaitTimeout
from gpulayer.model.units import format_duration
from gpulayer.runtime.children import without_users_modules

# Beyond the grace that the job was given: a node whose replicas have ended is gone in a tenth of a second.
END_SECONDS_MAX = 30.0
END_LOOK_SECONDS = 0.2
# It is committed in milliseconds, and a node that hangs is given up anyway.
CANCEL_SECONDS_MAX = 5.0
# A driver may need so long to wake up; only then does it tell of its GPUs.
DRIVER_SECONDS_MAX = 30.0
DRIVER_LOOK_SECONDS = 0.5
# The last lines are on their way when the job is said to have ended.
LOG_END_SECONDS_MAX = 2.0
_LAST_LINES = 5


def run_here(connection: Connection, request: JobRequest, wait_seconds: float | None, *, json: bool) -> int:
    """Run the job to its end. Returns the command's exit code: a batch's own, or 128+n after signal n.

    Raises WaitTimeout after `wait_seconds` (of a service: without being ready), JobEnded where a service ended without
    success, GpulayerError where the job can never run here, or its node cannot be made. Nothing of it is left then.
    """
    spec = request.spec
    if spec.kind == "service" and spec.replicas > 1 and spec.spread == "node":
        raise GpulayerError(
            f"{spec.replicas} replicas, each on a node of its own, can never run here: this is one node",
            hint="add --spread any",
            code="never_fits",
        )
    with _Signals() as signals:
        try:
            with _node(connection, signals, spec.stop_grace_seconds) as client:
                forewarn(spec, client)
                answer = client.submit_document(request)
                job = _JobHere(client, answer["id"], answer["name"])
                _refuse_what_never_fits(client, job, answer.get("warning"), wants_gpus=spec.requirements.gpus_milli > 0)
                return _stay(job, request, wait_seconds, signals, json=json)
        except KeyboardInterrupt:
            assert signals.first is not None
            if signals.is_urgent:
                note("gpulayer: killed at once")
            return 128 + signals.first


@contextmanager
def asked_here(connection: Connection) -> Iterator[Client]:
    """A node to ask something of, and no more."""
    with _Signals() as signals, _node(connection, signals, 0.0) as client:
        yield client


def _refuse_what_never_fits(client: Client, job: Job, warning: Mapping[str, str] | None, *, wants_gpus: bool) -> None:
    """No node will join that has what is missing. A driver that does not answer yet may have it."""
    deadline = time.monotonic() + DRIVER_SECONDS_MAX
    reason, is_told = warning, False
    while reason is not None and reason["code"] == "never_fits":
        (node,) = client.nodes()
        may_come = node["gpu_detect"] == "error"
        if not may_come or time.monotonic() >= deadline:
            # One that is broken is counted with those that are not there.
            for text in node["undetected"] if wants_gpus else ():
                if text not in reason["text"]:
                    note(f"gpulayer: not detected: {clean(text)}")
            raise GpulayerError(clean(reason["text"]), hint=_for_here(reason["hint"]), code=reason["code"])
        if not is_told:
            is_told = True
            at_most = format_duration(DRIVER_SECONDS_MAX)
            note(f"gpulayer: waits for the driver, {at_most} at most: {clean(reason['text'])}")
        time.sleep(DRIVER_LOOK_SECONDS)
        waiting = [replica["reason"] for replica in job.status()["replicas"] if replica["state"] == "waiting"]
        reason = next((each for each in waiting if each), None)


# --- staying with the job -----------------------------------------------------------------------------------------


def _stay(job: _JobHere, request: JobRequest, wait_seconds: float | None, signals: _Signals, *, json: bool) -> int:
    stopper = _Stopper(job, request, wait_seconds, signals.kill)
    signals.first_does(stopper.stop)
    try:
        try:
            if request.spec.kind == "batch":
                code = until_ended(job, None, replicas=request.spec.replicas, in_foreground=True)
            else:
                code = _stay_with_service(job, request, stopper, json=json)
        finally:
            signals.first_does(signals.hurry)
            stopper.close()
    except JobEnded:
        if not stopper.has_stopped_it:
            raise
        note(f"gpulayer: job {job.name} was stopped")
        code = 0
    except Unreachable:
        if not stopper.has_ended_its_node:
            raise
        code = 0
    if stopper.time_is_over is not None:
        raise stopper.time_is_over
    return code if signals.first is None else 128 + signals.first


def _stay_with_service(job: _JobHere, request: JobRequest, stopper: _Stopper, *, json: bool) -> int:
    """Its log goes to stderr all along, its endpoints to stdout once it is ready."""
    spec = request.spec
    log = _Log(job, stopper, is_prefixed=spec.replicas > 1)
    log.start()
    try:
        try:
            is_restarted_for_ever = spec.max_restarts is None and spec.restart == "always"
            until_ready(job, None, is_restarted_for_ever=is_restarted_for_ever, json=json, in_foreground=True)
        except JobEnded as error:
            if error.state:
                raise
            # One of them has ended for good, and is not to stop the others.
            note(f"gpulayer: {error.message}")
            say(job.id)
            for endpoint in job.endpoints():
                say(endpoint)
        sys.stdout.flush()
        stopper.is_ready()
        status = _watched_to_its_end(job)
    finally:
        log.finish()
    if status["state"] != "succeeded":
        raise ended(status)
    note(f"gpulayer: {ended(status).message}")
    return 0


def _watched_to_its_end(job: _JobHere) -> Document:
    """Says where it serves from now on, and what it waits for. How runs end and begin stands in its log."""
    assert job.seen is not None
    said = {replica["index"]: _words_of(replica) for replica in job.seen["replicas"]}
    for status in job.watch():
        if status["state"] in ENDED_STATES:
            return status
        for replica in status["replicas"]:
            words = _words_of(replica)
            if words and said.get(replica["index"]) != words:
                said[replica["index"]] = words
                note(f"replica {replica['index']}: {words}")
    raise AssertionError("a watch ends with an ended state")


def _words_of(replica: Mapping[str, Any]) -> str:
    if replica["state"] == "ready" and replica["endpoint"]:
        return f"ready at {replica['endpoint']}"
    return waiting_words(replica).text


class _JobHere(Job):
    """As a job on a daemon; what is said of it names no commands, which would ask a daemon."""

    seen: Document | None = None
    """How it was when that was watched last."""

    def watch(self, timeout: float | None = None) -> Generator[Document, None, None]:
        for status in super().watch(timeout):
            replicas = [{**replica, "reason": _reason_for_here(replica["reason"])} for replica in status["replicas"]]
            self.seen = {**status, "reason": _reason_for_here(status["reason"]), "replicas": replicas}
            yield self.seen


def _reason_for_here(reason: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    # Whoever stops a job here is this command, which says why.
    if reason is None or reason["code"] == "cancelled":
        return None
    return {**reason, "hint": _for_here(reason["hint"])}


def _for_here(hint: str) -> str:
    hint = hint.replace(", which is the daemon's unless --env PATH gives yours", "")
    return "; ".join(
        part for part in hint.split("; ") if "gpulayer " not in part or "gpulayer resources detect" in part
    )


class _Log(threading.Thread):
    """What a service writes, as `gpulayer job logs` shows it."""

    def __init__(self, job: Job, stopper: _Stopper, *, is_prefixed: bool) -> None:
        super().__init__(name="log", daemon=True)
        self._job = job
        self._stopper = stopper
        self._is_prefixed = is_prefixed

    def run(self) -> None:
        try:
            for line in self._job.logs(follow=True):
                note(log_text(line, self._is_prefixed))
        except OSError:
            # Nobody reads any more.
            self._stopper.stop()
        except Unreachable:
            pass  # its node has ended, which the main thread finds out as well
        except GpulayerError as error:
            note(f"gpulayer: its log is not shown here: {clean(error.message)}")

    def finish(self) -> None:
        self.join(LOG_END_SECONDS_MAX)


class _Stopper:
    """Stops the job when that is asked for, and when its time is over, while the main thread stays with it: so all that
    it says until its end is shown."""

    def __init__(self, job: Job, request: JobRequest, wait_seconds: float | None, end_node: Callable[[], None]) -> None:
        self.has_stopped_it = False
        self.has_ended_its_node = False
        self.time_is_over: WaitTimeout | None = None
        self._job = job
        self._spec = request.spec
        self._wait_seconds = wait_seconds
        self._end_node = end_node
        # Of all that can wake up a thread, this is what a signal handler may use.
        self._told: SimpleQueue[Literal["stop", "ready", "over"]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stopper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._told.put("stop")

    def is_ready(self) -> None:
        """There is no time that could be over any more."""
        self._told.put("ready")

    def close(self) -> None:
        """What it was doing is done, and what is told of it true."""
        self._told.put("over")
        self._thread.join(CANCEL_SECONDS_MAX)

    def _run(self) -> None:
        told = self._next(self._wait_seconds)
        if told == "ready":
            told = self._next(None)
        if told == "over":
            return
        self.has_stopped_it = True
        if told is None:
            self.time_is_over = self._timeout()
        elif not _is_output_closed():
            grace = format_duration(self._spec.stop_grace_seconds)
            with suppress(OSError):  # nobody may be there to read it
                note(
                    f"gpulayer: stopping job {self._job.name} ({self._spec.stop_signal}, KILL after {grace};"
                    " Ctrl-C again kills it at once)"
                )
        try:
            self._job.cancel()
        except Refused:
            self.has_stopped_it, self.time_is_over = False, None  # it has ended by itself
        except Unreachable:
            pass  # its node has ended, and it with that
        except GpulayerError as error:
            # A full disk. What cannot be written down is done by the shims, as the job says, when their node is gone.
            with suppress(OSError):
                note(f"gpulayer: it cannot be stopped in good order: {clean(error.message)}")
            self.has_ended_its_node = True
            self._end_node()

    def _next(self, seconds: float | None) -> Literal["stop", "ready", "over"] | None:
        try:
            return self._told.get(timeout=seconds)
        except Empty:
            return None

    def _timeout(self) -> WaitTimeout:
        what = "is not ready" if self._spec.kind == "service" else "has not ended"
        text = f"job {self._job.name} {what} after {format_duration(self._wait_seconds or 0)}"
        with suppress(GpulayerError):
            status = self._job.status()
            if self._spec.kind == "service" or status["state"] == "waiting":
                text += f": {clean(waiting_for(status))}"
        return WaitTimeout(text, hint="it was stopped; give it longer with --wait")


def _is_output_closed() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


# --- signals ------------------------------------------------------------------------------------------------------


class _Signals:
    """Ctrl-C, SIGTERM and SIGHUP while the block lasts. What the first does depends on what is under way; the second is
    in a hurry."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.is_urgent = False
        self.kill: Callable[[], None] = lambda: None
        """What makes an end of it; called when it is urgent."""
        self._first_does: Callable[[], None] = self.break_off
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup, or a shell that started it in the background, has said who is not to disturb us.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def first_does(self, what: Callable[[], None]) -> None:
        """From now on. Called by the handler, so it may be called between any two steps of the main thread."""
        self._first_does = what

    def break_off(self) -> None:
        raise KeyboardInterrupt

    def hurry(self) -> None:
        self.is_urgent = True
        self.kill()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = number
            self._first_does()
        else:
            self.hurry()


# --- the node -----------------------------------------------------------------------------------------------------


@contextmanager
def _node(connection: Connection, signals: _Signals, patience_seconds: float) -> Iterator[Client]:
    """A private node that serves; at the end of the block it is gone, and all that ran on it, which may take
    `patience_seconds` and a little more."""
    signals.first_does(lambda: None)  # heard below
    node = _Node(connection.data_dir, signals)
    try:
        if signals.first is not None:
            raise KeyboardInterrupt
        signals.first_does(signals.break_off)
        client = node.client()
        try:
            yield client
        except Unreachable as error:
            if signals.is_urgent:
                raise KeyboardInterrupt from None
            raise node.why_it_ended() or error from None
    finally:
        node.close(patience_seconds)


class _Node:
    """The process. Its stdin is the pipe at whose end it stops everything, so it does that also when we are killed."""

    def __init__(self, data_dir: str | None, signals: _Signals) -> None:
        self._signals = signals
        self._directory: Path | None = None
        self._is_ready = False
        # Gone by itself, however we end.
        self._log = os.fdopen(os.memfd_create("gpulayer-local"), "rb+", buffering=0)
        words = [] if data_dir is None else [os.path.abspath(os.path.expanduser(data_dir))]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpulayer.node.private", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=without_users_modules(os.environ),
            # A session of its own: Ctrl-C is for us, and so is Ctrl-Z.
            start_new_session=True,
        )
        signals.kill = self._process.kill

    def client(self) -> Client:
        """Once it serves. GpulayerError: what it says, or its log, why it does not."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "error" in told:
                error = told["error"]
                kind = BY_CODE.get(error["kind"], GpulayerError)
                raise kind(error["message"], hint=error["hint"], code=error["code"])
            if "directory" in told:
                self._directory = Path(told["directory"])
            if "ready" in told:
                self._is_ready = True
                client = connect(data_dir=self._directory)
                client.absence = _Presence(self)
                return client
        self._process.wait()
        raise self.why_it_ended() or AssertionError("it has ended")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def why_it_ended(self) -> GpulayerError | None:
        """In words; None where it lives."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        said = f": {clean(' | '.join(last))}" if last else ""
        return GpulayerError(f"the private node (pid {self._process.pid}) {how}{said}", hint="what it ran was stopped")

    def close(self, patience_seconds: float) -> None:
        self._signals.first_does(self._signals.hurry)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if not self._is_ready:
            self._process.terminate()  # it may not look at its stdin yet
        self._wait_for_end(patience_seconds)
        self._log.close()
        if self._directory is not None and self._directory.exists():
            _tidy_up(self._directory, self._signals)

    def _wait_for_end(self, patience_seconds: float) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + patience_seconds + END_SECONDS_MAX
        while True:
            # At its end, however that comes, its output ends.
            readable, _, _ = select.select([output], [], [], END_LOOK_SECONDS)
            if readable and not os.read(output, 4096):
                self._process.wait()
                return
            if self._signals.is_urgent or time.monotonic() >= deadline:
                self._process.kill()


class _Presence(Absence):
    """Where no answer comes and no process is there, nobody needs to be waited for."""

    def __init__(self, node: _Node) -> None:
        super().__init__(
            lambda is_away: note(f"gpulayer: the private node {'does not answer' if is_away else 'is back'}")
        )
        self._node = node

    def lasts(self, seconds: float) -> None:
        if self._node.has_ended:
            raise Unreachable("the private node has ended")
        super().lasts(seconds)


def _tidy_up(directory: Path, signals: _Signals) -> None:
    """What the node has left, because it was killed or could not remove it."""
    # Only here, because it brings a good part of the node along.
    from gpulayer.runtime.private_dirs import end_runs, remove

    for process in end_runs(directory, at_once=lambda: signals.is_urgent):
        note(f"warning: pid {process.pid} ({process.comm}) cannot be ended: it hangs in the kernel, see dmesg")
    if not remove(directory):
        note(f"warning: {directory} could not be removed; remove it by hand")
