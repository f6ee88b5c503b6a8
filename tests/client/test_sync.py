"""The Python client against a real daemon."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import gpulayer as gl
from gpulayer.client.stream import Absence
from tests.client.peers import answers_lost, open_sockets, port_of
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
    url = f"http://127.0.0.1:{port_of(daemon)}"
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


def test_a_job_that_ended_says_how_and_why(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.service(["sh", "-c", "exit 7"], max_restarts=0))
    with pytest.raises(gl.JobEnded) as ended:
        job.endpoints(wait=True)
    assert ended.value.state == "failed"
    assert ended.value.reason is not None
    assert ended.value.reason["code"] == "exit_nonzero"
    assert (ended.value.code, ended.value.hint) == ("job_ended", ended.value.reason["hint"])


def test_waiting_too_long_is_what_python_calls_a_timeout(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.service(SLEEP))
    with pytest.raises(TimeoutError, match=f"job {job.name} is not ready after 0.2s"):
        job.endpoints(wait=0.2)
    job.cancel(wait=True)


def test_a_stream_that_is_left_early_closes_its_connection(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.service(SLEEP, port=False))
    job.endpoints(wait=True)
    before = open_sockets()
    for _ in job.logs(follow=True):
        break
    assert open_sockets() <= before
    lines = job.logs(follow=True)
    next(lines)
    assert len(open_sockets() - before) == 1
    lines.close()
    assert open_sockets() <= before
    with closing(job.watch()) as statuses:
        next(statuses)
        assert len(open_sockets() - before) == 1
    assert open_sockets() <= before
    job.cancel(wait=True)


FOLLOWING = """
import os, signal, sys, threading
import gpulayer as gl
job = gl.connect(data_dir=sys.argv[1]).job(sys.argv[2])
try:
    for line in job.logs(follow=True):
        print(line, flush=True)
        if line.text == "one":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
except KeyboardInterrupt:
    open_now = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
    print("interrupted;", sum("socket" in each for each in open_now), "sockets are open")
"""


def test_an_interrupt_ends_what_is_followed_at_once(daemon: Daemon) -> None:
    job = client_of(daemon).submit(gl.service(["sh", "-c", "echo one; exec sleep 300"], port=False))
    words = [sys.executable, "-c", FOLLOWING, str(daemon.data_dir), job.id]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-2:] == ["one", "interrupted; 0 sockets are open"]
    assert job.status()["state"] in ("starting", "running")
    job.cancel(wait=True)


def test_threads_share_a_client(daemon: Daemon) -> None:
    client = client_of(daemon)

    def one(number: int) -> str:
        job = client.submit(gl.batch(["sh", "-c", f"echo {number}"]))
        said = [line.text for line in job.logs(follow=True) if line.kind == "output"]
        assert said == [str(number)]
        return str(job.wait(timeout=30)["state"])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(16))) == ["succeeded"] * 16


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda client, job: client.submit(["python", "serve.py"]), "request: .*gl.service"),
        (lambda client, job: client.dry_run("python serve.py"), "request: .*gl.service"),
        (lambda client, job: client.submit(gl.batch(["true"]), idempotency_key="a b"), "Idempotency-Key: .* 1 to 128"),
        (lambda client, job: client.submit(gl.batch(["true"]), idempotency_key=7), "idempotency_key: 7 is not text"),
        (lambda client, job: client.job(7), "job: 7 is not text"),
        (lambda client, job: client.jobs("alive"), "state: .*live, ended, all"),
        (lambda client, job: client.create_token("boss"), "role: .*admin, submit, read"),
        (lambda client, job: client.revoke_token(None), "token: None is not text"),
        (lambda client, job: job.endpoints(wait="120"), "wait: '120' is not a number of seconds"),
        (lambda client, job: job.wait(timeout="1m"), "timeout: '1m' is not a number of seconds"),
        (lambda client, job: job.wait(timeout=float("nan")), "timeout: nan"),
        (lambda client, job: job.watch(timeout=True), "timeout: True"),
        (lambda client, job: job.cancel(wait="yes"), "wait: 'yes'"),
        (lambda client, job: job.restart(0), "replicas: 0 is not a list"),
        (lambda client, job: job.restart(["0"]), "replicas: .*write "),
        (lambda client, job: list(job.logs(tail="many")), "tail: .*write a number"),
        (lambda client, job: list(job.logs(since="yesterday")), "since: .*UTC seconds"),
        (lambda client, job: list(job.logs(after="nonsense")), "after: .*offset"),
    ],
)
def test_a_call_that_is_wrong_says_what_and_what_would_be_right(
    daemon: Daemon, ask: Callable[[gl.Client, gl.Job], object], words: str
) -> None:
    client = client_of(daemon)
    job = client.submit(gl.batch(["true"]), idempotency_key="asked-wrongly")
    with pytest.raises(gl.InvalidRequest, match=words):
        ask(client, job)


def test_what_is_printed_says_what_it_is_and_no_secret() -> None:
    assert repr(gl.connect("http://127.0.0.1:7450", token="gpl_secret")) == "<Client http://127.0.0.1:7450>"
    request = gl.service(["python", "serve.py"], name="web", env={"KEY": "secret"})
    assert repr(request) == "<JobRequest service web: python serve.py>"
    assert repr(gl.Retry(max_attempts=3)) == "Retry(max_attempts=3)"
