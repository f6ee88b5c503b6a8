"""The Python client against a real daemon."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpulayer as gl
from gpulayer.client.stream import Absence
from tests.integration.daemon import Daemon, get

SERVE = ["sh", "-c", "exec python3 -u -m http.server --bind $HOST $PORT"]
SLEEP = ["sleep", "300"]


def client_of(daemon: Daemon) -> gl.Client:
    return gl.connect(data_dir=str(daemon.data_dir))


def test_a_service_is_submitted_found_and_cancelled(daemon: Daemon) -> None:
    client = client_of(daemon)
    job = client.submit(gl.service(SERVE, name="web", replicas=2, spread="any"))
    endpoints = job.endpoints(wait=30)
    assert len(endpoints) == 2
    assert all("Directory listing" in get(endpoint) for endpoint in endpoints)
    assert job.endpoints() == endpoints
    assert client.job("web").id == job.id
    assert job.status()["state"] == "running"
    assert job.spec()["command"] == SERVE
    assert job.cancel(wait=20)["state"] == "cancelled"
    with pytest.raises(gl.Refused):
        job.cancel()
    with pytest.raises(gl.JobEnded, match="cancelled"):
        job.endpoints(wait=5)


def test_waiting_for_endpoints_is_over_when_it_was_to_be(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.service(SLEEP, name="mute"))
    begun = time.monotonic()
    with pytest.raises(gl.WaitTimeout, match="nothing listens"):
        job.endpoints(wait=1.5)
    assert 1.4 < time.monotonic() - begun < 4
    job.cancel(wait=20)


def test_waiting_for_no_time_is_a_look(daemon: Daemon) -> None:
    """It was over before the daemon could answer, and that was taken for a daemon that does not."""
    client = client_of(daemon)
    job = client.submit(gl.service(SLEEP, name="looked-at"))
    with pytest.raises(gl.WaitTimeout, match="still"):
        job.wait(timeout=0)
    with pytest.raises(gl.WaitTimeout, match="replica 0 is"):
        job.endpoints(wait=0)
    with pytest.raises(gl.WaitTimeout):
        job.cancel(wait=0)
    job.wait(timeout=20)
    assert job.wait(timeout=0)["state"] == "cancelled"


def test_a_job_that_fails_meanwhile_says_why(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.service(["sh", "-c", "exit 7"], name="failing", max_restarts=0))
    with pytest.raises(gl.JobEnded, match="exit code 7"):
        job.endpoints(wait=20)
    assert job.wait()["state"] == "failed"
    assert job.explain()["replicas"][0]["state"] == "ended"


def test_logs_come_in_order_and_end_with_the_job(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.batch(["sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.2; done"]))
    followed = [line for line in job.logs(follow=True) if line.kind == "output"]
    assert [str(line) for line in followed] == ["line 1", "line 2", "line 3"]
    assert job.wait(timeout=10)["state"] == "succeeded"
    kept = [line for line in job.logs() if line.kind == "output"]
    assert kept == followed
    behind = [line.text for line in job.logs(after=kept[0].offset) if line.kind == "output"]
    assert behind == ["line 2", "line 3"]
    assert [line.text for line in job.logs(tail=50) if line.kind == "output"] == ["line 1", "line 2", "line 3"]


def test_following_what_will_say_no_more_ends_though_the_job_goes_on(daemon: Daemon) -> None:
    """The client asked whether the job had ended, which it had not, and took the daemon for one that is away."""
    client, absences = client_of(daemon), []
    client.absence = Absence(absences.append)
    script = "echo run $GPULAYER_RUN_ID; test -e once || { touch once; exit 1; }; exec sleep 300"
    again = client.submit(gl.service(["sh", "-c", script], name="again", port=False))
    for status in again.watch(timeout=30):
        if status["replicas"][0]["run"] == 2 and status["state"] == "running":
            break
    assert [line.kind for line in again.logs(run=1, follow=True)][:3] == ["run_started", "output", "run_ended"]
    again.cancel(wait=20)

    script = "test $GPULAYER_REPLICA = 1 && exec sleep 300; echo done"
    kept = client.submit(
        gl.service(
            ["sh", "-c", script],
            name="kept",
            port=False,
            replicas=2,
            spread="any",
            restart="never",
            on_replica_end="keep",
        )
    )
    assert [line.text for line in kept.logs(replica=0, follow=True) if line.kind == "output"] == ["done"]
    assert kept.status()["state"] == "degraded"
    kept.cancel(wait=20)
    assert absences == []


def test_what_does_not_exist_is_not_found(daemon: Daemon) -> None:
    client = client_of(daemon)
    for name in ("nobody", "no/body", "../status", "", "a b?x=1"):
        with pytest.raises(gl.NotFound):
            client.job(name)
    with pytest.raises(gl.NotFound):
        client.revoke_token("t-none")


def test_one_key_is_one_job(daemon: Daemon) -> None:
    client = client_of(daemon)
    request = gl.batch(["true"])
    first = client.submit(request, idempotency_key="the-same")
    assert client.submit(request, idempotency_key="the-same").id == first.id
    assert client.submit(request).id != first.id
    with pytest.raises(gl.Refused) as caught:
        client.submit(gl.batch(["false"]), idempotency_key="the-same")
    assert caught.value.code == "idempotency_conflict"


@contextmanager
def answers_lost(daemon: Daemon, path: Path, count: int) -> Iterator[list[bytes]]:
    """A socket in front of the daemon's that hands requests on, and drops the first `count` answers."""
    requests: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                asked, _ = listener.accept()
            except OSError:
                return
            with asked, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as real:
                asked.settimeout(10)
                real.settimeout(10)
                real.connect(str(daemon.socket))
                request = asked.recv(1 << 20)
                while b"\r\n\r\n" not in request or not request.endswith(b"}"):
                    request += asked.recv(1 << 20)
                requests.append(request)
                real.sendall(request)
                answer = real.recv(1 << 20)
                if len(requests) > count:
                    while b"}" not in answer:
                        answer += real.recv(1 << 20)
                    asked.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_a_submit_without_an_answer_is_repeated_and_happens_once(daemon: Daemon, tmp_path: Path) -> None:
    before = {job["id"] for job in client_of(daemon).jobs("all")}
    with answers_lost(daemon, tmp_path / "s", count=2) as requests:
        job = gl.connect(f"unix://{tmp_path}/s").submit(gl.service(SLEEP, port=False, name="once"))
    assert len(requests) == 3
    after = {job["id"] for job in client_of(daemon).jobs("all")}
    assert after - before == {job.id}
    client_of(daemon).job("once").cancel(wait=20)


def test_what_is_followed_goes_on_through_a_kill_of_the_daemon(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    try:
        job = client_of(daemon).submit(
            gl.batch(["sh", "-c", "for i in $(seq 1 30); do echo line $i; sleep 0.2; done"], name="through")
        )
        lines: list[str] = []
        for line in job.logs(follow=True):
            if line.kind == "output":
                lines.append(line.text)
            if lines == ["line 1", "line 2", "line 3"]:
                daemon.restart9()
        assert lines == [f"line {number}" for number in range(1, 31)]
        assert job.wait(timeout=10)["state"] == "succeeded"
    finally:
        daemon.end()


def test_a_watch_goes_on_through_a_kill_of_the_daemon(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    try:
        job = client_of(daemon).submit(gl.service(SLEEP, name="watched", port=False))
        job.endpoints(wait=20)
        stopper = threading.Timer(0.5, lambda: (daemon.restart9(), job.cancel()))
        stopper.start()
        states = [status["state"] for status in job.watch(timeout=40)]
        stopper.join(30)
        assert states[0] == "running"
        assert states[-1] == "cancelled"
    finally:
        daemon.end()


def test_a_path_too_long_for_a_socket_is_no_obstacle(tmp_path: Path) -> None:
    home = tmp_path / ("long-" + "x" * 120)
    daemon = Daemon(home)
    daemon.spawn()
    try:
        client = gl.connect(data_dir=str(daemon.data_dir))
        deadline = time.monotonic() + 20
        while not client.ready():
            assert daemon.is_running, daemon.log_tail()
            assert time.monotonic() < deadline, daemon.log_tail()
            time.sleep(0.05)
        assert client.status()["node"] == "n1"
        assert list(client.leave(stop_all=True))[-1] == {"state": "left"}
        assert daemon.process is not None
        assert daemon.process.wait(10) == 0
    finally:
        if daemon.is_running:
            daemon.kill9()


def test_http_needs_a_token_and_a_role_that_allows_it(daemon: Daemon) -> None:
    port = json.loads((daemon.data_dir / "api.json").read_text())["port"]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(gl.PermissionDenied) as caught:
        gl.connect(url).status()
    assert caught.value.hint
    made = client_of(daemon).create_token("read", label="reader")
    reader = gl.connect(url, token=made["token"])
    assert reader.status()["node"] == "n1"
    with pytest.raises(gl.PermissionDenied):
        reader.submit(gl.batch(["true"]))
    client_of(daemon).revoke_token(made["id"])
    with pytest.raises(gl.PermissionDenied):
        reader.status()


def test_words_that_are_no_text_name_nothing(daemon: Daemon) -> None:
    """A command line hands bytes on as they were typed."""
    client = gl.connect(data_dir=str(daemon.data_dir))
    for name in ("\udcff", "a\udcffb", "\u202e"):
        with pytest.raises(gl.NotFound):
            client.job(name)
        with pytest.raises(gl.NotFound):
            client.revoke_token(name)
        with pytest.raises(gl.InvalidRequest):
            list(client.events(after=name))


def test_events_go_on_behind_an_offset(daemon: Daemon) -> None:
    client = client_of(daemon)
    job = client.submit(gl.batch(["true"]))
    job.wait(timeout=20)
    events = list(job.events())
    assert events[0]["kind"] == "job.submitted"
    assert list(job.events(after=events[0]["offset"])) == events[1:]


def test_every_page_of_the_jobs_is_read(daemon: Daemon) -> None:
    client = client_of(daemon)
    made = {client.submit(gl.batch(["true"])).id for _ in range(3)}
    assert made <= {job["id"] for job in client.jobs("all")}
