"""The bytes of logs/NNNNNNNN.log: what the writer (the shim) and the reader (gpulayer/runtime/replica_logs.py) agree
on.

    segment = segment header, record*
    segment header = magic "gpulog\\r\\n", version u16, header bytes u16, 0 u32, offset u64, opened_at_ns u64
    record = sync "GL", kind u8, stream u8, run u32, payload bytes u32, at_utc_ns u64, crc32 of these 20 bytes u32,
    payload

All little endian. `offset` counts the bytes of all records before this segment, so that a reader that comes late can
say how much it missed. Output is stored in the chunks in which it was read, not by lines: the replica may write
anything at any speed, and lines are the reader's business. The checksum covers only the header: it tells a tear or a
zeroed block from a record, and a payload that was damaged on the disk is the file system's to notice.
"""

from __future__ import annotations

import os
import struct
from binascii import crc32
from typing import NamedTuple

MAGIC = b"gpulog\r\n"
VERSION = 1
SEGMENT_HEADER = struct.Struct("<8sHHIQQ")
RECORD_HEADER = struct.Struct("<2sBBIIQI")
SYNC = b"GL"
_UNCHECKED = struct.Struct("<2sBBIIQ")
# Looked up once: a reader of small records does this a hundred thousand times.
_HEADER_BYTES, _UNCHECKED_BYTES, _unpack_header = RECORD_HEADER.size, _UNCHECKED.size, RECORD_HEADER.unpack_from

OUTPUT, RUN_STARTED, RUN_ENDED, SUPERVISOR, GAP = range(1, 6)
STDOUT, STDERR, NO_STREAM = 1, 2, 0


class RecordHeader(NamedTuple):
    kind: int
    stream: int
    run: int
    payload_bytes: int
    at_utc_ns: int


def pack_segment_header(offset: int, opened_at_ns: int) -> bytes:
    return SEGMENT_HEADER.pack(MAGIC, VERSION, SEGMENT_HEADER.size, 0, offset, opened_at_ns)


def segment_offset(header: bytes) -> int | None:
    """The offset of a segment's first record; None if these are not the first bytes of a segment we can read."""
    if len(header) < SEGMENT_HEADER.size:
        return None
    magic, version, header_bytes, _, offset, _ = SEGMENT_HEADER.unpack_from(header)
    return int(offset) if (magic, version, header_bytes) == (MAGIC, VERSION, SEGMENT_HEADER.size) else None


def pack_record_header(kind: int, stream: int, run: int, payload_bytes: int, at_utc_ns: int) -> bytes:
    start = _UNCHECKED.pack(SYNC, kind, stream, run, payload_bytes, at_utc_ns)
    return start + crc32(start).to_bytes(4, "little")


def record_header(buffer: bytes | memoryview, position: int = 0) -> RecordHeader | None:
    """None if no (whole, undamaged) header stands there."""
    if len(buffer) - position < _HEADER_BYTES:
        return None
    sync, kind, stream, run, payload_bytes, at_utc_ns, checksum = _unpack_header(buffer, position)
    if sync != SYNC or crc32(buffer[position : position + _UNCHECKED_BYTES]) != checksum:
        return None
    return RecordHeader(kind, stream, run, payload_bytes, at_utc_ns)


def segment_name(number: int) -> str:
    return f"{number:08d}.log"


def segment_numbers(directory: str | int | os.PathLike[str]) -> list[int]:
    """The segments in a directory (path or descriptor), oldest first; none if there is no such directory."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".log") and name[:-4].isdigit())
