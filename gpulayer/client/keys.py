"""A value of the right type for each key of a request, or InvalidRequest that names the key as a program writes it.

Pure. The model judges values, and speaks of them as the command line writes them; `in_python` translates what it says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.job import sorted_pairs
from gpulayer.model.units import parse_size

_SHOWN_CHARS_MAX = 80


def words_of(command: Any) -> tuple[str, ...]:
    """The words of a command; a path is one."""
    if isinstance(command, str | bytes | os.PathLike | Mapping) or not isinstance(command, Iterable):
        raise wrong(
            "command",
            command,
            "a list of words",
            'write it like ["python", "serve.py"], or ["sh", "-c", "…"] to have a shell read it',
        )
    return tuple(path(f"command[{place}]", word, "text") for place, word in enumerate(command))


def path(key: str, value: Any, what: str = "a path") -> str:
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str):
        raise wrong(key, value, what, _quoted(value))
    return found


def text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(key, value, "text", _quoted(value))
    return value


def text_or_none(key: str, value: Any) -> str | None:
    return None if value is None else text(key, value)


def text_pairs(key: str, mapping: Any) -> tuple[tuple[str, str], ...]:
    """Sorted by name."""
    if mapping is None:
        return ()
    if not isinstance(mapping, Mapping):
        raise wrong(key, mapping, "a dict of text", f'write it like {key}={{"NAME": "value"}}')
    for name, value in mapping.items():
        if not isinstance(name, str):
            raise wrong(f"{key}: the name", name, "text", _quoted(name))
        if not isinstance(value, str):
            raise wrong(f"{key}[{name!r}]", value, "text", _quoted(value))
    return sorted_pairs(mapping)


def patterns(key: str, value: Any) -> tuple[str, ...]:
    """One or several."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise wrong(key, value, "a pattern or a list of them", f'write it like {key}="*A100*"')
    return tuple(text(key, pattern) for pattern in value)


def flag(key: str, value: Any, hint: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(key, value, "True or False", hint)
    return value


def whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(key, value, "a whole number", f"write it like {key}=2")
    return value


def quantity(key: str, value: Any) -> int | float | str:
    """What the model reads a number from: one, or the text of one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong(key, value, "a number", f"write it like {key}=2 or {key}=0.5")
    return value


def seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(key, value, "a number of seconds", f"write it like {key}=90")
    return value


def seconds_or_none(key: str, value: Any) -> float | None:
    return None if value is None else seconds(key, value)


def size_mib(key: str, value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, str):
        raise wrong(key, value, "a size", f'write it with its unit, like {key}="24GiB"')
    return parse_size(value, key)


def wrong(key: str, value: Any, wanted: str, hint: str) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS_MAX else shown[: _SHOWN_CHARS_MAX - 1] + "…"
    return InvalidRequest(f"{key}: {shown} is not {wanted}", hint=hint)


def _quoted(value: Any) -> str:
    return f'write "{value}"' if isinstance(value, int | float) else "give a str"


# --- the command line's words, as Python writes them ------------------------------------------------------------------


def _underscored(found: re.Match[str]) -> str:
    return found[0].replace("-", "_")


_IN_PYTHON: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^(timeout|start-timeout|stop-grace): ", r"\1-seconds: "),
    (r"^the command is empty", "command: there is no program in it"),
    (r"write it after --, .*", 'write it like ["python", "train.py"]'),
    (r"write it like 90s, 15m or 24h", "write seconds, like 90"),
    (r"--env NAME=VALUE", 'env={"NAME": "value"}'),
    (r"takes --no-port", "takes port=False"),
    (r"--([a-z-]+) ([^ ,;)]+)", r"\1=\2"),
    # Last, since it is for what the others have left: the name of a key, with hyphens.
    (r"\b(gpu|max|on|start|stop|timeout)-[a-z]+(-[a-z]+)?\b", _underscored),
)


@contextmanager
def in_python() -> Iterator[None]:
    """What the model says within, translated; its own words are the cause of the error."""
    try:
        yield
    except InvalidRequest as error:
        message, hint = error.message, error.hint
        for pattern, written in _IN_PYTHON:
            message, hint = re.sub(pattern, written, message), re.sub(pattern, written, hint)
        raise InvalidRequest(message, hint=hint, code=error.code) from error
