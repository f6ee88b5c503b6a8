"""What the host has besides GPUs: from the kernel's own files, and from files that say what no kernel would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulayer.model.node import NumaNode
from gpulayer.runtime.host import READ_BYTES_MAX, Host, detect_host

KIB_OF_GIB = 2**20


class Kernel:
    """Files as a kernel of two NUMA nodes writes them, in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal:  {64 * KIB_OF_GIB} kB\nMemAvailable:  {48 * KIB_OF_GIB} kB\n")
        self.write("proc/cpuinfo", "processor\t: 0\ncpu family\t: 25\nmodel name\t: AMD EPYC 9654  96-Core\n")
        self.write("proc/self/mountinfo", f"30 23 0:26 / {root}/cgroup rw - cgroup2 cgroup2 rw\n")
        self.write("proc/self/cgroup", "0::/a/b\n")
        for number, cpus in ((0, "0-3"), (1, "4-7")):
            self.write(f"sys/devices/system/node/node{number}/cpulist", f"{cpus}\n")
            self.write(
                f"sys/devices/system/node/node{number}/meminfo", f"Node {number} MemTotal:    {32 * KIB_OF_GIB} kB\n"
            )

    def write(self, name: str, content: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def detect(self, data_dir: Path | None = None) -> Host:
        return detect_host(data_dir or self.root, proc=f"{self.root}/proc", sys=f"{self.root}/sys")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_the_host_has_what_this_process_may_use(tmp_path: Path) -> None:
    host = detect_host(tmp_path)
    assert 0 < host.cpus_milli <= 1000 * len(os.sched_getaffinity(0))
    total_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    assert 0 < host.memory_mib <= host.memory_all_mib <= total_mib
    assert host.memory_available_mib is not None
    assert host.hostname == os.uname().nodename
    assert host.kernel == f"Linux {os.uname().release}"
    assert host.cpu_model


def test_a_cpu_that_is_taken_away_is_not_offered(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process has one CPU only")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert detect_host(tmp_path).cpus_milli == 1000
    finally:
        os.sched_setaffinity(0, allowed)


def test_all_of_it_is_read_from_the_kernels_files(kernel: Kernel) -> None:
    kernel.write("sys/module/nvidia/version", "550.54.14\n")
    host = kernel.detect()
    assert (host.memory_all_mib, host.memory_mib, host.memory_available_mib) == (65536, 65536, 49152)
    assert host.cpu_model == "AMD EPYC 9654 96-Core"
    assert host.numa == (
        NumaNode(id=0, cpus="0-3", memory_mib=32768),
        NumaNode(id=1, cpus="4-7", memory_mib=32768),
    )
    assert host.drivers == (("nvidia", "550.54.14"),)
    assert host.undetected == ()


def test_the_disk_is_that_of_the_data_directory_also_before_it_exists(tmp_path: Path) -> None:
    host = detect_host(tmp_path / "not" / "yet")
    found = os.statvfs(tmp_path)
    assert host.disk_path == str(tmp_path)
    assert host.disk_mib == found.f_blocks * found.f_frsize // 2**20
    assert 0 <= host.disk_free_mib <= host.disk_mib
    (tmp_path / "file").write_text("")
    assert detect_host(tmp_path / "file" / "below").disk_path == str(tmp_path / "file")


def test_the_narrowest_limit_on_the_way_to_our_cgroup_counts(kernel: Kernel) -> None:
    kernel.write("cgroup/cpu.max", "max 100000\n")
    kernel.write("cgroup/a/cpu.max", "50000 100000\n")
    kernel.write("cgroup/a/b/memory.max", f"{8 * 2**30}\n")
    host = kernel.detect()
    assert (host.cpus_milli, host.memory_mib, host.memory_all_mib) == (500, 8192, 65536)
    assert host.undetected == ()


def test_an_unlimited_cgroup_of_version_1_limits_nothing(kernel: Kernel) -> None:
    kernel.write("proc/self/mountinfo", f"30 23 0:26 / {kernel.root}/v1 rw - cgroup cgroup rw,memory\n")
    kernel.write("proc/self/cgroup", "4:memory:/a\n")
    kernel.write("v1/memory.limit_in_bytes", "9223372036854771712\n")
    assert kernel.detect().memory_mib == 65536
    kernel.write("v1/a/memory.limit_in_bytes", f"{2**30}\n")
    assert kernel.detect().memory_mib == 1024


@pytest.mark.parametrize("name", ["proc/meminfo", "proc/cpuinfo", "proc/self/mountinfo", "proc/self/cgroup"])
def test_a_file_that_is_missing_or_empty_is_named(kernel: Kernel, name: str) -> None:
    kernel.write(name, "\n")
    assert any(f"{name} is empty" in note for note in kernel.detect().undetected)
    kernel.remove(name)
    host = kernel.detect()
    assert any(f"no {kernel.root}/{name}" in note for note in host.undetected)
    assert host.memory_mib > 0
    assert host.cpus_milli > 0


def test_a_kernel_without_numa_is_told_and_no_failure(kernel: Kernel) -> None:
    (kernel.root / "sys").rename(kernel.root / "gone")
    host = kernel.detect()
    assert host.numa == ()
    assert host.undetected == (
        f"NUMA nodes: no {kernel.root}/sys/devices/system/node; this kernel was built without them",
    )


def test_a_directory_that_may_not_be_read_is_told(kernel: Kernel) -> None:
    """Root may read everything, so here it is one that is none."""
    node = kernel.root / "sys/devices/system/node"
    node.rename(kernel.root / "gone")
    node.write_text("")
    (note,) = kernel.detect().undetected
    assert note == f"NUMA nodes: cannot read {node} (Not a directory)"


def test_the_memory_of_a_gpu_may_be_a_node_without_cpus(kernel: Kernel) -> None:
    kernel.write("sys/devices/system/node/node2/cpulist", "\n")
    kernel.write("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal:   98304 kB\n")
    kernel.write("sys/devices/system/node/node3/cpulist", "\n")
    kernel.write("sys/devices/system/node/node3/meminfo", "Node 3 MemTotal:   0 kB\n")
    host = kernel.detect()
    assert host.numa[2:] == (NumaNode(id=2, cpus="", memory_mib=96),)


GARBAGE = (
    b"\0\xff\xfe" * 100,
    b"MemTotal: " + b"9" * 5000 + b" kB\n",
    "MemTotal: ²³ kB\nmodel name: \nNode x MemTotal: -1 kB".encode(),
    b"x" * 5000 + b" - cgroup2",
    b"0::/" + b"a/" * 100_000,
    "¹²³ ٣٤٥".encode(),
    b"99999999999999999999 1",
    b"\n" * 10_000,
)


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize(
    "name",
    [
        *("proc/meminfo", "proc/cpuinfo", "proc/self/mountinfo", "proc/self/cgroup", "cgroup/cpu.max"),
        *("cgroup/a/memory.max", "sys/module/nvidia/version"),
        *("sys/devices/system/node/node0/cpulist", "sys/devices/system/node/node1/meminfo"),
    ],
)
def test_garbage_is_a_reason_and_never_a_crash(kernel: Kernel, name: str, content: bytes) -> None:
    kernel.write(name, content)
    host = kernel.detect()
    assert host.cpus_milli > 0
    assert 0 < host.memory_mib <= host.memory_all_mib
    assert all(note.isprintable() and len(note) < 500 for note in host.undetected)
    assert all(version.isprintable() for _, version in host.drivers)
    if name not in ("proc/cpuinfo", "proc/self/mountinfo", "proc/self/cgroup") and content.strip():
        assert host.undetected


def test_a_file_without_end_is_read_up_to_a_bound(kernel: Kernel) -> None:
    kernel.write("proc/self/mountinfo", b"x" * (READ_BYTES_MAX + 10))
    (note,) = kernel.detect().undetected
    assert "only the first 4 MiB" in note
