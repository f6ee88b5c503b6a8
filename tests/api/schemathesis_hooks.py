"""What schemathesis has to know of this API that no document says: which requests would hang, hurt, or find nothing.

Loaded by the schemathesis command, not by pytest; tests/api/test_openapi.py starts it, and says in the environment
which jobs and tokens are there.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import schemathesis
from schemathesis.core.failures import Failure
from schemathesis.openapi.checks import RejectedPositiveData

ENDED_JOB = os.environ["GPULAYER_TEST_ENDED_JOB"]
"""Id of one that has ended: the one whose streams end, too."""
LIVE_JOB = os.environ["GPULAYER_TEST_LIVE_JOB"].split()
"""Id and name of one that goes on, and has to: while it does, no daemon leaves."""
OWN_TOKEN = os.environ["GPULAYER_TEST_OWN_TOKEN"]
"""Id of the token that all of this is asked with."""
REPLICAS_MAX = 3


@schemathesis.deserializer("application/x-ndjson")
def read_lines(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return [json.loads(line) for line in response.content.splitlines() if line.strip()]


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    _end_streams(case)
    _leave_out_what_no_schema_can_say(case)
    _spare_what_is_needed(case)
    _name_replicas_that_are_there(case)
    if case.operation.label == "POST /v1/jobs" and isinstance(case.body, dict):
        _make_harmless(case.body)
    if case.operation.label == "POST /v1/leave" and isinstance(case.body, dict) and case.body.get("stop_all") is True:
        case.body["stop_all"] = False


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Failure, case: schemathesis.Case, response: schemathesis.Response
) -> bool:
    """A word that is right in itself may be the beginning of several jobs' names by now, and is refused then."""
    return not (isinstance(failure, RejectedPositiveData) and b"is the beginning of" in response.content)


def _leave_out_what_no_schema_can_say(case: schemathesis.Case) -> None:
    """`previous` and `run` exclude one another; an offset has one place for each replica or source."""
    if case.path.endswith("/logs") and "previous" in (case.query or {}):
        case.query.pop("run", None)
    for values, key in ((case.query, "after"), (case.headers, "Last-Event-ID")):
        if isinstance(offset := (values or {}).get(key), str):
            places = {place.partition(".")[0].lstrip("0"): place for place in offset.split("_")}
            values[key] = "_".join(places.values())


def _end_streams(case: schemathesis.Case) -> None:
    """What is followed to the end of a job, or for ever, is followed to the end of one that has ended."""
    query = case.query or {}
    for key in ("follow", "watch"):
        if query.get(key) in (True, "true", 1, "1", "yes"):
            query[key] = False
    if case.path.endswith("/watch") and re.match(r"[a-z0-9-]+$", str(case.path_parameters["job"])):
        case.path_parameters["job"] = ENDED_JOB  # a word may be the beginning of a live one's name


def _spare_what_is_needed(case: schemathesis.Case) -> None:
    if case.path.endswith(("/cancel", "/restart")):
        given = str(case.path_parameters["job"]).partition(".")[0]
        if any(word.startswith(given) for word in LIVE_JOB):
            case.path_parameters["job"] = ENDED_JOB
    if (case.path_parameters or {}).get("token_id") == OWN_TOKEN:
        case.path_parameters["token_id"] = "t-another"


def _name_replicas_that_are_there(case: schemathesis.Case) -> None:
    """Else 404 is about a replica, and is taken for a job that was just made and is not found."""
    body = case.body
    if case.path.endswith("/restart") and isinstance(body, dict) and isinstance(body.get("replicas"), list):
        body["replicas"] = [0 if index in range(10_000) else index for index in body["replicas"]]


def _make_harmless(body: dict[str, Any]) -> None:
    """A specification that is accepted is run: as a program that does not exist, a few times."""
    command = body.get("command")
    is_program = isinstance(command, list) and command and isinstance(command[0], str) and command[0]
    if is_program and not command[0].startswith("/nonexistent/"):  # a case may be sent more than once
        command[0] = f"/nonexistent/{command[0]}"
    replicas = body.get("replicas")
    if isinstance(replicas, int | float) and REPLICAS_MAX < replicas <= 10_000:
        body["replicas"] = REPLICAS_MAX
