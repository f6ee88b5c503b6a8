"""Dataclasses to CBOR and back: what is promised to peers, to logs of other versions, and against bad bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NewType, TypeAlias

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.core.cluster import commands
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.event import Event
from gpulayer.model.ids import JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec, Requirements
from gpulayer.model.node import Accelerator, Capabilities, NumaNode
from gpulayer.model.replica import Reason
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
reals = st.floats(allow_nan=False, allow_infinity=False)
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


# What the version wrote that knew declared devices only: an entry of the log, and a snapshot.
ENTRY_BEFORE_NVML = bytes.fromhex(
    "a560684c6f67456e747279647465726d0165696e646578016661745f757463fb3ff000000000000067636f6d6d616e64a5606941646d"
    "69744e6f6465646e616d65626e31646e6f6465646e2d6e3169616476657274697365693132372e302e302e316c6361706162696c6974"
    "696573a36a637075735f6d696c6c69193e806a6d656d6f72795f6d69621a000100006c616363656c657261746f727382a5646b696e64"
    "64637564616475756964626730656d6f64656c64413130306676656e646f72666e76696469616a6d656d6f72795f6d69621a00014000"
    "a6646b696e6464637564616475756964626731656d6f64656c64413130306676656e646f72666e766964696169756e6865616c746879"
    "63686f746a6d656d6f72795f6d69621a00014000"
)
SNAPSHOT_BEFORE_NVML = bytes.fromhex(
    "a7606c436c75737465725374617465646a6f6273a1656a2d776562a7626964656a2d776562646e616d65637765626473706563a46461"
    "72677681692f62696e2f74727565646b696e646773657276696365646e616d65637765626c726571756972656d656e7473a16a677075"
    "735f6d696c6c691901f4687265706c6963617381a465696e6465780068617474656d70747301696c6173745f6e6f6465646e2d6e316a"
    "61737369676e6d656e74a5646e6f6465646e2d6e3167617474656d707401676465766963657381a26475756964626730656d696c6c69"
    "1901f4677265706c696361a2636a6f62656a2d77656265696e64657800687265766973696f6e01687265766973696f6e01707375626d"
    "69747465645f61745f757463fb4000000000000000727375626d69747465645f61745f696e64657802647465726d0165696e64657803"
    "656e6f646573a1646e2d6e31a5626964646e2d6e31646e616d65626e3169616476657274697365693132372e302e302e316c63617061"
    "62696c6974696573a36a637075735f6d696c6c69193e806a6d656d6f72795f6d69621a000100006c616363656c657261746f727382a5"
    "646b696e6464637564616475756964626730656d6f64656c64413130306676656e646f72666e76696469616a6d656d6f72795f6d6962"
    "1a00014000a6646b696e6464637564616475756964626731656d6f64656c64413130306676656e646f72666e766964696169756e6865"
    "616c74687963686f746a6d656d6f72795f6d69621a000140006f61646d69747465645f61745f757463fb3ff00000000000006874696d"
    "655f757463fb40080000000000006a706c616e6e65645f617402"
)


def test_the_log_of_a_version_that_knew_less_of_devices_is_read_and_written_as_it_was() -> None:
    """Its devices are well or not as they were, and nobody else is on them; what is unknown adds no byte."""
    entry = decode(commands.LogEntry, ENTRY_BEFORE_NVML)
    state = decode(ClusterState, SNAPSHOT_BEFORE_NVML)
    assert isinstance(entry.command, commands.AdmitNode)
    for capabilities in (entry.command.capabilities, state.nodes[NodeId("n-n1")].capabilities):
        g0, g1 = capabilities.accelerators
        assert (g0.uuid, g0.source, g0.foreign_milli, g0.parent, g0.index) == ("g0", "declared", 0, "", None)
        assert (g0.usable_milli, g1.usable_milli, g1.unhealthy) == (1000, 0, "hot")
        assert (capabilities.gpu_detect, capabilities.drivers, capabilities.disk_mib) == ("none", (), 0)
    assert encode(entry) == ENTRY_BEFORE_NVML
    assert encode(state) == SNAPSHOT_BEFORE_NVML


def test_what_the_log_says_of_devices_and_refusals_is_read_back() -> None:
    device = Accelerator(
        uuid="MIG-1",
        kind="cuda",
        vendor="nvidia",
        model="H100 1g.10gb",
        memory_mib=10240,
        source="nvml",
        index=3,
        compute_capability="9.0",
        pci_bus_id="0000:3b:00.0",
        numa_node=1,
        nvlink_peers=("GPU-1", "GPU-2"),
        parent="GPU-0",
        unhealthy="GPU is lost",
        foreign="pid 7",
        foreign_milli=1000,
    )
    capabilities = Capabilities(
        accelerators=(device,),
        cpus_milli=1000,
        memory_mib=1024,
        undetected=("NVLink",),
        gpu_detect="error",
        drivers=(("cuda", "12.4"), ("nvidia", "550.1")),
        disk_mib=10,
        numa=(NumaNode(id=0, cpus="0-15", memory_mib=512),),
    )
    said: tuple[commands.Command, ...] = (
        commands.AdmitNode(node=NodeId("n-1"), name="n1", advertise="10.0.0.5", capabilities=capabilities),
        commands.ReplicaRefused(
            job=JobId("j-1"), replica=0, attempt=2, reason=Reason(code="device_unavailable"), observed=(device,)
        ),
        commands.ReplicaRefused(job=JobId("j-1"), replica=0, attempt=2, reason=Reason(code="device_unavailable")),
    )
    for command in said:
        entry = commands.LogEntry(index=1, term=1, at_utc=0.5, command=command)
        assert decode(commands.LogEntry, encode(entry)) == entry


@pytest.mark.parametrize(
    "change", [{"foreign_milli": 1001}, {"foreign_milli": -1}, {"foreign": "pid 7"}, {"foreign_milli": 5}, {"uuid": ""}]
)
def test_a_device_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    raw = {"uuid": "g0", "kind": "cuda", "vendor": "nvidia", "model": "A100", "memory_mib": 1, **change}
    with pytest.raises(DecodeError):
        decode(Accelerator, cbor2.dumps(raw))


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_say_is_neither_read_nor_written(value: float) -> None:
    """One of a peer would be in the answers of every node, and spoil them."""
    event = Event(source="n-1", epoch=1, seq=1, at_utc=0.0, kind="node.alive")
    with pytest.raises(DecodeError, match="finite"):
        decode(Event, cbor2.dumps({**cbor2.loads(encode(event)), "at_utc": value}))
    with pytest.raises(EncodeError, match="finite"):
        encode(replace(event, at_utc=value))


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
