"""The devices of this node, judged from what the driver says of them at one moment and the next. Pure.

A device that is not well is unhealthy at once, with its reason, and well again only after three good readings in a row;
none of the others is touched by that. A device that the driver stops reporting stays in the list, unhealthy: a GPU is
never silently gone. What somebody else holds of a device (`foreign`) is kept apart from its health, because
it needs another remedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, assert_never

from gpulayer.model.inventory import CONFIRM_SECONDS, DeviceProcess, DeviceReading, Reading, ReadingFailed
from gpulayer.model.node import Accelerator, GpuDetect
from gpulayer.model.units import MILLI, Instant, format_size

SOURCE = "nvml"
GOOD_READINGS_NEEDED = 3
PROCESSES_NAMED = 3
NOT_CONFIRMED = "not confirmed free"
# A foreign process that grows or shrinks by less than this part of the device is no news: each change is a log entry.
NEWS_PART = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """What /proc tells of a pid that the driver listed."""

    kind: Literal["managed", "foreign", "gone"]
    """`managed`: below a shim, of this daemon or another. `gone`: there is no such process (any more)."""
    name: str = ""
    """For people: `python of user anna`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What the host-wide lock says is held by none of ours: another daemon's, a local run's."""

    milli: int
    text: str = "held by another gpulayer of this host"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesRead:
    """The driver was asked. `evidence`: signs of hardware where there is no driver (`NVIDIA card 0000:3b:00.0`)."""

    result: Reading | ReadingFailed
    processes: Mapping[int, SeenProcess] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    """UUIDs that orders of this node hold some of."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewhereSeen:
    """The locks were looked at: of every device, or of those in `only`."""

    elsewhere: Mapping[str, Elsewhere]
    only: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockTrouble:
    """The locks of these devices cannot be taken, and why; those left out can."""

    troubles: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotConfirmed:
    """The driver did not confirm in time that a replica, all of whose processes have ended, has left this device."""

    uuid: str
    why: str


InventoryEvent: TypeAlias = DevicesRead | ElsewhereSeen | LockTrouble | NotConfirmed


@dataclass(slots=True, kw_only=True)
class _Device:
    """One device of the list. `facts` has neither health nor foreign holders: they are put in when asked for."""

    facts: Accelerator
    unhealthy: str = ""
    good_readings: int = GOOD_READINGS_NEEDED
    foreign: str = ""
    """Who, as the driver lists processes."""
    told_mib: dict[int, int | None] = field(default_factory=dict)
    """Per foreign pid the amount in `foreign`."""
    gone_since: dict[int, Instant] = field(default_factory=dict)
    """Per pid that is gone, since when the driver lists it all the same. Each counts for itself: where processes come
    and go, one that has just ended is in nearly every reading."""
    elsewhere: Elsewhere | None = None
    lock_trouble: str = ""

    def judged(self) -> Accelerator:
        if self.foreign:
            foreign, milli = self.foreign, MILLI
        elif self.elsewhere is not None and self.elsewhere.milli > 0:
            foreign, milli = self.elsewhere.text, min(self.elsewhere.milli, MILLI)
        else:
            foreign, milli = "", 0
        unhealthy = self.unhealthy or self.lock_trouble
        return replace(self.facts, unhealthy=unhealthy, foreign=foreign, foreign_milli=milli)


class Inventory:
    """Declared devices, and those of the driver. `known`: what an earlier daemon of this node had (the log's record);
    `is_excluded`: devices that the configuration keeps gpulayer from; `foreign_processes`: what to do about a device
    on which somebody else's process is."""

    def __init__(
        self,
        *,
        declared: Iterable[Accelerator] = (),
        known: Iterable[Accelerator] = (),
        is_excluded: Callable[[Accelerator], bool] = lambda _: False,
        foreign_processes: Literal["skip", "allow"] = "skip",
    ) -> None:
        self._declared = {device.uuid: _Device(facts=device) for device in declared}
        self._is_excluded = is_excluded
        self._foreign_processes = foreign_processes
        self._found: dict[str, _Device] = {
            device.uuid: _Device(
                facts=_bare(device),
                unhealthy=device.unhealthy or "the driver has not reported it yet",
                good_readings=0 if device.unhealthy else GOOD_READINGS_NEEDED - 1,
            )
            for device in known
            if device.source == SOURCE and not is_excluded(device)
        }
        self._overruled = set(self._declared.keys() & self._found.keys())
        """Declared devices that the driver reports, or has reported: its word counts, also when it is that the device
        was taken apart (MIG)."""
        self._seen: dict[str, DeviceReading] = {}
        """The newest readings, by UUID; empty while the driver does not answer."""
        self._failure: ReadingFailed | None = None
        self._notes: tuple[str, ...] = ()
        self._detect: GpuDetect = "error" if self._found else "none"
        self._drivers: tuple[tuple[str, str], ...] = ()
        self._excluded: tuple[Accelerator, ...] = ()

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """All that may be handed out, or could be if it were well; in the driver's order, then what is declared."""
        found = [device.judged() for device in self._found.values()]
        found.sort(key=lambda device: (device.index is None, device.index or 0, device.uuid))
        declared = [device.judged() for uuid, device in self._declared.items() if uuid not in self._overruled]
        return (*found, *declared)

    @property
    def excluded(self) -> tuple[Accelerator, ...]:
        """Devices that are there and that the configuration takes out."""
        return self._excluded

    @property
    def gpu_detect(self) -> GpuDetect:
        return self._detect

    @property
    def drivers(self) -> tuple[tuple[str, str], ...]:
        return self._drivers

    @property
    def undetected(self) -> tuple[str, ...]:
        """What is not known of this node's devices, and why."""
        doubled = [
            f"{uuid} is declared in the configuration and found by the driver, whose word counts"
            for uuid in sorted(self._overruled)
        ]
        return (*self._notes, *doubled)

    @property
    def failure(self) -> ReadingFailed | None:
        """Why the driver could not be read the last time."""
        return self._failure

    def device(self, uuid: str) -> Accelerator | None:
        device = self._found.get(uuid)
        if device is None and uuid not in self._overruled:
            device = self._declared.get(uuid)
        return device.judged() if device is not None else None

    def users_of(self, uuid: str) -> str:
        """The foreign processes on it, in words; empty where there are none."""
        device = self._found.get(uuid)
        return device.foreign if device is not None else ""

    def pids_on(self, uuid: str) -> frozenset[int]:
        """Every process that the driver lists on it, whoever's."""
        seen = self._seen.get(uuid)
        return frozenset(process.pid for process in seen.processes or ()) if seen is not None else frozenset()

    def gone_on(self, uuid: str) -> frozenset[int] | None:
        """The pids that are gone and that the driver lists on it all the same. None: it cannot tell now."""
        if self._failure is not None or uuid not in self._seen or self._seen[uuid].processes is None:
            return None
        return frozenset(self._found[uuid].gone_since) if uuid in self._found else None

    def can_tell(self, uuid: str) -> bool:
        """Whether the driver is one that lists the processes of this device; false for one that is declared."""
        if uuid not in self._found:
            return False
        seen = self._seen.get(uuid)
        return seen is None or seen.processes is not None or bool(seen.problems)

    # --- the machine ------------------------------------------------------------------------------------------------

    def step(self, event: InventoryEvent, now: Instant) -> None:
        match event:
            case DevicesRead(result=result, evidence=evidence):
                if isinstance(result, Reading):
                    self._read(result, event, now)
                else:
                    self._failed(result, evidence)
            case ElsewhereSeen(elsewhere=elsewhere, only=only):
                for uuid, device in self._all():
                    if only is None or uuid in only:
                        device.elsewhere = elsewhere.get(uuid)
            case LockTrouble(troubles=troubles):
                for uuid, device in self._all():
                    device.lock_trouble = troubles.get(uuid, "")
            case NotConfirmed(uuid=uuid, why=why):
                found = self._found.get(uuid)
                if found is not None:
                    _is_unwell(found, f"{NOT_CONFIRMED}: {why}")
            case _:
                assert_never(event)

    def _all(self) -> list[tuple[str, _Device]]:
        return [*self._found.items(), *self._declared.items()]

    def _failed(self, failure: ReadingFailed, evidence: tuple[str, ...]) -> None:
        self._failure, self._seen = failure, {}
        is_error = failure.code != "no_driver" or bool(evidence) or bool(self._found)
        self._detect = "error" if is_error else "none"
        there = f" ({', '.join(evidence)} is there)" if evidence else ""
        hint = f": {failure.hint}" if failure.hint and is_error else ""
        self._notes = (f"NVIDIA GPUs: {failure.text}{there}{hint}",)
        for device in self._found.values():
            _is_unwell(device, failure.text)

    def _read(self, reading: Reading, event: DevicesRead, now: Instant) -> None:
        self._failure, self._detect = None, "ok"
        self._drivers = tuple(
            sorted((name, v) for name, v in (("cuda", reading.cuda_version), ("nvidia", reading.driver_version)) if v)
        )
        devices = sorted(reading.devices, key=lambda device: (device.index, device.uuid))
        named = _named_once(devices)
        excluded = {uuid for uuid, device in named.items() if self._is_excluded(facts_of(device))}
        excluded |= {uuid for uuid, device in named.items() if device.parent in excluded}
        self._overruled |= self._declared.keys() & named.keys()
        self._excluded = tuple(facts_of(device) for uuid, device in named.items() if uuid in excluded)
        for uuid in excluded:
            self._found.pop(uuid, None)
        self._seen = {uuid: device for uuid, device in named.items() if uuid not in excluded and not device.is_split}
        for device in self._seen.values():
            self._read_device(device, event, now)
        nameless = unexplained = [device for device in devices if not device.uuid]
        for uuid in [uuid for uuid in self._found if uuid not in self._seen]:
            instead = _instead_of(self._found[uuid].facts, named, nameless)
            unexplained = [device for device in unexplained if device is not instead]
            self._not_reported(uuid, named, instead, is_held=uuid in event.held)
        # What no known device has turned into is told by its number; there is nothing else to call it by.
        numbered = [f"GPU {device.index}: {_without_a_name(device)}" for device in unexplained]
        useless = [
            f"{uuid} is in MIG mode and has no instances, so nothing can run on it"
            for uuid, device in named.items()
            if device.is_split and uuid not in excluded and not any(each.parent == uuid for each in devices)
        ]
        self._notes = (*reading.notes, *numbered, *useless)

    def _read_device(self, seen: DeviceReading, event: DevicesRead, now: Instant) -> None:
        facts = facts_of(seen)
        device = self._found.get(seen.uuid)
        if device is None:
            device = self._found[seen.uuid] = _Device(facts=facts)
            if (declared := self._declared.get(seen.uuid)) is not None:
                device.elsewhere, device.lock_trouble = declared.elsewhere, declared.lock_trouble
        elif facts.memory_mib and facts.model:  # else what was read before says more
            device.facts = facts
        self._look_at_processes(device, seen, event, now)
        problems = list(seen.problems)
        if seen.memory_mib < 0:
            problems.append(f"the driver says that it has {seen.memory_mib} MiB of memory")
        stuck = [pid for pid, since in device.gone_since.items() if now - since >= CONFIRM_SECONDS]
        if stuck:
            listed = [process for process in _listed(seen) if process.pid in stuck]
            told = ", ".join(_words(process, event.processes) for process in listed[:PROCESSES_NAMED])
            problems.append(f"{NOT_CONFIRMED}: {told}, as the driver still says")
        if problems:
            _is_unwell(device, "; ".join(problems))
        elif device.gone_since and NOT_CONFIRMED in device.unhealthy:
            device.good_readings = 0  # not confirmed by this one either
        else:
            _is_well(device)

    def _look_at_processes(self, device: _Device, seen: DeviceReading, event: DevicesRead, now: Instant) -> None:
        processes, listed = event.processes, _listed(seen)
        gone = [process for process in listed if _kind_of(processes, process.pid) == "gone"]
        device.gone_since = {process.pid: device.gone_since.get(process.pid, now) for process in gone}
        if self._foreign_processes == "allow":
            return
        if seen.processes is not None and seen.process_count > len(seen.processes):
            # Not how many, which would be another text every second.
            device.foreign, device.told_mib = f"more than {len(seen.processes)} processes are on it", {}
            return
        others = [process for process in listed if _kind_of(processes, process.pid) == "foreign"]
        if seen.uuid not in event.held:  # else it is what a replica leaves that has just ended, and nobody else's
            others += gone
        now_mib = {process.pid: process.memory_mib for process in others}
        if not now_mib:
            device.foreign, device.told_mib = "", {}
        elif _is_news(device.told_mib, now_mib, device.facts.memory_mib):
            told = [_words(process, processes) for process in others[:PROCESSES_NAMED]]
            more = f" and {len(others) - PROCESSES_NAMED} more" if len(others) > PROCESSES_NAMED else ""
            device.foreign, device.told_mib = ", ".join(told) + more, now_mib

    def _not_reported(
        self, uuid: str, named: Mapping[str, DeviceReading], instead: DeviceReading | None, *, is_held: bool
    ) -> None:
        """It is not in the list, or is there as one that nothing can run on. `instead`: what answers in its place."""
        is_loss = False
        if uuid in named:
            why = "MIG mode was switched on, which takes it apart"
        elif instead is not None:
            why, is_loss = _without_a_name(instead), True
        elif self._found[uuid].facts.parent in named:
            why = "this MIG instance is not there any more"
        else:
            why, is_loss = "the driver does not report it any more (it fell off the bus, or was taken out)", True
        if is_loss or is_held:
            _is_unwell(self._found[uuid], why)
        else:
            del self._found[uuid]


# --- parts --------------------------------------------------------------------------------------------------------


def _is_unwell(device: _Device, why: str) -> None:
    device.unhealthy, device.good_readings = why, 0


def _is_well(device: _Device) -> None:
    if device.unhealthy:
        device.good_readings += 1
        if device.good_readings >= GOOD_READINGS_NEEDED:
            device.unhealthy = ""


def facts_of(device: DeviceReading) -> Accelerator:
    """What it is, without how it is. It has a UUID."""
    return Accelerator(
        uuid=device.uuid,
        kind="cuda",
        vendor="nvidia",
        model=device.model,
        memory_mib=max(0, device.memory_mib),
        source=SOURCE,
        index=device.index,
        compute_capability=device.compute_capability,
        pci_bus_id=device.pci_bus_id,
        numa_node=device.numa_node,
        nvlink_peers=tuple(sorted(device.nvlink_peers)),
        parent=device.parent if device.parent != device.uuid else "",
    )


def _named_once(devices: Sequence[DeviceReading]) -> dict[str, DeviceReading]:
    """By UUID, in their order. Of several with the same one only the first, as a device that is not well: a replica
    could not be kept to it."""
    times = Counter(device.uuid for device in devices)
    named: dict[str, DeviceReading] = {}
    for device in devices:
        if device.uuid and device.uuid not in named:
            twins = (f"the driver reports its UUID {times[device.uuid]} times",) if times[device.uuid] > 1 else ()
            named[device.uuid] = replace(device, problems=(*device.problems, *twins))
    return named


def _instead_of(
    missing: Accelerator, named: Mapping[str, DeviceReading], nameless: Sequence[DeviceReading]
) -> DeviceReading | None:
    """What has its number and does not tell its UUID: the device itself, or the GPU that it is an instance of."""
    parents = {missing.parent} if missing.parent in named else {missing.parent, ""}
    return next((each for each in nameless if each.index == missing.index and each.parent in parents), None)


def _without_a_name(device: DeviceReading) -> str:
    return "; ".join(device.problems) or "the driver does not tell its UUID"


def _listed(device: DeviceReading) -> list[DeviceProcess]:
    """Each process once; one that computes and draws is in two lists of the driver."""
    return list({process.pid: process for process in device.processes or ()}.values())


def _bare(device: Accelerator) -> Accelerator:
    return replace(device, unhealthy="", foreign="", foreign_milli=0)


def _kind_of(processes: Mapping[int, SeenProcess], pid: int) -> str:
    """A pid that nobody looked up is somebody else's until it is known whose it is."""
    return processes[pid].kind if pid in processes else "foreign"


def _words(process: DeviceProcess, processes: Mapping[int, SeenProcess]) -> str:
    """`pid 4711 (python of user anna) holds 20 GiB`."""
    seen = processes.get(process.pid)
    who = "gone" if seen is not None and seen.kind == "gone" else seen.name if seen is not None else ""
    named = f"pid {process.pid}" + (f" ({who})" if who else "")
    return named if process.memory_mib is None else f"{named} holds {format_size(process.memory_mib)}"


def _is_news(told: Mapping[int, int | None], now: Mapping[int, int | None], memory_mib: int) -> bool:
    if told.keys() != now.keys():
        return True
    return any(abs((told[pid] or 0) - (mib or 0)) > memory_mib * NEWS_PART for pid, mib in now.items())
