"""docs/tutorial.md is walked as a newcomer walks it: its own commands in one shell, its Python pasted into an
interpreter; and what it shows is what they print.

Only the installation is left out: the environment that runs the tests stands in for the one that it makes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.daemon import Daemon, describe, end_process, wait_for
from tests.tutorial.needs import needs_the_model

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "tutorial.md"
# Some 70 s on two idle cores, most of it PyTorch being imported.
WALK_SECONDS_MAX = 180
MARK = "=== block "

# For the shell: what makes the environment, and what installs into it.
STAND_INS = """
set -eu
python3() { test "$*" = "-m venv .venv" && ln -s "$TEST_ENVIRONMENT" .venv; }
pip() { test "$*" = "install $ROOT[examples]"; }
"""
# What is shown but need not come: it depends on how fast the machine is, at which moment a connection breaks, and
# whether there are GPUs.
MAY_BE_ABSENT = re.compile(
    r"still waiting: |hint: see what it does|\S+ s \S+ failed: |\S+ s endpoints: \S+ \S+$|myhost alive "
)


@dataclass
class Block:
    """Commands, and what the document shows behind them."""

    language: str
    code: str
    shown: list[str] = field(default_factory=list)


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    for language, content in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language:
            found.append(Block(language, content))
        else:
            found[-1].shown += content.splitlines()
    return found


def script_of(blocks: list[Block]) -> str:
    """One shell session, that says before each block which it is. It stops at the first command that fails."""
    parts = [STAND_INS]
    for number, block in enumerate(blocks):
        # An interpreter that thinks it is typed into, as for one who pastes: it takes a statement at a time.
        pasted = f"python -i -q <<'PASTED'\n{block.code}PASTED\n" if block.language == "python" else block.code
        parts.append(f"echo '{MARK}{number}'\n{pasted}")
    return "\n".join(parts)


def in_general(line: str, home: Path) -> str:
    """A line without what differs from one walk to the next: numbers, ids, durations, the home directory."""
    line = re.sub(r"^(?:>>> )+", "", line.replace(str(home), "/home/you"))
    line = re.sub(r"\b([cj])-[0-9a-z]{10,16}\b", r"\1-ID", line)
    line = re.sub(r"(?:\d+(?:ms|s|m|h))+\b", "#", line)
    line = re.sub(r"-?\d+(?:\.\d+)?", "#", line)
    return " ".join(line.split())


def is_shown_truly(shown: str, said: list[str]) -> bool:
    if shown.endswith("…"):
        return any(line.startswith(shown.rstrip("… ")) for line in said)
    return shown in said


@dataclass
class Walk:
    """One walk through the document: the whole output, and that of each block."""

    home: Path
    output: str
    by_block: dict[int, str]
    exit_code: int


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    return blocks_of(DOCUMENT.read_text())


@pytest.fixture(scope="module")
def walk(blocks: list[Block], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    needs_the_model()
    for program in ("bash", "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment")
    place = tmp_path_factory.mktemp("walk")
    home = place / "home"
    home.mkdir()
    daemon = Daemon(place)
    # gpulayer's variables would lead to another daemon; a proxy does not know this host's loopback.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")} | {
        "HOME": str(home),
        "ROOT": str(ROOT),
        "TEST_ENVIRONMENT": sys.prefix,
        "GPULAYER_DATA_DIR": str(daemon.data_dir),
        "GPULAYER_API_PORT": "0",
        "GPULAYER_NAME": "myhost",
        "no_proxy": "127.0.0.1",
    }
    log = place / "output"
    try:
        with open(log, "wb") as file:
            shell = subprocess.Popen(
                ["bash", "-c", script_of(blocks)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            exit_code = shell.wait(WALK_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            exit_code = -1
        output = log.read_text()
        parts = re.split(rf"^{MARK}(\d+)\n", output, flags=re.MULTILINE)
        yield Walk(
            home=home,
            output=output,
            by_block={int(number): said for number, said in zip(parts[1::2], parts[2::2], strict=True)},
            exit_code=exit_code,
        )
        daemon.wait_nothing_left()
    finally:
        # What is left after a failure: the shell with the daemon and the clients, and the replicas.
        try:
            os.killpg(shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for pid in daemon.all_on_host():
            end_process(pid)
        wait_for(lambda: not daemon.all_on_host(), 10, lambda: describe(daemon.all_on_host()))


def test_every_command_of_the_tutorial_succeeds(walk: Walk) -> None:
    assert walk.exit_code == 0, f"exit code {walk.exit_code} (-1: {WALK_SECONDS_MAX} s were over):\n{walk.output}"
    assert "Traceback" not in walk.output, walk.output


def test_what_the_tutorial_shows_is_what_comes(blocks: list[Block], walk: Walk) -> None:
    untrue = []
    for number, block in enumerate(blocks):
        said = [in_general(line, walk.home) for line in walk.by_block.get(number, "").splitlines()]
        for line in block.shown:
            shown = in_general(line, walk.home)
            if shown.strip("… ") and not MAY_BE_ABSENT.match(shown) and not is_shown_truly(shown, said):
                untrue.append(f"block {number}: {line}")
    assert not untrue, "\n".join([*untrue, "", walk.output])


def test_no_request_is_lost_while_a_replica_is_killed(walk: Walk) -> None:
    reports = re.findall(r"answered (\d+) \(replica 0: (\d+), replica 1: (\d+)\), .* lost (\d+)", walk.output)
    answered, by_first, by_second, lost = (int(number) for number in reports[-1])
    assert lost == 0
    assert answered == by_first + by_second > 0
    assert re.search(r"^task=0 state=ready .* restarts=1 .*\n  last exit: run 1: ended by signal 9", walk.output, re.M)


def test_the_model_finds_the_answer_that_shares_no_word_with_the_question(walk: Walk) -> None:
    similarity = re.search(r"\{'Refunds[^']*': ([\d.]+), '[^']*': ([-\d.]+)\}", walk.output)
    assert similarity, walk.output
    assert float(similarity[1]) > 0.3 > float(similarity[2])


def test_nothing_is_left_in_the_newcomers_home(walk: Walk) -> None:
    """But for the interpreter's own history of what was typed."""
    assert {path.name for path in walk.home.iterdir()} <= {".python_history"}


def test_the_tutorial_can_be_pasted() -> None:
    """A comment or a prompt in a command would be run; a line that is too long is cut or wrapped in a browser."""
    wrong = [
        line
        for block in blocks_of(DOCUMENT.read_text())
        for line in block.code.splitlines()
        if line.startswith(("$ ", "> ", "#", ">>> ")) or len(line) > 120
    ]
    assert not wrong
