"""What `gpulayer up` is told: flags over environment over file, checked once, frozen.

An unknown key is an error that names the nearest known one; nothing is started with half a configuration.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpulayer.model.address import Address, split_host_port
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import NodeId, checked_name
from gpulayer.model.job import sorted_pairs
from gpulayer.model.places import API_PORT, CONFIG_PATH, PEER_PORT, default_data_dir
from gpulayer.model.units import MILLI, parse_count, parse_size
from gpulayer.runtime.accelerators.declared import declared_accelerators
from gpulayer.runtime.accelerators.exclude import checked_exclusions
from gpulayer.runtime.routes import default_source
from gpulayer.wire.join_token import JoinTokenText, parse_join_token

LOG_FORMATS = ("auto", "json", "text")

# Outside the range from which Linux takes ephemeral ports by default (32768-60999, ip(7)), so that an outgoing
# connection never holds a port that a replica is about to be given.
SERVICE_PORTS = (20000, 29999)
# More than this are not tried, each with every address that its name has.
SEEDS_MAX = 16
_TOKEN_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The flags of `gpulayer up`, as typed; None where a flag was left out."""

    data_dir: str | None = None
    bind: str | None = None
    advertise: str | None = None
    api_port: int | None = None
    peer_port: int | None = None
    join: tuple[str, ...] = ()
    join_token: str | None = field(default=None, repr=False)
    join_token_file: str | None = None
    name: str | None = None
    config: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    log_format: str | None = None
    abandon_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another node of the same configuration: declared devices are the same ones for both."""

    data_dir: Path
    node_id: NodeId


@dataclass(frozen=True, slots=True, order=True)
class Seed:
    """A node that is asked to be let in by. `host` is an IP address or a name, looked up anew at each try."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    data_dir: Path
    bind: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    """Empty: the address that the way to a seed shows (node/joining.py)."""
    api_port: int | None = API_PORT
    """None: only the unix socket."""
    peer_port: int | None = PEER_PORT
    """Of datagrams and links from other nodes, on `bind`; 0: any that is free; None: no other node is spoken to."""
    seeds: tuple[Seed, ...] = ()
    join_token: JoinTokenText | None = None
    join_token_file: str = ""
    """Where it is to be, if it is not there any more."""
    name: str
    name_is_derived: bool = False
    """From the host's: where it is in use, the cluster adds a number."""
    labels: tuple[tuple[str, str], ...] = ()
    accelerators: tuple[Mapping[str, Any], ...] = ()
    devices_excluded: tuple[str, ...] = ()
    """UUIDs, PCI bus ids, models, or patterns of them (runtime/accelerators/exclude.py)."""
    foreign_processes: Literal["skip", "allow"] = "skip"
    cpus_milli: int | None = None
    """None: what this process may use."""
    memory_mib: int | None = None
    log_max_bytes: int = 10 * 2**20
    log_keep: int = 3
    cgroups: Literal["auto", "off"] = "auto"
    service_ports: tuple[int, int] = SERVICE_PORTS
    snapshot_every: int = 1000
    """Log entries between two snapshots."""
    disk_free_min_mib: int = 64
    log_format: str = "auto"
    abandon_state: bool = False
    shares_devices_with: Neighbour | None = None
    tethered: bool = False
    """Replicas end when this process does, however it ends (private.py)."""
    first_look_seconds: float = 1.5
    """So long the first answer of the driver is waited for. It takes a tenth of a second; one that hangs must not keep
    the daemon from answering itself."""
    observed_seconds: float = 10.0
    """At least so long lies between two changes of what the node has that are committed: each is a log entry."""
    warnings: tuple[str, ...] = field(default=())


# Key -> what it must be. A nested table is a mapping.
_KNOWN: Mapping[str, Any] = {
    "data_dir": str,
    "bind": str,
    "advertise": str,
    "api_port": int,
    "peer_port": int,
    "join": list,
    "join_token_file": str,
    "name": str,
    "log_format": str,
    "labels": dict,
    "accelerators": list,
    "devices": {"exclude": list, "foreign_processes": str},
    "resources": {"cpus": (int, float), "memory": str},
    "logs": {"max_bytes": (int, str), "keep": int},
    "supervision": {"cgroups": str, "service_ports": str},
    "storage": {"snapshot_every": int, "free_min": str},
}
_ARRAYS_OF_TABLES = ("accelerators",)
_ENVIRONMENT = ("data_dir", "bind", "advertise", "api_port", "peer_port", "join_token_file", "name", "log_format")
# Read elsewhere: by the client, by the tests' failpoints, or set by a replica's own supervisor.
_OTHER_ENVIRONMENT = ("config", "url", "token", "ca_file", "failpoints", "join", "join_token")


def load_config(options: UpOptions, environ: Mapping[str, str], *, uid: int) -> Config:
    """Merge and check. Raises InvalidRequest naming the key, the value and where it came from."""
    path = options.config or environ.get("GPULAYER_CONFIG") or (CONFIG_PATH if os.path.exists(CONFIG_PATH) else "")
    table = _read_file(path) if path else {}
    warnings = list(_unknown_environment(environ))
    merged: dict[str, Any] = {key: table[key] for key in _ENVIRONMENT if key in table}
    for key in _ENVIRONMENT:
        text = environ.get(f"GPULAYER_{key.upper()}")
        if text:
            merged[key] = text
        flag = getattr(options, key)
        if flag is not None:
            merged[key] = flag
    data_dir = merged.get("data_dir") or default_data_dir(environ, uid)
    seeds = _seeds(options, environ, table)
    bind = _checked_address("bind", str(merged.get("bind", "127.0.0.1")))
    advertise = _advertise(bind, merged.get("advertise"), has_seeds=bool(seeds))
    log_format = str(merged.get("log_format", "auto"))
    if log_format not in LOG_FORMATS:
        raise InvalidRequest(f"log_format: {log_format!r} is unknown", hint="use one of " + ", ".join(LOG_FORMATS))
    labels = _checked_labels({**table.get("labels", {}), **dict(options.labels)})
    resources, logs = table.get("resources", {}), table.get("logs", {})
    supervision, storage = table.get("supervision", {}), table.get("storage", {})
    cgroups = supervision.get("cgroups", "auto")
    if cgroups not in ("auto", "off"):
        raise InvalidRequest(f"supervision.cgroups: {cgroups!r} is unknown", hint="use auto or off")
    accelerators = tuple(table.get("accelerators", ()))
    devices = table.get("devices", {})
    foreign_processes = devices.get("foreign_processes", "skip")
    if foreign_processes not in ("skip", "allow"):
        raise InvalidRequest(
            f"{path}: devices.foreign_processes: {foreign_processes!r} is unknown", hint="use skip or allow"
        )
    try:
        # Only to be told here, with the file's name, what is wrong with them: the node's id is not known yet.
        declared_accelerators(accelerators, node_id=NodeId("n-0"))
        devices_excluded = checked_exclusions(devices.get("exclude", []))
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", hint=error.hint) from error
    return Config(
        data_dir=_checked_data_dir(data_dir),
        bind=bind,
        advertise=advertise,
        api_port=parse_count(merged.get("api_port", API_PORT), "api_port", least=0, most=65535),
        peer_port=parse_count(merged.get("peer_port", PEER_PORT), "peer_port", least=0, most=65535),
        seeds=seeds,
        join_token=_join_token(options, environ, merged.get("join_token_file")),
        join_token_file=str(merged.get("join_token_file") or ""),
        name=checked_name(str(merged["name"])) if merged.get("name") else _host_name(),
        name_is_derived=not merged.get("name"),
        labels=labels,
        accelerators=accelerators,
        devices_excluded=devices_excluded,
        foreign_processes=foreign_processes,
        cpus_milli=_checked_cpus(resources["cpus"]) if "cpus" in resources else None,
        memory_mib=parse_size(resources["memory"], "resources.memory") if "memory" in resources else None,
        log_max_bytes=_checked_bytes(logs.get("max_bytes", 10 * 2**20)),
        log_keep=parse_count(logs.get("keep", 3), "logs.keep", least=2, most=1000),
        cgroups=cgroups,
        service_ports=_checked_ports(supervision.get("service_ports", "20000-29999")),
        snapshot_every=parse_count(storage.get("snapshot_every", 1000), "storage.snapshot_every", least=1),
        disk_free_min_mib=parse_size(storage.get("free_min", "64MiB"), "storage.free_min"),
        log_format=log_format,
        abandon_state=options.abandon_state,
        warnings=tuple(warnings),
    )


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the configuration {path}: {error.strerror}", hint="name a readable file with --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the configuration {path} is not TOML: {error}", hint="mend that line") from error
    _check_keys(table, _KNOWN, path, "")
    return table


def _check_keys(table: Mapping[str, Any], known: Mapping[str, Any], path: str, prefix: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise InvalidRequest(f"{path}: unknown key {prefix + key!r}", hint=_nearest(key, known, prefix))
        wanted = known[key]
        if isinstance(wanted, Mapping):
            if not isinstance(value, dict):
                raise InvalidRequest(f"{path}: {prefix + key} is not a table", hint=f"write it as [{prefix + key}]")
            _check_keys(value, wanted, path, f"{prefix}{key}.")
        elif not isinstance(value, wanted) or isinstance(value, bool):
            names = wanted if isinstance(wanted, tuple) else (wanted,)
            expected = " or ".join(
                {str: "text", int: "a whole number", float: "a number", dict: "a table", list: "a list"}[kind]
                for kind in names
            )
            raise InvalidRequest(
                f"{path}: {prefix + key} = {value!r} is not {expected}", hint=_how_to_write(prefix, key, names[0])
            )
        elif prefix + key in _ARRAYS_OF_TABLES and not all(isinstance(item, dict) for item in value):
            raise InvalidRequest(
                f"{path}: {prefix + key} is not an array of tables", hint=f"write each as [[{prefix + key}]]"
            )


def _how_to_write(prefix: str, key: str, kind: type) -> str:
    if kind is list and prefix + key in _ARRAYS_OF_TABLES:
        return f"write each as [[{key}]]"
    if kind is list:
        return f'write {key} = ["…"]' + (f" below [{prefix[:-1]}]" if prefix else "")
    if kind is dict:
        return f"write it as [{prefix + key}]"
    return f'write it in quotes: {key} = "…"' if kind is str else f"write it without quotes: {key} = 4"


def _nearest(key: str, known: Iterable[str], prefix: str = "") -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"did you mean {prefix + near[0]}?" if near else "known keys: " + ", ".join(prefix + name for name in names)


def _unknown_environment(environ: Mapping[str, str]) -> Iterable[str]:
    """A misspelt variable would silently do nothing, so it is told; a replica's own variables are known."""
    known = {f"GPULAYER_{key.upper()}" for key in (*_ENVIRONMENT, *_OTHER_ENVIRONMENT)}
    inherited = re.compile(r"GPULAYER_(JOB_ID|JOB_NAME|REPLICA|REPLICAS|RUN_ID|NODE|SANDBOX|TEST_.*|KILLS)")
    for name in sorted(environ):
        if name.startswith("GPULAYER_") and name not in known and not inherited.fullmatch(name):
            yield f"the environment variable {name} is not a setting of gpulayer: {_nearest(name, known)}"


def _checked_data_dir(text: str) -> Path:
    path = os.path.abspath(os.path.expanduser(text))
    # It stands in reasons, which are text: they go into the log, and to people as JSON.
    if not path.isprintable():
        raise InvalidRequest(f"data_dir: {text!r} is not printable text", hint="choose another one with --data-dir")
    return Path(path)


def _checked_labels(labels: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    for key, value in labels.items():
        if not re.fullmatch(r"[A-Za-z0-9._/-]{1,63}", key):
            raise InvalidRequest(
                f"label: {key!r} is not a label's name", hint="use 1 to 63 of A-Z, a-z, 0-9, . _ / and -"
            )
        if not str(value).isprintable():
            raise InvalidRequest(f"label {key}: {value!r:.80} is not printable text", hint="write it like zone=a")
    return sorted_pairs({key: str(value) for key, value in labels.items()})


def _seeds(options: UpOptions, environ: Mapping[str, str], table: Mapping[str, Any]) -> tuple[Seed, ...]:
    """Those of the flags, else of $GPULAYER_JOIN (with commas between), else of the file."""
    texts = list(options.join) or [text for text in environ.get("GPULAYER_JOIN", "").split(",") if text.strip()]
    texts = texts or table.get("join", [])
    if len(texts) > SEEDS_MAX:
        raise InvalidRequest(f"join: {len(texts)} addresses, {SEEDS_MAX} at most", hint="a few are enough to find all")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidRequest(f"join: {text!r} is not HOST:PORT", hint='write it like join = ["10.0.0.5:7451"]')
    return tuple(dict.fromkeys(_seed(text.strip()) for text in texts))


def _seed(text: str) -> Seed:
    host, port = split_host_port(text, PEER_PORT, "join")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # A trailing dot is the root of names; a name of digits and dots only is a mistyped address.
        if re.fullmatch(r"[0-9.]+", host) or not re.fullmatch(r"[A-Za-z0-9._-]+", host):
            raise InvalidRequest(f"join: {host!r} is no address and no name", hint="write it like n1:7451") from None
        return Seed(host, port)
    if address.is_unspecified or address.is_multicast:
        raise InvalidRequest(f"join: {host} is not the address of a node", hint="write it like 10.0.0.5:7451")
    return Seed(str(address), port)


def _join_token(options: UpOptions, environ: Mapping[str, str], file: object) -> JoinTokenText | None:
    """Of the flags, else of $GPULAYER_JOIN_TOKEN, else of the file that a flag, the environment or the configuration
    names. What it is stands in no error."""
    if options.join_token is not None and options.join_token_file is not None:
        raise InvalidRequest("--token and --token-file are both given", hint="leave out one of them")
    text = options.join_token
    if text is None and options.join_token_file is None:
        text = environ.get("GPULAYER_JOIN_TOKEN") or None
    if text is None and file:
        # One that the configuration names is taken away once the node has joined; way_in() asks for it if it is needed.
        text = _read_token_file(str(file), may_lack=options.join_token_file is None)
    return parse_join_token(text.strip()) if text is not None else None


def _read_token_file(path: str, *, may_lack: bool) -> str | None:
    try:
        with open(path, "rb") as opened:
            return opened.read(_TOKEN_BYTES_MAX).decode("ascii", "replace")
    except OSError as error:
        if may_lack and isinstance(error, FileNotFoundError):
            return None
        raise InvalidRequest(
            f"cannot read the join token in {path}: {error.strerror}", hint="name a readable file with --token-file"
        ) from error


def _advertise(bind: str, asked: object, *, has_seeds: bool) -> str:
    """The address that others are told. Empty: the way to a seed is to show it."""
    is_loopback = ipaddress.ip_address(bind).is_loopback
    if asked:
        advertise = _checked_address("advertise", str(asked))
        if not is_loopback and not Address(advertise, 1).is_usable_elsewhere:
            raise InvalidRequest(
                f"advertise: no other host can reach {advertise}, and this node listens on {bind}",
                hint="name an address that others reach this host at; a cluster on one host needs no --bind",
            )
        return advertise
    if not ipaddress.ip_address(bind).is_unspecified:
        if not is_loopback and not Address(bind, 1).is_usable_elsewhere:
            raise InvalidRequest(
                f"bind: {bind} is link-local, which other hosts cannot be told",
                hint="name another one with --advertise",
            )
        return bind
    if has_seeds:
        return ""
    found = default_source()
    if found is None:
        raise InvalidRequest(
            f"advertise: bind is {bind}, and this host has no default route that would tell which of its addresses "
            "the others reach",
            hint="name it with --advertise",
        )
    return found


def _checked_address(what: str, text: str) -> str:
    if text == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        raise InvalidRequest(f"{what}: {text!r} is not an IP address", hint="write it like 127.0.0.1") from None
    if address.is_multicast or "%" in str(address):
        raise InvalidRequest(f"{what}: {text!r} is multicast or has a scope", hint="write it like 127.0.0.1")
    return str(address)


def _checked_cpus(value: float) -> int:
    if not 0 < value <= 100_000:
        raise InvalidRequest(
            f"resources.cpus: {value} is not between 0 and 100000", hint="leave it out to use what there is"
        )
    return round(value * MILLI)


def _checked_bytes(value: int | str) -> int:
    number = parse_size(value, "logs.max_bytes") * 2**20 if isinstance(value, str) else value
    # A segment must hold one whole chunk as it is read from the pipe.
    if not 64 * 1024 <= number <= 2**40:
        raise InvalidRequest(f"logs.max_bytes: {value} is not between 64 KiB and 1 TiB", hint='write it like "10MiB"')
    return number


def _checked_ports(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= low <= high <= 65535:
        raise InvalidRequest(
            f"supervision.service_ports: {text!r} is not a range of ports", hint='write it like "20000-29999"'
        )
    return low, high


def _host_name() -> str:
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().split(".")[0].lower()).strip("-")[:63]
    return name or "node"
