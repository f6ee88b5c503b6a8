"""What shim and daemon read from the disk, perhaps after a power cut: attempt.json, run notes, log records."""

from __future__ import annotations

import json
from contextlib import suppress

from gpulayer.shim import log_format, notes, requests


def one(data: bytes) -> None:
    note = notes._parse(data)
    assert note is None or isinstance(note, dict)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if content is not None:
        # The file is read by read_attempt, which turns these into BadAttempt.
        with suppress(ValueError, TypeError, KeyError, requests.BadRequest):
            requests._parse_attempt(content)
    log_format.segment_offset(data)
    position = 0
    while position < min(len(data), 4096):
        header = log_format.record_header(data, position)
        position += 1 if header is None else max(1, header.payload_bytes)
