"""The steps of a key's rotation: at each, whoever seals is understood by everybody."""

from __future__ import annotations

from dataclasses import replace

from gpulayer.core.cluster.apply import Rejected
from gpulayer.core.cluster.commands import Command, FoundTrust, InstallKey, RetireKey, UseKey
from gpulayer.core.cluster.trust import key_id
from gpulayer.model.trust import GossipKey
from tests.core.cluster.states import Cluster
from tests.core.cluster.test_registry import FOUNDED, founded


def key(letter: bytes) -> GossipKey:
    secret = letter * 32
    return GossipKey(id=key_id(secret), secret=secret)


OLD, NEW, THIRD = FOUNDED.key, key(b"n"), key(b"t")


def ring(cluster: Cluster) -> tuple[str, list[int]]:
    return cluster.state.key_ring.rotation, [each.id for each in cluster.state.key_ring.keys]


def refused(cluster: Cluster, command: Command) -> None:
    before = cluster.state.key_ring
    result = cluster.do(command).result
    assert isinstance(result, Rejected), result
    assert cluster.state.key_ring == before


def test_a_rotation_installs_uses_and_retires_and_each_step_raises_the_version() -> None:
    cluster = founded()
    assert ring(cluster) == ("", [OLD.id])
    seen = []
    for command, expected in (
        (InstallKey(key=NEW), ("installing", [OLD.id, NEW.id])),
        (UseKey(key_id=NEW.id), ("using", [NEW.id, OLD.id])),
        (RetireKey(key_id=OLD.id), ("", [NEW.id])),
    ):
        cluster.do(command)
        assert ring(cluster) == expected
        seen.append((cluster.state.key_ring.version, *cluster.kinds))
    assert seen == [(2, "key.installed"), (3, "key.used"), (4, "key.retired")]


def test_a_step_said_twice_changes_nothing() -> None:
    cluster = founded(InstallKey(key=NEW), UseKey(key_id=NEW.id))
    version = cluster.state.key_ring.version
    cluster.do(UseKey(key_id=NEW.id))
    assert cluster.kinds == []
    cluster.do(RetireKey(key_id=OLD.id), RetireKey(key_id=OLD.id))
    assert cluster.kinds == []
    assert cluster.state.key_ring.version == version + 1


def test_steps_out_of_order_are_refused() -> None:
    cluster = founded()
    refused(cluster, UseKey(key_id=NEW.id))
    refused(cluster, RetireKey(key_id=OLD.id))
    refused(cluster, InstallKey(key=OLD))
    cluster.do(InstallKey(key=NEW))
    refused(cluster, InstallKey(key=THIRD))
    refused(cluster, RetireKey(key_id=OLD.id))
    refused(cluster, RetireKey(key_id=NEW.id))
    cluster.do(UseKey(key_id=NEW.id))
    refused(cluster, InstallKey(key=THIRD))
    refused(cluster, RetireKey(key_id=NEW.id))


def test_a_key_that_is_none_is_refused() -> None:
    cluster = founded()
    refused(cluster, InstallKey(key=replace(NEW, secret=b"short")))
    refused(cluster, InstallKey(key=replace(NEW, id=NEW.id + 1)))


def test_the_time_of_installation_is_that_of_the_cluster() -> None:
    cluster = founded(InstallKey(key=replace(NEW, installed_at_utc=1e12)))
    assert cluster.state.key_ring.keys[-1].installed_at_utc == cluster.state.time_utc


def test_trust_is_founded_once() -> None:
    cluster = founded()
    assert isinstance(cluster.do(FOUNDED).result, Rejected)
    assert isinstance(Cluster(InstallKey(key=NEW)).applied[-1].result, Rejected)
    assert isinstance(
        Cluster(FoundTrust(authority=FOUNDED.authority, key=replace(OLD, id=1))).applied[-1].result, Rejected
    )
