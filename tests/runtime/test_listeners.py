"""Real sockets of real processes, in the kernel's table and in what is told of them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import trio

from gpulayer.core.replica.messages import AttemptEvent, ListenerFound, ListenerMissing
from gpulayer.model.ids import AttemptId, JobId, ReplicaId
from gpulayer.runtime import listeners
from gpulayer.runtime.listeners import ListenerChecks, ListeningSocket, accepting
from gpulayer.runtime.watch import Watch

ATTEMPT = AttemptId(ReplicaId(JobId("j-aaaaaaaaaa"), 0), 1)
HERE = "127.0.0.1"


def listen(address: str, port: int = 0, *, v6only: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    listener.bind((address, port))
    listener.listen()
    return listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def inode_of(listener: socket.socket) -> int:
    return os.fstat(listener.fileno()).st_ino


LISTEN = (
    "import socket,sys,time; s=socket.create_server((sys.argv[1],int(sys.argv[2]))); print(flush=True); time.sleep(60)"
)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A process that listens somewhere, as a replica's would."""
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str, port: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", LISTEN, address, str(port)], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Checks:
    """ListenerChecks with what they told."""

    def __init__(self) -> None:
        self.events: Watch[tuple[AttemptEvent, ...]] = Watch(())
        self.checks = ListenerChecks(advertise=HERE, emit=lambda event: self.events.set((*self.events.value, event)))

    async def wait_for(self, count: int, seconds: float = 5) -> AttemptEvent:
        with trio.fail_after(seconds):
            return (await self.events.wait_for(lambda events: len(events) >= count))[count - 1]

    def watch(self, port: int, *pids: int, run: int = 1) -> None:
        self.checks.watch(ATTEMPT, run=run, port=port, pids=lambda: pids)


@pytest.fixture
async def checks(nursery: trio.Nursery) -> Checks:
    made = Checks()
    nursery.start_soon(made.checks.run)
    return made


def missing(event: AttemptEvent) -> str:
    assert isinstance(event.event, ListenerMissing)
    return event.event.reason.code


def test_both_sources_of_the_table_agree() -> None:
    with listen(HERE) as four, listen("::1") as six, listen("0.0.0.0") as every:
        wanted = {inode_of(each): port_of(each) for each in (four, six, every)}
        for table in (listeners._listening_by_sock_diag(), listeners._listening_by_proc()):
            found = {each.inode: each for each in table if each.inode in wanted}
            assert {inode: each.port for inode, each in found.items()} == wanted
            assert {each.address for each in found.values()} == {HERE, "::1", "0.0.0.0"}
            assert all(each.uid == os.getuid() for each in found.values())


def test_sock_diag_tells_whether_ipv6_takes_ipv4_along() -> None:
    with listen("::", v6only=True) as only, listen("::") as both:
        found = {each.inode: each.v6only for each in listeners.listening()}
        assert found[inode_of(only)] is True
        assert found[inode_of(both)] is False


def test_the_owner_of_a_socket_is_found(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    with listen(HERE) as ours:
        assert os.getpid() in listeners.owner_of(inode_of(ours))
        assert listeners.inodes_of([os.getpid()])[inode_of(ours)] == os.getpid()


@pytest.mark.parametrize(
    ("bound", "address", "accepts"),
    [
        ([HERE], HERE, HERE),
        (["10.0.0.1"], HERE, None),
        (["0.0.0.0"], HERE, "0.0.0.0"),
        (["0.0.0.0", HERE], HERE, HERE),
        (["::"], HERE, "::"),
        (["::1"], HERE, None),
        (["0.0.0.0"], "::1", None),
        (["::"], "::1", "::"),
        ([f"::ffff:{HERE}"], HERE, f"::ffff:{HERE}"),
    ],
)
def test_who_gets_a_connection_to_an_address(bound: list[str], address: str, accepts: str | None) -> None:
    sockets = [ListeningSocket(each, 80, number, 0, v6only=False) for number, each in enumerate(bound)]
    found = accepting(sockets, address)
    assert [each.address for each in found] == ([accepts] if accepts else [])


async def test_a_listener_of_the_tree_is_found_soon_and_told_once(
    checks: Checks, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    with listen(HERE) as free:
        port = port_of(free)
    checks.watch(port, os.getpid())
    assert missing(await checks.wait_for(1)) == "not_listening"
    with listen(HERE, port):
        started = time.monotonic()
        event = (await checks.wait_for(2)).event
        assert isinstance(event, ListenerFound)
        assert time.monotonic() - started < 1.5
        await trio.sleep(1.2)
        assert len(checks.events.value) == 2
        assert checks.checks.checked_seconds_ago < 1.1
    assert missing(await checks.wait_for(3)) == "not_listening"


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
async def test_a_listener_on_all_addresses_counts(checks: Checks, address: str) -> None:
    with listen(address) as ours:
        checks.watch(port_of(ours), os.getpid())
        assert isinstance((await checks.wait_for(1)).event, ListenerFound)


async def test_a_stranger_on_the_port_is_named(checks: Checks, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    with listen(HERE) as free:
        port = port_of(free)
    stranger = spawn(HERE, port)
    checks.watch(port, os.getpid())
    event = (await checks.wait_for(1)).event
    assert isinstance(event, ListenerMissing)
    assert event.reason.code == "port_taken"
    assert f"port {port} is held by pid {stranger.pid} (python" in event.reason.text


async def test_listening_on_another_port_or_address_is_said(
    checks: Checks, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    with listen(HERE) as free:
        port = port_of(free)
    other = spawn(HERE, port + 1)
    checks.watch(port, other.pid)
    event = (await checks.wait_for(1)).event
    assert isinstance(event, ListenerMissing)
    assert event.reason.code == "listens_elsewhere"
    assert event.reason.text == f"listens on {HERE}:{port + 1} instead of $PORT {port}"
    elsewhere = spawn("127.0.0.2", port)
    checks.watch(port, elsewhere.pid, run=2)
    event = (await checks.wait_for(2)).event
    assert isinstance(event, ListenerMissing)
    assert event.reason.text == f"listens on 127.0.0.2 only, and not on {HERE}:{port}"
    # It stays so: said once, and not "nothing listens" a second later.
    await trio.sleep(1.2)
    assert len(checks.events.value) == 2


async def test_what_is_forgotten_is_not_told(checks: Checks) -> None:
    with listen(HERE) as ours:
        checks.watch(port_of(ours), os.getpid())
        checks.checks.forget(ATTEMPT, run=7)  # another run's
        assert isinstance((await checks.wait_for(1)).event, ListenerFound)
        checks.checks.forget(ATTEMPT)
    await trio.sleep(1.2)
    assert len(checks.events.value) == 1
    assert checks.checks.checked_seconds_ago == 0.0


async def test_a_hundred_listeners_cost_next_to_nothing(nursery: trio.Nursery) -> None:
    """Once found, a run costs one line in one dump a second: under 0.3 % of a core for a hundred."""
    found: list[AttemptEvent] = []
    checks = ListenerChecks(advertise=HERE, emit=found.append)
    nursery.start_soon(checks.run)
    ours = [listen(HERE) for _ in range(100)]
    try:
        for index, listener in enumerate(ours):
            attempt = AttemptId(ReplicaId(JobId("j-aaaaaaaaaa"), index), 1)
            checks.watch(attempt, run=1, port=port_of(listener), pids=lambda: [os.getpid()])
        with trio.fail_after(10):
            while len(found) < 100:  # noqa: ASYNC110 - a list has no event
                await trio.sleep(0.05)
        before, began = time.process_time(), time.monotonic()
        await trio.sleep(3)
        share = (time.process_time() - before) / (time.monotonic() - began)
        print(f"{share:.3%} of a core for 100 listeners")
        assert share < 0.01  # three times the promise: this host has other things to do
    finally:
        for listener in ours:
            listener.close()


def test_a_table_that_cannot_be_read_is_not_an_empty_one() -> None:
    """Out of descriptors, the daemon saw no listener anywhere and withdrew every endpoint."""
    own = listen(HERE)
    code = (
        "import os,resource,sys\n"
        "from gpulayer.runtime.listeners import listening\n"
        "port=int(sys.argv[1])\n"
        "assert any(each.port == port for each in listening())\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1,) * 2)\n"
        "try: print(listening())\n"
        "except OSError as error: print(error.errno)\n"
    )
    with own:
        done = subprocess.run(
            [sys.executable, "-c", code, str(port_of(own))], capture_output=True, text=True, check=True, timeout=30
        )
    assert done.stdout.strip() == str(errno.EMFILE)
