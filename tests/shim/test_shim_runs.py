"""A run from its marker to its exit note: what it is started with, and what is said about its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulayer.shim import notes

# Prints facts about itself as JSON into a file.
SELF_PORTRAIT = """
import json, os, resource, signal
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
facts = {
    "env": dict(os.environ), "cwd": os.getcwd(), "stdin": os.read(0, 10).decode(),
    "session_leader": os.getsid(0) == os.getpid(), "umask": os.umask(0), "nice": os.nice(0),
    "oom_score_adj": open("/proc/self/oom_score_adj").read().strip(),
    "ignored": status["SigIgn"].strip(), "blocked": status["SigBlk"].strip(),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
}
os.umask(0o022)
with open("facts.new", "w") as file: json.dump(facts, file)
os.rename("facts.new", "facts")
"""


def facts(attempt: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(attempt.file("facts"))
    return found


def test_the_environment_of_a_run_is_exactly_what_was_given(attempt: Any) -> None:
    given = {"PATH": "/usr/bin:/bin", "A": "1", "EMPTY": "", "NAME": "höhe ✓", "GPULAYER_TEST": attempt.mark}
    # env, since Python would add LC_CTYPE to its own.
    attempt.start("/usr/bin/env", "-0", env=given)
    attempt.client.wait_for("gone")
    log = b"".join(path.read_bytes() for path in (attempt.directory / "logs").iterdir())
    for key, value in given.items():
        assert f"{key}={value}\0".encode() in log
    assert log.count(b"\0A=1\0") + log.count(b"A=1\0") >= 1
    assert b"LC_" not in log
    assert b"HOME=" not in log


def test_a_run_starts_clean(attempt: Any) -> None:
    attempt.python(SELF_PORTRAIT)
    seen = facts(attempt)
    assert seen["cwd"] == str(attempt.directory / "work")
    assert seen["stdin"] == ""
    assert seen["session_leader"]
    assert seen["umask"] == 0o022
    assert seen["oom_score_adj"] == "0"
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25); see the next test for a program that sets nothing.
    assert int(seen["ignored"], 16) & ~(1 << 12 | 1 << 24) == 0
    assert int(seen["blocked"], 16) == 0


def test_all_signals_have_their_default_and_only_three_descriptors_are_open(attempt: Any) -> None:
    attempt.start("/bin/cat", "/proc/self/status")
    attempt.client.wait_for("gone")
    attempt.start("/bin/ls", "-l", "/proc/self/fd")
    attempt.client.wait_for("gone")
    log = b"".join(path.read_bytes() for path in (attempt.directory / "logs").iterdir()).decode("latin-1")
    for mask in ("SigIgn", "SigBlk", "SigCgt"):
        assert f"{mask}:\t0000000000000000" in log
    listed = {line.split(" -> ")[0].split()[-1] for line in log.splitlines() if " -> " in line}
    # 3 is the directory that ls lists.
    assert listed <= {"0", "1", "2", "3"}
    assert "0 -> /dev/null" in log


def test_the_daemons_original_limit_of_open_files_is_given_back(new_attempt: Any) -> None:
    attempt = new_attempt(nofile=[123, 456])
    attempt.python(SELF_PORTRAIT)
    assert facts(attempt)["nofile"] == [123, 456]


def test_the_marker_is_there_before_the_command_runs(attempt: Any) -> None:
    attempt.shell(
        "cp ../runs/000001 seen.new; mv seen.new seen; sleep 100",
        cause="deploy",
        port=20001,
        restart_serial=7,
        note={"restarts": 2},
    )
    marker = json.loads(attempt.file("seen")[: notes.HALF_BYTES])
    assert (marker["job_id"], marker["replica"], marker["attempt"], marker["run"]) == ("j-test", 0, 1, 1)
    assert (marker["cause"], marker["port"], marker["restart_serial"]) == ("deploy", 20001, 7)
    assert marker["note"] == attempt.client.ask("hello")["run"]["note"] == {"restarts": 2}
    assert marker["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    record = notes.read(str(attempt.directory / "runs" / "000001"))
    assert record is not None
    assert record.exit is None
    assert record.marker["pid"] == attempt.client.ask("hello")["run"]["pid"]
    assert (attempt.directory / "runs" / "000001").stat().st_size == 2 * notes.HALF_BYTES


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("exit 0", (0, None)),
        ("exit 3", (3, None)),
        ("kill -9 $$", (None, signal.SIGKILL)),
        ("kill -TERM $$", (None, signal.SIGTERM)),
    ],
)
def test_the_exit_on_disk_is_the_exit_that_was_reported(
    attempt: Any, code: str, expected: tuple[int | None, int | None]
) -> None:
    attempt.shell(code)
    event = attempt.client.wait_for("exited")
    assert (event["code"], event["signal"]) == expected
    assert event["ended_by"] == "itself"
    record = notes.read(str(attempt.directory / "runs" / "000001"))
    assert record is not None
    assert record.exit == {key: value for key, value in event.items() if key != "event"}
    assert attempt.client.ask("hello")["last_exit"] == record.exit
    assert attempt.client.wait_for("gone")["run"] == 1


def test_a_start_answers_with_the_process_that_it_started(attempt: Any) -> None:
    answer = attempt.shell("echo $$ > pid.new; mv pid.new pid; sleep 100")
    assert int(attempt.file("pid")) == answer["pid"]
    hello = attempt.client.ask("hello")
    assert (hello["run"]["pid"], hello["run"]["start_time"]) == (answer["pid"], answer["start_time"])
    assert hello["gone"] is False
    assert answer["pid"] in [process["pid"] for process in attempt.client.ask("pids")["pids"]]


def test_a_second_run_is_refused_while_the_first_is_there_and_runs_are_never_numbered_twice(attempt: Any) -> None:
    attempt.shell("sleep 100")
    assert attempt.shell("true")["error"]["code"] == "busy"
    attempt.client.ask("stop", signal="KILL", grace_seconds=0, reason="test")
    attempt.client.wait_for("gone")
    assert attempt.shell("true", run=1)["error"]["code"] == "stale_run"
    assert attempt.shell("true", run=2)["ok"]


def test_only_the_last_runs_are_kept(attempt: Any) -> None:
    for _ in range(notes.RUNS_KEPT + 3):
        assert attempt.start("/bin/true")["ok"]
        attempt.client.wait_for("gone")
    attempt.client.ask("hello")  # answered after what is done once nobody waits
    kept = notes.read_all(str(attempt.directory / "runs"))
    assert [record.run for record in kept] == list(range(4, notes.RUNS_KEPT + 4))


def test_the_file_of_the_next_run_is_prepared_and_counts_for_nothing(
    attempt: Any, spawner: Any, connect: Any, eventually: Any
) -> None:
    assert attempt.start("/bin/sh", "-c", "exit 3")["ok"]
    attempt.client.wait_for("gone")
    runs = attempt.directory / "runs"
    eventually(lambda: sorted(path.name for path in runs.iterdir()) == ["000001", "000002"])
    assert [record.run for record in notes.read_all(str(runs))] == [1]
    pid = attempt.client.ask("hello")["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: spawner.spawn(attempt.directory)["ok"])
    successor = connect(attempt.directory)
    hello = successor.ask("hello")
    assert successor.ask("quit")["ok"], "the fixture knows only the first shim"
    assert (hello["last_run"], hello["last_exit"]["code"]) == (1, 3)


def test_a_prepared_file_that_was_removed_by_hand_is_made_again(attempt: Any, eventually: Any) -> None:
    assert attempt.start("/bin/true")["ok"]
    attempt.client.wait_for("gone")
    prepared = attempt.directory / "runs" / "000002"
    eventually(prepared.exists)
    prepared.unlink()
    assert attempt.start("/bin/true")["ok"]
    attempt.client.wait_for("gone")
    assert [record.run for record in notes.read_all(str(attempt.directory / "runs"))] == [1, 2]


def executable(path: Path, content: bytes, mode: int = 0o755) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_command_that_cannot_be_executed_says_why(attempt: Any) -> None:
    work = attempt.directory / "work"
    executable(work / "plain", b"hello", 0o644)
    executable(work / "orphan", b"#!/no/such/interpreter -x\n")
    executable(work / "noise", b"\1\2\3\4")
    executable(work / "run.sh", b"#!/bin/sh\necho hello\n", 0o644)
    executable(work / "windows.sh", b"#!/bin/sh\r\necho hello\r\n")
    executable(work / "moved", b"#!/no/such/venv/bin/python3\nprint()\n")
    executable(work / "bare.py", b"print()\n")
    executable(work / "bare", b"echo hello\n")
    commands = {
        "no-such-program": "was not found in PATH",
        "python serve.py": "was not found in PATH: it is one word with a blank in it",
        "FOO=1": "was not found in PATH: no shell reads the command, so that it sets no variable; --env does",
        "export": "was not found in PATH: it is a word of the shell",
        "/no/such/program": "No such file or directory",
        "./plain": "is not executable (mode 0644): chmod +x it",
        "./run.sh": "is not executable (mode 0644): chmod +x it, or write /bin/sh ./run.sh",
        "./windows.sh": "interpreter /bin/sh is not found: sed -i 's/\\r$//' ./windows.sh",
        "./orphan": "begins with #!/no/such/interpreter, and there is no such interpreter",
        "./moved": "there is no such interpreter (is its environment moved, or gone?)",
        "./bare.py": "has no #! line, so that only a shell would run it: write python ./bare.py",
        "./bare": "has no #! line, so that only a shell would run it: write sh ./bare",
        "./noise": "is not a program for this host",
        "/": "is a directory",
    }
    for command, sentence in commands.items():
        answer = attempt.start(command)
        assert answer["ok"] is False
        assert answer["error"]["code"] == "bad_command", answer
        assert sentence in answer["error"]["message"]
        assert command in answer["error"]["message"]
        assert answer["error"]["errno"] > 0
    hello = attempt.client.ask("hello")
    assert hello["last_exit"]["ended_by"] == "spawn_failed"
    assert hello["last_run"] == len(commands)
    # Noted like an exit: nobody shall take the marker for an interrupted run.
    assert all(record.exit is not None for record in notes.read_all(str(attempt.directory / "runs")))
    assert attempt.client.events == []
    assert attempt.start("/bin/true")["ok"]


def test_a_working_directory_that_is_not_there_is_named(attempt: Any) -> None:
    answer = attempt.start("/bin/true", cwd="/no/such/place")
    assert answer["error"]["code"] == "bad_workdir"
    assert "/no/such/place: No such file or directory" in answer["error"]["message"]


def test_a_command_is_looked_up_in_the_path_that_was_given(attempt: Any) -> None:
    (attempt.directory / "work" / "bin").mkdir()
    executable(attempt.directory / "work" / "bin" / "mine", b"#!/bin/sh\nexit 5\n")
    path = f"/nowhere:{attempt.directory}/work/bin:/usr/bin:/bin"
    assert attempt.start("mine", env={"PATH": path})["ok"]
    assert attempt.client.wait_for("exited")["code"] == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"argv": []},
        {"argv": ["/bin/true", 3]},
        {"argv": ["/bin/true", "a\0b"]},
        {"env": {"A=B": "1"}},
        {"env": {"A": None}},
        {"cwd": "relative"},
        {"run": "1"},
        {"run": True},
        {"note": {"too": "long" * 500}},
    ],
)
def test_nonsense_is_refused_and_nothing_is_executed(attempt: Any, fields: dict[str, Any]) -> None:
    answer = attempt.start("/bin/true", **fields)
    assert answer["error"]["code"] == "bad_request"
    assert list((attempt.directory / "runs").iterdir()) == []
    assert attempt.client.ask("stop", signal="NONSENSE")["error"]["code"] == "bad_request"
    assert attempt.client.ask("stop", grace_seconds=-1)["error"]["code"] == "bad_request"


def test_an_unknown_operation_is_refused_by_name_and_the_connection_goes_on(attempt: Any) -> None:
    answer = attempt.client.ask("of_a_newer_daemon", field=1)
    assert answer["error"]["code"] == "unknown_op"
    assert "of_a_newer_daemon" in answer["error"]["message"]
    assert attempt.client.ask("hello", field_of_a_newer_daemon=1)["protocol"] == 1


def test_a_client_that_talks_nonsense_loses_only_its_own_connection(attempt: Any, connect: Any) -> None:
    for nonsense in (b"{not json\n", b"[1]\n", b"x" * (5 * 1024 * 1024) + b"\n", b"[" * 100_000 + b"\n"):
        other = connect(attempt.directory)
        try:
            other.socket.sendall(nonsense)
            assert json.loads(other.file.readline())["error"]["code"] == "bad_request"
            assert other.file.readline() == b""
        except ConnectionError:
            pass  # closed while we were still sending
    assert attempt.client.ask("hello")["ok"]


def test_a_process_that_kept_a_core_limit_of_zero_has_dumped_none(attempt: Any) -> None:
    attempt.python("import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()")
    event = attempt.client.wait_for("exited")
    assert (event["signal"], event["core_dumped"]) == (signal.SIGABRT, False)


def test_a_full_disk_refuses_the_run_and_executes_nothing(new_attempt: Any, small_disk: Path) -> None:
    attempt = new_attempt(directory=small_disk / "sandbox")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(8 * 1024 * 1024))
    answer = attempt.shell("touch executed")
    assert answer["error"]["code"] == "disk_full"
    (small_disk / "filler").unlink()
    assert not (attempt.directory / "work" / "executed").exists()
    assert attempt.shell("touch executed")["ok"]
    attempt.client.wait_for("gone")
    assert (attempt.directory / "work" / "executed").exists()


def test_a_disk_that_fills_up_during_the_run_cannot_swallow_the_exit(new_attempt: Any, small_disk: Path) -> None:
    attempt = new_attempt(directory=small_disk / "sandbox")
    os.mkfifo(attempt.directory / "work" / "go")
    attempt.shell("read line < go; exit 4")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(8 * 1024 * 1024))
    (attempt.directory / "work" / "go").write_text("go\n")
    assert attempt.client.wait_for("exited")["code"] == 4
    record = notes.read(str(attempt.directory / "runs" / "000001"))
    assert record is not None
    assert record.exit is not None
    assert record.exit["code"] == 4


def test_a_run_may_begin_with_a_thousand_variables_and_arguments(attempt: Any) -> None:
    variables = {f"VARIABLE_{index}": "x" * 500 for index in range(1000)}
    assert attempt.start(sys.executable, "-c", "", *(["argument"] * 1000), env=variables)["ok"]
    assert attempt.client.wait_for("exited")["code"] == 0
    answer = attempt.start("/bin/true", "x" * 1_000_000)
    assert "too long" in answer["error"]["message"]


def test_a_run_that_was_not_executed_is_noted_with_its_reason(attempt: Any) -> None:
    """The next daemon knew only that it could not be executed, and told people to look at their process limits."""
    attempt.start("no-such-program")
    (record,) = notes.read_all(str(attempt.directory / "runs"))
    assert record.exit is not None
    assert (record.exit["ended_by"], record.exit["error"]) == ("spawn_failed", "bad_command")
    assert "no-such-program" in record.exit["message"]


def test_the_longest_message_still_fits_into_the_exit_note(attempt: Any) -> None:
    """Twelve bytes a character in JSON: the note was too long for its half, and so there was none."""
    attempt.start("\U0001f600" * 2000)
    (record,) = notes.read_all(str(attempt.directory / "runs"))
    assert record.exit is not None
    assert record.exit["ended_by"] == "spawn_failed"


@pytest.mark.parametrize("removed", ["runs", "logs"])
def test_a_directory_that_was_removed_by_hand_is_made_again_for_the_next_run(attempt: Any, removed: str) -> None:
    """Without `runs` no later run could be marked, without `logs` nothing that it wrote was kept."""
    attempt.shell("exit 0")
    attempt.client.wait_for("gone")
    attempt.client.events.clear()
    for _ in range(20):  # the shim may be making the next run's file just then
        shutil.rmtree(attempt.directory / removed, ignore_errors=True)
        if not (attempt.directory / removed).exists():
            break
    assert attempt.shell("echo said; exit 4")["ok"]
    attempt.client.wait_for("gone")
    assert [record.run for record in notes.read_all(str(attempt.directory / "runs"))][-1:] == [2]
    assert any(b"said" in path.read_bytes() for path in (attempt.directory / "logs").iterdir())


@pytest.mark.parametrize("garbage", [b"[" * 4096, b"\xff" * 4096, b'{"run": 1e999}', b"[]"])
def test_a_note_that_is_garbage_is_none(tmp_path: Path, garbage: bytes) -> None:
    """A daemon that fell over one would fall over it at every start."""
    (tmp_path / "000001").write_bytes(garbage.ljust(notes.HALF_BYTES) + garbage.ljust(notes.HALF_BYTES))
    record = notes.read(str(tmp_path / "000001"))
    assert record is None or record.marker.keys() == {"run"}
