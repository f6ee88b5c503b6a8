"""Who outlives whom: spawner, shim, daemon and run. P8, and what happens without a daemon."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpulayer import shim
from gpulayer.shim import notes, tree
from gpulayer.shim import shim as shim_module
from tests.shim.conftest import Spawner

F_OFD_SETLK = 37


def status_of(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(field + ":"))


def has_ended(pid: int) -> bool:
    found = tree.process_stat(pid)
    return found is None or found.is_zombie


def test_a_shim_outlives_its_spawner_and_its_clients(attempt: Any, spawner: Any, connect: Any) -> None:
    started = attempt.shell("sleep 600")
    spawner.process.kill()
    spawner.process.wait()
    attempt.client.close()
    attempt.client = connect(attempt.directory)
    assert attempt.client.ask("hello")["run"]["pid"] == started["pid"]
    assert status_of(attempt.spawned["pid"], "PPid") != str(spawner.process.pid)


def test_the_spawner_ends_when_the_daemons_end_is_closed_and_leaves_no_zombies(new_attempt: Any, spawner: Any) -> None:
    first, second = new_attempt(), new_attempt()
    assert tree.children(spawner.process.pid) == []
    spawner.close()
    assert first.client.ask("hello")["ok"]
    assert second.client.ask("hello")["ok"]


@pytest.fixture
def tether() -> Iterator[tuple[Spawner, Callable[[], None]]]:
    """A spawner whose shims are tethered, and what ends the tether."""
    ours_read, ours_write = os.pipe()
    spawner = Spawner(tether=ours_read)
    os.close(ours_read)
    yield spawner, lambda: os.close(ours_write)
    spawner.close()


def test_a_tethered_shim_stops_its_run_and_ends_when_the_tether_does(
    new_attempt: Any, tether: tuple[Spawner, Callable[[], None]], eventually: Any
) -> None:
    spawner, end = tether
    attempt = new_attempt(spawner=spawner)
    script = "trap 'echo goodbye; exit 0' TERM; setsid sleep 600 & echo >begun; while :; do sleep 0.05; done"
    attempt.shell(script)
    attempt.file("begun")
    end()
    exited = attempt.client.wait_for("exited")
    assert (exited["code"], exited["ended_by"]) == (0, "shim_terminated")
    eventually(lambda: has_ended(attempt.spawned["pid"]))
    assert attempt.processes() == []
    assert not (attempt.directory / "shim.sock").exists()
    text = b"".join(path.read_bytes() for path in sorted((attempt.directory / "logs").iterdir()))
    assert b"the daemon that it belongs to has ended: stopping the run" in text
    assert b"goodbye" in text


def test_a_tethered_shim_without_a_run_ends_too(
    new_attempt: Any, tether: tuple[Spawner, Callable[[], None]], eventually: Any
) -> None:
    """The daemon was killed between making it and starting something: nobody would ever ask it again."""
    spawner, end = tether
    fresh, used = new_attempt(spawner=spawner), new_attempt(spawner=spawner)
    used.shell("exit 0")
    used.client.wait_for("gone")
    end()
    for each in (fresh, used):
        eventually(lambda each=each: has_ended(each.spawned["pid"]))


def test_no_run_has_the_tether(new_attempt: Any, tether: tuple[Spawner, Callable[[], None]]) -> None:
    """A run that kept it open would keep its siblings alive."""
    spawner, end = tether
    attempt = new_attempt(spawner=spawner)
    attempt.shell("ls /proc/self/fd | wc -l >count.new; mv count.new count")
    assert attempt.file("count").strip() == "4"
    end()


def test_the_spawner_answers_bad_requests_and_goes_on(spawner: Any, new_attempt: Any, tmp_path: Path) -> None:
    codes = {
        b"not json": "bad_request",
        b"[]": "bad_request",
        b"[" * 100_000: "bad_request",
        b'{"op": "dance"}': "unknown_op",
        b'{"op": "spawn"}': "bad_request",
        b'{"op": "spawn", "dir": "relative"}': "bad_request",
        b'{"op": "spawn", "dir": "/no/such/place"}': "shim_failed",
        b'{"op": "spawn", "dir": "/tmp", "nofile": 7}': "bad_request",
        json.dumps({"op": "spawn", "dir": str(tmp_path)}).encode(): "bad_attempt",
    }
    for request, code in codes.items():
        answer = spawner.send(request)
        assert answer["ok"] is False
        assert answer["error"]["code"] == code, answer
        assert answer["error"]["message"]
    for content in ("{", "[]", '{"log": 3}', '{"log": {"max_bytes": 1, "keep": 1}, "stop_signal": "NONE"}'):
        (tmp_path / "attempt.json").write_text(content)
        assert spawner.spawn(tmp_path)["error"]["code"] == "bad_attempt"
    assert new_attempt().client.ask("hello")["ok"]


def test_requests_are_answered_in_order(spawner: Any, attempt: Any, new_attempt: Any) -> None:
    other = new_attempt()
    for index, each in enumerate((attempt, other, attempt)):
        spawner.socket.send(json.dumps({"op": "spawn", "id": index, "dir": str(each.directory)}).encode())
    assert [spawner.receive()["id"] for _ in range(3)] == [0, 1, 2]


def test_a_second_shim_in_a_directory_is_refused_as_long_as_the_first_lives(
    attempt: Any, spawner: Any, eventually: Any, connect: Any
) -> None:
    assert spawner.spawn(attempt.directory)["error"]["code"] == "already_running"
    assert attempt.client.ask("hello")["ok"]
    os.kill(attempt.spawned["pid"], signal.SIGKILL)
    eventually(lambda: has_ended(attempt.spawned["pid"]))
    assert (attempt.directory / "shim.sock").exists()  # stale, and replaced
    attempt.spawned = spawner.spawn(attempt.directory)
    assert attempt.spawned["ok"]
    assert connect(attempt.directory).ask("hello")["pid"] == attempt.spawned["pid"]


def test_the_next_shim_may_start_as_soon_as_quit_is_answered(attempt: Any, spawner: Any) -> None:
    for _ in range(5):
        assert attempt.client.ask("quit")["ok"]
        attempt.spawned = spawner.spawn(attempt.directory)
        assert attempt.spawned["ok"], attempt.spawned
        attempt.client.close()
        attempt.client = type(attempt.client)(attempt.directory)


def test_a_shim_says_who_it_is(attempt: Any) -> None:
    pid = attempt.spawned["pid"]
    own = tree.process_stat(pid)
    assert own is not None
    assert (own.comm, own.session, own.start_time) == ("gpulayer-shim", pid, attempt.spawned["start_time"])
    published = json.loads((attempt.directory / "shim.json").read_text())
    hello = attempt.client.ask("hello")
    for key in ("pid", "start_time", "boot_id", "protocol", "version"):
        assert published[key] == hello[key]
    assert hello["protocol"] == 1
    assert hello["attempt"] == {
        "job_id": "j-test", "job_name": "test", "replica": 0, "attempt": 1, "node_id": "n-1"
    }  # fmt: skip


def test_a_shim_keeps_nothing_of_its_spawner(attempt: Any, spawner: Any) -> None:
    links = {os.readlink(f"/proc/{attempt.spawned['pid']}/fd/{fd}") for fd in ("0", "1", "2")}
    assert links == {"/dev/null"}
    descriptors, own = open_files(spawner.process.pid), open_files(attempt.spawned["pid"])
    assert {name for name in descriptors & own if name.startswith(("socket:", "pipe:"))} == set()
    assert os.readlink(f"/proc/{attempt.spawned['pid']}/cwd") == "/"


def open_files(pid: int) -> set[str]:
    """What its descriptors lead to; of one that it closes meanwhile, nothing."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def test_a_long_data_directory_is_no_obstacle(new_attempt: Any, tmp_path: Path) -> None:
    directory = tmp_path / ("long-" * 30) / "sandbox"
    assert len(str(directory)) > 150
    assert new_attempt(directory=directory).client.ask("hello")["ok"]


def test_files_are_for_their_owner_only(attempt: Any) -> None:
    attempt.shell("true")
    attempt.client.wait_for("gone")
    for path in attempt.directory.rglob("*"):
        if "work" not in path.parts and path.name not in ("attempt.json", "work"):
            assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path


def test_a_user_of_another_id_is_not_answered(attempt: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    directory_fd = os.open(attempt.directory, os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"/proc/self/fd/{directory_fd}/shim.sock")
                client.sendall(b'{"op": "hello"}\n')
                os._exit(1 if client.recv(1) else 0)
        except OSError:
            os._exit(0)
    os.close(directory_fd)
    assert os.waitpid(pid, 0)[1] == 0
    assert attempt.client.ask("hello")["ok"]


def test_the_timeout_is_kept_without_a_daemon(new_attempt: Any, spawner: Any, connect: Any, eventually: Any) -> None:
    attempt = new_attempt(timeout_seconds=0.4, stop_grace_seconds=0.2)
    attempt.shell("trap '' TERM; while :; do sleep 0.05; done")
    attempt.client.close()
    spawner.close()
    run_file = str(attempt.directory / "runs" / "000001")

    def exit_note() -> Any:
        record = notes.read(run_file)
        return record and record.exit

    note = eventually(exit_note)
    assert note["ended_by"] == "timeout"
    assert note["signal"] == signal.SIGKILL
    assert 0.55 < note["uptime_seconds"] < 3
    attempt.client = connect(attempt.directory)
    attempt.runs = 1
    assert attempt.shell("true")["error"]["code"] == "timed_out"


def test_the_timeout_counts_from_the_first_run_of_the_attempt_whatever_shim_it_had(
    new_attempt: Any, spawner: Any, connect: Any, eventually: Any
) -> None:
    attempt = new_attempt(timeout_seconds=1.0)
    assert attempt.start("no-such-program")["error"]["code"] == "bad_command"  # never executed: does not count
    attempt.shell("sleep 0.3")
    began = time.monotonic()
    attempt.client.wait_for("gone")
    os.kill(attempt.spawned["pid"], signal.SIGKILL)
    eventually(lambda: has_ended(attempt.spawned["pid"]))
    attempt.spawned = spawner.spawn(attempt.directory)
    attempt.client = connect(attempt.directory)
    assert attempt.client.ask("hello")["last_exit"]["code"] == 0
    attempt.shell("exec sleep 600")
    event = attempt.client.wait_for("exited")
    assert event["ended_by"] == "timeout"
    assert 0.9 < time.monotonic() - began < 1.9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_shim_that_is_told_to_end_stops_its_run_first(attempt: Any, eventually: Any, number: int) -> None:
    attempt.shell("trap 'echo bye; exit 9' TERM; echo > up; while :; do sleep 0.05; done")
    attempt.file("up")
    os.kill(attempt.spawned["pid"], number)
    event = attempt.client.wait_for("exited")
    assert (event["code"], event["ended_by"]) == (9, "shim_terminated")
    eventually(lambda: has_ended(attempt.spawned["pid"]))
    assert attempt.processes() == []
    assert not (attempt.directory / "shim.json").exists()
    record = notes.read(str(attempt.directory / "runs" / "000001"))
    assert record is not None
    assert record.exit is not None
    assert record.exit["ended_by"] == "shim_terminated"


def test_a_shim_without_a_run_ends_at_once_when_told_to(attempt: Any, eventually: Any) -> None:
    os.kill(attempt.spawned["pid"], signal.SIGTERM)
    eventually(lambda: has_ended(attempt.spawned["pid"]))
    assert not (attempt.directory / "shim.sock").exists()


def test_an_idle_shim_never_wakes(new_attempt: Any) -> None:
    attempt = new_attempt(timeout_seconds=3600)
    attempt.start("/bin/sleep", "600")
    attempt.client.ask("hello")
    pid = attempt.spawned["pid"]

    def switches() -> int:
        return int(status_of(pid, "voluntary_ctxt_switches")) + int(status_of(pid, "nonvoluntary_ctxt_switches"))

    time.sleep(0.2)
    before = switches()
    time.sleep(2)
    assert switches() == before


def test_ten_shims_are_small(new_attempt: Any) -> None:
    attempts = [new_attempt() for _ in range(10)]
    for attempt in attempts:
        attempt.start("/bin/sleep", "600")
    sizes_kib = []
    for attempt in attempts:
        lines = Path(f"/proc/{attempt.spawned['pid']}/smaps_rollup").read_text().splitlines()
        sizes_kib.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
    print(f"PSS of ten shims, KiB: {sorted(sizes_kib)}")
    assert max(sizes_kib) < 5 * 1024


def test_an_upgrade_may_take_the_files_of_the_package_away(
    spawner: Any, new_attempt: Any, tmp_path: Path, eventually: Any
) -> None:
    """What runs must not read from the new version's files: all is loaded before the first shim is forked."""
    package = Path(shim.__file__).parents[1]
    copy = tmp_path / "site" / "gpulayer"
    shutil.copytree(package / "shim", copy / "shim", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "__init__.py", copy)
    old = type(spawner)(copy / "shim" / "__main__.py")
    try:
        assert old.send(b"{}")["error"]["code"] == "unknown_op"  # so it is up
        shutil.rmtree(copy)
        attempt = new_attempt(spawner=old)
        assert attempt.start("no-such-program")["error"]["code"] == "bad_command"
        assert attempt.client.ask("stop", signal="NONSENSE")["error"]["code"] == "bad_request"
        attempt.shell("trap '' TERM; echo up > up; while :; do sleep 0.05; done")
        attempt.file("up")
        attempt.client.ask("stop", signal="TERM", grace_seconds=0.05, reason="test")
        assert attempt.client.wait_for("exited")["signal"] == signal.SIGKILL
        attempt.client.wait_for("gone")
        assert attempt.client.ask("quit")["ok"]
        eventually(lambda: has_ended(attempt.spawned["pid"]))
        assert not (attempt.directory / "shim.crash").exists()
    finally:
        old.close()


def test_several_clients_all_hear_of_an_exit(attempt: Any, connect: Any) -> None:
    others = [connect(attempt.directory) for _ in range(3)]
    for other in others:
        other.ask("hello")
    attempt.shell("exit 6")
    for client in (attempt.client, *others):
        assert client.wait_for("exited")["code"] == 6
        assert client.wait_for("gone")["run"] == 1


def test_a_client_that_never_reads_is_disconnected_and_blocks_nobody(attempt: Any, connect: Any) -> None:
    deaf = connect(attempt.directory)
    deaf.socket.setblocking(False)
    line = json.dumps({"op": "hello", "id": "x" * 10_000}).encode() + b"\n"
    sent = 0
    try:
        while sent < 64 * 1024 * 1024:
            try:
                sent += deaf.socket.send(line)
            except BlockingIOError:
                time.sleep(0.005)
    except (BrokenPipeError, ConnectionResetError):
        pass
    else:
        pytest.fail("was never disconnected")
    assert attempt.shell("exit 0")["ok"]
    assert attempt.client.wait_for("exited")["code"] == 0


def test_the_supervisor_may_write_into_the_log(attempt: Any) -> None:
    assert attempt.client.ask("log", kind="note", text="restarts in 4 s")["ok"]
    assert attempt.client.ask("log")["error"]["code"] == "bad_request"
    content = b"".join(path.read_bytes() for path in (attempt.directory / "logs").iterdir())
    assert b"restarts in 4 s" in content


def test_a_lease_that_is_not_renewed_stops_the_run_without_a_daemon(
    attempt: Any, connect: Any, eventually: Any
) -> None:
    def boottime() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    assert attempt.client.ask("lease", until_boottime=boottime() + 0.3)["ok"]
    attempt.start("/bin/sleep", "600")
    assert attempt.client.ask("lease", until_boottime=boottime() + 0.6)["ok"]
    attempt.client.close()
    attempt.client = connect(attempt.directory)
    event = attempt.client.wait_for("exited")
    assert event["ended_by"] == "stop:lease_expired"
    assert 0.55 < event["uptime_seconds"] < 3
    assert attempt.start("/bin/true")["error"]["code"] == "lease_expired"
    assert attempt.client.ask("lease", until_boottime=None)["ok"]
    assert attempt.start("/bin/true")["ok"]


def test_a_lock_that_the_shim_shares_outlives_the_daemon_and_can_be_taken_up_again(
    attempt: Any, connect: Any, tmp_path: Path
) -> None:
    path = tmp_path / "gpu-lock"
    path.touch()
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1000, 0)

    def is_free() -> bool:
        with path.open("r+") as other:
            try:
                fcntl.fcntl(other, F_OFD_SETLK, lock)
            except BlockingIOError:
                return False
            return True

    held = path.open("r+")
    fcntl.fcntl(held, F_OFD_SETLK, lock)
    request = json.dumps({"op": "hold", "id": 99, "names": ["GPU-1"]}).encode() + b"\n"
    socket.send_fds(attempt.client.socket, [request], [held.fileno()])
    assert attempt.client.receive() == {"id": 99, "ok": True}
    attempt.start("/bin/sleep", "600")  # which must not inherit it
    held.close()
    attempt.client.close()
    assert not is_free()

    attempt.client = connect(attempt.directory)
    assert attempt.client.ask("hello")["held"] == ["GPU-1"]
    attempt.client.send("held")
    answer, fds, _, _ = socket.recv_fds(attempt.client.socket, 65536, 8)
    assert json.loads(answer)["names"] == ["GPU-1"]
    assert len(fds) == 1
    assert attempt.client.ask("release", names=["GPU-1", "GPU-2"])["ok"]
    assert not is_free()  # ours now
    os.close(fds[0])
    assert is_free()
    assert attempt.client.ask("hold", names=["GPU-1"])["error"]["code"] == "bad_request"


def test_a_socket_that_was_removed_by_hand_is_made_again_when_asked_for(
    attempt: Any, connect: Any, eventually: Any
) -> None:
    """Nobody could reach such a shim any more: neither stop its run nor hear of its end."""
    started = attempt.shell("sleep 600")
    published = (attempt.directory / "shim.json").read_text()
    (attempt.directory / "shim.sock").unlink()
    (attempt.directory / "shim.json").unlink()
    os.kill(attempt.spawned["pid"], shim_module.LISTEN_AGAIN)
    eventually((attempt.directory / "shim.sock").exists)
    eventually(lambda: (attempt.directory / "shim.json").exists())
    assert (attempt.directory / "shim.json").read_text() == published
    assert connect(attempt.directory).ask("hello")["run"]["pid"] == started["pid"]
    assert attempt.client.ask("hello")["ok"], "older connections stay"


def test_the_spawner_works_where_the_daemon_was_started_with_sigchld_ignored(tmp_path: Path, new_attempt: Any) -> None:
    """As some supervisors and `trap '' CHLD` do it: there was no child to wait for, and every start failed."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        spawner = Spawner()
    finally:
        signal.signal(signal.SIGCHLD, before)
    try:
        attempt = new_attempt(spawner=spawner)
        attempt.shell("exit 3")
        assert attempt.client.wait_for("exited")["code"] == 3
    finally:
        spawner.close()


def test_a_spawner_that_was_stopped_makes_no_shim_for_a_daemon_that_is_gone(
    tmp_path: Path, spawner: Any, eventually: Any
) -> None:
    """It went on with the request when its daemon had given up, and the shim was nobody's for ever."""
    directory = tmp_path / "sandboxes" / "test.0.1"
    directory.mkdir(parents=True)
    (directory / "attempt.json").write_text(json.dumps({"log": {"max_bytes": 100_000, "keep": 2}}))
    os.kill(spawner.process.pid, signal.SIGSTOP)
    eventually(lambda: status_of(spawner.process.pid, "State").startswith("T"))
    spawner.socket.send(json.dumps({"op": "spawn", "dir": str(directory)}).encode())
    spawner.socket.close()
    os.kill(spawner.process.pid, signal.SIGCONT)
    assert spawner.process.wait(5) == 0
    assert not (directory / "shim.lock").exists()
