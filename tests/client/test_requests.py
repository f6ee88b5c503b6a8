"""What `gl.service(…)` and `gl.batch(…)` accept, and where `gl.connect(…)` goes; no daemon is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpulayer as gl
from gpulayer.client.address import Loopback, UnixSocket, find_address, parse_url
from gpulayer.wire.http import spec_to_json, submit_from_json


def test_importing_the_client_brings_nothing_heavy_along() -> None:
    heavy = "{'trio', 'httpx', 'starlette', 'cbor2', 'rich', 'cyclopts', 'structlog'}"
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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"command": []}, "the command is empty"),
        ({"command": "python serve.py"}, "not a list of words"),
        ({"replicas": 0}, "replicas"),
        ({"gpus": 1.5}, "gpus"),
        ({"gpu_memory": "24"}, "gpu-memory"),
        ({"gpu_model": "A100"}, "gpus is 0"),
        ({"cpus": -1}, "cpus"),
        ({"name": "No"}, "name"),
        ({"env": {"A": 1}}, "env"),
        ({"restart": "sometimes"}, "restart"),
        ({"stop_signal": "STOP"}, "stop-signal"),
        ({"priority": 101}, "priority"),
    ],
)
def test_nonsense_is_refused_when_the_request_is_made(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(gl.InvalidRequest, match=words) as caught:
        gl.service(**({"command": ["true"]} | keys))
    assert caught.value.hint
    assert caught.value.code == "invalid_request"


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
    for wrong in (
        "http://10.0.0.1:7450",
        "http://example.org",
        "http://127.0.0.1.example.org",
        "https://127.0.0.1:7450",
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


def test_no_daemon_is_unreachable_with_the_command_that_starts_one(tmp_path: Path) -> None:
    with pytest.raises(gl.Unreachable) as caught:
        gl.connect(data_dir=str(tmp_path)).status()
    assert caught.value.hint == f"start it with: gpulayer up --data-dir {tmp_path}"
