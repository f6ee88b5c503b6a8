"""A second node on this host, by the words that the first one prints; what `leave` says on either."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.cli.nodes import troubles
from tests.integration.daemon import Daemon, wait_for

SLEEP = ("--service", "--no-port", "--", "sleep", "300")


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path / "n1", name="n1").start()
    try:
        yield running
    finally:
        running.cli("leave", "--stop-all")
        running.end()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Daemon]:
    """Not started yet."""
    made = Daemon(tmp_path / "n2", name="n2")
    try:
        yield made
    finally:
        made.end()


def command_for_the_next(daemon: Daemon, *words: str) -> tuple[str, list[str]]:
    """The token, and the words of the command, as they are printed."""
    done = daemon.cli("token", "create", "--join", "--advertise", "127.0.0.1", *words)
    assert done.returncode == 0, done.stderr
    variable, *command = shlex.split(done.stdout)
    name, _, token = variable.partition("=")
    assert name == "GPULAYER_JOIN_TOKEN"
    return token, command


def join(first: Daemon, second: Daemon) -> None:
    token, command = command_for_the_next(first)
    second.start("--join", command[command.index("--join") + 1], env={"GPULAYER_JOIN_TOKEN": token})


def document(daemon: Daemon, *words: str) -> Any:
    done = daemon.cli(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def nodes(daemon: Daemon) -> set[str]:
    return {node["name"] for node in document(daemon, "status")["nodes"]}


def test_a_node_on_loopback_says_what_a_join_token_needs(first: Daemon) -> None:
    done = first.cli("token", "create", "--join")
    assert done.returncode == 5
    assert done.stdout == ""
    assert "gpulayer up --bind 0.0.0.0" in done.stderr
    assert "gpulayer token create --join --advertise 127.0.0.1" in done.stderr


def test_the_printed_command_has_ports_and_a_directory_of_its_own(first: Daemon) -> None:
    token, command = command_for_the_next(first)
    assert token.startswith("gpj_")
    assert command[:2] == ["gpulayer", "up"]
    assert command.count("0") == 2
    assert "--data-dir" in command
    assert token not in command, "ps shows a command's words to everybody"


def test_the_words_of_the_two_kinds_of_tokens_are_not_mixed(first: Daemon) -> None:
    for words in (("--join", "--role", "read"), ("--role", "read", "--uses", "2"), (), ("--join", "--for", "7")):
        done = first.cli("token", "create", *words)
        assert done.returncode == 2, (words, done.stdout)


def test_a_second_node_joins_is_seen_by_both_and_leaves(first: Daemon, second: Daemon) -> None:
    join(first, second)
    wait_for(lambda: nodes(first) == nodes(second) == {"n1", "n2"}, 15)
    (token,) = (each for each in document(second, "token", "list") if each["role"] == "join")
    assert token["uses_left"] == 0
    status = document(second, "cluster", "status")
    assert (status["leader"], status["voters"], status["nodes"]) == ("n1", ["n1"], 2)

    refused = first.cli("leave")
    assert refused.returncode == 5
    assert "holds the log" in refused.stderr

    done = second.cli("submit", "--name", "web", "--replicas", "2", "--wait", "30s", *SLEEP)
    assert done.returncode == 0, done.stderr
    refused = second.cli("leave")
    assert refused.returncode == 5
    assert re.search(r"1 job has not ended here \(web with 1 of its 2 replicas\)", refused.stderr)

    done = second.cli("leave", "--stop-all")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("ends job web, 1 of its 2 replicas not on n2\n"), done.stderr
    assert second.process is not None
    assert second.process.wait(10) == 0
    wait_for(lambda: nodes(first) == {"n1"}, 10)
    for daemon in (first, second):
        assert "gpj_" not in daemon.log_path.read_text()


def test_a_node_whose_record_is_not_here_yet_is_said_to_join() -> None:
    node = {"state": "alive", "reason": None, "is_self": False, "devices": [], "gpu_detect": "ok", "undetected": []}
    assert troubles(node | {"record": "none"}) == ["it is joining: what it has and runs is not known here yet"]
    assert troubles(node | {"record": "current"}) == []


def test_a_node_that_joined_comes_back_without_a_word_of_it(first: Daemon, second: Daemon) -> None:
    join(first, second)
    second.stop()
    second.start()
    wait_for(lambda: nodes(second) == {"n1", "n2"}, 15)


def test_a_node_of_one_cluster_joins_no_other(first: Daemon, second: Daemon) -> None:
    second.start()
    second.stop()
    token, command = command_for_the_next(first)
    process = second.spawn("--join", command[-1], env={"GPULAYER_JOIN_TOKEN": token})
    assert process.wait(20) == 5
    assert "is that of a node of cluster" in second.log_tail()
    assert "--abandon-state" in second.log_tail()


def test_a_spent_token_ends_the_start_with_its_reason(first: Daemon, second: Daemon, tmp_path: Path) -> None:
    token, command = command_for_the_next(first)
    second.start("--join", command[-1], env={"GPULAYER_JOIN_TOKEN": token})
    third = Daemon(tmp_path / "n3", name="n3")
    try:
        process = third.spawn("--join", command[-1], env={"GPULAYER_JOIN_TOKEN": token})
        assert process.wait(20) == 5
        assert "no uses left" in third.log_tail()
    finally:
        third.end()
