"""The data directory: who this node is, that it runs only once, and how often it has started.

Called first by the composition root; everything else that a node keeps lies in the directory that `open_data_dir` hands
out. Knows nothing of keys or the log.

    node.json     which node this is, and which machine and directory it was made on
    cluster.json  which cluster it is of, whether the log lies here, and the name that the node has there
    epoch         how many times a daemon has started here; durable before the first packet is sent
    lock          held as long as the daemon runs; contains its pid
    trust/        certificates and keys (runtime/trust.py)
    peers.json    where other nodes were seen last (runtime/peer_cache.py)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from gpulayer.model.errors import Refused, StorageFailed
from gpulayer.model.ids import NodeId, node_id

FORMAT = 1
_FILE_BYTES_MAX = 64 * 1024
_MACHINE_ID_PATHS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
# A daemon that has the lock writes its pid within microseconds, unless it is stopped just then.
HOLDER_LOOKS, HOLDER_LOOK_SECONDS = 20, 0.01
# What an earlier start may have left behind without having made a node: it is safe to begin anew beside these.
_HARMLESS = ("lock", "epoch", "node.json")
# What a node that was made here leaves: without its node.json, each of them means that something was lost.
_TRACES = frozenset({"log.db", "cluster.json", "trust"})
# Not the state of the node that is given up: runs of others (private_dirs.py), and what excludes them from our devices.
_NOT_ABANDONED = ("lock", "local", "devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDir:
    """An open data directory. Closing it, or the end of the process, lets the next daemon in."""

    path: Path
    node_id: NodeId
    epoch: int
    created_at_utc: float
    is_new: bool
    warnings: tuple[str, ...]
    """What was put right while opening; for the log."""
    lock_fd: int

    def close(self) -> None:
        """Release the lock. The file stays: removing it would let two daemons lock two files of the same name."""
        os.close(self.lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_data_dir(
    path: str | os.PathLike[str], *, abandon_state: bool = False, machine_id: str | None = None
) -> DataDir:
    """Create or open the data directory, lock it, and raise its epoch.

    Refused: another daemon runs there, it belongs to another user, or it is a copy (code `cloned_data_dir`).
    StorageFailed: it cannot be written, or what is in it is damaged, incomplete or of a newer version.
    `abandon_state` moves what is there into `abandoned-<utc>` and starts as a new node. `machine_id` is for tests.
    """
    where = Path(os.path.abspath(os.fspath(path)))
    try:
        warnings = _made_private(where)
        lock_fd = _locked(where)
    except OSError as exc:
        _cannot("use data directory", where, exc)
    try:
        return _opened(where, lock_fd, warnings, abandon_state, this_machine() if machine_id is None else machine_id)
    except OSError as exc:
        os.close(lock_fd)
        _cannot("use data directory", where, exc)
    except BaseException:
        os.close(lock_fd)
        raise


def _made_private(where: Path) -> tuple[str, ...]:
    parent = where.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from None
    try:
        where.mkdir(mode=0o700)
        _sync_directory(parent)
    except FileExistsError:
        pass
    found = where.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(where))
    if found.st_uid != os.geteuid():
        raise Refused(
            f"data directory {where} belongs to user {found.st_uid}, this daemon runs as user {os.geteuid()}",
            hint="run it as that user, or choose another directory with --data-dir",
        )
    if found.st_mode & 0o077:
        # It holds sandboxes, and a socket that needs no token.
        where.chmod(0o700)
        return (
            f"data directory {where} was open to other users (mode {stat.S_IMODE(found.st_mode):04o}); it is 0700 now",
        )
    return ()


def _locked(where: Path) -> int:
    # Not inherited by what the daemon starts (PEP 446): a replica must not keep the directory locked.
    fd = os.open(where / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(fd)
        os.close(fd)
        raise Refused(
            f"data directory {where} is in use by {holder}",
            hint="stop that daemon, or give this one its own directory with --data-dir",
            code="data_dir_in_use",
        ) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _holder(fd: int) -> str:
    """Who has the lock, in words. What stands in the file may be of a daemon that is gone: the one that has just got
    the lock writes its pid a moment later."""
    for _ in range(HOLDER_LOOKS):
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        if pid.isdigit() and os.path.exists(f"/proc/{pid}"):
            return f"pid {pid}"
        time.sleep(HOLDER_LOOK_SECONDS)
    return "another process"


def _opened(where: Path, lock_fd: int, warnings: tuple[str, ...], abandon_state: bool, machine: str) -> DataDir:
    if abandon_state:
        warnings += _abandoned(where)
    record = _read_json(where / "node.json")
    is_new = record is None
    if record is None:
        _refuse_remains(where)
        record = {
            "format": FORMAT,
            "node_id": node_id(os.urandom(8)),
            "created_at_utc": time.time(),
            "machine_id": machine,
            "inode": where.stat().st_ino,
        }
        # The epoch first: a node.json without an epoch then always means that something was lost.
        atomic_write(where / "epoch", b"0\n")
        atomic_write(where / "node.json", json.dumps(record, indent=1).encode() + b"\n")
    _check_record(where, record, machine)
    epoch = _read_epoch(where) + 1
    atomic_write(where / "epoch", f"{epoch}\n".encode())
    return DataDir(
        path=where,
        node_id=NodeId(record["node_id"]),
        epoch=epoch,
        created_at_utc=float(record["created_at_utc"]),
        is_new=is_new,
        warnings=warnings,
        lock_fd=lock_fd,
    )


def _check_record(where: Path, record: dict[str, Any], machine: str) -> None:
    found = record.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise StorageFailed(
            f"data directory {where} was written by a newer gpulayer (format {found}, this one reads {FORMAT})",
            hint="run the newer version, or choose another directory with --data-dir",
        )
    expected: dict[str, type | tuple[type, ...]] = {
        "format": int,
        "node_id": str,
        "created_at_utc": (int, float),
        "machine_id": str,
        "inode": int,
    }
    wrong = [name for name, kind in expected.items() if not isinstance(record.get(name), kind)]
    if wrong or found != FORMAT or not record["node_id"]:
        _damaged(where / "node.json", f"no usable {', '.join(wrong) or 'format'}")
    clones: list[str] = []
    # A machine without an id says nothing about whether this is the same one.
    if machine and record["machine_id"] and record["machine_id"] != machine:
        clones.append("it was made on another machine")
    if record["inode"] != where.stat().st_ino:
        clones.append("it is not the directory that it was made in")
    if clones:
        raise Refused(
            f"data directory {where} is a copy of that of node {record['node_id']}: {' and '.join(clones)}; "
            "two nodes with one identity would take each other's work",
            hint="move the original back to where it was, or start here as a new node with --abandon-state",
            code="cloned_data_dir",
        )


def _refuse_remains(where: Path) -> None:
    remains = sorted(
        entry.name
        for entry in where.iterdir()
        if entry.name not in _HARMLESS and not entry.name.startswith((".", "abandoned-", "lost+found"))
    )
    if _TRACES & set(remains):
        raise StorageFailed(
            f"data directory {where} has lost its node.json, but {', '.join(remains[:5])} is still there",
            hint="restore the directory from a backup, or start as a new node with --abandon-state",
        )


def _abandoned(where: Path) -> tuple[str, ...]:
    moved = [
        entry
        for entry in sorted(where.iterdir())
        if entry.name not in _NOT_ABANDONED and not entry.name.startswith("abandoned-")
    ]
    if not moved:
        return ()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = where / f"abandoned-{stamp}"
    number = 1
    while target.exists():
        number += 1
        target = where / f"abandoned-{stamp}-{number}"
    target.mkdir(mode=0o700)
    # node.json last: should this be cut short, the next start still finds the old node and says so.
    for entry in sorted(moved, key=lambda entry: entry.name == "node.json"):
        shutil.move(entry, target / entry.name)
    _sync_directory(target)
    _sync_directory(where)
    return (f"what was in data directory {where} was moved to {target}",)


def known_node_id(path: Path) -> NodeId | None:
    """Whose data directory it is; None where no node was made in it yet. StorageFailed."""
    try:
        record = _read_json(path / "node.json")
    except OSError as exc:
        _cannot("use data directory", path, exc)
    found = record.get("node_id") if record is not None else None
    return NodeId(found) if isinstance(found, str) and found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which cluster a data directory is of."""

    cluster_id: str
    is_voter: bool = True
    """Whether the log lies here."""
    name: str = ""
    """Of this node, as the cluster knows it; empty where it was not noted."""
    voter: str = ""
    """The node that holds the log, where that is another one."""


def membership(path: Path) -> Membership | None:
    """None: the data directory `path` is of no cluster yet. StorageFailed if the note of it is damaged."""
    noted = path / "cluster.json"
    record = _read_json(noted)
    if record is None:
        return None
    cluster_id, is_voter = record.get("cluster_id"), record.get("is_voter", True)
    name, voter = record.get("name", ""), record.get("voter", "")
    if not isinstance(cluster_id, str) or not cluster_id:
        _damaged(noted, "no usable cluster_id")
    if not isinstance(is_voter, bool) or not isinstance(name, str) or not isinstance(voter, str):
        _damaged(noted, "no usable is_voter, name or voter")
    return Membership(cluster_id=cluster_id, is_voter=is_voter, name=name, voter=voter)


def note_membership(data: DataDir, member: Membership) -> None:
    """Make it durable, if it is news. OSError if it cannot be written."""
    if membership(data.path) != member:
        atomic_write(data.path / "cluster.json", json.dumps(asdict(member)).encode() + b"\n")


def forget_membership(data: DataDir) -> None:
    """It has left: the next start makes a new cluster, or joins one. OSError if that cannot be written."""
    (data.path / "cluster.json").unlink(missing_ok=True)
    _sync_directory(data.path)


def check_cluster(data: DataDir, cluster_id: str) -> None:
    """Whether the log that was found is the one that this directory had; called before anything is made of it.

    A log that is gone looks like that of a new node: all jobs would be forgotten, their replicas ended as leftovers.
    Where no log has to be, none can be lost.
    """
    known = membership(data.path)
    if known is not None and known.is_voter and known.cluster_id != cluster_id:
        found = f"that of cluster {cluster_id}" if cluster_id else "empty"
        raise StorageFailed(
            f"data directory {data.path} has lost its log: it was that of cluster {known.cluster_id},"
            f" the one that is there is {found}",
            hint="restore the directory from a backup, or start as a new node with --abandon-state",
        )


def note_cluster(data: DataDir, cluster_id: str) -> None:
    """Remember whose log this directory has, for check_cluster(). OSError if it cannot be written."""
    if membership(data.path) is None:
        note_membership(data, Membership(cluster_id=cluster_id))


def _read_epoch(where: Path) -> int:
    path = where / "epoch"
    try:
        text = path.read_bytes()[:_FILE_BYTES_MAX].decode("ascii", "replace").strip()
    except FileNotFoundError:
        _damaged(path, "it is missing")
    if not text.isdigit() or len(text) > 18:
        _damaged(path, f"{text[:40]!r} is not a number")
    return int(text)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        record = json.loads(data[:_FILE_BYTES_MAX])
    except (ValueError, RecursionError) as exc:
        _damaged(path, str(exc))
    if not isinstance(record, dict):
        _damaged(path, "not an object")
    return record


def _damaged(path: Path, what: str) -> NoReturn:
    raise StorageFailed(
        f"{path} is damaged: {what}",
        hint="restore the directory from a backup, or start as a new node with --abandon-state",
    )


_HINTS = {
    errno.EROFS: "the file system is read-only; mount it writable, or choose another directory with --data-dir",
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota is used up; free some space",
    errno.ENOTDIR: "it is not a directory; choose another one with --data-dir",
}


def _cannot(act: str, where: Path, exc: OSError) -> NoReturn:
    # A full disk has a code of its own: it is the one that goes away by itself.
    code = "disk_full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else None
    hint = _HINTS.get(exc.errno or 0, "check that this user may write there, or choose another one with --data-dir")
    raise StorageFailed(f"cannot {act} {where}: {exc.strerror or exc}", hint=hint, code=code) from exc


def this_machine() -> str:
    """A name for this machine, made from its machine id, which is not to be shown (machine-id(5)); "" without one."""
    for path in _MACHINE_ID_PATHS:
        with suppress(OSError):
            found = Path(path).read_bytes().strip()
            if found and found != b"uninitialized":
                return sha256(b"gpulayer data directory\0" + found).hexdigest()[:32]
    return ""


def atomic_write(path: str | os.PathLike[str], data: bytes, mode: int = 0o600) -> None:
    """Replace a file: after a crash or a power cut there is all of the old or all of the new; durable on return."""
    target = Path(path)
    # Named after the writer, so that two of them do not write into one file.
    temporary = target.parent / f".{target.name}.{os.getpid()}-{threading.get_native_id()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(target.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
