"""A module imports only from the floors below its own, and the cores stay pure (docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpulayer"

BELOW: dict[str, frozenset[str]] = {
    "model": frozenset(),
    "core": frozenset({"model"}),
    "wire": frozenset({"model", "core"}),
    "shim": frozenset(),
    "runtime": frozenset({"model", "core", "wire", "shim"}),
    "api": frozenset({"model", "core", "wire", "runtime"}),
    "node": frozenset({"model", "core", "wire", "shim", "runtime", "api"}),
    "client": frozenset({"model", "wire"}),
    "cli": frozenset({"model", "core", "wire", "runtime", "api", "node", "client"}),
}
# Of core: these stand on top of the machines, which do not know one another; base is under all of them.
ON_TOP_OF_THE_MACHINES = frozenset({"leader", "agent", "orders", "rollout"})
UNDER_THE_MACHINES = frozenset({"base"})
PURE = ("model", "core", "wire")
# What would let a pure floor see the time, draw a number, or touch the world.
IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "threading", "trio"),
        *("datetime", "time", "random", "secrets", "uuid"),
        *(
            "fcntl",
            "io",
            "mmap",
            "os",
            "pathlib",
            "pty",
            "resource",
            "select",
            "selectors",
            "shutil",
            "sqlite3",
            "tempfile",
        ),
        *("http", "httpx", "socket", "ssl", "subprocess", "urllib", "logging", "structlog"),
    }
)
# The generator is handed in by the shell, its type may be named; bytes in memory are no I/O; a cache may need a lock.
PURE_ALL_THE_SAME = frozenset({("random", "Random"), ("io", "BytesIO"), ("threading", "RLock")})


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, module, name taken from it or empty) of every import, those within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, node.module or "", alias.name


def floor_of(module: str, name: str) -> str:
    """`gpulayer.wire.codec` and `from gpulayer import wire` are both of wire; the package itself is of none."""
    parts = module.split(".")
    if len(parts) > 1:
        return parts[1]
    return name if name in BELOW else ""


@pytest.mark.parametrize("floor", BELOW)
def test_a_floor_stands_only_on_those_below_it(floor: str) -> None:
    wrong = [
        f"{named(path)}:{line}: {floor} may not import {module}"
        for path in sorted((PACKAGE / floor).rglob("*.py"))
        for line, module, name in imports(path)
        if module.split(".")[0] == "gpulayer" and floor_of(module, name) not in BELOW[floor] | {floor, ""}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_on_a_floor() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(BELOW)


def test_the_shim_stands_on_the_standard_library_alone() -> None:
    wrong = [
        f"{named(path)}:{line}: {module}"
        for path in sorted((PACKAGE / "shim").rglob("*.py"))
        for line, module, _ in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names and not module.startswith("gpulayer.shim")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("floor", PURE)
def test_a_pure_floor_has_no_clock_no_chance_and_no_io(floor: str) -> None:
    wrong = [
        f"{named(path)}:{line}: {module}"
        for path in sorted((PACKAGE / floor).rglob("*.py"))
        for line, module, name in imports(path)
        if module.split(".")[0] in IMPURE and (module, name) not in PURE_ALL_THE_SAME
    ]
    wrong += [
        f"{named(path)}:{node.lineno}: {node.func.id}()"
        for path in sorted((PACKAGE / floor).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_machines_of_the_core_do_not_know_one_another() -> None:
    wrong = []
    for path in sorted((PACKAGE / "core").rglob("*.py")):
        own = path.relative_to(PACKAGE / "core").parts[0].removesuffix(".py")
        if own in ON_TOP_OF_THE_MACHINES:
            continue
        for line, module, name in imports(path):
            parts = module.split(".")
            if parts[:2] == ["gpulayer", "core"]:
                other = parts[2] if len(parts) > 2 else name
                if other != own and other not in UNDER_THE_MACHINES:
                    wrong.append(f"{named(path)}:{line}: {own} may not import {other}")
    assert not wrong, "\n".join(wrong)
