"""Cores that are connected with one another: who is found dead, how fast, and who is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulayer.core.gossip.messages import (
    DatagramRefused,
    Dead,
    Departed,
    LeaveWanted,
    Left,
    MemberChanged,
    Message,
    Ping,
    Received,
    SetSeeds,
    Suspect,
    SyncMembers,
    Vouch,
    Warned,
)
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE, IMPAIRED, Run
from tests.core.gossip.net import Host, Net


def deaths(net: Net, *, without: Host | None = None) -> list[MemberChanged]:
    return [
        change
        for host in net.hosts.values()
        for _, change in host.changes
        if change.after.state == "dead" and (without is None or change.after.id != without.id)
    ]


def seeds(*hosts: Host) -> SetSeeds:
    return SetSeeds(addresses=tuple(host.address for host in hosts))


def say(net: Net, to: Host, source: Host, *messages: Message) -> None:
    """A packet that `source` need not have sent."""
    net.give(to, Received(source=source.gossip.own.run, messages=messages, at=source.address))


# --- deaths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 5, 16])
def test_a_killed_daemon_is_known_to_be_gone_by_everybody_within_a_moment(count: int) -> None:
    net = Net(count)
    hosts = net.start(count)
    net.kill(hosts[-1])
    assert net.run_until(lambda: net.all_see(hosts[-1].id, "dead"), 10) < 2.0
    assert {host.member(hosts[-1].id).cause for host in net.up()} == {"daemon"}
    net.run(10)
    assert len(deaths(net)) == count - 1


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_a_host_that_is_off_is_found_dead_by_everybody_within_the_bound(count: int) -> None:
    net = Net(count)
    hosts = net.start(count)
    net.power_off(hosts[-1])
    taken = net.run_until(lambda: net.all_see(hosts[-1].id, "dead"), 20)
    assert 3.0 < taken < 6.5
    assert {host.member(hosts[-1].id).cause for host in net.up()} == {"silent"}


def test_one_member_that_is_refused_buries_nobody() -> None:
    """A firewall on one host rejects what it sends; all others hear the members well."""
    net = Net(4)
    hosts = net.start(5)
    fooled = hosts[0]
    for _ in range(200):
        for host in hosts[1:]:
            net.give(fooled, DatagramRefused(address=host.address))
        net.run(0.1)
    assert not deaths(net)
    assert net.run_until(net.is_settled, 10) < 10


def test_two_killed_daemons_of_three_are_found_too() -> None:
    net = Net(2)
    hosts = net.start(3)
    net.kill(hosts[1])
    net.kill(hosts[2])
    net.run(12)
    assert {hosts[0].sees(host.id) for host in hosts[1:]} == {"dead"}


def test_a_daemon_that_comes_back_at_once_is_alive_in_its_new_run() -> None:
    net = Net(3)
    hosts = net.start(5)
    again = net.restart(hosts[2])
    net.give(again, seeds(hosts[0]))

    def is_known_anew() -> bool:
        return net.is_settled() and all(host.member(again.id).run.epoch == 2 for host in net.up())

    assert net.run_until(is_known_anew, 10) < 3.0
    net.run(30)
    assert net.is_settled()


# --- no deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.01, 0.25, 0.4])
def test_lost_packets_bury_nobody(loss: float) -> None:
    net = Net(int(loss * 100))
    net.start(10)
    net.loss = loss
    net.run(60)
    assert not deaths(net)


def test_processes_that_stand_still_for_a_while_are_not_buried_and_bury_nobody() -> None:
    net = Net(9, loss=0.03)
    hosts = net.start(10)
    for round_ in range(15):
        for host in hosts[:3]:
            if not host.is_paused:
                net.pause(host, net.random.uniform(0.5, 2.5))
        net.run(3.0 + round_ / 10)
    assert not deaths(net)
    assert sum(host.gossip.counters().get("pauses", 0) for host in hosts) > 20


def test_who_was_away_for_longer_than_the_others_wait_comes_back_and_accuses_nobody() -> None:
    net = Net(8)
    hosts = net.start(8)
    sleeper = hosts[3]
    net.pause(sleeper, 15.0)
    net.run(14.9)
    assert net.all_see(sleeper.id, "dead")
    before = sleeper.gossip.own.incarnation
    assert net.run_until(net.is_settled, 10) < 2.0
    assert sleeper.gossip.own.incarnation > before
    net.run(20)
    assert not deaths(net, without=sleeper)


def test_a_direct_path_that_is_cut_is_bridged_by_the_only_other_member() -> None:
    net = Net(5)
    hosts = net.start(3)
    pair = {hosts[0].id, hosts[1].id}
    net.is_cut = lambda a, b, kind: {a.id, b.id} == pair
    net.run(300)
    assert not deaths(net)
    assert not any(host.gossip.counters().get("suspicions") for host in hosts)


def test_a_member_whose_datagrams_are_blocked_stays_and_is_told_of_once() -> None:
    net = Net(6)
    hosts = net.start(6)
    blocked = hosts[-1]
    net.is_cut = lambda a, b, kind: kind == "datagram" and blocked in (a, b)
    net.run(300)
    assert not deaths(net)
    for host in hosts[:-1]:
        warned = [effect for _, effect in host.others if isinstance(effect, Warned)]
        assert [warning.code for warning in warned] == ["datagrams_blocked"]
    net.is_cut = lambda a, b, kind: False
    net.run(30)
    assert not any(host.gossip._outbox.over_stream for host in hosts)


def test_a_member_that_hears_nothing_buries_no_others() -> None:
    """It can send: its accusations reach everybody, and so do the answers of the accused."""
    net = Net(7)
    hosts = net.start(8)
    deaf = hosts[-1]
    net.is_cut = lambda a, b, kind: b is deaf
    net.run(300)
    assert all(net.hosts[a.id].sees(b.id) == "alive" for a in hosts[:-1] for b in hosts[:-1] if a is not b)
    assert not [change for change in deaths(net, without=deaf) if change.after.id in {h.id for h in hosts[:-1]}][
        len(hosts) - 1 :
    ]
    assert deaf.gossip.is_isolated
    assert deaf.gossip.health == 8
    net.is_cut = lambda a, b, kind: False
    assert net.run_until(net.is_settled, 20) < 15


def test_a_host_that_cannot_send_accuses_nobody() -> None:
    net = Net(11)
    hosts = net.start(6)
    broken = hosts[0]
    net.is_cut = lambda a, b, kind: a is broken or b is broken
    for _ in range(50):
        for host in hosts[1:]:
            net.fail_to_send(broken, host.address)
        net.run(0.1)
    own_deaths = [change for _, change in broken.changes if change.after.state in ("suspect", "dead")]
    assert own_deaths == []
    assert net.all_see(broken.id, "dead")
    assert [effect.code for _, effect in broken.others if isinstance(effect, Warned)] == ["cannot_send"]


def test_a_host_that_cannot_send_to_some_accuses_those_and_not_itself() -> None:
    """A route that is gone, or a rule of its own firewall, towards half of the members. Each packet to one of them
    fails, those of gossip too, and more of these than a round of probes has packets."""
    net = Net(13)
    hosts = net.start(4)
    here, there = hosts[:2], hosts[2:]
    net.is_cut = lambda a, b, kind: (a in here) != (b in here)
    for _ in range(250):
        for sides in ((here, there), (there, here)):
            for host in sides[0]:
                for other in sides[1]:
                    net.fail_to_send(host, other.address)
        net.run(0.1)
    assert all(host.member(other.id).state == "dead" for host in here for other in there)
    assert [effect for host in hosts for _, effect in host.others if isinstance(effect, Warned)] == []


def test_a_member_that_only_some_hear_is_kept_by_their_word_and_marked() -> None:
    """It hears nothing and says little, but witnesses vouch for it; new work should go elsewhere."""
    net = Net(12)
    hosts = net.start(6)
    half = hosts[-1]
    net.is_cut = lambda a, b, kind: b is half
    for _ in range(40):
        for host in hosts[:-1]:  # it goes on sending, to whom it reaches
            ping = Ping(seq=0, target=host.id, epoch=host.gossip.own.run.epoch)
            net.give(host, Received(source=half.gossip.own.run, messages=(ping,), at=half.address))
        net.run(1.0)
    assert net.all_see(half.id, "suspect")
    assert all(host.member(half.id).flags & IMPAIRED for host in hosts[:-1])
    net.is_cut = lambda a, b, kind: False
    assert net.run_until(net.is_settled, 20) < 15
    assert not any(host.member(half.id).flags & IMPAIRED for host in hosts[:-1])


# --- words ----------------------------------------------------------------------------------------------------------


def test_who_is_accused_answers_the_accuser_at_once() -> None:
    net = Net(13)
    hosts = net.start(4)
    accused = hosts[1]
    word = Suspect(node=accused.id, epoch=1, incarnation=5, cause="timeout", reporter=hosts[2].id)
    say(net, hosts[0], hosts[2], word)
    assert hosts[0].sees(accused.id) == "suspect"
    say(net, accused, hosts[0], word)
    assert accused.gossip.own.incarnation == 6
    net.run(0.01)
    assert hosts[0].sees(accused.id) == "alive"
    assert hosts[2].member(accused.id).incarnation == 6


def test_an_accusation_of_an_older_run_or_incarnation_costs_nothing() -> None:
    net = Net(14)
    hosts = net.start(3)
    accused = net.restart(hosts[1])
    net.give(accused, seeds(hosts[0]))
    net.run(3)
    before = accused.gossip.own.incarnation
    say(net, accused, hosts[0], Dead(node=accused.id, epoch=1, incarnation=99, cause="silent", reporter=hosts[2].id))
    assert accused.gossip.own.incarnation == before
    assert accused.gossip.health == 0
    say(net, hosts[0], hosts[2], Dead(node=accused.id, epoch=1, incarnation=99, cause="silent", reporter=hosts[2].id))
    assert hosts[0].sees(accused.id) == "alive"


def test_an_accusation_that_cannot_be_refuted_is_ignored_by_all() -> None:
    net = Net(15)
    hosts = net.start(3)
    word = Dead(node=hosts[1].id, epoch=1, incarnation=2**64 - 1, cause="silent", reporter=hosts[2].id)
    for host in hosts[:2]:
        say(net, host, hosts[2], word)
    net.run(5)
    assert net.is_settled()


def test_an_accusation_of_a_stranger_is_passed_on_once() -> None:
    net = Net(16)
    hosts = net.start(3)
    stranger = NodeId("n-00000000000000ee")
    word = Dead(node=stranger, epoch=1, incarnation=0, cause="silent", reporter=hosts[2].id)
    before = net.kinds["Dead"]
    for _ in range(5):
        say(net, hosts[0], hosts[2], word)
    net.run(2)
    assert 1 <= net.kinds["Dead"] - before <= len(hosts)
    assert hosts[0].gossip.member(stranger) is None


def test_a_dead_one_in_somebodys_table_is_suspected_and_may_answer() -> None:
    net = Net(17)
    hosts = net.start(4)
    alive = hosts[0].gossip._members.word_of(hosts[1].id)
    say(net, hosts[0], hosts[2], SyncMembers(members=((alive, "dead", "silent"),)))
    assert hosts[0].sees(hosts[1].id) == "suspect"
    assert net.run_until(net.is_settled, 5) < 1.0
    assert not deaths(net)


def test_a_vouch_stops_the_burial_of_a_member_that_two_were_refused_by() -> None:
    net = Net(18)
    hosts = net.start(5)
    subject, hearer = hosts[4], hosts[3]
    incarnation = hosts[0].member(subject.id).incarnation
    net.is_cut = lambda a, b, kind: subject in (a, b)
    for reporter in hosts[1:3]:
        word = Suspect(node=subject.id, epoch=1, incarnation=incarnation, cause="refused", reporter=reporter.id)
        for host in hosts[:4]:
            say(net, host, reporter, word)
    say(net, hearer, subject, Ping(seq=0, target=hearer.id, epoch=1))
    net.run(0.3)
    assert all(host.sees(subject.id) == "suspect" for host in hosts[:4])


def test_who_left_is_never_called_dead_and_does_not_come_back_in_that_run() -> None:
    net = Net(19)
    hosts = net.start(6)
    leaver = hosts[2]
    word = leaver.gossip._members.word_of(leaver.id)
    net.give(leaver, LeaveWanted())
    net.run_until(lambda: any(isinstance(e, Departed) for _, e in leaver.others), 5)
    departed = [effect for _, effect in leaver.others if isinstance(effect, Departed)]
    assert departed[0].acknowledged >= 3
    net.kill(leaver)
    net.run(20)
    assert net.all_see(leaver.id, "left")
    assert not deaths(net)
    say(net, hosts[0], hosts[1], word)
    assert hosts[0].sees(leaver.id) == "left"


def test_leaving_ends_in_time_when_nobody_answers_and_at_once_when_nobody_is_there() -> None:
    net = Net(20)
    lone = net.add(0)
    effects = net.give(lone, LeaveWanted())
    assert [e.acknowledged for e in effects if isinstance(e, Departed)] == [0]
    net = Net(21)
    hosts = net.start(3)
    net.is_cut = lambda a, b, kind: True
    net.give(hosts[0], LeaveWanted())
    taken = net.run_until(lambda: any(isinstance(e, Departed) for _, e in hosts[0].others), 10)
    assert abs(taken - Profile().leave_timeout) < 0.1


def test_a_copied_identity_is_noticed_by_both_and_by_the_others() -> None:
    net = Net(22)
    hosts = net.start(3)
    twin = Run(hosts[1].id, 1, 4711)
    alive = hosts[1].gossip._members.word_of(hosts[1].id)

    net.give(hosts[0], Received(source=twin, messages=(replace(alive, run=twin),), at=hosts[1].address))
    net.run(2)

    assert hosts[1].gossip.own.flags & DUPLICATE
    assert all(host.member(hosts[1].id).flags & DUPLICATE for host in (hosts[0], hosts[2]))
    assert hosts[0].member(hosts[1].id).run == hosts[1].gossip.own.run


def test_that_we_left_is_for_us_to_say_and_not_believed_from_others() -> None:
    net = Net(23)
    hosts = net.start(3)
    say(net, hosts[1], hosts[0], Left(node=hosts[1].id, epoch=1, incarnation=hosts[1].gossip.own.incarnation))
    assert hosts[1].gossip.own.state == "alive"


# --- one address, two members -----------------------------------------------------------------------------------------


def test_two_members_at_one_address_are_marked_and_not_buried_and_nobody_else_is_suspected() -> None:
    """Which of the two a packet reaches changes all the time, as it does with a doubled IP address on one network."""
    net = Net(24)
    hosts = net.start(5)
    twin = net.add(9, address=hosts[4].address)
    net.give(twin, seeds(hosts[0]))
    net.run(3.0)
    pair = {hosts[4].id, twin.id}
    # A connection does not outlive such a change.
    net.is_cut = lambda a, b, kind: kind == "stream" and bool({a.id, b.id} & pair)
    for turn in range(240):
        net.by_address[twin.address] = (hosts[4], twin)[turn % 2]
        net.run(0.5)
    assert not deaths(net)
    observers = hosts[:4]
    assert not [c for h in observers for _, c in h.changes if c.after.state == "suspect" and c.after.id not in pair]
    warned = {effect.code for host in observers for _, effect in host.others if isinstance(effect, Warned)}
    assert warned == {"duplicate_address"}
    assert all(host.member(node).flags & DUPLICATE for host in observers for node in pair)
    net.is_cut = lambda a, b, kind: False
    net.by_address[twin.address] = hosts[4]
    net.give(twin, LeaveWanted())
    net.run(5.0)
    net.kill(twin)
    net.run(20.0)
    assert not any(host.member(hosts[4].id).flags for host in observers), "the other has the address for itself now"


def test_a_new_identity_at_an_old_address_does_not_keep_the_old_one_alive() -> None:
    """A host whose data directory was wiped: nothing is heard of its former node any more."""
    net = Net(25)
    hosts = net.start(5)
    net.kill(hosts[4])
    anew = net.add(9, address=hosts[4].address)
    net.give(anew, seeds(hosts[0]))
    assert net.run_until(lambda: net.all_see(hosts[4].id, "dead"), 120) < 90
    net.run(5)
    assert net.all_see(anew.id, "alive")


def test_a_lie_that_a_member_has_left_is_refuted_as_any_other() -> None:
    """One member's word would else put another out of the cluster until that one is restarted."""
    net = Net(26)
    hosts = net.start(8)
    victim, liar = hosts[3], hosts[7]
    word = Left(node=victim.id, epoch=1, incarnation=victim.gossip.own.incarnation)
    for host in hosts[:3] + hosts[4:7]:
        say(net, host, liar, word)
    assert hosts[0].sees(victim.id) == "left"
    assert net.run_until(net.is_settled, 10.0) < 5.0
    for host in hosts[:3] + hosts[4:7]:
        say(net, host, liar, word)
    assert net.is_settled(), "an old word is not believed again"


def test_reporters_and_witnesses_that_nobody_knows_count_for_nothing() -> None:
    """One member could else make up as many as a death takes, and the table of them would grow without end."""
    net = Net(27)
    hosts = net.start(6)
    victim, liar = hosts[3], hosts[5]
    incarnation = victim.gossip.own.incarnation
    made_up = [NodeId(f"n-{number + 4096:016x}") for number in range(50)]
    for reporter in made_up:
        word = Suspect(node=victim.id, epoch=1, incarnation=incarnation, cause="refused", reporter=reporter)
        say(net, hosts[0], liar, word)
    assert hosts[0].sees(victim.id) == "alive"
    say(
        net,
        hosts[0],
        liar,
        Suspect(node=victim.id, epoch=1, incarnation=incarnation, cause="timeout", reporter=liar.id),
    )
    for witness in made_up:
        say(net, hosts[0], liar, Vouch(node=victim.id, epoch=1, incarnation=incarnation, witness=witness))
    suspicion = hosts[0].gossip._suspicions.get(victim.id)
    assert suspicion is not None
    assert suspicion.vouches == {}
    assert suspicion.counted == {liar.id}
