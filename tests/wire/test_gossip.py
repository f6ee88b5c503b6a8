"""Gossip's messages to bytes and back: what peers of other versions may rely on, and what no peer may do to us."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from ipaddress import IPv4Address, IPv6Address
from timeit import timeit
from typing import Any, Literal

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.core.gossip.messages import (
    Ack,
    Alive,
    Delta,
    Digest,
    Entry,
    Message,
    Nack,
    Newer,
    Ping,
    PingRequest,
    Pull,
    Suspect,
    SyncBuckets,
    SyncDigests,
    SyncMembers,
)
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.record import RECORD_BYTES_MAX
from gpulayer.wire import gossip
from gpulayer.wire.codec import INT_MAX, DecodeError, EncodeError
from gpulayer.wire.gossip import KINDS, decode, decode_and_count, encode, size_of

NODE = NodeId("n-00112233445566ff")
OTHER = NodeId("n-ffeeddccbbaa9988")
PING = Ping(seq=7, target=NODE, epoch=3, incarnation=1, version=12)
ALIVE = Alive(run=Run(NODE, 3, 2**63), incarnation=4, addresses=(Address("10.0.0.5", 7451),), key_ids=(2**32 - 1,))

numbers = st.integers(0, INT_MAX)
hosts = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda number: str(IPv4Address(number))),
    st.integers(0, 2**128 - 1)
    .filter(lambda number: number >> 32 != 0xFFFF)
    .map(lambda number: str(IPv6Address(number))),
)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that messages are made of."""
    if hint is NodeId:
        return st.binary(min_size=8, max_size=8).map(lambda raw: NodeId("n-" + raw.hex()))
    if hint is Address:
        return st.builds(Address, hosts, st.integers(1, 65535))
    if hint in (int, bool, bytes, str):
        return {int: numbers, bool: st.booleans(), bytes: st.binary(max_size=80), str: st.text(max_size=40)}[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of, arguments))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[st.none() if each is type(None) else of(each) for each in arguments])
    hints = typing.get_type_hints(hint)
    required = {field.name: of(hints[field.name]) for field in fields(hint) if field.default is MISSING}
    # Defaults often, for they are what is left out.
    optional = {
        field.name: st.one_of(st.just(field.default), of(hints[field.name]))
        for field in fields(hint)
        if field.default is not MISSING
    }
    return st.builds(hint, **required, **optional)


messages = st.one_of(*map(of, typing.get_args(Message)))


@given(st.lists(messages, max_size=8))
@settings(max_examples=400)
def test_what_was_written_is_read_the_same(sent: list[Message]) -> None:
    payload = encode(sent)
    assert decode(payload) == tuple(sent)
    assert decode_and_count(payload)[1] == 0


@given(st.lists(messages, max_size=40))
def test_a_payload_is_its_head_and_what_each_message_adds(sent: list[Message]) -> None:
    """The core fills packets by this sum; wrong by one byte, and a packet does not fit."""
    assert len(encode(sent)) == gossip.HEAD_BYTES + sum(map(size_of, sent))


@pytest.mark.parametrize("count", [0, 1, 23, 24, 255, 256, gossip.MESSAGES_MAX])
def test_the_sum_holds_at_every_number_of_messages(count: int) -> None:
    sent = [Nack(seq=1)] * count
    assert len(encode(sent)) == gossip.HEAD_BYTES + count * size_of(sent[0] if sent else Nack(seq=1))
    assert decode(encode(sent)) == tuple(sent)


def test_every_message_has_one_number() -> None:
    assert set(KINDS.values()) == set(typing.get_args(Message))
    assert len(set(KINDS.values())) == len(KINDS)
    assert all(is_dataclass(kind) for kind in KINDS.values())


def test_the_bytes_of_a_message_stay_what_they_are() -> None:
    """Wire format: what daemons of this version send to those of the next."""
    assert encode([PING]).hex() == "9900018601074800112233445566ff03010c"
    assert encode([Ack(seq=1, node=NODE, epoch=2)]).hex() == "9900018402014800112233445566ff02"
    assert encode([ALIVE]).hex() == (
        "990001880583"
        "4800112233445566ff031b8000000000000000"  # its run
        "048182440a000005191d1b"  # incarnation, addresses
        "000000811affffffff"  # versions, flags, key ids
    )
    assert encode([Delta(node=NODE, epoch=1, gc_version=0, from_version=0, to_version=2)]).hex() == (
        "990001860a4800112233445566ff01000002"
    )
    assert encode([Newer(node=NODE, epoch=1, gc_version=2, version=300)]).hex() == (
        "990001850f4800112233445566ff010219012c"
    )


def test_trailing_fields_at_their_default_take_no_byte() -> None:
    whole = Suspect(node=NODE, epoch=1, incarnation=2, cause="timeout", reporter=OTHER, reporter_health=1)
    short = Suspect(node=NODE, epoch=1, incarnation=2, cause="timeout", reporter=OTHER)
    assert size_of(whole) == size_of(short) + 1


def _payload(*raw: object) -> bytes:
    return cbor2.dumps(list(raw))


def test_what_a_later_version_adds_is_passed_over() -> None:
    raw = cbor2.loads(encode([PING]))[0]
    assert decode_and_count(_payload([99, {"new": 1.5}], [*raw, "more", [1]])) == ((PING,), 1)


def test_a_field_that_an_earlier_version_lacks_has_its_default() -> None:
    assert decode(_payload([1, 7, bytes(8), 3])) == (Ping(seq=7, target=NodeId("n-" + "0" * 16), epoch=3),)


@pytest.mark.parametrize(
    "raw",
    [
        [1],
        [1, 7, bytes(8)],
        [1, 7, bytes(7), 3],
        [1, 7, "n-0000000000000000", 3],
        [1, -1, bytes(8), 3],
        [1, 7.0, bytes(8), 3],
        [1, True, bytes(8), 3],
        [3, 7, bytes(8), 3, [[bytes(5), 1]]],
        [3, 7, bytes(8), 3, [[bytes(4), 0]]],
        [3, 7, bytes(8), 3, [[bytes(4), 65536]]],
        [3, 7, bytes(8), 3, [[bytes(4), 1]] * (gossip.ADDRESSES_MAX + 1)],
        [4, 7, 1],
        [5, [bytes(8), 3], 4, []],
        [5, {}, 4, []],
        [6, bytes(8), 1, 2, 2, bytes(8)],
        [6, bytes(8), 1, 2, "timeout", bytes(8)],
        [10, bytes(8), 1, 0, 0, 2, [["k" * (gossip.TEXT_BYTES_MAX + 1), 1, None]]],
        [10, bytes(8), 1, 0, 0, 2, [["k", 1]]],
        [10, bytes(8), 1, 0, 0, 2, [["k", 1, "text"]]],
        [12, 1, [0] * (gossip.NUMBERS_MAX + 1)],
        [14, [[[[bytes(8), 1, 2], 1, []], 0]]],
        [],
        ["Ping", 1],
        [1.0],
        [True, 7, bytes(8), 3],
        None,
    ],
)
def test_a_message_with_missing_or_wrong_fields_is_refused(raw: object) -> None:
    with pytest.raises(DecodeError):
        decode(_payload(raw))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x00",
        b"\xf6",
        b"\xa0",
        b"\x01",
        encode([PING]) + b"\x00",
        encode([PING])[:-1],
        b"\x9f\xff",
        b"\xd8\x1c",
    ],
)
def test_a_payload_that_is_no_array_or_does_not_end_with_it_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


@given(st.binary(max_size=300))
@settings(max_examples=500)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for candidate in (data, b"\x81" + data, encode([ALIVE])[: len(data)] + data):
        try:
            read = decode(candidate)
        except DecodeError:
            continue
        assert decode(encode(read)) == read


def test_more_than_a_payload_may_hold_is_refused_before_it_is_read() -> None:
    with pytest.raises(DecodeError, match="at most"):
        decode(bytes(gossip.PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(DecodeError, match="messages"):
        decode(cbor2.dumps([[99]] * (gossip.MESSAGES_MAX + 1)))


def test_a_whole_record_and_a_sync_of_all_members_fit_into_one_payload() -> None:
    profile = Profile()
    record = Delta(
        node=NODE,
        epoch=1,
        gc_version=0,
        from_version=0,
        to_version=1,
        entries=(Entry("node", 1, b"x" * RECORD_BYTES_MAX),),
    )
    digest = Digest(NODE, INT_MAX, INT_MAX, "alive", INT_MAX, INT_MAX)
    digests = SyncDigests(seq=1, buckets=tuple(range(64)), digests=(digest,) * profile.members_max)
    members = SyncMembers(members=((ALIVE, "dead", "silent"),) * profile.members_max)
    for message in (record, digests, members, SyncBuckets(seq=1, hashes=(INT_MAX,) * 64)):
        assert decode(encode([message])) == (message,)


@pytest.mark.parametrize(
    "broken",
    [
        Ping(seq=-1, target=NODE, epoch=1),
        Ping(seq=2**64, target=NODE, epoch=1),
        Ping(seq=True, target=NODE, epoch=1),
        Ping(seq=1, target=NodeId("n1"), epoch=1),
        Ping(seq=1, target=NodeId(NODE.upper()), epoch=1),
        PingRequest(seq=1, target=NODE, epoch=1, addresses=(Address("host", 1),)),
        PingRequest(seq=1, target=NODE, epoch=1, addresses=(Address("10.0.0.1", 0),)),
        PingRequest(seq=1, target=NODE, epoch=1, addresses=[Address("10.0.0.1", 1)]),  # type: ignore[arg-type]
        Suspect(node=NODE, epoch=1, incarnation=1, cause="mood", reporter=NODE),  # type: ignore[arg-type]
        Pull(node=NODE, epoch=1, have=(1,)),  # type: ignore[arg-type]
        Delta(node=NODE, epoch=1, gc_version=0, from_version=0, to_version=1, entries=(Entry("\ud800", 1, b""),)),
        Delta(node=NODE, epoch=1, gc_version=0, from_version=0, to_version=1, entries=(Entry("é" * 129, 1, b""),)),
        "Ping",
    ],
)
def test_a_message_of_ours_that_breaks_its_types_is_not_sent(broken: Any) -> None:
    with pytest.raises(EncodeError):
        encode([broken])


def test_an_ipv4_address_in_ipv6_clothes_is_the_ipv4_address() -> None:
    """Pythons write it in different ways, and it would be taken for another host."""
    clothed = PingRequest(seq=1, target=NODE, epoch=1, addresses=(Address("::ffff:10.0.0.5", 7451),))
    (read,) = decode(encode([clothed]))
    assert read == PingRequest(seq=1, target=NODE, epoch=1, addresses=(Address("10.0.0.5", 7451),))
    raw = [3, 1, bytes(8), 1, [[bytes(10) + b"\xff\xff\x0a\x00\x00\x05", 7451]]]
    (read,) = decode(_payload(raw))
    assert isinstance(read, PingRequest)
    assert read.addresses == (Address("10.0.0.5", 7451),)


def test_a_ping_is_cheap_to_write_and_to_read() -> None:
    """About 4 µs each on the machine that this was made on; what holds is that it is not a hundred."""
    payload = encode([PING])
    assert min(timeit(lambda: encode([PING]), number=1000) for _ in range(5)) < 0.1
    assert min(timeit(lambda: decode(payload), number=1000) for _ in range(5)) < 0.1
