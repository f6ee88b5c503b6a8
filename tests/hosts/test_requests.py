"""Any node answers for the cluster: requests that are passed on, and a command line on a host that is no member."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from gpulayer.model.access import APPROVED_SECONDS
from tests.hosts.conftest import ClusterMaker
from tests.hosts.hosts import API_PORT, Cluster, Node
from tests.integration.daemon import GPULAYER
from tests.integration.programs import python, serve, sh


@pytest.fixture(scope="module")
def whole(make_cluster: ClusterMaker) -> Cluster:
    """Three nodes and a fourth host that is no member."""
    return make_cluster(4).start(3)


@pytest.fixture
def cluster(whole: Cluster) -> Cluster:
    return whole


@pytest.fixture(scope="module")
def service(whole: Cluster) -> str:
    """Submitted at n3; runs on n2."""
    job = whole[3].submit(serve("--say", "begun"), name="web", labels={"host": "n2"})
    whole[3].wait_ready(job)
    return job


# --- from a node to another -----------------------------------------------------------------------------------------


def test_a_service_that_one_node_was_told_of_runs_on_another_and_is_found_on_a_third(
    cluster: Cluster, service: str
) -> None:
    listed = cluster[1].cli("job", "endpoints", "web")
    assert listed.returncode == 0
    endpoint = listed.stdout.strip()
    assert endpoint.startswith(f"{cluster[2].address}:")
    for node in cluster.running():
        assert node.fetch(endpoint) == "hello"
        assert [each["endpoint"] for each in node.endpoints(service)] == [endpoint]
    assert len(cluster[2].runs_of(service)) == 1
    assert cluster[1].runs_on_host() == cluster[3].runs_on_host() == set()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_node_tells_all_of_a_replica_that_runs_elsewhere(cluster: Cluster, service: str, number: int) -> None:
    node = cluster[number]
    replica = node.replica(service)
    assert (replica["node"], replica["state"]) == ("n2", "ready")
    assert replica["pid"] in cluster[2].runs_on_host()
    assert "begun" in node.output(service)
    explained = node.call("GET", f"/v1/jobs/{service}/explain")["replicas"][0]
    assert explained["node"] == "n2"
    assert any("ready" in step["text"] for step in explained["history"])
    kinds = {event["kind"] for event in node.call("GET", f"/v1/jobs/{service}/events")}
    assert {"replica.ready", "job.submitted"} <= kinds
    audited = node.cli("audit", "--json")
    assert audited.returncode == 0, audited.stdout
    report = json.loads(audited.stdout)
    assert report["differences"] == []
    assert sorted(each["node"] for each in report["nodes"]) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_a_node_says_of_resources_is_of_the_whole_cluster(cluster: Cluster, service: str, number: int) -> None:
    models = cluster[number].call("GET", "/v1/resources")["models"]
    assert [(model["model"], model["all"]) for model in models] == [("H100", 6)]
    assert sorted(node["name"] for node in cluster[number].status()["nodes"]) == ["n1", "n2", "n3"]


def test_a_batch_that_is_followed_on_one_node_is_told_to_its_end_on_another(cluster: Cluster) -> None:
    done = cluster[3].cli(
        "submit", "--label", "host=n2", "--", "/bin/sh", "-c", "echo one; sleep 0.5; echo two; exit 3"
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["one", "two"]


# --- from a host that is no member ----------------------------------------------------------------------------------


class Laptop:
    """A user on a host without a daemon."""

    def __init__(self, node: Node, home: Path) -> None:
        self.node = node
        self.home = home
        home.mkdir()

    def cli(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.node.host.inside(*GPULAYER, *words),
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **more},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def curl(self, url: str, *headers: str) -> tuple[int, str]:
        """Whoever asks without knowing the CA."""
        words = [word for header in headers for word in ("-H", header)]
        done = subprocess.run(
            self.node.host.inside("curl", "-sk", "--noproxy", "*", "-m", "10", "-w", "\n%{http_code}", *words, url),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        body, _, status = done.stdout.rpartition("\n")
        return int(status or 0), body


@pytest.fixture
def laptop(cluster: Cluster, tmp_path: Path) -> Laptop:
    return Laptop(cluster[4], tmp_path / "laptop")


@pytest.fixture
def token_file(cluster: Cluster, tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(str(cluster[1].call("POST", "/v1/tokens", {"role": "admin"})["token"]))
    path.chmod(0o600)
    return path


def fingerprint(cluster: Cluster) -> str:
    said = cluster[3].cli("cluster", "status")
    assert said.returncode == 0, said.stderr
    return next(line.split()[1] for line in said.stdout.splitlines() if line.startswith("authority"))


def test_a_laptop_logs_in_once_and_then_asks_any_node(
    cluster: Cluster, service: str, laptop: Laptop, token_file: Path
) -> None:
    words = ("--fingerprint", fingerprint(cluster), "--token-file", str(token_file))
    done = laptop.cli("login", cluster[2].url, *words)
    assert done.returncode == 0, done.stderr
    listed = laptop.cli("node", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert {node["name"]: node["state"] for node in json.loads(listed.stdout)} == dict.fromkeys(
        ("n1", "n2", "n3"), "alive"
    )
    for node in cluster.running():
        told = laptop.cli("--url", node.url, "job", "endpoints", "web")
        assert told.returncode == 0, told.stderr
        assert told.stdout.startswith(f"{cluster[2].address}:")
    submitted = laptop.cli("submit", "--label", "host=n3", "--", *sh("echo from afar"))
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout == "from afar\n"


def test_a_laptop_whose_node_dies_goes_on_with_another_and_learns_of_a_new_one(
    cluster: Cluster, service: str, laptop: Laptop, token_file: Path
) -> None:
    words = ("--fingerprint", fingerprint(cluster), "--token-file", str(token_file))
    done = laptop.cli("login", cluster[3].url, *words)
    assert done.returncode == 0, done.stderr
    file = next(laptop.home.glob(".config/gpulayer/logins/*.json"))
    kept = json.loads(file.read_text())
    assert {host for host, _ in kept["endpoints"]} == {node.address for node in cluster.running()}
    # As it was before n1 came.
    file.write_text(json.dumps(kept | {"endpoints": [[node.address, API_PORT] for node in (cluster[3], cluster[2])]}))
    cluster[3].kill9()
    try:
        listed = laptop.cli("node", "list", "--json")
        assert listed.returncode == 0, listed.stderr
        told = [host for host, _ in json.loads(file.read_text())["endpoints"]]
        assert told[0] == cluster[3].address
        assert set(told) == {node.address for node in cluster.nodes[:3]}
        assert file.stat().st_mode & 0o777 == 0o600
        assert laptop.cli("job", "endpoints", "web").stdout.startswith(f"{cluster[2].address}:")
    finally:
        cluster[3].up()
        cluster[3].wait_until_ready()
    cluster.wait_for_one_view()


def test_a_laptop_that_was_told_another_fingerprint_shows_no_token(
    cluster: Cluster, laptop: Laptop, token_file: Path
) -> None:
    other = "sha256:" + "0" * 64
    done = laptop.cli("login", cluster[2].url, "--fingerprint", other, "--token-file", str(token_file))
    assert done.returncode == 5
    assert "do not log in" in done.stderr
    assert laptop.cli("login", "--list", "--json").stdout.strip() == "[]"


def test_nothing_is_answered_to_who_shows_no_token_or_a_wrong_one(
    cluster: Cluster, service: str, laptop: Laptop
) -> None:
    for node in cluster.running():
        for path in ("/v1/jobs", "/v1/nodes", "/v1/status", f"/v1/jobs/{service}/logs", "/metrics"):
            assert laptop.curl(f"{node.url}{path}")[0] == 401
            status, body = laptop.curl(f"{node.url}{path}", "Authorization: Bearer gpl_" + "x" * 43)
            assert status == 401
            assert "web" not in body
        status, body = laptop.curl(f"http://{node.address}:{API_PORT}/v1/status")
        assert status == 400, "plain words to the port of TLS"
        assert "https" in body
        assert node.name not in body


def test_a_peer_port_says_nothing_to_who_is_no_member(cluster: Cluster, laptop: Laptop) -> None:
    """Not even an error: neither by datagram nor in plain words on a connection."""
    source = """
import socket, sys
where = (sys.argv[1], 7451)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(1)
    for data in (b"", b"hello", b"GL" + bytes(60), bytes(range(256)) * 4):
        sock.sendto(data, where)
    try:
        print("answered", sock.recv(2048))
    except TimeoutError:
        pass
with socket.create_connection(where, timeout=5) as sock:
    sock.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    sock.settimeout(15)
    try:
        said = sock.recv(2048)
    except (TimeoutError, ConnectionError):
        said = b""
    # A TLS alert is what any TLS server says to it.
    print("said", said if said[:1] != b"\\x15" else b"")
"""
    for node in cluster.running():
        assert laptop.node.host.run(*python(source), node.address) == "said b''\n"


def test_a_token_that_is_revoked_is_good_at_no_node(
    cluster: Cluster, laptop: Laptop, tmp_path: Path, token_file: Path
) -> None:
    made = cluster[2].call("POST", "/v1/tokens", {"role": "read"})
    header = f"Authorization: Bearer {made['token']}"
    for node in cluster.running():
        assert laptop.curl(f"{node.url}/v1/nodes", header)[0] == 200
    assert cluster[3].cli("token", "revoke", made["id"]).returncode == 0
    for node in cluster.running():
        cluster.wait_for(lambda: laptop.curl(f"{node.url}/v1/nodes", header)[0] == 401, APPROVED_SECONDS + 5)  # noqa: B023


# --- keys -----------------------------------------------------------------------------------------------------------


def test_keys_that_were_rotated_while_a_node_was_away_are_given_to_it_when_it_is_back(
    cluster: Cluster, service: str
) -> None:
    away = cluster[2]
    pid = cluster[1].replica(service)["pid"]
    away.kill9()
    cluster.wait_until_seen(away, "unsupervised", by=[cluster[1], cluster[3]], seconds=8)
    before = cluster[3].call("GET", "/v1/cluster")["keys"]["ring"]
    done = cluster[3].cli("cluster", "rotate-keys")
    assert done.returncode == 0, done.stderr

    def sealing() -> str:
        ring = cluster[1].call("GET", "/v1/cluster")["keys"]["ring"]
        return next(key["id"] for key in ring if key["seals"])

    old = next(key["id"] for key in before if key["seals"])
    cluster.wait_for(lambda: sealing() != old, 15, "the new key is used")
    time.sleep(1)
    away.up()
    away.wait_until_ready()
    cluster.wait_for_one_view()
    cluster.wait_for(lambda: away.replica(service)["pid"] == pid, 10)
    assert away.cli("job", "list").returncode == 0
