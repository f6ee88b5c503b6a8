"""A spawner, shims and their clients, all real. What a test leaves running is ended at its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.shim import tree

SPAWNER = Path(__file__).parents[2] / "gpulayer" / "shim" / "__main__.py"
Json = dict[str, Any]


def processes_with_env(assignment: str) -> list[tree.ProcessStat]:
    found = []
    for stat in tree.all_processes():
        try:
            environment = Path(f"/proc/{stat.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if assignment.encode() in environment:
            found.append(stat)
    return found


def wait_until(predicate: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        if found := predicate():
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


class Spawner:
    def __init__(self, program: Path = SPAWNER, *, tether: int | None = None) -> None:
        """`tether`: the end of a pipe, for the shims."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", str(program), "--fd", str(theirs.fileno())]
        passed = [theirs.fileno()]
        if tether is not None:
            command += ["--tether", str(tether)]
            passed.append(tether)
        self.process = subprocess.Popen(command, pass_fds=passed, cwd="/", env={})
        theirs.close()
        self.socket.settimeout(10)

    def send(self, message: bytes) -> Json:
        self.socket.send(message)
        return self.receive()

    def receive(self) -> Json:
        answer: Json = json.loads(self.socket.recv(65536))
        return answer

    def spawn(self, directory: Path, **fields: Any) -> Json:
        return self.send(json.dumps({"op": "spawn", "dir": str(directory), **fields}).encode())

    def close(self) -> None:
        self.socket.close()
        assert self.process.wait(5) == 0


class Client:
    """One connection to a shim."""

    def __init__(self, directory: Path) -> None:
        directory_fd = os.open(directory, os.O_RDONLY)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(f"/proc/self/fd/{directory_fd}/shim.sock")
        os.close(directory_fd)
        self.file = self.socket.makefile("rb")
        self.events: list[Json] = []
        self.last_id = 0

    def send(self, op: str, **fields: Any) -> int:
        self.last_id += 1
        self.socket.sendall(json.dumps({"op": op, "id": self.last_id, **fields}).encode() + b"\n")
        return self.last_id

    def receive(self) -> Json:
        line = self.file.readline()
        assert line, "the shim closed the connection"
        message: Json = json.loads(line)
        return message

    def ask(self, op: str, **fields: Any) -> Json:
        request_id = self.send(op, **fields)
        while True:
            message = self.receive()
            if "event" in message:
                self.events.append(message)
            else:
                assert message["id"] == request_id
                return message

    def wait_for(self, event: str) -> Json:
        while True:
            for index, message in enumerate(self.events):
                if message["event"] == event:
                    return self.events.pop(index)
            message = self.receive()
            assert "event" in message, message
            self.events.append(message)

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class Attempt:
    """The directory of an attempt, a shim in it, and a connection to it."""

    def __init__(self, directory: Path, spawner: Spawner, **settings: Any) -> None:
        self.directory = directory
        self.mark = f"{os.getpid()}-{directory}"
        directory.mkdir(mode=0o700, parents=True)
        (directory / "work").mkdir()
        content = {
            "format": 1,
            "job_id": "j-test",
            "job_name": "test",
            "replica": 0,
            "attempt": 1,
            "node_id": "n-1",
            "log": {"max_bytes": 1_000_000, "keep": 3},
            "timeout_seconds": None,
            "stop_signal": "TERM",
            "stop_grace_seconds": 5.0,
            "cgroup": None,
            "nofile": None,
            "a_key_of_a_newer_daemon": {},
            **settings,
        }
        (directory / "attempt.json").write_text(json.dumps(content))
        self.spawned = spawner.spawn(directory)
        assert self.spawned["ok"], self.spawned
        self.client = Client(directory)
        self.runs = 0

    def start(self, *argv: str, env: dict[str, str] | None = None, **fields: Any) -> Json:
        self.runs += 1
        environment = {"PATH": os.environ["PATH"], "GPULAYER_TEST": self.mark, **(env or {})}
        request = {"run": self.runs, "argv": list(argv), "env": environment, "cwd": str(self.directory / "work")}
        return self.client.ask("start", **{**request, **fields})

    def python(self, code: str, **fields: Any) -> Json:
        return self.start(sys.executable, "-I", "-S", "-c", code, **fields)

    def shell(self, code: str, **fields: Any) -> Json:
        return self.start("/bin/sh", "-c", code, **fields)

    def file(self, name: str) -> str:
        """Waits for a file in the working directory that a run writes (and renames, if it matters)."""
        path = self.directory / "work" / name
        wait_until(path.exists)
        return path.read_text()

    def processes(self) -> list[tree.ProcessStat]:
        return [stat for stat in processes_with_env(f"GPULAYER_TEST={self.mark}") if not stat.is_zombie]

    def end(self) -> None:
        try:
            os.kill(self.spawned["pid"], signal.SIGKILL)
        except ProcessLookupError:
            pass
        tree.kill_all(lambda: processes_with_env(f"GPULAYER_TEST={self.mark}"))
        self.client.close()


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.socket.close()
    spawner.process.kill()
    spawner.process.wait()


@pytest.fixture
def new_attempt(tmp_path: Path, spawner: Spawner) -> Iterator[Callable[..., Attempt]]:
    made: list[Attempt] = []

    def new(**settings: Any) -> Attempt:
        directory = settings.pop("directory", tmp_path / "sandboxes" / f"test.{len(made)}.1")
        made.append(Attempt(directory, settings.pop("spawner", spawner), **settings))
        return made[-1]

    yield new
    for attempt in made:
        attempt.end()


@pytest.fixture
def attempt(new_attempt: Callable[..., Attempt]) -> Attempt:
    return new_attempt()


@pytest.fixture
def connect() -> Iterator[Callable[[Path], Client]]:
    made: list[Client] = []

    def connect_to(directory: Path) -> Client:
        made.append(Client(directory))
        return made[-1]

    yield connect_to
    for client in made:
        client.close()


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def cgroup() -> Iterator[str]:
    """A cgroup v2 of the test's own."""
    with open("/proc/self/mountinfo") as mounts:
        roots = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    path = f"{roots[0]}/gpulayer-test-{os.getpid()}-{time.monotonic_ns()}" if roots else ""
    try:
        os.mkdir(path)
    except OSError as error:
        pytest.skip(f"no cgroup v2 that may be written here: {error}")
    yield path
    tree.kill_cgroup(path)
    wait_until(lambda: not os.path.exists(path) or tree.remove_cgroup(path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, so that a full disk is a full disk."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs (needs root): {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
