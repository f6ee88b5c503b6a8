"""Which devices the configuration keeps gpulayer from."""

from __future__ import annotations

import pytest

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.inventory import DeviceReading
from gpulayer.model.node import Accelerator
from gpulayer.runtime.accelerators.exclude import (
    CHARACTERS_MAX,
    ENTRIES_MAX,
    checked_exclusions,
    exclusion_of,
    is_excluded,
    unmatched_exclusions,
)

UUID = "GPU-8f2a6c1e-0b1d-4c55-9a3e-1d2f3a4b5c6d"
READING = DeviceReading(index=0, uuid=UUID, model="NVIDIA RTX A2000", pci_bus_id="00000000:3B:00.0")
DEVICE = Accelerator(
    uuid=UUID, kind="cuda", vendor="nvidia", model="NVIDIA RTX A2000", memory_mib=1, pci_bus_id="0000:3b:00.0"
)


@pytest.mark.parametrize("device", [READING, DEVICE])
@pytest.mark.parametrize(
    "pattern",
    [
        *(UUID, UUID.upper(), "GPU-8f2a6c1e*", "gpu-*-1d2f3a4b5c6d"),
        *("3b:00.0", "3B:00.0", "0000:3b:00.0", "00000000:3B:00.0", "0000:3b:*"),
        *("NVIDIA RTX A2000", "nvidia rtx a2000", "*A2000*", "*a200[0-9]", "*"),
    ],
)
def test_a_device_is_named_by_uuid_bus_or_model(device: DeviceReading | Accelerator, pattern: str) -> None:
    assert is_excluded(device, checked_exclusions([pattern]))


@pytest.mark.parametrize(
    "pattern", ["GPU-8f2a6c1e", "GPU-00000000*", "3c:00.0", "3b:00.1", "0001:3b:00.0", "A2000", "*H100*", "?"]
)
def test_a_pattern_is_about_the_whole_name(pattern: str) -> None:
    assert not is_excluded(DEVICE, checked_exclusions([pattern]))


def test_an_empty_name_is_matched_by_nothing() -> None:
    """A declared device has no bus id, and a lost one may have nothing but its number."""
    assert not is_excluded(DeviceReading(index=3), ("*", ""))


def test_a_gpu_takes_its_instances_along() -> None:
    instance = DeviceReading(index=0, uuid="MIG-1", model="MIG 1g.5gb", parent=UUID)
    assert exclusion_of(instance, ("x", UUID)) == UUID


def test_no_list_excludes_nothing() -> None:
    assert checked_exclusions([]) == ()
    assert not is_excluded(DEVICE, ())


def test_entries_are_kept_once_and_in_their_order() -> None:
    assert checked_exclusions(["b*", " a* ", "b*"]) == ("b*", "a*")


@pytest.mark.parametrize("entry", [0, 7, "0", " 12 "])
def test_an_index_is_refused_because_it_changes(entry: object) -> None:
    with pytest.raises(InvalidRequest, match="after a reboot") as refused:
        checked_exclusions([UUID, entry])
    assert "resources detect" in refused.value.hint


@pytest.mark.parametrize("entry", ["", "  ", "a\nb", "x" * (CHARACTERS_MAX + 1), 1.5, True, None, ["GPU-1"], {}])
def test_what_names_no_device_is_refused_with_an_example(entry: object) -> None:
    with pytest.raises(InvalidRequest, match=r"devices\.exclude: .* names no device") as refused:
        checked_exclusions([entry])
    assert "GPU-" in refused.value.hint


@pytest.mark.parametrize("value", ["GPU-1", 0, None, {"uuid": "GPU-1"}])
def test_what_is_no_list_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="is not a list"):
        checked_exclusions(value)


def test_a_list_that_is_longer_than_any_host_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"{ENTRIES_MAX} at most"):
        checked_exclusions(["x"] * (ENTRIES_MAX + 1))


def test_patterns_about_no_device_are_known() -> None:
    assert unmatched_exclusions([DEVICE], ("*A2000*", "*H100*", "GPU-1")) == ("*H100*", "GPU-1")
