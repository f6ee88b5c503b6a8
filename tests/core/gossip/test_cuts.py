"""Clusters that are cut in two, and members that hear nobody: who is held dead, how soon, and by whom."""

from __future__ import annotations

import pytest

from gpulayer.core.gossip.messages import SetSeeds
from tests.core.gossip.net import Host, Net, address_of


def cut(net: Net, part: list[Host]) -> None:
    inside = {host.id for host in part}
    net.is_cut = lambda a, b, kind: (a.id in inside) != (b.id in inside)


def heal(net: Net) -> None:
    net.is_cut = lambda a, b, kind: False


def deaths_held_by(host: Host) -> list[str]:
    return [change.after.id for _, change in host.changes if change.after.state == "dead"]


# --- two sides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "part"), [(4, 2), (5, 2), (6, 3), (7, 3), (8, 4), (20, 10)])
def test_both_sides_of_a_cut_hold_each_other_dead_as_soon_as_a_host_without_power(size: int, part: int) -> None:
    for seed in range(5):
        net = Net(seed)
        hosts = net.start(size)
        net.run(5.0)
        cut(net, hosts[:part])
        one, other = hosts[:part], hosts[part:]
        took = net.run_until(
            lambda one=one, other=other: all(a.sees(b.id) == b.sees(a.id) == "dead" for a in one for b in other),  # type: ignore[misc]
            30.0,
        )
        assert took < 9.0, f"seed {seed}"
        heal(net)
        assert net.run_until(net.is_settled, 30.0) < 15.0, f"seed {seed}"


# --- nobody is heard --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("can_send", [False, True])
def test_who_hears_nobody_accuses_nobody_and_says_that_it_is_isolated(size: int, can_send: bool) -> None:
    net = Net(size)
    hosts = net.start(size)
    net.run(3.0)
    deaf = hosts[1]
    net.is_cut = lambda a, b, kind: b is deaf or (a is deaf and not can_send)
    before = len(deaf.changes)
    net.run(120.0)
    assert deaf.changes[before:] == []
    assert deaf.gossip.is_isolated
    assert deaf.gossip.health > 0
    heal(net)
    assert net.run_until(net.is_settled, 30.0) < 15.0
    net.run(10.0)
    assert not deaf.gossip.is_isolated
    assert not any(deaths_held_by(host) for host in hosts if host is deaf)


def test_a_suspicion_does_not_run_out_while_nobody_is_heard_nor_at_once_when_somebody_is() -> None:
    net = Net(3)
    hosts = net.start(5)
    net.run(3.0)
    deaf, doubted = hosts[0], hosts[3]
    net.is_cut = lambda a, b, kind: doubted in (a, b)
    net.run_until(lambda: deaf.sees(doubted.id) == "suspect", 10.0)
    net.is_cut = lambda a, b, kind: b is deaf or a is deaf
    net.run(60.0)
    assert deaths_held_by(deaf) == []
    heal(net)
    assert net.run_until(net.is_settled, 30.0) < 15.0
    assert deaths_held_by(deaf) == []


def test_the_other_of_two_is_dead_though_nothing_is_heard_of_anybody() -> None:
    net = Net(4)
    hosts = net.start(2)
    net.run(3.0)
    net.power_off(hosts[1])
    assert net.run_until(lambda: hosts[0].sees(hosts[1].id) == "dead", 30.0) < 6.0


def test_two_of_three_that_lose_power_one_after_the_other_are_both_dead() -> None:
    """The one that is left hears nobody then; but there was somebody who could have been heard when it began."""
    net = Net(5)
    hosts = net.start(3)
    net.run(3.0)
    net.power_off(hosts[1])
    net.run_until(lambda: hosts[0].sees(hosts[1].id) == "suspect", 10.0)
    net.power_off(hosts[2])
    assert net.run_until(lambda: all(hosts[0].sees(host.id) == "dead" for host in hosts[1:]), 60.0) < 30.0


def test_who_hears_nobody_finds_those_who_are_at_its_seeds_by_now() -> None:
    """Whoever is alive in its table may be elsewhere: all others were restarted at other addresses meanwhile."""
    net = Net(6)
    hosts = net.start(4)
    net.run(3.0)
    net.give(hosts[0], SetSeeds(addresses=(address_of(9),)))
    for host in hosts[1:]:
        net.power_off(host)
    net.run(20.0)
    assert hosts[0].gossip.is_isolated
    moved = [net.add(host.number, epoch=2, address=address_of(9 + host.number)) for host in hosts[1:]]
    seed = net.add(20, address=address_of(9))
    for host in moved:
        net.give(host, SetSeeds(addresses=(seed.address,)))
    assert net.run_until(lambda: all(hosts[0].sees(host.id) == "alive" for host in [*moved, seed]), 30.0) < 12.0
