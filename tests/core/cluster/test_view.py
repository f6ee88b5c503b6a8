"""The states and reasons that people see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulayer.core.cluster.commands import StopJob
from gpulayer.core.cluster.hints import HINTS, beside_explanation, hint_for, with_hint
from gpulayer.core.cluster.view import JOB_STATES, JobView, job_view
from gpulayer.core.placement.plan import waiting_reasons
from gpulayer.model.cluster import ClusterState
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import REASON_CODES, Endpoint, Exit, Outcome, Reason, ReplicaStatus
from gpulayer.model.seen import NodeSeen, NodeState
from tests.core.cluster.states import (
    CANCELLED,
    Cluster,
    admit,
    batch,
    ended,
    failed,
    gpu,
    service,
    states,
    submit,
    succeeded,
)

REPLICA_STATES = ("waiting", "assigned", "starting", "ready", "unready", "backing_off", "stopping", "ended")


def placed(spec: JobSpec, nodes: int = 2) -> Cluster:
    cluster = Cluster(*(admit(f"n{number}", gpu(f"g{number}")) for number in range(1, nodes + 1)))
    cluster.do(submit(spec, "j-web"))
    cluster.plan()
    return cluster


def says(index: int, state: Any, **more: Any) -> ReplicaStatus:
    return ReplicaStatus(attempt=AttemptId(ReplicaId(JobId("j-web"), index), 1), state=state, **more)


def view(cluster: Cluster, *statuses: ReplicaStatus, now_utc: float = 100.0) -> JobView:
    state = cluster.state
    return job_view(
        cluster.job(),
        {status.attempt: status for status in statuses},
        waiting_reasons(state, {}),
        node_names={node.id: node.name for node in state.nodes.values()},
        nodes=state.nodes,
        now_utc=now_utc,
    )


def test_every_reason_code_has_a_remedy() -> None:
    assert set(HINTS) == set(REASON_CODES)
    assert all(hint_for(code) for code in [*REASON_CODES, "of_a_newer_node"])


def test_a_job_that_nothing_can_run_waits_and_says_why() -> None:
    """The reason has the numbers and the node."""
    cluster = placed(service("first", gpus=1), nodes=1)
    cluster.do(submit(service("second", gpus=1), "j-second"))
    seen = job_view(cluster.job("j-second"), {}, waiting_reasons(cluster.state, {}), node_names={}, now_utc=0.0)
    assert seen.state == "waiting"
    assert seen.reason is not None
    assert seen.reason.code == "no_capacity"
    assert "0 of 1 GPU free on n1" in seen.reason.text
    assert seen.reason.hint
    assert seen.replicas[0].next == "starts as soon as there is room"


def test_a_job_that_no_node_could_ever_run_says_what_it_waits_for() -> None:
    cluster = placed(service("first"), nodes=1)
    cluster.do(submit(service("second", gpus=9), "j-second"))
    seen = job_view(cluster.job("j-second"), {}, waiting_reasons(cluster.state, {}), node_names={}, now_utc=0.0)
    assert seen.reason is not None
    assert seen.reason.code == "never_fits"
    assert seen.replicas[0].next == "starts when a node has what it needs"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("assigned", "assigned"), "starting"),
        (("starting", "assigned"), "starting"),
        (("ready", "starting"), "degraded"),
        (("ready", "ready"), "running"),
        (("ready", "unready"), "degraded"),
        (("backing_off", "unready"), "starting"),
    ],
)
def test_the_state_of_a_service_follows_from_its_replicas(states: tuple[str, str], expected: str) -> None:
    cluster = placed(service(replicas=2, gpus=1))
    seen = view(cluster, *(says(index, state, run=1, pid=7) for index, state in enumerate(states)))
    assert seen.state == expected
    assert (seen.reason is None) == (expected == "running")


def test_a_batch_runs_once_every_replica_has_started() -> None:
    cluster = placed(batch(replicas=2, gpus=1))
    assert view(cluster, says(0, "starting", run=1, pid=7)).state == "starting"
    seen = view(cluster, says(0, "starting", run=1, pid=7), says(1, "starting", run=1, pid=8))
    assert (seen.state, seen.reason) == ("running", None)


def test_a_replica_that_backs_off_says_when_it_starts_again_and_what_went_wrong() -> None:
    cluster = placed(service(gpus=1))
    exit = Exit(run=4, code=3)
    seen = view(cluster, says(0, "backing_off", run=4, restarts=3, next_start_at_utc=106.4, last_exit=exit))
    replica = seen.replicas[0]
    assert replica.reason is not None
    assert (replica.reason.code, replica.reason.text) == ("exit_nonzero", "exit code 3")
    assert (replica.next, replica.restarts, replica.node) == ("restarts in 7 s", 3, "n1")
    assert seen.reason == replica.reason


def test_an_endpoint_is_shown_only_while_the_replica_is_ready() -> None:
    """P5: a status that still carries one after the order to stop does not list it."""
    cluster = placed(service(gpus=1))
    endpoint = Endpoint(address="10.0.0.1", port=20001)
    assert view(cluster, says(0, "ready", endpoint=endpoint)).replicas[0].endpoint == endpoint
    assert view(cluster, says(0, "unready", endpoint=endpoint)).replicas[0].endpoint is None
    cluster.do(StopJob(job=JobId("j-web"), reason=CANCELLED))
    seen = view(cluster, says(0, "ready", endpoint=endpoint))
    assert (seen.state, seen.replicas[0].state, seen.replicas[0].endpoint) == ("stopping", "stopping", None)
    assert "SIGTERM" in seen.replicas[0].next


def test_what_waits_for_its_gpus_to_be_clear_is_not_said_to_be_killed() -> None:
    """It had ended by itself, and no signal was sent."""
    cluster = placed(batch(gpus=1))
    cluster.do(ended(succeeded(), released=False))
    not_clear = Reason(code="devices_not_clear", text="all its processes have ended")
    replica = view(cluster, says(0, "stopping", reason=not_clear)).replicas[0]
    assert replica.next == "goes on when its GPUs are confirmed free, after 30s at most"


@pytest.mark.parametrize(("spec", "remedy"), [(service(gpus=2), "job restart web"), (batch(gpus=2), "cancel it")])
def test_a_replica_whose_gpu_fails_under_it_carries_a_warning(spec: JobSpec, remedy: str) -> None:
    cluster = Cluster(admit("n1", *(gpu(f"GPU-{number}", index=number) for number in range(3))), submit(spec, "j-web"))
    cluster.plan()
    held = [share.uuid for share in view(cluster, says(0, "ready")).replicas[0].devices]
    assert held == ["GPU-0", "GPU-1"]
    assert view(cluster, says(0, "ready")).replicas[0].warning is None
    lost = [gpu(f"GPU-{number}", index=number, unhealthy="the GPU is lost") for number in (0, 2)]
    cluster.do(admit("n1", *lost, gpu("GPU-1", index=1)))
    seen = view(cluster, says(0, "ready", warning=Reason(code="cgroup_unavailable"))).replicas[0]
    assert (seen.state, seen.reason) == ("ready", None)
    assert seen.warning is not None
    assert seen.warning.code == "device_unhealthy"
    assert seen.warning.text == "GPU 0 (GPU-0), which it holds, is unhealthy: the GPU is lost"
    assert remedy in seen.warning.hint
    cluster.do(StopJob(job=JobId("j-web"), reason=CANCELLED))
    assert view(cluster, says(0, "stopping")).replicas[0].warning is None


def test_a_replica_that_cannot_be_killed_is_stopping_with_its_pid() -> None:
    cluster = placed(service(gpus=1))
    cluster.do(StopJob(job=JobId("j-web"), reason=CANCELLED))
    stuck = Reason(code="unkillable", text="pid 77 is in state D")
    cluster.do(ended(Outcome(result="cancelled", reason=CANCELLED), released=False))
    replica = view(cluster, says(0, "stopping", pid=77, reason=stuck)).replicas[0]
    assert (replica.state, replica.pid) == ("stopping", 77)
    assert replica.reason is not None
    assert replica.reason.text == stuck.text


def test_a_batch_that_succeeded_needs_no_reason_and_no_advice() -> None:
    cluster = placed(batch(gpus=1))
    cluster.do(ended(succeeded()))
    seen = view(cluster)
    assert (seen.state, seen.reason, seen.replicas[0].reason) == ("succeeded", None, None)


def test_a_hint_names_the_job_that_it_is_about() -> None:
    cluster = placed(service("first", gpus=1), nodes=1)
    cluster.do(submit(service("second", gpus=1), "j-second"))
    seen = job_view(cluster.job("j-second"), {}, waiting_reasons(cluster.state, {}), node_names={}, now_utc=0.0)
    assert seen.reason is not None
    assert "`gpulayer job explain second`" in seen.reason.hint
    assert "`gpulayer status`" in beside_explanation(seen.reason.hint)
    for code in HINTS:
        assert "JOB" not in with_hint(Reason(code=code), "first").hint


def test_with_keep_the_service_is_degraded_by_an_ended_replica() -> None:
    cluster = placed(service(replicas=2, gpus=1, on_replica_end="keep"))
    cluster.do(ended(failed(3, restarts=2)))
    seen = view(cluster, says(1, "ready"))
    assert seen.state == "degraded"
    assert seen.reason is not None
    assert seen.reason.text.startswith("1 of 2 replicas ready; replica 0: ")
    first = seen.replicas[0]
    assert (first.state, first.node, first.restarts) == ("ended", "n1", 2)
    assert first.last_exit == Exit(run=1, code=3)


def test_an_ended_job_says_how_it_ended() -> None:
    cluster = placed(service(gpus=1))
    cluster.do(ended(failed(3)))
    seen = view(cluster)
    assert seen.state == "failed"
    assert seen.reason is not None
    assert seen.reason.text == "replica 0 ended: exit code 3"
    assert "logs" in seen.reason.hint


_status_fields = st.fixed_dictionaries(
    {
        "state": st.sampled_from(REPLICA_STATES),
        "reason": st.sampled_from([None, Reason(code="port_taken")]),
        "run": st.integers(0, 3),
        "pid": st.sampled_from([None, 7]),
        "next_start_at_utc": st.sampled_from([None, 0.0, 1e9]),
        "last_exit": st.sampled_from([None, Exit(run=1, code=0), Exit(run=1, signal=9), Exit(run=1)]),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states(), st.lists(_status_fields, min_size=1, max_size=4))
def test_every_state_but_a_good_one_has_a_reason_with_a_remedy(state: ClusterState, said: list[dict[str, Any]]) -> None:
    """P9, whatever nodes say of attempts, whatever the log holds."""
    reasons = waiting_reasons(state, {})
    for job in state.jobs.values():
        statuses: Mapping[AttemptId, ReplicaStatus] = {
            replica.assignment.id: ReplicaStatus(attempt=replica.assignment.id, **said[replica.index % len(said)])
            for replica in job.replicas
            if replica.assignment is not None
        }
        seen = job_view(job, statuses, reasons, node_names={}, now_utc=50.0)
        assert seen.state in JOB_STATES
        for one in (seen, *seen.replicas):
            is_as_wished = job.spec.kind == "batch" and one.reason is None and one.state in ("succeeded", "ended")
            if one.state not in ("running", "ready") and not is_as_wished:
                assert one.reason is not None, one
                assert one.reason.code in REASON_CODES
                assert one.reason.hint


def seen_as(state: NodeState, *, is_stale: bool = False) -> dict[NodeId, NodeSeen]:
    reason = "" if state == "alive" else "nothing of it has answered for 42s"
    node = NodeSeen(
        id=NodeId("n-n1"), name="n1", state=state, reason=reason, age_seconds=42.0, facts=None, is_stale=is_stale
    )
    return {node.id: node}


def view_of_one(seen: Mapping[NodeId, NodeSeen], *statuses: ReplicaStatus) -> JobView:
    cluster = placed(service(), nodes=1)
    names = {NodeId("n-n1"): "n1"}
    found = {status.attempt: status for status in statuses}
    return job_view(cluster.job(), found, {}, node_names=names, seen=seen, now_utc=1.0)


@pytest.mark.parametrize(
    ("state", "code", "is_verified"),
    [("suspect", "node_suspect", True), ("unsupervised", "node_unsupervised", False), ("silent", "node_silent", False)],
)
def test_a_replica_says_for_how_long_its_node_is_away(state: NodeState, code: str, is_verified: bool) -> None:
    endpoint = Endpoint(address="127.0.0.1", port=20000)
    found = view_of_one(seen_as(state), says(0, "ready", endpoint=endpoint))
    (replica,) = found.replicas
    assert (found.state, replica.state, replica.endpoint) == ("running", "ready", endpoint)
    assert replica.is_verified == is_verified
    assert replica.warning is not None
    assert (replica.warning.code, code in REASON_CODES) == (code, True)
    assert replica.warning.text == f"n1, where it is, is {state}: nothing of it has answered for 42s"
    assert replica.warning.hint


def test_a_node_that_is_there_again_and_has_not_said_yet_what_it_runs_verifies_nothing() -> None:
    (replica,) = view_of_one(seen_as("alive", is_stale=True), says(0, "ready")).replicas
    assert (replica.warning, replica.is_verified) == (None, False)
    (replica,) = view_of_one(seen_as("alive"), says(0, "ready")).replicas
    assert (replica.warning, replica.is_verified) == (None, True)


def test_a_replica_that_waits_is_on_no_node_that_could_be_away() -> None:
    cluster = Cluster()
    cluster.do(submit(service(), "j-web"))
    found = job_view(cluster.job(), {}, {}, node_names={}, seen=seen_as("silent"), now_utc=1.0)
    assert found.replicas[0].warning is None
