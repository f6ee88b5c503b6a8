"""What is said on the command line before any daemon is asked: options, commands, files, help, exit codes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.cli import app as command_line
from gpulayer.cli.submit import request_from_keys
from gpulayer.cli.words import (
    GROUPS,
    SUBMIT_FLAGS,
    command_place,
    is_attached_batch,
    with_command_marked,
    with_globals_last,
)
from gpulayer.model.errors import InvalidRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
GPULAYER = (sys.executable, "-m", "gpulayer")


def run(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
    return subprocess.run(
        [*GPULAYER, *words], env=clean | (env or {}), cwd=cwd, capture_output=True, text=True, timeout=30, check=False
    )


def test_options_that_say_which_daemon_may_come_before_the_command() -> None:
    assert with_globals_last(["--url", "U", "--token=T", "job", "list", "--json"]) == [
        "job", "list", "--url", "U", "--token=T", "--json",
    ]  # fmt: skip
    assert with_globals_last(["--data-dir", "D", "status"]) == ["status", "--data-dir", "D"]
    assert with_globals_last(["--url", "U", "node", "list"]) == ["node", "list", "--url", "U"]
    assert with_globals_last(["status", "--url", "U"]) == ["status", "--url", "U"]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["submit", "python", "-m", "http.server", "--service"], 1),
        (["submit", "--service", "--gpus", "1", "python", "--gpus", "2"], 4),
        (["submit", "--gpus=1", "ls"], 2),
        (["submit", "--no-port", "--", "ls"], 2),
        (["submit", "--name", "x"], 3),
        (["submit", "--env", "A=1", "--", "--env"], 3),
    ],
)
def test_the_first_word_that_is_no_option_begins_the_command(words: list[str], place: int) -> None:
    assert command_place(words) == place
    marked = with_command_marked(words)
    assert "--" in marked[: place + 1] or place == len(words)


def test_the_flags_of_submit_are_those_that_its_signature_has() -> None:
    arguments = command_line.make_app()["submit"].assemble_argument_collection()
    flags = {argument.names[0] for argument in arguments if argument.hint is bool}
    assert flags == SUBMIT_FLAGS - {"--help", "-h", "--version"}


def test_the_lists_of_commands_are_those_that_exist() -> None:
    page = run("--help").stdout
    app = command_line.make_app()
    for name in app:
        if not name.startswith("-"):
            assert f"  {name} " in page, name
    assert set(GROUPS) == {name for name in app if any(not child.startswith("-") for child in app[name])}


def test_help_is_printed_without_importing_what_makes_it_slow() -> None:
    code = (
        "import sys; from gpulayer.cli.app import main; main(['--help']);"
        "print({'cyclopts', 'rich', 'trio', 'http.client', 'starlette'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_client_command_imports_neither_rich_nor_the_daemon() -> None:
    code = (
        "import sys; from gpulayer.cli.app import main; main(['status', '--data-dir', '/nonexistent']);"
        "print({'rich', 'trio', 'httpx', 'starlette', 'cbor2', 'gpulayer.node', 'gpulayer.api'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["sbmit"], 2, "did you mean submit?"),
        (["job", "lst"], 2, "did you mean list?"),
        (["submit", "--service", "--replcas", "2", "--", "ls"], 2, "did you mean --replicas?"),
        (["submit", "--detach", "--gpu", "1", "--", "ls"], 2, "did you mean --gpus?"),
        (["status", "--jsn"], 2, "did you mean --json?"),
        (["up", "--data-dri", "x"], 2, "did you mean --data-dir?"),
        (["submit", "--service", "--restart", "allways", "--", "ls"], 2, "did you mean always?"),
        (["submit", "--service", "--gpus", "1.5", "--", "ls"], 2, "write a whole number, or a share below 1"),
        (["submit", "--service", "--timeout", "90", "--", "ls"], 2, "write it like 90s, 15m, 24h or 1h30m"),
        (["submit", "--detach", "--max-restarts", "1", "--", "ls"], 2, "add --service, or leave it out"),
        (["submit", "--detach"], 2, "write it after --, as in: gpulayer submit --workdir . -- python train.py"),
        (["submit", "--detach", "--env", "NOT_SET_HERE", "--", "ls"], 2, "write NOT_SET_HERE=VALUE"),
        (["submit", "--detach", "--label", "zone", "--", "ls"], 2, "write it like --label zone=a"),
        (["token", "create", "--role", "root"], 2, ""),
        (["job", "status"], 2, ""),
        (
            ["frobnicate"],
            2,
            "commands: up, systemd, demo, status, submit, events, audit, login, logout, leave, completion, "
            "job, node, resources, cluster, token",
        ),
        (["job", "frob"], 2, "commands: list, status, logs, endpoints, events, explain, wait, restart, cancel"),
        (["logs", "web", "-f"], 2, "did you mean gpulayer job logs?"),
        (["--url", "http://127.0.0.1:1", "cancel", "web"], 2, "did you mean gpulayer job cancel?"),
        (["job", "stop", "web"], 2, "did you mean gpulayer job cancel?"),
        (["ps"], 2, "did you mean gpulayer job list?"),
        (["token", "rm", "t"], 2, "commands: create, list, revoke"),
        (["submit", "--detach", "--gres", "gpu:1", "--", "ls"], 2, "see gpulayer submit --help"),
        (["submit", "--detach", "--partition", "a", "--", "ls"], 2, "see gpulayer submit --help"),
        (["submit", "--detach", "--mem", "4GiB", "--", "ls"], 2, "did you mean --memory?"),
        (["submit", "--detach", "--workdir", "", "--", "ls"], 2, "leave it out for a sandbox"),
        (["submit", "--detach", "--gpus", "1", "--gpu-model", "", "--", "ls"], 2, "gpu-model: an empty pattern"),
        (["submit", "--target", "local", "--token", "T", "--service", "--", "ls"], 2, "leave out one of them"),
        (["job", "cancel"], 2, "write gpulayer job cancel JOB"),
        (["job", "cancel", "web", "--wait"], 2, "--wait 30s"),
        (["job", "cancel", "web.0"], 2, "gpulayer job restart web.0"),
        (["job", "wait", "web.0"], 2, "write gpulayer job wait web"),
        (["job", "endpoints", "web.0"], 2, "write gpulayer job endpoints web"),
        (["job", "events", "web.0"], 2, "write gpulayer job events web"),
        (["job", "logs", "web", "--previous", "--run", "1"], 2, "leave out one of them"),
        (["submit", "--service", "--timeout", "5min", "--", "ls"], 2, "units are ms, s, m, h, d"),
        (["submit", "--service", "--memory", "5gigs", "--", "ls"], 2, "units are KiB, MiB, GiB"),
        (["submit", "--service", "--port", "8080", "--", "ls"], 2, "gpulayer chooses the port and sets $PORT"),
        (["submit", "--service", "--detach", "--wait", "1s", "--", "ls"], 2, "leave out one of them"),
        (["status", "--url", "http://127.0.0.1:1"], 3, "check the port in the URL"),
        (["job", "status", "web", "db"], 2, ""),
        (["job", "logs", "web.x"], 2, "write JOB.N with N from 0 on, or JOB"),
        (["status", "--url", "http://10.1.2.3:7450"], 2, "use https://10.1.2.3:7450"),
        (
            ["status", "--url", "ftp://x"],
            2,
            "write https://HOST:7450, http://127.0.0.1:7450 or unix:///path/gpulayer.sock",
        ),
    ],
)
def test_wrong_words_are_refused_with_what_to_write(words: list[str], code: int, hint: str) -> None:
    done = run(*words, env={"GPULAYER_DATA_DIR": "/nonexistent"})
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("gpulayer: ")
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_no_daemon_is_exit_3_with_the_command_that_starts_one(tmp_path: Path) -> None:
    done = run("status", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert f"start it with: gpulayer up --data-dir {tmp_path}" in done.stderr


def test_what_is_wrong_with_an_attached_batch_is_125(tmp_path: Path) -> None:
    """Codes below that belong to the job, as in `docker run`."""
    no_daemon = {"GPULAYER_DATA_DIR": str(tmp_path)}
    assert run("submit", "--target", "remote", "--", "true", env=no_daemon).returncode == 125
    assert run("submit", "--gpsu", "1", "--", "true", env=no_daemon).returncode == 125
    assert run("submit", "--priority", "101", "true", env=no_daemon).returncode == 125
    assert run("submit", "--target", "remote", "--service", "--", "true", env=no_daemon).returncode == 3
    assert is_attached_batch(["--url", "U", "submit", "--gpus", "1", "ls", "--service"])
    assert not is_attached_batch(["submit", "--gpus", "1", "--service", "ls"])


def test_a_workdir_that_does_not_exist_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    done = run(
        "submit", "--detach", "--workdir", "nowhere", "true", env={"GPULAYER_DATA_DIR": str(tmp_path)}, cwd=tmp_path
    )
    assert done.returncode == 2
    assert f"{tmp_path}/nowhere does not exist" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('command = ["ls"]\nreplica = 2', "did you mean replicas?"),
        ('command = ["ls"]\ngpu-memori = "1GiB"', "did you mean gpu-memory?"),
        ('command = ["ls"]\ntarget = "local"', "it is for the command line: --target"),
        ('command = ["ls"]\ndry-run = true', "it is for the command line: --dry-run"),
        ('command = "ls"', "takes an array of words"),
        ('command = ["ls"]\nworkdir = ""', "leave it out for a sandbox"),
        ('command = ["ls"]\ngpus = 1\ngpu-model = ""', "gpu-model: an empty pattern"),
        ('command = ["ls"]\nreplicas = "2"', "takes a whole number"),
        ('command = ["ls"]\nstop-grace = "1s"\nstop_grace = "2s"', "is given twice"),
        ('command = ["ls"]\n[env]\nA = 1', 'write it in quotes, as in "1"'),
        ("command = [", "is not TOML"),
    ],
)
def test_a_job_file_is_read_strictly(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    done = run("submit", "--detach", "--file", str(file), env={"GPULAYER_DATA_DIR": str(tmp_path)})
    assert done.returncode == 2
    assert words in done.stderr


def test_keys_become_the_request_that_they_say() -> None:
    request = request_from_keys(
        {
            "service": True,
            "command": ["python", "serve.py"],
            "gpus": "0.5",
            "gpu_memory": "24GiB",
            "label": ["zone=a"],
            "env": ["A=1"],
            "timeout": "15m",
            "stop_signal": "SIGINT",
            "retry_max_attempts": 3,
            "no_port": True,
        }
    )
    spec = request.spec
    assert (spec.kind, spec.name, request.is_named) == ("service", "serve", False)
    assert (spec.requirements.gpus_milli, spec.requirements.gpu_memory_mib) == (500, 24 * 1024)
    assert (spec.requirements.labels, spec.env) == ((("zone", "a"),), (("A", "1"),))
    assert (spec.timeout_seconds, spec.stop_signal, spec.retry_max_attempts, spec.port) == (900, "INT", 3, False)


def test_what_only_services_have_is_refused_for_a_batch() -> None:
    for key, value in (("restart", "always"), ("max_restarts", 1), ("start_timeout", "5s")):
        with pytest.raises(InvalidRequest, match="is for services"):
            request_from_keys({"command": ["ls"], key: value})
    assert request_from_keys({"command": ["ls"], "restart": "never"}).spec.kind == "batch"


def test_an_env_file_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    file = tmp_path / "env"
    file.write_text("# a comment\n\nA=1\nB='two words'\nC=x=y\nFROM_HERE\nD=\n")
    request = request_from_keys({"command": ["ls"], "env_file": [str(file)], "env": ["A=2"]})
    assert dict(request.spec.env) == {"A": "2", "B": "two words", "C": "x=y", "FROM_HERE": "here", "D": ""}


def test_what_is_wrong_in_an_env_file_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    for text, words in (("A=1\n\nNOT_SET_HERE\n", "NOT_SET_HERE is not set here"), ("\n\nA B=1", "'A B' is not a")):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match=re.escape(f"env-file {file}, line 3: {words}")):
            request_from_keys({"command": ["ls"], "env_file": [str(file)]})


def test_help_and_version_are_understood_as_words_too() -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("version").stdout == run("--version").stdout
    assert run("help", "submit").stdout == run("submit", "--help").stdout


def test_help_says_what_a_value_is_and_which_is_taken_without_it() -> None:
    page = run("submit", "--help", env={"COLUMNS": "100"}).stdout
    for words in ("--gpus N ", "--timeout DURATION ", "--memory SIZE ", "--label K=V ", "(default 10s)", "e.g. 24h"):
        assert words in page
    assert "STR" not in page
    assert "auto and text are for people" in " ".join(run("up", "--help").stdout.split())


def documented_examples() -> list[list[str]]:
    text = (DOCUMENT.read_text()).replace(r"\|", "|")
    found = [shlex.split(example) for example in re.findall(r"\| `(gpulayer [^`]+)` \|$", text, re.MULTILINE)]
    assert len(found) > 40
    return [words[1:] for words in found]


@pytest.mark.parametrize("words", documented_examples(), ids=" ".join)
def test_every_example_in_the_document_is_understood(words: list[str]) -> None:
    app = command_line.make_app()
    app.parse_args(with_command_marked(words), exit_on_error=False, print_error=False)


def test_every_option_of_every_command_is_documented() -> None:
    text = DOCUMENT.read_text()
    app = command_line.make_app()
    commands = [app[name] for name in app if not name.startswith("-")]
    commands += [group[name] for group in (app["job"], app["token"]) for name in group if not name.startswith("-")]
    missing = {
        argument.names[0]
        for command in commands
        if command.default_command is not None
        for argument in command.assemble_argument_collection()
        if argument.names and argument.names[0].startswith("--") and f"{argument.names[0]}" not in text
    }
    assert not missing


def test_the_job_file_in_the_document_is_a_job(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "job.toml"
    file.write_text(block)
    # Read, and sent: it gets as far as finding that nobody is there.
    words = ("submit", "--target", "remote", "--file", str(file))
    assert run(*words, env={"GPULAYER_DATA_DIR": str(tmp_path)}).returncode == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    for word in ("submit", "endpoints", "replicas"):
        assert word in done.stdout


def test_the_one_argument_of_completion_is_named() -> None:
    assert run("completion", "--help").stdout.startswith("Usage: gpulayer completion [OPTIONS] [SHELL]\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[devices]\nexclude = "GPU-x"',
            ("devices.exclude = 'GPU-x' is not a list", 'write exclude = ["…"] below [devices]'),
        ),
        ('accelerators = "A100"', ("accelerators = 'A100' is not a list", "write each as [[accelerators]]")),
        ("name = 5", ("name = 5 is not text", 'write it in quotes: name = "…"')),
        ('api_port = "80"', ("api_port = '80' is not a whole number", "write it without quotes: api_port = 4")),
    ],
)
def test_a_wrong_value_in_the_configuration_is_told_with_how_to_write_it(
    tmp_path: Path, text: str, words: tuple[str, str]
) -> None:
    config = tmp_path / "gpulayer.toml"
    config.write_text(text)
    done = run("up", "--config", str(config), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    for expected in words:
        assert expected in done.stderr
