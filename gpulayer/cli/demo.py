"""gpulayer demo: what the product is about, on this host, in seconds, with real parts.

Three nodes in a temporary directory, which join by a token as hosts do; a real HTTP service with two replicas, requests
counted all along; one replica killed with kill -9, restarted by its daemon on a new port; then the daemon of a node
killed with kill -9, noticed by the others, its replica still serving, taken up again by the daemon that comes back.
Nothing is left afterwards, also after Ctrl-C or a failure.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from gpulayer.cli.render import say_now
from gpulayer.client.calls import Document
from gpulayer.client.requests import service
from gpulayer.client.sync import Job, connect
from gpulayer.model.errors import GpulayerError, WaitTimeout
from gpulayer.model.units import format_duration

NODES = 3
READY_SECONDS_MAX = 20.0
NOTICE_SECONDS_MAX = 20.0
RESTART_SECONDS_MAX = 15.0
CANCEL_SECONDS_MAX = 15.0
LEAVE_SECONDS_MAX = 15.0
# Enough to see a gap of a tenth of a second, and nothing a laptop would notice.
REQUESTS_PER_SECOND = 50
REQUEST_SECONDS_MAX = 2.0
CALM_SECONDS = 1.0
"""How long requests are counted between two events."""

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
    """Run a service of two replicas on three nodes of its own, kill a replica, then a node's daemon, and watch; leaves
    nothing behind.
    """
    gc.enable()
    begun = time.monotonic()
    with _sigterm_as_interrupt(), _temporary_directory() as directory, _Cluster(directory, begun) as cluster:
        _show(cluster)
        cluster.leave()
    say_now(f"cleaned up; {format_duration(round(time.monotonic() - begun, 1))} in all")


def _show(cluster: _Cluster) -> None:
    tell, client = cluster.tell, cluster.nodes[-1].client
    names = ", ".join(node.name for node in cluster.nodes)
    tell(f"{names} are one cluster, each in a directory of its own below {cluster.directory}")
    script = cluster.directory / "serve.py"
    script.write_text(_SERVER)
    tell(
        f"asked of {cluster.nodes[-1].name}: gpulayer submit --service --name demo --replicas 2 -- python {script.name}"
    )
    job = client.submit(service([sys.executable, str(script)], name="demo", replicas=2))
    job.endpoints(wait=READY_SECONDS_MAX)
    doomed, asked = _parts(cluster, job)
    job = asked.client.job(job.id)
    before = {replica["index"]: replica for replica in job.status()["replicas"]}
    for replica in before.values():
        tell(
            f"replica {replica['index']} is ready at {replica['endpoint']} on {replica['node']} (pid {replica['pid']})"
        )
    with _Traffic(job) as traffic:
        time.sleep(CALM_SECONDS)
        first = _kill_replica(cluster, job, before[0], traffic)
        time.sleep(CALM_SECONDS)
        _kill_daemon(cluster, job, doomed, asked, traffic)
        time.sleep(CALM_SECONDS)
    tell(
        f"requests: {traffic.answered} answered, {traffic.failed} failed (sent to the killed replica before it was "
        "noticed)"
    )
    after = {replica["index"]: replica for replica in job.status()["replicas"]}
    if after[1]["pid"] != before[1]["pid"] or after[0]["pid"] != first["pid"]:
        raise GpulayerError("a replica was replaced although nothing was wrong with it", hint="report this")
    tell("gpulayer job logs demo.0:")
    for line in job.logs(replica=0):
        say_now(f"         {line.text if line.kind == 'output' else '--- ' + line.text}")
    if not traffic.answered:
        raise GpulayerError("no request was answered", hint="report this")
    job.cancel(wait=CANCEL_SECONDS_MAX)
    tell("gpulayer job cancel demo: every process of it is gone")
    for node in cluster.nodes:
        differences = node.client.audit()["differences"]
        if differences:
            raise GpulayerError(f"audit of {node.name}: {differences[0]['text']}", hint="report this")
    tell("gpulayer audit: 0 differences")


def _kill_replica(cluster: _Cluster, job: Job, victim: Document, traffic: _Traffic) -> Document:
    cluster.tell(
        f"kill -9 {victim['pid']} (replica 0); {traffic.answered} requests answered so far, {traffic.failed} failed"
    )
    os.kill(victim["pid"], signal.SIGKILL)
    killed_at = time.monotonic()
    after = _restarted(job, victim)
    cluster.tell(
        f"replica 0 is ready again at {after['endpoint']} (pid {after['pid']}),"
        f" {time.monotonic() - killed_at:.2f}s after the kill; restarts={after['restarts']}"
    )
    return after


def _parts(cluster: _Cluster, job: Job) -> tuple[_Node, _Node]:
    """The node whose daemon is killed: it has a replica and does not hold the log. And the one that is asked all along:
    its daemon stays."""
    hosts = {replica["node"] for replica in job.status()["replicas"]}
    doomed = next(node for node in cluster.nodes[1:] if node.name in hosts)
    return doomed, next(node for node in cluster.nodes[1:] if node is not doomed)


def _kill_daemon(cluster: _Cluster, job: Job, node: _Node, other: _Node, traffic: _Traffic) -> None:
    failed = traffic.failed
    cluster.tell(f"kill -9 {node.process.pid} (the daemon of {node.name}); its replica goes on")
    node.process.kill()
    node.process.wait()
    killed_at = time.monotonic()
    _wait_for(lambda: _seen_by(other, node.name)["state"] == "unsupervised", f"{other.name} to notice")
    cluster.tell(
        f"{other.name} says {time.monotonic() - killed_at:.2f}s after the kill: {node.name} is unsupervised "
        "(its host answers, its daemon does not)"
    )
    time.sleep(CALM_SECONDS)
    cluster.tell(f"requests failed meanwhile: {traffic.failed - failed}; gpulayer up on {node.name} again")
    node.start()
    node.wait_until_ready()
    _wait_for(lambda: _seen_by(other, node.name)["state"] == "alive", f"{node.name} to be alive again")
    _wait_for(lambda: job.status()["state"] == "running", "the service to be running")
    cluster.tell(f"{node.name} is alive again and has taken up its replica, whose pid is the same")


def _seen_by(node: _Node, name: str) -> Document:
    return next(each for each in node.client.nodes() if each["name"] == name)


def _wait_for(what: Callable[[], bool], told: str) -> None:
    deadline = time.monotonic() + NOTICE_SECONDS_MAX
    while not what():
        if time.monotonic() > deadline:
            raise GpulayerError(f"waited {NOTICE_SECONDS_MAX:g} s in vain for {told}", hint="report this")
        time.sleep(0.02)


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


class _Node:
    """One daemon of the demo."""

    def __init__(self, directory: Path, name: str, *more: str, token: str = "") -> None:
        self.name = name
        self.data_dir = directory / name
        self.log = directory / f"{name}.log"
        # An empty file: the host's own configuration and environment must not change what is shown.
        config = directory / "gpulayer.toml"
        config.touch()
        words = ("up", "--data-dir", str(self.data_dir), "--config", str(config), "--name", name)
        self._command = [sys.executable, "-m", "gpulayer", *words, "--api-port", "0", "--peer-port", "0", *more]
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
        if token:
            self._environment["GPULAYER_JOIN_TOKEN"] = token
        self.client = connect(data_dir=str(self.data_dir))
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd="/",
                # A session of its own: Ctrl-C is for us, and the daemon is asked to leave after it.
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self.client.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = self.log.read_text(errors="replace").strip().splitlines()[-5:]
                how = "did not answer" if self.process.poll() is None else f"ended with code {self.process.returncode}"
                words = " | ".join(last) or "it said nothing"
                raise GpulayerError(f"the daemon of {self.name} {how}: {words}", hint="report this")
            time.sleep(0.02)

    def leave(self) -> None:
        for _ in self.client.leave(stop_all=True):
            pass
        try:
            code = self.process.wait(LEAVE_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise GpulayerError(f"{self.name} said good-bye, but did not end", hint="report this") from None
        if code != 0:
            raise GpulayerError(f"the daemon of {self.name} ended with code {code}", hint="report this")

    def end(self) -> None:
        """After a failure, or Ctrl-C: ask first, then kill. Bounded from outside: a daemon that hangs must not hang
        us."""
        if self.process.poll() is None:
            asking = threading.Thread(target=self._leave_quietly, daemon=True)
            asking.start()
            asking.join(LEAVE_SECONDS_MAX)
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5.0)

    def _leave_quietly(self) -> None:
        try:
            for _ in self.client.leave(stop_all=True):
                pass
        except GpulayerError:
            pass


class _Cluster:
    """Three daemons whose end, and that of all they started, is certain when the block is left."""

    def __init__(self, directory: Path, begun: float) -> None:
        self.directory = directory
        self.nodes: list[_Node] = []
        self._begun = begun

    def __enter__(self) -> _Cluster:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _start(self) -> None:
        self.nodes.append(first := _Node(self.directory, "n1"))
        first.wait_until_ready()
        self.tell("n1 runs: gpulayer up")
        made = first.client.create_join_token(uses=NODES - 1, advertise="127.0.0.1")
        self.tell(f"n1 makes a token for {NODES - 1} more: gpulayer token create --join --uses {NODES - 1}")
        for number in range(2, NODES + 1):
            self.nodes.append(_Node(self.directory, f"n{number}", "--join", made["seed"], token=made["token"]))
        for node in self.nodes[1:]:
            node.wait_until_ready()
        for node in self.nodes:
            _wait_for(
                lambda node=node: [each["state"] for each in node.client.nodes()] == ["alive"] * NODES,  # type: ignore[misc]
                f"{node.name} to see all {NODES}",
            )

    def tell(self, text: str) -> None:
        say_now(f"{time.monotonic() - self._begun:6.2f}s  {text}")

    def leave(self) -> None:
        """The node with the log last; then nothing is left."""
        for node in reversed(self.nodes):
            node.leave()
        left = _processes_under(self.directory)
        if left:
            raise GpulayerError(f"{len(left)} processes are left: pid {', '.join(map(str, left))}", hint="report this")

    def _end(self) -> None:
        """Whatever is left is only what was started below the directory."""
        for node in reversed(self.nodes):
            node.end()
        for pid in _processes_under(self.directory):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
