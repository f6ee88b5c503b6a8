"""The OpenAPI document is the contract: it names every request, and what a daemon takes and says is as it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jsonschema_rs
import pytest

from gpulayer.api.app import make_app
from gpulayer.api.openapi import OPERATIONS, document
from gpulayer.model.cluster import ROLES
from gpulayer.wire.http import SPEC_KEYS
from tests.api.test_bad_requests import WRONG_KEYS

if TYPE_CHECKING:
    from tests.api.conftest import Answer, Daemon

Json = dict[str, Any]
# `GPULAYER_TEST_SCHEMATHESIS_EXAMPLES=400` looks for some minutes; so many take half a minute.
EXAMPLES = int(os.environ.get("GPULAYER_TEST_SCHEMATHESIS_EXAMPLES", "10"))
SEED = os.environ.get("GPULAYER_TEST_SCHEMATHESIS_SEED", "1")


# --- the document itself ----------------------------------------------------------------------------------------------


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    app = make_app(cast(Any, None), trusted=True)
    routes = {
        (method.lower(), route.path) for route in cast(Any, app.routes) for method in route.methods if method != "HEAD"
    }
    written = {(method, path) for path, operations in document()["paths"].items() for method in operations}
    assert routes == written


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [operation.id for operation in OPERATIONS]
    assert len(set(names)) == len(names)


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_shape_that_is_named_is_there_and_every_one_that_is_there_is_named() -> None:
    components = document()["components"]
    there = {f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in components[kind]}
    assert set(references(document())) == there


def test_every_schema_is_one() -> None:
    for name, schema in document()["components"]["schemas"].items():
        jsonschema_rs.Draft202012Validator(schema | {"components": document()["components"]})
        assert schema, name


def test_a_specification_has_every_key_that_is_taken() -> None:
    schemas = document()["components"]["schemas"]
    for name in ("Service", "Batch"):
        assert set(schemas[name]["properties"]) == set(SPEC_KEYS), name
        assert schemas[name]["additionalProperties"] is False
    assert set(schemas["SpecificationInForce"]["properties"]) == {*SPEC_KEYS, "revision"}


# --- against a daemon -------------------------------------------------------------------------------------------------


def validator(schema: Json) -> jsonschema_rs.Draft202012Validator:
    """Of a schema of the document, with all objects closed: a key that is not documented is a mistake here."""
    components = closed({"components": document()["components"]})
    return jsonschema_rs.Draft202012Validator(closed(schema) | components)


def closed(node: Any) -> Any:
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: closed(value) for key, value in node.items()}
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def response_of(method: str, path: str, status: int) -> Json:
    """What the document says of that answer."""
    for template, operations in document()["paths"].items():
        if re.fullmatch(re.sub(r"\{[a-z_]+\}", "[^/]+", template), path):
            found = operations[method.lower()]["responses"].get(str(status))
            assert found is not None, f"{method} {template}: {status} is not documented"
            name = found.get("$ref", "").rpartition("/")[2]
            return cast(Json, document()["components"]["responses"][name] if name else found)
    raise AssertionError(f"{path} is not documented")


def check(answer: Answer, method: str, target: str) -> None:
    """The answer is as the document says: its status, its media type, its shape, its headers."""
    path = target.partition("?")[0]
    said = response_of(method, path, answer.status)
    for header, described in said.get("headers", {}).items():
        assert not described.get("required") or header.lower() in answer.headers, (target, header)
    if "content" not in said:
        assert answer.body == b"", target
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    assert media_type in said["content"], (target, media_type)
    if media_type in ("text/plain", "text/event-stream"):
        return
    lines = [json.loads(line) for line in answer.body.splitlines() if line.strip()]
    instance = lines if media_type == "application/x-ndjson" else lines[0]
    errors = list(validator(said["content"][media_type]["schema"]).iter_errors(instance))
    assert not errors, (target, [str(error) for error in errors[:3]], instance)


def test_the_document_is_what_the_daemon_gives_to_whoever_has_a_token(daemon: Daemon) -> None:
    answer = daemon.ask("GET", "/v1/openapi.json", role="read")
    assert answer.json == json.loads(json.dumps(document()))
    assert answer.json["info"]["version"] == daemon.ask("GET", "/v1/status").json["version"]
    check(answer, "GET", "/v1/openapi.json")
    assert daemon.ask("GET", "/v1/openapi.json", role="").status == 401


def test_every_answer_is_as_the_document_says(daemon: Daemon) -> None:
    def ask(method: str, path: str, status: int, body: object = None, **headers: str) -> Answer:
        answer = daemon.ask(
            method, path, body, headers={key.replace("_", "-"): value for key, value in headers.items()}
        )
        assert answer.status == status, answer
        check(answer, method, path)
        return answer

    fails = daemon.submit("sh", "-c", "echo out; echo err >&2; exit 3")
    daemon.wait_for_end(fails)
    serve = ["sh", "-c", "exec python3 -m http.server $PORT --bind $HOST"]
    service = {"kind": "service", "name": "serves", "command": serve, "gpus": 0.5, "env": {"A": "1"}}
    ask("POST", "/v1/jobs", 201, service, Idempotency_Key="serves-1")
    ask("POST", "/v1/jobs", 200, service, Idempotency_Key="serves-1")
    ask("POST", "/v1/jobs", 409, service | {"priority": 1}, Idempotency_Key="serves-1")
    ask("POST", "/v1/jobs?dry_run=1", 200, service)
    ask("POST", "/v1/jobs?dry_run=1", 200, {"command": ["true"], "gpus": 64})
    ask("POST", "/v1/jobs", 201, {"command": ["true"], "name": "greedy", "gpus": 64})
    ask("POST", "/v1/jobs", 400, {"command": []})
    daemon.wait_for("serves", lambda status: status["ready"] == 1)
    for state in ("live", "ended", "all"):
        ask("GET", f"/v1/jobs?state={state}&limit=1", 200)
    for job in (fails, "serves", "greedy"):
        for part in (
            "",
            "/spec",
            "/explain",
            "/endpoints",
            "/logs",
            "/logs?previous=1&tail=5",
            "/events",
            "/events?limit=1",
        ):
            is_none = "previous" in part and job != fails
            ask("GET", f"/v1/jobs/{job}{part}", 404 if is_none else 200)
    ask("GET", f"/v1/jobs/{fails}/logs", 200, Accept="text/event-stream")
    ask("GET", f"/v1/jobs/{fails}/watch", 200)
    ask("GET", f"/v1/jobs/{fails}/endpoints?watch=1", 200)
    ask("GET", "/v1/jobs/nobody", 404)
    for path in ("events", "status", "nodes", "resources", "audit", "tokens"):
        ask("GET", f"/v1/{path}", 200)
    ask("POST", "/v1/jobs/serves/restart", 202, {"replicas": [0]})
    ask("POST", "/v1/jobs/greedy/restart", 409)
    ask("POST", "/v1/leave", 409, {})
    ask("POST", "/v1/jobs/serves/cancel", 202)
    daemon.wait_for_end("serves")
    ask("POST", "/v1/jobs/greedy/cancel", 202, {})
    ask("POST", "/v1/jobs/greedy/cancel", 409)
    for job in (fails, "serves", "greedy"):
        ask("GET", f"/v1/jobs/{job}", 200)
    token = ask("POST", "/v1/tokens", 201, {"role": "read", "label": "tour"}).json
    ask("GET", "/v1/tokens", 200)
    ask("DELETE", f"/v1/tokens/{token['id']}", 204)
    ask("DELETE", f"/v1/tokens/{token['id']}", 404)
    for path in ("/healthz", "/readyz", "/metrics"):
        ask("GET", path, 200)
    ask("POST", "/v1/jobs", 415, b"command=true", Content_Type="application/x-www-form-urlencoded")
    ask("POST", "/v1/jobs", 413, b" " * (2 * 2**20))
    unknown = daemon.ask("GET", "/v1/status", role="", headers={"Authorization": "Bearer gpl_unknown"})
    assert unknown.status == 401
    check(unknown, "GET", "/v1/status")


def test_leaving_is_as_the_document_says(own_daemon: Daemon) -> None:
    own_daemon.submit("sleep", "60")
    answer = own_daemon.ask("POST", "/v1/leave", {"stop_all": True})
    assert answer.status == 200
    check(answer, "POST", "/v1/leave")
    assert own_daemon.process.wait(5) == 0


def with_values(path: str) -> str:
    return re.sub(r"\{[a-z_]+\}", "none-such", path)


def test_every_operation_needs_the_role_that_the_document_says(daemon: Daemon) -> None:
    for operation in OPERATIONS:
        path = with_values(operation.path)
        for role in ("", *ROLES):
            # Words that are wrong, so that nothing happens to whoever may do it.
            answer = daemon.ask(operation.method.upper(), f"{path}?wrong=1", role=role)
            is_open = operation.role is None
            allowed = is_open or (role and ROLES.index(role) <= ROLES.index(cast(Any, operation.role)))
            expected = {200, 400, 404} if allowed else {403} if role else {401}
            assert answer.status in expected, (operation.id, role, answer)


def test_the_parameters_of_each_operation_are_those_that_it_takes(daemon: Daemon) -> None:
    """A parameter that is unknown is refused, with those that are known."""
    job = daemon.submit("true")
    daemon.wait_for_end(job)
    for operation in OPERATIONS:
        if not operation.path.startswith("/v1/"):
            continue
        path = operation.path.replace("{job}", job).replace("{token_id}", "t-none")
        body = {"command": ["true"]} if operation.id == "submit" else None
        answer = daemon.ask(operation.method.upper(), f"{path}?qqqqqqqq=1", body)
        assert answer.status == 400, (operation.id, answer)
        hint = answer.json["hint"]
        known = hint.removeprefix("known here: ").split(", ") if hint.startswith("known here") else []
        assert sorted(operation.query) == known, operation.id


GOOD_BODIES: list[Json] = [
    {"command": ["true"]},
    {"command": ["true", ""], "kind": "batch", "port": False, "restart": "never", "name": None},
    {"command": ["true"], "replicas": 2.0, "priority": 0, "spread": "any", "on_replica_end": "keep"},
    {"command": ["true"], "gpus": 0.125, "gpu_model": "*A100*", "gpu_memory_mib": 100, "vendor": "nvidia"},
    {"command": ["true"], "gpus": 2, "gpu_model": ["*A100*", "*"], "accelerator": "cuda"},
    {"command": ["true"], "gpus": 0, "gpu_model": [], "gpu_memory_mib": 0, "accelerator": "cpu", "vendor": None},
    {"command": ["true"], "cpus": 0.25, "memory_mib": 16, "labels": {"zone": "a"}, "env": {"A.B": "ä"}},
    {"command": ["true"], "workdir": "/tmp", "timeout_seconds": 0.5, "stop_signal": "INT", "stop_grace_seconds": 0},
    {"command": ["true"], "kind": "service", "restart": "on_failure", "max_restarts": 3, "start_timeout_seconds": 1},
    {"command": ["true"], "kind": "service", "port": None, "restart": None, "retry_max_attempts": None},
]  # fmt: skip


@pytest.mark.parametrize("body", GOOD_BODIES)
def test_what_the_daemon_takes_is_valid(daemon: Daemon, body: Json) -> None:
    assert daemon.ask("POST", "/v1/jobs?dry_run=1", body).status == 200
    specification = validator(document()["components"]["schemas"]["Specification"])
    assert [str(error) for error in specification.iter_errors(body)] == []


@pytest.mark.parametrize("keys", [keys for keys, _, _ in WRONG_KEYS])
def test_what_the_daemon_refuses_is_not_valid(keys: Json) -> None:
    """tests/api/test_bad_requests.py has the daemon refuse each of these."""
    specification = validator(document()["components"]["schemas"]["Specification"])
    assert not specification.is_valid({"command": ["true"]} | keys)


# --- schemathesis -----------------------------------------------------------------------------------------------------


def test_schemathesis_finds_nothing_against_it(own_daemon: Daemon, tmp_path: Path) -> None:
    """All of its checks, over TCP with an admin's token. What it must not do, and why, is in schemathesis_hooks.py."""
    daemon = own_daemon
    ended = daemon.submit("sh", "-c", "echo out; echo err >&2")
    daemon.wait_for_end(ended)
    goes_on = {"kind": "service", "name": "goes-on", "command": ["sleep", "1000"], "port": False}
    live = daemon.ask("POST", "/v1/jobs", goes_on).json
    token = daemon.ask("POST", "/v1/tokens", {"role": "admin", "label": "schemathesis"}).json
    environment = {
        "GPULAYER_TEST_ENDED_JOB": ended,
        "GPULAYER_TEST_LIVE_JOB": f"{live['id']} {live['name']}",
        "GPULAYER_TEST_OWN_TOKEN": token["id"],
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "NO_COLOR": "1",
    }
    words = [
        *(Path(sys.executable).parent / "schemathesis", "--config-file", Path(__file__).parent / "schemathesis.toml"),
        *("run", f"http://127.0.0.1:{daemon.port}/v1/openapi.json"),
        *("--header", f"Authorization: Bearer {token['token']}"),
        *("--checks", "all", "--seed", SEED, "--max-examples", str(EXAMPLES)),
    ]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120 + 2 * EXAMPLES
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    # It leaves out the one by which it got the document.
    assert f"{len(OPERATIONS) - 1} selected / {len(OPERATIONS) - 1} total" in done.stdout
    assert daemon.status("goes-on")["state"] == "running"
