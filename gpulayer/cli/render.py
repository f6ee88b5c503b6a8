"""What people see: tables that fit the terminal, plain lines where there is none, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpulayer.model.units import format_duration

_GAP = "  "
# A column narrower than this says nothing; the line may wrap then.
_LAST_WIDTH_MIN = 12


def say(text: str = "") -> None:
    """A line of the answer. Nothing is flushed: see `say_now` for what people wait for."""
    sys.stdout.write(text + "\n")


def say_now(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line about how it goes on: stderr, so that stdout holds only the answer."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_json(document: object, *, indent: int | None = 2) -> None:
    """One document; `indent=None` where there is one per line."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=indent) + "\n")
    if indent is None:
        sys.stdout.flush()


def clean(text: object) -> str:
    """Text from elsewhere for one line of a terminal: control characters become visible."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def ago(at_utc: float | None) -> str:
    """How long ago, for a column; `-` for never."""
    return "-" if at_utc is None else format_duration(max(0.0, round(time.time() - at_utc)))


def utc(at_utc: float) -> str:
    """A moment, to the millisecond, as ISO 8601."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_utc))
    return f"{whole}.{int(at_utc % 1 * 1000):03d}Z"


def counted(count: int, one: str, several: str = "") -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def pairs(**fields: object) -> str:
    """`state=ready node=n1`, without what is unknown."""
    return " ".join(f"{key}={clean(value)}" for key, value in fields.items() if value is not None)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns under headers. On a terminal the last one is cut where a line would be too long."""
    cells = [list(headers), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(headers))]
    is_terminal = sys.stdout.isatty()
    if is_terminal:
        before_last = sum(width + len(_GAP) for width in widths[:-1])
        widths[-1] = max(_LAST_WIDTH_MIN, min(widths[-1], _terminal_width() - before_last))
    for place, row in enumerate(cells):
        line = _GAP.join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        say(f"\033[1m{line}\033[0m" if is_terminal and place == 0 else line)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def reason_sentence(reason: Mapping[str, Any] | None) -> str:
    """The sentence of a reason alone, where it follows on other words; empty where there is none."""
    return clean(reason["text"] or reason["code"]) if reason else ""


def reason_text(reason: Mapping[str, Any] | None) -> str:
    """Code and sentence of a reason on one line; empty where there is none."""
    if not reason:
        return ""
    text = clean(reason["text"])
    return f"{reason['code']}: {text}" if text else str(reason["code"])
