"""What a replica writes is in the log: attributed, in order, within bounds, and never at the replica's cost."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpulayer.runtime import replica_logs
from gpulayer.shim import log_format


def logs(attempt: Any) -> Path:
    path: Path = attempt.directory / "logs"
    return path


def output(attempt: Any) -> list[tuple[str, str]]:
    return [(line.stream, line.text) for line in replica_logs.read(logs(attempt)) if line.kind == "output"]


def test_both_streams_are_told_apart_and_stamped(attempt: Any) -> None:
    before = time.time()
    attempt.shell("echo out; echo err >&2; printf 'no newline'; exit 3", cause="deploy", port=4000)
    attempt.client.wait_for("gone")
    lines = list(replica_logs.read(logs(attempt)))
    assert ("stdout", "out") in output(attempt)
    assert ("stderr", "err") in output(attempt)
    last = next(line for line in lines if line.text == "no newline")
    assert last.partial
    assert all(before <= line.at_utc <= time.time() for line in lines)
    assert {line.run for line in lines} == {1}
    assert (lines[0].kind, lines[0].text) == ("run_started", "run 1 started (deploy, port 4000)")
    assert lines[-1].kind == "run_ended"
    assert lines[-1].text.startswith("run 1 exited with code 3 after 0.")


def test_the_last_line_is_in_the_log_when_the_exit_is_reported(attempt: Any) -> None:
    for number in range(20):
        # No more than a pipe holds at the moment of death; and a background process keeps the pipe open.
        attempt.python(
            f"import os; os.fork() or __import__('time').sleep(600); "
            f"os.write(1, b'x' * 50_000 + b'\\nlast words {number}\\n'); os._exit(1)"
        )
        attempt.client.wait_for("exited")
        assert ("stdout", f"last words {number}") in output(attempt)
        attempt.client.wait_for("gone")


def test_what_background_processes_write_until_they_are_gone_is_kept(new_attempt: Any) -> None:
    attempt = new_attempt()
    attempt.shell("(trap 'echo swept; exit' TERM; while :; do sleep 0.02; done) & sleep 0.2; echo main ends")
    attempt.client.wait_for("gone")
    assert [text for stream, text in output(attempt) if stream == "stdout"] == ["main ends", "swept"]


def test_each_run_has_its_own_lines(attempt: Any) -> None:
    for number in (1, 2, 3):
        attempt.shell(f"echo run {number}")
        attempt.client.wait_for("gone")
    assert [line.text for line in replica_logs.read(logs(attempt), run=2) if line.kind == "output"] == ["run 2"]
    assert [line.run for line in replica_logs.read(logs(attempt)) if line.kind == "output"] == [1, 2, 3]


@pytest.mark.parametrize(("max_bytes", "keep"), [(20_000, 3), (64_000, 1), (300_000, 2)])
def test_segments_stay_within_their_bounds_at_every_moment(new_attempt: Any, max_bytes: int, keep: int) -> None:
    attempt = new_attempt(log={"max_bytes": max_bytes, "keep": keep})
    attempt.python("for n in range(60_000): print('line', n, 'x' * 60)\nprint('the end')")
    largest = 0
    done = False
    while not done:
        done = attempt.client.ask("hello")["gone"]
        sizes = []
        for path in logs(attempt).iterdir():
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                pass  # rotated meanwhile
        assert all(size <= max_bytes for size in sizes)
        assert len(sizes) <= keep
        largest = max(largest, sum(sizes))
    assert largest > max_bytes * keep * 0.7  # and the room is used
    lines = list(replica_logs.read(logs(attempt)))
    assert [line.text for line in lines if line.kind == "output"][-1] == "the end"
    assert lines[0].kind == "rotated"
    numbers = [int(line.text.split()[1]) for line in lines if line.text.startswith("line ")]
    assert numbers == list(range(numbers[0], 60_000))


def test_a_following_reader_sees_every_line_across_rotation_or_is_told_what_it_missed(new_attempt: Any) -> None:
    attempt = new_attempt(log={"max_bytes": 200_000, "keep": 4})
    attempt.python("import time\nfor n in range(40_000):\n print(n, flush=True)\n if n % 500 == 0: time.sleep(0.005)")
    seen: list[int] = []
    missed = 0
    with replica_logs.LogReader(logs(attempt)) as reader:
        while True:
            gone = attempt.client.ask("hello")["gone"]
            while lines := reader.read_available(1000):
                seen += [int(line.text) for line in lines if line.kind == "output" and line.text]
                missed += sum(line.lost_bytes for line in lines)
            if gone:
                break
    assert seen[-1] == 39_999
    assert missed > 0 or seen == list(range(40_000))


def test_a_full_disk_costs_the_replica_nothing(new_attempt: Any, small_disk: Path) -> None:
    attempt = new_attempt(directory=small_disk / "sandbox", log={"max_bytes": 16 * 1024 * 1024, "keep": 2})
    attempt.python("print('before', flush=True)\nfor n in range(20_000): print('x' * 499)")  # 10 MB on a disk of 4
    event = attempt.client.wait_for("exited")
    assert event["code"] == 0
    assert "not_noted" not in event
    stored = output(attempt)
    assert stored[0] == ("stdout", "before")
    lost = attempt.client.ask("hello")["logs"]
    assert lost["lost_lines"] + sum(text == "x" * 499 for _, text in stored) == pytest.approx(20_000, abs=1)


def test_what_was_lost_is_counted_where_it_was_lost(new_attempt: Any, small_disk: Path) -> None:
    attempt = new_attempt(directory=small_disk / "sandbox", log={"max_bytes": 16 * 1024 * 1024, "keep": 2})
    witness = small_disk.parent / "witness"
    witness.mkdir()
    code = f"""
import os, time
def wait(name):
    while not os.path.exists({str(witness)!r} + "/" + name): time.sleep(0.01)
def say(line): os.write(1, line.encode() + b"\\n")
say("before"); os.mkdir({str(witness / "began")!r})
wait("full")
for n in range(1000): say("lost" * 25)
os.mkdir({str(witness / "written")!r})
wait("room")
say("after"); time.sleep(600)
"""
    attempt.python(code)

    def wait_for(name: str) -> None:
        deadline = time.monotonic() + 10
        while not (witness / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    wait_for("began")
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(8 * 1024 * 1024))
    (witness / "full").mkdir()
    wait_for("written")
    attempt.client.ask("hello")
    filler.unlink()
    time.sleep(0.1)  # the writer tries a disk that refused again only after RETRY_SECONDS
    (witness / "room").mkdir()
    deadline = time.monotonic() + 10
    while ("stdout", "after") not in output(attempt):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lines = list(replica_logs.read(logs(attempt)))
    kinds = [line.kind for line in lines]
    gap = lines[kinds.index("gap")]
    stored = sum(line.text == "lost" * 25 for line in lines)  # what fitted into the last block
    assert gap.lost_lines == 1000 - stored
    assert gap.lost_bytes == gap.lost_lines * 101
    assert "No space left on device" in gap.text or "the disk is full" in gap.text
    assert lines[kinds.index("gap") + 1].text == "after"
    assert attempt.client.ask("hello")["logs"] == {"lost_bytes": gap.lost_bytes, "lost_lines": gap.lost_lines}


def test_a_slow_reader_costs_the_replica_nothing(new_attempt: Any) -> None:
    attempt = new_attempt(log={"max_bytes": 500_000, "keep": 2})
    with replica_logs.LogReader(logs(attempt)) as reader:
        reader.read_available(1)
        attempt.start(sys.executable, "-S", "-c", "for _ in range(300_000): print('x' * 99)")
        reader.read_available(1)
        attempt.client.wait_for("gone")
        kinds = []
        while lines := reader.read_available():
            kinds += [line.kind for line in lines]
    assert "rotated" in kinds
    assert kinds[-1] == "run_ended"


def test_binary_output_and_long_lines_are_stored_as_they_are(attempt: Any) -> None:
    attempt.python("import os\nos.write(1, bytes(range(256)) * 40)\nos.write(1, b'y' * 200_000 + b'\\n')")
    attempt.client.wait_for("gone")
    stored = b""
    for number in log_format.segment_numbers(logs(attempt)):
        content = (logs(attempt) / log_format.segment_name(number)).read_bytes()
        for position, header in replica_logs._records(content):
            if header.kind == log_format.OUTPUT:
                start = position + log_format.RECORD_HEADER.size
                stored += content[start : start + header.payload_bytes]
    assert stored == bytes(range(256)) * 40 + b"y" * 200_000 + b"\n"
