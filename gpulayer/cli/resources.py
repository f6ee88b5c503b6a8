"""gpulayer resources detect, list: what this machine has, and the stock over the cluster."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.nodes import away_sentences
from gpulayer.cli.render import Row, clean, fitted_table, note, say, say_json, say_wrapped, short_names
from gpulayer.model.units import MILLI, format_size

if TYPE_CHECKING:
    from gpulayer.node.config import Config
    from gpulayer.runtime.accelerators.survey import Survey, Surveyed, User
    from gpulayer.runtime.host import Host

USERS_SHOWN_MAX = 8
_LABEL_WIDTH = 9
_COMMAND_CHARS_MAX = 120


# --- detect -------------------------------------------------------------------------------------------------------


def resources_detect(*, json: bool = False, config: str | None = None, data_dir: str | None = None) -> int:
    """What this machine has, found without a daemon: CPUs, memory, disk, NUMA nodes, GPUs and who is on them; what
    would be handed out and what not, what could not be detected, and why.

    Exit code 1 where there are signs of a GPU that could not be read; what is known is printed all the same.

    Parameters
    ----------
    json
        One JSON document, with everything.
    config
        Configuration file (default /etc/gpulayer/gpulayer.toml, if it is there).
    data_dir
        Data directory of the daemon whose disk and declared devices are meant ($GPULAYER_DATA_DIR).
    """
    gc.enable()
    from gpulayer.runtime.accelerators.survey import DriverAsked, survey

    asked = DriverAsked()  # it takes as long as all that follows
    from gpulayer.node.config import UpOptions, load_config
    from gpulayer.runtime.host import detect_host

    given = load_config(UpOptions(config=config, data_dir=data_dir), os.environ, uid=os.getuid())
    host = detect_host(given.data_dir)
    found = survey(
        asked,
        data_dir=given.data_dir,
        declared=given.accelerators,
        excluded=given.devices_excluded,
        foreign_processes=given.foreign_processes,
    )
    for warning in (*given.warnings, *found.warnings):
        note(f"warning: {clean(warning)}")
    if json:
        say_json(_document(host, found, given))
    else:
        _say_host(host, found, given)
        _say_devices(found)
        _say_undetected([*found.undetected, *host.undetected])
    return 1 if found.gpu_detect == "error" else 0


def _drivers(host: Host, found: Survey) -> dict[str, str]:
    # The driver's own word comes after that of the kernel's module, which is there also where it fails.
    return dict(sorted({**dict(host.drivers), **dict(found.drivers)}.items()))


def _document(host: Host, found: Survey, given: Config) -> dict[str, Any]:
    from gpulayer.wire.http import share

    return {
        "hostname": host.hostname,
        "kernel": host.kernel,
        "cpu_model": host.cpu_model,
        "cpus": share(given.cpus_milli or host.cpus_milli),
        "cpus_all": host.cpus,
        "memory_mib": given.memory_mib or host.memory_mib,
        "memory_all_mib": host.memory_all_mib,
        "memory_available_mib": host.memory_available_mib,
        "data_dir": str(given.data_dir),
        "disk_path": host.disk_path,
        "disk_mib": host.disk_mib,
        "disk_free_mib": host.disk_free_mib,
        "numa": [{"id": near.id, "cpus": near.cpus, "memory_mib": near.memory_mib} for near in host.numa],
        "gpu_detect": found.gpu_detect,
        "drivers": _drivers(host, found),
        "devices": [_device_document(each) for each in found.devices],
        "undetected": [*found.undetected, *host.undetected],
    }


def _device_document(found: Surveyed) -> dict[str, Any]:
    from gpulayer.wire.http import accelerator_to_json, share

    return accelerator_to_json(found.device) | {
        "state": found.state,
        "share_free": share(found.usable_milli),
        "why_not": found.why_not or None,
        "processes": None
        if found.users is None
        else [
            {
                "pid": user.pid,
                "memory_mib": user.memory_mib,
                "user": user.user or None,
                "command": user.command or None,
                "kind": user.kind,
            }
            for user in found.users
        ],
        "process_count": found.user_count,
    }


def _say_host(host: Host, found: Survey, given: Config) -> None:
    _say("host", f"{host.hostname}, {host.kernel}")
    cpus_milli, memory_mib = given.cpus_milli or host.cpus_milli, given.memory_mib or host.memory_mib
    part = f", {cpus_milli / MILLI:g} of them for jobs" if cpus_milli != host.cpus * MILLI else ""
    _say("cpu", f"{host.cpu_model}, {host.cpus} CPUs{part}")
    part = f", {format_size(memory_mib)} of it for jobs" if memory_mib != host.memory_all_mib else ""
    available = host.memory_available_mib
    left = "" if available is None else f", {format_size(available)} available"
    _say("memory", f"{format_size(host.memory_all_mib)}{part}{left}")
    if host.disk_mib:
        free = f"{format_size(host.disk_free_mib)} free"
        _say("disk", f"{format_size(host.disk_mib)}, {free}, at {host.disk_path}")
    gpus_near = _names_by_numa(found)
    for near in host.numa:
        gpus = gpus_near.get(near.id, ())
        parts = [f"CPUs {near.cpus}" if near.cpus else "no CPUs", format_size(near.memory_mib)]
        parts += [f"GPUs {_ranges(gpus)}"] if gpus else []
        _say(f"numa {near.id}", ", ".join(parts))
    drivers = ", ".join(f"{name} {version}" for name, version in _drivers(host, found).items())
    if drivers:
        _say("drivers", drivers)
    for group in _links(found):
        _say("nvlink", group)


def _say(label: str, text: str) -> None:
    say_wrapped(text, indent=" " * (_LABEL_WIDTH + 2), first=f"{label:{_LABEL_WIDTH}}  ")


def _say_devices(found: Survey) -> None:
    gpus = [each for each in found.devices if each.device.kind != "cpu"]
    say()
    if not gpus:
        say("no GPUs")
        return
    names = _short_names(found)
    fitted_table(
        ("GPU", "MODEL", "MEMORY", "CC", "NUMA", "FOR JOBS"),
        [_device_row(each, names[each.device.uuid]) for each in gpus],
        names=("GPU", "MODEL"),
    )
    say()
    fitted_table(
        ("GPU", "UUID", "PCI BUS ID"),
        [Row((names[each.device.uuid], each.device.uuid, each.device.pci_bus_id or "-")) for each in gpus],
        names=("GPU",),
    )


def _device_row(found: Surveyed, name: str) -> Row:
    device = found.device
    users = found.users or ()
    notes = [found.why_not] if found.why_not and not found.is_told_by_users else []
    notes += [_user_words(user) for user in users[:USERS_SHOWN_MAX]]
    more = max(found.user_count, len(users)) - USERS_SHOWN_MAX
    notes += [f"and {more} more processes"] if more > 0 else []
    cells = (
        # An instance stands below its GPU.
        f" {name}" if device.parent else name,
        device.model or "-",
        format_size(device.memory_mib) if device.memory_mib else "-",
        device.compute_capability or "-",
        "-" if device.numa_node is None else device.numa_node,
        _use_words(found),
    )
    return Row(cells, notes)


def _use_words(found: Surveyed) -> str:
    if found.usable_milli == MILLI:
        return "yes, declared" if found.device.source == "declared" else "yes"
    part = f"{found.usable_milli / MILLI:g} of it" if found.usable_milli else "no"
    return f"{part}, {_STATES[found.state]}"


_STATES = {"in_use": "in use", "unhealthy": "unhealthy", "excluded": "excluded", "split": "MIG mode", "usable": ""}


def _user_words(user: User) -> str:
    """`pid 4711 of anna, 20GiB: python train.py`."""
    whose = f" of {user.user}" if user.user else ""
    size = "" if user.memory_mib is None else f", {format_size(user.memory_mib)}"
    ours = {"managed": " (below gpulayer)", "gone": " (gone)", "foreign": ""}[user.kind]
    command = user.command if len(user.command) <= _COMMAND_CHARS_MAX else user.command[:_COMMAND_CHARS_MAX] + "…"
    return f"pid {user.pid}{whose}{size}{ours}{command and ': ' + command}"


def _say_undetected(reasons: Sequence[str]) -> None:
    if not reasons:
        return
    say()
    say("not detected:")
    for reason in reasons:
        say_wrapped(reason, indent="    ", first="  - ")


# --- topology, in short -------------------------------------------------------------------------------------------


def _short_names(found: Survey) -> dict[str, str]:
    devices = [each.device for each in found.devices if each.device.kind != "cpu"]
    return short_names(
        [{"uuid": each.uuid, "index": each.index, "parent": each.parent} for each in devices], found.node_id
    )


def _names_by_numa(found: Survey) -> dict[int, list[str]]:
    """Of GPUs; an instance is where its GPU is."""
    names = _short_names(found)
    near: dict[int, list[str]] = {}
    for each in found.devices:
        if each.device.numa_node is not None and each.device.uuid in names and not each.device.parent:
            near.setdefault(each.device.numa_node, []).append(names[each.device.uuid])
    return near


def _links(found: Survey) -> list[str]:
    """`0-7, each to each`, else a line for each GPU with the ones that it has a link to."""
    names = _short_names(found)
    peers = {
        each.device.uuid: sorted({*each.device.nvlink_peers} & names.keys())
        for each in found.devices
        if {*each.device.nvlink_peers} & names.keys()
    }
    lines = []
    left = dict(peers)
    for uuid in peers:
        if uuid not in left:
            continue
        group = {uuid, *peers[uuid]}
        if all({member, *peers.get(member, ())} == group for member in group):
            members = [member for member in peers if member in group]
            lines.append(f"{_ranges([names[member] for member in members])}, each to each")
            for member in members:
                del left[member]
        else:
            lines.append(f"{names[uuid]} to {_ranges([names[peer] for peer in peers[uuid]])}")
            del left[uuid]
    return lines


def _ranges(names: Sequence[str]) -> str:
    """`0-3,6` of numbers; other names as they are."""
    numbers = sorted(int(name) for name in names if name.isdecimal())
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return ",".join([*shown, *(name for name in names if not name.isdecimal())])


# --- list ---------------------------------------------------------------------------------------------------------


def resources_list(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """The stock over the cluster: GPUs by model, idle and all, and the largest number idle on one node; CPUs, memory
    and disk by node.

    Parameters
    ----------
    json
        One JSON document.
    """
    found = connection.client().resources()
    if json:
        say_json(found)
        return
    if found["models"]:
        fitted_table(
            ("MODEL", "MEMORY", "IDLE", "ALL", "MOST", "ON NODE"),
            [_model_row(model) for model in found["models"]],
            names=("MODEL",),
        )
    else:
        say("no GPUs")
    say()
    say("idle/all by node:")
    fitted_table(
        ("NODE", "CPUS", "MEMORY", "GPUS", "DISK", "DRIVER", "CUDA"),
        [_node_row(node) for node in found["nodes"]],
        names=("NODE",),
    )
    if found["away"]:
        say()
        say("not alive, and not counted above:")
        for sentence in away_sentences(found["away"]):
            say_wrapped(sentence, indent="    ", first="  ")


def _model_row(model: Mapping[str, Any]) -> Row:
    """Where all are idle, there is no more to be said."""
    taken = [f"{model[use]} {words}" for use, words in _USES.items() if model[use]]
    taken += [f"{model['share_open']:g} open for shares"] if model["share_open"] else []
    cells = (
        model["model"],
        format_size(model["memory_mib"]),
        model["idle"],
        model["all"],
        model["largest_idle_on_one_node"] or "-",
        model["node"] or "-",
    )
    return Row(cells, [", ".join(taken)] if taken else [])


_USES = {"held": "held", "foreign": "used by others", "unhealthy": "unhealthy", "away": "on nodes that are not alive"}


def _node_row(node: Mapping[str, Any]) -> Row:
    drivers = dict(node["drivers"])
    cuda = drivers.pop("cuda", "-")
    cells = (
        node["name"] if node["state"] == "alive" else f"{node['name']} ({node['state']})",
        f"{node['cpus_idle']:g}/{node['cpus']:g}",
        f"{format_size(node['memory_idle_mib'])}/{format_size(node['memory_mib'])}",
        f"{node['gpus_idle']}/{node['gpus']}" if node["gpus"] else "-",
        format_size(node["disk_mib"]) if node["disk_mib"] else "-",
        drivers.get("nvidia") or ", ".join(drivers.values()) or "-",
        cuda,
    )
    # A node without a GPU need not excuse itself.
    reasons = [] if node["gpu_detect"] == "none" else node["undetected"]
    return Row(cells, [f"not detected: {reason}" for reason in reasons])
