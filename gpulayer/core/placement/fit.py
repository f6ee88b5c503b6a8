"""What is free, and whether one replica fits a node: the devices it would get there, or why not.

Knows capacities and rules, not queues (plan.py) and not processes. All numbers are what the log says: the node's own
ledger has the last word when it starts something (P3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from gpulayer.core.placement.refusal import (
    DevicesInUse,
    MissingLabel,
    NoAccelerators,
    NoShareFree,
    NotEnoughGpusFree,
    NotFree,
    Refusal,
    TooFewCpus,
    TooLittleGpuMemory,
    TooLittleMemory,
    UnhealthyDevices,
    WrongAcceleratorKind,
    WrongModel,
    WrongVendor,
    counted,
    is_permanent,
)
from gpulayer.core.placement.score import Score
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import JobId, NodeId
from gpulayer.model.job import Requirements
from gpulayer.model.node import Accelerator, Node, excluded_by
from gpulayer.model.replica import Assignment, DeviceShare
from gpulayer.model.units import MILLI


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """What assignments leave of one node. Below zero where the node shrank under its work."""

    gpu_milli: Mapping[str, int]
    cpus_milli: int
    memory_mib: int
    replicas: Mapping[JobId, tuple[int, ...]] = field(default_factory=dict)
    """Who is there, by job; sorted."""

    def without(self, assignment: Assignment) -> Free:
        """With the assignment's part taken."""
        return self._changed(assignment, -1)

    def given_back(self, assignment: Assignment) -> Free:
        return self._changed(assignment, 1)

    def _changed(self, assignment: Assignment, sign: int) -> Free:
        gpu_milli = dict(self.gpu_milli)
        for share in assignment.devices:
            if share.uuid in gpu_milli:  # a device that vanished gives nothing back
                gpu_milli[share.uuid] += sign * share.milli
        job, index = assignment.replica.job, assignment.replica.index
        there = {*self.replicas.get(job, ())} - {index} | ({index} if sign < 0 else set())
        replicas = {**self.replicas, job: tuple(sorted(there))}
        if not there:
            del replicas[job]
        return replace(
            self,
            gpu_milli=gpu_milli,
            cpus_milli=self.cpus_milli + sign * assignment.cpus_milli,
            memory_mib=self.memory_mib + sign * assignment.memory_mib,
            replicas=replicas,
        )


def free_of(state: ClusterState) -> dict[NodeId, Free]:
    """Per node. An assignment holds its part until it is released, also when its outcome is known already."""
    held: dict[NodeId, list[Assignment]] = {node: [] for node in state.nodes}
    for job in state.jobs.values():
        if not job.is_live:
            continue
        for replica in job.replicas:
            if replica.assignment is not None and replica.assignment.node in held:
                held[replica.assignment.node].append(replica.assignment)
    return {node_id: left_of(state.nodes[node_id], assignments) for node_id, assignments in held.items()}


def left_of(node: Node, assignments: Iterable[Assignment] = ()) -> Free:
    """What these leave of a node."""
    gpu_milli = {device.uuid: MILLI - device.foreign_milli for device in _gpus_of(node)}
    cpus_milli, memory_mib = node.capabilities.cpus_milli, node.capabilities.memory_mib
    there: dict[JobId, list[int]] = {}
    for assignment in assignments:
        cpus_milli -= assignment.cpus_milli
        memory_mib -= assignment.memory_mib
        there.setdefault(assignment.replica.job, []).append(assignment.replica.index)
        for share in assignment.devices:
            if share.uuid in gpu_milli:
                gpu_milli[share.uuid] -= share.milli
    replicas = {job: tuple(sorted(indexes)) for job, indexes in there.items()}
    return Free(gpu_milli=gpu_milli, cpus_milli=cpus_milli, memory_mib=memory_mib, replicas=replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """It fits, with these devices."""

    devices: tuple[DeviceShare, ...]
    score: Score
    """Without `own_replicas`, which is the job's, not the node's."""


def fit(needs: Requirements, node: Node, free: Free) -> Choice | Refusal:
    """The best devices of the node for one replica, or the first reason against it.

    Reasons that would hold on the empty node too come first: they are what the user can act on.
    """
    labels = _label_refusal(needs, node)
    devices = _gpus(needs, node, free)
    host = _host(needs, node, free)
    refusals = [found for found in (labels, devices, host) if found is not None and not isinstance(found, tuple)]
    if refusals:
        return min(refusals, key=lambda refusal: not is_permanent(refusal))  # min() takes the first of equals
    assert isinstance(devices, tuple)
    return Choice(devices=devices, score=_score(devices, node, free))


def _label_refusal(needs: Requirements, node: Node) -> Refusal | None:
    there = dict(node.capabilities.labels) if needs.labels else {}
    for key, value in needs.labels:
        if there.get(key) != value:
            return MissingLabel(node=node.name, key=key, needed=value, there=there.get(key))
    return None


def _host(needs: Requirements, node: Node, free: Free) -> Refusal | None:
    has = node.capabilities
    if needs.cpus_milli and needs.cpus_milli > free.cpus_milli:
        return TooFewCpus(
            node=node.name, needed_milli=needs.cpus_milli, free_milli=free.cpus_milli, all_milli=has.cpus_milli
        )
    if needs.memory_mib and needs.memory_mib > free.memory_mib:
        return TooLittleMemory(
            node=node.name, needed_mib=needs.memory_mib, free_mib=free.memory_mib, all_mib=has.memory_mib
        )
    return None


def _gpus(needs: Requirements, node: Node, free: Free) -> tuple[DeviceShare, ...] | Refusal:
    if needs.gpus_milli == 0:
        return ()
    matching = _matching(needs, node)
    if not isinstance(matching, list):
        return matching
    # One replica gets devices of one kind only: no program uses two vendors' runtimes at once.
    by_kind: dict[str, list[Accelerator]] = {}
    for device in matching:
        by_kind.setdefault(device.kind, []).append(device)
    results = [_of_one_kind(needs, node, free, devices) for _, devices in sorted(by_kind.items())]
    choices = [found for found in results if isinstance(found, tuple)]
    if choices:
        memory = {device.uuid: device.memory_mib for device in matching}
        return min(choices, key=lambda shares: (sum(memory[share.uuid] for share in shares), shares[0].uuid))
    refusals = [found for found in results if not isinstance(found, tuple)]
    return min(refusals, key=is_permanent)  # one that may pass says more than one that cannot


def _gpus_of(node: Node) -> list[Accelerator]:
    return [device for device in node.capabilities.accelerators if device.kind != "cpu"]


def _matching(needs: Requirements, node: Node) -> list[Accelerator] | Refusal:
    """Devices that could do, free or not, well or not; else the first test that none passes."""
    devices = _gpus_of(node)
    if not devices:
        has = node.capabilities
        why = has.undetected if has.gpu_detect == "error" else ()
        return NoAccelerators(node=node.name, needed_milli=needs.gpus_milli, undetected=why, excluded=has.gpus_excluded)
    if needs.accelerator is not None:
        there = counted(device.kind for device in devices)
        devices = [device for device in devices if device.kind == needs.accelerator]
        if not devices:
            return WrongAcceleratorKind(node=node.name, needed=needs.accelerator, there=there)
    if needs.vendor is not None:
        vendors = Counter(device.vendor for device in devices)
        there = tuple(f"{vendor}'s ({number})" for vendor, number in sorted(vendors.items()))
        devices = [device for device in devices if device.vendor.casefold() == needs.vendor.casefold()]
        if not devices:
            return WrongVendor(node=node.name, needed=needs.vendor, there=there)
    if needs.gpu_models:
        there = counted(device.model for device in devices)
        patterns = [pattern.casefold() for pattern in needs.gpu_models]
        devices = [d for d in devices if any(fnmatchcase(d.model.casefold(), pattern) for pattern in patterns)]
        if not devices:
            return WrongModel(node=node.name, needed=needs.gpu_models, there=there)
    if needs.gpu_memory_mib:
        share_milli = min(needs.gpus_milli, MILLI)
        largest = max(device.memory_mib for device in devices)
        # A share tests share x total, in integers.
        devices = [d for d in devices if d.memory_mib * share_milli >= needs.gpu_memory_mib * MILLI]
        if not devices:
            return TooLittleGpuMemory(
                node=node.name,
                needed_mib=needs.gpu_memory_mib,
                largest_mib=largest * share_milli // MILLI,
                needed_milli=needs.gpus_milli,
            )
    return devices


def _of_one_kind(
    needs: Requirements, node: Node, free: Free, devices: Sequence[Accelerator]
) -> tuple[DeviceShare, ...] | Refusal:
    whole = needs.gpus_milli >= MILLI
    number = needs.gpus_milli // MILLI if whole else 1
    milli = MILLI if whole else needs.gpus_milli
    healthy = [device for device in devices if not device.unhealthy]
    # By what is free, so a shared GPU is never given whole and a whole one never shared.
    undivided = [device for device in healthy if _is_undivided(device, node, free)]
    with_room = [device for device in undivided if free.gpu_milli.get(device.uuid, 0) >= milli]
    open_devices = _side_by_side(with_room) if number > 1 else with_room
    if len(open_devices) >= number:
        chosen = _smallest(open_devices, number) if whole else [_fullest(open_devices, free)]
        return tuple(DeviceShare(uuid=device.uuid, milli=milli) for device in chosen)
    would_be_open = [
        device
        for device in undivided
        if device.foreign and device not in with_room and _without_others(device, free) >= milli
    ]
    others = NotFree(
        in_use=_told_together((device, f"in use: {device.foreign}") for device in would_be_open),
        unhealthy=_told_together((device, f"unhealthy: {device.unhealthy}") for device in devices if device.unhealthy),
        held=len(healthy) - len(with_room) - len(would_be_open),
    )
    if len(healthy) < number <= len(devices):
        return UnhealthyDevices(
            node=node.name, needed_milli=needs.gpus_milli, free=len(open_devices), all=len(devices), others=others
        )
    if len(open_devices) + len(would_be_open) >= number:
        return DevicesInUse(
            node=node.name, needed_milli=needs.gpus_milli, free=len(open_devices), all=len(devices), others=others
        )
    if whole:
        return NotEnoughGpusFree(
            node=node.name,
            needed=number,
            free=len(open_devices),
            all=len(devices),
            others=others,
            excluded=node.capabilities.gpus_excluded if number > len(devices) else 0,
        )
    largest = max((free.gpu_milli.get(device.uuid, 0) for device in undivided), default=0)
    return NoShareFree(
        node=node.name, needed_milli=milli, largest_free_milli=max(0, largest), all=len(devices), others=others
    )


def _is_undivided(device: Accelerator, node: Node, free: Free) -> bool:
    """Nothing is held of what cannot be used beside it (MIG)."""
    if not device.parent and not any(each.parent == device.uuid for each in node.capabilities.accelerators):
        return True
    by_uuid = {each.uuid: each for each in node.capabilities.accelerators}
    return all(
        free.gpu_milli.get(uuid, 0) >= MILLI - by_uuid[uuid].foreign_milli
        for uuid in excluded_by(device.uuid, node.capabilities.accelerators)
    )


def _side_by_side(devices: Sequence[Accelerator]) -> list[Accelerator]:
    """Those that one replica may have together: of a GPU and its MIG instances not both, the smaller ones first."""
    chosen: list[Accelerator] = []
    for device in sorted(devices, key=lambda device: (device.memory_mib, device.uuid)):
        if not excluded_by(device.uuid, [*chosen, device]):
            chosen.append(device)
    return chosen


def _without_others(device: Accelerator, free: Free) -> int:
    """What would be free of it if gpulayer had it for itself."""
    return free.gpu_milli.get(device.uuid, 0) + device.foreign_milli


def _smallest(devices: Sequence[Accelerator], number: int) -> list[Accelerator]:
    """Whole GPUs: of one model if one has enough free, the smallest memory that does, then by uuid."""
    of_model = Counter((device.memory_mib, device.model) for device in devices)
    enough = sorted(key for key, count in of_model.items() if count >= number)
    ordered = sorted(devices, key=lambda device: (device.memory_mib, device.model, device.uuid))
    if enough:
        ordered = [device for device in ordered if (device.memory_mib, device.model) == enough[0]]
    return ordered[:number]


def _fullest(devices: Sequence[Accelerator], free: Free) -> Accelerator:
    """A share: the GPU that is most used already and still has room, so that whole ones stay free."""
    return min(devices, key=lambda device: (free.gpu_milli[device.uuid], device.memory_mib, device.uuid))


def _told_together(told: Iterable[tuple[Accelerator, str]]) -> tuple[str, ...]:
    """What is the same of several is said once: `GPU 0 (GPU-ecdd1234) unhealthy: hot`, `2 unhealthy: hot`."""
    labels: dict[str, list[str]] = {}
    for device, text in sorted(told, key=lambda each: (each[0].index is None, each[0].index or 0, each[0].uuid)):
        labels.setdefault(text, []).append(device.label)
    return tuple(f"{named[0] if len(named) == 1 else len(named)} {text}" for text, named in labels.items())


def _score(devices: tuple[DeviceShare, ...], node: Node, free: Free) -> Score:
    memory = {device.uuid: device.memory_mib for device in node.capabilities.accelerators}
    taken = sum(share.milli for share in devices)
    return Score(
        own_replicas=0,
        share_left_milli=sum(free.gpu_milli[share.uuid] - share.milli for share in devices),
        device_memory_mib=sum(memory[share.uuid] for share in devices),
        gpus_left_milli=max(0, sum(free.gpu_milli.values()) - taken),
        replicas_there=sum(len(indexes) for indexes in free.replicas.values()),
    )
