"""Whatever is sent, the answer says what was wrong in JSON, changes nothing, and the next request is served (P12)."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.api.conftest import Answer, Daemon

GOOD = {"command": ["true"]}
WRONG_KEYS: list[tuple[dict[str, Any], str, str]] = [
    ({"comand": ["true"]}, '"comand"', "did you mean command?"),
    ({"replica": 2}, '"replica"', "did you mean replicas?"),
    ({"command": "true"}, "command", "sh"),
    ({"command": []}, "command", ""),
    ({"command": [1]}, "command[0]: 1", "quotes"),
    ({"replicas": "2"}, 'replicas: "2"', ""),
    ({"replicas": True}, "replicas: true", ""),
    ({"replicas": 0}, "replicas: 0", "10000"),
    ({"replicas": None}, "replicas: null", ""),
    ({"replicas": 1.5}, "replicas: 1.5", ""),
    ({"gpus": 1.5}, "gpus: 1.5", "whole"),
    ({"gpus": 0.0001}, "gpus: 0.0001", ""),
    ({"gpu_model": ["A100"]}, "gpu_model", "gpus"),
    ({"gpus": 1, "gpu_model": ""}, "gpu_model: an empty pattern", "leave it out"),
    ({"gpus": 1, "gpu_model": ["A100", ""]}, "gpu_model: an empty pattern", "leave it out"),
    ({"gpus": 1, "gpu_model": "x" * 129}, "gpu_model: ", "*"),
    ({"gpus": 1, "gpu_model": ["A100"] * 33}, "gpu_model: more than 32", "*"),
    ({"kind": "cron"}, 'kind: "cron"', "service, batch"),
    ({"port": True}, "port: true", "service"),
    ({"restart": "always"}, 'restart: "always"', "service"),
    ({"name": "Web Server"}, "name", "a-z"),
    ({"env": {"A": 1}}, "env", "quotes"),
    ({"env": {"A=B": "1"}}, "env", ""),
    ({"workdir": "here"}, "workdir", "/"),
    ({"timeout_seconds": -1}, "timeout_seconds: -1", ""),
    ({"priority": 101}, "priority: 101", "100"),
    ({"stop_signal": "SEGV"}, 'stop_signal: "SEGV"', "TERM"),
    ({"labels": ["a"]}, "labels", ""),
]


def refusal(answer: Answer, status: int, code: str) -> Any:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    document = answer.json
    assert set(document) == {"code", "message", "hint"}
    assert document["code"] == code
    assert document["message"]
    assert document["hint"]
    return document


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"not json", "not JSON"),
        (b'{"command": ["a"]} trailing', "not JSON"),
        (b'{"command": ["\xff"]}', "UTF-8"),
        (b'"a string"', "not an object"),
        (b"[]", "not an object"),
        (b'{"command": ["a"], "command": ["b"]}', "twice"),
        (b'{"command": ["a"], "cpus": NaN}', "NaN"),
        (b'{"command": ["a"], "cpus": 1e999}', "too large"),
        (b'{"command": ["a"], "replicas": 1' + b"0" * 5000 + b"}", "too long"),
        (b"[" * 100_000, "levels"),
        (b'{"a":' * 100_000, "levels"),
        (b'{"command": ["\\ud800"]}', "not a string"),
    ],
)
def test_a_body_that_is_no_request_is_refused_with_the_cause(daemon: Daemon, body: bytes, said: str) -> None:
    document = refusal(daemon.ask("POST", "/v1/jobs", body), 400, "invalid_request")
    assert said in document["message"]


@pytest.mark.parametrize(("keys", "said", "hint"), WRONG_KEYS)
def test_a_wrong_key_is_named_with_its_value_and_a_right_one(
    daemon: Daemon, keys: dict[str, Any], said: str, hint: str
) -> None:
    document = refusal(daemon.ask("POST", "/v1/jobs", GOOD | keys), 400, "invalid_request")
    assert said in document["message"]
    assert hint in document["hint"]


def test_a_hundred_mebibytes_are_refused_before_they_are_read(daemon: Daemon) -> None:
    connection = daemon.connect()
    started = time.monotonic()
    connection.putrequest("POST", "/v1/jobs")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(100 * 2**20))
    connection.endheaders()
    response = connection.getresponse()  # not a byte of the body was sent
    assert response.status == 413
    assert json.loads(response.read())["code"] == "too_large"
    assert time.monotonic() - started < 5
    connection.close()


def test_who_sends_a_hundred_mebibytes_all_the_same_gets_to_read_why(daemon: Daemon) -> None:
    refusal(daemon.ask("POST", "/v1/jobs", b"[" * (100 * 2**20)), 413, "too_large")


def test_a_chunked_body_without_a_length_is_cut_off(daemon: Daemon) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    answered = daemon.raw(head + chunk * 64, unix=True)
    assert answered.startswith(b"HTTP/1.1 413")
    assert b'"too_large"' in answered


def test_another_media_type_is_refused(daemon: Daemon) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
        answer = daemon.ask("POST", "/v1/jobs", GOOD, headers={"Content-Type": media_type})
        refusal(answer, 415, "unsupported_media_type")


def test_a_method_or_path_that_is_not_there_is_said_in_json(daemon: Daemon) -> None:
    answer = daemon.ask("PUT", "/v1/jobs")
    refusal(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"
    refusal(daemon.ask("GET", "/v2/jobs"), 404, "not_found")
    refusal(daemon.ask("OPTIONS", "/v1/jobs"), 405, "method_not_allowed")


def test_a_job_that_is_not_there_is_not_found(daemon: Daemon) -> None:
    for path in ("", "/watch", "/spec", "/logs", "/events", "/explain", "/endpoints"):
        refusal(daemon.ask("GET", f"/v1/jobs/nothing{path}"), 404, "not_found")
    for verb in ("cancel", "restart"):
        refusal(daemon.ask("POST", f"/v1/jobs/nothing/{verb}"), 404, "not_found")
    refusal(daemon.ask("DELETE", "/v1/tokens/nothing"), 404, "not_found")


def test_an_unknown_parameter_is_named_with_the_nearest(daemon: Daemon) -> None:
    assert "limit" in refusal(daemon.ask("GET", "/v1/jobs?limt=3"), 400, "invalid_request")["hint"]
    for query in ("limit=0", "limit=1001", "limit=x", "limit=1&limit=2", "cursor=-1", "state=dead", "limit=%D9%A1"):
        refusal(daemon.ask("GET", f"/v1/jobs?{query}"), 400, "invalid_request")
    job = daemon.submit("true")
    for query in ("tail=-1", "since=yesterday", "after=1.2.3", "replica=10000", "run=0", "follow=maybe", "since=nan"):
        refusal(daemon.ask("GET", f"/v1/jobs/{job}/logs?{query}"), 400, "invalid_request")
    refusal(daemon.ask("GET", "/v1/events?after=nonsense"), 400, "invalid_request")


def test_an_offset_is_judged_wherever_it_stands(daemon: Daemon) -> None:
    """That of a header was not looked at where there was one in the query."""
    job = daemon.submit("true")
    daemon.wait_for_end(job)
    wrong = {"Last-Event-ID": "nonsense"}
    for path in ("/v1/events", f"/v1/jobs/{job}/events", f"/v1/jobs/{job}/logs"):
        for query in ("", "?after="):
            refusal(daemon.ask("GET", path + query, headers=wrong), 400, "invalid_request")
        assert daemon.ask("GET", f"{path}?after=", headers={"Last-Event-ID": ""}).body != b""


def test_a_replica_that_is_not_there_is_not_found_however_it_is_named(daemon: Daemon) -> None:
    job = daemon.submit("true")
    for path in (f"/v1/jobs/{job}/logs?replica=1", f"/v1/jobs/{job}.1/logs"):
        assert "no replica 1" in refusal(daemon.ask("GET", path), 404, "not_found")["message"]


def test_a_key_is_judged_in_a_dry_run_too(daemon: Daemon) -> None:
    refusal(daemon.ask("POST", "/v1/jobs?dry_run=1", GOOD, headers={"Idempotency-Key": "ä b"}), 400, "invalid_request")


def test_a_whole_number_is_one_however_it_is_written(daemon: Daemon) -> None:
    """To JSON, and to many a client, 2.0 is 2."""
    job = daemon.submit("true", replicas=2.0, spread="any", priority=1e1)
    spec = daemon.ask("GET", f"/v1/jobs/{job}/spec").json
    assert (spec["replicas"], spec["priority"]) == (2, 10)
    assert isinstance(spec["replicas"], int)
    refusal(daemon.ask("POST", "/v1/jobs", GOOD | {"replicas": 1e300}), 400, "invalid_request")


@pytest.mark.parametrize("label", ["two\nlines", "\x1b[31m", "\u202egnp.exe", "x" * 201])
def test_a_label_that_turns_the_text_around_it_is_refused(daemon: Daemon, label: str) -> None:
    refusal(daemon.ask("POST", "/v1/tokens", {"role": "read", "label": label}), 400, "invalid_request")


def test_an_upgrade_is_ignored_and_the_request_answered(daemon: Daemon) -> None:
    for upgrade in (b"websocket", b"h2c"):
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: " + upgrade
        request += b"\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=5) as sock:
            sock.sendall(request)
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_and_harms_nobody(daemon: Daemon, request_bytes: bytes) -> None:
    answered = daemon.raw(request_bytes + b"\r\n\r\n")
    assert answered == b"" or answered.startswith(b"HTTP/1.1 4")
    assert daemon.ask("GET", "/healthz", role="").status == 200


def test_a_client_that_never_finishes_its_header_is_let_go(daemon: Daemon) -> None:
    started = time.monotonic()
    answered = daemon.raw(b"GET /healthz HTTP/1.1\r\nHost: loc")
    assert time.monotonic() - started < 15
    assert answered in (b"",) or answered.startswith(b"HTTP/1.1 4")


def test_many_connections_that_say_nothing_do_not_keep_others_out(daemon: Daemon) -> None:
    silent = []
    try:
        for _ in range(520):
            silent.append(socket.create_connection(("127.0.0.1", daemon.port), timeout=5))
        # The TCP side is full and says so; the socket of the local admin is another matter.
        assert daemon.ask("GET", "/v1/status").status == 200
        silent[-1].settimeout(5)
        silent[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 503")
    finally:
        for sock in silent:
            sock.close()
    until = time.monotonic() + 5
    while daemon.ask("GET", "/healthz", role="").status != 200:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_whole_url_as_the_target_is_taken(daemon: Daemon) -> None:
    """As RFC 9112 §3.2.2 has it; clients that know of a proxy send it."""
    for target in ("http://localhost/healthz", "HTTP://localhost:1/healthz"):
        request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert daemon.raw(request.encode()).startswith(b"HTTP/1.1 200")
    request = "GET http://localhost/v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert daemon.raw(request.encode()).startswith(b"HTTP/1.1 401")


def test_two_idempotency_keys_are_refused(daemon: Daemon) -> None:
    body = json.dumps(GOOD).encode()
    head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Idempotency-Key: a\r\nIdempotency-Key: b\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    answered = daemon.raw(request, unix=True)
    assert answered.startswith(b"HTTP/1.1 400")
    assert b"twice" in answered
