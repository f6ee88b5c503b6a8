"""A device of this host has one holder at a time, or shares that fit, whoever asks: real files, processes and users."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.model.errors import StorageFailed
from gpulayer.runtime.accelerators import device_locks
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Held, Hold, shared_directory, who_holds

GPU = "GPU-5a1f0c6e-0000-4000-8000-000000000001"
MIG = "MIG-0b7c0c6e-0000-4000-8000-00000000000a"
MIG_TOO = "MIG-0b7c0c6e-0000-4000-8000-00000000000b"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

# Holds a device until its input ends, or until it has passed its descriptors on and is told to end.
HOLDER = """
import os, sys
from pathlib import Path
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Hold
place, uuid, milli, parent, uid = sys.argv[-5:]
if uid != "-":
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
try:
    found = DeviceLocks(Path(place), Path(place) / "data").acquire(uuid, int(milli), parent=parent)
    print("holds" if isinstance(found, Hold) else f"{found.milli_free} free, {found.text}", flush=True)
except Exception as error:
    print(repr(error), getattr(error, "hint", ""), flush=True)
sys.stdin.read()
"""

# Keeps the descriptors that it is sent, as a shim does.
KEEPER = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while True:
    data, fds, _, _ = socket.recv_fds(peer, 100, 16)
    if not data:
        break
    peer.send(str(len(fds)).encode())
sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory like /run/lock: everyone's, and sticky."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.fixture
def locks(place: Path) -> Iterator[DeviceLocks]:
    made = DeviceLocks(place, place / "data")
    before = set(os.listdir("/proc/self/fd"))
    yield made
    made.close()
    for name in set(os.listdir("/proc/self/fd")) - before:
        assert not os.path.exists(f"/proc/self/fd/{name}") or str(place) not in os.readlink(f"/proc/self/fd/{name}")


def taken(found: Hold | Held) -> Hold:
    assert isinstance(found, Hold), found
    return found


def taken_once(locks: DeviceLocks, uuid: str) -> Path:
    """The lock file of a device that was held, and is free now."""
    taken(locks.acquire(uuid, 1)).close()
    return locks.path(uuid)


def free(found: Hold | Held) -> int:
    assert isinstance(found, Held), found
    return found.milli_free


@contextmanager
def holder(
    place: Path,
    uuid: str,
    milli: int = 1000,
    *,
    parent: str = "",
    uid: int | None = None,
    wrapped: tuple[str, ...] = (),
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has acquired something, and what it said."""
    arguments = [str(place), uuid, str(milli), parent, "-" if uid is None else str(uid)]
    program = wrapped or (sys.executable, "-c", HOLDER)
    process = subprocess.Popen([*program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=30)


@contextmanager
def keeper() -> Iterator[tuple[subprocess.Popen[bytes], Callable[[Hold], None]]]:
    """A process that shares the holds that it is handed."""
    ours, its = socket.socketpair()
    with ours, its:
        process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(its.fileno())], pass_fds=[its.fileno()], stdin=subprocess.PIPE
        )
        its.close()
        ours.settimeout(30)

        def share(hold: Hold) -> None:
            socket.send_fds(ours, [b"hold"], list(hold.fds.values()))
            assert ours.recv(10) == str(len(hold.fds)).encode()

        try:
            yield process, share
        finally:
            process.kill()
            process.communicate(timeout=30)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


# Who may have what


def test_a_whole_device_has_one_holder(locks: DeviceLocks) -> None:
    first = taken(locks.acquire(GPU, 1000))
    assert free(locks.acquire(GPU, 1000)) == 0
    assert free(locks.acquire(GPU, 1)) == 0
    other = taken(locks.acquire("GPU-2", 1000))
    first.close()
    first.close()
    again = taken(locks.acquire(GPU, 1000))
    assert again.ranges == ((0, 1000),)
    again.close()
    other.close()


def test_shares_fit_up_to_a_whole_and_not_beyond(locks: DeviceLocks) -> None:
    half, third = taken(locks.acquire(GPU, 500)), taken(locks.acquire(GPU, 333))
    assert free(locks.acquire(GPU, 168)) == 167
    assert free(locks.acquire(GPU, 1000)) == 167
    rest = taken(locks.acquire(GPU, 167))
    assert free(locks.acquire(GPU, 1)) == 0
    assert sorted(half.ranges + third.ranges + rest.ranges) == [(0, 500), (500, 833), (833, 1000)]
    for hold in (half, third, rest):
        hold.close()


def test_a_share_need_not_be_of_one_piece(locks: DeviceLocks) -> None:
    quarters = [taken(locks.acquire(GPU, 250)) for _ in range(4)]
    quarters[0].close()
    quarters[2].close()
    half = taken(locks.acquire(GPU, 400))
    assert (half.milli, half.ranges) == (400, ((0, 250), (500, 650)))
    assert free(locks.acquire(GPU, 101)) == 100
    for hold in (*quarters, half):
        hold.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_share_is_given_exactly_when_as_much_is_free(steps: list[tuple[bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        locks = DeviceLocks(Path(name), Path(name))
        holds: list[Hold] = []
        for gives_back, number in steps:
            if gives_back and holds:
                holds.pop(number % len(holds)).close()
            used = sum(hold.milli for hold in holds)
            assert locks.held_by_others(GPU, holds) == 0
            assert locks.held_by_others(GPU, ()) == used
            found = locks.acquire(GPU, number)
            if number <= 1000 - used:
                holds.append(taken(found))
                assert sum(end - start for start, end in holds[-1].ranges) == number
            else:
                assert free(found) == 1000 - used
            milli = [each for hold in holds for start, end in hold.ranges for each in range(start, end)]
            assert len(milli) == len(set(milli))
        for hold in holds:
            hold.close()
        locks.close()


def test_another_process_is_excluded_and_its_death_frees_the_device(locks: DeviceLocks, place: Path) -> None:
    with holder(place, GPU, 600) as (process, said):
        assert said == "holds"
        held = locks.acquire(GPU, 500)
        assert free(held) == 400
        assert isinstance(held, Held)
        assert held.text.startswith(f"held by pid {process.pid} (python")
        process.kill()
        process.wait(30)
        taken(locks.acquire(GPU, 1000)).close()


@needs_root
def test_users_exclude_one_another_whoever_made_the_file(locks: DeviceLocks, place: Path) -> None:
    for first, second in ((None, NOBODY), (NOBODY, None)):
        with holder(place, GPU, 600, uid=first) as (process, said):
            assert said == "holds"
            with holder(place, GPU, 500, uid=second) as (_, refused):
                assert refused.startswith("400 free, held by ")
                # Only root sees what others have open.
                assert ("another user's gpulayer" if second else f"pid {process.pid}") in refused
            with holder(place, GPU, 400, uid=second) as (_, said):
                assert said == "holds"
                assert free(locks.acquire(GPU, 1)) == 0
        os.unlink(locks.path(GPU))


@pytest.mark.parametrize("umask", [0o077, 0o777])
def test_a_file_is_everyones_whatever_the_umask(locks: DeviceLocks, umask: int) -> None:
    before = os.umask(umask)
    try:
        hold = taken(locks.acquire(GPU, 1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(locks.path(GPU).stat().st_mode) == 0o666
    assert os.listdir(locks.path(GPU).parent) == [locks.path(GPU).name]
    hold.close()


def test_namespaces_of_users_and_pids_do_not_separate(locks: DeviceLocks, place: Path) -> None:
    apart = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make user namespaces")
    with holder(place, GPU, wrapped=(*apart, sys.executable, "-c", HOLDER)) as (_, said):
        assert said == "holds"
        assert free(locks.acquire(GPU, 1)) == 0
    wait_until(lambda: locks.held_by_others(GPU, ()) == 0)
    hold = taken(locks.acquire(GPU, 1000))
    with holder(place, GPU, wrapped=(*apart, sys.executable, "-c", HOLDER)) as (_, said):
        assert said.startswith("0 free, held by a process that is not seen from here")
    hold.close()


def test_declared_devices_are_those_of_their_data_directory(place: Path) -> None:
    one, two = DeviceLocks(place, place / "new" / "one"), DeviceLocks(place, place / "two")
    holds = [taken(each.acquire(GPU, 1000, is_declared=True)) for each in (one, two)]
    assert free(one.acquire(GPU, 1, is_declared=True)) == 0
    assert one.held_by_others(GPU, (), is_declared=True) == 1000
    assert one.held_by_others(GPU, holds[:1], is_declared=True) == 0
    holds.append(taken(one.acquire(GPU, 1000)))  # a real device of that name is another one
    assert stat.S_IMODE((place / "new" / "one").stat().st_mode) == 0o700
    for closing in (*holds, one, two):
        closing.close()


@pytest.mark.parametrize(
    "uuid",
    [
        "MIG-GPU-5a1f/7/0",
        "../../etc/passwd",
        "a%2Fb",
        "a b\n*\x00",
        "ü\udcff",
        "declared:x^y",
        ".",
        ":" * 128,
        "/" * 127 + "a",
        "x" * 500,
    ],
)
def test_any_uuid_has_a_file_of_its_own_in_the_directory(locks: DeviceLocks, place: Path, uuid: str) -> None:
    names = {locks.path(each).name for each in (uuid, uuid + "/", uuid.replace("/", "_") + "!", uuid + uuid)}
    assert len(names) == 4
    assert all(len(name) < 256 for name in names)
    hold = taken(locks.acquire(uuid, 1000, parent=uuid + "!"))
    assert free(locks.acquire(uuid, 1)) == 0
    assert len(os.listdir(place)) == 2
    fds = {name: os.dup(fd) for name, fd in hold.fds.items()}
    hold.close()
    (adopted,) = locks.adopt(fds)
    assert (adopted.uuid, adopted.parent, adopted.milli, adopted.fds) == (uuid, uuid + "!", 1000, fds)
    adopted.close()


# MIG


def test_a_gpu_and_its_instances_exclude_one_another_and_instances_do_not(locks: DeviceLocks) -> None:
    one, two = taken(locks.acquire(MIG, 500, parent=GPU)), taken(locks.acquire(MIG_TOO, 1000, parent=GPU))
    more = taken(locks.acquire(MIG, 500, parent=GPU))
    assert free(locks.acquire(GPU, 1)) == 0
    assert free(locks.acquire(MIG, 1, parent=GPU)) == 0
    for hold in (one, two):
        hold.close()
    assert free(locks.acquire(GPU, 1000)) == 0
    more.close()
    share = taken(locks.acquire(GPU, 1))
    refused = locks.acquire(MIG, 1, parent=GPU)
    assert isinstance(refused, Held)
    assert refused.milli_free == 0
    assert refused.text.startswith(f"part of {GPU}, which is held by pid {os.getpid()} (")
    taken(locks.acquire(MIG, 1000)).close()  # nothing is left behind of the refused one
    share.close()
    taken(locks.acquire(GPU, 1000)).close()


def test_what_others_hold_of_a_gpu_or_an_instance_counts_for_the_other_in_full(locks: DeviceLocks) -> None:
    def others(*own: Hold) -> list[int]:
        return [
            locks.held_by_others(GPU, own),
            locks.held_by_others(MIG, own, parent=GPU),
            locks.held_by_others(MIG_TOO, own, parent=GPU),
        ]

    assert others() == [0, 0, 0]
    instance = taken(locks.acquire(MIG, 300, parent=GPU))
    assert others() == [1000, 300, 0]
    assert others(instance) == [0, 0, 0]
    instance.close()
    share = taken(locks.acquire(GPU, 200))
    assert others() == [200, 1000, 1000]
    assert others(share) == [0, 0, 0]
    more = taken(locks.acquire(GPU, 100))
    assert others(share) == [100, 1000, 1000]
    share.close()
    more.close()


# Shared with a shim


def test_a_hold_lasts_as_long_as_either_has_it_open(locks: DeviceLocks) -> None:
    hold = taken(locks.acquire(MIG, 400, parent=GPU))
    with keeper() as (process, share):
        share(hold)
        hold.close()
        assert free(locks.acquire(MIG, 601, parent=GPU)) == 600
        assert free(locks.acquire(GPU, 1)) == 0
        process.kill()
        process.wait(30)
    taken(locks.acquire(GPU, 1000)).close()

    hold = taken(locks.acquire(GPU, 1000))
    with keeper() as (process, share):
        share(hold)
        process.kill()
        process.wait(30)
        assert free(locks.acquire(GPU, 1)) == 0
    hold.close()
    taken(locks.acquire(GPU, 1000)).close()


def test_what_is_executed_does_not_hold_on(locks: DeviceLocks) -> None:
    hold = taken(locks.acquire(MIG, 1000, parent=GPU))
    locks.held_by_others(MIG, [hold], parent=GPU)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        hold.close()
        taken(locks.acquire(GPU, 1000)).close()
        opened = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]
        assert not [name for name in opened if "gpulayer-" in name]
    finally:
        child.kill()
        child.wait(30)


def passed_on(hold: Hold) -> dict[str, int]:
    """The hold's descriptors as they come back through a socket, and the hold closed."""
    ours, its = socket.socketpair()
    with ours, its:
        socket.send_fds(ours, [b"x"], list(hold.fds.values()))
        names = list(hold.fds)
        hold.close()
        _, fds, _, _ = socket.recv_fds(its, 1, 16)
    return dict(zip(names, fds, strict=True))


@pytest.mark.parametrize("is_declared", [False, True])
def test_holds_that_come_back_from_a_shim_are_adopted(locks: DeviceLocks, is_declared: bool) -> None:
    quarter = taken(locks.acquire(GPU, 250, is_declared=is_declared))
    half, gap = (taken(locks.acquire(GPU, milli, is_declared=is_declared)) for milli in (500, 250))
    quarter.close()
    gap.close()
    pieces = taken(locks.acquire(GPU, 300, is_declared=is_declared))
    expected = [(hold.uuid, hold.milli, hold.ranges) for hold in (half, pieces)]
    # Of one device in two attempts: each shim has one of that name.
    adopted = [one for hold in (half, pieces) for one in locks.adopt(passed_on(hold))]
    assert [(hold.uuid, hold.milli, hold.ranges) for hold in adopted] == expected
    assert all(hold.is_in_place() for hold in adopted)
    assert not any(os.get_inheritable(fd) for hold in adopted for fd in hold.fds.values())
    assert locks.held_by_others(GPU, adopted, is_declared=is_declared) == 0
    assert free(locks.acquire(GPU, 1000, is_declared=is_declared)) == 200
    for hold in adopted:
        hold.close()
    taken(locks.acquire(GPU, 1000, is_declared=is_declared)).close()


def test_several_holds_of_one_attempt_are_told_apart_by_their_names(locks: DeviceLocks) -> None:
    holds = [
        taken(locks.acquire(MIG_TOO, 1000, parent=GPU)),
        taken(locks.acquire(MIG, 500, parent=GPU)),
        taken(locks.acquire("GPU-2", 1000)),
        taken(locks.acquire(GPU, 1000, is_declared=True)),
    ]
    fds = {name: fd for hold in holds for name, fd in passed_on(hold).items()}
    assert len(fds) == 6
    adopted = locks.adopt(fds)
    assert {hold.uuid: hold.milli for hold in adopted} == {MIG: 500, MIG_TOO: 1000, "GPU-2": 1000, GPU: 1000}
    assert {hold.uuid: hold.parent for hold in adopted} == {MIG: GPU, MIG_TOO: GPU, "GPU-2": "", GPU: ""}
    assert locks.held_by_others(GPU, adopted) == 0
    for hold in adopted:
        hold.close()
    taken(locks.acquire(GPU, 1000)).close()


def test_what_is_no_hold_is_not_adopted_and_not_left_open(locks: DeviceLocks, place: Path, tmp_path: Path) -> None:
    taken(locks.acquire(GPU, 1000)).close()
    unlocked, elsewhere = os.open(locks.path(GPU), os.O_RDWR), os.open(tmp_path, os.O_RDONLY)
    whole, mig = passed_on(taken(locks.acquire("GPU-2", 1000))), passed_on(taken(locks.acquire(MIG, 1, parent=GPU)))
    (mig_name, mig_fd), (parent_name, parent_fd) = mig.items()
    wrong = {GPU: unlocked, "x\0": elsewhere, "other": whole["GPU-2"], parent_name: parent_fd, "closed": 100_000}
    assert locks.adopt(wrong) == []
    for fd in (unlocked, elsewhere, whole["GPU-2"], parent_fd):
        with pytest.raises(OSError):
            os.fstat(fd)
    assert locks.adopt({mig_name: mig_fd, f"{mig_name}^GPU-2": os.open(locks.path("GPU-2"), os.O_RDWR)}) == []
    taken(locks.acquire(GPU, 1000)).close()
    taken(locks.acquire("GPU-2", 1000)).close()


# A file that goes away


@pytest.mark.parametrize("uuid", [GPU, MIG])
def test_a_hold_whose_file_was_removed_is_renewed(locks: DeviceLocks, uuid: str) -> None:
    parent = "" if uuid == GPU else GPU
    hold = taken(locks.acquire(uuid, 700, parent=parent))
    assert hold.is_in_place()
    assert hold.renew() is None
    os.unlink(locks.path(GPU))  # the GPU's own file, or that of the instance's parent
    assert not hold.is_in_place()
    assert locks.held_by_others(GPU, [hold]) == 0
    assert hold.renew() is None
    assert hold.is_in_place()
    assert (hold.milli, hold.ranges) == (700, ((0, 700),))
    assert free(locks.acquire(GPU, 301)) == (300 if uuid == GPU else 0)
    hold.close()
    taken(locks.acquire(GPU, 1000)).close()


def test_who_was_faster_after_a_removal_keeps_the_device_and_is_named(locks: DeviceLocks, place: Path) -> None:
    hold = taken(locks.acquire(GPU, 600))
    before = hold.fds
    os.unlink(locks.path(GPU))
    with holder(place, GPU, 500) as (process, said):
        assert said == "holds"
        refused = hold.renew()
        assert isinstance(refused, Held)
        assert refused.milli_free == 500
        assert f"held by pid {process.pid} (" in refused.text
        assert (hold.is_in_place(), hold.fds) == (False, before)  # it keeps what it has, and may try again
        assert locks.held_by_others(GPU, [hold]) == 500
    assert hold.renew() is None
    hold.close()


def test_a_share_moves_to_other_milli_gpus_where_its_own_were_taken_after_a_removal(
    locks: DeviceLocks, place: Path
) -> None:
    hold = taken(locks.acquire(GPU, 500))
    os.unlink(locks.path(GPU))
    with holder(place, GPU, 500) as (_, said):
        assert said == "holds"
        assert hold.renew() is None
        assert hold.ranges == ((500, 1000),)
    hold.close()


def test_a_removed_instance_file_is_renewed_while_its_gpu_stays_locked(locks: DeviceLocks) -> None:
    hold = taken(locks.acquire(MIG, 1000, parent=GPU))
    before = hold.fds
    os.unlink(locks.path(MIG))
    assert hold.renew() is None
    after = hold.fds
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [MIG]
    hold.close()


def test_a_hold_whose_file_was_removed_is_adopted_and_renewed(locks: DeviceLocks) -> None:
    fds = passed_on(taken(locks.acquire(GPU, 300)))
    os.unlink(locks.path(GPU))
    (hold,) = locks.adopt(fds)
    assert (hold.milli, hold.is_in_place()) == (300, False)
    assert hold.renew() is None
    assert hold.is_in_place()
    hold.close()


def run_with_interference(place: Path, program: str) -> None:
    """In a process where `interfere(number)` is called just before each attempt to lock, from 1 on."""
    head = """
import fcntl, os, sys
from pathlib import Path
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Hold
locks = DeviceLocks(Path(sys.argv[1]), Path(sys.argv[1]))
number, interfere = 0, lambda number: None
def watch(event, arguments):
    global number
    if event == "fcntl.fcntl" and arguments[1] == fcntl.F_OFD_SETLK:
        number += 1
        interfere(number)
sys.addaudithook(watch)
"""
    done = subprocess.run(
        [sys.executable, "-c", head + program, str(place)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_removed_just_before_it_is_locked_is_not_the_one_that_is_held(place: Path) -> None:
    run_with_interference(
        place,
        """
interfere = lambda number: os.unlink(locks.path("gpu")) if number == 1 else None
found = locks.acquire("gpu", 1000)
assert isinstance(found, Hold) and found.is_in_place() and number == 2
assert locks.held_by_others("gpu", ()) == 1000
""",
    )


def test_who_loses_a_race_for_one_piece_gives_the_others_back_and_looks_again(place: Path) -> None:
    run_with_interference(
        place,
        """
first, second, third, fourth = (locks.acquire("gpu", milli) for milli in (250, 250, 250, 250))
first.close(), third.close()
start, faster = number, []
def interfere(number):
    if number == start + 2:  # has the first quarter and is about to take a part of the third
        faster.append(locks.acquire("gpu", 1))
        fourth.close()
found = locks.acquire("gpu", 400)
assert faster[0].ranges == ((500, 501),)
assert found.ranges == ((501, 901),)
assert locks.held_by_others("gpu", [found, second, *faster]) == 0
""",
    )


def test_a_holder_does_not_lock_a_file_that_is_removed_while_it_looks(locks: DeviceLocks, place: Path) -> None:
    """Somebody tidies all the time: whoever acquires gets on, or an error."""
    tidy = "import os, sys, time\nwhile True:\n    for name in os.listdir(sys.argv[1]):\n        try:\n"
    tidy += "            os.unlink(os.path.join(sys.argv[1], name))\n        except OSError:\n            pass\n"
    process = subprocess.Popen([sys.executable, "-c", tidy, str(place)])
    done = 0
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            with suppress(StorageFailed):
                hold = taken(locks.acquire(GPU, 1000))
                done += 1
                assert hold.ranges == ((0, 1000),)
                hold.close()
    finally:
        process.kill()
        process.wait(30)
    assert done > 0
    hold = taken(locks.acquire(GPU, 1000))
    assert hold.is_in_place()
    hold.close()


# What somebody else has put there


def plant_symlink(path: Path) -> None:
    path.with_name("target").touch()
    path.symlink_to("target")


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("plant", [plant_symlink, plant_socket, Path.mkdir, os.mkfifo], ids=lambda each: each.__name__)
def test_what_is_not_a_plain_file_is_refused_by_name(locks: DeviceLocks, plant: Callable[[Path], None]) -> None:
    plant(locks.path(GPU))
    for ask in (lambda: locks.acquire(GPU, 1000), lambda: locks.held_by_others(GPU, ())):
        with pytest.raises(StorageFailed, match="not a plain file") as caught:
            ask()
        assert str(locks.path(GPU)) in caught.value.message
        assert "remove it" in caught.value.hint
    with pytest.raises(StorageFailed, match="not a plain file"):
        locks.acquire(MIG, 1000, parent=GPU)
    taken(locks.acquire(MIG, 1000)).close()


def test_a_hold_whose_file_was_replaced_by_something_else_says_so(locks: DeviceLocks) -> None:
    hold = taken(locks.acquire(GPU, 1000))
    os.unlink(locks.path(GPU))
    locks.path(GPU).mkdir()
    assert not hold.is_in_place()
    with pytest.raises(StorageFailed, match="not a plain file"):
        hold.renew()
    locks.path(GPU).rmdir()
    assert hold.renew() is None
    hold.close()


@needs_root
def test_a_file_that_others_may_not_open_is_refused_with_its_owner(locks: DeviceLocks, place: Path) -> None:
    locks.path(GPU).touch(mode=0o600)
    with holder(place, GPU, uid=NOBODY) as (_, said):
        assert "Permission denied: it is user root's, with mode 0600" in said
        assert "chmod 0666" in said
    taken(locks.acquire(GPU, 1000)).close()
    assert stat.S_IMODE(locks.path(GPU).stat().st_mode) == 0o600  # not ours to open to everyone: who knows what it is


def test_an_owner_who_delays_others_by_a_lease_is_named_at_once(locks: DeviceLocks) -> None:
    fd = os.open(taken_once(locks, GPU), os.O_RDWR)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        started = time.monotonic()
        with pytest.raises(StorageFailed) as caught:
            locks.acquire(GPU, 1000)
        assert time.monotonic() - started < 5  # the kernel would let it wait for 45 s
        assert "lease" in caught.value.hint
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_no_file_of_somebody_elses_is_opened_as_if_to_be_made(place: Path) -> None:
    """The kernel refuses that in a sticky directory (fs.protected_regular), to root as well."""
    program = """
import os, sys
from pathlib import Path
from gpulayer.runtime.accelerators.device_locks import DeviceLocks
def watch(event, arguments):
    if event == "open" and sys.argv[1] in str(arguments[0]):
        assert not arguments[2] & os.O_CREAT or arguments[2] & os.O_EXCL, arguments
        assert arguments[2] & os.O_CLOEXEC and arguments[2] & os.O_NOFOLLOW, arguments
        print("made" if arguments[2] & os.O_CREAT else "opened")
sys.addaudithook(watch)
locks = DeviceLocks(Path(sys.argv[1]), Path(sys.argv[1]))
for _ in range(2):
    locks.acquire("GPU", 1000).close()
locks.held_by_others("GPU", ())
"""
    done = subprocess.run([sys.executable, "-c", program, str(place)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["opened", "made", "opened", "opened", "opened"], done.stderr


# What the host denies


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [("ro", "storage_failed", "ReadWritePaths"), ("nr_inodes=1", "disk_full", "some files")],
)
def test_a_read_only_or_full_directory_is_refused(place: Path, options: str, code: str, hint: str) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom gpulayer.model.errors import GpulayerError\n"
        "from gpulayer.runtime.accelerators.device_locks import DeviceLocks\n"
        "try:\n    DeviceLocks(Path(sys.argv[1]), Path(sys.argv[1])).acquire('GPU-1', 1)\n"
        "except GpulayerError as error:\n    print(error.code, error)\n"
    )
    script = 'mount -t tmpfs -o "$3" tmpfs "$0" || exit 9; exec "$1" -c "$2" "$0"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(place), sys.executable, program, f"mode=1777,{options}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode in (1, 9) and "Traceback" not in done.stderr:
        pytest.skip("needs the right to mount (root)")
    assert done.stdout.startswith(code), done.stdout + done.stderr
    assert f"{place}/gpulayer-GPU-1.lock" in done.stdout
    assert hint in done.stdout


def test_too_few_descriptors_are_an_error_and_leave_nothing_locked(locks: DeviceLocks) -> None:
    taken(locks.acquire(GPU, 1000)).close()
    taken(locks.acquire(MIG, 1000)).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with suppress(OSError):
            while True:
                fds.append(os.open("/dev/null", os.O_RDONLY))
        os.close(fds.pop())
        with pytest.raises(StorageFailed, match="Too many open files") as caught:
            locks.acquire(MIG, 1000, parent=GPU)  # needs two
        assert "ulimit -n" in caught.value.hint
        hold = taken(locks.acquire(MIG, 1000))
        with pytest.raises(StorageFailed, match="Too many open files"):
            locks.held_by_others(MIG, [hold])
        hold.close()
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    taken(locks.acquire(GPU, 1000)).close()


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    locks = DeviceLocks(tmp_path / "gone", tmp_path / "data")
    assert locks.held_by_others(GPU, ()) == 0
    with pytest.raises(StorageFailed, match="No such file") as caught:
        locks.acquire(GPU, 1)
    assert str(tmp_path / "gone") in caught.value.hint
    (tmp_path / "data").touch()
    with pytest.raises(StorageFailed, match="data/devices"):
        locks.acquire(GPU, 1, is_declared=True)


def test_the_shared_directory_is_the_first_that_is_sticky_and_everyones(tmp_path: Path) -> None:
    modes = {"absent": None, "roots": 0o755, "unsafe": 0o777, "good": 0o1777, "too": 0o1777}
    for name, mode in modes.items():
        if mode is not None:
            (tmp_path / name).mkdir()
            (tmp_path / name).chmod(mode)
    assert shared_directory([str(tmp_path / name) for name in modes]) == tmp_path / "good"
    with pytest.raises(StorageFailed, match="mode 1777") as caught:
        shared_directory([str(tmp_path / name) for name in ("absent", "roots", "unsafe")])
    assert "install -d -m 1777" in caught.value.hint


# How much others hold


def test_asking_each_second_opens_a_file_once(locks: DeviceLocks) -> None:
    hold = taken(locks.acquire(GPU, 250))
    assert locks.held_by_others(GPU, ()) == 250
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        assert locks.held_by_others(GPU, [hold]) == 0
    assert len(os.listdir("/proc/self/fd")) == before
    os.unlink(locks.path(GPU))
    assert locks.held_by_others(GPU, ()) == 0
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert hold.renew() is None
    assert locks.held_by_others(GPU, ()) == 250
    hold.close()


def test_the_most_broken_up_device_is_counted(locks: DeviceLocks) -> None:
    """Every second milli-GPU locked by somebody else's program, the most pieces that there can be."""
    fd = os.open(taken_once(locks, GPU), os.O_RDWR)
    for place in range(0, 1000, 2):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, place, 1, 0))
    assert locks.held_by_others(GPU, ()) == 500
    rest = taken(locks.acquire(GPU, 500))
    assert locks.held_by_others(GPU, [rest]) == 500
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, 1000, 0, 0))  # beyond, to the end
    assert locks.held_by_others(GPU, [rest]) == 500
    os.close(fd)
    assert locks.held_by_others(GPU, [rest]) == 0
    rest.close()


def test_classic_locks_of_other_programs_count_too(locks: DeviceLocks, place: Path) -> None:
    taken(locks.acquire(GPU, 1)).close()
    program = "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\nfcntl.lockf(file, fcntl.LOCK_EX)\nprint(flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program + "sys.stdin.read()", str(locks.path(GPU))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert locks.held_by_others(GPU, ()) == 1000
        assert free(locks.acquire(GPU, 1)) == 0
    finally:
        process.kill()
        process.communicate(timeout=30)


# Who


def test_a_daemon_is_named_with_its_user_and_data_directory(locks: DeviceLocks, place: Path, tmp_path: Path) -> None:
    program = tmp_path / "gpulayer"
    program.write_text(HOLDER)
    for told, data_dir in ((("--data-dir", "/data/one"), "/data/one"), (("--data-dir=/data/two",), "/data/two")):
        with holder(place, GPU, wrapped=(sys.executable, str(program), "up", *told)) as (process, said):
            assert said == "holds"
            (found,) = who_holds(locks.path(GPU))
            assert (found.pid, found.command, found.data_dir) == (process.pid, "gpulayer up", data_dir)
            held = locks.acquire(GPU, 1)
            assert isinstance(held, Held)
            user = f"user {found.user}, data directory {data_dir}"
            assert held.text == f"held by pid {process.pid} (gpulayer up of {user})"
    with holder(place, GPU, wrapped=(sys.executable, str(program), "up")) as (_, _):
        (found,) = who_holds(locks.path(GPU))
        assert found.data_dir.endswith("gpulayer")
    with holder(place, GPU, wrapped=(sys.executable, str(program), "submit", "--target=local")) as (_, _):
        (found,) = who_holds(locks.path(GPU))
        assert (found.command, found.data_dir) == ("gpulayer submit", "")


def test_a_shim_is_named_only_where_its_daemon_is_gone(locks: DeviceLocks) -> None:
    hold = taken(locks.acquire(GPU, 1000))
    name = "import ctypes\nctypes.CDLL(None).prctl(15, b'gpulayer-shim')\n"
    ours, its = socket.socketpair()
    with ours, its:
        process = subprocess.Popen(
            [sys.executable, "-c", name + KEEPER, str(its.fileno())], pass_fds=[its.fileno()], stdin=subprocess.PIPE
        )
        try:
            socket.send_fds(ours, [b"hold"], list(hold.fds.values()))
            ours.settimeout(30)
            ours.recv(10)
            assert [holder.pid for holder in who_holds(locks.path(GPU))] == [os.getpid(), process.pid]
            held = locks.acquire(GPU, 1)
            assert isinstance(held, Held)
            assert f"pid {os.getpid()} (" in held.text
            assert f"pid {process.pid} (" not in held.text
            hold.close()
            assert held.text.startswith(f"held by pid {process.pid} (gpulayer shim of user ")
        finally:
            process.kill()
            process.communicate(timeout=30)


def test_who_only_asks_is_not_taken_for_a_holder(locks: DeviceLocks, place: Path) -> None:
    taken(locks.acquire(GPU, 1)).close()
    assert locks.held_by_others(GPU, ()) == 0  # keeps the file open from now on
    assert who_holds(locks.path(GPU)) == ()
    assert who_holds(place / "absent") == ()
    shares = [taken(locks.acquire(GPU, 100)) for _ in range(3)]
    assert [holder.pid for holder in who_holds(locks.path(GPU))] == [os.getpid()]
    for hold in shares:
        hold.close()


def test_a_crowd_of_holders_is_cut_short(locks: DeviceLocks, place: Path) -> None:
    holders = [device_locks.Holder(pid=pid, user="anna", command="gpulayer up") for pid in range(1, 6)]
    words = device_locks._listed(holders)
    assert words.startswith("pid 1 (gpulayer up of user anna), pid 2")
    assert words.endswith("pid 3 (gpulayer up of user anna) and 2 more")


# All at once

RACER = """
import sys
from pathlib import Path
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Hold
locks = DeviceLocks(Path(sys.argv[1]), Path(sys.argv[1]))
for line in sys.stdin:
    found = locks.acquire("gpu", int(line))
    print(isinstance(found, Hold), flush=True)
    sys.stdin.readline()
    if isinstance(found, Hold):
        found.close()
    print(flush=True)
"""


@pytest.mark.parametrize("milli", [1000, 300])
def test_of_those_who_want_the_same_at_once_one_gets_it(locks: DeviceLocks, place: Path, milli: int) -> None:
    """Also where it is in hundreds of pieces, of which each of them gets some first."""
    fd = os.open(taken_once(locks, "gpu"), os.O_RDWR)
    if milli < 1000:
        for start in range(0, 1000, 2):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, start, 1, 0))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(place)], **pipes) for _ in range(4)]  # type: ignore[call-overload]
    try:
        for _ in range(50):
            for racer in racers:
                racer.stdin.write(f"{milli}\n")
            assert sorted(racer.stdout.readline().strip() for racer in racers) == ["False"] * 3 + ["True"]
            for racer in racers:
                racer.stdin.write("\n")
            for racer in racers:
                racer.stdout.readline()
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate(timeout=30)
        os.close(fd)


FIGHTER = """
import json, os, random, sys, time
import fcntl, struct
from pathlib import Path
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Hold
place, log, seed, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rng = random.Random(seed)
locks = DeviceLocks(place, place)
out = os.open(log, os.O_WRONLY | os.O_APPEND)
GPUS = [("gpu", ""), ("gpu", ""), ("mig-1", "gpu"), ("mig-2", "gpu")]

def say(**words):
    os.write(out, json.dumps({"at": time.monotonic_ns(), "pid": os.getpid(), **words}).encode() + b"\\n")

def is_refused_to_others(uuid, start, end):
    fd = os.open(locks.path(uuid), os.O_RDWR)
    try:
        first = rng.randrange(start, end)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, first, 1, 0))
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)

number = 0
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    uuid, parent = rng.choice(GPUS)
    found = locks.acquire(uuid, rng.choice([1000, 500, 334, 250, 100, 7]), parent=parent)
    if not isinstance(found, Hold):
        say(op="refused")
        time.sleep(rng.random() / 2000)
        continue
    number += 1
    hold = f"{os.getpid()}-{number}"
    say(op="take", hold=hold, uuid=uuid, parent=parent, ranges=found.ranges)
    shares = rng.random() < 0.1
    child = os.fork() if shares else -1
    if shares and child:
        found.close()  # the other has it now
    else:
        time.sleep(rng.random() / 1000)
        assert all(is_refused_to_others(uuid, start, end) for start, end in found.ranges)
        assert not parent or is_refused_to_others(parent, 0, 1000)
        assert found.is_in_place()
        say(op="drop", hold=hold)
        found.close()
    if shares and not child:
        os._exit(0)
    if shares:
        assert os.waitpid(child, 0)[1] == 0
say(op="done")
"""


def test_many_processes_never_hold_the_same_part_of_a_device_at_once(place: Path, tmp_path: Path) -> None:
    """Each holder tries, as a stranger, to take what it has; what all wrote down is checked afterwards. Some are
    killed with what they have."""
    log = tmp_path / "log"
    log.touch()
    seed, seconds = random.randrange(2**32), 4.0
    deadline = time.monotonic() + seconds
    killed: dict[int, int] = {}

    def start(number: int) -> subprocess.Popen[bytes]:
        left = str(max(deadline - time.monotonic(), 0.5))
        return subprocess.Popen([sys.executable, "-c", FIGHTER, str(place), str(log), str(seed + number), left])

    processes = [start(number) for number in range(4)]
    try:
        time.sleep(1.0)
        for number in (4, 5, 6):
            time.sleep(0.4)
            victim = processes[number % 4]
            killed[victim.pid] = time.monotonic_ns()
            victim.kill()
            victim.wait(30)
            processes.append(start(number))
        for process in processes:
            assert process.wait(60) == (-signal.SIGKILL if process.pid in killed else 0), f"seed {seed}"
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(30)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    dropped = {each["hold"] for each in told if each["op"] == "drop"}
    for each in told:
        if each["op"] == "take" and each["hold"] not in dropped and each["pid"] in killed:
            # It may have taken one more between our look at the clock and its end.
            told = [*told, {"at": max(killed[each["pid"]], each["at"]), "op": "drop", "hold": each["hold"]}]
    check_history(sorted(told, key=lambda each: int(each["at"])), seed)
    counts = {op: sum(each["op"] == op for each in told) for op in ("take", "drop", "refused", "done")}
    assert counts["take"] == counts["drop"] > 200, (counts, seed)
    assert counts["refused"] > 0
    assert counts["done"] == 4


def check_history(told: list[dict[str, object]], seed: int) -> None:
    """Replays who had what: no milli-GPU of a device twice, nothing of the GPU while an instance of it is held."""
    held: dict[str, tuple[str, str, set[int]]] = {}
    for each in told:
        hold = str(each.get("hold"))
        if each["op"] == "drop":
            del held[hold]
        elif each["op"] == "take":
            uuid, parent, ranges = str(each["uuid"]), str(each["parent"]), each["ranges"]
            assert isinstance(ranges, list)
            milli = {place for start, end in ranges for place in range(start, end)}
            for other, (other_uuid, other_parent, other_milli) in held.items():
                assert other_uuid != uuid or not milli & other_milli, f"{hold} and {other} share {uuid} (seed {seed})"
                assert parent != other_uuid, f"{hold} is a part of what {other} holds (seed {seed})"
                assert other_parent != uuid, f"{other} is a part of what {hold} holds (seed {seed})"
            held[hold] = (uuid, parent, milli)
    assert not held
