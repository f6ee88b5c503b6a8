"""Which job, replica or node somebody means."""

from __future__ import annotations

import pytest

from gpulayer.core.cluster.commands import StopJob
from gpulayer.core.cluster.resolve import resolve_job, resolve_job_or_replica, resolve_node, resolve_replica
from gpulayer.model.errors import InvalidRequest, NotFound
from gpulayer.model.ids import JobId, NodeId
from tests.core.cluster.states import CANCELLED, Cluster, service, submit


def cluster() -> Cluster:
    made = Cluster()
    for name, job in (("old", "j-aaa1"), ("old", "j-aaa2"), ("web", "j-bbb1"), ("web-2", "j-bcc1")):
        made.do(submit(service(name, replicas=3), job))
        if name == "old":
            made.do(StopJob(job=JobId(job), reason=CANCELLED))
    return made


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("web", "j-bbb1"),
        ("web-2", "j-bcc1"),
        ("web-", "j-bcc1"),
        ("j-bbb1", "j-bbb1"),
        ("j-bc", "j-bcc1"),
        ("j-aaa1", "j-aaa1"),
        ("old", "j-aaa2"),
    ],
)
def test_a_name_beats_an_id_beats_a_prefix(text: str, job: str) -> None:
    assert resolve_job(cluster().state, text).id == job


def test_the_name_of_a_live_job_beats_the_id_of_another() -> None:
    made = cluster()
    made.do(submit(service("j-bbb1"), "j-zzz1"))
    assert resolve_job(made.state, "j-bbb1").id == "j-zzz1"


def test_a_live_job_beats_ended_ones_of_its_name() -> None:
    made = cluster()
    made.do(submit(service("old"), "j-new1"))
    assert resolve_job(made.state, "old").id == "j-new1"


def test_an_ambiguous_prefix_names_the_candidates() -> None:
    with pytest.raises(InvalidRequest, match=r"2 jobs: web \(j-bbb1\), web-2 \(j-bcc1\)"):
        resolve_job(cluster().state, "j-b")


def test_an_unknown_job_names_near_ones() -> None:
    with pytest.raises(NotFound) as caught:
        resolve_job(cluster().state, "wep")
    assert "did you mean web" in caught.value.hint
    with pytest.raises(NotFound):
        resolve_job(cluster().state, "ol"), "the prefix of an ended job's name is none"
    with pytest.raises(InvalidRequest):
        resolve_job(cluster().state, "")


def test_a_replica_is_a_job_and_an_index() -> None:
    state = cluster().state
    job, index = resolve_replica(state, "j-bb.2")
    assert (job.id, index) == ("j-bbb1", 2)
    assert resolve_job_or_replica(state, "web")[1] is None
    assert resolve_job_or_replica(state, "web.0")[1] == 0
    for text in ("web", "web.x", "web.-1", "web.", "web.²"):
        with pytest.raises(InvalidRequest):
            resolve_replica(state, text)
    with pytest.raises(NotFound, match="no replica 3") as caught:
        resolve_replica(state, "web.3")
    assert caught.value.hint == "it has replicas 0 to 2"


NODES = {NodeId("n-a1"): "gpu1", NodeId("n-a2"): "gpu2", NodeId("n-b1"): "n-a1"}


@pytest.mark.parametrize(("text", "node"), [("gpu1", "n-a1"), ("n-a2", "n-a2"), ("n-a1", "n-b1"), ("n-b", "n-b1")])
def test_a_nodes_name_beats_an_id_beats_a_prefix(text: str, node: str) -> None:
    assert resolve_node(NODES, text) == node


def test_an_ambiguous_node_names_the_candidates() -> None:
    with pytest.raises(InvalidRequest, match=r"'gpu' may be 2 nodes: gpu1 \(n-a1\), gpu2 \(n-a2\)"):
        resolve_node(NODES, "gpu")


def test_an_unknown_node_names_near_ones() -> None:
    with pytest.raises(NotFound) as raised:
        resolve_node(NODES, "gpu7")
    assert "gpu1" in raised.value.hint
