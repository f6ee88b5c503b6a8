"""Requests that another node answers: passed on to the voter, asked of owners; over real links, sockets and logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from gpulayer.api import access, kept_readers, local
from gpulayer.api.facade import AuditReport, Difference
from gpulayer.core.cluster.commands import RevokeToken, StopJob
from gpulayer.model.errors import Unreachable
from gpulayer.model.ids import AttemptId, ReplicaId
from gpulayer.model.member import Run
from gpulayer.model.replica import Reason
from gpulayer.node import forward
from gpulayer.node.forward import BulkRequests
from gpulayer.runtime.frame_stream import FrameStream
from gpulayer.runtime.replica_logs import LogReader
from gpulayer.wire.http import BODY_BYTES_MAX
from gpulayer.wire.peer import RequestHead, ResponseHead, ResponsePart
from tests.node.nodes import ANSWER_SECONDS_MAX, Node, lines_of, running

TRUE = {"command": ["true"], "name": "work"}


async def wait_for(condition: Callable[[], object]) -> None:
    with trio.fail_after(ANSWER_SECONDS_MAX):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


# --- passed on ------------------------------------------------------------------------------------------------------


async def test_what_is_submitted_to_any_node_is_in_the_log_of_the_voter(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        made = await client.post("/v1/jobs", json=TRUE, headers={"Idempotency-Key": "k1"})
        assert made.status_code == 201
        assert made.headers["location"] == f"/v1/jobs/{made.json()['id']}"
        assert made.json()["id"] in a.state.jobs
        again = await client.post("/v1/jobs", json=TRUE, headers={"Idempotency-Key": "k1"})
        assert (again.status_code, again.json()["id"], again.json()["replayed"]) == (200, made.json()["id"], True)
        assert (await client.get("/v1/jobs")).json()["jobs"][0]["name"] == "work"


async def test_an_error_of_the_voter_is_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (_a, b), b.http() as client:
        await client.post("/v1/jobs", json=TRUE)
        assert (await client.get("/v1/jobs/nobody")).status_code == 404
        taken = await client.post("/v1/jobs", json=TRUE)
        assert (taken.status_code, taken.json()["code"]) == (409, "refused")
        assert (await client.get("/v1/jobs?limit=no")).json()["code"] == "invalid_request"
        assert (await client.post("/v1/jobs", content=b"{", headers={"Content-Type": "application/json"})).is_error


async def test_one_link_carries_one_request_after_the_other(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (_a, b), b.http() as client:
        for _ in range(5):
            assert (await client.get("/v1/jobs")).is_success
        assert b.end is not None
        assert b.end.links.counts["bulk_out"] == 1


async def test_what_the_other_side_has_closed_is_not_used_again(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (_a, b), b.http() as client:
        assert (await client.get("/v1/jobs")).is_success
        assert b.bulk is not None
        b.bulk._kept[0].stream.close()
        assert (await client.post("/v1/jobs", json=TRUE)).status_code == 201


async def test_a_link_that_nobody_uses_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "KEPT_SECONDS", 0.05)
    async with running(tmp_path, "ab") as (_a, b), b.http() as client:
        assert (await client.get("/v1/jobs")).is_success
        assert b.bulk is not None
        await wait_for(lambda: b.bulk is not None and not b.bulk._kept)
        assert (await client.get("/v1/jobs")).is_success


async def test_no_more_links_are_kept_than_are_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (_a, b), trio.open_nursery() as nursery:
        for _ in range(3 * forward.KEPT_PER_NODE_MAX):
            nursery.start_soon(b.get, "/v1/jobs")
    assert b.bulk is not None
    assert len(b.bulk._kept) <= forward.KEPT_PER_NODE_MAX


async def test_a_request_is_passed_on_once(tmp_path: Path) -> None:
    """What another node passed on to one that is not the voter either would go round."""
    async with running(tmp_path, "abc") as (_a, b, c):
        head = RequestHead(method="GET", path="/v1/jobs", query="", headers=(), role="admin")
        async with b.ask(c.node_id, head) as answer:
            parts = [part async for part in answer.parts()]
        assert answer.status == 503
        assert json.loads(b"".join(parts))["code"] == "no_leader"


async def test_what_a_client_may_not_ask_is_not_asked_through_another_node(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b):
        for path in ("/v1/local/kept", "/v1/local/token", "/v1/local/logs", "/v1/local/attempts"):
            for node in (a, b):
                assert (await node.get(path)).status_code == 404, path
            head = RequestHead(method="POST", path=path, query="", headers=(), role="admin")
            async with b.ask(a.node_id, head) as answer:
                _ = [part async for part in answer.parts()]
            assert answer.status == 404, path


async def test_a_head_request_is_answered_without_a_body(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (_a, b), b.http() as client:
        answered = await client.head("/v1/jobs")
        assert (answered.status_code, answered.content) == (200, b"")
        assert (await client.get("/v1/jobs")).is_success


async def test_a_body_of_the_largest_size_arrives(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as through_b, a.http() as at_a:
        job = {"command": ["true", "x" * (BODY_BYTES_MAX - 100)]}
        answered = await through_b.post("/v1/jobs", json=job)
        assert answered.json()["message"] == (await at_a.post("/v1/jobs", json=job)).json()["message"]
        assert answered.json()["code"] != "too_large"


# --- who asks -------------------------------------------------------------------------------------------------------


async def test_a_token_is_judged_by_the_voter_and_its_secret_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[RequestHead] = []
    inner = BulkRequests.ask

    def ask(self: BulkRequests, node: object, head: RequestHead) -> object:
        heads.append(head)
        return inner(self, node, head)  # type: ignore[arg-type]

    monkeypatch.setattr(BulkRequests, "ask", ask)
    async with running(tmp_path, "ab") as (a, b):
        secret = await a.token("read")
        assert (await b.get("/v1/jobs", secret)).status_code == 200
        assert (await b.get("/v1/jobs", "gpl_nobody")).status_code == 401
        async with b.http(secret) as client:
            denied = await client.post("/v1/jobs", json=TRUE)
            assert (denied.status_code, denied.json()["code"]) == (403, "permission_denied")
        assert heads
        assert secret not in repr(heads)


async def test_a_token_that_is_revoked_reads_nothing_of_the_voter_any_more(tmp_path: Path) -> None:
    """Even where the node that was asked has approved it just before."""
    async with running(tmp_path, "ab") as (a, b):
        secret = await a.token("read")
        assert (await b.get("/v1/jobs", secret)).status_code == 200
        await a.propose(RevokeToken(token=next(iter(a.state.tokens))))
        assert (await b.get("/v1/jobs", secret)).status_code == 401


async def test_a_stream_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b):
        job = await a.place("web", a)
        secret = await a.token("read")
        async with b.http(secret) as client, client.stream("GET", f"/v1/jobs/{job}/watch") as response:
            lines = response.aiter_lines()
            assert json.loads(await anext(lines))["name"] == "web"
            await a.propose(RevokeToken(token=next(iter(a.state.tokens))))
            with trio.fail_after(ANSWER_SECONDS_MAX), pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass


async def test_without_a_voter_a_token_that_was_good_just_before_reads_what_this_node_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "APPROVED_SECONDS", 0.0)
    async with running(tmp_path, "ab") as (a, b):
        secret, stranger = await a.token("read"), await a.token("read")
        assert (await b.get("/v1/audit", secret)).status_code == 200
        b.states[a.node_id] = "silent"
        assert (await b.get("/v1/audit", secret)).status_code == 200
        unknown = await b.get("/v1/audit", stranger)
        assert (unknown.status_code, unknown.json()["code"]) == (503, "no_leader")
        monkeypatch.setattr(access, "APPROVED_SECONDS_ALONE", 0.0)
        assert (await b.get("/v1/audit", secret)).status_code == 503


async def test_questions_about_tokens_are_not_asked_twice_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b):
        secret = await a.token("read")
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(b.get, "/v1/audit", secret)
        assert b.end is not None
        assert b.end.links.counts["bulk_out"] <= access.QUESTIONS_AT_A_TIME_MAX


# --- streams --------------------------------------------------------------------------------------------------------


async def test_a_stream_comes_as_it_is_made(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        job = await a.place("web", a)
        async with client.stream("GET", f"/v1/jobs/{job}/watch") as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            assert "content-length" not in response.headers
            (first,) = await lines_of(response, 1)
            assert first["name"] == "web"
        async with client.stream("GET", f"/v1/jobs/{job}/watch", headers={"Accept": "text/event-stream"}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")


async def test_a_client_that_goes_away_ends_the_work_at_the_voter(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        job = await a.place("web", a)
        async with client.stream("GET", f"/v1/jobs/{job}/watch") as response:
            await lines_of(response, 1)
            assert b.bulk is not None
            assert b.bulk._under_way[a.node_id] == 1
        await wait_for(lambda: b.bulk is not None and not b.bulk._under_way[a.node_id])
        assert a.end is not None
        await wait_for(lambda: a.end is not None and a.end.links._guests.streams[b.node_id] == 0)


async def test_a_reader_that_rests_holds_back_the_writer_and_loses_nothing(tmp_path: Path) -> None:
    """`job logs | less`: longer than any write of the links between may take."""
    from gpulayer.runtime.frame_stream import Limits

    text = "".join(f"line {number} {'x' * 200}\n" for number in range(40_000))
    async with running(tmp_path, "ab", limits=Limits(write_seconds=0.5)) as (a, b), b.http() as client:
        job = await a.place("web", a)
        a.write(job, 0, text[:1])
        a.writers[AttemptId(ReplicaId(job, 0), 1)].close()
        del a.writers[AttemptId(ReplicaId(job, 0), 1)]
        _write_large(a, job, text)
        async with client.stream("GET", f"/v1/jobs/{job}/logs") as response:
            chunks = response.aiter_raw()
            size = len(await anext(chunks))
            await trio.sleep(2)
            async for chunk in chunks:
                size += len(chunk)
        assert size > len(text)


def _write_large(node: Node, job: object, text: str) -> None:
    import os

    from gpulayer.model.ids import JobId
    from gpulayer.shim.log_writer import LogWriter

    directory = node.log_dir(AttemptId(ReplicaId(JobId(str(job)), 0), 1))
    writer = LogWriter(os.open(directory, os.O_RDONLY), max_bytes=100_000_000, keep=3)
    for start in range(0, len(text), 200_000):
        writer.output(1, 1, memoryview(text[start : start + 200_000].encode()))
    writer.close()


async def test_an_answer_that_breaks_off_is_no_whole_one(tmp_path: Path) -> None:
    async def half(run: Run, stream: FrameStream) -> None:
        await stream.receive_frame()
        await stream.send_frame(ResponseHead(status=200, headers=(("content-type", "application/json"),)))
        await stream.send_frame(ResponsePart(data=b'{"jobs": ['))
        stream.close()

    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        assert a.end is not None
        a.end.links._guests._on_bulk = half
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/v1/jobs")


async def test_a_voter_that_goes_away_before_it_answers_may_have_done_it(tmp_path: Path) -> None:
    async def gone(run: Run, stream: FrameStream) -> None:
        await stream.receive_frame()
        stream.close()

    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        assert a.end is not None
        a.end.links._guests._on_bulk = gone
        answered = await client.post("/v1/jobs", json=TRUE)
        assert (answered.status_code, answered.json()["code"]) == (503, "no_answer")


# --- nobody to pass it on to ----------------------------------------------------------------------------------------


async def test_without_a_leader_it_is_said_which_node_and_since_when(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        b.states[a.node_id] = "silent"
        answered = await client.get("/v1/jobs")
        assert (answered.status_code, answered.json()["code"]) == (503, "no_leader")
        assert answered.json()["message"] == "a, which leads the cluster, is silent: nothing of it answers"
        assert (await client.get("/healthz")).text == "ok\n"
        assert (await client.get("/v1/audit")).is_success


async def test_a_leader_that_cannot_be_reached_is_none(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        assert a.end is not None
        a.end.scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.05)
        answered = await client.get("/v1/jobs")
        assert (answered.status_code, answered.json()["code"]) == (503, "no_leader")
        assert "a, which leads the cluster, cannot be reached" in answered.json()["message"]


async def test_too_many_requests_to_one_node_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "UNDER_WAY_PER_NODE_MAX", 1)
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        job = await a.place("web", a)
        async with client.stream("GET", f"/v1/jobs/{job}/watch") as response:
            await lines_of(response, 1)
            head = RequestHead(method="GET", path="/v1/jobs", query="", headers=(), role="admin")
            with pytest.raises(Unreachable, match="requests to n-a are under way"):
                async with b.ask(a.node_id, head):
                    pass


# --- what only owners know ------------------------------------------------------------------------------------------


async def test_the_logs_of_replicas_on_several_nodes_are_one(tmp_path: Path) -> None:
    async with running(tmp_path, "abc") as (a, b, c):
        job = await a.place("web", a, b, c)
        for round_number in range(3):
            for index, node in enumerate((a, b, c)):
                node.write(job, index, f"{round_number} of {node.name}\n")
        for node in (a, b, c):
            lines = [json.loads(line) for line in (await node.get(f"/v1/jobs/{job}/logs")).text.splitlines()]
            assert [(line["text"], line["replica"]) for line in lines] == [
                (f"{number} of {name}", index) for number in range(3) for index, name in enumerate("abc")
            ]
            after = lines[4]["offset"]
            rest = [json.loads(line) for line in (await node.get(f"/v1/jobs/web/logs?after={after}")).text.splitlines()]
            assert rest == lines[5:]
            last = [json.loads(line) for line in (await node.get("/v1/jobs/web/logs?tail=2")).text.splitlines()]
            assert [line["text"] for line in last] == ["2 of b", "2 of c"]


async def test_logs_on_other_nodes_are_followed_to_the_end(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b), b.http() as client:
        job = await a.place("web", a, b)
        a.write(job, 0, "first of a\n")
        b.write(job, 1, "first of b\n")
        async with client.stream("GET", f"/v1/jobs/{job}/logs?follow=1") as response:
            stream = response.aiter_lines()

            async def next_text() -> str:
                with trio.fail_after(ANSWER_SECONDS_MAX):
                    while True:
                        line = await anext(stream)
                        if line.strip():
                            return str(json.loads(line)["text"])

            assert [await next_text(), await next_text()] == ["first of a", "first of b"]
            b.write(job, 1, "second of b\n")
            assert await next_text() == "second of b"
            a.write(job, 0, "second of a\n")
            assert await next_text() == "second of a"
            b.write(job, 1, "last of b, without a newline")
            await _end(a, job)
            assert await next_text() == "last of b, without a newline"
            with pytest.raises(StopAsyncIteration):
                await next_text()


async def _end(node: Node, job: str) -> None:
    """Its replicas have all ended and are released."""
    from gpulayer.core.cluster.commands import ReplicaEnded
    from gpulayer.model.ids import JobId
    from gpulayer.model.replica import Outcome

    await node.propose(StopJob(job=JobId(job), reason=Reason(code="cancelled")))
    for replica in node.state.jobs[JobId(job)].replicas:
        outcome = Outcome(result="cancelled", reason=Reason(code="cancelled"))
        await node.propose(
            ReplicaEnded(job=JobId(job), replica=replica.index, attempt=1, outcome=outcome, released=True)
        )


async def test_an_owner_that_is_away_is_a_line_and_the_rest_is_there(tmp_path: Path) -> None:
    async with running(tmp_path, "abc") as (a, b, c):
        job = await a.place("web", b, c)
        b.write(job, 0, "of b\n")
        c.write(job, 1, "of c\n")
        a.states[c.node_id] = "silent"
        lines = [json.loads(line) for line in (await b.get(f"/v1/jobs/{job}/logs")).text.splitlines()]
        assert [(line["replica"], line["kind"]) for line in lines] == [(0, "output"), (1, "gap")]
        assert lines[1]["text"] == f"the output of {job}.1 is missing here: c cannot be asked: it is silent"
        a.states.clear()
        rest = await b.get(f"/v1/jobs/{job}/logs?after={lines[1]['offset']}")
        assert [json.loads(line)["text"] for line in rest.text.splitlines()] == ["of c"]


async def test_more_lines_than_one_answer_holds_come_in_order(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b):
        job = await a.place("web", b)
        for start in range(0, 5000, 500):
            b.write(job, 0, "".join(f"{number}\n" for number in range(start, start + 500)))
        lines = (await a.get(f"/v1/jobs/{job}/logs")).text.splitlines()
        assert [int(json.loads(line)["text"]) for line in lines] == list(range(5000))


async def test_a_log_whose_writes_end_within_lines_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of such a log was begun at the beginning of it: 100,000 lines took a quarter of a minute."""
    made: list[object] = []

    class Counted(LogReader):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            made.append(keywords)
            super().__init__(*arguments, **keywords)

    monkeypatch.setattr(local, "LogReader", Counted)
    async with running(tmp_path, "ab") as (a, b):
        job = await a.place("web", b)
        text = "".join(f"{number}\n" for number in range(20_000))
        for start in range(0, len(text), 4097):
            b.write(job, 0, text[start : start + 4097])
        lines = (await a.get(f"/v1/jobs/{job}/logs")).text.splitlines()
        assert [int(json.loads(line)["text"]) for line in lines] == list(range(20_000))
        assert len(made) == 1


async def test_readers_that_nobody_comes_back_for_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_readers, "KEPT_SECONDS", 0.1)
    async with running(tmp_path, "ab") as (a, b), a.http() as client:
        job = await a.place("web", b)
        b.write(job, 0, "hello\n")
        async with client.stream("GET", f"/v1/jobs/{job}/logs?follow=1") as response:
            assert (await lines_of(response, 1))[0]["text"] == "hello"
        await wait_for(lambda: not local._readers._kept)


async def test_a_status_shows_the_last_lines_and_the_sandbox_of_a_replica_elsewhere(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b):
        job = await a.place("web", b)
        b.write(job, 0, "it is broken\n")
        attempt = AttemptId(ReplicaId(job, 0), 1)
        b.histories[attempt] = ((3.0, "started"), (1.0, "failed"))
        for node in (a, b):
            (replica,) = (await node.get(f"/v1/jobs/{job}")).json()["replicas"]
            assert replica["last_lines"] == ["it is broken"]
            assert replica["sandbox"] == str(b.sandbox(attempt))
            (explained,) = (await node.get(f"/v1/jobs/{job}/explain")).json()["replicas"]
            assert [each["text"] for each in explained["history"]] == ["started", "failed"]


async def test_a_status_without_its_owner_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as (a, b):
        job = await a.place("web", b)
        a.states[b.node_id] = "silent"
        (replica,) = (await a.get(f"/v1/jobs/{job}")).json()["replicas"]
        assert replica["last_lines"] == ["(b cannot be asked: it is silent)"]
        assert replica["sandbox"] is None
        (explained,) = (await a.get(f"/v1/jobs/{job}/explain")).json()["replicas"]
        assert [each["text"] for each in explained["history"]] == ["b cannot be asked: it is silent"]


async def test_an_audit_of_all_nodes_names_each(tmp_path: Path) -> None:
    async with running(tmp_path, "abc") as (a, b, c):
        stray = Difference(kind="stray_process", text="pid 7 is nobody's", pids=(7,))
        b.audit_report = AuditReport(checked_at_utc=1.0, differences=(stray,), replicas_checked=4, processes_seen=5)
        a.states[c.node_id] = "silent"
        found = (await a.get("/v1/audit?all=1")).json()
        assert found["nodes"] == [
            {"node": "a", "error": None},
            {"node": "b", "error": None},
            {"node": "c", "error": "c is silent"},
        ]
        assert [(each["node"], each["kind"]) for each in found["differences"]] == [("b", "stray_process")]
        assert (found["replicas_checked"], found["processes_seen"]) == (5, 7)
        own = (await b.get("/v1/audit")).json()
        assert own["nodes"] == [{"node": "b", "error": None}]


@pytest.mark.parametrize("path", ["attempts", "kept", "logs"])
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"of": 1}', b'{"of": ["../../etc"]}', b'{"of": [["j-x.0.1"]]}', b'{"of": [{}]}']
)
async def test_a_question_that_no_node_asks_is_refused(tmp_path: Path, path: str, body: bytes) -> None:
    async with running(tmp_path, "ab") as (a, b):
        headers = (("content-type", "application/json"),)
        head = RequestHead(method="POST", path=f"/v1/local/{path}", query="", headers=headers, role="node", body=body)
        async with b.ask(a.node_id, head) as answer:
            _ = [part async for part in answer.parts()]
        assert answer.status == 400
