"""Who may do what: tokens and roles over TCP, the owner of the socket file, and names in the Host header (P11)."""

from __future__ import annotations

import http.client
import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.api.conftest import Daemon


def test_without_a_token_nothing_but_health_is_answered(daemon: Daemon) -> None:
    for method, path in (("GET", "/v1/status"), ("POST", "/v1/jobs"), ("GET", "/metrics"), ("GET", "/nothing")):
        answer = daemon.ask(method, path, role="")
        assert answer.status == 401
        assert answer.json["code"] == "permission_denied"
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert daemon.ask("GET", "/healthz", role="").body == b"ok\n"
    assert daemon.ask("GET", "/readyz", role="").body == b"ready\n"


@pytest.mark.parametrize("given", ["Bearer", "Bearer ", "Bearer gpl_wrong", "Basic Z3BsOmdwbA==", "gpl_x", "Bearer é"])
def test_a_token_that_is_none_is_refused(daemon: Daemon, given: str) -> None:
    answer = daemon.ask("GET", "/v1/status", role="", headers={"Authorization": given})
    assert answer.status == 401


def test_each_role_may_do_its_own_and_no_more(daemon: Daemon) -> None:
    may = {
        "read": {"GET /v1/status"},
        "submit": {"GET /v1/status", "POST /v1/jobs"},
        "admin": {"GET /v1/status", "POST /v1/jobs", "POST /v1/tokens"},
    }
    bodies = {"POST /v1/jobs": {"command": ["true"]}, "POST /v1/tokens": {"role": "read"}}
    for role, allowed in may.items():
        for request in ("GET /v1/status", "POST /v1/jobs", "POST /v1/tokens", "DELETE /v1/tokens/x", "POST /v1/leave"):
            method, path = request.split()
            if request == "POST /v1/leave" and role == "admin":
                continue
            answer = daemon.ask(method, path, bodies.get(request), role=role)
            if request in allowed:
                assert answer.status in (200, 201), (role, request, answer)
            elif not (role == "admin" and answer.status == 404):
                assert answer.status == 403, (role, request, answer)
                assert answer.json["code"] == "permission_denied"


def test_who_may_only_read_does_not_read_the_environment_of_a_job(daemon: Daemon) -> None:
    body = {
        "command": ["sleep", "100"],
        "kind": "service",
        "port": False,
        "name": "keeps",
        "env": {"KEY": "s3cret-value"},
    }
    assert daemon.ask("POST", "/v1/jobs", body).status == 201
    assert daemon.ask("GET", "/v1/jobs/keeps/spec", role="submit").json["env"] == {"KEY": "s3cret-value"}
    assert daemon.ask("GET", "/v1/jobs/keeps/spec", role="read").status == 403
    for path in ("", "/explain", "/events", "/logs", "/endpoints"):
        answer = daemon.ask("GET", f"/v1/jobs/keeps{path}", role="read")
        assert answer.status == 200
        assert b"s3cret-value" not in answer.body, path


def test_a_role_is_judged_before_the_body_is_read(daemon: Daemon) -> None:
    token = daemon.token("read")
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 500000\r\n\r\n"
    )
    # Nothing of the body is sent, and the answer is there all the same.
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=5) as sock:
        sock.sendall(head.encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 403")


def test_a_revoked_token_is_of_no_use_any_more(daemon: Daemon) -> None:
    made = daemon.ask("POST", "/v1/tokens", {"role": "read", "label": "for a day"})
    assert made.status == 201
    assert made.headers["cache-control"] == "no-store"
    bearer = {"Authorization": f"Bearer {made.json['token']}"}
    assert daemon.ask("GET", "/v1/status", role="", headers=bearer).status == 200
    listed = daemon.ask("GET", "/v1/tokens").json["tokens"]
    mine = next(token for token in listed if token["id"] == made.json["id"])
    assert mine["label"] == "for a day"
    assert "token" not in mine
    assert "digest" not in mine
    assert daemon.ask("DELETE", f"/v1/tokens/{mine['id']}").status == 204
    assert daemon.ask("GET", "/v1/status", role="", headers=bearer).status == 401
    assert daemon.ask("DELETE", f"/v1/tokens/{mine['id']}").status == 404


@pytest.mark.parametrize("path", ["/v1/events?follow=1", "/v1/jobs/{job}/logs?follow=1", "/v1/jobs/{job}/watch"])
def test_a_revoked_token_gets_nothing_more_from_a_stream_that_it_began(daemon: Daemon, path: str) -> None:
    job = daemon.submit("sh", "-c", "echo hello; exec sleep 60")
    made = daemon.ask("POST", "/v1/tokens", {"role": "read"}).json
    connection = daemon.connect("")
    headers = {"Authorization": f"Bearer {made['token']}"}
    connection.request("GET", path.format(job=job), headers=headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline()
    assert daemon.ask("DELETE", f"/v1/tokens/{made['id']}").status == 204
    with pytest.raises(http.client.IncompleteRead):  # cut, not ended: there is more, for others
        response.read()
    assert daemon.ask("GET", path.format(job=job), role="", headers=headers).status == 401
    assert daemon.ask("POST", f"/v1/jobs/{job}/cancel").status == 202


def test_a_name_that_is_not_ours_is_refused_over_tcp(daemon: Daemon) -> None:
    bearer = {"Authorization": f"Bearer {daemon.token('admin')}"}
    for host in ("localhost", "LOCALHOST:7450", "127.0.0.1:1", "[::1]:7450", "[::1]", "127.0.0.9"):
        assert daemon.ask("GET", "/v1/status", role="", headers=bearer | {"Host": host}).status == 200, host
    for host in ("evil.example", "evil.example:7450", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        answer = daemon.ask("GET", "/v1/status", role="", headers=bearer | {"Host": host})
        assert answer.status == 400, host
        assert "access-control-allow-origin" not in answer.headers
    assert daemon.ask("GET", "/v1/status", headers={"Host": "anything"}).status == 200


def test_the_socket_file_is_for_its_owner_alone(daemon: Daemon) -> None:
    found = os.stat(daemon.socket_path)
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
