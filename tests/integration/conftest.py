"""Fixtures: a running daemon with two declared GPUs, and a maker of daemons for tests that need it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import locks_of_fakes  # noqa: F401
from tests.integration.daemon import Daemon

TWO_GPUS = """
[[accelerators]]
kind = "cuda"
model = "H100"
memory = "80GiB"
uuid = "GPU-a"

[[accelerators]]
kind = "cuda"
model = "H100"
memory = "80GiB"
uuid = "GPU-b"
"""
ONE_GPU = """
[[accelerators]]
kind = "cuda"
model = "A10"
memory = "24GiB"
uuid = "GPU-a"
"""

DaemonMaker = Callable[..., Daemon]


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[DaemonMaker]:
    """Makes daemons (not started), each in a directory of its own, and ends what they and their replicas became."""
    made: list[Daemon] = []

    def make(**options: Any) -> Daemon:
        name = options.setdefault("name", f"n{len(made) + 1}")
        daemon = Daemon(tmp_path / name, **options)
        made.append(daemon)
        return daemon

    yield make
    problems = []
    # The first holds the log of those that joined it, and may not leave before them.
    for daemon in reversed(made):
        try:
            daemon.end()
        except AssertionError as problem:
            problems.append(str(problem))
    assert not problems, "\n".join(problems)


@pytest.fixture
def daemon(make_daemon: DaemonMaker) -> Daemon:
    """One running daemon with two declared GPUs."""
    return make_daemon(config=TWO_GPUS).start()
