"""Where the cgroups of replicas can be, found in the kernel's own files; made and removed for real where this host
allows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer.runtime import cgroups
from gpulayer.shim import tree

SYSTEMD = """
22 1 0:21 / /sys rw,nosuid shared:2 - sysfs sysfs rw
30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""
HYBRID = """
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
36 31 0:33 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.fixture
def base() -> Iterator[cgroups.CgroupBase]:
    prepared = cgroups.prepare(f"gpulayer-test-{os.getpid()}")
    if isinstance(prepared, cgroups.Unavailable):
        pytest.skip(prepared.reason)
    yield prepared
    tree.remove_cgroup(prepared.path)


@pytest.mark.parametrize(
    ("mountinfo", "found"), [(SYSTEMD, ("/sys/fs/cgroup", "/")), (HYBRID, ("/sys/fs/cgroup/unified", "/")), ("", None)]
)
def test_the_mount_of_version_2_is_found_in_each_layout(mountinfo: str, found: tuple[str, str] | None) -> None:
    assert cgroups.find_mount(mountinfo) == found


def test_the_base_lies_below_our_own_cgroup(tmp_path: Path) -> None:
    """With systemd and Delegate=yes that is the unit's; the kernel's files are plain ones here."""
    unit = tmp_path / "system.slice" / "gpulayer.service"
    unit.mkdir(parents=True)
    (unit / "cgroup.procs").touch()
    (unit / "gpulayer-n-1").mkdir()
    for name in ("cgroup.procs", "cgroup.controllers"):
        (unit / "gpulayer-n-1" / name).write_text("cpu memory\n" if name.endswith("controllers") else "")
    mountinfo = f"30 22 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw"
    own = "1:name=systemd:/\n0::/system.slice/gpulayer.service\n"
    prepared = cgroups.prepare("gpulayer-n-1", mountinfo=mountinfo, own=own)
    assert prepared == cgroups.CgroupBase(str(unit / "gpulayer-n-1"))


@pytest.mark.parametrize(
    ("mountinfo", "own", "why"),
    [
        ("", "0::/", "no cgroup v2"),
        (SYSTEMD, "3:cpu:/x", "in no cgroup"),
        (SYSTEMD, "0::/../elsewhere", "outside of this cgroup namespace"),
        ("30 22 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/other", "not below"),
        ("30 22 0:26 / /nonexistent rw - cgroup2 cgroup2 rw", "0::/unit", "cannot make"),
    ],
)
def test_where_there_can_be_none_the_reason_is_said(mountinfo: str, own: str, why: str) -> None:
    prepared = cgroups.prepare("gpulayer-n-1", mountinfo=mountinfo, own=own)
    assert isinstance(prepared, cgroups.Unavailable)
    assert why in prepared.reason


def test_off_is_off() -> None:
    assert isinstance(cgroups.prepare("gpulayer-n-1", mode="off"), cgroups.Unavailable)


def test_empty_leftovers_go_and_those_with_processes_or_an_owner_stay(base: cgroups.CgroupBase) -> None:
    for name in ("empty", "kept", "busy"):
        base.make(name)
    process = subprocess.Popen(["sleep", "60"])
    try:
        Path(base.attempt("busy"), "cgroup.procs").write_text(str(process.pid))
        assert base.remove_leftovers(keep={"kept"}) == ["empty"]
        assert tree.cgroup_pids(base.attempt("busy")) == [process.pid]
        assert os.path.isdir(base.attempt("kept"))
    finally:
        process.kill()
        process.wait()
    assert set(base.remove_leftovers(keep=())) == {"kept", "busy"}


def test_the_base_is_there_only_while_it_holds_something(base: cgroups.CgroupBase) -> None:
    assert not os.path.exists(base.path)
    base.make("one")
    base.remove_if_empty()
    assert os.path.isdir(base.attempt("one"))
    base.remove_leftovers(keep=())
    base.remove_if_empty()
    assert not os.path.exists(base.path)
