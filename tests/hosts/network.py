"""Several hosts on one machine: a network namespace each, joined by a bridge in one of its own.

For everything but the kernel a daemon in such a namespace is on a host of its own. Needs root, iproute2 and nftables;
`missing()` says what is not there. Everything that was made goes away with `close()`, whatever the test did.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

COMMAND_SECONDS_MAX = 20.0
_TABLE = "gpulayer"


def missing() -> str:
    """Why namespaces cannot be used here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nft", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"there is no {program} here (packages iproute2, nftables, util-linux)"
    name = f"gpl{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        return f"no network namespace can be made here: {error}"
    _run("ip", "netns", "delete", name)
    return ""


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=True)
    return done.stdout


class Host:
    """One namespace with the address `10.77.0.N`, and the default route on that network."""

    def __init__(self, lan: Lan, number: int) -> None:
        self.lan = lan
        self.number = number
        self.namespace = f"{lan.prefix}-{number}"
        self.address = f"10.77.{number // 250}.{number % 250 + 1}"
        self.is_on = True

    def inside(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host. Only the network is another one: paths are the same."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "--", *words]

    def inside_with(self, files: Mapping[str, Path], *words: str) -> list[str]:
        """As inside(), with other files in the place of some, as `/etc/hosts`: what is in them now and later."""
        mounts = [f"mount --bind {shlex.quote(str(file))} {shlex.quote(place)}" for place, file in files.items()]
        script = " && ".join([*mounts, 'exec "$@"'])
        return self.inside("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, "sh", *words)

    def run(self, *words: str) -> str:
        return _run(*self.inside(*words))

    def add_address(self, address: str, *, device: str = "eth0") -> None:
        """A further one; on a device that is not there yet: of a bridge that leads nowhere, as containers have one."""
        if device != "eth0":
            self.run("ip", "link", "add", device, "type", "bridge")
            self.run("ip", "link", "set", device, "up")
        self.run("ip", "address", "add", f"{address}/16", "dev", device)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def power_off(self) -> None:
        """Nothing on it answers any more, from one moment to the next; then all of it ends."""
        self.is_on = False
        _run("ip", "-n", self.lan.switch, "link", "set", f"p{self.number}", "down")
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def power_on(self) -> None:
        """The network is there again; nothing runs yet."""
        self.is_on = True
        _run("ip", "-n", self.lan.switch, "link", "set", f"p{self.number}", "up")

    # --- trouble on the way ---------------------------------------------------------------------------------------

    def rule(self, *rules: str) -> None:
        """nft rules in the chains `incoming` and `outgoing` of this host, as `incoming ip saddr 10.77.0.2 drop`."""
        script = (
            f"table inet {_TABLE} {{\n"
            "  chain incoming { type filter hook input priority 0; }\n"
            "  chain outgoing { type filter hook output priority 0; }\n"
            "}\n" + "".join(f"add rule inet {_TABLE} {rule}\n" for rule in rules)
        )
        subprocess.run(
            self.inside("nft", "-f", "-"),
            input=script,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
            check=True,
        )

    def heal(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self.run("nft", "delete", "table", "inet", _TABLE)

    def lose(self, percent: int) -> None:
        """Of what comes in. With the same on every host that is the loss of every way."""
        self.rule(f"incoming numgen random mod 100 < {percent} drop")

    def deaf_to(self, *others: Host) -> None:
        """Hears nothing of them; they hear it."""
        self.rule(*(f"incoming ip saddr {other.address} drop" for other in others))


class Lan:
    """So many hosts on one network."""

    def __init__(self, count: int) -> None:
        self.prefix = f"gpl{os.getpid()}"
        self.switch = f"{self.prefix}-sw"
        self.hosts = [Host(self, number) for number in range(1, count + 1)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for host in self.hosts:
            _run("ip", "netns", "add", host.namespace)
            _run(
                *("ip", "-n", self.switch, "link", "add", f"p{host.number}", "type", "veth"),
                *("peer", "name", "eth0", "netns", host.namespace),
            )
            _run("ip", "-n", self.switch, "link", "set", f"p{host.number}", "master", "br0", "up")
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/16", "dev", "eth0")
            _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _run("ip", "-n", host.namespace, "route", "add", "default", "dev", "eth0")

    def __enter__(self) -> Lan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def cut(self, one_side: Sequence[Host], other_side: Sequence[Host]) -> None:
        """Nothing passes between the two, in either direction; who tries hears nothing."""
        for here, there in ((one_side, other_side), (other_side, one_side)):
            for host in here:
                addresses = ", ".join(other.address for other in there)
                host.rule(f"incoming ip saddr {{ {addresses} }} drop")  # outgoing, it would be an error to who sends

    def heal(self) -> None:
        for host in self.hosts:
            host.heal()

    def close(self) -> None:
        for host in self.hosts:
            with suppress(subprocess.SubprocessError, OSError):
                self._end(host)
            with suppress(subprocess.SubprocessError, OSError):
                _run("ip", "netns", "delete", host.namespace)
        with suppress(subprocess.SubprocessError, OSError):
            _run("ip", "netns", "delete", self.switch)

    @staticmethod
    def _end(host: Host) -> None:
        if not Path(f"/run/netns/{host.namespace}").exists():
            return
        deadline = time.monotonic() + 5.0
        while (pids := host.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
