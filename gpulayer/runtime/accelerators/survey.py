"""The devices of this machine, looked at once and without a daemon: what would be handed out, and what not and why.

The same reading, locks and rules as the daemon's (devices.py), but no history: a device that was unwell a moment ago
and is well again counts as well here. Changes nothing, and takes no lock. For `gpulayer resources detect`.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeAlias

from gpulayer.core.inventory import (
    DevicesRead,
    Elsewhere,
    ElsewhereSeen,
    Inventory,
    LockTrouble,
    SeenProcess,
    facts_of,
)
from gpulayer.model.errors import GpulayerError
from gpulayer.model.ids import NodeId
from gpulayer.model.inventory import DeviceReading, Reading, ReadingFailed
from gpulayer.model.node import Accelerator, GpuDetect
from gpulayer.model.units import Instant
from gpulayer.runtime.accelerators.declared import declared_accelerators
from gpulayer.runtime.accelerators.device_users import DeviceUsers, pids_of, without_strange_pids
from gpulayer.runtime.accelerators.exclude import exclusion_of, is_excluded, pci_bus_id, unmatched_exclusions
from gpulayer.runtime.accelerators.nvml import NO_DRIVER, PciGpu, driver_is_likely, pci_gpus, read_once
from gpulayer.shim.tree import printable

# With what a start and an end take, the answer is there within 5 s also where the driver hangs.
DRIVER_SECONDS_MAX = 3.5
COMMAND_BYTES_MAX = 4096
_NODE_JSON_BYTES_MAX = 65536
# Stands in the UUIDs of declared devices for the node's id, which the first start of a daemon makes.
_NODE_TO_BE = NodeId("NODE")
_VENDOR_NAMES = {"amd": "AMD", "intel": "Intel"}
_SPLIT = "its instances are handed out instead"
_SPLIT_INTO_NOTHING = "it has no instances"


DeviceState: TypeAlias = Literal["usable", "in_use", "unhealthy", "excluded", "split"]
"""`in_use`: by others, or by a gpulayer; wholly or in part. `split`: into MIG instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A process on a device. Text is empty where /proc does not tell."""

    pid: int
    memory_mib: int | None
    user: str
    command: str
    kind: Literal["managed", "foreign", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One device."""

    device: Accelerator
    state: DeviceState
    usable_milli: int
    """How much of it would be handed out."""
    why_not: str = ""
    """Why nothing, or not all; empty where all of it would."""
    is_told_by_users: bool = False
    """`why_not` says no more than `users` does."""
    users: tuple[User, ...] | None = None
    """None: no driver told."""
    user_count: int = 0
    """Also of those that the driver's list was too long for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    node_id: NodeId
    """Which declared devices are made up for."""
    devices: tuple[Surveyed, ...]
    """In the driver's order, instances behind their GPU; then what is declared."""
    gpu_detect: GpuDetect
    drivers: tuple[tuple[str, str], ...]
    undetected: tuple[str, ...]
    warnings: tuple[str, ...]
    """About the configuration."""


class DriverAsked:
    """A question to NVIDIA's driver that is on its way: what takes time may be done while it thinks."""

    def __init__(self, *, root: str = "/") -> None:
        """Begins to ask, where there are signs of a driver below `root`."""
        self._root = root
        self._answer: Reading | ReadingFailed = NO_DRIVER
        self._thread = Thread(target=self._ask)
        if driver_is_likely(root=root):
            self._thread.start()

    def _ask(self) -> None:
        self._answer = read_once(DRIVER_SECONDS_MAX, root=self._root)

    def answer(self) -> Reading | ReadingFailed:
        """Waits for it, for DRIVER_SECONDS_MAX at most."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._answer


def survey(
    asked: DriverAsked,
    *,
    data_dir: Path,
    declared: Sequence[Mapping[str, Any]],
    excluded: Sequence[str],
    foreign_processes: Literal["skip", "allow"],
    root: str = "/",
) -> Survey:
    """Waits for the driver. `declared`, `excluded` and `foreign_processes` are the configuration's; `root` is where
    signs of hardware are looked for."""
    node_id = _node_id(data_dir)
    cards = tuple(pci_gpus(root=root))
    reading = asked.answer()
    processes: Mapping[int, SeenProcess] = {}
    not_listed: list[str] = []
    unmatched: tuple[str, ...] = ()
    if isinstance(reading, Reading):
        reading, processes = _with_users(reading)
        not_listed = cards_not_listed(reading, cards)
        unmatched = unmatched_exclusions(reading.devices, excluded)
    inventory = Inventory(
        declared=declared_accelerators(declared, node_id=node_id),
        is_excluded=lambda device: is_excluded(device, excluded),
        foreign_processes=foreign_processes,
    )
    evidence = tuple(f"NVIDIA card {card.bus_id}" for card in cards if card.vendor == "nvidia")
    inventory.step(DevicesRead(result=reading, processes=processes, evidence=evidence), Instant(0.0))
    _look_at_locks(inventory, data_dir)
    return Survey(
        node_id=node_id,
        devices=_surveyed(inventory, reading, processes, excluded, foreign_processes),
        gpu_detect=inventory.gpu_detect,
        drivers=inventory.drivers,
        undetected=(*inventory.undetected, *not_listed, *cards_of_other_vendors(cards, inventory.accelerators)),
        warnings=tuple(f"devices.exclude: {pattern!r} is about no device of this machine" for pattern in unmatched),
    )


def _with_users(reading: Reading) -> tuple[Reading, Mapping[int, SeenProcess]]:
    reading = without_strange_pids(reading)
    return reading, DeviceUsers().look(pids_of(reading))


def cards_not_listed(reading: Reading, cards: Iterable[PciGpu]) -> list[str]:
    """Cards that the kernel sees and the driver does not tell of: broken, or given away."""
    listed = {pci_bus_id(device.pci_bus_id) for device in reading.devices}
    return [
        f"NVIDIA card {card.bus_id}: the driver does not list it; `dmesg` says why, unless it is passed through to a "
        "virtual machine or kept from this container"
        for card in cards
        if card.vendor == "nvidia" and pci_bus_id(card.bus_id) not in listed
    ]


def cards_of_other_vendors(cards: Iterable[PciGpu], devices: Iterable[Accelerator]) -> list[str]:
    declared = {device.vendor.casefold() for device in devices}
    return [
        f"{_VENDOR_NAMES[card.vendor]} card {card.bus_id}: this version detects NVIDIA's only; declare it with "
        "[[accelerators]] in the configuration if jobs shall have it"
        for card in cards
        if card.vendor != "nvidia" and card.vendor not in declared
    ]


def _look_at_locks(inventory: Inventory, data_dir: Path) -> None:
    """Whatever gpulayer holds here counts as others': this is no daemon, and holds nothing."""
    if not inventory.accelerators:
        return
    # Takes as long to import as all else here, and a machine without devices needs none of it.
    from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Held, shared_directory

    elsewhere: dict[str, Elsewhere] = {}
    troubles: dict[str, str] = {}
    locks: DeviceLocks | None = None
    for device in inventory.accelerators:
        is_declared = device.source == "declared"
        try:
            locks = locks or DeviceLocks(shared_directory(), data_dir)
            milli = locks.held_by_others(device.uuid, (), is_declared=is_declared)
            path, parent = locks.path(device.uuid, is_declared=is_declared), ""
            if not milli and device.parent:
                milli = locks.held_by_others(device.uuid, (), parent=device.parent)
                path, parent = locks.path(device.parent), device.parent
        except GpulayerError as error:
            troubles[device.uuid] = error.message
            continue
        if milli:
            elsewhere[device.uuid] = Elsewhere(milli=milli, text=Held(milli_free=0, path=path, parent=parent).text)
    inventory.step(ElsewhereSeen(elsewhere=elsewhere), Instant(0.0))
    inventory.step(LockTrouble(troubles=troubles), Instant(0.0))


def _surveyed(
    inventory: Inventory,
    reading: Reading | ReadingFailed,
    processes: Mapping[int, SeenProcess],
    excluded: Sequence[str],
    foreign_processes: Literal["skip", "allow"],
) -> tuple[Surveyed, ...]:
    judged = {device.uuid: device for device in inventory.accelerators}
    put_aside = {device.uuid: device for device in inventory.excluded}
    read = reading.devices if isinstance(reading, Reading) else ()
    found = []
    for seen in read:
        users = _users(seen, processes)
        if (device := judged.pop(seen.uuid, None)) is not None:
            one = _judged(device)
            is_foreign = any(user.kind != "managed" for user in users or ()) and foreign_processes == "skip"
            one = replace(one, is_told_by_users=one.state == "in_use" and is_foreign)
        elif (device := put_aside.get(seen.uuid)) is not None:
            pattern = exclusion_of(device, excluded) or exclusion_of(put_aside[device.parent], excluded)
            why_not = f"by {pattern!r} in [devices] exclude"
            one = Surveyed(device=device, state="excluded", usable_milli=0, why_not=why_not)
        elif seen.uuid:
            has_instances = any(each.parent == seen.uuid for each in read)
            why_not = _SPLIT if has_instances else _SPLIT_INTO_NOTHING
            one = Surveyed(device=facts_of(seen), state="split", usable_milli=0, why_not=why_not)
        else:
            continue  # nothing to call it by; its problems are among what was not detected
        found.append(replace(one, users=users, user_count=seen.process_count))
    return (*found, *(_judged(device) for device in judged.values()))


def _judged(device: Accelerator) -> Surveyed:
    state: DeviceState = "usable"
    why_not = ""
    if device.unhealthy:
        state, why_not = "unhealthy", device.unhealthy
    elif device.foreign:
        state, why_not = "in_use", device.foreign
    return Surveyed(device=device, state=state, usable_milli=device.usable_milli, why_not=why_not)


def _users(seen: DeviceReading, processes: Mapping[int, SeenProcess]) -> tuple[User, ...] | None:
    if seen.processes is None:
        return None
    return tuple(
        User(
            pid=process.pid,
            memory_mib=process.memory_mib,
            user=_user_of(process.pid),
            command=_command_of(process.pid),
            kind=processes[process.pid].kind if process.pid in processes else "foreign",
        )
        for process in seen.processes
    )


def _user_of(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command_of(pid: int) -> str:
    """Its words, without what cannot be printed."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(COMMAND_BYTES_MAX).rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return printable(" ".join(word.decode("utf-8", "replace") for word in words))


def _node_id(data_dir: Path) -> NodeId:
    try:
        with open(data_dir / "node.json", "rb") as file:
            record = json.loads(file.read(_NODE_JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return _NODE_TO_BE
    found = record.get("node_id") if isinstance(record, dict) else None
    return NodeId(found) if isinstance(found, str) and found else _NODE_TO_BE
