"""Fixtures: clusters in network namespaces, ended with all that they started. Skipped where none can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.hosts.hosts import Cluster
from tests.hosts.network import missing

ClusterMaker = Callable[[int], Cluster]


@pytest.fixture(scope="module")
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterMaker]:
    """Makes hosts, so many; nothing runs on them yet. One network serves a file: what it starts takes seconds."""
    if reason := missing():
        pytest.skip(reason)
    made: list[Cluster] = []

    def make(count: int) -> Cluster:
        cluster = Cluster(tmp_path_factory.mktemp("lan", numbered=True), count)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close()
