"""How much output one shim stores, beside how fast a plain pipe into a file is on the same machine in the same minute.

    python tests/bench/bench_log_throughput.py [--runs 7] [--mb 600] [--directory /var/tmp]

The run is `head -c N /dev/zero`; the yardstick `head -c N /dev/zero | cat > file`. Both go through one pipe into the
page cache. Also: how long a spawn of a shim and a start of a run take, from request to answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPAWNER = Path(__file__).parents[2] / "gpulayer" / "shim" / "__main__.py"


class Shim:
    def __init__(self, spawner: socket.socket, directory: Path, log: dict[str, int]) -> None:
        (directory / "work").mkdir(parents=True)
        self.cwd = str(directory / "work")
        (directory / "attempt.json").write_text(json.dumps({"format": 1, "log": log, "stop_grace_seconds": 1}))
        began = time.perf_counter()
        spawner.send(json.dumps({"op": "spawn", "dir": str(directory)}).encode())
        self.answer = json.loads(spawner.recv(65536))
        self.spawn_seconds = time.perf_counter() - began
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(directory / "shim.sock"))
        self.lines = self.socket.makefile("rb")
        self.runs = 0

    def ask(self, op: str, **fields: Any) -> Any:
        self.socket.sendall(json.dumps({"op": op, "id": 1, **fields}).encode() + b"\n")
        return json.loads(self.lines.readline())

    def start(self, *argv: str) -> Any:
        self.runs += 1
        answer = self.ask("start", run=self.runs, argv=argv, env={"PATH": os.environ["PATH"]}, cwd=self.cwd)
        assert answer["ok"], answer
        return answer

    def wait_until_gone(self) -> None:
        while json.loads(self.lines.readline()).get("event") != "gone":
            pass


def told(values: list[float], unit: str) -> str:
    spread = f"from {min(values):.1f} to {max(values):.1f}, {len(values)} runs"
    return f"median {statistics.median(values):.1f} {unit} ({spread})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--mb", type=int, default=600)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    options = parser.parse_args()
    size = options.mb * 1_000_000
    directory = Path(tempfile.mkdtemp(prefix="gpulayer-bench-", dir=options.directory))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-I", "-S", str(SPAWNER), "--fd", str(theirs.fileno())]
    spawner = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    shims = [Shim(ours, directory / f"s{index}", {"max_bytes": 64_000_000, "keep": 3}) for index in range(20)]
    shim = shims[0]
    stored, yardstick, starts = [], [], []
    try:
        for _ in range(options.runs):
            began = time.perf_counter()
            shim.start("head", "-c", str(size), "/dev/zero")
            shim.wait_until_gone()
            stored.append(size / (time.perf_counter() - began) / 1e6)
            began = time.perf_counter()
            subprocess.run(["/bin/sh", "-c", f"head -c {size} /dev/zero | cat > {directory}/yardstick"], check=True)
            yardstick.append(size / (time.perf_counter() - began) / 1e6)
            os.unlink(directory / "yardstick")
        for _ in range(50):
            began = time.perf_counter()
            shim.start("/bin/true")
            starts.append((time.perf_counter() - began) * 1000)
            shim.wait_until_gone()
        software = f"Linux {platform.release()}, Python {platform.python_version()}"
        print(f"machine: {platform.machine()}, {os.cpu_count()} CPUs, {software}")
        print(f"log: one shim, {options.mb} MB a run: {told(stored, 'MB/s')}")
        print(f"yardstick, head | cat > file, alternating with it: {told(yardstick, 'MB/s')}")
        print(f"ratio of the medians: {statistics.median(stored) / statistics.median(yardstick):.2f}")
        print(f"lost: {shim.ask('hello')['logs']}")
        print(f"spawn of a shim, request to answer: {told([each.spawn_seconds * 1000 for each in shims], 'ms')}")
        print(f"start of a run, request to answer (two fsyncs): {told(starts, 'ms')}")
    finally:
        for each in shims:
            os.kill(each.answer["pid"], signal.SIGKILL)
        ours.close()
        theirs.close()
        spawner.wait(10)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
