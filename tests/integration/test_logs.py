"""What a replica wrote is there, in order, with who and when; and never costs the replica anything."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, UnixConnection, get, is_alive, wait_for
from tests.integration.programs import python, serve, sh


def test_the_output_of_earlier_runs_is_there_with_a_line_for_each_restart(daemon: Daemon) -> None:
    """Logs were deleted as soon as the run was replaced."""
    job = daemon.submit(
        sh("echo run $GPULAYER_RUN_ID speaks; echo last words >&2; exit 2"), max_restarts=2, name="crashy"
    )
    daemon.wait_ended(job)
    lines = daemon.log_lines(job)
    for run in (1, 2, 3):
        of_run = [line for line in lines if line["run"] == run]
        kinds = [line["kind"] for line in of_run]
        assert kinds.index("run_started") < kinds.index("output") < kinds.index("run_ended"), of_run
        assert {line["text"] for line in of_run if line["stream"] == "stderr"} == {"last words"}
    assert len({line["text"] for line in lines if line["stream"] == "stdout"}) == 3
    assert all(earlier["at_utc"] <= later["at_utc"] for earlier, later in pairwise(lines))
    previous = daemon.cli("job", "logs", "crashy", "--previous").stdout
    assert "last words" in previous
    shown = daemon.cli("job", "logs", "crashy")
    assert shown.stdout.count("last words") == 3
    assert "code 2" in shown.stdout


def test_a_very_chatty_replica_is_never_blocked_and_keeps_its_newest_bytes(make_daemon: DaemonMaker) -> None:
    """50 MB/s, and the log stream stopped. Here a reader that does not read is connected as well."""
    daemon = make_daemon(config='[logs]\nmax_bytes = "2MiB"\nkeep = 3\n').start()
    source = """
import os, time
line = b"x" * 99 + b"\\n"
chunk, longest, written = line * 640, 0.0, 0
begun = time.monotonic()
while time.monotonic() - begun < 3:
    before = time.monotonic()
    written += os.write(1, chunk)
    longest = max(longest, time.monotonic() - before)
    time.sleep(max(0, written / 50e6 - (time.monotonic() - begun)))
os.write(1, b"\\nwritten %d MB, longest write %d ms\\n" % (written / 1e6, longest * 1000))
"""
    job = daemon.batch(python(source))
    daemon.wait_replica(job, lambda replica: replica["pid"] is not None)
    deaf = UnixConnection(daemon.socket, timeout=60)
    deaf.request("GET", f"/v1/jobs/{job}/logs?follow=1")
    status = daemon.wait_ended(job, 30)
    assert status["state"] == "succeeded"
    logs = Path(status["replicas"][0]["sandbox"]) / "logs"
    size = sum(file.stat().st_size for file in logs.iterdir())
    assert size <= 3 * 2**21 + 64 * 1024
    lines = daemon.log_lines(job)
    said = [line["text"] for line in lines if line["text"].startswith("written")]
    assert said, lines[-3:]
    megabytes, longest_ms = int(said[0].split()[1]), int(said[0].split()[5])
    assert megabytes >= 60, said
    assert longest_ms < 1000, said
    assert any(line["kind"] == "rotated" for line in lines)
    deaf.close()


def test_the_last_line_before_a_death_is_there_even_without_its_newline(daemon: Daemon) -> None:
    job = daemon.batch(sh("printf 'the last words'; kill -9 $$"))
    status = daemon.wait_ended(job)
    assert daemon.output(job) == ["the last words"]
    assert "the last words" in "".join(status["replicas"][0]["last_lines"])


class Followed:
    """`gpulayer job logs -f` in the background."""

    def __init__(self, daemon: Daemon, *arguments: str) -> None:
        self.path = daemon.home / "followed"
        with open(self.path, "wb") as output:
            self.process = subprocess.Popen(
                [*daemon.command, "job", "logs", "-f", *arguments],
                env=daemon.env | {"GPULAYER_DATA_DIR": str(daemon.data_dir)},
                stdout=output,
                stderr=output,
            )

    @property
    def text(self) -> str:
        return self.path.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def follow(daemon: Daemon) -> Iterator[object]:
    followed: list[Followed] = []

    def start(*arguments: str) -> Followed:
        followed.append(Followed(daemon, *arguments))
        return followed[-1]

    yield start
    for each in followed:
        each.end()


def test_following_goes_on_across_restarts_and_ends_with_the_job(daemon: Daemon, follow) -> None:  # type: ignore[no-untyped-def]
    job = daemon.submit(serve("--say", "hello from the start"), name="web")
    (endpoint,) = daemon.wait_ready(job)
    shown = follow("web")
    wait_for(lambda: "hello from the start" in shown.text, what=lambda: shown.text)
    get(endpoint, "/say/while-running")
    wait_for(lambda: "while-running" in shown.text, what=lambda: shown.text)
    get(endpoint, "/exit/3")
    wait_for(lambda: shown.text.count("hello from the start") == 2, what=lambda: shown.text)
    assert "code 3" in shown.text
    daemon.cancel(job)
    assert shown.process.wait(15) == 0


def test_since_tail_and_replica_choose_what_is_shown(daemon: Daemon) -> None:
    job = daemon.submit(
        sh('for i in 1 2 3 4 5; do echo "$GPULAYER_REPLICA says $i"; done; sleep 1000'),
        replicas=2,
        spread="any",
        port=False,
    )
    daemon.wait_ready(job)
    wait_for(lambda: len(daemon.output(job)) == 10)
    assert daemon.output(job, "replica=1") == [f"1 says {i}" for i in range(1, 6)]
    assert daemon.output(job, "replica=0&tail=2")[-2:] == ["0 says 4", "0 says 5"]
    assert daemon.output(job, f"since={time.time() + 60}") == []
    assert len(daemon.output(job, f"since={time.time() - 600}")) == 10
    shown = daemon.cli("job", "logs", job, "--tail", "1", "--replica", "1")
    assert "1 says 5" in shown.stdout
    assert "says 4" not in shown.stdout


def test_a_reader_goes_on_from_the_offset_where_it_left_off(daemon: Daemon) -> None:
    job = daemon.batch(sh("for i in 1 2 3 4; do echo $i; done"))
    daemon.wait_ended(job)
    lines = daemon.log_lines(job)
    second = next(line for line in lines if line["text"] == "2")
    assert daemon.output(job, f"after={second['offset']}") == ["3", "4"]


def test_bytes_that_are_no_text_and_very_long_lines_do_no_harm(daemon: Daemon) -> None:
    job = daemon.batch(
        python(
            r"import os; os.write(1, b'\xff\xfe\0 bytes\n'); os.write(1, b'a' * 300000 + b'\n'); os.write(1, b'end\n')"
        )
    )
    daemon.wait_ended(job)
    output = daemon.output(job)
    assert "bytes" in output[0]
    assert sum(len(line) for line in output[1:-1]) == 300_000
    assert output[-1] == "end"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MiB that can be filled."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=80m", "gpulayer-test", str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs to mount a tmpfs: not root, or not allowed")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_loses_log_lines_with_a_counted_gap_and_not_the_replica(
    small_disk: Path, make_daemon: DaemonMaker
) -> None:
    daemon = make_daemon(config='[storage]\nfree_min = "16MiB"\n')
    daemon.place(small_disk / "data")
    daemon.start()
    talks = daemon.submit(sh("n=0; while :; do n=$((n+1)); echo line $n; sleep 0.01; done"), port=False)
    ends = daemon.batch(sh("trap 'exit 6' USR1; while :; do sleep 0.05; done"))
    daemon.wait_ready(talks)
    pid = daemon.replica(talks)["pid"]
    ending = daemon.wait_replica(ends, lambda replica: replica["pid"] is not None)["pid"]
    fillers = [small_disk / "filler", small_disk / "what the daemon's reserve was"]
    fill(fillers[0])
    wait_for(lambda: daemon.request("POST", "/v1/jobs", {"command": ["true"], "gpus": 1})[0] == 507)
    fill(fillers[1])
    written = daemon.output(talks, "tail=1")
    time.sleep(1.0)  # the replica goes on writing, into nothing: there is nothing to wait for
    os.kill(ending, signal.SIGUSR1)
    wait_for(lambda: not is_alive(ending))
    status, body = daemon.request("POST", "/v1/jobs", {"command": ["true"]})
    assert status == 507, body
    assert daemon.replica(talks)["pid"] == pid
    for filler in fillers:
        filler.unlink()

    assert daemon.wait_ended(ends, 30)["replicas"][0]["last_exit"]["code"] == 6
    gap = wait_for(lambda: [line for line in daemon.log_lines(talks) if line["kind"] == "gap"])[0]
    assert re.search(r"\d", gap["text"]), gap
    wait_for(lambda: daemon.output(talks, "tail=1") != written)
    after = daemon.replica(talks)
    assert (after["pid"], after["restarts"]) == (pid, 0)
    wait_for(lambda: daemon.request("POST", "/v1/jobs", {"command": ["true"]})[0] == 201, 20, "room again")


def fill(path: Path) -> None:
    """Until nothing more fits."""
    with open(path, "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
