"""What people trip over, tried as they do it: each row of the table in docs/services.md is a test here."""

from __future__ import annotations

import os
import re
import venv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import gpulayer
from tests.integration.daemon import Daemon, get, wait_for

DOCUMENT = Path(__file__).parents[2] / "docs" / "services.md"
TWO_GPUS = """
[[accelerators]]
kind = "cuda"
model = "NVIDIA A100-SXM4-40GB"
memory = "40GiB"
count = 2
"""
SERVICE = ("--service", "--max-restarts", "0")
AnyTest = TypeVar("AnyTest", bound=Callable[..., Any])
ROWS: set[str] = set()


def row(typed: str) -> Callable[[AnyTest], AnyTest]:
    """The test holds the row of the document that begins so."""
    ROWS.add(typed)
    return lambda test: test


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = Daemon(tmp_path_factory.mktemp("traps"), config=TWO_GPUS).start()
    try:
        yield running
    finally:
        running.end()


def submit(daemon: Daemon, *words: str, **more: Any) -> str:
    """All that `submit` says to who waits for it, on one line."""
    done = daemon.cli("submit", *words, **more)
    return " ".join((done.stdout + done.stderr).split())


def cancel(daemon: Daemon, *names: str) -> None:
    daemon.cli("job", "cancel", *names, "--wait", "10s")


def test_every_row_of_the_table_is_tried() -> None:
    (table,) = re.findall(r"^## What people trip over$.*?^(\| typed .*?)\n\n", DOCUMENT.read_text(), re.M | re.S)
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]}
    assert rows == ROWS


# --- words --------------------------------------------------------------------------------------------------------


@row("`sh -c 'conda activate x && python serve.py'`")
def test_conda_activate_is_explained_at_submit_and_at_the_end(daemon: Daemon) -> None:
    said = submit(daemon, *SERVICE, "--name", "conda", "--", "sh", "-c", "conda activate x && python serve.py")
    assert "note: `conda activate` works only in a shell that `conda init` has prepared" in said
    assert "`conda run --no-capture-output -n x …`" in said
    reason = daemon.job("conda")["replicas"][0]["reason"]
    assert reason["code"] == "exit_nonzero"
    assert reason["hint"].startswith("`conda activate` works only in a shell")
    assert reason["hint"].endswith("`gpulayer job logs conda --previous` shows what it wrote")


@row("`conda run -n x python serve.py`")
def test_conda_run_that_keeps_its_output_back_is_pointed_out(daemon: Daemon) -> None:
    assert "note: `conda run` keeps the output to itself" in submit(daemon, "--", "conda", "run", "-n", "x", "true")


@row("`sh -c 'source venv/bin/activate && …'`")
def test_a_word_of_bash_in_sh_is_explained(daemon: Daemon) -> None:
    job = daemon.submit(["dash", "-c", "source venv/bin/activate && python serve.py"], max_restarts=0)
    reason = daemon.wait_ended(job)["replicas"][0]["reason"]
    assert reason["hint"].startswith("`source` is a word of bash, which sh may not know; write bash -c")


@row("`'python serve.py'`, `FOO=1 python serve.py`, `cd /srv`")
def test_words_that_are_no_program_are_explained_at_submit_and_in_the_reason(daemon: Daemon) -> None:
    for command, note, reason in (
        (["python3 serve.py"], "is one word, and no program is called so", "one word with a blank in it"),
        (["FOO=1", "python3"], "write --env FOO=1 before the --", "so that it sets no variable; --env does"),
        (["export", "A=1"], "`export` is a word of the shell and no program", "it is a word of the shell"),
        (["cd", "/srv"], "write --workdir DIR instead", "it is a word of the shell"),
    ):
        said = submit(daemon, "--", *command)
        assert note in said
        assert reason in said, said


@row("`python -m http.server '$PORT'`, `a '&&' b`, `--model=~/x`")
def test_what_only_a_shell_would_read_is_explained(daemon: Daemon) -> None:
    said = submit(daemon, *SERVICE, "--name", "literal", "--", "python3", "-m", "http.server", "$PORT")
    assert "note: no shell reads the command, so python3 gets $PORT as it is written" in said
    assert said.count("write sh -c 'exec python3 -m http.server $PORT'") == 2  # the note, and the hint of its end
    assert "true gets && as an argument" in submit(daemon, "--", "true", "a", "&&", "true", "b")
    assert "true gets the ~ of --model=~/x as it is" in submit(daemon, "--", "true", "--model=~/x")


@row("`uvicorn app:app --port $PORT`")
def test_a_port_that_the_users_own_shell_took_away_is_noticed(daemon: Daemon) -> None:
    for command in (["true", "--port"], ["true", "--port=", "--x"], ["sh", "-c", "true --port  --host x"]):
        said = submit(daemon, *SERVICE, "--wait", "2s", "--", *command)
        assert "your own shell has put its $PORT there, which is empty; use single quotes" in said


@row("`uvicorn app:app --port 8000`")
def test_a_fixed_port_is_named_with_what_to_write_for_it(daemon: Daemon) -> None:
    command = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "28199"]
    said = submit(daemon, "--service", "--wait", "4s", "--name", "fixed", "--", *command)
    assert "listens on 127.0.0.1:28199 instead of $PORT" in said
    assert "hint: its command says `28199`; write `$PORT` there, in sh -c '…', which fills it in" in said
    cancel(daemon, "fixed")


@row("`sudo python serve.py`")
def test_sudo_is_pointed_out(daemon: Daemon) -> None:
    assert "note: sudo takes $PORT, CUDA_VISIBLE_DEVICES and the like away" in submit(daemon, "--", "sudo", "true")


@row("`CUDA_VISIBLE_DEVICES=0 python serve.py` in a shell line, or with `--env`")
def test_devices_of_ones_own_are_pointed_out(daemon: Daemon) -> None:
    note = "note: CUDA_VISIBLE_DEVICES=0 takes the place of the devices that the replica holds"
    assert note in submit(daemon, "--", "sh", "-c", "CUDA_VISIBLE_DEVICES=0 true")
    assert note in submit(daemon, "--gpus", "1", "--env", "CUDA_VISIBLE_DEVICES=0", "--", "true")


@row("`ssh host python serve.py`")
def test_what_runs_on_another_host_is_pointed_out(daemon: Daemon) -> None:
    said = submit(daemon, *SERVICE, "--", "ssh", "-o", "BatchMode=yes", "-p", "1", "127.0.0.1", "true")
    assert "note: what ssh starts runs on the other host, where gpulayer neither sees nor ends it" in said


# --- a run ends with its first process ----------------------------------------------------------------------------


@row("`sh -c 'python serve.py &'`, `setsid python serve.py`")
def test_a_service_that_goes_to_the_background_says_so_at_every_end(daemon: Daemon) -> None:
    """It was restarted for ever, with nothing said but `exit code 0`."""
    done = daemon.cli(
        "submit",
        "--service",
        "--no-port",
        "--wait",
        "4s",
        "--name",
        "leaves",
        "--",
        "sh",
        "-c",
        "sleep 300 & true; true &",
    )
    said = done.stderr
    assert "note: the & behind `true` lets the shell end at once" in said
    # The last of the two may be there still when the shell ends.
    left = (
        r"left (1 process in the background \(\w+\), which was|2 processes in the background \(.*\), which were) ended"
    )
    assert re.search(rf"exited with code 0 after .* and {left}", said)
    assert "hint: the & behind `true` lets the shell end at once, and a run ends with its first process" in said
    replica = daemon.replica("leaves")
    assert replica["warning"]["code"] == "left_background_processes"
    cancel(daemon, "leaves")
    said = submit(daemon, *SERVICE, "--no-port", "--", "setsid", "sleep", "300")
    assert said.count("`setsid` returns at once, and a run ends with its first process; leave setsid out") == 2


def test_a_batch_that_leaves_something_behind_says_who_started_it(daemon: Daemon) -> None:
    done = daemon.wait_ended(daemon.batch(["sh", "-c", "sleep 300 & sleep 0.3"]))
    reason = done["replicas"][0]["reason"]
    assert (done["state"], reason["code"]) == ("succeeded", "left_background_processes")
    assert "it left 1 process in the background (sleep), which was ended" in reason["text"]
    assert "`sleep` was started with & in the background" in reason["hint"]


@row("`sh -c 'python serve.py & sleep infinity'`, `… & tail -f /dev/null`")
def test_a_program_that_dies_behind_a_shell_is_noticed(daemon: Daemon) -> None:
    """The shell lives on, nobody listens, and nothing was said for ever."""
    hidden = "sleep 0.2 & exec 3<&0; while true; do sleep 100; done"
    said = submit(daemon, "--service", "--wait", "5s", "--name", "hidden", "--", "sh", "-c", hidden)
    assert re.search(r"replica 0: nothing listens on \S+; what is left of it: sh and sleep", said)
    assert "hint: the program has ended, and its shell hides that by waiting for something else" in said
    reason = daemon.replica("hidden")["reason"]
    assert reason["code"] == "only_shell_left"
    cancel(daemon, "hidden")
    said = submit(daemon, "--service", "--wait", "1s", "--name", "told", "--", "sh", "-c", "sleep 3 & sleep infinity")
    assert "note: nobody will notice when `sleep` ends: the shell waits for `sleep infinity`" in said
    cancel(daemon, "told")


def test_a_program_that_had_listened_and_died_behind_a_shell_is_named(daemon: Daemon) -> None:
    script = "python3 -m http.server --bind $HOST $PORT & echo $! > pid; tail -f /dev/null"
    assert daemon.cli("submit", "--service", "--name", "once", "--", "sh", "-c", script).returncode == 0
    sandbox = Path(daemon.replica("once")["sandbox"])
    pid = int((sandbox / "work" / "pid").read_text())
    os.kill(pid, 9)
    replica = daemon.wait_replica("once", lambda replica: (replica["reason"] or {}).get("code") == "only_shell_left")
    assert replica["state"] == "unready"
    assert re.search(
        rf": pid {pid} \(python\S*\), which did, has ended; what is left of it: sh and tail", replica["reason"]["text"]
    )
    cancel(daemon, "once")


def test_a_shell_that_only_waits_is_not_taken_for_one_whose_program_has_ended(daemon: Daemon) -> None:
    script = "sleep 3; exec python3 -m http.server --bind $HOST $PORT"
    done = daemon.cli("submit", "--service", "--name", "later", "--", "sh", "-c", script)
    assert done.returncode == 0
    assert "note:" not in done.stderr
    assert "what is left of it" not in done.stderr
    assert "Directory listing" in get(done.stdout.splitlines()[1])
    cancel(daemon, "later")


@row("`sh -c 'a & b & wait'`")
def test_a_wait_that_hides_how_its_programs_ended_is_explained(daemon: Daemon) -> None:
    said = submit(
        daemon, *SERVICE, "--no-port", "--name", "waits", "--restart", "on_failure", "--", "sh", "-c", "false & wait"
    )
    assert "note:" not in said
    reason = daemon.wait_ended("waits")["replicas"][0]["reason"]
    assert reason["code"] == "exit_zero"
    assert "`wait` gives 0 however the programs before it have ended" in reason["hint"]


@row("`docker run -d …`, `systemctl start …`, `tmux new -d …`, `nginx`")
def test_programs_that_return_at_once_are_pointed_out(daemon: Daemon, tmp_path: Path) -> None:
    """A program that leaves, as nginx does where its configuration does not say otherwise."""
    nginx = tmp_path / "nginx"
    nginx.write_text("#!/bin/sh\nsleep 300 &\n")
    nginx.chmod(0o755)
    said = submit(daemon, *SERVICE, "--no-port", "--", str(nginx))
    assert (
        said.count("`nginx` returns at once, and a run ends with its first process; write nginx -g 'daemon off;'") == 2
    )
    for command in ("docker run -d x", "systemctl start x", "tmux new -d x"):
        assert "returns at once, and a run ends with" in submit(daemon, *SERVICE, "--dry-run", "--", *command.split())


# --- where it runs, and with what ---------------------------------------------------------------------------------


@row("`python serve.py` without `--workdir`")
def test_files_of_this_directory_are_pointed_out_however_they_are_named(daemon: Daemon) -> None:
    here = daemon.home
    (here / "pkg").mkdir()
    for path in ("app.py", "run.sh", "conf.yaml", "pkg/__main__.py"):
        (here / path).write_text("")
    for command, path in (
        ("python3 app.py", "app.py"),
        ("./run.sh", "./run.sh"),
        ("bash run.sh", "run.sh"),
        ("python3 -m pkg", "pkg/__main__.py"),
        ("python3 -m app", "app.py"),
        ("uvicorn app:app", "app.py"),
        ("true --config conf.yaml", "conf.yaml"),
        ("true --config=conf.yaml", "conf.yaml"),
    ):
        said = submit(daemon, "--dry-run", "--", *command.split())
        assert f"note: {path} is in this directory, but the job runs in a sandbox of its own; add --workdir ." in said
    said = submit(daemon, "--dry-run", "--", "sh", "-c", "exec python3 app.py --port 1")
    assert "note: app.py is in this directory" in said
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    said = submit(daemon, "--dry-run", "--workdir", "elsewhere", "--", "python3", "app.py")
    assert f"note: app.py is in this directory, and not in {elsewhere}, where the job runs" in said
    assert "note:" not in submit(daemon, "--dry-run", "--workdir", ".", "--", "python3", "app.py")
    assert "note:" not in submit(daemon, "--dry-run", "--", "sh", "-c", "cd /srv && python3 app.py")


@row("`python serve.py` with an environment activated in your shell")
def test_a_program_of_an_activated_environment_is_pointed_out(daemon: Daemon, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    tool = tmp_path / "venv" / "bin" / "serve-it"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    activated = {"PATH": f"{tmp_path}/venv/bin:{daemon.env['PATH']}"}
    python = tmp_path / "venv" / "bin" / "python3"
    for command in (["python3", "-V"], ["sh", "-c", "exec python3 -V"], ["env", "A=1", "python3", "-V"]):
        said = submit(daemon, "--", *command, env=activated)
        assert re.search(
            rf"note: python3 is {python} here, and /\S+/python3 for the job, whose PATH is the daemon's", said
        )
        assert f"write {python}, or add --env PATH" in said
    said = submit(daemon, "--", "serve-it", env=activated)
    assert f"note: serve-it is {tool} here, and is not found by the job" in said
    assert "note:" not in submit(daemon, "--env", "PATH", "--", "python3", "-V", env=activated)
    assert "note:" not in submit(daemon, "--", str(python), "-V", env=activated)
    assert "note:" not in submit(
        daemon, "--", "bash", "-c", f". {tmp_path}/venv/bin/activate && python3 -V", env=activated
    )
    assert "note:" not in submit(daemon, "--", "python3", "-V")


@row("a script with Windows line ends, without `chmod +x`, or without a `#!` line")
def test_a_script_that_cannot_be_executed_says_what_is_wrong_with_it(daemon: Daemon, tmp_path: Path) -> None:
    for name, content, mode, words in (
        ("windows.sh", b"#!/bin/sh\r\ntrue\r\n", 0o755, "Windows line ends"),
        ("plain.sh", b"#!/bin/sh\ntrue\n", 0o644, "chmod +x it, or write /bin/sh"),
        ("bare.py", b"print()\n", 0o755, "no #! line, so that only a shell would run it: write python"),
    ):
        script = tmp_path / name
        script.write_bytes(content)
        script.chmod(mode)
        reason = daemon.wait_ended(daemon.batch([str(script)]))["replicas"][0]["reason"]
        assert reason["code"] == "bad_command"
        assert words in reason["text"]
    script = tmp_path / "windows.py"
    script.write_bytes(b"#!/usr/bin/env python3\r\nprint()\r\n")
    script.chmod(0o755)
    reason = daemon.wait_ended(daemon.batch([str(script)]))["replicas"][0]["reason"]
    assert reason["code"] == "exit_nonzero"
    assert "Windows line ends" in reason["hint"]


@row("`print(…)` in a Python program")
def test_what_a_python_program_prints_is_in_the_log_at_once(daemon: Daemon) -> None:
    program = "import os, time; print('loading', os.environ.get('PYTHONUNBUFFERED')); time.sleep(300)"
    job = daemon.submit(["python3", "-c", program], port=False)
    assert wait_for(lambda: daemon.output(job), 10) == ["loading 1"]
    daemon.cancel(job)
    job = daemon.batch(["python3", "-c", program.replace("300", "0")], env={"PYTHONUNBUFFERED": ""})
    daemon.wait_ended(job)
    assert daemon.output(job) == ["loading "]


# --- what is asked for --------------------------------------------------------------------------------------------


@row("`--gpu-model A100`")
def test_a_model_that_is_nowhere_is_answered_with_the_one_that_was_meant(daemon: Daemon) -> None:
    words = ("--gpus", "1", "--gpu-model", "A100", "--", "true")
    meant = "did you mean --gpu-model 'NVIDIA A100-SXM4-40GB'?"
    for mode in (["--detach"], ["--dry-run"], ["--wait", "1s"], ["--detach", "--json"], ["--dry-run", "--json"]):
        said = submit(daemon, *mode, *words)
        assert "cannot ever run here: 1 node: GPUs on n1 are 2 x NVIDIA A100-SXM4-40GB, A100 needed" in said
        assert meant in said.replace("\\\\", "")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        daemon.client().submit(gpulayer.batch(["true"], gpus=1, gpu_model="A100", name="meant"))
    (warning,) = heard
    assert str(warning.message).startswith("job meant waits: cannot ever run here: ")
    assert meant in str(warning.message)
    assert warning.filename == __file__


@row("`--gpus 4`, `--gpu-memory 80GiB` where no node has that")
def test_what_is_more_than_any_node_has_is_said_at_once(daemon: Daemon) -> None:
    for words, text, hint in (
        (["--gpus", "4"], "2 such GPUs on n1, 4 needed", "ask for what there is"),
        (["--gpus", "1", "--gpu-memory", "80GiB"], "largest GPU on n1 has 40GiB", "ask for 40GiB at most"),
        (["--gpus", "0.5", "--gpu-memory", "30GiB"], "0.5 of the largest GPU on n1 has 20GiB", "ask for 20GiB at most"),
    ):
        said = submit(daemon, "--detach", *words, "--", "true")
        assert f"warning: cannot ever run here: 1 node: {text}" in said
        assert f"hint: {hint}" in said
        said = submit(daemon, "--dry-run", *words, "--", "true")
        assert text in said
        assert "job explain" not in said  # there is no job to explain


@row("`--gpus 1.5`, `--gpus 0.0`, `--gpus 0 --gpu-model …`")
def test_amounts_that_make_no_sense_are_refused(daemon: Daemon) -> None:
    for words, text in (
        (["--gpus", "1.5"], "1.5 is more than one GPU and not whole"),
        (["--gpus", "0.0"], "0.0 is a share of nothing"),
        (["--gpus", "0.0001"], "0.0001 is finer than a thousandth of a GPU"),
        (["--gpus", "-1"], "-1 is not between 0 and 1024"),
        (["--gpus", "nan"], "nan is not between 0 and 1024"),
        (["--gpus", "0", "--gpu-model", "*"], "but gpus is 0"),
    ):
        done = daemon.cli("submit", "--detach", *words, "--", "true")
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr
        assert "\nhint: " in done.stderr
