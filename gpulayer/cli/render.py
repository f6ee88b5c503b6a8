"""What people see: tables that fit the terminal, plain lines where there is none, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpulayer.model.units import format_duration


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


def pairs(**fields: object) -> str:
    """`state=ready node=n1`, without what is unknown."""
    return " ".join(f"{key}={clean(value)}" for key, value in fields.items() if value is not None)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns under headers. On a terminal rich makes them fit; elsewhere they are as wide as what is in them."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(headers, cells)
        return
    widths = [max(len(row[place]) for row in [list(headers), *cells]) for place in range(len(headers))]
    for row in [list(headers), *cells]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rich_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        made.add_column(header, overflow="fold")
    for row in cells:
        # Text, not markup: "[0]" in a reason is a reason.
        made.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console().print(made)


def reason_text(reason: Mapping[str, Any] | None) -> str:
    """Code and sentence of a reason on one line; empty where there is none."""
    if not reason:
        return ""
    text = clean(reason["text"])
    return f"{reason['code']}: {text}" if text else str(reason["code"])
