"""Every state that a user can see has a reason that they can act on (P9)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, wait_for
from tests.integration.gpus import held, ready
from tests.integration.programs import serve, sh


def test_five_services_that_fail_differently_have_five_reasons(daemon: Daemon) -> None:
    """It said "FAILED", without a cause."""
    jobs = {
        "bad_command": daemon.submit(["/no/such/program"], max_restarts=0),
        "exit_nonzero": daemon.submit(sh("exit 3"), max_restarts=0),
        "never_ready": daemon.submit(sh("sleep 1000"), max_restarts=0, start_timeout_seconds=0.5),
        "never_fits": daemon.submit(serve(), gpus=3),
        "signal": daemon.submit(sh("kill -9 $$"), max_restarts=0),
    }
    for code, job in jobs.items():
        status = daemon.wait_job(job, lambda status: status["state"] in ("failed", "waiting") and status["reason"])
        assert status["reason"]["code"] == code
        assert status["replicas"][0]["reason"]["code"] == code
        assert status["reason"]["text"]
        assert status["reason"]["hint"]
        shown = daemon.cli("job", "status", job).stdout
        assert "task=0" in shown
        assert status["replicas"][0]["reason"]["text"] in shown


def test_a_command_that_cannot_be_executed_says_which_and_why(daemon: Daemon, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("echo hello\n")
    plain.chmod(stat.S_IRUSR | stat.S_IWUSR)
    lost = tmp_path / "lost"
    lost.write_text("#!/no/such/interpreter\n")
    lost.chmod(0o755)
    for command, word in (
        (["no-such-program-anywhere"], "PATH"),
        ([str(plain)], "executable"),
        ([str(lost)], "/no/such/interpreter"),
        ([str(tmp_path)], "directory"),
    ):
        job = daemon.batch(command)
        reason = daemon.wait_ended(job)["replicas"][0]["reason"]
        assert reason["code"] == "bad_command"
        assert word in reason["text"], reason
    elsewhere = daemon.batch(["true"], workdir="/no/such/directory")
    reason = daemon.wait_ended(elsewhere)["replicas"][0]["reason"]
    assert reason["code"] == "bad_workdir"
    assert "/no/such/directory" in reason["text"]


@pytest.mark.parametrize(
    ("code", "script", "spec"),
    [
        ("exit_zero", "exit 0", {"max_restarts": 0}),
        ("timeout", "sleep 1000", {"timeout_seconds": 0.3}),
    ],
)
def test_a_service_that_ended_says_how(daemon: Daemon, code: str, script: str, spec: dict[str, object]) -> None:
    status = daemon.wait_ended(daemon.submit(sh(script), port=False, **spec))
    assert status["replicas"][0]["reason"]["code"] == code


def test_a_replica_that_backs_off_says_what_happened_and_when_it_goes_on(daemon: Daemon) -> None:
    job = daemon.submit(sh("echo about to fail; exit 9"), port=False, name="loop")
    replica = daemon.wait_replica(job, lambda replica: replica["restarts"] >= 2 and replica["state"] == "backing_off")
    assert replica["reason"]["code"] == "exit_nonzero"
    assert "9" in replica["reason"]["text"]
    assert "restart" in replica["next"]
    assert any("about to fail" in line for line in replica["last_lines"])
    shown = daemon.cli("job", "status", "loop").stdout
    assert "state=backing_off" in shown
    assert "about to fail" in shown
    queued = daemon.call("GET", "/v1/status")
    assert [job["name"] for job in queued["unhealthy"]] == ["loop"]


def test_explain_tells_the_story_of_a_replica(daemon: Daemon) -> None:
    job = daemon.submit(serve(), name="web")
    daemon.wait_ready(job)
    os.kill(daemon.replica(job)["pid"], 9)
    daemon.wait_replica(job, lambda replica: replica["restarts"] == 1 and replica["state"] == "ready")
    explained = daemon.call("GET", "/v1/jobs/web/explain")
    story = [line["text"] for line in explained["replicas"][0]["history"]]
    assert len(story) >= 4
    assert explained["replicas"][0]["why"]
    kinds = [event["kind"] for event in daemon.call("GET", "/v1/jobs/web/events")]
    assert "job.submitted" in kinds
    assert "replica.ready" in kinds
    assert kinds.index("job.submitted") == 0


def test_status_shows_what_waits_and_why(daemon: Daemon) -> None:
    daemon.submit(serve(), gpus=3, name="big")
    status = wait_for(lambda: (s := daemon.call("GET", "/v1/status"))["queued"] and s)
    assert status["queued"][0]["name"] == "big"
    assert status["queued"][0]["reason"]["code"] == "never_fits"
    shown = daemon.cli("status")
    assert shown.returncode == 0
    assert "big" in shown.stdout
    assert "H100" in shown.stdout


def test_a_gpu_that_fails_under_a_service_is_told_with_the_way_to_another_one(
    make_daemon: DaemonMaker, tmp_path: Path
) -> None:
    """The replica was ready, its status was silent, and its program hung."""
    nvml = FakeNvml(tmp_path, gpus=2)
    daemon = make_daemon(env=nvml.env()).start()
    job = ready(daemon, gpus=1, name="serve")
    bad = held(daemon, job)
    nvml.ecc_errors(nvml.uuids.index(bad), 3)
    warning = daemon.wait_replica(job, lambda replica: replica["warning"])["warning"]
    assert warning["code"] == "device_unhealthy"
    assert warning["text"].startswith(f"GPU {nvml.uuids.index(bad)} ({bad[:12]}), which it holds, is unhealthy: ")
    assert daemon.job(job)["state"] == "running"
    assert warning["text"] in daemon.cli("job", "status", job).stdout

    assert "gpulayer job restart serve" in warning["hint"]
    assert daemon.cli("job", "restart", "serve").returncode == 0
    moved = daemon.wait_replica(
        job, lambda replica: replica["attempt"] == 2 and replica["state"] == "ready", seconds=60
    )
    assert moved["warning"] is None
    assert held(daemon, job) != bad

    second = daemon.submit(serve(), gpus=2, name="second")
    reason = daemon.wait_job(second, lambda status: status["reason"])["reason"]
    assert "0 of 2 GPUs free" in reason["text"]
    assert f"GPU {nvml.uuids.index(bad)} ({bad[:12]}) unhealthy: " in reason["text"]
    assert "gpulayer resources detect" in reason["hint"]
