"""JSON bodies of the HTTP API and the model, both ways. Pure; the server (api) and the clients share it.

What comes in is judged here before anything else sees it: strict JSON, bounded in size, depth and numbers, every key
known. Each refusal names the key, shows the value (shortened) and says what would have been right. The contract is
docs/http-api.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from gpulayer.model.cluster import ROLES, Role, Token
from gpulayer.model.errors import (
    BY_CODE,
    GpulayerError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Refused,
    StorageFailed,
    Unreachable,
)
from gpulayer.model.ids import NodeId, checked_name, name_from_command
from gpulayer.model.job import (
    ON_REPLICA_END,
    REPLICAS_MAX,
    RESTART_WHEN,
    SIGNALS,
    SPREADS,
    JobSpec,
    Requirements,
    RestartWhen,
    checked_gpu_models,
    sorted_pairs,
)
from gpulayer.model.node import ACCELERATOR_KINDS
from gpulayer.model.trust import JOIN_SECONDS, JOIN_SECONDS_MAX, JOIN_USES_MAX, JoinToken, KeyRing
from gpulayer.model.units import DURATION_MAX, MIB_MAX, MILLI, parse_gpus

if TYPE_CHECKING:
    # Only the server needs these; the command line, which starts for every call, does not wait for their import.
    from gpulayer.core.cluster.view import JobView, ReplicaView
    from gpulayer.model.event import Event
    from gpulayer.model.node import Accelerator
    from gpulayer.model.replica import DeviceShare, Exit, Reason

Json: TypeAlias = dict[str, Any]

# The longest command with its environment is 512 KiB (model/job.py); escapes may double it. One request holds no more.
BODY_BYTES_MAX = 1024 * 1024
# The contract's deepest document has 3 levels. The bound has to be far below what makes a parser recurse too deeply.
DEPTH_MAX = 32
# Every number of the contract fits into 64 bits; longer ones cost quadratic time to read.
INTEGER_DIGITS_MAX = 19
# One line, and nothing that turns the text around it: what controls, separates lines, or sets a direction is left out.
TOKEN_LABEL = re.compile(r"[^\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069]{0,200}")
HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,128}")
_SHOWN_CHARS_MAX = 60

# The end is optional: a string that is not closed is one match to the end of the text, so this stays linear.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")


# --- reading JSON ---------------------------------------------------------------------------------------------------


def parse_json(body: bytes, max_bytes: int = BODY_BYTES_MAX) -> object:
    """The document in a body, or InvalidRequest.

    Stricter than json.loads: UTF-8, no NaN or Infinity, no key twice in an object, at most DEPTH_MAX levels, integers
    of at most 19 digits. The depth is found without recursion, before the parser sees the text.
    """
    if len(body) > max_bytes:
        raise InvalidRequest(
            f"the body has {len(body)} bytes, {max_bytes} at most",
            hint="put large values into a file and pass its path",
            code="too_large",
        )
    if not body.strip(b" \t\r\n"):
        raise InvalidRequest("the body is empty", hint="send a JSON object")
    _check_depth(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})", hint="send JSON in UTF-8") from None
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_real,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})", hint="send a JSON object"
        ) from None
    except RecursionError:
        # Not reached with the depth checked above, unless we are called from very deep ourselves.
        raise _too_deep() from None


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
        return
    left = _STRING.sub(b"", body).translate(_BRACKETS, _NO_BRACKET)
    # Each round takes away the innermost pairs, so what is left after N rounds is nested more than N levels deep,
    # or is not JSON, which the parser says better.
    for _ in range(DEPTH_MAX):
        if b"[]" not in left:
            break
        left = left.replace(b"[]", b"")
    if b"[]" in left or left.count(b"[") > DEPTH_MAX:
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(
        f"the body is nested more than {DEPTH_MAX} levels deep", hint="no key of the API needs more than 3"
    )


def _object(pairs: list[tuple[str, Any]]) -> Json:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the key {shown(key)} is given twice in one object", hint="leave out one of them")
            seen.add(key)
    return made


def _no_constant(name: str) -> object:
    raise InvalidRequest(f"{name} is not JSON", hint="write a number, or null")


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > INTEGER_DIGITS_MAX:
        raise InvalidRequest(f"the number {shown(digits)} is too long", hint="write a number below 2^63")
    return int(digits)


def _real(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise InvalidRequest(f"the number {shown(digits)} is too large", hint="write a number below 1e308")
    return number


def shown(value: object) -> str:
    """A value as a message may repeat it: as JSON writes it (so no raw control character), short."""
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else None
    if text is None:
        text = f"an array of {len(value)}" if isinstance(value, list) else "an object"
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 1] + "…"


# --- typed access to one object -------------------------------------------------------------------------------------


class Fields:
    """The keys of one object, taken one by one with their type. Unknown keys are refused when it is made."""

    def __init__(self, document: object, known: Sequence[str], what: str = "the body") -> None:
        if not isinstance(document, dict):
            raise InvalidRequest(f"{what} is {shown(document)}, not an object", hint='send {"key": value, …}')
        for key in document:
            if key not in known:
                raise InvalidRequest(f"unknown key {shown(key)}", hint=nearest(key, known))
        self._document = document

    def given(self, key: str) -> bool:
        """Null is the same as leaving a key out where the key may be null; where it may not, reading it refuses."""
        return self._document.get(key) is not None

    def raw(self, key: str) -> object:
        return self._document.get(key)

    def text(self, key: str, default: str) -> str:
        return cast(str, self._typed(key, default, _is_text, "a string"))

    def text_or_none(self, key: str) -> str | None:
        return self.text(key, "") if self.given(key) else None

    def one_of(self, key: str, allowed: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in allowed:
            raise InvalidRequest(f"{key}: {shown(value)} is unknown", hint="use one of " + ", ".join(allowed))
        return value

    def flag(self, key: str, default: bool) -> bool:
        return cast(bool, self._typed(key, default, lambda value: isinstance(value, bool), "true or false"))

    def whole(self, key: str, default: int, least: int, most: int) -> int:
        number = int(self._typed(key, default, _is_whole, "a whole number"))
        if not least <= number <= most:
            raise _out_of_range(key, number, least, most)
        return number

    def number(self, key: str, default: float, least: float, most: float) -> float:
        number = self._typed(key, default, _is_number, "a number")
        if not least <= number <= most:
            raise _out_of_range(key, number, least, most)
        return float(number)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._typed(key, [], lambda value: isinstance(value, list), "an array of strings")
        for place, item in enumerate(value):
            if not _is_text(item):
                raise InvalidRequest(
                    f"{key}[{place}]: {shown(item)} is not a string", hint='write every element in quotes, as in "8080"'
                )
        return tuple(value)

    def text_pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        value = self._typed(key, {}, lambda value: isinstance(value, dict), "an object of strings")
        for name, item in value.items():
            if not _is_text(name) or not _is_text(item):
                raise InvalidRequest(
                    f"{key}: {shown(name)}: {shown(item)} is not a string", hint='write the value in quotes, as in "1"'
                )
        return sorted_pairs(value)

    def _typed(self, key: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        if key not in self._document:
            return default
        value = self._document[key]
        if not fits(value):
            raise InvalidRequest(f"{key}: {shown(value)} is not {wanted}", hint=f"{key} takes {wanted}")
        return value


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint for a word that is not known."""
    import difflib  # only where somebody was wrong

    known = sorted(known)
    close = difflib.get_close_matches(word[:64], known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return "known here: " + ", ".join(known) if known else "leave it out; none is known here"


def _is_text(value: object) -> bool:
    # A lone surrogate ("\\ud800") is valid JSON and no text: it cannot be written to a file or given to a program.
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value if char > "\ud7ff")


def _is_whole(value: object) -> bool:
    # JSON has one kind of number: to many a client 2.0 is 2.
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _out_of_range(key: str, number: float, least: float, most: float) -> InvalidRequest:
    return InvalidRequest(
        f"{key}: {shown(number)} is not between {least:g} and {most:g}",
        hint=f"write a number from {least:g} to {most:g}",
    )


# --- specifications -------------------------------------------------------------------------------------------------

SPEC_KEYS: tuple[str, ...] = (
    "kind",
    "name",
    "command",
    "replicas",
    "accelerator",
    "gpus",
    "gpu_model",
    "gpu_memory_mib",
    "vendor",
    "cpus",
    "memory_mib",
    "labels",
    "env",
    "workdir",
    "port",
    "restart",
    "max_restarts",
    "retry_max_attempts",
    "spread",
    "priority",
    "on_replica_end",
    "timeout_seconds",
    "start_timeout_seconds",
    "stop_signal",
    "stop_grace_seconds",
)
# What null may stand for: nothing (no workdir, no limit), or "what fits the kind". Elsewhere null is a mistake.
_NULLABLE = frozenset(
    (
        "name",
        "accelerator",
        "gpu_model",
        "gpu_memory_mib",
        "vendor",
        "workdir",
        "port",
        "restart",
        "max_restarts",
        "retry_max_attempts",
        "timeout_seconds",
        "start_timeout_seconds",
    )
)
_RETRY_MAX_ATTEMPTS_OF_SERVICE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    spec: JobSpec
    name_is_derived: bool
    """No name was given; the one in `spec` is made from the command, and may get a suffix."""

    @property
    def digest(self) -> str:
        """Equal for two requests that ask for the same, however they are written. For Idempotency-Key."""
        import hashlib  # the clients, which do not need it, start faster without

        document = spec_to_json(self.spec) | {"name_is_derived": self.name_is_derived}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def parse_submit(body: bytes, *, max_bytes: int = BODY_BYTES_MAX) -> SubmitRequest:
    """The body of POST /v1/jobs, or InvalidRequest."""
    return submit_from_json(parse_json(body, max_bytes))


def spec_from_json(document: object) -> JobSpec:
    """The inverse of spec_to_json, for a specification with a name of its own."""
    return submit_from_json(document).spec


def submit_from_json(document: object) -> SubmitRequest:
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if value is not None or key not in _NULLABLE}
    fields = Fields(document, SPEC_KEYS)
    kind = cast("Literal['service', 'batch']", fields.one_of("kind", ("service", "batch"), "batch"))
    argv = _command(fields)
    derived = not fields.given("name")
    name = name_from_command(argv) if derived else checked_name(fields.text("name", ""))
    if kind == "batch":
        _check_batch(fields)
    spec = JobSpec(
        kind=kind,
        name=name,
        argv=argv,
        env=fields.text_pairs("env"),
        workdir=_workdir(fields),
        replicas=fields.whole("replicas", 1, 1, REPLICAS_MAX),
        requirements=_requirements(fields),
        port=fields.flag("port", kind == "service"),
        restart=cast(RestartWhen, fields.one_of("restart", RESTART_WHEN, "always" if kind == "service" else "never")),
        max_restarts=fields.whole("max_restarts", 0, 0, 1_000_000) if fields.given("max_restarts") else None,
        retry_max_attempts=fields.whole(
            "retry_max_attempts", _RETRY_MAX_ATTEMPTS_OF_SERVICE if kind == "service" else 0, 0, 1_000_000
        ),
        spread=cast("Literal['node', 'any']", fields.one_of("spread", SPREADS, "node")),
        priority=fields.whole("priority", 50, 0, 100),
        on_replica_end=cast("Literal['stop', 'keep']", fields.one_of("on_replica_end", ON_REPLICA_END, "stop")),
        timeout_seconds=_seconds(fields, "timeout_seconds"),
        start_timeout_seconds=_seconds(fields, "start_timeout_seconds"),
        stop_signal=fields.one_of("stop_signal", SIGNALS, "TERM"),
        stop_grace_seconds=fields.number("stop_grace_seconds", 10.0, 0.0, DURATION_MAX),
    )
    return SubmitRequest(spec=spec, name_is_derived=derived)


def _command(fields: Fields) -> tuple[str, ...]:
    if isinstance(fields.raw("command"), str):
        raise InvalidRequest(
            f"command: {shown(fields.raw('command'))} is a string, not an array of strings",
            hint='write ["sh", "-c", "…"] to have a shell read it',
        )
    argv = fields.texts("command")
    if not argv or not argv[0]:
        raise InvalidRequest("command: there is no program in it", hint='write it like ["python", "train.py"]')
    return argv


def _workdir(fields: Fields) -> str | None:
    workdir = fields.text_or_none("workdir")
    if workdir is not None and (not workdir.startswith("/") or "\0" in workdir):
        raise InvalidRequest(f"workdir: {shown(workdir)} is not an absolute path", hint="write it from / on")
    return workdir


def _check_batch(fields: Fields) -> None:
    """What only services have. Said here with the keys' names; JobSpec would say it in the command line's words."""
    if fields.flag("port", False):
        raise InvalidRequest(
            "port: true is for services; a batch has no port", hint='leave out port, or write "kind": "service"'
        )
    if fields.given("restart") and fields.raw("restart") != "never":
        raise InvalidRequest(
            f"restart: {shown(fields.raw('restart'))} is for services; a batch runs once",
            hint='leave out restart, or write "kind": "service"',
        )
    for key in ("max_restarts", "start_timeout_seconds"):
        if fields.given(key):
            raise InvalidRequest(
                f"{key}: {shown(fields.raw(key))} is for services; a batch runs once",
                hint=f'leave out {key}, or write "kind": "service"',
            )


def _requirements(fields: Fields) -> Requirements:
    gpus_milli = parse_gpus(fields.number("gpus", 0, 0, 1024))
    accelerator = fields.text_or_none("accelerator")
    if accelerator is not None:
        fields.one_of("accelerator", ACCELERATOR_KINDS, "")
    models = (fields.text("gpu_model", ""),) if isinstance(fields.raw("gpu_model"), str) else fields.texts("gpu_model")
    memory_mib = fields.whole("gpu_memory_mib", 0, 0, MIB_MAX)
    vendor = fields.text_or_none("vendor")
    for key, value in (("gpu_model", models), ("gpu_memory_mib", memory_mib), ("vendor", vendor)):
        if value and not gpus_milli:
            raise InvalidRequest(
                f"{key}: {shown(fields.raw(key))} says which GPUs, but gpus is 0",
                hint='add "gpus": 1 (or a share such as 0.5)',
            )
    return Requirements(
        accelerator=accelerator,
        gpus_milli=gpus_milli,
        gpu_models=checked_gpu_models("gpu_model", models),
        gpu_memory_mib=memory_mib,
        vendor=vendor,
        cpus_milli=_cpus_milli(fields),
        memory_mib=fields.whole("memory_mib", 0, 0, MIB_MAX),
        labels=fields.text_pairs("labels"),
    )


def _cpus_milli(fields: Fields) -> int:
    cpus = fields.number("cpus", 0, 0, 100_000)
    milli = round(cpus * MILLI)
    if abs(milli - cpus * MILLI) > 1e-6 or (milli == 0 and cpus > 0):
        raise InvalidRequest(f"cpus: {shown(cpus)} is finer than a thousandth", hint="write 4 or 0.5")
    return milli


def _seconds(fields: Fields, key: str) -> float | None:
    return fields.number(key, 0, 0.001, DURATION_MAX) if fields.given(key) else None


def spec_to_json(spec: JobSpec) -> Json:
    """Every key of a specification, as POST /v1/jobs takes it."""
    needs = spec.requirements
    return {
        "kind": spec.kind,
        "name": spec.name,
        "command": list(spec.argv),
        "replicas": spec.replicas,
        "accelerator": needs.accelerator,
        "gpus": share(needs.gpus_milli),
        "gpu_model": list(needs.gpu_models),
        "gpu_memory_mib": needs.gpu_memory_mib,
        "vendor": needs.vendor,
        "cpus": share(needs.cpus_milli),
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


def share(milli: int) -> int | float:
    """Thousandths as people write them: 2, 0.5."""
    return milli // MILLI if milli % MILLI == 0 else milli / MILLI


# --- other bodies ---------------------------------------------------------------------------------------------------


def parse_empty(body: bytes) -> None:
    """No body, or {}."""
    if body.strip():
        Fields(parse_json(body), ())


def parse_restart(body: bytes) -> tuple[int, ...] | None:
    """The replicas to restart; None: all of them."""
    if not body.strip():
        return None
    fields = Fields(parse_json(body), ("replicas",))
    if not fields.given("replicas"):
        return None
    replicas = fields.raw("replicas")
    if not isinstance(replicas, list) or not replicas or len(replicas) > REPLICAS_MAX:
        raise InvalidRequest(
            f"replicas: {shown(replicas)} is not an array of indexes", hint="write [0], or leave it out"
        )
    for index in replicas:
        if not _is_whole(index) or not 0 <= index < REPLICAS_MAX:
            raise InvalidRequest(f"replicas: {shown(index)} is not a replica's index", hint="write [0, 1]")
    return tuple(sorted({int(index) for index in replicas}))


def parse_token(body: bytes) -> tuple[Role, str]:
    """Role and label of a token to be made."""
    fields = Fields(parse_json(body), ("role", "label"))
    if not fields.given("role"):
        raise InvalidRequest("role: is missing", hint="use one of " + ", ".join(ROLES))
    role = cast(Role, fields.one_of("role", ROLES, ""))
    label = fields.text("label", "")
    if not TOKEN_LABEL.fullmatch(label):
        raise InvalidRequest(
            f"label: {shown(label)} is not a label", hint="use at most 200 characters, and no control characters"
        )
    return role, label


def parse_join_token_request(body: bytes) -> tuple[int, float, str]:
    """How many hosts it lets in, for how many seconds, and by which host they are told to join (empty: this one's)."""
    fields = Fields(parse_json(body) if body.strip() else {}, ("uses", "lasts_seconds", "advertise"))
    uses = fields.whole("uses", 1, 1, JOIN_USES_MAX)
    seconds = fields.number("lasts_seconds", JOIN_SECONDS, 1, JOIN_SECONDS_MAX)
    advertise = fields.text("advertise", "").strip("[]")
    if advertise and not HOST.fullmatch(advertise):
        raise InvalidRequest(f"advertise: {shown(advertise)} is no address and no name", hint="write it like 10.0.0.5")
    return uses, seconds, advertise


def parse_node_leaves(body: bytes) -> tuple[NodeId, bool]:
    """Which node leaves, and whether what runs there shall be stopped."""
    fields = Fields(parse_json(body), ("node", "stop_all"))
    return NodeId(fields.text("node", "")), fields.flag("stop_all", False)


def parse_leave(body: bytes) -> bool:
    """Whether everything shall be stopped first."""
    if not body.strip():
        return False
    return Fields(parse_json(body), ("stop_all",)).flag("stop_all", False)


def checked_idempotency_key(key: str) -> str:
    if not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest(
            f"Idempotency-Key: {shown(key)} is not a key", hint="use 1 to 128 printable ASCII characters without spaces"
        )
    return key


# --- errors ---------------------------------------------------------------------------------------------------------

_STATUS_OF_CODE: dict[str, int] = {
    "invalid_request": 400,
    "permission_denied": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "refused": 409,
    "idempotency_conflict": 409,
    "too_large": 413,
    "unsupported_media_type": 415,
    "unreachable": 503,
    "storage_failed": 507,
    "disk_full": 507,
}
_STATUS_OF_KIND: tuple[tuple[type[GpulayerError], int], ...] = (
    (InvalidRequest, 400),
    (PermissionDenied, 403),
    (NotFound, 404),
    (Refused, 409),
    (Unreachable, 503),
    (StorageFailed, 507),
)
_KIND_OF_STATUS: dict[int, type[GpulayerError]] = {
    400: InvalidRequest,
    401: PermissionDenied,
    403: PermissionDenied,
    404: NotFound,
    405: InvalidRequest,
    408: InvalidRequest,
    409: Refused,
    413: InvalidRequest,
    415: InvalidRequest,
    431: InvalidRequest,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
    507: StorageFailed,
}


def status_of(error: GpulayerError) -> int:
    """The HTTP status that fits: by code, else by class."""
    if error.code in _STATUS_OF_CODE:
        return _STATUS_OF_CODE[error.code]
    return next((status for kind, status in _STATUS_OF_KIND if isinstance(error, kind)), 500)


def error_to_json(error: GpulayerError) -> Json:
    return {"code": error.code, "message": error.message, "hint": error.hint}


def error_from_json(document: object, status: int) -> GpulayerError:
    """The error that an answer carries: its class by code, else by status. What a proxy answered is one too."""
    found = document if isinstance(document, Mapping) else {}
    code, message, hint = (found.get(key) for key in ("code", "message", "hint"))
    kind = BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None:
        kind = _KIND_OF_STATUS.get(status, GpulayerError)
    return kind(
        message if isinstance(message, str) and message else f"the node answered with status {status}",
        hint=hint if isinstance(hint, str) else "",
        code=code if isinstance(code, str) and code else None,
    )


# --- answers --------------------------------------------------------------------------------------------------------


def dump(document: object) -> bytes:
    """One document as compact UTF-8 on one line. A lone surrogate (in a file name, say) becomes its JSON escape."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def token_to_json(token: Token) -> Json:
    return {
        "id": token.id,
        "role": token.role,
        "label": token.label,
        "created_at_utc": token.created_at_utc,
        "uses_left": None,
        "expires_at_utc": None,
    }


def join_token_to_json(token: JoinToken) -> Json:
    return {
        "id": token.id,
        "role": "join",
        "label": "",
        "created_at_utc": token.created_at_utc,
        "uses_left": token.uses_left,
        "expires_at_utc": token.expires_at_utc,
    }


def key_ring_to_json(ring: KeyRing) -> Json:
    """Ids and states of the gossip keys; the first one seals."""
    return {
        "version": ring.version,
        "rotation": ring.rotation or None,
        "changed_at_utc": ring.changed_at_utc,
        "ring": [
            {"id": f"{key.id:08x}", "installed_at_utc": key.installed_at_utc, "seals": place == 0}
            for place, key in enumerate(ring.keys)
        ],
    }


def reason_to_json(reason: Reason | None) -> Json | None:
    return None if reason is None else {"code": reason.code, "text": reason.text, "hint": reason.hint}


def exit_to_json(exit: Exit | None) -> Json | None:
    if exit is None:
        return None
    return {
        "run": exit.run,
        "code": exit.code,
        "signal": exit.signal,
        "ended_by": exit.ended_by,
        "ended_at_utc": exit.ended_at_utc,
        "uptime_seconds": exit.uptime_seconds,
        "text": _exit_text(exit),
    }


def _exit_text(exit: Exit) -> str:
    if exit.ended_by == "spawn_failed":
        return "could not be executed"
    if exit.code is not None:
        how = f"exit code {exit.code}"
    elif exit.signal is not None:
        how = f"ended by signal {exit.signal_text}"
    else:
        return f"how it ended is unknown ({exit.ended_by.replace('_', ' ')})"
    why = "" if exit.ended_by == "itself" else f" ({exit.ended_by.removeprefix('stop:').replace('_', ' ')})"
    return f"{how} after {exit.uptime_seconds:.1f} s{why}"


def devices_to_json(devices: Iterable[DeviceShare]) -> list[Json]:
    return [{"uuid": device.uuid, "share": share(device.milli)} for device in devices]


def job_summary(view: JobView, spec: JobSpec) -> Json:
    return {
        "id": view.id,
        "name": view.name,
        "kind": view.kind,
        "state": view.state,
        "reason": reason_to_json(view.reason),
        "revision": view.revision,
        "replicas": len(view.replicas),
        "ready": view.ready,
        "restarts": view.restarts,
        "gpus": share(spec.requirements.gpus_milli),
        "priority": spec.priority,
        "submitted_at_utc": view.submitted_at_utc,
        "ended_at_utc": view.ended_at_utc,
    }


def job_status(
    view: JobView, spec: JobSpec, *, sandboxes: Mapping[int, str], last_lines: Mapping[int, Sequence[str]]
) -> Json:
    """`sandboxes` and `last_lines` by replica, where there is anything to be shown."""
    return job_summary(view, spec) | {
        "command": list(spec.argv),
        "on_replica_end": spec.on_replica_end,
        "replicas": [
            replica_status(replica, sandboxes.get(replica.index), last_lines.get(replica.index, ()))
            for replica in view.replicas
        ],
    }


def replica_status(view: ReplicaView, sandbox: str | None, last_lines: Sequence[str]) -> Json:
    return {
        "index": view.index,
        "state": view.state,
        "reason": reason_to_json(view.reason),
        "next": view.next or None,
        "node": view.node or None,
        "endpoint": str(view.endpoint) if view.endpoint is not None else None,
        "endpoint_verified": view.is_verified if view.endpoint is not None else None,
        "attempt": view.attempt,
        "run": view.run,
        "pid": view.pid,
        "restarts": view.restarts,
        "started_at_utc": view.started_at_utc,
        "ready_since_utc": view.ready_since_utc,
        "next_start_at_utc": view.next_start_at_utc,
        "devices": devices_to_json(view.devices),
        "last_exit": exit_to_json(view.last_exit),
        "warning": reason_to_json(view.warning),
        "sandbox": sandbox,
        "last_lines": list(last_lines),
    }


def event_to_json(event: Event, offset: str, job_name: str, node_name: str) -> Json:
    return {
        "offset": offset,
        "at_utc": event.at_utc,
        "source": event.source,
        "kind": event.kind,
        "job": event.job or None,
        "job_name": job_name or None,
        "replica": event.replica,
        "node": node_name or None,
        "text": event.text,
        "data": dict(event.data),
    }


def accelerator_to_json(device: Accelerator) -> Json:
    """A device as its node knows it, whoever of ours holds it."""
    return {
        "uuid": device.uuid,
        "index": device.index,
        "kind": device.kind,
        "vendor": device.vendor,
        "model": device.model,
        "memory_mib": device.memory_mib,
        "compute_capability": device.compute_capability or None,
        "pci_bus_id": device.pci_bus_id or None,
        "numa_node": device.numa_node,
        "nvlink_peers": list(device.nvlink_peers),
        "parent": device.parent or None,
        "source": device.source,
        "unhealthy": device.unhealthy or None,
        "foreign": device.foreign or None,
        "foreign_share": share(device.foreign_milli),
    }
