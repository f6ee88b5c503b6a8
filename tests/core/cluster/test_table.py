"""The cluster as one node sees it: which word each node has there, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpulayer.core.cluster.table import make_table
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import (
    DUPLICATE,
    IMPAIRED,
    RESTARTING,
    SLUGGISH,
    TCP_IMPAIRED,
    DeathCause,
    Member,
    MemberState,
    Run,
)
from gpulayer.model.node import Capabilities
from gpulayer.model.record import Load, NodeFacts, NodeRecord
from gpulayer.model.seen import NodeSeen, Table

A, B, C = (NodeId(f"n-{number:016x}") for number in (1, 2, 3))
NOW = 1000.0


def member(
    node: NodeId = B,
    state: MemberState = "alive",
    *,
    cause: DeathCause | None = None,
    flags: int = 0,
    heard_at: float = NOW - 3,
    changed_at: float = NOW - 600,
    doubted_at: float = 0.0,
) -> Member:
    return Member(
        run=Run(node, 4, 77),
        incarnation=9,
        state=state,
        addresses=(Address("10.0.0.6", 7451),),
        flags=flags,
        cause=cause,
        heard_at=heard_at,
        changed_at=changed_at,
        doubted_at=doubted_at,
    )


def record(name: str, *, is_voter: bool = False) -> NodeRecord:
    facts = NodeFacts(
        name=name, advertise="10.0.0.6", capabilities=Capabilities(cpus_milli=1, memory_mib=1), is_voter=is_voter
    )
    return NodeRecord(facts=facts, load=Load(cpu_percent=10))


ARGUMENTS: dict[str, Any] = {
    "own": A,
    "members": {A: member(A)},
    "records": {A: record("n1"), B: record("n2")},
    "registry": None,
    "now": NOW,
    "heard_at": NOW - 0.25,
    "is_isolated": False,
    "listening_since": NOW - 700,
}


def table(*others: Member, **changes: Any) -> Table:
    return make_table(**(ARGUMENTS | {"members": {one.id: one for one in (member(A), *others)}} | changes))


def seen(one: Member, **changes: Any) -> NodeSeen:
    return table(one, **changes).nodes[B]


def test_oneself_is_there_and_known_as_of_now() -> None:
    own = table().nodes[A]
    assert (own.is_self, own.state, own.age_seconds, own.name, own.conditions) == (True, "alive", 0.0, "n1", ())


def test_oneself_is_alive_whatever_others_made_us_believe() -> None:
    for members in ({A: member(A, "dead", cause="silent")}, {}):
        assert make_table(**(ARGUMENTS | {"members": members})).nodes[A].state == "alive"


def test_of_a_living_node_the_age_is_that_of_the_last_word_of_anybody() -> None:
    """Its own last word here may be minutes old in a large cluster, and be told by others since."""
    one = seen(member(heard_at=NOW - 400))
    assert (one.state, one.reason, one.age_seconds, one.is_verified) == ("alive", "", 0.25, True)
    assert (one.name, one.epoch, one.incarnation) == ("n2", 4, 9)
    assert one.peer_address == Address("10.0.0.6", 7451)
    assert one.load == Load(cpu_percent=10)


@pytest.mark.parametrize(
    ("one", "state", "reason", "is_verified"),
    [
        (member(B, "suspect", doubted_at=NOW - 2), "suspect", "nothing of it has answered for 2s", True),
        (
            member(B, "dead", cause="silent", heard_at=NOW - 45, doubted_at=NOW - 42),
            "silent",
            "answered for 42s",
            False,
        ),
        (member(B, "dead", heard_at=0.0, doubted_at=NOW - 42), "silent", "nothing of it has answered for 42s", False),
        (
            member(B, "dead", cause="daemon", heard_at=NOW - 42),
            "unsupervised",
            "its host is up, but its daemon is not: nothing of it has answered for 42s",
            False,
        ),
        (member(flags=RESTARTING), "unsupervised", "its daemon said that it restarts", False),
        (member(B, "suspect", flags=RESTARTING), "unsupervised", "its daemon said that it restarts", False),
        (
            member(B, "dead", cause="silent", flags=RESTARTING, doubted_at=NOW - 5, heard_at=NOW - 9),
            "unsupervised",
            "has not been back for 5s",
            False,
        ),
        (member(B, "left", changed_at=NOW - 7200), "left", "it left the cluster 2h ago", False),
        (member(B, "left", flags=RESTARTING, changed_at=NOW - 60), "left", "it left the cluster 60s ago", False),
    ],
)
def test_a_node_that_is_not_alive_says_why(one: Member, state: str, reason: str, is_verified: bool) -> None:
    found = seen(one)
    assert (found.state, found.is_verified) == (state, is_verified)
    assert reason in found.reason


def test_of_a_node_that_is_not_alive_the_age_is_how_long_it_is_quiet_as_its_reason_says() -> None:
    """We heard it 45 s ago, others until it was doubted, 4 s before it was called dead."""
    found = seen(member(B, "dead", cause="silent", heard_at=NOW - 45, doubted_at=NOW - 9, changed_at=NOW - 5))
    assert (found.age_seconds, found.reason) == (9, "nothing of it has answered for 9s")
    assert seen(member(B, "dead", cause="silent", heard_at=0.0, doubted_at=NOW - 42)).age_seconds == 42


def test_a_registered_node_that_was_never_heard_is_silent_since_this_node_listens() -> None:
    found = table(registry={A: "n1", C: "n3"}).nodes[C]
    assert (found.state, found.name, found.age_seconds, found.facts) == ("silent", "n3", 700, None)
    assert found.reason == "nothing of it has been heard in the 11m40s since this node began to listen"


def test_a_node_without_a_record_has_the_name_it_was_admitted_with() -> None:
    assert table(member(C), registry={C: "n3"}).nodes[C].name == "n3"
    assert table(member(C)).nodes[C].name == C


def test_conditions_are_the_words_of_its_flags() -> None:
    flags = SLUGGISH | IMPAIRED | TCP_IMPAIRED | DUPLICATE
    assert seen(member(flags=flags)).conditions == ("sluggish", "impaired", "tcp_impaired", "duplicate")
    assert seen(member(flags=RESTARTING)).conditions == ("restarting",)


def test_who_is_isolated_vouches_for_nobody() -> None:
    """It may be deaf or the only one left: it cannot tell, accuses nobody, and calls nobody alive."""
    one = member(heard_at=NOW - 90)
    both: Mapping[NodeId, NodeSeen] = table(one, is_isolated=True, heard_at=NOW - 90).nodes
    assert (both[A].conditions, both[A].state) == (("isolated",), "alive")
    assert (both[B].conditions, both[B].state, both[B].age_seconds) == ((), "silent", 90)
    assert both[B].reason == "this node hears no other node any more, and this one was heard 90s ago"
    assert not both[B].is_verified
    gone = seen(member(B, "dead", cause="daemon", heard_at=NOW - 90), is_isolated=True)
    assert gone.state == "unsupervised"


def test_the_record_of_an_older_run_verifies_nothing() -> None:
    found = seen(member(), stale={B})
    assert (found.state, found.is_stale, found.is_verified) == ("alive", True, False)


def test_a_record_of_which_a_newer_version_is_on_its_way_verifies_and_is_not_up_to_date() -> None:
    """An endpoint of it may have moved since: it is tried before it is listed."""
    late, whole = seen(member(), announced={B: 17}), seen(member(), announced={B: 0})
    assert (late.announced_version, late.is_verified, late.is_up_to_date) == (17, True, False)
    assert (whole.is_verified, whole.is_up_to_date) == (True, True)


def test_the_leader_is_named_only_while_it_may_be_there() -> None:
    assert table(member(), leader=B).leader == B
    assert table(member(B, "suspect"), leader=B).leader == B
    assert table(member(B, "dead", cause="silent"), leader=B).leader is None
    assert table(member(flags=RESTARTING), leader=B).leader is None
    assert table(leader=C).leader is None
    assert table(leader=A).leader == A
    assert table().leader is None


def test_voters_are_those_whose_records_say_so() -> None:
    assert seen(member(), records={B: record("n2", is_voter=True)}).is_voter


def test_nodes_come_sorted() -> None:
    assert list(table(member(C), member(B)).nodes) == [A, B, C]


def test_ages_are_never_below_nothing() -> None:
    assert seen(member(), heard_at=NOW + 1).age_seconds == 0.0
    assert seen(member(B, "dead", cause="silent", heard_at=NOW + 1, changed_at=NOW + 1)).age_seconds == 0.0
