"""What is wrong is refused with what and why, and changes nothing (P12)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Answered, Daemon, get
from tests.integration.programs import serve, sh


def index_of(daemon: Daemon) -> int:
    return int(daemon.call("GET", "/v1/status")["index"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicass", "2"], "--replicas"),
        (["--memory", "4"], "GiB"),
        (["--memory", "4parsecs"], "GiB"),
        (["--timeout", "10"], "90s"),
        (["--timeout", "5y"], "90s"),
        (["--accelerator", "tpu", "--gpus", "1"], "cuda"),
        (["--gpus", "-1"], "gpus"),
        (["--gpus", "1.5"], "whole"),
        (["--gpus", "0.0001"], "thousandth"),
        (["--gpus", "nan"], "gpus"),
        (["--replicas", "0"], "replicas"),
        (["--replicas", "-3"], "replicas"),
        (["--replicas", "100000000"], "replicas"),
        (["--max-restarts", "-1"], "max-restarts"),
        (["--priority", "101"], "priority"),
        (["--restart", "sometimes"], "on_failure"),
        (["--name", "Not A Name"], "name"),
        (["--env", "NOVALUE"], "env"),
        (["--label", "novalue"], "label"),
        (["--workdir", "relative/path", "--stop-grace", "-1s"], "stop-grace"),
        (["--stop-signal", "NICE"], "TERM"),
        (["--gpu-model", "H100"], "gpus"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_refused_with_a_right_one(daemon_of_all: Daemon, words: list[str], said: str) -> None:
    before = index_of(daemon_of_all)
    done = daemon_of_all.cli("submit", "--service", *words, "--", "true")
    assert done.returncode == 2, done
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert index_of(daemon_of_all) == before


@pytest.fixture(scope="module")
def daemon_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests that must not change it."""
    daemon = Daemon(tmp_path_factory.mktemp("bad-input")).start()
    yield daemon
    daemon.end()


def test_an_interpreter_that_is_no_text_is_a_bad_command_and_no_end_of_the_daemon(
    daemon_of_all: Daemon, tmp_path: Path
) -> None:
    """The bytes after #! went into the reason as lone surrogates, which no entry of the log can hold: the daemon ended,
    and so did each one after it, for the run's note was still there."""
    script = tmp_path / "script"
    script.write_bytes(b"#!/none/\xff\xfe\n")
    script.chmod(0o755)
    pid = daemon_of_all.pid
    ended = daemon_of_all.wait_ended(daemon_of_all.batch([str(script)]))
    assert (ended["state"], ended["reason"]["code"]) == ("failed", "bad_command")
    assert "/none/" in ended["reason"]["text"]
    assert daemon_of_all.pid == pid


def nested(levels: int) -> bytes:
    return b'{"command": ' + b"[" * levels + b"]" * levels + b"}"


GOOD = {"command": ["true"]}
BODIES: dict[str, tuple[object, int]] = {
    "not JSON": (b"command=true", 400),
    "half of it": (b'{"command": ["tr', 400),
    "empty": (b"", 400),
    "not an object": (b"[1, 2]", 400),
    "not UTF-8": (b'{"command": ["\xff\xfe"]}', 400),
    "nested": (nested(10_000), 400),
    "NaN": (b'{"command": ["true"], "gpus": NaN}', 400),
    "a number of a million digits": (b'{"command": ["true"], "replicas": ' + b"9" * 500_000 + b"}", 400),
    "a key twice": (b'{"command": ["true"], "command": ["false"]}', 400),
    "unknown key": (GOOD | {"replica": 2}, 400),
    "command as text": ({"command": "true"}, 400),
    "no command": ({"name": "x"}, 400),
    "NUL in the command": ({"command": ["tr\0ue"]}, 400),
    "NUL in the environment": (GOOD | {"env": {"A": "b\0c"}}, 400),
    "= in a variable's name": (GOOD | {"env": {"A=B": "c"}}, 400),
    "lone surrogate": (b'{"command": ["\\ud800"]}', 400),
    "negative replicas": (GOOD | {"replicas": -1}, 400),
    "replicas true": (GOOD | {"replicas": True}, 400),
    "a string of 200 KiB": (GOOD | {"env": {"A": "x" * 200_000}}, 400),
    "10 MiB of environment": (GOOD | {"env": {f"A{n}": "x" * 100_000 for n in range(105)}}, 413),
    "100 MiB": (b"[" + b" " * (100 * 2**20) + b"]", 413),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_wrong_body_is_refused_and_changes_nothing(daemon_of_all: Daemon, what: str) -> None:
    body, status = BODIES[what]
    before = index_of(daemon_of_all)
    try:
        answered, content = daemon_of_all.request("POST", "/v1/jobs", body)
    except (BrokenPipeError, ConnectionResetError):
        # A body far too long: the answer was given, and the rest is not listened to.
        assert status == 413
    else:
        error = json.loads(content)
        assert (answered, bool(error["code"] and error["message"] and error["hint"])) == (status, True), content
        assert len(content) < 2000, "what was sent is not sent back"
    assert index_of(daemon_of_all) == before
    assert daemon_of_all.is_running


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/jobs/no-such-job", 404),
        ("GET", "/v1/jobs/j-aaaaaaaaaa", 404),
        ("POST", "/v1/jobs/no-such-job/cancel", 404),
        ("GET", "/v1/jobs/..%2f..%2fetc", 404),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/jobs?limit=-1", 400),
        ("GET", "/v1/jobs?limit=many", 400),
        ("GET", "/v1/jobs?state=gone", 400),
        ("GET", "/v1/jobs?unknown=1", 400),
        ("GET", "/v1/events?after=%00nonsense", 400),
        ("DELETE", "/v1/tokens/no-such", 404),
    ],
)
def test_a_wrong_address_is_refused(daemon_of_all: Daemon, method: str, path: str, status: int) -> None:
    answered, content = daemon_of_all.request(method, path, b"{}" if method == "POST" else None)
    error = json.loads(content)
    assert (answered, bool(error["code"] and error["message"])) == (status, True), content


def test_wrong_headers_are_refused(daemon_of_all: Daemon) -> None:
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),
        ({"Idempotency-Key": "with space"}, 400),
        ({"Idempotency-Key": "x" * 200}, 400),
    ):
        answered, content = daemon_of_all.request("POST", "/v1/jobs", GOOD, headers=headers)
        assert answered == status, content


def test_noise_on_the_socket_disturbs_nobody(daemon_of_all: Daemon) -> None:
    silent = []
    for noise in (
        b"",
        b"\0" * 4096,
        b"GET /" + b"a" * 100_000,
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc",
    ):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(daemon_of_all.socket))
        try:
            connection.sendall(noise)
        except BrokenPipeError:
            pass
        silent.append(connection)
    assert daemon_of_all.is_ready()
    assert daemon_of_all.call("GET", "/v1/jobs")["jobs"] == []
    for connection in silent:
        connection.close()


def test_a_name_in_use_is_refused_and_free_again_when_its_job_has_ended(daemon: Daemon) -> None:
    first = daemon.submit(sh("sleep 1000"), name="taken", port=False)
    done = daemon.cli("submit", "--service", "--name", "taken", "--", "true")
    assert done.returncode == 5
    assert "taken" in done.stderr
    assert [job["id"] for job in daemon.call("GET", "/v1/jobs")["jobs"]] == [first]
    derived = [daemon.submit(["sleep", "1000"], port=False) for _ in range(2)]
    assert len({daemon.job(job)["name"] for job in derived}) == 2
    daemon.cancel(first)
    daemon.wait_ended(first)
    assert daemon.submit(sh("sleep 1000"), name="taken", port=False)


def test_an_id_of_a_job_that_ended_can_be_read_and_not_cancelled(daemon: Daemon) -> None:
    job = daemon.batch(["true"], name="over")
    daemon.wait_ended(job)
    assert daemon.job(job)["state"] == "succeeded"
    before = index_of(daemon)
    for act in ("cancel", "restart"):
        with pytest.raises(Answered) as refused:
            daemon.call("POST", f"/v1/jobs/{job}/{act}", {})
        assert refused.value.status == 409
        done = daemon.cli("job", act, job)
        assert done.returncode == 5
        assert "ended" in done.stderr
    assert index_of(daemon) == before


def test_a_wrong_job_file_is_refused_with_its_line(daemon_of_all: Daemon) -> None:
    path = daemon_of_all.home / "job.toml"
    for text, said in (("command = [", "TOML"), ('comand = ["true"]', "command"), ('command = "true"', "command")):
        path.write_text(text)
        done = daemon_of_all.cli("submit", "--service", "--file", str(path))
        assert done.returncode == 2, (text, done)
        assert said in done.stderr
        assert str(path) in done.stderr or "job.toml" in done.stderr
    done = daemon_of_all.cli("submit", "--service", "--file", "/no/such/file.toml")
    assert done.returncode == 2
    assert "/no/such/file.toml" in done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("datadir = '/tmp/x'", "data_dir"),
        ("[logs]\nmaxbytes = 1", "logs.max_bytes"),
        ("[[accelerator]]\nkind='cuda'", "accelerators"),
        ("[[accelerators]]\nkind='cuda'\nmodel='A'\nmemory='lots'", "memory"),
        ("[[accelerators]]\nkind='tpu'\nmodel='A'\nmemory='1GiB'", "kind"),
        ("api_port = 'high'", "api_port"),
        ("this is not toml", "TOML"),
        ("[supervision]\nservice_ports = '1-2'", "service_ports"),
    ],
)
def test_a_daemon_with_a_wrong_configuration_does_not_start(make_daemon: DaemonMaker, config: str, said: str) -> None:
    daemon = make_daemon(config=config)
    assert daemon.spawn().wait(20) == 2
    assert said in daemon.log_tail()
    assert "Traceback" not in daemon.log_tail()
    assert not daemon.data_dir.exists(), "half a start"


def refused_start(daemon: Daemon, *words: str) -> str:
    """What a daemon says that cannot start."""
    process = daemon.spawn(*words)
    assert process.wait(20) not in (0, None)
    said = daemon.log_tail()
    assert "Traceback" not in said
    return said


def test_a_copied_data_directory_is_refused(daemon: Daemon, make_daemon: DaemonMaker) -> None:
    """Two nodes with one identity would take each other's work (C42)."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    assert daemon.stop() == 0
    copy = make_daemon()
    shutil.copytree(daemon.data_dir, copy.data_dir, ignore=shutil.ignore_patterns("*.sock"))
    said = refused_start(copy)
    assert "copy" in said
    assert "--abandon-state" in said
    daemon.start()
    assert get(daemon.wait_ready(job)[0]) == "hello"


@pytest.mark.parametrize("name", ["log.db", "node.json", "epoch"])
def test_a_damaged_data_directory_is_refused_and_left_as_it_is(daemon: Daemon, name: str) -> None:
    daemon.batch(["true"])
    assert daemon.stop() == 0
    for suffix in ("-wal", "-shm"):
        (daemon.data_dir / f"log.db{suffix}").unlink(missing_ok=True)
    path = daemon.data_dir / name
    whole = path.read_bytes()
    path.write_bytes(b"\xde\xad" * 512)
    said = refused_start(daemon)
    assert name in said
    assert path.read_bytes() == b"\xde\xad" * 512
    path.write_bytes(whole)
    daemon.start()


def mounted(place: Path, *options: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    done = (
        subprocess.run(["mount", *options, str(place)], capture_output=True, check=False) if os.geteuid() == 0 else None
    )
    if done is None or done.returncode:
        pytest.skip("needs to mount a file system: not root, or not allowed")


def test_a_read_only_or_full_place_is_refused_with_its_cause(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    place = tmp_path / "tiny"
    mounted(place, "-t", "tmpfs", "-o", "size=64k", "gpulayer-test")
    try:
        daemon = make_daemon()
        daemon.place(place / "data")
        (place / "filler").write_bytes(b"\0" * 60 * 1024)
        with open(place / "more", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 512)
            except OSError:
                pass
        assert "full" in refused_start(daemon) or "No space" in daemon.log_tail()
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert "read-only" in refused_start(daemon).lower()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_an_address_that_no_other_host_can_reach_is_not_advertised(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    assert "no other host can reach 127.0.0.1" in refused_start(daemon, "--bind", "0.0.0.0", "--advertise", "127.0.0.1")
    assert not daemon.data_dir.exists()


def test_a_data_directory_that_was_open_to_others_is_closed_and_that_is_said(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    daemon.data_dir.mkdir(parents=True, mode=0o755)
    daemon.start()
    assert daemon.data_dir.stat().st_mode & 0o777 == 0o700
    assert "was open to other users" in daemon.log_tail()
