"""Two daemons, of root and of another user, and local runs fight over one GPU: never more holders than there is GPU.

What counts is what is seen from outside: every process of a run writes down that it has the GPU while it has it, the
environments of all processes of the host are read, and the kernel's list of locks.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.daemon import GPULAYER, Daemon, environment, living, read, wait_for

SECONDS = float(os.environ.get("GPULAYER_TEST_FIGHT_SECONDS", "30"))
STRANGER = "nobody"
# Notes down under a lock of its own who is on the GPU, and whether that is too much; then works for a moment.
HOLDER = """
import fcntl, os, signal, sys, time
place, milli, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
def start_time(pid):
    try:
        return open(f"/proc/{pid}/stat", "rb").read().rsplit(b")", 1)[1].split()[19].decode()
    except OSError:
        return ""
me = f"{os.getpid()}-{start_time(os.getpid())}-{milli}"
os.umask(0)
with open(f"{place}/guard", "a") as guard:
    fcntl.flock(guard, fcntl.LOCK_EX)
    open(f"{place}/on/{me}", "w").close()
    there = [name.split("-") for name in os.listdir(f"{place}/on")]
    total = sum(int(share) for pid, started, share in there if start_time(pid) == started)
    with open(f"{place}/totals", "a") as totals:
        print(total, *["/".join(each) for each in there], file=totals)
try:
    time.sleep(seconds)
finally:
    os.unlink(f"{place}/on/{me}")
"""


def as_stranger() -> list[str]:
    """The words before a command of another user, who may read the interpreter and the package, wherever they are."""
    who = pwd.getpwnam(STRANGER)
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups", *may_read]


def why_no_stranger() -> str:
    """Why nothing can be started as another user; empty if it can."""
    if os.geteuid() != 0:
        return "only root can start processes of another user"
    try:
        command = [*as_stranger(), *GPULAYER, "--version"]
        done = subprocess.run(command, cwd="/", timeout=30, capture_output=True, check=False)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        return f"user {STRANGER}: {error}"
    return done.stderr.decode()[-200:] if done.returncode else ""


@pytest.fixture
def arena() -> Iterator[Path]:
    """A directory that both users reach."""
    place = Path(tempfile.mkdtemp(prefix="gpulayer-fight-"))
    place.chmod(0o755)
    for name in ("root", STRANGER, "on"):
        (place / name).mkdir()
    (place / "on").chmod(0o777)
    for name in ("totals", "guard"):
        (place / name).touch()
        (place / name).chmod(0o666)
    (place / "holder.py").write_text(HOLDER)
    yield place
    shutil.rmtree(place, ignore_errors=True)


class StrangersDaemon(Daemon):
    """`gpulayer up` of another user."""

    def __init__(self, home: Path, **options: object) -> None:
        who = pwd.getpwnam(STRANGER)
        super().__init__(home, **options)  # type: ignore[arg-type]
        self.env |= {"HOME": str(home), "USER": STRANGER, "LOGNAME": STRANGER}
        self.command = [*as_stranger(), *self.command]
        self.log_path.touch()
        for path in (home, self.log_path, self.config_path):
            os.chown(path, who.pw_uid, who.pw_gid)


class Watcher(threading.Thread):
    """Reads /proc all the time: how much of the GPU the environments of living runs have, and how much is locked."""

    def __init__(self, uuid: str) -> None:
        super().__init__(daemon=True)
        self._uuid = uuid.encode()
        self.problems: list[str] = []
        self.most = 0
        self.looks = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            self.looks += 1
            before = self._held()
            locked = self._locked()
            after = self._held()
            # What was there before and after was there in between, when the locks were read.
            held = {run: milli for run, milli in before.items() if run in after}
            total = sum(held.values())
            self.most = max(self.most, total)
            if total > 1000 or locked < total:
                self.problems.append(f"{time.time():.3f} {held} with {locked} bytes locked")

    def _held(self) -> dict[bytes, int]:
        found = {}
        for pid in living():
            variables = dict(line.split(b"=", 1) for line in environment(pid) if b"=" in line)
            if variables.get(b"CUDA_VISIBLE_DEVICES") == self._uuid and b"FIGHT_MILLI" in variables:
                found[variables.get(b"GPULAYER_RUN_ID", b"?")] = int(variables[b"FIGHT_MILLI"])
        return found

    def _locked(self) -> int:
        inodes = {
            str(path.stat().st_ino)
            for place in ("/run/lock", "/dev/shm")
            for path in Path(place).glob(f"gpulayer-{self._uuid.decode()}.lock")
        }
        total = 0
        for line in read("/proc/locks").decode().splitlines():
            words = line.split()
            if "OFDLCK" in words and "WRITE" in words and words[-3].rsplit(":", 1)[1] in inodes:
                total += int(words[-1]) - int(words[-2]) + 1
        return total


def test_two_daemons_of_two_users_and_local_runs_never_share_more_gpu_than_there_is(arena: Path) -> None:
    obstacle = why_no_stranger()
    seed = int(os.environ.get("GPULAYER_TEST_FIGHT_SEED", random.randrange(2**32)))
    rng = random.Random(seed)
    nvml = FakeNvml(arena, gpus=1)
    env = nvml.env()
    for path in [arena / "fake-nvml", *(arena / "fake-nvml").rglob("*")]:
        path.chmod(0o755)
    first = Daemon(arena / "root" / "n1", env=env, name="n1").start()
    kind = Daemon if obstacle else StrangersDaemon
    second = kind(arena / STRANGER / "n2", env=env, name="n2")
    second.start()
    watcher = Watcher(nvml.uuids[0])
    watcher.start()
    deadline = time.monotonic() + SECONDS
    local: list[subprocess.Popen[bytes]] = []
    locals_done = 0
    jobs: list[tuple[Daemon, str]] = []
    try:
        while time.monotonic() < deadline:
            milli = rng.choice([1000, 1000, 600, 500, 300])
            seconds = rng.uniform(0.05, 1.0)
            holder = [sys.executable, str(arena / "holder.py"), str(arena), str(milli), f"{seconds:.2f}"]
            daemon = rng.choice([first, second])
            match rng.randrange(12):
                case 0 | 1 if len(local) < 2:
                    command = [
                        "submit",
                        "--target",
                        "local",
                        "--gpus",
                        str(milli / 1000),
                        "--env",
                        f"FIGHT_MILLI={milli}",
                    ]
                    local.append(
                        subprocess.Popen(
                            [*GPULAYER, *command, "--timeout", "20s", "--wait", "25s", "--", *holder],
                            env=first.env | {"GPULAYER_DATA_DIR": str(arena / "root" / f"local{len(jobs) % 3}")},
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                            cwd=arena,
                        )
                    )
                case 2 if jobs:
                    owner, job = rng.choice(jobs)
                    owner.request("POST", f"/v1/jobs/{job}/cancel")
                case 3 if rng.random() < 0.3:
                    daemon.restart9()
                case _ if len(jobs) < 500:
                    job = daemon.batch(holder, gpus=milli / 1000, env={"FIGHT_MILLI": str(milli)})
                    jobs.append((daemon, job))
            ended = [process for process in local if process.poll() is not None]
            locals_done += sum(process.returncode == 0 for process in ended)
            local = [process for process in local if process.returncode is None]
            time.sleep(rng.uniform(0.0, 0.15))
        for process in local:
            process.wait(60)
    finally:
        watcher.stopped.set()
        watcher.join(10)
        for process in local:
            process.kill()
        for daemon in (first, second):
            daemon.end()
        for place in ("/run/lock", "/dev/shm"):
            Path(place, f"gpulayer-{nvml.uuids[0]}.lock").unlink(missing_ok=True)
    totals = [line.split() for line in (arena / "totals").read_text().splitlines()]
    shown = (
        f"seed {seed}, {len(totals)} runs, {locals_done} local, {watcher.looks} looks, most {watcher.most}; {obstacle}"
    )
    print(shown)
    if watcher.problems:
        print(time.time(), watcher.problems[:20])
        print(first.log_path.read_text()[-60000:])
        print("=====SECOND")
        print(second.log_path.read_text()[-60000:])
    assert not [line for line in totals if int(line[0]) > 1000], shown
    assert not watcher.problems, f"{shown}: {watcher.problems[:5]}"
    assert len(totals) >= SECONDS / 4, f"they did not fight: {shown}"
    wait_for(lambda: not [pid for pid in living() if str(arena).encode() in read(f"/proc/{pid}/cmdline")], 40)
