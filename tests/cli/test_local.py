"""`submit --target local`: the same rules in the foreground, without a daemon; nothing is left, whoever is killed."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from gpulayer.client.sync import connect
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, who_holds
from tests.fakes.nvml import FakeNvml
from tests.integration.daemon import (
    GPULAYER,
    Daemon,
    describe,
    end_process,
    environment,
    get,
    is_alive,
    living,
    opens_below,
    read,
    refuses,
    wait_for,
)

SERVE = ("sh", "-c", "exec python3 -u -m http.server --bind $HOST $PORT")
# Ends only by KILL.
STUBBORN = ("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")
NAMED_GPU = '[[accelerators]]\nkind = "cuda"\nmodel = "A10"\nmemory = "24GiB"\nuuid = "GPU-a"\n'
UNNAMED_GPU = '[[accelerators]]\nkind = "cuda"\nmodel = "A10"\nmemory = "24GiB"\n'


class Host:
    """A user's home with no daemon, and the commands that are started in it."""

    def __init__(self, home: Path, config: str = "") -> None:
        self.home = home
        self.data_dir = home / "data"
        self.config_path = home / "gpulayer.toml"
        self.config_path.write_text(config)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")} | {
            "HOME": str(home),
            "GPULAYER_DATA_DIR": str(self.data_dir),
            "GPULAYER_CONFIG": str(self.config_path),
        }
        self.started: list[subprocess.Popen[str]] = []

    def submit(
        self, *words: str, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        command = self.start(*words, env=env)
        try:
            stdout, stderr = command.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            command.kill()
            raise
        return subprocess.CompletedProcess(command.args, command.returncode, stdout, stderr)

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """As a shell would, in a process group of its own."""
        command = subprocess.Popen(
            [*GPULAYER, "submit", *words],
            env=self.env | dict(env or {}),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.started.append(command)
        return command

    def node(self) -> int:
        """The pid of the one private node that runs."""
        wanted = b"\0gpulayer.node.private\0"

        def found() -> list[int]:
            return [pid for pid in self.processes() if wanted in read(f"/proc/{pid}/cmdline") + b"\0"]

        return wait_for(found)[0]

    def runs(self) -> list[int]:
        """Living processes that run in a sandbox of ours."""
        wanted = f"GPULAYER_SANDBOX={self.data_dir}/local/".encode()
        return [pid for pid in living() if any(value.startswith(wanted) for value in environment(pid))]

    def shims(self) -> list[int]:
        return [pid for pid in living() if opens_below(pid, f"{self.data_dir}/local/") and _is_shim(pid)]

    def processes(self) -> list[int]:
        """All that was started by our commands, but these."""
        mine = {os.getpid(), *(command.pid for command in self.started)}
        mark = f"GPULAYER_CONFIG={self.config_path}".encode()
        found = {pid for pid in living() if mark in environment(pid)}
        return sorted({*found, *self.runs(), *self.shims()} - mine)

    def directories(self) -> list[Path]:
        found = self.data_dir / "local"
        return sorted(found.iterdir()) if found.exists() else []

    def cgroups(self) -> list[Path]:
        """Of the attempts that there are, with that of their node."""
        named = [
            json.loads(path.read_text())["cgroup"] for path in self.data_dir.glob("local/*/sandboxes/*/attempt.json")
        ]
        return [each for name in named if name for each in (Path(name), Path(name).parent)]

    def wait_for_run(self) -> int:
        return wait_for(self.runs, 20)[0]

    def wait_for_nothing(self, seconds: float = 10) -> None:
        wait_for(lambda: not self.processes(), seconds, lambda: describe(self.processes()))

    def is_clean(self) -> bool:
        self.wait_for_nothing(2)
        assert not self.directories()
        return True


def _is_shim(pid: int) -> bool:
    return read(f"/proc/{pid}/comm") == b"gpulayer-shim\n"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    yield from _tidied(Host(tmp_path))


@pytest.fixture
def host_with_gpu(tmp_path: Path) -> Iterator[Host]:
    yield from _tidied(Host(tmp_path, NAMED_GPU))


def _tidied(host: Host) -> Iterator[Host]:
    """Ends what a failed test left, by pid, and says so for one that did not fail."""
    yield host
    left = [*(command.pid for command in host.started if command.poll() is None), *host.processes()]
    for pid in left:
        end_process(pid)
    for command in host.started:
        command.communicate(timeout=10)
    assert not left


def lines_until(command: subprocess.Popen[str], text: str) -> list[str]:
    """What it says on stderr up to a line with this in it."""
    assert command.stderr is not None
    said = []
    for line in command.stderr:
        said.append(line.rstrip("\n"))
        if text in line:
            return said
    raise AssertionError(f"it ended without {text!r}: {said}")


def interrupt(command: subprocess.Popen[str], number: int = signal.SIGINT) -> None:
    """As the terminal does it: to its whole group."""
    os.killpg(command.pid, number)


# --- a batch ------------------------------------------------------------------------------------------------------


def test_a_batch_passes_output_and_exit_code_on(host: Host) -> None:
    done = host.submit("--target", "local", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert done.stderr.splitlines() == ["err", "gpulayer: job sh failed: replica 0 ended: exit code 3 after 0.0 s"]
    assert host.is_clean()
    assert host.submit("--target", "local", "--", "sh", "-c", "kill -TERM $$").returncode == 128 + 15
    done = host.submit("--target", "local", "--", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert host.is_clean()


def test_what_keeps_a_batch_from_running_is_125(host: Host) -> None:
    done = host.submit("--target", "local", "--", "no-such-program")
    assert (done.returncode, done.stdout) == (125, "")
    assert "no-such-program" in done.stderr
    assert host.submit("--target", "local", "--workdir", "nowhere", "--", "true").returncode == 125
    assert host.is_clean()


def test_replicas_share_the_machine_and_their_lines_are_prefixed(host: Host) -> None:
    done = host.submit(
        *("--target", "local", "--replicas", "2", "--spread", "any"), *("--", "sh", "-c", "echo I am $GPULAYER_REPLICA")
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] I am 0", "[1] I am 1"]
    assert host.is_clean()


def test_a_run_begins_as_clean_as_on_a_daemon(host: Host) -> None:
    """Empty stdin, none of our descriptors, our environment but what identifies it."""
    script = "cat; ls /proc/self/fd | wc -l; echo $GPULAYER_NODE $GPULAYER_REPLICA; echo ${SECRET:-none}; pwd"
    done = host.submit("--target", "local", "--", "sh", "-c", script, env={"SECRET": "s"})
    assert done.returncode == 0, done.stderr
    descriptors, node, secret, directory = done.stdout.splitlines()
    assert int(descriptors) == 4  # and the listing's own
    assert node.endswith(" 0")
    assert secret == "none"
    assert directory.startswith(f"{host.data_dir}/local/")


def test_a_data_directory_may_be_named_by_any_path(host: Host) -> None:
    long = "d" * 120  # beyond what a socket's address holds
    done = host.submit("--target", "local", "--data-dir", f"below/{long}", "--", "pwd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{host.home}/below/{long}/local/")
    done = host.submit("--target", "local", "--data-dir", "~/mine", "--", "pwd")
    assert done.stdout.startswith(f"{host.home}/mine/local/")


def test_a_closed_output_ends_it(host: Host) -> None:
    command = host.start("--target", "local", "--", "sh", "-c", "while echo y; do sleep 0.01; done")
    assert command.stdout is not None
    assert command.stdout.readline() == "y\n"
    command.stdout.close()
    assert command.wait(20) == 128 + 13
    assert host.is_clean()


def test_an_output_without_room_ends_it_with_a_sentence(host: Host) -> None:
    words = [*GPULAYER, "submit", "--target", "local", "--", "sh", "-c", "while echo y; do sleep 0.01; done"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, env=host.env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 125
    assert done.stderr.splitlines()[-1] == "gpulayer: cannot write the output: No space left on device"
    assert host.is_clean()


# --- where it runs ------------------------------------------------------------------------------------------------


def test_without_a_daemon_it_runs_here_and_says_so(host: Host) -> None:
    done = host.submit("--", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert done.stderr.splitlines() == ["no daemon here: runs in the foreground; `gpulayer up` starts one"]


def test_modules_of_the_users_own_are_not_taken_for_those_of_its_node(host: Host) -> None:
    """PYTHONPATH is for the user's programs, and comes before Python's own modules."""
    own = host.home / "project"
    own.mkdir()
    for name in ("secrets", "trio"):
        (own / f"{name}.py").write_text("raise SystemExit('not for gpulayer')")
    done = host.submit("--target", "local", "--", "sh", "-c", "exit 7", env={"PYTHONPATH": str(own)})
    assert done.returncode == 7, done.stderr


def test_a_daemon_that_just_starts_is_waited_for(host: Host) -> None:
    """The first lines of the README at once: `gpulayer up &`, and a submit."""
    host.data_dir.mkdir()
    with open(host.data_dir / "lock", "w") as lock:
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        command = host.start("--", "true")
        assert command.stderr is not None
        assert command.stderr.readline() == f"note: a daemon (pid {os.getpid()}) is starting: waiting for it\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.bind(str(host.data_dir / "gpulayer.sock"))  # and nobody listens: it is asked, all the same
            _, stderr = command.communicate(timeout=20)
    assert command.returncode == 125
    assert "no daemon answers at" in stderr


def test_the_lock_of_a_daemon_that_is_gone_is_no_daemon(host: Host) -> None:
    host.data_dir.mkdir()
    for text in (f"{os.getpid()}\n", "999999999\n", "", "x"):
        (host.data_dir / "lock").write_text(text)
        done = host.submit("--", "sh", "-c", "exit 7")
        assert done.returncode == 7, done.stderr
        assert "is starting" not in done.stderr


def test_no_daemons_path_is_spoken_of(host: Host) -> None:
    done = host.submit("--target", "local", "--", "no-such-program")
    assert done.returncode != 0
    assert "the PATH of the job" in done.stderr
    assert "daemon" not in done.stderr


def test_a_daemon_that_is_named_is_asked(host: Host) -> None:
    done = host.submit("--", "true", env={"GPULAYER_URL": "http://127.0.0.1:1"})
    assert done.returncode == 125
    assert "no daemon answers at http://127.0.0.1:1" in done.stderr
    done = host.submit("--target", "remote", "--service", "--", "true")
    assert done.returncode == 3
    # A daemon that was killed leaves its socket: whoever has one does not want its jobs to run elsewhere.
    host.data_dir.mkdir()
    (host.data_dir / "gpulayer.sock").touch()
    assert host.submit("--service", "--", "true").returncode == 3
    assert not host.directories()


def test_a_daemon_that_runs_is_asked(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    try:
        assert daemon.cli("submit", "--", "true").returncode == 0
        assert daemon.cli("submit", "--target", "local", "--name", "aside", "--", "true").returncode == 0
        assert [job["name"] for job in daemon.cli_json("job", "list", "--all")] == ["true"]
    finally:
        daemon.end()


def test_nobody_would_look_after_a_detached_job(host: Host) -> None:
    done = host.submit("--target", "local", "--detach", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--detach does not go with --target local" in done.stderr
    assert "gpulayer up" in done.stderr
    # Without a daemon, and without having said so, it is the daemon that is missing.
    done = host.submit("--detach", "--", "true")
    assert done.returncode == 3
    assert "start it with: gpulayer up" in done.stderr


def test_a_dry_run_says_where_it_would_go(host_with_gpu: Host) -> None:
    done = host_with_gpu.submit("--target", "local", "--dry-run", "--gpus", "1", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "devices=GPU-a" in done.stdout
    assert host_with_gpu.submit("--target", "local", "--dry-run", "--gpus", "2", "--", "true").returncode == 1
    assert host_with_gpu.is_clean()


def test_what_can_never_run_here_is_said_at_once(host_with_gpu: Host) -> None:
    done = host_with_gpu.submit("--target", "local", "--gpus", "1", "--gpu-model", "B200", "--", "true")
    assert (done.returncode, done.stdout) == (125, "")
    assert "cannot ever run here: " in done.stderr
    assert "A10" in done.stderr
    assert "gpulayer job" not in done.stderr
    done = host_with_gpu.submit("--target", "local", "--service", "--gpus", "2", "--", "true")
    assert done.returncode == 1
    assert "cannot ever run here: " in done.stderr
    done = host_with_gpu.submit("--target", "local", "--service", "--replicas", "2", "--", "true")
    assert done.returncode == 1
    assert "hint: add --spread any" in done.stderr
    assert host_with_gpu.is_clean()


# --- a service ----------------------------------------------------------------------------------------------------


def test_a_service_stays_with_its_log_until_ctrl_c(host: Host) -> None:
    command = host.start("--target", "local", "--service", "--name", "web", "--", *SERVE)
    assert command.stdout is not None
    job_id, endpoint = command.stdout.readline().strip(), command.stdout.readline().strip()
    assert job_id.startswith("j-")
    assert "Directory listing" in get(endpoint)
    said = lines_until(command, '"GET / HTTP/1.1" 200')
    assert f"replica 0: ready at {endpoint}" in said
    interrupt(command)
    stdout, stderr = command.communicate(timeout=20)
    assert command.returncode == 130
    assert stdout == ""
    assert "gpulayer: stopping job web (TERM, KILL after 10s; Ctrl-C again kills it at once)" in stderr
    assert stderr.splitlines()[-1] == "gpulayer: job web was stopped"
    assert refuses(endpoint)
    assert host.is_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_the_end_of_its_terminal_stop_it_in_good_order(host: Host, number: signal.Signals) -> None:
    script = "trap 'echo goodbye; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    command = host.start("--target", "local", "--service", "--no-port", "--", "sh", "-c", script)
    lines_until(command, "up")
    command.send_signal(number)
    _, stderr = command.communicate(timeout=20)
    assert command.returncode == 128 + number
    assert "goodbye" in stderr
    assert host.is_clean()


def test_the_second_ctrl_c_kills_what_does_not_want_to_end(host: Host) -> None:
    for kind in ("batch", "service"):
        words = ("--service", "--no-port") if kind == "service" else ()
        command = host.start("--target", "local", "--stop-grace", "1h", *words, "--", *STUBBORN)
        run = host.wait_for_run()
        interrupt(command)
        lines_until(command, "Ctrl-C again kills it at once")
        assert is_alive(run)
        interrupt(command)
        command.communicate(timeout=20)
        assert command.returncode == 130
        assert not is_alive(run)
        assert host.is_clean()


def test_a_service_that_ends_for_good_says_why(host: Host) -> None:
    script = "echo the cause; exit 7"
    done = host.submit("--target", "local", "--service", "--restart", "never", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the cause" in done.stderr.splitlines()
    assert "exit code 7" in done.stderr.splitlines()[-1]
    assert host.is_clean()
    script = "sleep 2; exit 0"
    words = ("--target", "local", "--service", "--no-port", "--restart", "on_failure")
    done = host.submit(*words, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("j-")
    assert host.is_clean()


def test_a_restart_says_the_new_address(host: Host) -> None:
    command = host.start("--target", "local", "--service", "--", *SERVE)
    assert command.stdout is not None
    first = [command.stdout.readline(), command.stdout.readline()][1].strip()
    os.kill(host.runs()[0], signal.SIGKILL)
    said = lines_until(command, "replica 0: ready at")
    if said[-1].endswith(first):  # that was the one before
        said = lines_until(command, "replica 0: ready at")
    second = said[-1].rpartition(" ")[2]
    assert second != first
    assert "Directory listing" in get(second)
    interrupt(command)
    command.communicate(timeout=20)
    assert host.is_clean()


def test_an_address_that_changed_while_nobody_read_the_first_is_said(host: Host) -> None:
    """The command waits for its stdout to be read, and its service does not wait for that."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    with suppress(BlockingIOError):
        while True:
            os.write(ours, bytes(4096))
    os.set_blocking(ours, True)
    command = subprocess.Popen(
        [*GPULAYER, "submit", "--target", "local", "--service", "--", *SERVE],
        env=host.env,
        stdin=subprocess.DEVNULL,
        stdout=ours,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    os.close(ours)
    host.started.append(command)
    with os.fdopen(theirs) as stdout:
        first = lines_until(command, "replica 0: ready at")[-1].rpartition(" ")[2]
        (directory,) = (host.data_dir / "local").iterdir()
        job = connect(data_dir=directory).job("sh")
        time.sleep(0.5)  # it is at its stdout now
        os.kill(host.runs()[0], signal.SIGKILL)
        wait_for(lambda: job.endpoints() not in ([], [first]), 20)
        stdout.read(65536)
        second = lines_until(command, "replica 0: ready at")[-1].rpartition(" ")[2]
        assert second != first
        interrupt(command)
        command.communicate(timeout=20)
    assert host.is_clean()


def test_a_service_that_keeps_its_other_replicas_stays(host: Host) -> None:
    script = "[ $GPULAYER_REPLICA = 1 ] && exit 3; exec python3 -u -m http.server --bind $HOST $PORT"
    command = host.start(
        *("--target", "local", "--service", "--replicas", "2", "--spread", "any"),
        *("--restart", "never", "--on-replica-end", "keep", "--", "sh", "-c", script),
    )
    assert command.stdout is not None
    endpoint = [command.stdout.readline(), command.stdout.readline()][1].strip()
    assert "Directory listing" in get(endpoint)
    interrupt(command)
    _, stderr = command.communicate(timeout=20)
    assert command.returncode == 130
    assert "replica 1 has ended for good" in stderr
    assert host.is_clean()


def test_a_service_answers_in_json(host: Host) -> None:
    command = host.start("--target", "local", "--service", "--no-port", "--json", "--", "sleep", "300")
    lines_until(command, "ready")
    interrupt(command)
    stdout, _ = command.communicate(timeout=20)
    assert json.loads(stdout)["state"] == "running"


def test_what_takes_longer_than_its_wait_is_stopped(host: Host) -> None:
    done = host.submit("--target", "local", "--wait", "1s", "--", "sh", "-c", "echo begun; sleep 300")
    assert (done.returncode, done.stdout) == (124, "begun\n")
    assert "gpulayer: job sh has not ended after 1s" in done.stderr
    assert "hint: it was stopped" in done.stderr
    # Nobody has.
    assert "cancelled by a user" not in done.stderr
    assert "submit it again" not in done.stderr
    done = host.submit("--target", "local", "--service", "--wait", "1s", "--", "sleep", "300")
    assert (done.returncode, done.stdout) == (124, "")
    assert "is not ready after 1s: replica 0 is starting: nothing listens on" in done.stderr
    assert host.is_clean()
    # That it was ready in time is all that was asked for.
    command = host.start("--target", "local", "--service", "--no-port", "--wait", "3s", "--", "sleep", "300")
    lines_until(command, "ready")
    time.sleep(3)
    assert command.poll() is None
    interrupt(command)
    command.communicate(timeout=20)


# --- nothing is left ----------------------------------------------------------------------------------------------

FAMILY = ("sh", "-c", "setsid sleep 301 & sh -c 'sleep 302' & wait")


def family(host: Host, *words: str) -> subprocess.Popen[str]:
    command = host.start("--target", "local", "--service", "--no-port", *words, "--", *FAMILY)
    wait_for(lambda: len(host.runs()) >= 4, 20)
    return command


def test_a_command_that_is_killed_leaves_nothing(host: Host) -> None:
    command = family(host)
    cgroups = host.cgroups()
    command.kill()
    host.wait_for_nothing()
    assert not host.directories()
    assert not [path for path in cgroups if path.exists()]


def test_a_node_that_is_killed_takes_its_replicas_along(host: Host) -> None:
    command = family(host)
    cgroups = host.cgroups()
    node = host.node()
    os.kill(node, signal.SIGKILL)
    _, stderr = command.communicate(timeout=20)
    assert command.returncode == 1
    assert f"gpulayer: the private node (pid {node}) was killed by signal 9" in stderr
    assert host.is_clean()
    assert not [path for path in cgroups if path.exists()]


def test_both_killed_leave_a_directory_and_the_next_run_removes_it(host: Host) -> None:
    command = family(host)
    cgroups = host.cgroups()
    command.kill()
    os.kill(host.node(), signal.SIGKILL)
    host.wait_for_nothing()
    assert not [path for path in cgroups if path.exists()]
    (left,) = host.directories()
    locked = left / "sandboxes" / "made-by-the-run" / "read-only"
    locked.mkdir(parents=True)
    locked.chmod(0o500)
    locked.parent.chmod(0o500)
    assert host.submit("--target", "local", "--", "sleep", "0.5").returncode == 0
    assert not host.directories()


def test_a_run_that_lost_everybody_is_ended_by_the_next(host: Host) -> None:
    command = host.start("--target", "local", "--", "sh", "-c", "trap '' TERM; sleep 300; true")
    run = host.wait_for_run()
    killed = [host.node(), *host.shims()]
    command.kill()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert is_alive(run)
    assert host.submit("--target", "local", "--", "sleep", "6").returncode == 0
    assert not host.runs()
    assert not host.directories()


def test_a_run_of_which_the_shim_lives_is_left_alone_by_the_next(host: Host) -> None:
    command = host.start("--target", "local", "--stop-grace", "5s", "--", *STUBBORN)
    run = host.wait_for_run()
    node = host.node()
    command.kill()
    os.kill(node, signal.SIGKILL)
    assert host.submit("--target", "local", "--", "sleep", "0.5").returncode == 0
    assert is_alive(run)
    assert len(host.directories()) == 1
    host.wait_for_nothing()
    assert host.submit("--target", "local", "--", "sleep", "0.5").returncode == 0
    assert not host.directories()


def test_ctrl_c_before_anything_runs_leaves_nothing(host: Host) -> None:
    for milliseconds in (50, 150, 250, 400, 600, 800, 1000):
        command = host.start("--target", "local", "--", "sleep", "300")
        time.sleep(milliseconds / 1000)
        interrupt(command)
        _, stderr = command.communicate(timeout=20)
        assert command.returncode in (130, -signal.SIGINT), (milliseconds, stderr)
        host.wait_for_nothing(5)
        # One that was interrupted before it could say where it is may be left to the next.
        assert len(host.directories()) <= 1
    assert host.submit("--target", "local", "--", "sleep", "0.5").returncode == 0
    assert host.is_clean()


def test_a_node_that_is_told_to_end_stops_its_job(host: Host) -> None:
    command = host.start(
        "--target", "local", "--", "sh", "-c", "trap 'echo goodbye; exit 0' TERM; while :; do sleep 0.1; done"
    )
    host.wait_for_run()
    os.kill(host.node(), signal.SIGTERM)
    stdout, stderr = command.communicate(timeout=20)
    assert command.returncode == 125, stderr
    assert stdout == "goodbye\n"
    assert host.is_clean()


# --- devices ------------------------------------------------------------------------------------------------------


def test_a_gpu_that_a_daemon_has_given_away_is_waited_for(tmp_path: Path, host_with_gpu: Host) -> None:
    host = host_with_gpu
    daemon = Daemon(tmp_path, config=NAMED_GPU).start()
    try:
        held = daemon.submit(["sleep", "300"], gpus=1, port=False)
        daemon.wait_ready(held)
        command = host.start("--target", "local", "--gpus", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        said = lines_until(command, "waits: ")
        assert "GPU-a" in said[-1]
        assert not host.runs()
        daemon.cancel(held)
        stdout, _ = command.communicate(timeout=40)
        assert (command.returncode, stdout) == (0, "GPU-a\n")
    finally:
        daemon.end()
    assert host.is_clean()


def test_a_daemon_waits_for_a_gpu_that_a_local_run_has(tmp_path: Path, host_with_gpu: Host) -> None:
    daemon = Daemon(tmp_path, config=NAMED_GPU).start()
    try:
        command = host_with_gpu.start("--target", "local", "--gpus", "1", "--", "sleep", "300")
        host_with_gpu.wait_for_run()
        job = daemon.batch(["true"], gpus=1)
        daemon.wait_replica(
            job, lambda replica: replica["state"] == "waiting" and "GPU-a in use: held by" in replica["reason"]["text"]
        )
        lock = DeviceLocks(tmp_path, host_with_gpu.data_dir).path("GPU-a", is_declared=True)
        assert {holder.command for holder in who_holds(lock)} == {"gpulayer shim", "gpulayer submit --target local"}
        interrupt(command)
        command.communicate(timeout=20)
        assert daemon.wait_ended(job, 40)["state"] == "succeeded"
    finally:
        daemon.end()


def test_a_gpu_that_the_driver_has_lost_is_named_where_it_is_missed(host: Host, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path)
    try:
        fake.fault(1, "lost")
        done = host.submit("--target", "local", "--gpus", "2", "--", "true", env=fake.env())
        assert done.returncode == 125
        assert "cannot ever run here: " in done.stderr
        assert "not detected: GPU 1: the GPU is lost" in done.stderr
    finally:
        fake.remove_locks()


def test_a_gpu_is_free_as_soon_as_command_and_node_were_killed(host_with_gpu: Host) -> None:
    command = host_with_gpu.start("--target", "local", "--gpus", "1", "--", "sleep", "300")
    host_with_gpu.wait_for_run()
    node = host_with_gpu.node()
    command.kill()
    os.kill(node, signal.SIGKILL)
    done = host_with_gpu.submit("--target", "local", "--gpus", "1", "--wait", "20s", "--", "true")
    assert done.returncode == 0, done.stderr


def test_two_local_runs_do_not_share_a_gpu_that_has_no_name(tmp_path: Path) -> None:
    """No daemon has ever run here: what such a GPU is called depends on the node that one would be."""
    for host in _hosts(tmp_path, UNNAMED_GPU):
        first = host.start(
            "--target", "local", "--gpus", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; sleep 300"
        )
        assert first.stdout is not None
        uuid = first.stdout.readline().strip()
        second = host.start("--target", "local", "--gpus", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        lines_until(second, "waits: ")
        interrupt(first)
        first.communicate(timeout=20)
        stdout, _ = second.communicate(timeout=40)
        assert (second.returncode, stdout) == (0, f"{uuid}\n")
        daemon = Daemon(tmp_path, config=UNNAMED_GPU).start()
        try:
            assert daemon.cli_json("status")["nodes"][0]["devices"][0]["uuid"] == uuid
        finally:
            daemon.end()


# --- where it cannot be, and who ------------------------------------------------------------------------------------


def as_nobody(home: Path, *words: str, data_dir: str) -> subprocess.CompletedProcess[str]:
    # The one right that is left to him is to read: the interpreter may lie in root's home.
    rights = ("--inh-caps", "-all,+dac_read_search", "--ambient-caps", "+dac_read_search")
    user = ("setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", *rights)
    return subprocess.run(
        [*user, *GPULAYER, "submit", "--target", "local", *words],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "GPULAYER_CONFIG": str(home / "gpulayer.toml"),
            "GPULAYER_DATA_DIR": data_dir,
        },
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
def test_a_user_without_rights_runs_in_a_directory_of_his_own() -> None:
    home = Path("/tmp") / f"gpulayer-test-{os.getpid()}"
    home.mkdir(mode=0o700)
    try:
        (home / "gpulayer.toml").touch()
        os.chown(home, pwd.getpwnam("nobody").pw_uid, -1)
        done = as_nobody(home, "--", "sh", "-c", "id -un; pwd", data_dir=str(home / "data"))
        assert done.returncode == 0, done.stderr
        user, directory = done.stdout.splitlines()
        assert user == "nobody"
        assert directory.startswith(f"{home}/data/local/")
        assert not list((home / "data" / "local").iterdir())
        done = as_nobody(home, "--", "true", data_dir="/var/lib/gpulayer-of-root/deep")
        assert done.returncode == 125
        assert "cannot make a directory for this run in /var/lib/gpulayer-of-root/deep/local: Permission denied" in (
            done.stderr
        )
        assert "hint: choose a place where you may write with --data-dir" in done.stderr
    finally:
        shutil.rmtree(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_said_in_a_sentence(host: Host) -> None:
    host.data_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(host.data_dir)], check=True)
    try:
        (host.data_dir / "filler").write_bytes(bytes(60 * 1024))
        done = host.submit("--target", "local", "--", "true")
        assert done.returncode == 125
        assert "No space left on device" in done.stderr
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr
        assert host.is_clean()
    finally:
        subprocess.run(["umount", str(host.data_dir)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_job_that_has_filled_its_disk_is_stopped_all_the_same(host: Host) -> None:
    """What it has left no room for is written out of the reserve, without which it would not have been taken on."""
    host.data_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(host.data_dir)], check=True)
    # Its last words stand on another disk.
    filler = (
        "sh",
        "-c",
        f"trap 'echo >> {host.home}/asked; exit' TERM; cat /dev/zero > big; echo full; sleep 300 & wait",
    )
    try:
        command = host.start("--target", "local", "--", *filler)
        assert command.stdout is not None
        assert command.stdout.readline() == "full\n"
        interrupt(command)
        _, stderr = command.communicate(timeout=20)
        assert command.returncode == 130
        assert "job sh was cancelled" in stderr
        assert host.is_clean()
        done = host.submit("--target", "local", "--wait", "1s", "--", *filler)
        assert done.returncode == 124
        assert "has not ended after 1s" in done.stderr
        assert host.is_clean()
        assert (host.home / "asked").read_text() == "\n\n"
    finally:
        subprocess.run(["umount", "-l", str(host.data_dir)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_cannot_be_written_is_said_in_a_sentence(host: Host) -> None:
    host.data_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(host.data_dir)], check=True)
    try:
        done = host.submit("--target", "local", "--", "true")
        assert done.returncode == 125
        assert f"cannot make a directory for this run in {host.data_dir}/local: Read-only file system" in done.stderr
        assert "hint: choose a place where you may write with --data-dir" in done.stderr
    finally:
        subprocess.run(["umount", str(host.data_dir)], check=True)


def test_a_wrong_configuration_is_said_as_the_daemon_says_it(tmp_path: Path) -> None:
    for host in _hosts(tmp_path, "[log]\n"):
        done = host.submit("--target", "local", "--service", "--", "true")
        assert done.returncode == 2
        assert "unknown key 'log'" in done.stderr
        assert "hint: did you mean logs?" in done.stderr


def _hosts(tmp_path: Path, config: str) -> Iterator[Host]:
    yield from _tidied(Host(tmp_path, config))
