"""What every module owes its reader."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import gpulayer

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpulayer"
LOG_METHODS = frozenset({"exception", "error", "warning", "critical"})


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files("gpulayer", "tests", "fuzz", "examples")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_a_package_file_holds_public_names_and_no_code() -> None:
    """gpulayer/__init__.py alone may: it imports its public names at first use."""
    wrong = []
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent == PACKAGE:
            continue
        for node in ast.parse(path.read_text()).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_all = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
            if not (is_docstring or is_all or isinstance(node, ast.Import | ast.ImportFrom)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_every_public_name_is_there_and_documented() -> None:
    for name in gpulayer.__all__:
        value = getattr(gpulayer, name)
        assert name == "__version__" or value.__doc__, f"gpulayer.{name} has no docstring"


def test_every_module_can_be_imported() -> None:
    for path in python_files("gpulayer"):
        if path.name != "__main__.py":
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            importlib.import_module(dotted)


def catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in caught
    )


def calls(statements: list[ast.stmt]) -> set[str]:
    return {
        node.func.attr
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def is_honest(attempt: ast.Try, handler: ast.ExceptHandler) -> bool:
    """Raises on, says in the log what it caught, hands it on as the answer, or ends the process (a forked child)."""
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    raises = any(isinstance(node, ast.Raise) for node in inside)
    hands_on = any(isinstance(node, ast.Name) and node.id == handler.name for node in inside)
    return raises or hands_on or bool(calls(handler.body) & LOG_METHODS) or "_exit" in calls(attempt.finalbody)


def test_nothing_is_caught_in_silence() -> None:
    """`except Exception` to go on hides our own mistakes; at the edge of one request it is logged."""
    silent = [
        f"{path.relative_to(ROOT)}:{handler.lineno}"
        for path in python_files("gpulayer")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if catches_everything(handler) and not is_honest(node, handler)
    ]
    assert not silent


def test_tests_use_the_real_thing() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("unittest") for alias in node.names))
    ]
    assert not wrong


def test_every_reader_of_a_test_folder_finds_named_behaviour() -> None:
    """A test is a sentence about the product: at least three words after `test_`."""
    terse = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name.split("_")) < 4
    ]
    assert not terse
