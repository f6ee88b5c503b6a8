"""The unit: systemd itself finds nothing to say about it, and it does not end replicas."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.cli.systemd import unit_text


def printed(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpulayer", "systemd", "--print", *words],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_unit_keeps_replicas_and_says_how_it_is() -> None:
    unit = printed().splitlines()
    for line in (
        "Type=notify", "NotifyAccess=main", "KillMode=process", "Delegate=yes", "WatchdogSec=30", "Restart=on-failure",
        "StartLimitIntervalSec=0", "After=network-online.target",
    ):  # fmt: skip
        assert line in unit
    command = next(line for line in unit if line.startswith("ExecStart=")).removeprefix("ExecStart=").split()
    assert os.path.isabs(command[0])
    assert command[-1] == "up"


def test_paths_are_carried_in_absolute_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = next(line for line in unit_text("a b", "50%.toml").splitlines() if line.startswith("ExecStart="))
    assert line.endswith(f'up --data-dir "{tmp_path}/a b" --config {tmp_path}/50%%.toml')


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    unit = tmp_path / "gpulayer.service"
    unit.write_text(printed("--data-dir", str(tmp_path / "a b"), "--config", "gpulayer.toml"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may install it, and a test must not")
def test_only_root_may_install_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpulayer", "systemd"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 5
    assert "gpulayer systemd --print" in done.stderr
