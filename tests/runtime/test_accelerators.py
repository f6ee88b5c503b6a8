"""Devices that the configuration declares."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import NodeId
from gpulayer.runtime.accelerators.declared import declared_accelerators

NODE = NodeId("n-0123456789abcdef")
H100 = {"kind": "cuda", "model": "H100", "memory": "80GiB"}


def test_a_device_is_declared_with_its_own_uuid() -> None:
    (device,) = declared_accelerators([{**H100, "uuid": "GPU-1"}], node_id=NODE)
    assert (device.uuid, device.kind, device.vendor, device.model, device.memory_mib) == (
        "GPU-1",
        "cuda",
        "nvidia",
        "H100",
        80 * 1024,
    )
    assert device.source == "declared"


def test_count_makes_numbered_devices() -> None:
    devices = declared_accelerators([{**H100, "uuid": "GPU-1", "count": 3}], node_id=NODE)
    assert [device.uuid for device in devices] == ["GPU-1-0", "GPU-1-1", "GPU-1-2"]


def test_a_made_up_uuid_is_the_same_each_time_and_another_on_another_node() -> None:
    entries: list[Mapping[str, object]] = [
        H100,
        {**H100, "count": 2},
        {"kind": "rocm", "model": "MI300X", "memory": "192GiB"},
    ]
    devices = declared_accelerators(entries, node_id=NODE)
    assert devices == declared_accelerators(entries, node_id=NODE)
    assert len({device.uuid for device in devices}) == 4
    elsewhere = declared_accelerators(entries, node_id=NodeId("n-fedcba9876543210"))
    assert not {device.uuid for device in devices} & {device.uuid for device in elsewhere}


def test_a_duplicate_names_both_entries() -> None:
    with pytest.raises(InvalidRequest, match=r"entry 2 declares 'GPU-1', and so does entry 1"):
        declared_accelerators([{**H100, "uuid": "GPU-1"}, {**H100, "uuid": "GPU-1"}], node_id=NODE)
    with pytest.raises(InvalidRequest, match=r"'GPU-1-0'"):
        declared_accelerators([{**H100, "uuid": "GPU-1", "count": 2}, {**H100, "uuid": "GPU-1-0"}], node_id=NODE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "cude"}, "cude"),
        ({"kind": None}, "kind is missing"),
        ({"memory": "80"}, "memory"),
        ({"memory": 80}, "memory is 80"),
        ({"model": ""}, "model"),
        ({"count": 0}, "count 0"),
        ({"count": 5000}, "count 5000"),
        ({"count": True}, "count True"),
        ({"count": "2"}, "count '2'"),
        ({"uuid": "a,b"}, "a,b"),
        ({"memry": "1GiB"}, "'memry' is unknown"),
    ],
)
def test_nonsense_is_refused_with_the_entry_and_the_key(change: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        declared_accelerators([H100, {**H100, **change}], node_id=NODE)
    assert named in refused.value.message
    assert "entry 2" in refused.value.message
    assert refused.value.hint
