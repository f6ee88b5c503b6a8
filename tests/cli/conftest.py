"""A daemon of the test's own, asked through the real command line; it must be left clean: `leave --stop-all` exits
0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.daemon import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One per file of tests, because a start costs a second; each test uses job names of its own."""
    home: Path = tmp_path_factory.mktemp("cli")
    running = Daemon(home).start()
    try:
        yield running
        done = running.cli("leave", "--stop-all")
        assert done.returncode == 0, done.stderr
        assert running.process is not None
        assert running.process.wait(10) == 0
    finally:
        running.end()
