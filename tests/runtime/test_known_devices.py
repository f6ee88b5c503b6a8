"""The devices that a node had last: what is kept of them, and what a damaged file is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.model.node import Accelerator
from gpulayer.runtime.known_devices import FILE_NAME, KnownDevices

GPU = Accelerator(uuid="GPU-1", kind="cuda", vendor="nvidia", model="H100", memory_mib=81559, source="nvml")
HELD_BY_OTHERS = Accelerator(
    uuid="GPU-2",
    kind="cuda",
    vendor="nvidia",
    model="H100",
    memory_mib=81559,
    source="nvml",
    unhealthy="it fell off the bus",
    foreign="pid 4711",
    foreign_milli=1000,
)


async def test_what_a_node_has_is_known_to_its_next_daemon_and_who_used_it_is_not(tmp_path: Path) -> None:
    known = KnownDevices(tmp_path)
    await known.keep((GPU, HELD_BY_OTHERS))
    found = KnownDevices(tmp_path).accelerators
    assert found[0] == GPU
    assert found[1].unhealthy == "it fell off the bus"
    assert (found[1].foreign, found[1].foreign_milli) == ("", 0)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x00" * 2_000_000], ids=["empty", "garbage", "huge"])
def test_a_file_that_cannot_be_read_is_one_of_no_devices(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert KnownDevices(tmp_path).accelerators == ()
