"""Named points at which a test can kill, break or delay this process. Nothing happens unless the environment asks.

`GPULAYER_FAILPOINTS="log.before_commit=kill:3,log.after_commit=sleep:0.5"`, read once when this module is imported:

- `kill` or `kill:N`: SIGKILL to this process, when the point is reached for the Nth time;
- `error` or `error:N`: OSError (EIO), from the Nth time on, because a broken disk stays broken;
- `sleep:SECONDS`: every time.

They are compiled in, so that what is tested is what is run. Unset, a point costs one look at an empty dictionary.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

VARIABLE = "GPULAYER_FAILPOINTS"


@dataclass(slots=True)
class Armed:
    """What one point does; `reached` counts, from any thread."""

    act: Literal["kill", "error", "sleep"]
    at: int = 1
    seconds: float = 0.0
    reached: int = 0
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)


def parse(text: str) -> dict[str, Armed]:
    """The points that `text` arms; ValueError names the part that cannot be read, so that no test passes for a typo."""
    armed: dict[str, Armed] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, what = part.partition("=")
        act, _, number = what.partition(":")
        try:
            if not name or not equals:
                raise ValueError
            if act == "sleep":
                armed[name] = Armed(act="sleep", seconds=float(number))
            elif act in ("kill", "error"):
                armed[name] = Armed(act="kill" if act == "kill" else "error", at=int(number or "1"))
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{VARIABLE}: cannot read {part!r}; write NAME=kill, NAME=kill:3, NAME=error:1 or NAME=sleep:0.5"
            ) from None
    return armed


_armed = parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Do here what the environment asks for, which is nothing outside of tests."""
    if _armed:
        _reach(_armed.get(name))


def _reach(point: Armed | None) -> None:
    if point is None:
        return
    with point.lock:
        point.reached += 1
        reached = point.reached
    match point.act:
        case "kill":
            if reached == point.at:
                os.kill(os.getpid(), signal.SIGKILL)
        case "error":
            if reached >= point.at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        case "sleep":
            time.sleep(point.seconds)
