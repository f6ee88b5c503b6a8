"""`audit` finds what should not be there, by looking at the host. What it says is compared with a walk of our own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

from tests.integration.daemon import Daemon, wait_for
from tests.integration.programs import serve, sh


def test_a_host_in_order_has_no_differences(daemon: Daemon) -> None:
    job = daemon.submit(serve(), replicas=2, spread="any")
    daemon.submit(sh("sleep 1000 & setsid sleep 1000 & wait"), port=False)
    daemon.submit(serve(), gpus=9)
    daemon.wait_ready(job)
    report = daemon.call("GET", "/v1/audit")
    assert report["differences"] == []
    assert report["replicas_checked"] == 3
    assert report["processes_seen"] == len(daemon.all_on_host())
    assert daemon.cli("audit").returncode == 0


def test_a_planted_stray_is_found_and_named(daemon: Daemon) -> None:
    job = daemon.submit(serve(), name="web")
    daemon.wait_ready(job)
    pid = next(iter(daemon.runs_on_host()))
    planted = subprocess.Popen(
        ["/bin/sleep", "1000"], env=dict(line.split("=", 1) for line in _environment(pid)), start_new_session=True
    )
    try:
        (difference,) = wait_for(daemon.differences)
        assert difference["kind"] == "stray_process"
        assert difference["pids"] == [planted.pid]
        assert difference["job"] == job
        assert difference["hint"]
        assert planted.pid in daemon.runs_on_host()
        shown = daemon.cli("audit")
        assert shown.returncode == 1
        assert str(planted.pid) in shown.stdout
    finally:
        planted.kill()
        planted.wait(10)
    assert daemon.differences() == []


def _environment(pid: int) -> list[str]:
    with open(f"/proc/{pid}/environ") as file:
        return [line for line in file.read().split("\0") if "=" in line]


def test_a_killed_shim_is_found_or_already_put_right(daemon: Daemon) -> None:
    """The daemon puts it right within a moment; while it is away it cannot, and the next one has to."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    (shim,) = daemon.shims_on_host()
    runs = daemon.runs_on_host()
    daemon.kill9()
    os.kill(shim, signal.SIGKILL)
    assert daemon.runs_on_host() == runs, "nobody is there to end it yet"
    daemon.start()
    replica = daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["restarts"] == 1)
    assert replica["last_exit"]["ended_by"] == "supervisor_killed"
    assert not runs & daemon.runs_on_host()
    assert daemon.differences() == []


def test_a_foreign_listener_on_a_replicas_port_is_found(daemon: Daemon) -> None:
    job = daemon.submit(serve())
    (endpoint,) = daemon.wait_ready(job)
    port = int(endpoint.rpartition(":")[2])
    with socket.create_server(("127.0.0.9", port)):
        (difference,) = wait_for(daemon.differences)
        assert difference["kind"] == "foreign_listener"
        assert difference["pids"] == [os.getpid()]
        assert str(port) in difference["text"]
    assert daemon.differences() == []


def test_a_supervisor_that_nobody_ordered_is_found_or_ended(daemon: Daemon) -> None:
    """A sandbox of a job that is not in the log, with a living shim: as after a restored backup."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    daemon.kill9()
    (sandbox,) = (daemon.data_dir / "sandboxes").iterdir()
    for name in ("cluster.json", "log.db", "log.db-wal", "log.db-shm", "events.db", "events.db-wal", "events.db-shm"):
        (daemon.data_dir / name).unlink(missing_ok=True)
    daemon.start()
    daemon.wait_nothing_left()
    assert daemon.differences() == []
    assert sandbox.exists(), "its log is kept for its time"
