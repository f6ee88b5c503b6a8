"""Which devices of this host gpulayer has in use, whoever runs it: a lock file for each device (decision 0008).

A byte of the first thousand is a milli-GPU. A hold has write locks on as many of them as it has milli-GPUs, any that
are free; a whole device is all of them. What holds a MIG instance also has a read lock on all bytes of its GPU's file:
so the GPU and its instances exclude one another, and the instances do not.

The locks are those of open file descriptions (fcntl(2), F_OFD_SETLK), a new one for each hold: two holds of one process
exclude one another as well, and a shim that is given the descriptor shares the hold, which lasts as long as either has
it open. Nobody waits here for a lock. Knows files and locks; who may have what, and what is to be said about it, is
decided by the callers (devices.py, the local run). docs/decisions/0008 has the reasons.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

from gpulayer.model.errors import StorageFailed
from gpulayer.model.places import default_data_dir
from gpulayer.model.units import MILLI
from gpulayer.shim.tree import printable

Range: TypeAlias = tuple[int, int]
"""The first byte, and the one after the last."""
FileId: TypeAlias = tuple[int, int]
"""Device and inode: names a file as long as somebody has it open."""

SHARED_DIRECTORIES = ("/run/lock", "/dev/shm")
# A new try means that somebody else was faster, or that the file was removed just then: not a hundred times in a row.
TRIES_MAX = 100
# A file's name has 255 bytes at most.
NAME_CHARACTERS_MAX = 200
COMMAND_CHARACTERS_MAX = 80
HOLDERS_NAMED_MAX = 3

_WHOLE: Final[Range] = (0, MILLI)
# struct flock with 64-bit offsets, as the platform aligns it: type, whence, start, length, pid, and what pads it to the
# alignment of the offsets.
_FLOCK = struct.Struct("@hhqqi0q")
# Not blocking: the owner of a file could make others wait in open(), by a lease.
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# The beginning of a descriptor's name where it is of a declared device; no quoted UUID has a colon.
_DECLARED = "declared:"
_SHIM = "gpulayer shim"
# How a local run's node is started, and what people call it.
_PRIVATE_NODE = "gpulayer.node.private"
_LOCAL_RUN = "gpulayer submit --target local"


def shared_directory(candidates: Sequence[str] = SHARED_DIRECTORIES) -> Path:
    """The directory that all users of this host have in common: the first that is sticky and writable by everyone.

    What it depends on is the host alone, not who asks or who came first. StorageFailed if there is none.
    """
    for candidate in candidates:
        try:
            mode = os.stat(candidate).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) and mode & 0o1777 == 0o1777:
            return Path(candidate)
    raise StorageFailed(
        f"no place for device locks: neither {' nor '.join(candidates)} is a directory for everyone (mode 1777)",
        hint=f"make one, as root: install -d -m 1777 {candidates[0]}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a device locked, as far as it can be seen."""

    pid: int
    user: str
    command: str
    """`gpulayer up`, `gpulayer submit --target local`, `gpulayer shim`, or another program's name."""
    data_dir: str = ""
    """Of a daemon; empty where it cannot be seen."""

    def __str__(self) -> str:
        where = f", data directory {self.data_dir}" if self.data_dir else ""
        return f"pid {self.pid} ({self.command} of user {self.user}{where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Too much of a device is locked by others; nothing was taken."""

    milli_free: int
    path: Path
    """The file whose lock was in the way."""
    parent: str = ""
    """Of a MIG instance, where that is its GPU's."""

    @property
    def text(self) -> str:
        """What the device is: `held by pid 4711 (gpulayer up of user anna)`. Walks through /proc when it is read."""
        by = _listed(who_holds(self.path))
        return f"part of {self.parent}, which is held by {by}" if self.parent else f"held by {by}"


class _Lock:
    """One lock file, locked through an open file description of its own; not yet, to begin with."""

    def __init__(self, name: str, path: Path, kind: int, milli: int) -> None:
        self.name = name
        self.path = path
        self.kind = kind
        self.milli = milli
        self.fd = -1
        self.file: FileId | None = None
        self.ranges: tuple[Range, ...] = ()

    def is_in_place(self) -> bool:
        """Whether it is locked, and in the file that others would find."""
        try:
            return self.file is not None and self.file == _file_at(self.path)
        except OSError:
            return False  # take() says why

    def take(self) -> int | None:
        """Locks as much as it should in the file that is there, and makes that if need be. None: done. Else how many
        milli-GPUs are free there, and nothing has changed."""
        for _ in range(TRIES_MAX):
            fd = _opened(self.path)
            try:
                found = _locked(fd, self.kind, self.milli)
                if _file_id(os.fstat(fd)) != _file_at(self.path):
                    continue  # removed in between: nobody else would find this one
                if isinstance(found, int):
                    return found
                self.close()
                self.set(fd, found)
                return None
            finally:
                if fd != self.fd:
                    os.close(fd)
        raise OSError(errno.EBUSY, "it is removed as often as it is made")

    def set(self, fd: int, ranges: tuple[Range, ...]) -> None:
        self.fd, self.file, self.ranges = fd, _file_id(os.fstat(fd)), ranges

    def close(self) -> None:
        # Never unlocked: the shim that shares the description would lose it, too.
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.file, self.ranges = -1, None, ()


class Hold:
    """A part of one device, or all of it, that nobody else can have until each copy of its descriptors is closed."""

    def __init__(self, uuid: str, locks: Sequence[_Lock], *, parent: str = "") -> None:
        self.uuid = uuid
        self.parent = parent
        self._locks = locks
        """The device's own is the first."""

    @property
    def milli(self) -> int:
        return self._locks[0].milli

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The milli-GPUs of the device that are held: (first, one after the last)."""
        return self._locks[0].ranges

    @property
    def fds(self) -> dict[str, int]:
        """The descriptors that hold it, by names that DeviceLocks.adopt() understands. They stay this object's."""
        return {lock.name: lock.fd for lock in self._locks}

    def is_in_place(self) -> bool:
        """False: a lock file was removed or replaced, so that others do not see this hold. Costs a stat() or two."""
        return all(lock.is_in_place() for lock in self._locks)

    def renew(self) -> Held | None:
        """Locks anew what is not in place. None: others see the hold again; what was renewed has other descriptors in
        `fds` and perhaps other `ranges`. Held: somebody else was faster and has it, too; to be tried again.

        StorageFailed: the files cannot be made or opened.
        """
        for lock in self._locks:
            if lock.is_in_place():
                continue
            try:
                milli_free = lock.take()
            except OSError as error:
                raise _cannot_use(lock.path, error) from error
            if milli_free is not None:
                is_parents = lock is not self._locks[0]
                return Held(
                    milli_free=0 if is_parents else milli_free,
                    path=lock.path,
                    parent=self.parent if is_parents else "",
                )
        return None

    def close(self) -> None:
        """Gives it back, unless somebody shares the descriptors. May be called again."""
        for lock in self._locks:
            lock.close()


class DeviceLocks:
    """The lock files of one host. `place` is for devices that a driver reports (see shared_directory()); declared ones
    exist only for their data directory, and have their locks there."""

    def __init__(self, place: Path, data_dir: Path) -> None:
        self._place = place
        self._data_dir = data_dir
        self._probes: dict[Path, tuple[int, FileId]] = {}
        """Descriptors without locks, to ask by."""

    def path(self, uuid: str, *, is_declared: bool = False) -> Path:
        """The lock file of a device, whether there is one or not."""
        name = _quoted(uuid)
        if len(name) > NAME_CHARACTERS_MAX:
            name = f"{name[:100]}+{sha256(name.encode()).hexdigest()}"
        return (self._data_dir / "devices" if is_declared else self._place) / f"gpulayer-{name}.lock"

    def acquire(self, uuid: str, milli: int, *, parent: str = "", is_declared: bool = False) -> Hold | Held:
        """`milli` of a device, at once or not at all. `parent` is the GPU that a MIG instance is a part of.

        StorageFailed: the lock files cannot be made or opened; says which, why, and what to do.
        """
        assert uuid
        assert 0 < milli <= MILLI
        name = (_DECLARED if is_declared else "") + _quoted(uuid)
        locks = [_Lock(name, self.path(uuid, is_declared=is_declared), fcntl.F_WRLCK, milli)]
        if parent:
            path = self.path(parent, is_declared=is_declared)
            locks.append(_Lock(f"{name}^{_quoted(parent)}", path, fcntl.F_RDLCK, MILLI))
        if is_declared:
            self._make_directory()
        hold = Hold(uuid, locks, parent=parent)
        try:
            held = hold.renew()
        except BaseException:
            hold.close()
            raise
        if held is None:
            return hold
        hold.close()
        return held

    def adopt(self, fds: Mapping[str, int]) -> list[Hold]:
        """The holds that these descriptors are: what a daemon before us has shared, by the names of Hold.fds.

        Takes all of them over. What is not such a hold is closed, and the log says why. One whose file was removed
        meanwhile is adopted, and not in place.
        """
        holds = []
        unused = dict(fds)
        for name in sorted(fds):
            own = name.partition("^")[0]
            if name != own and own in fds:
                continue  # comes with its instance
            try:
                hold = self._adopted({each: fd for each, fd in sorted(fds.items()) if each.partition("^")[0] == own})
            except (OSError, ValueError) as error:
                _log_not_adopted(name, error)
                continue
            holds.append(hold)
            for used in hold.fds:
                del unused[used]
        for fd in unused.values():
            with suppress(OSError):  # it may be none
                os.close(fd)
        return holds

    def held_by_others(self, uuid: str, own: Iterable[Hold], *, parent: str = "", is_declared: bool = False) -> int:
        """How many milli-GPUs of it are locked through other descriptions than those of `own`, which are the caller's
        holds of whatever devices. All, where a MIG instance's GPU or a GPU's instance is.

        Made to be asked every second. Of instances in `own` and others' of the same GPU it cannot tell the latter: that
        GPU is then nobody else's. StorageFailed: a file is there and cannot be read.
        """
        ours = [lock for hold in own for lock in hold._locks]
        milli = self._locked_by_others(self.path(uuid, is_declared=is_declared), fcntl.F_WRLCK, ours)
        if parent and milli < MILLI:
            path = self.path(parent, is_declared=is_declared)
            milli = MILLI if self._locked_by_others(path, fcntl.F_RDLCK, ours) else milli
        return milli

    def close(self) -> None:
        """What it asked by; the holds stay."""
        while self._probes:
            os.close(self._probes.popitem()[1][0])

    def _make_directory(self) -> None:
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._data_dir / "devices").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _cannot_use(self._data_dir / "devices", error) from error

    def _adopted(self, fds: Mapping[str, int]) -> Hold:
        """The hold of one device; its own descriptor is the first. ValueError or OSError says what is wrong with it."""
        own = next(iter(fds))
        if "^" in own:
            raise ValueError("the lock of the device itself did not come along")
        is_declared = own.startswith(_DECLARED)
        uuid, parent = _unquoted(own.removeprefix(_DECLARED)), ""
        locks = []
        for name, fd in fds.items():
            parent = _unquoted(name.partition("^")[2])
            kind = fcntl.F_RDLCK if parent else fcntl.F_WRLCK
            path = self.path(parent or uuid, is_declared=is_declared)
            ranges = tuple(where for found, where in _locks_of("self", fd) if found == kind)
            if not ranges or (parent and ranges != (_WHOLE,)):
                raise ValueError(f"descriptor {fd} has not locked what it should have")
            if not _is_of(fd, path):
                raise ValueError(f"descriptor {fd} is not one of {path}")
            os.set_inheritable(fd, False)
            locks.append(_Lock(name, path, kind, _size(ranges)))
            locks[-1].set(fd, ranges)
        return Hold(uuid, locks, parent=parent)

    def _locked_by_others(self, path: Path, kind: int, ours: Iterable[_Lock]) -> int:
        try:
            probe = self._probe(path)
            if probe is None:
                return 0
            fd, file = probe
            not_ours = _gaps(where for lock in ours if lock.file == file for where in lock.ranges)
            return _size(not_ours) - _size(_free(fd, kind, not_ours))
        except OSError as error:
            raise _cannot_use(path, error) from error

    def _probe(self, path: Path) -> tuple[int, FileId] | None:
        """None: there is no file, so nobody holds anything."""
        file, known = _file_at(path), self._probes.get(path)
        if known is not None and known[1] == file:
            return known
        if known is not None:
            os.close(self._probes.pop(path)[0])
        if file is None:
            return None
        try:
            fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._probes[path] = fd, _file_id(found)
        return self._probes[path]


def _log_not_adopted(name: str, error: Exception) -> None:
    # Costs more than the rest of this module together, and a local run or `resources detect` never comes here.
    import structlog

    structlog.get_logger().warning("device_lock.not_adopted", name=name, reason=str(error))


# --- locks of a file ------------------------------------------------------------------------------------------------


def _locked(fd: int, kind: int, milli: int) -> tuple[Range, ...] | int:
    """What it locked, of what was free; or how much is free, if that is too little.

    Two who look at the same time want the same bytes, and each takes them in ascending order: whoever has the highest
    of them gets on, so that one always does.
    """
    free: list[Range] = []
    for _ in range(TRIES_MAX):
        free = _free(fd, kind, [_WHOLE])
        if _size(free) < milli:
            break
        wanted = _chosen(free, milli)
        if _lock_all(fd, kind, wanted):
            return wanted
    return _size(free)


def _free(fd: int, kind: int, within: Iterable[Range]) -> list[Range]:
    """What of these bytes no other description has locked so that such a lock would be refused; ascending.

    The kernel names one lock that is in the way, and not the lowest: what lies beside it is asked about again. Each
    answer takes a byte off at least, so there are 2000 questions at most.
    """
    free, left = [], list(within)
    while left:
        start, end = left.pop()
        taken = _in_the_way(fd, kind, start, end)
        if taken is None:
            free.append((start, end))
        else:
            left += [(low, high) for low, high in ((start, taken[0]), (taken[1], end)) if low < high]
    return sorted(free)


def _chosen(free: Sequence[Range], milli: int) -> tuple[Range, ...]:
    """In one piece where that fits, which is taken by one call; else the lowest bytes."""
    for start, end in free:
        if end - start >= milli:
            return ((start, start + milli),)
    chosen = []
    for start, end in free:
        chosen.append((start, min(end, start + milli)))
        milli -= chosen[-1][1] - start
        if not milli:
            break
    return tuple(chosen)


def _lock_all(fd: int, kind: int, ranges: Iterable[Range]) -> bool:
    """All or nothing; False: somebody else was faster."""
    for start, end in ranges:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, end - start, 0))
        except BlockingIOError:
            # Nobody shares this description yet, so nobody else's locks go.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, MILLI, 0))
            return False
    return True


def _in_the_way(fd: int, kind: int, start: int, end: int) -> Range | None:
    asked = _FLOCK.pack(kind, os.SEEK_SET, start, end - start, 0)
    found, _, first, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    if found == fcntl.F_UNLCK:
        return None
    return first, first + length if length else MILLI  # no length: to the end, wherever that is


def _size(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _gaps(ranges: Iterable[Range]) -> list[Range]:
    """What of the whole is in none of them."""
    gaps, reached = [], 0
    for start, end in sorted(ranges):
        if reached < start:
            gaps.append((reached, start))
        reached = max(reached, end)
    if reached < MILLI:
        gaps.append((reached, MILLI))
    return gaps


# --- files ----------------------------------------------------------------------------------------------------------


def _quoted(uuid: str) -> str:
    return quote(uuid, safe="", errors="surrogatepass")


def _unquoted(name: str) -> str:
    return unquote(name, errors="surrogatepass")


def _file_id(found: os.stat_result) -> FileId:
    return found.st_dev, found.st_ino


def _file_at(path: Path) -> FileId | None:
    try:
        return _file_id(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _opened(path: Path) -> int:
    """The file, to lock it; made if there is none. OSError."""
    for _ in range(TRIES_MAX):
        try:
            # Without O_CREAT: in a sticky directory that is refused for a file of somebody else's, even to root
            # (fs.protected_regular).
            fd = os.open(path, os.O_RDWR | _OPEN_FLAGS)
        except FileNotFoundError:
            _make(path)
            continue
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return fd
    raise OSError(errno.EBUSY, "it is removed as often as it is made")


def _make(path: Path) -> None:
    """An empty file that every user may lock; at once, so that nobody finds it while its mode is still that which our
    umask gave it, and nobody for good if we die just then."""
    made = f"{path}.{os.urandom(8).hex()}"
    fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o666)
    try:
        os.fchmod(fd, 0o666)
        with suppress(FileExistsError, FileNotFoundError):  # somebody else was faster, or is tidying
            os.link(made, path)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(made)


def _is_of(fd: int, path: Path) -> bool:
    """Whether it is the file there, or was until that was removed."""
    if _file_id(os.fstat(fd)) == _file_at(path):
        return True
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == f"{path.name} (deleted)"


_HINTS = {
    errno.ENOSPC: "free some space or, on a tmpfs, some files",
    errno.EDQUOT: "free some space",
    errno.EMFILE: "allow more open files: ulimit -n, or LimitNOFILE= of the unit",
    errno.ENFILE: "the host has no more open files: raise fs.file-max",
    errno.ENOLCK: "the kernel has no memory for locks: free some",
    errno.EROFS: "make it writable for gpulayer: ReadWritePaths= of the unit, or a bind mount",
    errno.EAGAIN: "its owner keeps others from opening it (a lease): end that, or remove the file",
    errno.EINVAL: "locks of open file descriptions are needed: Linux 3.15 or later",
}
# What os.open() says of a symbolic link, a directory, a socket.
_NOT_PLAIN = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


def _cannot_use(path: Path, error: OSError) -> StorageFailed:
    what = error.strerror or str(error)
    hint = _HINTS.get(error.errno or 0, f"check that everyone may write in {path.parent}")
    if error.errno in _NOT_PLAIN:
        what, hint = "it is not a plain file", "somebody has put it there: remove it"
    elif error.errno == errno.EACCES:
        with suppress(OSError):
            found = os.stat(path, follow_symlinks=False)
            what += f": it is user {_user(found.st_uid)}'s, with mode {stat.S_IMODE(found.st_mode):04o}"
            hint = "every user must be able to lock it: chmod 0666, or remove it"
    code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    return StorageFailed(f"cannot use device lock {path}: {what}", hint=hint, code=code)


# --- who ------------------------------------------------------------------------------------------------------------


def who_holds(path: Path) -> tuple[Holder, ...]:
    """The processes that have this lock file locked, as far as /proc shows them to this user; shims last.

    Walks through all of /proc: for when something is refused, not for every second.
    """
    try:
        file = _file_at(path)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return ()
    holders = [_holder(pid) for pid in pids if file is not None and _has_locked(pid, path, file)]
    return tuple(sorted(holders, key=lambda holder: (holder.command == _SHIM, holder.pid)))


def _listed(holders: Sequence[Holder]) -> str:
    # A shim holds what its daemon does; it is worth a word where the daemon is gone.
    named = [holder for holder in holders if holder.command != _SHIM] or list(holders)
    if not named:
        return "another user's gpulayer" if os.geteuid() else "a process that is not seen from here, as in a container"
    more = f" and {len(named) - HOLDERS_NAMED_MAX} more" if len(named) > HOLDERS_NAMED_MAX else ""
    return ", ".join(str(holder) for holder in named[:HOLDERS_NAMED_MAX]) + more


def _has_locked(pid: int, path: Path, file: FileId) -> bool:
    try:
        return any(_is_lock(pid, int(fd), path, file) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # it has ended, or is another user's


def _is_lock(pid: int, fd: int, path: Path, file: FileId) -> bool:
    link = f"/proc/{pid}/fd/{fd}"
    try:
        # The name first: to look at any file itself might wait for a file server that is gone.
        if os.path.basename(os.readlink(link)) != path.name:
            return False
        # Who only asks has it open, too.
        return _file_id(os.stat(link)) == file and bool(_locks_of(pid, fd))
    except OSError:
        return False


def _locks_of(pid: int | str, fd: int) -> list[tuple[int, Range]]:
    """What is locked through a descriptor's description: (F_WRLCK or F_RDLCK, where). OSError."""
    found = []
    with open(f"/proc/{pid}/fdinfo/{fd}") as file:
        for line in file:
            # lock:   1: OFDLCK ADVISORY  WRITE -1 00:1b:12 0 499
            words = line.split()
            if words[:1] == ["lock:"] and len(words) == 9 and words[2] == "OFDLCK":
                end = MILLI if words[8] == "EOF" else int(words[8]) + 1
                found.append((fcntl.F_WRLCK if words[4] == "WRITE" else fcntl.F_RDLCK, (int(words[7]), end)))
    return sorted(found)


def _holder(pid: int) -> Holder:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return Holder(pid=pid, user="unknown", command="it has just ended")
    arguments = [printable(os.fsdecode(each)) for each in _read(pid, "cmdline").split(b"\0")]
    command = _command(pid, arguments)[:COMMAND_CHARACTERS_MAX]
    data_dir = _data_dir(pid, uid, arguments) if command == "gpulayer up" else ""
    return Holder(pid=pid, user=_user(uid), command=command, data_dir=data_dir)


def _command(pid: int, arguments: Sequence[str]) -> str:
    if _read(pid, "comm").strip() == b"gpulayer-shim":
        return _SHIM
    if _PRIVATE_NODE in arguments:
        return _LOCAL_RUN
    names = [os.path.basename(each) for each in arguments]
    for place, name in enumerate(names[:-1]):
        if name == "gpulayer" or arguments[place].endswith("gpulayer/__main__.py"):
            return f"gpulayer {names[place + 1]}".strip()
    return names[0] or "no name"


def _data_dir(pid: int, uid: int, arguments: Sequence[str]) -> str:
    """As the daemon was told, else what it takes by itself; empty if that cannot be seen."""
    for place, argument in enumerate(arguments[:-1]):
        if argument == "--data-dir":
            return arguments[place + 1]
        if argument.startswith("--data-dir="):
            return argument.partition("=")[2]
    variables = (os.fsdecode(each).partition("=") for each in _read(pid, "environ").split(b"\0"))
    environ = {name: value for name, _, value in variables if name}
    return printable(default_data_dir(environ, uid)) if environ else ""


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
