"""What a node has heard of its orders, durable: the stamp below which it believes nobody, the orders, the registry.

One file. Not async: node/orders.py calls it in a thread, one call at a time.

    two blocks of 4 KiB, the same in both: the newest (generation, term)      overwritten in place, rarely
    records, each with length and checksum: all orders, then what changed     appended, one sync each
    zeros: room that is kept, so that a full disk refuses no withdrawal

The file is written anew, and put in the place of the old one, when changes take more room than the orders.

Damage. A record that cannot be read ends the reading: after a power cut that is one that nobody had been promised, else
some orders of this term are forgotten. Either is safe, because a restarted node starts nothing before the leader has
told it all its orders, and within a term there is only one who tells; what protects from an older leader (P4) is the
term, which is kept three times: in the records and in both blocks. Only if none of the three can be read nobody knows
what was heard, and the store refuses to be opened.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpulayer.core.orders.changes import bytes_of
from gpulayer.core.orders.messages import HeardOrders, OrderStamp
from gpulayer.core.replica.messages import Order
from gpulayer.model.errors import StorageFailed
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.runtime.failpoints import failpoint
from gpulayer.wire.codec import BYTES_MAX, DecodeError, EncodeError, decode, encode

FILE_NAME = "orders"
BLOCK_BYTES = 4096
# What a node may hear while its disk is full: some hundred withdrawals.
RESERVE_BYTES = 256 * 1024
# Below this there is nothing to gain from writing the file anew.
CHANGES_BYTES_MIN = 64 * 1024
# Some ten thousand orders, or dozens with an environment of the largest size.
FILE_BYTES_MAX = 256 * 1024 * 1024
# One record is decoded at once, and the codec has a bound.
RECORD_BYTES = 4 * 1024 * 1024

_MAGIC = b"gpulayer orders 1"
_BLOCK = struct.Struct(f">{len(_MAGIC)}sQQ")
_CRC = struct.Struct(">I")
_HEAD = struct.Struct(">II")
RECORDS_AT = 2 * BLOCK_BYTES
_DAMAGE_HINT = (
    "if the leader of the cluster is the one it should be, move the file away: the node then follows whoever leads now"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersRecord:
    """One record. `is_whole`: `changed` are all orders, and the ones before do not count."""

    stamp: OrderStamp
    is_whole: bool
    changed: tuple[Order, ...] = ()
    gone: tuple[AttemptId, ...] = ()
    registry: tuple[NodeId, ...] | None = None
    """None: as it was."""
    continues: bool = False
    """The record before it, which could not hold all orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    heard: HeardOrders | None
    """None: nothing was ever heard here."""
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _File:
    fd: int
    end: int
    """Of the last record."""
    size: int
    whole_bytes: int
    """Of the records that hold all orders; what follows are changes."""

    @property
    def changes_bytes(self) -> int:
        return self.end - RECORDS_AT - self.whole_bytes


class OrderStore:
    """Made by open_order_store()."""

    def __init__(self, path: Path, heard: HeardOrders | None, file: _File | None) -> None:
        """`file`: what can be added to; None: it is written anew."""
        self.path = path
        self._file = file
        """What is on the disk, where that is known to be what this object thinks. Not so after a failed write."""
        self._stamp = heard.stamp if heard is not None else OrderStamp(0, 0, 0)
        self._orders: dict[AttemptId, Order] = {o.assignment.id: o for o in heard.orders} if heard is not None else {}
        self._registry = heard.registry if heard is not None else ()

    def persist(self, heard: HeardOrders) -> None:
        """Durable on return. StorageFailed: it is not known to be; the store goes on, and may be asked again.

        The time it takes is that of one sync, and of writing what changed since the last call."""
        assert heard.is_whole
        assert heard.stamp >= self._stamp, "what was heard is never taken back"
        orders = {order.assignment.id: order for order in heard.orders}
        try:
            if self._file is None or not self._append(self._file, heard, orders):
                self._write_anew(heard, orders)
        except OSError as error:
            self.close()
            code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
            raise StorageFailed(
                f"cannot keep the orders of this node in {self.path}: {error.strerror or error}",
                hint="nothing new is begun or stopped here until it can; make room, or look at the disk",
                code=code,
            ) from error
        except EncodeError as error:
            raise StorageFailed(f"cannot keep the orders of this node in {self.path}: {error}") from error
        self._stamp, self._orders, self._registry = heard.stamp, orders, heard.registry

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file.fd)
            self._file = None

    # --- writing --------------------------------------------------------------------------------------------------

    def _append(self, file: _File, heard: HeardOrders, orders: Mapping[AttemptId, Order]) -> bool:
        """False: the file shall be written anew, and nothing was added."""
        changed = tuple(order for id, order in orders.items() if self._orders.get(id) != order)
        gone = tuple(id for id in self._orders if id not in orders)
        registry = heard.registry if heard.registry != self._registry else None
        data = _records(heard.stamp, changed, gone=gone, registry=registry, is_whole=False)
        if file.changes_bytes + len(data) > max(CHANGES_BYTES_MIN, file.whole_bytes):
            # Without room for a second file this one grows on, into what is kept.
            with suppress(OSError):
                self._write_anew(heard, orders)
            if self._file is not file:
                return self._file is not None
        if file.end + len(data) > file.size:
            file.size = _reserve(file.fd, file.end + len(data) + RESERVE_BYTES)
        if (heard.stamp.generation, heard.stamp.term) != (self._stamp.generation, self._stamp.term):
            # Before the record, and both: whatever a power cut leaves of this is one that was heard.
            _write_blocks(file.fd, heard.stamp)
        _write_all(file.fd, data, file.end)
        failpoint("orders.before_sync")
        os.fdatasync(file.fd)
        file.end += len(data)
        return True

    def _write_anew(self, heard: HeardOrders, orders: Mapping[AttemptId, Order]) -> None:
        """The old file stays until the new one is durable; without one in use afterwards, if its name may not be."""
        data = _records(heard.stamp, tuple(orders.values()), registry=heard.registry, is_whole=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            size = _reserve(fd, RECORDS_AT + len(data) + RESERVE_BYTES)
            _write_blocks(fd, heard.stamp)
            _write_all(fd, data, RECORDS_AT)
            os.fsync(fd)
            failpoint("orders.before_replace")
            os.replace(temporary, self.path)
            self.close()
            _sync_directory(self.path.parent)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._file = _File(fd=fd, end=RECORDS_AT + len(data), size=size, whole_bytes=len(data))


# --- reading ------------------------------------------------------------------------------------------------------


def open_order_store(directory: Path) -> tuple[OrderStore, Recovered]:
    """Read what a data directory holds. StorageFailed: it cannot be read, or nothing certain can be told from it."""
    path = directory / FILE_NAME
    try:
        data = _content(path)
    except OSError as error:
        raise StorageFailed(
            f"cannot read {path}: {error.strerror or error}", hint="look at the disk, and at who owns the file"
        ) from error
    if data is None:
        return OrderStore(path, None, None), Recovered(heard=None)
    blocks = [_read_block(data[at : at + BLOCK_BYTES]) for at in (0, BLOCK_BYTES)]
    read = _read_records(data)
    stamps = [stamp for stamp in (*blocks, read.heard.stamp if read.heard is not None else None) if stamp is not None]
    if not stamps:
        raise StorageFailed(
            f"{path} is damaged: no term can be read in it, so it cannot be told which leader is an old one",
            hint=_DAMAGE_HINT,
        )
    warnings = [f"{path}: {read.trouble}"] if read.trouble else []
    warnings += [f"{path}: block {number} is damaged" for number, stamp in enumerate(blocks) if stamp is None]
    heard, newest = read.heard, max(stamps)
    if heard is None or (heard.stamp.generation, heard.stamp.term) < (newest.generation, newest.term):
        warnings.append(f"{path}: no orders of term {newest.term} can be read; the leader is asked for all of them")
        # What is known of an older term says still what runs here, which is looked after until the leader answers.
        heard = replace(heard or HeardOrders(stamp=newest), stamp=newest, is_whole=False)
    file: _File | None = None
    if not warnings:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        file = _File(fd=fd, end=read.end, size=len(data), whole_bytes=read.whole_bytes)
    return OrderStore(path, heard, file), Recovered(heard=heard, warnings=tuple(warnings))


def _content(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
            raise OSError(f"it is no file, or larger than {FILE_BYTES_MAX // 2**20} MiB")
        return file.read()


def _read_block(data: bytes) -> OrderStamp | None:
    """The lowest stamp of the newest term."""
    if len(data) < _BLOCK.size + _CRC.size:
        return None
    magic, generation, term = _BLOCK.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _BLOCK.size)
    if magic != _MAGIC or crc != zlib.crc32(data[: _BLOCK.size]):
        return None
    return OrderStamp(generation, term, 0)


@dataclass(slots=True)
class _Read:
    """What the records up to the first unreadable one say, and what is wrong with that."""

    heard: HeardOrders | None = None
    end: int = RECORDS_AT
    whole_bytes: int = 0
    trouble: str = ""


def _read_records(data: bytes) -> _Read:
    read = _Read()
    orders: dict[AttemptId, Order] = {}
    while read.end + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, read.end)
        if length == 0:
            break
        content = data[read.end + _HEAD.size : read.end + _HEAD.size + length]
        if length > BYTES_MAX or len(content) < length or crc != zlib.crc32(content):
            break
        try:
            record: OrdersRecord = decode(OrdersRecord, content)
        except DecodeError as error:
            read.trouble = f"the record at byte {read.end} is of another version, or damaged: {error}"
            break
        if read.heard is None and not record.is_whole:
            read.trouble = "it does not begin with all orders"
            break
        _take(read, record, orders)
        read.end += _HEAD.size + length
        if record.is_whole or record.continues:
            read.whole_bytes = read.end - RECORDS_AT
    if not read.trouble and data.count(0, read.end) != len(data) - read.end:
        read.trouble = f"what was written last, at byte {read.end}, was not finished, or is damaged; it does not count"
    if read.heard is not None:
        read.heard = replace(read.heard, orders=tuple(orders.values()))
    return read


def _take(read: _Read, record: OrdersRecord, orders: dict[AttemptId, Order]) -> None:
    if record.is_whole:
        orders.clear()
    for id in record.gone:
        orders.pop(id, None)
    orders |= {order.assignment.id: order for order in record.changed}
    before = read.heard.registry if read.heard is not None else ()
    registry = record.registry if record.registry is not None else before
    read.heard = HeardOrders(stamp=record.stamp, registry=registry)


def _block(stamp: OrderStamp) -> bytes:
    data = _BLOCK.pack(_MAGIC, stamp.generation, stamp.term)
    return data + _CRC.pack(zlib.crc32(data))


def _records(
    stamp: OrderStamp,
    changed: tuple[Order, ...],
    *,
    gone: tuple[AttemptId, ...] = (),
    registry: tuple[NodeId, ...] | None,
    is_whole: bool,
) -> bytes:
    """In one record, or as many as it takes."""
    groups: list[list[Order]] = [[]]
    size = 0
    for order in changed:
        if size > RECORD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(order)
        size += bytes_of(order)
    first, *others = (tuple(group) for group in groups)
    records = [OrdersRecord(stamp=stamp, is_whole=is_whole, changed=first, gone=gone, registry=registry)]
    records += [OrdersRecord(stamp=stamp, is_whole=False, changed=group, continues=is_whole) for group in others]
    return b"".join(map(_framed, records))


def _framed(record: OrdersRecord) -> bytes:
    content = encode(record)
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _write_blocks(fd: int, stamp: OrderStamp) -> None:
    for at in (0, BLOCK_BYTES):
        _write_all(fd, _block(stamp), at)


def _reserve(fd: int, size: int) -> int:
    os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):  # else there is no promise for a full disk
        os.posix_fallocate(fd, 0, size)
    return size


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
