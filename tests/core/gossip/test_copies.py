"""How a change of a record gets to everybody, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpulayer.core.gossip.messages import GossipEvent, Newer, Received, RecordChanged, SendDatagram, SetLeader, SetOwn
from gpulayer.model.ids import NodeId
from tests.core.gossip.net import Host, Net

KEY = "r/j-abcdefghij.0.1"
# A replica's record is of about this size.
SMALL = 400
LARGE = 8000


def have(hosts: Iterable[Host], owner: Host, value: bytes) -> bool:
    return all(host.gossip.record(owner.id).get(KEY) == value for host in hosts)


def heard(owner: Host, version: int, *, node: NodeId | None = None, epoch: int = 1) -> GossipEvent:
    """`owner` says how far a record is, its own where no other node is named."""
    newer = Newer(node=node or owner.id, epoch=epoch, gc_version=0, version=version)
    return Received(source=owner.gossip.own.run, messages=(newer,), at=owner.address)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("loss", [0.0, 0.05])
@pytest.mark.parametrize("count", [2, 5, 32])
def test_a_change_gets_to_everybody_soon(count: int, loss: float, size: int) -> None:
    net = Net(count, loss=loss)
    hosts = net.start(count, settle=10.0)
    for number, owner in enumerate(hosts[:5]):
        value = bytes((number,)) * size
        net.give(owner, SetOwn(values={KEY: value}))
        assert net.run_until(lambda: have(hosts, owner, value), 10.0) < 4.0  # noqa: B023
        net.run(1.0)


def test_a_change_is_carried_to_each_about_once_and_told_of_in_few_bytes() -> None:
    net = Net(7)
    hosts = net.start(32, settle=30.0)
    before = dict(net.kinds)
    changes = 20
    for number in range(changes):
        net.give(hosts[number], SetOwn(values={KEY: bytes((number,)) * SMALL}))
        net.run(1.0)
    carried = net.kinds["Delta"] - before.get("Delta", 0)
    assert carried < 1.5 * changes * len(hosts)
    assert net.kinds["Newer"] > carried
    assert net.kinds["Alive"] == before["Alive"]


def test_who_leads_has_a_change_at_once() -> None:
    net = Net(3)
    hosts = net.start(16)
    for host in hosts:
        net.give(host, SetLeader(node=hosts[0].id))
    net.run(3.0)
    for number, owner in enumerate(hosts[1:]):
        value = bytes((number,)) * LARGE
        net.give(owner, SetOwn(values={KEY: value}))
        assert net.run_until(lambda: have(hosts[:1], owner, value), 5.0) < 0.1  # noqa: B023


def test_that_a_record_moved_is_asked_for_where_it_was_said_and_passed_on_when_it_is_here() -> None:
    net = Net(4)
    hosts = net.start(3)
    asker, owner = hosts[:2]
    version = owner.gossip.own.version[1]
    net.give(owner, SetOwn(values={KEY: b"1" * LARGE}))
    effects = net.give(asker, heard(owner, version + 1))
    assert not any(isinstance(effect, SendDatagram | RecordChanged) for effect in effects)
    assert net.run_until(lambda: have(hosts, owner, b"1" * LARGE), 5.0) < 2.0
    assert net.kinds["Pull"]
    assert asker.member(owner.id).version == owner.gossip.own.version


def test_how_far_a_record_is_said_to_be_means_nothing_of_strangers_and_other_runs() -> None:
    net = Net(5)
    hosts = net.start(3)
    asker, owner = hosts[:2]
    known = dict(asker.gossip.members())
    for event in (
        heard(owner, 99, node=NodeId("n-00000000000000ff")),
        heard(owner, 99, epoch=2),
        heard(owner, 99, epoch=0),
        heard(owner, 0),
        heard(owner, 99, node=asker.id, epoch=2),
    ):
        net.give(asker, event)
    now = asker.gossip.members()
    assert {node: member.version for node, member in now.items()} == {
        node: member.version for node, member in known.items()
    }


def test_a_record_that_somebody_else_wrote_in_our_name_is_outbid() -> None:
    """Another daemon ran with a copy of our data directory."""
    net = Net(6)
    hosts = net.start(3)
    owner = hosts[1]
    net.give(owner, SetOwn(values={KEY: b"ours"}))
    net.give(owner, heard(hosts[0], 50, node=owner.id))
    assert owner.gossip.own.version > (50, 50)
    net.run(5.0)
    assert have(hosts, owner, b"ours")


def test_it_is_known_which_version_of_a_record_was_announced_and_is_not_here_and_since_when() -> None:
    net = Net(9)
    hosts = net.start(3)
    observer, owner = hosts[:2]
    assert (observer.gossip.announced_version(owner.id), observer.gossip.behind_since(owner.id)) == (0, None)
    net.give(owner, SetOwn(values={KEY: b"1" * LARGE}))
    version = owner.gossip.own.version[1]
    net.is_cut = lambda a, b, kind: True
    began = net.now
    net.give(observer, heard(owner, version))
    net.run(0.01)
    net.give(observer, heard(owner, version))
    assert observer.gossip.announced_version(owner.id) == version
    assert observer.gossip.behind_since(owner.id) == began
    net.is_cut = lambda a, b, kind: False
    assert net.run_until(lambda: have([observer], owner, b"1" * LARGE), 15.0) < 15.0
    assert (observer.gossip.announced_version(owner.id), observer.gossip.behind_since(owner.id)) == (0, None)


def test_a_node_that_is_not_known_or_has_said_nothing_is_not_behind() -> None:
    net = Net(10)
    hosts = net.start(2)
    for node in (hosts[0].id, hosts[1].id, NodeId("n-00000000000000aa")):
        assert (hosts[0].gossip.announced_version(node), hosts[0].gossip.behind_since(node)) == (0, None)
