"""Real shims, real processes, real sockets."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from structlog.testing import capture_logs

from gpulayer.core.inventory import Inventory
from gpulayer.core.replica.messages import (
    AttemptEffect,
    AttemptEvent,
    Discard,
    FoundAttempt,
    ListenerFound,
    ListenerMissing,
    Note,
    Order,
    ReplicaEffect,
    ReplicaEvent,
    RunExited,
    RunStarted,
    ShimDied,
    StartFailed,
    StartRefused,
    StartRun,
    StopRun,
    TreeGone,
)
from gpulayer.model.ids import JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Accelerator
from gpulayer.model.replica import Assignment, DeviceShare
from gpulayer.runtime import attempt_shell, processes
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, shared_directory
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.shim_link import ShimGone, ShimLink, living_shim
from gpulayer.runtime.supervisor import Supervisor
from gpulayer.runtime.watch import Watch
from gpulayer.shim import notes, tree

NODE = NodeId("n-0123456789abcdef")
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
E = TypeVar("E")

SERVE = "import os,socket,time\ns=socket.create_server((os.environ['HOST'],int(os.environ['PORT'])))\ntime.sleep(300)"
# A child of the run that left its session, ignores TERM, and says its pid.
STUBBORN = (
    "import os,signal,time\n"
    "if os.fork()==0:\n"
    " os.setsid(); signal.signal(15,signal.SIG_IGN)\n"
    " open('child','w').write(str(os.getpid())); time.sleep(300)\n"
    "signal.signal(15,signal.SIG_IGN); time.sleep(300)"
)


def gpu(uuid: str) -> Accelerator:
    return Accelerator(uuid=uuid, kind="cuda", vendor="nvidia", model="H100", memory_mib=81920)


class Daemon:
    """A supervisor with what it told: one life of a daemon. End it, and the shims go on."""

    def __init__(self, data_dir: Path, **options: Any) -> None:
        self.told: Watch[tuple[AttemptEvent, ...]] = Watch(())
        self.devices = Devices(
            inventory=Inventory(declared=[gpu("GPU-1"), gpu("GPU-2")]),
            locks=DeviceLocks(shared_directory(), data_dir),
            assigned=dict,
            changed=lambda: None,
        )
        self.supervisor = Supervisor(
            data_dir=data_dir,
            node_id=NODE,
            node_name="n1",
            advertise="127.0.0.1",
            emit=lambda event: self.told.set((*self.told.value, event)),
            base_env=options.pop("base_env", os.environ),
            devices=self.devices,
            ports=options.pop("ports", (27000, 29999)),
            **options,
        )
        self.found: tuple[FoundAttempt, ...] = ()
        self._scope = trio.CancelScope()

    async def start(self, nursery: trio.Nursery) -> None:
        async def run(task_status: trio.TaskStatus[None]) -> None:
            with self._scope:
                async with trio.open_nursery() as beside:
                    await beside.start(self.devices.run)
                    await self.supervisor.run(task_status)
                    beside.cancel_scope.cancel()

        await nursery.start(run)
        self.found = await self.supervisor.find_attempts()
        self.supervisor.start_events()

    def end(self) -> None:
        self._scope.cancel()

    def do(self, order: Order, effect: ReplicaEffect) -> None:
        self.supervisor.perform(AttemptEffect(attempt=order.assignment.id, order=order, effect=effect))

    def start_run(self, order: Order, run: int = 1, *, restarts: int = 0, failures: int = 0) -> None:
        self.do(order, StartRun(run=run, cause="test", restarts=restarts, failures=failures, restart_serial=0))

    def stop_run(self, order: Order, run: int = 1, *, grace_seconds: float = 5.0) -> None:
        self.do(order, StopRun(run=run, signal="TERM", grace_seconds=grace_seconds, why="test"))

    async def event(self, order: Order, kind: type[E], run: int = 1, *, seconds: float = 10) -> E:
        """The first of this kind about this run, once there is one."""

        def those(told: tuple[AttemptEvent, ...]) -> list[E]:
            mine = [each.event for each in told if each.attempt == order.assignment.id]
            return [each for each in mine if isinstance(each, kind) and run_of(each) == run]

        try:
            with trio.fail_after(seconds):
                return those(await self.told.wait_for(lambda told: bool(those(told))))[0]
        except trio.TooSlowError:
            pytest.fail(f"no {kind.__name__} of run {run}; told: {self.told.value}")

    def reasons(self, order: Order) -> dict[str, str]:
        """What was found instead of its listener, by code."""
        mine = [each.event for each in self.told.value if each.attempt == order.assignment.id]
        return {each.reason.code: each.reason.text for each in mine if isinstance(each, ListenerMissing)}

    def answers(self, order: Order, run: int) -> list[str]:
        """What came of a start."""
        mine = [each.event for each in self.told.value if each.attempt == order.assignment.id]
        return [
            type(each).__name__
            for each in mine
            if isinstance(each, RunStarted | StartFailed | ShimDied) and each.run == run
        ]

    def kinds(self, order: Order) -> list[str]:
        """What was told of it, but for its port."""
        mine = [each.event for each in self.told.value if each.attempt == order.assignment.id]
        return [type(each).__name__ for each in mine if not isinstance(each, ListenerFound | ListenerMissing)]


def run_of(event: ReplicaEvent) -> int:
    return event.exit.run if isinstance(event, RunExited) else getattr(event, "run", 0)


def an_order(*argv: str, kind: Any = "batch", port: bool = False, devices: tuple[str, ...] = (), **spec: Any) -> Order:
    job = JobId("j-" + "".join(random.choices(string.ascii_lowercase, k=10)))
    assignment = Assignment(
        replica=ReplicaId(job, 0),
        attempt=1,
        node=NODE,
        revision=1,
        devices=tuple(DeviceShare(uuid=uuid, milli=1000) for uuid in devices),
    )
    return Order(
        assignment=assignment,
        spec=JobSpec(
            kind=kind, name="test", argv=argv, port=port, restart="always" if kind == "service" else "never", **spec
        ),
        job_name="test",
    )


def python(code: str, **options: Any) -> Order:
    return an_order(sys.executable, "-c", code, **options)


def a_server(**options: Any) -> Order:
    return python(SERVE, kind="service", port=True, **options)


def shim_pid(daemon: Daemon, order: Order) -> int:
    path = daemon.supervisor.sandbox_path(order.assignment.id)
    return int(json.loads((path / "shim.json").read_text())["pid"])


def is_alive(pid: int) -> bool:
    stat = tree.process_stat(pid)
    return stat is not None and not stat.is_zombie


async def until(holds: Callable[[], bool], seconds: float = 10) -> None:
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - processes and files have no event
            await trio.sleep(0.01)


async def child_pid(daemon: Daemon, order: Order) -> int:
    path = daemon.supervisor.sandbox_path(order.assignment.id) / "work" / "child"
    await until(lambda: path.exists() and path.read_text().isdigit())
    return int(path.read_text())


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    _clean_up(tmp_path)


def _clean_up(data_dir: Path) -> None:
    """Ends what a test left: its shims, named by their files and checked, and all that carries its attempts' run
    ids."""
    names, cgroups = set(), set()
    for sandbox in (data_dir / "sandboxes").glob("j-*"):
        names.add(sandbox.name)
        try:
            cgroups.add(json.loads((sandbox / "attempt.json").read_text()).get("cgroup"))
            shim = living_shim(json.loads((sandbox / "shim.json").read_text()), BOOT)
        except (OSError, ValueError):
            continue
        if shim is not None and (stat := tree.process_stat(shim.pid)) is not None and stat.comm.startswith("gpulayer"):
            tree.signal_process(stat, signal.SIGKILL)
    for run_id, members in processes.run_ids().items():
        if run_id.rpartition(".")[0] in names:
            for stat in members:
                tree.signal_process(stat, signal.SIGKILL)
    for cgroup in cgroups - {None}:
        tree.kill_all(lambda: (), cgroup=cgroup)
        tree.remove_cgroup(cgroup)
        tree.remove_cgroup(str(Path(cgroup).parent))


@pytest.fixture
async def daemon(data_dir: Path, nursery: trio.Nursery) -> Daemon:
    made = Daemon(data_dir)
    await made.start(nursery)
    return made


async def test_a_service_starts_listens_is_killed_and_leaves_nothing(daemon: Daemon) -> None:
    order = a_server()
    daemon.start_run(order)
    started = await daemon.event(order, RunStarted)
    assert started.port is not None
    assert 27000 <= started.port <= 29999
    assert started.warning is None
    await daemon.event(order, ListenerFound)
    with socket.create_connection(("127.0.0.1", started.port), timeout=1):
        pass
    os.kill(started.pid, signal.SIGKILL)
    exit = (await daemon.event(order, RunExited)).exit
    assert (exit.signal, exit.code, exit.ended_by) == (signal.SIGKILL, None, "itself")
    await daemon.event(order, TreeGone)
    assert daemon.kinds(order) == ["RunStarted", "RunExited", "TreeGone"]


async def test_an_exit_code_and_the_output_are_kept(daemon: Daemon) -> None:
    order = an_order("sh", "-c", "echo hello; exit 3")
    daemon.start_run(order)
    exit = (await daemon.event(order, RunExited)).exit
    assert exit.code == 3
    await daemon.event(order, TreeGone)
    written = b"".join(path.read_bytes() for path in daemon.supervisor.log_dir(order.assignment.id).iterdir())
    assert b"hello" in written


async def test_a_stranger_on_its_port_is_named(daemon: Daemon) -> None:
    order = an_order("sleep", "300", kind="service", port=True)
    daemon.start_run(order)
    port = (await daemon.event(order, RunStarted)).port
    assert (await daemon.event(order, ListenerMissing)).reason.code == "not_listening"
    with socket.create_server(("127.0.0.1", port or 0)):
        await until(lambda: "port_taken" in daemon.reasons(order))
    text = daemon.reasons(order)["port_taken"]
    assert f"port {port} is held by pid {os.getpid()} (" in text


async def test_a_child_that_listens_elsewhere_is_told_so(daemon: Daemon) -> None:
    code = (
        "import os,socket,time\n"
        "if os.fork(): time.sleep(300)\n"
        "os.setsid(); s=socket.create_server(('127.0.0.1',0)); open('child','w').write(str(s.getsockname()[1]))\n"
        "time.sleep(300)"
    )
    order = python(code, kind="service", port=True)
    daemon.start_run(order)
    port = (await daemon.event(order, RunStarted)).port
    actual = await child_pid(daemon, order)
    await until(lambda: "listens_elsewhere" in daemon.reasons(order))
    assert daemon.reasons(order)["listens_elsewhere"] == f"listens on 127.0.0.1:{actual} instead of $PORT {port}"


async def test_each_run_has_a_new_port_and_the_old_one_is_free(daemon: Daemon) -> None:
    """Else a client of the old run is answered by another, and a new run fails on what the old one still has."""
    order = a_server()
    ports = []
    for run in range(1, 5):
        daemon.start_run(order, run, restarts=run - 1)
        ports.append((await daemon.event(order, RunStarted, run)).port)
        await daemon.event(order, ListenerFound, run)
        daemon.stop_run(order, run)
        await daemon.event(order, TreeGone, run)
    assert len(set(ports)) == 4
    assert daemon.supervisor._services.ports._held == {}


async def test_a_stubborn_tree_is_gone_after_its_grace(daemon: Daemon) -> None:
    order = python(STUBBORN)
    daemon.start_run(order)
    main = (await daemon.event(order, RunStarted)).pid
    child = await child_pid(daemon, order)
    daemon.stop_run(order, grace_seconds=0.3)
    exit = (await daemon.event(order, RunExited)).exit
    assert exit.ended_by == "stop:test"
    await daemon.event(order, TreeGone)
    assert not is_alive(main)
    assert not is_alive(child)


async def test_a_stop_right_after_a_start_is_heard(daemon: Daemon) -> None:
    order = an_order("sleep", "300")
    daemon.start_run(order)
    daemon.stop_run(order)
    await daemon.event(order, TreeGone)
    assert daemon.kinds(order) == ["RunStarted", "RunExited", "TreeGone"]


@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_what_a_killed_shim_leaves_is_swept(data_dir: Path, nursery: trio.Nursery, mode: str) -> None:
    """Also a process that left the session, and one that cleared its environment."""
    daemon = Daemon(data_dir, cgroups=mode)
    await daemon.start(nursery)
    order = python(STUBBORN, stop_grace_seconds=0.2)
    daemon.start_run(order)
    main = (await daemon.event(order, RunStarted)).pid
    child = await child_pid(daemon, order)
    os.kill(shim_pid(daemon, order), signal.SIGKILL)
    await daemon.event(order, ShimDied)
    await daemon.event(order, TreeGone)
    assert not is_alive(main)
    assert not is_alive(child)
    assert daemon.kinds(order) == ["RunStarted", "ShimDied", "TreeGone"]
    # And the next run of the same attempt gets a new shim.
    daemon.start_run(order, 2)
    await daemon.event(order, RunStarted, 2)


async def test_a_child_without_environment_is_swept_with_the_rest(data_dir: Path, nursery: trio.Nursery) -> None:
    daemon = Daemon(data_dir, cgroups="off")
    await daemon.start(nursery)
    order = an_order("sh", "-c", "env -i sleep 300 & echo $! > child.new; mv child.new child; sleep 300")
    daemon.start_run(order)
    await daemon.event(order, RunStarted)
    path = daemon.supervisor.sandbox_path(order.assignment.id) / "work" / "child"
    await until(path.exists)
    child = int(path.read_text())
    os.kill(shim_pid(daemon, order), signal.SIGKILL)
    await daemon.event(order, TreeGone)
    assert not is_alive(child)


async def test_a_shim_that_dies_between_runs_is_replaced_unnoticed(daemon: Daemon) -> None:
    order = an_order("true")
    daemon.start_run(order)
    await daemon.event(order, TreeGone)
    first = shim_pid(daemon, order)
    os.kill(first, signal.SIGKILL)
    await until(lambda: not is_alive(first))
    daemon.start_run(order, 2)
    await daemon.event(order, TreeGone, 2)
    assert shim_pid(daemon, order) != first
    assert daemon.kinds(order) == ["RunStarted", "RunExited", "TreeGone"] * 2


async def test_a_shim_that_hangs_is_connected_to_again(data_dir: Path, nursery: trio.Nursery) -> None:
    """SIGSTOP at the worst time: while a new daemon says hello. It is not taken for dead, and nothing is missed."""
    daemon = Daemon(data_dir)
    await daemon.start(nursery)
    order = an_order("sleep", "300")
    daemon.start_run(order)
    main = (await daemon.event(order, RunStarted)).pid
    shim = shim_pid(daemon, order)
    daemon.end()
    os.kill(shim, signal.SIGSTOP)
    try:
        second = Daemon(data_dir)
        await second.start(nursery)
        (found,) = second.found
        assert found.shim_alive
        assert found.last is not None
        assert found.last.alive
        os.kill(main, signal.SIGKILL)
    finally:
        os.kill(shim, signal.SIGCONT)
    assert (await second.event(order, RunExited)).exit.signal == signal.SIGKILL
    await second.event(order, TreeGone)


async def test_a_shim_that_does_not_answer_a_stop_is_ended_with_its_tree(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_shell, "STOP_ANSWER_SECONDS_MAX", 0.2)
    order = an_order("sleep", "300")
    daemon.start_run(order)
    main = (await daemon.event(order, RunStarted)).pid
    os.kill(shim_pid(daemon, order), signal.SIGSTOP)
    daemon.stop_run(order)
    await daemon.event(order, TreeGone)
    assert not is_alive(main)
    assert daemon.kinds(order) == ["RunStarted", "ShimDied", "TreeGone"]


async def test_a_start_that_hangs_is_broken_off(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim is stopped before it can answer: neither a pid nor a failure comes, and yet the start has an end."""
    monkeypatch.setattr(attempt_shell, "START_SECONDS_MAX", 0.2)
    monkeypatch.setattr(attempt_shell, "STOP_ANSWER_SECONDS_MAX", 0.2)
    order = an_order("true")
    daemon.start_run(order)
    await daemon.event(order, TreeGone)
    os.kill(shim_pid(daemon, order), signal.SIGSTOP)
    daemon.start_run(order, 2)
    await daemon.event(order, StartFailed, 2)
    daemon.start_run(order, 3)
    await daemon.event(order, TreeGone, 3)


async def test_the_next_daemon_adopts_what_the_last_one_started(data_dir: Path, nursery: trio.Nursery) -> None:
    """P8: same pids, same port, nothing restarted; and stop still works."""
    first = Daemon(data_dir)
    await first.start(nursery)
    order = a_server()
    first.start_run(order, 1)
    await first.event(order, ListenerFound)
    first.stop_run(order)
    await first.event(order, TreeGone)
    first.start_run(order, 2, restarts=1, failures=1)
    started = await first.event(order, RunStarted, 2)
    await first.event(order, ListenerFound, 2)
    first.end()
    await trio.sleep(0.1)

    second = Daemon(data_dir)
    await second.start(nursery)
    (found,) = second.found
    assert found.attempt == order.assignment.id
    assert found.shim_alive
    assert found.first_started_seconds_ago is not None
    last = found.last
    assert last is not None
    assert (last.run, last.pid, last.port, last.alive, last.gone) == (2, started.pid, started.port, True, False)
    assert last.restarts == 1
    assert 0 < last.started_seconds_ago < 30
    await second.event(order, ListenerFound, 2)
    assert second.kinds(order) == []
    assert is_alive(started.pid)
    second.stop_run(order, 2)
    await second.event(order, TreeGone, 2)
    assert not is_alive(started.pid)


async def test_an_exit_while_no_daemon_is_there_is_found(data_dir: Path, nursery: trio.Nursery) -> None:
    first = Daemon(data_dir)
    await first.start(nursery)
    order = an_order("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit 7")
    first.start_run(order)
    main = (await first.event(order, RunStarted)).pid
    first.end()
    (data_dir / "sandboxes" / str(order.assignment.id) / "work" / "go").touch()
    await until(lambda: not is_alive(main))
    await trio.sleep(0.1)
    second = Daemon(data_dir)
    await second.start(nursery)
    last = second.found[0].last
    assert last is not None
    assert last.exit is not None
    assert (last.alive, last.gone, last.exit.code, last.exit.ended_by) == (False, True, 7, "itself")
    second.do(order, Discard())
    await until(lambda: not (data_dir / "sandboxes" / str(order.assignment.id) / "shim.sock").exists())


@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_leftovers_of_a_shim_killed_while_no_daemon_was_there(
    data_dir: Path, nursery: trio.Nursery, mode: str
) -> None:
    first = Daemon(data_dir, cgroups=mode)
    await first.start(nursery)
    order = python(STUBBORN, stop_grace_seconds=0.2)
    first.start_run(order)
    main = (await first.event(order, RunStarted)).pid
    child = await child_pid(first, order)
    first.end()
    os.kill(shim_pid(first, order), signal.SIGKILL)
    second = Daemon(data_dir, cgroups=mode)
    await second.start(nursery)
    (found,) = second.found
    assert not found.shim_alive
    assert found.last is not None
    assert found.last.exit is not None
    assert (found.last.alive, found.last.gone) == (False, False)
    assert found.last.exit.ended_by == "supervisor_killed"
    await second.event(order, TreeGone)
    assert not is_alive(main)
    assert not is_alive(child)


async def test_after_a_reboot_a_run_without_a_note_was_interrupted(data_dir: Path, nursery: trio.Nursery) -> None:
    order = an_order("sleep", "300")
    path = Path(data_dir / "sandboxes" / str(order.assignment.id))
    (path / "runs").mkdir(parents=True)
    (path / "attempt.json").write_text("{}")
    (path / "shim.json").write_text(json.dumps({"pid": os.getpid(), "start_time": 1, "boot_id": "another"}))
    runs_fd = os.open(path / "runs", os.O_RDONLY)
    note = {"restarts": 2, "failures": 1}
    marker = {"run": 3, "pid": os.getpid(), "start_time": 1, "boot_id": "another", "started_at_utc": 1.0, "note": note}
    os.close(notes.create(runs_fd, 3, marker))
    os.close(runs_fd)
    daemon = Daemon(data_dir)
    await daemon.start(nursery)
    (found,) = daemon.found
    assert not found.shim_alive
    assert found.last is not None
    assert found.last.exit is not None
    assert found.last.exit.ended_by == "interrupted"
    assert (found.last.run, found.last.restarts, found.last.failures, found.last.gone) == (3, 2, 1, True)


@pytest.fixture
def stranger() -> Iterator[tree.ProcessStat]:
    process = subprocess.Popen(["sleep", "300"])
    stat = tree.process_stat(process.pid)
    assert stat is not None
    yield stat
    assert process.poll() is None, "it was killed"
    process.kill()
    process.wait()


@pytest.mark.parametrize("off_by", [1, 0])
async def test_a_pid_that_belongs_to_another_program_is_left_alone(
    data_dir: Path, nursery: trio.Nursery, stranger: tree.ProcessStat, off_by: int
) -> None:
    """shim.json and the marker name a living stranger; once even with its start time, and with a socket that
    answers."""
    order = an_order("sleep", "300")
    path = Path(data_dir / "sandboxes" / str(order.assignment.id))
    (path / "runs").mkdir(parents=True)
    (path / "attempt.json").write_text("{}")
    shim = {"pid": stranger.pid, "start_time": stranger.start_time - off_by, "boot_id": BOOT}
    (path / "shim.json").write_text(json.dumps(shim))
    runs_fd = os.open(path / "runs", os.O_RDONLY)
    marker = {"run": 1, "boot_id": BOOT, "pid": stranger.pid, "start_time": stranger.start_time - 1}
    os.close(notes.create(runs_fd, 1, marker))
    os.close(runs_fd)
    with socket.socket(socket.AF_UNIX) as listener:
        directory_fd = os.open(path, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory_fd}/shim.sock")
        os.close(directory_fd)
        listener.listen()
        daemon = Daemon(data_dir)
        await daemon.start(nursery)
        (found,) = daemon.found
        assert not found.shim_alive
        assert found.last is not None
        assert found.last.gone
        await trio.sleep(0.2)
    assert is_alive(stranger.pid)


async def test_the_environment_is_what_it_should_be_and_nothing_else(data_dir: Path, nursery: trio.Nursery) -> None:
    base = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/root",
        "LC_TIME": "C",
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": "1",
        "GPULAYER_TOKEN": "secret",
        "GPULAYER_DATA_DIR": "/x",
        "AWS_SECRET": "x",
    }
    daemon = Daemon(data_dir, base_env=base)
    await daemon.start(nursery)
    order = an_order(
        "env",
        kind="service",
        port=True,
        devices=("GPU-1", "GPU-2"),
        replicas=3,
        env=(
            ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),
            ("HOME", "/home/me"),
        ),
    )
    daemon.start_run(order)
    started = await daemon.event(order, RunStarted)
    await daemon.event(order, TreeGone)
    written = b"".join(path.read_bytes() for path in daemon.supervisor.log_dir(order.assignment.id).iterdir())
    lines = written[written.index(b"PATH=") :] if b"PATH=" in written else b""
    sandbox = str(daemon.supervisor.sandbox_path(order.assignment.id))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/home/me",
        "LC_TIME": "C",
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "PYTHONUNBUFFERED": "1",
        "HOST": "127.0.0.1",
        "PORT": str(started.port),
        "GPULAYER_JOB_ID": order.assignment.replica.job,
        "GPULAYER_JOB_NAME": "test",
        "GPULAYER_REPLICA": "0",
        "GPULAYER_REPLICAS": "3",
        "GPULAYER_NODE": "n1",
        "GPULAYER_SANDBOX": sandbox,
    }
    found = dict(line.split("=", 1) for line in lines.decode("utf-8", "replace").splitlines() if "=" in line[:40])
    run_id = found.pop("GPULAYER_RUN_ID")
    assert run_id.startswith(f"{order.assignment.id}.1-")
    assert {key: found.get(key) for key in environment} == environment
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "GPULAYER_TOKEN", "GPULAYER_DATA_DIR", "AWS_SECRET"} & set(found)


async def test_an_order_that_is_refused_at_once_is_no_trouble_with_a_log(nursery: trio.Nursery, data_dir: Path) -> None:
    """It has no sandbox, and so no log; each refusal was two warnings, the second about a missing directory."""
    daemon = Daemon(data_dir)
    await daemon.start(nursery)
    order = an_order("true", devices=("GPU-3",))
    with capture_logs() as logged:
        daemon.start_run(order)
        refused = await daemon.event(order, StartRefused)
        daemon.do(order, Note(text="it waits to be placed again"))
        daemon.do(order, Discard())
        await until(lambda: order.assignment.id not in daemon.supervisor._attempts)
    assert "GPU-3 is not a device of this node" in refused.reason.text
    assert [each["event"] for each in logged if each["log_level"] == "warning"] == ["run.refused"]
    assert not daemon.supervisor.sandbox_path(order.assignment.id).exists()
    daemon.end()


@pytest.mark.parametrize(
    ("argv", "spec", "code"),
    [
        (("no-such-program-here",), {}, "bad_command"),
        (("./nothing",), {}, "bad_command"),
        (("true",), {"workdir": "/no/such/dir"}, "bad_workdir"),
    ],
)
async def test_a_start_that_cannot_be_says_why(
    daemon: Daemon, argv: tuple[str, ...], spec: dict[str, Any], code: str
) -> None:
    order = an_order(*argv, **spec)
    daemon.start_run(order)
    reason = (await daemon.event(order, StartFailed)).reason
    assert reason.code == code
    assert reason.text
    assert reason.hint
    # The number is used up, the attempt is not.
    daemon.start_run(order, 2)
    await daemon.event(order, StartFailed, 2)
    daemon.do(order, Discard())
    await until(lambda: order.assignment.id not in daemon.supervisor._attempts)


async def test_a_working_directory_removed_by_hand_comes_back(daemon: Daemon) -> None:
    order = an_order("pwd")
    daemon.start_run(order)
    await daemon.event(order, TreeGone)
    work = daemon.supervisor.sandbox_path(order.assignment.id) / "work"
    work.rmdir()
    daemon.start_run(order, 2)
    assert (await daemon.event(order, RunExited, 2)).exit.code == 0
    assert work.is_dir()


async def test_without_a_free_port_nothing_is_started(data_dir: Path, nursery: trio.Nursery) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        daemon = Daemon(data_dir, ports=(port, port))
        await daemon.start(nursery)
        order = a_server()
        daemon.start_run(order)
        assert (await daemon.event(order, StartFailed)).reason.code == "port_taken"


async def test_discard_lets_the_shim_go_and_keeps_the_log(daemon: Daemon) -> None:
    order = an_order("echo", "kept")
    daemon.start_run(order)
    await daemon.event(order, TreeGone)
    shim = shim_pid(daemon, order)
    content = json.loads((daemon.supervisor.sandbox_path(order.assignment.id) / "attempt.json").read_text())
    daemon.do(order, Note(text="the last word"))
    daemon.do(order, Discard())
    await until(lambda: not is_alive(shim))
    await until(lambda: order.assignment.id not in daemon.supervisor._attempts)
    written = b"".join(path.read_bytes() for path in daemon.supervisor.log_dir(order.assignment.id).iterdir())
    assert b"kept" in written
    assert b"the last word" in written
    await until(lambda: content["cgroup"] is None or not Path(content["cgroup"]).exists())


async def test_a_line_said_before_there_is_a_shim_is_not_lost(daemon: Daemon) -> None:
    order = an_order("true")
    daemon.do(order, Note(text="before the start"))
    daemon.start_run(order)
    await daemon.event(order, TreeGone)
    written = b"".join(path.read_bytes() for path in daemon.supervisor.log_dir(order.assignment.id).iterdir())
    assert b"before the start" in written


async def test_a_spawner_that_was_killed_is_replaced(daemon: Daemon) -> None:
    first, second = an_order("true"), an_order("true")
    daemon.start_run(first)
    await daemon.event(first, TreeGone)
    spawner = daemon.supervisor._services.spawner.pid
    assert spawner is not None
    os.kill(spawner, signal.SIGKILL)
    await trio.sleep(0.05)
    daemon.start_run(second)
    await daemon.event(second, TreeGone)
    assert daemon.supervisor._services.spawner.pid != spawner


async def test_a_stop_of_what_is_not_there_is_answered(daemon: Daemon) -> None:
    order = an_order("true")
    daemon.stop_run(order, 5)
    await daemon.event(order, TreeGone, 5)


async def test_many_are_adopted_in_well_under_a_second(data_dir: Path, nursery: trio.Nursery) -> None:
    first = Daemon(data_dir)
    await first.start(nursery)
    orders = [an_order("sleep", "300") for _ in range(50)]
    began = time.monotonic()
    for order in orders:
        first.start_run(order)
    pids = {order.assignment.id: (await first.event(order, RunStarted)).pid for order in orders}
    print(f"50 starts: {time.monotonic() - began:.3f} s")
    first.end()
    await trio.sleep(0.1)
    began = time.monotonic()
    second = Daemon(data_dir)
    await second.start(nursery)
    took = time.monotonic() - began
    print(f"50 adopted: {took:.3f} s")
    assert {found.attempt: found.last.pid for found in second.found if found.last is not None} == pids
    assert took < 2.0


async def test_what_happens_while_a_daemon_looks_around_is_not_missed(data_dir: Path, nursery: trio.Nursery) -> None:
    """Between a shim's hello and the end of find_attempts() its run may exit, or the shim itself be killed."""
    first = Daemon(data_dir)
    await first.start(nursery)
    exits, orphaned = an_order("sleep", "300"), an_order("sleep", "300")
    pids = {}
    for order in (exits, orphaned):
        first.start_run(order)
        pids[order] = (await first.event(order, RunStarted)).pid
    first.end()
    await trio.sleep(0.1)

    second = Daemon(data_dir)
    greet = second.supervisor._greet

    async def greet_and_kill(*args: Any) -> None:
        await greet(*args)
        if args[0].attempt == exits.assignment.id:
            os.kill(pids[exits], signal.SIGKILL)
        else:
            os.kill(args[0].shim.pid, signal.SIGKILL)
        await trio.sleep(0.5)

    second.supervisor._greet = greet_and_kill  # type: ignore[assignment, method-assign]
    await second.start(nursery)
    assert all(found.last is not None and found.last.alive for found in second.found)
    assert (await second.event(exits, RunExited)).exit.signal == signal.SIGKILL
    await second.event(exits, TreeGone)
    await second.event(orphaned, TreeGone)
    assert second.kinds(orphaned) == ["ShimDied", "TreeGone"]
    assert not is_alive(pids[orphaned])


async def test_a_shim_that_dies_just_before_a_start_is_answered_for(daemon: Daemon) -> None:
    """Each StartRun has exactly one answer, whenever the shim is killed."""
    for delay_seconds in (0.0, 0.002, 0.005, 0.01, 0.02):
        order = an_order("sleep", "300")
        daemon.start_run(order)
        await daemon.event(order, RunStarted)
        daemon.stop_run(order)
        await daemon.event(order, TreeGone)
        daemon.do(order, Note(text="a line"))
        daemon.start_run(order, 2)
        await trio.sleep(delay_seconds)
        os.kill(shim_pid(daemon, order), signal.SIGKILL)
        await until(lambda order=order: bool(daemon.answers(order, 2)))  # type: ignore[misc]
        await trio.sleep(0.3)
        answers = daemon.answers(order, 2)
        assert answers in (["StartFailed"], ["RunStarted", "ShimDied"], ["ShimDied"], ["RunStarted"]), answers
        if "RunStarted" in answers or "ShimDied" in answers:
            daemon.stop_run(order, 2)
            await daemon.event(order, TreeGone, 2)


async def test_last_words_that_cannot_be_written_do_not_end_the_daemon(daemon: Daemon) -> None:
    """A full disk had kept even the directory of its log from being made; then the job was cancelled."""
    order = an_order("true")
    path = daemon.supervisor.sandbox_path(order.assignment.id)
    path.mkdir(parents=True)
    (path / "logs").write_text("in the way")
    daemon.do(order, Note(text="ended, cancelled"))
    daemon.do(order, Discard())
    other = an_order("true")
    daemon.start_run(other)
    assert (await daemon.event(other, RunExited)).exit.code == 0


async def test_a_shim_that_was_made_and_never_connected_to_goes_with_its_attempt(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of descriptors a start failed after its shim was made; the job was cancelled, and the shim stayed."""
    order = an_order("true")

    async def refuse(*_: object) -> ShimLink:
        raise ShimGone("no descriptor left")

    with monkeypatch.context() as patched:
        patched.setattr(ShimLink, "connect", refuse)
        daemon.start_run(order)
        assert (await daemon.event(order, StartFailed)).reason.code == "spawn_failed"
    pid = shim_pid(daemon, order)
    assert is_alive(pid)
    daemon.do(order, Discard())
    await until(lambda: not is_alive(pid))


async def test_an_old_sandbox_is_discarded_without_a_walk_through_proc(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start a daemon discards every kept sandbox of an ended job, 10,000 of them: what shims live it has looked
    up once for all."""
    order = an_order("true")
    (daemon.supervisor.sandbox_path(order.assignment.id)).mkdir(parents=True)
    (daemon.supervisor.sandbox_path(order.assignment.id) / "shim.lock").touch()
    monkeypatch.setattr(attempt_shell, "lock_holders", None)
    daemon.do(order, Discard())
    await until(lambda: order.assignment.id not in daemon.supervisor._attempts)


async def test_a_shim_that_does_not_answer_goes_with_all_that_hangs_below_it(
    data_dir: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: what had left its session and cleared its environment could not be found once the shim was dead."""
    monkeypatch.setattr(attempt_shell, "STOP_ANSWER_SECONDS_MAX", 0.2)
    daemon = Daemon(data_dir, cgroups="off")
    await daemon.start(nursery)
    order = python(
        "import os,time\n"
        "if os.fork()==0:\n"
        " os.setsid()\n"
        " if os.fork(): os._exit(0)\n"
        " os.execve('/bin/sh', ['sh', '-c', 'printf %s $$ >child; cd /; exec sleep 300'], {})\n"
        "os.wait(); time.sleep(300)"
    )
    daemon.start_run(order)
    await daemon.event(order, RunStarted)
    child = await child_pid(daemon, order)
    os.kill(shim_pid(daemon, order), signal.SIGSTOP)
    daemon.stop_run(order, grace_seconds=0.1)
    await daemon.event(order, TreeGone)
    assert not is_alive(child)
