"""All of a cluster at once, and all but the node that holds the log: what goes on, what is not done meanwhile, and what
is never done twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.hosts.conftest import ClusterMaker
from tests.hosts.hosts import DEAD_SECONDS_MAX, Cluster, Node, all_alive, stays_so
from tests.integration.daemon import is_alive
from tests.integration.programs import serve, sh

# A node is not current any more three seconds after the last word of its leader.
NOT_CURRENT_SECONDS = 4.0


@pytest.fixture(scope="module")
def whole(make_cluster: ClusterMaker) -> Cluster:
    """Three nodes, with a service on each of n2 and n3."""
    return make_cluster(3).start()


@pytest.fixture(scope="module")
def services(whole: Cluster) -> dict[str, str]:
    return {node.name: whole.serve_on(node, name=f"on-{node.name}") for node in whole.nodes[1:]}


@pytest.fixture
def cluster(whole: Cluster, services: dict[str, str]) -> Iterator[Cluster]:
    yield whole
    whole.mend()


def pid_of(node: Node, job: str) -> int:
    return int(node.runs_of(job)[0]["pid"])


def runs_on_hosts(cluster: Cluster) -> set[int]:
    return {pid for node in cluster.nodes for pid in node.runs_on_host()}


# --- all of it ------------------------------------------------------------------------------------------------------


def test_a_cluster_whose_daemons_were_all_killed_comes_back_in_another_order_with_all_that_ran(
    cluster: Cluster, services: dict[str, str]
) -> None:
    running = runs_on_hosts(cluster)
    pids = {name: pid_of(cluster[int(name[1:])], job) for name, job in services.items()}
    assert set(pids.values()) <= running
    for node in cluster.nodes:
        node.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
    for node in cluster.nodes:
        node.kill9()
    for node in (cluster[3], cluster[1], cluster[2]):
        node.up()
        time.sleep(0.3)
    for node in cluster.nodes:
        node.wait_until_ready()
    cluster.wait_for_one_view()
    for job in services.values():
        cluster[1].wait_ready(job)
    assert {name: pid_of(cluster[int(name[1:])], job) for name, job in services.items()} == pids
    assert runs_on_hosts(cluster) == running, "nothing was begun and nothing ended"


def test_a_cluster_that_was_switched_off_comes_back_with_its_services(
    cluster: Cluster, services: dict[str, str]
) -> None:
    for node in cluster.nodes:
        node.host.power_off()
    for node in cluster.nodes:
        node.process.wait(10)  # type: ignore[union-attr]
        node.host.power_on()
    for node in reversed(cluster.nodes):
        node.up()
    for node in cluster.nodes:
        node.wait_until_ready()
    cluster.wait_for_one_view()
    for name, job in services.items():
        cluster[1].wait_ready(job)
        assert len(cluster[int(name[1:])].runs_of(job)) == 1


# --- without the voter ----------------------------------------------------------------------------------------------


def test_without_the_voter_services_go_on_and_every_node_lists_where_they_are(
    cluster: Cluster, services: dict[str, str]
) -> None:
    pids = {name: pid_of(cluster[int(name[1:])], job) for name, job in services.items()}
    endpoints = {job: [each["endpoint"] for each in cluster[2].endpoints(job)] for job in services.values()}
    voter, others = cluster[1], cluster.nodes[1:]
    voter.kill9()
    cluster.wait_until_seen(voter, "unsupervised", by=others, seconds=8)
    for node in others:
        for job, listed in endpoints.items():
            assert [each["endpoint"] for each in node.endpoints(job)] == listed
            assert node.fetch(listed[0]) == "hello"
    refused = cluster[3].cli("job", "list")
    assert refused.returncode == 3
    assert "n1, which leads the cluster, is unsupervised" in refused.stderr
    assert json.loads(cluster[3].request("GET", "/v1/jobs")[1])["code"] == "no_leader"
    assert cluster[2].cli("node", "list").returncode == 0
    assert cluster[2].cli("status").returncode == 0
    assert all_alive(pids.values())


def test_without_the_voter_a_service_that_dies_is_started_again(cluster: Cluster, services: dict[str, str]) -> None:
    node, job = cluster[2], services["n2"]
    pid = pid_of(node, job)
    cluster[1].kill9()
    time.sleep(NOT_CURRENT_SECONDS)
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for(lambda: [each for each in node.runs_of(job) if each["pid"] not in (pid, None)], 15)
    assert len(node.attempts_of(job)) == 1, "another run of the same attempt"


def test_a_node_restarted_without_the_voter_keeps_what_runs_and_begins_nothing(
    cluster: Cluster, services: dict[str, str]
) -> None:
    node, job = cluster[3], services["n3"]
    pid, running = pid_of(node, job), node.runs_on_host()
    begun = sorted(path.name for path in (node.data_dir / "sandboxes").iterdir())
    # Once it is back, this is its to run; it hears of it only from a voter.
    node.kill9()
    batch = cluster[1].batch(sh("echo ran >> ran.txt; exec sleep 0.1"), labels={"host": "n3"})
    cluster[1].kill9()
    node.up()
    node.wait_until_ready()
    assert stays_so(lambda: node.runs_on_host() == running and is_alive(pid), NOT_CURRENT_SECONDS)
    assert sorted(path.name for path in (node.data_dir / "sandboxes").iterdir()) == begun
    assert pid_of(node, job) == pid

    cluster[1].up()
    cluster[1].wait_until_ready()
    assert cluster[1].wait_ended(batch)["state"] == "succeeded"
    assert len(node.attempts_of(batch)) == 1
    assert pid_of(node, job) == pid


# --- orders and cuts ------------------------------------------------------------------------------------------------


def test_what_was_submitted_for_a_node_while_it_was_cut_off_runs_on_it_once(
    cluster: Cluster, services: dict[str, str]
) -> None:
    node = cluster[3]
    cluster.lan.cut([node.host], [other.host for other in cluster.nodes if other is not node])
    # At once: the leader believes still that it is there, and places on it.
    early = cluster[1].batch(sh("echo once; exec sleep 0.2"), labels={"host": "n3"})
    cluster.wait_until_seen(node, "silent", by=[cluster[1], cluster[2]], seconds=DEAD_SECONDS_MAX)
    late = cluster[1].batch(sh("echo once; exec sleep 0.2"), labels={"host": "n3"})
    time.sleep(6)  # longer than an order that nobody accepted waits
    assert node.attempts_of(early) == []
    assert cluster[1].job(late)["state"] == "waiting"

    cluster.lan.heal()
    for batch in (early, late):
        assert cluster[1].wait_ended(batch, 30)["state"] == "succeeded"
        assert len(node.attempts_of(batch)) == 1
        assert cluster[1].output(batch) == ["once"]


def test_a_node_that_was_cut_off_ends_what_was_cancelled_meanwhile(cluster: Cluster) -> None:
    node = cluster[3]
    job = cluster[1].submit(serve(), labels={"host": "n3"})
    cluster[1].wait_ready(job)
    pid = pid_of(node, job)
    cluster.lan.cut([node.host], [other.host for other in cluster.nodes if other is not node])
    cluster[1].cancel(job)
    cluster.wait_until_seen(node, "silent", by=[cluster[1]], seconds=DEAD_SECONDS_MAX)
    assert is_alive(pid), "it was not told"
    assert cluster[1].job(job)["state"] == "stopping"
    cluster.lan.heal()
    assert cluster[1].wait_ended(job, 30)["state"] == "cancelled"
    assert not is_alive(pid)
