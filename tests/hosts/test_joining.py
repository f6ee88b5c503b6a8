"""Hosts become nodes of a cluster, and stop being that: what is advertised, who is refused, with which words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer.model.places import API_PORT
from gpulayer.node.mesh import PARTING_SECONDS
from tests.hosts.conftest import ClusterMaker
from tests.hosts.hosts import PEER_PORT, Cluster, Node, Watched, stays_so
from tests.integration.daemon import GPULAYER, wait_for

BRIDGE_ADDRESS = "172.30.0.1"


@pytest.fixture(scope="module")
def cluster(make_cluster: ClusterMaker) -> Cluster:
    """n1 runs, the other hosts are there for whoever joins."""
    return make_cluster(30).start(1)


@pytest.fixture
def first(cluster: Cluster) -> Node:
    return cluster[1]


@pytest.fixture
def host(cluster: Cluster) -> Node:
    """One that nothing has run on."""
    return next(node for node in cluster.nodes if node.process is None)


@pytest.fixture(autouse=True)
def no_more_than_before(cluster: Cluster) -> Iterator[None]:
    """A daemon that a test has added ends with it: so no test waits for the nodes of another."""
    before = cluster.running()
    yield
    for node in cluster.running():
        if node not in before:
            node.kill9()


def joins(node: Node, first: Node, *more: str, token: str | None = None) -> Node:
    node.up(*more, *node.join_words(first.address, token or first.new_token()))
    return node.wait_until_ready()


def refused(node: Node, first: Node, *more: str, token: str) -> str:
    """What is said by a daemon that is not let in."""
    node.up(*more, *node.join_words(first.address, token))
    assert node.wait_until_ended() != 0
    return node.log_tail()


def two_see_each_other(one: Node, other: Node, seconds: float = 10) -> None:
    for here, there in ((one, other), (other, one)):
        wait_for(lambda: here.states().get(there.name) == "alive", seconds, lambda: f"{here.nodes()}")  # noqa: B023


# --- who is let in --------------------------------------------------------------------------------------------------


def test_the_command_that_is_printed_on_a_node_makes_the_next_host_one(first: Node, host: Node) -> None:
    printed = first.cli("token", "create", "--join")
    assert printed.returncode == 0, printed.stderr
    # Nothing but its data directory, its name and where gpulayer is was said before on that host.
    host.process = subprocess.Popen(
        host.host.inside("/bin/sh", "-c", f"exec env {printed.stdout.strip()}"),
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GPULAYER_DATA_DIR": str(host.data_dir),
            "GPULAYER_NAME": host.name,
        },
        stdin=subprocess.DEVNULL,
        stdout=host.log_path.open("ab"),
        stderr=subprocess.STDOUT,
    )
    host.wait_until_ready()
    two_see_each_other(first, host)
    seen = first.nodes()[host.name]
    assert seen["address"] == host.address, "of the way to the seed, though it listens on all"
    assert seen["peer_address"] == f"{host.address}:{PEER_PORT}"


def test_a_second_node_on_a_host_that_others_reach_is_not_sent_to_loopback(first: Node) -> None:
    """The command was printed, and led to a refusal on the host that ran it."""
    printed = first.cli("token", "create", "--join", "--advertise", "127.0.0.1")
    assert printed.returncode == 5
    assert printed.stdout == ""
    assert "--data-dir" in printed.stderr


def test_who_comes_is_logged_by_name(first: Node, host: Node) -> None:
    joins(host, first)
    for here, there in ((first, host), (host, first)):
        seen = wait_for(
            lambda: [each for each in here.log_events("member.alive") if each["id"] == there.id],  # noqa: B023
            10,
            here.log_tail,
        )
        assert [each["member"] for each in seen] == [there.name]


def test_of_two_addresses_that_on_the_way_to_the_seed_is_advertised(first: Node, host: Node) -> None:
    """As on a host with containers, whose default route is another way."""
    host.host.add_address(BRIDGE_ADDRESS, device="containers")
    host.host.run("ip", "route", "replace", "default", "dev", "containers", "src", BRIDGE_ADDRESS)
    joins(host, first, "--bind", "0.0.0.0")
    two_see_each_other(first, host)
    assert first.nodes()[host.name]["address"] == host.address


def test_what_advertise_says_wins(first: Node, host: Node) -> None:
    other = host.address.replace("10.77.0.", "10.77.1.")
    host.host.add_address(other)
    joins(host, first, "--bind", "0.0.0.0", "--advertise", other)
    two_see_each_other(first, host)
    assert first.nodes()[host.name]["peer_address"] == f"{other}:{PEER_PORT}"
    job = first.submit(["/bin/sh", "-c", "exec sleep 60"], labels={"host": host.name}, port=False)
    first.wait_ready(job)
    first.cancel(job)
    first.wait_ended(job)


def test_a_host_that_advertises_what_nobody_else_reaches_is_refused(first: Node, host: Node) -> None:
    said = refused(host, first, "--bind", "127.0.0.1", token=first.new_token())
    assert "127.0.0.1" in said
    assert "--advertise" in said
    assert host.name not in first.nodes()


def test_a_host_behind_a_firewall_joins_and_is_warned_of_it(cluster: Cluster, first: Node, host: Node) -> None:
    host.host.rule(f"incoming ip saddr {first.address} tcp dport {PEER_PORT} drop")
    joins(host, first)
    warnings = host.log_events("join.warned")
    assert any(f"{host.address}:{PEER_PORT}" in each["text"] and "firewall" in each["text"] for each in warnings)
    two_see_each_other(first, host)


def test_who_joins_at_the_port_of_the_api_is_told_the_right_one(first: Node, host: Node) -> None:
    """It was told of a frame of 1213486160 bytes, which is "HTTP" as a number."""
    host.up(*host.join_words(f"{first.address}:{API_PORT}", first.new_token()))
    (said,) = wait_for(lambda: host.log_events("join.no_answer"), 20, host.log_tail)
    assert str(PEER_PORT) in str(said["tried"])


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_a_token_that_is_used_up_lets_nobody_else_in(cluster: Cluster, first: Node, host: Node) -> None:
    token = first.new_token(uses=1)
    joins(host, first, token=token)
    late = next(node for node in cluster.nodes if node.process is None)
    said = refused(late, first, token=token)
    assert "has no uses left" in said
    assert "gpulayer token create --join" in said
    assert late.name not in first.nodes()
    assert joins(late, first).name in first.nodes(), "with a token of its own it is let in, in the same directory"


def test_a_token_that_has_expired_lets_nobody_in(first: Node, host: Node) -> None:
    token = first.new_token(seconds=1)
    time.sleep(1.2)
    said = refused(host, first, token=token)
    assert "expired" in said
    assert host.name not in first.nodes()


def test_a_token_that_nobody_gave_lets_nobody_in_and_is_not_shown(first: Node, host: Node) -> None:
    token = first.new_token()
    # gpj_SECRET.PIN: another secret, for the same cluster.
    forged = token[:10] + token[10:20].swapcase() + token[20:]
    said = refused(host, first, token=forged)
    assert "token" in said
    assert forged[-20:] not in said
    assert host.name not in first.nodes()


def test_a_foreign_cluster_s_address_is_not_shown_the_token(cluster: Cluster, first: Node, host: Node) -> None:
    """As when an address is now another cluster's. Neither of the two takes anything of the other."""
    foreign = next(node for node in cluster.nodes if node.process is None and node is not host)
    foreign.up()
    foreign.wait_until_ready()
    said = refused(host, foreign, token=first.new_token())
    assert "another cluster" in said or "authority" in said
    assert foreign.log_events("join.rejected", "join.accepted") == []
    assert list(foreign.states()) == [foreign.name]


def test_a_member_does_not_join_another_cluster(cluster: Cluster, first: Node, host: Node) -> None:
    joins(host, first)
    foreign = next(node for node in cluster.nodes if node.process is None)
    foreign.up()
    foreign.wait_until_ready()
    host.stop()
    said = refused(host, foreign, token=foreign.new_token())
    assert "is that of a node of cluster" in said
    assert "--abandon-state" in said
    host.up()
    host.wait_until_ready()
    two_see_each_other(first, host)


# --- copies ---------------------------------------------------------------------------------------------------------


def copied(node: Node, to: Node) -> None:
    """Its data directory, and all that is in it."""
    subprocess.run(["cp", "-a", str(node.data_dir), str(to.data_dir)], check=True, timeout=20)


def cloned(node: Node, to: Node) -> None:
    """As from an image of its disk: the same machine id, and the directory seems to be the one it was made in."""
    copied(node, to)
    note = json.loads((to.data_dir / "node.json").read_text())
    note["inode"] = to.data_dir.stat().st_ino
    (to.data_dir / "node.json").write_text(json.dumps(note))


def test_a_copied_data_directory_is_refused(cluster: Cluster, first: Node, host: Node) -> None:
    joins(host, first)
    copy = next(node for node in cluster.nodes if node.process is None)
    copied(host, copy)
    copy.up()
    assert copy.wait_until_ended() == 5
    assert "is a copy of that of node" in copy.log_tail()
    assert "--abandon-state" in copy.log_tail()


def test_a_cloned_host_is_told_apart_and_the_original_is_not_harmed(cluster: Cluster, first: Node, host: Node) -> None:
    joins(host, first)
    copy = next(node for node in cluster.nodes if node.process is None)
    cloned(host, copy)
    watched = Watched(cluster)
    job = cluster.serve_on(host)
    pid = host.runs_of(job)[0]["pid"]

    copy.up()
    assert copy.wait_until_ended(30) == 5
    said = copy.log_tail()
    assert "copied" in said or "copy" in said
    assert "--abandon-state" in said

    assert any(f"two processes say that they are node {host.name}" in each for each in first.warnings())
    assert stays_so(lambda: first.states()[host.name] == "alive", 3.0)
    assert host.runs_of(job)[0]["pid"] == pid
    assert watched.deaths(of=host) == []
    assert host.is_running
    first.cancel(job)
    first.wait_ended(job)

    joins(copy, first, "--abandon-state")
    two_see_each_other(first, copy)
    assert copy.id != host.id


def test_a_clone_that_starts_cut_off_ends_when_it_meets_a_member_and_the_original_stays(
    cluster: Cluster, first: Node, host: Node
) -> None:
    """Its epoch is the higher one. While nobody can tell it so it begins nothing, and calls nobody."""
    joins(host, first)
    copy = next(node for node in cluster.nodes if node.process is None)
    cloned(host, copy)
    job = cluster.serve_on(host)
    pid, epoch = host.runs_of(job)[0]["pid"], first.nodes()[host.name]["epoch"]
    watched = Watched(cluster)
    cluster.lan.cut([copy.host], [node.host for node in cluster.nodes if node is not copy])
    copy.up()
    copy.wait_until_ready()
    assert any("isolated" in each["conditions"] for each in copy.nodes().values() if each["is_self"])
    assert copy.runs_on_host() == set()

    cluster.lan.heal()
    assert copy.wait_until_ended(30) == 5
    assert "--abandon-state" in copy.log_tail()

    assert stays_so(lambda: first.states()[host.name] == "alive", 3.0)
    assert first.nodes()[host.name]["epoch"] == epoch
    assert host.is_running
    assert host.runs_of(job)[0]["pid"] == pid
    assert watched.deaths(of=host) == []
    first.cancel(job)
    first.wait_ended(job)


def test_a_clone_of_the_node_with_the_log_that_starts_cut_off_ends_when_it_meets_a_member(
    cluster: Cluster, first: Node, host: Node
) -> None:
    joins(host, first)
    copy = next(node for node in cluster.nodes if node.process is None)
    two_see_each_other(first, host)
    peers = first.data_dir / "peers.json"
    wait_for(lambda: host.id in peers.read_text(), 20, peers.read_text)
    cloned(first, copy)
    epoch = host.nodes()[first.name]["epoch"]
    cluster.lan.cut([copy.host], [node.host for node in cluster.nodes if node is not copy])
    copy.up()
    copy.wait_until_ready()
    cluster.lan.heal()
    assert copy.wait_until_ended(30) == 5
    assert "--abandon-state" in copy.log_tail()
    assert stays_so(lambda: host.states()[first.name] == "alive", 3.0)
    assert host.nodes()[first.name]["epoch"] == epoch
    job = cluster.serve_on(host)
    first.cancel(job)
    first.wait_ended(job)


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_seed_whose_name_is_not_known_yet_is_joined_soon_after_it_is(first: Node, host: Node) -> None:
    hosts, resolver = host.home / "hosts", host.home / "resolv.conf"
    hosts.write_text("127.0.0.1 localhost\n")
    resolver.write_text("")
    named = Node(
        host.host,
        host.home,
        command=host.host.inside_with({"/etc/hosts": hosts, "/etc/resolv.conf": resolver}, *GPULAYER),
    )
    host.process = named.up(*named.join_words("first.cluster.test", first.new_token()))
    wait_for(lambda: named.log_events("join.no_answer"), 15, named.log_tail)
    time.sleep(5)  # so that it has been in vain for a while
    assert named.is_running
    hosts.write_text(f"127.0.0.1 localhost\n{first.address} first.cluster.test\n")
    begun = time.monotonic()
    wait_for(lambda: named.log_events("join.joined"), 15, named.log_tail)
    assert time.monotonic() - begun < 6.0
    named.wait_until_ready()
    two_see_each_other(first, named)


# --- leaving --------------------------------------------------------------------------------------------------------


def test_a_node_that_leaves_is_not_taken_for_dead_and_joins_again_with_a_new_token(
    cluster: Cluster, first: Node, host: Node
) -> None:
    joins(host, first)
    third = next(node for node in cluster.nodes if node.process is None)
    joins(third, first)
    two_see_each_other(third, host)
    watched = Watched(cluster)
    job = cluster.serve_on(host)

    refused_ = host.cli("leave")
    assert refused_.returncode == 5, refused_.stderr
    assert host.is_running

    done = host.cli("leave", "--stop-all")
    assert done.returncode == 0, done.stderr
    assert host.wait_until_ended() == 0
    assert host.all_on_host() == set()
    assert not (host.data_dir / "peers.json").exists()
    assert first.job(job)["state"] == "cancelled"
    wait_for(lambda: host.name not in first.states() or first.states()[host.name] == "left", 5)
    wait_for(lambda: host.name not in third.states() or third.states()[host.name] == "left", 5, lambda: third.states())
    assert stays_so(lambda: not watched.deaths(of=host), 5.0), watched.deaths(of=host)

    joins(host, first)
    two_see_each_other(first, host)
    two_see_each_other(third, host)
    assert cluster.serve_on(host)


@pytest.mark.parametrize("voter", ["goes on", "restarts"])
def test_a_node_that_was_removed_while_it_was_away_does_not_come_back_by_itself(
    cluster: Cluster, first: Node, host: Node, voter: str
) -> None:
    """Its certificate is good still; what counts is who the cluster says that it has."""
    joins(host, first)
    two_see_each_other(first, host)
    backup = host.home / "backup"
    shutil.copytree(host.data_dir, backup, symlinks=True, ignore=lambda *_: ["gpulayer.sock", "lock"])
    assert host.cli("leave").returncode == 0
    assert host.wait_until_ended() == 0
    for name in ("cluster.json", "trust", "peers.json"):
        there = backup / name
        if there.is_dir():
            shutil.copytree(there, host.data_dir / name, dirs_exist_ok=True)
        else:
            shutil.copy(there, host.data_dir / name)
    time.sleep(PARTING_SECONDS)  # so long the last words of who leaves are heard
    if voter == "restarts":
        first.kill9()
        first.up()
        first.wait_until_ready()
    host.up()
    assert stays_so(lambda: first.states().get(host.name) in (None, "left"), 4.0), first.nodes()
    assert any("not in the registry" in each["reason"] for each in host.log_events("peer.refused"))
    host.kill9()
