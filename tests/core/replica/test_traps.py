"""What is said of commands that do not do what their writer thinks, and that nothing is said of ordinary ones."""

from __future__ import annotations

import shlex
import time
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.core.replica import traps
from gpulayer.core.replica.reasons import left_in_background, reason_for_exit, told
from gpulayer.core.replica.shell_line import read
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import Exit


def job(command: str | list[str], kind: Literal["service", "batch"] = "service", **more: object) -> JobSpec:
    """`command` as one types it behind the --."""
    argv = tuple(shlex.split(command) if isinstance(command, str) else command)
    restart = "always" if kind == "service" else "never"
    return JobSpec(kind=kind, name="x", argv=argv, restart=restart, port=kind == "service", **more)  # type: ignore[arg-type]


ORDINARY = [
    "python serve.py",
    "python -m http.server --bind 0.0.0.0",
    "python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3-8B",
    "/opt/conda/envs/x/bin/python -u serve.py --config /etc/serve.yaml",
    "sh -c 'exec python -m http.server --bind $HOST $PORT'",
    "sh -c 'exec uvicorn app:app --host $HOST --port $PORT'",
    "bash -c 'exec gunicorn app:app --bind $HOST:$PORT --workers 4'",
    "bash -lc 'cd /srv/app && exec node server.js'",
    "bash -c 'set -euo pipefail; pip install -r requirements.txt; exec python serve.py'",
    "bash -c 'source /srv/venv/bin/activate && exec python serve.py'",
    "bash -c '. /opt/conda/etc/profile.d/conda.sh && conda activate x && exec python serve.py'",
    """bash -c 'eval "$(conda shell.bash hook)" && conda activate x && exec python serve.py'""",
    "bash -ic 'conda activate x && exec python serve.py'",
    "conda run --no-capture-output -n x python serve.py",
    "sh -c 'python serve.py 2>&1 | tee log.txt'",
    "sh -c 'exec python serve.py > out.txt 2>&1'",
    "sh -c 'python a.py & python b.py & wait -n'",
    "bash -c 'python worker.py & exec python serve.py --port $PORT'",
    "bash run.sh --port 8000",
    "./run.sh",
    "env A=1 python serve.py",
    "nohup python serve.py",
    "timeout 1h python serve.py",
    "docker run --rm -p 8000:80 nginx -g 'daemon off;'",
    "docker run --rm -it image serve -d",
    "docker build -t image .",
    "nginx -g 'daemon off;'",
    "nginx -t",
    "redis-server --port 6379",
    "vllm serve meta-llama/Llama-3-8B --port 8000",
    "torchrun --nproc-per-node 2 train.py --report-to none",
    "ray start --head --block",
    "jupyter lab --no-browser",
    "text-generation-launcher --model-id x --export",
    "find . -name '*.py' -exec grep -l x {} ;",
    "awk '{ print $1 }' /etc/passwd",
    "expr 3 > 2",
    "perl -e 'print $PORT & 1'",
    "python -c \"import os; print(os.environ['PORT'], 1 | 2)\"",
    "grep -r 'a|b' /srv",
    "sleep infinity",
    "rsync -a --port=873 host:/x /y",
    "systemctl status nginx",
    "tmux -V",
    "tmux new-session -s my-dev",
    "screen -S my-dev",
    "supervisord -n -c /etc/supervisord.conf",
    "supervisord -nc /etc/supervisord.conf",
    # Their files mostly say that they stay.
    "supervisord -c /etc/supervisord.conf",
    "nginx -c /etc/nginx.conf",
    "docker start -ai web",
    "docker run --rm --detach-keys ctrl-x nginx",
    "podman run --detach=false nginx",
    # The last command is what the run waits for.
    "sh -c 'ray start --head && exec python serve.py --port $PORT'",
    "sh -c 'systemctl start postgresql; exec python serve.py'",
    "sh -c 'docker run -d --rm redis; exec python serve.py'",
    "sh -c 'setsid python watch.py & exec python serve.py'",
    "sh -c 'nginx && exec python serve.py'",
    "sh -c 'ssh host cat model > model && exec python serve.py'",
    "ssh -N -L 5432:localhost:5432 host",
    # Where /etc/profile.d has conda.sh, as in conda's own images, and where conda's bin is in the PATH.
    "bash -lc 'conda activate x && exec python serve.py'",
    "bash --login -c 'conda activate x && exec python serve.py'",
    "bash -c 'source activate x && exec python serve.py'",
    # Patterns of their own.
    "grep '$HOME' notes.txt",
    "grep '|' table.txt",
    "sed 's/$PORT/1/' notes.txt",
    "make -j 4",
]


@pytest.mark.parametrize("command", ORDINARY)
def test_nothing_is_said_of_an_ordinary_command(command: str) -> None:
    assert traps.at_submit(job(command, "service")) == ()
    assert traps.at_submit(job(command, "batch")) == ()


# Command, what is said of it, what to write instead.
AT_SUBMIT = [
    ("sh -c 'conda activate x && python serve.py'", "conda init", "conda run --no-capture-output -n x"),
    ("sh -c 'conda activate; exec python serve.py'", "`conda activate`", "conda run"),
    ("bash -c 'micromamba activate x; python serve.py'", "`micromamba activate`", "envs/x/bin/python"),
    ("conda run -n x python serve.py", "until the end", "--no-capture-output"),
    ("sh -c 'exec conda run -n x python serve.py'", "until the end", "--no-capture-output"),
    ("sh -c 'python serve.py &'", "the & behind `python`", "exec"),
    ("sh -c 'nohup python serve.py > log 2>&1 &'", "the & behind `python`", "exec"),
    ("sh -c 'python serve.py & sleep infinity'", "nobody will notice when `python` ends", "exec"),
    ("bash -c 'app --x & tail -f /dev/null'", "waits for `tail -f /dev/null`", "exec"),
    ("python -m http.server '$PORT'", "python gets $PORT as it is written", "sh -c 'exec python -m http.server $PORT'"),
    ("uvicorn app:app --port '${PORT}'", "gets ${PORT}", "sh -c 'exec uvicorn app:app --port ${PORT}'"),
    ("app --listen '$HOST:$PORT'", "gets $HOST", "sh -c"),
    ("python a.py '&&' python b.py", "gets && as an argument", "sh -c 'python a.py && python b.py'"),
    ("python a.py '>' out.txt", "gets > as an argument", "sh -c"),
    ("python a.py '2>&1'", "gets 2>&1 as an argument", "sh -c"),
    ("nohup python serve.py '&'", "gets & as an argument", "leave it out"),
    ("python serve.py --model=~/models/x", "the ~ of --model=~/models/x", "the whole path"),
    ("'python serve.py --port 1'", "one word", "without quotes"),
    ("FOO=1 python serve.py", "FOO=1 is no program", "--env FOO=1"),
    ("cd /srv", "`cd` is a word of the shell", "--workdir"),
    ("source /srv/venv/bin/activate", "`source` is a word of the shell", "sh -c"),
    ("uvicorn app:app --port", "behind --port", "single quotes"),
    ("uvicorn app:app --port= --host 0.0.0.0", "behind --port=", "single quotes"),
    ("sh -c 'uvicorn app:app --port  --host 0.0.0.0'", "behind --port", "single quotes"),
    ("streamlit run app.py --server.port", "behind --server.port", "single quotes"),
    ("sudo python serve.py", "takes $PORT", "leave it out"),
    ("sh -c 'exec sudo -u nobody python serve.py'", "takes $PORT", "leave it out"),
    ("sh -c 'CUDA_VISIBLE_DEVICES=0 exec python serve.py'", "CUDA_VISIBLE_DEVICES=0", "leave it out"),
    ("env CUDA_VISIBLE_DEVICES=1 python serve.py", "CUDA_VISIBLE_DEVICES=1", "leave it out"),
    ("docker run -d nginx", "`docker run -d` returns at once", "without -d"),
    ("docker run --rm --gpus all -p 80:80 -d nginx", "returns at once", "without -d"),
    ("docker compose up -d", "returns at once", "without -d"),
    ("systemctl start nginx", "`systemctl start` returns at once", "the program that the unit starts"),
    ("service nginx start", "returns at once", "the program that the unit starts"),
    ("tmux new-session -d python serve.py", "returns at once", "gpulayer job logs"),
    ("screen -dmS web python serve.py", "returns at once", "gpulayer job logs"),
    ("setsid python serve.py", "`setsid` returns at once", "leave setsid out"),
    ("nginx", "`nginx` returns at once", "nginx -g 'daemon off;'"),
    ("sh -c 'nginx -t && nginx'", "`nginx` returns at once", "nginx -g 'daemon off;'"),
    ("supervisord", "`supervisord` returns at once", "supervisord -n"),
    ("tmux new -s web -d python serve.py", "returns at once", "gpulayer job logs"),
    ("sh -c 'cd /srv && exec docker compose up -d'", "returns at once", "without -d"),
    ("redis-server --daemonize yes", "returns at once", "leave that out"),
    ("gunicorn -D app:app", "returns at once", "leave that out"),
    ("ray start --head", "`ray start` returns at once", "--block"),
    ("ssh host python serve.py", "runs on the other host", "a daemon there"),
]


@pytest.mark.parametrize(("command", "what", "instead"), AT_SUBMIT)
def test_a_trap_is_named_at_submit_with_what_to_write_instead(command: str, what: str, instead: str) -> None:
    (trap,) = traps.at_submit(job(command))
    assert what in trap.what
    assert instead in trap.instead
    assert "\n" not in str(trap)


def test_devices_that_the_user_sets_are_pointed_out() -> None:
    (trap,) = traps.at_submit(job("python serve.py", env=(("CUDA_VISIBLE_DEVICES", "0"),)))
    assert trap.what.startswith("CUDA_VISIBLE_DEVICES=0 takes the place of the devices")
    assert not traps.at_submit(job("python serve.py", env=(("CUDA_VISIBLE_DEVICES", ""),)))


def test_a_batch_may_start_something_elsewhere_and_needs_no_port() -> None:
    for command in ("docker run -d nginx", "ssh host uptime", "uvicorn app:app --port", "sh -c 'a & sleep infinity'"):
        assert traps.at_submit(job(command, "batch")) == ()


# --- after the end of a run ---------------------------------------------------------------------------------------


def hint(command: str, code: int, kind: Literal["service", "batch"] = "service", left: int = 0) -> str:
    end = Exit(run=1, code=code, left_background=left)
    return reason_for_exit(end, job(command, kind), "web").hint


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("sh -c 'conda activate x && python serve.py'", 127, "conda run --no-capture-output -n x"),
        ("bash -lc 'conda activate x && python serve.py'", 1, "`conda init`"),
        ("bash -c 'source activate tf; python serve.py'", 1, "envs/tf/bin/python"),
        ("nginx -c /etc/nginx.conf", 0, "daemon off"),
        ("supervisord -c /etc/supervisord.conf", 0, "supervisord -n"),
        ("sh -c 'source venv/bin/activate && python serve.py'", 127, "`source` is a word of bash"),
        ("sh run.sh", 127, "Windows line ends"),
        ("bash -c ./run.sh", 126, "chmod +x"),
        ("python -m http.server '$PORT'", 2, "sh -c 'exec python -m http.server $PORT'"),
        ("sudo python serve.py", 1, "leave it out"),
        ("sh -c 'app & wait'", 0, "`wait` gives 0"),
        ("sh -c 'app &'", 0, "the & behind `app`"),
        ("sh -c 'app & exit 0'", 0, "was started with & in the background"),
        ("docker run -d nginx", 0, "without -d"),
        ("nginx", 0, "daemon off"),
        ("ssh host app", 0, "runs on the other host"),
    ],
)
def test_the_end_of_a_run_is_explained_by_what_its_command_did(command: str, code: int, words: str) -> None:
    assert words in hint(command, code)


def test_an_end_that_no_trap_explains_keeps_its_own_hint() -> None:
    see_log = "`gpulayer job logs web --previous` shows what it wrote"
    assert hint("python serve.py", 1) == see_log
    assert hint("sh -c 'source venv/bin/activate && python serve.py'", 1) == see_log
    assert hint("bash -c 'source /venv/bin/activate; exec python serve.py'", 1) == see_log
    assert hint("python serve.py", 0) == ""
    assert hint("sh -c 'conda activate x && python serve.py'", 127).endswith(see_log)


def test_a_run_that_was_stopped_is_not_explained_by_its_command() -> None:
    spec = job("docker run -d nginx")
    assert traps.after_exit(spec, Exit(run=1, code=0, ended_by="stop:never_ready")) is None
    assert traps.after_exit(spec, Exit(run=1, signal=9)) is None


def test_what_was_left_in_the_background_is_said_with_what_started_it() -> None:
    end = Exit(run=1, code=0, left_background=1, left_names=("python3",))
    spec = job("sh -c 'python3 serve.py & exit 0'", "batch")
    reason = left_in_background(end, spec)
    assert reason is not None
    assert reason.text == "it left 1 process in the background (python3), which was ended"
    assert "`python3` was started with &" in reason.hint
    service = job("sh -c 'python3 serve.py &'")
    words = told(end, reason_for_exit(end, service, "web"))
    assert words == "exited with code 0 after 0 s and left 1 process in the background (python3), which was ended"
    assert traps.after_exit(job("sh -c 'a & exit 0'", "batch"), Exit(run=1, code=0)) is None


# --- what is alive ------------------------------------------------------------------------------------------------


def test_a_run_of_which_only_a_shell_is_left_is_recognised() -> None:
    found = traps.only_shell([["sh", "-c", "app & sleep infinity"], ["sleep", "infinity"]])
    assert found == traps.OnlyShell(names="sh and sleep", has_background=True)
    found = traps.only_shell([["/bin/bash", "run.sh"], ["tail", "-f", "/dev/null"]])
    assert found == traps.OnlyShell(names="bash and tail", has_background=False)
    assert traps.only_shell([["-bash"]]) == traps.OnlyShell(names="bash", has_background=False)
    for alive in (
        [],
        [["python", "serve.py"]],
        [["sh", "-c", "app & sleep 9"], ["python", "app.py"], ["sleep", "9"]],
        [["sleep", "infinity"]],
        [[]],
    ):
        assert traps.only_shell(alive) is None


@pytest.mark.parametrize(
    ("command", "port", "told_", "instead"),
    [
        ("uvicorn app:app --port 8000", 8000, "`--port 8000`", "`--port $PORT`"),
        ("uvicorn app:app --port=8000", 8000, "`--port=8000`", "`--port=$PORT`"),
        ("gunicorn -b 0.0.0.0:8000 app:app", 8000, "`0.0.0.0:8000`", "`0.0.0.0:$PORT`"),
        ("python -m http.server 8000", 8000, "`8000`", "`$PORT`"),
        ("sh -c 'python -m http.server 8000'", 8000, "`8000`", "`$PORT`"),
    ],
)
def test_a_port_that_the_command_fixes_is_named(command: str, port: int, told_: str, instead: str) -> None:
    trap = traps.fixed_port(shlex.split(command), port)
    assert trap is not None
    assert told_ in trap.what
    assert instead in trap.instead


def test_a_port_that_the_command_does_not_say_is_no_trap_of_it() -> None:
    assert traps.fixed_port(["python", "serve.py", "--port", "18000"], 8000) is None
    assert traps.fixed_port(["python", "-c", "serve(8000) # 'x'"], 8000) is None
    assert traps.fixed_port([], 8000) is None


def test_the_words_of_a_command_that_may_be_files_of_the_directory() -> None:
    def paths(command: str) -> list[str]:
        return list(traps.paths(shlex.split(command)))

    assert paths("python serve.py") == ["serve.py"]
    assert "serve.py" in paths("sh -c 'exec python serve.py --port $PORT'")
    assert paths("./serve.py --config=conf.yaml") == ["./serve.py", "conf.yaml"]
    assert "pkg/serve.py" in paths("python -m pkg.serve")
    assert "pkg/__main__.py" in paths("python -m pkg")
    assert "app.py" in paths("uvicorn app:app")
    assert "serve.py" not in paths("sh -c 'cd /srv && python serve.py'")
    assert paths("python /srv/serve.py") == []


# --- laws ---------------------------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30),
    st.sampled_from(
        [
            *(
                "sh",
                "-c",
                "env",
                "conda",
                "activate",
                "docker",
                "run",
                "-d",
                "--port",
                "&",
                "wait",
                "'",
                "$PORT",
                "timeout",
            )
        ],
    ),
)


@given(st.lists(WORDS, min_size=1, max_size=8), st.integers(0, 255), st.integers(0, 2))
def test_no_command_is_too_strange_to_be_looked_at(argv: list[str], code: int, left: int) -> None:
    """The daemon looks at every command whose run has ended."""
    argv = [argv[0] or "x", *argv[1:]]
    for kind in ("service", "batch"):
        spec = job(argv, kind)  # type: ignore[arg-type]
        for trap in traps.at_submit(spec):
            assert trap.what
            assert trap.instead
        traps.after_exit(spec, Exit(run=1, code=code, left_background=left))
    traps.only_shell([argv, argv])
    traps.fixed_port(argv, 8000)
    list(traps.paths(argv))


@given(st.text(max_size=200))
def test_no_script_is_too_strange_to_be_read(script: str) -> None:
    assert all(step.then in ("&", "&&", "||", "|", ";") for step in read(["sh", "-c", script]).steps)


def test_a_command_as_long_as_may_be_is_looked_at_in_no_time() -> None:
    script = "app & " * 80_000
    assert traps.at_submit(job(["sh", "-c", script[:100_000]])) == ()
    assert traps.at_submit(job(["app", *["--port"] * 60_000])) != ()


def test_a_command_that_nobody_typed_costs_nothing_to_judge() -> None:
    """Whoever may submit must not stop the daemon's loop with a word that a pattern chews on for minutes."""
    for argv in (
        ("/bin/sudo", "-" + "E" * 130_000 + "!"),
        ("/bin/docker", "run", "-" + "d" * 130_000 + "x"),
        ("sh", "-c", "conda activate x; " + "shell" * 20_000),
        ("/bin/docker", "run", "-" + "d" * 4000 + "x"),
        ("/bin/sudo", "-" + "E" * 4000 + "!"),
    ):
        began = time.process_time()
        spec = JobSpec(kind="service", name="x", argv=argv)
        traps.at_submit(spec)
        traps.after_exit(spec, Exit(run=1, code=1))
        assert time.process_time() - began < 1.0, argv[0]
