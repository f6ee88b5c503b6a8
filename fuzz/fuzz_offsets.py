"""Offsets of the event feed, as they come back in a URL."""

from __future__ import annotations

from gpulayer.model.errors import InvalidRequest
from gpulayer.runtime.event_store import format_offset, parse_offset


def one(data: bytes) -> None:
    try:
        marks = parse_offset(data.decode("utf-8", "replace"))
    except InvalidRequest:
        return
    assert parse_offset(format_offset(marks)) == marks
