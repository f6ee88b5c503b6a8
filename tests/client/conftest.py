"""A daemon of the test's own, left clean afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.daemon import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One per file of tests, because a start costs a second; each test uses job names of its own."""
    running = Daemon(tmp_path_factory.mktemp("client")).start()
    try:
        yield running
    finally:
        running.end()
