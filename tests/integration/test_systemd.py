"""Run by systemd: the unit file, and what the daemon tells whoever supervises it."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, is_alive
from tests.integration.programs import serve


def unit_of(daemon: Daemon) -> str:
    done = daemon.cli("systemd", "--print")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_unit_ends_only_the_daemon_and_lets_it_have_cgroups(make_daemon: DaemonMaker) -> None:
    settings = {line.partition("=")[0]: line.partition("=")[2] for line in unit_of(make_daemon()).splitlines()}
    assert settings["Type"] == "notify"
    assert settings["KillMode"] == "process"
    assert settings["Delegate"] == "yes"
    assert " up" in settings["ExecStart"]
    assert int(settings["WatchdogSec"].rstrip("s")) > 0


def test_systemd_finds_nothing_wrong_with_the_unit(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "gpulayer.service"
    unit.write_text(unit_of(make_daemon()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "gpulayer" in line]
    assert not said, said
    assert done.returncode == 0, done.stderr


class Supervisor:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))

    def wait_for(self, assignment: str, seconds: float = 15) -> None:
        heard = []
        self.socket.settimeout(seconds)
        try:
            while not heard or assignment not in heard[-1]:
                heard.append(self.socket.recv(4096).decode().splitlines())
        except TimeoutError:
            raise AssertionError(f"not heard within {seconds} s: {assignment}; but {heard}") from None


def test_the_daemon_says_when_it_is_ready_that_it_lives_and_when_it_stops(
    make_daemon: DaemonMaker, tmp_path: Path
) -> None:
    supervisor = Supervisor(tmp_path / "notify")
    daemon = make_daemon(env={"NOTIFY_SOCKET": str(supervisor.path), "WATCHDOG_USEC": "400000"})
    daemon.spawn()
    supervisor.wait_for("READY=1")
    assert daemon.is_ready()
    for _ in range(3):
        supervisor.wait_for("WATCHDOG=1", seconds=2)
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    assert daemon.process is not None
    daemon.process.terminate()
    supervisor.wait_for("STOPPING=1")
    assert daemon.process.wait(15) == 0
    assert is_alive(pid)


def test_a_daemon_that_cannot_start_is_never_said_to_be_ready(make_daemon: DaemonMaker, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "notify")
    daemon = make_daemon(config="nonsense = 1\n", env={"NOTIFY_SOCKET": str(supervisor.path)})
    assert daemon.spawn().wait(15) != 0
    with pytest.raises(AssertionError):
        supervisor.wait_for("READY=1", seconds=0.2)
