"""The file of the Raft log: what is in it, how it is checked when it is opened, how it is written. Not async.

log_store.py owns that thread and is what everyone else calls.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulayer.model.errors import StorageFailed
from gpulayer.model.ids import NodeId
from gpulayer.runtime.failpoints import failpoint

FORMAT = 1
# In the header of the file, "gplL": another program's database, or one of our others, is not taken for a log.
APPLICATION_ID = 0x67706C4C
# The write-ahead log is copied into the database in idle moments, and at the latest when it has grown to this.
WAL_BYTES_MAX = 64 * 1024 * 1024
# A transaction that ends things is some pages in the write-ahead log; this much for it, and the rest of the reserve for
# those that follow.
ENDING_BYTES = 1024 * 1024
# Locks and syncs of these do not hold what Raft needs of them. 9p and other FUSE file systems are mostly local.
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs")

_NO_CHECKPOINT_ON_CLOSE = 1006  # SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE

# What SQLite and the system raise for a disk that does not do as it is told.
BROKEN = (sqlite3.Error, OSError, MemoryError)

_SCHEMA = (
    "CREATE TABLE hard_state (one INTEGER PRIMARY KEY CHECK (one = 1), cluster_id TEXT NOT NULL, node_id TEXT NOT NULL,"
    " generation INTEGER NOT NULL, term INTEGER NOT NULL, voted_for TEXT, crc32 INTEGER NOT NULL)",
    'CREATE TABLE log ("index" INTEGER PRIMARY KEY, term INTEGER NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL,'
    " crc32 INTEGER NOT NULL)",
    'CREATE TABLE snapshot ("index" INTEGER PRIMARY KEY, term INTEGER NOT NULL, crc32 INTEGER NOT NULL,'
    " complete INTEGER NOT NULL)",
    # Apart from its row, so that marking it complete does not write it again.
    'CREATE TABLE snapshot_blob ("index" INTEGER PRIMARY KEY, blob BLOB NOT NULL)',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the log; what `payload` means is its writer's business."""

    index: int
    term: int
    kind: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HardState:
    """What a voter must never forget. (generation, term) never falls; the vote of a term never changes."""

    cluster_id: str
    generation: int = 0
    term: int
    voted_for: NodeId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was on the disk, every checksum verified. `snapshot` is (index, term, blob)."""

    hard_state: HardState | None = None
    snapshot: tuple[int, int, bytes] | None = None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStats:
    first_index: int
    """0 when no entry is kept."""
    last_index: int
    """Of the last entry, or of the snapshot when no entry follows it."""
    snapshot_index: int
    wal_bytes: int
    commits: int
    last_commit_seconds: float
    pending: int
    oldest_pending_seconds: float
    """How long the oldest unanswered write has been waiting: a disk that hangs shows here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """An append (entries, hard state, truncation, in one transaction) or a snapshot."""

    entries: Sequence[Entry] = ()
    hard_state: HardState | None = None
    truncate_from: int | None = None
    snapshot: tuple[int, int, bytes] | None = None
    keep_entries: int = 0
    ends_something: bool = False
    """Its entries stop, end or forget: they are taken while the disk is low, out of the reserve."""

    @property
    def payload_bytes(self) -> int:
        return sum(len(entry.payload) for entry in self.entries)


class LogFile:
    """The database, used by one thread. Keeps in memory where the log begins and ends, to check before it writes."""

    def __init__(self, path: Path, node_id: NodeId, reserve_bytes: int, disk_free_min_bytes: int) -> None:
        self._path = path
        self._node_id = node_id
        self._reserve = path.parent / "reserve"
        self._reserve_bytes = reserve_bytes
        self._disk_free_min_bytes = disk_free_min_bytes
        self._db: sqlite3.Connection | None = None
        self._ends = _Ends()
        self._commits = 0
        self._last_commit_seconds = 0.0
        self.wants_checkpoint = False
        self.disk_low = False

    # Opening

    def open(self) -> Recovered:
        _refuse_network(self._path)
        try:
            # Once by hand, because SQLite says "unable to open" to whatever the system gave as the reason.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            recovered = self._open()
            _sync_directory(self._path.parent)
            self._look_at_disk()
        except sqlite3.Error as exc:
            self.abandon()
            raise _unusable(self._path, exc) from exc
        except OSError as exc:
            self.abandon()
            raise _cannot_open(self._path, exc) from exc
        except StorageFailed:
            self.abandon()
            raise
        return recovered

    def _open(self) -> Recovered:
        db = self._db = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        # Exclusive before the first access: then no -shm file is needed and no other process gets in between.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        (journal_mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
        if journal_mode != "wal":
            raise _damaged(self._path, f"its journal mode is {journal_mode} and cannot be made wal")
        # Set although it is the default, because some builds of SQLite have NORMAL for WAL: that loses commits.
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA cell_size_check=ON")
        db.execute("BEGIN IMMEDIATE")
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (found,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if not application_id and not found and not tables:
            # Also what a start that was cut short left behind: all of this is one transaction.
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={FORMAT}")
        elif application_id != APPLICATION_ID:
            raise StorageFailed(
                f"{self._path} is not a gpulayer log (application id {application_id:#x})",
                hint="move that file away, or choose another directory with --data-dir",
            )
        elif found != FORMAT:
            age = "a newer" if found > FORMAT else "an older"
            raise StorageFailed(
                f"{self._path} was written by {age} gpulayer (format {found}, this one reads {FORMAT})",
                hint="run that version, or start as a new node with --abandon-state",
            )
        db.execute("COMMIT")
        (check,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if check != "ok":
            raise _damaged(self._path, str(check).replace("\n", " "))
        recovered = Recovered(
            hard_state=self._read_hard_state(db), snapshot=self._read_snapshot(db), entries=self._read_entries(db)
        )
        self._ends = self._checked_ends(recovered)
        return recovered

    def _read_hard_state(self, db: sqlite3.Connection) -> HardState | None:
        row = db.execute("SELECT cluster_id, node_id, generation, term, voted_for, crc32 FROM hard_state").fetchone()
        if row is None:
            return None
        cluster_id, node_id, generation, term, voted_for, crc = row
        if crc != _crc_of_hard_state(*row[:5]):
            raise _damaged(self._path, "the checksum of its hard state (term and vote) is wrong")
        if node_id != self._node_id:
            raise StorageFailed(
                f"{self._path} belongs to node {node_id}, this is node {self._node_id}",
                hint="put each node's log back into its own data directory",
            )
        return HardState(cluster_id=cluster_id, generation=generation, term=term, voted_for=voted_for)

    def _read_snapshot(self, db: sqlite3.Connection) -> tuple[int, int, bytes] | None:
        row = db.execute(
            'SELECT snapshot."index", term, crc32, blob FROM snapshot LEFT JOIN snapshot_blob'
            ' ON snapshot_blob."index" = snapshot."index" WHERE complete = 1 ORDER BY snapshot."index" DESC LIMIT 1'
        ).fetchone()
        if row is None:
            return None
        index, term, crc, blob = row
        if not isinstance(blob, bytes) or crc != _crc(blob, index, term):
            raise _damaged(self._path, f"the checksum of its snapshot at index {index} is wrong")
        return index, term, blob

    def _read_entries(self, db: sqlite3.Connection) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for index, term, kind, payload, crc in db.execute(
            'SELECT "index", term, kind, payload, crc32 FROM log ORDER BY "index"'
        ):
            if not isinstance(payload, bytes) or crc != _crc(payload, index, term, kind):
                raise _damaged(self._path, f"the checksum of entry {index} is wrong")
            if entries and index != entries[-1].index + 1:
                raise _damaged(self._path, f"entry {entries[-1].index + 1} is missing")
            entries.append(Entry(index=index, term=term, kind=kind, payload=payload))
        return tuple(entries)

    def _checked_ends(self, recovered: Recovered) -> _Ends:
        entries, snapshot_index = recovered.entries, 0
        if recovered.snapshot is not None:
            snapshot_index, snapshot_term, _ = recovered.snapshot
            if entries and not entries[0].index <= snapshot_index + 1 <= entries[-1].index + 1:
                span = f"entries {entries[0].index} to {entries[-1].index}"
                raise _damaged(self._path, f"{span} do not join the snapshot at index {snapshot_index}")
            for entry in entries[max(0, snapshot_index - entries[0].index) :][:1] if entries else ():
                if entry.index == snapshot_index and entry.term != snapshot_term:
                    raise _damaged(self._path, f"entry {entry.index} and the snapshot differ in term")
        elif entries and entries[0].index != 1:
            raise _damaged(self._path, f"entries 1 to {entries[0].index - 1} are missing, and there is no snapshot")
        return _Ends(
            first=entries[0].index if entries else 0,
            last=entries[-1].index if entries else snapshot_index,
            snapshot=snapshot_index,
            hard_state=recovered.hard_state,
        )

    # Writing

    def write(self, batch: Sequence[Write]) -> list[StorageFailed | ValueError | None]:
        """One transaction for all of the batch; the answer for each. What breaks the rules is left out of it."""
        self._look_at_disk()
        ends = self._ends
        answers: list[StorageFailed | ValueError | None] = []
        accepted: list[tuple[Write, _Ends]] = []
        for write in batch:
            if self.disk_low and write.entries and not (write.ends_something and self._has_room_to_end()):
                answers.append(self._disk_full())
                continue
            try:
                before, ends = ends, ends.after(write)
            except ValueError as error:
                answers.append(error)
                continue
            accepted.append((write, before))
            answers.append(None)
        if accepted:
            started = time.monotonic()
            self._commit(accepted, ends)
            self._last_commit_seconds = time.monotonic() - started
            self._commits += 1
            self.wants_checkpoint = True
            if self._wal_bytes() > WAL_BYTES_MAX:
                self.checkpoint(shrink=True)
        return answers

    def _commit(self, accepted: list[tuple[Write, _Ends]], ends: _Ends) -> None:
        db = self._connection
        failpoint("log.before_begin")
        db.execute("BEGIN IMMEDIATE")
        failpoint("log.after_begin")
        for write, before in accepted:
            if write.snapshot is not None:
                ends = self._put_snapshot(db, *write.snapshot, write.keep_entries, ends)
            else:
                self._put_append(db, write, before)
        failpoint("log.before_commit")
        db.execute("COMMIT")
        failpoint("log.after_commit")
        self._ends = ends

    def _put_append(self, db: sqlite3.Connection, write: Write, before: _Ends) -> None:
        if write.hard_state is not None and write.hard_state != before.hard_state:
            hard = write.hard_state
            row = (hard.cluster_id, self._node_id, hard.generation, hard.term, hard.voted_for)
            db.execute(
                "INSERT OR REPLACE INTO hard_state VALUES (1, ?, ?, ?, ?, ?, ?)", (*row, _crc_of_hard_state(*row))
            )
            failpoint("log.after_hard_state")
        if write.truncate_from is not None and write.truncate_from <= before.last:
            db.execute('DELETE FROM log WHERE "index" >= ?', (write.truncate_from,))
            failpoint("log.after_truncate")
        db.executemany(
            "INSERT INTO log VALUES (?, ?, ?, ?, ?)",
            (
                (
                    entry.index,
                    entry.term,
                    entry.kind,
                    entry.payload,
                    _crc(entry.payload, entry.index, entry.term, entry.kind),
                )
                for entry in write.entries
            ),
        )
        failpoint("log.after_insert")

    def _put_snapshot(
        self, db: sqlite3.Connection, index: int, term: int, blob: bytes, keep_entries: int, ends: _Ends
    ) -> _Ends:
        failpoint("snapshot.before_blob")
        db.execute("INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, 0)", (index, term, _crc(blob, index, term)))
        db.execute("INSERT OR REPLACE INTO snapshot_blob VALUES (?, ?)", (index, blob))
        failpoint("snapshot.after_blob")
        db.execute('UPDATE snapshot SET complete = 1 WHERE "index" = ?', (index,))
        failpoint("snapshot.after_complete")
        db.execute('DELETE FROM snapshot WHERE "index" <> ?', (index,))
        db.execute('DELETE FROM snapshot_blob WHERE "index" <> ?', (index,))
        failpoint("snapshot.before_truncate")
        row = db.execute('SELECT term FROM log WHERE "index" = ?', (index,)).fetchone()
        continues = row == (term,) or (row is None and ends.last == index)
        db.execute('DELETE FROM log WHERE "index" <= ?', (index - keep_entries if continues else ends.last,))
        (first,) = db.execute('SELECT min("index") FROM log').fetchone()
        return _Ends(
            first=first or 0, last=ends.last if continues else index, snapshot=index, hard_state=ends.hard_state
        )

    def idle(self) -> None:
        """What is done while nobody waits. A disk that was low is looked at again: no write may come to do it."""
        if self.disk_low:
            self._look_at_disk()
        self.checkpoint()

    def checkpoint(self, *, shrink: bool = False) -> None:
        """Copy the write-ahead log into the database. Normally its file stays as it is and is written from the start
        again, which is faster than growing it anew; `shrink` gives its space back."""
        if not self.wants_checkpoint:
            return
        try:
            self._connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if shrink else 'PASSIVE'})").fetchone()
        except sqlite3.OperationalError as exc:
            # The disk is full: nothing is lost, everything is still in the write-ahead log. Tried again at the next
            # idle moment.
            if exc.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            self._look_at_disk()
            return
        self.wants_checkpoint = False

    def _look_at_disk(self) -> None:
        """Is there room for new work? Only where its end can be written, too: with a reserve, or with room for one."""
        needed = self._disk_free_min_bytes
        if self._reserve_bytes and not self._reserve.exists():
            needed += self._reserve_bytes
            if self._free_bytes() > needed:
                self._take_reserve()
        self.disk_low = self._free_bytes() < self._disk_free_min_bytes or (
            self._free_bytes() < needed and not self._reserve.exists()
        )

    def _has_room_to_end(self) -> bool:
        """Is there room to stop and end what runs? Else who fills the disk could not be stopped. The reserve is let go
        for it, and not before."""
        if self._free_bytes() >= ENDING_BYTES:
            return True
        with suppress(FileNotFoundError):
            self._reserve.unlink()
        return self._free_bytes() >= ENDING_BYTES

    def _take_reserve(self) -> None:
        with suppress(FileExistsError):
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, self._reserve_bytes)
            except OSError:
                self._reserve.unlink()  # no room, or a file system that cannot: it is a convenience, not a promise
            finally:
                os.close(fd)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize

    def _disk_full(self) -> StorageFailed:
        return StorageFailed(
            f"the disk of {self._path} is almost full: {self._free_bytes() // 2**20} MiB free,"
            f" {self._disk_free_min_bytes // 2**20} MiB needed; nothing was written",
            hint="free some space, or move the data directory to a larger disk",
            code="disk_full",
        )

    def stats(self, *, pending: int, oldest_pending_seconds: float) -> LogStats:
        """The only method for other threads: it reads single values that are each whole."""
        ends = self._ends
        return LogStats(
            first_index=ends.first,
            last_index=ends.last,
            snapshot_index=ends.snapshot,
            wal_bytes=self._wal_bytes(),
            commits=self._commits,
            last_commit_seconds=self._last_commit_seconds,
            pending=pending,
            oldest_pending_seconds=oldest_pending_seconds,
        )

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self._path}-wal").st_size
        except FileNotFoundError:
            return 0

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._db is not None
        return self._db

    def close(self) -> None:
        """With a last checkpoint, which SQLite makes by itself."""
        self._connection.close()
        self._db = None

    def abandon(self) -> None:
        """Let go without trusting the disk any further: what matters is in the write-ahead log, for the next start."""
        db, self._db = self._db, None
        if db is None:
            return
        with suppress(sqlite3.Error):
            # From Python 3.12. Before, SQLite tries a checkpoint when it closes, and keeps the log if that fails.
            if setconfig := getattr(db, "setconfig", None):
                setconfig(_NO_CHECKPOINT_ON_CLOSE, True)
        with suppress(sqlite3.Error):
            db.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Where the log begins and ends, and the hard state: enough to see that a write makes sense."""

    first: int = 0
    last: int = 0
    snapshot: int = 0
    hard_state: HardState | None = None

    def after(self, write: Write) -> _Ends:
        """Where it ends after `write`; ValueError if that may not happen. What a snapshot does is found out later."""
        if write.snapshot is not None:
            index, term, blob = write.snapshot
            if index < max(1, self.snapshot) or term < 0 or type(blob) is not bytes:
                raise ValueError(f"a snapshot at index {index}, after one at {self.snapshot}")
            return self
        last = self.last
        if write.truncate_from is not None:
            if write.truncate_from <= self.snapshot:
                raise ValueError(f"truncation from {write.truncate_from}, below the snapshot at {self.snapshot}")
            last = min(last, write.truncate_from - 1)
        first = self.first if self.first <= last else 0
        term = 0
        for entry in write.entries:
            if entry.index != last + 1:
                raise ValueError(f"entry {entry.index} would follow entry {last}")
            if entry.term < term or type(entry.payload) is not bytes:
                raise ValueError(f"entry {entry.index} of term {entry.term} would follow one of term {term}")
            first, last, term = first or entry.index, entry.index, entry.term
        return _Ends(first=first, last=last, snapshot=self.snapshot, hard_state=self._hard_state_after(write))

    def _hard_state_after(self, write: Write) -> HardState | None:
        old, new = self.hard_state, write.hard_state
        if new is None or old is None:
            return new or old
        if (new.generation, new.term) < (old.generation, old.term):
            raise ValueError(f"term {new.term} of generation {new.generation} after {old.term} of {old.generation}")
        same_term = (new.generation, new.term) == (old.generation, old.term)
        if same_term and old.voted_for is not None and new.voted_for != old.voted_for:
            raise ValueError(f"a vote for {new.voted_for} in term {new.term}, after one for {old.voted_for}")
        if old.cluster_id and new.cluster_id != old.cluster_id:
            raise ValueError(f"cluster {new.cluster_id} in the log of cluster {old.cluster_id}")
        return new


def _crc(content: bytes, index: int, term: int, kind: str = "") -> int:
    """Over the numbers too: a row that moved is as wrong as one that changed."""
    return zlib.crc32(content, zlib.crc32(f"{index} {term} {kind} ".encode()))


def _crc_of_hard_state(cluster_id: str, node_id: str, generation: int, term: int, voted_for: str | None) -> int:
    return zlib.crc32(repr((cluster_id, str(node_id), generation, term, voted_for)).encode())


# What a failure is called, and what to do about it --------------------------------------------------------------------


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that `path` is on, by the text of /proc/self/mountinfo (proc(5)); "" if unknown."""
    best, found = -1, ""
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        words = left.split(" ")
        if not separator or len(words) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        # Later lines are mounted over earlier ones, so the last of equals is the one in sight.
        if len(point) >= best and path.is_relative_to(point):
            best, found = len(point), right.split(" ")[0]
    return found


def _refuse_network(path: Path) -> None:
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return  # without /proc there is no telling
    kind = filesystem_of(Path(os.path.realpath(path.parent)), mountinfo)
    if kind in NETWORK_FILESYSTEMS:
        raise StorageFailed(
            f"{path} is on a network file system ({kind}), which does not keep what it says it has written",
            hint="put the data directory on a local disk with --data-dir",
        )


def _damaged(path: Path, what: str) -> StorageFailed:
    return StorageFailed(
        f"{path} is damaged: {what}",
        hint="restore the data directory from a backup, or start as a new node with --abandon-state",
    )


def _unusable(path: Path, exc: sqlite3.Error) -> StorageFailed:
    primary = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageFailed(f"{path} is in use by another process", hint="stop that process first")
    if primary == sqlite3.SQLITE_FULL:
        return StorageFailed(f"cannot open {path}: the disk is full", hint="free some space", code="disk_full")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, words(exc))
    return StorageFailed(f"cannot open {path}: {words(exc)}", hint="look at the disk and at the kernel's log (dmesg)")


_HINTS = {
    errno.EROFS: "the file system is read-only; mount it writable, or choose another directory with --data-dir",
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota is used up; free some space",
    errno.EACCES: "let the user of this daemon read and write it",
    errno.EPERM: "let the user of this daemon read and write it",
    errno.ENOENT: "make the directory first",
    errno.EISDIR: "move that directory away",
    errno.ELOOP: "it is a symbolic link; put the file itself there",
}


def _cannot_open(path: Path, exc: OSError) -> StorageFailed:
    code = "disk_full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else None
    hint = _HINTS.get(exc.errno or 0, "look at the disk and at the kernel's log (dmesg)")
    return StorageFailed(f"cannot open {path}: {words(exc)}", hint=hint, code=code)


def words(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    name = getattr(exc, "sqlite_errorname", "")
    return f"{exc} ({name})" if name else str(exc) or type(exc).__name__


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
