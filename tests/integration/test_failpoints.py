"""Killed at each step of a commit: what was acknowledged is there, what was not is there once. A disk that breaks."""

from __future__ import annotations

import http.client

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Answered, Daemon, free_port, get, wait_for
from tests.integration.programs import serve

COMMIT = [
    "log.before_begin",
    "log.after_begin",
    "log.after_insert",
    "log.before_commit",
    "log.after_commit",
    "voter.after_append",
]
SNAPSHOT = ["snapshot.before_blob", "snapshot.after_blob", "snapshot.after_complete", "snapshot.before_truncate"]
# It does not run, so that only the log is at work: it waits for ever.
WAITS = {"kind": "service", "command": ["true"], "gpus": 1}


def submit_until_it_dies(daemon: Daemon, most: int = 30) -> tuple[dict[str, str], str]:
    """Key -> id of what was acknowledged, and the key that was not."""
    acknowledged = {}
    for number in range(most):
        key = f"key-{number}"
        try:
            answer = daemon.call("POST", "/v1/jobs", WAITS, headers={"Idempotency-Key": key}, timeout=10)
        except (OSError, http.client.HTTPException):
            return acknowledged, key
        acknowledged[key] = answer["id"]
    raise AssertionError(f"{most} jobs submitted, and the daemon still lives")


@pytest.mark.parametrize("point", [*COMMIT, *SNAPSHOT])
def test_a_daemon_that_dies_within_a_commit_loses_nothing_acknowledged(make_daemon: DaemonMaker, point: str) -> None:
    daemon = make_daemon(config="[storage]\nsnapshot_every = 6\n")
    daemon.start(env={"GPULAYER_FAILPOINTS": f"{point}=kill:{1 if point in SNAPSHOT else 8}"})
    acknowledged, unanswered = submit_until_it_dies(daemon)
    assert acknowledged
    assert daemon.process is not None
    assert daemon.process.wait(10) == -9
    daemon.start()
    found = {job["id"] for job in daemon.call("GET", "/v1/jobs?limit=1000")["jobs"]}
    assert set(acknowledged.values()) <= found
    assert len(found) <= len(acknowledged) + 1
    again = daemon.call("POST", "/v1/jobs", WAITS, headers={"Idempotency-Key": unanswered})
    for key, job in acknowledged.items():
        assert daemon.call("POST", "/v1/jobs", WAITS, headers={"Idempotency-Key": key})["id"] == job
    found = {job["id"] for job in daemon.call("GET", "/v1/jobs?limit=1000")["jobs"]}
    assert found == {*acknowledged.values(), again["id"]}


@pytest.mark.parametrize("point", ["log.before_commit", "log.after_commit", "log.after_hard_state"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_daemon_that_dies_in_its_first_start_can_be_started_again(
    make_daemon: DaemonMaker, point: str, at: int
) -> None:
    daemon = make_daemon()
    process = daemon.spawn(env={"GPULAYER_FAILPOINTS": f"{point}=kill:{at}"})
    wait_for(lambda: process.poll() is not None or daemon.is_ready(), 20)
    if process.poll() is None:
        daemon.kill9()
    daemon.start()
    job = daemon.submit(serve())
    assert get(daemon.wait_ready(job)[0]) == "hello"
    assert daemon.call("GET", "/v1/status")["cluster_id"]


@pytest.mark.parametrize("point", ["join.before_keep", "join.before_membership"])
def test_a_daemon_that_dies_after_it_was_let_in_joins_by_the_same_use_of_its_token(
    make_daemon: DaemonMaker, point: str
) -> None:
    first = make_daemon(peer_port=free_port()).start()
    made = first.call("POST", "/v1/join-tokens", {"uses": 1, "lasts_seconds": 600, "advertise": "127.0.0.1"})
    second = make_daemon(name="n2")
    words = ("--join", made["seed"], "--token", made["token"])
    assert second.spawn(*words, env={"GPULAYER_FAILPOINTS": f"{point}=kill"}).wait(20) == -9
    assert "n2" in {node["name"] for node in first.call("GET", "/v1/nodes")}

    second.start(*words)
    keys = [path.name for path in (second.data_dir / "trust").iterdir() if path.suffix == ".key"]
    assert keys == ["node.key"]
    wait_for(lambda: second.call("GET", "/v1/status")["nodes_by_state"] == {"alive": 2}, 15)


def test_a_disk_that_breaks_stops_the_log_and_no_replica(make_daemon: DaemonMaker) -> None:
    """P10: control-plane trouble never stops a healthy replica and never hides its endpoint."""
    daemon = make_daemon().start()
    job = daemon.submit(serve())
    (endpoint,) = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    daemon.kill9()
    daemon.start(env={"GPULAYER_FAILPOINTS": "log.before_commit=error:3"})
    refused = None
    for _ in range(5):
        try:
            daemon.call("POST", "/v1/jobs", WAITS)
        except Answered as error:
            refused = error
    assert refused is not None
    assert (refused.status, refused.code) == (507, "storage_failed")
    assert refused.hint
    status, body = daemon.request("GET", "/readyz")
    assert status == 503
    assert b"storage" in body
    assert [found["endpoint"] for found in daemon.call("GET", f"/v1/jobs/{job}/endpoints")] == [endpoint]
    assert daemon.replica(job)["pid"] == pid
    assert get(endpoint) == "hello"
    get(endpoint, "/exit/1")
    after = daemon.wait_replica(job, lambda replica: replica["restarts"] == 1 and replica["state"] == "ready")
    assert get(after["endpoint"]) == "hello", "supervision goes on"
    assert any("storage" in warning for warning in daemon.call("GET", "/v1/status")["warnings"])
    daemon.restart9()
    assert daemon.replica(job)["pid"] == after["pid"]
    assert daemon.call("POST", "/v1/jobs", WAITS)["id"]
