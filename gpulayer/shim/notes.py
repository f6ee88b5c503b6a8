"""runs/NNNNNN: one file per run. Its first half, the marker, is durable before the run is executed; its second half,
the exit note, before the exit is reported.

The file has its full size from the start, so that a disk that fills up meanwhile cannot swallow the exit. A marker
without an exit note, whose process is gone, is a run that was interrupted (the shim died with it, or the host did). A
file without a marker is a run that was never executed: mostly the next one, prepared while there is time.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any, NamedTuple, TypeAlias

Json: TypeAlias = dict[str, Any]

# A half is one block of the usual file systems: the note lies in a block of its own, and overwriting it needs no new
# one. (A copy-on-write file system may need one all the same; there the reservation is worth less.)
HALF_BYTES = 4096
RUNS_KEPT = 20


class RunRecord(NamedTuple):
    run: int
    marker: Json
    exit: Json | None


def prepare(runs_fd: int, run: int) -> int:
    """The file of the next run, reserved and durable but without a marker: a restart then waits for one sync less.
    OSError: nothing was left behind."""
    name = _name(run)
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=runs_fd)
    try:
        _reserve(fd)
        os.fsync(fd)
        os.fsync(runs_fd)
    except BaseException:
        discard(runs_fd, run, fd)
        raise
    return fd


def create(runs_fd: int, run: int, marker: Json, prepared_fd: int | None = None) -> int:
    """Makes the file of a run durable, marker included, and gives its descriptor. OSError: nothing was left behind.

    `prepared_fd`: what prepare() gave for this run; it belongs to the result, or is closed.
    """
    if prepared_fd is not None and not _is_in_place(runs_fd, run, prepared_fd):
        os.close(prepared_fd)  # removed by hand
        prepared_fd = None
    fd = prepare(runs_fd, run) if prepared_fd is None else prepared_fd
    try:
        _write_at(fd, _half(marker), 0)
        os.fdatasync(fd)
    except BaseException:
        discard(runs_fd, run, fd)
        raise
    return fd


def discard(runs_fd: int, run: int, fd: int) -> None:
    """Takes back a file that got no marker."""
    os.close(fd)
    try:
        os.unlink(_name(run), dir_fd=runs_fd)
    except OSError:
        pass  # gone already; and one without a marker counts for nothing


def _is_in_place(runs_fd: int, run: int, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(_name(run), dir_fd=runs_fd), os.fstat(fd))
    except OSError:
        return False


def amend_marker(fd: int, marker: Json) -> None:
    """What is known only after the fork (pid, start time). Not synced: the marker that counts is."""
    _write_at(fd, _half(marker), 0)


def write_exit(fd: int, note: Json) -> None:
    _write_at(fd, _half(note), HALF_BYTES)
    os.fdatasync(fd)


def read(path: str) -> RunRecord | None:
    """None if the file is not there or has no marker."""
    try:
        with open(path, "rb") as file:
            content = file.read(2 * HALF_BYTES)
    except OSError:
        return None
    marker = parse(content[:HALF_BYTES])
    name = os.path.basename(path)
    if marker is None or not name.isdigit():
        return None
    return RunRecord(run=int(name), marker=marker, exit=parse(content[HALF_BYTES:]))


def read_all(runs_directory: str) -> list[RunRecord]:
    """Every run that is still noted, oldest first."""
    records = (read(os.path.join(runs_directory, _name(run))) for run in numbers(runs_directory))
    return [record for record in records if record is not None]


def numbers(runs_directory: str | int) -> list[int]:
    """The numbers of all files, those without a marker too."""
    try:
        return sorted(int(name) for name in os.listdir(runs_directory) if name.isdigit())
    except OSError:
        return []


def drop_unmarked(runs_fd: int) -> None:
    """What an earlier shim had prepared and never executed."""
    for run in numbers(runs_fd):
        if read(f"/proc/self/fd/{runs_fd}/{_name(run)}") is None:
            os.unlink(_name(run), dir_fd=runs_fd)


def prune(runs_fd: int, keep: int = RUNS_KEPT) -> None:
    for run in numbers(runs_fd)[: -keep or None]:
        try:
            os.unlink(_name(run), dir_fd=runs_fd)
        except OSError:
            return  # housekeeping: the next run tries again


def _name(run: int) -> str:
    return f"{run:06d}"


def _half(content: Json) -> bytes:
    encoded = json.dumps(content, separators=(",", ":")).encode()
    if len(encoded) >= HALF_BYTES:
        raise ValueError(f"a run's note would take {len(encoded)} bytes, and there are {HALF_BYTES}")
    return encoded.ljust(HALF_BYTES - 1) + b"\n"


def parse(told: bytes | bytearray) -> Json | None:
    """An object that a shim wrote or sent; None for zeros, what was torn by a power failure, and what is not a shim's.

    Its strings are text: a lone surrogate is valid JSON, but can be put neither into the log nor into a file.
    """
    try:
        content = json.loads(told)
        if b"\\u" in told or not told.isascii():
            content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _reserve(fd: int) -> None:
    try:
        os.posix_fallocate(fd, 0, 2 * HALF_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        _write_at(fd, bytes(2 * HALF_BYTES), 0)


def _write_at(fd: int, content: bytes, offset: int) -> None:
    written = os.pwrite(fd, content, offset)
    if written != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
