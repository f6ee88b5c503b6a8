"""Asks a job of serve.py without pause, as many clients would, and counts what becomes of it.

    python ask.py embed --seconds 30

Each request goes to the next endpoint; where one fails, the same request goes to another. One that nobody has answered
within 10 s is lost. Exit code 0 if every request was answered, else 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter

import gpulayer as gl

TEXTS = ["How do I reset my password?", "The parcel has not arrived.", "Where is my invoice?"]
CLIENTS = 4
LOST_AFTER_SECONDS = 10.0
# One request takes some 30 ms; this is for a replica that hangs.
ANSWER_SECONDS_MAX = 5.0
REPORT_SECONDS = 5.0


class Failed(Exception):
    """One endpoint did not answer, or not well."""


class Load:
    """What the clients share: whom to ask, and what came of it."""

    def __init__(self, job: gl.Job) -> None:
        self.begun = time.monotonic()
        self.answered: Counter[int] = Counter()
        """By replica."""
        self.asked_again = 0
        self.lost = 0
        self.slowest_seconds = 0.0
        self._job = job
        self._endpoints = job.endpoints()
        self._turn = 0
        self._told: set[tuple[str | None, str]] = set()
        self._lock = threading.Lock()

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.begun:5.1f} s  {text}", flush=True)

    def follow_endpoints(self) -> None:
        """Every restart gives a replica a new port: gpulayer tells as it happens."""
        try:
            for listed in self._job.watch_endpoints():
                endpoints = [entry["endpoint"] for entry in listed]
                if endpoints != self._endpoints:
                    self._endpoints = endpoints
                    self.tell(f"endpoints: {' '.join(endpoints) or 'none'}")
        except gl.GpulayerError as error:
            self.tell(f"endpoints are not known any more: {error.message}")

    def choose(self, failed: set[str]) -> str | None:
        """The next endpoint, one that has not failed if there is such; None where there is none at all."""
        with self._lock:
            self._turn += 1
            endpoints = self._endpoints
            rest = [endpoint for endpoint in endpoints if endpoint not in failed] or endpoints
            return rest[self._turn % len(rest)] if rest else None

    def request(self, text: str) -> None:
        """One request, until somebody has answered it or it is lost."""
        begun = time.monotonic()
        failed: set[str] = set()
        while True:
            endpoint = self.choose(failed)
            try:
                if endpoint is None:
                    raise Failed("there is no endpoint")
                replica = embed(endpoint, text)
            except Failed as failure:
                is_lost = time.monotonic() - begun > LOST_AFTER_SECONDS
                with self._lock:
                    self.lost += is_lost
                    self.asked_again += not is_lost
                self._tell_once(endpoint, str(failure))
                if is_lost:
                    return
                if endpoint is None or endpoint in failed:
                    time.sleep(0.1)
                failed.add(endpoint or "")
            else:
                with self._lock:
                    self.answered[replica] += 1
                    self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - begun)
                return

    def _tell_once(self, endpoint: str | None, failure: str) -> None:
        if (endpoint, failure) not in self._told:
            self._told.add((endpoint, failure))
            self.tell(f"{endpoint} failed: {failure}")

    def report(self) -> None:
        each = ", ".join(f"replica {replica}: {count}" for replica, count in sorted(self.answered.items()))
        self.tell(
            f"answered {self.answered.total()} ({each}), asked again {self.asked_again}, lost {self.lost};"
            f" slowest {self.slowest_seconds:.2f} s"
        )


def embed(endpoint: str, text: str) -> int:
    """The replica that answered. Raises Failed."""
    connection = http.client.HTTPConnection(endpoint, timeout=ANSWER_SECONDS_MAX)
    try:
        connection.request("POST", "/embed", json.dumps({"texts": [text]}))
        answer = connection.getresponse()
        document = json.loads(answer.read())
        if answer.status != 200:
            raise Failed(f"{answer.status} {document['error']}")
        return int(document["replica"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="name or id of the job")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long (30)")
    options = parser.parse_args()
    try:
        load = Load(gl.connect().job(options.job))
    except gl.GpulayerError as error:
        print(f"{error.message}\nhint: {error.hint}", file=sys.stderr)
        return 1

    end = load.begun + options.seconds

    def client(first: int) -> None:
        turn = first
        while time.monotonic() < end:
            load.request(TEXTS[turn % len(TEXTS)])
            turn += 1

    threading.Thread(target=load.follow_endpoints, daemon=True).start()
    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        while time.monotonic() + REPORT_SECONDS < end:
            time.sleep(REPORT_SECONDS)
            load.report()
        for thread in clients:
            thread.join()
    except KeyboardInterrupt:
        pass
    load.report()
    return 0 if load.answered and not load.lost else 1


if __name__ == "__main__":
    sys.exit(main())
