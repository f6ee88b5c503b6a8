"""Writes what a replica says into logs/, within its bounds, whatever the disk does.

A record is there as a whole or not at all. What could not be written is counted, and the count stands in the log (GAP)
before the next record that could be. Nothing here raises for a full or broken disk: the replica must not notice it.
"""

from __future__ import annotations

import errno
import json
import os
import time
from typing import TypeAlias

from gpulayer.shim import log_format

Payload: TypeAlias = bytes | memoryview

# Room for the segment header and the longest record that is not output, several times over.
MAX_BYTES_LEAST = 16 * 1024
TEXT_BYTES_MAX = 2 * 1024
# Fill a segment's rest with part of a chunk rather than waste it, unless it is hardly worth a record.
SPLIT_BYTES_LEAST = 4096
# How often a disk that refused is tried again while output pours in.
RETRY_SECONDS = 0.05


class LogWriter:
    """At most `keep` segments of at most `max_bytes`, the one being written included. `logs_fd`: the directory's."""

    def __init__(self, logs_fd: int, *, max_bytes: int, keep: int) -> None:
        self.logs_fd = logs_fd
        self._max_bytes = max(max_bytes, MAX_BYTES_LEAST)
        self._keep = max(keep, 1)
        self._segment_fd = -1
        self._segment_bytes = 0
        self._number, self._offset = _end_of_log(logs_fd)
        self._retry_at = 0.0
        self._gap_bytes = 0
        self._gap_lines = 0
        self._gap_reason = ""
        self.lost_bytes = 0
        self.lost_lines = 0

    def output(self, stream: int, run: int, chunk: memoryview) -> None:
        at_utc_ns = time.time_ns()
        while chunk:
            room = self._max_bytes - self._segment_bytes - log_format.RECORD_HEADER.size - self._gap_room()
            if self._segment_fd < 0 or room < min(len(chunk), SPLIT_BYTES_LEAST):
                if not self._open_next():
                    self._lose(chunk)
                    return
                continue
            if not self._append(log_format.OUTPUT, stream, run, at_utc_ns, chunk[:room]):
                self._lose(chunk)
                return
            chunk = chunk[room:]

    def note(self, kind: int, run: int, text: str) -> None:
        """A record that is not output: what the supervisor has to say. Tried even where the disk refused a moment
        ago."""
        payload = text.encode("utf-8", "replace")[:TEXT_BYTES_MAX]
        self._retry_at = 0.0
        needed = log_format.RECORD_HEADER.size + len(payload) + self._gap_room()
        has_room = self._segment_fd >= 0 and self._segment_bytes + needed <= self._max_bytes
        if not has_room and not self._open_next():
            return
        self._append(kind, log_format.NO_STREAM, run, time.time_ns(), payload)

    def move_to(self, logs_fd: int) -> None:
        """Another directory, since the one before was removed by hand: goes on with the next segment in it."""
        self._leave_segment()
        os.close(self.logs_fd)
        self.logs_fd = logs_fd

    def close(self) -> None:
        if self._segment_fd >= 0:
            os.close(self._segment_fd)
            self._segment_fd = -1

    def _append(self, kind: int, stream: int, run: int, at_utc_ns: int, payload: Payload) -> bool:
        """One record, and before it, in the same write, what was lost since the last one."""
        if self._gap_bytes and time.monotonic() < self._retry_at:
            return False
        buffers: list[Payload] = []
        if self._gap_bytes:
            gap = self._gap_text()
            buffers += [log_format.pack_record_header(log_format.GAP, 0, run, len(gap), at_utc_ns), gap]
        buffers += [log_format.pack_record_header(kind, stream, run, len(payload), at_utc_ns), payload]
        total = sum(map(len, buffers))
        try:
            written = os.writev(self._segment_fd, buffers)
            if written == total:
                self._segment_bytes += total
                self._gap_bytes = self._gap_lines = 0
                return True
            self._refused("the disk is full")
        except OSError as error:
            self._refused(os.strerror(error.errno or 0))
        self._cut_back()
        return False

    def _cut_back(self) -> None:
        """Removes the half of a record that fitted. If even that fails, the reader stops at the tear and takes the
        next."""
        try:
            os.ftruncate(self._segment_fd, self._segment_bytes)
        except OSError:
            self.close()

    def _open_next(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        self._leave_segment()
        number = self._number + 1
        fd = -1
        try:
            # The oldest goes before the next one grows: the bound holds at every moment.
            for old in log_format.segment_numbers(self.logs_fd)[: -(self._keep - 1) or None]:
                os.unlink(log_format.segment_name(old), dir_fd=self.logs_fd)
            header = log_format.pack_segment_header(self._offset, time.time_ns())
            name = log_format.segment_name(number)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=self.logs_fd)
            if os.write(fd, header) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                _unlink(log_format.segment_name(number), self.logs_fd)
            self._refused(os.strerror(error.errno or 0))
            return False
        self._number, self._segment_fd, self._segment_bytes = number, fd, len(header)
        return True

    def _leave_segment(self) -> None:
        """Before the next is opened, since it may be among those that are unlinked for it (keep=1)."""
        self._offset += max(self._segment_bytes - log_format.SEGMENT_HEADER.size, 0)
        self._segment_bytes = 0
        self.close()

    def _refused(self, reason: str) -> None:
        self._gap_reason = reason
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def _lose(self, chunk: memoryview) -> None:
        lines = bytes(chunk).count(b"\n")
        self._gap_bytes += len(chunk)
        self._gap_lines += lines
        self.lost_bytes += len(chunk)
        self.lost_lines += lines

    def _gap_text(self) -> bytes:
        gap = {"lost_bytes": self._gap_bytes, "lost_lines": self._gap_lines, "reason": self._gap_reason}
        return json.dumps(gap).encode()

    def _gap_room(self) -> int:
        return log_format.RECORD_HEADER.size + len(self._gap_text()) if self._gap_bytes else 0


def _end_of_log(logs_fd: int) -> tuple[int, int]:
    """The number of the last segment and the offset at its end. A new writer never goes on in an old segment: it may
    end in a tear."""
    numbers = log_format.segment_numbers(logs_fd)
    if not numbers:
        return 0, 0
    try:
        fd = os.open(log_format.segment_name(numbers[-1]), os.O_RDONLY | os.O_CLOEXEC, dir_fd=logs_fd)
    except OSError:
        return numbers[-1], 0
    try:
        header_bytes = log_format.SEGMENT_HEADER.size
        offset = log_format.segment_offset(os.read(fd, header_bytes)) or 0
        return numbers[-1], offset + max(os.fstat(fd).st_size - header_bytes, 0)
    except OSError:
        return numbers[-1], 0
    finally:
        os.close(fd)


def _unlink(name: str, directory_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=directory_fd)
    except OSError:
        pass  # an empty segment: the reader takes it for a torn one and goes on
