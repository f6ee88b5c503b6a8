"""`gpulayer up`, from the configuration to a daemon that runs, and from its end to an exit code.

What can be refused is refused first; then this node's place is found (a new cluster, the one it is of, or one that it
asks to be let into), and what a daemon works on is opened, and closed after it.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import structlog
import trio

from gpulayer.api.server import BoundSockets, bind_sockets
from gpulayer.model.errors import GpulayerError, InvalidRequest
from gpulayer.model.ids import NodeId
from gpulayer.model.node import Capabilities
from gpulayer.model.places import SOCKET_NAME
from gpulayer.node.config import Config, UpOptions, load_config
from gpulayer.node.daemon import SHUTDOWN_SECONDS, Daemon
from gpulayer.node.facade import Facade
from gpulayer.node.joining import Applicant, join, keep, shown_to, way_in
from gpulayer.node.notify import ServiceNotifier
from gpulayer.node.voter import open_voter
from gpulayer.runtime.accelerators.declared import declared_accelerators
from gpulayer.runtime.accelerators.survey import DriverAsked, survey
from gpulayer.runtime.event_store import EventStore, open_event_store
from gpulayer.runtime.host import detect_host
from gpulayer.runtime.identity import DataDir, check_cluster, membership, open_data_dir
from gpulayer.runtime.peer_cache import PeerCache
from gpulayer.runtime.peer_greeting import ask_to_join
from gpulayer.runtime.peer_sockets import PeerSockets, bind_peer_sockets
from gpulayer.runtime.telemetry import configure_logs
from gpulayer.runtime.trust_files import TrustFiles

log = structlog.get_logger()


def run(options: UpOptions) -> int:
    """`gpulayer up`: returns the exit code, or raises a GpulayerError that says why it could not start."""
    # A signal that the caller blocked would never end us.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    config = load_config(options, os.environ, uid=os.getuid())
    # Whatever the caller's is: nobody else may write where the data directory lies, and we ourselves always may.
    os.umask(0o077)
    configure_logs(config.log_format)
    notifier = ServiceNotifier(os.environ)
    return trio.run(_main, config, notifier)


async def _main(config: Config, notifier: ServiceNotifier) -> int:
    # What can be refused without touching anything comes first: no half start.
    declared_accelerators(config.accelerators, node_id=NodeId("n-0"))
    with (
        open_data_dir(config.data_dir, abandon_state=config.abandon_state) as data,
        bind_sockets(unix_path=data.path / SOCKET_NAME, host=config.bind, port=config.api_port) as sockets,
        _peer_sockets(config) as peers,
    ):
        for text in data.warnings:
            log.warning("data_dir.changed", text=text)
        if peers is not None and way_in(config, data) == "join":
            notifier.send("STATUS=asking to be let into the cluster")
            config = await _join(config, data, peers.port)
        return await run_node(_settled(config, data), data, sockets, peers, notifier, beside=_stop_on_signal)


@contextmanager
def _peer_sockets(config: Config) -> Iterator[PeerSockets | None]:
    if config.peer_port is None:
        yield None
        return
    # Of a wildcard both families, where there are both.
    hosts = ("0.0.0.0", "::") if config.bind == "::" else (config.bind,)
    with bind_peer_sockets(hosts, config.peer_port) as bound:
        yield bound


async def _join(config: Config, data: DataDir, peer_port: int) -> Config:
    assert config.join_token is not None
    keys = TrustFiles(data.path).key_to_join_with()
    applicant = Applicant(
        node=data.node_id,
        name=config.name,
        name_is_derived=config.name_is_derived,
        advertise=config.advertise,
        peer_port=peer_port,
        api_names=(config.name,),
        capabilities=await trio.to_thread.run_sync(_surveyed, config, data.path),
        keys=keys,
    )
    joined = await join(applicant, config.seeds, config.join_token, rng=Random(secrets.randbits(64)), ask=ask_to_join)
    keep(data, joined, keys)
    return replace(config, name=joined.accepted.name, advertise=joined.advertise)


def _surveyed(config: Config, data_dir: Path) -> Capabilities:
    """What this host has, for the request to be let in. Its daemon looks again."""
    found = survey(
        DriverAsked(),
        data_dir=data_dir,
        declared=config.accelerators,
        excluded=config.devices_excluded,
        foreign_processes=config.foreign_processes,
    )
    host = detect_host(data_dir)
    return Capabilities(
        accelerators=tuple(each.device for each in found.devices if each.state != "excluded"),
        cpus_milli=config.cpus_milli or host.cpus_milli,
        memory_mib=config.memory_mib or host.memory_mib,
        labels=config.labels,
        undetected=(*host.undetected, *found.undetected),
        gpu_detect=found.gpu_detect,
        drivers=tuple(sorted({**dict(host.drivers), **dict(found.drivers)}.items())),
        disk_mib=host.disk_mib,
        numa=host.numa,
    )


def _settled(config: Config, data: DataDir) -> Config:
    """With the name that the cluster knows this node by, and an address that others reach it at."""
    member = membership(data.path)
    if member is not None and member.name and config.name_is_derived:
        config = replace(config, name=member.name)
    if not config.advertise:
        known = [address for peer in PeerCache(data.path / "peers.json").peers for address in peer.addresses]
        found = next((shown for shown in map(shown_to, known) if shown), "")
        if not found:
            raise InvalidRequest(
                f"advertise: bind is {config.bind}, and no way to another node tells which address others reach",
                hint="name it with --advertise",
            )
        config = replace(config, advertise=found)
    return config


async def run_node(
    config: Config,
    data: DataDir,
    sockets: BoundSockets,
    peers: PeerSockets | None,
    notifier: ServiceNotifier,
    *,
    beside: Callable[[Facade], Awaitable[None]],
) -> int:
    """A node, from its log to its end. `beside` runs as long as it does, and says when it is to stop. `peers`: None for
    a node that is alone for good."""
    member = membership(data.path)
    events = await open_event_store(data.path / "events.db")
    try:
        if member is not None and not member.is_voter:
            daemon = Daemon(config, data, None, events, _raise_open_files_limit())
            await _run_daemon(daemon, sockets, peers, notifier, beside)
        else:
            await _run_voter(config, data, events, sockets, peers, notifier, beside)
    finally:
        await _closed(events.close)
    log.info("daemon.stopped")
    return 0


async def _run_voter(
    config: Config,
    data: DataDir,
    events: EventStore,
    sockets: BoundSockets,
    peers: PeerSockets | None,
    notifier: ServiceNotifier,
    beside: Callable[[Facade], Awaitable[None]],
) -> None:
    voter = await open_voter(
        data.path / "log.db",
        node_id=data.node_id,
        now_utc=time.time,
        snapshot_every=config.snapshot_every,
        disk_free_min_mib=config.disk_free_min_mib,
        before_snapshot=events.flush,
        on_events=events.add,
    )
    try:
        check_cluster(data, voter.state.value.cluster_id)
        daemon = Daemon(config, data, voter, events, _raise_open_files_limit())
        await _run_daemon(daemon, sockets, peers, notifier, beside)
    finally:
        await _closed(voter.store.close)


async def _run_daemon(
    daemon: Daemon,
    sockets: BoundSockets,
    peers: PeerSockets | None,
    notifier: ServiceNotifier,
    beside: Callable[[Facade], Awaitable[None]],
) -> None:
    refused: list[GpulayerError] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside, daemon.facade)
            await daemon.run(sockets, peers, notifier)
            nursery.cancel_scope.cancel()
    except* GpulayerError as group:
        # Words for a person, such as a full disk that the node cannot be entered on; not a crash.
        refused = _leaves(group)
    if refused:
        raise refused[0]


def _leaves(group: BaseExceptionGroup[GpulayerError]) -> list[GpulayerError]:
    found: list[GpulayerError] = []
    for each in group.exceptions:
        found += _leaves(each) if isinstance(each, BaseExceptionGroup) else [each]
    return found


async def _closed(close: Callable[[], Awaitable[None]]) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_SECONDS):
        await close()


async def _stop_on_signal(node: Facade) -> None:
    """SIGHUP too, which is the end of the terminal that it was started in; unless nohup has said to ignore it."""
    wanted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    with trio.open_signal_receiver(*wanted) as received:
        async for number in received:
            log.info("daemon.signalled", signal=signal.Signals(number).name)
            node.stop_requested.set()


def _raise_open_files_limit() -> tuple[int, int]:
    """Three descriptors a replica. Returns the limits there were, which the runs get back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard
