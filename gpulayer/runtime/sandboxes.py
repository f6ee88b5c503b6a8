"""The directories that replicas run in: `<data>/sandboxes/<job>.<replica>.<attempt>/`, and what a starting daemon finds
there.

    attempt.json   what the attempt is; written by the daemon before there is a shim
    shim.json, shim.sock, runs/, logs/   the shim's
    work/          where the run starts, unless the job names a directory

Everything here blocks; the supervisor calls it in threads. A name that is not an attempt's is a stranger's and is left
alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Container
from pathlib import Path
from typing import Any, TypeAlias

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import AttemptId, JobId, ReplicaId
from gpulayer.shim import notes

Json: TypeAlias = dict[str, Any]

FORMAT = 1
# Sandboxes and logs are kept 7 days, or a tenth of the disk (docs/operating.md).
KEPT_SECONDS = 7 * 86400.0
KEPT_FRACTION_OF_DISK = 0.1
# Ours is under 2 KiB; whoever wrote more than this did not write ours.
JSON_BYTES_MAX = 1024 * 1024

_NAME = re.compile(r"(j-[a-z0-9]{1,32})\.(0|[1-9][0-9]{0,8})\.([1-9][0-9]{0,8})")


def attempt_id(name: str) -> AttemptId | None:
    """The attempt whose sandbox has this name; None for a stranger's."""
    match = _NAME.fullmatch(name)
    return AttemptId(ReplicaId(JobId(match[1]), int(match[2])), int(match[3])) if match else None


class Sandboxes:
    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "sandboxes"

    def path(self, attempt: AttemptId) -> Path:
        """InvalidRequest for an id that would lead out of the directory."""
        name = str(attempt)
        if attempt_id(name) != attempt:
            raise InvalidRequest(f"attempt {name!r} is not one", hint="they look like j-abcdefghij.0.1")
        return self.root / name

    def logs(self, attempt: AttemptId) -> Path:
        return self.path(attempt) / "logs"

    def work(self, attempt: AttemptId) -> Path:
        return self.path(attempt) / "work"

    def make(self, attempt: AttemptId, content: Json) -> Path:
        """The directory with attempt.json in it, durable. Made anew or again: both are the same afterwards."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(attempt)
        try:
            path.mkdir(mode=0o700)
            _sync(self.root)
        except FileExistsError:
            pass
        # Someone may have removed it by hand; a new run gets a new one.
        (path / "work").mkdir(mode=0o700, exist_ok=True)
        _write_durably(path, "attempt.json", json.dumps({"format": FORMAT, **content}).encode() + b"\n")
        return path

    def attempts(self) -> list[AttemptId]:
        try:
            names = [entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(found for name in names if (found := attempt_id(name)) is not None)

    def read_attempt(self, attempt: AttemptId) -> Json | None:
        return _read_json(self.path(attempt) / "attempt.json")

    def read_shim(self, attempt: AttemptId) -> Json | None:
        return _read_json(self.path(attempt) / "shim.json")

    def runs(self, attempt: AttemptId) -> list[notes.RunRecord]:
        """Every run that is still noted, oldest first."""
        return notes.read_all(str(self.path(attempt) / "runs"))

    def prune(
        self,
        live: Container[AttemptId],
        *,
        now_utc: float | None = None,
        kept_seconds: float = KEPT_SECONDS,
        kept_bytes: int | None = None,
    ) -> list[AttemptId]:
        """Removes what ended more than `kept_seconds` ago, and then the oldest until the ended ones fit into
        `kept_bytes` (a tenth of the disk). Never one in `live`: what has a shim, or an order. Returns what went."""
        now_utc = time.time() if now_utc is None else now_utc
        ended = sorted((self._ended_at_utc(each), each) for each in self.attempts() if each not in live)
        sizes = {attempt: _bytes_below(self.path(attempt)) for _, attempt in ended}
        if kept_bytes is None:
            kept_bytes = int(shutil.disk_usage(self.root).total * KEPT_FRACTION_OF_DISK) if ended else 0
        total = sum(sizes.values())
        removed = []
        for ended_at_utc, attempt in ended:
            if now_utc - ended_at_utc <= kept_seconds and total <= kept_bytes:
                break  # the rest is younger
            # By descriptor, not following links (shutil.rmtree.avoids_symlink_attacks): a replica cannot lead us
            # elsewhere.
            shutil.rmtree(self.path(attempt), ignore_errors=True)
            if not self.path(attempt).exists():
                total -= sizes[attempt]
                removed.append(attempt)
        return removed

    def _ended_at_utc(self, attempt: AttemptId) -> float:
        runs = self.runs(attempt)
        noted = runs[-1].exit.get("ended_at_utc") if runs and runs[-1].exit else None
        if isinstance(noted, int | float):
            return float(noted)
        try:
            return self.path(attempt).stat().st_mtime
        except OSError:
            return 0.0


def _read_json(path: Path) -> Json | None:
    """None if it is missing, torn or not ours."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _write_durably(directory: Path, name: str, content: bytes) -> None:
    """The whole of it or what was there before, whenever the power fails."""
    fresh = directory / f"{name}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        written = 0
        while written < len(content):
            written += os.write(fd, content[written:])
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(fresh, directory / name)
    _sync(directory)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _bytes_below(path: Path) -> int:
    """What it takes on the disk; links are not followed, nor what disappears meanwhile."""
    total = 0
    unvisited = [str(path)]
    while unvisited:
        try:
            with os.scandir(unvisited.pop()) as entries:
                for entry in entries:
                    try:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            unvisited.append(entry.path)
                    except OSError:
                        continue
        except OSError:
            continue
    return total
