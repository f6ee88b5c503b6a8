"""Which devices of a node one replica gets, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulayer.core.placement.fit import Choice, Free, fit
from gpulayer.core.placement.refusal import Refusal, code_of, explain, is_permanent
from gpulayer.model.ids import NodeId
from gpulayer.model.job import Requirements
from gpulayer.model.node import Accelerator, Capabilities, Node
from gpulayer.model.units import parse_size
from tests.core.cluster.states import GIB, capabilities, gpu


def node(*gpus: Accelerator, **more: Any) -> Node:
    return named(capabilities(*gpus, **more))


def named(has: Capabilities) -> Node:
    return Node(id=NodeId("n-n1"), name="n1", capabilities=has, advertise="127.0.0.1", admitted_at_utc=0.0)


def all_free(on: Node, **used_milli: int) -> Free:
    has = on.capabilities
    return Free(
        gpu_milli={
            device.uuid: 1000 - device.foreign_milli - used_milli.get(device.uuid, 0) for device in has.accelerators
        },
        cpus_milli=has.cpus_milli,
        memory_mib=has.memory_mib,
    )


def needs(gpus: float = 0, **more: Any) -> Requirements:
    return Requirements(gpus_milli=round(gpus * 1000), **more)


def chosen(wanted: Requirements, on: Node, **used_milli: int) -> list[tuple[str, int]]:
    found = fit(wanted, on, all_free(on, **used_milli))
    assert isinstance(found, Choice), explain(found)
    return [(share.uuid, share.milli) for share in found.devices]


def refused(wanted: Requirements, on: Node, free: Free | None = None, **used_milli: int) -> Refusal:
    found = fit(wanted, on, free or all_free(on, **used_milli))
    assert not isinstance(found, Choice)
    return found


def test_a_whole_gpu_is_the_smallest_that_does_then_the_first_by_uuid() -> None:
    on = node(gpu("b", gib=80), gpu("a", gib=80), gpu("c", gib=24, model="L4"))
    assert chosen(needs(1), on) == [("c", 1000)]
    assert chosen(needs(1, gpu_memory_mib=40 * GIB), on) == [("a", 1000)]


def test_several_gpus_are_of_one_model_where_one_has_enough() -> None:
    on = node(gpu("a", gib=24, model="L4"), gpu("b"), gpu("c"))
    assert chosen(needs(2), on) == [("b", 1000), ("c", 1000)]
    assert chosen(needs(3), on) == [("a", 1000), ("b", 1000), ("c", 1000)]


def test_several_gpus_are_never_of_two_kinds() -> None:
    on = node(gpu("a"), gpu("b", kind="rocm", model="MI300"))
    assert explain(refused(needs(2), on)) == "1 such GPU on n1, 2 needed"


def test_a_share_fills_the_fullest_gpu_that_has_room() -> None:
    on = node(gpu("a"), gpu("b"), gpu("c"))
    assert chosen(needs(0.5), on, b=250, c=750) == [("b", 500)]


def test_a_shared_gpu_is_never_given_whole_and_a_whole_one_never_shared() -> None:
    on = node(gpu("a"))
    assert explain(refused(needs(1), on, a=250)) == "0 of 1 GPU free on n1"
    assert explain(refused(needs(0.5), on, a=1000)) == "0 of 1 GPU free on n1, 0.5 needed"
    assert explain(refused(needs(0.5), on, a=750)) == "at most 0.25 of one GPU free on n1, 0.5 needed"


def test_gpu_memory_of_a_share_is_that_share_of_it() -> None:
    on = node(gpu("a", gib=80))
    assert chosen(needs(0.5, gpu_memory_mib=40 * GIB), on) == [("a", 500)]
    text = explain(refused(needs(0.5, gpu_memory_mib=41 * GIB), on))
    assert text == "0.5 of the largest GPU on n1 has 40GiB, 41GiB needed"


def test_models_are_patterns_in_any_case_and_one_of_them_must_match() -> None:
    on = node(gpu("a", model="NVIDIA A100-SXM4-80GB"))
    assert chosen(needs(1, gpu_models=("*h100*", "*a100*")), on) == [("a", 1000)]
    text = explain(refused(needs(1, gpu_models=("*H100*", "L4")), on))
    assert text == "GPUs on n1 are NVIDIA A100-SXM4-80GB, *H100* or L4 needed"


@pytest.mark.parametrize(
    ("wanted", "code", "text"),
    [
        (needs(1, accelerator="rocm"), "wrong_accelerator_kind", "GPUs on n1 are 2 x cuda, rocm needed"),
        (needs(1, vendor="amd"), "wrong_vendor", "GPUs on n1 are nvidia's (2), amd needed"),
        (
            needs(1, gpu_memory_mib=100 * GIB),
            "too_little_gpu_memory",
            "largest GPU on n1 has 80GiB, 100GiB needed",
        ),
        (needs(4), "not_enough_gpus_free", "2 such GPUs on n1, 4 needed"),
        (needs(cpus_milli=17_000), "too_few_cpus", "16 CPUs on n1, 17 needed"),
        (needs(memory_mib=65 * GIB), "too_little_memory", "64GiB memory on n1, 65GiB needed"),
        (needs(labels=(("zone", "east"),)), "missing_label", "label zone is west on n1, east needed"),
        (needs(labels=(("disk", "ssd"),)), "missing_label", "label disk=ssd is not on n1"),
    ],
)
def test_what_the_node_will_never_have_is_refused_for_good(wanted: Requirements, code: str, text: str) -> None:
    found = refused(wanted, node(gpu("a"), gpu("b"), zone="west"))
    assert (code_of(found), explain(found), is_permanent(found)) == (code, text, True)


def test_a_node_without_gpus_says_so() -> None:
    """A CPU that is listed as an accelerator is no GPU."""
    found = refused(needs(1), node(gpu("cpu0", kind="cpu", model="EPYC")))
    assert explain(found) == "no GPU on n1, 1 needed"


def test_what_is_missing_for_good_is_said_before_what_is_only_busy() -> None:
    on = node(gpu("a"))
    found = refused(needs(1, memory_mib=65 * GIB), on, a=1000)
    assert code_of(found) == "too_little_memory"


def test_an_unhealthy_gpu_is_passed_over_and_named() -> None:
    on = node(gpu("a", unhealthy="xid 79"), gpu("b"))
    assert chosen(needs(1), on) == [("b", 1000)]
    found = refused(needs(2), on)
    assert explain(found) == "1 of 2 GPUs free on n1, 2 needed (a unhealthy: xid 79)"
    assert not is_permanent(found)


def test_a_node_that_shrank_under_its_work_still_takes_what_asks_for_nothing() -> None:
    on = node(cpus=1)
    shrunk = replace(all_free(on), cpus_milli=-3000, memory_mib=-1)
    assert isinstance(fit(needs(), on, shrunk), Choice)
    assert explain(refused(needs(cpus_milli=500), on, shrunk)) == "0 of 1 CPUs free on n1, 0.5 needed"


# --- held by others -----------------------------------------------------------------------------------------------


def test_a_gpu_that_others_use_is_passed_over_and_named() -> None:
    on = node(gpu("a", foreign_milli=1000), gpu("b"))
    assert chosen(needs(1), on) == [("b", 1000)]
    found = refused(needs(2), on)
    assert code_of(found) == "devices_in_use"
    assert explain(found) == "1 of 2 GPUs free on n1, 2 needed (a in use: pid 7 (python of user bob) holds 20GiB)"
    assert not is_permanent(found)


def test_what_others_leave_of_a_gpu_can_be_shared_and_is_never_given_whole() -> None:
    on = node(gpu("a", foreign_milli=300, foreign="held by another gpulayer"))
    assert chosen(needs(0.7), on) == [("a", 700)]
    assert chosen(needs(0.25), on, a=400) == [("a", 250)]
    why = "(a in use: held by another gpulayer)"
    assert explain(refused(needs(1), on)) == f"0 of 1 GPU free on n1 {why}"
    assert explain(refused(needs(0.75), on)) == f"0 of 1 GPU free on n1, 0.75 needed {why}"
    # With 0.5 of it held by ours, it would be too little without the others too.
    assert explain(refused(needs(0.75), on, a=500)) == "at most 0.2 of one GPU free on n1, 0.75 needed"


def test_a_share_goes_to_the_fullest_gpu_whoever_filled_it() -> None:
    on = node(gpu("a"), gpu("b", foreign_milli=600))
    assert chosen(needs(0.25), on) == [("b", 250)]
    assert chosen(needs(0.5), on) == [("a", 500)]


def test_only_those_that_would_help_are_named_as_in_use() -> None:
    on = node(gpu("a", foreign_milli=1000), gpu("b", foreign_milli=500), gpu("c", foreign_milli=1000, unhealthy="hot"))
    found = refused(needs(1), on, b=500)
    assert explain(found).endswith("(a in use: pid 7 (python of user bob) holds 20GiB; c unhealthy: hot; 1 held)")


def test_a_gpu_that_is_both_unhealthy_and_used_is_unhealthy() -> None:
    found = refused(needs(1), node(gpu("a", unhealthy="hot", foreign_milli=1000)))
    assert explain(found) == "0 of 1 GPU free on n1 (a unhealthy: hot)"


@pytest.mark.parametrize(("number", "code"), [(1, "devices_in_use"), (4, "unhealthy_devices")])
def test_all_that_keeps_gpus_from_being_free_is_said_and_what_is_the_same_once(number: int, code: str) -> None:
    """Of a foreign process, a shared GPU and two lost ones only the process was named."""
    first = gpu("GPU-ecdd1234-5678-90ab-cdef-1234567890ab", foreign_milli=1000, index=0)
    lost = [gpu(f"GPU-{uuid}", unhealthy="the GPU is lost", index=index) for index, uuid in ((2, "d"), (3, "c"))]
    found = refused(needs(number), node(first, gpu("GPU-b", index=1), *lost), **{"GPU-b": 500})
    assert code_of(found) == code
    assert explain(found) == (
        f"0 of 4 GPUs free on n1{'' if number == 1 else ', 4 needed'} (GPU 0 (GPU-ecdd1234) in use: "
        "pid 7 (python of user bob) holds 20GiB; 2 unhealthy: the GPU is lost; 1 held)"
    )


def test_what_others_use_is_named_beside_what_replicas_hold() -> None:
    found = refused(needs(4), node(gpu("a", foreign_milli=1000), gpu("b"), gpu("c"), gpu("d")), b=1000)
    assert explain(found).startswith("2 of 4 GPUs free on n1, 4 needed (a in use: pid 7 ")
    found = refused(needs(0.5), node(gpu("a", unhealthy="hot"), gpu("b")), b=750)
    assert explain(found) == "at most 0.25 of one GPU free on n1, 0.5 needed (a unhealthy: hot; 1 held)"


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (3, "3 such GPUs on n1 (1 more is excluded by the configuration), 4 needed"),
        (0, "no GPU on n1 (1 is excluded by the configuration), 4 needed"),
    ],
)
def test_gpus_that_the_configuration_excludes_are_not_silently_gone(gpus: int, text: str) -> None:
    on = node(*(gpu(f"g{number}") for number in range(gpus)))
    on = replace(on, capabilities=replace(on.capabilities, gpus_excluded=1))
    assert explain(refused(needs(4), on)) == text


def test_a_gpu_is_never_said_to_have_what_is_asked_of_it_in_vain() -> None:
    """A GPU of 24564 MiB "has 24.0GiB, 24GiB needed", and the hint said to ask for 24.0GiB."""
    small = replace(gpu("a"), memory_mib=24564)
    text = explain(refused(needs(1, gpu_memory_mib=24 * GIB), node(small)))
    assert text == "largest GPU on n1 has 23.9GiB, 24GiB needed"
    assert chosen(needs(1, gpu_memory_mib=parse_size("23.9GiB")), node(small)) == [("a", 1000)]
    text = explain(refused(needs(1, gpu_memory_mib=24570), node(small)))
    assert text == "largest GPU on n1 has 24564MiB, 24570MiB needed"


# --- MIG ----------------------------------------------------------------------------------------------------------


def divided(**gib: int) -> Node:
    """A GPU `p` with its instances, as a node lists them while one of both is still held."""
    return node(gpu("p", model="H100"), *(gpu(uuid, gib=size, model="1g", parent="p") for uuid, size in gib.items()))


def test_of_a_divided_gpu_only_the_parts_are_given_while_one_of_them_is_held() -> None:
    on = divided(i=10, j=10)
    assert chosen(needs(1), on, i=1000) == [("j", 1000)]
    assert chosen(needs(0.5), on, i=500) == [("i", 500)]
    assert explain(refused(needs(1, gpu_models=("H100",)), on, i=250)) == "0 of 1 GPU free on n1"


def test_of_a_gpu_that_is_held_no_part_is_given() -> None:
    on = divided(i=10)
    assert explain(refused(needs(1), on, p=250)) == "0 of 2 GPUs free on n1"
    assert chosen(needs(0.5), on, p=250) == [("p", 500)]


def test_a_share_that_a_divided_gpu_could_give_is_not_said_to_be_free() -> None:
    """It was told that one GPU is free where half of one was needed."""
    found = refused(needs(0.5, gpu_models=("H100",)), divided(i=10), i=250)
    assert explain(found) == "0 of 1 GPU free on n1, 0.5 needed"


def test_a_divided_gpu_is_not_said_to_wait_for_others() -> None:
    on = node(gpu("p", model="H100", foreign_milli=1000), gpu("i", model="1g", parent="p"))
    found = refused(needs(1, gpu_models=("H100",)), on, i=500)
    assert explain(found) == "0 of 1 GPU free on n1"


def test_one_replica_is_never_given_a_gpu_together_with_a_part_of_it() -> None:
    on = divided(i=10)
    assert explain(refused(needs(2), on)) == "1 of 2 GPUs free on n1, 2 needed"
    assert chosen(needs(2), divided(i=10, j=10)) == [("i", 1000), ("j", 1000)]
    with_another = node(*divided(i=90).capabilities.accelerators, gpu("q", gib=80, model="H100"))
    assert chosen(needs(2), with_another) == [("p", 1000), ("q", 1000)]


def test_a_gpu_that_claims_to_be_a_part_of_itself_excludes_nothing_else() -> None:
    on = node(gpu("a", parent="a"), gpu("b"))
    assert chosen(needs(2), on) == [("a", 1000), ("b", 1000)]
    assert chosen(needs(0.5), on, a=500) == [("a", 500)]
