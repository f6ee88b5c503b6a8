"""Gossip's messages as bytes: compact CBOR, for datagrams and for frames alike. Pure, strict and bounded.

The format, which peers of different versions share:

- a payload is an array, always with a head of three bytes, so that its size is the sum of its messages' sizes;
- a message is an array [kind, field, …] in the order of declaration. Trailing fields that equal their default are left
  out; trailing items that a reader does not know, and messages of a kind that it does not know, are ignored;
- a node id is its eight bytes, an address [packed address, port], one of several words its place in the type's list;
  None, bool, int, text, bytes and arrays are themselves. Whole numbers are unsigned, of 64 bits at most.

A new message gets the next number in KINDS, a new field a default and the last place, a new word the last place.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Literal

import cbor2

from gpulayer.core.gossip.messages import (
    Ack,
    Alive,
    Dead,
    Delta,
    Left,
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
    Vouch,
)
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.record import RECORD_BYTES_MAX
from gpulayer.wire.codec import INT_MAX, DecodeError, EncodeError, parse

_Coder = Callable[[Any], Any]

KINDS: dict[int, type] = {
    1: Ping,
    2: Ack,
    3: PingRequest,
    4: Nack,
    5: Alive,
    6: Suspect,
    7: Dead,
    8: Left,
    9: Vouch,
    10: Delta,
    11: Pull,
    12: SyncBuckets,
    13: SyncDigests,
    14: SyncMembers,
    15: Newer,
}
HEAD_BYTES = 3
"""What a payload takes beside its messages: encode() gives HEAD_BYTES + the size_of() of each."""
# A whole record in one message, with room for what is around it; a frame may hold no more of gossip.
PAYLOAD_BYTES_MAX = 1024 * 1024
MESSAGES_MAX = 4096
# As many members as there may be (Profile.members_max): what a sync lists at once.
ITEMS_MAX = 4096
NUMBERS_MAX = 1024
ADDRESSES_MAX = 4
TEXT_BYTES_MAX = 256

_HEAD = 0x99  # an array whose length follows in two bytes (RFC 8949 §3)
_NODE_ID_BYTES = 8


def encode(messages: Sequence[Message]) -> bytes:
    """A payload. EncodeError: a message breaks its own type hints or a bound; our mistake."""
    if len(messages) > MESSAGES_MAX:
        raise EncodeError(f"{len(messages)} messages, {MESSAGES_MAX} at most in one payload")
    payload = b"".join((_HEAD.to_bytes(1, "big"), len(messages).to_bytes(2, "big"), *map(_written, messages)))
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise EncodeError(f"a payload of {len(payload)} bytes, {PAYLOAD_BYTES_MAX} at most")
    return payload


def size_of(message: Message) -> int:
    """Bytes that it adds to a payload, exactly."""
    return len(_written(message))


def decode(data: bytes) -> tuple[Message, ...]:
    """The messages of a payload that are known here; else DecodeError, and nothing of it is used."""
    return decode_and_count(data)[0]


def decode_and_count(data: bytes) -> tuple[tuple[Message, ...], int]:
    """decode(), and how many messages were left out because their kind is not known here."""
    if len(data) > PAYLOAD_BYTES_MAX:
        raise DecodeError(f"{len(data)} bytes, {PAYLOAD_BYTES_MAX} at most")
    raw = parse(data)
    if type(raw) is not list or len(raw) > MESSAGES_MAX:
        raise DecodeError(f"expected an array of {MESSAGES_MAX} messages at most")
    found: list[Message] = []
    for item in raw:
        if type(item) is not list or not item or type(item[0]) is not int:
            raise DecodeError("a message that does not begin with its kind")
        layout = _BY_KIND.get(item[0])
        if layout is not None:
            found.append(layout.read(item, 1))
    return tuple(found), len(raw) - len(found)


def _written(message: Message) -> bytes:
    layout = _BY_CLASS.get(type(message))
    if layout is None:
        raise EncodeError(f"{type(message).__name__} is not a message of gossip")
    try:
        return cbor2.dumps(layout.write(message, [layout.kind]))
    except UnicodeEncodeError as exc:
        raise EncodeError(f"{layout.name}: text that is not valid Unicode: {exc.reason}") from exc


# --- per class, compiled once ----------------------------------------------------------------------------------------


class _Layout:
    """How one class is written and read: its fields by place, those with a default last."""

    __slots__ = ("_build", "_defaults", "_fields", "_required", "kind", "name")

    def __init__(self, kind_of: type, kind: int = 0) -> None:
        self.kind = kind
        self.name = kind_of.__name__
        self._build = kind_of
        hints = typing.get_type_hints(kind_of)
        self._fields: list[tuple[str, _Coder, _Coder]] = []
        self._defaults: list[object] = []
        for field in fields(kind_of):
            write, read = _coders(hints[field.name], f"{self.name}.{field.name}")
            self._fields.append((field.name, write, read))
            if field.default is not MISSING:
                self._defaults.append(write(field.default))
            elif self._defaults:
                raise TypeError(f"{self.name}.{field.name} has no default, but one before it has")
        self._required = len(self._fields) - len(self._defaults)

    def write(self, value: Any, head: list[Any]) -> list[Any]:
        if type(value) is not self._build:
            raise EncodeError(f"expected {self.name}, found {type(value).__name__}")
        for name, write, _ in self._fields:
            try:
                head.append(write(getattr(value, name)))
            except EncodeError as exc:
                raise EncodeError(f"{self.name}.{name}: {exc}") from None
        for default in reversed(self._defaults):
            if head[-1] != default:
                break
            head.pop()
        return head

    def read(self, raw: Any, begin: int = 0) -> Any:
        if type(raw) is not list:
            raise DecodeError(f"expected {self.name} as an array, found {type(raw).__name__}")
        if len(raw) - begin < self._required:
            raise DecodeError(f"{self.name}: {self._fields[len(raw) - begin][0]} is missing")
        arguments = {}
        # Not strict: what follows the last field is of a later version, what is not there has its default.
        for (name, _, read), item in zip(self._fields, raw[begin:] if begin else raw, strict=False):
            try:
                arguments[name] = read(item)
            except DecodeError as exc:
                raise DecodeError(f"{self.name}.{name}: {exc}") from None
        return self._build(**arguments)


# --- per type hint ---------------------------------------------------------------------------------------------------


def _coders(hint: Any, where: str) -> tuple[_Coder, _Coder]:
    """A writer and a reader; TypeError, when this module is imported, for a hint that has no format."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        layout = _Layout(hint)
        return lambda value: layout.write(value, []), layout.read
    if origin is Literal:
        return _words(arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        most = ADDRESSES_MAX if arguments[0] is Address else NUMBERS_MAX if arguments[0] is int else ITEMS_MAX
        return _many(*_coders(arguments[0], where), most)
    if origin is tuple:
        return _fixed([_coders(argument, where) for argument in arguments])
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(*_coders(arguments[0], where))
    raise TypeError(f"{where}: {hint} has no format")


def _write_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= INT_MAX:
        raise EncodeError(f"expected an unsigned number of 64 bits, found {value!r:.80}")
    return value


def _read_int(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= INT_MAX:
        raise DecodeError(f"expected an unsigned number of 64 bits, found {type(raw).__name__}")
    return raw


def _write_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise EncodeError(f"expected bool, found {type(value).__name__}")
    return value


def _read_bool(raw: Any) -> bool:
    if type(raw) is not bool:
        raise DecodeError(f"expected bool, found {type(raw).__name__}")
    return raw


def _write_text(value: Any) -> str:
    # Not encoded for the length where that cannot matter: a character takes four bytes at most.
    if type(value) is not str or (
        len(value) * 4 > TEXT_BYTES_MAX and len(value.encode("utf-8", "replace")) > TEXT_BYTES_MAX
    ):
        raise EncodeError(f"expected text of {TEXT_BYTES_MAX} bytes at most, found {value!r:.80}")
    return value


def _read_text(raw: Any) -> str:
    if type(raw) is not str or (len(raw) * 4 > TEXT_BYTES_MAX and len(raw.encode()) > TEXT_BYTES_MAX):
        raise DecodeError(f"expected text of {TEXT_BYTES_MAX} bytes at most, found {type(raw).__name__}")
    return raw


def _write_bytes(value: Any) -> bytes:
    if type(value) is not bytes or len(value) > RECORD_BYTES_MAX:
        raise EncodeError(f"expected {RECORD_BYTES_MAX} bytes at most, found {type(value).__name__}")
    return value


def _read_bytes(raw: Any) -> bytes:
    if type(raw) is not bytes or len(raw) > RECORD_BYTES_MAX:
        raise DecodeError(f"expected {RECORD_BYTES_MAX} bytes at most, found {type(raw).__name__}")
    return raw


def pack_node_id(node: NodeId) -> bytes:
    """`n-` and 16 lower-case hex digits -> eight bytes; EncodeError for any other."""
    try:
        packed = bytes.fromhex(node[2:])
    except (TypeError, ValueError):
        packed = b""
    if len(packed) != _NODE_ID_BYTES or unpack_node_id(packed) != node:
        raise EncodeError(f"expected a node id, found {node!r:.80}")
    return packed


def unpack_node_id(packed: bytes) -> NodeId:
    return NodeId("n-" + packed.hex())


def _read_node_id(raw: Any) -> NodeId:
    if type(raw) is not bytes or len(raw) != _NODE_ID_BYTES:
        raise DecodeError(f"expected a node id of {_NODE_ID_BYTES} bytes, found {type(raw).__name__}")
    return unpack_node_id(raw)


def _write_address(value: Any) -> list[Any]:
    if type(value) is not Address or type(value.port) is not int or not 1 <= value.port <= 65535:
        raise EncodeError(f"expected an address with a port, found {value!r:.80}")
    return [_packed(value.host), value.port]


def _read_address(raw: Any) -> Address:
    if type(raw) is not list or len(raw) < 2 or type(raw[0]) is not bytes or len(raw[0]) not in (4, 16):
        raise DecodeError("expected an address of 4 or 16 bytes and a port")
    if type(raw[1]) is not int or not 1 <= raw[1] <= 65535:
        raise DecodeError("expected a port between 1 and 65535")
    return Address(_unpacked(raw[0]), raw[1])


@lru_cache(maxsize=4096)
def _packed(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        raise EncodeError(f"expected an IP address, found {host!r:.80}") from None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    if mapped is not None:
        return mapped.packed
    return address.packed


@lru_cache(maxsize=4096)
def _unpacked(packed: bytes) -> str:
    if len(packed) == 4:
        return str(IPv4Address(packed))
    address = IPv6Address(packed)
    # The same host, and what Pythons make of it as text differs.
    return str(address.ipv4_mapped or address)


def _words(allowed: tuple[str, ...]) -> tuple[_Coder, _Coder]:
    places = {word: place for place, word in enumerate(allowed)}
    what = "one of " + ", ".join(allowed)

    def write(value: Any) -> int:
        if type(value) is not str or value not in places:
            raise EncodeError(f"expected {what}, found {value!r:.80}")
        return places[value]

    def read(raw: Any) -> str:
        if type(raw) is not int or not 0 <= raw < len(allowed):
            raise DecodeError(f"expected the number of {what}")
        return allowed[raw]

    return write, read


def _many(write_item: _Coder, read_item: _Coder, most: int) -> tuple[_Coder, _Coder]:
    def write(value: Any) -> list[Any]:
        if type(value) is not tuple or len(value) > most:
            raise EncodeError(f"expected a tuple of {most} at most, found {type(value).__name__}")
        return [write_item(item) for item in value]

    def read(raw: Any) -> tuple[Any, ...]:
        if type(raw) is not list or len(raw) > most:
            raise DecodeError(f"expected an array of {most} at most, found {type(raw).__name__}")
        return tuple([read_item(item) for item in raw])

    return write, read


def _fixed(coders: list[tuple[_Coder, _Coder]]) -> tuple[_Coder, _Coder]:
    size = len(coders)

    def write(value: Any) -> list[Any]:
        if type(value) is not tuple or len(value) != size:
            raise EncodeError(f"expected a tuple of {size}, found {type(value).__name__}")
        return [write_one(item) for (write_one, _), item in zip(coders, value, strict=True)]

    def read(raw: Any) -> tuple[Any, ...]:
        if type(raw) is not list or len(raw) != size:
            raise DecodeError(f"expected an array of {size}, found {type(raw).__name__}")
        return tuple([read_one(item) for (_, read_one), item in zip(coders, raw, strict=True)])

    return write, read


def _optional(write_one: _Coder, read_one: _Coder) -> tuple[_Coder, _Coder]:
    def write(value: Any) -> Any:
        return None if value is None else write_one(value)

    def read(raw: Any) -> Any:
        return None if raw is None else read_one(raw)

    return write, read


_PLAIN: dict[Any, tuple[_Coder, _Coder]] = {
    int: (_write_int, _read_int),
    bool: (_write_bool, _read_bool),
    str: (_write_text, _read_text),
    bytes: (_write_bytes, _read_bytes),
    NodeId: (pack_node_id, _read_node_id),
    Address: (_write_address, _read_address),
}
_BY_KIND = {number: _Layout(kind, number) for number, kind in KINDS.items()}
_BY_CLASS: dict[type, _Layout] = {KINDS[number]: layout for number, layout in _BY_KIND.items()}
