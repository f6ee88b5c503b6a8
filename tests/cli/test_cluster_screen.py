"""Nodes on the screen, from documents as a node makes them: within 80 columns, and one screen however many."""

from __future__ import annotations

import pytest

from gpulayer.cli.cluster import say_cluster
from gpulayer.cli.nodes import away_sentences, state_of
from gpulayer.core.placement.stock import NodeStock, make_stock
from gpulayer.model.ids import NodeId
from gpulayer.model.node import Accelerator, Capabilities, Node
from gpulayer.model.seen import NodeSeen, NodeState
from gpulayer.wire.http import Json
from gpulayer.wire.nodes import away_to_json, gpu_stock, node_to_json, nodes_by_state


def stock(number: int, state: NodeState = "alive", *, conditions: tuple[str, ...] = ()) -> NodeStock:
    name = f"gpu-cluster-rack{number // 20:02d}-host{number:03d}"
    id = NodeId(f"n-{number:016x}")
    gpus = tuple(
        Accelerator(uuid=f"GPU-{number:04x}{index:04x}", kind="cuda", vendor="nvidia", model="H100", memory_mib=81920)
        for index in range(8)
    )
    has = Capabilities(cpus_milli=128_000, memory_mib=2**20, accelerators=gpus)
    seen = NodeSeen(
        id=id,
        name=name,
        state=state,
        reason="" if state == "alive" else "nothing of it has answered for 42s",
        age_seconds=0.2 if state == "alive" else 42.0,
        facts=None,
        conditions=conditions,
        is_self=state == "alive",  # so that nobody waits for its record
    )
    return make_stock(seen, Node(id=id, name=name, capabilities=has, advertise="10.0.0.7", admitted_at_utc=0.0), ())


def status(stocks: list[NodeStock], log_unknown: str | None = None) -> Json:
    return {
        "cluster_id": "c-1",
        "leader": None if log_unknown else "n1",
        "version": "0",
        "node": "n1",
        "uptime_seconds": 1.0,
        "index": 1,
        "nodes_by_state": nodes_by_state(stocks),
        "away": away_to_json(stocks),
        "nodes": [node_to_json(each) for each in stocks],
        "gpus": gpu_stock(stocks),
        "jobs": {"running": 3},
        "queued": [],
        "unhealthy": [],
        "log_unknown": log_unknown,
        "warnings": [],
    }


def test_two_hundred_nodes_are_one_screen_and_those_in_trouble_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    stocks = [stock(number) for number in range(197)]
    stocks += [stock(197, "silent"), stock(198, "unsupervised"), stock(199, conditions=("sluggish",))]
    say_cluster(status(stocks))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "nodes: 198 alive, 1 unsupervised, 1 silent" in lines
    text = "\n".join(lines)
    assert all(word in text for word in ("silent 42s", "unsupervised 42s", "sluggish", "nothing of it has answered"))
    assert "t198" in text
    assert "t196" not in text
    assert lines[-1] == "jobs: 3 running"


def test_when_half_of_many_are_away_it_is_one_screen_too(capsys: pytest.CaptureFixture[str]) -> None:
    say_cluster(status([stock(number, "silent" if number % 2 else "alive") for number in range(200)]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert "and 90 more: gpulayer node list" in lines


def test_of_few_each_has_its_line_and_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    say_cluster(status([stock(0), stock(1)]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("H100" in line for line in lines) == 1 + 16


def test_what_is_not_known_without_a_leader_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say_cluster(status([stock(0)], log_unknown="n1, which leads the cluster, is silent since 9s"))
    said = " ".join(capsys.readouterr().out.split())
    assert "leader=" not in said
    assert "jobs that run: 3 running (by the nodes' own word)" in said
    assert "what is queued is not known here: n1, which leads the cluster, is silent since 9s" in said


def test_a_node_that_is_away_says_since_when() -> None:
    assert state_of(node_to_json(stock(1))) == "alive"
    assert state_of(node_to_json(stock(1, "silent"))) == "silent 42s"
    (sentence,) = away_sentences(away_to_json([stock(1, "silent"), stock(2, "left")]))
    assert sentence == ("gpu-cluster-rack00-host001 is silent 42s, with 8 GPUs: nothing of it has answered for 42s")
