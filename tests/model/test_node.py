"""What a device may say of itself, and which devices exclude one another."""

from __future__ import annotations

from typing import Any

import pytest

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.node import Accelerator, excluded_by


def device(uuid: str = "GPU-0", **more: Any) -> Accelerator:
    told: dict[str, Any] = dict(uuid=uuid, kind="cuda", vendor="nvidia", model="H100", memory_mib=1024)
    return Accelerator(**(told | more))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "tpu"},
        {"uuid": ""},
        {"memory_mib": -1},
        {"foreign": "pid 7"},
        {"foreign_milli": 1},
        {"foreign": "pid 7", "foreign_milli": -1},
        {"foreign": "pid 7", "foreign_milli": 1001},
    ],
)
def test_a_device_that_contradicts_itself_is_refused_with_a_hint(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        device(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("told", "label"),
    [
        ({"uuid": "GPU-ecdd1234-5678-90ab-cdef-1234567890ab", "index": 0}, "GPU 0 (GPU-ecdd1234)"),
        ({"uuid": "MIG-ecdd1234-5678-90ab-cdef-1234567890ab", "index": 3}, "GPU 3 (MIG-ecdd1234)"),
        ({"uuid": "n-1-declared-a"}, "n-1-declared-a"),
        ({"uuid": "n-1-declared-a", "index": 1}, "GPU 1 (n-1-declared-a)"),
    ],
)
def test_a_device_is_called_by_its_number_and_the_beginning_of_its_uuid(told: dict[str, Any], label: str) -> None:
    assert device(**told).label == label


@pytest.mark.parametrize(
    ("told", "usable"),
    [
        ({}, 1000),
        ({"foreign": "pid 7", "foreign_milli": 300}, 700),
        ({"foreign": "pid 7", "foreign_milli": 1000}, 0),
        ({"unhealthy": "hot"}, 0),
        ({"unhealthy": "hot", "foreign": "pid 7", "foreign_milli": 300}, 0),
    ],
)
def test_what_may_be_handed_out_is_what_others_leave_of_a_device_that_is_well(
    told: dict[str, Any], usable: int
) -> None:
    assert device(**told).usable_milli == usable


def test_a_gpu_and_its_instances_exclude_one_another_and_instances_do_not() -> None:
    devices = [device("GPU-0"), *(device(f"MIG-{number}", parent="GPU-0") for number in (1, 2)), device("GPU-1")]
    assert excluded_by("GPU-0", devices) == {"MIG-1", "MIG-2"}
    assert excluded_by("MIG-1", devices) == {"GPU-0"}
    assert excluded_by("GPU-1", devices) == frozenset()
    assert excluded_by("MIG-1", devices[1:]) == frozenset(), "the GPU itself is not in the list"
    assert excluded_by("unknown", devices) == frozenset()


def test_no_device_excludes_itself() -> None:
    """One that claimed to be a part of itself could be shared by nobody."""
    assert excluded_by("GPU-0", [device("GPU-0", parent="GPU-0")]) == frozenset()
    pair = [device("GPU-0", parent="GPU-1"), device("GPU-1", parent="GPU-0")]
    assert excluded_by("GPU-0", pair) == {"GPU-1"}
