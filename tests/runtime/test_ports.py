"""Ports against real sockets: new for each run, and nobody else's."""

from __future__ import annotations

import socket
from random import Random

import pytest

from gpulayer.model.ids import AttemptId, JobId, ReplicaId
from gpulayer.runtime.ports import NoPort, Ports, can_bind

ONE = AttemptId(ReplicaId(JobId("j-aaaaaaaaaa"), 0), 1)
TWO = AttemptId(ReplicaId(JobId("j-aaaaaaaaaa"), 1), 1)


def free_range(length: int) -> range:
    """Ports that nobody holds now, outside of the ephemeral range."""
    for first in range(27000, 31000, length):
        if all(can_bind("127.0.0.1", port) for port in range(first, first + length)):
            return range(first, first + length)
    pytest.fail("no free ports on this host")


def make(ports: range, seed: int = 1) -> Ports:
    return Ports(address="127.0.0.1", rng=Random(seed), ports=ports)


def test_each_run_gets_another_port() -> None:
    ports = make(free_range(20))
    had = []
    for _ in range(10):
        port = ports.take(ONE, in_use=())
        ports.release(ONE, port)
        had.append(port)
    assert len(set(had)) == 10


def test_a_port_that_is_held_is_given_to_nobody_else() -> None:
    """A new copy got the port that the old copy still held while it shut down."""
    ports = make(free_range(3))
    held = {ports.take(ONE, in_use=()) for _ in range(3)}
    assert len(held) == 3
    with pytest.raises(NoPort) as none_left:
        ports.take(TWO, in_use=())
    assert none_left.value.reason.code == "port_taken"
    assert "3 are held by replicas" in none_left.value.reason.text
    ports.release(ONE, min(held))
    assert ports.take(TWO, in_use=()) == min(held)


def test_a_released_port_is_not_given_to_the_same_replica_again() -> None:
    ports = make(free_range(2))
    first = ports.take(ONE, in_use=())
    ports.release(ONE, first)
    assert ports.take(ONE, in_use=()) != first


def test_only_its_holder_releases_a_port() -> None:
    ports = make(free_range(1))
    port = ports.take(ONE, in_use=())
    ports.release(TWO, port)
    with pytest.raises(NoPort):
        ports.take(TWO, in_use=())


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_a_stranger_holds_is_passed_over(address: str) -> None:
    """Also one that is bound and does not listen, and so is in no table."""
    span = free_range(2)
    with socket.socket() as stranger:
        stranger.bind((address, span[0]))
        for seed in range(4):
            assert make(span, seed).take(ONE, in_use=()) == span[1]


def test_a_port_in_the_listening_table_is_passed_over() -> None:
    span = free_range(2)
    assert make(span).take(ONE, in_use={span[1]}) == span[0]


def test_the_same_seed_gives_the_same_ports_and_others_begin_elsewhere() -> None:
    span = free_range(50)
    assert make(span, 7).take(ONE, in_use=()) == make(span, 7).take(ONE, in_use=())
    assert len({make(span, seed).take(ONE, in_use=()) for seed in range(8)}) > 1
