"""`[devices] exclude` in the configuration: devices that a driver reports and that gpulayer leaves alone. Pure.

    [devices]
    exclude = ["GPU-8f2a6c1e-…", "3b:00.0", "*RTX A2000*"]

Each entry is a UUID, a PCI bus id or a model, and may be a pattern (`*`, `?`, `[ab]`); upper and lower case are the
same. A GPU that is excluded takes its MIG instances with it. An index is refused: it may be another device's after a
reboot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from gpulayer.model.errors import InvalidRequest

# One entry for each device of the largest host, and no more text than a model's name has.
ENTRIES_MAX = 1024
CHARACTERS_MAX = 128

_HINT = 'name devices by UUID, PCI bus id or model, like exclude = ["GPU-8f2a6c1e-…", "3b:00.0", "*A2000*"]'
# `0000:3b:00.0` as the kernel writes it, `3b:00.0` as lspci does, `00000000:3B:00.0` as nvidia-smi does.
_PCI_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


class Named(Protocol):
    """What an exclusion is held against: an Accelerator, or the DeviceReading it is made from."""

    @property
    def uuid(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def pci_bus_id(self) -> str: ...
    @property
    def parent(self) -> str: ...


def checked_exclusions(value: object) -> tuple[str, ...]:
    """The value of `devices.exclude`, each entry once and in its order. InvalidRequest names the entry and says why."""
    if not isinstance(value, list):
        raise InvalidRequest(f"devices.exclude: {value!r:.80} is not a list", hint=_HINT)
    if len(value) > ENTRIES_MAX:
        raise InvalidRequest(f"devices.exclude: {len(value)} entries, {ENTRIES_MAX} at most", hint="use patterns")
    return tuple(dict.fromkeys(_checked(entry) for entry in value))


def _checked(entry: object) -> str:
    is_number = isinstance(entry, int) and not isinstance(entry, bool)
    if is_number or (isinstance(entry, str) and entry.strip().isdecimal()):
        raise InvalidRequest(
            f"devices.exclude: {entry!r:.80} is an index, which may be another device's after a reboot",
            hint="name its UUID or its PCI bus id; `gpulayer resources detect` shows both",
        )
    if not isinstance(entry, str) or not entry.strip() or not entry.isprintable() or len(entry) > CHARACTERS_MAX:
        raise InvalidRequest(f"devices.exclude: {entry!r:.80} names no device", hint=_HINT)
    return entry.strip()


def is_excluded(device: Named, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, as `checked_exclusions` gave them, is about this device."""
    return bool(exclusion_of(device, patterns))


def exclusion_of(device: Named, patterns: Iterable[str]) -> str:
    """The first pattern that is about this device, as it was written; empty if none is."""
    names = [device.uuid.casefold(), device.parent.casefold(), device.model.casefold(), pci_bus_id(device.pci_bus_id)]
    return next((pattern for pattern in patterns if any(_fits(pattern, name) for name in names if name)), "")


def unmatched_exclusions(devices: Sequence[Named], patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns that are about none of these devices: typing errors, or devices that were taken out."""
    return tuple(pattern for pattern in patterns if not any(is_excluded(device, (pattern,)) for device in devices))


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern.casefold()) or name == pci_bus_id(pattern)


def pci_bus_id(text: str) -> str:
    """One spelling of a PCI bus id, `0000:3b:00.0`; what is none stays as it is."""
    match = _PCI_BUS_ID.fullmatch(text.casefold())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}" if match else text.casefold()
