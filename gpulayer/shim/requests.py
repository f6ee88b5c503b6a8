"""What the daemon writes (attempt.json) and asks (the fields of requests), checked: nonsense is refused with its name.

Unknown keys are those of a newer daemon, and ignored.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, NamedTuple, TypeAlias

from gpulayer.shim import launch

Json: TypeAlias = dict[str, Any]

NOTE_BYTES_MAX = 1024
# Names of locks: those of one replica's devices, which are a handful.
NAMES_MAX = 64


class BadAttempt(Exception):
    """attempt.json is missing, or not what we can work with."""


class BadRequest(Exception):
    """A field of a request is missing or nonsense."""


class Attempt(NamedTuple):
    """attempt.json: what the daemon knew before there was a shim. Unknown keys are a newer daemon's, and ignored."""

    identity: Json
    log_max_bytes: int
    log_keep: int
    timeout_seconds: float | None
    stop_signal: int
    stop_grace_seconds: float
    cgroup: str | None
    nofile: tuple[int, int] | None


def read_attempt(directory_fd: int, directory: str) -> Attempt:
    try:
        fd = os.open("attempt.json", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory_fd)
        with os.fdopen(fd, "rb") as file:
            return parse_attempt(file.read())
    except (OSError, BadAttempt) as error:
        raise BadAttempt(f"cannot use {directory}/attempt.json: {error}") from error


def parse_attempt(content: bytes) -> Attempt:
    try:
        return _attempt(json.loads(content))
    except (ValueError, ArithmeticError, TypeError, LookupError, RecursionError, BadRequest) as error:
        raise BadAttempt(f"{type(error).__name__}: {error}") from error


def _attempt(content: Json) -> Attempt:
    log, nofile, timeout = content["log"], content.get("nofile"), content.get("timeout_seconds")
    identity_keys = ("job_id", "job_name", "replica", "attempt", "node_id")
    return Attempt(
        identity={key: content.get(key) for key in identity_keys},
        log_max_bytes=int(log["max_bytes"]),
        log_keep=int(log["keep"]),
        timeout_seconds=None if timeout is None else float(timeout),
        stop_signal=signal_number(content.get("stop_signal", "TERM")),
        stop_grace_seconds=seconds(content, "stop_grace_seconds", 10.0),
        cgroup=content.get("cgroup"),
        nofile=None if nofile is None else (int(nofile[0]), int(nofile[1])),
    )


def command(request: Json) -> launch.Command:
    argv, env, cwd = field(request, "argv", list), field(request, "env", dict), field(request, "cwd", str)
    if not argv or not all(isinstance(word, str) and "\0" not in word for word in argv):
        raise BadRequest("argv must be a list of one or more strings without NUL")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or not isinstance(value, str) or "\0" in value:
            raise BadRequest(f"env: {key!r} is not a variable with a string value without NUL")
    if not cwd.startswith("/") or "\0" in cwd:
        raise BadRequest("cwd must be an absolute path")
    return launch.Command(argv, env, cwd)


def field(request: Json, key: str, kind: type[Any]) -> Any:
    value = request.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequest(f"{key} must be given and be of type {kind.__name__}")
    return value


def seconds(request: Json, key: str, default: float | None = None) -> float:
    value = request.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise BadRequest(f"{key} must be a number of seconds, not {value!r:.50}")
    return float(value)


def small_note(request: Json) -> Json | None:
    """What the daemon wants to find again in the marker; nothing of it means anything here."""
    note = request.get("note")
    if note is not None and (not isinstance(note, dict) or len(json.dumps(note)) > NOTE_BYTES_MAX):
        raise BadRequest(f"note must be an object of at most {NOTE_BYTES_MAX} bytes")
    return note


def names(request: Json) -> list[str]:
    names = field(request, "names", list)
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names) or len(names) > NAMES_MAX:
        raise BadRequest(f"names must be a list of at most {NAMES_MAX} different strings")
    return list(names)


def signal_number(name: object) -> int:
    """15, "15", "TERM" and "SIGTERM" are the same."""
    if isinstance(name, str) and not (name.isascii() and name.isdecimal()):
        full_name = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
        known = getattr(signal, full_name, None)
        if isinstance(known, signal.Signals):
            return int(known)
    elif isinstance(name, int | str) and len(str(name)) < 9 and 0 < int(name) < signal.NSIG:
        return int(name)
    raise BadRequest(f"{name!r:.50} is not a signal")
