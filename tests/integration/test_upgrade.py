"""The program is replaced under running replicas, by a newer one and back: no pid, line or exit code changes (P8)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpulayer
from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, get, is_alive, wait_for
from tests.integration.programs import serve, sh

ROOT = Path(__file__).parents[2]
NEXT_VERSION = "99.0.0"


def pip(*arguments: str, python: Path | None = None) -> None:
    which = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *which, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def replace(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        text, count = re.subn(old, new, text, flags=re.MULTILINE)
        assert count, f"{path}: nothing like {old!r}"
    path.write_text(text)


def make_next_version(tree: Path) -> None:
    """A version that is higher, and says one thing more in everything that shims and daemons tell each other."""
    package = tree / "gpulayer"
    replace(package / "__init__.py", (r"^__version__ = .*", f'__version__ = "{NEXT_VERSION}"'))
    replace(
        package / "shim" / "shim.py",
        (r"^PROTOCOL = (\d+)", r"PROTOCOL = \g<1>1"),
        (r'"protocol": PROTOCOL,', '"protocol": PROTOCOL, "new_in_this_version": {"a": [1]},'),
    )
    replace(package / "runtime" / "shim_link.py", (r'"op": op,', '"op": op, "also_new": True,'))
    replace(package / "runtime" / "sandboxes.py", (r'"format": FORMAT,', '"format": FORMAT, "new_here_too": 1,'))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of this tree, and one of its next version."""
    built = {}
    for version in (gpulayer.__version__, NEXT_VERSION):
        tree = tmp_path_factory.mktemp("tree")
        shutil.copytree(ROOT / "gpulayer", tree / "gpulayer", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        if version == NEXT_VERSION:
            make_next_version(tree)
        # --no-build-isolation: what builds it is installed; nothing is fetched.
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(tree / "dist"), str(tree))
        (built[version],) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture
def installation(tmp_path: Path, wheels: dict[str, Path]) -> tuple[Path, Callable[[str], None]]:
    """A virtual environment's gpulayer, and what installs another version over it. Libraries are those of this one."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")

    def install(version: str) -> None:
        pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheels[version]), python=python)

    return home / "bin" / "gpulayer", install


def installed(daemon: Daemon) -> str:
    return str(daemon.call("GET", "/v1/status")["version"])


@pytest.mark.parametrize(
    ("first", "second"),
    [(gpulayer.__version__, NEXT_VERSION), (NEXT_VERSION, gpulayer.__version__)],
    ids=["upgrade", "downgrade"],
)
def test_another_version_adopts_what_this_one_started(
    make_daemon: DaemonMaker, installation: tuple[Path, Callable[[str], None]], first: str, second: str
) -> None:
    program, install = installation
    install(first)
    daemon = make_daemon(command=[str(program)]).start()
    assert installed(daemon) == first
    web = daemon.submit(serve("--say", "started by the first"), name="web")
    (endpoint,) = daemon.wait_ready(web)
    ticks = daemon.batch(sh("trap 'echo done; exit 42' USR1; while :; do echo tick; sleep 0.05; done"))
    ends_meanwhile = daemon.batch(sh("trap 'echo gone; exit 7' USR1; while :; do sleep 0.05; done"))
    pids = {
        job: daemon.wait_replica(job, lambda r: r["pid"] is not None)["pid"] for job in (web, ticks, ends_meanwhile)
    }
    wait_for(lambda: len(daemon.output(ticks)) > 2)

    install(second)
    assert get(endpoint) == "hello"
    assert daemon.stop() == 0
    os.kill(pids[ends_meanwhile], signal.SIGUSR1)
    wait_for(lambda: not is_alive(pids[ends_meanwhile]))
    daemon.start()
    assert installed(daemon) == second

    assert daemon.wait_ready(web) == [endpoint]
    assert {daemon.replica(job)["pid"] for job in (web, ticks)} == {pids[web], pids[ticks]}
    assert daemon.wait_ended(ends_meanwhile)["replicas"][0]["last_exit"]["code"] == 7
    assert daemon.output(ends_meanwhile) == ["gone"]
    seen = len(daemon.output(ticks))
    wait_for(lambda: len(daemon.output(ticks)) > seen)
    os.kill(pids[ticks], signal.SIGUSR1)
    assert daemon.wait_ended(ticks)["replicas"][0]["last_exit"]["code"] == 42
    assert daemon.output(ticks)[-1] == "done"
    assert set(daemon.output(ticks)[:-1]) == {"tick"}

    get(endpoint, "/exit/1")
    after = daemon.wait_replica(web, lambda replica: replica["restarts"] == 1 and replica["state"] == "ready")
    assert get(after["endpoint"]) == "hello", "an old shim starts a new run for the other version"
    assert daemon.differences() == []
    newer = daemon.submit(serve())
    assert get(daemon.wait_ready(newer)[0]) == "hello"
    daemon.cancel(web)
    assert daemon.wait_ended(web)["state"] == "cancelled"


def test_a_log_of_a_format_that_this_version_does_not_know_is_refused(daemon: Daemon) -> None:
    assert daemon.stop() == 0
    replace(daemon.data_dir / "node.json", (r'"format": \d+', '"format": 99'))
    done = daemon.cli("up", "--api-port", "0", timeout=20)
    assert done.returncode == 1
    assert "newer gpulayer" in done.stderr
    assert "99" in done.stderr
    replace(daemon.data_dir / "node.json", (r'"format": \d+', '"format": 1'))
    daemon.start()
