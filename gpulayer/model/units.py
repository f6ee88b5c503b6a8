"""Quantities as people write them and as the program keeps them: durations in seconds, sizes in MiB, GPUs in milli-GPU.

Every parser raises InvalidRequest that names the value and shows a right one.
"""

from __future__ import annotations

import math
import re
from typing import NewType

from gpulayer.model.errors import InvalidRequest

Instant = NewType("Instant", float)
"""Seconds on a monotonic clock of the process; comparable only within it."""
Duration = NewType("Duration", float)
"""Seconds."""
Mib = NewType("Mib", int)

NEVER = Instant(math.inf)
MILLI = 1000
"""Milli-GPUs in a whole GPU."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MIB = {
    "k": 1 / 1024,
    "kib": 1 / 1024,
    "m": 1.0,
    "mib": 1.0,
    "g": 1024.0,
    "gib": 1024.0,
    "t": 1024.0**2,
    "tib": 1024.0**2,
    "kb": 1e3 / 2**20,
    "mb": 1e6 / 2**20,
    "gb": 1e9 / 2**20,
    "tb": 1e12 / 2**20,
}
DURATION_MAX = Duration(10 * 365 * 86400.0)
MIB_MAX = Mib(2**40)


def parse_duration(text: str, what: str = "duration") -> Duration:
    """`90s`, `15m`, `1h30m`, `250ms` as seconds. A bare number is refused: its unit would be a guess."""
    cleaned = text.strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", cleaned)
    if not parts or "".join(number + unit for number, unit in parts) != cleaned:
        raise InvalidRequest(
            f"{what}: {text!r} is not a duration", hint="write it like 90s, 15m, 24h or 1h30m; units are ms, s, m, h, d"
        )
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds > DURATION_MAX:
        raise InvalidRequest(f"{what}: {text!r} is longer than ten years", hint="write it like 90s, 15m or 24h")
    return Duration(seconds)


def format_duration(seconds: float) -> str:
    """The shortest of `0.5s`, `90s`, `15m`, `1h30m` that says it; for people, so two units are enough."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole}s"
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (secs, "s")]
    shown = [f"{number}{unit}" for number, unit in parts if number]
    return "".join(shown[:2])


def parse_size(text: str, what: str = "size") -> Mib:
    """`24GiB`, `512MiB`, `80GB` as MiB, rounded up. A bare number is refused: its unit would be a guess."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    factor = _MIB.get(match[2]) if match else None
    if match is None or factor is None:
        raise InvalidRequest(
            f"{what}: {text!r} is not a size",
            hint="write it like 24GiB, 512MiB or 80GB; units are KiB, MiB, GiB, TiB, KB, MB, GB, TB",
        )
    mib = float(match[1]) * factor
    if mib > MIB_MAX:  # before it is rounded: infinity cannot be
        raise InvalidRequest(f"{what}: {text!r:.80} is more than 1 EiB", hint="write it like 24GiB")
    return Mib(math.ceil(mib))


def format_size(mib: int) -> str:
    """`24GiB` when it is whole, else `1.5GiB` or `512MiB`. Never more than it is: what is shown can be asked for."""
    if mib >= 1024 and mib % 1024 == 0:
        return f"{mib // 1024}GiB"
    if mib >= 1024:
        tenths = mib * 10 // 1024
        return f"{tenths // 10}.{tenths % 10}GiB"
    return f"{mib}MiB"


def parse_gpus(value: str | int | float, what: str = "gpus") -> int:
    """GPUs per replica as milli-GPU: a share below one, or a whole number (a share of several would fit nobody)."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{what}: {value!r:.80} is not a number", hint="write 1, 2, or a share such as 0.5"
        ) from None
    if not math.isfinite(number) or number < 0 or number > 1024:
        raise InvalidRequest(f"{what}: {value} is not between 0 and 1024", hint="write 1, 2, or a share such as 0.5")
    if number == 0 and isinstance(value, str) and "." in value:
        raise InvalidRequest(f"{what}: {value} is a share of nothing", hint="write 0 for none, or a share such as 0.5")
    milli = round(number * MILLI)
    if abs(milli - number * MILLI) > 1e-6 or (milli == 0 and number > 0):
        raise InvalidRequest(f"{what}: {value} is finer than a thousandth of a GPU", hint="write 0.5, 0.25 or 0.125")
    if milli > MILLI and milli % MILLI:
        raise InvalidRequest(
            f"{what}: {value} is more than one GPU and not whole", hint="write a whole number, or a share below 1"
        )
    return milli


def format_gpus(milli: int) -> str:
    return str(milli // MILLI) if milli % MILLI == 0 else f"{milli / MILLI:g}"


def parse_count(value: str | int, what: str, *, least: int = 0, most: int = 1_000_000) -> int:
    """A whole number within bounds that are named when they are broken."""
    try:
        number = int(str(value).strip())
    except ValueError:
        raise InvalidRequest(
            f"{what}: {value!r} is not a whole number", hint=f"write a number from {least} to {most}"
        ) from None
    if not least <= number <= most:
        raise InvalidRequest(
            f"{what}: {number} is not between {least} and {most}", hint=f"write a number from {least} to {most}"
        )
    return number
