"""What people see: tables that fit the terminal, plain lines where there is none, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gpulayer.model.units import format_duration

_GAP = "  "
# A column narrower than this says nothing; the line may wrap then.
_LAST_WIDTH_MIN = 12
# Where the answer goes into a file or a pipe. Programs take --json.
_WIDTH_OTHERWISE = 80
_NOTE_INDENT = "    "
# `GPU-8f2a6c1e`: of a driver's UUIDs, this tells those of a thousand devices apart.
_UUID_BEGINNING = 12
_DEVICE_WIDTH_MAX = 16


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


class Row(NamedTuple):
    """Of a table that fits: its cells, and sentences that stand under it."""

    cells: Sequence[object]
    notes: Sequence[str] = ()


def fitted_table(
    headers: Sequence[str], rows: Sequence[Row], *, names: Collection[str] = (), is_whole_elsewhere: bool = False
) -> None:
    """Columns that fit the terminal, or 80 characters where there is none; with `is_whole_elsewhere`, all of it is
    there then. Those of `names` are shortened in their middle if need be, because names of one kind differ at their
    ends; the last one goes on in further lines."""
    cells = [list(headers), *([clean(cell) for cell in row.cells] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sys.stdout.isatty() or not is_whole_elsewhere:
        widths = _fitting(widths, headers, names)
    indent = " " * sum(width + len(_GAP) for width in widths[:-1])
    for place, line in enumerate(cells):
        before = [shortened(cell, width).ljust(width) for cell, width in zip(line, widths[:-1], strict=False)]
        words = " ".join(shortened(word, widths[-1]) for word in line[-1].split())
        first, *more = wrapped(words, widths[-1])
        text = _GAP.join([*before, first]).rstrip()
        say(f"\033[1m{text}\033[0m" if place == 0 and sys.stdout.isatty() else text)
        for text in more:
            say(indent + text)
        for sentence in rows[place - 1].notes if place else ():
            say_wrapped(sentence, indent=_NOTE_INDENT)


def _fitting(widths: list[int], headers: Sequence[str], names: Collection[str]) -> list[int]:
    """Takes from the widest of the columns that can give, until it fits or all are as narrow as makes sense."""
    room = screen_width() - len(_GAP) * (len(widths) - 1)
    widths = [min(width, room) for width in widths]
    least = [max(len(header), _LAST_WIDTH_MIN) for header in headers]
    can_give = [place for place, header in enumerate(headers) if header in names or place == len(headers) - 1]
    while sum(widths) > room:
        place = max(can_give, key=lambda place: widths[place] - least[place])
        if widths[place] <= least[place]:
            break
        widths[place] -= 1
    return widths


def say_wrapped(text: str, *, indent: str = "", first: str | None = None) -> None:
    """A sentence on as many lines as it takes. `first` stands before it instead of the indent."""
    for place, line in enumerate(wrapped(clean(text), screen_width() - len(indent))):
        say((first if place == 0 and first is not None else indent) + line)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most this width, broken between words where that is possible; at least one."""
    if len(text) <= width:
        return [text]
    import textwrap

    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def shortened(text: str, width: int) -> str:
    """`gpu-clus…rack7-n3`: both ends of it."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def screen_width() -> int:
    """Of the terminal; 80 where there is none."""
    return max(40, _terminal_width()) if sys.stdout.isatty() else _WIDTH_OTHERWISE


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def gpus_of(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its devices but those that stand for CPUs."""
    return [device for device in node["devices"] if device["kind"] != "cpu"]


def short_names(devices: Sequence[Mapping[str, Any]], node_id: str) -> dict[str, str]:
    """By UUID what tells the devices of one node apart in a table: the driver's index, else the beginning of the UUID,
    else all of it but the node that it was made up for."""
    own = {device["uuid"]: device["uuid"].removeprefix(f"{node_id}-") for device in devices}
    begun_by = Counter(name[:_UUID_BEGINNING] for name in own.values())
    names = {}
    for device in devices:
        name = own[device["uuid"]]
        beginning = name[:_UUID_BEGINNING]
        if device["index"] is not None and not device["parent"]:
            name = str(device["index"])
        elif name.startswith(("GPU-", "MIG-")) and begun_by[beginning] == 1:
            name = beginning
        else:
            name = shortened(name, _DEVICE_WIDTH_MAX)
        names[device["uuid"]] = name
    return names


def reason_sentence(reason: Mapping[str, Any] | None) -> str:
    """The sentence of a reason alone, where it follows on other words; empty where there is none."""
    return clean(reason["text"] or reason["code"]) if reason else ""


def reason_text(reason: Mapping[str, Any] | None) -> str:
    """Code and sentence of a reason on one line; empty where there is none."""
    if not reason:
        return ""
    text = clean(reason["text"])
    return f"{reason['code']}: {text}" if text else str(reason["code"])
