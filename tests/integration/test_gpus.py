"""A daemon and a driver that misbehaves: what it says of its GPUs is true, and what runs is left alone.

The driver is a fake libnvidia-ml (tests/fakes/nvml.py) that the product loads as it loads NVIDIA's; its faults are
switched on and off while the daemon runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.runtime.known_devices import FILE_NAME
from tests.fakes.nvml import FakeNvml
from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, environment, free_port, wait_for
from tests.integration.gpus import SLEEP, devices, held, node, ready, wait_device


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    """Four GPUs."""
    return FakeNvml(tmp_path, gpus=4)


@pytest.fixture
def host(make_daemon: DaemonMaker, nvml: FakeNvml) -> Daemon:
    return make_daemon(env=nvml.env()).start()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that gpulayer did not start."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


# --- what there is ------------------------------------------------------------------------------------------------


def test_the_drivers_gpus_are_there_from_the_first_answer(host: Daemon, nvml: FakeNvml) -> None:
    found = node(host)
    assert [device["uuid"] for device in found["devices"]] == nvml.uuids
    assert found["gpu_detect"] == "ok"
    assert found["drivers"] == {"cuda": "12.4", "nvidia": "550.54.15"}
    first = found["devices"][0]
    assert first["model"] == "NVIDIA H100 80GB HBM3"
    assert first["memory_mib"] == 81559
    assert first["source"] == "nvml"


def test_a_gpu_is_given_by_uuid_and_in_the_order_of_the_bus(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    """Numbers mean different devices to different tools."""
    nvml = FakeNvml(tmp_path, gpus=0)
    nvml.add(1, model="NVIDIA A10", memory_mib=23028)
    nvml.add(1, model="NVIDIA A100", memory_mib=40960)
    host = make_daemon(env=nvml.env()).start()
    assert held(host, ready(host, gpus=1, gpu_model=["*A100*"])) == nvml.uuids[1]
    whole = host.submit(SLEEP, port=False, gpus=1, gpu_model=["*A10"], env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    host.wait_ready(whole)
    mine = environment(host.replica(whole)["pid"])
    assert b"CUDA_DEVICE_ORDER=FASTEST_FIRST" in mine
    assert f"CUDA_VISIBLE_DEVICES={nvml.uuids[0]}".encode() in mine


def test_a_replica_without_gpus_sees_none(host: Daemon) -> None:
    job = ready(host)
    mine = environment(host.replica(job)["pid"])
    assert b"CUDA_VISIBLE_DEVICES=" in mine
    assert b"ROCR_VISIBLE_DEVICES=" in mine


def test_shares_of_one_gpu_add_up_to_one(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    host = make_daemon(env=nvml.env()).start()
    jobs = [ready(host, gpus=0.4, name=f"share-{number}") for number in range(2)]
    assert {held(host, job) for job in jobs} == {nvml.uuids[0]}
    third = host.submit(SLEEP, port=False, gpus=0.4)
    waiting = host.wait_job(third, lambda status: status["state"] == "waiting" and status["reason"] is not None)
    assert "0.2" in waiting["reason"]["text"]
    host.cancel(jobs[0])
    host.wait_ready(third)


def test_an_excluded_gpu_is_left_alone(make_daemon: DaemonMaker, nvml: FakeNvml) -> None:
    host = make_daemon(env=nvml.env(), config=f'[devices]\nexclude = ["{nvml.uuids[0]}", "00000000:02:00.0"]\n').start()
    assert [*devices(host)] == nvml.uuids[2:]


def test_mig_instances_are_devices_and_exclude_their_gpu(make_daemon: DaemonMaker, nvml: FakeNvml) -> None:
    instances = nvml.split(0, 2)
    host = make_daemon(env=nvml.env()).start()
    assert nvml.uuids[0] not in devices(host)
    job = ready(host, gpus=1, gpu_model=["*MIG*"])
    assert held(host, job) in {instance.uuid for instance in instances}
    assert devices(host)[instances[0].uuid]["parent"] == nvml.uuids[0]


# --- a driver that fails ------------------------------------------------------------------------------------------


def test_one_bad_gpu_of_four_leaves_the_others_and_what_runs_on_them_alone(host: Daemon, nvml: FakeNvml) -> None:
    jobs = {held(host, job): job for job in (ready(host, gpus=1, name=f"job-{n}") for n in range(4))}
    before = {uuid: host.replica(job) for uuid, job in jobs.items()}
    nvml.fault(2, "lost")
    bad = wait_device(host, nvml.uuids[2], "unhealthy", text="lost", seconds=6)
    assert bad["share_free"] == 0
    well = [uuid for uuid, device in devices(host).items() if not device["unhealthy"]]
    assert well == [uuid for uuid in nvml.uuids if uuid != nvml.uuids[2]]
    for uuid, job in jobs.items():
        now = host.replica(job)
        assert (now["state"], now["pid"], now["restarts"]) == ("ready", before[uuid]["pid"], 0)
    wait_for(
        lambda: any(
            event["kind"] == "node.changed" and nvml.uuids[2] in event["text"] and "lost" in event["text"]
            for event in host.call("GET", "/v1/events")
        ),
        15,
    )
    nvml.well(2)
    wait_device(host, nvml.uuids[2], "unhealthy", text="", seconds=10)


def test_a_service_is_not_started_again_on_the_gpu_that_was_lost_under_it(host: Daemon, nvml: FakeNvml) -> None:
    job = ready(host, gpus=1)
    lost = nvml.uuids.index(held(host, job))
    nvml.fault(lost, "lost")
    wait_device(host, nvml.uuids[lost], "unhealthy", text="lost")
    assert "device.unhealthy" in host.log_tail()
    os.kill(host.replica(job)["pid"], signal.SIGKILL)
    host.wait_replica(job, lambda replica: replica["attempt"] == 2 and replica["state"] == "ready", seconds=60)
    assert held(host, job) != nvml.uuids[lost]


def test_a_gpu_that_fell_off_the_bus_is_not_forgotten_even_by_the_next_daemon(host: Daemon, nvml: FakeNvml) -> None:
    gone = nvml.gpus.pop(3)
    nvml.write()
    wait_device(host, gone.uuid, "unhealthy", text="not report")
    host.restart9()
    wait_device(host, gone.uuid, "unhealthy", text="not report")
    nvml.gpus.append(gone)
    nvml.write()
    wait_device(host, gone.uuid, "unhealthy", text="")


def test_a_gpu_that_fell_off_the_bus_of_a_node_without_the_log_is_not_forgotten_either(
    make_daemon: DaemonMaker, nvml: FakeNvml
) -> None:
    first = make_daemon(name="n1", peer_port=free_port()).start()
    made = first.call("POST", "/v1/join-tokens", {"uses": 1, "lasts_seconds": 600, "advertise": "127.0.0.1"})
    host = make_daemon(name="n2", env=nvml.env()).start("--join", made["seed"], "--token", made["token"])
    wait_for(lambda: (host.data_dir / FILE_NAME).exists(), 10, host.log_tail)
    gone = nvml.gpus.pop(3)
    nvml.write()
    host.restart9()

    def is_missed() -> bool:
        found = host.call("GET", "/v1/nodes/n2")["devices"]
        return any(each["uuid"] == gone.uuid and "not report" in (each["unhealthy"] or "") for each in found)

    wait_for(is_missed, 10, lambda: f"{host.call('GET', '/v1/nodes/n2')}")


def test_a_driver_that_hangs_is_a_reason_and_the_daemon_goes_on(host: Daemon, nvml: FakeNvml) -> None:
    job = ready(host, gpus=1)
    pid = host.replica(job)["pid"]
    nvml.hang("nvmlDeviceGetMemoryInfo")
    wait_for(lambda: node(host)["gpu_detect"] == "error", 8, lambda: str(node(host)))
    assert all(device["unhealthy"] for device in devices(host).values())
    assert any("NVIDIA" in text for text in host.call("GET", "/v1/status")["warnings"])
    assert host.replica(job)["pid"] == pid
    assert host.wait_ended(host.batch(["true"]))["state"] == "succeeded"
    nvml.relent()
    for uuid in nvml.uuids:
        wait_device(host, uuid, "unhealthy", text="", seconds=20)


@pytest.mark.parametrize("trouble", ["hang", "crash"])
def test_a_daemon_starts_beside_a_driver_that_does_not_answer(
    make_daemon: DaemonMaker, nvml: FakeNvml, trouble: Any
) -> None:
    nvml.on("nvmlInitWithFlags", trouble)
    host = make_daemon(env=nvml.env()).start()
    found = wait_for(lambda: node(host) if node(host)["gpu_detect"] == "error" else None, 8)
    assert found is not None
    assert found["devices"] == []
    assert found["undetected"]
    waiting = host.submit(SLEEP, port=False, gpus=1)
    assert host.wait_job(waiting, lambda status: status["reason"] is not None)["state"] == "waiting"
    nvml.relent()
    host.wait_ready(waiting, seconds=60)


def test_a_driver_that_prints_garbage_is_an_error_with_its_text_and_an_event(
    make_daemon: DaemonMaker, nvml: FakeNvml
) -> None:
    nvml.answered = "garbage all over\n"
    nvml.write()
    host = make_daemon(env=nvml.env()).start()
    found = wait_for(lambda: node(host) if node(host)["gpu_detect"] == "error" else None, 8)
    assert found is not None
    assert found["devices"] == []
    assert any("garbage" in text for text in found["undetected"])
    events = wait_for(
        lambda: [event for event in host.call("GET", "/v1/events") if "gpu_detect=error" in event["text"]], 15
    )
    assert events


def test_a_driver_that_appears_later_is_found_without_a_restart(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, gpus=1, is_there=False)
    host = make_daemon(env=nvml.env()).start()
    assert node(host)["gpu_detect"] == "none"
    job = host.submit(SLEEP, port=False, gpus=1)
    nvml.appear()
    host.wait_ready(job, seconds=30)
    assert held(host, job) == nvml.uuids[0]


# --- others on a GPU ----------------------------------------------------------------------------------------------


def test_a_gpu_with_a_foreign_process_is_skipped_and_pid_and_amount_are_named(
    host: Daemon, nvml: FakeNvml, stranger: subprocess.Popen[bytes]
) -> None:
    nvml.processes(0, {stranger.pid: 20480})
    wait_device(host, nvml.uuids[0], "foreign", text=f"pid {stranger.pid}")
    assert "20GiB" in devices(host)[nvml.uuids[0]]["foreign"]
    jobs = [ready(host, gpus=1, name=f"job-{n}") for n in range(3)]
    assert nvml.uuids[0] not in {held(host, job) for job in jobs}
    fourth = host.submit(SLEEP, port=False, gpus=1)
    status = host.wait_job(fourth, lambda status: status["state"] == "waiting" and status["reason"] is not None)
    assert f"pid {stranger.pid}" in status["reason"]["text"]
    nvml.processes(0, {})
    host.wait_ready(fourth, seconds=30)


def test_foreign_processes_can_be_allowed(
    make_daemon: DaemonMaker, tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    nvml.processes(0, {stranger.pid: 20480})
    host = make_daemon(env=nvml.env(), config='[devices]\nforeign_processes = "allow"\n').start()
    ready(host, gpus=1)


def test_the_processes_of_its_own_replicas_are_not_foreign(host: Daemon, nvml: FakeNvml) -> None:
    job = host.submit(["sh", "-c", "sleep 1000 & wait"], port=False, gpus=0.5)
    host.wait_ready(job)
    uuid = held(host, job)
    pid = host.replica(job)["pid"]
    nvml.processes(nvml.uuids.index(uuid), {pid: 1000})
    time.sleep(2.5)
    assert devices(host)[uuid]["foreign"] is None
    assert held(host, ready(host, gpus=0.5, name="other-half")) == uuid
    nvml.processes(nvml.uuids.index(uuid), {})


def test_a_million_processes_in_the_drivers_list_are_a_number_and_no_burden(host: Daemon, nvml: FakeNvml) -> None:
    nvml.flood(1, 1_000_000)
    wait_device(host, nvml.uuids[1], "foreign", text="processes are on it")
    assert host.wait_ended(host.batch(["true"], gpus=1))["state"] == "succeeded"


def test_what_an_order_meets_at_the_last_moment_sends_it_back_to_the_queue(
    host: Daemon, nvml: FakeNvml, stranger: subprocess.Popen[bytes]
) -> None:
    """The node's own ledger has the last word (P3): a process is on the GPU that nobody has told the leader of yet."""
    nvml.processes(0, {stranger.pid: 1})
    nvml.processes(1, {stranger.pid: 1})
    nvml.processes(2, {stranger.pid: 1})
    nvml.processes(3, {stranger.pid: 1})
    job = host.batch(["true"], gpus=1)
    host.wait_job(job, lambda status: status["state"] == "waiting" and "pid" in str(status["reason"]))
    for number in range(4):
        nvml.processes(number, {})
    assert host.wait_ended(job, seconds=40)["state"] == "succeeded"
    assert [line for line in host.log_lines(job) if line["kind"] == "run_started"]


# --- free again ---------------------------------------------------------------------------------------------------


def test_a_gpu_is_free_only_when_the_driver_lists_no_process_of_the_replica_any_more(
    make_daemon: DaemonMaker, tmp_path: Path
) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    host = make_daemon(env=nvml.env()).start()
    job = ready(host, gpus=1)
    pid = host.replica(job)["pid"]
    nvml.processes(0, {pid: 4000})
    next_job = host.submit(SLEEP, port=False, gpus=1)
    host.cancel(job)
    wait_for(lambda: not host.runs_on_host(), 10)
    time.sleep(2.0)
    assert host.job(job)["state"] == "stopping"
    assert host.job(next_job)["state"] == "waiting"
    assert "driver still lists" in str(host.job(job))
    nvml.processes(0, {})
    host.wait_ready(next_job)
    assert host.job(job)["state"] == "cancelled"
    assert devices(host)[nvml.uuids[0]]["unhealthy"] is None


def test_a_gpu_that_is_not_confirmed_free_is_unhealthy_until_it_is(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, gpus=1)
    host = make_daemon(env=nvml.env()).start()
    job = ready(host, gpus=1)
    nvml.processes(0, {host.replica(job)["pid"]: 4000})
    host.cancel(job)
    assert host.wait_ended(job, seconds=45)["state"] == "cancelled"
    wait_device(host, nvml.uuids[0], "unhealthy", text="not confirmed free")
    next_job = host.submit(SLEEP, port=False, gpus=1)
    time.sleep(1.0)
    assert host.job(next_job)["state"] == "waiting"
    nvml.processes(0, {})
    host.wait_ready(next_job, seconds=30)


def test_a_restart_keeps_its_gpu(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    """There is no moment in which its own GPU is in its way."""
    nvml = FakeNvml(tmp_path, gpus=1)
    host = make_daemon(env=nvml.env()).start()
    job = ready(host, gpus=1)
    for run in (2, 3):
        os.kill(host.replica(job)["pid"], signal.SIGKILL)
        host.wait_replica(job, lambda replica, run=run: replica["run"] == run and replica["state"] == "ready")  # type: ignore[misc]
    assert host.replica(job)["attempt"] == 1
