"""`[[accelerators]]` in the configuration: devices declared by hand, for hardware that no driver reports, or to try
things.

    [[accelerators]]
    kind = "cuda"
    model = "H100"
    memory = "80GiB"
    count = 2          # optional; then uuid-0 and uuid-1
    uuid = "GPU-…"     # optional; else made from the node's id, kind, model and place in the list
    vendor = "nvidia"  # optional; else by kind
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import NodeId
from gpulayer.model.node import ACCELERATOR_KINDS, VENDOR_OF_KIND, Accelerator
from gpulayer.model.units import parse_size

KEYS = ("kind", "model", "memory", "uuid", "count", "vendor")
# More than any host has; what is above is a slip of the finger.
DEVICES_MAX = 1024
TEXT_CHARACTERS_MAX = 128
# A uuid stands in CUDA_VISIBLE_DEVICES, where a comma separates them.
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def declared_accelerators(entries: Sequence[Mapping[str, Any]], *, node_id: NodeId) -> tuple[Accelerator, ...]:
    """One device each, `count` of them. InvalidRequest names the entry (from 1) and the key that is wrong."""
    found: list[Accelerator] = []
    places: dict[str, int] = {}
    for place, entry in enumerate(entries, start=1):
        for device in _devices(entry, place, node_id, len(found)):
            if device.uuid in places:
                raise InvalidRequest(
                    f"accelerators: entry {place} declares {device.uuid!r}, and so does entry {places[device.uuid]}",
                    hint="give each device its own uuid, or one entry with count",
                )
            places[device.uuid] = place
            found.append(device)
    return tuple(found)


def _devices(entry: Mapping[str, Any], place: int, node: NodeId, before: int) -> list[Accelerator]:
    where = f"accelerators: entry {place}"
    if not isinstance(entry, Mapping):
        raise InvalidRequest(
            f"{where} is not a table", hint='write [[accelerators]] and below it kind = "cuda" and so on'
        )
    for key in entry:
        if key not in KEYS:
            raise InvalidRequest(f"{where}: {key!r} is unknown", hint=_nearest(str(key), KEYS))
    kind = _text(entry, "kind", where)
    if kind not in ACCELERATOR_KINDS:
        raise InvalidRequest(f"{where}: kind {kind!r} is unknown", hint=_nearest(kind, ACCELERATOR_KINDS))
    model = _text(entry, "model", where)
    memory_mib = parse_size(_text(entry, "memory", where), f"{where}: memory")
    count = entry.get("count", 1)
    if type(count) is not int or not 1 <= count <= DEVICES_MAX - before:
        raise InvalidRequest(
            f"{where}: count {count!r} is not a number from 1 to {DEVICES_MAX - before}",
            hint=f"a node has {DEVICES_MAX} devices at most",
        )
    uuid = _text(entry, "uuid", where) if "uuid" in entry else _made_up_uuid(node, kind, model, place)
    if not _UUID.fullmatch(uuid):
        raise InvalidRequest(f"{where}: uuid {uuid!r} is not one", hint="use letters, digits and . _ : / -")
    vendor = _text(entry, "vendor", where) if "vendor" in entry else VENDOR_OF_KIND[kind]
    uuids = [uuid] if count == 1 else [f"{uuid}-{number}" for number in range(count)]
    return [Accelerator(uuid=each, kind=kind, vendor=vendor, model=model, memory_mib=memory_mib) for each in uuids]


def _nearest(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "use one of " + ", ".join(known)


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip() or len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
        raise InvalidRequest(
            f"{where}: {key} is {'missing' if value is None else repr(value)[:80]}",
            hint='give it as text, like kind = "cuda", model = "H100", memory = "80GiB"',
        )
    return value.strip()


def _made_up_uuid(node: NodeId, kind: str, model: str, place: int) -> str:
    """The same at every start as long as the list stays the same, and no other node's."""
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:40].strip("-")
    return f"{node}-{kind}-{name or 'device'}-{place}"
