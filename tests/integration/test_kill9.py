"""Killed at any moment: no acknowledged job is lost, none runs twice, and the host is as the log says (P1, P7, P8).

The moments are random, from a seed that is printed. `GPULAYER_KILLS=200` for as many as the promise was made with.
"""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from random import Random, SystemRandom

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import ENDED, Answered, Daemon, describe, wait_for
from tests.integration.programs import serve, sh

# What fits into a minute; `GPULAYER_KILLS` for more.
KILLS = int(os.environ.get("GPULAYER_KILLS", "25"))
KILLS_OF_SHIMS = min(50, max(KILLS, 25))
LIVE_JOBS_MAX = 10


@pytest.fixture
def rng() -> Random:
    seed = int(os.environ.get("GPULAYER_TEST_SEED") or SystemRandom().randrange(2**32))
    print(f"\nGPULAYER_TEST_SEED={seed} GPULAYER_KILLS={KILLS} python -m pytest tests/integration/test_kill9.py")
    return Random(seed)


class Customer(threading.Thread):
    """Submits and cancels all the time, and remembers what was acknowledged; asks again until it is."""

    def __init__(self, daemon: Daemon, rng: Random) -> None:
        super().__init__()
        self._daemon = daemon
        self._rng = rng
        self._done = threading.Event()
        self.jobs: dict[str, str] = {}
        """Key -> id, acknowledged."""
        self.live: list[str] = []
        self.cancelled: list[str] = []
        self.problems: list[str] = []

    def run(self) -> None:
        number = 0
        while not self._done.is_set():
            number += 1
            if len(self.live) >= LIVE_JOBS_MAX or (self.live and self._rng.random() < 0.4):
                self._cancel(self._rng.choice(self.live))
            else:
                self._submit(f"key-{number}")

    def finish(self) -> None:
        self._done.set()
        self.join(90)
        assert not self.is_alive()
        assert not self.problems, self.problems

    def _submit(self, key: str) -> None:
        command = self._rng.choice([serve(), sh("sleep 1000"), sh("setsid sleep 1000 & sleep 1000")])
        body = {"kind": "service", "command": command, "port": command == serve(), "stop_grace_seconds": 0.5}
        answer = self._ask("POST", "/v1/jobs", body, headers={"Idempotency-Key": key})
        if answer is not None:
            self.jobs[key] = answer["id"]
            self.live.append(answer["id"])

    def _cancel(self, job: str) -> None:
        if self._ask("POST", f"/v1/jobs/{job}/cancel", {}) is not None:
            self.live.remove(job)
            self.cancelled.append(job)

    def _ask(
        self, method: str, path: str, body: object, headers: dict[str, str] | None = None
    ) -> dict[str, str] | None:
        """Until it is answered: one that is killed before it has started answers nobody."""
        asked_of_the_last_one = 0
        while asked_of_the_last_one < 3000:
            asked_of_the_last_one += self._done.is_set()
            try:
                return dict(self._daemon.call(method, path, body, headers=headers, timeout=10))
            except Answered as error:
                if error.status == 409 and "cancel" in path:
                    return {}  # the one before was heard
                if error.status != 503:
                    self.problems.append(f"{method} {path}: {error}")
                    return None
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.01)
        self.problems.append(f"{method} {path}: not answered by a daemon that nobody killed")
        return None


def assert_in_order(daemon: Daemon, live: list[str]) -> None:
    """What runs on the host is what should: the audit's word, and our own."""
    for job in live:
        daemon.wait_replica(job, lambda replica: replica["state"] == "ready", seconds=60)
    wait_for(lambda: not daemon.differences(), 10, daemon.differences)
    pids = {daemon.replica(job)["pid"] for job in live}
    assert None not in pids
    assert len(pids) == len(live)
    assert len(daemon.shims_on_host()) == len(live), describe(daemon.shims_on_host())
    runs = daemon.runs_on_host()
    assert pids <= runs
    sandboxes = {daemon.replica(job)["sandbox"] for job in live}
    for pid in runs:
        assert any(f"GPULAYER_SANDBOX={each}" in environ(pid) for each in sandboxes), describe([pid])


def environ(pid: int) -> str:
    with open(f"/proc/{pid}/environ", errors="replace") as file:
        return file.read()


def test_a_daemon_killed_at_random_moments_loses_nothing_that_it_acknowledged(
    make_daemon: DaemonMaker, rng: Random
) -> None:
    daemon = make_daemon(config="[storage]\nsnapshot_every = 20\n").start()
    customer = Customer(daemon, Random(rng.random()))
    customer.start()
    try:
        for number in range(3 * KILLS):
            # On a slow machine most die before they took anything.
            if number >= KILLS and len(customer.jobs) > KILLS / 2:
                break
            # From the middle of its start to a second of work.
            time.sleep(rng.uniform(0.1, 1.8))
            daemon.kill9()
            daemon.spawn()
        wait_for(daemon.is_ready, 30, daemon.log_tail)
    finally:
        customer.finish()
    ids, cursor = [], ""
    while True:
        page = daemon.call("GET", f"/v1/jobs?state=all&limit=1000{cursor}")
        ids += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert len(customer.jobs) > KILLS / 2, "too little happened to show anything"
    assert sorted(ids) == sorted(customer.jobs.values()), "each acknowledged job once, and no other"
    for job in customer.cancelled:
        assert daemon.wait_ended(job, 60)["state"] == "cancelled"
    assert_in_order(daemon, customer.live)
    for job in customer.live:
        assert daemon.replica(job)["restarts"] == 0, "the daemon's death is no reason to restart a run"
    print(f"{len(ids)} jobs, {len(customer.cancelled)} cancelled, {KILLS} kills")


def test_shims_killed_at_random_moments_leave_nothing_behind(daemon: Daemon, rng: Random) -> None:
    jobs = []
    for number in range(KILLS_OF_SHIMS):
        job = daemon.submit(sh("setsid sleep 1000 & sleep 1000 & wait"), port=False, stop_grace_seconds=0.5)
        jobs.append(job)
        time.sleep(rng.uniform(0.0, 0.12))
        for shim in daemon.shims_on_host():
            try:
                os.kill(shim, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if number % 10 == 9:
            daemon.restart9()
        if len(jobs) > 4:
            daemon.cancel(jobs.pop(0))
    live = jobs[-2:]
    for job in jobs[:-2]:
        daemon.cancel(job)
    assert_in_order(daemon, live)
    for job in live:
        daemon.cancel(job)
    wait_for(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], 30)
    assert not daemon.all_on_host()
    assert daemon.differences() == []


def test_a_cancel_at_any_moment_of_a_start_leaves_nothing(daemon: Daemon, rng: Random) -> None:
    jobs = []
    for _ in range(50):
        job = daemon.submit(serve(), stop_grace_seconds=1)
        time.sleep(rng.uniform(0.0, 0.1))
        daemon.cancel(job)
        jobs.append(job)
    for job in jobs:
        assert daemon.wait_ended(job)["state"] == "cancelled"
    assert not daemon.all_on_host()
    assert daemon.differences() == []
    assert {daemon.job(job)["state"] for job in jobs} <= set(ENDED)
