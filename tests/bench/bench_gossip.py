"""Who is alive, told how fast and at what cost: gpulayer beside Serf and kinship, in the same run, on real sockets.

    python -m tests.bench.bench_gossip [what …] --nodes 16 --kills 30 --kinship-python PATH

What: together (all started at once until all see all), idle (bytes and processor of a node of which nothing is asked),
kill9 (of a daemon; its host stays up), poweroff (of a host), heal (a cluster cut in half), stopped (a node that stands
still for 2.5 s), loss (25 % and 40 % for a minute), burners (four busy processes on all nodes' processors), record (a
replica's change, told to all; of gpulayer alone). All of them where none is named. The last but one row of each system
counts deaths that were said of nodes that lived.

Needs root, iproute2, nftables; `serf` (Debian's package) and a Python that has kinship, where these are asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.bench.fleet import Fleet, Gpulayer, Kinship, Serf, System
from tests.hosts.network import Host, Lan, missing

WHAT = ("together", "idle", "kill9", "poweroff", "heal", "stopped", "loss", "burners", "record")
STOP_SECONDS = 2.5
LOSS_SECONDS = 60.0
BURN_SECONDS = 60.0
CUT_SECONDS = 30.0
SERVER = (
    "import http.server as h, os\n"
    "h.ThreadingHTTPServer(('', int(os.environ['PORT'])), h.SimpleHTTPRequestHandler).serve_forever()"
)
# After a trouble: what it set in motion has come to its end.
SETTLE_SECONDS = 15.0


def told(values: list[float], unit: str = "s") -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    median, least, most = statistics.median(ordered), ordered[0], ordered[-1]
    return f"p50 {median:.3f}  p99 {p99:.3f}  min {least:.3f}  max {most:.3f} {unit}  n {len(ordered)}"


def say(words: str) -> None:
    print(f"  {words}  [load {os.getloadavg()[0]:.1f}]", flush=True)


class Measured:
    """One system, up, and what is done to it. Each method is a row, or some."""

    def __init__(self, system: System, lan: Lan, options: argparse.Namespace) -> None:
        self._system = system
        self._lan = lan
        self._hosts = lan.hosts
        self._options = options
        self._chosen = random.Random(options.seed)
        self._others = len(lan.hosts) - 1
        self.fleet = Fleet(system, self._hosts)

    def start(self) -> None:
        for host in self._hosts:
            self.fleet.start(host)

    def stop(self) -> None:
        self.fleet.stop()

    def _victim(self) -> Host:
        # Not the first: of gpulayer it holds the log, and is as good as any for this.
        return self._chosen.choice(self._hosts[1:])

    def until_all_see_all(self, begun: float) -> float | None:
        """Seconds from the last READY until every node has called every other alive; None if that was too long."""
        names = {f"n{host.number}" for host in self._hosts}

        def is_so() -> bool:
            known: dict[int, set[str]] = {host.number: {f"n{host.number}"} for host in self._hosts}
            for when, observer, seen in list(self.fleet.seen):
                if when >= begun and seen.kind == "alive":
                    known[observer].add(seen.subject)
            return all(names <= each for each in known.values())

        if not self.fleet.wait(is_so, 120):
            return None
        said = [when for when, _, seen in self.fleet.seen if when >= begun and seen.kind == "alive"]
        ready = [when for when, _, seen in self.fleet.seen if when >= begun and seen.kind == "ready"]
        return max(0.0, max(said) - max(ready))

    def together(self) -> None:
        took: list[float] = []
        late = 0
        for turn in range(self._options.starts):
            if turn:
                self.fleet.stop()
                self.fleet = Fleet(self._system, self._hosts)
            begun = time.monotonic()
            self.start()
            seconds = self.until_all_see_all(begun)
            late += seconds is None
            took += [] if seconds is None else [seconds]
        say(f"all started together -> all see all, from the last READY: {told(took)}; not within 120 s: {late}")

    def idle(self) -> None:
        time.sleep(5)
        sent, cpu, at = self.fleet.sent_bytes(), self.fleet.cpu_seconds(), time.monotonic()
        time.sleep(self._options.idle)
        seconds = time.monotonic() - at
        each = (self.fleet.sent_bytes() - sent) / seconds / len(self._hosts)
        used = (self.fleet.cpu_seconds() - cpu) / seconds / len(self._hosts) * 100
        say(f"idle for {seconds:.0f} s: {each / 1000:.2f} KB/s sent a node (with headers), {used:.2f} % of a core")

    def kill9(self) -> None:
        self._deaths("kill -9", self.fleet.kill9)

    def poweroff(self) -> None:
        self._deaths("power-off", self.fleet.power_off)

    def _deaths(self, how: str, end: Callable[[Host], float]) -> None:
        deaths: list[float] = []
        suspicions: list[float] = []
        causes: dict[str, int] = {}
        missed = 0
        for _ in range(self._options.kills):
            victim = self._victim()
            name = f"n{victim.number}"
            at = end(victim)
            if not self.fleet.wait(lambda: len(self.fleet.since(at, "dead", name)) >= self._others, 60):  # noqa: B023
                missed += self._others - len(self.fleet.since(at, "dead", name))
            deaths += self.fleet.since(at, "dead", name).values()
            first = self.fleet.since(at, "suspect", name)
            if first:
                suspicions.append(min(first.values()))
            for when, _, seen in self.fleet.seen:
                if when >= at and seen.kind == "dead" and seen.subject == name:
                    causes[seen.detail] = causes.get(seen.detail, 0) + 1
            if not victim.is_on:
                victim.power_on()
            again = time.monotonic()
            self.fleet.start(victim)
            self.fleet.wait(lambda: len(self.fleet.since(again, "alive", name)) >= self._others, 90)  # noqa: B023
            time.sleep(self._chosen.uniform(1.0, 2.0))
        say(f"{how}: first suspicion: {told(suspicions)}")
        say(f"{how}: dead at each other node: {told(deaths)}; causes {causes}; never said {missed}")

    def heal(self) -> None:
        """Both halves hold the other dead; then the cut is mended."""
        took: list[float] = []
        for _ in range(self._options.cuts):
            half = len(self._hosts) // 2
            self._lan.cut(self._hosts[:half], self._hosts[half:])
            time.sleep(CUT_SECONDS)
            healed = time.monotonic()
            self._lan.heal()
            sides = [{f"n{host.number}" for host in side} for side in (self._hosts[:half], self._hosts[half:])]

            def is_one(healed: float = healed, sides: list[set[str]] = sides) -> bool:
                known: dict[int, set[str]] = {host.number: set() for host in self._hosts}
                for when, observer, seen in list(self.fleet.seen):
                    if when >= healed and seen.kind == "alive":
                        known[observer].add(seen.subject)
                return all(sides[f"n{number}" in sides[0]] <= seen for number, seen in known.items())

            if self.fleet.wait(is_one, 120):
                took.append(max(when for when, _, seen in self.fleet.seen if seen.kind == "alive") - healed)
            time.sleep(2.0)
        say(f"cut in half for {CUT_SECONDS:g} s -> one view after it is mended: {told(took)} of {self._options.cuts}")

    def _false_deaths(self, what: str, trouble: Callable[[], None]) -> None:
        begun = time.monotonic()
        trouble()
        time.sleep(SETTLE_SECONDS)
        now = time.monotonic()
        dead = {seen.subject for at, _, seen in list(self.fleet.seen) if begun <= at and seen.kind == "dead"}
        said, suspected = self.fleet.said("dead", begun, now), self.fleet.said("suspect", begun, now)
        say(f"{what}: called dead though alive: {len(dead)} nodes, said {said} times; suspicions said {suspected}")

    def stopped(self) -> None:
        def stop_some() -> None:
            for _ in range(self._options.stops):
                process = self.fleet.processes[self._victim().number]
                process.send_signal(signal.SIGSTOP)
                time.sleep(STOP_SECONDS)
                process.send_signal(signal.SIGCONT)
                time.sleep(2.0)

        self._false_deaths(f"{self._options.stops} times one node stands still for {STOP_SECONDS} s", stop_some)

    def loss(self) -> None:
        for percent in (25, 40):

            def lose(percent: int = percent) -> None:
                for host in self._hosts:
                    host.lose(percent)
                time.sleep(LOSS_SECONDS)
                self._lan.heal()

            self._false_deaths(f"{percent} % loss for {LOSS_SECONDS:g} s", lose)

    def burners(self) -> None:
        def burn() -> None:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
            try:
                time.sleep(BURN_SECONDS)
            finally:
                for process in busy:
                    process.kill()
                    process.wait(10)

        self._false_deaths(f"4 busy processes on {os.cpu_count()} processors for {BURN_SECONDS:g} s", burn)

    def record(self) -> None:
        """One of two replicas is killed again and again: its node's record says that it does not serve, and later that
        it does. One that watches the endpoints at each node notes when that node's table shows it."""
        if not isinstance(self._system, Gpulayer):
            return
        first = self._hosts[0]
        server = (sys.executable, "-c", SERVER)
        words = (
            "submit",
            "--service",
            "--name",
            "bench",
            "--json",
            "--replicas",
            "2",
            "--restart",
            "always",
            "--detach",
        )
        job = json.loads(self._system.cli(first, *words, "--", *server))["id"]
        seen: list[tuple[float, int, int]] = []
        watchers = [self._watch(host, job, seen) for host in self._hosts]
        try:
            self.fleet.wait(
                lambda: {number for _, number, up in seen if up == 2} == set(range(1, self._others + 2)), 60
            )
            at_leader, everywhere, missed = [], [], 0
            for _ in range(self._options.changes):
                replicas = json.loads(self._system.cli(first, "job", "status", job, "--json"))["replicas"]
                replica = next(each for each in replicas if each["node"] != f"n{first.number}")
                owner = next(host for host in self._hosts if f"n{host.number}" == replica["node"])
                for up in (1, 2):
                    at = time.monotonic()
                    if up == 1:
                        os.kill(replica["pid"], signal.SIGKILL)

                    def told_by(at: float = at, up: int = up) -> dict[int, float]:
                        found: dict[int, float] = {}
                        for when, number, is_up in list(seen):
                            if when >= at and is_up == up:
                                found.setdefault(number, when)
                        return found

                    self.fleet.wait(lambda told_by=told_by: len(told_by()) > self._others, 60)
                    times = told_by()
                    missed += self._others + 1 - len(times)
                    zero = times.get(owner.number)
                    if zero is None:
                        continue
                    everywhere += [when - zero for number, when in times.items() if number != owner.number]
                    if first.number in times:
                        at_leader.append(times[first.number] - zero)
                time.sleep(1.0)
        finally:
            for watcher in watchers:
                watcher.kill()
                watcher.wait(10)
            with suppress(SystemExit):
                self._system.cli(first, "job", "cancel", job)
        say(f"a replica's change, from its own node's table: at who leads: {told(at_leader)}")
        say(f"a replica's change, from its own node's table: at each other node: {told(everywhere)}; missed {missed}")

    def _watch(self, host: Host, job: str, seen: list[tuple[float, int, int]]) -> subprocess.Popen[bytes]:
        path = self._system.directory / f"n{host.number}" / "gpulayer.sock"
        url = f"http://localhost/v1/jobs/{job}/endpoints?watch=true"
        words = ["curl", "-sN", "--retry", "5", "--retry-all-errors", "--unix-socket", str(path), url]
        watcher = subprocess.Popen(words, stdout=subprocess.PIPE)

        def read() -> None:
            assert watcher.stdout is not None
            for line in watcher.stdout:
                if line.startswith(b"["):
                    seen.append((time.monotonic(), host.number, line.count(b'"endpoint"')))

        threading.Thread(target=read, daemon=True).start()
        return watcher


def measure(system: System, lan: Lan, options: argparse.Namespace) -> None:
    system.prepare(lan.hosts)
    measured = Measured(system, lan, options)
    what = options.what or WHAT
    try:
        if "together" not in what:
            begun = time.monotonic()
            measured.start()
            measured.until_all_see_all(begun)
        for name in what:
            getattr(measured, name)()
    finally:
        measured.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*WHAT, []])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument(
        "--share-of-others", type=float, default=1.0, help="of the kills, starts, cuts and stops: for serf, kinship"
    )
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--idle", type=float, default=60.0)
    parser.add_argument("--systems", default="gpulayer,serf,kinship")
    parser.add_argument("--kinship-python", default="")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    print(f"{options.nodes} nodes; {os.cpu_count()} processors; {os.uname().release}; load {os.getloadavg()[0]:.1f}")
    Kinship.python = options.kinship_python
    for kind in (Gpulayer, Serf, Kinship):
        if kind.name not in options.systems.split(","):
            continue
        if kind is Serf and shutil.which("serf") is None:
            print("serf: not here")
            continue
        if kind is Kinship and not Kinship.python:
            print("kinship: name a Python that has it with --kinship-python")
            continue
        share = 1.0 if kind is Gpulayer else options.share_of_others
        times = {name: max(1, round(getattr(options, name) * share)) for name in ("kills", "starts", "cuts", "stops")}
        print(kind.name)
        directory = Path(tempfile.mkdtemp(prefix="gpulayer-bench-"))
        try:
            with Lan(options.nodes) as lan:
                measure(kind(directory), lan, argparse.Namespace(**{**vars(options), **times}))
        finally:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
