"""A replica's life: restarts, ends, stops. Nothing outlives it (P7)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.conftest import ONE_GPU, DaemonMaker
from tests.integration.daemon import Daemon, get, is_alive, wait_for, zombies_of
from tests.integration.programs import python, serve, sh


def run_starts(daemon: Daemon, job: str) -> list[float]:
    return [line["at_utc"] for line in daemon.log_lines(job) if line["kind"] == "run_started"]


def test_a_killed_service_is_back_within_its_backoff(daemon: Daemon) -> None:
    """A crashed model stayed down until someone noticed."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    before = daemon.replica(job)
    os.kill(before["pid"], signal.SIGKILL)
    killed_at = time.time()
    after = daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["restarts"] == 1)
    assert after["pid"] != before["pid"]
    assert after["started_at_utc"] - killed_at == pytest.approx(1.0, abs=0.5)
    assert after["last_exit"]["signal"] == 9
    supervisor_lines = [line["text"] for line in daemon.log_lines(job) if line["kind"] != "output"]
    assert any("SIGKILL" in line for line in supervisor_lines), supervisor_lines
    assert get(after["endpoint"]) == "hello"


def test_the_endpoint_is_gone_while_the_service_restarts(daemon: Daemon) -> None:
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    os.kill(daemon.replica(job)["pid"], signal.SIGKILL)
    backing_off = daemon.wait_replica(job, lambda replica: replica["state"] == "backing_off")
    assert backing_off["endpoint"] is None
    assert backing_off["next_start_at_utc"] > 0
    assert "restart" in backing_off["next"]
    assert daemon.call("GET", f"/v1/jobs/{job}/endpoints") == []


STUBBORN_TREE = """
import os, signal, sys, time
def child(prepare):
    if os.fork() == 0:
        prepare()
        print(os.getpid(), flush=True)
        while True:
            time.sleep(1000)
def daemonised():
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def ignoring():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def with_a_cleared_environment():
    os.setsid()
    os.execve("/bin/sh", ["sh", "-c", "echo $$; trap '' TERM; while :; do sleep 1000; done"], {})
for prepare in (lambda: None, os.setsid, ignoring, daemonised, with_a_cleared_environment):
    child(prepare)
print(os.getpid(), flush=True)
while True:
    time.sleep(1000)
"""


@pytest.mark.parametrize("cgroups", ["auto", "off"])
def test_a_stop_ends_the_whole_tree_whatever_it_forked_or_ignores(make_daemon: DaemonMaker, cgroups: str) -> None:
    """Children in sessions of their own, daemonised, deaf to SIGTERM or without our environment stayed behind."""
    daemon = make_daemon(config=f'[supervision]\ncgroups = "{cgroups}"\n').start()
    job = daemon.submit(python(STUBBORN_TREE), port=False, stop_grace_seconds=0.3)
    wait_for(lambda: len(daemon.output(job)) == 6, what=lambda: daemon.output(job))
    pids = [int(line) for line in daemon.output(job)]
    assert all(map(is_alive, pids))
    daemon.cancel(job)
    assert daemon.wait_ended(job)["state"] == "cancelled"
    assert not [pid for pid in pids if is_alive(pid)]
    assert not daemon.all_on_host()
    assert zombies_of(daemon.pid) == []


def test_what_a_crashed_run_left_is_gone_before_the_next_one_starts(daemon: Daemon) -> None:
    """A child that kept the GPU or the port would make every later run fail."""
    job = daemon.submit(sh("setsid sleep 1000 & echo $!; sleep 0.2; exit 1"), port=False, max_restarts=1)
    daemon.wait_ended(job)
    pids = [int(line) for line in daemon.output(job)]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_service_that_always_fails_is_restarted_as_often_as_allowed_and_then_fails(daemon: Daemon) -> None:
    """It was retried without end, and the deploy call reported nothing."""
    other = daemon.submit(serve(), name="other")
    daemon.wait_ready(other)
    other_pid = daemon.replica(other)["pid"]
    script = "for i in $(seq 30); do echo line $i; done; exit 1"
    done = daemon.cli("submit", "--service", "--name", "bad", "--max-restarts", "3", "--", *sh(script))
    assert done.returncode == 1, done
    assert "exit" in done.stderr + done.stdout
    status = daemon.wait_ended("bad")
    assert status["state"] == "failed"
    (replica,) = status["replicas"]
    assert replica["restarts"] == 3
    assert replica["last_exit"]["code"] == 1
    assert replica["reason"]["code"] == "exit_nonzero"
    assert [line for line in replica["last_lines"] if "line 30" in line]
    assert len(replica["last_lines"]) <= 20
    starts = run_starts(daemon, "bad")
    delays = [later - earlier for earlier, later in pairwise(starts)]
    assert delays == pytest.approx([1, 2, 4], abs=0.6)
    assert daemon.replica(other)["pid"] == other_pid
    assert daemon.job(other)["state"] == "running"


@pytest.mark.parametrize(
    ("restart", "script", "runs", "state"),
    [
        ("on_failure", "exit 0", 1, "succeeded"),
        ("on_failure", "exit 4", 2, "failed"),
        ("never", "exit 4", 1, "failed"),
        ("never", "exit 0", 1, "succeeded"),
        ("always", "exit 0", 2, "succeeded"),
    ],
)
def test_the_restart_policy_decides_which_ends_are_followed_by_a_new_run(
    daemon: Daemon, restart: str, script: str, runs: int, state: str
) -> None:
    job = daemon.submit(sh(script), restart=restart, max_restarts=1, port=False)
    assert daemon.wait_ended(job)["state"] == state
    assert len(run_starts(daemon, job)) == runs


def test_a_replica_that_ended_for_good_ends_the_others_unless_told_to_keep_them(daemon: Daemon) -> None:
    """One replica failed and the whole service was ended, where its user wanted the rest."""
    keep = daemon.submit(serve(), name="keep", replicas=2, spread="any", max_restarts=0, on_replica_end="keep")
    stop = daemon.submit(serve(), name="stop", replicas=2, spread="any", max_restarts=0)
    first, second = daemon.wait_ready(keep)
    get(daemon.wait_ready(stop)[0], "/exit/5")
    kept_pid = daemon.replica(keep, 1)["pid"]
    get(first, "/exit/5")

    status = daemon.wait_job(keep, lambda status: status["state"] == "degraded")
    assert status["replicas"][0]["state"] in ("stopping", "ended")
    time.sleep(1.5)
    status = daemon.job(keep)
    assert (status["state"], status["replicas"][1]["pid"]) == ("degraded", kept_pid)
    assert get(second) == "hello"
    assert status["replicas"][1]["endpoint"] == second

    ended = daemon.wait_ended(stop)
    assert ended["state"] == "failed"
    assert ended["replicas"][1]["reason"]["code"] == "replica_ended"


@pytest.mark.parametrize("removed", ["work", "."])
def test_a_replica_that_was_removed_by_hand_is_noticed_and_replaced(daemon: Daemon, removed: str) -> None:
    """Its directory and its process were removed, and the system went on believing in both."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    before = daemon.replica(job)
    shutil.rmtree(Path(before["sandbox"]) / removed)
    os.kill(before["pid"], signal.SIGKILL)
    daemon.wait_replica(job, lambda replica: replica["pid"] != before["pid"] and replica["state"] != "ready", seconds=2)
    after = daemon.wait_replica(job, lambda replica: replica["state"] == "ready")
    assert get(after["endpoint"]) == "hello"
    daemon.cancel(job)
    daemon.wait_ended(job)
    daemon.wait_nothing_left()


def test_a_restart_keeps_its_own_gpu_and_nobody_gets_in_between(make_daemon: DaemonMaker) -> None:
    """The restart found its own GPU "still in use"; or the job that waited for it got it in that moment."""
    daemon = make_daemon(config=ONE_GPU).start()
    job = daemon.submit(serve(), gpus=1, name="first")
    waiting = daemon.submit(serve(), gpus=1, name="second")
    daemon.wait_ready(job)
    for restarts in (1, 2):
        os.kill(daemon.replica(job)["pid"], signal.SIGKILL)
        daemon.wait_replica(job, lambda r, n=restarts: r["restarts"] == n and r["state"] == "ready")  # type: ignore[misc]
        assert daemon.replica(job)["devices"] == [{"uuid": "GPU-a", "share": 1.0}]
        assert daemon.replica(job)["attempt"] == 1
        assert daemon.job(waiting)["state"] == "waiting"
        (node,) = daemon.call("GET", "/v1/nodes")
        assert [held["name"] for held in node["devices"][0]["held_by"]] == ["first"]


def test_a_run_that_is_not_ready_in_time_is_ended_and_restarted(daemon: Daemon) -> None:
    job = daemon.submit(serve("--delay", "1000"), start_timeout_seconds=0.5, max_restarts=1)
    status = daemon.wait_ended(job)
    assert status["state"] == "failed"
    assert status["replicas"][0]["reason"]["code"] == "never_ready"
    assert len(run_starts(daemon, job)) == 2


def test_a_timeout_ends_the_replica_with_and_without_a_daemon(daemon: Daemon) -> None:
    job = daemon.batch(sh("sleep 1000"), timeout_seconds=0.5)
    status = daemon.wait_ended(job)
    assert (status["state"], status["replicas"][0]["reason"]["code"]) == ("failed", "timeout")

    alone = daemon.batch(sh("sleep 1000"), timeout_seconds=1.5)
    pid = daemon.wait_replica(alone, lambda replica: replica["pid"] is not None)["pid"]
    daemon.kill9()
    wait_for(lambda: not is_alive(pid), 5, "the shim keeps the time")
    daemon.start()
    assert daemon.wait_ended(alone)["replicas"][0]["reason"]["code"] == "timeout"


def test_a_requested_restart_is_a_new_run_that_is_not_counted(daemon: Daemon) -> None:
    job = daemon.submit(serve(), max_restarts=0)
    (first,) = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    assert daemon.cli("job", "restart", job).returncode == 0
    after = daemon.wait_replica(job, lambda r: r["state"] == "ready" and r["pid"] not in (None, pid))
    assert after["restarts"] == 0
    assert after["endpoint"] != first
    assert not is_alive(pid)


def test_the_grace_is_given_and_then_ended(daemon: Daemon) -> None:
    polite = daemon.submit(sh("trap 'sleep 0.3; echo bye; exit 0' TERM; while :; do sleep 0.05; done"), port=False)
    deaf = daemon.submit(
        sh("trap '' TERM; echo deaf; while :; do sleep 0.05; done"), port=False, stop_grace_seconds=0.5
    )
    wait_for(lambda: daemon.output(deaf) == ["deaf"])
    daemon.wait_replica(polite, lambda replica: replica["state"] == "ready")
    started = time.monotonic()
    daemon.cancel(polite)
    daemon.cancel(deaf)
    daemon.wait_ended(deaf)
    assert time.monotonic() - started >= 0.5
    daemon.wait_ended(polite)
    assert daemon.output(polite)[-1] == "bye"
    assert not daemon.all_on_host()


def test_what_a_batch_left_in_the_background_is_swept_and_said(daemon: Daemon) -> None:
    job = daemon.batch(sh("setsid sleep 1000 & echo $!"))
    status = daemon.wait_ended(job)
    assert status["state"] == "succeeded"
    assert status["reason"]["code"] == "left_background_processes"
    assert status["reason"]["hint"]
    assert not is_alive(int(daemon.output(job)[0]))


def test_a_killed_supervisor_takes_its_run_along_and_a_service_starts_again(daemon: Daemon) -> None:
    """The shim is killed (out of memory): the daemon ends what it left, and says that how it ended is unknown."""
    job = daemon.submit(serve())
    batch = daemon.batch(sh("sleep 1000"))
    daemon.wait_ready(job)
    daemon.wait_replica(batch, lambda replica: replica["pid"] is not None)
    pids = daemon.runs_on_host()
    for pid in daemon.shims_on_host():
        os.kill(pid, signal.SIGKILL)
    after = daemon.wait_replica(job, lambda replica: replica["restarts"] == 1 and replica["state"] == "ready")
    assert after["last_exit"]["ended_by"] == "supervisor_killed"
    ended = daemon.wait_ended(batch)
    assert ended["replicas"][0]["reason"]["code"] == "supervisor_killed"
    assert not pids & daemon.runs_on_host()
    assert daemon.differences() == []
