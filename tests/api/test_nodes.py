"""The cluster as any of its nodes tells it: two real daemons, of which one is killed, then the one that leads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import STARTED_SECONDS_MAX, Daemon

NOTICED_SECONDS_MAX = 20.0
SERVER = "import http.server, os\nhttp.server.HTTPServer((os.environ['HOST'], int(os.environ['PORT'])), "
SERVER += "http.server.SimpleHTTPRequestHandler).serve_forever()"


@dataclass
class Pair:
    leader: Daemon
    other: Daemon

    def __iter__(self) -> Iterator[Daemon]:
        return iter((self.leader, self.other))


def start(directory: Path, name: str, *words: str, token: str = "") -> Daemon:
    config = directory / "gpulayer.toml"
    config.write_text('[[accelerators]]\nkind = "cuda"\nmodel = "Test A100"\nmemory = "40GiB"\ncount = 2\n')
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
    environment |= {"GPULAYER_JOIN_TOKEN": token} if token else {}
    data_dir = directory / name
    ready = data_dir / "api.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpulayer", "up", "--data-dir", str(data_dir), "--config", str(config)]
    with (directory / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--name", name, "--api-port", "0", "--peer-port", "0", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
    wait_until(ready.exists, STARTED_SECONDS_MAX)
    return Daemon(data_dir, process, json.loads(ready.read_text())["port"])


def wait_until(what: Callable[[], Any], seconds: float = NOTICED_SECONDS_MAX) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def nodes(daemon: Daemon) -> dict[str, Any]:
    return {node["name"]: node for node in daemon.ask("GET", "/v1/nodes").json}


def listed(daemon: Daemon) -> dict[int, bool]:
    """Whether each replica's endpoint is verified."""
    return {each["replica"]: each["verified"] for each in daemon.ask("GET", "/v1/jobs/web/endpoints").json}


def kill_tree(data_dir: Path) -> None:
    """Whatever a daemon that was killed has left running."""
    mark = os.fsencode(data_dir)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    started: list[Daemon] = []
    try:
        leader = start(tmp_path, "n1")
        started.append(leader)
        made = leader.ask("POST", "/v1/join-tokens", {"uses": 1, "advertise": "127.0.0.1"}).json
        started.append(other := start(tmp_path, "n2", "--join", made["seed"], token=made["token"]))
        pair = Pair(leader, other)
        for daemon in pair:
            wait_until(lambda daemon=daemon: all(node["record"] == "current" for node in nodes(daemon).values()))
            wait_until(lambda daemon=daemon: nodes(daemon).keys() == {"n1", "n2"})
        yield pair
        for log in tmp_path.glob("*.log"):
            assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        for daemon in started:
            daemon.process.kill()
            daemon.process.wait(5)
        kill_tree(tmp_path)


@pytest.fixture
def web(pair: Pair) -> Pair:
    """With a service of a replica on each."""
    pair.other.submit(
        sys.executable, "-c", SERVER, kind="service", name="web", replicas=2, gpus=0.5, spread="node", env={}
    )
    for daemon in pair:
        wait_until(lambda daemon=daemon: listed(daemon) == {0: True, 1: True})
    return pair


def test_every_node_tells_the_same_of_a_healthy_cluster(web: Pair) -> None:
    told = []
    for daemon in web:
        found = nodes(daemon)
        same = ("state", "reason", "voter", "epoch", "api", "peer_address")
        told.append(
            {
                name: [
                    *(node[key] for key in same),
                    *((device["share_free"], device["held_by"]) for device in node["devices"]),
                ]
                for name, node in found.items()
            }
        )
        own = daemon.data_dir.name
        assert [name for name, node in found.items() if node["is_self"]] == [own]
        assert all(0 <= node["age_seconds"] < NOTICED_SECONDS_MAX for node in found.values())
        (model,) = daemon.ask("GET", "/v1/resources").json["models"]
        assert (model["all"], model["held"], model["away"], model["share_open"]) == (4, 2, 0, 1)
        status = daemon.ask("GET", "/v1/status").json
        assert (status["node"], status["leader"], status["nodes_by_state"]) == (own, "n1", {"alive": 2})
        assert (status["jobs"], status["log_unknown"], status["away"]) == ({"running": 1}, None, [])
    assert told[0] == told[1]
    assert told[0]["n1"][2]
    assert not told[0]["n2"][2]


def test_one_node_is_told_with_what_runs_there(web: Pair) -> None:
    for daemon in web:
        node = daemon.ask("GET", "/v1/nodes/n2").json
        assert node == daemon.ask("GET", f"/v1/nodes/{node['id']}").json | {"age_seconds": node["age_seconds"]}
        (replica,) = node["replicas"]
        assert (replica["name"], replica["kind"], replica["state"]) == ("web", "service", "ready")
        assert replica["endpoint"] in [each["endpoint"] for each in daemon.ask("GET", "/v1/jobs/web/endpoints").json]
        answer = daemon.ask("GET", "/v1/nodes/n")
        assert answer.status == 400
        assert "n1 (" in answer.json["message"]
        assert daemon.ask("GET", "/v1/nodes/n7").status == 404


def test_a_replica_on_a_node_without_its_daemon_is_listed_until_it_refuses(web: Pair) -> None:
    web.other.process.kill()
    web.other.process.wait(5)
    away = wait_until(lambda: (node := nodes(web.leader)["n2"])["state"] == "unsupervised" and node)
    assert "its daemon is not" in away["reason"]
    assert away["age_seconds"] > 0
    assert {each["share_free"] for each in away["devices"]} == {0}

    status = web.leader.status("web")
    (victim,) = [each for each in status["replicas"] if each["node"] == "n2"]
    assert (status["state"], victim["state"], victim["endpoint_verified"]) == ("running", "ready", False)
    assert victim["warning"]["code"] == "node_unsupervised"
    assert re.search(r"for \d+s$", victim["warning"]["text"])
    assert listed(web.leader) == {victim["index"]: False, 1 - victim["index"]: True}

    (model,) = web.leader.ask("GET", "/v1/resources").json["models"]
    assert (model["all"], model["away"], model["largest_idle_on_one_node"]) == (2, 2, 1)
    seen = web.leader.ask("GET", "/v1/status").json
    assert [(each["name"], each["state"], each["gpus"]) for each in seen["away"]] == [("n2", "unsupervised", 2)]

    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: listed(web.leader) == {1 - victim["index"]: True})


def test_without_the_leader_any_node_tells_what_it_sees(web: Pair) -> None:
    (place,) = [each["replica"] for each in web.other.ask("GET", "/v1/nodes/n1").json["replicas"]]
    web.leader.process.kill()
    web.leader.process.wait(5)
    wait_until(lambda: nodes(web.other)["n1"]["state"] == "unsupervised")
    assert listed(web.other) == {place: False, 1 - place: True}
    status = web.other.ask("GET", "/v1/status").json
    assert status["leader"] is None
    assert re.search(r"n1, which leads the cluster, is unsupervised: .* \d+s", status["log_unknown"])
    assert (status["queued"], sum(status["jobs"].values())) == ([], 1)
    answer = web.other.ask("GET", "/v1/jobs/nothing/endpoints")
    assert (answer.status, answer.json["code"]) == (503, "no_leader")
    assert "nothing" in answer.json["message"]
    assert web.other.ask("GET", "/v1/resources").status == 200


def test_a_job_that_no_record_has_is_asked_of_the_leader(pair: Pair) -> None:
    job = pair.other.submit("true", name="greedy", gpus=64)
    for daemon in pair:
        answer = daemon.ask("GET", "/v1/jobs/greedy/endpoints")
        assert (answer.status, answer.json) == (200, [])
        assert daemon.ask("GET", "/v1/jobs/unheard-of/endpoints").status == 404
    seen = pair.other.ask("GET", "/v1/status").json
    assert [each["id"] for each in seen["queued"]] == [job]


def test_a_stream_of_endpoints_goes_on_through_changes_and_ends_with_its_job(web: Pair) -> None:
    connection = web.other.connect()
    try:
        connection.request("GET", "/v1/jobs/web/endpoints?watch=1")
        response = connection.getresponse()
        first = json.loads(response.readline())
        assert [each["verified"] for each in first] == [True, True]
        web.other.ask("POST", "/v1/jobs/web/cancel")
        last = first
        while line := response.readline():
            last = json.loads(line) if line.strip() else last
        assert last == []
    finally:
        connection.close()
