"""A service and a batch job from end to end: submitted, answering, restarted, cancelled, nothing left."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import time

import pytest

import gpulayer as gl
from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, environment, get, is_alive, living, refuses, wait_for
from tests.integration.programs import python, serve, sh


def test_a_service_answers_moves_to_a_new_port_when_it_restarts_and_leaves_nothing_when_cancelled(
    daemon: Daemon,
) -> None:
    job = daemon.submit(serve(), name="web")
    (first,) = daemon.wait_ready(job)
    assert get(first) == "hello"
    assert daemon.call("GET", "/v1/jobs/web/endpoints")[0]["endpoint"] == first

    get(first, "/exit/3")
    moved = daemon.wait_replica(job, lambda replica: replica["restarts"] == 1 and replica["state"] == "ready")
    second = moved["endpoint"]
    assert second != first
    assert get(second) == "hello"
    assert refuses(first)
    assert [found["endpoint"] for found in daemon.call("GET", "/v1/jobs/web/endpoints")] == [second]
    assert moved["last_exit"]["code"] == 3
    lines = daemon.log_lines(job)
    restart = next(line for line in lines if line["kind"] == "run_started" and line["run"] == 2)
    assert "code 3" in " ".join(line["text"] for line in lines if line["kind"] != "output"), lines
    assert "asked to exit with 3" in [line["text"] for line in lines if line["at_utc"] <= restart["at_utc"]]

    daemon.cancel(job)
    ended = daemon.wait_ended(job)
    assert ended["state"] == "cancelled"
    assert not daemon.all_on_host()
    assert refuses(second)
    assert daemon.call("GET", "/v1/jobs/web/endpoints") == []


def test_submit_waits_until_every_replica_is_ready_and_prints_id_and_endpoints(daemon: Daemon) -> None:
    done = daemon.cli(
        "submit", "--service", "--replicas", "2", "--spread", "any", "--name", "web", "--", *serve("--delay", "0.3")
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bj-[a-z2-7]{10}\b", done.stdout)
    endpoints = re.findall(r"127\.0\.0\.1:\d+", done.stdout)
    assert len(set(endpoints)) == 2
    assert {get(endpoint) for endpoint in endpoints} == {"hello"}
    listed = daemon.cli_json("job", "endpoints", "web")
    assert sorted(found["endpoint"] for found in listed) == sorted(set(endpoints))
    assert daemon.cli_json("job", "status", "web")["state"] == "running"


def test_an_interrupted_submit_leaves_the_service_running_and_says_how_to_stop_it(daemon: Daemon) -> None:
    submit = subprocess.Popen(
        [*daemon.command, "submit", "--service", "--name", "slow", "--", *sh("sleep 1000")],
        env=daemon.env | {"GPULAYER_DATA_DIR": str(daemon.data_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    job = wait_for(lambda: daemon.call("GET", "/v1/jobs")["jobs"], what="submitted")[0]["id"]
    pid = daemon.wait_replica(job, lambda replica: replica["pid"] is not None)["pid"]
    time.sleep(0.2)  # so that it is waiting, rather than on its way there; either must work
    submit.send_signal(signal.SIGINT)
    said, _ = submit.communicate(timeout=10)
    assert "gpulayer job cancel slow" in said
    assert is_alive(pid)
    assert daemon.job(job)["state"] == "starting"


def test_the_python_client_submits_waits_reads_and_cancels(daemon: Daemon) -> None:
    client = daemon.client()
    job = client.submit(gl.service(serve("--say", "up"), replicas=2, spread="any", accelerator="cuda", gpus=1))
    endpoints = job.endpoints(wait=20)
    assert len(set(endpoints)) == 2
    assert get(endpoints[0]) == "hello"
    uuids = {get(endpoint, "/env/CUDA_VISIBLE_DEVICES") for endpoint in endpoints}
    assert uuids == {"GPU-a", "GPU-b"}
    assert "up" in "\n".join(str(line) for line in job.logs())
    job.cancel()
    daemon.wait_nothing_left()


def test_waiting_too_long_for_an_endpoint_is_an_error_of_its_own(daemon: Daemon) -> None:
    job = daemon.client().submit(gl.service(sh("sleep 1000"), name="silent"))
    with pytest.raises(gl.WaitTimeout, match=f"silent|{job.id}"):
        job.endpoints(wait=0.5)


def test_a_run_begins_clean(make_daemon: DaemonMaker) -> None:
    """Nothing of the daemon's own surroundings is handed on: no descriptors, signals, secrets, standard input."""
    daemon = make_daemon(
        env={"GPULAYER_TOKEN": "gpl_secret", "NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "900000000"}
    ).start()
    source = """
import json, os, signal, sys
print(json.dumps({
    "env": dict(os.environ), "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "cwd": os.getcwd(),
    "stdin": sys.stdin.read(), "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read().strip(),
    "blocked": open("/proc/self/status").read().split("SigBlk:")[1].split()[0],
    "ignored": open("/proc/self/status").read().split("SigIgn:")[1].split()[0],
    "leads": os.getsid(0) == os.getpid(),
}))
"""
    job = daemon.batch(python(source), name="mirror", env={"MINE": "1"})
    assert daemon.wait_ended(job)["state"] == "succeeded", daemon.output(job)
    seen = json.loads(daemon.output(job)[-1])
    env = seen["env"]
    assert seen["fds"] == [0, 1, 2]
    assert (seen["stdin"], seen["nice"], seen["oom"], seen["leads"]) == ("", 0, "0", True)
    assert int(seen["blocked"], 16) == 0
    # Python itself ignores SIGPIPE and SIGXFSZ at its start.
    assert int(seen["ignored"], 16) & ~((1 << (signal.SIGPIPE - 1)) | (1 << (signal.SIGXFSZ - 1))) == 0
    assert not {"GPULAYER_TOKEN", "NOTIFY_SOCKET", "WATCHDOG_USEC", "PORT"} & set(env)
    assert env["MINE"] == "1"
    assert (env["GPULAYER_JOB_ID"], env["GPULAYER_JOB_NAME"]) == (job, "mirror")
    assert (env["GPULAYER_REPLICA"], env["GPULAYER_REPLICAS"], env["GPULAYER_NODE"]) == ("0", "1", daemon.name)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["cwd"] == env["GPULAYER_SANDBOX"] or seen["cwd"].startswith(env["GPULAYER_SANDBOX"])


def test_a_service_without_a_port_is_ready_once_it_has_lived_a_second(daemon: Daemon) -> None:
    job = daemon.submit(sh('echo "${PORT-none}"; sleep 1000'), port=False)
    replica = daemon.wait_replica(job, lambda replica: replica["state"] == "ready")
    assert replica["endpoint"] is None
    assert replica["ready_since_utc"] - replica["started_at_utc"] >= 0.9
    assert daemon.output(job) == ["none"]


def test_an_attached_batch_shows_its_output_and_passes_its_exit_code_on(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--", *sh("echo out; echo err >&2; exit 7"))
    assert done.returncode == 7
    assert "out" in done.stdout
    assert "err" in done.stdout + done.stderr
    assert daemon.cli("submit", "--", *sh("kill -9 $$")).returncode == 128 + 9
    assert daemon.cli("submit", "--", *sh("true")).returncode == 0


def test_a_failure_of_our_own_is_125_where_the_exit_code_belongs_to_the_job(daemon: Daemon) -> None:
    assert daemon.cli("submit", "--", "/no/such/program").returncode == 125
    assert daemon.cli("submit", "--gpus", "nine", "--", "true").returncode == 125
    assert daemon.cli("submit", "--", "true", env={"GPULAYER_URL": "http://127.0.0.1:1"}).returncode == 125


def test_without_a_daemon_every_command_ends_with_3_and_names_the_one_that_starts_it(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    for words in (["job", "list"], ["status"], ["submit", "--detach", "--", "true"]):
        done = daemon.cli(*words)
        assert done.returncode == 3, (words, done)
        assert "gpulayer up" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_job_is_found_by_name_by_id_and_by_an_unambiguous_prefix(daemon: Daemon) -> None:
    first = daemon.submit(sh("sleep 1000"), name="alpha", port=False)
    second = daemon.submit(sh("sleep 1000"), name="alphabet", port=False)
    assert daemon.job("alpha")["id"] == first
    assert daemon.job("alphab")["id"] == second
    assert daemon.job(first[:8])["id"] == first
    done = daemon.cli("job", "status", "alp")
    assert done.returncode == 2
    assert "alpha" in done.stderr
    assert daemon.cli("job", "status", "beta").returncode == 4


def test_the_same_idempotency_key_submits_once(daemon: Daemon) -> None:
    body = {"kind": "service", "command": sh("sleep 1000"), "port": False}
    first = daemon.call("POST", "/v1/jobs", body, headers={"Idempotency-Key": "k1"})
    again = daemon.call("POST", "/v1/jobs", body, headers={"Idempotency-Key": "k1"})
    assert (again["id"], again["replayed"]) == (first["id"], True)
    daemon.restart9()
    after = daemon.call("POST", "/v1/jobs", body, headers={"Idempotency-Key": "k1"})
    assert (after["id"], after["replayed"]) == (first["id"], True)
    status, _ = daemon.request("POST", "/v1/jobs", body | {"port": True}, headers={"Idempotency-Key": "k1"})
    assert status == 409
    assert len(daemon.call("GET", "/v1/jobs")["jobs"]) == 1


def test_a_token_opens_the_port_with_its_role_and_no_longer_once_revoked(daemon: Daemon) -> None:
    address = json.loads((daemon.data_dir / "api.json").read_text())

    def status(method: str, path: str, token: str = "", body: object = None) -> int:
        connection = http.client.HTTPConnection(address["host"], address["port"], timeout=10)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        connection.request(method, path, json.dumps(body).encode() if body is not None else None, headers)
        return connection.getresponse().status

    assert status("GET", "/healthz") == 200
    assert status("GET", "/v1/jobs") == 401
    assert status("GET", "/v1/jobs", "gpl_wrong") == 401
    made = daemon.cli_json("token", "create", "--role", "read")
    assert status("GET", "/v1/jobs", made["token"]) == 200
    assert status("POST", "/v1/jobs", made["token"], {"command": ["true"]}) == 403
    stored = (daemon.data_dir / "log.db").read_bytes() + (daemon.data_dir / "log.db-wal").read_bytes()
    assert made["token"].encode() not in stored
    assert daemon.cli("token", "revoke", made["id"]).returncode == 0
    assert status("GET", "/v1/jobs", made["token"]) == 401


def test_the_demo_runs_in_half_a_minute_and_cleans_up(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    daemon.home.joinpath("tmp").mkdir()
    started = time.monotonic()
    done = daemon.cli("demo", timeout=60, env={"TMPDIR": str(daemon.home / "tmp")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 30
    assert list((daemon.home / "tmp").iterdir()) == []
    prefix = f"GPULAYER_SANDBOX={daemon.home}/tmp/".encode()
    assert not [pid for pid in living() if any(value.startswith(prefix) for value in environment(pid))]
