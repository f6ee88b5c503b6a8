"""A log that cannot be written: what is said of it is true, no replica notices, and words say what to do (P10)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, free_port, is_alive, wait_for
from tests.integration.programs import serve

QUARTER_MIB = 256 * 1024


@pytest.fixture
def broken(make_daemon: DaemonMaker) -> Iterator[Daemon]:
    """Its disk breaks after a service and a batch were submitted; it is whole again after the test."""
    daemon = make_daemon(config="[resources]\ncpus = 1\n").start()
    daemon.wait_ready(daemon.submit(serve(), name="web"))
    daemon.kill9()
    daemon.start(env={"GPULAYER_FAILPOINTS": "log.before_commit=error:3"})
    assert daemon.request("POST", "/v1/jobs", {"command": ["true"], "name": "late", "cpus": 1})[0] == 201
    wait_for(lambda: daemon.request("GET", "/readyz")[0] == 503, 10, "the plan was to break the disk")
    yield daemon
    daemon.restart9()
    assert daemon.wait_ended("late")["state"] == "succeeded"


def test_what_waits_behind_a_broken_disk_says_so(broken: Daemon) -> None:
    reason = broken.job("late")["replicas"][0]["reason"]
    assert "storage failed" in reason["text"], reason
    assert "storage failed" in str(broken.call("GET", "/v1/jobs/late/explain"))
    assert broken.call("GET", "/v1/status")["leader"] is None


def test_leave_stop_all_behind_a_broken_disk_is_refused_and_stops_nothing(broken: Daemon) -> None:
    pid = broken.replica("web")["pid"]
    status, body = broken.request("POST", "/v1/leave", {"stop_all": True})
    assert status == 507, body
    done = broken.cli("leave", "--stop-all")
    assert done.returncode == 1, done.stderr
    assert "storage failed" in done.stderr
    assert broken.is_running
    assert (broken.replica("web")["pid"], broken.replica("web")["state"]) == (pid, "ready")
    broken.restart9()
    assert broken.replica("web")["pid"] == pid


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "gpulayer-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a tmpfs: not root, or not allowed")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_too_small_from_the_start_is_refused_with_words(
    small_disk: Path, make_daemon: DaemonMaker
) -> None:
    daemon = make_daemon()  # 64 MiB free are wanted
    daemon.place(small_disk / "data")
    assert daemon.spawn().wait(20) == 1
    said = daemon.log_tail()
    assert "Traceback" not in said
    assert "MiB free" in said
    assert "hint: free some space" in said


def test_a_daemon_starts_on_a_nearly_full_disk_or_says_that_it_is_full(
    small_disk: Path, make_daemon: DaemonMaker
) -> None:
    daemon = make_daemon(config='[storage]\nfree_min = "1MiB"\n')
    daemon.place(small_disk / "data")
    daemon.start()
    job = daemon.submit(serve())
    endpoints = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    daemon.kill9()
    (small_disk / "data" / "reserve").unlink(missing_ok=True)
    filler = small_disk / "filler"
    page = os.sysconf("SC_PAGESIZE")
    for pages in (0, 1, 2, 3, 4, 6, 8, 16):
        fill(filler)
        os.truncate(filler, filler.stat().st_size - pages * page)
        process = daemon.spawn()
        ready = wait_for(lambda process=process: process.poll() is not None or daemon.is_ready(), 20)  # type: ignore[misc]
        assert ready
        if process.poll() is None:
            assert [each["endpoint"] for each in daemon.call("GET", f"/v1/jobs/{job}/endpoints")] == endpoints
            daemon.kill9()
        else:
            assert process.returncode == 1
            assert "full" in daemon.log_tail(5)
        assert "Traceback" not in daemon.log_tail(1000), f"{pages} pages free"
    filler.unlink()
    daemon.start()
    assert daemon.wait_ready(job) == endpoints
    assert daemon.replica(job)["pid"] == pid


def test_a_job_that_fills_the_disk_can_be_cancelled(small_disk: Path, make_daemon: DaemonMaker) -> None:
    daemon = make_daemon(config='[storage]\nfree_min = "12MiB"\n')
    daemon.place(small_disk / "data")
    daemon.start()
    greedy = daemon.submit(["sh", "-c", "cat /dev/zero > big; exec sleep 1000"], name="greedy", port=False)
    wait_for(lambda: os.statvfs(small_disk).f_bavail == 0, 20, "the disk fills up")
    assert daemon.request("POST", "/v1/jobs", {"command": ["true"]})[0] == 507
    daemon.cancel(greedy)
    assert daemon.wait_ended(greedy, 20)["state"] == "cancelled"
    for big in small_disk.glob("data/sandboxes/*/work/big"):
        big.unlink()
    wait_for(lambda: daemon.request("POST", "/v1/jobs", {"command": ["true"]})[0] == 201, 20, "room again")


def test_a_device_that_is_well_again_while_the_disk_was_full_is_used_when_there_is_room(
    small_disk: Path, tmp_path: Path, make_daemon: DaemonMaker
) -> None:
    """Nothing more happens on the device: what could not be committed has to be tried again by itself."""
    nvml = FakeNvml(tmp_path, gpus=1)
    daemon = make_daemon(env=nvml.env(), config='[storage]\nfree_min = "12MiB"\n')
    daemon.place(small_disk / "data")
    daemon.start()
    nvml.fault(0, "lost")
    wait_for(lambda: "lost" in str(daemon.call("GET", "/v1/events")), 20)
    waiting = daemon.batch(["true"], gpus=1)
    filler = small_disk / "filler"
    fill(filler)
    wait_for(lambda: daemon.request("POST", "/v1/jobs", {"command": ["true"]})[0] == 507, 20)
    nvml.well(0)
    wait_for(lambda: daemon.call("GET", "/v1/nodes")[0]["devices"][0]["unhealthy"] is None, 20)
    wait_for(lambda: "plan.not_committed" in daemon.log_tail(1000), 20)
    filler.unlink()
    assert daemon.wait_ended(waiting, 40)["state"] == "succeeded"


def test_nothing_is_placed_on_a_node_whose_disk_is_nearly_full(small_disk: Path, make_daemon: DaemonMaker) -> None:
    """A batch that could not even be prepared has failed for good: one full disk ended all that the queue held."""
    first = make_daemon(peer_port=free_port()).start()
    made = first.call("POST", "/v1/join-tokens", {"uses": 1, "lasts_seconds": 600, "advertise": "127.0.0.1"})
    second = make_daemon(name="n2", config='[storage]\nfree_min = "12MiB"\n')
    second.place(small_disk / "data")
    second.start("--join", made["seed"], "--token", made["token"], "--label", "disk=small")

    def conditions() -> list[str]:
        return [word for node in first.call("GET", "/v1/nodes") if node["name"] == "n2" for word in node["conditions"]]

    filler = small_disk / "filler"
    fill(filler)
    wait_for(lambda: conditions() == ["disk_low"], 20, conditions)
    assert "nearly full" in str(second.call("GET", "/v1/status")["warnings"])
    job = first.batch(["true"], labels={"disk": "small"})
    first.wait_replica(job, lambda replica: "disk_low" in str(replica["reason"]))
    filler.unlink()
    assert first.wait_ended(job)["state"] == "succeeded"
    assert conditions() == []


def fill(path: Path) -> None:
    """Until nothing more fits."""
    with open(path, "ab", buffering=0) as file:
        for size in (QUARTER_MIB, 4096, 512):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


@pytest.mark.parametrize("loss", ["removed", "emptied", "of another cluster"])
def test_a_log_that_is_lost_is_refused_and_ends_no_replica(make_daemon: DaemonMaker, loss: str) -> None:
    """It would look like that of a new node: every job forgotten, every replica a leftover to be ended."""
    daemon = make_daemon().start()
    job = daemon.submit(serve())
    endpoints = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    assert daemon.stop() == 0
    log = daemon.data_dir / "log.db"
    kept = log.read_bytes()
    if loss == "removed":
        log.unlink()
    elif loss == "emptied":
        log.write_bytes(b"")
    else:
        known = daemon.data_dir / "cluster.json"
        known.write_text(known.read_text().replace("c-", "c-0"))
    assert daemon.spawn().wait(20) == 1
    said = daemon.log_tail(3)
    assert "has lost its log" in said
    assert "--abandon-state" in said
    assert is_alive(pid)
    if loss == "of another cluster":
        known.write_text(known.read_text().replace("c-0", "c-"))
    else:
        log.write_bytes(kept)
    daemon.start()
    assert daemon.wait_ready(job) == endpoints
    assert daemon.replica(job)["pid"] == pid


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_callers_umask_opens_and_closes_nothing(make_daemon: DaemonMaker, tmp_path: Path, umask: int) -> None:
    daemon = make_daemon()
    above = tmp_path / "made"
    daemon.place(above / "on the way" / "data")
    before = os.umask(umask)
    try:
        daemon.spawn()
    finally:
        os.umask(before)
    wait_for(lambda: daemon.is_ready() or not daemon.is_running, 20)
    assert daemon.is_running, daemon.log_tail()
    assert daemon.wait_ended(daemon.batch(["true"]))["state"] == "succeeded"
    places = [above, *above.rglob("*")]
    open_ones = [str(place) for place in places if place.lstat().st_mode & 0o077 and "work" not in place.parts]
    assert not open_ones
