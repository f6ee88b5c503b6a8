"""gpulayer status, events: the cluster as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.nodes import NODE_HEADERS, is_troubled, node_cells, say_devices, troubles
from gpulayer.cli.render import (
    Row,
    clean,
    fitted_table,
    pairs,
    reason_text,
    say,
    say_json,
    say_now,
    say_wrapped,
    utc,
)
from gpulayer.model.units import format_duration

# Up to so many, each node has its line; of more only those that something is wrong with.
NODES_EACH_MAX = 12
TROUBLED_SHOWN_MAX = 10


def status(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """The cluster on one screen: nodes, GPUs free and all by model, services and their health, what is queued and why.

    Any node answers, by what it knows itself; what is queued only the leader knows.

    Parameters
    ----------
    json
        One JSON document.
    """
    found = connection.client().status()
    if json:
        say_json(found)
    else:
        say_cluster(found)


def say_cluster(found: Mapping[str, Any]) -> None:
    """The status as people read it: one screen, of however many nodes."""
    say_wrapped(
        pairs(
            cluster=found["cluster_id"],
            leader=found["leader"],
            node=found["node"],
            version=found["version"],
            up=format_duration(round(found["uptime_seconds"])),
        ),
        indent="  ",
        first="",
    )
    for warning in found["warnings"]:
        say(f"warning: {clean(warning)}")
    say()
    is_folded = len(found["nodes"]) > NODES_EACH_MAX
    _say_nodes(found, is_folded=is_folded)
    if found["gpus"]:
        say()
        headers, has_away = ["MODEL", "FREE", "ALL"], any(gpu["away"] for gpu in found["gpus"])
        stock = [
            Row((gpu["model"], f"{gpu['free']:g}", f"{gpu['all']:g}", *([f"{gpu['away']:g}"] if has_away else [])))
            for gpu in found["gpus"]
        ]
        fitted_table(headers + (["AWAY"] if has_away else []), stock, names=("MODEL",))
        if not is_folded:
            say()
            say_devices(found["nodes"])
    say()
    by_state = ", ".join(f"{count} {state}" for state, count in found["jobs"].items() if count)
    if found["log_unknown"]:
        say(f"jobs that run: {by_state or 'none'} (by the nodes' own word)")
        _say_job(f"what is queued is not known here: {clean(found['log_unknown'])}")
        return
    say(f"jobs: {by_state or 'none'}")
    queued = {job["id"] for job in found["queued"]}
    for job in found["queued"]:
        _say_job(f"{job['name']} waits: {reason_text(job['reason']) or 'to be placed'}")
    for job in found["unhealthy"]:
        if job["id"] not in queued:
            why = reason_text(job["reason"])
            ready = f"{job['ready']} of {job['replicas']} ready"
            _say_job(f"{job['name']} is {job['state']}, {ready}{why and ': ' + why}")


def _say_nodes(found: Mapping[str, Any], *, is_folded: bool) -> None:
    told = set(found["warnings"])  # of the node that answers, its own
    shown = [node for node in found["nodes"] if not is_folded or is_troubled(node)]
    if is_folded:
        say("nodes: " + ", ".join(f"{count} {state}" for state, count in found["nodes_by_state"].items()))
    rows = [
        Row(node_cells(node), [clean(trouble) for trouble in troubles(node) if trouble not in told])
        for node in shown[: TROUBLED_SHOWN_MAX if is_folded else None]
    ]
    if rows:
        fitted_table(NODE_HEADERS, rows, names=("NODE", "ADDRESS"))
    if len(shown) > len(rows):
        say(f"and {len(shown) - len(rows)} more: gpulayer node list")


def _say_job(text: str) -> None:
    say_wrapped(text, indent="    ", first="  ")


def events(
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    since: str | None = None,
    offsets: bool = False,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """The cluster's event feed: every change once, in order per source.

    Parameters
    ----------
    follow
        Go on with what happens, until Ctrl-C.
    since
        Offset to go on behind, as --offsets and --json show them; left out, from the oldest kept.
    offsets
        Begin each line with its offset.
    json
        One JSON document a line.
    """
    client = connection.client(meanwhile="jobs run on; Ctrl-C ends this")
    say_events(client.events(after=since, follow=follow), json=json, follow=follow, offsets=offsets)


def say_events(found: Iterable[dict[str, Any]], *, json: bool, follow: bool, offsets: bool) -> None:
    """One line each: time, what it is about, where, text."""
    for event in found:
        if json:
            say_json(event, indent=None)
            continue
        subject = event["job_name"] or event["job"]
        if subject and event["replica"] is not None:
            subject = f"{subject}.{event['replica']}"
        offset = event["offset"] if offsets else ""
        words = (offset, utc(event["at_utc"]), subject, event["node"], clean(event["text"]))
        (say_now if follow else say)(" ".join(str(word) for word in words if word))
