"""Streams: complete, in order, to go on from any offset, over when there is no more, and harmless when nobody reads."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.api.conftest import Daemon


def open_stream(daemon: Daemon, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = daemon.connect()
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    assert response.status == 200
    return response


def next_document(response: http.client.HTTPResponse) -> Any:
    while True:
        line = response.readline()
        assert line, "the stream has ended"
        if line.strip():
            return json.loads(line)


def head(daemon: Daemon, path: str) -> bytes:
    token = daemon.token("read")
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def output(lines: list[Any]) -> list[str]:
    return [line["text"] for line in lines if line["kind"] == "output"]


def test_a_followed_log_ends_with_its_job_and_has_the_last_line(daemon: Daemon) -> None:
    job = daemon.submit("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.2; done; printf unfinished; exit 4")
    lines = daemon.documents(f"/v1/jobs/{job}/logs?follow=1")
    assert output(lines) == ["1", "2", "3", "unfinished"]
    kinds = [line["kind"] for line in lines]
    assert kinds.index("run_started") == 0
    assert "run_ended" in kinds
    assert {line["replica"] for line in lines} == {0}


def test_following_begins_before_the_job_has_a_place(daemon: Daemon) -> None:
    blocker = daemon.submit("sleep", "60", gpus=2)
    daemon.wait_for(blocker, lambda status: status["state"] == "running")
    job = daemon.submit("echo", "at last", gpus=2)
    response = open_stream(daemon, f"/v1/jobs/{job}/logs?follow=1")
    daemon.ask("POST", f"/v1/jobs/{blocker}/cancel")
    texts = [json.loads(line)["text"] for line in response.read().splitlines() if line.strip()]
    assert "at last" in texts


def test_a_log_can_be_taken_up_at_every_line(daemon: Daemon) -> None:
    job = daemon.submit("sh", "-c", "seq 1 30; printf end")
    daemon.wait_for_end(job)
    lines = daemon.documents(f"/v1/jobs/{job}/logs")
    for place in range(0, len(lines), 3):
        rest = daemon.documents(f"/v1/jobs/{job}/logs?after={lines[place]['offset']}")
        assert [line["text"] for line in rest] == [line["text"] for line in lines[place + 1 :]], place


def test_lines_of_several_replicas_are_merged_and_resumed_without_loss(daemon: Daemon) -> None:
    script = "for i in $(seq 1 20); do echo $GPULAYER_REPLICA.$i; done"
    job = daemon.submit("sh", "-c", script, replicas=3, spread="any")
    daemon.wait_for_end(job)
    lines = daemon.documents(f"/v1/jobs/{job}/logs")
    assert [line["at_utc"] for line in lines] == sorted(line["at_utc"] for line in lines)
    for replica in range(3):
        mine = [text for text in output(lines) if text.startswith(f"{replica}.")]
        assert mine == [f"{replica}.{number}" for number in range(1, 21)]
        only = daemon.documents(f"/v1/jobs/{job}/logs?replica={replica}")
        assert output(only) == mine
        assert output(daemon.documents(f"/v1/jobs/{job}.{replica}/logs")) == mine
    for place in (0, 7, 33, 50):
        rest = daemon.documents(f"/v1/jobs/{job}/logs?after={lines[place]['offset']}")
        assert sorted(output(rest) + output(lines[: place + 1])) == sorted(output(lines))


def test_the_tail_is_as_long_as_asked_for(daemon: Daemon) -> None:
    job = daemon.submit("sh", "-c", "seq 1 100")
    daemon.wait_for_end(job)
    every = daemon.documents(f"/v1/jobs/{job}/logs")
    for count in (0, 1, 5, 1000):
        lines = daemon.documents(f"/v1/jobs/{job}/logs?tail={count}")
        expected = every[-count:] if count else []
        assert [line["text"] for line in lines] == [line["text"] for line in expected]
        followed = daemon.documents(f"/v1/jobs/{job}/logs?follow=1&tail={count}")
        assert [line["text"] for line in followed] == [line["text"] for line in expected]
    since = every[50]["at_utc"]
    assert all(line["at_utc"] >= since for line in daemon.documents(f"/v1/jobs/{job}/logs?since={since}"))


def test_a_restart_is_a_line_and_the_run_before_can_be_read(daemon: Daemon) -> None:
    script = "echo run $$; exec sleep 60"
    daemon.ask("POST", "/v1/jobs", {"kind": "service", "name": "twice", "command": ["sh", "-c", script], "port": False})
    first = daemon.wait_for("twice", lambda status: status["ready"] == 1)["replicas"][0]
    assert daemon.ask("GET", "/v1/jobs/twice/logs?previous=1").status == 404
    response = open_stream(daemon, "/v1/jobs/twice/logs?follow=1")
    while next_document(response)["text"] != f"run {first['pid']}":
        pass
    os.kill(first["pid"], signal.SIGKILL)
    seen = []
    while not (seen and seen[-1]["kind"] == "output"):
        seen.append(next_document(response))
    assert {"run_ended", "run_started"} <= {line["kind"] for line in seen}
    assert seen[-1]["run"] == 2
    response.close()
    previous = daemon.documents("/v1/jobs/twice/logs?previous=1")
    assert output(previous) == [f"run {first['pid']}"]
    assert {line["run"] for line in previous} == {1}
    assert {line["run"] for line in daemon.documents("/v1/jobs/twice/logs?run=2")} == {2}
    daemon.ask("POST", "/v1/jobs/twice/cancel")


def test_a_watch_shows_each_change_and_ends_with_the_job(daemon: Daemon) -> None:
    job = daemon.submit("sh", "-c", "sleep 0.3")
    states = [status["state"] for status in daemon.documents(f"/v1/jobs/{job}/watch")]
    assert states[-1] == "succeeded"
    assert "succeeded" not in states[:-1]
    assert [status["state"] for status in daemon.documents(f"/v1/jobs/{job}/watch")] == ["succeeded"]


def test_endpoints_are_told_as_they_come_and_go(daemon: Daemon) -> None:
    serve = ["sh", "-c", "exec python3 -m http.server $PORT --bind $HOST"]
    daemon.ask("POST", "/v1/jobs", {"kind": "service", "name": "web", "command": serve})
    response = open_stream(daemon, "/v1/jobs/web/endpoints?watch=1")
    assert next_document(response) == []
    (endpoint,) = next_document(response)
    assert set(endpoint) == {"endpoint", "replica", "node", "verified", "age_seconds"}
    host, _, port = endpoint["endpoint"].partition(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    assert [each["endpoint"] for each in daemon.ask("GET", "/v1/jobs/web/endpoints").json] == [endpoint["endpoint"]]
    daemon.ask("POST", "/v1/jobs/web/cancel")
    assert next_document(response) == []
    assert response.read().strip() == b""


def test_events_come_once_each_and_from_any_offset(daemon: Daemon) -> None:
    job = daemon.submit("true")
    daemon.wait_for_end(job)
    events = daemon.documents("/v1/events")
    offsets = [event["offset"] for event in events]
    assert len(set(offsets)) == len(offsets)
    rest = [event["offset"] for event in daemon.documents(f"/v1/events?after={offsets[2]}")]
    assert rest[: len(offsets) - 3] == offsets[3:]
    assert len(daemon.documents("/v1/events?limit=3")) == 3
    mine = daemon.documents(f"/v1/jobs/{job}/events")
    assert {event["job"] for event in mine} == {job}
    assert "job.submitted" in [event["kind"] for event in mine]
    assert "job.ended" in [event["kind"] for event in mine]


def test_a_followed_feed_tells_of_what_happens_next(daemon: Daemon) -> None:
    last = daemon.documents("/v1/events")[-1]["offset"]
    response = open_stream(daemon, f"/v1/events?follow=1&after={last}")
    job = daemon.submit("true")
    while (event := next_document(response))["kind"] != "job.ended" or event["job"] != job:
        pass
    response.close()


def test_server_sent_events_carry_the_offset_as_their_id(daemon: Daemon) -> None:
    job = daemon.submit("echo", "one\rline")
    daemon.wait_for_end(job)
    accept = {"Accept": "text/event-stream"}
    answer = daemon.ask("GET", f"/v1/jobs/{job}/logs", headers=accept)
    assert answer.headers["content-type"].startswith("text/event-stream")
    records = [record.split("\n") for record in answer.body.decode().split("\n\n") if record]
    plain = daemon.documents(f"/v1/jobs/{job}/logs")
    assert [json.loads(data.removeprefix("data: ")) for _, data in records] == plain
    assert [number.removeprefix("id: ") for number, _ in records] == [line["offset"] for line in plain]
    resumed = daemon.ask("GET", f"/v1/jobs/{job}/logs", headers=accept | {"Last-Event-ID": plain[0]["offset"]})
    assert resumed.body.decode() == answer.body.decode().partition("\n\n")[2]


@pytest.mark.parametrize("connections", [20])
def test_who_does_not_read_holds_nobody_else_up(daemon: Daemon, connections: int) -> None:
    """A client that was stopped (Ctrl-Z) in the middle of a long log."""
    job = daemon.submit("sh", "-c", "yes 0123456789012345678901234567890123456789 | head -c 8000000")
    daemon.wait_for_end(job)
    stuck = []
    for _ in range(connections):
        sock = socket.create_connection(("127.0.0.1", daemon.port), timeout=5)
        sock.sendall(head(daemon, f"/v1/jobs/{job}/logs"))
        stuck.append(sock)
    started = time.monotonic()
    assert daemon.ask("GET", "/v1/status").status == 200
    assert time.monotonic() - started < 3
    for sock in stuck:
        sock.close()
    lines = daemon.documents(f"/v1/jobs/{job}/logs?tail=1000")
    assert len(lines) == 1000


def test_streams_are_cut_and_not_ended_when_the_daemon_stops(own_daemon: Daemon) -> None:
    """A client must see that there is more to come, or it would take the job for ended."""
    daemon = own_daemon
    job = daemon.submit("sleep", "60")
    responses = [open_stream(daemon, path) for path in (f"/v1/jobs/{job}/logs?follow=1", "/v1/events?follow=1")]
    stuck = socket.create_connection(("127.0.0.1", daemon.port), timeout=5)
    token = daemon.token("read")
    stuck.sendall(
        f"GET /v1/events?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    idle = socket.create_connection(("127.0.0.1", daemon.port), timeout=5)
    assert daemon.terminate() < 3
    assert not daemon.socket_path.exists()
    for response in responses:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    stuck.close()
    idle.close()
    daemon.start_again()
    assert daemon.wait_for(job, lambda status: status["state"] == "running")["replicas"][0]["run"] == 1


def test_a_quiet_stream_shows_that_it_is_alive(daemon: Daemon) -> None:
    job = daemon.submit("sleep", "60")
    daemon.wait_for(job, lambda status: status["replicas"][0]["state"] == "ready")
    last = daemon.documents("/v1/events")[-1]["offset"]
    paths = (f"/v1/jobs/{job}/logs?follow=1&tail=0", f"/v1/events?follow=1&after={last}")
    plain = [open_stream(daemon, path) for path in paths]
    as_sse = open_stream(daemon, paths[1], Accept="text/event-stream")
    started = time.monotonic()
    assert [response.readline() for response in plain] == [b"\n", b"\n"]
    assert as_sse.readline() == b":\n"
    assert 14 < time.monotonic() - started < 18
    daemon.ask("POST", f"/v1/jobs/{job}/cancel")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_end_of_a_stream_closes_a_connection_that_was_to_be_closed(
    daemon: Daemon, method: str, version: str
) -> None:
    """With HTTP/1.0 that is how the end is told."""
    request = f"{method} /v1/events HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answered = daemon.raw(request.encode(), unix=True, seconds=5)
    assert answered.startswith(b"HTTP/1.1 200")
    assert (b"cluster.created" in answered) == (method == "GET")


@pytest.fixture
def chatty(daemon: Daemon) -> Iterator[str]:
    """A job that writes faster than anybody reads."""
    job = daemon.submit("yes", "nobody can read all of this")
    daemon.wait_for(job, lambda _: daemon.documents(f"/v1/jobs/{job}/logs?tail=1&since=0") != [], 20)
    yield job
    daemon.ask("POST", f"/v1/jobs/{job}/cancel")
    daemon.wait_for_end(job)


@pytest.mark.parametrize("query", ["", "tail=5", "since=1", "run=1"])
def test_a_log_that_grows_faster_than_it_is_read_is_given_up_to_now(daemon: Daemon, chatty: str, query: str) -> None:
    response = open_stream(daemon, f"/v1/jobs/{chatty}/logs?{query}")
    until, size = time.monotonic() + 20, 0
    lines = b""
    while part := response.read1(1 << 20):
        size += len(part)
        lines = lines[-100_000:] + part
        assert time.monotonic() < until, f"{size} bytes and no end"
    assert b"nobody can read all of this" in lines
    if query == "tail=5":
        assert lines.count(b"\n") == 5


def test_the_tail_of_a_log_that_grows_fast_is_followed(daemon: Daemon, chatty: str) -> None:
    response = open_stream(daemon, f"/v1/jobs/{chatty}/logs?tail=5&follow=1")
    assert [next_document(response)["kind"] for _ in range(50)]
    response.close()


def test_readers_that_vanish_leave_no_file_open(daemon: Daemon, chatty: str) -> None:
    for _ in range(100):
        response = open_stream(daemon, f"/v1/jobs/{chatty}/logs?follow=1")
        response.read1(1000)
        response.close()
    until = time.monotonic() + 10
    while left := open_logs(daemon.process.pid):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def open_logs(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return [path for path in found if "/logs/" in path]
