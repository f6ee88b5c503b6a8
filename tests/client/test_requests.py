"""What `gl.service(…)` and `gl.batch(…)` accept, and where `gl.connect(…)` goes; no daemon is asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpulayer as gl
from gpulayer.client.address import Loopback, Secure, UnixSocket, find_address, parse_url
from gpulayer.client.waits import UntilReady
from gpulayer.wire.http import spec_to_json, submit_from_json


def test_importing_the_client_brings_nothing_heavy_along() -> None:
    heavy = "{'trio', 'asyncio', 'anyio', 'httpx', 'starlette', 'cbor2', 'rich', 'cyclopts', 'structlog'}"
    code = f"import sys, gpulayer as gl; gl.connect; gl.service; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"


def test_a_service_takes_the_keys_of_the_command_line() -> None:
    request = gl.service(
        ["python", "serve.py"],
        replicas=2,
        accelerator="cuda",
        gpus=0.5,
        gpu_model="*A100*",
        gpu_memory="40GiB",
        cpus=0.5,
        memory="512MiB",
        env={"B": "2", "A": "1"},
        retry=gl.Retry(max_attempts=3),
        timeout_seconds=60,
    )
    body = request.body()
    assert "name" not in body
    assert body["kind"] == "service"
    assert body["command"] == ["python", "serve.py"]
    assert (body["gpus"], body["cpus"], body["gpu_model"]) == (0.5, 0.5, ["*A100*"])
    assert (body["gpu_memory_mib"], body["memory_mib"]) == (40960, 512)
    assert (body["retry_max_attempts"], body["timeout_seconds"], body["port"]) == (3, 60, True)


def test_a_batch_has_no_port_and_is_not_placed_again() -> None:
    body = gl.batch(["python", "train.py"], name="train").body()
    assert (body["kind"], body["name"], body["port"]) == ("batch", "train", False)
    assert (body["restart"], body["retry_max_attempts"]) == ("never", 0)


def test_the_body_is_the_specification_as_the_node_writes_it() -> None:
    for request in (
        gl.service(
            ["a", "b"], name="x", gpus=0.5, gpu_model=["*A100*", "*H100*"], labels={"zone": "a"}, env={"A": "1"}
        ),
        gl.service(["a"], name="x", cpus=2.5, memory="1GiB", workdir="/tmp", max_restarts=3, start_timeout_seconds=5),
        gl.batch(["a"], name="x", gpus=2, gpu_memory="24GiB", vendor="nvidia", timeout_seconds=60, priority=7),
    ):
        assert request.body() == spec_to_json(request.spec)
        assert submit_from_json(request.body()).spec == request.spec
    unnamed = gl.batch(["a"])
    assert submit_from_json(unnamed.body()).name_is_derived


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"command": []}, "command: there is no program in it"),
    ({"command": "python serve.py"}, "command: 'python serve.py' is not a list of words"),
    ({"command": Path("/bin/true")}, "command: .* is not a list of words"),
    ({"command": {"python": 1}}, "command: .* is not a list of words"),
    ({"command": None}, "command: None is not a list of words"),
    ({"command": ["python", 8080]}, r"command\[1\]: 8080 is not text \(write \"8080\"\)"),
    ({"command": [b"python"]}, r"command\[0\]: b'python' is not text"),
    ({"command": ["a\0b"]}, "NUL"),
    ({"replicas": 0}, r"replicas: 0 is not between 1 and 10000 \(write replicas=2\)"),
    ({"replicas": "2"}, "replicas: '2' is not a whole number"),
    ({"replicas": 1.5}, "replicas: 1.5 is not a whole number"),
    ({"replicas": True}, "replicas: True"),
    ({"gpus": 1.5}, "gpus: 1.5 is more than one GPU and not whole"),
    ({"gpus": "two"}, "gpus: 'two' is not a number"),
    ({"gpus": None}, "gpus: None is not a number"),
    ({"gpus": [1]}, r"gpus: \[1\] is not a number"),
    ({"gpus": True}, "gpus: True is not a number"),
    ({"gpus": -1}, "gpus: -1"),
    ({"gpus": float("nan")}, "gpus: nan"),
    ({"gpu_memory": "24", "gpus": 1}, "gpu_memory: '24' is not a size"),
    ({"gpu_memory": 24, "gpus": 1}, "gpu_memory: 24 is not a size .*24GiB"),
    ({"gpu_model": "A100"}, r"gpu_model, gpu_memory and vendor say which GPUs, but gpus is 0 \(add gpus=1"),
    ({"gpu_model": 5, "gpus": 1}, "gpu_model: 5"),
    ({"gpu_model": ["A100", 5], "gpus": 1}, "gpu_model: 5 is not text"),
    ({"gpu_model": "", "gpus": 1}, r"gpu_model: an empty pattern matches no GPU \(leave it out"),
    ({"gpu_model": ["A100", ""], "gpus": 1}, "gpu_model: an empty pattern"),
    ({"gpu_model": ["A100"] * 33, "gpus": 1}, "gpu_model: more than 32 patterns"),
    ({"gpu_model": "x" * 129, "gpus": 1}, "gpu_model: .* more than 128 characters"),
    ({"accelerator": "gpu"}, "accelerator: 'gpu' .*cuda"),
    ({"accelerator": "cuda"}, r"accelerator cuda is asked for, but gpus is 0 \(add gpus=1\)"),
    ({"vendor": 5, "gpus": 1}, "vendor: 5 is not text"),
    ({"cpus": -1}, "cpus: -1"),
    ({"cpus": None}, "cpus: None is not a number"),
    ({"cpus": "many"}, "cpus: 'many' is not a number"),
    ({"memory": 512}, "memory: 512 is not a size .*unit"),
    ({"name": "No"}, "name: 'No' .*a-z"),
    ({"name": 5}, "name: 5 is not text"),
    ({"env": {"A": 1}}, r"env\['A'\]: 1 is not text \(write \"1\"\)"),
    ({"env": {"A": None}}, r"env\['A'\]: None is not text"),
    ({"env": {1: "a"}}, "env: the name: 1 is not text"),
    ({"env": ["A=1"]}, r"env: \['A=1'\] is not a dict"),
    ({"env": {"A=B": "1"}}, r"env: 'A=B' .*env=\{\"NAME\": \"value\"\}"),
    ({"env": {"PORT": "80"}}, "env: PORT is set by gpulayer, .*takes port=False"),
    ({"env": {"GPULAYER_X": "80"}}, "env: GPULAYER_X is reserved"),
    ({"labels": "zone=a"}, "labels: 'zone=a' is not a dict"),
    ({"workdir": 5}, "workdir: 5 is not a path"),
    ({"workdir": ""}, r"workdir: it is empty \(leave it out for a sandbox\)"),
    ({"port": 8080}, "port: 8080 is not True or False .*picks a free port"),
    ({"restart": "sometimes"}, "restart: 'sometimes' .*always, on_failure, never"),
    ({"restart": None}, "restart: None"),
    ({"max_restarts": -1}, "max_restarts: -1"),
    ({"max_restarts": "3"}, "max_restarts: '3' is not a whole number"),
    ({"retry": 3}, r"retry: 3 is not a gl.Retry .*gl.Retry\(max_attempts=3\)"),
    ({"retry": None}, "retry: None is not a gl.Retry"),
    ({"spread": "all"}, "spread: 'all' .*node, any"),
    ({"priority": 101}, "priority: 101"),
    ({"priority": "high"}, "priority: 'high' is not a whole number"),
    ({"on_replica_end": "go"}, "on_replica_end: 'go' .*stop, keep"),
    ({"timeout_seconds": 0}, r"timeout_seconds: 0 s is out of range \(write seconds, like 90\)"),
    ({"timeout_seconds": "60s"}, "timeout_seconds: '60s' is not a number of seconds .*timeout_seconds=90"),
    ({"start_timeout_seconds": -1}, "start_timeout_seconds: -1 s"),
    ({"stop_signal": "STOP"}, "stop_signal: 'STOP' .*TERM"),
    ({"stop_signal": 15}, r"stop_signal: 15 is not text \(write \"TERM\", or signal.SIGTERM\)"),
    ({"stop_grace_seconds": None}, "stop_grace_seconds: None is not a number of seconds"),
    ({"stop_grace_seconds": float("inf")}, "stop_grace_seconds: inf"),
]


@pytest.mark.parametrize(("keys", "words"), WRONG)
def test_nonsense_is_refused_when_the_request_is_made(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(gl.InvalidRequest, match=words) as caught:
        gl.service(**({"command": ["true"]} | keys))
    assert caught.value.hint
    assert caught.value.code == "invalid_request"
    # Nothing of the command line's spelling is of use to a program.
    assert not re.search(r"--|\b(gpu|max|stop|start|on|retry)-[a-z]", str(caught.value))


@pytest.mark.parametrize("wrong", [-1, 10**7, "3", 1.5, True, None])
def test_a_retry_is_judged_when_it_is_made(wrong: Any) -> None:
    with pytest.raises(gl.InvalidRequest, match="max_attempts: "):
        gl.Retry(max_attempts=wrong)


def test_what_people_write_for_the_same_is_the_same() -> None:
    assert gl.service(["python", Path("/srv/app.py")]).spec.argv == ("python", "/srv/app.py")
    for written in ("TERM", "term", "SIGTERM", signal.SIGTERM):
        assert gl.service(["true"], stop_signal=written).spec.stop_signal == "TERM"
    assert gl.batch(["true"], gpus="0.5") == gl.batch(["true"], gpus=0.5)
    assert gl.batch(["true"], env={}) == gl.batch(["true"], env=None)


def test_a_relative_workdir_counts_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gl.service(["true"], workdir="a").spec.workdir == str(tmp_path / "a")


def test_what_is_said_wins_over_the_environment() -> None:
    environ = {"GPULAYER_URL": "http://127.0.0.1:9000", "GPULAYER_DATA_DIR": "/env"}
    assert find_address(None, None, environ) == Loopback("127.0.0.1", 9000)
    assert find_address(None, "/said", environ) == UnixSocket("/said/gpulayer.sock")
    assert find_address("unix:///a.sock", "/said", environ) == UnixSocket("/a.sock")
    assert find_address(None, None, {"GPULAYER_DATA_DIR": "/env"}) == UnixSocket("/env/gpulayer.sock")
    expected = "/var/lib/gpulayer" if os.getuid() == 0 else "/home/u/.local/state/gpulayer"
    assert find_address(None, None, {"HOME": "/home/u"}) == UnixSocket(f"{expected}/gpulayer.sock")


def test_a_url_is_read_whole_or_refused() -> None:
    assert parse_url("http://localhost") == Loopback("127.0.0.1", 7450)
    assert parse_url("http://127.0.0.1:8000/") == Loopback("127.0.0.1", 8000)
    assert parse_url("http://[::1]:8000") == Loopback("::1", 8000)
    assert parse_url("https://gpu1.lab") == Secure((("gpu1.lab", 7450),))
    assert str(parse_url("https://[fd00::5]:8000/")) == "https://[fd00::5]:8000"
    for wrong in (
        "http://10.0.0.1:7450",
        "http://example.org",
        "http://127.0.0.1.example.org",
        "https://127.0.0.1:7450/v1",
        "https://user@127.0.0.1",
        "https://",
        "http://127.0.0.1:0",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:7450/v1",
        "http://user@127.0.0.1:7450",
        "unix://relative",
        "127.0.0.1:7450",
        "",
    ):
        with pytest.raises(gl.InvalidRequest):
            parse_url(wrong)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"url": 7450}, "url: 7450 is not text"),
        ({"url": Path("/run/gpulayer.sock")}, "url: .*unix:///path"),
        ({"url": "/run/gpulayer.sock"}, "unix:///path"),
        ({"data_dir": 3}, "data_dir: 3 is not a path"),
        ({"data_dir": b"/run"}, "data_dir: b'/run' is not a path"),
        ({"url": "http://127.0.0.1", "token": 5}, "token: .*gpl_"),
        ({"url": "http://127.0.0.1", "token": "two words"}, "token: .*gpl_"),
    ],
)
def test_a_place_that_is_none_is_refused_at_once(place: dict[str, Any], words: str) -> None:
    for connect in (gl.connect, gl.aio.connect):
        with pytest.raises(gl.InvalidRequest, match=words):
            connect(**place)


def test_no_daemon_is_unreachable_with_the_command_that_starts_one(tmp_path: Path) -> None:
    with pytest.raises(gl.Unreachable) as caught:
        gl.connect(data_dir=str(tmp_path)).status()
    assert caught.value.hint.startswith(f"start it with: gpulayer up --data-dir {tmp_path};")


def test_the_async_client_is_a_module_of_the_package() -> None:
    code = "import gpulayer as gl; a = gl.aio; import gpulayer.aio; from gpulayer.aio import connect, Client, Job"
    code += "; assert a is gpulayer.aio and a.connect is connect"
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)


def test_a_client_may_be_used_as_a_block() -> None:
    with gl.connect("http://127.0.0.1") as client:
        assert client.url == "http://127.0.0.1:7450"


@pytest.mark.parametrize("wrong", [-1, -0.5, float("nan"), "5"])
def test_a_wait_that_is_no_time_is_refused(wrong: Any, tmp_path: Path) -> None:
    job = gl.Job(gl.connect(data_dir=tmp_path), "j-1", "web")
    for ask in (lambda: job.endpoints(wait=wrong), lambda: job.cancel(wait=wrong)):
        with pytest.raises(gl.InvalidRequest, match="wait: "):
            ask()
    with pytest.raises(gl.InvalidRequest, match="timeout: "):
        job.wait(timeout=wrong)


def test_no_replica_to_be_restarted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gl.InvalidRequest, match="replicas: it is empty"):
        gl.Job(gl.connect(data_dir=tmp_path), "j-1", "web").restart([])


def test_whoever_waits_for_endpoints_of_a_batch_is_told_what_to_wait_for() -> None:
    status = {"state": "succeeded", "kind": "batch", "name": "train", "reason": None, "replicas": []}
    with pytest.raises(gl.JobEnded, match=r"job\.wait\(\)"):
        UntilReady("train", 5).endpoints(status)
