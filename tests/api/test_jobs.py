"""Jobs over HTTP: what is answered, and that asking twice does no harm."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.api.conftest import Daemon

SLEEP = ["sleep", "60"]


def service(**keys: Any) -> dict[str, Any]:
    return {"kind": "service", "command": SLEEP, "port": False, **keys}


def test_a_submit_names_the_job_and_where_it_is(daemon: Daemon) -> None:
    answer = daemon.ask("POST", "/v1/jobs", {"command": ["true"]})
    assert answer.status == 201
    document = answer.json
    assert set(document) == {"id", "name", "revision", "replayed", "warning"}
    assert document["warning"] is None
    assert document["name"].startswith("true")
    assert answer.headers["location"] == f"/v1/jobs/{document['id']}"
    assert daemon.wait_for_end(document["id"])["state"] == "succeeded"


def test_the_same_key_with_the_same_body_is_one_job(daemon: Daemon) -> None:
    key = {"Idempotency-Key": "once-1"}
    first = daemon.ask("POST", "/v1/jobs", {"command": ["true", "a"], "priority": 50}, headers=key)
    again = daemon.ask("POST", "/v1/jobs", b'{"priority": 50,  "command": ["true", "a"]}', headers=key)
    assert (first.status, again.status) == (201, 200)
    assert again.json == first.json | {"replayed": True}
    other = daemon.ask("POST", "/v1/jobs", {"command": ["true", "b"]}, headers=key)
    assert other.status == 409
    assert other.json["code"] == "idempotency_conflict"
    for wrong in ("", "a b", "x" * 129):
        assert daemon.ask("POST", "/v1/jobs", {"command": ["true"]}, headers={"Idempotency-Key": wrong}).status == 400


def test_what_nothing_but_a_person_can_change_is_said_at_once(daemon: Daemon) -> None:
    answer = daemon.ask("POST", "/v1/jobs", {"command": ["true"], "gpus": 64, "name": "huge"})
    assert answer.status == 201
    warning = answer.json["warning"]
    assert warning["code"] == "never_fits"
    assert warning["text"].startswith("cannot ever run here: ")
    assert warning["hint"].startswith("ask for what there is")
    dry = daemon.ask("POST", "/v1/jobs?dry_run=1", service(replicas=2)).json
    assert dry["warning"]["text"] == "2 replicas need as many nodes (spread=node), and 1 node can run one"
    assert daemon.ask("POST", "/v1/jobs?dry_run=1", service()).json["warning"] is None
    daemon.ask("POST", "/v1/jobs/huge/cancel")


def test_a_name_in_use_is_refused_and_a_derived_one_gets_a_suffix(daemon: Daemon) -> None:
    assert daemon.ask("POST", "/v1/jobs", service(name="taken")).status == 201
    answer = daemon.ask("POST", "/v1/jobs", service(name="taken"))
    assert answer.status == 409
    assert answer.json["code"] == "refused"
    names = {daemon.ask("POST", "/v1/jobs", service(command=["sleep", "61"])).json["name"] for _ in range(2)}
    assert len(names) == 2


def test_the_specification_comes_back_as_it_was_given(daemon: Daemon) -> None:
    given = {
        "kind": "service",
        "name": "full",
        "command": ["sleep", "60", "ä"],
        "replicas": 2,
        "accelerator": "cuda",
        "gpus": 0.5,
        "gpu_model": ["*A100*"],
        "gpu_memory_mib": 1024,
        "vendor": "nvidia",
        "cpus": 0.25,
        "memory_mib": 16,
        "labels": {},
        "env": {"K": "V"},
        "workdir": "/tmp",
        "port": False,
        "restart": "on_failure",
        "max_restarts": 3,
        "retry_max_attempts": 4,
        "spread": "any",
        "priority": 60,
        "on_replica_end": "keep",
        "timeout_seconds": 100.5,
        "start_timeout_seconds": 10,
        "stop_signal": "INT",
        "stop_grace_seconds": 1,
    }
    assert daemon.ask("POST", "/v1/jobs", given).status == 201
    assert daemon.ask("GET", "/v1/jobs/full/spec").json == given | {"revision": 1}


def test_a_dry_run_says_where_it_would_go_and_keeps_nothing(daemon: Daemon) -> None:
    body = {"command": ["true"], "name": "dry", "gpus": 1}
    fits = daemon.ask("POST", "/v1/jobs?dry_run=1", body)
    assert fits.status == 200
    assert fits.json["fits"] is True
    assert len(fits.json["replicas"][0]["devices"]) == 1
    too_much = daemon.ask("POST", "/v1/jobs?dry_run=1", body | {"gpus": 64}).json
    assert too_much["fits"] is False
    assert too_much["replicas"][0]["node"] is None
    assert too_much["replicas"][0]["refusals"][0]["code"]
    assert too_much["summary"]
    assert daemon.ask("GET", "/v1/jobs/dry").status == 404


def test_pages_of_the_list_have_each_job_once_newest_first(daemon: Daemon) -> None:
    made = [daemon.submit("true", name=f"page-{number}") for number in range(5)]
    for job in made:
        daemon.wait_for_end(job)
    found: list[str] = []
    cursor = ""
    while True:
        page = daemon.ask("GET", f"/v1/jobs?state=all&limit=2{cursor}").json
        assert len(page["jobs"]) <= 2
        found += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert len(found) == len(set(found))
    assert [job for job in found if job in made] == made[::-1]
    live = daemon.ask("GET", "/v1/jobs").json["jobs"]
    assert not {job["id"] for job in live} & set(made)


def test_cancelling_ends_it_and_cancelling_again_is_a_conflict(daemon: Daemon) -> None:
    job = daemon.submit(*SLEEP)
    answer = daemon.ask("POST", f"/v1/jobs/{job}/cancel")
    assert answer.status == 202
    assert answer.json["id"] == job
    assert daemon.wait_for_end(job)["state"] == "cancelled"
    again = daemon.ask("POST", f"/v1/jobs/{job}/cancel", {})
    assert again.status == 409
    assert daemon.ask("POST", f"/v1/jobs/{job}/restart").status == 409


def test_a_restart_is_a_new_run_of_the_named_replica_alone(daemon: Daemon) -> None:
    daemon.ask("POST", "/v1/jobs", service(name="again", replicas=2, spread="any"))
    before = daemon.wait_for("again", lambda status: status["ready"] == 2)["replicas"]
    answer = daemon.ask("POST", "/v1/jobs/again/restart", {"replicas": [1]})
    assert answer.status == 202
    assert answer.json["replicas"] == [1]
    after = daemon.wait_for("again", lambda status: status["ready"] == 2 and status["replicas"][1]["run"] == 2)
    assert after["replicas"][0]["pid"] == before[0]["pid"]
    assert after["replicas"][1]["pid"] != before[1]["pid"]
    assert daemon.ask("POST", "/v1/jobs/again.0/restart").json["replicas"] == [0]
    assert daemon.ask("POST", "/v1/jobs/again/restart", {"replicas": [2]}).status == 404
    assert daemon.ask("POST", "/v1/jobs/again/restart", {"replicas": ["0"]}).status == 400


def test_a_batch_is_not_restarted_and_is_said_not_to_be(daemon: Daemon) -> None:
    job = daemon.submit(*SLEEP)
    before = daemon.wait_for(job, lambda status: status["state"] == "running")["replicas"][0]
    for path in (f"/v1/jobs/{job}/restart", f"/v1/jobs/{job}.0/restart"):
        answer = daemon.ask("POST", path)
        assert answer.status == 409
        assert "batch" in answer.json["message"]
    assert not [event for event in daemon.documents(f"/v1/jobs/{job}/events") if "restart" in event["kind"]]
    assert daemon.status(job)["replicas"][0]["pid"] == before["pid"]
    assert daemon.ask("POST", f"/v1/jobs/{job}/cancel").status == 202


def test_a_name_whose_job_is_stopping_is_refused_with_how_to_wait_for_it(daemon: Daemon) -> None:
    script = "trap '' TERM; echo armed; while :; do sleep 0.05; done"
    body = {"command": ["sh", "-c", script], "name": "leaving", "stop_grace_seconds": 3}
    assert daemon.ask("POST", "/v1/jobs", body).status == 201
    daemon.wait_for("leaving", lambda status: status["state"] == "running")
    assert "cancel" in daemon.ask("POST", "/v1/jobs", body).json["hint"]
    assert daemon.ask("POST", "/v1/jobs/leaving/cancel").status == 202
    refused = daemon.ask("POST", "/v1/jobs", body)
    assert refused.status == 409
    assert "is stopping" in refused.json["hint"]
    assert "wait" in refused.json["hint"]
    daemon.wait_for_end("leaving")
    again = daemon.ask("POST", "/v1/jobs", body | {"command": ["true"]})
    assert again.status == 201
    daemon.wait_for_end(again.json["id"])


def test_a_failed_run_shows_its_exit_and_its_last_lines(daemon: Daemon) -> None:
    job = daemon.submit("sh", "-c", "echo about to fail; exit 3")
    status = daemon.wait_for_end(job)
    replica = status["replicas"][0]
    assert status["state"] == "failed"
    assert status["reason"]["code"] == "exit_nonzero"
    assert replica["last_exit"]["code"] == 3
    assert "about to fail" in replica["last_lines"]


def test_what_waits_says_why_and_explain_names_the_node(daemon: Daemon) -> None:
    job = daemon.submit("true", name="greedy", gpus=64)
    status = daemon.status(job)
    assert status["state"] == "waiting"
    assert status["reason"]["code"] == "never_fits"
    explained = daemon.ask("GET", "/v1/jobs/greedy/explain").json
    assert explained["replicas"][0]["refusals"][0]["text"]
    assert explained["replicas"][0]["why"]
    seen = daemon.ask("GET", "/v1/status").json
    assert any(each["name"] == "greedy" for each in seen["queued"])
    daemon.ask("POST", "/v1/jobs/greedy/cancel")


def test_devices_say_who_holds_them(daemon: Daemon) -> None:
    job = daemon.submit(*SLEEP, name="holder", gpus=0.5)
    daemon.wait_for(job, lambda status: status["state"] == "running")
    (node,) = daemon.ask("GET", "/v1/nodes").json
    held = [device for device in node["devices"] if any(holder["job"] == job for holder in device["held_by"])]
    assert len(held) == 1
    assert held[0]["share_free"] == 0.5 or held[0]["share_free"] == 0
    stock = daemon.ask("GET", "/v1/status").json["gpus"]
    assert stock[0]["model"] == "Test A100"
    assert stock[0]["all"] == 2
    metrics = daemon.ask("GET", "/metrics").body.decode()
    assert 'gpulayer_gpus_all{model="Test A100"} 2.0' in metrics
    found = re.findall(r'gpulayer_gpus\{model="Test A100",state="(\w+)"\} (\d)\.0', metrics)
    by_state = {state: int(count) for state, count in found}
    assert by_state.keys() == {"idle", "held", "foreign", "unhealthy", "away"}
    assert sum(by_state.values()) == 2
    assert by_state["held"] >= 1
    assert "gpulayer_log_index" in metrics
    daemon.ask("POST", f"/v1/jobs/{job}/cancel")


def test_an_audit_of_a_quiet_node_finds_nothing(daemon: Daemon) -> None:
    report = daemon.ask("GET", "/v1/audit").json
    assert set(report) == {"checked_at_utc", "differences", "replicas_checked", "processes_seen", "nodes"}
    everywhere = daemon.ask("GET", "/v1/audit?all=1").json
    assert everywhere["nodes"] == report["nodes"], "it is the only node"


def test_leaving_is_refused_while_something_lives(daemon: Daemon) -> None:
    job = daemon.submit(*SLEEP)
    answer = daemon.ask("POST", "/v1/leave", {})
    assert answer.status == 409
    assert "stop-all" in answer.json["hint"]
    daemon.ask("POST", f"/v1/jobs/{job}/cancel")


def test_a_kept_connection_serves_one_request_after_another(daemon: Daemon) -> None:
    connection = daemon.connect()
    for _ in range(50):
        connection.request("GET", "/v1/status")
        response = connection.getresponse()
        assert response.status == 200
        response.read()
    connection.request("HEAD", "/v1/status")
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_leaving_with_stop_all_ends_everything_and_then_the_daemon(own_daemon: Daemon) -> None:
    own_daemon.submit(*SLEEP)
    own_daemon.submit("true", gpus=64)
    answer = own_daemon.ask("POST", "/v1/leave", {"stop_all": True})
    told = [json.loads(line) for line in answer.body.splitlines() if line.strip()]
    assert told[0]["state"] == "stopping"
    assert told[-1] == {"state": "left"}
    assert own_daemon.process.wait(5) == 0
    assert not own_daemon.socket_path.exists()
