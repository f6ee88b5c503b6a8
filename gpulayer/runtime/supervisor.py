"""Does what the agent wants done to the processes of this node, and tells what happens to them.

One task per attempt takes its effects in order and holds the link to its shim; nothing here decides whether something
runs. A shim that is gone is not the end of the story: what it left is found (processes.py) and ended, and only then is
it said that nothing is left. The daemon may be killed at any moment: everything that its successor needs is on the disk
or in the shims, and find_attempts() collects it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import structlog
import trio

from gpulayer.core.replica.messages import (
    AttemptEffect,
    AttemptEvent,
    Discard,
    FoundAttempt,
    FoundRun,
    Note,
    StartRun,
    StopRun,
)
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.runtime import cgroups, processes
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.attempt_shell import AttemptShell, Services
from gpulayer.runtime.found import (
    OnDisk,
    found_dead_run,
    found_run,
)
from gpulayer.runtime.listeners import ListenerChecks
from gpulayer.runtime.ports import Ports
from gpulayer.runtime.sandboxes import Sandboxes
from gpulayer.runtime.shim_link import (
    ShimGone,
    ShimSilent,
    Spawner,
    ask_to_listen,
    boot_id,
    end_with_tree,
    living_shim,
    lock_holders,
)
from gpulayer.shim import notes, tree

Json: TypeAlias = dict[str, Any]

log = structlog.get_logger()

CONNECTING_AT_ONCE_MAX = 64
EVENTS_HELD_MAX = 100_000
# After the start has settled, then hourly: what it enforces is counted in days.
HOUSEKEEPING_FIRST_SECONDS = 60.0
HOUSEKEEPING_SECONDS = 3600.0


class Supervisor:
    """`emit` is called with every event, in order per attempt, from the loop's thread.

    Order of use: `await nursery.start(supervisor.run)`, `await find_attempts()`, hand what it found to the agent,
    `start_events()`. Until then events are held back, so that none is heard before the attempt that it is about.
    """

    def __init__(
        self,
        *,
        data_dir: Path,
        node_id: NodeId,
        node_name: str,
        advertise: str,
        emit: Callable[[AttemptEvent], None],
        log_max_bytes: int = 10 * 2**20,
        log_keep: int = 3,
        cgroups: cgroups.CgroupMode = "auto",
        base_env: Mapping[str, str],
        devices: Devices,
        ports: tuple[int, int] = (20000, 29999),
        rng: Random | None = None,
        nofile: tuple[int, int] | None = None,
        wanted: Callable[[], Container[AttemptId]] = frozenset,
        is_withdrawn: Callable[[AttemptId], bool] = lambda _: False,
        tethered: bool = False,
    ) -> None:
        """`ports`: first and last. `nofile`: the limit of open files that runs get, if the daemon raised its own.
        `wanted`: the attempts in the orders, whose sandboxes are never pruned. `is_withdrawn`: whether an order was
        taken back since it was handed on. `tethered`: shims and replicas end with
        this process, however it ends."""
        self._emit = emit
        self._held: list[AttemptEvent] | None = None
        self._cgroup_mode = cgroups
        self._wanted = wanted
        self._is_tethered = tethered
        self._cgroups_unavailable = ""
        checks = ListenerChecks(advertise=advertise, emit=self._tell)
        self._services = Services(
            sandboxes=Sandboxes(data_dir.absolute()),
            spawner=Spawner(nofile, tethered=tethered),
            ports=Ports(address=advertise, rng=rng or Random(), ports=range(ports[0], ports[1] + 1)),
            checks=checks,
            emit=lambda attempt, event: self._tell(AttemptEvent(attempt=attempt, event=event)),
            node_id=node_id,
            node_name=node_name,
            advertise=advertise,
            base_env=dict(base_env),
            devices=devices,
            is_withdrawn=is_withdrawn,
            log={"max_bytes": log_max_bytes, "keep": log_keep},
            nofile=nofile,
            boot_id=boot_id(),
        )
        devices.renewed = self._share_locks_again
        self._attempts: dict[AttemptId, AttemptShell] = {}
        self._forgotten = trio.lowlevel.ParkingLot()
        self._nursery: trio.Nursery | None = None

    # --- for the daemon -----------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; then the links are closed, and shims and replicas go on."""
        self._prepare_cgroups()
        if self._is_tethered:
            # Made for a job that comes in a moment, and that somebody waits for.
            self._services.spawner.start()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._services.checks.run)
                nursery.start_soon(self._keep_house)
                task_status.started()
        finally:
            self._nursery = None
            await self._services.spawner.aclose()

    def perform(self, effect: AttemptEffect) -> None:
        """Never waits. Reports and announcements are the daemon's to route; they are ignored here."""
        if isinstance(effect.effect, StartRun | StopRun | Note | Discard):
            self._attempt(effect.attempt).hand(effect.effect, effect.order)

    def start_events(self) -> None:
        """What happened since find_attempts() is told now, and from now on everything at once."""
        held, self._held = self._held, None
        for event in held or ():
            self._emit(event)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the operator should know, in a sentence each."""
        if self._cgroups_unavailable and self._cgroup_mode != "off":
            return (f"replicas run without cgroups, and are supervised by descent: {self._cgroups_unavailable}",)
        return ()

    def sandbox_path(self, attempt: AttemptId) -> Path:
        return self._services.sandboxes.path(attempt)

    def log_dir(self, attempt: AttemptId) -> Path:
        return self._services.sandboxes.logs(attempt)

    def listeners_checked_seconds_ago(self) -> float:
        """How old the last look at the listening sockets is; 0 while there is none to look at."""
        return self._services.checks.checked_seconds_ago

    # --- what is there at the start -----------------------------------------------------------------------------

    async def find_attempts(self) -> tuple[FoundAttempt, ...]:
        """Every sandbox; living shims are connected to, and what dead ones left is being ended from now on."""
        assert self._nursery is not None, "run() first"
        self._held = []
        on_disk = await trio.to_thread.run_sync(self._read_sandboxes)
        greetings: dict[AttemptId, Json | None] = {}
        limiter = trio.CapacityLimiter(CONNECTING_AT_ONCE_MAX)
        async with trio.open_nursery() as nursery:
            for disk in on_disk:
                if disk.shim is not None:
                    nursery.start_soon(self._greet, disk, greetings, limiter)
        dead = [disk for disk in on_disk if disk.attempt not in greetings]
        left = await trio.to_thread.run_sync(self._find_leftovers, dead) if dead else {}
        found = []
        for disk in on_disk:
            if disk.attempt in greetings:
                found.append(await self._adopt(disk, greetings[disk.attempt]))
            else:
                found.append(await self._take_up_dead(disk, left.get(disk.attempt, [])))
        if self._services.cgroup_base is not None:
            keep = {str(attempt) for attempt in self._attempts}
            self._services.cgroup_base.remove_leftovers(keep)
            self._services.cgroup_base.remove_if_empty()
        return tuple(found)

    def _read_sandboxes(self) -> list[OnDisk]:
        sandboxes, this_boot = self._services.sandboxes, self._services.boot_id
        holders = lock_holders(sandboxes.root)
        certain = {holder.attempt: holder.shim for holder in holders if holder.is_in_place}
        found = {
            attempt: OnDisk(
                attempt=attempt,
                content=sandboxes.read_attempt(attempt) or {},
                shim=certain.get(attempt) or living_shim(sandboxes.read_shim(attempt), this_boot),
                is_certain=attempt in certain,
                records=sandboxes.runs(attempt),
            )
            for attempt in sandboxes.attempts()
        }
        for attempt, shim in certain.items():
            if living_shim(sandboxes.read_shim(attempt), this_boot) != shim:
                ask_to_listen(shim)  # which writes shim.json anew, too
        # Where the sandbox was removed by hand, nothing on the disk tells that something of it was executed; it must
        # not be executed a second time beside that, and a batch not at all. Nobody can reach such a shim.
        runs = processes.runs_below(sandboxes.root)
        for holder in holders:
            if not holder.is_in_place:
                log.warning("sandbox.removed", attempt=str(holder.attempt), shim=holder.shim.pid)
                end_with_tree(holder.shim)
                runs.setdefault(holder.attempt, 1)
        for attempt, run in runs.items():
            disk = found.get(attempt)
            if disk is None or (disk.shim is None and not disk.records):
                marker = {"boot_id": this_boot}
                record = notes.RunRecord(run=run, marker=marker, exit=None)
                found[attempt] = OnDisk(attempt=attempt, content={}, shim=None, is_certain=False, records=[record])
        return [found[attempt] for attempt in sorted(found)]

    async def _greet(
        self, disk: OnDisk, greetings: dict[AttemptId, Json | None], limiter: trio.CapacityLimiter
    ) -> None:
        """Leaves a hello for a shim that answers, None for one that lives and does not, nothing where it is not a
        shim."""
        assert disk.shim is not None
        async with limiter:
            attempt = self._attempt(disk.attempt)
            try:
                greetings[disk.attempt] = await attempt.connect(disk.shim, is_certain=disk.is_certain)
            except ShimSilent as error:
                log.warning("shim.silent", attempt=str(disk.attempt), error=str(error))
                greetings[disk.attempt] = None
            except ShimGone as error:
                log.warning("shim.not_there", attempt=str(disk.attempt), error=str(error))

    def _find_leftovers(self, dead: Iterable[OnDisk]) -> dict[AttemptId, list[tree.ProcessStat]]:
        """One walk through /proc for all of them."""
        this_boot = [disk for disk in dead if disk.records and disk.is_of_boot(self._services.boot_id)]
        if not this_boot:
            return {}
        by_run_id = processes.run_ids()
        return {disk.attempt: processes.find(disk.leftovers(), by_run_id) for disk in this_boot}

    async def _adopt(self, disk: OnDisk, hello: Json | None) -> FoundAttempt:
        found = found_run(disk, hello)
        self._remember_ports(disk, found)
        await self._attempt(disk.attempt).adopt(disk, found, disk.shim)
        return FoundAttempt(
            attempt=disk.attempt,
            shim_alive=True,
            first_started_seconds_ago=disk.first_started_seconds_ago(self._services.boot_id),
            last=found,
        )

    async def _take_up_dead(self, disk: OnDisk, left: list[tree.ProcessStat]) -> FoundAttempt:
        found = found_dead_run(disk, self._services.boot_id, gone=not left)
        self._remember_ports(disk, found)
        if found is not None and left:
            log.warning("shim.left_processes", attempt=str(disk.attempt), pids=[stat.pid for stat in left])
            await self._attempt(disk.attempt).adopt(disk, found, None)
        return FoundAttempt(
            attempt=disk.attempt,
            shim_alive=False,
            first_started_seconds_ago=disk.first_started_seconds_ago(self._services.boot_id),
            last=found,
        )

    def _remember_ports(self, disk: OnDisk, found: FoundRun | None) -> None:
        for record in disk.records:
            if isinstance(port := record.marker.get("port"), int):
                self._services.ports.remember(disk.attempt.replica, port)
        if found is not None and found.port is not None and not found.gone:
            self._services.ports.hold(disk.attempt, found.port)

    # --- inside -------------------------------------------------------------------------------------------------

    def _attempt(self, attempt: AttemptId) -> AttemptShell:
        assert self._nursery is not None, "run() first"
        known = self._attempts.get(attempt)
        if known is None:
            known = self._attempts[attempt] = AttemptShell(attempt, self._services, self._forget)
            self._nursery.start_soon(known.run)
        return known

    def _forget(self, attempt: AttemptShell) -> None:
        if self._attempts.get(attempt.id) is attempt:
            del self._attempts[attempt.id]
            self._forgotten.unpark_all()

    async def wait_for_nothing(self) -> None:
        """Until no attempt is left here: each was discarded, and its shim has been let go. The caller bounds it."""
        while self._attempts:
            await self._forgotten.park()

    def _share_locks_again(self, attempt: AttemptId) -> None:
        if attempt in self._attempts:
            self._attempts[attempt].share_locks_again()

    def _tell(self, event: AttemptEvent) -> None:
        if self._held is None:
            self._emit(event)
            return
        assert len(self._held) < EVENTS_HELD_MAX, "start_events() was not called"
        self._held.append(event)

    def _prepare_cgroups(self) -> None:
        prepared = cgroups.prepare(f"gpulayer-{self._services.node_id}", mode=self._cgroup_mode)
        if isinstance(prepared, cgroups.CgroupBase):
            self._services.cgroup_base = prepared
        else:
            self._cgroups_unavailable = prepared.reason
            log.info("cgroups.unavailable", reason=prepared.reason)

    async def _keep_house(self) -> None:
        """Sandboxes that have been kept long enough go."""
        await trio.sleep(HOUSEKEEPING_FIRST_SECONDS)
        while True:
            kept = _Either(self._wanted(), self._attempts)
            removed = await trio.to_thread.run_sync(self._services.sandboxes.prune, kept, abandon_on_cancel=True)
            if removed:
                log.info("sandboxes.pruned", attempts=[str(attempt) for attempt in removed])
            await trio.sleep(HOUSEKEEPING_SECONDS)


class _Either:
    def __init__(self, *parts: Container[AttemptId]) -> None:
        self._parts = parts

    def __contains__(self, attempt: object) -> bool:
        return any(attempt in part for part in self._parts)
