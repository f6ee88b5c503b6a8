"""NVIDIA's devices through the child, against a fake libnvidia-ml whose faults are switched on while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import gpulayer
from gpulayer.model.inventory import DeviceProcess, DeviceReading, Reading, ReadingFailed
from gpulayer.runtime.accelerators import nvml, nvml_child
from gpulayer.runtime.accelerators.nvml import NvmlChild, PciGpu, driver_is_likely, parse_answer, pci_gpus, read_once
from tests.fakes.nvml import FakeNvml, Link

WAIT_SECONDS_MAX = 20.0


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path)


def environment(fake: FakeNvml) -> dict[str, str]:
    return {**os.environ, **fake.env()}


@pytest.fixture
async def child(fake: FakeNvml) -> AsyncIterator[NvmlChild]:
    child = NvmlChild(environment=environment(fake), root=str(fake.root))
    yield child
    pid = child.pid
    await child.aclose()
    assert pid is None or is_gone(pid)


def once(fake: FakeNvml) -> Reading:
    result = read_once(WAIT_SECONDS_MAX, environment=environment(fake), root=str(fake.root))
    assert isinstance(result, Reading), result
    return result


def failed_once(fake: FakeNvml, seconds: float = WAIT_SECONDS_MAX) -> ReadingFailed:
    result = read_once(seconds, environment=environment(fake), root=str(fake.root))
    assert isinstance(result, ReadingFailed), result
    return result


async def reading(child: NvmlChild) -> Reading:
    result = await child.read()
    assert isinstance(result, Reading), result
    return result


async def failure(child: NvmlChild) -> ReadingFailed:
    result = await child.read()
    assert isinstance(result, ReadingFailed), result
    return result


async def reading_at_last(child: NvmlChild, wanted: Callable[[Reading], bool] = lambda _: True) -> Reading:
    result = None
    with trio.move_on_after(WAIT_SECONDS_MAX):
        while True:
            result = await child.read()
            if isinstance(result, Reading) and wanted(result):
                return result
            await trio.sleep(0.05)
    raise AssertionError(f"no such reading in {WAIT_SECONDS_MAX:g} s; the last: {result}")


def state_of(pid: int) -> str:
    """As /proc says: R, S, D, Z, …; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def wait_until(predicate: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not predicate():
        assert time.monotonic() < deadline, f"not in {WAIT_SECONDS_MAX:g} s: {what}"
        time.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def healthy(devices: tuple[DeviceReading, ...]) -> list[int]:
    return [device.index for device in devices if device.uuid and not device.problems]


# --- what it tells ------------------------------------------------------------------------------------------------


def test_a_gpu_is_told_with_all_that_the_driver_knows(fake: FakeNvml) -> None:
    fake.processes(0, {4711: 20480, 4712: None})
    fake.pci_device("0000:01:00.0", numa_node=1)
    result = once(fake)
    assert (result.driver_version, result.cuda_version, result.notes) == ("550.54.15", "12.4", ())
    assert result.devices[0] == DeviceReading(
        index=0,
        uuid=fake.uuids[0],
        model="NVIDIA H100 80GB HBM3",
        memory_mib=81559,
        compute_capability="9.0",
        pci_bus_id="0000:01:00.0",
        numa_node=1,
        processes=(DeviceProcess(pid=4711, memory_mib=20480), DeviceProcess(pid=4712)),
        process_count=2,
    )
    assert result.devices[1].uuid == fake.uuids[1]
    assert result.devices[1].numa_node is None


def test_a_driver_without_gpus_is_a_reading_without_devices(tmp_path: Path) -> None:
    assert once(FakeNvml(tmp_path, gpus=0)).devices == ()


def test_a_numa_node_of_minus_one_is_none(fake: FakeNvml) -> None:
    fake.pci_device("0000:01:00.0", numa_node=-1)
    assert once(fake).devices[0].numa_node is None


def test_linked_gpus_are_peers_of_one_another(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=4)
    fake.link(0, 1)
    fake.link(0, 1)
    fake.gpus[2].links.append(Link(to=fake.gpus[3].pci, is_active=False))
    fake.gpus[2].links.append(Link(to="00000000:FF:00.0"))
    fake.write()
    first, second, third, fourth = once(fake).devices
    assert (first.nvlink_peers, second.nvlink_peers) == ((second.uuid,), (first.uuid,))
    assert third.nvlink_peers == fourth.nvlink_peers == ()


def test_gpus_on_a_switch_are_peers_of_one_another(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=4)
    fake.link_to_switch(0, 1, 3)
    first, second, third, fourth = once(fake).devices
    assert first.nvlink_peers == tuple(sorted((second.uuid, fourth.uuid)))
    assert third.nvlink_peers == ()


def test_a_process_that_computes_and_draws_is_told_once(fake: FakeNvml) -> None:
    fake.gpus[0].mps = {11: 300}
    fake.processes(0, {10: 100, 11: 200}, graphics={10: 150})
    device = once(fake).devices[0]
    assert device.processes == (DeviceProcess(pid=10, memory_mib=150), DeviceProcess(pid=11, memory_mib=300))
    assert device.process_count == 2


def test_an_idle_display_is_no_process_and_a_busy_one_is(fake: FakeNvml) -> None:
    fake.processes(0, {12: 1}, graphics={10: nvml_child.DRAWING_MIB_IGNORED, 11: 400, 13: None})
    device = once(fake).devices[0]
    assert {process.pid for process in device.processes or ()} == {11, 12, 13}
    assert device.process_count == 3


def test_a_split_gpu_is_told_with_its_instances(fake: FakeNvml) -> None:
    instances = fake.split(0, 2, memory_mib=9856)
    instances[1].compute = {4711: 512}
    fake.write()
    gpu, first, second, other = once(fake).devices
    assert (gpu.uuid, gpu.is_split, gpu.parent) == (fake.uuids[0], True, "")
    assert (first.uuid, first.parent, first.index, first.is_split) == (instances[0].uuid, gpu.uuid, 0, False)
    assert (first.model, first.memory_mib) == ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9856)
    assert (first.compute_capability, first.pci_bus_id) == ("9.0", gpu.pci_bus_id)
    assert (first.processes, second.processes) == ((), (DeviceProcess(pid=4711, memory_mib=512),))
    assert not other.is_split


def test_an_instance_is_named_by_its_slices_where_the_driver_does_not(fake: FakeNvml) -> None:
    (instance,) = fake.split(0, 1, slices=2, memory_mib=20096)
    instance.model = fake.gpus[0].model
    fake.write()
    assert once(fake).devices[1].model == "NVIDIA H100 80GB HBM3 MIG 2g.20gb"


def test_a_split_gpu_without_instances_is_told_as_split(fake: FakeNvml) -> None:
    fake.split(0, 0)
    assert [device.is_split for device in once(fake).devices] == [True, False]


async def test_instances_come_and_go_while_it_is_read(fake: FakeNvml, child: NvmlChild) -> None:
    assert len((await reading(child)).devices) == 2
    fake.split(1, 3)
    assert len((await reading(child)).devices) == 5
    fake.join(1)
    assert [device.is_split for device in (await reading(child)).devices] == [False, False]


def test_an_old_driver_tells_what_it_can(tmp_path: Path) -> None:
    """It has no MIG, no remapped rows, and fills processes in by an older layout."""
    fake = FakeNvml(tmp_path, variant="old")
    fake.link(0, 1)
    fake.processes(0, {4711: 1000, 4712: 2000})
    result = once(fake)
    assert result.devices[0].processes == (
        DeviceProcess(pid=4711, memory_mib=1000),
        DeviceProcess(pid=4712, memory_mib=2000),
    )
    assert result.devices[0].nvlink_peers == (fake.uuids[1],)
    assert result.notes == ()
    assert healthy(result.devices) == [0, 1]


@pytest.mark.parametrize(
    ("functions", "what"),
    [
        (("nvmlDeviceGetMemoryInfo",), {"memory_mib": 0}),
        (("nvmlDeviceGetName",), {"model": ""}),
        (("nvmlDeviceGetPciInfo_v3",), {"pci_bus_id": ""}),
        (("nvmlDeviceGetCudaComputeCapability",), {"compute_capability": ""}),
        (("nvmlDeviceGetComputeRunningProcesses_v3",), {"processes": None}),
        (("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetMigMode"), {}),
    ],
)
@pytest.mark.parametrize("error", [13, 3, 4], ids=["function not found", "not supported", "no permission"])
def test_what_a_driver_cannot_tell_is_left_out(
    fake: FakeNvml, functions: tuple[str, ...], what: dict[str, Any], error: int
) -> None:
    for function in functions:
        fake.on(function, "error", error)
    result = once(fake)
    assert healthy(result.devices) == [0, 1]
    for name, value in what.items():
        assert getattr(result.devices[0], name) == value


def test_memory_that_is_not_told_is_a_note(fake: FakeNvml) -> None:
    fake.on("nvmlDeviceGetMemoryInfo", "error", 3, gpu=1)
    assert once(fake).notes == ("the driver does not tell how much memory GPU 1 has",)


def test_a_gpu_that_this_container_may_not_use_is_left_out_with_a_note(fake: FakeNvml) -> None:
    fake.fell_off(0, "no_permission")
    result = once(fake)
    assert [device.uuid for device in result.devices] == [fake.uuids[1]]
    assert result.notes == ("GPU 0 is not for this user or container: no permission to talk to it",)


# --- devices that are not well ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("go_bad", "words"),
    [
        (lambda fake: fake.fault(2, "lost"), "lost"),
        (lambda fake: fake.fault(2, "reset_required"), "has to be reset"),
        (lambda fake: fake.fault(2, "unknown"), "Unknown Error"),
        (lambda fake: fake.fault(2, 77), "fake error 77"),
        (lambda fake: fake.fell_off(2), "does not give access"),
        (lambda fake: fake.fell_off(2, "lost"), "fell off the bus"),
        (lambda fake: fake.ecc_errors(2, 3), "3 uncorrected ECC errors"),
        (lambda fake: fake.on("nvmlDeviceGetRemappedRows", "error", 999, gpu=2), "Unknown Error"),
    ],
    ids=["lost", "reset required", "unknown", "unheard of", "no handle", "lost handle", "ecc", "one question"],
)
async def test_one_bad_device_of_four_leaves_the_others_alone(
    tmp_path: Path, go_bad: Callable[[FakeNvml], None], words: str
) -> None:
    """Also a GPU that cannot say who it is any more is told by its UUID, so that it is known which one is bad."""
    fake = FakeNvml(tmp_path, gpus=4)
    child = NvmlChild(environment=environment(fake))
    try:
        before = await reading(child)
        go_bad(fake)
        bad = await reading(child)
        assert [device.uuid for device in bad.devices] == fake.uuids
        assert healthy(bad.devices) == [0, 1, 3]
        assert words in "; ".join(bad.devices[2].problems)
        assert len(bad.devices[2].problems) == 1
        assert bad.devices[2].model == before.devices[2].model
        fake.relent()
        fake.well(2)
        assert await reading(child) == before
    finally:
        await child.aclose()


@pytest.mark.parametrize(
    ("remapped", "words"),
    [((1, 1, True, False), "are to be remapped"), ((1, 1, False, True), "could not be remapped")],
)
def test_rows_that_wait_for_a_remapping_are_a_problem(
    fake: FakeNvml, remapped: tuple[int, int, bool, bool], words: str
) -> None:
    fake.gpus[0].remapped = remapped
    fake.gpus[1].remapped = (5, 2, False, False)  # done, and of no consequence
    fake.write()
    devices = once(fake).devices
    assert words in devices[0].problems[0]
    assert not devices[1].problems


def test_pages_that_wait_to_be_retired_are_a_problem(fake: FakeNvml) -> None:
    fake.gpus[0].retired_pending, fake.gpus[1].retired_pending = True, False
    fake.write()
    devices = once(fake).devices
    assert "to be retired" in devices[0].problems[0]
    assert not devices[1].problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": 0}, "0 bytes of memory"),
        ({"memory_bytes": 2**44 + 1}, f"{2**44 + 1} bytes"),
        ({"model": "\\xff\\xfe"}, "name is not text"),
        ({"model": "H100\\x07"}, "name 'H100?' is none"),
        ({"model": ""}, "name '' is none"),
        ({"uuid": "GPU,1"}, "UUID 'GPU,1' is none"),
        ({"uuid": ""}, "UUID '' is none"),
        ({"uuid": "\\xff"}, "UUID is not text"),
        ({"uuid": "G" * 90 + "\\x01"}, "is none"),
    ],
)
def test_an_answer_that_cannot_be_true_is_a_problem_of_that_device(
    fake: FakeNvml, change: dict[str, Any], words: str
) -> None:
    for name, value in change.items():
        setattr(fake.gpus[0], name, value)
    fake.write()
    devices = once(fake).devices
    assert healthy(devices) == [1]
    assert words in devices[0].problems[0]
    assert "uuid" not in change or devices[0].uuid == ""


def test_a_place_on_the_bus_that_is_none_is_left_out(fake: FakeNvml) -> None:
    fake.gpus[0].pci, fake.gpus[1].pci = "no\\xffwhere", "nowhere"
    fake.write()
    devices = once(fake).devices
    assert [device.pci_bus_id for device in devices] == ["", ""]
    assert healthy(devices) == [0, 1]


def test_versions_that_are_none_are_notes(fake: FakeNvml) -> None:
    fake.driver, fake.cuda = "\\xff", -1
    fake.write()
    result = once(fake)
    assert (result.driver_version, result.cuda_version) == ("", "")
    assert len(result.notes) == 2
    assert healthy(result.devices) == [0, 1]


def test_two_gpus_with_one_uuid_are_both_unwell(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=3)
    fake.gpus[2].uuid = fake.gpus[0].uuid
    fake.write()
    first, second, third = once(fake).devices
    words = f"GPU 0 and GPU 2 both say that they are {fake.uuids[0]}"
    assert (first.uuid, first.problems) == (fake.uuids[0], (words,))
    assert (third.uuid, third.problems) == ("", (words,))
    assert not second.problems


async def test_what_is_wrong_with_a_split_gpu_is_wrong_with_its_instances(fake: FakeNvml, child: NvmlChild) -> None:
    fake.split(0, 2)
    before = [device.uuid for device in (await reading(child)).devices]
    fake.ecc_errors(0, 1)
    assert healthy((await reading(child)).devices) == [1]
    fake.fell_off(0)
    for _ in range(3):
        lost = (await reading(child)).devices
        assert [device.uuid for device in lost] == before
        assert healthy(lost) == [1]
        assert [len(device.problems) for device in lost] == [1, 1, 1, 0]
        assert lost[1].processes is None
    fake.well(0)
    assert healthy((await reading(child)).devices) == [0, 0, 0, 1]


def test_a_sick_instance_leaves_its_neighbours_alone(fake: FakeNvml) -> None:
    fake.split(0, 2)[0].fault = 999
    fake.write()
    gpu, first, second, _ = once(fake).devices
    assert first.problems
    assert not gpu.problems
    assert not second.problems


def test_more_devices_than_any_host_has_are_cut_with_a_note(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=nvml_child.DEVICES_MAX + 100)
    result = once(fake)
    assert len(result.devices) == nvml_child.DEVICES_MAX
    assert result.notes == (
        f"the driver claims {nvml_child.DEVICES_MAX + 100} GPUs; only the first 1024 are looked at",
    )


def test_more_instances_than_a_gpu_can_have_are_not_followed(fake: FakeNvml) -> None:
    fake.split(0, nvml_child.INSTANCES_MAX + 20)
    assert len(once(fake).devices) == 2 + nvml_child.INSTANCES_MAX


async def test_a_million_processes_are_counted_and_not_followed(fake: FakeNvml, child: NvmlChild) -> None:
    fake.processes(0, {4711: 20480})
    await reading(child)
    assert child.pid is not None
    memory_before_kib = peak_kib(child.pid)
    fake.flood(0, 1_000_000)
    fake.flood(1, 100)
    began = time.monotonic()
    crowded, other = (await reading(child)).devices
    assert time.monotonic() - began < 2
    assert crowded.process_count == 1_000_001
    assert crowded.processes is not None
    assert len(crowded.processes) == nvml_child.PROCESSES_MAX
    assert crowded.processes[0] == DeviceProcess(pid=4711, memory_mib=20480)
    assert (other.process_count, len(other.processes or ())) == (100, 100)
    assert peak_kib(child.pid) - memory_before_kib < 16 * 1024


def peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_a_million_processes_on_every_gpu_make_an_answer_of_bounded_size(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=20)
    for gpu in fake.gpus:
        gpu.flood = 1_000_000
    fake.write()
    devices = once(fake).devices
    assert {device.process_count for device in devices} == {1_000_000}
    assert sum(len(device.processes or ()) for device in devices) == nvml_child.PROCESSES_LISTED_MAX


async def test_eight_gpus_are_read_within_milliseconds_of_cpu(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=8)
    fake.link_to_switch(*range(8))
    child = NvmlChild(environment=environment(fake))
    try:
        await reading(child)
        assert child.pid is not None
        before = cpu_seconds(child.pid)
        for _ in range(50):
            await reading(child)
        # Once a second is a fiftieth of this: 5 ms are half a percent of a core.
        assert cpu_seconds(child.pid) - before < 50 * 0.005
    finally:
        await child.aclose()


# --- drivers that are not well ------------------------------------------------------------------------------------


def test_no_library_is_no_driver(tmp_path: Path) -> None:
    failed = failed_once(FakeNvml(tmp_path, is_there=False))
    assert failed.code == "no_driver"
    assert "libnvidia-ml.so.1" in failed.text


def test_a_library_that_cannot_be_loaded_is_not_a_missing_one(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, is_there=False)
    fake.library.write_bytes(b"\x7fELF, or so it says")
    failed = failed_once(fake)
    assert failed.code == "failed"
    assert "cannot be loaded" in failed.text


@pytest.mark.parametrize(
    ("error", "text", "hint"),
    [
        ("driver_not_loaded", "Driver Not Loaded", "modprobe nvidia"),
        ("version_mismatch", "mismatch", "reboot"),
        ("no_permission", "Permissions", "/dev/nvidiactl"),
        ("unknown", "Unknown Error", "nvidia-smi"),
        (4242, "fake error 4242", "nvidia-smi"),
    ],
)
def test_a_driver_that_fails_is_told_with_what_to_do(fake: FakeNvml, error: str | int, text: str, hint: str) -> None:
    fake.init_fails(error)
    failed = failed_once(fake)
    assert failed.code == "failed"
    assert text in failed.text
    assert hint in failed.hint


@pytest.mark.parametrize("function", ["nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"])
async def test_a_library_that_fails_later_is_initialised_again(fake: FakeNvml, child: NvmlChild, function: str) -> None:
    before = await reading(child)
    fake.on(function, "error", 999)
    assert (await failure(child)).code == "failed"
    fake.relent()
    assert await reading(child) == before


async def test_a_driver_that_comes_up_late_is_read_by_the_same_child(fake: FakeNvml, child: NvmlChild) -> None:
    fake.init_fails("driver_not_loaded")
    assert (await failure(child)).code == "failed"
    pid = child.pid
    fake.init_fails(0)
    assert len((await reading(child)).devices) == 2
    assert child.pid == pid


async def test_a_child_without_success_is_replaced_from_time_to_time(
    fake: FakeNvml, child: NvmlChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has loaded it keeps: after an upgrade that would be the old library for ever."""
    fake.init_fails("version_mismatch")
    await failure(child)
    pid = child.pid
    assert pid is not None
    monkeypatch.setattr(nvml, "FIRST_READING_SECONDS_MAX", 0.0)
    assert "mismatch" in (await failure(child)).text
    assert is_gone(pid)
    fake.init_fails(0)
    await reading(child)


async def test_a_driver_that_is_installed_late_is_found(fake: FakeNvml, child: NvmlChild) -> None:
    fake.remove()
    assert (await failure(child)).code == "no_driver"
    assert child.pid is None, "a host without a driver keeps no child"
    fake.appear()
    await reading_at_last(child)


async def test_a_gpu_that_the_kernel_takes_up_later_is_found(fake: FakeNvml, child: NvmlChild) -> None:
    """NVML lists what there was when it was initialised."""
    fake.is_frozen = True
    fake.driver_lists("0000:01:00.0", "0000:02:00.0")
    fake.write()
    assert len((await reading(child)).devices) == 2
    fake.add()
    assert len((await reading(child)).devices) == 2
    fake.driver_lists("0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
    assert len((await reading(child)).devices) == 3


def test_a_driver_that_hangs_is_left_in_time(fake: FakeNvml) -> None:
    fake.hang("nvmlDeviceGetMemoryInfo")
    began = time.monotonic()
    failed = failed_once(fake, seconds=1.0)
    assert time.monotonic() - began < 4
    assert failed.code == "hangs"
    assert "1 s" in failed.text
    assert "nvidia-persistenced" in failed.hint


async def test_a_child_that_hangs_is_killed_and_another_asked(
    fake: FakeNvml, child: NvmlChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "READ_SECONDS_MAX", 0.5)
    await reading(child)
    pid = child.pid
    assert pid is not None
    fake.hang("nvmlDeviceGetCount_v2")
    failed = await failure(child)
    assert failed.code == "hangs"
    assert is_gone(pid)
    fake.relent()
    await reading_at_last(child)
    assert child.pid != pid


async def test_the_first_reading_may_take_longer(
    fake: FakeNvml, child: NvmlChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sleeping GPUs take more than three seconds to wake; a child killed for that would never finish."""
    monkeypatch.setattr(nvml, "READ_SECONDS_MAX", 0.3)
    fake.hang("nvmlInitWithFlags")
    assert (await failure(child)).code == "hangs"
    pid = child.pid
    assert (await failure(child)).code == "hangs"
    fake.relent()
    await reading_at_last(child)
    assert child.pid == pid


async def test_the_patience_with_a_first_reading_ends(
    fake: FakeNvml, child: NvmlChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "READ_SECONDS_MAX", 0.3)
    monkeypatch.setattr(nvml, "FIRST_READING_SECONDS_MAX", 0.1)
    fake.hang("nvmlInitWithFlags")
    assert (await failure(child)).code == "hangs"
    assert child.pid is None


@pytest.mark.parametrize(
    ("action", "value", "words"),
    [("crash", 0, "SIGSEGV"), ("abort", 0, "SIGABRT"), ("exit", 3, "status 3"), ("exit", 0, "status 0")],
)
async def test_a_library_that_crashes_takes_only_the_child_along(
    fake: FakeNvml, child: NvmlChild, action: Any, value: int, words: str
) -> None:
    await reading(child)
    fake.on("nvmlDeviceGetMemoryInfo", action, value)
    failed = await failure(child)
    assert failed.code == "crashed"
    assert words in failed.text
    assert child.pid is None
    fake.relent()
    await reading_at_last(child)


def test_the_last_words_of_a_child_are_told(fake: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('it is\\tdamaged')\n")
    # A PYTHONPATH is the child's, too, where gpulayer itself is found by it.
    path = f"{tmp_path}{os.pathsep}{Path(gpulayer.__file__).parent.parent}"
    failed = read_once(WAIT_SECONDS_MAX, environment={**environment(fake), "PYTHONPATH": path})
    assert isinstance(failed, ReadingFailed)
    assert failed.code == "crashed"
    assert failed.text.endswith("ended with status 1: ImportError: it is?damaged")


async def test_a_crash_loop_costs_no_process_while_it_waits(fake: FakeNvml, child: NvmlChild) -> None:
    fake.crash("nvmlDeviceGetMemoryInfo")
    failed = await failure(child)
    for _ in range(20):
        assert await failure(child) is failed, "the same, not another like it"
        assert child.pid is None
    fake.relent()
    await reading_at_last(child)


async def test_a_child_that_was_killed_is_replaced(fake: FakeNvml, child: NvmlChild) -> None:
    await reading(child)
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    failed = await failure(child)
    assert (failed.code, "SIGKILL" in failed.text) == ("crashed", True)
    await reading_at_last(child)


@pytest.mark.parametrize("answer", ["hello \\xff\\x00there", "999 {}", "1 {}", "1 [1]", "-1 {}", " ", "x" * 200])
async def test_nonsense_from_the_child_is_garbage(fake: FakeNvml, child: NvmlChild, answer: str) -> None:
    fake.answered = answer
    fake.write()
    failed = await failure(child)
    assert failed.code == "garbage"
    assert failed.text.isprintable()
    assert child.pid is None
    fake.answered = ""
    fake.write()
    await reading_at_last(child)


async def test_a_library_that_prints_does_no_harm(fake: FakeNvml, child: NvmlChild) -> None:
    fake.printed = "NVRM: hello"
    fake.write()
    for _ in range(3):
        assert len((await reading(child)).devices) == 2


async def test_a_library_that_prints_without_end_blocks_nobody(fake: FakeNvml, child: NvmlChild) -> None:
    fake.printed = "x" * 200
    fake.write()
    for _ in range(1000):  # three times what a pipe holds
        await reading(child)


def test_a_process_that_cannot_be_started_is_a_failure_with_its_reason(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    failed = failed_once(fake)
    assert failed.code == "failed"
    assert "No such file" in failed.text


# --- the child as a process ---------------------------------------------------------------------------------------


async def test_a_cancelled_read_leaves_no_answer_for_the_next(fake: FakeNvml, child: NvmlChild) -> None:
    await reading(child)
    pid = child.pid
    fake.on("nvmlDeviceGetCount_v2", "delay", 300)
    for _ in range(3):
        with trio.move_on_after(0.05) as cancelled:
            await child.read()
        assert cancelled.cancelled_caught
    fake.gpus.pop()
    fake.relent()
    assert len((await reading(child)).devices) == 1
    assert child.pid == pid


async def test_readings_that_are_always_cancelled_pile_nothing_up(fake: FakeNvml, child: NvmlChild) -> None:
    await reading(child)
    fake.hang("nvmlDeviceGetCount_v2")
    for _ in range(20_000):  # more than the pipe has room for
        with trio.CancelScope() as scope:
            scope.cancel()
            await child.read()
    fake.relent()
    await reading_at_last(child)


async def test_a_child_has_nothing_of_the_daemons_secrets(fake: FakeNvml) -> None:
    secrets = {"GPULAYER_TOKEN": "t0ken", "NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "1", "GPULAYER_RUN_ID": "r"}
    child = NvmlChild(environment={**environment(fake), **secrets})
    try:
        await reading(child)
        environ = environment_of(child.pid)
        assert b"FAKE_NVML_STATE=" in environ
        assert not [name for name in secrets if name.encode() in environ]
    finally:
        await child.aclose()


def environment_of(pid: int | None) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_the_childs_pipes_are_inherited_by_nobody(child: NvmlChild) -> None:
    before = open_files()
    await reading(child)
    mine = [target for target in open_files() if target not in before]
    assert len(mine) == 3
    others = files_of_a_careless_process()
    assert not [target for target in mine if target in others]
    await child.aclose()
    assert open_files() == before


def files_of_a_careless_process() -> str:
    """One that was started without closing what it inherits."""
    words = ["ls", "-l", "/proc/self/fd"]
    return subprocess.run(words, close_fds=False, capture_output=True, text=True, check=True, timeout=10).stdout


def open_files() -> list[str]:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # that of the listing itself
    return sorted(target for target in targets if target.startswith("pipe:"))


def test_reading_once_leaves_nothing_behind(fake: FakeNvml) -> None:
    files, processes = open_files(), children()
    once(fake)
    fake.crash("nvmlDeviceGetMemoryInfo")
    failed_once(fake)
    assert open_files() == files
    assert children() == processes


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


PARENT = """
import sys, trio
from gpulayer.runtime.accelerators.nvml import NvmlChild

async def main():
    child = NvmlChild()
    await child.read()
    print(child.pid, flush=True)
    while True:
        await child.read()
        await trio.sleep(0.01)

trio.run(main)
"""


@pytest.mark.parametrize("does_hang", [False, True], ids=["well", "hanging"])
def test_a_daemon_that_is_killed_leaves_no_child(fake: FakeNvml, does_hang: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment(fake), text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if does_hang:
            fake.hang("nvmlDeviceGetCount_v2")
            time.sleep(0.2)
        assert not is_gone(pid)
        parent.kill()
        parent.wait(10)
        wait_until(lambda: is_gone(pid), f"the child {pid} is gone")
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()


def test_a_command_that_reads_once_needs_no_event_loop(fake: FakeNvml) -> None:
    program = (
        "import sys; from gpulayer.runtime.accelerators import nvml; result = nvml.read_once();"
        "print(len(result.devices), 'trio' in sys.modules, 'pynvml' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(fake), capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["2", "False", "False"]


class Freezer:
    """Makes of processes what a driver's bug makes of them: alive, whatever signal comes."""

    def __init__(self) -> None:
        self._directory = Path(f"/sys/fs/cgroup/freezer/gpulayer-test-{os.getpid()}")
        try:
            self._directory.mkdir()
            self._set("FROZEN")
        except OSError:
            pytest.skip("needs root and the freezer of cgroup v1, which SIGKILL does not reach")

    def freeze(self, pid: int) -> None:
        (self._directory / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")

    def thaw(self) -> None:
        self._set("THAWED")

    def remove(self) -> None:
        self.thaw()
        wait_until(lambda: not (self._directory / "cgroup.procs").read_text(), "the frozen are gone")
        self._directory.rmdir()

    def _set(self, state: str) -> None:
        file = self._directory / "freezer.state"
        file.write_text(state)
        wait_until(lambda: file.read_text().strip() == state, f"the freezer is {state}")


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    freezer = Freezer()
    yield freezer
    freezer.remove()


async def test_children_that_cannot_be_killed_are_counted_and_no_more_than_three(
    fake: FakeNvml, freezer: Freezer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "READ_SECONDS_MAX", 0.3)
    monkeypatch.setattr(nvml, "RESTART_SECONDS_MAX", 0.0)
    child = NvmlChild(environment=environment(fake))
    stuck: list[int] = []
    try:
        for _ in range(nvml.UNKILLABLE_MAX):
            await reading_at_last(child)
            assert child.pid is not None
            stuck.append(child.pid)
            freezer.freeze(child.pid)
            assert (await failure(child)).code == "hangs"
        assert not any(is_gone(pid) for pid in stuck)
        failed = await failure(child)
        assert child.pid is None
        assert failed.code == "hangs"
        assert all(str(pid) in failed.text for pid in stuck)
        freezer.thaw()
        await reading_at_last(child)
    finally:
        await child.aclose()


# --- without a child ----------------------------------------------------------------------------------------------


def test_a_driver_is_likely_where_its_library_is(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, is_there=False)
    root = str(fake.root)
    assert not driver_is_likely(environment=fake.env(), root=root)
    fake.appear()
    assert driver_is_likely(environment=fake.env(), root=root)
    assert not driver_is_likely(environment={}, root=root)


@pytest.mark.parametrize("sign", ["proc/driver/nvidia", "dev/nvidiactl", "usr/lib64/libnvidia-ml.so.1"])
def test_a_driver_is_likely_where_a_part_of_it_is(tmp_path: Path, sign: str) -> None:
    assert not driver_is_likely(environment={}, root=str(tmp_path))
    (tmp_path / sign).mkdir(parents=True)
    assert driver_is_likely(environment={}, root=str(tmp_path))


def test_cards_on_the_bus_are_found_without_a_driver(fake: FakeNvml) -> None:
    fake.pci_device("0000:3b:00.0")
    fake.pci_device("0000:01:00.0", vendor=0x1002, kind=0x120000)
    fake.pci_device("0000:00:02.0", vendor=0x8086, kind=0x030000)
    fake.pci_device("0000:3b:00.1", kind=0x040300)  # the sound of the first
    fake.pci_device("0000:02:00.0", vendor=0x1A03, kind=0x030000)  # the console of a server's board
    (fake.root / "sys/bus/pci/devices/0000:04:00.0").mkdir()
    assert pci_gpus(root=str(fake.root)) == [
        PciGpu("intel", "0000:00:02.0"),
        PciGpu("amd", "0000:01:00.0"),
        PciGpu("nvidia", "0000:3b:00.0"),
    ]


def test_a_host_whose_bus_cannot_be_read_has_no_cards(tmp_path: Path) -> None:
    assert pci_gpus(root=str(tmp_path)) == []
    assert isinstance(pci_gpus(), list)


# --- the answer ---------------------------------------------------------------------------------------------------

DEVICE = (
    '{"index":0,"uuid":"GPU-1","model":"H100","memory_mib":81559,"compute_capability":"9.0","pci_bus_id":"0000:01:00.0",'
    '"numa_node":null,"nvlink_peers":["GPU-2"],"is_split":false,"processes":[[1,2],[3,null]],"process_count":2,'
    '"problems":[]}'
)
ANSWER = f'{{"driver_version":"550","cuda_version":"12.4","devices":[{DEVICE}],"notes":[]}}'


def test_an_answer_is_what_it_says() -> None:
    result = parse_answer(ANSWER.encode())
    assert isinstance(result, Reading)
    assert result.devices[0].processes == (DeviceProcess(pid=1, memory_mib=2), DeviceProcess(pid=3))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"550"', "550"),
        ('"550"', '"5\\u0007"'),
        ('"550"', '"\\ud800"'),
        ('"550"', '"' + "5" * 501 + '"'),
        ('"driver_version":"550",', ""),
        ('"notes":[]', '"notes":null'),
        ('"notes":[]', '"notes":[],"more":1'),
        ('"devices":[', '"devices":[7,'),
        ('"devices":[', f'"devices":[{DEVICE},'),
        ('"index":0', '"index":true'),
        ('"index":0', '"index":-1'),
        ('"index":0', '"index":0,"color":"red"'),
        ("81559", "1e400"),
        ("81559", "81559.5"),
        ("81559", "9" * 5000),
        ('"GPU-1"', '"GPU,1"'),
        ('"GPU-2"', "2"),
        ("false", "0"),
        ("[1,2]", "[1]"),
        ("[1,2]", "[1,2,3]"),
        ("[1,2]", "[null,2]"),
        ("[1,2]", '{"pid":1}'),
        ('"problems":[]', '"problems":"none"'),
        (ANSWER, "[" * 100_000),
        (ANSWER, "null"),
        (ANSWER, ""),
        (ANSWER, '{"failed":{"code":"fine","text":"","hint":""}}'),
        (ANSWER, '{"failed":{"code":"failed"}}'),
        (ANSWER, '{"failed":null}'),
    ],
)
def test_an_answer_that_is_wrong_in_one_place_is_garbage(before: str, after: str) -> None:
    assert before in ANSWER
    result = parse_answer(ANSWER.replace(before, after, 1).encode())
    assert isinstance(result, ReadingFailed)
    assert result.code == "garbage"
    assert result.text.isprintable()
    assert len(result.text) < 600


@given(st.binary() | st.recursive(st.none() | st.text(), lambda inner: st.lists(inner)).map(lambda v: repr(v).encode()))
def test_whatever_a_child_writes_is_a_reading_or_a_failure(line: bytes) -> None:
    assert isinstance(parse_answer(line), ReadingFailed)


def test_both_sides_have_the_same_bounds() -> None:
    """The child imports nothing of gpulayer, so they stand in both files."""
    assert nvml.ANSWER_BYTES_MAX == nvml_child.ANSWER_BYTES_MAX
    assert nvml.UUID == nvml_child._UUID


def test_the_modules_of_the_user_are_not_the_childs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pynvml.py in PYTHONPATH made a host with two GPUs one without."""
    nvml = FakeNvml(tmp_path)
    (tmp_path / "pynvml.py").write_text("raise SystemExit(3)")
    for name, value in nvml.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reading = read_once()
    assert isinstance(reading, Reading), reading
    assert len(reading.devices) == 2
