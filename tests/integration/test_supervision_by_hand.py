"""What people do to a host by hand, and what a host does to a daemon: files removed, processes stopped, limits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import GPULAYER, Daemon, children, environment, get, is_alive, read, wait_for
from tests.integration.programs import python, serve, sh

# Ignores its stop signal, with a child in a session of its own that does too.
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def spawner_of(daemon: Daemon) -> int:
    (pid,) = [child for child in children(daemon.pid) if b"gpulayer/shim/" in read(f"/proc/{child}/cmdline")]
    return pid


def test_a_service_whose_stop_needed_a_kill_can_be_restarted(daemon: Daemon) -> None:
    """On Linux 6.18 a process born in a cgroup that was ever killed is killed at its birth: after one such stop no
    later run of the replica lived."""
    job = daemon.submit(python(DEAF), port=False, stop_grace_seconds=0.2)
    before = daemon.wait_replica(job, lambda replica: replica["state"] == "ready")
    wait_for(lambda: len(daemon.output(job)) == 2)
    daemon.call("POST", f"/v1/jobs/{job}/restart", {})
    after = daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["pid"] != before["pid"])
    assert (after["run"], after["restarts"]) == (2, 0)


@pytest.mark.parametrize("removed", ["runs", "logs", "."])
def test_directories_removed_by_hand_are_there_for_the_next_run(daemon: Daemon, removed: str) -> None:
    """Each later start failed, with a hint to look at the limits of the host, until someone cancelled the job."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    before = daemon.replica(job)
    shutil.rmtree(Path(before["sandbox"]) / removed)
    os.kill(before["pid"], signal.SIGKILL)
    after = daemon.wait_replica(
        job, lambda replica: replica["state"] == "ready" and replica["pid"] != before["pid"], seconds=6
    )
    get(after["endpoint"], "/say/here-again")
    wait_for(lambda: "here-again" in daemon.output(job), 5, lambda: daemon.log_lines(job))
    assert len(daemon.shims_on_host()) == 1


@pytest.mark.parametrize("removed", ["shim.sock", "shim.json", "attempt.json", "runs"])
def test_a_supervisor_whose_files_were_removed_is_found_by_the_next_daemon(daemon: Daemon, removed: str) -> None:
    """P8: its healthy run was ended, and then nothing could be started there, since the lock was held for ever."""
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    before = daemon.replica(job)
    path = Path(before["sandbox"]) / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    daemon.restart9()
    daemon.wait_ready(job)
    assert daemon.replica(job)["pid"] == before["pid"]
    os.kill(before["pid"], signal.SIGKILL)
    after = daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["restarts"] == 1)
    assert after["last_exit"]["signal"] == 9
    assert len(daemon.shims_on_host()) == 1
    assert daemon.differences() == []


def test_a_sandbox_removed_by_hand_is_no_reason_to_run_a_batch_twice(daemon: Daemon, tmp_path: Path) -> None:
    """P4: the next daemon found nothing of it on the disk, and would have executed it again, beside the first."""
    count = tmp_path / "count"
    batch = daemon.batch(sh(f"echo x >> {count}; exec sleep 1000"))
    service = daemon.submit(serve())
    daemon.wait_ready(service)
    wait_for(count.exists)
    first = {job: daemon.replica(job) for job in (batch, service)}
    for replica in first.values():
        shutil.rmtree(replica["sandbox"])
    daemon.restart9()
    assert daemon.wait_ended(batch)["replicas"][0]["reason"]["code"] == "supervisor_killed"
    again = daemon.wait_replica(service, lambda replica: replica["state"] == "ready")
    assert count.read_text() == "x\n"
    assert again["restarts"] == 1
    assert not [replica for replica in first.values() if is_alive(replica["pid"])]
    assert len(daemon.shims_on_host()) == 1
    assert daemon.differences() == []


def test_why_a_command_could_not_be_executed_survives_the_daemon(daemon: Daemon) -> None:
    """`bad_command` had become `spawn_failed`, with a hint to look at the limits of the host."""
    job = daemon.submit(["/no/such/program"], port=False)
    before = daemon.wait_replica(
        job, lambda replica: replica["state"] == "backing_off" and replica["run"] == 3 and replica["restarts"] == 2
    )
    daemon.restart9()
    after = daemon.replica(job)
    assert (after["state"], after["restarts"]) == ("backing_off", 2)
    assert before["reason"]["code"] == after["reason"]["code"] == "bad_command"


def test_a_timeout_also_ends_a_service_that_waits_for_its_next_start(daemon: Daemon) -> None:
    job = daemon.submit(sh("exit 1"), port=False, timeout_seconds=2)
    started = time.monotonic()
    ended = daemon.wait_ended(job, 6)
    assert time.monotonic() - started < 4
    assert (ended["state"], ended["replicas"][0]["reason"]["code"]) == ("failed", "timeout")
    assert ended["replicas"][0]["last_exit"]["code"] == 1


def test_a_daemon_started_with_sigchld_ignored_starts_replicas(make_daemon: DaemonMaker) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    daemon = make_daemon()
    try:
        daemon.spawn()
    finally:
        signal.signal(signal.SIGCHLD, before)
    wait_for(daemon.is_ready, 20, daemon.log_tail)
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    assert get(daemon.replica(job)["endpoint"]) == "hello"


def test_a_stopped_spawner_is_replaced_and_leaves_no_supervisor_behind(daemon: Daemon) -> None:
    """The request that it had not read was carried out when it went on: a shim that nobody asked for any more."""
    kept = daemon.submit(serve(), name="kept")
    daemon.wait_ready(kept)
    spawner = spawner_of(daemon)
    os.kill(spawner, signal.SIGSTOP)
    late = daemon.submit(serve(), name="late")
    # What is cancelled before that is never asked of the spawner.
    daemon.wait_replica(late, lambda replica: replica["state"] == "starting")
    daemon.cancel(late)
    assert daemon.wait_ended(late, 40)["state"] == "cancelled"
    wait_for(lambda: not is_alive(spawner), 20)
    wait_for(lambda: len(daemon.shims_on_host()) == 1, 20)
    assert daemon.differences() == []


def test_a_daemon_with_few_descriptors_ends_nothing_and_lists_nothing_dead(make_daemon: DaemonMaker) -> None:
    """What could not be looked at for want of a descriptor was taken for not there: healthy runs were given up."""
    daemon = make_daemon().start()
    job = daemon.submit(serve(), replicas=24, spread="any")

    def tried() -> bool:
        return len(daemon.shims_on_host()) == 24

    wait_for(tried, 30, lambda: len(daemon.shims_on_host()))
    runs = {pid for pid in daemon.runs_on_host() if is_alive(pid)}
    assert runs
    daemon.kill9()
    # Enough for itself, and for some of the supervisors that are all there at once now: it may fail, and loudly.
    daemon.command = ["/bin/sh", "-c", 'ulimit -n 38; exec "$@"', "sh", *GPULAYER]
    daemon.spawn()
    wait_for(
        lambda: not daemon.is_running or "shim.silent" in daemon.log_tail(200).rpartition("voter.recovered")[2],
        20,
        daemon.log_tail,
    )
    assert runs <= daemon.runs_on_host()
    daemon.kill9()
    daemon.command = [*GPULAYER]
    daemon.start()
    daemon.wait_ready(job, 60)
    assert runs <= daemon.runs_on_host()
    assert len(daemon.shims_on_host()) == 24
    assert daemon.differences() == []


def test_audit_can_look_at_a_tree_of_any_depth(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "deeper"
    script.write_text('#!/bin/sh\n[ "$1" = 0 ] && { echo deep; exec sleep 1000; }\n"$0" $(($1-1))\n:\n')
    script.chmod(0o755)
    job = daemon.submit([str(script), "1100"], port=False, stop_grace_seconds=0.2)
    wait_for(lambda: daemon.output(job) == ["deep"], 40)
    assert daemon.differences() == []
    daemon.cancel(job)
    daemon.wait_ended(job)
    assert not daemon.all_on_host()


def test_audit_finds_what_a_stopped_daemon_cannot_mend(daemon: Daemon) -> None:
    """A second look at the host, while the daemon itself had no chance to see that the shim was killed."""
    job = daemon.submit(serve(), name="web")
    daemon.wait_ready(job)
    (shim,) = daemon.shims_on_host()
    (run,) = daemon.runs_on_host()
    variables = dict(os.fsdecode(each).split("=", 1) for each in environment(run) if each)
    stray = subprocess.Popen(["/bin/sleep", "1000"], env=variables, cwd="/", start_new_session=True)
    try:
        found = wait_for(daemon.differences)
        assert [each["pids"] for each in found] == [[stray.pid]]
        os.kill(daemon.pid, signal.SIGSTOP)
        os.kill(shim, signal.SIGKILL)
        os.kill(daemon.pid, signal.SIGCONT)
        # A killed shim's run and whoever carries its run id are ended alike: the stray too.
        daemon.wait_replica(job, lambda replica: replica["state"] == "ready" and replica["restarts"] == 1)
        assert stray.wait(5) == -signal.SIGTERM
        assert daemon.differences() == []
    finally:
        stray.kill()
        stray.wait(5)
