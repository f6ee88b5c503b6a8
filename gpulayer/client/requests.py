"""What a program asks for: `service(…)` and `batch(…)` make a request that was checked when it was made.

Pure but for one thing: a relative `workdir` is read from the caller's current directory. Sending is sync.py's and
aio.py's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpulayer.client.keys import (
    flag,
    in_python,
    path,
    patterns,
    quantity,
    seconds,
    seconds_or_none,
    size_mib,
    text,
    text_or_none,
    text_pairs,
    whole,
    words_of,
    wrong,
)
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import name_from_command
from gpulayer.model.job import JobSpec, Requirements, RestartWhen, checked_gpu_models
from gpulayer.model.units import MILLI, parse_gpus

if TYPE_CHECKING:
    from signal import Signals

Accelerator: TypeAlias = Literal["cuda", "rocm", "mps", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a replica is placed again after its node was lost; `max_attempts=0`: never. Raises InvalidRequest."""

    max_attempts: int

    def __post_init__(self) -> None:
        if not 0 <= whole("max_attempts", self.max_attempts) <= _ATTEMPTS_MAX:
            raise InvalidRequest(
                f"max_attempts: {self.max_attempts} is not between 0 and {_ATTEMPTS_MAX}",
                hint="write it like gl.Retry(max_attempts=3)",
            )


# What the model allows (model/job.py).
_ATTEMPTS_MAX = 1_000_000
RETRY_OF_SERVICE = Retry(max_attempts=10)
RETRY_OF_BATCH = Retry(max_attempts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job that can be submitted: made by `service(…)` or `batch(…)`, valid by then, never changed."""

    spec: JobSpec
    is_named: bool
    """False: the name in `spec` was made from the command, and the node adds a suffix where it is in use."""

    def __repr__(self) -> str:
        # Short, and without the environment, which may hold secrets.
        return f"<JobRequest {self.spec.kind} {self.spec.name}: {' '.join(self.spec.argv):.60}>"

    def body(self) -> dict[str, Any]:
        """The body of POST /v1/jobs: every key; no name where none was given."""
        # wire/http.py's spec_to_json, again: importing what that module needs would take a tenth of the time that a
        # submit may take. A test holds the two together.
        spec, needs = self.spec, self.spec.requirements
        return {
            "kind": spec.kind,
            **({"name": spec.name} if self.is_named else {}),
            "command": list(spec.argv),
            "replicas": spec.replicas,
            "accelerator": needs.accelerator,
            "gpus": needs.gpus_milli / MILLI,
            "gpu_model": list(needs.gpu_models),
            "gpu_memory_mib": needs.gpu_memory_mib,
            "vendor": needs.vendor,
            "cpus": needs.cpus_milli / MILLI,
            "memory_mib": needs.memory_mib,
            "labels": dict(needs.labels),
            "env": dict(spec.env),
            "workdir": spec.workdir,
            "port": spec.port,
            "restart": spec.restart,
            "max_restarts": spec.max_restarts,
            "retry_max_attempts": spec.retry_max_attempts,
            "spread": spec.spread,
            "priority": spec.priority,
            "on_replica_end": spec.on_replica_end,
            "timeout_seconds": spec.timeout_seconds,
            "start_timeout_seconds": spec.start_timeout_seconds,
            "stop_signal": spec.stop_signal,
            "stop_grace_seconds": spec.stop_grace_seconds,
        }


def service(
    command: Sequence[str | os.PathLike[str]],
    *,
    name: str | None = None,
    replicas: int = 1,
    accelerator: Accelerator | None = None,
    gpus: int | float | str = 0,
    gpu_model: str | Iterable[str] = (),
    gpu_memory: str | None = None,
    vendor: str | None = None,
    cpus: int | float | str = 0,
    memory: str | None = None,
    labels: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    port: bool = True,
    restart: RestartWhen = "always",
    max_restarts: int | None = None,
    retry: Retry = RETRY_OF_SERVICE,
    spread: Literal["node", "any"] = "node",
    priority: int = 50,
    on_replica_end: Literal["stop", "keep"] = "stop",
    timeout_seconds: float | None = None,
    start_timeout_seconds: float | None = None,
    stop_signal: str | Signals = "TERM",
    stop_grace_seconds: float = 10.0,
) -> JobRequest:
    """A service: copies of a command that are kept running.

    The keys are those of `gpulayer submit --service`. `command` is the program and its arguments, no shell between.
    `gpus` and `cpus` are numbers per replica (0.5 is a share), `gpu_memory` and `memory` sizes such as "24GiB",
    `gpu_model` one pattern or several, `env` and `labels` text by name. With `port`, the node picks a free port and
    sets $PORT; the service must listen on it. A relative `workdir` counts from the current directory. Raises
    InvalidRequest, naming the key.
    """
    return _request(
        "service",
        command,
        name=name,
        replicas=whole("replicas", replicas),
        requirements=_requirements(accelerator, gpus, gpu_model, gpu_memory, vendor, cpus, memory, labels),
        env=text_pairs("env", env),
        workdir=_absolute(workdir),
        port=flag("port", port, "the node picks a free port and sets $PORT for the command"),
        restart=restart,
        max_restarts=None if max_restarts is None else whole("max_restarts", max_restarts),
        retry_max_attempts=_retry(retry),
        spread=spread,
        priority=whole("priority", priority),
        on_replica_end=on_replica_end,
        timeout_seconds=seconds_or_none("timeout_seconds", timeout_seconds),
        start_timeout_seconds=seconds_or_none("start_timeout_seconds", start_timeout_seconds),
        stop_signal=_signal(stop_signal),
        stop_grace_seconds=seconds("stop_grace_seconds", stop_grace_seconds),
    )


def batch(
    command: Sequence[str | os.PathLike[str]],
    *,
    name: str | None = None,
    replicas: int = 1,
    accelerator: Accelerator | None = None,
    gpus: int | float | str = 0,
    gpu_model: str | Iterable[str] = (),
    gpu_memory: str | None = None,
    vendor: str | None = None,
    cpus: int | float | str = 0,
    memory: str | None = None,
    labels: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    retry: Retry = RETRY_OF_BATCH,
    spread: Literal["node", "any"] = "node",
    priority: int = 50,
    on_replica_end: Literal["stop", "keep"] = "stop",
    timeout_seconds: float | None = None,
    stop_signal: str | Signals = "TERM",
    stop_grace_seconds: float = 10.0,
) -> JobRequest:
    """A batch: a command that runs to its end, once per replica; it succeeds when every replica exited 0.

    The keys are those of `gpulayer submit`, as in `service(…)`; a batch has no port and is not restarted.
    Raises InvalidRequest, naming the key.
    """
    return _request(
        "batch",
        command,
        name=name,
        replicas=whole("replicas", replicas),
        requirements=_requirements(accelerator, gpus, gpu_model, gpu_memory, vendor, cpus, memory, labels),
        env=text_pairs("env", env),
        workdir=_absolute(workdir),
        port=False,
        restart="never",
        retry_max_attempts=_retry(retry),
        spread=spread,
        priority=whole("priority", priority),
        on_replica_end=on_replica_end,
        timeout_seconds=seconds_or_none("timeout_seconds", timeout_seconds),
        stop_signal=_signal(stop_signal),
        stop_grace_seconds=seconds("stop_grace_seconds", stop_grace_seconds),
    )


def _request(
    kind: Literal["service", "batch"], command: Sequence[str | os.PathLike[str]], *, name: str | None, **keys: Any
) -> JobRequest:
    argv = words_of(command)
    chosen = name_from_command(argv) if name is None else text("name", name)
    with in_python():
        spec = JobSpec(kind=kind, name=chosen, argv=argv, **keys)
    return JobRequest(spec=spec, is_named=name is not None)


def _requirements(
    accelerator: str | None,
    gpus: int | float | str,
    gpu_model: str | Iterable[str],
    gpu_memory: str | None,
    vendor: str | None,
    cpus: int | float | str,
    memory: str | None,
    labels: Mapping[str, str] | None,
) -> Requirements:
    with in_python():
        return Requirements(
            accelerator=text_or_none("accelerator", accelerator),
            gpus_milli=parse_gpus(quantity("gpus", gpus)),
            gpu_models=checked_gpu_models("gpu-model", patterns("gpu_model", gpu_model)),
            gpu_memory_mib=size_mib("gpu_memory", gpu_memory),
            vendor=text_or_none("vendor", vendor),
            cpus_milli=_cpus_milli(quantity("cpus", cpus)),
            memory_mib=size_mib("memory", memory),
            labels=text_pairs("labels", labels),
        )


def _cpus_milli(value: int | float | str) -> int:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"cpus: {value!r:.80} is not a number", hint="write 4 or 0.5") from None
    if not math.isfinite(number) or not 0 <= number <= 100_000:
        raise InvalidRequest(f"cpus: {value} is not between 0 and 100000", hint="write 4 or 0.5")
    milli = round(number * MILLI)
    if abs(milli - number * MILLI) > 1e-6 or (milli == 0 and number > 0):
        raise InvalidRequest(f"cpus: {value} is finer than a thousandth", hint="write 4 or 0.5")
    return milli


def _retry(value: Retry) -> int:
    if not isinstance(value, Retry):
        raise wrong("retry", value, "a gl.Retry", "write it like retry=gl.Retry(max_attempts=3)")
    return value.max_attempts


def _absolute(workdir: str | os.PathLike[str] | None) -> str | None:
    if workdir is None:
        return None
    given = path("workdir", workdir)
    if not given:
        raise InvalidRequest("workdir: it is empty", hint="leave it out for a sandbox")
    return os.path.abspath(os.path.expanduser(given))


def _signal(value: str | Signals) -> str:
    """`signal.SIGTERM`, "SIGTERM" and "term" are what people write for TERM."""
    name = getattr(value, "name", value)
    if not isinstance(name, str):
        raise wrong("stop_signal", value, "text", 'write "TERM", or signal.SIGTERM')
    return name.upper().removeprefix("SIG")
