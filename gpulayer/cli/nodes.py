"""gpulayer node list, status: who is there, by the word of the node that is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.known_nodes import refresh
from gpulayer.cli.render import (
    Row,
    clean,
    counted,
    fitted_table,
    gpus_of,
    pairs,
    reason_sentence,
    say,
    say_json,
    say_wrapped,
    short_names,
)
from gpulayer.model.units import format_duration, format_size

NODE_HEADERS = ("NODE", "STATE", "ADDRESS", "CPUS FREE", "MEMORY FREE", "GPUS FREE")

# Of a node that is alive; both last some hundred milliseconds.
_NOT_SAID = {
    "none": "it is joining: what it has and runs is not known here yet",
    "earlier": "it has restarted: what is shown is what it said before",
}


def node_list(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """The nodes of the cluster: alive or since when not, GPUs free and all, and what is wrong with them.

    Any node answers, by what it knows itself, also while nobody leads.

    Parameters
    ----------
    json
        One JSON document: an array of objects.
    """
    found = connection.client().nodes()
    refresh(connection, found)
    if json:
        say_json(found)
        return
    fitted_table(
        NODE_HEADERS,
        [Row(node_cells(node), troubles(node)) for node in found],
        names=("NODE", "ADDRESS"),
    )


def node_status(node: str, /, *, json: bool = False, connection: Connection = LOCAL) -> None:
    """All that is known of one node: how it is seen, what it has, who holds what of it, and what runs there.

    Parameters
    ----------
    node
        A name, an id, or an unambiguous beginning of one.
    json
        One JSON document.
    """
    found = connection.client().node(node)
    if json:
        say_json(found)
        return
    load = found["load"] or {}
    _say_pairs(
        node=found["name"],
        id=found["id"],
        state=state_of(found).replace(" ", "_"),
        age=None if found["is_self"] else format_duration(round(found["age_seconds"])),
        epoch=found["epoch"] or None,
        voter="yes" if found["voter"] else None,
        version=found["gpulayer_version"],
    )
    for trouble in [*troubles(found), *found["warnings"]]:
        say_wrapped(trouble, indent="  ")
    _say_pairs(address=found["address"] or None, api=found["api"], peers=found["peer_address"])
    _say_pairs(
        cpus=f"{found['cpus_free']:g}/{found['cpus']:g}",
        memory=f"{format_size(found['memory_free_mib'])}/{format_size(found['memory_mib'])}",
        disk=format_size(found["disk_mib"]) if found["disk_mib"] else None,
        cpu_load=f"{load['cpu_percent']}%" if load else None,
        memory_load=f"{load['memory_percent']}%" if load else None,
        disk_load=f"{load['disk_percent']}%" if load else None,
    )
    _say_pairs(**{f"numa{near['id']}": f"{near['cpus']}:{format_size(near['memory_mib'])}" for near in found["numa"]})
    _say_pairs(**found["drivers"])
    if found["labels"]:
        _say_pairs(labels=",".join(f"{key}={value}" for key, value in found["labels"].items()))
    if gpus_of(found):
        say()
        say_devices([found])
    say()
    if not found["replicas"]:
        say("no replicas")
        return
    fitted_table(
        ("REPLICA", "STATE", "ENDPOINT", "GPUS", "RESTARTS", "REASON"),
        [_replica_row(replica) for replica in found["replicas"]],
        names=("REPLICA", "ENDPOINT"),
    )


def _say_pairs(**fields: object) -> None:
    words = pairs(**fields)
    if words:
        say_wrapped(words, indent="  ", first="")


def _replica_row(replica: Mapping[str, Any]) -> Row:
    return Row(
        (
            f"{replica['name']}.{replica['replica']}",
            replica["state"],
            replica["endpoint"] or "-",
            f"{sum(device['share'] for device in replica['devices']):g}",
            replica["restarts"],
            reason_sentence(replica["reason"]) or "-",
        )
    )


# --- what status shows too --------------------------------------------------------------------------------------------


def node_cells(node: Mapping[str, Any]) -> tuple[object, ...]:
    gpus = gpus_of(node)
    free = sum(device["share_free"] for device in gpus)
    return (
        node["name"],
        ",".join([state_of(node), *node["marks"], *node["conditions"]]),
        node["address"] or "-",
        f"{node['cpus_free']:g}/{node['cpus']:g}",
        f"{format_size(node['memory_free_mib'])}/{format_size(node['memory_mib'])}",
        f"{free:g}/{len(gpus)}" if gpus else "-",
    )


def state_of(node: Mapping[str, Any]) -> str:
    """`alive`, or `silent 42s`: how long it has not been heard."""
    if node["state"] == "alive":
        return "alive"
    return f"{node['state']} {format_duration(max(1, round(node['age_seconds'])))}"


def troubles(node: Mapping[str, Any]) -> list[str]:
    """What is wrong with it, in a sentence each."""
    found = [str(node["reason"])] if node["reason"] else []
    if node["record"] != "current" and node["state"] == "alive" and not node["is_self"]:
        found.append(_NOT_SAID[node["record"]])
    found += [
        f"{device['index'] if device['index'] is not None else device['uuid']} ({device['model']}) is unhealthy: "
        f"{device['unhealthy']}"
        for device in gpus_of(node)
        if device["unhealthy"]
    ]
    # A node without a GPU need not excuse itself.
    found += node["undetected"] if node["gpu_detect"] == "error" else []
    return found


def is_troubled(node: Mapping[str, Any]) -> bool:
    return node["state"] != "alive" or bool(node["marks"] or node["conditions"] or troubles(node))


def say_devices(nodes: Iterable[Mapping[str, Any]]) -> None:
    fitted_table(
        ("NODE", "GPU", "MODEL", "MEMORY", "FREE", "HELD BY"),
        [row for node in nodes for row in _device_rows(node)],
        names=("NODE", "GPU", "MODEL"),
    )


def _device_rows(node: Mapping[str, Any]) -> list[Row]:
    gpus = gpus_of(node)
    names = short_names(gpus, node["id"])
    return [_device_row(node["name"], names[device["uuid"]], device) for device in gpus]


def _device_row(node: str, name: str, device: Mapping[str, Any]) -> Row:
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


def away_sentences(away: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of nodes that are not alive, one each."""
    return [
        f"{node['name']} is {clean(state_of(node))}"
        + (f", with {counted(node['gpus'], 'GPU')}" if node["gpus"] else "")
        + (f": {clean(node['reason'])}" if node["reason"] else "")
        for node in away
    ]
