"""One GPU, two daemons of one host: the lock decides, whoever dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import wait_for
from tests.integration.gpus import SLEEP, devices, held, ready


def test_two_daemons_of_one_host_never_share_a_gpu(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    one, two = make_daemon(env=nvml.env()).start(), make_daemon(env=nvml.env()).start()
    job = ready(one, gpus=1)
    waiting = two.submit(SLEEP, port=False, gpus=1)
    status = two.wait_job(waiting, lambda status: "held by" in str(status["reason"]))
    assert status["state"] == "waiting"
    assert devices(two)[nvml.uuids[0]]["share_free"] == 0
    one.cancel(job)
    two.wait_ready(waiting, seconds=30)
    assert held(two, waiting) == nvml.uuids[0]


@pytest.mark.parametrize("who_dies", ["daemon", "shim"])
def test_a_gpu_stays_locked_whoever_dies(make_daemon: DaemonMaker, tmp_path: Path, who_dies: str) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    one, two = make_daemon(env=nvml.env()).start(), make_daemon(env=nvml.env()).start()
    job = ready(one, gpus=1)
    waiting = two.submit(SLEEP, port=False, gpus=1)
    if who_dies == "daemon":
        one.kill9()
        time.sleep(2)
        assert not two.runs_on_host()
        one.start()
        assert one.replica(job)["run"] == 1
    else:
        for pid in one.shims_on_host():
            os.kill(pid, signal.SIGKILL)
        one.wait_replica(job, lambda replica: replica["run"] == 2 and replica["state"] == "ready")
    time.sleep(2)
    assert not two.runs_on_host()
    one.cancel(job)
    two.wait_ready(waiting, seconds=30)


def test_a_process_that_outlived_both_daemon_and_shim_keeps_others_from_its_gpu(
    make_daemon: DaemonMaker, tmp_path: Path
) -> None:
    """The lock has died with them; the driver still tells."""
    nvml = FakeNvml(tmp_path, gpus=1)
    one, two = make_daemon(env=nvml.env()).start(), make_daemon(env=nvml.env()).start()
    job = ready(one, gpus=1)
    pid = one.replica(job)["pid"]
    nvml.processes(0, {pid: 1000})
    waiting = two.submit(SLEEP, port=False, gpus=1)
    one.kill9()
    for shim in one.shims_on_host():
        os.kill(shim, signal.SIGKILL)
    two.wait_job(waiting, lambda status: f"pid {pid}" in str(status["reason"]))
    one.start()
    wait_for(lambda: pid not in one.runs_on_host(), 10)
    assert not two.runs_on_host()
    one.cancel(job)
    nvml.processes(0, {})
    two.wait_ready(waiting, seconds=40)


def test_who_comes_back_to_a_gpu_that_others_took_meanwhile_does_not_start_on_it_again(
    make_daemon: DaemonMaker, tmp_path: Path
) -> None:
    """Daemon and shim were killed together, and so the lock was free. The daemon found it taken when it came back, and
    restarted its run all the same: it had asked once, which was enough to count as having it."""
    nvml = FakeNvml(tmp_path, gpus=1)
    one, two = make_daemon(env=nvml.env()).start(), make_daemon(env=nvml.env()).start()
    job = ready(one, gpus=1)
    one.kill9()
    for shim in one.shims_on_host():
        os.kill(shim, signal.SIGKILL)
    others = ready(two, gpus=1)
    one.start()
    one.wait_job(job, lambda status: status["state"] == "waiting")
    assert not one.runs_on_host()
    two.cancel(others)
    one.wait_ready(job, seconds=40)


def test_what_lost_its_lock_to_others_is_not_restarted_on_the_gpu(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    one, two = make_daemon(env=nvml.env()).start(), make_daemon(env=nvml.env()).start()
    job = ready(one, gpus=1)
    pid = one.replica(job)["pid"]
    os.kill(one.pid, signal.SIGSTOP)
    try:
        for place in ("/run/lock", "/dev/shm"):
            Path(place, f"gpulayer-{nvml.uuids[0]}.lock").unlink(missing_ok=True)
        ready(two, gpus=1)
    finally:
        os.kill(one.pid, signal.SIGCONT)
    wait_for(lambda: "was removed" in one.cli("status").stdout, 10)
    assert one.replica(job)["pid"] == pid  # what runs is left alone, and told of
    os.kill(pid, signal.SIGKILL)
    one.wait_job(job, lambda status: status["state"] == "waiting")
    assert not one.runs_on_host()


def test_a_declared_device_is_its_data_directorys_own(make_daemon: DaemonMaker) -> None:
    config = '[[accelerators]]\nkind = "cuda"\nmodel = "H100"\nmemory = "80GiB"\nuuid = "GPU-declared"\n'
    one, two = make_daemon(config=config).start(), make_daemon(config=config).start()
    ready(one, gpus=1)
    ready(two, gpus=1)


def test_a_lock_file_that_was_removed_is_made_again(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    one, two = make_daemon(env=nvml.env()).start(), make_daemon(env=nvml.env()).start()
    ready(one, gpus=1)
    locks = [path for place in ("/run/lock", "/dev/shm") for path in Path(place).glob(f"gpulayer-*{nvml.uuids[0]}*")]
    assert len(locks) == 1
    locks[0].unlink()
    wait_for(lambda: locks[0].exists(), 5)
    waiting = two.submit(SLEEP, port=False, gpus=1)
    time.sleep(3)
    assert two.job(waiting)["state"] == "waiting"
