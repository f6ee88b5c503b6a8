"""A real daemon for a test: its own data directory, its own words to it, and a look at the host that does not ask it.

Whatever a test did, `end()` leaves nothing of it on the host, and says so if it had to help.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Json = dict[str, Any]

GPULAYER = (sys.executable, "-m", "gpulayer")
# An idle daemon starts in about a second; a machine that runs three test suites at once takes longer.
START_SECONDS_MAX = 30.0
ENDED = ("succeeded", "failed", "cancelled", "lost")


def wait_for(predicate: Callable[[], T], seconds: float = 10.0, what: str | Callable[[], object] = "") -> T:
    """The first true value that `predicate` gives; AssertionError with `what` after the time."""
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            detail = what() if callable(what) else what
            raise AssertionError(
                f"waited {seconds:g} s in vain{f': {detail}' if detail else ''}; last: {value!r:.2000}"
            )
        time.sleep(0.02)


class Answered(Exception):
    """An HTTP answer that is an error: `status`, and the body's `code`, `message` and `hint`."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.code: str = body.get("code", "")
        self.message: str = body.get("message", "")
        self.hint: str = body.get("hint", "")


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Daemon:
    """`gpulayer up` on `home/data`. `config` is the text of its configuration file."""

    def __init__(
        self,
        home: Path,
        *,
        config: str = "",
        api_port: int = 0,
        peer_port: int = 0,
        env: Mapping[str, str] | None = None,
        command: Iterable[str] = GPULAYER,
        name: str = "n1",
    ) -> None:
        self.home = home
        self.place(home / "data")
        self.log_path = home / "daemon.log"
        self.name = name
        self.command = [*command]
        self.api_port = api_port
        self.peer_port = peer_port
        self.process: subprocess.Popen[bytes] | None = None
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")} | dict(
            env or {}
        )
        home.mkdir(parents=True, exist_ok=True)
        self.config_path = home / "gpulayer.toml"
        self.config_path.write_text(config)

    def place(self, data_dir: Path) -> None:
        """Another data directory than `home/data`; before the start."""
        self.data_dir = data_dir
        self.socket = data_dir / "gpulayer.sock"

    # --- life ---------------------------------------------------------------------------------------------------

    def spawn(self, *more: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.command,
                    "up",
                    *("--data-dir", str(self.data_dir)),
                    *("--config", str(self.config_path)),
                    *("--name", self.name),
                    *("--api-port", str(self.api_port), "--peer-port", str(self.peer_port)),
                    *more,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env | dict(env or {}),
                cwd=self.home,
                start_new_session=True,
            )
        return self.process

    def start(self, *more: str, env: Mapping[str, str] | None = None) -> Daemon:
        process = self.spawn(*more, env=env)

        def serves() -> bool:
            assert process.poll() is None, f"the daemon ended with {process.returncode}:\n{self.log_tail()}"
            return self.is_ready()

        wait_for(serves, START_SECONDS_MAX, self.log_tail)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def is_ready(self) -> bool:
        try:
            connection = UnixConnection(self.socket, timeout=5)
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, seconds: float = 15) -> int:
        """SIGTERM, as systemd does it; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(seconds)

    def restart9(self) -> Daemon:
        self.kill9()
        return self.start()

    def log_tail(self, lines: int = 40) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    # --- words --------------------------------------------------------------------------------------------------

    def cli(
        self, *arguments: str, timeout: float = 60, stdin: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            env=self.env | {"GPULAYER_DATA_DIR": str(self.data_dir)} | dict(env or {}),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
            input=stdin if stdin is not None else "",
        )

    def cli_json(self, *arguments: str) -> Any:
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def client(self) -> Any:
        import gpulayer

        return gpulayer.connect(f"unix://{self.socket}")

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30,
    ) -> tuple[int, bytes]:
        """One request over the socket: status and body. `body`: bytes as they are, all else as JSON."""
        connection = UnixConnection(self.socket, timeout=timeout)
        try:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"Content-Type": "application/json"} if content is not None else {}
            connection.request(method, path, content, sent | dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def call(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """The JSON of a good answer, or Answered."""
        status, content = self.request(method, path, body, **more)
        if status >= 400:
            raise Answered(status, json.loads(content))
        lines = content.decode().splitlines()
        return json.loads(content) if len(lines) <= 1 else [json.loads(line) for line in lines if line]

    def submit(self, command: list[str], kind: str = "service", **spec: Any) -> str:
        """The id of an acknowledged job."""
        answer = self.call("POST", "/v1/jobs", {"kind": kind, "command": command, **spec})
        return str(answer["id"])

    def batch(self, command: list[str], **spec: Any) -> str:
        return self.submit(command, "batch", **spec)

    def job(self, job: str) -> Json:
        return dict(self.call("GET", f"/v1/jobs/{job}"))

    def replica(self, job: str, index: int = 0) -> Json:
        return dict(self.job(job)["replicas"][index])

    def cancel(self, job: str) -> None:
        self.call("POST", f"/v1/jobs/{job}/cancel")

    def wait_job(self, job: str, predicate: Callable[[Json], bool], seconds: float = 15) -> Json:
        """The first status of the job for which the predicate holds."""
        seen: list[Json] = [{}]

        def look() -> bool:
            seen[0] = self.job(job)
            return predicate(seen[0])

        wait_for(look, seconds, lambda: f"{json.dumps(seen[0], indent=1)}\n{self.log_tail()}")
        return seen[0]

    def wait_replica(self, job: str, predicate: Callable[[Json], bool], index: int = 0, seconds: float = 15) -> Json:
        status = self.wait_job(job, lambda status: predicate(status["replicas"][index]), seconds)
        return dict(status["replicas"][index])

    def wait_ready(self, job: str, seconds: float = 20) -> list[str]:
        """The endpoints of all replicas, in their order, once each is ready."""
        status = self.wait_job(job, lambda status: status["ready"] == len(status["replicas"]), seconds)
        return [replica["endpoint"] for replica in status["replicas"]]

    def wait_ended(self, job: str, seconds: float = 20) -> Json:
        return self.wait_job(job, lambda status: status["state"] in ENDED, seconds)

    def log_lines(self, job: str, query: str = "") -> list[Json]:
        status, content = self.request("GET", f"/v1/jobs/{job}/logs{'?' + query if query else ''}")
        assert status == 200, content
        return [json.loads(line) for line in content.splitlines() if line.strip()]

    def output(self, job: str, query: str = "") -> list[str]:
        return [line["text"] for line in self.log_lines(job, query) if line["kind"] == "output"]

    def differences(self) -> list[Json]:
        return list(self.call("GET", "/v1/audit")["differences"])

    # --- the host, without asking the daemon ----------------------------------------------------------------------

    def runs_on_host(self) -> set[int]:
        """Living processes with $GPULAYER_SANDBOX below our data directory."""
        wanted = f"GPULAYER_SANDBOX={self.data_dir}/".encode()
        return {pid for pid in living() if any(v.startswith(wanted) for v in environment(pid))}

    def shims_on_host(self) -> set[int]:
        """Living processes of the shim's code that have something of our sandboxes open."""
        return {
            pid
            for pid in living()
            if b"gpulayer/shim/" in read(f"/proc/{pid}/cmdline") and opens_below(pid, f"{self.data_dir}/sandboxes/")
        }

    def all_on_host(self) -> set[int]:
        return self.runs_on_host() | self.shims_on_host()

    def wait_nothing_left(self, seconds: float = 15) -> None:
        wait_for(lambda: not self.all_on_host(), seconds, lambda: describe(self.all_on_host()))

    def end(self) -> None:
        """Called by the fixture: everything of ours is ended, by the daemon if it can; the host is clean afterwards."""
        disordered = ""
        if self.is_running:
            try:
                self.request("POST", "/v1/leave", {"stop_all": True}, timeout=40)
                assert self.process is not None
                self.process.wait(20)
            except (OSError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
                disordered = f"leave --stop-all failed: {error!r}\n{self.log_tail()}"
                self.kill9()
            else:
                try:
                    # A shim has heard that it may go, and is on its way.
                    self.wait_nothing_left(1)
                except AssertionError as left:
                    disordered = f"left behind by leave --stop-all: {left}"
        for _ in range(50):
            left = self.all_on_host()
            if not left:
                break
            for pid in left:
                end_process(pid)
            time.sleep(0.05)
        assert not self.all_on_host(), describe(self.all_on_host())
        assert not disordered, disordered


# --- /proc ------------------------------------------------------------------------------------------------------


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def living() -> list[int]:
    """Every process but zombies."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and is_alive(int(name))]


def is_alive(pid: int) -> bool:
    stat = read(f"/proc/{pid}/stat")
    return bool(stat) and stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in (b"Z", b"X")


def environment(pid: int) -> list[bytes]:
    return read(f"/proc/{pid}/environ").split(b"\0")


def opens_below(pid: int, prefix: str) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(prefix):
                return True
        except OSError:
            continue
    return False


def children(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        stat = read(f"/proc/{name}/stat") if name.isdigit() else b""
        if stat and int(stat[stat.rindex(b")") + 2 :].split()[1]) == pid:
            found.append(int(name))
    return found


def zombies_of(pid: int) -> list[int]:
    return [child for child in children(pid) if not is_alive(child)]


def end_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def describe(pids: Iterable[int]) -> str:
    return "; ".join(
        f"{pid} {read(f'/proc/{pid}/cmdline').replace(chr(0).encode(), b' ').decode()}" for pid in sorted(pids)
    )


# --- the network --------------------------------------------------------------------------------------------------


def get(endpoint: str, path: str = "/", seconds: float = 10) -> str:
    """The body of a GET; OSError if nobody answers."""
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def refuses(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
