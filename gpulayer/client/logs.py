"""A line of a replica's log, as the client hands it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a replica's output, or one that its supervisor wrote about it. `str(line)` is its text."""

    at_utc: float
    replica: int
    attempt: int
    run: int
    stream: str
    """stdout, stderr, or supervisor."""
    kind: str
    """output, run_started, run_ended, supervisor, gap (lines were lost), rotated."""
    text: str
    offset: str
    """Where it is; `logs(after=…)` goes on behind it."""

    def __str__(self) -> str:
        return self.text


def log_line(document: Mapping[str, Any]) -> LogLine:
    """The line that the API's LOG_LINE says."""
    return LogLine(
        at_utc=document["at_utc"],
        replica=document["replica"],
        attempt=document["attempt"],
        run=document["run"],
        stream=document["stream"],
        kind=document["kind"],
        text=document["text"],
        offset=document["offset"],
    )
