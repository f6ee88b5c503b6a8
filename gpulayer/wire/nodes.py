"""Documents about nodes: each by itself, all of them on one screen, and the stock of what they have.

A node that is not alive is never counted with those whose parts can be had: what it has is `away`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gpulayer.core.placement.stock import NodeStock
from gpulayer.model.ids import AttemptId
from gpulayer.model.node import Accelerator
from gpulayer.model.record import Load, ReplicaRecord
from gpulayer.model.seen import NODE_STATES, NodeSeen
from gpulayer.model.units import MILLI
from gpulayer.wire.http import Json, accelerator_to_json, devices_to_json, reason_to_json, share


def node_to_json(stock: NodeStock) -> Json:
    seen, node = stock.seen, stock.node
    has, facts = node.capabilities, seen.facts
    held = _held_by(stock)
    return {
        "name": node.name,
        "id": node.id,
        "state": seen.state,
        "reason": seen.reason or None,
        "age_seconds": round(seen.age_seconds, 3),
        "conditions": list(seen.conditions),
        "marks": list(node.marks),
        "is_self": seen.is_self,
        "voter": seen.is_voter,
        "record": _record_of(seen),
        "address": node.advertise,
        "api": str(facts.api) if facts is not None and facts.api is not None else None,
        "peer_address": str(seen.peer_address) if seen.peer_address is not None else None,
        "epoch": seen.epoch,
        "incarnation": seen.incarnation,
        "gpulayer_version": (facts.gpulayer_version or None) if facts is not None else None,
        "load": _load_to_json(seen.load),
        "labels": dict(has.labels),
        "cpus": share(has.cpus_milli),
        "cpus_free": share(stock.cpus_idle_milli),
        "memory_mib": has.memory_mib,
        "memory_free_mib": stock.memory_idle_mib,
        "disk_mib": has.disk_mib,
        "numa": [{"id": near.id, "cpus": near.cpus, "memory_mib": near.memory_mib} for near in has.numa],
        "gpu_detect": has.gpu_detect,
        "drivers": dict(has.drivers),
        "undetected": list(has.undetected),
        "gpus_excluded": has.gpus_excluded,
        "devices": [
            accelerator_to_json(device)
            | {"share_free": share(stock.idle_milli[device.uuid]), "held_by": held.get(device.uuid, [])}
            for device in has.accelerators
        ],
    }


def node_status(stock: NodeStock) -> Json:
    """All that is known of one node, also what runs there by its own word."""
    seen = stock.seen
    return node_to_json(stock) | {
        "warnings": list(seen.facts.warnings) if seen.facts is not None else [],
        "replicas": [
            _replica_to_json(attempt, said) for attempt, said in sorted(seen.replicas.items(), key=_name_and_index)
        ],
    }


def _name_and_index(item: tuple[AttemptId, ReplicaRecord]) -> tuple[str, int, int]:
    attempt, said = item
    return said.job_name, attempt.replica.index, attempt.attempt


def _replica_to_json(attempt: AttemptId, said: ReplicaRecord) -> Json:
    status = said.status
    return {
        "job": attempt.replica.job,
        "name": said.job_name,
        "kind": said.kind,
        "replica": attempt.replica.index,
        "attempt": attempt.attempt,
        "state": status.state,
        "reason": reason_to_json(status.reason),
        "endpoint": str(status.endpoint) if status.endpoint is not None and status.state == "ready" else None,
        "pid": status.pid,
        "restarts": status.restarts,
        "devices": devices_to_json(said.devices),
        "cpus": share(said.cpus_milli),
        "memory_mib": said.memory_mib,
    }


def _record_of(seen: NodeSeen) -> str:
    """Of which run of its daemon what it says of itself is."""
    if seen.facts is None:
        return "none"
    return "earlier" if seen.is_stale else "current"


def _load_to_json(load: Load | None) -> Json | None:
    if load is None:
        return None
    return {
        "cpu_percent": load.cpu_percent,
        "memory_percent": load.memory_percent,
        "disk_percent": load.disk_percent,
    }


def _held_by(stock: NodeStock) -> dict[str, list[Json]]:
    held: dict[str, list[Json]] = {}
    for holder in stock.holders:
        replica = holder.assignment.replica
        for part in holder.assignment.devices:
            told = {"job": replica.job, "name": holder.job_name, "replica": replica.index, "share": share(part.milli)}
            held.setdefault(part.uuid, []).append(told)
    return held


# --- all of them ----------------------------------------------------------------------------------------------------


def nodes_by_state(stocks: Iterable[NodeStock]) -> dict[str, int]:
    """How many of each state, best first; states that no node is in are left out."""
    counts = Counter(stock.seen.state for stock in stocks)
    return {state: counts[state] for state in NODE_STATES if counts[state]}


def away_to_json(stocks: Iterable[NodeStock]) -> list[Json]:
    """Nodes that should be there and are not alive. One that left took what it had along."""
    return [
        {
            "name": stock.node.name,
            "id": stock.node.id,
            "state": stock.seen.state,
            "reason": stock.seen.reason or None,
            "age_seconds": round(stock.seen.age_seconds, 3),
            "gpus": len(stock.gpus),
        }
        for stock in stocks
        if not stock.is_here and stock.seen.state != "left"
    ]


# --- the stock ------------------------------------------------------------------------------------------------------


def gpu_stock(stocks: Iterable[NodeStock]) -> list[Json]:
    """Per model how many there are and how much of them is free; what is unhealthy counts as there and not as free.
    Those on nodes that are not alive are `away` and nothing else."""
    found: dict[str, list[int]] = {}
    for stock in _not_left(stocks):
        for device in stock.gpus:
            counts = found.setdefault(device.model, [0, 0, 0])
            if stock.is_here:
                counts[0] += stock.idle_milli[device.uuid]
                counts[1] += MILLI
            else:
                counts[2] += MILLI
    return [
        {"model": model, "free": share(idle), "all": share(all_), "away": share(away)}
        for model, (idle, all_, away) in sorted(found.items())
    ]


def resources_to_json(stocks: Sequence[NodeStock]) -> Json:
    """The stock of the cluster: per model, and per node."""
    stocks = _not_left(stocks)
    # MIG instances carry their profile in their model, so they are a model of their own.
    models: dict[tuple[str, str, str, int], list[tuple[NodeStock, Accelerator]]] = {}
    for stock in stocks:
        for device in stock.gpus:
            kind = (device.model, device.kind, device.vendor, device.memory_mib)
            models.setdefault(kind, []).append((stock, device))
    return {
        "models": [
            {"model": model, "kind": kind, "vendor": vendor, "memory_mib": memory_mib} | _stock_of_model(found)
            for (model, kind, vendor, memory_mib), found in sorted(models.items())
        ],
        "nodes": [_stock_of_node(stock) for stock in stocks],
        "away": away_to_json(stocks),
    }


def _not_left(stocks: Iterable[NodeStock]) -> list[NodeStock]:
    return [stock for stock in stocks if stock.seen.state != "left"]


def _stock_of_model(found: Sequence[tuple[NodeStock, Accelerator]]) -> Json:
    """Each device of a node that is alive counts once: as idle, held (by replicas), foreign or unhealthy. What is left
    of those that somebody holds in part is `share_open`; no whole device can be had of it."""
    counts: Counter[str] = Counter()
    idle_on: Counter[str] = Counter()
    open_milli = 0
    for stock, device in found:
        if not stock.is_here:
            counts["away"] += 1
            continue
        idle_milli = stock.idle_milli[device.uuid]
        use = _use_of(device, idle_milli)
        counts[use] += 1
        if use == "idle":
            idle_on[stock.node.name] += 1
        else:
            open_milli += idle_milli
    largest = max(idle_on.values(), default=0)
    return {
        "idle": counts["idle"],
        "all": len(found) - counts["away"],
        "held": counts["held"],
        "foreign": counts["foreign"],
        "unhealthy": counts["unhealthy"],
        "away": counts["away"],
        "share_open": share(open_milli),
        "largest_idle_on_one_node": largest,
        "node": min((name for name, count in idle_on.items() if count == largest), default=None),
    }


def _use_of(device: Accelerator, idle_milli: int) -> str:
    if device.unhealthy:
        return "unhealthy"
    if idle_milli == MILLI:
        return "idle"
    return "foreign" if device.foreign else "held"


def _stock_of_node(stock: NodeStock) -> Json:
    node = stock.node
    return {
        "name": node.name,
        "state": stock.seen.state,
        "reason": stock.seen.reason or None,
        "age_seconds": round(stock.seen.age_seconds, 3),
        "marks": list(node.marks),
        "cpus": share(node.capabilities.cpus_milli),
        "cpus_idle": share(stock.cpus_idle_milli),
        "memory_mib": node.capabilities.memory_mib,
        "memory_idle_mib": stock.memory_idle_mib,
        "disk_mib": node.capabilities.disk_mib,
        "gpus": len(stock.gpus),
        "gpus_idle": sum(stock.idle_milli[device.uuid] == MILLI for device in stock.gpus),
        "gpu_detect": node.capabilities.gpu_detect,
        "drivers": dict(node.capabilities.drivers),
        "undetected": list(node.capabilities.undetected),
    }
