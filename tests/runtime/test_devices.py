"""The devices of a node at work: a real child that asks a fake driver, real locks."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from gpulayer.core.inventory import Inventory
from gpulayer.model.replica import DeviceShare
from gpulayer.runtime.accelerators.device_locks import DeviceLocks
from gpulayer.runtime.accelerators.devices import Devices
from tests.fakes.nvml import FakeNvml


async def test_of_a_lost_gpu_it_is_not_said_that_processes_are_on_it(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it hears what is known: that nobody can tell, and why."""
    nvml = FakeNvml(tmp_path, gpus=1)
    for name, value in nvml.env().items():
        monkeypatch.setenv(name, value)
    devices = Devices(inventory=Inventory(), locks=DeviceLocks(tmp_path, tmp_path), assigned=dict, changed=lambda: None)
    await nursery.start(devices.run)
    assert await devices.first_look()
    nvml.fault(0, "lost")
    told, hear = trio.open_memory_channel[str](8)
    nursery.start_soon(devices.wait_clear, [DeviceShare(uuid=nvml.uuids[0], milli=1000)], told.send_nowait)
    with trio.fail_after(15):
        text = await hear.receive()
    assert text.startswith(f"the driver does not tell who is on {nvml.uuids[0]}: ")
    assert "lost" in text
    nursery.cancel_scope.cancel()
