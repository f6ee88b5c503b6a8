"""What a user submits: a service that is kept running, or a batch that runs to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import checked_name
from gpulayer.model.node import ACCELERATOR_KINDS
from gpulayer.model.units import DURATION_MAX, MIB_MAX, MILLI, format_size

RestartWhen = Literal["always", "on_failure", "never"]
RESTART_WHEN: tuple[str, ...] = ("always", "on_failure", "never")
SPREADS: tuple[str, ...] = ("node", "any")
ON_REPLICA_END: tuple[str, ...] = ("stop", "keep")

# What the kernel takes in one execve is 2 MiB for arguments and environment together, and 128 KiB for one string
# (execve(2), MAX_ARG_STRLEN); a quarter of it leaves room for what the node adds and keeps log entries small.
COMMAND_BYTES_MAX = 512 * 1024
STRING_BYTES_MAX = 128 * 1024 - 1
REPLICAS_MAX = 10_000
# Each is compared with every model there is, whenever somebody asks why the job waits.
GPU_MODELS_MAX = 32
GPU_MODEL_CHARS_MAX = 128

# What gpulayer alone says to a run. Refused rather than overridden in silence: whoever sets one means it.
RESERVED_PREFIX = "GPULAYER_"
RESERVED_WITH_PORT = ("PORT", "HOST")
RESERVED_ALWAYS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")

SIGNALS: tuple[str, ...] = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What one replica needs of a node."""

    accelerator: str | None = None
    """cuda, rocm, mps, cpu; None: any kind if `gpus_milli`, else none."""
    gpus_milli: int = 0
    gpu_models: tuple[str, ...] = ()
    """Patterns (fnmatch, any case); one must match."""
    gpu_memory_mib: int = 0
    """Per device; a share tests share x total."""
    vendor: str | None = None
    cpus_milli: int = 0
    memory_mib: int = 0
    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.accelerator is not None and self.accelerator not in ACCELERATOR_KINDS:
            raise InvalidRequest(
                f"accelerator: {self.accelerator!r} is unknown", hint="use one of " + ", ".join(ACCELERATOR_KINDS)
            )
        if (
            self.gpus_milli < 0
            or self.gpus_milli > 1024 * MILLI
            or (self.gpus_milli > MILLI and self.gpus_milli % MILLI)
        ):
            raise InvalidRequest(
                f"gpus: {self.gpus_milli / MILLI:g} is not a share or a whole number", hint="write 1, 2, or 0.5"
            )
        if self.gpus_milli == 0 and (self.gpu_models or self.gpu_memory_mib or self.vendor):
            raise InvalidRequest(
                "gpu-model, gpu-memory and vendor say which GPUs, but gpus is 0",
                hint="add --gpus 1 (or a share such as 0.5)",
            )
        if self.accelerator not in (None, "cpu") and self.gpus_milli == 0:
            raise InvalidRequest(f"accelerator {self.accelerator} is asked for, but gpus is 0", hint="add --gpus 1")
        if self.accelerator == "cpu" and self.gpus_milli:
            raise InvalidRequest("accelerator cpu and gpus exclude each other", hint="leave out one of them")
        if not 0 <= self.cpus_milli <= 100_000 * MILLI:
            raise InvalidRequest(
                f"cpus: {self.cpus_milli / MILLI:g} is not between 0 and 100000", hint="write 4 or 0.5"
            )
        for what, mib in (("memory", self.memory_mib), ("gpu-memory", self.gpu_memory_mib)):
            if not 0 <= mib <= MIB_MAX:
                raise InvalidRequest(f"{what}: {format_size(mib)} is out of range", hint="write it like 24GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One revision of a job: everything that decides what is run and how. Refuses nonsense when it is made."""

    kind: Literal["service", "batch"]
    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Sorted by name."""
    workdir: str | None = None
    """Absolute; None: the sandbox."""
    replicas: int = 1
    requirements: Requirements = field(default_factory=Requirements)
    port: bool = True
    restart: RestartWhen = "always"
    max_restarts: int | None = None
    retry_max_attempts: int = 10
    spread: Literal["node", "any"] = "node"
    priority: int = 50
    on_replica_end: Literal["stop", "keep"] = "stop"
    timeout_seconds: float | None = None
    start_timeout_seconds: float | None = None
    stop_signal: str = "TERM"
    stop_grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        checked_name(self.name)
        _check_command(self.argv, self.env)
        _check_reserved(self.env, has_port=self.port)
        if self.workdir is not None:
            if not self.workdir.startswith("/"):
                raise InvalidRequest(f"workdir: {self.workdir!r} is not an absolute path", hint="write it from / on")
            _check_string("workdir", self.workdir)
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise InvalidRequest(
                f"replicas: {self.replicas} is not between 1 and {REPLICAS_MAX}", hint="write --replicas 2"
            )
        if self.kind == "batch" and self.restart != "never":
            raise InvalidRequest(
                f"restart: {self.restart} is for services; a batch runs once",
                hint="add --service, or leave out --restart",
            )
        if self.kind == "batch" and self.max_restarts is not None:
            raise InvalidRequest(
                "max-restarts is for services; a batch runs once", hint="add --service, or leave it out"
            )
        if self.kind == "batch" and self.start_timeout_seconds is not None:
            raise InvalidRequest(
                "start-timeout is for services; a batch is never awaited to be ready", hint="use --timeout"
            )
        for what, value, allowed in (
            ("kind", self.kind, ("service", "batch")),
            ("restart", self.restart, RESTART_WHEN),
            ("spread", self.spread, SPREADS),
            ("on-replica-end", self.on_replica_end, ON_REPLICA_END),
            ("stop-signal", self.stop_signal, SIGNALS),
        ):
            if value not in allowed:
                raise InvalidRequest(f"{what}: {value!r} is unknown", hint="use one of " + ", ".join(allowed))
        for what, number, most in (
            ("max-restarts", self.max_restarts, 1_000_000),
            ("retry-max-attempts", self.retry_max_attempts, 1_000_000),
            ("priority", self.priority, 100),
        ):
            if number is not None and not 0 <= number <= most:
                raise InvalidRequest(
                    f"{what}: {number} is not between 0 and {most}", hint=f"write a number from 0 to {most}"
                )
        for what, seconds, least in (
            ("timeout", self.timeout_seconds, 0.001),
            ("start-timeout", self.start_timeout_seconds, 0.001),
            ("stop-grace", self.stop_grace_seconds, 0.0),
        ):
            if seconds is not None and not least <= seconds <= DURATION_MAX:
                raise InvalidRequest(f"{what}: {seconds:g} s is out of range", hint="write it like 90s, 15m or 24h")

    def named(self, name: str) -> JobSpec:
        return replace(self, name=name)


def _check_command(argv: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> None:
    if not argv or not argv[0]:
        raise InvalidRequest("the command is empty", hint="write it after --, like: gpulayer submit -- python train.py")
    total = 0
    for word in argv:
        _check_string("the command", word)
        total += len(word.encode("utf-8", "surrogateescape")) + 1
    for key, value in env:
        if not key or "=" in key or any(char.isspace() for char in key):
            raise InvalidRequest(f"env: {key[:80]!r} is not a variable's name", hint="write --env NAME=VALUE")
        _check_string(f"env {key[:80]}", key)
        _check_string(f"env {key[:80]}", value)
        total += len(key.encode("utf-8", "surrogateescape")) + len(value.encode("utf-8", "surrogateescape")) + 2
    if total > COMMAND_BYTES_MAX:
        raise InvalidRequest(
            f"command and environment are {total // 1024} KiB together, {COMMAND_BYTES_MAX // 1024} KiB at most",
            hint="put large values into a file and pass its path",
        )


def _check_reserved(env: tuple[tuple[str, str], ...], *, has_port: bool) -> None:
    for key, _ in env:
        if has_port and key in RESERVED_WITH_PORT:
            raise InvalidRequest(
                f"env: {key} is set by gpulayer, anew for every run",
                hint="listen on $HOST:$PORT; a service that listens nowhere takes --no-port",
            )
        if key.startswith(RESERVED_PREFIX) or key in RESERVED_ALWAYS:
            raise InvalidRequest(
                f"env: {key} is reserved: gpulayer sets it, or keeps it from runs", hint="use another name"
            )


def _check_string(what: str, text: str) -> None:
    if "\0" in text:
        raise InvalidRequest(f"{what} contains a NUL byte", hint="no program can be given one; remove it")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise InvalidRequest(f"{what} is not valid UTF-8", hint="write it in UTF-8")
    if len(text.encode()) > STRING_BYTES_MAX:
        raise InvalidRequest(
            f"{what} has a string of {len(text.encode()) // 1024} KiB, 128 KiB at most",
            hint="put it into a file and pass its path",
        )


def checked_gpu_models(key: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Of a request. Not judged by Requirements, which also come from the logs of versions that took any."""
    if "" in patterns:
        raise InvalidRequest(f"{key}: an empty pattern matches no GPU", hint="leave it out, or write it like *A100*")
    if len(patterns) > GPU_MODELS_MAX or any(len(pattern) > GPU_MODEL_CHARS_MAX for pattern in patterns):
        raise InvalidRequest(
            f"{key}: more than {GPU_MODELS_MAX} patterns, or one of more than {GPU_MODEL_CHARS_MAX} characters",
            hint="use * for the part that may be anything",
        )
    return patterns


def sorted_pairs(mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(mapping.items()))
