"""What is idle of a cluster: nothing of what is held, unwell, somebody else's, or a part of what is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpulayer.core.placement.fit import free_of
from gpulayer.core.placement.stock import NodeStock, idle_milli_of, stock_of
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import NodeId
from gpulayer.model.node import Accelerator, Capabilities, Node
from gpulayer.model.seen import NodeSeen, Table
from gpulayer.wire.nodes import gpu_stock, node_to_json, resources_to_json


def device(uuid: str, model: str = "A100", **more: Any) -> Accelerator:
    return Accelerator(uuid=uuid, kind="cuda", vendor="nvidia", model=model, memory_mib=40960, **more)


def node(name: str, *devices: Accelerator) -> Node:
    has = Capabilities(cpus_milli=4000, memory_mib=1024, accelerators=devices)
    return Node(id=NodeId(f"n-{name}"), name=name, capabilities=has, advertise="127.0.0.1", admitted_at_utc=0.0)


def cluster(*nodes: Node) -> ClusterState:
    return replace(ClusterState(), nodes={each.id: each for each in nodes})


def stock(state: ClusterState) -> list[NodeStock]:
    """With every node alive."""
    seen = {
        id: NodeSeen(id=id, name=node.name, state="alive", age_seconds=0.0, facts=None)
        for id, node in state.nodes.items()
    }
    return stock_of(Table(seen_by=next(iter(seen)), nodes=seen, leader=None), state)


def models(state: ClusterState) -> list[Any]:
    return list(resources_to_json(stock(state))["models"])


def test_the_largest_number_is_of_one_node_and_the_first_by_name() -> None:
    state = cluster(
        node("c", device("1"), device("2")),
        node("b", device("3"), device("4")),
        node("a", device("5")),
    )
    (found,) = models(state)
    assert (found["idle"], found["all"], found["largest_idle_on_one_node"], found["node"]) == (5, 5, 2, "b")


def test_models_are_apart_where_their_memory_is() -> None:
    state = cluster(node("a", device("1"), replace(device("2"), memory_mib=81920)))
    assert [(found["memory_mib"], found["all"]) for found in models(state)] == [(40960, 1), (81920, 1)]


def test_what_others_hold_and_what_is_unwell_is_not_idle() -> None:
    state = cluster(
        node(
            "a",
            device("1", foreign="held by another", foreign_milli=250),
            device("2", foreign="pid 7", foreign_milli=1000),
            device("3", unhealthy="it is lost"),
            device("4", unhealthy="it is lost", foreign="pid 7", foreign_milli=1000),
        )
    )
    (found,) = models(state)
    assert {key: found[key] for key in ("idle", "held", "foreign", "unhealthy", "share_open")} == {
        "idle": 0,
        "held": 0,
        "foreign": 2,
        "unhealthy": 2,
        "share_open": 0.75,
    }
    assert gpu_stock(stock(state)) == [{"model": "A100", "free": 0.75, "all": 4, "away": 0}]
    (only,) = stock(state)
    told = node_to_json(only)["devices"]
    assert [(each["share_free"], each["foreign_share"]) for each in told] == [(0.75, 0.25), (0, 1), (0, 0), (0, 1)]


def test_an_instance_that_is_held_takes_its_gpu_along_and_not_its_sisters() -> None:
    gpu = device("GPU-1")
    parts = [device(f"MIG-{number}", "A100 MIG 1g.5gb", parent="GPU-1") for number in (1, 2)]
    state = cluster(node("a", gpu, *parts))
    (only,) = state.nodes.values()
    free = free_of(state)[only.id]
    held = replace(free, gpu_milli={**free.gpu_milli, "MIG-1": 500})
    assert list(idle_milli_of(only, held).values()) == [0, 500, 1000]
    whole = replace(free, gpu_milli={**free.gpu_milli, "GPU-1": 0})
    assert list(idle_milli_of(only, whole).values()) == [0, 0, 0]


def test_what_stands_for_cpus_is_no_gpu() -> None:
    cpu = Accelerator(uuid="cpu-0", kind="cpu", vendor="cpu", model="EPYC", memory_mib=1)
    assert models(cluster(node("a", cpu))) == []
