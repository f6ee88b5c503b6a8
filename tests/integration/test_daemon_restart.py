"""The daemon goes away and comes back; the replicas do not notice (P8)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.integration.conftest import ONE_GPU, DaemonMaker
from tests.integration.daemon import Daemon, children, get, is_alive, wait_for
from tests.integration.programs import serve, sh


def test_a_killed_daemon_adopts_its_replicas_and_can_still_stop_them(daemon: Daemon) -> None:
    """After a restart of the daemon, stop did not kill the process any more."""
    job = daemon.submit(serve())
    (endpoint,) = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    daemon.kill9()
    assert get(endpoint) == "hello"
    daemon.start()
    assert daemon.wait_ready(job) == [endpoint]
    assert daemon.replica(job)["pid"] == pid
    assert daemon.replica(job)["restarts"] == 0
    daemon.cancel(job)
    daemon.wait_ended(job)
    assert not is_alive(pid)
    assert not daemon.all_on_host()


def test_a_restarted_node_is_back_with_everything_in_five_seconds(daemon: Daemon) -> None:
    """There were three minutes of "pending" after a restart."""
    jobs = [daemon.submit(serve()) for _ in range(3)]
    endpoints = {job: daemon.wait_ready(job) for job in jobs}
    pids = daemon.runs_on_host()
    assert daemon.stop() == 0
    started = time.monotonic()
    daemon.start()
    for job in jobs:
        assert daemon.wait_ready(job, seconds=5) == endpoints[job]
        assert daemon.job(job)["state"] == "running"
    assert time.monotonic() - started < 5
    assert daemon.runs_on_host() == pids


def test_a_stop_of_the_daemon_leaves_replicas_and_only_leave_stop_all_ends_them(daemon: Daemon) -> None:
    """Users disagreed whether stopping the service must stop the workloads. Here it is a documented choice."""
    job = daemon.submit(serve())
    (endpoint,) = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    assert daemon.stop() == 0
    assert (is_alive(pid), get(endpoint)) == (True, "hello")
    daemon.start()
    refused = daemon.cli("leave")
    assert refused.returncode == 5
    assert "--stop-all" in refused.stderr
    assert daemon.is_running
    assert is_alive(pid)
    assert daemon.cli("leave", "--stop-all").returncode == 0
    assert daemon.process is not None
    assert daemon.process.wait(15) == 0
    assert not is_alive(pid)
    assert not daemon.all_on_host()
    assert (daemon.data_dir / "log.db").exists()
    daemon.start()
    assert daemon.call("GET", "/v1/jobs?state=ended")["jobs"][0]["id"] == job


def test_a_spawner_does_not_outlive_its_daemon(daemon: Daemon) -> None:
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    spawners = children(daemon.pid)
    assert spawners
    daemon.kill9()
    wait_for(lambda: not [pid for pid in spawners if is_alive(pid)])


def test_lines_and_exit_codes_of_the_time_without_a_daemon_are_kept(daemon: Daemon) -> None:
    job = daemon.batch(sh("trap 'echo done; exit 42' USR1; while :; do echo tick; sleep 0.05; done"))
    pid = daemon.wait_replica(job, lambda replica: replica["pid"] is not None)["pid"]
    wait_for(lambda: len(daemon.output(job)) > 1)
    daemon.kill9()
    os.kill(pid, signal.SIGUSR1)
    wait_for(lambda: not is_alive(pid), what="the batch ends by itself")
    daemon.start()
    status = daemon.wait_ended(job)
    assert status["replicas"][0]["last_exit"]["code"] == 42
    output = daemon.output(job)
    assert output[-1] == "done"
    assert set(output[:-1]) == {"tick"}
    assert not daemon.all_on_host()


def test_a_service_that_died_meanwhile_is_restarted_by_the_next_daemon(daemon: Daemon) -> None:
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    daemon.kill9()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not daemon.runs_on_host())
    daemon.start()
    after = daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["restarts"] == 1)
    assert after["last_exit"]["signal"] == 9
    assert get(after["endpoint"]) == "hello"


def test_the_count_of_restarts_and_the_backoff_survive_the_daemon(daemon: Daemon) -> None:
    job = daemon.submit(sh("exit 1"), port=False, max_restarts=3)
    daemon.wait_replica(job, lambda replica: replica["restarts"] == 2)
    daemon.restart9()
    status = daemon.wait_ended(job, 30)
    assert status["replicas"][0]["restarts"] == 3
    starts = [line["at_utc"] for line in daemon.log_lines(job) if line["kind"] == "run_started"]
    assert len(starts) == 4
    assert starts[3] - starts[2] >= 3.5


def test_a_cancel_that_the_daemon_did_not_live_to_finish_is_finished_by_the_next(daemon: Daemon) -> None:
    job = daemon.submit(sh("trap '' TERM; while :; do sleep 0.05; done"), port=False, stop_grace_seconds=2)
    daemon.wait_replica(job, lambda replica: replica["state"] == "ready")
    daemon.cancel(job)
    daemon.restart9()
    assert daemon.wait_ended(job)["state"] == "cancelled"
    assert not daemon.all_on_host()


def test_a_second_daemon_on_the_same_directory_fails_at_once_and_names_the_first(daemon: Daemon) -> None:
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    done = daemon.cli("up", "--api-port", "0", timeout=15)
    assert done.returncode not in (0, 3)
    assert str(daemon.pid) in done.stderr
    assert "Traceback" not in done.stderr
    assert daemon.differences() == []
    assert daemon.job(job)["state"] == "running"


def test_a_pid_that_belongs_to_another_program_by_now_is_never_signalled(make_daemon: DaemonMaker) -> None:
    """After a reboot, or much forking, the pid in our notes may be anyone's."""
    daemon = make_daemon(config=ONE_GPU).start()
    job = daemon.submit(serve(), name="web")
    daemon.wait_ready(job)
    daemon.kill9()
    for pid in [*daemon.shims_on_host(), *daemon.runs_on_host()]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not daemon.all_on_host())
    stranger = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
    try:
        (sandbox,) = (daemon.data_dir / "sandboxes").iterdir()
        told = json.loads((sandbox / "shim.json").read_text())
        (sandbox / "shim.json").write_text(json.dumps(told | {"pid": stranger.pid}))
        (run,) = (sandbox / "runs").iterdir()
        raw = run.read_bytes()
        marker = json.loads(raw[:4096])
        assert "pid" in marker
        half = json.dumps(marker | {"pid": stranger.pid}).encode()
        run.write_bytes(half.ljust(4095) + b"\n" + raw[4096:])
        daemon.start()
        after = daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["run"] == 2)
        daemon.cancel(job)
        daemon.wait_ended(job)
        assert after["pid"] != stranger.pid
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(10)


def test_the_event_feed_goes_on_where_a_reader_left_off_across_a_crash(daemon: Daemon) -> None:
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    before = daemon.call("GET", "/v1/events?limit=1000")
    assert {"replica.ready"} <= {event["kind"] for event in before}
    daemon.restart9()
    daemon.cancel(job)
    daemon.wait_ended(job)
    after = daemon.call("GET", f"/v1/events?after={before[-1]['offset']}")
    after = after if isinstance(after, list) else [after]
    assert not {event["offset"] for event in before} & {event["offset"] for event in after}
    everything = daemon.call("GET", "/v1/events?limit=1000")
    assert [event["offset"] for event in everything] == [event["offset"] for event in [*before, *after]]


@pytest.mark.parametrize("snapshot_every", [1000, 3])
def test_every_restart_finds_the_same_state(make_daemon: DaemonMaker, snapshot_every: int) -> None:
    """Replayed from the first entry, or from a snapshot and the rest."""
    daemon = make_daemon(config=f"{ONE_GPU}\n[storage]\nsnapshot_every = {snapshot_every}\n").start()
    running = daemon.submit(serve(), name="running")
    daemon.wait_ready(running)
    waiting = daemon.submit(serve(), name="waiting", gpus=2)
    ended = daemon.batch(sh("exit 3"), name="ended")
    daemon.wait_ended(ended)

    def state() -> object:
        jobs = [daemon.job(job) for job in (running, waiting, ended)]
        return [
            (
                job["state"],
                job["reason"] and job["reason"]["code"],
                [(r["attempt"], r["pid"], r["restarts"]) for r in job["replicas"]],
            )
            for job in jobs
        ]

    before = state()
    for _ in range(2):
        daemon.restart9()
        daemon.wait_ready(running)
        assert state() == before
    assert daemon.differences() == []
