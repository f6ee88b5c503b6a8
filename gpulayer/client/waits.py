"""What a client that watches a job concludes from each status, and says when it has waited long enough. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpulayer.model.errors import InvalidRequest, JobEnded, NotFound, WaitTimeout
from gpulayer.model.units import format_duration

ENDED_STATES = frozenset(("succeeded", "failed", "cancelled", "lost"))
_ENDED_AS = {"succeeded": "has ended", "failed": "failed", "cancelled": "was cancelled", "lost": "was lost"}


class JobWaits(UserWarning):
    """A job was accepted, and will wait until a person does something."""


class UntilReady:
    """Waiting for every replica to serve."""

    def __init__(self, job_name: str, seconds: float) -> None:
        self._job_name = job_name
        self._seconds = seconds
        self._status: Mapping[str, Any] | None = None

    def endpoints(self, status: Mapping[str, Any]) -> list[str] | None:
        """Those of every replica, or None while it is not so. Raises JobEnded."""
        self._status = status
        if status["state"] in ENDED_STATES:
            error = ended(status)
            if status["state"] == "succeeded" and status["kind"] == "batch":
                error.hint = (
                    f"a batch serves nowhere; job.wait(), or gpulayer job wait {self._job_name}, waits for its end"
                )
            raise error
        if not is_all_ready(status):
            return None
        return [replica["endpoint"] for replica in status["replicas"] if replica["endpoint"]]

    def timeout(self) -> WaitTimeout:
        return WaitTimeout(
            f"job {self._job_name} is not ready after {format_duration(self._seconds)}: {waiting_for(self._status)}",
            hint=f"it goes on; see gpulayer job explain {self._job_name}",
        )


class UntilEnded:
    """Waiting for the end of a job."""

    def __init__(self, job_name: str, seconds: float) -> None:
        self._job_name = job_name
        self._seconds = seconds
        self._state = "unknown"

    def is_over(self, status: Mapping[str, Any]) -> bool:
        self._state = status["state"]
        return self._state in ENDED_STATES

    def timeout(self) -> WaitTimeout:
        return WaitTimeout(
            f"job {self._job_name} is still {self._state} after {format_duration(self._seconds)}",
            hint=f"it goes on; see gpulayer job status {self._job_name}",
        )


def forgotten(job_name: str) -> NotFound:
    """Where a watch ended without saying how the job did: it had ended long ago when it was to be told."""
    return NotFound(f"job {job_name} ended, and is not kept any more", hint="see gpulayer events")


def seconds_at_most(timeout: float | None) -> float:
    """Until when something is followed; None: to its end."""
    return math.inf if timeout is None else _seconds("timeout", timeout)


def seconds_to_wait(wait: float | bool | None) -> float | None:
    """How long something is waited for; None and False: not at all, True: however long it takes."""
    if wait is None or wait is False:
        return None
    return math.inf if wait is True else _seconds("wait", wait)


def _seconds(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidRequest(f"{what}: {value!r:.80} is not a number of seconds", hint=f"write it like {what}=120")
    if value < 0:
        raise InvalidRequest(
            f"{what}: {value} is less than nothing", hint=f"write it like {what}=120, or 0 not to wait"
        )
    return float(value)


def is_all_ready(status: Mapping[str, Any]) -> bool:
    """Whether every replica of a live job serves."""
    return all(replica["state"] == "ready" for replica in status["replicas"])


def ended(status: Mapping[str, Any]) -> JobEnded:
    """The error for a job that ended while something else was waited for."""
    reason = status["reason"] or {}
    text = f": {reason['text'] or reason['code']}" if reason else ""
    return JobEnded(
        f"job {status['name']} {_ENDED_AS.get(status['state'], status['state'])}{text}",
        hint=reason.get("hint") or "",
        state=status["state"],
        reason=status["reason"],
    )


def waiting_for(status: Mapping[str, Any] | None) -> str:
    """What keeps a job from being ready, in one sentence of a few replicas."""
    if status is None:
        return "the daemon did not say how it is"
    held = [replica for replica in status["replicas"] if replica["state"] != "ready"]
    said = [f"replica {replica['index']} is {replica_words(replica)}" for replica in held[:3]]
    return "; ".join(said) + (f"; and {len(held) - 3} more" if len(held) > 3 else "")


def replica_words(replica: Mapping[str, Any]) -> str:
    """State and reason of one replica, as people read it behind `replica 0 is`."""
    reason = replica["reason"]
    state = replica["state"].replace("_", " ")
    return f"{state}: {reason['text'] or reason['code']}" if reason else state
