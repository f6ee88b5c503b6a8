"""What watching eight GPUs costs, and how soon a fault is told: `python -m tests.bench.bench_devices [--quick]`.

The GPUs are those of tests/fakes/nvml.py, behind the product's own path. What NVIDIA's driver itself takes for an
answer is not in these numbers.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.bench_services import Row
from tests.fakes.nvml import FakeNvml
from tests.integration.daemon import Daemon, children, read, wait_for

GPUS = 8
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of all threads."""
    fields = [read(f"/proc/{pid}/stat").rsplit(b")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) * TICK_SECONDS


def polling(daemon: Daemon, seconds: float) -> float:
    """Percent of a core."""
    child = [pid for pid in children(daemon.pid) if b"nvml_child" in read(f"/proc/{pid}/cmdline")]
    pids = [daemon.pid, *child]
    before, at = cpu_seconds(pids), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pids) - before) / (time.monotonic() - at)


def fault(daemon: Daemon, nvml: FakeNvml, index: int) -> float:
    """Seconds from the fault to its word in `GET /v1/nodes`."""

    def is_unhealthy() -> bool:
        return bool(daemon.call("GET", "/v1/nodes")[0]["devices"][index]["unhealthy"])

    wait_for(lambda: not is_unhealthy(), 20)
    at = time.monotonic()
    nvml.fault(index, "lost")
    wait_for(is_unhealthy, 10)
    took = time.monotonic() - at
    nvml.well(index)
    return took


def hang(daemon: Daemon, nvml: FakeNvml) -> float:
    def is_told() -> bool:
        return bool(daemon.call("GET", "/v1/nodes")[0]["gpu_detect"] == "error")

    wait_for(lambda: not is_told(), 60)
    at = time.monotonic()
    nvml.hang("nvmlDeviceGetMemoryInfo")
    wait_for(is_told, 10)
    took = time.monotonic() - at
    nvml.relent()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    print(f"{platform.platform()}, Python {platform.python_version()}, {sys.executable}")
    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as home:
        bare = Daemon(Path(home) / "n0").start()
        nvml = FakeNvml(Path(home), gpus=GPUS)
        watched = Daemon(Path(home) / "n1", env=nvml.env()).start()
        try:
            time.sleep(3)
            rounds, seconds = (2, 5.0) if quick else (5, 20.0)
            idle = [polling(bare, seconds) for _ in range(rounds)]
            print(Row(f"yardstick: idle daemon without GPUs, {seconds:g} s each", "%", idle))
            busy = [polling(watched, seconds) for _ in range(rounds)]
            print(Row(f"daemon and child, {GPUS} GPUs once a second", "%", busy, "<= 1 % of a core"))
            jobs = [watched.submit(["sleep", "1000"], port=False, gpus=1, spread="any") for _ in range(GPUS)]
            for job in jobs:
                watched.wait_ready(job)
            pids = [watched.replica(job)["pid"] for job in jobs]
            faults = [fault(watched, nvml, number % GPUS) for number in range(3 if quick else 20)]
            print(Row("a GPU is lost -> unhealthy in status", "s", faults, "<= 5 s"))
            hangs = [hang(watched, nvml) for _ in range(1 if quick else 5)]
            print(Row("the driver hangs -> told in status", "s", hangs, "<= 5 s"))
            touched = sum(pid != watched.replica(job)["pid"] for pid, job in zip(pids, jobs, strict=True))
            print(f"replicas on the {GPUS} GPUs whose pid changed meanwhile: {touched}")
            print(f"median of polling above idle: {statistics.median(busy) - statistics.median(idle):.2f} %")
        finally:
            for daemon in (bare, watched):
                daemon.end()
            nvml.remove_locks()


if __name__ == "__main__":
    main()
