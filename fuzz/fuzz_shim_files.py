"""What shim and daemon read from the disk, perhaps after a power cut: attempt.json, run notes, log records."""

from __future__ import annotations

from contextlib import suppress

from gpulayer.shim import log_format, notes, requests


def one(data: bytes) -> None:
    note = notes.parse(data)
    assert note is None or isinstance(note, dict)
    with suppress(requests.BadAttempt):
        requests.parse_attempt(data)
    log_format.segment_offset(data)
    position = 0
    while position < min(len(data), 4096):
        header = log_format.record_header(data, position)
        position += 1 if header is None else max(1, header.payload_bytes)
