"""Frozen dataclasses to canonical CBOR and back, driven by their type hints. Pure, strict and bounded.

It knows no message of its own: whoever sends, stores or compares something calls `encode`, `decode` or `digest`. JSON
for people is not made here.

The format, which is what peers and logs of different versions share:

- a dataclass is a map from field name to value. Fields equal to their default are left out, unknown fields are ignored,
  missing ones take their default: a field with a default may be added or removed without breaking either side;
- where more than one class is possible (a union), and at the top, the map carries the class's name under the key "";
- a mapping with text keys is a map, one with other keys an array of [key, value]; both sorted by the encoded key;
- a tuple is an array; None, bool, int, float, str and bytes are themselves. Floats are finite, and take nine bytes.

Equal values give equal bytes, whatever the order of insertion and the hash seed; no tags, no indefinite lengths.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from hashlib import sha256
from io import BytesIO
from threading import RLock
from typing import Any, Literal, NewType, NoReturn, TypeVar, Union, cast, overload

import cbor2

T = TypeVar("T")
_Coder = Callable[[Any], Any]

# Many times what is sent or stored at once (1 MiB of entries); an end to what a peer can make us read.
BYTES_MAX = 16 * 1024 * 1024
# The deepest thing there is, a cluster's state down to a replica's exit, takes about twelve levels.
DEPTH_MAX = 32
INT_MIN = -(2**63)
INT_MAX = 2**64 - 1
_TAG = ""
_TEXT_MAX_IN_MESSAGE = 80


class DecodeError(ValueError):
    """These bytes are not what was expected. The only thing that `decode` raises, whatever the bytes."""


class EncodeError(ValueError):
    """The value breaks its own type hints: our mistake, found before it is sent or stored."""


def encode(value: Any) -> bytes:
    """The bytes of a dataclass instance, tagged with its class: `decode` can be told the class, or a union it is in."""
    if not is_dataclass(value) or isinstance(value, type):
        raise EncodeError(f"{type(value).__name__} is not a dataclass instance")
    try:
        record = _record(type(value))
        return cbor2.dumps({_TAG: record.name, **record.encode(value)})
    except UnicodeEncodeError as exc:
        raise EncodeError(f"{type(value).__name__}: text that is not valid Unicode: {exc.reason}") from exc


def digest(value: Any) -> str:
    """sha256 of the encoded value, in hex: equal for equal values on every node."""
    return sha256(encode(value)).hexdigest()


@overload
def decode(kind: type[T], data: bytes, *, bytes_max: int = BYTES_MAX) -> T: ...
@overload
def decode(kind: object, data: bytes, *, bytes_max: int = BYTES_MAX) -> Any: ...
def decode(kind: Any, data: bytes, *, bytes_max: int = BYTES_MAX) -> Any:
    """The value of dataclass `kind`, or of a member where `kind` is a union of dataclasses; else DecodeError."""
    chosen = _choices(kind)
    if len(data) > bytes_max:
        raise DecodeError(f"{len(data)} bytes, {bytes_max} at most")
    raw = parse(data)
    if type(raw) is not dict:
        raise DecodeError(f"expected a map, found {_found(raw)}")
    return chosen(raw)


def parse(data: bytes) -> Any:
    """Exactly one CBOR value, not yet compared with anything; else DecodeError. The caller bounds the length."""
    stream = BytesIO(data)
    # Outside of the try: options that cbor2 (before 6.2) does not know are no fault of the message.
    decoder = cbor2.CBORDecoder(
        stream,
        tag_hook=_refuse_tag,
        semantic_decoders=_REFUSE_EVERY_TAG,
        max_depth=DEPTH_MAX,
        allow_indefinite=False,
        allow_duplicate_keys=False,
        strict_hashable_types=True,
    )
    try:
        raw = decoder.decode()
    except Exception as exc:
        # It documents CBORDecodeError; whatever else a broken message provokes in it is the message's fault too.
        raise DecodeError(_shortened(str(exc.__cause__ or exc) or type(exc).__name__)) from exc
    if stream.tell() != len(data):
        raise DecodeError(f"{len(data) - stream.tell()} bytes follow the value")
    return raw


def _refuse_tag(*_: object) -> NoReturn:
    raise DecodeError("tags are not allowed")


class _EveryTag(dict[int, Callable[..., Any]]):
    """Answers for any tag. cbor2 knows some that compile patterns, divide big numbers, build cycles; none is ours."""

    def get(self, key: int, default: object = None) -> Any:
        return _refuse_tag

    def __getitem__(self, key: int) -> Callable[..., Any]:
        return _refuse_tag

    def __contains__(self, key: object) -> bool:
        return True


_REFUSE_EVERY_TAG = _EveryTag()


def _found(raw: object) -> str:
    match raw:
        case str():
            return f"text {raw[:_TEXT_MAX_IN_MESSAGE]!r}"
        case bool() | int() | float() | None:
            return repr(raw)
        case bytes():
            return f"{len(raw)} bytes"
        case list() | tuple():
            return f"an array of {len(raw)}"
        case dict():
            return f"a map of {len(raw)}"
        case _:
            return f"a value of type {type(raw).__name__}"


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else text[:400] + "…"


# Per class: compiled once --------------------------------------------------------------------------------------------


class _Record:
    """How one dataclass is written and read. Put together in two steps, because classes may contain themselves."""

    __slots__ = ("_kind", "_readers", "_required", "_writers", "name")

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.name = kind.__name__
        self._writers: list[tuple[str, _Coder, object, object]] = []
        self._readers: dict[str, _Coder] = {}
        self._required: tuple[str, ...] = ()

    def compile(self) -> None:
        hints = typing.get_type_hints(self._kind)
        required = []
        for field in fields(self._kind):
            if not field.init:
                continue
            write, read = _coders(hints[field.name], f"{self.name}.{field.name}")
            default: object = MISSING
            if field.default is not MISSING:
                default = field.default
            elif field.default_factory is not MISSING:
                default = field.default_factory()
            else:
                required.append(field.name)
            written_default = MISSING if default is MISSING else write(default)
            self._writers.append((field.name, write, default, written_default))
            self._readers[field.name] = read
        # The order of canonical CBOR: shorter keys first, then by bytes. Done here, it costs nothing per message.
        self._writers.sort(key=lambda writer: (len(writer[0].encode()), writer[0].encode()))
        self._required = tuple(required)

    def encode(self, value: object) -> dict[str, Any]:
        if type(value) is not self._kind:
            raise EncodeError(f"expected {self.name}, found {type(value).__name__}")
        written: dict[str, Any] = {}
        for name, write, default, written_default in self._writers:
            content = getattr(value, name)
            if content is default:
                continue
            try:
                raw = write(content)
            except EncodeError as exc:
                raise EncodeError(f"{self.name}.{name}: {exc}") from None
            # Compared as written: a frozen mapping and a dict, or -0.0 and 0.0, are the same default to a reader.
            if raw != written_default:
                written[name] = raw
        return written

    def decode(self, raw: Any) -> Any:
        if type(raw) is not dict:
            raise DecodeError(f"expected {self.name}, found {_found(raw)}")
        arguments: dict[str, Any] = {}
        readers = self._readers
        for name, content in raw.items():
            read = readers.get(name)
            if read is None:
                continue
            try:
                arguments[name] = read(content)
            except DecodeError as exc:
                raise DecodeError(_shortened(f"{self.name}.{name}: {exc}")) from None
        for name in self._required:
            if name not in arguments:
                raise DecodeError(f"{self.name}.{name} is missing")
        try:
            return self._kind(**arguments)
        except Exception as exc:
            # __post_init__ refuses in its own words (InvalidRequest, ValueError, an assert): here it is one thing.
            raise DecodeError(_shortened(f"{self.name}: {exc}")) from exc


_compiled: dict[type, _Record] = {}
_compiling: dict[type, _Record] = {}
_compiled_choices: dict[object, _Coder] = {}
_lock = RLock()


def _record(kind: type) -> _Record:
    record = _compiled.get(kind)
    if record is not None:
        return record
    with _lock:
        record = _compiled.get(kind) or _compiling.get(kind)
        if record is not None:
            return record
        outermost = not _compiling
        record = _compiling[kind] = _Record(kind)
        try:
            record.compile()
            if outermost:  # only now is every class that takes part complete, and other threads may use it
                _compiled.update(_compiling)
        finally:
            if outermost:
                _compiling.clear()
        return record


def _choices(kind: Any) -> _Coder:
    """What reads the top of a message: every class that it may be, by name."""
    chosen = _compiled_choices.get(kind)
    if chosen is None:
        members = _members(kind) if _is_union(kind) else (kind,)
        if not all(isinstance(member, type) and is_dataclass(member) for member in members):
            raise TypeError(f"{kind} is neither a dataclass nor a union of dataclasses")
        chosen = _compiled_choices[kind] = _tagged([_record(member) for member in members])[1]
    return chosen


def _tagged(records: list[_Record]) -> tuple[_Coder, _Coder]:
    by_name = {record.name: record for record in records}
    if len(by_name) != len(records):
        raise TypeError(f"two classes of one union have the same name: {[record.name for record in records]}")

    def write(value: Any) -> Any:
        record = by_name.get(type(value).__name__)
        if record is None:
            raise EncodeError(f"expected one of {sorted(by_name)}, found {type(value).__name__}")
        return {_TAG: record.name, **record.encode(value)}

    def read(raw: Any) -> Any:
        name = raw.get(_TAG) if type(raw) is dict else None
        record = by_name.get(name) if type(name) is str else None
        if record is None:
            what = f"one of {sorted(by_name)}" if len(by_name) > 1 else f"{records[0].name}"
            raise DecodeError(_shortened(f"expected {what}, found {_found(raw if type(raw) is not dict else name)}"))
        return record.decode(raw)

    return write, read


# Per type hint -------------------------------------------------------------------------------------------------------


def _coders(hint: Any, where: str) -> tuple[_Coder, _Coder]:
    """A writer and a reader for a type hint; TypeError, when a class is first used, for one that has no format."""
    if isinstance(hint, NewType):
        return _coders(hint.__supertype__, where)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and is_dataclass(hint):
        record = _record(hint)
        return record.encode, record.decode
    origin = typing.get_origin(hint)
    if origin is Literal:
        return _literal(typing.get_args(hint))
    if origin is tuple:
        return _tuple(typing.get_args(hint), where)
    if origin in (Mapping, dict):
        return _mapping(typing.get_args(hint), where)
    if _is_union(hint):
        return _union(_members(hint), where)
    raise TypeError(f"{where}: {hint} has no format")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _members(union: Any) -> tuple[Any, ...]:
    return typing.get_args(union)


def _scalar(kind: type) -> tuple[_Coder, _Coder]:
    # Exact types: bool is an int to isinstance, and an Enum or a str subclass would come back as something else.
    def write(value: Any) -> Any:
        if type(value) is not kind:
            raise EncodeError(f"expected {kind.__name__}, found {type(value).__name__}")
        return value

    def read(raw: Any) -> Any:
        if type(raw) is not kind:
            raise DecodeError(f"expected {kind.__name__}, found {_found(raw)}")
        return raw

    return write, read


def _write_int(value: Any) -> int:
    if type(value) is not int or not INT_MIN <= value <= INT_MAX:
        raise EncodeError(f"expected an int of 64 bits, found {type(value).__name__}")
    return value


def _read_int(raw: Any) -> int:
    if type(raw) is not int or not INT_MIN <= raw <= INT_MAX:
        raise DecodeError(f"expected an int of 64 bits, found {_found(raw)}")
    return raw


def _write_float(value: Any) -> float:
    # An int is a float to the type checker, so it may be one here; what is written is a float.
    if type(value) is not float and type(value) is not int:
        raise EncodeError(f"expected float, found {type(value).__name__}")
    found = float(value)
    if not math.isfinite(found):
        raise EncodeError(f"expected a finite float, found {found}")
    return found


def _read_float(raw: Any) -> float:
    # NaN and the infinities have no JSON: one of a peer would spoil every answer that it is in.
    if type(raw) is not float or not math.isfinite(raw):
        raise DecodeError(f"expected a finite float, found {_found(raw)}")
    return raw


_SCALARS: dict[Any, tuple[_Coder, _Coder]] = {
    bool: _scalar(bool),
    str: _scalar(str),
    bytes: _scalar(bytes),
    int: (_write_int, _read_int),
    float: (_write_float, _read_float),
    type(None): _scalar(type(None)),
}


def _literal(allowed: tuple[Any, ...]) -> tuple[_Coder, _Coder]:
    known = {(type(value), value) for value in allowed}
    hashable = frozenset(type(value) for value in allowed)
    what = "one of " + ", ".join(repr(value) for value in allowed)

    def write(value: Any) -> Any:
        if type(value) not in hashable or (type(value), value) not in known:
            raise EncodeError(f"expected {what}, found {_found(value)}")
        return value

    def read(raw: Any) -> Any:
        if type(raw) not in hashable or (type(raw), raw) not in known:
            raise DecodeError(f"expected {what}, found {_found(raw)}")
        return raw

    return write, read


def _tuple(arguments: tuple[Any, ...], where: str) -> tuple[_Coder, _Coder]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        write_item, read_item = _coders(arguments[0], where)

        def write(value: Any) -> Any:
            if type(value) is not tuple:
                raise EncodeError(f"expected tuple, found {type(value).__name__}")
            return [write_item(item) for item in value]

        def read(raw: Any) -> Any:
            if type(raw) is not list:
                raise DecodeError(f"expected an array, found {_found(raw)}")
            return tuple([read_item(item) for item in raw])

        return write, read

    coders = [_coders(argument, where) for argument in arguments]
    size = len(coders)

    def write_fixed(value: Any) -> Any:
        if type(value) is not tuple or len(value) != size:
            raise EncodeError(f"expected a tuple of {size}, found {_found(value)}")
        return [write_one(item) for (write_one, _), item in zip(coders, value, strict=True)]

    def read_fixed(raw: Any) -> Any:
        if type(raw) is not list or len(raw) != size:
            raise DecodeError(f"expected an array of {size}, found {_found(raw)}")
        return tuple([read_one(item) for (_, read_one), item in zip(coders, raw, strict=True)])

    return write_fixed, read_fixed


def _is_text(hint: Any) -> bool:
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    if typing.get_origin(hint) is Literal:
        return all(type(value) is str for value in typing.get_args(hint))
    return hint is str


def _mapping(arguments: tuple[Any, ...], where: str) -> tuple[_Coder, _Coder]:
    key, item = arguments
    write_key, read_key = _coders(key, where)
    write_item, read_item = _coders(item, where)

    def write_map(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise EncodeError(f"expected a mapping, found {type(value).__name__}")
        written = {write_key(name): write_item(content) for name, content in value.items()}
        return dict(sorted(written.items(), key=_by_encoded_text))

    def read_map(raw: Any) -> Any:
        if type(raw) is not dict:
            raise DecodeError(f"expected a map, found {_found(raw)}")
        return {read_key(name): read_item(content) for name, content in raw.items()}

    def write_pairs(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise EncodeError(f"expected a mapping, found {type(value).__name__}")
        written = [(write_key(name), write_item(content)) for name, content in value.items()]
        return [list(pair) for pair in sorted(written, key=lambda pair: cbor2.dumps(pair[0]))]

    def read_pairs(raw: Any) -> Any:
        if type(raw) is not list:
            raise DecodeError(f"expected an array of pairs, found {_found(raw)}")
        found: dict[Any, Any] = {}
        for pair in raw:
            if type(pair) is not list or len(pair) != 2:
                raise DecodeError(f"expected a pair, found {_found(pair)}")
            found[read_key(pair[0])] = read_item(pair[1])
        if len(found) != len(raw):
            raise DecodeError("a key occurs twice")
        return found

    return (write_map, read_map) if _is_text(key) else (write_pairs, read_pairs)


def _by_encoded_text(entry: tuple[str, Any]) -> tuple[int, bytes]:
    encoded = entry[0].encode()
    return len(encoded), encoded


def _union(members: tuple[Any, ...], where: str) -> tuple[_Coder, _Coder]:
    """Told apart by what CBOR itself tells: None, the scalar's type, array, or map; among dataclasses by the tag."""
    writers: dict[type, _Coder] = {}
    readers: dict[type, _Coder] = {}
    records: list[_Record] = []
    for member in members:
        plain = member
        while isinstance(plain, NewType):
            plain = plain.__supertype__
        if isinstance(plain, type) and is_dataclass(plain):
            records.append(_record(plain))
            continue
        origin = typing.get_origin(plain)
        if origin is Literal:
            python_type: type = type(typing.get_args(plain)[0])
            raw_type = python_type
        elif origin is tuple:
            python_type, raw_type = tuple, list
        else:
            python_type = raw_type = plain
        if raw_type in readers:
            raise TypeError(f"{where}: two members of the union look alike in CBOR")
        writers[python_type], readers[raw_type] = _coders(plain, where)
    # As written, 1, True and 1.0 are equal, so a default among them could be mistaken for another.
    if len({bool, int, float} & readers.keys()) > 1:
        raise TypeError(f"{where}: a union of bool, int and float would not keep them apart")
    if len(records) == 1:
        write_record, read_record = cast(_Coder, records[0].encode), cast(_Coder, records[0].decode)
    elif records:
        write_record, read_record = _tagged(records)
    if records:
        readers[dict] = read_record

    def write(value: Any) -> Any:
        writer = writers.get(type(value))
        if writer is not None:
            return writer(value)
        if records:
            return write_record(value)
        raise EncodeError(f"expected one of {sorted(kind.__name__ for kind in writers)}, found {type(value).__name__}")

    def read(raw: Any) -> Any:
        reader = readers.get(type(raw))
        if reader is None:
            raise DecodeError(f"expected one of {sorted(kind.__name__ for kind in readers)}, found {_found(raw)}")
        return reader(raw)

    return write, read
