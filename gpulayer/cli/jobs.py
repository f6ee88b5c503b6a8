"""gpulayer job …: what one job is, says, does; and the list of them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpulayer.cli.cluster import say_events
from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.options import job_and_replica, moment, whole_job
from gpulayer.cli.render import (
    Row,
    ago,
    clean,
    fitted_table,
    note,
    pairs,
    reason_text,
    say,
    say_json,
    say_now,
    say_wrapped,
    utc,
)
from gpulayer.client.calls import Document
from gpulayer.client.logs import LogLine
from gpulayer.client.sync import Client, Job
from gpulayer.client.waits import ENDED_STATES, ended
from gpulayer.model.errors import GpulayerError, InvalidRequest, NotFound, WaitTimeout
from gpulayer.model.units import format_duration, parse_duration

Follow = Annotated[bool, Parameter(name=("--follow", "-f"))]


def job_list(
    *,
    state: Literal["live", "ended", "all"] = "live",
    all: bool = False,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """Jobs, newest first.

    Parameters
    ----------
    state
        live, ended, or all (default live).
    all
        The same as --state all.
    json
        One JSON document: an array.
    """
    found = connection.client().jobs("all" if all else state)
    if json:
        say_json(found)
        return
    rows = [
        Row(
            (
                job["name"],
                job["id"],
                job["kind"],
                job["state"],
                "-" if job["state"] in ENDED_STATES else f"{job['ready']}/{job['replicas']}",
                job["restarts"],
                f"{job['gpus']:g}" if job["gpus"] else "-",
                ago(job["submitted_at_utc"]),
                reason_text(job["reason"]),
            )
        )
        for job in found
    ]
    headers = ("NAME", "ID", "KIND", "STATE", "READY", "RESTARTS", "GPUS", "AGE", "REASON")
    fitted_table(headers, rows, names=("NAME",), is_whole_elsewhere=True)


def job_status(job: str, /, *, json: bool = False, connection: Connection = LOCAL) -> None:
    """State, endpoints and reasons: one line per replica, and below it why it is not ready and how its last run ended.

    Parameters
    ----------
    job
        JOB, or JOB.N for one replica.
    json
        One JSON document.
    """
    name, index = job_and_replica(job)
    found = _job(connection.client(), name).status()
    count = len(found["replicas"])
    if index is not None:
        _check_replica(found, index)
        found["replicas"] = [replica for replica in found["replicas"] if replica["index"] == index]
    if json:
        say_json(found)
        return
    say_status(found, count)


def say_status(found: Mapping[str, Any], count: int) -> None:
    """The status of a job of `count` replicas as people read it."""
    say(
        pairs(
            job=found["name"],
            id=found["id"],
            kind=found["kind"],
            state=found["state"],
            ready=None if found["state"] in ENDED_STATES else f"{found['ready']}/{count}",
            revision=found["revision"],
            restarts=found["restarts"],
        )
    )
    say(f"command: {clean(shlex.join(found['command']))}")
    ended_text = f", ended {ago(found['ended_at_utc'])} ago" if found["ended_at_utc"] else ""
    say(f"submitted: {utc(found['submitted_at_utc'])} ({ago(found['submitted_at_utc'])} ago{ended_text})")
    told = None
    if count > 1 or not _is_same(found["reason"], found["replicas"][0]["reason"]):
        told = found["reason"]
        _say_reason(told, "")
    for replica in found["replicas"]:
        _say_replica(replica, told)


def _is_same(reason: Mapping[str, Any] | None, of_replica: Mapping[str, Any] | None) -> bool:
    """Whether a job's reason is no more than that of its only replica, which is shown below."""
    return (reason or {}).get("code") == (of_replica or {}).get("code")


def _say_replica(replica: Mapping[str, Any], told: Mapping[str, Any] | None) -> None:
    """`told`: the reason of the job, whose hint needs no repeating."""
    devices = ",".join(
        device["uuid"] if device["share"] == 1 else f"{device['uuid']}:{device['share']:g}"
        for device in replica["devices"]
    )
    say(
        pairs(
            task=replica["index"],
            state=replica["state"],
            node=replica["node"],
            endpoint=replica["endpoint"],
            verified="no" if replica["endpoint_verified"] is False else None,
            restarts=replica["restarts"],
            attempt=replica["attempt"] or None,
            run=replica["run"] or None,
            pid=replica["pid"],
            devices=devices or None,
            up=ago(replica["started_at_utc"]) if replica["pid"] and replica["started_at_utc"] else None,
        )
    )
    _say_reason(replica["reason"], "  ", told)
    if replica["next"]:
        say(f"  next: {clean(replica['next'])}")
    if replica["last_exit"]:
        say(f"  last exit: {exit_text(replica['last_exit'])}")
    if replica["warning"]:
        say(f"  warning: {reason_text(replica['warning'])}")
    if replica["last_lines"]:
        say("  last lines of its log:")
        for line in replica["last_lines"]:
            say(f"    {clean(line)}")


def _say_reason(reason: Mapping[str, Any] | None, indent: str, told: Mapping[str, Any] | None = None) -> None:
    if reason:
        say(f"{indent}reason: {reason_text(reason)}")
        if reason["hint"] and not (told and told["hint"] == reason["hint"]):
            say(f"{indent}hint: {clean(reason['hint'])}")


def exit_text(last_exit: Mapping[str, Any]) -> str:
    """How a run ended, on one line."""
    return f"run {last_exit['run']}: {clean(last_exit['text'])}, {ago(last_exit['ended_at_utc'])} ago"


def job_events(
    job: str,
    /,
    *,
    follow: Follow = False,
    since: str | None = None,
    offsets: bool = False,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """What happened to a job.

    Parameters
    ----------
    follow
        Go on with what happens, until Ctrl-C.
    since
        Offset to go on behind, as --offsets and --json show them.
    offsets
        Begin each line with its offset.
    json
        One JSON document a line.
    """
    found = _job(connection.client(), whole_job(job, "events")).events(after=since, follow=follow)
    say_events(found, json=json, follow=follow, offsets=offsets)


def job_explain(job: str, /, *, json: bool = False, connection: Connection = LOCAL) -> None:
    """Why each replica is where and how it is: where it could and could not run, node by node, and its history.

    Parameters
    ----------
    json
        One JSON document.
    """
    name, index = job_and_replica(job)
    found = _job(connection.client(), name).explain()
    if index is not None:
        _check_replica(found, index)
    if json:
        say_json(found)
        return
    say_wrapped(pairs(job=found["name"], id=found["id"], state=found["state"]), indent="  ", first="")
    told = None
    if len(found["replicas"]) != 1 or not _is_same(found["reason"], found["replicas"][0]["reason"]):
        told = found["reason"]
        _say_reason(told, "")
    for replica in found["replicas"]:
        if index is None or replica["index"] == index:
            _say_explanation(replica, told)


def _say_explanation(replica: Mapping[str, Any], told: Mapping[str, Any] | None) -> None:
    devices = ",".join(device["uuid"] for device in replica["devices"] or ())
    say(pairs(replica=replica["index"], state=replica["state"], node=replica["node"], devices=devices or None))
    _say_reason(replica["reason"], "  ", told)
    for why in replica["why"]:
        say(f"  {clean(why)}")
    for refusal in replica["refusals"]:
        say(f"  not on {clean(refusal['node'])}: {refusal['code']}: {clean(refusal['text'])}")
    for entry in replica["history"]:
        say(f"  {format_duration(round(entry['ago_seconds'], 1))} ago: {clean(entry['text'])}")


def job_logs(
    job: str,
    /,
    *,
    follow: Follow = False,
    replica: int | None = None,
    previous: bool = False,
    run: int | None = None,
    since: str | None = None,
    tail: int | None = None,
    timestamps: Annotated[bool, Parameter(name=("--timestamps", "-t"))] = False,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """What the replicas of a job wrote, everything that is kept, prefixed with the replica where there are several.

    Lines that begin with --- are the supervisor's: starts, exits, restarts, and lines that were lost.

    Parameters
    ----------
    job
        JOB, or JOB.N for one replica.
    follow
        Go on with what is written, until the job ends or Ctrl-C.
    replica
        Only of this one.
    previous
        Of every run that has ended, oldest first: all but the one that is on.
    run
        Only of this run, as `gpulayer job status` and the lines about starts number them.
    since
        Not older than this, e.g. 15m, or 2026-01-31T12:00:00Z.
    tail
        Only the last so many lines.
    timestamps
        Begin each line with its time, in UTC.
    json
        One JSON document a line.
    """
    name, index = job_and_replica(job)
    if replica is not None and index is not None and replica != index:
        raise InvalidRequest(f"{job} and --replica {replica} name different replicas", hint="leave out one of them")
    chosen = index if replica is None else replica
    if tail is not None and tail < 0:
        raise InvalidRequest(f"tail: {tail} is not between 0 and {10**6}", hint="write --tail 100")
    if run is not None and run < 1:
        raise InvalidRequest(f"run: {run} is no run's number", hint="they are numbered from 1")
    if previous and run is not None:
        raise InvalidRequest("--previous and --run exclude each other", hint="leave out one of them")
    since_utc = None if since is None else moment("since", since)
    asked = connection.client().job(name)
    status = asked.status()
    if chosen is not None:
        _check_replica(status, chosen)
    prefixed = chosen is None and len(status["replicas"]) > 1
    lines = asked.logs(follow=follow, replica=chosen, previous=previous, run=run, since=since_utc, tail=tail)
    for line in lines:
        if json:
            say_json(asdict(line), indent=None)
        else:
            at = f"{utc(line.at_utc)} " if timestamps else ""
            (say_now if follow else say)(at + log_text(line, prefixed))


def log_text(line: LogLine, prefixed: bool) -> str:
    """A line of a log as it is shown: output as it was written, and what the supervisor says marked."""
    marked = line.text if line.kind == "output" else f"--- {line.text}"
    return f"[{line.replica}] {marked}" if prefixed else marked


def job_endpoints(
    job: str,
    /,
    *,
    watch: bool = False,
    wait: str | None = None,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """host:port of each replica that is ready.

    Parameters
    ----------
    watch
        Print them again at every change (with a blank line between), until the job ends or Ctrl-C.
    wait
        Wait so long, e.g. 2m, for every replica to be ready (exit code 124 after it).
    json
        One JSON document: an array of objects. With --watch, one a line.
    """
    whole_job(job, "endpoints")
    if wait is not None:
        asked = connection.client().job(job)
        asked.endpoints(wait=parse_duration(wait, "wait"))
    else:
        asked = _job(connection.client(), job)
    if watch:
        for place, listed in enumerate(asked.watch_endpoints()):
            if json:
                say_json(listed, indent=None)
            else:
                say_now("\n".join(([""] if place else []) + [item["endpoint"] for item in listed]))
                _note_unverified(listed)
        return
    listed = asked.endpoint_documents()
    if json:
        say_json(listed)
        return
    for item in listed:
        say(item["endpoint"])
    _note_unverified(listed)


def _note_unverified(listed: Sequence[Mapping[str, Any]]) -> None:
    for item in listed:
        if not item["verified"]:
            age = format_duration(max(1, round(item["age_seconds"])))
            note(f"{item['endpoint']} is not verified: {item['node']}, where it is, was heard last {age} ago")


def job_wait(job: str, /, *, timeout: str | None = None, json: bool = False, connection: Connection = LOCAL) -> None:
    """Return when a job has ended: exit code 0 if it succeeded, else 1 with the reason.

    Parameters
    ----------
    timeout
        Wait no longer than this, e.g. 2h (exit code 124).
    json
        Its last status, as one JSON document.
    """
    asked = connection.client().job(whole_job(job, "wait"))
    status = asked.wait(None if timeout is None else parse_duration(timeout, "timeout"))
    if json:
        say_json(status)
    if status["state"] != "succeeded":
        raise ended(status)
    if not json:
        note(f"job {status['name']} has succeeded")


def job_restart(job: str, /, *, json: bool = False, connection: Connection = LOCAL) -> None:
    """Replace the processes of a job by new ones, on the nodes where they are.

    Parameters
    ----------
    job
        JOB, or JOB.N for one replica.
    json
        One JSON document.
    """
    name, index = job_and_replica(job)
    asked = _job(connection.client(), name)
    if index is not None:
        _check_replica(asked.status(), index)
    answer = asked.restart(None if index is None else [index])
    if json:
        say_json(answer)
        return
    for sentence in answer.get("skipped", ()):
        note(f"left alone: {clean(sentence)}")
    which = ", ".join(str(replica) for replica in answer["replicas"])
    number = "replica" if len(answer["replicas"]) == 1 else "replicas"
    note(f"restarting {number} {which} of {answer['name']}; see: gpulayer job status {answer['name']}")


def job_cancel(
    *job: str,
    wait: str | None = None,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """Stop every replica of a job, or of several.

    Parameters
    ----------
    job
        JOB, one or more.
    wait
        Wait so long, e.g. 30s, until no process of it is left (exit code 124 after it).
    json
        One JSON document; for several jobs an array.
    """
    # Read before anything is done: neither a wrong duration nor a wrong name among others must cancel.
    wait_seconds = None if wait is None else parse_duration(wait, "wait")
    if not job:
        raise InvalidRequest("no job was named", hint="write gpulayer job cancel JOB; gpulayer job list shows them")
    for name in job:
        whole_job(name, "cancel", "for a new process of that replica alone: gpulayer job restart")
    client = connection.client()
    handles = [client.job(name) for name in job]
    answers: dict[str, Document] = {}
    failed: list[GpulayerError] = []
    for asked in handles:
        try:
            answers[asked.id] = asked.cancel()
        except GpulayerError as error:
            failed.append(error)
    if wait_seconds is not None:
        deadline = time.monotonic() + wait_seconds
        for asked in handles:
            try:
                if asked.id in answers:
                    answers[asked.id] = asked.wait(max(0.0, deadline - time.monotonic()))
            except WaitTimeout as error:
                failed.insert(0, error)
    if json and (answers or len(job) > 1):
        say_json(next(iter(answers.values())) if len(job) == 1 else list(answers.values()))
    for answer in () if json else answers.values():
        note(f"job {answer['name']} is {answer['state']}")
    for other in failed[1:]:
        note(f"gpulayer: {other.message}")
    if failed:
        raise failed[0]


def _check_replica(status: Mapping[str, Any], index: int) -> None:
    if all(replica["index"] != index for replica in status["replicas"]):
        raise NotFound(f"job {status['name']} has no replica {index}", hint=f"see gpulayer job status {status['name']}")


def _job(client: Client, name: str) -> Job:
    """A handle without asking first whether it exists: the one request that follows says it."""
    return Job(client, name, name)
