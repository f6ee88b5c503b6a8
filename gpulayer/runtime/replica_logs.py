"""Reads what the shims write (gpulayer/shim/log_format.py): lines, each with its time, stream and run.

Only files and no waiting: the daemon calls it for `gpulayer job logs` and for the last lines of a failed run, and
follows by calling read_available() again. It reads beside the writer without a lock, since a record counts only when
it is there as a whole; a slow reader costs the writer nothing, it misses what was rotated away and is told how much.
Whatever a crash or a disk left in the files, nothing here raises for it: reading stops at the tear and goes on with
the next segment.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from gpulayer.shim import log_format, notes
from gpulayer.shim.log_format import RecordHeader

Stream: TypeAlias = Literal["stdout", "stderr", "supervisor"]
Kind: TypeAlias = Literal["output", "run_started", "run_ended", "supervisor", "gap", "rotated"]

# A longer line is given in pieces: one line of a replica must not take the daemon's memory.
LINE_BYTES_MAX = 64 * 1024
# How much is read at once; a record may be longer and is then read in full.
BLOCK_BYTES = 256 * 1024
# A record longer than this is not one: the writer's chunks are 256 KiB at most.
RECORD_BYTES_MAX = 64 * 1024 * 1024
# What is above is no time: JSON knows Infinity, and integers without end.
UPTIME_SECONDS_MAX = 1e12

_STREAMS: dict[int, Stream] = {log_format.STDOUT: "stdout", log_format.STDERR: "stderr"}


class LogLine(NamedTuple):
    """One line. (A tuple rather than a dataclass: a log has hundreds of thousands, and this is made three times as
    fast.)"""

    at_utc: float
    """When its beginning was read from the replica."""
    stream: Stream
    run: int
    text: str
    kind: Kind = "output"
    partial: bool = False
    """No newline (yet): the run ended first, the reader came to the end, or it is a piece of an overlong line."""
    lost_bytes: int = 0
    lost_lines: int = 0


class Cursor(NamedTuple):
    """Where a reader stands, to go on from later or elsewhere (with the same `run`): a record, and how many lines
    that came from there on were given already."""

    segment: int
    offset: int
    lines: int

    def __str__(self) -> str:
        return f"{self.segment}.{self.offset}.{self.lines}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """ValueError if it is not one."""
        segment, offset, lines = (int(part) for part in text.split("."))
        if min(segment, offset, lines) < 0:
            raise ValueError(f"not a place in a log: {text!r}")
        return cls(segment, offset, lines)


class LogReader:
    """Goes through a logs directory once, from the oldest segment or a cursor, as far as the writer has come."""

    def __init__(
        self,
        directory: Path,
        *,
        since_utc: float | None = None,
        run: int | None = None,
        cursor: Cursor | None = None,
    ) -> None:
        self._directory = directory
        self._since_utc = since_utc
        self._run = run
        self._fd = -1
        self._segment = 0
        self._position = 0
        """Of the next record, in the segment's file."""
        self._first_offset = 0
        """The segment's place in all that was ever written, see log_format."""
        self._block = b""
        self._block_start = 0
        self._lines: deque[LogLine] = deque()
        self._unfinished: dict[tuple[int, int], tuple[bytes, float]] = {}
        """(run, stream) -> the beginning of a line and its time."""
        self._anchor = Cursor(0, 0, 0)
        """The last record before which no line was unfinished; `lines` counts what was taken from there on."""
        self._skip_lines = 0
        self._at_beginning = cursor is None
        self._end: tuple[int, int] | None = None
        """Segment and offset from which on nothing is read; None: as far as the writer has come."""
        if cursor is not None:
            self._go_to(cursor)

    @property
    def cursor(self) -> Cursor:
        return self._anchor

    def read_available(self, max_lines: int = 10_000) -> list[LogLine]:
        """The next lines, [] if there are none yet. A line without its newline is held back until it or its run
        ends."""
        found: list[LogLine] = []
        while len(found) < max_lines:
            if not self._lines and not self._take_record():
                break
            while self._lines and len(found) < max_lines:
                line = self._lines.popleft()
                self._anchor = self._anchor._replace(lines=self._anchor.lines + 1)
                if self._skip_lines:
                    self._skip_lines -= 1
                elif self._since_utc is None or line.at_utc >= self._since_utc:
                    found.append(line)
        return found

    def unfinished(self) -> list[LogLine]:
        """The beginnings of lines that are not complete yet; for whoever will not read on."""
        lines = [
            LogLine(at_utc, _STREAMS.get(stream, "supervisor"), run, _text(begun), "output", True)
            for (run, stream), (begun, at_utc) in self._unfinished.items()
        ]
        return [line for line in lines if self._since_utc is None or line.at_utc >= self._since_utc]

    def stop_at_present_end(self) -> None:
        """Read no more than is there now: a replica may write faster than anybody can read, and that would have no
        end. `go_on()` undoes it."""
        if self._fd < 0:
            self._open_next()  # before the end is looked up, or a fast writer may have removed all up to it by then
        self._end = newest_end(self._directory)

    def stop_at(self, end: tuple[int, int]) -> None:
        """Read no further than newest_end() was at some moment before."""
        self._end = end

    def go_on(self) -> None:
        self._end = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Records

    def _take_record(self) -> bool:
        """Turns the next record into lines (perhaps none); False if there is no whole one."""
        if self._fd < 0 and not self._open_next():
            return False
        while self._is_at_end() or (record := self._next_record()) is None:
            if self._is_at_end():
                return False
            # Looked for before the last read: a segment is complete once a later one exists.
            if not self._has_later_segment():
                return False
            if (record := self._next_record(reread=True)) is not None:
                break
            if not self._open_next():
                return False
            if self._lines:
                return True
        header, payload = record
        if not self._unfinished:
            self._anchor = Cursor(self._segment, self._position, 0)
        self._position += log_format.RECORD_HEADER.size + header.payload_bytes
        if self._at_beginning:
            self._at_beginning = False
            self._note_what_came_before(header)
        if self._run is None or header.run == self._run:
            self._take(header, payload)
        return True

    def _is_at_end(self) -> bool:
        return self._end is not None and (self._segment, self._position) >= self._end

    def _next_record(self, *, reread: bool = False) -> tuple[RecordHeader, bytes] | None:
        """The record at the position, if it is there as a whole."""
        header_bytes = log_format.RECORD_HEADER.size
        start = self._position - self._block_start
        header = None if reread else log_format.record_header(self._block, start) if start >= 0 else None
        if header is None or start + header_bytes + header.payload_bytes > len(self._block):
            self._read_block(BLOCK_BYTES)
            start = 0
            header = log_format.record_header(self._block)
            if header is None or header.payload_bytes > RECORD_BYTES_MAX:
                return None
            if header_bytes + header.payload_bytes > len(self._block):
                self._read_block(header_bytes + header.payload_bytes)
                # Read anew, and checked anew: the writer may have cut this record back meanwhile and written another.
                header = log_format.record_header(self._block)
                if header is None or header_bytes + header.payload_bytes > len(self._block):
                    return None
        payload_start = start + header_bytes
        return header, self._block[payload_start : payload_start + header.payload_bytes]

    def _read_block(self, size: int) -> None:
        self._block_start = self._position
        try:
            self._block = os.pread(self._fd, size, self._position)
        except OSError:
            self._block = b""  # a bad sector is a tear

    # Segments

    def _has_later_segment(self) -> bool:
        numbers = log_format.segment_numbers(self._directory)
        return bool(numbers) and numbers[-1] > self._segment

    def _open_next(self) -> bool:
        """The oldest segment after the present one that can be read. Says what lies between, if anything does."""
        expected = self._first_offset + max(self._position - log_format.SEGMENT_HEADER.size, 0)
        for number in log_format.segment_numbers(self._directory):
            if number <= self._segment:
                continue
            fd, offset = self._open(number)
            if fd < 0:
                continue
            missed = offset - expected
            if self._segment and missed > 0:
                self._note_missing(missed, is_rotated=number > self._segment + 1)
            self._enter(number, fd, offset)
            return True
        return False

    def _open(self, number: int) -> tuple[int, int]:
        """(-1, 0) for one that is gone, or that is no segment: an interrupted beginning of one has no header."""
        try:
            fd = os.open(self._directory / log_format.segment_name(number), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1, 0
        try:
            offset = log_format.segment_offset(os.pread(fd, log_format.SEGMENT_HEADER.size, 0))
        except OSError:
            offset = None
        if offset is None:
            os.close(fd)
            return -1, 0
        return fd, offset

    def _enter(self, number: int, fd: int, offset: int) -> None:
        self.close()
        self._fd, self._segment, self._first_offset = fd, number, offset
        self._position = log_format.SEGMENT_HEADER.size
        self._block, self._block_start = b"", self._position
        if not self._unfinished and not self._lines:
            self._anchor = Cursor(number, self._position, 0)

    def _go_to(self, cursor: Cursor) -> None:
        if cursor.segment == 0:
            self._at_beginning = True
            return
        fd, offset = self._open(cursor.segment)
        if fd >= 0:
            self._enter(cursor.segment, fd, offset)
            self._position = max(cursor.offset, log_format.SEGMENT_HEADER.size)
            self._anchor = Cursor(cursor.segment, self._position, 0)
            self._skip_lines = cursor.lines
            return
        # Rotated away: begin with what is left. How much was missed cannot be told from a segment that is gone.
        self._segment = cursor.segment
        numbers = [number for number in log_format.segment_numbers(self._directory) if number > cursor.segment]
        if numbers:
            self._segment = numbers[0] - 1
            fd, offset = self._open(numbers[0])
            if fd >= 0:
                self._enter(numbers[0], fd, offset)
        self._lines.append(_rotated(0.0, self._run or 0, 0))

    # Lines

    def _note_what_came_before(self, first: RecordHeader) -> None:
        """At the beginning of the oldest segment: was there anything before it that the caller asked for?"""
        if self._first_offset == 0:
            return
        if self._run is None or (first.run == self._run and first.kind != log_format.RUN_STARTED):
            self._lines.append(_rotated(first.at_utc_ns / 1e9, first.run, self._first_offset))

    def _note_missing(self, missed_bytes: int, *, is_rotated: bool) -> None:
        self._unfinished.clear()  # their ends are missing as well
        if is_rotated:
            self._lines.append(_rotated(0.0, self._run or 0, missed_bytes))
        else:
            text = f"{missed_bytes} bytes of the log cannot be read"
            self._lines.append(LogLine(0.0, "supervisor", self._run or 0, text, "gap", lost_bytes=missed_bytes))

    def _take(self, header: RecordHeader, payload: bytes) -> None:
        at_utc = header.at_utc_ns / 1e9
        match header.kind:
            case log_format.OUTPUT:
                self._take_output(header, payload, at_utc)
            case log_format.RUN_STARTED:
                text = _started_text(header.run, _json(payload))
                self._lines.append(LogLine(at_utc, "supervisor", header.run, text, "run_started"))
            case log_format.RUN_ENDED:
                for key in [key for key in self._unfinished if key[0] == header.run]:
                    begun, begun_at_utc = self._unfinished.pop(key)
                    stream = _STREAMS.get(key[1], "supervisor")
                    self._lines.append(LogLine(begun_at_utc, stream, header.run, _text(begun), "output", True))
                text = ended_text(header.run, _json(payload))
                self._lines.append(LogLine(at_utc, "supervisor", header.run, text, "run_ended"))
            case log_format.SUPERVISOR:
                for text in _text(payload).splitlines() or [""]:
                    self._lines.append(LogLine(at_utc, "supervisor", header.run, text, "supervisor"))
            case log_format.GAP:
                self._take_gap(header.run, at_utc, _json(payload))
            case _:
                pass  # a kind of a newer shim

    def _take_gap(self, run: int, at_utc: float, gap: dict[str, Any]) -> None:
        lost_bytes, lost_lines = _count(gap, "lost_bytes"), _count(gap, "lost_lines")
        text = f"{lost_bytes} bytes ({lost_lines} lines) of output could not be stored: {gap.get('reason', '')}"
        for key in [key for key in self._unfinished if key[0] == run]:
            begun, begun_at_utc = self._unfinished.pop(key)  # what followed is what was lost
            self._lines.append(
                LogLine(begun_at_utc, _STREAMS.get(key[1], "supervisor"), run, _text(begun), "output", True)
            )
        line = LogLine(at_utc, "supervisor", run, text, "gap", lost_bytes=lost_bytes, lost_lines=lost_lines)
        self._lines.append(line)

    def _take_output(self, header: RecordHeader, payload: bytes, at_utc: float) -> None:
        key, run, stream = (header.run, header.stream), header.run, _STREAMS.get(header.stream, "supervisor")
        begun, begun_at_utc = self._unfinished.pop(key, (b"", at_utc))
        content = begun + payload if begun else payload
        end = content.rfind(b"\n")
        if end >= 0:
            first, *others = _text(content[:end]).split("\n")
            append = self._lines.append
            for piece, is_partial in _pieces(first):
                append(LogLine(begun_at_utc, stream, run, piece, "output", is_partial))
            for text in others:
                if len(text) <= LINE_BYTES_MAX:
                    append(LogLine(at_utc, stream, run, text))
                else:
                    for piece, is_partial in _pieces(text):
                        append(LogLine(at_utc, stream, run, piece, "output", is_partial))
            begun_at_utc = at_utc
        rest = content[end + 1 :]
        while len(rest) > LINE_BYTES_MAX:
            self._lines.append(LogLine(begun_at_utc, stream, run, _text(rest[:LINE_BYTES_MAX]), "output", True))
            rest = rest[LINE_BYTES_MAX:]
        if rest:
            self._unfinished[key] = (rest, begun_at_utc)


def read(
    directory: Path,
    *,
    since_utc: float | None = None,
    tail: int | None = None,
    run: int | None = None,
    cursor: Cursor | None = None,
) -> Iterator[LogLine]:
    """All that is there now: the whole log, what follows a cursor, or the last `tail` lines; of one run or of all."""
    if tail is not None:
        yield from _last(directory, tail, since_utc=since_utc, run=run)
        return
    with LogReader(directory, since_utc=since_utc, run=run, cursor=cursor) as reader:
        reader.stop_at_present_end()
        while lines := reader.read_available():
            yield from lines
        yield from reader.unfinished()


def last_lines(directory: Path, count: int, run: int | None = None) -> list[LogLine]:
    return _last(directory, count, since_utc=None, run=run)


def tail_cursor(directory: Path, count: int, run: int | None = None) -> Cursor:
    """Where a reader begins that is to give the last `count` lines (or a few more) and then follow."""
    return _place_before(directory, count, run)


def newest_end(directory: Path) -> tuple[int, int]:
    """(number of the newest segment, its size); (0, 0) while there is none."""
    try:
        numbers = log_format.segment_numbers(directory)
        return (numbers[-1], (directory / log_format.segment_name(numbers[-1])).stat().st_size) if numbers else (0, 0)
    except OSError:
        return 0, 0  # rotated away in between


def ended_text(run: int, note: dict[str, Any]) -> str:
    """An exit note as a sentence."""
    ended_by = note.get("ended_by", "")
    if ended_by == "spawn_failed":
        return f"run {run} could not be started: {note.get('message', 'unknown reason')}"
    text = f"run {run} " + _how_it_ended(note)
    uptime = note.get("uptime_seconds")
    if isinstance(uptime, int | float) and abs(uptime) < UPTIME_SECONDS_MAX:
        text += f" after {uptime:.1f} s"
    if isinstance(ended_by, str) and ended_by not in ("", "itself"):
        text += f" ({ended_by.removeprefix('stop:').replace('_', ' ')})"
    elif note.get("left_background"):
        told = note.get("left_names")
        names = ", ".join(map(str, told)) if isinstance(told, list) else ""
        left = note["left_background"]
        processes = "1 process was" if left == 1 else f"{left} processes were"
        text += f"; {processes} left in the background{f' ({names})' if names else ''}"
    return text


def _how_it_ended(note: dict[str, Any]) -> str:
    number = note.get("signal")
    if not isinstance(number, int):
        return f"exited with code {note.get('code')}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was ended by {name}" + (" (core dumped)" if note.get("core_dumped") else "")


def _started_text(run: int, marker: dict[str, Any]) -> str:
    # Of `exit code 3 after 0.1 s; restart 2` the beginning stands in the line about the run before.
    restart = re.search(r"; (restart \d+( of \d+)?)$", str(marker.get("cause", "")))
    details = [restart[1] if restart else str(marker["cause"])] if marker.get("cause") else []
    if marker.get("port") is not None:
        details.append(f"port {marker['port']}")
    return f"run {run} started" + (f" ({', '.join(details)})" if details else "")


def _last(directory: Path, count: int, *, since_utc: float | None, run: int | None) -> list[LogLine]:
    if count <= 0:
        return []
    kept: deque[LogLine] = deque(maxlen=count)
    with LogReader(directory, since_utc=since_utc, run=run, cursor=_place_before(directory, count, run)) as reader:
        reader.stop_at_present_end()
        while lines := reader.read_available():
            kept.extend(lines)
        kept.extend(reader.unfinished())
    return list(kept)


def _place_before(directory: Path, count: int, run: int | None) -> Cursor:
    """A record such that at least `count` lines come from there on; the beginning if there are fewer.

    Looks only at headers and newlines, from the newest segment backwards.
    """
    # Two more: the first line of either stream may have begun before the place and would be a fragment.
    wanted = count + 2
    for number in reversed(log_format.segment_numbers(directory)):
        try:
            content = (directory / log_format.segment_name(number)).read_bytes()
        except OSError:
            break
        for position, header in reversed(_records(content)):
            if run is not None and header.run != run:
                continue
            start = position + log_format.RECORD_HEADER.size
            is_output = header.kind == log_format.OUTPUT
            wanted -= content.count(b"\n", start, start + header.payload_bytes) if is_output else 1
            if wanted <= 0:
                return Cursor(number, position, 0)
    return Cursor(0, 0, 0)


def _records(content: bytes) -> list[tuple[int, RecordHeader]]:
    """Position and header of each whole record of a segment, up to its end or its tear."""
    found = []
    if log_format.segment_offset(content) is None:
        return []
    position = log_format.SEGMENT_HEADER.size
    while (header := log_format.record_header(content, position)) is not None:
        following = position + log_format.RECORD_HEADER.size + header.payload_bytes
        if following > len(content):
            break
        found.append((position, header))
        position = following
    return found


def _rotated(at_utc: float, run: int, lost_bytes: int) -> LogLine:
    amount = f"{lost_bytes} bytes of" if lost_bytes else "Some"
    text = f"{amount} older output were removed to make room for newer"
    return LogLine(at_utc, "supervisor", run, text, "rotated", lost_bytes=lost_bytes)


def _pieces(line: str) -> Iterator[tuple[str, bool]]:
    for start in range(0, max(len(line), 1), LINE_BYTES_MAX):
        yield line[start : start + LINE_BYTES_MAX], start + LINE_BYTES_MAX < len(line)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _json(payload: bytes) -> dict[str, Any]:
    return notes.parse(payload) or {}


def _count(content: dict[str, Any], key: str) -> int:
    value = content.get(key, 0)
    return value if isinstance(value, int) else 0
