"""Values of options as people write them, where several commands read the same kind."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.units import parse_duration


def key_value(what: str, text: str) -> tuple[str, str]:
    """`K=V` as a pair."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InvalidRequest(f"{what}: {text!r} is not K=V", hint=f"write it like --{what} zone=a")
    return key, value


def moment(what: str, text: str) -> float:
    """A moment as UTC seconds: `15m` (so long ago), or ISO 8601; one without a zone is UTC."""
    try:
        return time.time() - parse_duration(text, what)
    except InvalidRequest:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{what}: {text!r} is not a moment", hint="write 15m for so long ago, or 2026-01-31T12:00:00Z"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def whole_job(text: str, command: str, otherwise: str = "") -> str:
    """`web`, where `web.2` would be one replica of it and `command` is about the whole."""
    job, separator, index = text.rpartition(".")
    if separator and job and index.isdecimal():
        raise InvalidRequest(
            f"{command} takes a whole job, and {text} is one replica",
            hint=f"write gpulayer job {command} {job}{otherwise and f'; {otherwise} {text}'}",
        )
    return text


def job_and_replica(text: str) -> tuple[str, int | None]:
    """`web.2` as the job and the index; `web` as the job and None. Neither names nor ids have a dot in them."""
    job, separator, index = text.rpartition(".")
    if not separator:
        return text, None
    if not job or not index.isdecimal():
        raise InvalidRequest(f"{text!r} names no replica", hint="write JOB.N with N from 0 on, or JOB")
    return job, int(index)
