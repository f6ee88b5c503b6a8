"""P7: nothing outlives its replica, whatever it forked, daemonised or ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from gpulayer.shim import tree

# Each writes "ready" when its whole tree stands; `survivor` processes sleep far longer than any test.
PREAMBLE = """
import os, signal, sys, time
def ready():
    open("ready.new", "w").close(); os.rename("ready.new", "ready")
def survivor():
    time.sleep(600); os._exit(0)
def child(become):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        become(write)
        os._exit(0)
    os.close(write); os.read(read, 1); os.close(read)
    return pid
"""
TREES = {
    "a child in a session of its own": """
def become(up): os.setsid(); os.write(up, b"x"); survivor()
child(become); ready(); survivor()
""",
    "a daemon that forked twice": """
def become(up):
    os.setsid()
    if os.fork() == 0:
        os.write(up, b"x"); survivor()
    os._exit(0)
os.waitpid(child(become), 0); ready(); survivor()
""",
    "all ignore the signal": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def become(up): os.setsid(); os.write(up, b"x"); survivor()
child(become); ready(); survivor()
""",
    "children of children in groups and sessions": """
def deeper(depth):
    def become(up):
        (os.setsid if depth % 2 else os.setpgrp)()
        if depth: deeper(depth - 1)
        os.write(up, b"x"); survivor()
    child(become); child(become)
deeper(3); ready(); survivor()
""",
    "stopped processes": """
def become(up): os.write(up, b"x"); os.kill(os.getpid(), signal.SIGSTOP); survivor()
child(become); ready(); os.kill(os.getpid(), signal.SIGSTOP)
""",
    "names that look like something else": """
import ctypes
ctypes.CDLL(None).prctl(15, b"a) R 1 (b", 0, 0, 0)
def become(up): os.setsid(); os.write(up, b"x"); survivor()
child(become); ready(); survivor()
""",
}

# Forks a successor and ends, again and again, in a new session each time: nobody lives to be looked at twice.
CHAIN = """
def chain(steps):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while steps:
        if os.fork(): os._exit(0)
        os.setsid(); steps -= 1
    open("chain-came-to-its-end", "w").close()
if os.fork() == 0: chain(200_000)
ready(); survivor()
"""
# In one group, and each of its processes starts two more. Bounded by a limit in case we lose.
BOMB = """
import resource
signal.signal(signal.SIGTERM, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
end = time.monotonic() + 20
if os.fork() == 0:
    for _ in range(5):
        os.fork()
    while time.monotonic() < end:
        pid = os.fork()
        if pid: os._exit(0)
ready(); survivor()
"""


def begin(attempt: Any, code: str) -> None:
    assert attempt.python(PREAMBLE + code)["ok"]
    attempt.file("ready")


def is_gone(attempt: Any) -> bool:
    return not attempt.processes() and not tree.descendants(attempt.spawned["pid"])


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("has_cgroup", [False, True])
def test_after_a_stop_nothing_of_the_tree_is_left(
    new_attempt: Any, request: pytest.FixtureRequest, name: str, has_cgroup: bool
) -> None:
    attempt = new_attempt(cgroup=request.getfixturevalue("cgroup") if has_cgroup else None)
    begin(attempt, TREES[name])
    assert len(attempt.processes()) >= 2
    attempt.client.ask("stop", signal="TERM", grace_seconds=0.3, reason="test")
    event = attempt.client.wait_for("exited")
    assert event["ended_by"] == "stop:test"
    attempt.client.wait_for("gone")
    assert is_gone(attempt)
    assert attempt.client.ask("hello")["gone"]
    assert attempt.client.ask("quit")["ok"]
    if has_cgroup:
        assert not os.path.exists(request.getfixturevalue("cgroup"))


@pytest.mark.parametrize("code", [CHAIN, BOMB], ids=["chain", "bomb"])
@pytest.mark.parametrize("has_cgroup", [False, True])
def test_a_tree_that_forks_faster_than_one_can_look_is_ended_as_well(
    new_attempt: Any, request: pytest.FixtureRequest, code: str, has_cgroup: bool
) -> None:
    attempt = new_attempt(cgroup=request.getfixturevalue("cgroup") if has_cgroup else None)
    begin(attempt, code)
    attempt.client.ask("stop", signal="TERM", grace_seconds=0.1, reason="test")
    attempt.client.wait_for("gone")
    assert is_gone(attempt)
    assert not (attempt.directory / "work" / "chain-came-to-its-end").exists()


def test_a_stop_within_its_grace_is_not_a_kill(attempt: Any) -> None:
    begin(attempt, "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\nready()\nsurvivor()")
    attempt.client.ask("stop", signal="TERM", grace_seconds=10, reason="scale down")
    event = attempt.client.wait_for("exited")
    assert (event["code"], event["ended_by"]) == (7, "stop:scale down")
    attempt.client.wait_for("gone")


def test_a_signal_reaches_each_process_of_the_group_once(attempt: Any) -> None:
    """Twice means "at once" to many programs (Ctrl-C, Ctrl-C)."""
    count = """
hits = []
signal.signal(signal.SIGINT, lambda *_: hits.append(1))
def become(up):
    os.write(up, b"x")
    while not hits: time.sleep(0.01)
    time.sleep(0.2); open("child-%d" % len(hits), "w").close(); os._exit(0)
child(become); ready()
while not hits: time.sleep(0.01)
time.sleep(0.1); open("main-%d" % len(hits), "w").close()
"""
    begin(attempt, count)
    attempt.client.ask("stop", signal="INT", grace_seconds=10, reason="test")
    attempt.client.wait_for("gone")
    names = sorted(path.name for path in (attempt.directory / "work").iterdir())
    assert names == ["child-1", "main-1", "ready"]


def test_a_second_stop_shortens_the_grace_and_the_first_reason_stands(attempt: Any) -> None:
    begin(attempt, TREES["all ignore the signal"])
    attempt.client.ask("stop", signal="TERM", grace_seconds=500, reason="first")
    assert attempt.client.ask("hello")["run"]["stopping"] == "first"
    began = time.monotonic()
    attempt.client.ask("stop", signal="TERM", grace_seconds=0.1, reason="second")
    event = attempt.client.wait_for("exited")
    assert (event["signal"], event["ended_by"]) == (signal.SIGKILL, "stop:first")
    attempt.client.wait_for("gone")
    assert time.monotonic() - began < 5


def test_what_a_run_left_in_the_background_is_counted_named_and_swept(new_attempt: Any) -> None:
    attempt = new_attempt(stop_grace_seconds=0.3)
    attempt.shell("sleep 600 & (trap '' TERM; exec sleep 601) & sleep 0.2; exit 2")
    event = attempt.client.wait_for("exited")
    assert (event["code"], event["ended_by"], event["left_background"]) == (2, "itself", 2)
    assert event["left_names"] == ["sleep", "sleep"]
    assert attempt.client.ask("hello")["run"] is None
    attempt.client.wait_for("gone")
    assert is_gone(attempt)


def test_a_stop_without_a_run_does_nothing(attempt: Any) -> None:
    assert attempt.client.ask("stop", signal="TERM", grace_seconds=1, reason="test") == {"id": 1, "ok": True}
    assert attempt.client.ask("hello")["gone"]
    assert attempt.client.events == []


def test_zombies_do_not_gather(attempt: Any) -> None:
    code = """
for _ in range(50):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
ready(); survivor()
"""
    begin(attempt, code)
    attempt.client.ask("hello")
    assert [process["state"] for process in attempt.client.ask("pids")["pids"]] == ["S"]


def test_quit_is_refused_while_anything_is_there(attempt: Any, eventually: Any) -> None:
    attempt.shell("sleep 600")
    assert attempt.client.ask("quit")["error"]["code"] == "busy"
    attempt.client.ask("stop", signal="KILL", grace_seconds=9, reason="test")
    attempt.client.wait_for("gone")
    assert attempt.client.ask("quit")["ok"]
    eventually(lambda: tree.process_stat(attempt.spawned["pid"]) is None)
    assert not (attempt.directory / "shim.sock").exists()
    assert not (attempt.directory / "shim.json").exists()


def test_the_run_is_in_its_cgroup_and_the_shim_is_not(new_attempt: Any, cgroup: str) -> None:
    attempt = new_attempt(cgroup=cgroup)
    answer = attempt.shell("sleep 600")
    assert answer["pid"] in tree.cgroup_pids(cgroup)
    assert attempt.spawned["pid"] not in tree.cgroup_pids(cgroup)


def test_a_cgroup_that_cannot_be_joined_is_said_and_the_run_starts(new_attempt: Any) -> None:
    attempt = new_attempt(cgroup="/no/such/cgroup")
    answer = attempt.shell("exit 0")
    assert answer["ok"]
    assert "/no/such/cgroup: No such file" in answer["cgroup_error"]
    attempt.client.wait_for("gone")


def test_what_an_earlier_shim_left_in_the_cgroup_keeps_the_next_one_busy_until_it_is_stopped(
    new_attempt: Any, spawner: Any, connect: Any, cgroup: str, eventually: Any
) -> None:
    attempt = new_attempt(cgroup=cgroup)
    begin(attempt, TREES["all ignore the signal"])
    os.kill(attempt.spawned["pid"], signal.SIGKILL)
    eventually(lambda: tree.process_stat(attempt.spawned["pid"]) is None)
    attempt.spawned = spawner.spawn(attempt.directory)
    attempt.client.close()
    attempt.client = connect(attempt.directory)
    hello = attempt.client.ask("hello")
    assert (hello["gone"], hello["run"], hello["last_run"], hello["last_exit"]) == (False, None, 1, None)
    assert attempt.shell("true")["error"]["code"] == "busy"
    attempt.client.ask("stop", signal="TERM", grace_seconds=0.1, reason="orphans")
    attempt.client.wait_for("gone")
    assert attempt.client.ask("hello")["gone"]
    assert attempt.processes() == []
    attempt.runs = 1
    assert attempt.shell("true")["ok"]


def test_a_signal_never_reaches_a_process_that_is_another_by_now() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        stat = tree.process_stat(process.pid)
        assert stat is not None
        assert not tree.signal_process(stat._replace(start_time=stat.start_time - 1), signal.SIGKILL)
        assert not tree.signal_process(stat, signal.SIGKILL, is_still_ours=lambda now: False)
        assert process.poll() is None
        assert tree.signal_process(stat, signal.SIGKILL)
        assert process.wait(5) == -signal.SIGKILL
        assert not tree.signal_process(stat, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()


def test_the_tree_of_a_dead_shim_is_found_by_its_environment_and_ended(attempt: Any) -> None:
    begin(attempt, TREES["children of children in groups and sessions"])
    os.kill(attempt.spawned["pid"], signal.SIGKILL)
    assert len(attempt.processes()) > 10
    assert tree.kill_all(attempt.processes) == []
    assert attempt.processes() == []


def test_a_line_of_proc_is_read_whatever_the_name() -> None:
    fields = b"S 7 8 9 " + b" ".join(b"%d" % number for number in range(10, 60))
    stat = tree.parse_stat(b"42 (a) R 1 (b \xff) " + fields)
    assert (stat.pid, stat.comm, stat.state, stat.ppid, stat.pgrp, stat.session) == (42, "a) R 1 (b �", "S", 7, 8, 9)
    assert tree.parse_stat(b"42 (a\n\x1b[2Jb) " + fields).comm == "a??[2Jb", "it is shown to people"
    own = tree.process_stat(os.getpid())
    assert own is not None
    assert (own.ppid, own.session) == (os.getppid(), os.getsid(0))


def test_both_ways_to_look_for_descendants_agree() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & sleep 60 & echo up; wait"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        by_children = {stat.pid for stat in tree.descendants(os.getpid())}
        by_scan = {stat.pid for stat in tree._descendants_by_scan(os.getpid())}
        assert by_children == by_scan
        assert len(by_children & {stat.pid for stat in tree.descendants(process.pid)}) == 2
    finally:
        for stat in tree.descendants(process.pid):
            tree.signal_process(stat, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_lives_in_a_cgroup_that_was_killed_before(new_attempt: Any, cgroup: str, eventually: Any) -> None:
    """On Linux 6.18 what is born in a cgroup that was ever killed is killed too: after one stop that needed SIGKILL
    no later run of that replica lived for longer than an instant."""
    attempt = new_attempt(cgroup=cgroup)
    begin(attempt, TREES["all ignore the signal"])
    attempt.client.ask("stop", signal="TERM", grace_seconds=0.05, reason="test")
    attempt.client.wait_for("gone")
    attempt.client.events.clear()
    started = attempt.shell("echo alive > alive; sleep 600")
    assert attempt.file("alive") == "alive\n"
    assert started["pid"] in tree.cgroup_pids(cgroup)
    attempt.client.ask("stop", signal="KILL", grace_seconds=0, reason="test")
    assert attempt.client.wait_for("exited")["ended_by"] == "stop:test"
