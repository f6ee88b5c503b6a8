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
from tests.core.cluster.states import GIB, capabilities, gpu


def node(*gpus: Accelerator, **more: Any) -> Node:
    return named(capabilities(*gpus, **more))


def named(has: Capabilities) -> Node:
    return Node(id=NodeId("n-n1"), name="n1", capabilities=has, advertise="127.0.0.1", admitted_at_utc=0.0)


def all_free(on: Node, **used_milli: int) -> Free:
    has = on.capabilities
    return Free(
        gpu_milli={device.uuid: 1000 - used_milli.get(device.uuid, 0) for device in has.accelerators},
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
    assert explain(refused(needs(2), on)) == "1 of 1 GPU free on n1, 2 needed"


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
        (needs(1, vendor="amd"), "wrong_vendor", "GPUs on n1 are from 2 x nvidia, amd needed"),
        (
            needs(1, gpu_memory_mib=100 * GIB),
            "too_little_gpu_memory",
            "largest GPU on n1 has 80GiB, 100GiB needed",
        ),
        (needs(4), "not_enough_gpus_free", "2 of 2 GPUs free on n1, 4 needed"),
        (needs(cpus_milli=17_000), "too_few_cpus", "16 of 16 CPUs free on n1, 17 needed"),
        (needs(memory_mib=65 * GIB), "too_little_memory", "64GiB of 64GiB memory free on n1, 65GiB needed"),
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
    assert explain(found) == "1 of 2 GPUs healthy on n1 (a: xid 79)"
    assert not is_permanent(found)


def test_a_node_that_shrank_under_its_work_still_takes_what_asks_for_nothing() -> None:
    on = node(cpus=1)
    shrunk = replace(all_free(on), cpus_milli=-3000, memory_mib=-1)
    assert isinstance(fit(needs(), on, shrunk), Choice)
    assert explain(refused(needs(cpus_milli=500), on, shrunk)) == "0 of 1 CPUs free on n1, 0.5 needed"
