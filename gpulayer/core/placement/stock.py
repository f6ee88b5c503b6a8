"""What each node has, and how much of it is free: one account, from the log where it is, else from the nodes' records.

The log knows what is held before a node has said so; a record says what its node has been told, and may be as old as
the node has been away. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpulayer.core.placement.fit import Free, left_of
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import NodeId
from gpulayer.model.node import Accelerator, Capabilities, Node
from gpulayer.model.replica import Assignment
from gpulayer.model.seen import NodeSeen, Table
from gpulayer.model.units import MILLI

_NOTHING = Capabilities(cpus_milli=0, memory_mib=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A replica that holds a part of a node."""

    job_name: str
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStock:
    """One node: how it is seen, what it has, and who holds what of it."""

    seen: NodeSeen
    node: Node
    """With no capabilities while nobody knows them."""
    free: Free
    holders: tuple[Holder, ...]
    idle_milli: Mapping[str, int]
    """Per device how much of it a replica could get now: nothing of a node that is not alive."""

    @property
    def is_here(self) -> bool:
        """Whether its parts can be had now. A suspected node gets nothing new either (fit.py)."""
        return self.seen.state == "alive"

    @property
    def cpus_idle_milli(self) -> int:
        return max(0, self.free.cpus_milli) if self.is_here else 0

    @property
    def memory_idle_mib(self) -> int:
        return max(0, self.free.memory_mib) if self.is_here else 0

    @property
    def gpus(self) -> tuple[Accelerator, ...]:
        return tuple(device for device in self.node.capabilities.accelerators if device.kind != "cpu")


def stock_of(table: Table, state: ClusterState | None) -> list[NodeStock]:
    """Every node that is seen or known, by name. `state`: with the nodes as they are seen now; None where the log is
    not here, and the records say what is held."""
    if state is None:
        found = [make_stock(seen, _node_of_record(seen), _holders_of_record(seen)) for seen in table.nodes.values()]
    else:
        holders = _holders_of_log(state)
        seen_of = {**{node.id: _not_seen(node) for node in state.nodes.values()}, **table.nodes}
        found = [
            make_stock(seen, state.nodes.get(id) or _node_of_record(seen), holders.get(id, ()))
            for id, seen in seen_of.items()
        ]
    return sorted(found, key=lambda stock: (stock.node.name, stock.node.id))


def make_stock(seen: NodeSeen, node: Node, holders: Iterable[Holder]) -> NodeStock:
    holders = tuple(holders)
    free = left_of(node, (holder.assignment for holder in holders))
    idle = idle_milli_of(node, free)
    if seen.state != "alive":
        idle = dict.fromkeys(idle, 0)
    return NodeStock(seen=seen, node=node, free=free, holders=holders, idle_milli=idle)


def idle_milli_of(node: Node, free: Free) -> dict[str, int]:
    """How much of each device a replica could get: nothing of one that is unhealthy, and nothing of a GPU and its MIG
    instances beside one another."""
    devices = node.capabilities.accelerators
    left = {device.uuid: max(0, free.gpu_milli.get(device.uuid, 0)) for device in devices}
    held = {device.uuid for device in devices if left[device.uuid] < MILLI - device.foreign_milli}
    split = {device.parent for device in devices if device.parent and device.uuid in held}
    return {
        device.uuid: 0 if device.unhealthy or device.uuid in split or device.parent in held else left[device.uuid]
        for device in devices
    }


def _holders_of_log(state: ClusterState) -> dict[NodeId, list[Holder]]:
    """An assignment holds its part until it is released, also when its outcome is known already."""
    found: dict[NodeId, list[Holder]] = {}
    for job in state.jobs.values():
        if not job.is_live:
            continue
        for replica in job.replicas:
            if replica.assignment is not None:
                found.setdefault(replica.assignment.node, []).append(
                    Holder(job_name=job.name, assignment=replica.assignment)
                )
    return found


def _holders_of_record(seen: NodeSeen) -> list[Holder]:
    return [
        Holder(
            job_name=said.job_name,
            assignment=Assignment(
                replica=attempt.replica,
                attempt=attempt.attempt,
                node=seen.id,
                revision=said.revision,
                devices=said.devices,
                cpus_milli=said.cpus_milli,
                memory_mib=said.memory_mib,
            ),
        )
        for attempt, said in sorted(seen.replicas.items(), key=lambda item: str(item[0]))
    ]


def _node_of_record(seen: NodeSeen) -> Node:
    facts = seen.facts
    return Node(
        id=seen.id,
        name=seen.name,
        capabilities=facts.capabilities if facts is not None else _NOTHING,
        advertise=facts.advertise if facts is not None else "",
        admitted_at_utc=0.0,
    )


def _not_seen(node: Node) -> NodeSeen:
    """Let in a moment ago."""
    return NodeSeen(
        id=node.id,
        name=node.name,
        state="silent",
        reason="nothing of it has been heard yet",
        age_seconds=0.0,
        facts=None,
    )
