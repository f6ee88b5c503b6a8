"""How late a daemon's loop is while its status is asked for again and again: python -m tests.bench.bench_storm.

Three daemons on loopback, joined; one that does not hold the log is asked GET /v1/status at a fixed rate over
a few kept connections by another process. Printed: what was answered, how long an answer took, and the lateness of the
asked daemon's loop in the last minute, as its own /metrics tell it; first with nothing asked, in the same run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

READY_SECONDS = 60.0
# What the daemon's own quantiles look back on.
LOOKED_AT_SECONDS = 60.0


class OverSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def asked(path: Path, what: str, body: object = None) -> bytes:
    connection = OverSocket(path)
    try:
        method = "GET" if body is None else "POST"
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, what, body=None if body is None else json.dumps(body), headers=headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def ready(path: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            if asked(path, "/readyz") == b"ready\n":
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise SystemExit(f"the daemon at {path} does not become ready")


def lag(path: Path) -> str:
    text = asked(path, "/metrics").decode()
    found = re.findall(r'^gpulayer_loop_lag_seconds\{quantile="([\d.]+)"\} (\S+)', text, re.MULTILINE)
    return "  ".join(f"p{float(part) * 100:g} {float(value) * 1000:.1f} ms" for part, value in found)


def storm(path: Path, rate: float, seconds: float, connections: int) -> None:
    """In a process of its own: its work must not be the daemon's."""
    took: list[float] = []
    until = time.monotonic() + seconds

    def ask(number: int) -> None:
        connection = OverSocket(path)
        at = time.monotonic() + number / rate
        while at < until:
            time.sleep(max(0.0, at - time.monotonic()))
            began = time.monotonic()
            connection.request("GET", "/v1/status")
            connection.getresponse().read()
            took.append(time.monotonic() - began)
            at += connections / rate
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(connections)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    per_second = len(took) / (time.monotonic() - began)
    ordered = sorted(took)
    print(
        f"asked {rate:g} a second, answered {per_second:.0f}: p50 {statistics.median(ordered) * 1000:.1f} ms, "
        f"p99 {ordered[int(len(ordered) * 0.99)] * 1000:.1f} ms of {len(ordered)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--storm", type=Path, help="the asking process: this socket")
    options = parser.parse_args()
    if options.storm:
        storm(options.storm, options.rate, LOOKED_AT_SECONDS, options.connections)
        return
    print(f"{os.cpu_count()} processors; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as name:
        base = Path(name)
        running: list[subprocess.Popen[bytes]] = []
        try:
            for number in (1, 2, 3):
                data = base / f"n{number}"
                words = [sys.executable, "-m", "gpulayer", "up", "--data-dir", str(data), "--name", f"n{number}"]
                words += ["--api-port", "0", "--peer-port", "0"]
                if running:
                    token = {"uses": 1, "lasts_seconds": 600, "advertise": "127.0.0.1"}
                    made = json.loads(asked(base / "n1" / "gpulayer.sock", "/v1/join-tokens", token))
                    words += ["--join", made["seed"], "--token", made["token"]]
                running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                ready(data / "gpulayer.sock")
            path = base / "n3" / "gpulayer.sock"
            time.sleep(LOOKED_AT_SECONDS)
            print(f"nothing asked for a minute: loop lag {lag(path)}", flush=True)
            again = [sys.executable, "-m", "tests.bench.bench_storm", "--storm", str(path)]
            again += ["--rate", str(options.rate), "--connections", str(options.connections)]
            subprocess.run(again, check=True)
            print(f"while it was asked: loop lag {lag(path)}", flush=True)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(30)


if __name__ == "__main__":
    main()
