"""An order that its node says nothing of: taken back, unless the node has begun with it."""

from __future__ import annotations

from gpulayer.core.cluster.apply import Rejected
from gpulayer.core.cluster.commands import CreateCluster, ReplicaAccepted, StopJob, WithdrawUnaccepted
from gpulayer.core.cluster.view import ReplicaView, job_view
from gpulayer.model.ids import JobId
from gpulayer.model.replica import Assignment, Reason
from tests.core.cluster.states import CANCELLED, Cluster, admit, ended, failed, gpu, refused, service, submit

WHY = Reason(code="no_answer", text="n1 has said nothing of it for 5 s")
WEB = JobId("j-web")
RECALL = WithdrawUnaccepted(job=WEB, replica=0, attempt=1, reason=WHY)
BEGUN = ReplicaAccepted(job=WEB, replica=0, attempt=1)


def placed() -> Cluster:
    cluster = Cluster(CreateCluster(cluster_id="c-1"), admit("n1", gpu("g0")), submit(service(gpus=1)))
    cluster.plan()
    return cluster


def assignment(cluster: Cluster) -> Assignment:
    found = cluster.job().replicas[0].assignment
    assert found is not None
    return found


def view(cluster: Cluster) -> ReplicaView:
    job = cluster.job()
    return job_view(job, {}, {}, node_names={}, now_utc=0.0).replicas[0]


def test_a_recalled_order_holds_its_devices_until_its_node_gives_it_back() -> None:
    cluster = placed()
    cluster.do(RECALL)
    assert cluster.kinds == ["replica.recalled"]
    assert assignment(cluster).recalled == WHY
    assert assignment(cluster).withdrawn is None
    cluster.do(refused())
    assert cluster.job().replicas[0].assignment is None
    assert cluster.job().outcome is None
    cluster.plan()
    assert assignment(cluster).attempt == 2
    assert assignment(cluster).recalled is None


def test_a_node_that_has_begun_keeps_it() -> None:
    cluster = placed()
    cluster.do(RECALL, BEGUN)
    assert cluster.kinds == ["replica.accepted"]
    assert assignment(cluster).recalled is None
    cluster.do(BEGUN)
    assert cluster.kinds == []


def test_a_recall_that_was_said_twice_is_one() -> None:
    cluster = placed()
    cluster.do(RECALL, RECALL)
    assert cluster.kinds == []


def test_a_recall_of_another_attempt_or_of_what_has_ended_is_refused() -> None:
    cluster = placed()
    cluster.do(refused())
    assert isinstance(cluster.do(RECALL).result, Rejected)
    assert isinstance(cluster.do(BEGUN).result, Rejected)
    cluster.plan()
    assert isinstance(cluster.do(RECALL).result, Rejected)
    cluster = placed()
    cluster.do(ended(failed(), released=False))
    assert isinstance(cluster.do(RECALL).result, Rejected)


def test_the_end_of_a_recalled_attempt_ends_the_recall() -> None:
    cluster = placed()
    cluster.do(RECALL, ended(failed(), released=False))
    assert assignment(cluster).recalled is None


def test_a_recalled_replica_is_not_shown_as_stopping() -> None:
    cluster = placed()
    cluster.do(RECALL)
    seen = view(cluster)
    assert seen.state == "assigned"
    assert seen.reason is not None
    assert seen.reason.text == WHY.text
    assert "placed again" in seen.next


def test_a_recalled_replica_of_a_job_that_stops_ends_with_it() -> None:
    cluster = placed()
    cluster.do(RECALL, StopJob(job=WEB, reason=CANCELLED))
    assert view(cluster).state == "stopping"
    cluster.do(refused())
    outcome = cluster.job().outcome
    assert outcome is not None
    assert outcome.result == "cancelled"
