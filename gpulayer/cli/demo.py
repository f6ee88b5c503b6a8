"""gpulayer demo: what the product is about, on this host, in seconds, with real parts.

A daemon of its own in a temporary directory, a real HTTP service with two replicas, requests counted all along, one
replica killed with kill -9, restarted by the daemon on a new port. Nothing is left afterwards, also after Ctrl-C or a
failure.
"""

from __future__ import annotations

import gc
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gpulayer.cli.render import say_now
from gpulayer.client.calls import Document
from gpulayer.client.requests import service
from gpulayer.client.sync import Client, Job, connect
from gpulayer.model.errors import GpulayerError, WaitTimeout
from gpulayer.model.units import format_duration

READY_SECONDS_MAX = 15.0
RESTART_SECONDS_MAX = 15.0
CANCEL_SECONDS_MAX = 15.0
LEAVE_SECONDS_MAX = 15.0
# Enough to see a gap of a tenth of a second, and nothing a laptop would notice.
REQUESTS_PER_SECOND = 50
REQUEST_SECONDS_MAX = 2.0
CALM_SECONDS = 1.0
"""How long requests are counted before the kill, and after the restart."""

_SERVER = '''\
"""The demo's service: answers with its replica's number and its pid."""
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"replica {os.environ['GPULAYER_REPLICA']} pid {os.getpid()}\\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

address = (os.environ["HOST"], int(os.environ["PORT"]))
print(f"serving on port {address[1]}", flush=True)
ThreadingHTTPServer(address, Handler).serve_forever()
'''


def demo() -> None:
    """Run a service of two replicas on a daemon of its own, kill one replica, watch it come back; leaves nothing
    behind.
    """
    gc.enable()
    begun = time.monotonic()
    with _sigterm_as_interrupt(), _temporary_directory() as directory, _daemon(directory) as client:
        _show(client, directory, begun)
    say_now(f"cleaned up; {format_duration(round(time.monotonic() - begun, 1))} in all")


def _show(client: Client, directory: Path, begun: float) -> None:
    def tell(text: str) -> None:
        say_now(f"{time.monotonic() - begun:6.2f}s  {text}")

    tell(f"a daemon runs in {directory}")
    script = directory / "serve.py"
    script.write_text(_SERVER)
    request = service([sys.executable, str(script)], name="demo", replicas=2, spread="any")
    tell(f"gpulayer submit --service --name demo --replicas 2 --spread any -- python {script.name}")
    job = client.submit(request)
    job.endpoints(wait=READY_SECONDS_MAX)
    before = {replica["index"]: replica for replica in job.status()["replicas"]}
    for replica in before.values():
        tell(f"replica {replica['index']} is ready at {replica['endpoint']} (pid {replica['pid']})")

    with _Traffic(job) as traffic:
        time.sleep(CALM_SECONDS)
        victim = before[0]
        tell(
            f"kill -9 {victim['pid']} (replica 0); {traffic.answered} requests answered so far, {traffic.failed} failed"
        )
        os.kill(victim["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        after = _restarted(job, victim)
        tell(
            f"replica 0 is ready again at {after['endpoint']} (pid {after['pid']}),"
            f" {time.monotonic() - killed_at:.2f}s after the kill; restarts={after['restarts']}"
        )
        time.sleep(CALM_SECONDS)
    other = next(replica for replica in job.status()["replicas"] if replica["index"] == 1)
    if other["pid"] != before[1]["pid"]:
        raise GpulayerError("replica 1 was replaced although nothing was wrong with it", hint="report this")
    tell(f"replica 1 was not touched: pid {other['pid']} all along")
    tell(
        f"requests: {traffic.answered} answered, {traffic.failed} failed (sent to the killed one before it was noticed)"
    )
    tell("gpulayer job logs demo.0:")
    for line in job.logs(replica=0):
        say_now(f"         {line.text if line.kind == 'output' else '--- ' + line.text}")
    if not traffic.answered:
        raise GpulayerError("no request was answered", hint="report this")
    job.cancel(wait=CANCEL_SECONDS_MAX)
    tell("gpulayer job cancel demo: every process of it is gone")
    differences = client.audit()["differences"]
    if differences:
        raise GpulayerError(f"audit: {differences[0]['text']}", hint="report this")
    tell("gpulayer audit: 0 differences")


def _restarted(job: Job, victim: Document) -> Document:
    try:
        for status in job.watch(RESTART_SECONDS_MAX):
            replica: Document = status["replicas"][0]
            if replica["state"] == "ready" and replica["pid"] not in (None, victim["pid"]):
                return replica
    except WaitTimeout:
        pass
    raise GpulayerError(f"replica 0 was not ready again within {RESTART_SECONDS_MAX:g} s", hint="report this")


class _Traffic:
    """Asks the ready endpoints in turn, and counts. The endpoints come from the daemon, as any client would have
    them.
    """

    def __init__(self, job: Job) -> None:
        self.answered = 0
        self.failed = 0
        self._job = job
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def __enter__(self) -> _Traffic:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join(REQUEST_SECONDS_MAX * 2)

    def _run(self) -> None:
        turn = 0
        while not self._is_over.wait(1 / REQUESTS_PER_SECOND):
            try:
                endpoints = self._job.endpoints()
            except GpulayerError:
                endpoints = []
            if endpoints and _answers(endpoints[turn % len(endpoints)]):
                self.answered += 1
            else:
                self.failed += 1
            turn += 1


def _answers(endpoint: str) -> bool:
    connection = http.client.HTTPConnection(endpoint, timeout=REQUEST_SECONDS_MAX)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# --- what it needs, and takes away again --------------------------------------------------------------------------


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="gpulayer-demo-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _daemon(directory: Path) -> Iterator[Client]:
    """A daemon whose end, and that of all it started, is certain when this returns."""
    data_dir = directory / "data"
    # An empty file: the host's own configuration and environment must not change what is shown.
    config = directory / "gpulayer.toml"
    config.touch()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
    ports = ("--api-port", "0", "--peer-port", "0")
    words = ("up", "--data-dir", str(data_dir), "--config", str(config), *ports, "--name", "demo")
    with open(directory / "daemon.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpulayer", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            # A session of its own: Ctrl-C is for us, and the daemon is asked to leave after it.
            start_new_session=True,
        )
    client = connect(data_dir=str(data_dir))
    try:
        _wait_until_ready(client, process, directory / "daemon.log")
        yield client
        _leave(client, process)
        left = _processes_under(directory)
        if left:
            raise GpulayerError(f"{len(left)} processes are left: pid {', '.join(map(str, left))}", hint="report this")
    finally:
        _end_all(client, process, directory)


def _wait_until_ready(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not client.ready():
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(errors="replace").strip().splitlines()[-5:]
            how = "did not answer" if process.poll() is None else f"ended with code {process.returncode}"
            raise GpulayerError(f"the daemon {how}: " + (" | ".join(last) or "it said nothing"), hint="report this")
        time.sleep(0.02)


def _leave(client: Client, process: subprocess.Popen[bytes]) -> None:
    for _ in client.leave(stop_all=True):
        pass
    try:
        code = process.wait(LEAVE_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        raise GpulayerError("the daemon said good-bye, but did not end", hint="report this") from None
    if code != 0:
        raise GpulayerError(f"the daemon ended with code {code}", hint="report this")


def _end_all(client: Client, process: subprocess.Popen[bytes], directory: Path) -> None:
    """After a failure, or Ctrl-C: ask first, then kill what is left, which is only what was started under
    `directory`.
    """
    if process.poll() is None:
        # Bounded from outside: a daemon that hangs must not hang us.
        asking = threading.Thread(target=_leave_quietly, args=(client,), daemon=True)
        asking.start()
        asking.join(LEAVE_SECONDS_MAX)
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)
    for pid in _processes_under(directory):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _leave_quietly(client: Client) -> None:
    try:
        for _ in client.leave(stop_all=True):
            pass
    except GpulayerError:
        pass


def _processes_under(directory: Path) -> list[int]:
    """Processes whose environment, command or working directory names the temporary directory, as all that the demo
    starts do.
    """
    mark = os.fsencode(directory)
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            text = b"".join(Path(f"/proc/{entry}/{name}").read_bytes() for name in ("environ", "cmdline"))
            text += os.fsencode(os.readlink(f"/proc/{entry}/cwd"))
        except OSError:
            # Another user's, or gone.
            continue
        if mark in text:
            found.append(int(entry))
    return found
