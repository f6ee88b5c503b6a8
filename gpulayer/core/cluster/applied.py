"""What comes of a log entry: the state after it, its answer, its events; and the words that all commands share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from gpulayer.core.cluster.commands import Placement
from gpulayer.model.cluster import ClusterState
from gpulayer.model.event import Event
from gpulayer.model.ids import JobId

NAME_LENGTH_MAX = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Done, or done before (`replayed`, and every command that says again what is so already)."""

    job: JobId | None = None
    name: str = ""
    replayed: bool = False
    dropped: tuple[Placement, ...] = ()
    """Of a plan: what no longer held, and is back in the queue."""
    skipped: tuple[str, ...] = ()
    """Of a restart: a sentence for each replica that could not be restarted, while others were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Nothing was changed. The fields are those of the error that people see (model/errors.py)."""

    code: str
    message: str
    hint: str = ""


Result: TypeAlias = Accepted | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    state: ClusterState
    result: Result
    events: tuple[Event, ...] = ()


def rejected(state: ClusterState, code: str, message: str, hint: str = "") -> Applied:
    return Applied(state=state, result=Rejected(code=code, message=message, hint=hint))


def event_of(
    state: ClusterState,
    kind: str,
    text: str,
    *,
    job: str = "",
    replica: int | None = None,
    node: str = "",
    data: tuple[tuple[str, str], ...] = (),
) -> Event:
    """An event of the log at this moment; apply() gives it its number."""
    return Event(
        source="log",
        epoch=0,
        seq=0,
        at_utc=state.time_utc,
        kind=kind,
        job=job,
        replica=replica,
        node=node,
        text=text,
        data=data,
    )


def free_name(taken: Collection[str], wanted: str) -> str:
    """`wanted`, or with the lowest suffix from -2 on that makes it free."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        suffix = f"-{number}"
        name = wanted[: NAME_LENGTH_MAX - len(suffix)] + suffix
    return name


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
