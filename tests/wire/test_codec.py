"""Dataclasses to CBOR and back: what is promised to peers, to logs of other versions, and against bad bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, TypeAlias

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.core.cluster import commands
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import JobId, ReplicaId
from gpulayer.model.job import JobSpec, Requirements
from gpulayer.wire.codec import INT_MAX, INT_MIN, DecodeError, EncodeError, decode, digest, encode

Host = NewType("Host", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    seq: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    seq: int
    late: bool = False


Message: TypeAlias = Ping | Pong


@dataclass(frozen=True, slots=True, order=True)
class Key:
    host: Host
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    flag: bool
    number: int
    real: float
    text: str
    blob: bytes
    color: Literal["red", "green", 7]
    maybe: Ping | None = None
    message: Message | None = None
    word_or_number: str | int = ""
    many: tuple[Message, ...] = ()
    pair: tuple[str, int] = ("", 0)
    by_host: Mapping[Host, int] = field(default_factory=dict)
    by_key: Mapping[Key, tuple[float, ...]] = field(default_factory=dict)
    by_number: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    children: tuple[Tree, ...] = ()


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
ints = st.integers(INT_MIN, INT_MAX)
reals = st.floats(allow_nan=False)
pings = st.builds(Ping, seq=ints, note=texts)
pongs = st.builds(Pong, seq=ints, late=st.booleans())
messages: st.SearchStrategy[Message] = pings | pongs
everythings = st.builds(
    Everything,
    flag=st.booleans(),
    number=ints,
    real=reals,
    text=texts,
    blob=st.binary(max_size=8),
    color=st.sampled_from(["red", "green", 7]),
    maybe=st.none() | pings,
    message=st.none() | messages,
    word_or_number=texts | ints,
    many=st.lists(messages, max_size=3).map(tuple),
    pair=st.tuples(texts, ints),
    by_host=st.dictionaries(texts.map(Host), ints, max_size=3),
    by_key=st.dictionaries(st.builds(Key, texts.map(Host), ints), st.lists(reals, max_size=2).map(tuple), max_size=3),
    by_number=st.dictionaries(ints, texts, max_size=3),
)

PLAIN = Everything(flag=True, number=1, real=0.5, text="a", blob=b"b", color="red")
SPEC = JobSpec(kind="service", name="web", argv=("python", "serve.py"), requirements=Requirements(gpus_milli=500))


@given(everythings)
def test_what_is_written_is_read_back_and_written_again_the_same(value: Everything) -> None:
    data = encode(value)
    assert decode(Everything, data) == value
    assert encode(decode(Everything, data)) == data


@given(st.dictionaries(texts.map(Host), ints, max_size=6), st.randoms())
def test_the_order_of_insertion_does_not_reach_the_bytes(by_host: dict[Host, int], random: Any) -> None:
    shuffled = list(by_host.items())
    random.shuffle(shuffled)
    assert digest(Everything(**{**_fields(PLAIN), "by_host": dict(shuffled)})) == digest(
        Everything(**{**_fields(PLAIN), "by_host": by_host})
    )


def test_the_hash_seed_does_not_reach_the_bytes() -> None:
    program = (
        "from gpulayer.wire.codec import digest; from gpulayer.model.cluster import ClusterState, KeyedAnswer\n"
        "names = {f'k{i}' for i in range(50)}\n"
        "print(digest(ClusterState(answers={n: KeyedAnswer(at_utc=1, request_digest=n, job='j-1') for n in names})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, timeout=60
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_maps_are_in_the_order_of_canonical_cbor() -> None:
    raw = cbor2.loads(encode(Everything(**{**_fields(PLAIN), "by_host": {Host("bb"): 1, Host("c"): 2, Host("a"): 3}})))
    assert list(raw["by_host"]) == ["a", "c", "bb"]
    assert list(raw) == sorted(raw, key=lambda name: (len(name), name))


def test_a_field_with_a_default_can_be_added_and_removed() -> None:
    old = dataclass(frozen=True, kw_only=True)(type("Ping", (), {"__annotations__": {"seq": int}}))
    assert decode(old, encode(Ping(seq=3, note="new"))) == old(seq=3)
    assert decode(Ping, encode(old(seq=3))) == Ping(seq=3)
    assert cbor2.loads(encode(Ping(seq=3))) == {"": "Ping", "seq": 3}


def test_a_missing_field_without_a_default_is_named() -> None:
    with pytest.raises(DecodeError, match=r"Ping\.seq is missing"):
        decode(Ping, cbor2.dumps({"": "Ping"}))


def test_a_union_is_told_apart_by_the_class_name() -> None:
    assert decode(Message, encode(Pong(seq=1))) == Pong(seq=1)
    command = commands.SubmitJob(job=JobId("j-1"), spec=SPEC)
    assert decode(commands.Command, encode(command)) == command
    with pytest.raises(DecodeError, match="'Ping'"):
        decode(Pong, encode(Ping(seq=1)))


def test_equal_defaults_are_left_out_whatever_they_are_made_of() -> None:
    class Frozen(dict[Host, int]):
        pass

    assert encode(Everything(**{**_fields(PLAIN), "by_host": Frozen()})) == encode(PLAIN)


REFUSED: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("a bool for an int", lambda raw: {**raw, "number": True}),
    ("an int for a bool", lambda raw: {**raw, "flag": 1}),
    ("an int for a float", lambda raw: {**raw, "real": 1}),
    ("a float for an int", lambda raw: {**raw, "number": 1.0}),
    ("text for bytes", lambda raw: {**raw, "blob": "b"}),
    ("an int above 64 bits", lambda raw: {**raw, "number": 2**64}),
    ("an int below 64 bits", lambda raw: {**raw, "number": -(2**63) - 1}),
    ("a word that is not in the literal", lambda raw: {**raw, "color": "blue"}),
    ("True where a literal 7 is meant", lambda raw: {**raw, "color": True}),
    ("a list in a literal", lambda raw: {**raw, "color": []}),
    ("None where nothing may be missing", lambda raw: {**raw, "text": None}),
    ("a tuple of the wrong length", lambda raw: {**raw, "pair": ["a", 1, 2]}),
    ("a pair that is none", lambda raw: {**raw, "by_number": [[1]]}),
    ("a key twice", lambda raw: {**raw, "by_number": [[1, "a"], [1, "b"]]}),
    ("a map without text keys", lambda raw: {**raw, "by_host": {b"x": 1}}),
    ("an unknown class in a union", lambda raw: {**raw, "message": {"": "Gone"}}),
    ("a union without its tag", lambda raw: {**raw, "message": {"seq": 1}}),
    ("a tag that is a list", lambda raw: {**raw, "message": {"": []}}),
    ("a date", lambda raw: {**raw, "text": cbor2.CBORTag(1, 0)}),
    ("an unknown tag, even in an unknown field", lambda raw: {**raw, "unknown": cbor2.CBORTag(30, [1, 2])}),
    ("undefined", lambda raw: {**raw, "text": cbor2.undefined}),
    ("an array", lambda raw: [raw]),
    ("too deep, even in an unknown field", lambda raw: {**raw, "unknown": _nested(40)}),
]


@pytest.mark.parametrize("change", [change for _, change in REFUSED], ids=[name for name, _ in REFUSED])
def test_it_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    raw = cbor2.loads(encode(PLAIN))
    with pytest.raises(DecodeError):
        decode(Everything, cbor2.dumps(change(raw)))


def test_bytes_after_the_value_are_refused() -> None:
    with pytest.raises(DecodeError, match="2 bytes follow"):
        decode(Ping, encode(Ping(seq=1)) + b"\0\0")


def test_a_key_twice_in_a_map_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode(Ping, bytes.fromhex("a3 60 6450696e67 63736571 01 63736571 02"))


def test_an_indefinite_length_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode(Ping, bytes.fromhex("bf 60 6450696e67 63736571 01 ff"))


def test_more_than_the_limit_is_refused_before_it_is_read() -> None:
    data = encode(Ping(seq=1, note="x" * 100))
    with pytest.raises(DecodeError, match="at most"):
        decode(Ping, data, bytes_max=100)


def test_a_class_that_refuses_its_values_is_a_decode_error() -> None:
    raw = cbor2.loads(encode(SPEC))
    with pytest.raises(DecodeError, match="replicas") as caught:
        decode(JobSpec, cbor2.dumps({**raw, "replicas": 0}))
    assert isinstance(caught.value.__cause__, InvalidRequest)
    with pytest.raises(DecodeError):
        decode(JobSpec, cbor2.dumps({**raw, "stop_grace_seconds": float("nan")}))


def test_an_error_says_where() -> None:
    raw = cbor2.loads(encode(SPEC))
    with pytest.raises(DecodeError, match=r"JobSpec\.requirements: Requirements\.gpus_milli: expected an int .* 'x'"):
        decode(JobSpec, cbor2.dumps({**raw, "requirements": {"gpus_milli": "x"}}))


@pytest.mark.parametrize(
    "wrong",
    [
        Ping(seq=True),
        Ping(seq=2**64),
        Ping(seq="1"),  # type: ignore[arg-type]
        Ping(seq=1, note="\ud800"),
        Everything(**{"flag": True, "number": 1, "real": 1.0, "text": "", "blob": b"", "color": "blue"}),
        "text",
    ],
)
def test_a_value_that_breaks_its_own_hints_is_not_written(wrong: object) -> None:
    with pytest.raises(EncodeError):
        encode(wrong)


def test_a_class_may_contain_itself_and_depth_has_an_end() -> None:
    tree = Tree(children=(Tree(), Tree(children=(Tree(),))))
    assert decode(Tree, encode(tree)) == tree
    for _ in range(40):
        tree = Tree(children=(tree,))
    with pytest.raises(DecodeError):
        decode(Tree, encode(tree))


KINDS: list[Any] = [Everything, Message, Tree, commands.Command, ClusterState, ReplicaId]


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(kind: Any, data: bytes) -> None:
    _read_or_refused(kind, data)


@settings(max_examples=300)
@given(everythings, st.data())
def test_damaged_messages_are_read_or_refused(value: Everything, draw: st.DataObject) -> None:
    data = bytearray(encode(value))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    _read_or_refused(Everything, bytes(data))
    _read_or_refused(Everything, bytes(data[: draw.draw(st.integers(0, len(data)))]))


@settings(max_examples=100)
@given(
    st.sampled_from(KINDS),
    st.recursive(
        st.none() | st.booleans() | ints | st.floats() | texts | st.binary(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=10,
    ),
)
def test_well_formed_but_foreign_messages_are_read_or_refused(kind: Any, raw: object) -> None:
    _read_or_refused(kind, cbor2.dumps(raw))
    _read_or_refused(kind, cbor2.dumps({"": getattr(kind, "__name__", "Ping"), "seq": raw, "children": raw}))


def _read_or_refused(kind: Any, data: bytes) -> None:
    try:
        value = decode(kind, data)
    except DecodeError:
        return
    written = encode(value)
    assert encode(decode(kind, written)) == written


def _fields(value: Everything) -> dict[str, Any]:
    return {name: getattr(value, name) for name in Everything.__dataclass_fields__}


def _nested(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested
