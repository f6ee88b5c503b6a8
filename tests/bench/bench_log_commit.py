"""What one acknowledged append costs, alone and among 64, beside what the disk itself takes for a sync.

`python -m tests.bench.bench_log_commit [--directory DIR] [--turns 300]` prints a table and, as its last line, JSON. The
yardsticks are measured in the same directory and the same run, in turns with what they stand beside, because disks
differ by a factor of a hundred and change within a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trio

from gpulayer.model.ids import NodeId
from gpulayer.runtime.log_store import Entry, LogStore, open_store

PAYLOAD = os.urandom(400)  # as large as the entry of a usual submit
CONCURRENT = 64
WARM_UP = 20


def bare_fsync(directory: Path) -> Callable[[], None]:
    """Append as much as SQLite writes for one small commit (two or three pages) to a file, and sync it."""
    fd = os.open(directory / "bare", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    content = os.urandom(3 * 4120)

    def once() -> None:
        os.write(fd, content)
        os.fsync(fd)

    return once


def bare_sqlite(directory: Path) -> Callable[[], None]:
    """One insert in a transaction of its own: no thread, no queue, no checksum of ours."""
    db = sqlite3.connect(directory / "bare.db", isolation_level=None)
    for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=0"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("CREATE TABLE log (number INTEGER PRIMARY KEY, payload BLOB)")

    def once() -> None:
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO log (payload) VALUES (?)", (PAYLOAD,))
        db.execute("COMMIT")

    return once


class Appends:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._last = store.stats().last_index
        self.seconds: list[float] = []

    async def once(self) -> None:
        started = time.perf_counter()
        self._last += 1
        await self._store.append([Entry(index=self._last, term=1, kind="command", payload=PAYLOAD)])
        self.seconds.append(time.perf_counter() - started)


async def measured(directory: Path, turns: int) -> dict[str, list[float]]:
    fsync, sqlite = bare_fsync(directory), bare_sqlite(directory)
    store, _ = await open_store(directory / "log.db", node_id=NodeId("n-bench"))
    appends = Appends(store)
    found: dict[str, list[float]] = {"fsync": [], "sqlite": [], "append": appends.seconds}

    def timed(name: str, act: Callable[[], None]) -> None:
        started = time.perf_counter()
        act()
        found[name].append(time.perf_counter() - started)

    for turn in range(turns + WARM_UP):
        timed("fsync", fsync)
        timed("sqlite", sqlite)
        await appends.once()
        if turn == WARM_UP - 1:
            for seconds in found.values():
                seconds.clear()
    together = Appends(store)
    commits = store.stats().commits
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:

        async def client() -> None:
            for _ in range(max(1, turns // 10)):
                await together.once()

        for _ in range(CONCURRENT):
            nursery.start_soon(client)
    elapsed = time.perf_counter() - started
    found[f"append, {CONCURRENT} at once"] = together.seconds
    commits = store.stats().commits - commits
    print(
        f"{CONCURRENT} at once: {len(together.seconds) / elapsed:.0f} appends/s in {commits / elapsed:.0f} commits/s, "
        f"{len(together.seconds) / commits:.1f} entries per commit"
    )
    await store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where to write; default: a new one in the temporary directory")
    parser.add_argument("--turns", type=int, default=300)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        found = trio.run(measured, Path(directory), chosen.turns)
    summary = {}
    for name, seconds in found.items():
        cuts = statistics.quantiles(seconds, n=100)
        summary[name] = {"p50_ms": round(cuts[49] * 1e3, 3), "p99_ms": round(cuts[98] * 1e3, 3), "count": len(seconds)}
        print(f"{name:24} p50 {cuts[49] * 1e3:8.3f} ms   p99 {cuts[98] * 1e3:8.3f} ms   ({len(seconds)})")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
