"""Offsets of the event feed and of logs, as they come back in a URL."""

from __future__ import annotations

from gpulayer.api import log_merge
from gpulayer.model.errors import InvalidRequest
from gpulayer.runtime.event_store import format_offset, parse_offset


def one(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    _of_events(text)
    _of_logs(text)


def _of_events(text: str) -> None:
    try:
        marks = parse_offset(text)
    except InvalidRequest:
        return
    assert parse_offset(format_offset(marks)) == marks


def _of_logs(text: str) -> None:
    try:
        places = log_merge.parse_offset(text)
    except InvalidRequest:
        return
    assert text.isascii()
    assert log_merge.parse_offset(log_merge.format_offset(places)) == places
