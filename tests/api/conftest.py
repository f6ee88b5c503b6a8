"""A real daemon per module, and requests to it as bytes on a socket or through http.client: no client code of ours."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

STARTED_SECONDS_MAX = 20.0
ANSWERED_SECONDS_MAX = 20.0
CONFIG = """
[[accelerators]]
kind = "cuda"
model = "Test A100"
memory = "40GiB"
count = 2
"""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWERED_SECONDS_MAX)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWERED_SECONDS_MAX)
        self.sock.connect(str(self._path))


@dataclass
class Daemon:
    data_dir: Path
    process: subprocess.Popen[bytes]
    port: int
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def socket_path(self) -> Path:
        return self.data_dir / "gpulayer.sock"

    def connect(self, role: str | None = None) -> http.client.HTTPConnection:
        """Over the unix socket; with a role (or "") over TCP."""
        if role is None:
            return _UnixConnection(self.socket_path)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWERED_SECONDS_MAX)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        role: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """`role`: over TCP with a token of that role; "" without one. `body`: bytes as they are, else as JSON."""
        sent = dict(headers or {})
        if role:
            sent.setdefault("Authorization", f"Bearer {self.token(role)}")
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if content is not None:
            sent.setdefault("Content-Type", "application/json")
        connection = self.connect(role)
        try:
            connection.request(method, path, body=content, headers=sent)
            response = connection.getresponse()
            found = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def token(self, role: str) -> str:
        if role not in self.tokens:
            self.tokens[role] = self.ask("POST", "/v1/tokens", {"role": role}).json["token"]
        return self.tokens[role]

    def submit(self, *argv: str, **keys: object) -> str:
        """The job's id."""
        answer = self.ask("POST", "/v1/jobs", {"command": list(argv), **keys})
        assert answer.status == 201, answer
        return str(answer.json["id"])

    def status(self, job: str) -> Any:
        answer = self.ask("GET", f"/v1/jobs/{job}")
        assert answer.status == 200, answer
        return answer.json

    def wait_for(self, job: str, is_so: Callable[[Any], bool], seconds: float = 15.0) -> Any:
        until = time.monotonic() + seconds
        while not is_so(status := self.status(job)):
            assert time.monotonic() < until, status
            time.sleep(0.05)
        return status

    def wait_for_end(self, job: str) -> Any:
        return self.wait_for(job, lambda status: status["ended_at_utc"] is not None)

    def documents(self, path: str, **keywords: Any) -> list[Any]:
        """A stream to its end; empty lines are only to keep it alive."""
        answer = self.ask("GET", path, **keywords)
        assert answer.status == 200, answer
        return [json.loads(line) for line in answer.body.splitlines() if line.strip()]

    def raw(self, request: bytes, *, unix: bool = False, seconds: float = ANSWERED_SECONDS_MAX) -> bytes:
        """What comes back until the daemon closes."""
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.settimeout(seconds)
            sock.connect(str(self.socket_path) if unix else ("127.0.0.1", self.port))
            sock.sendall(request)
            parts = []
            while part := sock.recv(65536):
                parts.append(part)
            return b"".join(parts)

    def start_again(self) -> None:
        again = start_daemon(self.data_dir)
        self.process, self.port = again.process, again.port

    def terminate(self) -> float:
        """Seconds until it was gone."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        return time.monotonic() - started


def start_daemon(data_dir: Path) -> Daemon:
    config = data_dir.parent / f"{data_dir.name}.toml"
    config.write_text(CONFIG)
    log = (data_dir.parent / f"{data_dir.name}.log").open("ab")
    ready = data_dir / "api.json"
    ready.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
    command = [sys.executable, "-m", "gpulayer", "up", "--data-dir", str(data_dir)]
    process = subprocess.Popen(
        [*command, "--api-port", "0", "--peer-port", "0", "--config", str(config)],
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    log.close()
    until = time.monotonic() + STARTED_SECONDS_MAX
    while not ready.exists():
        said = Path(log.name).read_text()
        assert process.poll() is None, said
        assert time.monotonic() < until, said
        time.sleep(0.05)
    return Daemon(data_dir, process, json.loads(ready.read_text())["port"])


def stop_daemon(daemon: Daemon) -> None:
    """Nothing that it started is left."""
    try:
        if daemon.process.poll() is None:
            for job in daemon.ask("GET", "/v1/jobs?limit=1000").json["jobs"]:
                daemon.ask("POST", f"/v1/jobs/{job['id']}/cancel")
            until = time.monotonic() + 15
            while daemon.ask("GET", "/v1/jobs?limit=1").json["jobs"] and time.monotonic() < until:
                time.sleep(0.05)
            daemon.terminate()
    finally:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait(5)
    said = (daemon.data_dir.parent / f"{daemon.data_dir.name}.log").read_text()
    assert "Traceback" not in said, said
    assert "api.request_failed" not in said, said


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = start_daemon(tmp_path_factory.mktemp("api") / "data")
    try:
        yield started
    finally:
        stop_daemon(started)


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """For a test that stops it."""
    started = start_daemon(tmp_path / "data")
    try:
        yield started
    finally:
        stop_daemon(started)
