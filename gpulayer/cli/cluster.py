"""gpulayer status, events: the cluster as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any

from cyclopts import Parameter

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import (
    Row,
    clean,
    fitted_table,
    gpus_of,
    pairs,
    reason_text,
    say,
    say_json,
    say_now,
    say_wrapped,
    short_names,
    utc,
)
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
    for warning in [*found["warnings"], *_undetected(found["nodes"], found["warnings"])]:
        say(f"warning: {clean(warning)}")
    say()
    fitted_table(
        ("NODE", "STATE", "ADDRESS", "CPUS FREE", "MEMORY FREE", "GPUS FREE"),
        [Row(_node_cells(node)) for node in found["nodes"]],
        names=("NODE", "ADDRESS"),
    )
    if found["gpus"]:
        say()
        stock = [Row((gpu["model"], f"{gpu['free']:g}", f"{gpu['all']:g}")) for gpu in found["gpus"]]
        fitted_table(("MODEL", "FREE", "ALL"), stock, names=("MODEL",))
        say()
        fitted_table(
            ("NODE", "GPU", "MODEL", "MEMORY", "FREE", "HELD BY"),
            [row for node in found["nodes"] for row in _device_rows(node)],
            names=("NODE", "GPU", "MODEL"),
        )
    say()
    by_state = ", ".join(f"{count} {state}" for state, count in found["jobs"].items() if count)
    say(f"jobs: {by_state or 'none'}")
    queued = {job["id"] for job in found["queued"]}
    for job in found["queued"]:
        _say_job(f"{job['name']} waits: {reason_text(job['reason']) or 'to be placed'}")
    for job in found["unhealthy"]:
        if job["id"] not in queued:
            why = reason_text(job["reason"])
            ready = f"{job['ready']} of {job['replicas']} ready"
            _say_job(f"{job['name']} is {job['state']}, {ready}{why and ': ' + why}")


def _say_job(text: str) -> None:
    say_wrapped(text, indent="    ", first="  ")


def _undetected(nodes: Iterable[dict[str, Any]], told: Collection[str]) -> list[str]:
    """Why a node does not know its GPUs, with what to do about it; the node that answers has told its own."""
    return [
        f"{node['name']}: {why}"
        for node in nodes
        if node["gpu_detect"] == "error"
        for why in node["undetected"]
        if why not in told
    ]


def _node_cells(node: dict[str, Any]) -> tuple[object, ...]:
    gpus = gpus_of(node)
    free = sum(device["share_free"] for device in gpus)
    return (
        node["name"],
        ",".join([node["state"], *node["marks"]]),
        node["address"],
        f"{node['cpus_free']:g}/{node['cpus']:g}",
        f"{format_size(node['memory_free_mib'])}/{format_size(node['memory_mib'])}",
        f"{free:g}/{len(gpus)}" if gpus else "-",
    )


def _device_rows(node: dict[str, Any]) -> list[Row]:
    gpus = gpus_of(node)
    names = short_names(gpus, node["id"])
    return [_device_row(node["name"], names[device["uuid"]], device) for device in gpus]


def _device_row(node: str, name: str, device: dict[str, Any]) -> Row:
    """What is wrong with it is said in its row, and why under it."""
    held = [
        f"{holder['name']}.{holder['replica']}" + ("" if holder["share"] == 1 else f" {holder['share']:g}")
        for holder in device["held_by"]
    ]
    held += ["others"] if device["foreign"] else []
    held[:0] = ["unhealthy"] if device["unhealthy"] else []
    notes = [f"unhealthy: {device['unhealthy']}"] if device["unhealthy"] else []
    notes += [f"used by others: {device['foreign']}"] if device["foreign"] else []
    free = f"{device['share_free']:g}"
    return Row((node, name, device["model"], format_size(device["memory_mib"]), free, ", ".join(held) or "-"), notes)


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
