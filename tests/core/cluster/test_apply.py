"""What each command does to the state, and what none of them may ever do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulayer.core.cluster.apply import EVENTS_PER_ENTRY_MAX, Accepted, Rejected, apply
from gpulayer.core.cluster.commands import (
    CommitPlan,
    CreateCluster,
    CreateToken,
    ForgetJobs,
    LogEntry,
    Placement,
    ReplicaReleased,
    RestartReplicas,
    RevokeToken,
    StopJob,
)
from gpulayer.core.cluster.registry import DEVICES_TOLD_MAX
from gpulayer.model.ids import JobId, NodeId, TokenId
from gpulayer.model.node import Accelerator
from gpulayer.model.replica import DeviceShare, Outcome, Reason
from tests.core.cluster.states import (
    CANCELLED,
    Act,
    Cluster,
    admit,
    batch,
    ended,
    failed,
    gpu,
    histories,
    refused,
    service,
    shuffled,
    submit,
    succeeded,
)

WEB = JobId("j-web")


def one_gpu() -> Cluster:
    return Cluster(CreateCluster(cluster_id="c-1"), admit("n1", gpu("g0")))


def rejected(cluster: Cluster) -> Rejected:
    result = cluster.applied[-1].result
    assert isinstance(result, Rejected), result
    return result


def accepted(cluster: Cluster) -> Accepted:
    result = cluster.applied[-1].result
    assert isinstance(result, Accepted), result
    return result


# --- nodes --------------------------------------------------------------------------------------------------------


def test_a_cluster_is_created_once_only() -> None:
    cluster = Cluster(CreateCluster(cluster_id="c-1"))
    assert cluster.kinds == ["cluster.created"]
    cluster.do(CreateCluster(cluster_id="c-2"))
    assert rejected(cluster).code == "refused"
    assert cluster.state.cluster_id == "c-1"


def test_a_known_node_is_changed_and_keeps_its_time_of_admission() -> None:
    cluster = one_gpu()
    first = cluster.state.nodes[NodeId("n-n1")]
    cluster.do(admit("n1", gpu("g0"), gpu("g1")))
    assert cluster.kinds == ["node.changed"]
    assert "has 2 accelerators" in cluster.applied[-1].events[0].text
    assert cluster.state.nodes[NodeId("n-n1")].admitted_at_utc == first.admitted_at_utc
    cluster.do(admit("n1", gpu("g0"), gpu("g1")))
    assert cluster.kinds == [], "nothing changed, nothing is said"


def test_a_node_name_in_use_is_refused_with_the_one_who_has_it() -> None:
    cluster = one_gpu()
    cluster.do(replace(admit("n1"), node=NodeId("n-other")))
    assert "n-n1" in rejected(cluster).message


def test_a_device_listed_twice_by_its_node_is_refused() -> None:
    cluster = Cluster(admit("n1", gpu("g0"), gpu("g0")))
    assert rejected(cluster).code == "invalid_request"
    assert not cluster.state.nodes


def changed(before: tuple[Accelerator, ...], after: tuple[Accelerator, ...], **more: Any) -> str:
    """What is said when a node with these devices becomes one with those."""
    first, second = admit("n1", *before), admit("n1", *after)
    second = replace(second, capabilities=replace(second.capabilities, **more))
    (event,) = Cluster(first).do(second).events
    assert event.kind == "node.changed"
    return event.text.removeprefix("node n1 changed: ")


BOB = "pid 7 (python of user bob) holds 20GiB"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (gpu("g0"), gpu("g0", unhealthy="GPU is lost"), "g0 (A100) is unhealthy: GPU is lost"),
        (gpu("g0", unhealthy="hot"), gpu("g0", unhealthy="GPU is lost"), "g0 (A100) is unhealthy: GPU is lost"),
        (gpu("g0", unhealthy="hot"), gpu("g0"), "g0 (A100) is well again"),
        (gpu("g0"), gpu("g0", foreign_milli=1000), f"g0 (A100) is used by others: {BOB}"),
        (gpu("g0", foreign_milli=1000), gpu("g0"), "g0 (A100) is free of others"),
        (
            gpu("g0", unhealthy="hot"),
            gpu("g0", foreign_milli=1000),
            f"g0 (A100) is well again; g0 (A100) is used by others: {BOB}",
        ),
        (gpu("g0"), gpu("g0", unhealthy="hot", model=""), "g0 is unhealthy: hot"),
        (gpu("g0", foreign_milli=300), gpu("g0", foreign_milli=500), "g0 (A100) has used by others 0.5, was 0.3"),
        (gpu("g0"), gpu("g0", gib=40), "g0 (A100) has memory 40GiB, was 80GiB"),
        (
            replace(gpu("GPU-1", index=1), pci_bus_id="0000:3b:00.0"),
            gpu("GPU-1", index=0),
            "GPU-1 (GPU 0, A100) has number 0, was 1, PCI address none, was 0000:3b:00.0",
        ),
    ],
)
def test_a_change_of_a_device_is_told_with_its_name_and_the_reason(
    before: Accelerator, after: Accelerator, text: str
) -> None:
    beside = gpu("g1", unhealthy="was so before", foreign_milli=1000)
    assert changed((before, beside), (after, beside)) == text


def test_a_device_that_is_new_and_not_well_is_told_with_the_reason() -> None:
    assert changed((), (gpu("g0", unhealthy="hot"), gpu("g1", foreign_milli=1000))) == (
        f"it has 2 accelerators, had 0; g0 (A100) is unhealthy: hot; g1 (A100) is used by others: {BOB}"
    )


def test_a_driver_that_cannot_be_asked_any_more_is_told_with_the_reason() -> None:
    """Nothing is found, and nobody is told."""
    text = changed((gpu("g0"),), (gpu("g0", unhealthy="it hangs"),), gpu_detect="error", undetected=("it hangs",))
    assert text == "gpu_detect=error: it hangs; g0 (A100) is unhealthy: it hangs"
    assert changed((), (), gpu_detect="ok", undetected=("NVLink",)) == "gpu_detect=ok"


def test_what_is_told_of_devices_is_bounded() -> None:
    many = tuple(gpu(f"g{number:02}") for number in range(20))
    text = changed(many, tuple(replace(device, unhealthy="hot") for device in many))
    assert text.count("is unhealthy") == DEVICES_TOLD_MAX
    assert text.endswith("g07 (A100) is unhealthy: hot; and 12 more")


def test_another_change_of_a_node_is_not_said_to_be_one_of_its_devices() -> None:
    assert changed((gpu("g0"),), (gpu("g0"),), cpus_milli=1) == "its CPUs, memory, labels or drivers are others"


# --- submit -------------------------------------------------------------------------------------------------------


def test_a_submitted_job_waits_with_all_its_replicas() -> None:
    cluster = one_gpu()
    cluster.do(submit(service(replicas=2)))
    assert accepted(cluster) == Accepted(job=WEB, name="web")
    assert [replica.assignment for replica in cluster.job().replicas] == [None, None]
    assert cluster.kinds == ["job.submitted"]


def test_an_explicit_name_in_use_is_refused_and_free_again_once_the_job_ended() -> None:
    cluster = Cluster(submit(service()), submit(service(), "j-other"))
    assert rejected(cluster).code == "refused"
    assert rejected(cluster).message == "name web is in use by job j-web"
    cluster.do(StopJob(job=WEB, reason=CANCELLED), submit(service(), "j-other"))
    assert accepted(cluster).name == "web"


def test_a_derived_name_gets_a_suffix_within_the_length_of_names() -> None:
    long = "x" * 63
    cluster = Cluster(*(submit(service(long), f"j-{number}", name_is_derived=True) for number in range(3)))
    assert [cluster.job(f"j-{number}").name for number in range(3)] == [long, "x" * 61 + "-2", "x" * 61 + "-3"]
    assert cluster.job("j-1").spec.name == cluster.job("j-1").name


def test_the_same_key_and_request_answers_with_the_first_job() -> None:
    cluster = Cluster(submit(service(), idempotency_key="k", request_digest="d"))
    cluster.do(submit(service(), "j-again", idempotency_key="k", request_digest="d"))
    assert accepted(cluster) == Accepted(job=WEB, name="web", replayed=True)
    assert list(cluster.state.jobs) == [WEB]


def test_the_same_key_for_another_request_is_a_conflict() -> None:
    cluster = Cluster(submit(service(), idempotency_key="k", request_digest="d"))
    cluster.do(submit(service("other"), idempotency_key="k", request_digest="e"))
    assert rejected(cluster).code == "idempotency_conflict"


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_plan_copies_what_the_replica_holds_into_its_assignment() -> None:
    cluster = one_gpu()
    cluster.do(submit(service(gpus=0.5, cpus_milli=2000, memory_mib=100)))
    cluster.plan()
    assignment = cluster.job().replicas[0].assignment
    assert assignment is not None
    assert assignment.devices == (DeviceShare(uuid="g0", milli=500),)
    assert (assignment.cpus_milli, assignment.memory_mib, assignment.attempt) == (2000, 100, 1)
    assert cluster.kinds == ["replica.assigned"]
    assert "replica 0 of web placed on n1 with 0.5 GPU" in cluster.applied[-1].events[0].text


def placement(job: str = "j-web", **more: object) -> Placement:
    fields = {"revision": 1, "replica": 0, "attempt": 1, "node": NodeId("n-n1")} | more
    fields.setdefault("devices", (DeviceShare(uuid="g0", milli=1000),))
    return Placement(job=JobId(job), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "j-unknown"},
        {"revision": 2},
        {"replica": 7},
        {"attempt": 2},
        {"node": NodeId("n-unknown")},
        {"devices": ()},
        {"devices": (DeviceShare(uuid="g9", milli=1000),)},
        {"devices": (DeviceShare(uuid="sick", milli=1000),)},
        {"devices": (DeviceShare(uuid="others", milli=1000),)},
        {"devices": (DeviceShare(uuid="shared", milli=1000),)},
        {"devices": (DeviceShare(uuid="g0", milli=500),)},
    ],
)
def test_a_placement_that_no_longer_holds_is_dropped(wrong: dict[str, object]) -> None:
    devices = (gpu("sick", unhealthy="too hot"), gpu("others", foreign_milli=1000), gpu("shared", foreign_milli=1))
    cluster = Cluster(admit("n1", gpu("g0"), *devices), submit(service(gpus=1)))
    made = placement(**wrong)  # type: ignore[arg-type]
    cluster.do(CommitPlan(based_on=cluster.state.index, placements=(made,)))
    assert accepted(cluster).dropped == (made,)
    assert cluster.job().replicas[0].assignment is None


def test_two_placements_of_one_plan_never_share_a_whole_gpu() -> None:
    """The second is dropped and waits; it is not started without its GPU."""
    cluster = one_gpu()
    cluster.do(submit(service("a", gpus=1)), submit(service("b", gpus=1)))
    both = (placement("j-a"), placement("j-b"))
    cluster.do(CommitPlan(based_on=cluster.state.index, placements=both))
    assert accepted(cluster).dropped == (both[1],)
    assert cluster.job("j-b").replicas[0].assignment is None


def test_a_plan_does_not_place_what_is_being_stopped() -> None:
    cluster = one_gpu()
    cluster.do(submit(service(gpus=1)))
    made = CommitPlan(based_on=cluster.state.index, placements=(placement(),))
    cluster.do(StopJob(job=WEB, reason=CANCELLED), made)
    assert accepted(cluster).dropped == made.placements


def test_spread_over_nodes_is_checked_again_by_the_log() -> None:
    cluster = Cluster(admit("n1"), submit(service(replicas=2)))
    both = tuple(placement(replica=index, devices=()) for index in (0, 1))
    cluster.do(CommitPlan(based_on=cluster.state.index, placements=both))
    assert accepted(cluster).dropped == (both[1],)


def test_cpus_and_memory_are_checked_again_by_the_log() -> None:
    cluster = Cluster(admit("n1", cpus=4), submit(service("a", cpus_milli=3000)), submit(service("b", cpus_milli=3000)))
    both = (placement("j-a", devices=()), placement("j-b", devices=()))
    cluster.do(CommitPlan(based_on=cluster.state.index, placements=both))
    assert accepted(cluster).dropped == (both[1],)


def placed_shares(cluster: Cluster, *shares: tuple[str, str, int]) -> list[bool]:
    """One plan with a share of a device for each job: which of them were placed?"""
    made = tuple(placement(f"j-{job}", devices=(DeviceShare(uuid=uuid, milli=milli),)) for job, uuid, milli in shares)
    cluster.do(CommitPlan(based_on=cluster.state.index, placements=made))
    return [each not in accepted(cluster).dropped for each in made]


def test_a_share_beside_one_of_others_is_placed_as_far_as_it_fits() -> None:
    cluster = Cluster(admit("n1", gpu("g0", foreign_milli=400)), submit(service("a", gpus=0.6)))
    cluster.do(submit(service("b", gpus=0.6)))
    assert placed_shares(cluster, ("a", "g0", 600), ("b", "g0", 600)) == [True, False]


@pytest.mark.parametrize("first", ["gpu", "part"])
def test_a_gpu_and_its_mig_instances_are_not_placed_on_at_the_same_time(first: str) -> None:
    cluster = Cluster(admit("n1", gpu("gpu"), gpu("part", parent="gpu"), gpu("sibling", parent="gpu")))
    cluster.do(*(submit(service(name, gpus=0.5)) for name in "abc"))
    second = "part" if first == "gpu" else "gpu"
    assert placed_shares(cluster, ("a", first, 500), ("b", second, 500), ("c", first, 500)) == [True, False, True]
    cluster.do(submit(service("d", gpus=0.5)))
    assert placed_shares(cluster, ("b", second, 500), ("d", "sibling", 500)) == [False, first == "part"]


def test_one_placement_with_a_gpu_and_a_part_of_it_is_dropped() -> None:
    cluster = Cluster(admit("n1", gpu("gpu"), gpu("part", parent="gpu")), submit(service(gpus=2)))
    both = tuple(DeviceShare(uuid=uuid, milli=1000) for uuid in ("gpu", "part"))
    made = placement(devices=both)
    cluster.do(CommitPlan(based_on=cluster.state.index, placements=(made,)))
    assert accepted(cluster).dropped == (made,)


# --- ends ---------------------------------------------------------------------------------------------------------


def running(spec_: object = None, *, nodes: int = 1) -> Cluster:
    cluster = Cluster(*(admit(f"n{number}", gpu(f"g{number}")) for number in range(1, nodes + 1)))
    cluster.do(submit(spec_ or service(gpus=1), "j-web"))  # type: ignore[arg-type]
    cluster.plan()
    return cluster


def test_what_an_ended_replica_held_is_free_only_when_it_is_released() -> None:
    """A GPU is free again when no process of the old replica is left, not when its end is known."""
    cluster = running()
    cluster.do(ended(failed(), released=False), submit(service("next", gpus=1)))
    cluster.plan()
    assert cluster.job("j-next").replicas[0].assignment is None
    assert cluster.job().is_live
    cluster.do(ReplicaReleased(job=WEB, replica=0, attempt=1))
    assert cluster.kinds == ["replica.released", "job.ended"]
    cluster.plan()
    assert cluster.job("j-next").replicas[0].assignment is not None


def test_the_job_says_which_replica_ended_and_how() -> None:
    """It has failed, and why."""
    cluster = running()
    cluster.do(ended(failed(3, restarts=3)))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert (outcome.result, outcome.restarts) == ("failed", 3)
    assert outcome.reason.code == "exit_nonzero"
    assert outcome.reason.text == "replica 0 ended: exit code 3 after 3 restarts"
    assert outcome.exit is not None
    assert outcome.exit.code == 3
    assert cluster.kinds == ["replica.ended", "replica.released", "job.ended"]


def test_a_replica_that_ended_for_good_stops_the_others_and_gives_the_job_its_outcome() -> None:
    cluster = running(service(replicas=3, gpus=1), nodes=2)
    cluster.do(ended(failed()))
    first, second, third = cluster.job().replicas
    assert first.assignment is None
    assert second.assignment is not None
    assert second.assignment.withdrawn is not None
    assert second.assignment.withdrawn.code == "replica_ended"
    assert third.outcome is not None, "it had never been placed"
    assert third.outcome.reason.code == "replica_ended"
    assert cluster.job().is_live
    cluster.do(ended(Outcome(result="cancelled", reason=Reason(code="replica_ended")), replica=1))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "failed"


def test_with_keep_a_failed_replica_ends_alone() -> None:
    """One that fails takes nothing along where that was asked for."""
    cluster = running(service(replicas=2, gpus=1, on_replica_end="keep"), nodes=2)
    cluster.do(ended(failed()))
    other = cluster.job().replicas[1].assignment
    assert other is not None
    assert other.withdrawn is None
    assert cluster.job().is_live
    cluster.do(ended(succeeded(), replica=1))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "failed"
    assert outcome.reason.text.startswith("replica 0 ended")


def test_a_batch_succeeds_when_every_replica_exited_zero() -> None:
    cluster = running(batch(replicas=2, gpus=1), nodes=2)
    cluster.do(ended(succeeded()))
    assert cluster.job().is_live
    cluster.do(ended(succeeded(), replica=1))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "succeeded"


def test_a_failed_replica_of_a_batch_stops_the_others() -> None:
    cluster = running(batch(replicas=2, gpus=1), nodes=2)
    cluster.do(ended(failed(), replica=1))
    first = cluster.job().replicas[0].assignment
    assert first is not None
    assert first.withdrawn is not None
    assert cluster.job().stopping is not None


def test_a_batch_that_keeps_runs_on_and_fails_at_its_end() -> None:
    cluster = running(batch(replicas=2, gpus=1, on_replica_end="keep"), nodes=2)
    cluster.do(ended(failed(), replica=1))
    assert cluster.job().stopping is None
    cluster.do(ended(succeeded()))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "failed"


def test_a_report_said_twice_is_accepted_and_changes_nothing() -> None:
    cluster = running(service(replicas=2, gpus=1, on_replica_end="keep"), nodes=2)
    cluster.do(ended(failed()))
    before = cluster.job()
    cluster.do(ended(failed()))
    assert isinstance(accepted(cluster), Accepted)
    assert cluster.job() == before
    cluster.do(ended(succeeded()))
    assert "ended already" in rejected(cluster).message, "the first outcome stays"


def test_a_second_report_that_differs_still_releases() -> None:
    """A daemon that died between the end and the release may tell it in other words; its GPU must not stay held."""
    cluster = running()
    cluster.do(ended(failed(3), released=False), ended(failed(4), released=True))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.exit is not None
    assert outcome.exit.code == 3


def test_a_report_about_another_attempt_changes_nothing() -> None:
    cluster = running()
    before = cluster.job()
    cluster.do(ended(failed(), attempt=2))
    assert rejected(cluster).message == "replica 0 of web is at attempt 1, not at attempt 2"
    cluster.do(ReplicaReleased(job=WEB, replica=0, attempt=1))
    assert rejected(cluster).message == "replica 0 of web has not ended"
    assert cluster.job() == before


# --- refused ------------------------------------------------------------------------------------------------------


def devices(cluster: Cluster) -> dict[str, Accelerator]:
    return {device.uuid: device for device in cluster.state.nodes[NodeId("n-n1")].capabilities.accelerators}


def test_a_refused_replica_waits_again_and_its_next_attempt_is_another_one() -> None:
    cluster = running()
    cluster.do(refused())
    assert cluster.kinds == ["replica.refused", "replica.released"]
    event = cluster.applied[-1].events[0]
    assert event.text == "n1 cannot run replica 0 of web, which waits again: g0 is used by others: pid 7"
    assert dict(event.data) == {"attempt": "1", "reason": "device_unavailable"}
    (replica,) = cluster.job().replicas
    assert (replica.assignment, replica.outcome, replica.attempts) == (None, None, 1)
    assert cluster.job().is_live
    cluster.plan()
    assignment = cluster.job().replicas[0].assignment
    assert assignment is not None
    assert assignment.attempt == 2


def test_what_the_node_saw_of_the_devices_is_in_the_same_entry_so_no_plan_chooses_them_again() -> None:
    cluster = Cluster(admit("n1", gpu("g0"), gpu("g1", foreign_milli=1000)), submit(service(gpus=1)))
    cluster.plan()
    cluster.do(refused(gpu("g0", foreign_milli=1000), gpu("unknown")))
    assert devices(cluster) == {"g0": gpu("g0", foreign_milli=1000), "g1": gpu("g1", foreign_milli=1000)}
    assert cluster.kinds == ["replica.refused", "replica.released", "node.changed"]
    assert cluster.applied[-1].events[2].text == f"node n1 changed: g0 (A100) is used by others: {BOB}"
    cluster.plan()
    assert cluster.job().replicas[0].assignment is None
    cluster.do(admit("n1", gpu("g0"), gpu("g1", foreign_milli=1000)))
    assert "g0 (A100) is free of others" in cluster.applied[-1].events[0].text
    cluster.plan()
    assert cluster.job().replicas[0].assignment is not None


def test_a_refusal_that_is_repeated_is_accepted_and_changes_nothing() -> None:
    cluster = running()
    cluster.do(refused(gpu("g1", foreign_milli=1000)))
    before = cluster.state
    cluster.do(refused(gpu("g1", unhealthy="hot")))
    assert accepted(cluster).job == WEB
    assert cluster.kinds == []
    assert (cluster.state.jobs, cluster.state.nodes) == (before.jobs, before.nodes)


def test_a_late_refusal_of_an_older_attempt_does_not_touch_the_next_one() -> None:
    cluster = running()
    cluster.do(refused())
    cluster.plan()
    cluster.do(refused(gpu("g1", unhealthy="hot")))
    assert rejected(cluster).message == "replica 0 of web is at attempt 2, not at attempt 1"
    assert devices(cluster)["g1"].unhealthy == ""
    assert cluster.job().replicas[0].assignment is not None


def test_an_end_after_the_refusal_is_about_an_attempt_that_is_over() -> None:
    cluster = running()
    cluster.do(refused(), ended(failed()))
    assert rejected(cluster).message == "replica 0 of web waits again after attempt 1"
    assert cluster.job().replicas[0].outcome is None


def test_a_refusal_by_an_attempt_that_was_never_made_changes_nothing() -> None:
    cluster = Cluster(admit("n1", gpu("g0")), submit(service(gpus=1)))
    for attempt in (-1, 0, 1):
        cluster.do(refused(attempt=attempt))
        assert "not placed yet" in rejected(cluster).message
    cluster.do(refused(replica=1))
    assert rejected(cluster).code == "not_found"
    cluster.do(refused(job="j-unknown"))
    assert rejected(cluster).code == "not_found"


def test_a_replica_that_was_told_to_stop_and_is_refused_ends_cancelled() -> None:
    cluster = running(service(replicas=2, gpus=1), nodes=2)
    cluster.do(StopJob(job=WEB, reason=CANCELLED), refused())
    first, second = cluster.job().replicas
    assert first.outcome == Outcome(result="cancelled", reason=CANCELLED)
    assert first.assignment is None
    assert second.assignment is not None
    cluster.do(refused(replica=1))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "cancelled"


def test_a_refusal_of_what_had_ended_for_the_log_is_its_release() -> None:
    cluster = running()
    cluster.do(ended(failed(), released=False), refused(gpu("g1", unhealthy="hot")))
    assert cluster.kinds == ["replica.released", "job.ended", "node.changed"]
    assert cluster.job().outcome is not None
    assert devices(cluster)["g1"].unhealthy == "hot"


def test_other_replicas_of_the_job_go_on_whatever_is_refused() -> None:
    cluster = running(batch(replicas=2, gpus=1), nodes=2)
    before = cluster.job().replicas[1]
    cluster.do(refused())
    assert cluster.job().replicas[1] == before
    assert cluster.job().stopping is None


def test_what_a_refusal_says_of_a_device_that_another_replica_holds_takes_it_nothing() -> None:
    cluster = Cluster(admit("n1", gpu("g0")), submit(service("a", gpus=0.5)), submit(service("b", gpus=0.5)))
    cluster.plan()
    cluster.do(refused(gpu("g0", foreign_milli=1000), job="j-b"))
    assert cluster.job("j-a").replicas[0].assignment is not None
    cluster.plan()
    assert cluster.job("j-b").replicas[0].assignment is None


# --- stop, restart, forget ----------------------------------------------------------------------------------------


def test_stopping_a_job_that_was_never_placed_ends_it_at_once() -> None:
    cluster = Cluster(submit(service()), StopJob(job=WEB, reason=CANCELLED))
    assert cluster.kinds == ["job.stopping", "job.ended"]
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "cancelled"


def test_stopping_a_running_job_withdraws_and_waits_for_the_release() -> None:
    cluster = running()
    cluster.do(StopJob(job=WEB, reason=CANCELLED))
    assignment = cluster.job().replicas[0].assignment
    assert assignment is not None
    assert assignment.withdrawn == CANCELLED
    cluster.do(StopJob(job=WEB, reason=CANCELLED))
    assert accepted(cluster).job == WEB
    assert cluster.kinds == [], "said twice is told once"
    cluster.do(ended(failed(143)))
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "cancelled", "how it died does not matter: it was told to"
    cluster.do(StopJob(job=WEB, reason=CANCELLED), seconds_later=180)
    assert "job web ended already (cancelled 3m ago" in rejected(cluster).message


def test_a_restart_is_counted_on_the_replica_and_its_assignment() -> None:
    cluster = running(service(replicas=2, gpus=1))
    cluster.do(RestartReplicas(job=WEB, replicas=(0,)))
    assert cluster.kinds == ["replica.restart_requested"]
    replica = cluster.job().replicas[0]
    assert replica.assignment is not None
    assert replica.restart_serial == replica.assignment.restart_serial == 1
    cluster.do(RestartReplicas(job=WEB, replicas=(1,)))
    assert "waits for a place" in rejected(cluster).message
    cluster.do(RestartReplicas(job=WEB, replicas=(0, 1)))
    assert len(accepted(cluster).skipped) == 1
    cluster.do(StopJob(job=WEB, reason=CANCELLED), RestartReplicas(job=WEB, replicas=(0,)))
    assert rejected(cluster).message == "job web is stopping"


def test_only_ended_jobs_are_forgotten() -> None:
    cluster = Cluster(submit(service("a")), submit(service("b")), StopJob(job=JobId("j-a"), reason=CANCELLED))
    cluster.do(ForgetJobs(jobs=(JobId("j-a"), JobId("j-b"))))
    assert list(cluster.state.jobs) == ["j-b"]
    cluster.do(ForgetJobs(jobs=(JobId("j-b"),)))
    assert rejected(cluster).code == "refused"


# --- tokens -------------------------------------------------------------------------------------------------------


def test_a_token_is_created_once_and_revoked_once() -> None:
    create = CreateToken(token=TokenId("t-1"), role="admin", digest="d", label="laptop")
    cluster = Cluster(create)
    assert cluster.kinds == ["token.created"]
    assert "d" not in dict(cluster.applied[-1].events[0].data)
    cluster.do(create)
    assert rejected(cluster).code == "refused"
    cluster.do(RevokeToken(token=TokenId("t-1")))
    assert not cluster.state.tokens
    cluster.do(RevokeToken(token=TokenId("t-1")))
    assert rejected(cluster).code == "not_found"


# --- laws ---------------------------------------------------------------------------------------------------------


def test_an_entry_out_of_order_is_our_own_mistake() -> None:
    cluster = one_gpu()
    with pytest.raises(AssertionError):
        apply(cluster.state, LogEntry(index=9, term=1, at_utc=0.0, command=CreateCluster(cluster_id="c")))


def test_cluster_time_never_goes_back() -> None:
    cluster = one_gpu()
    before = cluster.state.time_utc
    for at_utc in (-5.0, float("nan"), float("inf")):
        entry = LogEntry(index=cluster.state.index + 1, term=1, at_utc=at_utc, command=RevokeToken(token=TokenId("t")))
        assert apply(cluster.state, entry).state.time_utc == before


def test_more_events_than_an_entry_has_numbers_for_are_folded() -> None:
    cluster = Cluster(admit("n1"), submit(service(replicas=1100, spread="any")))
    while any(replica.assignment is None for replica in cluster.job().replicas):
        cluster.plan()
    events = cluster.do(RestartReplicas(job=WEB, replicas=tuple(range(1100)))).events
    assert len(events) == EVENTS_PER_ENTRY_MAX
    assert events[-1].text == "and 101 more of the same"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.integers(0, 1000))
def test_any_history_keeps_what_must_hold_whatever_the_order_of_the_mappings(history: list[Act], seed: int) -> None:
    """Sense or nonsense: nothing raises, check() holds after each entry (Cluster.do), a rejected command changes
    nothing but the entry's own numbers, and two voters with differently filled mappings agree."""
    cluster = Cluster()
    for act in history:
        before = cluster.state
        command = act(before)
        applied = cluster.do(command)
        entry = LogEntry(index=before.index + 1, term=1, at_utc=before.time_utc + 1.0, command=command)
        assert apply(shuffled(before, seed), entry) == applied
        assert [event.seq for event in applied.events] == [
            entry.index * EVENTS_PER_ENTRY_MAX + k for k in range(len(applied.events))
        ]
        assert all(event.text for event in applied.events)
        for job_id in before.jobs.keys() & applied.state.jobs.keys():
            for old, new in zip(before.jobs[job_id].replicas, applied.state.jobs[job_id].replicas, strict=True):
                is_placed = old.assignment is None and new.assignment is not None
                assert new.attempts == old.attempts + is_placed, "P4: each placement is an attempt of its own"
                assert old.outcome in (None, new.outcome)
                assert not is_placed or old.outcome is None
        if isinstance(applied.result, Rejected):
            assert applied.result.message
            assert not applied.events
            assert applied.state == replace(before, index=entry.index, term=1, time_utc=entry.at_utc)
