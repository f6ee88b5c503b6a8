"""gpulayer status, events, audit: the cluster as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from cyclopts import Parameter

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import clean, counted, note, pairs, reason_text, say, say_json, say_now, table, utc
from gpulayer.model.units import format_duration, format_size


def status(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """The cluster on one screen: nodes, GPUs free and all by model, services and their health, what is queued and why.

    Parameters
    ----------
    json
        One JSON document.
    """
    found = connection.client().status()
    if json:
        say_json(found)
        return
    say(
        pairs(
            cluster=found["cluster_id"],
            leader=found["leader"],
            node=found["node"],
            version=found["version"],
            up=format_duration(round(found["uptime_seconds"])),
        )
    )
    for warning in found["warnings"]:
        say(f"warning: {clean(warning)}")
    say()
    table(
        ("NODE", "STATE", "ADDRESS", "CPUS FREE", "MEMORY FREE", "GPUS FREE"),
        [_node_row(node) for node in found["nodes"]],
    )
    if found["gpus"]:
        say()
        table(("GPU", "FREE", "ALL"), [(gpu["model"], f"{gpu['free']:g}", f"{gpu['all']:g}") for gpu in found["gpus"]])
        say()
        table(
            ("NODE", "DEVICE", "MEMORY", "FREE", "HELD BY"),
            [_device_row(node, device) for node in found["nodes"] for device in _gpus(node)],
        )
    say()
    by_state = ", ".join(f"{count} {state}" for state, count in found["jobs"].items() if count)
    say(f"jobs: {by_state or 'none'}")
    queued = {job["id"] for job in found["queued"]}
    for job in found["queued"]:
        say(f"  {clean(job['name'])} waits: {reason_text(job['reason']) or 'to be placed'}")
    for job in found["unhealthy"]:
        if job["id"] not in queued:
            why = reason_text(job["reason"])
            ready = f"{job['ready']} of {job['replicas']} ready"
            say(f"  {clean(job['name'])} is {job['state']}, {ready}{why and ': ' + why}")


def _node_row(node: dict[str, Any]) -> tuple[object, ...]:
    gpus = _gpus(node)
    free = sum(device["share_free"] for device in gpus if not device["unhealthy"])
    return (
        node["name"],
        ",".join([node["state"], *node["marks"]]),
        node["address"],
        f"{node['cpus_free']:g}/{node['cpus']:g}",
        f"{format_size(node['memory_free_mib'])}/{format_size(node['memory_mib'])}",
        f"{free:g}/{len(gpus)}" if gpus else "-",
    )


def _gpus(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [device for device in node["devices"] if device["kind"] != "cpu"]


def _device_row(node: dict[str, Any], device: dict[str, Any]) -> tuple[object, ...]:
    held = [
        f"{holder['name']}.{holder['replica']}" + ("" if holder["share"] == 1 else f" {holder['share']:g}")
        for holder in device["held_by"]
    ]
    if device["unhealthy"]:
        held.insert(0, f"unhealthy: {device['unhealthy']}")
    return (
        node["name"],
        device["model"],
        format_size(device["memory_mib"]),
        f"{device['share_free']:g}",
        ", ".join(held) or "-",
    )


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


def audit(*, json: bool = False, connection: Connection = LOCAL) -> int:
    """Compare what runs on the host with what should; exit code 1 on any difference.

    Parameters
    ----------
    json
        One JSON document.
    """
    found = connection.client().audit()
    differences = found["differences"]
    if json:
        say_json(found)
        return 1 if differences else 0
    for difference in differences:
        pids = ",".join(str(pid) for pid in difference["pids"])
        say(f"{difference['kind']}: {clean(difference['text'])}{pids and f' (pid {pids})'}")
        if difference["hint"]:
            note(f"hint: {clean(difference['hint'])}")
    count = len(differences)
    say(
        f"{counted(count, 'difference')}; {counted(found['replicas_checked'], 'replica')} and "
        f"{counted(found['processes_seen'], 'process', 'processes')} checked"
    )
    return 1 if differences else 0
