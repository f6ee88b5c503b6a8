"""Failpoints do what the environment says, when it says so, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpulayer.runtime.failpoints import Armed, failpoint, parse

PROGRAM = """
import sys
from gpulayer.runtime.failpoints import failpoint
for turn in range(4):
    try:
        failpoint("here")
        print(turn, flush=True)
    except OSError as exc:
        print(exc.strerror, flush=True)
"""


def run(failpoints: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "GPULAYER_FAILPOINTS": failpoints},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_every_form_is_read() -> None:
    assert parse(" a=kill, b=kill:3 ,c=error,d=error:2,e=sleep:0.5,") == {
        "a": Armed(act="kill"),
        "b": Armed(act="kill", at=3),
        "c": Armed(act="error"),
        "d": Armed(act="error", at=2),
        "e": Armed(act="sleep", seconds=0.5),
    }


@pytest.mark.parametrize("text", ["a", "=kill", "a=die", "a=kill:x", "a=sleep", "a=sleep:"])
def test_a_typo_is_an_error_and_not_a_passing_test(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        parse(text)


def test_nothing_happens_when_nothing_is_armed() -> None:
    failpoint("here")


def test_the_process_is_killed_at_the_nth_time() -> None:
    done = run("here=kill:3")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1"])


def test_an_error_stays_once_it_has_come() -> None:
    done = run("here=error:3,elsewhere=kill")
    assert done.stdout.splitlines() == ["0", "1", "Input/output error", "Input/output error"]


def test_the_daemon_does_not_start_with_a_typo() -> None:
    done = run("here=explode")
    assert done.returncode != 0
    assert "cannot read 'here=explode'" in done.stderr
