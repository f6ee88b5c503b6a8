"""Cores that look for one another: seeds, those who were here once, the registry, links worth keeping."""

from __future__ import annotations

from gpulayer.core.base import Tick
from gpulayer.core.gossip.contacts import CALLS_MAX, LINKS_MAX
from gpulayer.core.gossip.messages import (
    Alive,
    CloseLink,
    Contact,
    LeaveWanted,
    LinkDown,
    LinkUp,
    MemberForgotten,
    Received,
    SetLeader,
    SetOwn,
    SetRegistry,
    SetSeeds,
    Warned,
)
from gpulayer.model.address import Address
from gpulayer.model.member import TCP_IMPAIRED, Run
from tests.core.gossip.net import Host, Net, address_of, node_id


def ids(*hosts: Host) -> frozenset[str]:
    return frozenset(host.id for host in hosts)


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_a_lone_node_with_nobody_to_find_wants_nothing() -> None:
    net = Net(1)
    host = net.add(0)
    net.give(host, SetSeeds(addresses=(host.address,)))
    net.run(1.0)
    assert host.gossip.deadline == float("inf")
    assert not host.gossip.is_isolated


def test_a_node_whose_seed_starts_later_finds_it_soon_after() -> None:
    net = Net(2)
    early, seed_address = net.add(1), address_of(0)
    net.give(early, SetSeeds(addresses=(seed_address,)))
    net.run(60.0)
    assert early.gossip.is_isolated
    net.add(0)
    assert net.run_until(net.is_settled, 20) < 7.5


def test_those_who_started_first_and_those_who_came_later_make_one_cluster() -> None:
    net = Net(3)
    hosts = [net.add(number) for number in range(12)]
    for host in hosts:
        net.give(host, SetSeeds(addresses=(hosts[(host.number + 5) % 12].address,)))
    assert net.run_until(net.is_settled, 20) < 5.0


def test_of_many_addresses_only_so_many_are_called_at_once() -> None:
    net = Net(4)
    host = net.add(0)
    net.give(host, SetSeeds(addresses=tuple(address_of(number) for number in range(1, 200))))
    called = [effect for effect in net.give(host, Tick()) if isinstance(effect, Contact)]
    assert len(called) == CALLS_MAX


def test_parts_of_a_cluster_that_have_buried_each_other_become_one_again_by_themselves() -> None:
    net = Net(5)
    hosts = net.start(8)
    part = ids(*hosts[:3])
    for host in hosts:
        net.give(host, SetSeeds(addresses=()))
    net.is_cut = lambda a, b, kind: (a.id in part) != (b.id in part)
    net.run(300.0)
    assert {a.sees(b.id) for a in hosts[:3] for b in hosts[3:]} == {"dead"}
    net.is_cut = lambda a, b, kind: False
    assert net.run_until(net.is_settled, 60) < 15.0


# --- the registry -----------------------------------------------------------------------------------------------------


def test_hearsay_of_a_node_that_is_not_registered_makes_no_member_until_it_is() -> None:
    net = Net(6)
    hosts = net.start(3)
    for host in hosts:
        net.give(host, SetRegistry(nodes=ids(*hosts)))
    stranger = Alive(run=Run(node_id(77), 1, 5), incarnation=0, addresses=(address_of(77),))
    net.give(hosts[0], Received(source=hosts[1].gossip.own.run, messages=(stranger,), at=hosts[1].address))
    net.run(5.0)
    assert all(host.gossip.member(node_id(77)) is None for host in hosts)
    net.give(hosts[0], SetRegistry(nodes=ids(*hosts) | {node_id(77)}))
    assert hosts[0].sees(node_id(77)) == "alive"


def test_a_link_makes_a_member_of_a_node_that_the_registry_here_does_not_hold_yet() -> None:
    net = Net(7)
    hosts = net.start(3)
    for host in hosts:
        net.give(host, SetRegistry(nodes=ids(*hosts)))
    newcomer = net.add(8)
    net.give(newcomer, SetSeeds(addresses=(hosts[1].address,)))
    net.run(1.0)
    assert hosts[1].sees(newcomer.id) == "alive"
    for host in hosts:
        net.give(host, SetRegistry(nodes=ids(*hosts, newcomer)))
    assert net.run_until(net.is_settled, 5) < 2.0


def test_who_is_taken_out_of_the_registry_is_forgotten_and_told_nothing_more() -> None:
    net = Net(8)
    hosts = net.start(4)
    expelled = hosts[3]
    for host in hosts[:3]:
        net.give(host, SetRegistry(nodes=ids(*hosts)))
        net.give(host, SetRegistry(nodes=ids(*hosts[:3])))
        assert host.gossip.member(expelled.id) is None
        assert [e.node for _, e in host.others if isinstance(e, MemberForgotten)] == [expelled.id]
    sent: list[object] = []
    original = net._send
    net._send = lambda host, effect: (
        sent.append(effect) if effect.to == expelled.id else None,
        original(host, effect),
    )[1]  # type: ignore[method-assign]
    net.run(30.0)
    assert [effect for effect in sent if effect.to == expelled.id] == []  # type: ignore[attr-defined]
    assert all(host.gossip.member(expelled.id) is None for host in hosts[:3])


def test_a_node_that_was_let_go_and_starts_again_at_once_is_not_seen_and_its_last_words_are() -> None:
    net = Net(17)
    hosts = net.start(5)
    leaver = hosts[4]
    for host in hosts:
        net.give(host, SetRegistry(nodes=ids(*hosts)))
    for host in hosts[:4]:
        net.give(host, SetRegistry(nodes=ids(*hosts[:4]), parting=frozenset({leaver.id})))
    net.give(leaver, LeaveWanted())
    net.run(1.0)
    assert all(host.sees(leaver.id) == "left" for host in hosts[:4])
    again = net.restart(leaver)
    net.give(again, SetSeeds(addresses=(hosts[0].address,)))
    net.run(4.0)
    assert {change.after.run for host in hosts[:4] for _, change in host.changes if change.after.id == leaver.id} == {
        leaver.gossip.own.run
    }
    for host in hosts[:4]:
        net.give(host, SetRegistry(nodes=ids(*hosts)))
    assert net.run_until(net.is_settled, 20.0) < 10.0


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_to_who_leads_is_kept_and_opened_again() -> None:
    net = Net(9)
    hosts = net.start(3)
    leader, other = hosts[1], hosts[2]
    net.give(other, SetLeader(node=leader.id))
    net.run(1.0)
    assert leader.id in other.links
    net.run(200.0)
    assert leader.id in other.links, "it is never idle for too long"
    other.links.discard(leader.id)
    leader.links.discard(other.id)
    net.give(other, LinkDown(node=leader.id, address=leader.address, why="closed"))
    assert net.run_until(lambda: leader.id in other.links, 10) < 2.0


def test_other_links_are_closed_when_they_are_idle() -> None:
    net = Net(10)
    hosts = net.start(6)
    assert any(host.links for host in hosts)
    net.run(400.0)
    assert not any(host.links for host in hosts)
    assert net.is_settled()


def test_a_node_keeps_no_more_links_of_its_own_than_so_many() -> None:
    net = Net(11)
    host = net.add(0)
    closed = 0
    for number in range(1, LINKS_MAX + 30):
        run = Run(node_id(number), 1, number)
        effects = net.give(host, LinkUp(run=run, addresses=(address_of(number),), is_ours=True))
        closed += sum(isinstance(effect, CloseLink) for effect in effects)
    assert closed == 29


def test_a_link_that_ends_without_a_goodbye_makes_its_other_end_be_asked_at_once() -> None:
    net = Net(12)
    hosts = net.start(8)
    net.give(hosts[0], SetLeader(node=hosts[5].id))
    net.run(1.0)
    net.kill(hosts[5])
    assert net.run_until(lambda: hosts[0].sees(hosts[5].id) == "suspect", 5) < 0.05


# --- blocked connections ----------------------------------------------------------------------------------------------


def test_a_node_whose_connections_are_blocked_says_so_and_takes_it_back_when_they_work() -> None:
    net = Net(13)
    hosts = net.start(6)
    blocked = hosts[3]
    net.run(130.0)  # links of the start are over
    net.is_cut = lambda a, b, kind: kind == "stream" and blocked in (a, b)
    for host in hosts:
        net.give(host, SetLeader(node=hosts[0].id))
    net.run(60.0)
    assert blocked.gossip.own.flags & TCP_IMPAIRED
    assert all(host.member(blocked.id).flags & TCP_IMPAIRED for host in hosts if host is not blocked)
    assert not any(host.gossip.own.flags for host in hosts if host is not blocked)
    assert [e.code for _, e in blocked.others if isinstance(e, Warned)] == ["streams_blocked"]
    assert net.is_settled()
    net.is_cut = lambda a, b, kind: False
    assert net.run_until(lambda: not blocked.gossip.own.flags, 30) < 20.0


def test_hosts_that_are_off_do_not_make_a_node_believe_that_its_own_connections_are_blocked() -> None:
    net = Net(14)
    hosts = net.start(6)
    for host in hosts[3:]:
        net.power_off(host)
    net.run(60.0)
    assert not any(host.gossip.own.flags for host in hosts[:3])


def test_records_still_get_to_everybody_where_one_node_has_no_connections() -> None:
    net = Net(15)
    hosts = net.start(5)
    net.run(130.0)
    blocked = hosts[2]
    net.is_cut = lambda a, b, kind: kind == "stream" and blocked in (a, b)
    net.give(blocked, SetOwn(values={"r/1": b"x" * 300}))
    net.run(5.0)
    assert all(host.gossip.record(blocked.id).get("r/1") == b"x" * 300 for host in hosts)


def test_a_seed_that_is_somebody_known_is_not_called_for_ever() -> None:
    net = Net(16)
    hosts = net.start(3)
    net.give(hosts[2], SetSeeds(addresses=(hosts[0].address, Address("10.9.9.9", 7451))))
    calls = []
    for _ in range(60):
        net.run(1.0)
        calls += [e for e in net.give(hosts[2], Tick()) if isinstance(e, Contact)]
    assert not [call for call in calls if call.address == hosts[0].address]
