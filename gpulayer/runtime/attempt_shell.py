"""One attempt on this node: its sandbox, the link to its shim, its newest run.

Takes the attempt's effects in order, one after the other, and turns what the shim tells into events. A shim that is
gone is not the end of the story: what it left is found (processes.py) and ended, and only then is it said that nothing
is left. Owes the core, for each StartRun, one of RunStarted, StartFailed and ShimDied, and a TreeGone after each
RunExited and ShimDied (core/replica/lifecycle.py).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import structlog
import trio

from gpulayer.core.replica.messages import (
    DevicesNotClear,
    Discard,
    FoundRun,
    Note,
    Order,
    ReplicaEffect,
    ReplicaEvent,
    RunExited,
    RunStarted,
    ShimDied,
    StartFailed,
    StartRefused,
    StartRun,
    StopRun,
    TreeGone,
    Unkillable,
)
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.replica import DeviceShare, Reason
from gpulayer.runtime import cgroups, processes
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.environment import run_environment
from gpulayer.runtime.found import (
    START_HINTS,
    OnDisk,
    cgroup_of,
    exit_of,
    not_executed,
    number,
    run_id_from,
    run_id_of,
    signal_number,
    wants_port,
)
from gpulayer.runtime.listeners import ListenerChecks, listening
from gpulayer.runtime.ports import NoPort, Ports
from gpulayer.runtime.processes import Leftovers
from gpulayer.runtime.sandboxes import Sandboxes
from gpulayer.runtime.shim_link import (
    HELLO_SECONDS_MAX,
    ShimGone,
    ShimLink,
    ShimProcess,
    ShimSilent,
    Spawner,
    SpawnFailed,
    ask_to_listen,
    end_with_tree,
    living_shim,
    lock_holders,
)
from gpulayer.shim import log_format, log_writer, tree

Json: TypeAlias = dict[str, Any]

log = structlog.get_logger()

# A run has a handful of effects; this many are waiting only when a shim hangs, and then lines for its log are dropped
# first.
MAILBOX_MAX = 256
NOTES_WITHOUT_SHIM_MAX = 16
# One run is there, so an exit, a gone, and some that it cannot be killed.
TOLD_BEFORE_ADOPTION_MAX = 64
# The marker is synced before exec, and the disk may be slow; after this the start is broken off, not repeated.
START_SECONDS_MAX = 60.0
# Answered by a loop that does nothing else: a shim that takes longer is stopped or broken, and is ended with its tree.
STOP_ANSWER_SECONDS_MAX = 10.0
UNREACHABLE_SECONDS_MAX = 20.0
LOG_ANSWER_SECONDS_MAX = 10.0
QUIT_SECONDS_MAX = 10.0
# Of a daemon's start, which one stopped shim should not hold up; it is connected to again later.
FIRST_HELLO_SECONDS_MAX = 2.0
# A shim that closes the connection is mostly dead, and its process is gone a moment later.
DEATH_SECONDS_MAX = 1.0
RECONNECT_PAUSE_SECONDS = (0.05, 5.0)
# What a dead shim left gets the job's stop signal, but nobody is there to read its output: no need for a long goodbye.
SWEEP_GRACE_SECONDS_MAX = 3.0
SWEEP_PAUSE_SECONDS = (0.2, 10.0)


@dataclass(slots=True)
class _Run:
    """The newest run of an attempt, as far as it is known here."""

    number: int
    run_id: str
    port: int | None = None
    pid: int | None = None
    start_time: int | None = None
    is_started: bool = False
    has_exited: bool = False
    is_gone: bool = False
    is_stopping: bool = False
    is_orphaned: bool = False
    """Its shim died, and what follows from it is under way."""


@dataclass(slots=True)
class Services:
    """What all attempts use."""

    sandboxes: Sandboxes
    spawner: Spawner
    ports: Ports
    checks: ListenerChecks
    emit: Callable[[AttemptId, ReplicaEvent], None]
    node_id: NodeId
    node_name: str
    advertise: str
    base_env: Mapping[str, str]
    devices: Devices
    is_withdrawn: Callable[[AttemptId], bool]
    log: Json
    nofile: tuple[int, int] | None
    boot_id: str
    cgroup_base: cgroups.CgroupBase | None = None
    # One walk through /proc at a time, however many shims were killed together.
    sweeps: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(4))


class AttemptShell:
    """The task of one attempt. Only it and the reader of its link change what is here; both run in the loop's
    thread."""

    def __init__(self, attempt: AttemptId, services: Services, forget: Callable[[AttemptShell], None]) -> None:
        self.id = attempt
        self._services = services
        self._forget = forget
        self._log = log.bind(attempt=str(attempt))
        self._mail, self._mailbox = trio.open_memory_channel[tuple[ReplicaEffect, Order | None]](MAILBOX_MAX)
        self._directory = services.sandboxes.path(attempt)
        self._cgroup: str | None = None
        self._content: Json = {}
        self._link: ShimLink | None = None
        self._shim: ShimProcess | None = None
        """Set while a shim of this attempt may live, linked or not."""
        self._shares: tuple[DeviceShare, ...] = ()
        """What it holds of devices, by its order or, before that is known, by what was written down."""
        self._lock_keeper: ShimProcess | None = None
        """The shim that has copies of the locks of these."""
        self._settled = trio.Event()
        """Set while a link is up or the shim is known to be dead; clear while neither is certain."""
        self._settled.set()
        self._has_spawned = False
        """A shim of it may have been made that was never connected to."""
        self._run: _Run | None = None
        self._swept = trio.Event()
        """Clear while a dead shim's leftovers are being ended."""
        self._swept.set()
        self._let_go: ShimLink | None = None
        """The link that was ended because its shim is of no use any more."""
        self._published: tuple[int, int] | None = None
        """What `shim.json` was when it was last read and named this shim."""
        self._before_adoption: list[Json] | None = None
        """What the shim of an attempt that is being found told since its hello; heard once the run is known."""
        self._unsaid: list[str] = []
        self._greeting: Json | None = None
        """The first hello of the link."""
        self._nursery: trio.Nursery | None = None
        self._begun = trio.Event()

    def hand(self, effect: ReplicaEffect, order: Order | None) -> None:
        try:
            self._mail.send_nowait((effect, order))
        except trio.WouldBlock:
            if not isinstance(effect, Note):
                raise RuntimeError(f"{self.id}: {MAILBOX_MAX} effects wait, and now {effect}") from None
            self._log.warning("note.dropped", text=effect.text)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._begun.set()
                async for effect, order in self._mailbox:
                    match effect:
                        case StartRun():
                            await self._start_run(effect, order)
                        case StopRun():
                            await self._stop_run(effect)
                        case Note(text=text):
                            await self._note(text)
                        case Discard():
                            await self._discard()
                            break
                        case _:
                            raise AssertionError(effect)
                nursery.cancel_scope.cancel()
        finally:
            if self._link is not None:
                await self._link.close()
            self._forget(self)

    def _emit(self, event: ReplicaEvent) -> None:
        self._services.emit(self.id, event)

    # --- starting -----------------------------------------------------------------------------------------------

    async def _start_run(self, effect: StartRun, order: Order | None) -> None:
        if order is None:
            self._fail_start(effect.run, Reason(code="spawn_failed", text="there is no order for it any more"))
            return
        if self._run is not None and not self._run.is_gone:
            text = f"processes of run {self._run.number} are still there"
            self._fail_start(effect.run, Reason(code="spawn_failed", text=text))
            return
        self._shares = order.assignment.devices
        kept = self._services.devices.shared_fds(self.id)
        refused = await self._services.devices.take(self.id, self._shares)
        if self._services.devices.shared_fds(self.id) != kept:
            self._lock_keeper = None  # its shim has none of them, or not all
        if refused is not None:
            self._log.warning("run.refused", run=effect.run, text=refused.reason.text)
            self._emit(StartRefused(run=effect.run, reason=refused.reason, observed=refused.observed))
            return
        if self._services.is_withdrawn(self.id):  # which took longer than it takes to change one's mind
            self._fail_start(effect.run, Reason(code="cancelled", text="it was taken back before it was started"))
            return
        try:
            link = await self._linked_shim(order)
            await self._share_locks(link)
            port = self._choose_port(order)
        except NoPort as error:
            self._fail_start(effect.run, error.reason)
            return
        except SpawnFailed as error:
            code = "disk_full" if error.code == "disk_full" else "spawn_failed"
            text = f"no supervisor could be made for it: {error}"
            self._fail_start(effect.run, Reason(code=code, text=text, hint=START_HINTS[code]))
            return
        except OSError as error:
            code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "spawn_failed"
            text = f"it could not be prepared in {self._directory}: {error.strerror or error}"
            self._fail_start(effect.run, Reason(code=code, text=text, hint=START_HINTS[code]))
            return
        run_id = run_id_of(self.id, effect.run, self._services.boot_id)
        self._run = _Run(number=effect.run, run_id=run_id, port=port)
        assert self._nursery is not None
        await self._nursery.start(self._launch, link, self._run, effect, order)

    async def _share_locks(self, link: ShimLink) -> None:
        """Before anything is executed: from here on the death of either side leaves the devices locked."""
        if self._lock_keeper == link.shim or not self._shares:
            return
        try:
            await link.hold(self._services.devices.shared_fds(self.id), timeout_seconds=LOG_ANSWER_SECONDS_MAX)
        except (ShimGone, ShimSilent) as error:
            raise SpawnFailed("shim_failed", str(error)) from error
        self._lock_keeper = link.shim

    async def _take_up_locks(self, link: ShimLink, hello: Json) -> None:
        """A shim that was reached again: what it holds is held by us, too. Without an answer it goes on holding it."""
        names = hello.get("held")
        if not isinstance(names, list) or self._lock_keeper == link.shim:
            return
        devices = self._services.devices
        if names:
            devices.take_up(
                self.id, await link.held([str(name) for name in names], timeout_seconds=LOG_ANSWER_SECONDS_MAX)
            )
        if hello.get("gone") is not True:
            devices.take_again(self.id, self._shares)
        if devices.shared_fds(self.id).keys() != set(names):
            await link.hold(devices.shared_fds(self.id), timeout_seconds=LOG_ANSWER_SECONDS_MAX)
        self._lock_keeper = link.shim

    def share_locks_again(self) -> None:
        """They are held through other descriptors now (devices.py, `renewed`)."""
        self._lock_keeper = None
        if self._nursery is not None and self._link is not None:
            self._nursery.start_soon(self._share_locks_with, self._link)

    async def _share_locks_with(self, link: ShimLink) -> None:
        try:
            await self._share_locks(link)
        except SpawnFailed as error:
            self._log.warning("shim.locks_not_shared", error=str(error))

    def _choose_port(self, order: Order) -> int | None:
        if not wants_port(order):
            return None
        return self._services.ports.take(self.id, in_use={each.port for each in listening()})

    async def _launch(
        self,
        link: ShimLink,
        run: _Run,
        effect: StartRun,
        order: Order,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Until the shim has said what came of it. A stop may be sent meanwhile, but not before the start was."""
        is_sent = False

        def sent() -> None:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                task_status.started()

        env = run_environment(
            order,
            base=self._services.base_env,
            node_name=self._services.node_name,
            host=self._services.advertise,
            port=run.port,
            run_id=run.run_id,
            sandbox=str(self._directory),
            kinds=self._services.devices.kinds(self._shares),
        )
        try:
            await link.request(
                "start",
                timeout_seconds=float("inf"),
                on_sent=sent,
                on_reply=lambda reply: self._start_answered(run, reply),
                slow_seconds=START_SECONDS_MAX,
                on_slow=partial(self._break_off_start, link, run),
                run=run.number,
                argv=list(order.spec.argv),
                env=env,
                cwd=order.spec.workdir or str(self._services.sandboxes.work(self.id)),
                cause=effect.cause,
                port=run.port,
                restart_serial=effect.restart_serial,
                note={"restarts": effect.restarts, "failures": effect.failures, "run_id": run.run_id},
            )
        except ShimGone:
            sent()
            await self._start_lost(run, link.shim)

    async def _start_lost(self, run: _Run, shim: ShimProcess) -> None:
        """The link ended before the answer came. Mostly its follower has told what that means; but it may have looked
        before there was this run."""
        link = await self._living_link()
        if run.is_started or run.is_gone or run.is_orphaned:
            return
        if link is None:
            await self._shim_died(shim)
        else:
            text = "the connection to its supervisor was lost before the start was sent"
            self._start_answered(run, {"error": {"code": "spawn_failed", "message": text}})

    async def _break_off_start(self, link: ShimLink, run: _Run) -> None:
        """A working directory on a dead file system lets exec hang, a broken disk the marker."""
        self._log.warning("start.hangs", run=run.number, seconds=START_SECONDS_MAX)
        try:
            await link.request(
                "stop", timeout_seconds=STOP_ANSWER_SECONDS_MAX, signal="KILL", grace_seconds=0, reason="start_hangs"
            )
        except (ShimGone, ShimSilent):
            await self._kill_shim(link.shim)

    def _start_answered(self, run: _Run, reply: Json) -> None:
        """Called by the reader, so that nothing is told of the run before this."""
        if reply.get("ok") is not True:
            run.is_gone = True
            error = reply.get("error")
            error = error if isinstance(error, dict) else {}
            code = {"timed_out": "timeout"}.get(str(error.get("code")), str(error.get("code")))
            code = code if code in START_HINTS else "spawn_failed"
            text = str(error.get("message") or "the supervisor gave no reason")
            self._release_port(run)
            self._fail_start(run.number, Reason(code=code, text=text, hint=START_HINTS[code]))
            if error.get("code") == "busy" and self._nursery is not None:
                self._nursery.start_soon(self._end_unknown_run)
            return
        run.is_started, run.pid, run.start_time = True, reply.get("pid"), reply.get("start_time")
        warning = None
        if reply.get("cgroup_error"):
            warning = Reason(
                code="cgroup_unavailable",
                text=f"runs without its own cgroup: {reply['cgroup_error']}",
                hint="with systemd, set Delegate=yes",
            )
        # The life cycle tells the story at `info` (replica.starting, replica.exited); this is for who looks closer.
        self._log.debug("run.started", run=run.number, pid=run.pid, port=run.port)
        self._emit(RunStarted(run=run.number, pid=run.pid or 0, port=run.port, at_utc=time.time(), warning=warning))
        self._watch_port(run, fresh=True)

    async def _end_unknown_run(self) -> None:
        """The shim has processes of a run that the core takes for ended (an answer was lost with a connection)."""
        link = self._link
        if link is None:
            return
        try:
            await link.request(
                "stop", timeout_seconds=STOP_ANSWER_SECONDS_MAX, signal="KILL", grace_seconds=0, reason="unknown_run"
            )
        except (ShimGone, ShimSilent) as error:
            self._log.warning("unknown_run.not_stopped", error=str(error))

    def _fail_start(self, run: int, reason: Reason) -> None:
        self._log.warning("run.not_started", run=run, code=reason.code, text=reason.text)
        self._emit(StartFailed(run=run, reason=reason, at_utc=time.time()))

    def _watch_port(self, run: _Run, *, fresh: bool) -> None:
        if run.port is not None and not run.is_stopping and not run.has_exited:
            self._services.checks.watch(self.id, run=run.number, port=run.port, pids=self._tree_pids, fresh=fresh)

    def _tree_pids(self) -> list[int]:
        pids = [stat.pid for stat in tree.descendants(self._shim.pid)] if self._shim is not None else []
        return pids + (tree.cgroup_pids(self._cgroup) if self._cgroup is not None else [])

    def _release_port(self, run: _Run) -> None:
        self._services.checks.forget(self.id, run.number)
        self._services.ports.release(self.id, run.port)

    # --- its shim -----------------------------------------------------------------------------------------------

    async def _linked_shim(self, order: Order) -> ShimLink:
        """The link to its shim, which is made if there is none. OSError, SpawnFailed."""
        link = await self._living_link()
        if link is not None and not self._is_in_place(link.shim):
            self._log.warning("sandbox.removed", directory=str(self._directory), shim=link.shim.pid)
            await self._quit(link)
            link = await self._living_link()
        if link is None:
            await trio.to_thread.run_sync(self._make_sandbox, order)
            try:
                await self._connect_and_follow(await self._spawn())
            except (ShimGone, ShimSilent) as error:
                raise SpawnFailed("shim_failed", str(error)) from error
            link = self._link
            assert link is not None
        unsaid, self._unsaid = self._unsaid, []
        for text in unsaid:
            await self._note(text)
        return link

    def _make_sandbox(self, order: Order) -> None:
        base, spec, services = self._services.cgroup_base, order.spec, self._services
        self._cgroup = None
        if base is not None:
            try:
                self._cgroup = base.make(str(self.id))
            except OSError as error:
                self._log.warning("cgroup.not_made", error=str(error))
        self._content = {
            "job_id": self.id.replica.job,
            "job_name": order.job_name,
            "replica": self.id.replica.index,
            "attempt": self.id.attempt,
            "node_id": services.node_id,
            "log": services.log,
            "timeout_seconds": spec.timeout_seconds,
            "stop_signal": spec.stop_signal,
            "stop_grace_seconds": spec.stop_grace_seconds,
            "cgroup": self._cgroup,
            "nofile": list(services.nofile) if services.nofile is not None else None,
            # For a daemon that finds neither this one nor the shim alive: what must be locked again.
            "devices": [{"uuid": share.uuid, "milli": share.milli} for share in self._shares],
        }
        services.sandboxes.make(self.id, self._content)

    def _is_in_place(self, shim: ShimProcess) -> bool:
        """Someone may have removed the sandbox by hand, or what the next daemon finds its shim by. Only `work` is
        made again for the same shim.

        Not in a thread, and nothing is read while nothing changed: the kernel has these names in its caches, and a
        hundred threads for a hundred restarts took longer than all the rest of them.
        """
        published = _published(self._directory)
        if published is None:
            return False
        if published != self._published:
            if living_shim(self._services.sandboxes.read_shim(self.id), self._services.boot_id) != shim:
                return False
            self._published = published
        with suppress(FileExistsError):
            os.mkdir(f"{self._directory}/work", 0o700)
        return True

    async def _spawn(self) -> ShimProcess:
        self._has_spawned = True
        for is_last in (False, True):
            try:
                return await self._services.spawner.spawn(self._directory)
            except SpawnFailed as error:
                # The spawner may have died after it had made the shim, or a daemon before us made it in its last
                # moment.
                if error.code in ("spawner_died", "already_running"):
                    living = living_shim(self._services.sandboxes.read_shim(self.id), self._services.boot_id)
                    if living is not None:
                        return living
                if is_last or error.code != "spawner_died":
                    raise
        raise AssertionError("not reached")

    async def connect(self, shim: ShimProcess, *, is_certain: bool) -> Json:
        """The hello of a shim found at the start. ShimGone: it is none of ours. ShimSilent: it does not answer yet.
        `is_certain`: it is known for ours, so that its run is not to be touched just because we do not reach it."""
        await self._begun.wait()
        self._services.devices.await_locks(self.id)
        self._before_adoption = []
        deadline = trio.current_time() + FIRST_HELLO_SECONDS_MAX
        while True:
            try:
                return await self._connect_and_follow(shim, timeout_seconds=FIRST_HELLO_SECONDS_MAX)
            except ShimGone as error:
                # Not there, or not ours; or it is, and had no ear for us.
                if self._shim is None and is_certain and shim.is_alive():
                    if trio.current_time() < deadline:
                        ask_to_listen(shim)
                        await trio.sleep(RECONNECT_PAUSE_SECONDS[0])
                        continue
                    self._shim, self._settled = shim, trio.Event()
                    assert self._nursery is not None
                    self._nursery.start_soon(self._reconnect, shim)
                elif self._shim is None or await self._has_died(shim):
                    self._before_adoption = None
                    self._services.devices.release(self.id)
                    raise
                raise ShimSilent(str(error)) from error

    async def _connect_and_follow(self, shim: ShimProcess, timeout_seconds: float = HELLO_SECONDS_MAX) -> Json:
        assert self._nursery is not None
        link = await ShimLink.connect(self._directory, shim, self._heard)
        self._shim = shim
        self._settled = trio.Event()
        self._nursery.start_soon(self._follow, link)
        try:
            hello = await link.hello(timeout_seconds=timeout_seconds)
        except ShimSilent:
            await link.close()  # which lets the follower try again
            raise
        self._link = link
        self._greeting = hello
        self._settled.set()
        return hello

    async def _living_link(self) -> ShimLink | None:
        """None once the shim is known to be dead. While neither is certain it is being connected to; but who asks wants
        something started or stopped, so a shim that cannot be reached for long is ended with what is left of its
        run."""
        with trio.move_on_after(UNREACHABLE_SECONDS_MAX):
            return await self._link_when_settled()
        if self._shim is not None:
            await self._kill_shim(self._shim)
        return await self._link_when_settled()

    async def _link_when_settled(self) -> ShimLink | None:
        while True:
            await self._settled.wait()
            if self._link is None or not self._link.ended.is_set():
                return self._link
            await trio.sleep(0.01)  # its follower is about to find out

    async def _follow(self, link: ShimLink) -> None:
        """Reads a link to its end, and finds out what the end means."""
        await link.run()
        if self._let_go is link:
            return
        self._link = None
        self._settled = trio.Event() if self._settled.is_set() else self._settled
        if not await self._has_died(link.shim):
            await self._reconnect(link.shim)
            return
        await self._shim_died(link.shim)

    async def _has_died(self, shim: ShimProcess) -> bool:
        deadline = trio.current_time() + DEATH_SECONDS_MAX
        while shim.is_alive():
            if trio.current_time() >= deadline:
                return False
            await trio.sleep(0.01)
        return True

    async def _reconnect(self, shim: ShimProcess) -> None:
        """It lives but is not connected: it was stopped (SIGSTOP), or we had not read for too long."""
        pause = RECONNECT_PAUSE_SECONDS[0]
        while shim.is_alive():
            try:
                link = await ShimLink.connect(self._directory, shim, self._heard)
            except ShimGone as error:
                self._log.warning("shim.not_connected", pid=shim.pid, error=str(error))
                ask_to_listen(shim)
            else:
                assert self._nursery is not None
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.run)
                    try:
                        hello = await link.hello(timeout_seconds=pause + 1, on_reply=self._reconcile)
                        await self._take_up_locks(link, hello)
                    except (ShimGone, ShimSilent) as error:
                        self._log.warning("shim.silent", pid=shim.pid, error=str(error))
                        await link.close()
                    else:
                        self._log.info("shim.connected_again", pid=shim.pid, run=hello.get("last_run"))
                        self._link = link
                        self._settled.set()
                if self._let_go is link:
                    return
                if self._link is link:  # and its connection has ended again
                    self._link = None
                    self._settled = trio.Event()
                    pause = RECONNECT_PAUSE_SECONDS[0]
            await trio.sleep(pause)
            pause = min(pause * 2, RECONNECT_PAUSE_SECONDS[1])
        await self._shim_died(shim)

    async def _kill_shim(self, shim: ShimProcess) -> None:
        """What may be left of its tree is swept as after any death of a shim."""
        self._log.warning("shim.killed", pid=shim.pid)
        await trio.to_thread.run_sync(end_with_tree, shim, limiter=self._services.sweeps)

    # --- what it tells ------------------------------------------------------------------------------------------

    def _heard(self, event: Json) -> None:
        if self._before_adoption is not None:
            self._before_adoption = [*self._before_adoption, event][-TOLD_BEFORE_ADOPTION_MAX:]
            return
        run = self._run
        number = event.get("run", run.number if run is not None else None)
        if run is None or number != run.number:
            return
        match event.get("event"):
            case "exited":
                self._has_exited(run, event)
            case "gone":
                self._is_gone(run)
            case "unkillable":
                pids = tuple(pid for pid in event.get("pids", ()) if isinstance(pid, int))
                self._emit(Unkillable(run=run.number, pids=pids))
            case _:
                pass  # a newer shim's

    def _has_exited(self, run: _Run, note: Json) -> None:
        if not run.has_exited and not run.is_gone:
            run.has_exited = True
            self._services.checks.forget(self.id, run.number)
            self._log.debug("run.exited", run=run.number, code=note.get("code"), signal=note.get("signal"))
            self._emit(RunExited(exit=exit_of(run.number, note)))

    def _is_gone(self, run: _Run) -> None:
        """No process is left. That is said when the driver says so, too, where it can tell."""
        if run.is_gone:
            return
        run.is_gone = True
        self._release_port(run)
        if not self._services.devices.can_tell(self._shares):
            self._emit(TreeGone(run=run.number))
            return
        assert self._nursery is not None
        self._nursery.start_soon(self._confirm_clear, run)

    async def _confirm_clear(self, run: _Run) -> None:
        def tell(text: str) -> None:
            self._emit(DevicesNotClear(run=run.number, text=text))

        await self._services.devices.wait_clear(self._shares, tell)
        self._emit(TreeGone(run=run.number))

    def _reconcile(self, hello: Json) -> None:
        """What was not heard while there was no connection."""
        if self._before_adoption is not None:
            self._before_adoption.append({"hello": hello})
            return
        run = self._run
        if run is None or hello.get("last_run") != run.number or run.is_gone:
            return
        last_exit = hello.get("last_exit")
        if hello.get("run") is None and isinstance(last_exit, dict):
            if not run.is_started and not_executed(last_exit) is not None:
                self._start_answered(run, {"error": {"code": last_exit.get("error"), **last_exit}})
                return
            self._has_exited(run, last_exit)
            if hello.get("gone") is True:
                self._is_gone(run)
        elif not run.is_started and isinstance(current := hello.get("run"), dict):
            self._start_answered(run, {"ok": True, **current})

    # --- its death ----------------------------------------------------------------------------------------------

    async def _shim_died(self, shim: ShimProcess) -> None:
        self._link = self._shim = None
        self._settled.set()
        run = self._run
        if run is None or run.is_gone or run.is_orphaned:
            return
        run.is_orphaned = True
        # What it alone had locked is not locked any more, and processes of it are still there.
        self._services.devices.take_again(self.id, self._shares)
        self._services.checks.forget(self.id, run.number)
        records = await trio.to_thread.run_sync(self._services.sandboxes.runs, self.id)
        record = next((each for each in records if each.run == run.number), None)
        self._log.warning("shim.died", pid=shim.pid, run=run.number)
        note = (record.exit or {}) if record is not None else {}
        if not run.is_started and (record is None or not_executed(note) is not None):
            # No marker: nothing was executed.
            text = note.get("message") or f"its supervisor (pid {shim.pid}) ended before it executed anything"
            self._start_answered(run, {"error": {"code": note.get("error"), "message": text}})
            return
        if record is not None:
            run.pid, run.start_time = record.marker.get("pid"), record.marker.get("start_time")
        if record is not None and record.exit is not None:
            if not run.is_started:
                self._start_answered(run, {"ok": True, "pid": run.pid, "start_time": run.start_time})
            self._has_exited(run, record.exit)
        elif not run.has_exited:
            run.has_exited = True
            self._emit(ShimDied(run=run.number, at_utc=time.time()))
        await self._sweep(run)

    async def _sweep(self, run: _Run) -> None:
        """Ends what a dead shim left of a run, however long that takes, and says when nothing is left."""
        if not self._swept.is_set() or run.is_gone:
            return
        self._swept = trio.Event()
        stop_signal = signal_number(self._content.get("stop_signal"))
        grace = min(number(self._content.get("stop_grace_seconds"), SWEEP_GRACE_SECONDS_MAX), SWEEP_GRACE_SECONDS_MAX)
        leftovers = Leftovers(run_id=run.run_id, pid=run.pid, start_time=run.start_time, cgroup=self._cgroup)
        pause = SWEEP_PAUSE_SECONDS[0]
        try:
            while left := await trio.to_thread.run_sync(
                partial(processes.end, leftovers, signal_number=stop_signal, grace_seconds=grace),
                limiter=self._services.sweeps,
                abandon_on_cancel=True,
            ):
                self._emit(Unkillable(run=run.number, pids=tuple(stat.pid for stat in left)))
                stop_signal, grace = signal.SIGKILL, 0.0
                await trio.sleep(pause)
                pause = min(pause * 2, SWEEP_PAUSE_SECONDS[1])
        finally:
            self._swept.set()
        self._is_gone(run)

    # --- what was there at the daemon's start -------------------------------------------------------------------

    async def adopt(self, disk: OnDisk, found: FoundRun | None, greeted: ShimProcess | None) -> None:
        """Takes up what find_attempts() found: with the shim that was greeted, or, without one, leftovers to end."""
        await self._begun.wait()
        self._content = disk.content
        self._cgroup = disk.cgroup
        await self._adopt_locks(disk, found)
        if found is None:
            self._hear_what_was_told()
            return
        marker = next((record.marker for record in disk.records if record.run == found.run), {})
        self._run = _Run(
            number=found.run,
            run_id=run_id_from(disk.attempt, found.run, marker),
            port=found.port,
            pid=found.pid,
            start_time=marker.get("start_time"),
            is_started=True,
            has_exited=not found.alive,
            is_gone=found.gone,
            is_stopping=bool(found.stopping),
        )
        assert self._nursery is not None
        if greeted is None:
            self._run.is_orphaned = True
            self._nursery.start_soon(self._sweep, self._run)
        elif self._shim is None:  # it died since its hello
            self._hear_what_was_told()
            self._nursery.start_soon(self._shim_died, greeted)
        else:
            self._watch_port(self._run, fresh=False)
            self._hear_what_was_told()

    async def _adopt_locks(self, disk: OnDisk, found: FoundRun | None) -> None:
        # The order knows, too, what an earlier version did not write down.
        self._shares = disk.devices or self._services.devices.assigned(self.id)
        link = self._link
        if link is not None and self._greeting is not None:
            try:
                await self._take_up_locks(link, self._greeting)
            except (ShimGone, ShimSilent) as error:
                # It keeps them as long as it lives; its follower finds out whether it does.
                self._log.warning("shim.locks_not_taken_up", error=str(error))
        elif self._shim is None and found is not None and not found.gone:
            self._services.devices.take_again(self.id, self._shares)

    def _hear_what_was_told(self) -> None:
        told, self._before_adoption = self._before_adoption or [], None
        for each in told:
            if "hello" in each:
                self._reconcile(each["hello"])
            else:
                self._heard(each)

    # --- the rest -----------------------------------------------------------------------------------------------

    async def _stop_run(self, effect: StopRun) -> None:
        run = self._run
        if run is None or run.number != effect.run:
            # Nothing of it was ever here, or a newer one is; whoever waits for its end may go on.
            self._emit(TreeGone(run=effect.run))
            return
        if run.is_gone:
            return
        run.is_stopping = True
        self._services.checks.forget(self.id, run.number)
        link = await self._living_link()
        if link is None:
            assert self._nursery is not None
            self._nursery.start_soon(self._sweep, run)
            return
        try:
            await link.request(
                "stop",
                timeout_seconds=STOP_ANSWER_SECONDS_MAX,
                signal=effect.signal,
                grace_seconds=effect.grace_seconds,
                reason=effect.why,
            )
        except ShimSilent:
            await self._kill_shim(link.shim)
        except ShimGone:
            pass  # its follower sweeps

    async def _note(self, text: str) -> None:
        link = self._link
        if link is None or link.ended.is_set():
            self._unsaid = [*self._unsaid, text][-NOTES_WITHOUT_SHIM_MAX:]
            return
        try:
            await link.request("log", timeout_seconds=LOG_ANSWER_SECONDS_MAX, kind="supervisor", text=text)
        except (ShimGone, ShimSilent) as error:
            self._log.warning("note.not_written", text=text, error=str(error))

    async def _discard(self) -> None:
        # The shim's copies go with it, at its end below.
        self._services.devices.release(self.id)
        link = await self._living_link()
        if link is not None:
            await self._quit(link)
        elif self._has_spawned:  # a walk through all of /proc; not for each old sandbox at the daemon's start
            await trio.to_thread.run_sync(self._end_unlinked_shim)
        if link is None and self._unsaid and self._content:  # else it has no sandbox: its first start was refused
            await trio.to_thread.run_sync(self._write_notes_without_shim)
        with trio.move_on_after(QUIT_SECONDS_MAX):
            await self._swept.wait()
        if self._run is not None:
            if not self._run.is_gone and self._shim is None:
                await self._sweep(self._run)
            self._release_port(self._run)
        self._services.checks.forget(self.id)
        cgroup = self._cgroup or cgroup_of(self.id, self._services.sandboxes.read_attempt(self.id))
        if cgroup is not None:
            tree.remove_cgroup(cgroup)
            if self._services.cgroup_base is not None:
                self._services.cgroup_base.remove_if_empty()

    async def _quit(self, link: ShimLink) -> None:
        self._let_go = link
        try:
            with trio.move_on_after(QUIT_SECONDS_MAX):
                while True:
                    answer = await link.request("quit", timeout_seconds=QUIT_SECONDS_MAX)
                    if answer.get("ok") is True:
                        break
                    # Not all of its tree is gone after all; nothing of it is wanted any more.
                    self._log.warning("shim.busy", error=answer.get("error"))
                    await link.request(
                        "stop", timeout_seconds=QUIT_SECONDS_MAX, signal="KILL", grace_seconds=0, reason="discarded"
                    )
                    await trio.sleep(0.1)
        except ShimSilent:
            await self._kill_shim(link.shim)
        except ShimGone:
            pass
        if not await self._has_died(link.shim):
            await self._kill_shim(link.shim)
        self._link = self._shim = None
        await link.close()

    def _end_unlinked_shim(self) -> None:
        """One that was made for a start, and then could not be connected to."""
        for holder in lock_holders(self._services.sandboxes.root):
            if holder.attempt == self.id:
                end_with_tree(holder.shim)

    def _write_notes_without_shim(self) -> None:
        """The last words about a run whose shim is dead go into its log all the same."""
        logs = self._services.sandboxes.logs(self.id)
        try:
            logs.mkdir(mode=0o700, exist_ok=True)
            logs_fd = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._log.warning("note.not_written", text=" / ".join(self._unsaid), error=str(error))
            return
        try:
            writer = log_writer.LogWriter(logs_fd, **self._services.log)
            for text in self._unsaid:
                writer.note(log_format.SUPERVISOR, self._run.number if self._run is not None else 0, text)
            writer.close()
        finally:
            os.close(logs_fd)


def _published(directory: Path) -> tuple[int, int] | None:
    """What identifies `shim.json` as it is now; None if that or the socket beside it is gone."""
    try:
        os.stat(f"{directory}/shim.sock")
        told = os.stat(f"{directory}/shim.json")
    except OSError:
        return None
    return told.st_ino, told.st_mtime_ns
