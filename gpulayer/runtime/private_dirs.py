"""The directories of local runs: `<data-dir>/local/<random>`, one for each, made by its node and removed at its end.

Each has the lock of any data directory (identity.py), which is held as long as its node lives. A node that was killed
leaves its directory, and for a moment its shims, which end by themselves (shim/shim.py, the tether). Whoever finds that
puts it right: the command that the node worked for, if it is still there, else the next local run. Everything here
blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpulayer.model.errors import StorageFailed
from gpulayer.runtime import processes
from gpulayer.runtime.found import OnDisk, number
from gpulayer.runtime.identity import DataDir, open_data_dir
from gpulayer.runtime.sandboxes import Sandboxes
from gpulayer.runtime.shim_link import ShimProcess, boot_id, end_with_tree, lock_holders
from gpulayer.shim import tree

NAME = "local"
# Beyond the grace that its job gave it, until a shim has noticed that all of its run is gone, and has ended.
END_SECONDS = 10.0
# What a dead shim left is signalled by us, and nobody is there to read its last words.
ORPHAN_GRACE_SECONDS = 3.0
LOOK_SECONDS = 0.05


def open_private_dir(data_dir: Path) -> DataDir:
    """A new one, locked until it is closed. StorageFailed, Refused."""
    parent = data_dir / NAME
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _making_or_finding(parent):
            path = parent / secrets.token_hex(4)
            try:
                return open_data_dir(path)
            except BaseException:
                remove(path)
                raise
    except OSError as error:
        raise StorageFailed(
            f"cannot make a directory for this run in {parent}: {error.strerror or error}",
            hint="free some space, or choose another place with --data-dir"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "choose a place where you may write with --data-dir",
        ) from error


def remove_leftovers(data_dir: Path) -> None:
    """Of runs whose node was killed: what they left running is ended, then their directories go. Not those of which a
    shim lives: it is ending its run, as its job says, and a later run finds it done."""
    parent = data_dir / NAME
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            lock_fd = _abandoned(path)
            if lock_fd is None:
                continue
            try:
                if not lock_holders(path / "sandboxes") and not end_runs(path):
                    remove(path)
            finally:
                os.close(lock_fd)


def end_runs(path: Path, *, at_once: Callable[[], bool] = lambda: False) -> list[tree.ProcessStat]:
    """Ends what a node left running in its directory, as each job says; killed where `at_once` says so, which is asked
    again and again, or where that takes longer than its grace. Its cgroups go, too. Returns what cannot be ended."""
    on_disk = _sandboxes(path)
    graces = [number(each.content.get("stop_grace_seconds"), 0.0) for each in on_disk]
    deadline = time.monotonic() + max(graces, default=0.0) + END_SECONDS
    told: set[ShimProcess] = set()
    while holders := lock_holders(path / "sandboxes"):
        is_over = time.monotonic() >= deadline
        for holder in holders:
            if is_over or at_once():
                end_with_tree(holder.shim)
            elif holder.shim not in told:
                told.add(holder.shim)
                _ask_to_end(holder.shim)
        if is_over:
            break
        time.sleep(LOOK_SECONDS)
    left = []
    for each in on_disk:
        if each.is_of_boot(boot_id()):
            grace_seconds = 0.0 if at_once() else ORPHAN_GRACE_SECONDS
            left += processes.end(each.leftovers(), signal_number=signal.SIGTERM, grace_seconds=grace_seconds)
        if each.cgroup is not None:
            tree.remove_cgroup(each.cgroup)
            with suppress(OSError):
                os.rmdir(os.path.dirname(each.cgroup))
    return left


def remove(path: Path) -> bool:
    """Removes the directory with all that is in it, also where a run took away its own right to do that."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for directory, below, _ in os.walk(path):
            for name in below:
                # Not through a link: that would be somebody else's directory.
                if not os.path.islink(inside := os.path.join(directory, name)):
                    with suppress(OSError):
                        os.chmod(inside, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


@contextmanager
def _making_or_finding(parent: Path) -> Iterator[None]:
    """One at a time: a directory that is being made and not locked yet would look like a leftover. OSError."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _abandoned(path: Path) -> int | None:
    """The lock of a directory whose node is gone, now ours; None where it lives, or where another is tidying up."""
    try:
        with _making_or_finding(path.parent):
            fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:
                os.close(fd)
                return None
    except OSError:
        return None  # not a directory, or not ours


def _sandboxes(path: Path) -> list[OnDisk]:
    sandboxes = Sandboxes(path)
    return [
        OnDisk(
            attempt=attempt,
            content=sandboxes.read_attempt(attempt) or {},
            shim=None,
            is_certain=False,
            records=sandboxes.runs(attempt),
        )
        for attempt in sandboxes.attempts()
    ]


def _ask_to_end(shim: ShimProcess) -> None:
    stat = tree.process_stat(shim.pid)
    if stat is not None and stat.start_time == shim.start_time:
        tree.signal_process(stat, signal.SIGTERM)
