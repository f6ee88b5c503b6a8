"""What `resources detect` tells of hardware that this version does not drive, or that the driver keeps silent about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from gpulayer.runtime.accelerators.survey import DriverAsked, Survey, survey
from tests.fakes.nvml import FakeNvml


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml(tmp_path, gpus=1)
    for name, value in made.env().items():
        monkeypatch.setenv(name, value)
    return made


def surveyed(
    fake: FakeNvml,
    *,
    declared: Sequence[Mapping[str, Any]] = (),
    excluded: Sequence[str] = (),
    foreign_processes: Literal["skip", "allow"] = "skip",
) -> Survey:
    root = str(fake.root)
    return survey(
        DriverAsked(root=root),
        data_dir=fake.directory,
        declared=declared,
        excluded=excluded,
        foreign_processes=foreign_processes,
        root=root,
    )


def test_a_card_without_a_driver_is_an_error_with_what_to_do(fake: FakeNvml) -> None:
    fake.remove()
    fake.pci_device("0000:3b:00.0")
    found = surveyed(fake)
    assert (found.gpu_detect, found.devices) == ("error", ())
    (why,) = found.undetected
    assert "NVIDIA card 0000:3b:00.0" in why
    assert "install" in why


def test_nothing_at_all_is_no_error(fake: FakeNvml) -> None:
    fake.remove()
    found = surveyed(fake)
    assert (found.gpu_detect, found.devices, found.drivers) == ("none", (), ())


def test_a_card_that_the_driver_does_not_list_is_told(fake: FakeNvml) -> None:
    fake.pci_device("0000:01:00.0")
    fake.pci_device("0000:02:00.0")
    found = surveyed(fake)
    assert found.gpu_detect == "ok"
    assert [each.device.pci_bus_id for each in found.devices] == ["0000:01:00.0"]
    (why,) = [why for why in found.undetected if "0000:02:00.0" in why]
    assert "does not list it" in why
    assert "dmesg" in why


@pytest.mark.parametrize(("vendor", "name", "kind"), [(0x1002, "AMD", "rocm"), (0x8086, "Intel", "cuda")])
def test_cards_of_other_vendors_are_told_unless_they_are_declared(
    fake: FakeNvml, vendor: int, name: str, kind: str
) -> None:
    fake.pci_device("0000:41:00.0", vendor=vendor, kind=0x120000 if name == "AMD" else 0x030000)
    (why,) = [why for why in surveyed(fake).undetected if "0000:41:00.0" in why]
    assert why.startswith(f"{name} card 0000:41:00.0: ")
    assert "[[accelerators]]" in why
    declared = [{"kind": kind, "vendor": name.lower(), "model": "X", "memory": "16GiB"}]
    assert not [why for why in surveyed(fake, declared=declared).undetected if "0000:41:00.0" in why]


def test_a_declared_device_has_the_uuid_that_its_daemon_gives_it(fake: FakeNvml) -> None:
    declared = [{"kind": "cuda", "model": "H100", "memory": "80GiB"}]
    assert surveyed(fake, declared=declared).devices[-1].device.uuid == "NODE-cuda-h100-1"
    (fake.directory / "node.json").write_text(json.dumps({"node_id": "n-0123456789abcdef"}))
    assert surveyed(fake, declared=declared).devices[-1].device.uuid == "n-0123456789abcdef-cuda-h100-1"


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"[]", b'{"node_id": 7}', b'{"node_id": ""}'])
def test_a_damaged_record_of_the_node_is_no_matter_here(fake: FakeNvml, content: bytes) -> None:
    (fake.directory / "node.json").write_bytes(content)
    declared = [{"kind": "cuda", "model": "H100", "memory": "80GiB"}]
    assert surveyed(fake, declared=declared).devices[-1].device.uuid == "NODE-cuda-h100-1"


def test_a_declared_device_that_the_driver_reports_is_listed_once(fake: FakeNvml) -> None:
    declared = [{"kind": "cuda", "model": "H100", "memory": "80GiB", "uuid": fake.uuids[0]}]
    found = surveyed(fake, declared=declared)
    assert [each.device.source for each in found.devices] == ["nvml"]
    assert any("is declared" in why for why in found.undetected)


def test_a_gpu_in_mig_mode_without_instances_says_so(fake: FakeNvml) -> None:
    fake.split(0, 0)
    (only,) = surveyed(fake).devices
    assert (only.state, only.usable_milli, only.why_not) == ("split", 0, "it has no instances")


def test_a_gpu_that_is_excluded_takes_its_instances_along(fake: FakeNvml) -> None:
    fake.split(0, 2)
    for pattern in (fake.uuids[0], fake.gpus[0].model):
        found = surveyed(fake, excluded=(pattern,)).devices
        assert [each.state for each in found] == ["excluded"] * 3
        assert {each.why_not for each in found} == {f"by {pattern!r} in [devices] exclude"}


def test_what_users_say_is_not_said_twice_and_what_they_do_not_is(fake: FakeNvml) -> None:
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        fake.processes(0, {running.pid: 100})
        (only,) = surveyed(fake).devices
        assert only.users is not None
        assert (only.state, only.is_told_by_users, only.users[0].pid) == ("in_use", True, running.pid)
        assert only.users[0].command.startswith(sys.executable)
        (allowed,) = surveyed(fake, foreign_processes="allow").devices
        assert (allowed.state, allowed.usable_milli, allowed.is_told_by_users) == ("usable", 1000, False)
    finally:
        running.kill()
        running.wait(5)


def test_a_process_that_is_gone_is_listed_without_a_name(fake: FakeNvml) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(5)
    fake.processes(0, {gone.pid: None, os.getpid(): 5})
    (only,) = surveyed(fake).devices
    assert only.users is not None
    by_pid = {user.pid: user for user in only.users}
    assert (by_pid[gone.pid].kind, by_pid[gone.pid].command, by_pid[gone.pid].memory_mib) == ("gone", "", None)
