"""The unit as shipped, run by a real systemd: what restart, a crash, stop and leave do to replicas.

A minimal Debian with systemd is made by debootstrap and booted by systemd-nspawn. Needs root, both tools and a package
mirror: GPULAYER_TEST_SYSTEMD=1 asks for it, and .ci/run does where it can.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SUITE = "bookworm"
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv"

# Runs inside, once booted, and leaves what it saw as JSON. Bounded by the test's own time limit for the container.
DRILL = r"""
import json, subprocess, time
G = "/opt/gpulayer/bin/gpulayer"
seen = {}
def sh(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=60)
def active():
    return sh("systemctl", "is-active", "gpulayer").stdout.strip()
def wait_for(what, test):
    deadline = time.monotonic() + 30
    while not test():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited 30 s: {what}")
        time.sleep(0.1)
def pids():
    done = sh(G, "job", "status", "web", "--json")
    replicas = json.loads(done.stdout)["replicas"] if done.returncode == 0 else []
    return [each["pid"] for each in replicas if each["state"] == "ready"]
def alive(pid):
    return sh("test", "-d", f"/proc/{pid}").returncode == 0
try:
    wait_for("active", lambda: active() == "active")
    sh(G, "submit", "--service", "--name", "web", "--replicas", "2", "--spread", "any", "--",
       "sh", "-c", "exec python3 -m http.server $PORT --bind $HOST")
    seen["first"] = pids()
    seen["cgroup"] = open(f"/proc/{seen['first'][0]}/cgroup").read()
    sh("systemctl", "restart", "gpulayer")
    wait_for("ready after restart", lambda: len(pids()) == 2)
    seen["restart"] = pids()
    sh("systemctl", "kill", "-s", "KILL", "--kill-who=main", "gpulayer")
    wait_for("ready after a crash", lambda: len(pids()) == 2)
    seen["crash"] = pids()
    sh("systemctl", "stop", "gpulayer")
    seen["alive_while_stopped"] = [alive(pid) for pid in seen["first"]]
    sh("systemctl", "start", "gpulayer")
    wait_for("ready after stop and start", lambda: len(pids()) == 2)
    seen["stop_and_start"] = pids()
    seen["audit"] = sh(G, "audit").returncode
    seen["leave"] = sh(G, "leave", "--stop-all").returncode
    wait_for("inactive", lambda: active() == "inactive")
    time.sleep(2.5)  # longer than RestartSec: systemd must not bring it back
    seen["after_leave"] = active()
    seen["alive_after_leave"] = [alive(pid) for pid in seen["first"]]
except BaseException as error:
    seen["error"] = repr(error)
    seen["journal"] = sh("journalctl", "-u", "gpulayer", "--no-pager", "-n", "50").stdout
json.dump(seen, open("/opt/seen.json", "w"))
subprocess.run(["systemctl", "poweroff"])
"""
DRILL_UNIT = """[Unit]
After=gpulayer.service
[Service]
Type=oneshot
ExecStart=/usr/bin/python3 /opt/drill.py
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    if os.environ.get("GPULAYER_TEST_SYSTEMD") != "1":
        pytest.skip("GPULAYER_TEST_SYSTEMD=1 asks for it: it makes a Debian of 300 MB")
    if os.getuid() != 0 or not (shutil.which("debootstrap") and shutil.which("systemd-nspawn")):
        pytest.skip("needs root, debootstrap and systemd-nspawn (packages debootstrap, systemd-container)")
    if sys.version_info[:2] != (3, 11):
        pytest.skip(f"the compiled dependencies of this Python are not for {SUITE}'s 3.11")
    root = tmp_path_factory.mktemp("systemd") / "root"
    made = _run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)], 600)
    if made.returncode != 0:
        pytest.skip(f"debootstrap cannot make a {SUITE}: {made.stdout[-300:]}")
    _install(root)
    (root / "opt/drill.py").write_text(DRILL)
    (root / "etc/systemd/system/drill.service").write_text(DRILL_UNIT)
    assert _run(["chroot", str(root), "systemctl", "enable", "gpulayer", "drill"], 60).returncode == 0
    booted = _run(["systemd-nspawn", "-b", "-D", str(root), "--register=no", "--keep-unit", "--link-journal=no"], 300)
    report = root / "opt/seen.json"
    assert report.exists(), f"the drill left no report: {booted.stdout[-2000:]}"
    yield json.loads(report.read_text())
    shutil.rmtree(root, ignore_errors=True)


def _install(root: Path) -> None:
    """This tree as a wheel, beside the dependencies of the Python that runs the tests, and the unit it installs."""
    wheels = root / "opt/wheels"
    built = _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(wheels), str(REPOSITORY)], 120)
    assert built.returncode == 0, built.stdout[-2000:]
    assert _run(["chroot", str(root), "python3", "-m", "venv", "/opt/gpulayer"], 120).returncode == 0
    packages = root / "opt/gpulayer/lib/python3.11/site-packages"
    shutil.copytree(
        sysconfig.get_path("purelib"),
        packages,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*gpulayer*", "pip", "pip-*", "setuptools*", "__pycache__"),
    )
    (wheel,) = wheels.glob("*.whl")
    pip = ["chroot", str(root), "/opt/gpulayer/bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    installed = _run([*pip, f"/opt/wheels/{wheel.name}"], 120)
    assert installed.returncode == 0, installed.stdout[-2000:]
    unit = _run(["chroot", str(root), "/opt/gpulayer/bin/gpulayer", "systemd"], 60)
    assert unit.returncode == 0, unit.stdout


def _run(words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_restart_crash_and_stop_leave_the_replicas_and_leave_ends_them(seen: dict[str, object]) -> None:
    assert "error" not in seen, seen
    first = seen["first"]
    assert isinstance(first, list)
    assert len(first) == 2
    assert seen["restart"] == seen["crash"] == seen["stop_and_start"] == first
    assert seen["alive_while_stopped"] == [True, True]
    assert seen["audit"] == 0
    assert seen["leave"] == 0
    assert seen["after_leave"] == "inactive", "systemd brought it back"
    assert seen["alive_after_leave"] == [False, False]


def test_each_replica_has_a_cgroup_of_its_own_below_the_unit(seen: dict[str, object]) -> None:
    assert "/system.slice/gpulayer.service/gpulayer-n-" in str(seen["cgroup"])
