"""The process that asks NVIDIA's library (NVML), so that the daemon never has to. Run as a program by nvml.py.

It answers every line on stdin, a number, with one line on stdout: the number, and what the driver says as JSON, at most
ANSWER_BYTES_MAX long. Of questions that came while it was busy it answers the last. It ends at the end of its input and
dies with the thread that started it. It judges nothing but this: an error of one device is a problem of that device, an
error of the library a failed reading, and what a driver cannot tell is left out.

NVML stays initialised from one reading to the next: to initialise it costs a second or two per GPU where no persistence
daemon keeps them awake. This file imports nothing of gpulayer: it starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pynvml  # type: ignore[import-untyped]

ANSWER_BYTES_MAX = 4 * 1024 * 1024
# More than any host has; what is above is an error of the driver.
DEVICES_MAX = 1024
# A GPU has up to seven.
INSTANCES_MAX = 64
# What is listed of the processes of one device, and of all together: a driver that claims a million is not followed.
PROCESSES_MAX = 4096
PROCESSES_LISTED_MAX = 32768
# More would be a line for each function that fails in its own way; the first say enough.
PROBLEMS_MAX = 4
NOTES_MAX = 16
TEXT_CHARACTERS_MAX = 200
# NVSwitch systems have 16 GPUs to a host, or 72 in a rack of many hosts.
PEERS_MAX = 128
# A process that only draws and has no more than this is none that a job would notice: on servers an idle X server and
# its greeter hold 4 to 30 MiB of every GPU, for ever.
DRAWING_MIB_IGNORED = 64

_LIBRARY = "libnvidia-ml.so.1"
_REQUEST_BYTES = 64 * 1024
_MIB = 2**20
# The largest GPUs have a fiftieth of it.
_MEMORY_BYTES_MAX = 16 * 2**40
_ROOM_AT_FIRST = 64
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_VERSION = re.compile(r"[0-9][0-9A-Za-z._-]{0,63}")
_PCI_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])")

# The driver, the device or our rights do not let us know: no fault.
_CANNOT_TELL = frozenset(
    {
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
# The device is asked no more: it answers nothing else either, and some drivers take a second to say so each time.
_GONE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost: it fell off the bus, or the driver gave it up (dmesg has its Xid)",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU has to be reset (nvidia-smi --gpu-reset)",
}
_INIT_HINTS = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the kernel module (modprobe nvidia); dmesg says why it is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the driver was upgraded while its old kernel module stayed loaded: reboot, or load the nvidia modules anew"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "let the user of this daemon open /dev/nvidiactl and /dev/nvidia*",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old: install one of 2018 or later",
}
_FAILED_HINT = "see whether nvidia-smi works, and what dmesg says of NVRM"

Json = dict[str, Any]


class _ProcessV1(ctypes.Structure):
    """Of drivers before 2020; pynvml has the later one only."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


# The newest first: how the function's name ends, and what it fills in.
_PROCESS_LAYOUTS = (
    ("_v3", pynvml.c_nvmlProcessInfo_v2_t),
    ("_v2", pynvml.c_nvmlProcessInfo_v2_t),
    ("", _ProcessV1),
)


class _Facts(NamedTuple):
    """What does not change as long as the device is there."""

    model: str
    pci_bus_id: str
    compute_capability: str
    numa_node: int | None


class _Processes(NamedTuple):
    claimed: int
    """How many the driver says that there are, which may be more than there are in `memory_mib`."""
    memory_mib: dict[int, int | None]


class _Questions:
    """Asks one device, and collects what is wrong with it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.problems: list[str] = []
        self.is_gone = False
        self._errors: set[int] = set()

    def ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """None where it cannot be told, for whatever reason."""
        if self.is_gone:
            return None
        try:
            return function(self.handle, *arguments)
        except pynvml.NVMLError as error:
            self._note(what, error)
        except UnicodeDecodeError:
            self.problem(f"its {what} is not text")
        return None

    def problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX and text not in self.problems:
            self.problems.append(text)

    def _note(self, what: str, error: pynvml.NVMLError) -> None:
        if error.value in _CANNOT_TELL:
            return
        if error.value in _GONE:
            self.is_gone = True
            self.problem(_GONE[error.value])
        elif error.value not in self._errors:
            self._errors.add(error.value)
            self.problem(f"asked for its {what}, the driver says: {_told(error)}")


class Driver:
    """NVML, initialised at the first reading that finds it willing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_initialised = False
        self._listed: frozenset[str] | None = None
        """What the kernel module listed when NVML was initialised, which sees no GPU that came later."""
        self._facts: dict[str, _Facts] = {}
        self._peers: dict[str, list[str]] = {}
        self._uuids: dict[int, str] = {}
        """By index, as it answered last: a GPU that is lost cannot say who it is."""
        self._instances: dict[str, list[Json]] = {}
        """The newest of each GPU, for when it is lost."""
        self._notes: list[str] = []
        self._room = 0

    def read(self) -> Json:
        """One answer: a reading, or `failed` with code, text and hint."""
        self._notes, self._room = [], PROCESSES_LISTED_MAX
        try:
            self._initialise()
            return self._reading()
        except pynvml.NVMLError_LibraryNotFound:
            return _no_library()
        except pynvml.NVMLError as error:
            self._forget()
            return _failed(
                "failed", f"NVIDIA's driver says: {_told(error)}", _INIT_HINTS.get(error.value, _FAILED_HINT)
            )

    def _initialise(self) -> None:
        listed = self._listed_gpus()
        if self._is_initialised and listed != self._listed:
            self._forget()
        if not self._is_initialised:
            pynvml.nvmlInit()
            self._is_initialised, self._listed = True, listed

    def _listed_gpus(self) -> frozenset[str] | None:
        try:
            return frozenset(os.listdir(self._root / "proc/driver/nvidia/gpus"))
        except OSError:
            return None

    def _forget(self) -> None:
        if self._is_initialised:
            self._is_initialised = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                pass  # it is shut down, or will say at nvmlInit what it has

    def _reading(self) -> Json:
        driver_version, cuda_version = self._driver_version(), self._cuda_version()
        count = pynvml.nvmlDeviceGetCount()
        if count > DEVICES_MAX:
            self._note(f"the driver claims {count} GPUs; only the first {DEVICES_MAX} are looked at")
        handles = self._handles(min(count, DEVICES_MAX))
        self._see_who_is_there(handles)
        devices = [device for index, questions in handles.items() for device in self._gpu(index, questions)]
        if len(devices) > DEVICES_MAX:
            self._note(f"the driver claims {len(devices)} GPUs and MIG instances; {DEVICES_MAX} are looked at")
        return {
            "driver_version": driver_version,
            "cuda_version": cuda_version,
            "devices": _one_of_each_uuid(devices[:DEVICES_MAX]),
            "notes": self._notes,
        }

    def _note(self, text: str) -> None:
        if len(self._notes) < NOTES_MAX and text not in self._notes:
            self._notes.append(text)

    def _driver_version(self) -> str:
        try:
            version = str(pynvml.nvmlSystemGetDriverVersion())
        except UnicodeDecodeError:
            version = "?"
        except pynvml.NVMLError as error:
            _unless_it_cannot_tell(error)
            return ""
        if _VERSION.fullmatch(version):
            return version
        self._note(f"the driver's version {_clean(version)!r} is none")
        return ""

    def _cuda_version(self) -> str:
        try:
            version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        except pynvml.NVMLError as error:
            _unless_it_cannot_tell(error)
            return ""
        if 1000 <= version < 1000_000:
            return f"{version // 1000}.{version % 1000 // 10}"
        self._note(f"the driver's CUDA version {version} is none")
        return ""

    # --- who is there -------------------------------------------------------------------------------------------

    def _handles(self, count: int) -> dict[int, _Questions]:
        """By index, without those that are not for us; `handle` is None where the driver does not give it."""
        handles = {}
        for index in range(count):
            try:
                handles[index] = _Questions(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError_NoPermission:
                self._note(f"GPU {index} is not for this user or container: no permission to talk to it")
            except pynvml.NVMLError as error:
                handles[index] = questions = _Questions(None)
                questions.is_gone = True
                words = _GONE.get(error.value, f"the driver does not give access to it: {_told(error)}")
                questions.problem(words)
        return handles

    def _see_who_is_there(self, handles: dict[int, _Questions]) -> None:
        answered = {index: _uuid(questions) for index, questions in handles.items()}
        here = set(answered.values())
        for index, uuid in answered.items():
            before = self._uuids.get(index, "")
            answered[index] = uuid or (before if before not in here else "")
        if answered != self._uuids:
            # Somebody came or went: what was true of the others is asked again, their links above all. Of those that
            # cannot answer now it is kept.
            lost = {uuid for uuid in answered.values() if uuid and uuid not in here}
            self._facts = {uuid: facts for uuid, facts in self._facts.items() if uuid in lost}
            self._instances = {uuid: seen for uuid, seen in self._instances.items() if uuid in lost}
            self._uuids = answered
            self._peers = self._linked(handles)

    # --- one device ---------------------------------------------------------------------------------------------

    def _gpu(self, index: int, questions: _Questions) -> list[Json]:
        """The GPU and its MIG instances."""
        uuid = self._uuids[index]
        facts = self._facts_of(uuid, questions)
        memory_mib = self._memory_mib(questions, f"GPU {index}")
        instances = self._mig_instances(index, uuid, facts, questions)
        processes = self._processes(questions)
        _look_at_health(questions)
        if questions.is_gone:
            instances = self._instances.get(uuid)
        elif instances is not None:
            self._instances[uuid] = [{**each, "processes": None, "process_count": 0} for each in instances]
        else:
            self._instances.pop(uuid, None)
        gpu = {
            "index": index,
            "uuid": uuid,
            "model": facts.model,
            "memory_mib": memory_mib,
            "compute_capability": facts.compute_capability,
            "pci_bus_id": facts.pci_bus_id,
            "numa_node": facts.numa_node,
            "nvlink_peers": self._peers.get(uuid, []),
            "is_split": instances is not None,
            **processes,
            "problems": questions.problems,
        }
        # What is wrong with the GPU is wrong with each of its parts.
        parts = [
            {**each, "problems": [*each["problems"], *questions.problems][:PROBLEMS_MAX]} for each in instances or []
        ]
        return [gpu, *parts]

    def _facts_of(self, uuid: str, questions: _Questions) -> _Facts:
        known = self._facts.get(uuid)
        if known is not None:
            return known
        pci_bus_id = _pci_bus_id(questions)
        facts = _Facts(
            model=_model(questions),
            pci_bus_id=pci_bus_id,
            compute_capability=_compute_capability(questions),
            numa_node=self._numa_node(pci_bus_id),
        )
        if uuid and not questions.problems:
            self._facts[uuid] = facts
        return facts

    def _memory_mib(self, questions: _Questions, name: str) -> int:
        memory = questions.ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        if memory is None:
            if not questions.problems:
                self._note(f"the driver does not tell how much memory {name} has")
            return 0
        if not _MIB <= memory.total <= _MEMORY_BYTES_MAX:
            questions.problem(f"it says that it has {memory.total} bytes of memory")
            return 0
        return int(memory.total) // _MIB

    def _numa_node(self, pci_bus_id: str) -> int | None:
        """Of the bus that it is on, from the kernel: NVML's own number is of the GPU's memory, where that is a node."""
        try:
            node = int((self._root / "sys/bus/pci/devices" / (pci_bus_id or "?") / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    # --- MIG ----------------------------------------------------------------------------------------------------

    def _mig_instances(self, index: int, parent: str, facts: _Facts, questions: _Questions) -> list[Json] | None:
        """None: the GPU is whole."""
        mode = questions.ask("MIG mode", pynvml.nvmlDeviceGetMigMode)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        slots = questions.ask("number of MIG instances", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0
        found = []
        for slot in range(min(slots, INSTANCES_MAX)):
            handle = questions.ask("MIG instances", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, slot)
            if handle is not None:
                found.append(self._instance(index, parent, facts, _Questions(handle)))
        return found

    def _instance(self, index: int, parent: str, gpu: _Facts, questions: _Questions) -> Json:
        memory_mib = self._memory_mib(questions, f"a MIG instance of GPU {index}")
        return {
            "index": index,
            "uuid": _uuid(questions),
            "model": _instance_model(questions, gpu.model, memory_mib),
            "memory_mib": memory_mib,
            "compute_capability": gpu.compute_capability,
            "pci_bus_id": gpu.pci_bus_id,
            "numa_node": gpu.numa_node,
            "parent": parent,
            **self._processes(questions),
            "problems": questions.problems,
        }

    # --- processes ----------------------------------------------------------------------------------------------

    def _processes(self, questions: _Questions) -> Json:
        """Each pid once. `processes` is None where the driver cannot tell; and shorter than `process_count` where it
        lists more than may be followed."""
        compute, graphics, mps = (
            questions.ask("processes", _running, kind) for kind in ("Compute", "Graphics", "MPSCompute")
        )
        if compute is None:
            return {"processes": None, "process_count": 0}
        computing = compute.memory_mib.keys() | (mps.memory_mib.keys() if mps is not None else set())
        memory_mib: dict[int, int | None] = {}
        unlisted = 0
        for kind in (compute, mps, graphics):
            if kind is None:
                continue
            unlisted += kind.claimed - len(kind.memory_mib)
            for pid, mib in kind.memory_mib.items():
                only_draws_a_little = pid not in computing and mib is not None and mib <= DRAWING_MIB_IGNORED
                if not only_draws_a_little:
                    memory_mib[pid] = max(mib or 0, memory_mib.get(pid) or 0) or mib
        listed = list(memory_mib.items())[: min(PROCESSES_MAX, self._room)]
        self._room -= len(listed)
        return {"processes": listed, "process_count": len(memory_mib) + unlisted}

    # --- NVLink -------------------------------------------------------------------------------------------------

    def _linked(self, handles: dict[int, _Questions]) -> dict[str, list[str]]:
        """By UUID the GPUs that it has a link to. Those that hang on NVSwitches reach one another. What is wrong with a
        link is not wrong with the GPU, which works without it."""
        by_bus_id: dict[str, str] = {}
        remote: dict[str, set[str]] = {}
        on_switch: list[str] = []
        for index, questions in handles.items():
            uuid = self._uuids[index]
            if uuid and not questions.is_gone:
                asked_apart = _Questions(questions.handle)
                by_bus_id[_pci_bus_id(asked_apart)] = uuid
                remote[uuid], is_on_switch = _links(asked_apart)
                on_switch += [uuid] if is_on_switch else []
        linked: dict[str, list[str]] = {}
        for uuid, bus_ids in remote.items():
            direct = {by_bus_id[bus_id] for bus_id in bus_ids if bus_id in by_bus_id}
            switched = set(on_switch) if uuid in on_switch else set()
            linked[uuid] = sorted((direct | switched) - {uuid})[:PEERS_MAX]
        return linked


# --- parts --------------------------------------------------------------------------------------------------------


def _links(questions: _Questions) -> tuple[set[str], bool]:
    """The bus ids at the other ends of its active links, and whether one leads to a switch."""
    bus_ids: set[str] = set()
    is_on_switch = False
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = questions.ask("NVLinks", pynvml.nvmlDeviceGetNvLinkState, link)
        if state is None:
            break  # it has no more
        if state != pynvml.NVML_FEATURE_ENABLED:
            continue
        kind = questions.ask("NVLinks", pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            is_on_switch = True
            continue
        pci = questions.ask("NVLinks", pynvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
        if pci is not None:
            bus_ids.add(_bus_id(pci))
    return bus_ids, is_on_switch


def _uuid(questions: _Questions) -> str:
    uuid = questions.ask("UUID", pynvml.nvmlDeviceGetUUID)
    if uuid is not None and _UUID.fullmatch(uuid):
        return str(uuid)
    if uuid is not None:
        questions.problem(f"its UUID {_clean(uuid)!r} is none")
    elif not questions.problems:
        questions.problem("it does not tell its UUID")
    return ""


def _look_at_health(questions: _Questions) -> None:
    errors = questions.ask(
        "ECC errors",
        pynvml.nvmlDeviceGetTotalEccErrors,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    if errors:
        questions.problem(f"{errors} uncorrected ECC errors since the driver was loaded")
    if questions.ask("retired pages", pynvml.nvmlDeviceGetRetiredPagesPendingStatus):
        questions.problem("pages of its memory are to be retired: it has to be reset")
    rows = questions.ask("remapped rows", pynvml.nvmlDeviceGetRemappedRows)
    if rows is not None:
        _, _, is_pending, has_failed = rows
        if has_failed:
            questions.problem("a row of its memory could not be remapped: it has to be replaced")
        elif is_pending:
            questions.problem("rows of its memory are to be remapped: it has to be reset")


def _model(questions: _Questions) -> str:
    name = questions.ask("name", pynvml.nvmlDeviceGetName)
    if name is None:
        return ""
    if not name.strip() or not name.isprintable():
        questions.problem(f"its name {_clean(name)!r} is none")
        return ""
    return _clean(name.strip())


def _instance_model(questions: _Questions, gpu_model: str, memory_mib: int) -> str:
    """`NVIDIA H100 80GB HBM3 MIG 1g.10gb`; older drivers give the name of the GPU alone."""
    model = _model(questions)
    if "MIG" in model:
        return model
    attributes = questions.ask("slices", pynvml.nvmlDeviceGetAttributes_v2)
    slices = f"{attributes.gpuInstanceSliceCount}g." if attributes is not None else ""
    return f"{model or gpu_model} MIG {slices}{round(memory_mib / 1024)}gb".strip()


def _compute_capability(questions: _Questions) -> str:
    capability = questions.ask("compute capability", pynvml.nvmlDeviceGetCudaComputeCapability)
    if capability is None or not (0 < capability[0] < 1000 and 0 <= capability[1] < 1000):
        return ""
    return f"{capability[0]}.{capability[1]}"


def _pci_bus_id(questions: _Questions) -> str:
    pci = questions.ask("place on the bus", pynvml.nvmlDeviceGetPciInfo_v3)
    return _bus_id(pci) if pci is not None else ""


def _bus_id(pci: Any) -> str:
    """As the kernel writes it, `0000:3b:00.0`; NVML has a longer domain and capitals. Empty if it is none."""
    try:
        match = _PCI_BUS_ID.fullmatch(pci.busId)
    except UnicodeDecodeError:
        return ""
    if match is None:
        return ""
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def _running(handle: Any, kind: str) -> _Processes:
    """One list of processes, by the newest function that this driver has. pynvml's own makes an object of all that the
    driver claims, however many."""
    for suffix, layout in _PROCESS_LAYOUTS:
        function = getattr(pynvml.nvmlLib, f"nvmlDeviceGet{kind}RunningProcesses{suffix}", None)
        if function is not None:
            return _fetch(function, handle, layout)
    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _fetch(function: Any, handle: Any, layout: Any) -> _Processes:
    room = _ROOM_AT_FIRST
    while True:
        entries, count = (layout * room)(), ctypes.c_uint(room)
        status = function(handle, ctypes.byref(count), entries)
        if status == pynvml.NVML_SUCCESS or (status == pynvml.NVML_ERROR_INSUFFICIENT_SIZE and room == PROCESSES_MAX):
            break
        if status != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            raise pynvml.NVMLError(status)
        room = min(max(count.value, room) * 2, PROCESSES_MAX)
    # With too little room the driver fills in what fits, or nothing: the entries were zero before.
    found = [entries[place] for place in range(min(count.value, room))]
    memory_mib = {entry.pid: _used_mib(entry.usedGpuMemory) for entry in found if entry.pid}
    return _Processes(max(count.value if status else 0, len(memory_mib)), memory_mib)


def _used_mib(used_bytes: int) -> int | None:
    # "Not available" is all ones.
    return -(-used_bytes // _MIB) if used_bytes <= _MEMORY_BYTES_MAX else None


def _one_of_each_uuid(devices: list[Json]) -> list[Json]:
    """Two that answer with one UUID cannot be told apart, so neither may be used: the first keeps it, with the
    problem, the other has none."""
    first: dict[str, Json] = {}
    for device in devices:
        uuid = device["uuid"]
        if uuid and first.setdefault(uuid, device) is not device:
            words = f"GPU {first[uuid]['index']} and GPU {device['index']} both say that they are {uuid}"
            first[uuid]["problems"] = [words, *first[uuid]["problems"]][:PROBLEMS_MAX]
            device["uuid"], device["problems"] = "", [words]
    return devices


def _unless_it_cannot_tell(error: pynvml.NVMLError) -> None:
    if error.value not in _CANNOT_TELL:
        raise error


def _told(error: pynvml.NVMLError) -> str:
    try:
        return _clean(f"{error} (NVML error {error.value})")
    except UnicodeDecodeError:
        return f"NVML error {error.value}"


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:TEXT_CHARACTERS_MAX]


def _no_library() -> Json:
    """pynvml says "not found" of a library that cannot be loaded, too."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        if f"{_LIBRARY}: cannot open shared object file: No such file" not in str(error):
            text = f"NVIDIA's library cannot be loaded: {_clean(str(error))}"
            return _failed("failed", text, "install the driver again")
    return _failed("no_driver", f"there is no NVIDIA driver (no {_LIBRARY})", "install NVIDIA's driver")


def _failed(code: str, text: str, hint: str) -> Json:
    return {"failed": {"code": code, "text": text, "hint": hint}}


# --- the program --------------------------------------------------------------------------------------------------


def main() -> None:
    """`nvml_child.py PARENT ROOT`: the pid of who started it; the directory below which /sys and /proc are."""
    parent, root = int(sys.argv[1]), Path(sys.argv[2])
    _die_with_parent()
    if os.getppid() != parent:
        return  # it died before we could say that we want to hear of it
    # A library that crashes again and again shall not fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A library that prints shall not speak in our place.
    answers = os.dup(1)
    os.dup2(2, 1)
    driver = Driver(root)
    while (number := _last_question()) is not None:
        _write(answers, b"%d %s\n" % (number, _line(driver.read())))


def _die_with_parent() -> None:
    """Also in a call that never returns, where no end of input is noticed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _last_question() -> int | None:
    """The newest of those that wait; None at the end."""
    received = b""
    while not received.endswith(b"\n"):
        part = os.read(0, _REQUEST_BYTES)
        if not part:
            return None
        received += part
    return int(received.split()[-1])


def _line(answer: Json) -> bytes:
    line = json.dumps(answer, separators=(",", ":")).encode()
    if len(line) < ANSWER_BYTES_MAX:
        return line
    text = f"the driver's answer has {len(line)} bytes, more than {ANSWER_BYTES_MAX}"
    return json.dumps(_failed("failed", text, _FAILED_HINT)).encode()


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
