"""What a node says of its devices, from what the driver says of them: never a crash, never a silent zero."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpulayer.core.inventory import (
    GOOD_READINGS_NEEDED,
    PROCESSES_NAMED,
    DevicesRead,
    Elsewhere,
    ElsewhereSeen,
    Inventory,
    InventoryEvent,
    LockTrouble,
    NotConfirmed,
    SeenProcess,
)
from gpulayer.model.inventory import CONFIRM_SECONDS, DeviceProcess, DeviceReading, Reading, ReadingFailed
from gpulayer.model.node import Accelerator, Capabilities
from gpulayer.model.units import Instant
from gpulayer.wire.codec import decode, encode

GIB = 1024
NO_DRIVER = ReadingFailed(code="no_driver", text="there is no libnvidia-ml.so.1", hint="install the driver")
HANGS = ReadingFailed(code="hangs", text="the driver has not answered within 3 s")
LOST = "GPU is lost"
BOB = SeenProcess(kind="foreign", name="python of user bob")
OURS = SeenProcess(kind="managed", name="python of user ann")
GONE = SeenProcess(kind="gone")


def gpu(number: int, **more: Any) -> DeviceReading:
    """`GPU-<number>`, idle and well."""
    told: dict[str, Any] = dict(
        index=number,
        uuid=f"GPU-{number}",
        model="NVIDIA H100",
        memory_mib=80 * GIB,
        pci_bus_id=f"0000:{number:02x}:00.0",
        processes=(),
    )
    return DeviceReading(**(told | more))


def instance(number: int, of: int = 0, **more: Any) -> DeviceReading:
    """`MIG-<number>`, of the GPU with that index."""
    told: dict[str, Any] = dict(
        uuid=f"MIG-{number}", model="NVIDIA H100 MIG 1g.10gb", memory_mib=10 * GIB, parent=f"GPU-{of}"
    )
    return gpu(of, **(told | more))


def lost(index: int, *problems: str, **more: Any) -> DeviceReading:
    """So lost that it does not even tell its UUID."""
    return DeviceReading(index=index, problems=problems or (LOST,), **more)


def process(pid: int, gib: float | None = 20) -> DeviceProcess:
    return DeviceProcess(pid=pid, memory_mib=round(gib * GIB) if gib is not None else None)


def with_processes(index: int, *listed: DeviceProcess, **more: Any) -> DeviceReading:
    return gpu(index, **({"processes": listed, "process_count": len(listed)} | more))


def read_once(reading: Reading) -> Inventory:
    """What one reading says by itself, without a history."""
    inventory = Inventory()
    inventory.step(DevicesRead(result=reading), Instant(0.0))
    return inventory


def known(index: int, **more: Any) -> Accelerator:
    """As the log has it from an earlier daemon."""
    return replace(read_once(Reading(devices=(gpu(index),))).accelerators[0], **more)


def declared(uuid: str) -> Accelerator:
    return Accelerator(uuid=uuid, kind="cuda", vendor="nvidia", model="Declared", memory_mib=24 * GIB)


class Host:
    """An inventory that is read once a second."""

    def __init__(self, *first: DeviceReading, **made: Any) -> None:
        self.inventory = Inventory(**made)
        self.now = 1000.0
        self.held: frozenset[str] = frozenset()
        self.processes: dict[int, SeenProcess] = {}
        if first:
            self.read(*first)

    def read(self, *devices: DeviceReading, times: int = 1, **more: Any) -> None:
        for _ in range(times):
            self.hear(
                DevicesRead(result=Reading(devices=devices, **more), processes=self.processes, held=self.held),
                later=1.0,
            )

    def fail(self, failure: ReadingFailed = HANGS, *evidence: str) -> None:
        self.hear(DevicesRead(result=failure, held=self.held, evidence=evidence), later=1.0)

    def hear(self, event: InventoryEvent, *, later: float = 0.0) -> None:
        self.now += later
        self.inventory.step(event, Instant(self.now))

    @property
    def uuids(self) -> list[str]:
        return [device.uuid for device in self.inventory.accelerators]

    @property
    def unhealthy(self) -> dict[str, str]:
        """Of those that are not well, why."""
        return {device.uuid: device.unhealthy for device in self.inventory.accelerators if device.unhealthy}

    @property
    def foreign(self) -> dict[str, tuple[str, int]]:
        return {
            device.uuid: (device.foreign, device.foreign_milli)
            for device in self.inventory.accelerators
            if device.foreign
        }


# --- what is there ------------------------------------------------------------------------------------------------


def test_a_new_device_that_is_well_can_be_used_at_once() -> None:
    host = Host()
    host.read(gpu(0, compute_capability="9.0", nvlink_peers=("GPU-2", "GPU-1"), numa_node=1), driver_version="550.1")
    (device,) = host.inventory.accelerators
    assert (device.uuid, device.kind, device.vendor, device.source) == ("GPU-0", "cuda", "nvidia", "nvml")
    assert (device.memory_mib, device.compute_capability, device.numa_node) == (80 * GIB, "9.0", 1)
    assert device.nvlink_peers == ("GPU-1", "GPU-2")
    assert device.usable_milli == 1000
    assert host.inventory.gpu_detect == "ok"
    assert host.inventory.drivers == (("nvidia", "550.1"),)
    assert host.inventory.undetected == ()


def test_the_order_is_the_drivers_then_what_is_declared() -> None:
    host = Host(gpu(2), gpu(0), gpu(1), declared=[declared("A")])
    assert host.uuids == ["GPU-0", "GPU-1", "GPU-2", "A"]


def test_one_reading_alone_can_be_judged_by_whoever_has_no_history() -> None:
    found = read_once(Reading(devices=(gpu(0), gpu(1, problems=("ECC errors",)))))
    assert [device.unhealthy for device in found.accelerators] == ["", "ECC errors"]


def test_a_device_unknown_to_everyone_is_none() -> None:
    host = Host(gpu(0))
    assert host.inventory.device("GPU-9") is None
    assert host.inventory.users_of("GPU-9") == ""
    assert host.inventory.gone_on("GPU-9") is None
    assert not host.inventory.can_tell("GPU-9")


# --- well and unwell ----------------------------------------------------------------------------------------------


def test_a_bad_device_is_unhealthy_at_once_and_leaves_the_others_alone() -> None:
    """One dead GPU made all of the host unusable."""
    host = Host(gpu(0), gpu(1), gpu(2))
    host.read(gpu(0), gpu(1, problems=("uncorrectable ECC errors", "2 pages to retire")), gpu(2))
    assert host.unhealthy == {"GPU-1": "uncorrectable ECC errors; 2 pages to retire"}


def test_a_device_is_well_again_after_three_good_readings_in_a_row() -> None:
    host = Host(gpu(0))
    host.read(gpu(0, problems=(LOST,)))
    host.read(gpu(0), times=GOOD_READINGS_NEEDED - 1)
    assert host.unhealthy == {"GPU-0": LOST}
    host.read(gpu(0))
    assert host.unhealthy == {}


@pytest.mark.parametrize(
    "bad",
    [(gpu(0, problems=("hot",)),), (lost(0),), ()],
    ids=["it has a problem", "it lost its name", "it is not reported"],
)
def test_a_bad_reading_in_between_begins_the_count_again(bad: tuple[DeviceReading, ...]) -> None:
    host = Host(gpu(0))
    host.read(gpu(0, problems=(LOST,)))
    host.read(gpu(0), times=GOOD_READINGS_NEEDED - 1)
    host.read(*bad)
    host.read(gpu(0), times=GOOD_READINGS_NEEDED - 1)
    assert host.unhealthy
    host.read(gpu(0))
    assert host.unhealthy == {}


def test_an_unhealthy_device_says_what_is_wrong_now() -> None:
    host = Host(gpu(0))
    host.read(gpu(0, problems=("hot",)))
    host.read(gpu(0, problems=(LOST,)))
    assert host.unhealthy == {"GPU-0": LOST}


def test_a_device_that_the_driver_stops_reporting_stays_listed_and_comes_back() -> None:
    host = Host(gpu(0), gpu(1))
    host.read(gpu(0), times=5)
    assert list(host.unhealthy) == ["GPU-1"]
    assert "does not report it any more" in host.unhealthy["GPU-1"]
    assert host.inventory.accelerators[1].memory_mib == 80 * GIB
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED)
    assert host.unhealthy == {}


def test_a_lost_device_is_known_by_its_number_where_it_does_not_tell_its_uuid() -> None:
    host = Host(gpu(0), gpu(1))
    host.read(gpu(0), lost(1))
    assert host.unhealthy == {"GPU-1": LOST}
    assert host.inventory.undetected == ()


def test_a_device_that_never_told_its_uuid_is_a_note_with_its_number() -> None:
    """A driver that names no device must not look like a host that has none."""
    host = Host(gpu(0), lost(1), DeviceReading(index=2))
    assert host.uuids == ["GPU-0"]
    first, second = host.inventory.undetected
    assert first == f"GPU 1: {LOST}"
    assert second.startswith("GPU 2: ")
    assert "UUID" in second


def test_a_device_that_took_the_number_of_a_lost_one_is_not_mistaken_for_it() -> None:
    host = Host(gpu(0), gpu(1))
    host.read(gpu(1, index=0))
    assert list(host.unhealthy) == ["GPU-0"]
    assert host.inventory.accelerators[0].index == 0
    assert host.inventory.device("GPU-1").index == 0  # type: ignore[union-attr]


def test_what_an_ailing_device_does_not_tell_now_was_read_before() -> None:
    host = Host(gpu(0))
    host.read(DeviceReading(index=0, uuid="GPU-0", problems=("its answers fail",)))
    (device,) = host.inventory.accelerators
    assert (device.model, device.memory_mib) == ("NVIDIA H100", 80 * GIB)


def test_a_negative_amount_of_memory_is_garbage_and_no_crash() -> None:
    host = Host(gpu(0, memory_mib=-5), gpu(1))
    assert list(host.unhealthy) == ["GPU-0"]
    assert "-5 MiB" in host.unhealthy["GPU-0"]
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED)
    assert host.unhealthy == {}
    assert host.inventory.accelerators[0].memory_mib == 80 * GIB
    host.read(gpu(0, memory_mib=-5), gpu(1))
    assert list(host.unhealthy) == ["GPU-0"]
    assert host.inventory.accelerators[0].memory_mib == 80 * GIB


def test_a_device_whose_memory_the_driver_does_not_tell_can_be_used() -> None:
    """GPUs that share the host's memory have none of their own."""
    host = Host(gpu(0, memory_mib=0))
    assert host.unhealthy == {}


@pytest.mark.parametrize("in_order", [True, False])
def test_two_devices_with_one_uuid_are_one_that_cannot_be_used(in_order: bool) -> None:
    """Nobody can be pinned to it; and it must not count twice as fast towards being well."""
    twins = (gpu(0), gpu(1, uuid="GPU-0")) if in_order else (gpu(1, uuid="GPU-0"), gpu(0))
    host = Host(*twins, gpu(2))
    assert host.uuids == ["GPU-0", "GPU-2"]
    assert list(host.unhealthy) == ["GPU-0"]
    assert "2 times" in host.unhealthy["GPU-0"]
    assert host.inventory.accelerators[0].index == 0
    host.read(gpu(0), gpu(2), times=GOOD_READINGS_NEEDED)
    assert host.unhealthy == {}


# --- the driver ---------------------------------------------------------------------------------------------------


def test_no_driver_and_no_sign_of_a_gpu_is_no_error() -> None:
    host = Host()
    host.fail(NO_DRIVER)
    assert host.inventory.gpu_detect == "none"
    assert host.inventory.accelerators == ()
    assert host.inventory.undetected == ("NVIDIA GPUs: there is no libnvidia-ml.so.1",)
    assert host.inventory.failure == NO_DRIVER


def test_no_driver_where_a_card_is_there_is_an_error_with_the_remedy() -> None:
    """After an upgrade the probe silently found nothing."""
    host = Host()
    host.fail(NO_DRIVER, "NVIDIA card 0000:3b:00.0")
    assert host.inventory.gpu_detect == "error"
    assert host.inventory.undetected == (
        "NVIDIA GPUs: there is no libnvidia-ml.so.1 (NVIDIA card 0000:3b:00.0 is there): install the driver",
    )


@pytest.mark.parametrize("code", ["failed", "hangs", "crashed", "garbage"])
def test_a_driver_that_cannot_be_asked_is_an_error_also_where_nothing_is_known(code: str) -> None:
    host = Host()
    host.fail(ReadingFailed(code=code, text="it does not work"))
    assert host.inventory.gpu_detect == "error"
    assert host.inventory.undetected == ("NVIDIA GPUs: it does not work",)


def test_a_driver_that_hangs_makes_its_devices_unhealthy_and_none_of_the_declared() -> None:
    host = Host(gpu(0), gpu(1), declared=[declared("A")])
    host.fail()
    assert host.unhealthy == {"GPU-0": HANGS.text, "GPU-1": HANGS.text}
    assert host.uuids == ["GPU-0", "GPU-1", "A"]
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED - 1)
    assert len(host.unhealthy) == 2
    host.read(gpu(0), gpu(1))
    assert host.unhealthy == {}
    assert (host.inventory.gpu_detect, host.inventory.failure, host.inventory.undetected) == ("ok", None, ())


def test_a_driver_that_is_taken_away_is_an_error_where_devices_were_known() -> None:
    host = Host(gpu(0))
    host.fail(NO_DRIVER)
    assert host.inventory.gpu_detect == "error"
    assert host.unhealthy == {"GPU-0": NO_DRIVER.text}


def test_a_driver_that_comes_late_is_believed_as_soon_as_it_answers() -> None:
    host = Host()
    for _ in range(10):
        host.fail(NO_DRIVER)
    host.read(gpu(0))
    assert (host.uuids, host.unhealthy, host.inventory.gpu_detect) == (["GPU-0"], {}, "ok")
    assert host.inventory.undetected == ()


def test_what_the_driver_says_of_itself_is_passed_on() -> None:
    host = Host()
    host.read(gpu(0), notes=("NVLink: not supported",), driver_version="550.1", cuda_version="12.4")
    assert host.inventory.undetected == ("NVLink: not supported",)
    assert host.inventory.drivers == (("cuda", "12.4"), ("nvidia", "550.1"))


# --- what an earlier daemon knew ----------------------------------------------------------------------------------


def test_a_known_device_is_unhealthy_until_the_driver_has_reported_it_once() -> None:
    host = Host(known=[known(0)])
    assert host.inventory.gpu_detect == "error"
    assert host.unhealthy == {"GPU-0": "the driver has not reported it yet"}
    host.read(gpu(0))
    assert host.unhealthy == {}


def test_a_known_device_that_was_not_well_needs_three_good_readings_after_a_restart_too() -> None:
    host = Host(known=[known(0, unhealthy=LOST)])
    host.read(gpu(0), times=GOOD_READINGS_NEEDED - 1)
    assert host.unhealthy == {"GPU-0": LOST}
    host.read(gpu(0))
    assert host.unhealthy == {}


def test_a_known_device_that_was_taken_out_while_no_daemon_was_there_is_said_to_be_missing() -> None:
    host = Host(known=[known(0), known(1)])
    host.read(gpu(0))
    assert list(host.unhealthy) == ["GPU-1"]
    assert host.uuids == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("failure", [NO_DRIVER, HANGS])
def test_known_devices_are_listed_with_the_reason_when_the_driver_is_not_there_at_the_start(
    failure: ReadingFailed,
) -> None:
    host = Host(known=[known(0), known(1)])
    host.fail(failure)
    assert host.unhealthy == {"GPU-0": failure.text, "GPU-1": failure.text}
    assert host.inventory.gpu_detect == "error"


def test_what_others_held_before_the_restart_is_not_believed_any_more() -> None:
    host = Host(known=[known(0, foreign="pid 7", foreign_milli=1000)])
    host.read(gpu(0))
    assert host.foreign == {}


def test_a_device_that_was_declared_before_is_not_looked_for_in_the_driver() -> None:
    assert Host(known=[declared("A")]).inventory.accelerators == ()


# --- excluded -----------------------------------------------------------------------------------------------------


def test_an_excluded_device_is_not_listed_but_can_be_told_of() -> None:
    made: dict[str, Any] = dict(is_excluded=lambda device: device.uuid in ("GPU-0", "GPU-2"))
    host = Host(gpu(2), gpu(0), gpu(1), known=[known(0), known(1)], **made)
    assert host.uuids == ["GPU-1"]
    assert [device.uuid for device in host.inventory.excluded] == ["GPU-0", "GPU-2"]
    assert host.unhealthy == {}
    assert not host.inventory.can_tell("GPU-0")
    assert host.inventory.gone_on("GPU-0") is None
    host.read(gpu(1))
    assert host.inventory.excluded == ()
    assert host.unhealthy == {}, "nobody misses it"


def test_an_excluded_gpu_takes_its_instances_with_it() -> None:
    """Its model names the GPU, not the instances, which have another."""
    made: dict[str, Any] = dict(is_excluded=lambda device: device.model == "NVIDIA H100")
    host = Host(instance(1, 0), gpu(0, is_split=True), known=[replace(known(0), uuid="MIG-2", parent="GPU-0")], **made)
    host.read(instance(1, 0), gpu(0, is_split=True))
    assert "MIG-1" not in host.uuids
    assert host.inventory.undetected == ()


# --- MIG ----------------------------------------------------------------------------------------------------------


def split(index: int = 0, **more: Any) -> DeviceReading:
    return gpu(index, is_split=True, **more)


def test_a_split_gpu_is_listed_as_its_instances() -> None:
    host = Host(split(), instance(1), instance(2), gpu(1))
    assert host.uuids == ["MIG-1", "MIG-2", "GPU-1"]
    assert [device.parent for device in host.inventory.accelerators] == ["GPU-0", "GPU-0", ""]
    assert host.inventory.undetected == ()


def test_a_split_gpu_without_instances_is_said_to_be_useless() -> None:
    host = Host(split(), gpu(1))
    assert host.uuids == ["GPU-1"]
    assert host.inventory.undetected == ("GPU-0 is in MIG mode and has no instances, so nothing can run on it",)


def test_switching_mig_on_replaces_an_idle_gpu_by_its_instances_and_off_gives_it_back() -> None:
    host = Host(gpu(0))
    host.read(split(), instance(1))
    assert (host.uuids, host.unhealthy) == (["MIG-1"], {})
    host.read(gpu(0))
    assert (host.uuids, host.unhealthy) == (["GPU-0"], {})


def test_a_gpu_that_is_held_while_mig_is_switched_on_stays_listed_until_it_is_released() -> None:
    host = Host(gpu(0))
    host.held = frozenset({"GPU-0"})
    host.read(split(), instance(1))
    assert host.uuids == ["GPU-0", "MIG-1"]
    assert "MIG mode" in host.unhealthy["GPU-0"]
    host.held = frozenset()
    host.read(split(), instance(1))
    assert host.uuids == ["MIG-1"]


def test_an_instance_that_is_destroyed_is_no_loss_unless_a_replica_holds_it() -> None:
    host = Host(split(), instance(1), instance(2))
    host.held = frozenset({"MIG-2"})
    host.read(split())
    assert host.uuids == ["MIG-2"]
    assert host.unhealthy == {"MIG-2": "this MIG instance is not there any more"}
    host.held = frozenset()
    host.read(split())
    assert host.uuids == []


def test_an_instance_that_comes_back_under_its_replica_is_well_after_three_good_readings() -> None:
    host = Host(split(), instance(1))
    host.held = frozenset({"MIG-1"})
    host.read(split())
    host.read(split(), instance(1), times=GOOD_READINGS_NEEDED - 1)
    assert host.unhealthy
    host.read(split(), instance(1))
    assert host.unhealthy == {}


def test_known_instances_of_a_gpu_that_is_whole_again_are_no_loss_after_a_restart() -> None:
    host = Host(known=[known(0, uuid="MIG-1", parent="GPU-0")])
    host.read(gpu(0))
    assert (host.uuids, host.unhealthy) == (["GPU-0"], {})


def test_a_lost_gpu_takes_all_its_instances_with_it_and_each_says_why() -> None:
    """The second and later ones were said to have been taken out."""
    host = Host(split(), instance(1), instance(2), gpu(1))
    host.read(lost(0), gpu(1))
    assert host.unhealthy == {"MIG-1": LOST, "MIG-2": LOST}
    assert host.inventory.undetected == ()


def test_an_instance_that_does_not_tell_its_uuid_is_not_taken_for_destroyed() -> None:
    host = Host(split(), instance(1), instance(2))
    host.read(split(), instance(1), lost(0, "its UUID cannot be read", parent="GPU-0"))
    assert host.uuids == ["MIG-1", "MIG-2"]
    assert host.unhealthy == {"MIG-2": "its UUID cannot be read"}


def test_a_device_that_says_to_be_a_part_of_itself_is_a_part_of_nothing() -> None:
    host = Host(gpu(0, parent="GPU-0"))
    assert host.inventory.accelerators[0].parent == ""
    host.read()
    assert "does not report it" in host.unhealthy["GPU-0"]


# --- foreign processes --------------------------------------------------------------------------------------------


def test_a_foreign_process_is_named_with_what_it_holds_and_the_device_is_skipped() -> None:
    host = Host(gpu(0), gpu(1))
    host.processes = {4711: BOB}
    host.read(with_processes(0, process(4711)), gpu(1))
    assert host.foreign == {"GPU-0": ("pid 4711 (python of user bob) holds 20GiB", 1000)}
    assert host.inventory.users_of("GPU-0") == "pid 4711 (python of user bob) holds 20GiB"
    assert host.inventory.accelerators[0].usable_milli == 0
    assert host.unhealthy == {}, "it is in use, not ill"
    host.read(gpu(0), gpu(1))
    assert host.foreign == {}, "free at once when they leave"


def test_where_foreign_processes_are_allowed_they_change_nothing() -> None:
    host = Host(foreign_processes="allow")
    host.processes = {4711: BOB}
    host.read(with_processes(0, process(4711)))
    host.read(with_processes(0, *(process(pid) for pid in range(1, 129)), process_count=1_000_000))
    assert host.foreign == {}


def test_where_foreign_processes_are_allowed_one_that_has_just_ended_is_not_in_the_way_either() -> None:
    """Where they come and go, there is one in nearly every reading."""
    host = Host(foreign_processes="allow")
    host.processes = {7: GONE}
    host.read(with_processes(0, process(7)))
    assert (host.foreign, host.unhealthy) == ({}, {})
    host.read(with_processes(0, process(7)), times=round(CONFIRM_SECONDS))
    assert list(host.unhealthy) == ["GPU-0"], "this one does not go"


def test_processes_of_replicas_are_not_foreign() -> None:
    host = Host()
    host.processes = {7: OURS}
    host.read(with_processes(0, process(7)))
    assert host.foreign == {}


def test_a_pid_that_nobody_has_looked_up_is_somebody_elses() -> None:
    host = Host()
    host.read(with_processes(0, process(7, None)))
    assert host.foreign == {"GPU-0": ("pid 7", 1000)}


def test_a_few_are_named_and_the_others_counted() -> None:
    host = Host()
    host.read(with_processes(0, *(process(pid, None) for pid in range(1, PROCESSES_NAMED + 3))))
    assert host.foreign["GPU-0"][0] == "pid 1, pid 2, pid 3 and 2 more"


def test_a_process_that_is_listed_twice_is_named_once() -> None:
    """One that computes and draws is in two lists of the driver."""
    host = Host()
    host.read(with_processes(0, process(7), process(7), process(8)))
    assert host.foreign["GPU-0"][0] == "pid 7 holds 20GiB, pid 8 holds 20GiB"


def test_an_amount_that_wavers_is_no_news_and_one_that_changed_is() -> None:
    """Each change of a text is an entry of the log."""
    host = Host(with_processes(0, process(7, 20)))
    told = host.foreign
    for gib in (21.0, 19.5, 27.9, 20.0):
        host.read(with_processes(0, process(7, gib)))
        assert host.foreign == told
    host.read(with_processes(0, process(7, 28.5)))
    assert host.foreign["GPU-0"][0] == "pid 7 holds 28.5GiB"


def test_an_amount_that_creeps_up_is_told_in_the_end() -> None:
    host = Host(with_processes(0, process(7, 1)))
    for gib in range(2, 40):
        host.read(with_processes(0, process(7, gib)))
    words = host.foreign["GPU-0"][0]
    assert abs(float(words.removeprefix("pid 7 holds ").removesuffix("GiB")) - 39) <= 8


def test_a_list_in_another_order_is_no_news() -> None:
    host = Host(with_processes(0, process(7), process(8)))
    told = host.foreign
    host.read(with_processes(0, process(8), process(7)))
    assert host.foreign == told


def test_another_process_is_news() -> None:
    host = Host(with_processes(0, process(7, None)))
    host.read(with_processes(0, process(8, None)))
    assert host.foreign["GPU-0"][0] == "pid 8"


def test_more_processes_than_are_listed_make_it_foreign_without_naming_them_and_without_wavering() -> None:
    """A million of them, and every second another number."""
    host = Host()
    listed = [process(pid) for pid in range(1, 129)]
    host.processes = dict.fromkeys(range(1, 129), OURS)
    host.read(with_processes(0, *listed, process_count=1_000_000))
    (words, milli) = host.foreign["GPU-0"]
    assert (words, milli) == ("more than 128 processes are on it", 1000)
    host.read(with_processes(0, *listed, process_count=1_000_007))
    assert host.foreign["GPU-0"][0] == words
    host.read(with_processes(0, *listed))
    assert host.foreign == {}


def test_a_driver_that_cannot_list_processes_makes_nothing_foreign() -> None:
    host = Host(gpu(0, processes=None, process_count=7))
    assert host.foreign == {}
    assert host.inventory.gone_on("GPU-0") is None
    assert not host.inventory.can_tell("GPU-0")


# --- held elsewhere -----------------------------------------------------------------------------------------------


def test_a_share_that_another_daemon_holds_leaves_the_rest() -> None:
    host = Host(gpu(0), declared=[declared("A")])
    host.hear(ElsewhereSeen(elsewhere={"GPU-0": Elsewhere(milli=300), "A": Elsewhere(milli=1000)}))
    assert host.foreign == {
        "GPU-0": ("held by another gpulayer of this host", 300),
        "A": ("held by another gpulayer of this host", 1000),
    }
    assert [device.usable_milli for device in host.inventory.accelerators] == [700, 0]
    host.hear(ElsewhereSeen(elsewhere={}))
    assert host.foreign == {}


def test_a_look_at_some_locks_says_nothing_of_the_others() -> None:
    host = Host(gpu(0), gpu(1))
    host.hear(ElsewhereSeen(elsewhere={"GPU-0": Elsewhere(milli=1), "GPU-1": Elsewhere(milli=2)}))
    host.hear(ElsewhereSeen(elsewhere={}, only=frozenset({"GPU-0"})))
    assert {uuid: milli for uuid, (_, milli) in host.foreign.items()} == {"GPU-1": 2}


@pytest.mark.parametrize(("milli", "told"), [(-5, 0), (0, 0), (1, 1), (1000, 1000), (5000, 1000)])
def test_what_is_held_elsewhere_is_between_nothing_and_all(milli: int, told: int) -> None:
    host = Host(gpu(0))
    host.hear(ElsewhereSeen(elsewhere={"GPU-0": Elsewhere(milli=milli)}))
    assert host.inventory.accelerators[0].foreign_milli == told


def test_a_foreign_process_says_more_than_a_lock_and_takes_all() -> None:
    host = Host(gpu(0))
    host.hear(ElsewhereSeen(elsewhere={"GPU-0": Elsewhere(milli=300)}))
    host.read(with_processes(0, process(7, None)))
    assert host.foreign == {"GPU-0": ("pid 7", 1000)}
    host.read(gpu(0))
    assert host.foreign["GPU-0"][1] == 300


def test_another_daemons_process_is_told_by_its_lock_not_as_foreign() -> None:
    host = Host(gpu(0))
    host.processes = {7: OURS}
    host.hear(ElsewhereSeen(elsewhere={"GPU-0": Elsewhere(milli=500)}))
    host.read(with_processes(0, process(7)))
    assert host.foreign["GPU-0"][1] == 500
    assert host.inventory.users_of("GPU-0") == "", "a lock of others is no foreign process"


def test_a_lock_that_cannot_be_taken_makes_the_device_unhealthy_while_it_lasts() -> None:
    host = Host(gpu(0), gpu(1), declared=[declared("A")])
    host.hear(LockTrouble(troubles={"GPU-0": "/run/lock is read-only", "A": "no room"}))
    assert host.unhealthy == {"GPU-0": "/run/lock is read-only", "A": "no room"}
    host.read(gpu(0, problems=(LOST,)), gpu(1))
    assert host.unhealthy["GPU-0"] == LOST, "what is wrong with the device itself comes first"
    host.hear(LockTrouble(troubles={}))
    assert host.unhealthy == {"GPU-0": LOST}


# --- ended, and not confirmed -------------------------------------------------------------------------------------


def ended_replica(pid: int = 7) -> Host:
    """A replica held GPU-0; its process is gone, and the driver lists it still."""
    host = Host(gpu(0), gpu(1))
    host.held = frozenset({"GPU-0"})
    host.processes = {pid: OURS}
    host.read(with_processes(0, process(pid)), gpu(1))
    assert host.inventory.gone_on("GPU-0") == frozenset()
    host.processes = {pid: GONE}
    host.read(with_processes(0, process(pid)), gpu(1))
    return host


def test_a_device_is_clear_when_the_driver_lists_no_process_that_is_gone() -> None:
    host = ended_replica()
    assert host.inventory.gone_on("GPU-0")
    assert host.inventory.gone_on("GPU-1") == frozenset()
    assert (host.unhealthy, host.foreign) == ({}, {}), "the driver takes its moment"
    host.read(gpu(0), gpu(1))
    assert host.inventory.gone_on("GPU-0") == frozenset()


def test_a_process_that_is_gone_for_thirty_seconds_makes_the_device_unhealthy() -> None:
    host = ended_replica()
    host.read(with_processes(0, process(7)), gpu(1), times=round(CONFIRM_SECONDS) - 1)
    assert host.unhealthy == {}
    host.read(with_processes(0, process(7)), gpu(1))
    assert list(host.unhealthy) == ["GPU-0"]
    assert host.unhealthy["GPU-0"].startswith("not confirmed free")
    assert "pid 7" in host.unhealthy["GPU-0"]
    host.read(with_processes(0, process(7)), gpu(1), times=10)
    assert list(host.unhealthy) == ["GPU-0"], "still there"
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED - 1)
    assert host.unhealthy
    host.read(gpu(0), gpu(1))
    assert host.unhealthy == {}


def test_processes_that_come_and_go_are_not_taken_for_one_that_stays() -> None:
    """A replica that starts a short process after the other: in nearly every reading there is one that has just ended.
    The device was unhealthy after thirty seconds."""
    host = Host(gpu(0))
    host.held = frozenset({"GPU-0"})
    for pid in range(100, 100 + 3 * round(CONFIRM_SECONDS)):
        host.processes = {pid: GONE, 7: OURS}
        host.read(with_processes(0, process(pid), process(7)))
    assert host.unhealthy == {}


def test_a_gone_process_on_a_device_that_nobody_of_ours_holds_is_in_the_way() -> None:
    host = Host()
    host.processes = {7: GONE}
    host.read(with_processes(0, process(7)))
    assert host.foreign == {"GPU-0": ("pid 7 (gone) holds 20GiB", 1000)}


def test_what_was_not_confirmed_stays_so_until_three_clean_readings_in_a_row() -> None:
    host = ended_replica()
    host.hear(NotConfirmed(uuid="GPU-0", why="the driver still lists pid 7"))
    assert host.unhealthy == {"GPU-0": "not confirmed free: the driver still lists pid 7"}
    host.read(with_processes(0, process(7)), gpu(1), times=5)
    assert host.unhealthy == {"GPU-0": "not confirmed free: the driver still lists pid 7"}
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED - 1)
    host.read(with_processes(0, process(7)), gpu(1))
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED - 1)
    assert host.unhealthy, "they were not in a row"
    host.read(gpu(0), gpu(1))
    assert host.unhealthy == {}


def test_what_is_not_confirmed_beside_another_fault_stays_so_when_that_fault_is_over() -> None:
    host = ended_replica()
    host.read(with_processes(0, process(7), problems=("hot",)), gpu(1), times=round(CONFIRM_SECONDS))
    assert "hot" in host.unhealthy["GPU-0"]
    assert "not confirmed free" in host.unhealthy["GPU-0"]
    host.read(gpu(0), gpu(1), times=GOOD_READINGS_NEEDED - 1)
    host.processes = {8: GONE}
    host.read(with_processes(0, process(8)), gpu(1))
    assert host.unhealthy


def test_nothing_is_confirmed_while_the_driver_does_not_answer() -> None:
    host = ended_replica()
    host.fail()
    assert host.inventory.gone_on("GPU-0") is None
    assert host.inventory.can_tell("GPU-0")
    host.hear(NotConfirmed(uuid="GPU-0", why=HANGS.text))
    assert host.unhealthy["GPU-0"].startswith("not confirmed free")


def test_a_device_that_is_lost_cannot_be_confirmed_but_its_driver_can_tell() -> None:
    host = ended_replica()
    host.read(lost(0), gpu(1))
    assert host.inventory.gone_on("GPU-0") is None
    assert host.inventory.can_tell("GPU-0")
    host.read(gpu(0, processes=None, problems=("its processes cannot be read",)), gpu(1))
    assert host.inventory.gone_on("GPU-0") is None
    assert host.inventory.can_tell("GPU-0"), "only now it cannot"


def test_a_declared_device_has_nobody_who_could_confirm_anything() -> None:
    host = Host(declared=[declared("A")])
    assert not host.inventory.can_tell("A")
    assert host.inventory.gone_on("A") is None
    host.hear(NotConfirmed(uuid="A", why="x"))
    host.hear(NotConfirmed(uuid="unknown", why="x"))
    assert host.unhealthy == {}


# --- declared and found -------------------------------------------------------------------------------------------


def test_a_device_that_is_declared_and_found_is_listed_once_as_the_driver_says() -> None:
    host = Host(declared=[declared("GPU-0"), declared("A")])
    assert host.uuids == ["GPU-0", "A"]
    host.hear(ElsewhereSeen(elsewhere={"GPU-0": Elsewhere(milli=100)}))
    host.hear(LockTrouble(troubles={"GPU-0": "no room"}))
    host.read(gpu(0))
    (found, other) = host.inventory.accelerators
    assert (found.uuid, found.source, found.model) == ("GPU-0", "nvml", "NVIDIA H100")
    assert (found.foreign_milli, found.unhealthy) == (100, "no room"), "what is known of its lock goes along"
    assert other.uuid == "A"
    assert host.inventory.undetected == (
        "GPU-0 is declared in the configuration and found by the driver, whose word counts",
    )
    assert host.inventory.can_tell("GPU-0")


def test_a_declared_device_does_not_come_back_when_the_driver_says_that_it_is_taken_apart() -> None:
    """Listed again beside its instances, as declared and well, it could be handed out."""
    host = Host(declared=[declared("GPU-0")])
    host.read(split(), instance(1))
    assert host.uuids == ["MIG-1"]
    host.read(gpu(0))
    host.read(split(), instance(1))
    assert host.uuids == ["MIG-1"]
    host.fail()
    assert host.uuids == ["MIG-1"]


def test_a_device_that_is_declared_and_excluded_is_excluded() -> None:
    host = Host(gpu(0), declared=[declared("GPU-0")], is_excluded=lambda device: device.uuid == "GPU-0")
    assert host.uuids == []


# --- laws ---------------------------------------------------------------------------------------------------------

_texts = st.text("aé|\0 ", max_size=5)
_uuids = st.sampled_from(["", "GPU-0", "GPU-1", "MIG-0", "MIG-1"])
_pids = st.sampled_from([-1, 0, 1, 7, 8, 9, 2**31])
_numbers = st.sampled_from([-(2**40), -1, 0, 1, 500, 80 * GIB, 2**40])
_processes = st.builds(DeviceProcess, pid=_pids, memory_mib=st.none() | _numbers)
_devices = st.builds(
    DeviceReading,
    index=st.integers(-1, 3),
    uuid=_uuids,
    model=st.sampled_from(["", "H100"]) | _texts,
    memory_mib=_numbers,
    compute_capability=_texts,
    pci_bus_id=_texts,
    numa_node=st.none() | st.integers(-1, 2),
    nvlink_peers=st.lists(_uuids, max_size=2).map(tuple),
    parent=_uuids,
    is_split=st.booleans(),
    processes=st.none() | st.lists(_processes, max_size=5).map(tuple),
    process_count=st.integers(-1, 2**20),
    problems=st.lists(_texts, max_size=2).map(tuple),
)
_readings = st.builds(
    Reading,
    driver_version=_texts,
    cuda_version=_texts,
    devices=st.lists(_devices, max_size=4).map(tuple),
    notes=st.lists(_texts, max_size=1).map(tuple),
)
_failures = st.builds(
    ReadingFailed, code=st.sampled_from(["no_driver", "failed", "hangs", "crashed", "garbage", "?"]), text=_texts
)
_seen = st.builds(SeenProcess, kind=st.sampled_from(["managed", "foreign", "gone"]), name=_texts)
_events: st.SearchStrategy[InventoryEvent] = st.one_of(
    st.builds(
        DevicesRead,
        result=_readings | _readings | _failures,
        processes=st.dictionaries(_pids, _seen, max_size=4),
        held=st.frozensets(_uuids, max_size=2),
        evidence=st.lists(_texts, max_size=1).map(tuple),
    ),
    st.builds(
        ElsewhereSeen,
        elsewhere=st.dictionaries(_uuids, st.builds(Elsewhere, milli=st.integers(-5, 2000)), max_size=2),
        only=st.none() | st.frozensets(_uuids, max_size=2),
    ),
    st.builds(LockTrouble, troubles=st.dictionaries(_uuids, _texts, max_size=2)),
    st.builds(NotConfirmed, uuid=_uuids, why=_texts),
)


def told(inventory: Inventory) -> tuple[object, ...]:
    """All that it says."""
    uuids = ("", "GPU-0", "GPU-1", "MIG-0", "MIG-1", "A")
    return (
        inventory.accelerators,
        inventory.excluded,
        inventory.gpu_detect,
        inventory.drivers,
        inventory.undetected,
        [(inventory.device(uuid), inventory.gone_on(uuid), inventory.can_tell(uuid)) for uuid in uuids],
        [inventory.users_of(uuid) for uuid in uuids],
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(_events, st.sampled_from([0.0, 1.0, 40.0])), max_size=8),
    st.sampled_from(["skip", "allow"]),
    st.frozensets(_uuids, max_size=2),
    st.booleans(),
)
def test_no_driver_however_mad_breaks_the_list(
    events: list[tuple[InventoryEvent, float]],
    foreign_processes: Literal["skip", "allow"],
    excluded: frozenset[str],
    is_known: bool,
) -> None:
    """Nothing raises; each device is listed once, in an order that is the same for everyone, and can go into the log;
    what was excluded is never listed; and a device that was there is still there, or it was taken apart."""
    inventory = Inventory(
        declared=[declared("A"), declared("GPU-1")],
        known=[known(0), known(3)] if is_known else [],
        is_excluded=lambda device: device.uuid in excluded,
        foreign_processes=foreign_processes,
    )
    now = 1000.0
    for event, later in events:
        now += later
        before = {device.uuid: device for device in inventory.accelerators}
        inventory.step(event, Instant(now))
        devices = inventory.accelerators
        uuids = [device.uuid for device in devices]
        assert len(set(uuids)) == len(uuids)
        found = [device for device in devices if device.source == "nvml"]
        assert found == sorted(found, key=lambda device: (device.index, device.uuid))
        assert not excluded & {device.uuid for device in found}
        for uuid, device in before.items():
            if device.source != "nvml" or uuid in uuids:
                continue
            assert isinstance(event, DevicesRead)
            assert isinstance(event.result, Reading), "a driver that does not answer takes nothing away"
            parents = {device.parent, *(seen.parent for seen in event.result.devices if seen.uuid == uuid)}
            if not (parents | {uuid}) & excluded:
                assert uuid not in event.held, "what a replica holds is never silently gone"
                assert {uuid, device.parent} & {seen.uuid for seen in event.result.devices}, "it was taken apart"
        if foreign_processes == "allow":
            assert not any(inventory.users_of(uuid) for uuid in uuids)
        capabilities = Capabilities(accelerators=devices, cpus_milli=1, memory_mib=1, undetected=inventory.undetected)
        assert decode(Capabilities, encode(capabilities)) == capabilities
        assert {device.uuid: device for device in devices} == {uuid: inventory.device(uuid) for uuid in uuids}


@settings(max_examples=100, deadline=None)
@given(st.lists(_readings, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_in_which_the_driver_lists_its_devices_changes_nothing(readings: list[Reading], random: Any) -> None:
    one, other = Inventory(declared=[declared("A")]), Inventory(declared=[declared("A")])
    for number, reading in enumerate(readings):
        # Two answers under one number and one UUID contradict each other: whose facts are kept is anyone's choice.
        devices = list({(device.index, device.uuid): device for device in reading.devices}.values())
        reading = replace(reading, devices=tuple(devices))
        random.shuffle(devices)
        mixed = replace(reading, devices=tuple(devices))
        one.step(DevicesRead(result=reading), Instant(float(number)))
        other.step(DevicesRead(result=mixed), Instant(float(number)))
        assert told(one) == told(other)


def test_the_hash_seed_changes_nothing() -> None:
    program = (
        "from tests.core.test_inventory import *\n"
        "host = Host(gpu(2), gpu(0), split(1), instance(1, 1), instance(2, 1), lost(3), declared=[declared('A')],\n"
        "            is_excluded=lambda device: device.uuid in {'GPU-2'})\n"
        "host.held = frozenset({'MIG-1', 'MIG-2', 'GPU-0'})\n"
        "host.read(split(1), lost(0))\n"
        "print(told(host.inventory))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1


class Devices(RuleBasedStateMachine):
    """Four GPUs whose faults come and go: each is judged by its own readings alone."""

    NUMBER = 4

    @initialize()
    def begins(self) -> None:
        self.host = Host(*(gpu(index) for index in range(self.NUMBER)))
        self.good = dict.fromkeys(range(self.NUMBER), GOOD_READINGS_NEEDED)
        """How many good readings in a row, and as many as are needed where it never was bad."""

    @rule(
        states=st.lists(
            st.sampled_from(["well", "well", "well", "bad", "lost", "vanished"]), min_size=NUMBER, max_size=NUMBER
        ),
        random=st.randoms(use_true_random=False),
    )
    def reads(self, states: list[str], random: Any) -> None:
        answers = []
        for index, state in enumerate(states):
            self.good[index] = self.good[index] + 1 if state == "well" else 0
            match state:
                case "well":
                    answers.append(gpu(index))
                case "bad":
                    answers.append(gpu(index, problems=("hot",)))
                case "lost":
                    answers.append(lost(index))
        random.shuffle(answers)
        self.host.read(*answers)

    @rule()
    def fails(self) -> None:
        self.host.fail()
        self.good = dict.fromkeys(self.good, 0)

    @rule(index=st.integers(0, NUMBER - 1))
    def is_not_confirmed(self, index: int) -> None:
        self.host.hear(NotConfirmed(uuid=f"GPU-{index}", why="x"))
        self.good[index] = 0

    @invariant()
    def each_is_well_after_three_good_readings_of_its_own(self) -> None:
        assert self.host.uuids == [f"GPU-{index}" for index in range(self.NUMBER)]
        assert set(self.host.unhealthy) == {
            f"GPU-{index}" for index, good in self.good.items() if good < GOOD_READINGS_NEEDED
        }


Devices.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, database=None)
TestDevices = Devices.TestCase
