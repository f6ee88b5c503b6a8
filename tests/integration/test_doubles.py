"""Data directories that were copied with their host: two daemons that say they are one node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, free_port, wait_for
from tests.integration.programs import serve


@pytest.fixture
def pair(make_daemon: DaemonMaker) -> tuple[Daemon, Daemon]:
    """n1, which holds the log, and n2, which joined it."""
    first = make_daemon(name="n1", peer_port=free_port()).start()
    made = first.call("POST", "/v1/join-tokens", {"uses": 1, "lasts_seconds": 600, "advertise": "127.0.0.1"})
    second = make_daemon(name="n2").start("--join", made["seed"], "--token", made["token"])
    see_each_other(first, second)
    return first, second


def see_each_other(*daemons: Daemon) -> None:
    names = {daemon.name for daemon in daemons}

    def all_alive() -> bool:
        return all(
            {node["name"] for node in daemon.call("GET", "/v1/nodes") if node["state"] == "alive"} == names
            for daemon in daemons
        )

    wait_for(all_alive, 15, lambda: [daemon.call("GET", "/v1/nodes") for daemon in daemons])


def image_of(daemon: Daemon, at: Path) -> Path:
    """Its data directory as it is on a host made from an image of its disk: the same in all that is looked at."""
    subprocess.run(["cp", "-a", str(daemon.data_dir), str(at)], check=True, timeout=20)
    note = json.loads((at / "node.json").read_text())
    (at / "node.json").write_text(json.dumps(note | {"inode": at.stat().st_ino}))
    return at


@pytest.mark.parametrize("which", [0, 1], ids=["voter", "follower"])
def test_the_copy_of_a_node_that_runs_ends_before_it_does_anything(
    make_daemon: DaemonMaker, pair: tuple[Daemon, Daemon], tmp_path: Path, which: int
) -> None:
    original = pair[which]
    job = pair[0].submit(serve(), spread="any", replicas=2)
    pair[0].wait_ready(job)
    runs = original.runs_on_host()
    copy = make_daemon(name="copy")
    copy.place(image_of(original, tmp_path / "image"))
    # Not called "copy": the cluster knows it under its own name.
    copy.name = original.name

    assert copy.spawn().wait(20) == 5
    said = copy.log_tail()
    assert "this data directory is a copy" in said
    assert "--abandon-state" in said
    assert copy.runs_on_host() == set()
    assert original.runs_on_host() == runs
    see_each_other(*pair)
    assert pair[0].job(job)["ready"] == 2


def test_a_node_that_was_killed_comes_back_at_another_address(pair: tuple[Daemon, Daemon]) -> None:
    """Its next port is another one: nobody answers at the one before, so it is taken for what it is."""
    first, second = pair
    second.kill9()
    second.start()
    see_each_other(first, second)


def test_a_node_whose_peers_are_all_away_goes_on_alone(pair: tuple[Daemon, Daemon]) -> None:
    first, second = pair
    job = first.submit(serve(), spread="any", replicas=2)
    first.wait_ready(job)
    runs = second.runs_on_host()
    first.kill9()
    second.kill9()
    second.start()
    assert second.runs_on_host() == runs
    first.start()
    see_each_other(first, second)
