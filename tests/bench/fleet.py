"""Nodes of several programs that watch one another, each in a network namespace of its own, and what they say of it.

Every program says on its output what it sees of the others; one reader stamps each line with the moment at which it
arrives, so all of them are measured the same way.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.hosts.network import Host

# All three seal what they say; the two others with one key for all.
GOSSIP_KEY = b64encode(secrets.token_bytes(32)).decode()
KINSHIP_NODE = """\
import asyncio, os, sys
import kinship

KEY = os.environ["GOSSIP_KEY"]

async def main(name, address, seeds):
    config = kinship.Config.lan(name=name, bind=f"{address}:7946", keys=[KEY], seeds=seeds)
    cluster = kinship.Cluster(config)
    await cluster.start()
    events = cluster.events()
    print("ready", flush=True)
    for member in cluster.members():
        print("MemberJoined", member.name, flush=True)
    async for event in events:
        print(type(event).__name__, getattr(getattr(event, "member", None), "name", ""), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3].split(",")))
"""


@dataclass(frozen=True)
class Seen:
    """One line that says something of a node."""

    kind: str
    """`ready` (of itself), `alive`, `suspect` or `dead`."""
    subject: str = ""
    detail: str = ""


class System(ABC):
    """How one program is started, and what its lines mean."""

    name = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self, hosts: list[Host]) -> None:  # noqa: B027
        """Once, before all are started together. Most need nothing."""

    @abstractmethod
    def command(self, host: Host, hosts: list[Host]) -> list[str]: ...

    @abstractmethod
    def parse(self, line: str) -> Seen | None: ...


class Gpulayer(System):
    name = "gpulayer"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._names: dict[str, str] = {}

    def _up(self, host: Host, *more: str) -> list[str]:
        data = self.directory / f"n{host.number}"
        config = self.directory / "gpulayer.toml"
        if not config.exists():
            config.write_text('[[accelerators]]\nkind = "cuda"\nmodel = "H100"\nmemory = "80GiB"\ncount = 8\n')
        return host.inside(
            *(sys.executable, "-m", "gpulayer", "up", "--data-dir", str(data), "--config", str(config)),
            *("--name", f"n{host.number}", "--bind", host.address, "--log-format", "json"),
            *more,
        )

    def cli(self, host: Host, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gpulayer", *words],
            env={**os.environ, "GPULAYER_DATA_DIR": str(self.directory / f"n{host.number}")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"gpulayer {' '.join(words)}: {done.stderr}")
        return done.stdout

    def prepare(self, hosts: list[Host]) -> None:
        """All of them join, one after another, and are stopped again."""
        first, others = hosts[0], hosts[1:]
        running = [subprocess.Popen(self._up(first), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        self._wait_ready(first)
        created = json.loads(self.cli(first, "token", "create", "--join", "--uses", str(len(hosts)), "--json"))
        token = self.directory / "token"
        token.write_text(created["token"])
        token.chmod(0o600)
        for host in others:
            joining = self._up(host, "--join", first.address, "--token-file", str(token))
            running.append(subprocess.Popen(joining, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            self._wait_ready(host)
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)
        for host in hosts:
            note = json.loads((self.directory / f"n{host.number}" / "node.json").read_text())
            self._names[note["node_id"]] = f"n{host.number}"

    def _wait_ready(self, host: Host) -> None:
        path = self.directory / f"n{host.number}" / "gpulayer.sock"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            done = subprocess.run(
                ["curl", "-sf", "--unix-socket", str(path), "http://localhost/readyz"], capture_output=True, check=False
            )
            if done.returncode == 0:
                return
            time.sleep(0.05)
        raise SystemExit(f"n{host.number} does not become ready")

    def command(self, host: Host, hosts: list[Host]) -> list[str]:
        return self._up(host)

    def parse(self, line: str) -> Seen | None:
        if '"member.' not in line and '"daemon.ready"' not in line:
            return None
        said = json.loads(line)
        if said["event"] == "daemon.ready":
            return Seen("ready")
        kind = said["event"].removeprefix("member.")
        if kind not in ("alive", "suspect", "dead"):
            return None
        return Seen(kind, self._names.get(said["id"], said["id"]), said.get("cause", ""))


class Serf(System):
    name = "serf"
    _LINES = (
        (re.compile(r"Serf agent starting|agent: Serf agent starting"), "ready"),
        (re.compile(r"EventMemberJoin: (\S+)"), "alive"),
        (re.compile(r"memberlist: Suspect (\S+) has failed"), "suspect"),
        (re.compile(r"EventMemberFailed: (\S+)"), "dead"),
    )

    def command(self, host: Host, hosts: list[Host]) -> list[str]:
        seeds = [f"-retry-join={other.address}" for other in hosts[:3] if other is not host]
        return host.inside(
            *("serf", "agent", f"-node=n{host.number}", f"-bind={host.address}:7946", "-log-level=info"),
            *("-profile=lan", f"-rpc-addr={host.address}:7373", f"-encrypt={GOSSIP_KEY}", *seeds),
        )

    def parse(self, line: str) -> Seen | None:
        for pattern, kind in self._LINES:
            if match := pattern.search(line):
                return Seen(kind, match[1] if pattern.groups else "")
        return None


class Kinship(System):
    name = "kinship"
    python = ""
    _KINDS: ClassVar = {
        "ready": "ready",
        "MemberJoined": "alive",
        "MemberSuspect": "suspect",
        "MemberDead": "dead",
        "MemberRecovered": "alive",
    }

    def command(self, host: Host, hosts: list[Host]) -> list[str]:
        seeds = ",".join(f"{other.address}:7946" for other in hosts[:3])
        return host.inside(self.python, "-u", "-c", KINSHIP_NODE, f"n{host.number}", host.address, seeds)

    def parse(self, line: str) -> Seen | None:
        word, _, subject = line.strip().partition(" ")
        kind = self._KINDS.get(word)
        return Seen(kind, subject) if kind else None


@dataclass
class Fleet:
    """All nodes of one system, and a reader that stamps their lines."""

    system: System
    hosts: list[Host]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    seen: list[tuple[float, int, Seen]] = field(default_factory=list)
    """(monotonic time, observer, what)."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: bool = False

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, host: Host) -> None:
        process = subprocess.Popen(
            self.system.command(host, self.hosts),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GOSSIP_KEY": GOSSIP_KEY},
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.processes[host.number] = process
        with self._lock:
            self._selector.register(process.stdout, selectors.EVENT_READ, [host.number, b""])

    def _read(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.05):
                now = time.monotonic()
                try:
                    data = os.read(key.fd, 65536)
                except BlockingIOError:
                    continue
                if not data:
                    with self._lock:
                        self._selector.unregister(key.fileobj)
                    continue
                *lines, key.data[1] = (key.data[1] + data).split(b"\n")
                for line in lines:
                    seen = self.system.parse(line.decode(errors="replace"))
                    if seen is not None:
                        self.seen.append((now, key.data[0], seen))

    def kill9(self, host: Host) -> float:
        at = time.monotonic()
        self.processes[host.number].kill()
        self.processes[host.number].wait(10)
        return at

    def power_off(self, host: Host) -> float:
        at = time.monotonic()
        host.power_off()
        self.processes[host.number].wait(10)
        return at

    def since(self, at: float, kind: str, subject: str) -> dict[int, float]:
        """Observer -> seconds after `at` at which it first said so."""
        found: dict[int, float] = {}
        for when, observer, seen in list(self.seen):
            if when >= at and seen.kind == kind and seen.subject == subject:
                found.setdefault(observer, when - at)
        return found

    def wait(self, what: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if what():
                return True
            time.sleep(0.02)
        return False

    def cpu_seconds(self) -> float:
        ticks = 0
        for process in self.processes.values():
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def sent_bytes(self) -> int:
        total = 0
        for host in self.hosts:
            for line in host.run("cat", "/proc/net/dev").splitlines():
                if line.strip().startswith("eth0:"):
                    total += int(line.split(":")[1].split()[8])
        return total

    def said(self, kind: str, begun: float, until: float) -> int:
        return sum(seen.kind == kind and begun <= at < until for at, _, seen in list(self.seen))

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        self._over = True
