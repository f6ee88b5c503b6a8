"""The command line against a real daemon: what is printed where, and the exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.integration.daemon import Daemon, get, wait_for

SERVE = ("sh", "-c", "exec python3 -u -m http.server --bind $HOST $PORT")
SLEEP = ("--service", "--no-port", "--", "sleep", "300")


def start(daemon: Daemon, *words: str) -> subprocess.Popen[str]:
    """A command that stays, in a process group of its own, as a shell would start it."""
    return subprocess.Popen(
        [*daemon.command, *words],
        env=daemon.env | {"GPULAYER_DATA_DIR": str(daemon.data_dir)},
        cwd=daemon.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def interrupted(command: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said until Ctrl-C ended it. Pressed again if need be: of one that comes right between two instructions,
    when it is about to wait, Python knows only after the wait."""
    for _ in range(4):
        os.killpg(command.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return command.communicate(timeout=10)
    raise AssertionError("Ctrl-C does not end it")


def shell(daemon: Daemon, words: str) -> subprocess.CompletedProcess[str]:
    """A command as `sh` reads it, redirections and all."""
    return subprocess.run(
        ["sh", "-c", f"{shlex.join(daemon.command)} {words}"],
        env=daemon.env | {"GPULAYER_DATA_DIR": str(daemon.data_dir)},
        cwd=daemon.home,
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- where the output goes ----------------------------------------------------------------------------------------


def test_an_output_that_cannot_be_written_is_said_in_a_sentence(daemon: Daemon) -> None:
    for words in (("status",), ("job", "list", "--json"), ("token", "list")):
        done = shell(daemon, f"{shlex.join(words)} > /dev/full")
        assert (done.returncode, done.stderr) == (1, "gpulayer: cannot write the output: No space left on device\n")
    done = shell(daemon, "submit -- sh -c 'echo first; sleep 0.5; exit 3' > /dev/full")
    assert (done.returncode, done.stderr) == (125, "gpulayer: cannot write the output: No space left on device\n")


def test_where_errors_cannot_be_said_the_exit_code_says_them(daemon: Daemon) -> None:
    for words, code in (
        ("job status nothing-of-that-name", 4),
        ("submit --bogus -- true", 125),
        ("submit --detach", 2),
        ("submit -- sh -c 'exit 3'", 125),
        ("job list --data-dir nowhere", 3),
    ):
        assert shell(daemon, f"{words} 2> /dev/full").returncode == code, words


# --- submit: services ---------------------------------------------------------------------------------------------


def test_a_services_submit_returns_when_it_is_ready_with_its_addresses(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--service", "--name", "web", "--replicas", "2", "--spread", "any", *SERVE)
    assert done.returncode == 0, done.stderr
    job_id, *endpoints = done.stdout.splitlines()
    assert job_id.startswith("j-")
    assert len(endpoints) == 2
    for endpoint in endpoints:
        assert "Directory listing" in get(endpoint)
    for index, endpoint in enumerate(endpoints):
        assert f"replica {index}: ready at {endpoint}" in done.stderr
    assert daemon.cli("job", "endpoints", "web").stdout.splitlines() == endpoints
    status = daemon.cli("job", "status", "web").stdout
    assert re.search(
        rf"^task=0 state=ready node=n1 endpoint={re.escape(endpoints[0])} restarts=0 ", status, re.MULTILINE
    )
    daemon.cli("job", "cancel", "web", "--wait", "10s")


def test_a_service_that_fails_is_exit_1_with_reason_code_and_last_lines(daemon: Daemon) -> None:
    done = daemon.cli(
        "submit", "--service", "--name", "crash", "--max-restarts", "1", "--", "sh", "-c", "echo the cause; exit 7"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "exit code 7" in done.stderr
    assert "  the cause" in done.stderr
    assert "replica 0: exited with code 7 after" in done.stderr
    assert "exit_nonzero: " not in done.stderr
    assert "Traceback" not in done.stderr
    status = daemon.cli("job", "status", "crash").stdout
    assert "state=failed" in status
    assert "last exit: run 2: exit code 7" in status
    assert "    the cause" in status


def test_a_wait_that_is_over_says_what_it_still_waits_for(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--service", "--name", "mute", "--wait", "2s", "--", "sleep", "300")
    assert (done.returncode, done.stdout) == (124, "")
    assert "job mute is not ready after 2s: replica 0 is starting: nothing listens on" in done.stderr
    assert "gpulayer job cancel mute" in done.stderr
    assert daemon.cli_json("job", "status", "mute")["state"] == "starting"
    daemon.cli("job", "cancel", "mute", "--wait", "10s")


def test_ctrl_c_leaves_a_service_running_and_says_how_to_stop_it(daemon: Daemon) -> None:
    command = start(daemon, "submit", "--service", "--name", "patient", "--", "sleep", "300")
    wait_for(lambda: "patient" in daemon.cli("job", "list").stdout, 15)
    os.killpg(command.pid, signal.SIGINT)
    _, stderr = command.communicate(timeout=10)
    assert command.returncode == 130
    assert "job patient" in stderr
    assert "goes on" in stderr
    assert "gpulayer job cancel patient" in stderr
    assert "Traceback" not in stderr
    assert daemon.cli_json("job", "status", "patient")["state"] in ("starting", "running")
    daemon.cli("job", "cancel", "patient", "--wait", "10s")


def test_a_name_in_use_is_refused(daemon: Daemon) -> None:
    assert daemon.cli("submit", "--detach", "--name", "taken", *SLEEP).returncode == 0
    done = daemon.cli("submit", "--detach", "--name", "taken", *SLEEP)
    assert done.returncode == 5
    assert "taken" in done.stderr
    assert daemon.cli("job", "cancel", "taken", "--wait", "10s").returncode == 0
    assert daemon.cli("job", "cancel", "taken").returncode == 5


# --- submit: batches ----------------------------------------------------------------------------------------------


def test_an_attached_batch_passes_output_and_exit_code_on(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.returncode == 3
    assert done.stdout == "out\n"
    assert done.stderr.splitlines()[0] == "err"
    assert daemon.cli("submit", "--", "sh", "-c", "kill -TERM $$").returncode == 128 + 15
    assert daemon.cli("submit", "--", "true").returncode == 0
    assert daemon.cli("submit", "--", "no-such-program").returncode == 125


def test_no_line_of_an_attached_batch_is_lost_or_doubled(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--", "sh", "-c", "seq 1 3000; sleep 0.2; seq 3001 5000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(number) for number in range(1, 5001)]


def test_lines_of_several_replicas_are_told_apart(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--replicas", "2", "--spread", "any", "--", "sh", "-c", "echo I am $GPULAYER_REPLICA")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] I am 0", "[1] I am 1"]


def test_the_command_is_handed_on_untouched(daemon: Daemon) -> None:
    words = ["--service", "--", "a b", "", "$HOME", "--name=x", "-h", "*"]
    shown = ("python3", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))")
    assert json.loads(daemon.cli("submit", "--", *shown, *words).stdout) == words
    assert json.loads(daemon.cli("submit", *shown, *words).stdout) == words


def test_a_waiting_batch_says_why_and_waits_no_longer_than_it_is_told(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--name", "big", "--gpus", "1", "--wait", "1s", "--", "true")
    assert done.returncode == 124
    assert "warning: replica 0 cannot ever run here: " in done.stderr
    assert "job big has not ended after 1s: replica 0 is waiting: " in done.stderr
    status = daemon.cli("status").stdout
    assert "big waits: never_fits" in status
    explained = daemon.cli("job", "explain", "big").stdout
    assert "not on n1: " in explained
    daemon.cli("job", "cancel", "big")


def test_ctrl_c_leaves_a_batch_running(daemon: Daemon) -> None:
    command = start(daemon, "submit", "--name", "long", "--", "sh", "-c", "echo begun; sleep 300")
    assert command.stdout is not None
    assert command.stdout.readline() == "begun\n"
    os.killpg(command.pid, signal.SIGINT)
    _, stderr = command.communicate(timeout=10)
    assert command.returncode == 130
    assert "gpulayer job cancel long" in stderr
    assert daemon.cli_json("job", "status", "long")["state"] == "running"
    daemon.cli("job", "cancel", "long", "--wait", "10s")


def test_a_dry_run_says_where_it_would_go_and_submits_nothing(daemon: Daemon) -> None:
    fits = daemon.cli("submit", "--dry-run", "--name", "dry", "--", "true")
    assert fits.returncode == 0
    assert "replica=0 node=n1" in fits.stdout
    waits = daemon.cli("submit", "--dry-run", "--service", "--gpus", "1", "--", "true")
    assert waits.returncode == 1
    assert "not on n1: " in waits.stdout
    assert daemon.cli("job", "status", "dry").returncode == 4


def test_a_job_file_is_submitted_and_options_win(daemon: Daemon) -> None:
    workdir = daemon.home / "project"
    workdir.mkdir()
    (workdir / "job.toml").write_text(
        'command = ["sh", "-c", "echo $A $B; pwd"]\nname = "from-file"\nworkdir = "."\nstop-grace = "1s"\n'
        '[env]\nA = "1"\nB = "2"\n'
    )
    done = daemon.cli("submit", "--file", "project/job.toml", "--env", "B=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 3", str(workdir)]
    (workdir / "service.toml").write_text(
        'service = true\nname = "filed"\nno-port = true\ncommand = ["sleep", "300"]\n'
    )
    done = daemon.cli("submit", "--file", "project/service.toml")
    assert done.returncode == 0, done.stderr
    assert daemon.cli("submit", "--file", "project/service.toml").returncode == 5
    daemon.cli("job", "cancel", "filed", "--wait", "10s")


def test_a_relative_workdir_counts_from_here(daemon: Daemon) -> None:
    (daemon.home / "here").mkdir()
    done = daemon.cli("submit", "--workdir", "here", "--", "pwd")
    assert done.stdout.splitlines() == [str(daemon.home / "here")]


# --- job … --------------------------------------------------------------------------------------------------------


def test_a_job_that_does_not_exist_is_exit_4(daemon: Daemon) -> None:
    for words in (["status"], ["logs"], ["cancel"], ["wait"], ["endpoints"], ["events"], ["explain"], ["restart"]):
        done = daemon.cli("job", *words, "nobody")
        assert done.returncode == 4, (words, done.stderr)
        assert "nobody" in done.stderr
        assert done.stderr.count("\nhint: ") == 1
    assert daemon.cli("job", "status", "").returncode == 4


def test_json_has_the_keys_that_programs_rely_on(daemon: Daemon) -> None:
    assert daemon.cli("submit", "--service", "--name", "keys", "--no-port", "sleep", "300").returncode == 0
    status = daemon.cli_json("job", "status", "keys")
    assert {"id", "name", "state", "reason", "revision", "replicas"} <= set(status)
    wanted = {"index", "state", "reason", "node", "endpoint", "attempt", "restarts", "last_exit"}
    assert wanted <= set(status["replicas"][0])
    listed = daemon.cli_json("job", "list")
    assert "keys" in [job["name"] for job in listed]
    assert daemon.cli_json("job", "endpoints", "keys") == []
    assert {"leader", "nodes", "gpus", "jobs"} <= set(daemon.cli_json("status"))
    assert daemon.cli_json("audit")["differences"] == []
    event = json.loads(daemon.cli("events", "--json").stdout.splitlines()[0])
    assert {"offset", "at_utc", "kind", "text"} <= set(event)
    line = json.loads(daemon.cli("job", "logs", "keys", "--json").stdout.splitlines()[0])
    assert {"at_utc", "replica", "run", "stream", "kind", "text", "offset"} <= set(line)
    assert json.loads(daemon.cli("submit", "--detach", "--json", "true").stdout)["id"].startswith("j-")
    daemon.cli("job", "cancel", "keys", "--wait", "10s")


def test_a_restart_is_a_new_run_and_a_line_in_the_log(daemon: Daemon) -> None:
    assert daemon.cli("submit", "--name", "again", *SLEEP).returncode == 0
    before = daemon.replica("again")
    assert daemon.cli("job", "restart", "again.0").returncode == 0
    after = daemon.wait_replica("again", lambda replica: replica["state"] == "ready" and replica["run"] == 2)
    assert after["pid"] != before["pid"]
    logs = daemon.cli("job", "logs", "again").stdout
    assert "--- run 1 " in logs
    assert "--- run 2 " in logs
    assert daemon.cli("job", "restart", "again.5").returncode == 4
    daemon.cli("job", "cancel", "again", "--wait", "10s")


def test_logs_can_be_chosen_by_run_by_tail_and_by_age(daemon: Daemon) -> None:
    script = "echo run of $GPULAYER_RUN_ID; echo more; exit 1"
    daemon.cli("submit", "--service", "--name", "runs", "--max-restarts", "1", "--", "sh", "-c", script)
    every = daemon.cli("job", "logs", "runs").stdout.splitlines()
    assert len([line for line in every if line.startswith("run of ")]) == 2
    runs = [line for line in every if line.startswith("run of ")]
    for number, words in ((slice(0, 1), ("--run", "1")), (slice(1, 2), ("--run", "2")), (slice(0, 2), ("--previous",))):
        chosen = daemon.cli("job", "logs", "runs", *words).stdout.splitlines()
        assert [line for line in chosen if line.startswith("run of ")] == runs[number]
    stamped = daemon.cli("job", "logs", "runs", "-t").stdout.splitlines()
    assert [line.split(" ", 1)[1] for line in stamped] == every
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in stamped)
    assert daemon.cli("job", "logs", "runs", "--previous", "--run", "1").returncode == 2
    assert len(daemon.cli("job", "logs", "runs", "--tail", "1").stdout.splitlines()) == 1
    assert "more" in daemon.cli("job", "logs", "runs", "--since", "10m").stdout
    time.sleep(1.1)
    assert "more" not in daemon.cli("job", "logs", "runs", "--since", "1s").stdout
    assert daemon.cli("job", "logs", "runs", "--since", "yesterday").returncode == 2


def test_followed_logs_end_with_the_job(daemon: Daemon) -> None:
    script = "for i in 1 2 3; do echo tick $i; sleep 0.3; done"
    daemon.cli("submit", "--detach", "--name", "ticks", "--", "sh", "-c", script)
    done = daemon.cli("job", "logs", "ticks", "-f", timeout=20)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("tick")] == ["tick 1", "tick 2", "tick 3"]


def test_a_reader_that_goes_away_is_no_error(daemon: Daemon) -> None:
    daemon.cli("submit", "--name", "chatty", "--", "seq", "1", "200000")
    command = start(daemon, "job", "logs", "chatty")
    assert command.stdout is not None
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == ""
    assert command.wait(20) == 141


def test_waiting_for_a_job_tells_how_it_ended(daemon: Daemon) -> None:
    daemon.cli("submit", "--detach", "--name", "good", "--", "true")
    assert daemon.cli("job", "wait", "good").returncode == 0
    daemon.cli("submit", "--detach", "--name", "bad", "--", "sh", "-c", "exit 9")
    done = daemon.cli("job", "wait", "bad")
    assert done.returncode == 1
    assert "exit code 9" in done.stderr
    daemon.cli("submit", "--detach", "--name", "slow", *SLEEP)
    assert daemon.cli("job", "wait", "slow", "--timeout", "500ms").returncode == 124
    daemon.cli("job", "cancel", "slow", "--wait", "10s")
    assert daemon.cli("job", "endpoints", "slow", "--wait", "1s").returncode == 1


def test_events_go_on_behind_an_offset(daemon: Daemon) -> None:
    daemon.cli("submit", "--name", "evented", "--", "true")
    lines = daemon.cli("job", "events", "evented", "--offsets").stdout.splitlines()
    assert "evented submitted" in lines[0]
    rest = daemon.cli("job", "events", "evented", "--offsets", "--since", lines[0].split()[0]).stdout.splitlines()
    assert rest == lines[1:]
    plain = daemon.cli("job", "events", "evented").stdout.splitlines()
    assert plain == [line.split(" ", 1)[1] for line in lines]


def test_a_table_fits_the_terminal_and_is_whole_elsewhere(daemon: Daemon) -> None:
    name = "wide-" + "x" * 40
    daemon.cli("submit", "--detach", "--name", name, "--gpus", "1", "--", "true")
    piped = daemon.cli("job", "list").stdout
    assert re.search(rf"^{name} .* never_fits: .*GPU", piped, re.MULTILINE)
    assert "\033" not in piped
    main_side, other_side = os.openpty()
    fcntl.ioctl(other_side, termios.TIOCSWINSZ, struct.pack("4H", 24, 90, 0, 0))
    env = {key: value for key, value in daemon.env.items() if key != "COLUMNS"}
    subprocess.run(
        [*daemon.command, "job", "list", "--data-dir", str(daemon.data_dir)],
        env=env, stdout=other_side, stdin=subprocess.DEVNULL, timeout=20, check=True,
    )  # fmt: skip
    os.close(other_side)
    shown = re.sub(r"\033\[\d*m", "", os.read(main_side, 1 << 16).decode())
    os.close(main_side)
    assert max(len(line) for line in shown.splitlines()) <= 90
    # Both ends of the name; the reason goes on below.
    assert re.search(r"^wide-x+…x+ ", shown, re.MULTILINE)
    assert "never_fits:" in shown
    for words in (("status",), ("job", "explain", name)):
        assert max(len(line) for line in daemon.cli(*words).stdout.splitlines()[:1]) <= 80
    queued = [line for line in daemon.cli("status").stdout.splitlines() if line.startswith("  ")]
    assert max(len(line) for line in queued) <= 80
    daemon.cli("job", "cancel", name)


# --- what is told while one waits ---------------------------------------------------------------------------------


def test_the_first_run_that_fails_is_explained_and_each_restart_is_one_line(daemon: Daemon) -> None:
    """Somebody submitted a service that crashed at once, and saw "restarting" for ever without a cause."""
    script = "for i in 1 2 3 4 5 6 7; do echo line $i; done; echo the cause >&2; exit 3"
    done = daemon.cli("submit", "--service", "--name", "loop", "--wait", "5s", "--", "sh", "-c", script)
    assert done.returncode == 124
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"replica 0: exited with code 3 after .*; restarts in 1 s", lines[0])
    assert lines[1:6] == ["  line 4", "  line 5", "  line 6", "  line 7", "  the cause"]
    assert lines[6] == "hint: `gpulayer job logs loop --previous` shows what it wrote"
    assert lines[7].startswith("it is restarted until it is cancelled: Ctrl-C leaves it, `gpulayer job cancel loop`")
    assert [line.partition("; ")[2] for line in lines[8:-2]] == ["restarts in 2 s", "restarts in 4 s"][
        : len(lines) - 10
    ]
    status = daemon.cli("job", "status", "loop").stdout
    assert status.count("reason: ") == 1
    assert status.count("the cause") == 2  # in the command, and in the last lines: those of the last run only
    # Right after a crash, while the next start is waited for: all of the runs are over.
    previous = daemon.cli("job", "logs", "loop", "--previous").stdout
    assert previous.count("the cause") >= 3
    assert len([line for line in previous.splitlines() if "exited with code 3" in line]) == previous.count("the cause")
    assert daemon.cli("job", "logs", "loop", "--previous", "--tail", "2").stdout.splitlines()[0].startswith("--- run ")
    daemon.cli("job", "cancel", "loop", "--wait", "10s")


def test_a_service_that_is_never_ready_or_cannot_start_is_explained_as_well(daemon: Daemon) -> None:
    for name, words in (
        ("mute-2", ("--start-timeout", "1s", "--", "sh", "-c", "echo loading; exec sleep 300")),
        ("absent-2", ("--", "no-such-program")),
    ):
        done = daemon.cli("submit", "--service", "--name", name, "--wait", "3s", *words)
        assert done.returncode == 124
        assert done.stderr.count("it is restarted until it is cancelled") == 1
        assert done.stderr.count("replica 0: placed on n1") <= 1
        assert ("  loading\n" in done.stderr) == (name == "mute-2")
    daemon.cli("job", "cancel", "mute-2", "absent-2", "--wait", "10s")


def test_what_the_present_run_writes_is_no_previous_output(daemon: Daemon) -> None:
    script = "echo run of $GPULAYER_RUN_ID; test -e once || { touch once; exit 1; }; exec sleep 300"
    assert daemon.cli("submit", "--service", "--no-port", "--name", "second", "sh", "-c", script).returncode == 0
    wait_for(lambda: daemon.replica("second")["run"] == 2 and daemon.replica("second")["state"] == "ready")
    for words in ((), ("--tail", "100")):
        previous = daemon.cli("job", "logs", "second", "--previous", *words).stdout
        assert previous.count("run of ") == 1
        assert "run 2" not in previous
    assert daemon.cli("job", "logs", "second").stdout.count("run of ") == 2
    daemon.cli("job", "cancel", "second", "--wait", "10s")
    assert daemon.cli("job", "logs", "second", "--previous").stdout.count("run of ") == 2


def test_a_service_that_is_ready_at_once_is_told_in_one_line(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--service", "--name", "swift", "--", *SERVE)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == f"replica 0: ready at {done.stdout.splitlines()[1]}"
    assert set(done.stderr.splitlines()[:-1]) <= {"replica 0: placed on n1"}
    daemon.cli("job", "cancel", "swift", "--wait", "10s")


def test_two_replicas_on_one_node_are_told_what_would_help(daemon: Daemon) -> None:
    done = daemon.cli(
        "submit", "--service", "--no-port", "--replicas", "2", "--name", "apart", "--wait", "3s", "sleep", "300"
    )
    assert done.returncode == 124
    assert done.stderr.count("\nhint: add a node, or submit with --spread any") + done.stderr.startswith("hint") == 2
    assert "replica 1: waits: " in done.stderr
    detached = daemon.cli("submit", "--detach", "--replicas", "2", "--name", "apart-too", "sleep", "300")
    assert detached.returncode == 0
    assert detached.stdout.startswith("j-")
    assert "--spread any" in detached.stderr
    status = daemon.cli("job", "status", "apart").stdout
    assert "ready=1/2" in status
    assert "ready=1/2" in daemon.cli("job", "status", "apart.0").stdout
    daemon.cli("job", "cancel", "apart", "apart-too", "--wait", "10s")


def test_who_stays_with_a_batch_that_can_never_run_hears_how_to_be_rid_of_it(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--name", "stuck", "--gpus", "64", "--wait", "2s", "--", "true")
    daemon.cli("job", "cancel", "stuck")
    assert done.returncode == 124
    hint = "hint: it stays in the queue; Ctrl-C leaves it there, `gpulayer job cancel stuck` removes it"
    assert done.stderr.splitlines().count(hint) == 1


def test_what_can_never_run_is_a_warning_also_for_who_does_not_stay(daemon: Daemon) -> None:
    detached = daemon.cli("submit", "--detach", "--gpus", "2", "--name", "never", "true")
    assert detached.returncode == 0
    assert "warning: cannot ever run here: " in detached.stderr
    assert "JOB" not in detached.stderr
    assert "`gpulayer resources detect`" in detached.stderr
    explained = daemon.cli("job", "explain", "never").stdout
    assert "gpulayer job explain" not in explained
    assert "starts when a node has what it needs" in explained
    attached = daemon.cli("submit", "--gpus", "2", "--wait", "8s", "--name", "never-2", "true")
    assert attached.returncode == 124
    assert "gpulayer: still waiting: replica 0 is waiting: cannot ever run here" in attached.stderr
    assert daemon.cli("submit", "--detach", "--name", "plain", "true").stderr == ""
    done = daemon.cli("job", "cancel", "never", "never-2")
    assert done.returncode == 0
    assert "job never-2 is cancelled" in done.stderr


def test_a_file_of_this_directory_is_pointed_out_where_the_job_would_not_see_it(daemon: Daemon) -> None:
    (daemon.home / "train.py").write_text("print('trained')\n")
    done = daemon.cli("submit", "--", "python3", "train.py")
    assert done.returncode == 2
    note = "note: train.py is in this directory, but the job runs in a sandbox of its own; add --workdir ."
    assert note in done.stderr.splitlines()
    done = daemon.cli("submit", "--workdir", ".", "--", "python3", "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert "note:" not in daemon.cli("submit", "--", "echo", "data").stderr


def test_a_cancel_of_several_tells_of_each_what_was_not_done(daemon: Daemon) -> None:
    """The first that did not stop in time was all that was said."""
    deaf = ("--service", "--no-port", "--stop-grace", "3s", "--", "sh", "-c", "trap '' TERM; sleep 300 & wait; wait")
    daemon.cli("submit", "--name", "deaf", *deaf)
    daemon.cli("submit", "--name", "deaf-too", *deaf)
    daemon.cli("submit", "--name", "over", "--", "true")
    done = daemon.cli("job", "cancel", "deaf", "over", "deaf-too", "--wait", "300ms")
    assert done.returncode == 124
    for words in ("job deaf is still stopping", "job deaf-too is still stopping", "job over ended already"):
        assert words in done.stderr, done.stderr
    assert daemon.cli("job", "wait", "deaf", "--timeout", "20s").returncode == 1


def test_ctrl_c_before_the_daemon_answered_says_that_nobody_knows(daemon: Daemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(20)
        command = start(daemon, "submit", "--url", f"unix://{tmp_path}/s", "--name", "limbo", "--", "true")
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1)
            stdout, stderr = interrupted(command)
    assert (command.returncode, stdout) == (130, "")
    assert "the daemon had not said yet whether it took the job limbo" in stderr
    assert "gpulayer job list" in stderr


def test_a_batch_whose_output_cannot_be_merged_keeps_its_exit_code(daemon: Daemon) -> None:
    """There is a bound to the replicas whose logs are merged; it ended in 125, whatever the batch had done."""
    done = daemon.cli("submit", "--replicas", "101", "--spread", "any", "--", "sh", "-c", "exit 3")
    assert (done.returncode, done.stdout) == (3, "")
    assert "gpulayer: its output is not shown here: sh has 101 replicas" in done.stderr
    assert "--replica 0" in done.stderr


class Heard:
    """What a command has said on stderr so far."""

    def __init__(self, command: subprocess.Popen[str]) -> None:
        self.text = ""
        self._command = command
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._command.stderr is not None
        for line in self._command.stderr:
            self.text += line

    def to_the_end(self) -> str:
        assert self._command.stdout is not None
        self._command.stdout.read()
        self._command.wait(10)
        self._reader.join(10)
        return self.text


def holds_a_socket(pid: int) -> bool:
    """It has connected; none of these has another use for one."""
    try:
        held = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(each.startswith("socket:") for each in held)


def test_who_stays_hears_that_the_daemon_is_away_and_that_it_is_back(tmp_path: Path) -> None:
    own = Daemon(tmp_path).start()
    try:
        own.cli("submit", "--name", "on", *SLEEP)
        own.submit(["sleep", "300"], kind="batch", name="bat")
        commands = [
            start(own, *words)
            for words in (
                ("job", "logs", "-f", "on"),
                ("job", "wait", "on"),
                ("job", "endpoints", "--watch", "on"),
                ("events", "-f"),
                ("submit", "--", "sleep", "300"),
            )
        ]
        wait_for(lambda: len(own.cli_json("job", "list")) == 3)
        wait_for(lambda: all(holds_a_socket(command.pid) for command in commands))
        time.sleep(1)  # that each has begun to hear its answer shows nowhere; it takes some milliseconds
        own.kill9()
        heard = {command.pid: Heard(command) for command in commands}
        wait_for(lambda: all("no daemon answers" in each.text for each in heard.values()), 20)
        own.start()
        assert own.replica("on")["started_at_utc"] < time.time() - 2
        assert re.search(r" up=\d+s", own.cli("job", "status", "on").stdout)
        assert " up=0s" not in own.cli("job", "status", "on").stdout
        wait_for(lambda: all("the daemon is back" in each.text for each in heard.values()), 20)
        for command in commands:
            os.killpg(command.pid, signal.SIGINT)
            stderr = heard[command.pid].to_the_end()
            assert stderr.count("no daemon answers; waiting for it to come back (") == 1, (command.args, stderr)
            assert stderr.count("the daemon is back\n") == 1, (command.args, stderr)
            assert "Traceback" not in stderr
    finally:
        own.end()


def test_devices_are_listed_with_who_holds_them(tmp_path: Path) -> None:
    config = '[[accelerators]]\nkind = "cuda"\nmodel = "NVIDIA H100 80GB HBM3"\nmemory = "80GiB"\ncount = 2\n'
    own = Daemon(tmp_path, config=config).start()
    try:
        assert own.cli("submit", "--gpus", "0.5", "--name", "half", *SLEEP).returncode == 0
        assert own.cli("submit", "--gpus", "1", "--name", "whole", *SLEEP).returncode == 0
        lines = own.cli("status").stdout.splitlines()
        rows = [re.split(r"\s{2,}", line) for line in lines if "80GiB" in line]
        assert len({name for _, name, *_ in rows}) == 2  # two devices of one model can be told apart
        assert sorted(rest for _, _, *rest in rows) == [
            ["NVIDIA H100 80GB HBM3", "80GiB", "0", "whole.0"],
            ["NVIDIA H100 80GB HBM3", "80GiB", "0.5", "half.0 0.5"],
        ]
        assert max(map(len, lines)) <= 80
    finally:
        own.end()


def test_a_batch_that_did_what_it_was_to_do_gets_no_advice(daemon: Daemon) -> None:
    daemon.cli("submit", "--name", "fine", "--", "sh", "-c", "echo 'a b'")
    status = daemon.cli("job", "status", "fine").stdout
    assert "reason" not in status
    assert "hint" not in status
    assert "command: sh -c 'echo '" in status
    assert daemon.cli_json("job", "status", "fine")["reason"] is None
    assert daemon.replica("fine")["started_at_utc"] > time.time() - 60
    listed = daemon.cli("job", "list", "--state", "ended").stdout
    assert re.search(r"^fine .* succeeded  -  ", listed, re.MULTILINE)
    daemon.cli("submit", "--detach", "--name", "stopped", "--", "sh", "-c", "sleep 300; true")
    daemon.wait_replica("stopped", lambda replica: replica["pid"] is not None)
    daemon.cli("job", "cancel", "stopped", "--wait", "10s")
    assert "background" not in daemon.cli("job", "status", "stopped").stdout


def test_a_program_that_is_not_there_is_told_without_the_whole_path(daemon: Daemon) -> None:
    done = daemon.cli("submit", "--name", "absent", "no-such-program-anywhere")
    assert done.returncode == 125
    assert "command 'no-such-program-anywhere' was not found in PATH\n" in done.stderr
    assert "looked up in the PATH of the job" in done.stderr


def test_several_jobs_are_cancelled_or_none_where_a_name_is_wrong(daemon: Daemon) -> None:
    for name in ("many-1", "many-2"):
        assert daemon.cli("submit", "--detach", "--name", name, *SLEEP).returncode == 0
    assert daemon.cli("job", "cancel", "many-1", "many-2", "nobody").returncode == 4
    assert daemon.job("many-1")["state"] != "cancelled"
    done = daemon.cli("job", "cancel", "many-1", "many-2", "--wait", "20s", "--json")
    assert done.returncode == 0, done.stderr
    assert [job["state"] for job in json.loads(done.stdout)] == ["cancelled", "cancelled"]
    again = daemon.cli("job", "cancel", "many-1")
    assert again.returncode == 5


def test_a_live_job_is_what_is_meant_rather_than_one_that_ended(daemon: Daemon) -> None:
    daemon.cli("submit", "--name", "serve-one", "true")
    assert daemon.cli("submit", "--name", "serving-one", *SLEEP).returncode == 0
    done = daemon.cli("job", "status", "srve-one")
    assert "hint: did you mean serving-one?\n" in done.stderr
    daemon.cli("job", "cancel", "serving-one", "--wait", "10s")


def test_a_token_that_is_missing_is_asked_for_in_words_of_the_command_line(daemon: Daemon) -> None:
    port = json.loads((daemon.data_dir / "api.json").read_text())["port"]
    done = daemon.cli("status", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 5
    assert "hint: give --token or set GPULAYER_TOKEN" in done.stderr


def test_a_wrong_declaration_names_its_file_and_the_nearest_key(tmp_path: Path) -> None:
    own = Daemon(tmp_path, config='[[accelerators]]\nkind = "cuda"\nmodle = "H100"\nmemory = "80GiB"\n')
    done = own.cli("up", "--config", str(own.config_path), "--data-dir", str(own.data_dir))
    assert done.returncode == 2
    assert f"{own.config_path}: accelerators: entry 1: 'modle' is unknown" in done.stderr
    assert "did you mean model?" in done.stderr


# --- tokens -------------------------------------------------------------------------------------------------------


def test_a_token_is_printed_alone_and_works_until_it_is_revoked(daemon: Daemon) -> None:
    made = daemon.cli("token", "create", "--role", "read", "--label", "a test")
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    assert re.fullmatch(r"gpl_\S+", token)
    listed = daemon.cli_json("token", "list")
    entry = next(entry for entry in listed if entry["label"] == "a test")
    assert token not in json.dumps(listed)
    port = json.loads((daemon.data_dir / "api.json").read_text())["port"]
    url = f"http://127.0.0.1:{port}"
    assert daemon.cli("--url", url, "--token", token, "status").returncode == 0
    assert daemon.cli("status", "--url", url, env={"GPULAYER_TOKEN": token}).returncode == 0
    assert daemon.cli("--url", url, "--token", token, "submit", "--detach", "true").returncode == 5
    assert daemon.cli("--url", url, "status").returncode == 5
    assert daemon.cli("token", "revoke", entry["id"]).returncode == 0
    assert daemon.cli("--url", url, "--token", token, "status").returncode == 5
    assert daemon.cli("token", "revoke", entry["id"]).returncode == 4


# --- leave --------------------------------------------------------------------------------------------------------


def test_leave_is_refused_while_replicas_run(daemon: Daemon) -> None:
    daemon.cli("submit", "--name", "stays", *SLEEP)
    done = daemon.cli("leave")
    assert done.returncode == 5
    assert "--stop-all" in done.stderr
    assert daemon.is_ready()
    daemon.cli("job", "cancel", "stays", "--wait", "10s")


def test_leave_stops_all_and_the_daemon_ends_with_0(tmp_path: Path) -> None:
    own = Daemon(tmp_path).start()
    try:
        own.cli("submit", "--name", "last", *SLEEP)
        done = own.cli("leave", "--stop-all")
        assert done.returncode == 0, done.stderr
        assert "left; the daemon has ended" in done.stderr
        assert own.process is not None
        # It has ended by the time that this is said: what comes next may need its data directory.
        assert own.process.wait(0.5) == 0
        assert not own.runs_on_host()
    finally:
        own.end()


def test_audit_is_exit_1_where_a_process_of_ours_is_unknown(daemon: Daemon) -> None:
    assert daemon.cli("audit").returncode == 0
    stray = subprocess.Popen(
        ["sleep", "60"],
        env=daemon.env | {"GPULAYER_SANDBOX": f"{daemon.data_dir}/sandboxes/j-none.0.1", "GPULAYER_RUN_ID": "x"},
    )
    try:
        done = daemon.cli("audit")
        assert done.returncode == 1
        assert str(stray.pid) in done.stdout
    finally:
        stray.kill()
        stray.wait()
