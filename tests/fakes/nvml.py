"""An NVIDIA driver for tests: a libnvidia-ml.so.1 built from fake_nvml.c, whose GPUs and faults a test sets at will.

The product loads it as it loads NVIDIA's, by the linker's path; only what answers is not real:

    fake = FakeNvml(tmp_path)              # two GPUs of 80 GiB
    daemon = Daemon(home, env=fake.env())  # everything started with this environment sees them
    fake.fault(1, "lost")                  # at once, also for what runs already
    fake.well(1)

Every method that changes something writes the state file anew, in one step; what a test changes in `gpus` or `rules` by
hand needs `write()`. UUIDs are random, so that tests which run at the same time never hold the same device.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
MIB = 2**20
LISTED_MAX = 64  # PROCESSES_MAX of the C source

ERRORS = {
    "uninitialized": 1,
    "no_permission": 4,
    "driver_not_loaded": 9,
    "lost": 15,
    "reset_required": 16,
    "version_mismatch": 18,
    "unknown": 999,
}
"""NVML's return codes, by names for tests; where a method takes an error it takes the number, too."""

Action = Literal["hang", "crash", "abort", "exit", "error", "delay", "missing"]
Variant = Literal["full", "old"]


@functools.cache
def built(variant: Variant = "full") -> Path:
    """The compiled library, made once per test session. Skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the fake libnvidia-ml needs a C compiler")
    directory = Path(tempfile.mkdtemp(prefix="fake-nvml-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = directory / LIBRARY
    old = ["-DOLD"] if variant == "old" else []
    subprocess.run([compiler, *old, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return library


@pytest.fixture(autouse=True)
def locks_of_fakes() -> Iterator[None]:
    """For whoever imports it: no lock file of a fake device stays. On a host with eight GPUs they are nothing, but here
    every test makes new ones."""
    yield
    while FakeNvml.made:
        FakeNvml.made.pop().remove_locks()


def new_uuid(prefix: str = "GPU") -> str:
    return f"{prefix}-{uuid.uuid4()}"


@dataclass(kw_only=True)
class Link:
    """One NVLink of a GPU; `to` is the PCI bus id at its other end."""

    to: str
    kind: Literal["gpu", "switch"] = "gpu"
    is_active: bool = True


@dataclass(kw_only=True)
class FakeGpu:
    """A GPU or, with `slices`, a MIG instance of one. None is what the driver does not support."""

    uuid: str = field(default_factory=new_uuid)
    model: str = "NVIDIA H100 80GB HBM3"
    """May hold any byte but a newline, as \\xNN."""
    memory_mib: int = 81559
    memory_bytes: int | None = None
    """Instead of `memory_mib`, for sizes that cannot be true."""
    pci: str = ""
    compute_capability: str = "9.0"
    """Empty: it does not tell."""
    ecc_errors: int | None = 0
    retired_pending: bool | None = None
    remapped: tuple[int, int, bool, bool] | None = (0, 0, False, False)
    """Rows remapped after correctable and after uncorrectable errors; whether a remapping is pending; has failed."""
    fault: int = 0
    handle_error: int = 0
    links: list[Link] = field(default_factory=list)
    compute: dict[int, int | None] = field(default_factory=dict)
    """MiB by pid; None: it does not tell."""
    graphics: dict[int, int | None] = field(default_factory=dict)
    mps: dict[int, int | None] = field(default_factory=dict)
    flood: int = 0
    """So many processes more, with pids from 5,000,000, 1 MiB each."""
    mig: bool | None = None
    instances: list[FakeGpu] = field(default_factory=list)
    slices: int = 1

    def lines(self, parent: int) -> list[str]:
        assert max(len(self.compute), len(self.graphics), len(self.mps)) <= LISTED_MAX, "use flood for more"
        size = self.memory_mib * MIB if self.memory_bytes is None else self.memory_bytes
        optional = {
            "capability": self.compute_capability,
            "ecc": _number(self.ecc_errors),
            "retired": _number(self.retired_pending),
            "remap": " ".join(str(int(value)) for value in self.remapped) if self.remapped else "",
            "mig": _number(self.mig),
            "compute": _processes(self.compute),
            "graphics": _processes(self.graphics),
            "mps": _processes(self.mps),
        }
        return [
            f"device {parent}",
            f"uuid {self.uuid}",
            f"name {self.model}",
            f"memory {size}",
            f"pci {self.pci}",
            f"fault {self.fault}",
            f"handle {self.handle_error}",
            f"flood {self.flood}",
            f"slices {self.slices}",
            *(f"{key} {value}" for key, value in optional.items() if value),
            *(f"link {int(link.is_active)} {2 if link.kind == 'switch' else 0} {link.to}" for link in self.links),
        ]


class FakeNvml:
    """One fake driver, in a directory of its own. With `gpus=0` there is a driver and no GPU."""

    made: ClassVar[list[FakeNvml]] = []
    """Those of this test, whose locks are to be removed after it."""

    def __init__(self, directory: Path, *, gpus: int = 2, variant: Variant = "full", is_there: bool = True) -> None:
        self.directory = directory / "fake-nvml"
        self.library = self.directory / "lib" / LIBRARY
        self.state = self.directory / "state"
        self.root = self.directory / "root"
        """A place that may stand for `/`, with a /sys and a /proc of its own; see `pci_device`."""
        self.variant = variant
        self.driver = "550.54.15"
        self.cuda = 12040
        self.init_error = 0
        self.is_frozen = False
        """As real ones do, the library sees the GPUs that there were when it was initialised, and no later ones."""
        self.printed = ""
        """What the library prints on stdout."""
        self.answered = ""
        """What it writes into every pipe that it finds open: memory overwritten, as far as the reader can tell."""
        self._ever: set[str] = set()
        self.rules: list[str] = []
        self.gpus: list[FakeGpu] = []
        self.library.parent.mkdir(parents=True)
        self.root.mkdir()
        self.add(gpus)
        FakeNvml.made.append(self)
        if is_there:
            self.appear()

    def remove_locks(self) -> None:
        """The lock files of all devices that it ever had."""
        for device in self._ever:
            for place in ("/run/lock", "/dev/shm"):
                Path(place, f"gpulayer-{device}.lock").unlink(missing_ok=True)

    def env(self) -> dict[str, str]:
        """What a process needs in its environment to find this driver."""
        before = os.environ.get("LD_LIBRARY_PATH")
        path = f"{self.library.parent}:{before}" if before else str(self.library.parent)
        return {"LD_LIBRARY_PATH": path, "FAKE_NVML_STATE": str(self.state)}

    def write(self) -> None:
        """The state file as everything is set now. A reader sees the old or the new one, never a part."""
        text = [
            f"driver {self.driver}",
            f"cuda {self.cuda}",
            f"init {self.init_error}",
            f"frozen {int(self.is_frozen)}",
            f"print {self.printed}",
            f"answer {self.answered}",
            *(f"rule {rule}" for rule in self.rules),
        ]
        place = 0
        for gpu in self.gpus:
            parent, place = place, place + 1
            text += gpu.lines(-1)
            for instance in gpu.instances:
                place += 1
                text += instance.lines(parent)
        self._ever |= {each.uuid for gpu in self.gpus for each in (gpu, *gpu.instances)}
        new = self.state.with_suffix(".new")
        new.write_text("\n".join(text) + "\n")
        new.replace(self.state)

    # --- the library --------------------------------------------------------------------------------------------

    def appear(self) -> None:
        """The driver is installed; until then, and after `remove`, there is none."""
        if not self.library.exists():
            shutil.copy(built(self.variant), self.library)

    def remove(self) -> None:
        """For processes that have loaded it already nothing changes."""
        self.library.unlink(missing_ok=True)

    def init_fails(self, error: int | str) -> None:
        """nvmlInit says so; 0: it works again."""
        self.init_error = _code(error)
        self.write()

    def on(self, function: str, action: Action, value: int = 0, *, gpu: int = -1) -> None:
        """What an NVML function does instead of its work, on one GPU or on all. `delay`: milliseconds, then its work;
        `error`: the code that it returns; `exit`: the status that the process ends with. The function is named as NVML
        exports it (`nvmlDeviceGetMemoryInfo`, `nvmlDeviceGetHandleByIndex_v2`)."""
        self.rules.append(f"{function} {action} {value} {gpu}")
        self.write()

    def hang(self, function: str, *, gpu: int = -1) -> None:
        """It does not return until `relent`."""
        self.on(function, "hang", gpu=gpu)

    def crash(self, function: str, *, gpu: int = -1) -> None:
        """SIGSEGV."""
        self.on(function, "crash", gpu=gpu)

    def relent(self) -> None:
        """Every function does its work again; one that hangs goes on."""
        self.rules.clear()
        self.write()

    # --- the devices --------------------------------------------------------------------------------------------

    def add(self, count: int = 1, *, model: str = "NVIDIA H100 80GB HBM3", memory_mib: int = 81559) -> list[FakeGpu]:
        """New GPUs after those there are; gives them."""
        new = [
            FakeGpu(model=model, memory_mib=memory_mib, pci=f"{number >> 8:08X}:{number & 255:02X}:00.0")
            for number in range(len(self.gpus) + 1, len(self.gpus) + 1 + count)
        ]
        self.gpus += new
        self.write()
        return new

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.gpus]

    def fault(self, index: int, error: int | str) -> None:
        """Every question about this GPU is answered with the error: `lost`, `reset_required`, `unknown`, …"""
        self.gpus[index].fault = _code(error)
        self.write()

    def fell_off(self, index: int, error: int | str = "unknown") -> None:
        """The driver does not even hand it out any more."""
        self.gpus[index].handle_error = _code(error)
        self.write()

    def ecc_errors(self, index: int, count: int) -> None:
        """So many uncorrected ones since the driver was loaded."""
        self.gpus[index].ecc_errors = count
        self.write()

    def well(self, index: int) -> None:
        """Nothing is wrong with it any more."""
        gpu = self.gpus[index]
        gpu.fault = gpu.handle_error = gpu.ecc_errors = 0
        gpu.retired_pending, gpu.remapped = None, (0, 0, False, False)
        self.write()

    def processes(
        self, index: int, compute: Mapping[int, int | None], *, graphics: Mapping[int, int | None] | None = None
    ) -> None:
        """Who is on it from now on, with how many MiB (None: the driver does not tell); {}: nobody."""
        gpu = self.gpus[index]
        gpu.compute, gpu.graphics, gpu.flood = dict(compute), dict(graphics or {}), 0
        self.write()

    def flood(self, index: int, count: int) -> None:
        """So many processes more."""
        self.gpus[index].flood = count
        self.write()

    def split(self, index: int, count: int, *, slices: int = 1, memory_mib: int = 9856) -> list[FakeGpu]:
        """MIG mode on, with this many instances; 0: MIG mode on, and no instance. Gives the instances."""
        gpu = self.gpus[index]
        gpu.mig = True
        gpu.instances = [
            FakeGpu(
                uuid=new_uuid("MIG"),
                model=f"{gpu.model} MIG {slices}g.{round(memory_mib / 1024)}gb",
                memory_mib=memory_mib,
                pci=gpu.pci,
                slices=slices,
                ecc_errors=None,
                remapped=None,
            )
            for _ in range(count)
        ]
        self.write()
        return gpu.instances

    def join(self, index: int) -> None:
        """MIG mode off."""
        self.gpus[index].mig, self.gpus[index].instances = False, []
        self.write()

    def link(self, one: int, other: int) -> None:
        """A direct NVLink between two GPUs."""
        first, second = self.gpus[one], self.gpus[other]
        first.links.append(Link(to=second.pci))
        second.links.append(Link(to=first.pci))
        self.write()

    def link_to_switch(self, *indices: int) -> None:
        """These GPUs hang on one NVSwitch."""
        for index in indices:
            self.gpus[index].links.append(Link(to="00000000:C0:00.0", kind="switch"))
        self.write()

    # --- the host below `root` ----------------------------------------------------------------------------------

    def pci_device(self, bus_id: str, *, vendor: int = 0x10DE, kind: int = 0x030200, numa_node: int = -1) -> None:
        """A card in `root`/sys, as the kernel shows it (`0000:3b:00.0`)."""
        directory = self.root / "sys/bus/pci/devices" / bus_id
        directory.mkdir(parents=True)
        (directory / "vendor").write_text(f"0x{vendor:04x}\n")
        (directory / "class").write_text(f"0x{kind:06x}\n")
        (directory / "numa_node").write_text(f"{numa_node}\n")

    def driver_lists(self, *bus_ids: str) -> None:
        """The GPUs that the kernel module has taken up, in `root`/proc."""
        directory = self.root / "proc/driver/nvidia/gpus"
        shutil.rmtree(directory, ignore_errors=True)
        for bus_id in bus_ids:
            (directory / bus_id).mkdir(parents=True)


def _code(error: int | str) -> int:
    return error if isinstance(error, int) else ERRORS[error]


def _number(value: int | None) -> str:
    return "" if value is None else str(int(value))


def _processes(mib: Mapping[int, int | None]) -> str:
    return " ".join(f"{pid}:{'?' if amount is None else amount * MIB}" for pid, amount in mib.items())
