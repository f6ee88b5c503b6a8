"""What each node has and how much of it is free: the same from the log and from the records that tell the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulayer.core.placement.stock import NodeStock, stock_of
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import NodeId
from gpulayer.model.record import NodeFacts, ReplicaRecord
from gpulayer.model.replica import ReplicaStatus
from gpulayer.model.seen import NodeSeen, NodeState, Table
from tests.core.cluster.states import Cluster, admit, gpu, service, submit


def placed() -> ClusterState:
    cluster = Cluster(*(admit(f"n{number}", gpu(f"g{number}"), gpu(f"h{number}")) for number in (1, 2)))
    cluster.do(submit(service(gpus=0.5, replicas=3, spread="any"), "j-web"))
    cluster.plan()
    return cluster.state


def seen(state: ClusterState, node: NodeId, *, as_: NodeState = "alive", is_told: bool = True) -> NodeSeen:
    """As its record would have it."""
    known = state.nodes[node]
    replicas = {
        each.id: ReplicaRecord(
            status=ReplicaStatus(attempt=each.id, state="ready"),
            job_name=state.jobs[each.replica.job].name,
            kind="service",
            revision=each.revision,
            devices=each.devices,
            cpus_milli=each.cpus_milli,
            memory_mib=each.memory_mib,
        )
        for each in state.assignments(node)
    }
    facts = NodeFacts(name=known.name, advertise=known.advertise, capabilities=known.capabilities)
    return NodeSeen(
        id=node,
        name=known.name,
        state=as_,
        age_seconds=0.0,
        facts=facts if is_told else None,
        replicas=replicas if is_told else {},
    )


def table(*nodes: NodeSeen) -> Table:
    return Table(seen_by=nodes[0].id, nodes={node.id: node for node in nodes}, leader=None)


def what_matters(stocks: list[NodeStock]) -> list[object]:
    return [
        (each.node.name, each.idle_milli, each.cpus_idle_milli, each.memory_idle_mib, sorted(map(str, each.holders)))
        for each in stocks
    ]


def test_the_log_and_the_records_give_one_account() -> None:
    state = placed()
    everybody = table(*(seen(state, node) for node in state.nodes))
    by_log = stock_of(everybody, state)
    assert what_matters(by_log) == what_matters(stock_of(everybody, None))
    assert sum(sum(each.idle_milli.values()) for each in by_log) == 4000 - 1500


def test_the_log_knows_what_is_held_before_a_record_says_so() -> None:
    state = placed()
    untold = table(*(seen(state, node, is_told=False) for node in state.nodes))
    assert sum(len(each.holders) for each in stock_of(untold, state)) == 3
    assert [each.node.capabilities.accelerators for each in stock_of(untold, None)] == [(), ()]


@pytest.mark.parametrize("away", ["suspect", "unsupervised", "silent", "lost", "left"])
def test_nothing_of_a_node_that_is_not_alive_is_idle(away: NodeState) -> None:
    state = placed()
    first, second = state.nodes
    stocks = stock_of(table(seen(state, first), seen(state, second, as_=away)), state)
    assert [each.is_here for each in stocks] == [True, False]
    assert set(stocks[1].idle_milli.values()) == {0}
    assert (stocks[1].cpus_idle_milli, stocks[1].memory_idle_mib) == (0, 0)


def test_a_node_that_was_let_in_a_moment_ago_is_there_before_it_is_heard() -> None:
    state = placed()
    first, second = state.nodes
    stocks = stock_of(table(seen(state, first)), state)
    assert [(each.node.id, each.seen.state) for each in stocks] == [(first, "alive"), (second, "silent")]


def test_they_come_by_name() -> None:
    state = placed()
    first, second = state.nodes
    renamed = {first: replace(state.nodes[first], name="z"), second: state.nodes[second]}
    state = replace(state, nodes=renamed)
    assert [each.node.name for each in stock_of(table(seen(state, first), seen(state, second)), state)] == ["n2", "z"]
