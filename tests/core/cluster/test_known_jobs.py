"""Jobs as the records tell of them, on a node without the log."""

from __future__ import annotations

import pytest

from gpulayer.core.cluster.known_jobs import known_jobs, resolve_known_job
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.record import ReplicaRecord
from gpulayer.model.replica import ReplicaStatus
from gpulayer.model.seen import NodeSeen, NodeState, Table


def said(job: str, name: str, index: int, attempt: int = 1, started: float = 1.0) -> tuple[AttemptId, ReplicaRecord]:
    id = AttemptId(ReplicaId(JobId(job), index), attempt)
    status = ReplicaStatus(attempt=id, state="ready", started_at_utc=started)
    return id, ReplicaRecord(status=status, job_name=name, kind="service")


def seen(name: str, *replicas: tuple[AttemptId, ReplicaRecord], state: NodeState = "alive") -> NodeSeen:
    return NodeSeen(
        id=NodeId(f"n-{name}"), name=name, state=state, age_seconds=0.0, facts=None, replicas=dict(replicas)
    )


def table(*nodes: NodeSeen) -> Table:
    return Table(seen_by=nodes[0].id, nodes={node.id: node for node in nodes}, leader=None)


def test_a_job_has_the_replicas_of_every_node_and_of_each_its_newest_attempt() -> None:
    jobs = known_jobs(
        table(seen("a", said("j-1", "web", 0), said("j-1", "web", 1)), seen("b", said("j-1", "web", 1, 2)))
    )
    (job,) = jobs.values()
    assert job.name == "web"
    assert {index: (each.node.name, each.attempt) for index, each in job.replicas.items()} == {0: ("a", 1), 1: ("b", 2)}


@pytest.mark.parametrize("text", ["web", "j-abc", "we", "j-a"])
def test_a_name_an_id_or_the_beginning_of_one_finds_it(text: str) -> None:
    jobs = known_jobs(table(seen("a", said("j-abc", "web", 0), said("j-xyz", "train", 0))))
    found = resolve_known_job(jobs, text)
    assert found is not None
    assert found.id == "j-abc"


@pytest.mark.parametrize("text", ["", "other", "j-abd"])
def test_what_no_record_tells_of_is_not_known(text: str) -> None:
    assert resolve_known_job(known_jobs(table(seen("a", said("j-abc", "web", 0)))), text) is None


def test_of_one_name_the_job_whose_node_is_there_beats_what_a_silent_one_said_last() -> None:
    old = seen("a", said("j-old", "web", 0, started=9.0), state="silent")
    found = resolve_known_job(known_jobs(table(old, seen("b", said("j-new", "web", 0, started=5.0)))), "web")
    assert found is not None
    assert found.id == "j-new"


def test_the_beginning_of_several_names_them() -> None:
    jobs = known_jobs(table(seen("a", *(said(f"j-{number}", f"web-{number}", 0) for number in range(7)))))
    with pytest.raises(InvalidRequest, match=r"beginning of 7 jobs: web-0 \(j-0\).* and 2 more"):
        resolve_known_job(jobs, "web")
