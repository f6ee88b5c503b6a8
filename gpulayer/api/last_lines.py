"""What a run wrote last, for a status. Reads files: called in a thread."""

from __future__ import annotations

from pathlib import Path

from gpulayer.runtime.replica_logs import last_lines

LAST_LINES = 20
LAST_LINE_CHARS_MAX = 2000


def last_output(directory: Path, run: int) -> list[str]:
    """What the last run wrote last, or the one before it while the last has written nothing. What its supervisor says
    of it stands in the status already."""
    for number in (run, run - 1) if run > 1 else (run,):
        # Beside what it wrote there are its start, its end, and what follows from it.
        lines = last_lines(directory, LAST_LINES + 4, number or None)
        said = [line.text[:LAST_LINE_CHARS_MAX] for line in lines if line.kind in ("output", "gap")]
        if said:
            return said[-LAST_LINES:]
    return []
