"""One node's record at one state of its owner, the parts of a later one as they come, and the bounds of both.

records.py decides what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from gpulayer.core.gossip.messages import Delta, Entry
from gpulayer.model.record import RECORD_BYTES_MAX

KEY_LENGTH_MAX = 128
ENTRIES_MAX = 4096
# A value travels whole: with what is around it, it stays below a frame of 256 KiB.
VALUE_BYTES_MAX = RECORD_BYTES_MAX - 8 * 1024
# No owner gets there; a version near the end of 64 bits could never be outbid.
VERSION_MAX = 2**62
# What an entry, and a delta without entries, take on the wire at most beside keys and values: CBOR's heads (RFC 8949
# §3) and versions of nine bytes.
ENTRY_BYTES = 20
DELTA_BYTES = 80
# A series may hold parts of two states of its owner at once, each as large as a record may be.
SERIES_STATES_MAX = 2


class RecordCopy:
    """A record at one state of its owner. Never changed: a later state is another RecordCopy."""

    __slots__ = ("_values", "bytes", "entries", "epoch", "gc_version", "max_version")

    def __init__(
        self, epoch: int, gc_version: int = 0, max_version: int = 0, entries: dict[str, Entry] | None = None
    ) -> None:
        self.epoch = epoch
        self.gc_version = gc_version
        self.max_version = max_version
        self.entries = entries or {}
        """By version, the lowest first: what changed since a version is at the end. Tombstones too."""
        self.bytes = sum(map(bytes_of, self.entries.values()))
        self._values: Mapping[str, bytes] | None = None

    @property
    def version(self) -> tuple[int, int]:
        return self.gc_version, self.max_version

    @property
    def values(self) -> Mapping[str, bytes]:
        if self._values is None:
            self._values = MappingProxyType({e.key: e.value for e in self.entries.values() if e.value is not None})
        return self._values

    def after(self, entries: Iterable[Entry], gc_version: int, max_version: int) -> RecordCopy:
        """The state with these later entries, and without the tombstones up to gc_version."""
        merged = dict(self.entries)
        for entry in entries:
            present = merged.get(entry.key)
            if present is None or present.version < entry.version:
                merged.pop(entry.key, None)  # so that it goes to the end
                merged[entry.key] = entry
        gc_version = max(gc_version, self.gc_version)
        kept = {key: e for key, e in merged.items() if e.value is not None or e.version > gc_version}
        return RecordCopy(self.epoch, gc_version, max_version, kept)

    def above(self, version: int) -> list[Entry]:
        """Entries that are newer, in version order."""
        found = []
        for entry in reversed(self.entries.values()):
            if entry.version <= version:
                break
            found.append(entry)
        return found[::-1]

    def broken_bound(self) -> str:
        """Empty: it may be so large."""
        if self.bytes > RECORD_BYTES_MAX:
            return f"{self.bytes} bytes in {len(self.entries)} keys, {RECORD_BYTES_MAX} bytes may be"
        if len(self.entries) > ENTRIES_MAX:
            return f"{len(self.entries)} keys, {ENTRIES_MAX} may be"
        return ""

    def check(self) -> None:
        assert 0 <= self.gc_version <= self.max_version
        assert not self.broken_bound()
        versions = [entry.version for entry in self.entries.values()]
        assert versions == sorted(set(versions))
        assert not versions or versions[-1] <= self.max_version
        assert all(e.version > self.gc_version for e in self.entries.values() if e.value is None)
        assert all(key == entry.key for key, entry in self.entries.items())


class Series:
    """Deltas of one run that join on to one another, and do not reach yet all that their senders had."""

    __slots__ = ("bytes", "entries", "epoch", "gc_version", "is_whole", "moved_at", "to_version", "view")

    def __init__(self, epoch: int, *, is_whole: bool, from_version: int) -> None:
        self.epoch = epoch
        self.is_whole = is_whole
        """It replaces what is held; else it is applied to it."""
        self.gc_version = 0
        self.to_version = from_version
        self.view = 0
        """The newest state (max_version) that a part of it was taken from. It is complete when it reaches that."""
        self.entries: dict[str, Entry] = {}
        self.bytes = 0
        self.moved_at = 0.0

    @property
    def is_complete(self) -> bool:
        return self.to_version >= self.view

    def goes_on_with(self, delta: Delta) -> bool:
        # A part of an older state than those before it may lack an entry that they left out as newer than their end.
        return (
            delta.epoch == self.epoch
            and delta.from_version <= self.to_version
            and delta.max_version >= self.view
            and delta.gc_version <= max(self.gc_version, self.to_version)
        )

    def add(self, delta: Delta, now: float) -> None:
        for entry in delta.entries:
            if entry.version > self.to_version:
                replaced = self.entries.pop(entry.key, None)
                self.entries[entry.key] = entry
                self.bytes += bytes_of(entry) - (bytes_of(replaced) if replaced else 0)
        self.gc_version = max(self.gc_version, delta.gc_version)
        self.to_version = max(self.to_version, delta.to_version)
        self.view = max(self.view, delta.max_version)
        self.moved_at = now

    def broken_bound(self) -> str:
        if self.bytes > SERIES_STATES_MAX * RECORD_BYTES_MAX or len(self.entries) > SERIES_STATES_MAX * ENTRIES_MAX:
            return f"{self.bytes} bytes in {len(self.entries)} keys of a part, far above {RECORD_BYTES_MAX} bytes"
        return ""


def bytes_of(entry: Entry) -> int:
    """What it counts for, and at least what it takes on the wire. Keys are ASCII."""
    return len(entry.key) + (len(entry.value) if entry.value else 0) + ENTRY_BYTES


def broken_bound_of(key: str, value: bytes | None) -> str:
    """Empty: such an entry may be."""
    if not 0 < len(key) <= KEY_LENGTH_MAX or not key.isascii():
        return f"key {key!r:.300} is not 1 to {KEY_LENGTH_MAX} ASCII characters"
    if value is not None and len(value) > VALUE_BYTES_MAX:
        return f"key {key!r} has {len(value)} bytes, {VALUE_BYTES_MAX} may be"
    return ""


def malformed(delta: Delta) -> str:
    """Why no owner and no honest node can have made this; empty: one may have."""
    if not 0 <= delta.from_version <= delta.to_version <= delta.max_version <= VERSION_MAX:
        return f"versions {delta.from_version}, {delta.to_version}, {delta.max_version} do not rise"
    if not 0 <= delta.gc_version <= delta.max_version:
        return f"gc_version {delta.gc_version} is not between 0 and {delta.max_version}"
    if delta.reset and delta.from_version:
        return f"a reset that begins at version {delta.from_version}"
    if len(delta.entries) > ENTRIES_MAX:
        return f"{len(delta.entries)} entries, {ENTRIES_MAX} may be"
    last = delta.from_version
    for entry in delta.entries:
        if not last < entry.version <= delta.to_version:
            return f"key {entry.key!r:.300} at version {entry.version} after {last} in a delta up to {delta.to_version}"
        if why := broken_bound_of(entry.key, entry.value):
            return why
        last = entry.version
    if len({entry.key for entry in delta.entries}) < len(delta.entries):
        return "a key occurs twice"
    return ""


def parts(entries: list[Entry], bytes_max: int) -> Iterator[tuple[list[Entry], bool]]:
    """Cut between entries so that each part has bytes_max at most, or one entry: (part, whether it is the last)."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        if part and size + bytes_of(entry) > bytes_max:
            yield part, False
            part, size = [], 0
        part.append(entry)
        size += bytes_of(entry)
    yield part, True
