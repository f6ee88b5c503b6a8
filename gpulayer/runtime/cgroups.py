"""One cgroup (v2) per attempt, where this daemon may make them: the surest way to know and to end all of a replica's
tree.

Without one the tree is still found, by descent and by GPULAYER_RUN_ID; so a host that does not allow it is no fault,
and says so once. The path of each attempt's cgroup is written into its attempt.json: a daemon that comes back in
another cgroup (another service unit, a login session) still finds it.
"""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpulayer.shim import tree

CgroupMode: TypeAlias = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No cgroups; why, for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class CgroupBase:
    """The directory that holds this daemon's attempts."""

    path: str

    def attempt(self, name: str) -> str:
        """Where the cgroup of an attempt is, whether it exists or not."""
        return f"{self.path}/{name}"

    def make(self, name: str) -> str:
        """Its path; OSError says why it could not be made."""
        path = self.attempt(name)
        for is_last in (False, True):
            try:
                os.makedirs(path, 0o755, exist_ok=True)  # an earlier shim of the same attempt may have left it
                break
            except FileNotFoundError:  # the base was removed just now, because it was empty
                if is_last:
                    raise
        return path

    def remove_if_empty(self) -> None:
        """The base itself: a host should not collect directories of daemons that have nothing to do."""
        try:
            os.rmdir(self.path)
        except OSError:
            pass  # in use, or never made

    def remove_leftovers(self, keep: Container[str]) -> list[str]:
        """Removes what is empty and not in `keep`; the names of what went. One with processes stays, the kernel sees to
        it."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return []
        return [name for name in names if name not in keep and tree.remove_cgroup(self.attempt(name))]


def prepare(
    name: str, *, mode: CgroupMode = "auto", mountinfo: str | None = None, own: str | None = None
) -> CgroupBase | Unavailable:
    """Tries whether `<our own cgroup>/<name>` can be made and used. The last two are what the kernel says in
    /proc/self/mountinfo and /proc/self/cgroup."""
    if mode == "off":
        return Unavailable("turned off in the configuration")
    try:
        mount = find_mount(mountinfo if mountinfo is not None else _read("/proc/self/mountinfo"))
        path = own_path(own if own is not None else _read("/proc/self/cgroup"))
    except OSError as error:
        return Unavailable(f"cannot read /proc: {error}")
    if mount is None:
        return Unavailable("no cgroup v2 is mounted")
    if path is None:
        return Unavailable("this process is in no cgroup of version 2")
    mount_point, root = mount
    if path == "/.." or path.startswith("/../"):
        return Unavailable(f"our own cgroup, {path}, is outside of this cgroup namespace")
    if root != "/" and path != root and not path.startswith(root + "/"):
        return Unavailable(f"our own cgroup, {path}, is not below the mounted {root}")
    below = path[len(root) :] if root != "/" else path
    base = f"{mount_point}/{below.strip('/')}".rstrip("/") + f"/{name}"
    try:
        os.mkdir(base, 0o755)
    except FileExistsError:
        pass
    except OSError as error:
        return Unavailable(f"cannot make {base}: {error.strerror}; with systemd, set Delegate=yes")
    # A process moves between cgroups only if both the new one and what is above both are ours to write (cgroups(7)).
    for procs in (f"{base}/cgroup.procs", f"{os.path.dirname(base)}/cgroup.procs"):
        if not os.access(procs, os.W_OK):
            return Unavailable(f"cannot write {procs}; with systemd, set Delegate=yes")
    prepared = CgroupBase(base)
    prepared.remove_if_empty()
    return prepared


def find_mount(mountinfo: str) -> tuple[str, str] | None:
    """Where cgroup v2 is mounted, and which of its directories is seen there; also in the hybrid layout. proc(5)."""
    found = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) >= 5 and kinds[:1] == ["cgroup2"]:
            found = (_unescaped(fields[4]), _unescaped(fields[3]))  # a later mount hides an earlier one
    return found


def own_path(cgroup: str) -> str | None:
    """From the line `0::/path` of /proc/<pid>/cgroup."""
    for line in cgroup.splitlines():
        if line.startswith("0::"):
            return line[3:].removesuffix(" (deleted)")
    return None


def _unescaped(text: str) -> str:
    for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escaped, character)
    return text


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
