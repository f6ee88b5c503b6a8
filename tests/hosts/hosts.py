"""Daemons on the hosts of a Lan: a real one in each namespace, and what a test wants to know of several at once.

Only the network of such a host is its own. Its files lie beside the others', so that a daemon's socket is asked from
where the tests run, whatever its network suffers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.hosts.network import Host, Lan
from tests.integration.daemon import GPULAYER, START_SECONDS_MAX, Answered, Daemon, Json, is_alive, wait_for
from tests.integration.programs import python, serve

T = TypeVar("T")

_FETCH = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=5)
connection.request("GET", "/")
print(connection.getresponse().read().decode(), end="")
"""

API_PORT, PEER_PORT = 7450, 7451
# What a cut or a killed daemon takes to be told everywhere, on two busy cores.
DEAD_SECONDS_MAX = 20.0
ONE_VIEW_SECONDS_MAX = 15.0
# Without cgroups: a host that is switched off leaves none behind. Elsewhere they are tested.
CONFIG = """
[[accelerators]]
kind = "cuda"
model = "H100"
memory = "80GiB"
count = 2

[supervision]
cgroups = "off"
"""


class Node(Daemon):
    """`gpulayer up` on a host, listening on its address; it carries the label `host=NAME`."""

    def __init__(self, host: Host, home: Path, *, command: Iterable[str] = (), config: str = CONFIG) -> None:
        """`command`: in the place of gpulayer in the host's network."""
        super().__init__(
            home,
            config=config,
            api_port=API_PORT,
            peer_port=PEER_PORT,
            command=command or host.inside(*GPULAYER),
            name=f"n{host.number}",
        )
        self.host = host

    @property
    def address(self) -> str:
        return self.host.address

    @property
    def url(self) -> str:
        return f"https://{self.address}:{API_PORT}"

    @property
    def id(self) -> str:
        return str(json.loads((self.data_dir / "node.json").read_text())["node_id"])

    # --- life -----------------------------------------------------------------------------------------------------

    def up(self, *more: str) -> subprocess.Popen[bytes]:
        """Started, and not waited for. What `more` says of --bind holds."""
        bind = () if "--bind" in more else ("--bind", self.address)
        return self.spawn("--log-format", "json", "--label", f"host={self.name}", *bind, *more)

    def join_words(self, seed: str, token: str) -> tuple[str, ...]:
        """For up(): the token in a file, as nobody else is to see it."""
        path = self.home / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        return "--join", seed, "--token-file", str(path)

    def wait_until_ready(self) -> Node:
        assert self.process is not None
        process = self.process

        def serves() -> bool:
            assert process.poll() is None, f"the daemon ended with {process.returncode}:\n{self.log_tail()}"
            return self.is_ready()

        wait_for(serves, START_SECONDS_MAX, self.log_tail)
        return self

    def wait_until_ended(self, seconds: float = 20.0) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Its daemon stands still, and nothing else of it."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    # --- what it says ---------------------------------------------------------------------------------------------

    def new_token(self, *, uses: int = 1, seconds: float = 600.0) -> str:
        """That lets hosts join."""
        made = self.call("POST", "/v1/join-tokens", {"uses": uses, "lasts_seconds": seconds})
        return str(made["token"])

    def nodes(self) -> dict[str, Json]:
        return {node["name"]: node for node in self.call("GET", "/v1/nodes")}

    def states(self) -> dict[str, str]:
        """Of every node, as this one sees it."""
        return {name: node["state"] for name, node in self.nodes().items()}

    def status(self) -> Json:
        return dict(self.call("GET", "/v1/status"))

    def warnings(self) -> list[str]:
        return list(self.status()["warnings"])

    def endpoints(self, job: str) -> list[Json]:
        return list(self.call("GET", f"/v1/jobs/{job}/endpoints"))

    def runs_of(self, job: str) -> list[Json]:
        """Replicas of the job on this node, by its own record."""
        told = self.call("GET", f"/v1/nodes/{self.name}")["replicas"]
        return [replica for replica in told if replica["job"] == job]

    def fetch(self, endpoint: str) -> str:
        """What a client on this host is answered by a service."""
        return self.host.run(*python(_FETCH), endpoint)

    def attempts_of(self, job: str) -> list[str]:
        """The names of its sandboxes here: one for each attempt that this node has begun."""
        root = self.data_dir / "sandboxes"
        return sorted(path.name for path in root.glob(f"{job}.*")) if root.exists() else []

    def log_events(self, *kinds: str, since: int = 0) -> list[Json]:
        """Of its own log, those of some kinds, from a position that log_end() gave."""
        found = []
        for line in self.log_path.read_bytes()[since:].splitlines() if self.log_path.exists() else ():
            if line.startswith(b"{"):
                event = json.loads(line)
                if event.get("event") in kinds:
                    found.append(event)
        return found

    def log_end(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0


class Cluster:
    """So many nodes on a network of their own; n1 holds the log. Closing it leaves nothing of them."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.lan = Lan(count)
        self.nodes = [Node(host, directory / f"n{host.number}") for host in self.lan.hosts]

    def close(self) -> None:
        self.lan.close()
        for node in self.nodes:
            if node.process is not None:
                node.process.wait(10)

    def __getitem__(self, number: int) -> Node:
        """Counted from 1, as they are called."""
        return self.nodes[number - 1]

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, count: int | None = None) -> Cluster:
        """The first makes a cluster, the others of the first `count` join it, all at once."""
        first, *others = self.nodes[:count]
        first.up()
        first.wait_until_ready()
        token = first.new_token(uses=max(1, len(others)))
        for node in others:
            node.up(*node.join_words(first.address, token))
        for node in others:
            node.wait_until_ready()
        self.wait_for_one_view()
        return self

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.is_running]

    def mend(self) -> None:
        """The network is whole, every host on, every daemon runs that ever did, and all see all."""
        self.lan.heal()
        for node in self.nodes:
            if not node.host.is_on:
                node.host.power_on()
        for node in self.nodes:
            if node.process is not None and not node.is_running:
                node.up()
        for node in self.running():
            node.wait_until_ready()
        self.wait_for_one_view(30)

    # --- what is seen ---------------------------------------------------------------------------------------------

    def wait_for(self, predicate: Callable[[], T], seconds: float, what: str = "") -> T:
        """As wait_for(), telling what every node says when it was in vain."""
        return wait_for(predicate, seconds, lambda: f"{what}\n{self.told()}")

    def wait_for_one_view(self, seconds: float = ONE_VIEW_SECONDS_MAX) -> None:
        """Every node that runs sees all that run alive, with their names, and has what this run of them says."""
        names = {node.name for node in self.running()}

        def is_one() -> bool:
            for node in self.running():
                seen = {name: each for name, each in node.nodes().items() if name in names}
                if seen.keys() != names:
                    return False
                if any(each["state"] != "alive" or each["record"] != "current" for each in seen.values()):
                    return False
            return True

        self.wait_for(is_one, seconds, f"one view of {sorted(names)}")

    def wait_until_seen(self, subject: Node, state: str, *, by: Iterable[Node], seconds: float) -> None:
        by = list(by)
        self.wait_for(
            lambda: all(node.states().get(subject.name) == state for node in by),
            seconds,
            f"{subject.name} {state} at {', '.join(node.name for node in by)}",
        )

    def told(self) -> str:
        lines = []
        for node in self.running():
            try:
                lines.append(f"{node.name}: {node.states()}")
            except (OSError, Answered, ValueError) as error:
                lines.append(f"{node.name}: {error!r}")
        lines += [f"--- {node.name}\n{node.log_tail(12)}" for node in self.nodes if node.process is not None]
        return "\n".join(lines)

    def serve_on(self, node: Node, *options: str, by: Node | None = None, **spec: object) -> str:
        """A service that can run on that node alone, ready; its id."""
        asked = by or self[1]
        job = asked.submit(serve(*options), labels={"host": node.name}, **spec)
        asked.wait_ready(job)
        return job


class Watched:
    """What each node of a cluster logs from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._from = {node.name: (node, node.log_end()) for node in cluster.nodes}

    def deaths(self, *, at: Iterable[Node] = (), of: Node | None = None) -> list[str]:
        """`n1: n3 (silent)` for each death that was said, at some of the nodes or all of them, of one or of any."""
        names = {node.name for node in at} or self._from.keys()
        return [
            f"{name}: {event['member']} ({event.get('cause')})"
            for name, (node, since) in self._from.items()
            if name in names
            for event in node.log_events("member.dead", since=since)
            if of is None or event["member"] == of.name
        ]


def stays_so(predicate: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds now and as long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not predicate():
            return False
        time.sleep(0.05)
    return True


def all_alive(pids: Iterable[int]) -> bool:
    return all(map(is_alive, pids))
