"""What the others see of a host that fails, and what becomes of its replicas: daemons that are killed or stand still,
hosts that go off, packets that are lost, networks that are cut."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hosts.conftest import ClusterMaker
from tests.hosts.hosts import DEAD_SECONDS_MAX, PEER_PORT, Cluster, Node, Watched, all_alive, stays_so
from tests.integration.daemon import is_alive
from tests.integration.programs import serve

LOSS_SECONDS = 15.0
# Longer than the three seconds after which a suspicion becomes a death.
CUT_SECONDS = 8.0


@pytest.fixture(scope="module")
def whole(make_cluster: ClusterMaker) -> Cluster:
    """Four nodes, with a service on n2, n3 and n4 each."""
    return make_cluster(4).start()


@pytest.fixture(scope="module")
def services(whole: Cluster) -> dict[str, str]:
    return {node.name: whole.serve_on(node, name=f"on-{node.name}") for node in whole.nodes[1:]}


@pytest.fixture
def cluster(whole: Cluster, services: dict[str, str]) -> Iterator[Cluster]:
    yield whole
    whole.mend()


@pytest.fixture
def watched(cluster: Cluster) -> Watched:
    return Watched(cluster)


def others(cluster: Cluster, node: Node) -> list[Node]:
    return [other for other in cluster.nodes if other is not node]


def pid_of(node: Node, job: str) -> int:
    return int(node.runs_of(job)[0]["pid"])


# --- daemons and hosts ----------------------------------------------------------------------------------------------


def test_replicas_of_a_daemon_that_was_killed_serve_on_and_are_taken_up_by_the_next(
    cluster: Cluster, services: dict[str, str]
) -> None:
    node, job = cluster[3], services["n3"]
    pid, endpoint = pid_of(node, job), cluster[1].endpoints(job)[0]["endpoint"]
    node.kill9()
    cluster.wait_until_seen(node, "unsupervised", by=others(cluster, node), seconds=8)
    reason = cluster[2].nodes()["n3"]["reason"]
    assert "its host is up, but its daemon is not" in reason
    assert cluster[2].fetch(endpoint) == "hello"
    for other in others(cluster, node):
        listed = other.endpoints(job)
        assert [each["endpoint"] for each in listed] == [endpoint]
        assert not listed[0]["verified"]
    assert all(other.job(job)["replicas"][0]["node"] == "n3" for other in others(cluster, node))

    node.up()
    node.wait_until_ready()
    cluster.wait_for_one_view()
    assert pid_of(node, job) == pid
    cluster.wait_for(lambda: cluster[1].replica(job)["pid"] == pid, 5)
    cluster.wait_for(lambda: cluster[2].endpoints(job)[0]["verified"], 5)


def test_a_daemon_that_is_told_to_stop_says_so_before_it_goes(cluster: Cluster, services: dict[str, str]) -> None:
    node = cluster[2]
    assert node.stop() == 0
    cluster.wait_until_seen(node, "unsupervised", by=others(cluster, node), seconds=2)
    assert "its daemon said that it restarts" in cluster[1].nodes()["n2"]["reason"]


def test_a_host_that_is_switched_off_is_silent_and_its_replicas_are_not_moved_yet(
    cluster: Cluster, services: dict[str, str]
) -> None:
    node, job = cluster[4], services["n4"]
    node.host.power_off()
    cluster.wait_until_seen(node, "silent", by=others(cluster, node), seconds=DEAD_SECONDS_MAX)
    assert cluster[1].replica(job)["node"] == "n4"
    waiting = cluster[1].batch(["/bin/true"], labels={"host": "n4"})
    explained = cluster[1].call("GET", f"/v1/jobs/{waiting}/explain")
    assert "silent" in str(explained["replicas"][0]["refusals"])

    node.host.power_on()
    node.up()
    node.wait_until_ready()
    cluster.wait_for_one_view()
    # It ended with its host; what it has to do is known there.
    cluster[1].wait_ready(job)
    assert cluster[1].wait_ended(waiting)["state"] == "succeeded"


def test_a_daemon_that_stood_still_for_a_moment_is_never_dead(cluster: Cluster, watched: Watched) -> None:
    for node in cluster.nodes[:3]:
        with node.stopped():
            time.sleep(2.5)
        cluster.wait_for_one_view(10)
    assert watched.deaths() == []


# --- packets that are lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [25, 40])
def test_no_node_is_dead_by_loss(cluster: Cluster, watched: Watched, services: dict[str, str], percent: int) -> None:
    for node in cluster.nodes:
        node.host.lose(percent)
    time.sleep(LOSS_SECONDS)
    cluster.lan.heal()
    assert watched.deaths() == []


def test_a_node_that_sends_and_hears_nothing_buries_nobody(cluster: Cluster, watched: Watched) -> None:
    node = cluster[3]
    node.host.rule("incoming ip saddr 10.77.0.0/16 drop")
    time.sleep(LOSS_SECONDS)
    cluster.lan.heal()
    assert [death for death in watched.deaths(at=others(cluster, node)) if "n3" not in death.split(": ")[1]] == []


def test_a_node_whose_datagrams_are_dropped_stays_alive_and_it_is_said(cluster: Cluster, watched: Watched) -> None:
    node = cluster[4]
    node.host.rule(f"incoming udp dport {PEER_PORT} drop", f"outgoing udp dport {PEER_PORT} drop")
    time.sleep(LOSS_SECONDS)
    assert watched.deaths() == []
    assert all(other.states()["n4"] in ("alive", "suspect") for other in cluster.nodes)
    warnings = [warning for each in cluster.nodes for warning in each.warnings()]
    assert any("UDP" in warning or "datagram" in warning for warning in warnings), warnings


# --- cuts -----------------------------------------------------------------------------------------------------------


def test_two_halves_of_a_cut_cluster_are_one_again_by_themselves(cluster: Cluster, services: dict[str, str]) -> None:
    pids = {name: pid_of(cluster[int(name[1:])], job) for name, job in services.items()}
    hosts = cluster.lan.hosts
    cluster.lan.cut(hosts[:2], hosts[2:])
    # Half of what they try fails, so that each doubts itself first: one may say sooner than another that they are dead.
    time.sleep(CUT_SECONDS)
    for here, there in ((cluster[1], "n3"), (cluster[2], "n4"), (cluster[3], "n1"), (cluster[4], "n2")):
        assert here.states()[there] in ("suspect", "silent"), cluster.told()
    assert all_alive(pids.values()), "nobody ends what runs for a cut"
    cluster.lan.heal()
    cluster.wait_for_one_view()
    assert all_alive(pids.values())
    assert {name: pid_of(cluster[int(name[1:])], job) for name, job in services.items()} == pids


def test_a_cut_in_one_direction_heals_by_itself(cluster: Cluster, watched: Watched) -> None:
    cluster[3].host.deaf_to(cluster[1].host, cluster[2].host)
    time.sleep(CUT_SECONDS)
    # n4 is heard by all, and hears all.
    assert [death for death in watched.deaths() if "n4" in death.split(": ")[1]] == []
    cluster.lan.heal()
    cluster.wait_for_one_view()


def test_two_nodes_that_reach_one_another_by_a_third_only_are_alive(cluster: Cluster, watched: Watched) -> None:
    hosts = cluster.lan.hosts
    cluster.lan.cut([hosts[1]], [hosts[2]])
    assert stays_so(lambda: not watched.deaths(), LOSS_SECONDS), watched.deaths()
    assert cluster[2].states()["n3"] in ("alive", "suspect")
    cluster.lan.heal()
    cluster.wait_for_one_view()


def test_a_node_that_was_cut_off_for_long_is_placed_on_again_and_keeps_what_it_runs(
    cluster: Cluster, services: dict[str, str], watched: Watched
) -> None:
    node, job = cluster[4], services["n4"]
    pid, begun = pid_of(node, job), len(node.attempts_of(job))
    cluster.lan.cut([node.host], [other.host for other in others(cluster, node)])
    cluster.wait_until_seen(node, "silent", by=others(cluster, node), seconds=DEAD_SECONDS_MAX)
    cluster.wait_for(lambda: cluster[2].endpoints(job) == [], 5, "it may be there, and nobody reaches it")
    wanted = cluster[1].submit(serve(), labels={"host": "n4"})
    time.sleep(CUT_SECONDS)
    assert cluster[1].job(wanted)["state"] == "waiting"
    assert is_alive(pid)

    healed = time.monotonic()
    cluster.lan.heal()
    cluster.wait_for_one_view()
    cluster[1].wait_ready(wanted, 20)
    assert time.monotonic() - healed < 20
    assert pid_of(node, job) == pid
    assert len(node.attempts_of(job)) == begun, "nothing of it was begun anew"
    cluster.wait_for(lambda: [each["verified"] for each in cluster[2].endpoints(job)] == [True], 5)
    cluster[1].cancel(wanted)
    cluster[1].wait_ended(wanted)
