"""gpulayer submit: words, or a file, become a request; then the command stays with the job as was asked for."""

# Without `from __future__ import annotations`: cyclopts would have to evaluate the text of each of 35 annotations,
# which takes longer than the request itself.
import os
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.failure import Interrupted, SubmitFailed
from gpulayer.cli.forewarn import forewarn
from gpulayer.cli.options import key_value
from gpulayer.cli.render import clean, note, pairs, say, say_json
from gpulayer.client.calls import Document
from gpulayer.client.requests import RETRY_OF_BATCH, RETRY_OF_SERVICE, JobRequest, Retry, batch, service
from gpulayer.client.sync import Client, Job
from gpulayer.model.errors import GpulayerError, InvalidRequest
from gpulayer.model.units import parse_count, parse_duration

_NEEDS = Group("What a replica needs", sort_key=10)
_POLICY = Group("How it is kept running", sort_key=20)
_PROCESS = Group("The process", sort_key=30)
_SHOW = Group("What this command does", sort_key=40)

# A daemon has its socket a tenth of a second after its data directory, later where a large log is to be read.
_START_SECONDS_MAX = 15.0
_START_LOOK_SECONDS = 0.05


def submit(
    *command: str,
    service: bool = False,
    name: str | None = None,
    replicas: int | None = None,
    file: Annotated[str | None, Parameter(group=_SHOW)] = None,
    accelerator: Annotated[Literal["cuda", "rocm", "mps", "cpu"] | None, Parameter(group=_NEEDS)] = None,
    gpus: Annotated[str | None, Parameter(group=_NEEDS)] = None,
    gpu_model: Annotated[tuple[str, ...], Parameter(group=_NEEDS)] = (),
    gpu_memory: Annotated[str | None, Parameter(group=_NEEDS)] = None,
    vendor: Annotated[str | None, Parameter(group=_NEEDS)] = None,
    cpus: Annotated[str | None, Parameter(group=_NEEDS)] = None,
    memory: Annotated[str | None, Parameter(group=_NEEDS)] = None,
    label: Annotated[tuple[str, ...], Parameter(group=_NEEDS)] = (),
    no_port: Annotated[bool, Parameter(name="--no-port", group=_PROCESS)] = False,
    restart: Annotated[Literal["always", "on_failure", "never"] | None, Parameter(group=_POLICY)] = None,
    max_restarts: Annotated[int | None, Parameter(group=_POLICY)] = None,
    retry_max_attempts: Annotated[int | None, Parameter(group=_POLICY)] = None,
    spread: Annotated[Literal["node", "any"] | None, Parameter(group=_POLICY)] = None,
    priority: Annotated[int | None, Parameter(group=_POLICY)] = None,
    on_replica_end: Annotated[Literal["stop", "keep"] | None, Parameter(group=_POLICY)] = None,
    timeout: Annotated[str | None, Parameter(group=_POLICY)] = None,
    start_timeout: Annotated[str | None, Parameter(group=_POLICY)] = None,
    env: Annotated[tuple[str, ...], Parameter(group=_PROCESS)] = (),
    env_file: Annotated[tuple[str, ...], Parameter(group=_PROCESS)] = (),
    workdir: Annotated[str | None, Parameter(group=_PROCESS)] = None,
    stop_signal: Annotated[str | None, Parameter(group=_PROCESS)] = None,
    stop_grace: Annotated[str | None, Parameter(group=_PROCESS)] = None,
    target: Annotated[Literal["remote", "local"] | None, Parameter(group=_SHOW)] = None,
    wait: Annotated[str | None, Parameter(group=_SHOW)] = None,
    detach: Annotated[bool, Parameter(group=_SHOW)] = False,
    dry_run: Annotated[bool, Parameter(group=_SHOW)] = False,
    json: Annotated[bool, Parameter(group=_SHOW)] = False,
    connection: Connection = LOCAL,
) -> int:
    """Hand in a command: gpulayer submit [options] -- CMD ARG…

    A service's submit returns when every replica is ready and prints the job's id and one host:port per replica. A
    batch stays attached, shows its output, and returns at its end with its exit code (128+n for a signal, 125 where it
    has none). Ctrl-C leaves the job running, unless it runs here (--target local).

    Parameters
    ----------
    command
        The program and its arguments, as they are; no shell reads them.
    service
        Keep it running; left out, it is a batch and runs to its end.
    name
        Unique among live jobs; left out, made from the command.
    replicas
        Copies, each on a node of its own, see --spread (default 1).
    file
        Read the job from this TOML file: the options' names as keys, and `command`; options given here win.
    accelerator
        Kind of device (default: any if --gpus is given, else none).
    gpus
        Per replica, e.g. 2, or 0.5 for a share of one (default 0).
    gpu_model
        Pattern, e.g. '*A100*'; repeat it for several, one of which must match.
    gpu_memory
        Each GPU has at least this, e.g. 24GiB.
    vendor
        Who made the device: nvidia, amd or apple.
    cpus
        CPUs per replica, e.g. 4 or 0.5.
    memory
        Memory per replica, e.g. 16GiB.
    label
        K=V that the node must have; repeat it for several.
    no_port
        Do not pick a port; else the node sets $PORT and the service must listen on it.
    restart
        When a service's run has ended, start a new one (default always).
    max_restarts
        Restarts per replica before it has ended for good (default: no limit).
    retry_max_attempts
        Times a replica is placed again after its node was lost (default 10, for a batch 0).
    spread
        node puts each replica on another node, any only prefers that (default node).
    priority
        0 to 100, higher first in the queue (default 50).
    on_replica_end
        When a replica has ended for good, stop the others, or keep them (default stop).
    timeout
        End it after this long, e.g. 24h (default: no limit).
    start_timeout
        A run that is not ready after this, e.g. 15m, is ended, and restarted by the policy (default: no limit).
    env
        K=V, or K for the value it has here; repeat it for several.
    env_file
        File of such lines; # begins a comment. --env wins over it.
    workdir
        Directory to run in, on the node, e.g. . for this one (default: a sandbox of its own).
    stop_signal
        Signal that asks it to stop (default TERM).
    stop_grace
        Time between that signal and KILL (default 10s).
    target
        remote hands it to a daemon; local runs it here, in the foreground, without one: Ctrl-C stops it (default:
        remote if a URL is given or a daemon's socket is there, else local).
    wait
        Wait no longer than this, e.g. 5m, to be ready (a batch: to end); exit code 124 after it, and the job goes on
        (with --target local it is stopped).
    detach
        Print the id and return.
    dry_run
        Say where it would go now, and why not elsewhere; submit nothing.
    json
        One JSON document.
    """
    asked = _asked(locals())
    keys = asked if file is None else _merged(_from_file(file), asked)
    is_attached_batch = not keys.get("service") and not detach and not dry_run
    try:
        if is_attached_batch and json:
            raise InvalidRequest("--json does not go with a batch that shows its output", hint="add --detach")
        if detach and wait is not None:
            raise InvalidRequest("--wait and --detach exclude each other", hint="leave out one of them")
        wait_seconds = None if wait is None else parse_duration(wait, "wait")
        request = request_from_keys(keys)
        if _is_for_here(target, connection, detach=detach):
            return _submit_here(request, connection, wait_seconds, dry_run=dry_run, json=json)
        client = connection.client()
        _check_workdir(request, is_local=client.is_local)
        forewarn(request.spec, client)
        if dry_run:
            return _say_dry_run(client.dry_run(request), json=json)
        answer = _submitted(client, request)
        job = Job(client, answer["id"], answer["name"])
        return _detach(job, answer, json=json) if detach else _stay(job, request, wait_seconds, json=json)
    except GpulayerError as error:
        raise SubmitFailed(error, is_attached_batch=is_attached_batch) from error


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of the options that describe the job, as the keys of a job file."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in options.items()
        if key in _FILE_KEYS and value is not None and value is not False and value != ()
    }


def _is_for_here(target: Literal["remote", "local"] | None, connection: Connection, *, detach: bool) -> bool:
    if target == "local" and connection.url:
        raise InvalidRequest("--url and --target local exclude each other", hint="leave out one of them")
    if target == "local" and detach:
        raise InvalidRequest(
            "--detach does not go with --target local: nobody would be there to look after the job",
            hint="start a daemon with `gpulayer up`, or leave out one of them",
        )
    if target == "local" and connection.token:
        raise InvalidRequest("--token and --target local exclude each other", hint="leave out one of them")
    if target == "local":
        return True
    if connection.names_a_daemon() or _has_started(connection) or target == "remote" or detach:
        return False
    note("no daemon here: runs in the foreground; `gpulayer up` starts one")
    return True


def _has_started(connection: Connection) -> bool:
    """Waits for the socket of a daemon that was started a moment ago; False where there is no such daemon."""
    pid = connection.starting_daemon()
    if pid is None:
        return False
    note(f"note: a daemon (pid {pid}) is starting: waiting for it")
    deadline = time.monotonic() + _START_SECONDS_MAX
    while time.monotonic() < deadline and not connection.names_a_daemon():
        if connection.starting_daemon() is None:
            return False
        time.sleep(_START_LOOK_SECONDS)
    return True


def _submit_here(
    request: JobRequest, connection: Connection, wait_seconds: float | None, *, dry_run: bool, json: bool
) -> int:
    from gpulayer.cli.local import asked_here, run_here

    _check_workdir(request, is_local=True)
    if dry_run:
        with asked_here(connection) as client:
            return _say_dry_run(client.dry_run(request), json=json)
    return run_here(connection, request, wait_seconds, json=json)


def _submitted(client: Client, request: JobRequest) -> Document:
    try:
        return client.submit_document(request)
    except KeyboardInterrupt:
        raise Interrupted(
            f"the daemon had not said yet whether it took the job {request.spec.name}",
            hint="if it did, it goes on: see gpulayer job list",
        ) from None


def _detach(job: Job, answer: Document, *, json: bool) -> int:
    if json:
        say_json(answer)
    else:
        say(answer["id"])
    _say_warning(answer.get("warning"))
    return 0


def _stay(job: Job, request: JobRequest, wait_seconds: float | None, *, json: bool) -> int:
    try:
        from gpulayer.cli.follow import until_ended, until_ready

        if request.spec.kind == "batch":
            return until_ended(job, wait_seconds, replicas=request.spec.replicas)
        until_ready(job, wait_seconds, is_restarted_for_ever=_is_restarted_for_ever(request), json=json)
        return 0
    except KeyboardInterrupt:
        # Before it was stayed with, but after it was accepted.
        from gpulayer.cli.follow import left_running

        raise left_running(job) from None


def _is_restarted_for_ever(request: JobRequest) -> bool:
    return request.spec.max_restarts is None and request.spec.restart == "always"


def _say_warning(reason: Document | None) -> None:
    """What will keep it waiting until a person does something; None: nothing."""
    if reason:
        waits = "" if reason["code"] == "never_fits" else "it waits: "
        note(f"warning: {waits}{clean(reason['text'])}")
        note(f"hint: {clean(reason['hint'])}")


def _say_dry_run(found: Document, *, json: bool) -> int:
    """Exit code 0 where it fits, else 1: the answer to a question, so no error is told."""
    if json:
        say_json(found)
        _say_warning(found.get("warning"))
        return 0 if found["fits"] else 1
    for replica in found["replicas"]:
        devices = ",".join(device["uuid"] for device in replica["devices"])
        say(pairs(replica=replica["index"], node=replica["node"] or "none", devices=devices or None))
        for refusal in replica["refusals"]:
            say(f"  not on {clean(refusal['node'])}: {refusal['code']}: {clean(refusal['text'])}")
    say(clean(found["summary"]))
    if found.get("warning"):
        note(f"hint: {clean(found['warning']['hint'])}")
    return 0 if found["fits"] else 1


def _check_workdir(request: JobRequest, *, is_local: bool) -> None:
    workdir = request.spec.workdir
    if workdir is not None and is_local and not os.path.isdir(workdir):
        what = "is not a directory" if os.path.exists(workdir) else "does not exist"
        raise InvalidRequest(f"workdir: {workdir} {what}", hint="make it first, or leave --workdir out for a sandbox")


# --- keys to a request --------------------------------------------------------------------------------------------


def request_from_keys(keys: Mapping[str, Any]) -> JobRequest:
    """The request that options, or a file's keys, ask for. The keys are the options' names with underscores."""
    is_service = bool(keys.get("service"))
    if not keys.get("command"):
        raise InvalidRequest(
            "there is no command", hint="write it after --, as in: gpulayer submit --workdir . -- python train.py"
        )
    made: dict[str, Any] = {
        "name": keys.get("name"),
        "labels": dict(key_value("label", text) for text in keys.get("label", ())),
        "env": _environment(keys),
        "retry": RETRY_OF_SERVICE if is_service else RETRY_OF_BATCH,
    }
    for key, read in _READ.items():
        if keys.get(key) is not None:
            made[_PYTHON_NAMES.get(key, key)] = read(keys[key])
    if "no_port" in keys:
        made["port"] = not keys["no_port"]
    if is_service:
        return _in_our_words(lambda: service(keys["command"], **made))
    # A batch has no port anyway; the words for the other three are those that a service would have needed.
    made.pop("port", None)
    for key in ("restart", "max_restarts", "start_timeout_seconds"):
        if key == "restart" and made.get(key) == "never":
            del made[key]
        elif key in made:
            option = key.removesuffix("_seconds").replace("_", "-")
            raise InvalidRequest(f"{option} is for services; a batch runs once", hint="add --service, or leave it out")
    return _in_our_words(lambda: batch(keys["command"], **made))


def _in_our_words(make: Callable[[], JobRequest]) -> JobRequest:
    """What is wrong is said in Python's words; its cause has the command line's."""
    try:
        return make()
    except InvalidRequest as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        raise


def _plain(value: Any) -> Any:
    return value


_READ: Mapping[str, Callable[[Any], Any]] = {
    "replicas": lambda value: parse_count(value, "replicas", least=1, most=10_000),
    "accelerator": _plain,
    "gpus": _plain,
    "gpu_model": _plain,
    "gpu_memory": _plain,
    "vendor": _plain,
    "cpus": _plain,
    "memory": _plain,
    "workdir": _plain,
    "restart": _plain,
    "max_restarts": _plain,
    "retry_max_attempts": lambda value: Retry(max_attempts=value),
    "spread": _plain,
    "priority": _plain,
    "on_replica_end": _plain,
    "timeout": lambda value: parse_duration(value, "timeout"),
    "start_timeout": lambda value: parse_duration(value, "start-timeout"),
    "stop_signal": _plain,
    "stop_grace": lambda value: parse_duration(value, "stop-grace"),
}
_PYTHON_NAMES = {
    "timeout": "timeout_seconds",
    "start_timeout": "start_timeout_seconds",
    "stop_grace": "stop_grace_seconds",
    "retry_max_attempts": "retry",
}


def _environment(keys: Mapping[str, Any]) -> dict[str, str]:
    made: dict[str, str] = {}
    for path in keys.get("env_file", ()):
        for number, line in enumerate(_read_text(path, "env-file").splitlines(), start=1):
            text = line.strip()
            if text and not text.startswith("#"):
                what = f"env-file {path}, line {number}"
                name, value = _variable(text, what)
                if not name or any(char.isspace() for char in name):
                    raise InvalidRequest(f"{what}: {name!r} is not a variable's name", hint="write NAME=VALUE")
                made[name] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    made.update(_variable(text, "env") for text in keys.get("env", ()))
    return made


def _variable(text: str, what: str) -> tuple[str, str]:
    """`K=V`, or `K` for the value that it has here."""
    name, separator, value = text.partition("=")
    if separator:
        return name.strip(), value
    if text not in os.environ:
        raise InvalidRequest(f"{what}: {text} is not set here", hint=f"write {text}=VALUE")
    return text, os.environ[text]


# --- a job in a file ----------------------------------------------------------------------------------------------

# Options that are not the job's.
_OF_THE_COMMAND = ("target", "wait", "detach", "dry_run", "json", "file", "url", "token", "data_dir")
# Key -> what a TOML value must be. Nothing is guessed: `replicas = "2"` is refused as `--replicas two` is.
_FILE_KEYS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "command": ((list,), 'an array of words, like ["python", "train.py"]'),
    "service": ((bool,), "true or false"),
    "no_port": ((bool,), "true or false"),
    "port": ((bool,), "true or false"),
    "replicas": ((int,), "a whole number"),
    "max_restarts": ((int,), "a whole number"),
    "retry_max_attempts": ((int,), "a whole number"),
    "priority": ((int,), "a whole number"),
    "gpus": ((int, float), "a number"),
    "cpus": ((int, float), "a number"),
    "gpu_model": ((str, list), "a pattern, or an array of them"),
    "label": ((str, list, dict), 'a table, or an array like ["zone=a"]'),
    "labels": ((dict,), "a table"),
    "env": ((dict, list), 'a table, or an array like ["K=V"]'),
    "env_file": ((str, list), "a path, or an array of them"),
    **{
        key: ((str,), "text in quotes")
        for key in (
            "name",
            "accelerator",
            "gpu_memory",
            "vendor",
            "memory",
            "restart",
            "spread",
            "on_replica_end",
            "timeout",
            "start_timeout",
            "workdir",
            "stop_signal",
            "stop_grace",
        )
    },
}


def _from_file(path: str) -> dict[str, Any]:
    """The keys of a job file, in the form that the options have. Paths in it count from where the file is."""
    import tomllib

    try:
        table = tomllib.loads(_read_text(path, "file"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is not TOML: {error}", hint="mend that line") from error
    keys: dict[str, Any] = {}
    for written, value in table.items():
        key = written.replace("-", "_")
        if key not in _FILE_KEYS:
            from gpulayer.wire.http import nearest

            if key in _OF_THE_COMMAND:
                hint = f"it is for the command line: --{key.replace('_', '-')}"
                raise InvalidRequest(f"{path}: {written} is no key of a job", hint=hint)
            shown = [known.replace("_", "-") if "-" in written else known for known in _FILE_KEYS]
            raise InvalidRequest(f"{path}: unknown key {written!r}", hint=nearest(written, shown))
        if key in keys:
            raise InvalidRequest(f"{path}: {written} is given twice, with - and with _", hint="leave out one of them")
        kinds, wanted = _FILE_KEYS[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InvalidRequest(f"{path}: {written} = {value!r} is not {wanted}", hint=f"{written} takes {wanted}")
        keys[key] = value
    return _as_options(keys, path)


def _as_options(keys: dict[str, Any], path: str) -> dict[str, Any]:
    directory = os.path.dirname(os.path.abspath(path))
    if "port" in keys:
        keys["no_port"] = not keys.pop("port")
    if "labels" in keys:
        keys["label"] = keys.pop("labels")
    for key in ("label", "env"):
        if isinstance(keys.get(key), dict):
            keys[key] = [f"{name}={_text(value, f'{path}: {key}.{name}')}" for name, value in keys[key].items()]
    for key in ("label", "env", "gpu_model", "env_file"):
        if isinstance(keys.get(key), str):
            keys[key] = [keys[key]]
    for key in ("command", "label", "env", "gpu_model", "env_file"):
        if key in keys:
            keys[key] = [_text(item, f"{path}: {key}") for item in keys[key]]
    if "env_file" in keys:
        keys["env_file"] = [os.path.join(directory, item) for item in keys["env_file"]]
    if keys.get("workdir"):
        keys["workdir"] = os.path.join(directory, os.path.expanduser(keys["workdir"]))
    return keys


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{what}: {value!r} is not text", hint=f'write it in quotes, as in "{value}"')
    return value


def _merged(from_file: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What is typed wins. Variables and labels are won one by one, as their names are; the rest key by key."""
    merged = from_file | dict(flags)
    for key in ("env", "env_file", "label"):
        if key in from_file and key in flags:
            merged[key] = [*from_file[key], *flags[key]]
    return merged


def _read_text(path: str, what: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise InvalidRequest(f"{what}: cannot read {path}: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what}: {path} is not UTF-8", hint="write it in UTF-8") from error
