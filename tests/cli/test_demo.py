"""The demo shows a restart, leaves nothing behind, and cleans up after Ctrl-C too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpulayer.cli import demo
from gpulayer.client.requests import service
from tests.integration.daemon import living, read

DEMO_SECONDS_MAX = 30.0


def start(tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpulayer", "demo"],
        env=dict(os.environ) | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def of_the_demo(tmp_path: Path) -> list[int]:
    mark = str(tmp_path).encode()
    return [pid for pid in living() if pid != os.getpid() and mark in read(f"/proc/{pid}/cmdline")]


def test_the_demo_shows_a_restart_and_leaves_nothing(tmp_path: Path) -> None:
    begun = time.monotonic()
    process = start(tmp_path)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stdout + stderr
    assert time.monotonic() - begun < DEMO_SECONDS_MAX
    ports = re.findall(r"replica 0 is ready (?:again )?at 127\.0\.0\.1:(\d+)", stdout)
    assert len(ports) == 2
    assert ports[0] != ports[1]
    assert "restarts=1" in stdout
    assert "audit: 0 differences" in stdout
    answered, failed = map(int, re.findall(r"requests: (\d+) answered, (\d+) failed", stdout)[0])
    assert answered > 20
    # One endpoint was gone for a second, and listed no longer than its next check.
    assert failed < answered
    assert not list(tmp_path.iterdir())
    assert not of_the_demo(tmp_path)


def test_ctrl_c_in_the_demo_leaves_nothing_either(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "is ready at" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=40)
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())
    assert not of_the_demo(tmp_path)


def test_requests_go_on_while_a_daemon_is_killed_wherever_the_replicas_are(tmp_path: Path) -> None:
    """Two on n1 and n3: the daemon that is killed was the one that was asked for the endpoints, and half of all
    requests were never sent."""
    with demo._Cluster(tmp_path, time.monotonic()) as cluster:
        script = tmp_path / "serve.py"
        script.write_text(demo._SERVER)
        client = cluster.nodes[-1].client
        fillers = [client.submit(service(["/bin/sleep", "600"], port=False)) for _ in range(2)]
        for filler in fillers:
            filler.endpoints(wait=20)
        on_first = next(filler for filler in fillers if filler.status()["replicas"][0]["node"] == "n1")
        on_first.cancel(wait=20)
        job = client.submit(service([sys.executable, str(script)], name="demo", replicas=2))
        job.endpoints(wait=20)
        assert {replica["node"] for replica in job.status()["replicas"]} == {"n1", "n3"}
        doomed, asked = demo._parts(cluster, job)
        job = asked.client.job(job.id)
        with demo._Traffic(job) as traffic:
            demo._kill_daemon(cluster, job, doomed, asked, traffic)
        assert doomed.name == "n3"
        assert traffic.answered > 20
        assert traffic.failed < traffic.answered / 10
