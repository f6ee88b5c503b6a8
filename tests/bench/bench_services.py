"""What one host costs and how fast it is: `python -m tests.bench.bench_services [--only NAME] [--quick]`.

A replica says itself when it was executed: it is a shell whose first act is `date +%s%N`. What that takes by itself is
among the yardsticks and is not subtracted. Each row has the number of measurements and their spread.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.daemon import Daemon, children, read, wait_for
from tests.integration.programs import serve

STAMPED = 'date +%s%N >> "$OUT.$GPULAYER_REPLICA"; exec "$@"'
FIRST_BACKOFF_MS = 1000.0
REPLICAS = 100
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    what: str
    unit: str
    values: list[float]
    to_reach: str = ""

    def __str__(self) -> str:
        ordered = sorted(self.values)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return (
            f"{self.what:62} n={len(ordered):<4} p50 {statistics.median(ordered):8.2f}  p99 {p99:8.2f}  "
            f"min {ordered[0]:8.2f}  max {ordered[-1]:8.2f} {self.unit:4} {self.to_reach}"
        )


@dataclass(frozen=True)
class Effort:
    """How often. `--quick` for a look, else for a number."""

    submits: int
    commands: int
    kills: int
    replicas: int
    idle_seconds: float
    restarts: int


FULL = Effort(submits=200, commands=30, kills=30, replicas=REPLICAS, idle_seconds=20, restarts=5)
QUICK = Effort(submits=30, commands=5, kills=5, replicas=20, idle_seconds=3, restarts=2)


def stamped(*command: str) -> list[str]:
    return ["/bin/sh", "-c", STAMPED, "sh", *command]


def stamps(out: Path, replica: int = 0) -> list[int]:
    """When each run was executed, in ns of wall-clock time."""
    path = Path(f"{out}.{replica}")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@contextmanager
def running() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as home:
        daemon = Daemon(Path(home) / "n1").start()
        try:
            yield daemon
        finally:
            try:
                daemon.end()
            except AssertionError as problem:
                print(f"not in order at the end: {problem}", file=sys.stderr)


def measure(count: int, act: Callable[[int], float]) -> list[float]:
    return [act(number) for number in range(count)]


# --- yardsticks -------------------------------------------------------------------------------------------------


def yardsticks(effort: Effort) -> list[Row]:
    count = effort.commands

    def python_pass(_: int) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        return (time.perf_counter() - begun) * 1e3

    def spawn(_: int) -> float:
        begun = time.perf_counter()
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        elapsed = (time.perf_counter() - begun) * 1e3
        os.waitpid(pid, 0)
        return elapsed

    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as home:
        out = Path(home) / "out"
        fd = os.open(Path(home) / "file", os.O_WRONLY | os.O_CREAT)

        def fsync(_: int) -> float:
            os.write(fd, b"x" * 4096)
            begun = time.perf_counter()
            os.fsync(fd)
            return (time.perf_counter() - begun) * 1e3

        def spawn_date(_: int) -> float:
            begun = time.time_ns()
            subprocess.run(stamped("true"), env={**os.environ, "OUT": str(out), "GPULAYER_REPLICA": "0"}, check=True)
            return (stamps(out)[-1] - begun) / 1e6

        return [
            Row("yardstick: python -c pass", "ms", measure(count, python_pass)),
            Row("yardstick: posix_spawn", "ms", measure(count, spawn)),
            Row("yardstick: write 4 KiB, fsync", "ms", measure(count, fsync)),
            Row("yardstick: sh -c date, to its stamp", "ms", measure(count, spawn_date)),
        ]


# --- submit -----------------------------------------------------------------------------------------------------


def submit(effort: Effort) -> list[Row]:
    """From the request to the first act of the process; durable in between."""
    with running() as daemon:

        def through_the_api(number: int) -> float:
            out = daemon.home / f"api-{number}"
            begun = time.time_ns()
            job = daemon.batch(stamped("true"), env={"OUT": str(out)})
            wait_for(lambda: stamps(out))
            daemon.wait_ended(job)
            return (stamps(out)[0] - begun) / 1e6

        def typed(number: int) -> float:
            out = daemon.home / f"typed-{number}"
            begun = time.time_ns()
            done = daemon.cli("submit", "--detach", "--env", f"OUT={out}", "--", *stamped("true"))
            assert done.returncode == 0, done.stderr
            wait_for(lambda: stamps(out))
            return (stamps(out)[0] - begun) / 1e6

        through_the_api(-1)
        typed(-1)
        return [
            Row("API submit -> process is exec'd", "ms", measure(effort.submits, through_the_api), "(p50 30, p99 80)"),
            Row("gpulayer submit --detach typed -> exec'd", "ms", measure(effort.commands, typed), "(p50 200)"),
        ]


# --- restarts ---------------------------------------------------------------------------------------------------


def killed_one_by_one(effort: Effort) -> list[Row]:
    """Each replica is killed once, so that its backoff is the first one."""
    with running() as daemon:

        def kill_one(number: int) -> float:
            out = daemon.home / f"one-{number}"
            job = daemon.submit(stamped("sleep", "1000"), port=False, env={"OUT": str(out)})
            wait_for(lambda: stamps(out))
            elapsed = kill_and_wait(daemon.wait_replica(job, lambda replica: replica["pid"] is not None)["pid"], out, 0)
            daemon.cancel(job)
            daemon.wait_ended(job)
            return elapsed

        alone = measure(max(effort.kills // 2, 3), kill_one)
        out, job = many(daemon, effort.replicas)
        pids = [replica["pid"] for replica in daemon.job(job)["replicas"]]
        among = [kill_and_wait(pids[replica], out, replica) for replica in range(min(effort.kills, effort.replicas))]
        return [
            Row("killed -9 -> next exec, minus the backoff; 1 replica", "ms", alone, "(p50 12)"),
            Row(f"the same, among {effort.replicas} replicas", "ms", among, "(p50 12)"),
        ]


def kill_and_wait(pid: int, out: Path, replica: int) -> float:
    begun = time.time_ns()
    os.kill(pid, 9)
    wait_for(lambda: len(stamps(out, replica)) == 2)
    return (stamps(out, replica)[1] - begun) / 1e6 - FIRST_BACKOFF_MS


def killed_at_once(effort: Effort) -> list[Row]:
    values = []
    for _ in range(max(effort.restarts // 2, 1)):
        with running() as daemon:
            out, job = many(daemon, effort.replicas)
            pids = [replica["pid"] for replica in daemon.job(job)["replicas"]]
            begun = time.time_ns()
            for pid in pids:
                os.kill(pid, 9)
            wait_for(lambda out=out: all(len(stamps(out, n)) == 2 for n in range(effort.replicas)), 60)
            last = max(stamps(out, replica)[1] for replica in range(effort.replicas))
            values.append((last - begun) / 1e6 - FIRST_BACKOFF_MS)
    return [Row(f"{effort.replicas} replicas killed at once -> all exec'd again", "ms", values, "(400)")]


def many(daemon: Daemon, replicas: int, *, listens: bool = False) -> tuple[Path, str]:
    """A service of many replicas, all ready: servers, or (so that their own start takes no time) sleepers."""
    out = daemon.home / "many"
    command = stamped(*serve()) if listens else stamped("sleep", "1000")
    job = daemon.submit(command, replicas=replicas, spread="any", port=listens, env={"OUT": str(out)})
    daemon.wait_ready(job, 120)
    return out, job


# --- standing still -----------------------------------------------------------------------------------------------


def idle(effort: Effort) -> list[Row]:
    """Daemon and spawner, and the shims, with many replicas that do nothing."""
    with running() as daemon:
        many(daemon, effort.replicas, listens=True)
        time.sleep(3)  # what a start leaves to do: checkpoints, first checks
        ours = [daemon.pid, *spawners(daemon)]
        shims = sorted(daemon.shims_on_host())
        before, begun = cpu_seconds(ours), time.monotonic()
        shims_before = cpu_seconds(shims)
        time.sleep(effort.idle_seconds)
        elapsed = time.monotonic() - begun
        with_replicas = f"with {effort.replicas} replicas"
        return [
            Row(f"idle, {with_replicas}: PSS of daemon and spawner", "MiB", [sum(map(pss_mib, ours))], "(75)"),
            Row("  of these the spawner", "MiB", [sum(map(pss_mib, spawners(daemon)))]),
            Row("  PSS of a shim", "MiB", [pss_mib(pid) for pid in shims], "(5)"),
            Row("  CPU of daemon and spawner", "%", [(cpu_seconds(ours) - before) / elapsed * 100], "(0.5)"),
            Row("  CPU of all shims", "%", [(cpu_seconds(shims) - shims_before) / elapsed * 100]),
        ]


def spawners(daemon: Daemon) -> list[int]:
    return [pid for pid in children(daemon.pid) if b"gpulayer/shim/" in read(f"/proc/{pid}/cmdline")]


def pss_mib(pid: int) -> float:
    for line in read(f"/proc/{pid}/smaps_rollup").decode().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_seconds(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        stat = read(f"/proc/{pid}/stat").decode()
        fields = stat[stat.rindex(")") + 2 :].split()
        total += (int(fields[11]) + int(fields[12])) * TICK_SECONDS
    return total


# --- the daemon comes back ------------------------------------------------------------------------------------------


def adopted(effort: Effort) -> list[Row]:
    with running() as daemon:
        _, job = many(daemon, effort.replicas, listens=True)
        pids = [replica["pid"] for replica in daemon.job(job)["replicas"]]

        def come_back(_: int) -> float:
            daemon.kill9()
            begun = time.perf_counter()
            daemon.spawn()
            wait_for(daemon.is_ready, 30)
            wait_for(lambda: len(daemon.call("GET", f"/v1/jobs/{job}/endpoints")) == effort.replicas, 30)
            elapsed = (time.perf_counter() - begun) * 1e3
            assert [replica["pid"] for replica in daemon.job(job)["replicas"]] == pids, "a pid changed"
            return elapsed

        return [
            Row(
                f"daemon killed -9, started -> {effort.replicas} adopted and listed",
                "ms",
                measure(effort.restarts, come_back),
                "(1500)",
            )
        ]


PARTS: dict[str, Callable[[Effort], list[Row]]] = {
    "yardsticks": yardsticks,
    "submit": submit,
    "killed": killed_one_by_one,
    "killed_at_once": killed_at_once,
    "idle": idle,
    "adopted": adopted,
}


def machine() -> str:
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")  # noqa: SIM115
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}, load {load:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(machine(), flush=True)
    for name in options.only or PARTS:
        for row in PARTS[name](QUICK if options.quick else FULL):
            print(row, flush=True)


if __name__ == "__main__":
    main()
