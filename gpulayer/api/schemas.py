"""The shapes of the API's documents as JSON Schema (2020-12), by name: what openapi.py lists under components/schemas.

What is asked for is closed: unknown keys are refused. What is answered is open: every key that is listed is always
there, a later version may add some. A test holds all of it to what a daemon takes and says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from gpulayer.core.cluster.view import JOB_STATES
from gpulayer.model.cluster import ROLES
from gpulayer.model.ids import NAME_PATTERN
from gpulayer.model.job import (
    GPU_MODEL_CHARS_MAX,
    GPU_MODELS_MAX,
    ON_REPLICA_END,
    REPLICAS_MAX,
    RESTART_WHEN,
    SIGNALS,
    SPREADS,
    STRING_BYTES_MAX,
)
from gpulayer.model.node import ACCELERATOR_KINDS, GpuDetect
from gpulayer.model.replica import ReplicaState
from gpulayer.model.seen import NODE_STATES
from gpulayer.model.trust import JOIN_SECONDS, JOIN_SECONDS_MAX, JOIN_USES_MAX
from gpulayer.model.units import DURATION_MAX, MIB_MAX
from gpulayer.runtime.replica_logs import Kind
from gpulayer.wire.http import HOST, TOKEN_LABEL, Json

# --- words to write them with -----------------------------------------------------------------------------------------


def record(**keys: Json) -> Json:
    """An object of an answer: each of these keys is always there."""
    return {"type": "object", "required": list(keys), "properties": keys}


def closed(required: Iterable[str] = (), **keys: Json) -> Json:
    """An object of a request: no other key is taken."""
    needed = {"required": list(required)} if required else {}
    return {"type": "object", **needed, "properties": keys, "additionalProperties": False}


def array(of: Json, **bounds: object) -> Json:
    return {"type": "array", "items": of, **bounds}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def text(description: str = "", **bounds: object) -> Json:
    return {"type": "string", **({"description": description} if description else {}), **bounds}


def one_of(words: Iterable[str], description: str = "") -> Json:
    return text(description, enum=list(words))


def whole(least: int = 0, most: int | None = None, description: str = "") -> Json:
    bounds = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return {"type": "integer", **({"description": description} if description else {}), **bounds}


def number(description: str = "", **bounds: object) -> Json:
    return {"type": "number", **({"description": description} if description else {}), **bounds}


def or_null(schema: Json) -> Json:
    if "enum" in schema:
        return schema | {"type": [schema["type"], "null"], "enum": [*schema["enum"], None]}
    return schema | {"type": [schema["type"], "null"]} if "type" in schema else {"anyOf": [schema, {"type": "null"}]}


def pairs(of: Json, **bounds: object) -> Json:
    """An object whose keys are names that somebody chose."""
    return {"type": "object", "additionalProperties": of, **bounds}


TRUTH: Json = {"type": "boolean"}
UTC = number("UTC seconds")
MIB = whole(description="MiB")
SHARE = number("GPUs, or a share of one", minimum=0)

# --- what is asked for ------------------------------------------------------------------------------------------------

# No program can be given a NUL byte.
_WORD = text(pattern=r"^[^\u0000]*$", maxLength=STRING_BYTES_MAX)
_GPUS: Json = {
    "description": "Per replica: a whole number, or a share of one.",
    "anyOf": [whole(0, 1024), number(minimum=0, maximum=1, multipleOf=0.001)],
    "default": 0,
}
_GPU_MODEL = text(minLength=1, maxLength=GPU_MODEL_CHARS_MAX)
_GPU_MODELS: Json = {
    "description": "Patterns (fnmatch, any case), one of which must match.",
    "anyOf": [_GPU_MODEL, array(_GPU_MODEL, maxItems=GPU_MODELS_MAX), {"type": "null"}],
}
_SECONDS = number("Seconds.", minimum=0.001, maximum=DURATION_MAX)

_SPECIFICATION: dict[str, Json] = {
    "name": or_null(text("Made from the command if left out.", pattern=f"^{NAME_PATTERN.pattern}$")),
    "command": {
        "type": "array",
        "description": "The program and its arguments; no shell reads them. 512 KiB with the environment.",
        "minItems": 1,
        "prefixItems": [_WORD | {"minLength": 1}],
        "items": _WORD,
    },
    "replicas": whole(1, REPLICAS_MAX) | {"default": 1},
    "accelerator": or_null(one_of(ACCELERATOR_KINDS)),
    "gpus": _GPUS,
    "gpu_model": _GPU_MODELS,
    "gpu_memory_mib": or_null(whole(0, MIB_MAX, "Of each device; of a share, that share of it.")),
    "vendor": or_null(text()),
    "cpus": number("Per replica.", minimum=0, maximum=100_000, multipleOf=0.001),
    "memory_mib": whole(0, MIB_MAX, "Per replica."),
    "labels": pairs(text(), description="That a node must have."),
    "env": pairs(
        _WORD,
        description="No name begins with GPULAYER_; PORT and HOST are set for a service with a port.",
        # Whitespace as Python's str.isspace has it.
        propertyNames={
            "pattern": r"^(?!GPULAYER_|(?:NOTIFY_SOCKET|WATCHDOG_PID|WATCHDOG_USEC)$)[^=\s\u0000\u001c-\u001f\u0085]+$",
            "maxLength": STRING_BYTES_MAX,
        },
    ),
    "workdir": or_null(text("On the node; a sandbox of its own if left out.", pattern=r"^/[^\u0000]*$")),
    "retry_max_attempts": or_null(whole(0, 1_000_000, "Left out: 10 for a service, 0 for a batch.")),
    "spread": one_of(SPREADS) | {"default": "node"},
    "priority": whole(0, 100) | {"default": 50},
    "on_replica_end": one_of(ON_REPLICA_END) | {"default": "stop"},
    "timeout_seconds": or_null(_SECONDS),
    "stop_signal": one_of(SIGNALS) | {"default": "TERM"},
    "stop_grace_seconds": number("Seconds.", minimum=0, maximum=DURATION_MAX) | {"default": 10},
}
_WITH_OR_WITHOUT_GPUS: list[Json] = [
    {
        "title": "without GPUs",
        "properties": {
            "gpus": {"const": 0},
            "accelerator": {"enum": [None, "cpu"]},
            "gpu_model": {"enum": [None, []]},
            "gpu_memory_mib": {"enum": [None, 0]},
            "vendor": {"enum": [None, ""]},
        },
    },
    {
        "title": "with GPUs",
        "required": ["gpus"],
        "properties": {
            "gpus": {"exclusiveMinimum": 0},
            "accelerator": {"enum": [None, *(kind for kind in ACCELERATOR_KINDS if kind != "cpu")]},
        },
    },
]
_SERVICE = closed(
    ["kind", "command"],
    kind={"const": "service"},
    **_SPECIFICATION,
    port=or_null(TRUTH) | {"default": True},
    restart=or_null(one_of(RESTART_WHEN)) | {"default": "always"},
    max_restarts=or_null(whole(0, 1_000_000)),
    start_timeout_seconds=or_null(_SECONDS),
)
_BATCH = closed(
    ["command"],
    kind={"const": "batch", "default": "batch"},
    **_SPECIFICATION,
    port={"enum": [False, None]},
    restart={"enum": ["never", None]},
    max_restarts={"type": "null"},
    start_timeout_seconds={"type": "null"},
)

REQUESTS: dict[str, Json] = {
    "Specification": {"oneOf": [ref("Service"), ref("Batch")]},
    "Service": _SERVICE | {"anyOf": _WITH_OR_WITHOUT_GPUS},
    "Batch": _BATCH | {"anyOf": _WITH_OR_WITHOUT_GPUS},
    "Restart": closed(
        replicas=or_null(array(whole(0, REPLICAS_MAX - 1), minItems=1, maxItems=REPLICAS_MAX))
        | {"description": "Indexes; all that run if left out."}
    ),
    "Nothing": closed(),
    "TokenRequest": closed(
        ["role"],
        role=one_of(ROLES),
        label=text(pattern=f"^{TOKEN_LABEL.pattern}$", default=""),
    ),
    "JoinTokenRequest": closed(
        uses=whole(1, JOIN_USES_MAX, "So many hosts.") | {"default": 1},
        lasts_seconds=number(minimum=1, maximum=JOIN_SECONDS_MAX, default=JOIN_SECONDS),
        advertise=text(
            "The address that hosts are told to join by; left out, that of the node that answers.",
            pattern=f"^\\[?{HOST.pattern}\\]?$",
        ),
    ),
    "Leave": closed(stop_all=TRUTH | {"default": False, "description": "Stop what lives, instead of refusing."}),
}

# --- what is answered -------------------------------------------------------------------------------------------------

_REASON = or_null(ref("Reason"))
_DEVICES = array(record(uuid=text(), share=SHARE))
_REFUSALS = array(record(node=text(), code=text(), text=text()))
_JOB: dict[str, Json] = {
    "id": text(),
    "name": text(),
    "kind": one_of(("service", "batch")),
    "state": one_of(JOB_STATES),
    "reason": _REASON,
    "revision": whole(1),
    "replicas": whole(1),
    "ready": whole(),
    "restarts": whole(),
    "gpus": SHARE,
    "priority": whole(0, 100),
    "submitted_at_utc": UTC,
    "ended_at_utc": or_null(UTC),
}
_NAMED_JOB = {"id": text(), "name": text()}
_DEVICE: dict[str, Json] = {
    "uuid": text(),
    "index": or_null(whole(description="The driver's number for it.")),
    "kind": one_of(ACCELERATOR_KINDS),
    "vendor": text(),
    "model": text(),
    "memory_mib": MIB,
    "compute_capability": or_null(text()),
    "pci_bus_id": or_null(text()),
    "numa_node": or_null(whole()),
    "nvlink_peers": array(text("UUID")),
    "parent": or_null(text("Of a MIG instance: the UUID of its GPU.")),
    "source": text("Who says that it is there: nvml, declared."),
    "unhealthy": or_null(text("Why nothing is placed on it.")),
    "foreign": or_null(text("Who else is on it.")),
    "foreign_share": SHARE,
    "share_free": SHARE,
    "held_by": array(record(job=text(), name=text(), replica=whole(), share=SHARE)),
}
_DETECTED: dict[str, Json] = {
    "gpu_detect": one_of(get_args(GpuDetect)),
    "drivers": pairs(text("Version.")),
    "undetected": array(text("What could not be found out, and why.")),
}
_NAMED_NODE = {"name": text(), "id": text()}
_SEEN: dict[str, Json] = {
    "state": one_of(NODE_STATES),
    "reason": or_null(text("Why it is not alive.")),
    "age_seconds": number("How old this is: since anything was heard of the cluster, or of a node that is away."),
}
_NODE: dict[str, Json] = {
    **_NAMED_NODE,
    **_SEEN,
    "conditions": array(text("sluggish, impaired, tcp_impaired, isolated, restarting, duplicate, disk_low.")),
    "marks": array(text()),
    "is_self": TRUTH | {"description": "It is the node that answers."},
    "voter": TRUTH | {"description": "The log is there."},
    "record": one_of(("current", "earlier", "none"))
    | {"description": "Of which run of its daemon is what it says of itself."},
    "address": text("That its endpoints carry."),
    "api": or_null(text("host:port of its API; null: not reached from other hosts.")),
    "peer_address": or_null(text("host:port for other nodes.")),
    "epoch": whole(description="Rises with every start of its daemon."),
    "incarnation": whole(description="Rises when it contradicts being suspected."),
    "gpulayer_version": or_null(text()),
    "load": or_null(record(cpu_percent=whole(), memory_percent=whole(), disk_percent=whole())),
    "labels": pairs(text()),
    "cpus": number(),
    "cpus_free": number(),
    "memory_mib": MIB,
    "memory_free_mib": MIB,
    "disk_mib": MIB,
    "numa": array(record(id=whole(), cpus=text("As the kernel lists them: 0-15,32-47."), memory_mib=MIB)),
    **_DETECTED,
    "gpus_excluded": whole(description="How many the configuration keeps gpulayer from."),
    "devices": array(record(**_DEVICE)),
}
_TOKEN: dict[str, Json] = {"id": text(), "role": one_of(ROLES), "label": text()}

ANSWERS: dict[str, Json] = {
    "Error": record(code=text("Stable, for programs."), message=text("What happened."), hint=text("What to do now.")),
    "Reason": record(code=text("Stable, for programs."), text=text(), hint=text()),
    "Submitted": record(
        **_NAMED_JOB,
        revision=whole(1),
        replayed=TRUTH | {"description": "The same key was used before, and this is what came of it."},
        warning=_REASON | {"description": "Why it would wait for ever, where only a person can help."},
    ),
    "DryRun": record(
        fits=TRUTH,
        replicas=array(record(index=whole(), node=or_null(text()), devices=_DEVICES, refusals=_REFUSALS)),
        summary=text(),
        warning=_REASON,
    ),
    "Job": record(**_JOB),
    "Jobs": record(jobs=array(ref("Job")), next=or_null(text("The cursor of the next page."))),
    "JobStatus": record(
        **_JOB
        | {
            "command": array(text()),
            "on_replica_end": one_of(ON_REPLICA_END),
            "replicas": array(ref("Replica")),
        }
    ),
    "Replica": record(
        index=whole(),
        state=one_of(get_args(ReplicaState)),
        reason=_REASON,
        next=or_null(text("What happens next, in a sentence.")),
        node=or_null(text()),
        endpoint=or_null(text("address:port, while it is ready.")),
        endpoint_verified=or_null(TRUTH | {"description": "Whether its node is there to say that it still is so."}),
        attempt=whole(),
        run=whole(),
        pid=or_null(whole()),
        restarts=whole(),
        started_at_utc=or_null(UTC),
        ready_since_utc=or_null(UTC),
        next_start_at_utc=or_null(UTC),
        devices=_DEVICES,
        last_exit=or_null(ref("Exit")),
        warning=_REASON,
        sandbox=or_null(text("On the node.")),
        last_lines=array(text()),
    ),
    "Exit": record(
        run=whole(),
        code=or_null(whole()),
        signal=or_null(whole()),
        ended_by=text(),
        ended_at_utc=UTC,
        uptime_seconds=number(),
        text=text(),
    ),
    "SpecificationInForce": record(
        kind=one_of(("service", "batch")),
        name=text(),
        command=array(text()),
        replicas=whole(1),
        accelerator=or_null(one_of(ACCELERATOR_KINDS)),
        gpus=SHARE,
        gpu_model=array(text()),
        gpu_memory_mib=MIB,
        vendor=or_null(text()),
        cpus=number(),
        memory_mib=MIB,
        labels=pairs(text()),
        env=pairs(text()),
        workdir=or_null(text()),
        port=TRUTH,
        restart=one_of(RESTART_WHEN),
        max_restarts=or_null(whole()),
        retry_max_attempts=whole(),
        spread=one_of(SPREADS),
        priority=whole(0, 100),
        on_replica_end=one_of(ON_REPLICA_END),
        timeout_seconds=or_null(number()),
        start_timeout_seconds=or_null(number()),
        stop_signal=one_of(SIGNALS),
        stop_grace_seconds=number(),
        revision=whole(1),
    ),
    "Cancelled": record(**_NAMED_JOB, state=one_of(JOB_STATES)),
    "Restarted": {
        **(restarted := record(**_NAMED_JOB, replicas=array(whole()))),
        "properties": restarted["properties"] | {"skipped": array(text("Which was not restarted, and why."))},
    },
    "Endpoints": array(
        record(endpoint=text("address:port"), replica=whole(), node=text(), verified=TRUTH, age_seconds=number())
    ),
    "LogLine": record(
        at_utc=UTC,
        replica=whole(),
        attempt=whole(1),
        run=whole(),
        stream=one_of(("stdout", "stderr", "supervisor")),
        kind=one_of(get_args(Kind)),
        text=text(),
        offset=text("Where to go on after it."),
    ),
    "Event": record(
        offset=text("Where to go on after it."),
        at_utc=UTC,
        source=text(),
        kind=text("noun.verb"),
        job=or_null(text()),
        job_name=or_null(text()),
        replica=or_null(whole()),
        node=or_null(text()),
        text=text(),
        data=pairs(text()),
    ),
    "Explanation": record(
        **_NAMED_JOB,
        state=one_of(JOB_STATES),
        reason=_REASON,
        replicas=array(
            record(
                index=whole(),
                state=one_of(get_args(ReplicaState)),
                reason=_REASON,
                node=or_null(text()),
                devices=_DEVICES,
                why=array(text()),
                refusals=_REFUSALS,
                history=array(record(ago_seconds=number(), text=text())),
            )
        ),
    ),
    "Status": record(
        cluster_id=text(),
        leader=or_null(text()),
        version=text(),
        node=text("The one that answers."),
        uptime_seconds=number(),
        index=whole(),
        nodes_by_state=pairs(whole(), description="How many, by state."),
        away=array(ref("AwayNode")),
        nodes=array(ref("Node")),
        gpus=array(record(model=text(), free=SHARE, all=SHARE, away=SHARE)),
        log_unknown=or_null(
            text("Why jobs are told by the nodes' records, and what is queued not at all; null: by the log.")
        ),
        jobs=pairs(whole(), description="How many, by state."),
        queued=array(record(**_NAMED_JOB, reason=_REASON)),
        unhealthy=array(ref("Job")),
        warnings=array(text()),
    ),
    "Node": record(**_NODE),
    "NodeStatus": record(
        **_NODE,
        warnings=array(text()),
        replicas=array(
            record(
                job=text(),
                name=text(),
                kind=one_of(("service", "batch")),
                replica=whole(),
                attempt=whole(1),
                state=one_of(get_args(ReplicaState)),
                reason=_REASON,
                endpoint=or_null(text("address:port, while it is ready.")),
                pid=or_null(whole()),
                restarts=whole(),
                devices=_DEVICES,
                cpus=number(),
                memory_mib=MIB,
            )
        ),
    ),
    "AwayNode": record(**_NAMED_NODE, **_SEEN, gpus=whole()),
    "Resources": record(
        models=array(
            record(
                model=text(),
                kind=one_of(ACCELERATOR_KINDS),
                vendor=text(),
                memory_mib=MIB,
                idle=whole(),
                all=whole(),
                held=whole(),
                foreign=whole(),
                unhealthy=whole(),
                away=whole(description="On nodes that are not alive; not among all."),
                share_open=SHARE,
                largest_idle_on_one_node=whole(),
                node=or_null(text("Which has the most idle ones.")),
            )
        ),
        nodes=array(
            record(
                name=text(),
                **_SEEN,
                marks=array(text()),
                cpus=number(),
                cpus_idle=number(),
                memory_mib=MIB,
                memory_idle_mib=MIB,
                disk_mib=MIB,
                gpus=whole(),
                gpus_idle=whole(),
                **_DETECTED,
            )
        ),
        away=array(ref("AwayNode")),
    ),
    "Tokens": record(
        tokens=array(
            record(
                id=text(),
                role=one_of([*ROLES, "join"]),
                label=text(),
                created_at_utc=UTC,
                uses_left=or_null(whole(description="Of a join token.")),
                expires_at_utc=or_null(UTC),
            )
        )
    ),
    "NewJoinToken": record(
        id=text(),
        token=text("What the next host shows; it is not shown again."),
        uses_left=whole(),
        expires_at_utc=UTC,
        seed=text("HOST:PORT to join by."),
        bind=or_null(text("What the next host has to listen on; null: loopback.")),
    ),
    "Cluster": record(
        cluster_id=text(),
        leader=or_null(text()),
        voters=array(text()),
        standbys=array(text()),
        term=whole(),
        index=whole(),
        generation=whole(),
        nodes=whole(),
        authority=or_null(text("sha256 of the certificate of the cluster's authority.")),
        keys=ref("Keys"),
    ),
    "Keys": record(
        version=whole(),
        rotation=or_null(one_of(["installing", "using"])),
        changed_at_utc=UTC,
        ring=array(record(id=text(), installed_at_utc=UTC, seals=TRUTH)),
    ),
    "NewToken": record(**_TOKEN, token=text("The secret; it is not shown again.")),
    "Audit": record(
        checked_at_utc=UTC,
        differences=array(
            record(
                node=text("Its name."),
                kind=text(),
                text=text(),
                pids=array(whole()),
                job=text(),
                replica=or_null(whole()),
                hint=text(),
            )
        ),
        replicas_checked=whole(),
        processes_seen=whole(),
        nodes=array(record(node=text("Its name."), error=or_null(text("Why it was not checked.")))),
    ),
    "Left": {
        "anyOf": [
            record(state={"const": "stopping"}, left=whole(description="Replicas that are not released yet.")),
            record(state={"const": "left"}),
        ]
    },
}
