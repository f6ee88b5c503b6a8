"""NVIDIA's devices, read in a child process: a driver may hang, crash or write nonsense, and only the child suffers.

Two ways to ask the same child (nvml_child.py): `read_once` blocks and needs no event loop, for the command line;
`NvmlChild` keeps the child between readings, for the daemon. Both give a Reading or a ReadingFailed that says what
happened; what that means for a device is judged elsewhere (core/inventory.py). No timer runs here: who asks, decides
when. `driver_is_likely` and `pci_gpus` look at files only, so that a host without a driver pays for no child.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never

from gpulayer.model.inventory import DeviceProcess, DeviceReading, Reading, ReadingFailed
from gpulayer.runtime.children import without_users_modules

Json: TypeAlias = dict[str, Any]

LIBRARY = "libnvidia-ml.so.1"
CHILD = Path(__file__).with_name("nvml_child.py")
NO_DRIVER = ReadingFailed(code="no_driver", text=f"{LIBRARY} was not found", hint="install NVIDIA's driver")
# A healthy driver answers for eight GPUs within milliseconds.
READ_SECONDS_MAX = 3.0
# The first answer of a child: where no persistence daemon keeps the GPUs awake the driver starts them one by one, a
# second or two each. A child that has given no reading by then is given up, and a new one loads the library anew.
FIRST_READING_SECONDS_MAX = 30.0
# A process that SIGKILL has not ended by then is held by the kernel (state D).
KILL_SECONDS_MAX = 0.25
WAITS_FOR_END = 50  # looks within that time: it takes a few milliseconds
# Each holds 12 MiB, and perhaps a lock in the kernel, until the host is restarted.
UNKILLABLE_MAX = 3
# To start a child takes 60 ms of CPU: two thousandths of a core at this pace.
RESTART_SECONDS_MAX = 30.0
# The child's own bound (nvml_child.py); a peer that sends more is not it.
ANSWER_BYTES_MAX = 4 * 1024 * 1024
_READ_BYTES = 64 * 1024
_TEXT_CHARACTERS_MAX = 500
_QUOTED_CHARACTERS_MAX = 200
_NUMBER_MAX = 2**48
UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")

# Not for a child: whose words the daemon takes, and what systemd wants to hear from it alone.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_NOT_INHERITED_PREFIX = "GPULAYER_"

# Where distributions, WSL, NixOS and NVIDIA's containers put the library; LD_LIBRARY_PATH comes before.
LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
)
DRIVER_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl")

PCI_VENDORS: dict[str, Literal["nvidia", "amd", "intel"]] = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
# Display controllers and processing accelerators (what AMD's MI300 are to PCI).
PCI_CLASSES = ("0x03", "0x12")


class PciGpu(NamedTuple):
    """A card on the bus, whether or not a driver knows it."""

    vendor: Literal["nvidia", "amd", "intel"]
    bus_id: str
    """As the kernel writes it: `0000:3b:00.0`."""


# --- without a child ----------------------------------------------------------------------------------------------


def driver_is_likely(*, environment: Mapping[str, str] | None = None, root: str = "/") -> bool:
    """Whether anything here looks like an NVIDIA driver: its library or its kernel module. A dozen looks at the file
    system, no process; False spares the child, True promises nothing. `environment`: the process's own if None."""
    path = (os.environ if environment is None else environment).get("LD_LIBRARY_PATH", "")
    given = [directory for directory in re.split("[:;]", path) if directory]
    usual = [os.path.join(root, directory) for directory in LIBRARY_DIRECTORIES]
    libraries = (os.path.join(directory, LIBRARY) for directory in (*given, *usual))
    signs = (os.path.join(root, sign) for sign in DRIVER_SIGNS)
    return any(os.path.exists(file) for file in (*libraries, *signs))


def pci_gpus(*, root: str = "/") -> list[PciGpu]:
    """The GPUs that the kernel sees on the PCI bus, sorted: evidence of hardware, also where no driver is. Empty where
    /sys cannot be read."""
    devices = Path(root, "sys/bus/pci/devices")
    try:
        names = sorted(os.listdir(devices))
    except OSError:
        return []
    found = []
    for name in names:
        vendor = PCI_VENDORS.get(_first_line(devices / name / "vendor"))
        if vendor is not None and _first_line(devices / name / "class").startswith(PCI_CLASSES):
            found.append(PciGpu(vendor, name))
    return found


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- the two ways to ask ------------------------------------------------------------------------------------------


def read_once(
    timeout_seconds: float = READ_SECONDS_MAX, *, environment: Mapping[str, str] | None = None, root: str = "/"
) -> Reading | ReadingFailed:
    """Starts a child, asks it once and ends it. Blocks for `timeout_seconds` at most, and KILL_SECONDS_MAX more where
    the child does not end. `environment`: the child's, this process's own if None; `root`: where /sys and /proc are."""
    deadline = time.monotonic() + timeout_seconds
    try:
        child = _Child(environment, root)
    except OSError as error:
        return _cannot_start(error)
    try:
        child.ask()
        result = _wait_for_answer(child, deadline)
        if result is None:
            return child.silence(timeout_seconds)
        if isinstance(result, _Ended):
            child.wait(KILL_SECONDS_MAX)
            return child.why_it_ended()
        return result
    finally:
        child.kill()
        child.wait(KILL_SECONDS_MAX)
        child.close()


def _wait_for_answer(child: _Child, deadline: float) -> Reading | ReadingFailed | _Ended | None:
    poll = select.poll()
    poll.register(child.answers, select.POLLIN)
    result = None
    while result is None and (left_seconds := deadline - time.monotonic()) > 0:
        if poll.poll(left_seconds * 1000):
            result = child.take()
    return result


class NvmlChild:
    """The child that a daemon keeps. One reader at a time, in trio.

    A child that hangs, crashes or answers nonsense is killed, and a later read starts another: after 1 s, 2 s, … 30 s
    as long as that does not help, and until then the failure is repeated. One that cannot be killed is left to the
    kernel, and after three of these none is started any more until one is gone.
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None, root: str = "/") -> None:
        self._environment = environment
        self._root = root
        self._child: _Child | None = None
        self._unkillable: list[_Child] = []
        self._failure: ReadingFailed | None = None
        """The newest, since the last reading; it stands until `_not_before`."""
        self._failures = 0
        self._not_before = 0.0
        self._is_reading = False

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._child.pid if self._child is not None else None

    async def read(self) -> Reading | ReadingFailed:
        """What the driver says now, after READ_SECONDS_MAX at the latest, and KILL_SECONDS_MAX more where the child
        does not end. May be cancelled: the next read gets an answer of its own."""
        assert not self._is_reading, "one reader at a time"
        self._is_reading = True
        try:
            return await self._read()
        finally:
            self._is_reading = False

    async def aclose(self) -> None:
        """Ends the child; not while somebody reads. A read after it starts a new one."""
        assert not self._is_reading, "it is being read"
        await self._end()

    async def _read(self) -> Reading | ReadingFailed:
        if self._child is None:
            if self._failure is not None and time.monotonic() < self._not_before:
                return self._failure
            refusal = self._start()
            if refusal is not None:
                return self._back_off(refusal)
        child = self._child
        assert child is not None
        child.ask()
        result = await _answer(child)
        match result:
            case Reading():
                self._failure, self._failures = None, 0
                return result
            case ReadingFailed(code="failed"):
                # The driver may come up yet, and asking costs nothing. But what a process has loaded it keeps, so a
                # new one has to look from time to time.
                if child.fruitless_seconds() > FIRST_READING_SECONDS_MAX:
                    await self._end()
                return result
            case ReadingFailed():
                failure = result
            case _Ended():
                await _wait_for_end(child)
                failure = child.why_it_ended()
            case None:
                failure = child.silence(READ_SECONDS_MAX)
                if child.is_waking_the_driver():
                    return failure
            case _:
                assert_never(result)
        await self._end()
        return self._back_off(failure)

    def _start(self) -> ReadingFailed | None:
        self._unkillable = [child for child in self._unkillable if not child.has_ended()]
        if len(self._unkillable) >= UNKILLABLE_MAX:
            return _cannot_be_killed([child.pid for child in self._unkillable])
        try:
            self._child = _Child(self._environment, self._root)
        except OSError as error:
            return _cannot_start(error)
        return None

    def _back_off(self, failure: ReadingFailed) -> ReadingFailed:
        self._failure = failure
        self._not_before = time.monotonic() + min(2.0**self._failures, RESTART_SECONDS_MAX)
        self._failures = min(self._failures + 1, 10)
        return failure

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.close()
        await _wait_for_end(child)
        if not child.has_ended():
            self._unkillable.append(child)


# trio is imported where it is used: the command line imports this module, and the import takes 90 ms.


async def _answer(child: _Child) -> Reading | ReadingFailed | _Ended | None:
    """None: none in READ_SECONDS_MAX."""
    import trio

    result = None
    with trio.move_on_after(READ_SECONDS_MAX):
        while result is None:
            await trio.lowlevel.wait_readable(child.answers)
            result = child.take()
    return result


async def _wait_for_end(child: _Child) -> None:
    """Or for KILL_SECONDS_MAX."""
    import trio

    with trio.CancelScope(shield=True):
        for _ in range(WAITS_FOR_END):
            if child.has_ended():
                break
            await trio.sleep(KILL_SECONDS_MAX / WAITS_FOR_END)


# --- the child ----------------------------------------------------------------------------------------------------


class _Ended:
    """The child has closed its answers."""


class _Child:
    """The process, and the pipes to it. Never waits, but in `wait`; OSError if it cannot be started.

    The kernel kills it when the thread that started it ends: a daemon's main thread.
    """

    def __init__(self, environment: Mapping[str, str] | None, root: str) -> None:
        # What it has to say of its end is read when it has ended; until then it can neither fill a disk nor be stopped
        # by a full pipe, because its end of this one does not block either.
        self._errors, errors_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(os.getpid()), root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors_in,
                bufsize=0,
                env=_environment(os.environ if environment is None else environment),
                # A Ctrl-C in the terminal is for who started it.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._errors)
            raise
        finally:
            os.close(errors_in)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions = self._process.stdin.fileno()
        self.answers = self._process.stdout.fileno()
        os.set_blocking(self._questions, False)
        os.set_blocking(self.answers, False)
        self.pid = self._process.pid
        self._received = bytearray()
        self._number = 0
        self._has_read = False
        self._fruitless_since = time.monotonic()

    def ask(self) -> None:
        self._number += 1
        try:
            os.write(self._questions, b"%d\n" % self._number)
        except (BrokenPipeError, BlockingIOError):
            pass  # it has ended, or not listened to thousands of questions: what comes of this one says so

    def take(self) -> Reading | ReadingFailed | _Ended | None:
        """What it has answered to the newest question; None: nothing yet."""
        try:
            part = os.read(self.answers, _READ_BYTES)
        except BlockingIOError:
            return None
        if not part:
            return _Ended()
        self._received += part
        if len(self._received) > ANSWER_BYTES_MAX:
            return _garbage(self._received, f"it is longer than {ANSWER_BYTES_MAX} bytes")
        if b"\n" not in part:
            return None
        *lines, self._received = self._received.split(b"\n")
        heard = [result for line in lines if (result := self._heard(bytes(line))) is not None]
        # Whoever says one true thing and one nonsense is not believed.
        return next((result for result in heard if isinstance(result, ReadingFailed)), heard[0] if heard else None)

    def _heard(self, line: bytes) -> Reading | ReadingFailed | None:
        number, _, answer = line.partition(b" ")
        if not number.isdigit() or len(number) > 18 or int(number) > self._number:
            return _garbage(line, "it has no number")
        if int(number) < self._number:
            return None  # to a question whose asker has gone
        result = parse_answer(answer)
        if isinstance(result, Reading):
            self._has_read, self._fruitless_since = True, time.monotonic()
        return result

    def fruitless_seconds(self) -> float:
        """Since its last reading, or since its start."""
        return time.monotonic() - self._fruitless_since

    def is_waking_the_driver(self) -> bool:
        return not self._has_read and self.fruitless_seconds() < FIRST_READING_SECONDS_MAX

    def silence(self, seconds: float) -> ReadingFailed:
        hang = "what dmesg says of NVRM and Xid tells why; it may take a reboot"
        slow = "the first answer takes a second or two per GPU where nvidia-persistenced does not run; if it hangs, "
        return ReadingFailed(
            code="hangs",
            text=f"NVIDIA's driver has not answered for {seconds:g} s",
            hint=hang if self._has_read else slow + hang,
        )

    def why_it_ended(self) -> ReadingFailed:
        status = self._process.poll()
        if status is None:
            how = "closed its output and did not end"
        elif status < 0:
            how = f"was ended by {_signal_name(-status)}"
        else:
            how = f"ended with status {status}"
        words = self._last_words()
        return ReadingFailed(
            code="crashed",
            text=f"the process that asks NVIDIA's driver {how}" + (f": {words}" if words else ""),
            hint="see whether nvidia-smi works and what dmesg says; if the library crashes, install the driver again",
        )

    def _last_words(self) -> str:
        try:
            lines = os.read(self._errors, _READ_BYTES).splitlines()
        except BlockingIOError:
            return ""
        return next((_quoted(line) for line in reversed(lines) if line.strip()), "")

    def kill(self) -> None:
        self._process.kill()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass  # the kernel holds it; it dies when that lets go of it

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        os.close(self._errors)


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_users_modules(base).items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIX)
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- failures -----------------------------------------------------------------------------------------------------


def _cannot_start(error: OSError) -> ReadingFailed:
    return ReadingFailed(
        code="failed",
        text=f"cannot start the process that asks NVIDIA's driver: {error.strerror or error}",
        hint="is this host out of processes, memory or descriptors?",
    )


def _cannot_be_killed(pids: Collection[int]) -> ReadingFailed:
    named = ", ".join(str(pid) for pid in pids)
    return ReadingFailed(
        code="hangs",
        text=f"NVIDIA's driver hangs, and the kernel holds {len(pids)} processes that asked it (pids {named})",
        hint="see dmesg; a reboot ends them. As soon as one is gone the driver is asked again",
    )


def _garbage(line: bytes | bytearray, why: str) -> ReadingFailed:
    return ReadingFailed(
        code="garbage",
        text=f"the process that asks NVIDIA's driver answered nonsense ({why}): {_quoted(line) or 'an empty line'}",
        hint="if it happens again, a library of the driver writes where it must not: install the driver again",
    )


def _quoted(line: bytes | bytearray) -> str:
    text = bytes(line[: 4 * _QUOTED_CHARACTERS_MAX]).decode(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_QUOTED_CHARACTERS_MAX]


# --- the answer ---------------------------------------------------------------------------------------------------


def parse_answer(line: bytes) -> Reading | ReadingFailed:
    """The JSON of a child's answer. What it is not in every field is a ReadingFailed `garbage`."""
    try:
        answer = _fields(json.loads(line), _ANSWER_KEYS)
        return _failure(answer["failed"]) if "failed" in answer else _reading(answer)
    except KeyError as error:
        return _garbage(line, f"it has no {error}")
    except (ValueError, RecursionError) as error:
        return _garbage(line, _quoted(str(error).encode(errors="replace")))


_ANSWER_KEYS = frozenset({"failed", "driver_version", "cuda_version", "devices", "notes"})
_FAILURE_KEYS = frozenset({"code", "text", "hint"})
_DEVICE_KEYS = frozenset(field.name for field in fields(DeviceReading))


def _failure(value: object) -> ReadingFailed:
    entry = _fields(value, _FAILURE_KEYS)
    code = _text(entry["code"])
    if code not in ("no_driver", "failed"):
        raise ValueError(f"{code!r} is no code")
    return ReadingFailed(code=code, text=_text(entry["text"]), hint=_text(entry["hint"]))


def _reading(entry: Json) -> Reading:
    devices = tuple(_device(each) for each in _list(entry["devices"]))
    uuids = [device.uuid for device in devices if device.uuid]
    if len(uuids) != len(set(uuids)):
        raise ValueError("two devices have one UUID")
    return Reading(
        driver_version=_text(entry["driver_version"]),
        cuda_version=_text(entry["cuda_version"]),
        devices=devices,
        notes=tuple(_text(note) for note in _list(entry["notes"])),
    )


def _device(value: object) -> DeviceReading:
    entry = _fields(value, _DEVICE_KEYS)
    processes = entry["processes"]
    numa_node = entry["numa_node"]
    return DeviceReading(
        index=_number(entry["index"]),
        uuid=_uuid(entry["uuid"]),
        model=_text(entry["model"]),
        memory_mib=_number(entry["memory_mib"]),
        compute_capability=_text(entry["compute_capability"]),
        pci_bus_id=_text(entry["pci_bus_id"]),
        numa_node=None if numa_node is None else _number(numa_node),
        nvlink_peers=tuple(_uuid(peer) for peer in _list(entry.get("nvlink_peers", []))),
        parent=_uuid(entry.get("parent", "")),
        is_split=_truth(entry.get("is_split", False)),
        processes=None if processes is None else tuple(_process(each) for each in _list(processes)),
        process_count=_number(entry["process_count"]),
        problems=tuple(_text(problem) for problem in _list(entry["problems"])),
    )


def _process(value: object) -> DeviceProcess:
    match value:
        case [pid, None]:
            return DeviceProcess(pid=_number(pid))
        case [pid, memory_mib]:
            return DeviceProcess(pid=_number(pid), memory_mib=_number(memory_mib))
    raise ValueError(f"{_short(value)} is no process")


def _fields(value: object, known: frozenset[str]) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} is no object")
    unknown = value.keys() - known
    if unknown:
        raise ValueError(f"{_short(min(unknown))} is unknown")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{_short(value)} is no list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"{_short(value)} is no text")
    return value


def _uuid(value: object) -> str:
    if value == "" or (isinstance(value, str) and UUID.fullmatch(value)):
        return str(value)
    raise ValueError(f"{_short(value)} is no UUID")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"{_short(value)} is no number")
    return value


def _truth(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{_short(value)} is neither true nor false")
    return value


def _short(value: object) -> str:
    return f"{value!r:.80}"
