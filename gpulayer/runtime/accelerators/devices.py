"""The devices of this node at work: asks the driver every second, takes and keeps the host-wide locks, confirms that a
device is free.

What it all means is core/inventory.py's; here are the child that asks, /proc, the locks, and the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
import trio

from gpulayer.core.inventory import (
    PROCESSES_NAMED,
    DevicesRead,
    Elsewhere,
    ElsewhereSeen,
    Inventory,
    LockTrouble,
    NotConfirmed,
    SeenProcess,
)
from gpulayer.model.errors import GpulayerError
from gpulayer.model.ids import AttemptId
from gpulayer.model.inventory import CONFIRM_SECONDS, Reading, ReadingFailed
from gpulayer.model.node import Accelerator, GpuDetect
from gpulayer.model.replica import DeviceShare, Reason
from gpulayer.model.units import MILLI, Instant, format_gpus
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Held, Hold
from gpulayer.runtime.accelerators.device_users import DeviceUsers, pids_of, without_strange_pids
from gpulayer.runtime.accelerators.nvml import NO_DRIVER, NvmlChild, PciGpu, driver_is_likely
from gpulayer.runtime.accelerators.survey import cards_not_listed

log = structlog.get_logger()

LOOK_SECONDS = 1.0
# Where there is no driver: how often it is looked whether there is one now, which is a handful of stat() calls.
ABSENT_LOOK_SECONDS = 5.0
# An order is accepted or refused within five seconds, so that a replica can soon be placed elsewhere.
TAKE_SECONDS_MAX = 4.0
# A replica that has ended a moment ago may still be giving its lock back.
GIVING_BACK_SECONDS_MAX = 2.0
TAKE_PAUSE_SECONDS = 0.05
# For the first answer of the driver, before a device can be judged.
FIRST_READING_SECONDS_MAX = 3.5
# A lock file that could not be used: the device is left alone for so long before it is tried again.
TROUBLE_SECONDS = 60.0
CONFIRM_PAUSE_SECONDS = (0.05, 1.0)
# A walk through /proc for more processes than these goes into a thread.
PROCESSES_AT_ONCE_MAX = 64


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Why devices cannot be had now, and what is seen of them."""

    reason: Reason
    observed: tuple[Accelerator, ...]


@dataclass(frozen=True, slots=True)
class _Left:
    """Processes that are on a device though nobody has it locked any more."""

    pids: frozenset[int]
    text: str


class Devices:
    """`assigned`: what the orders of this node hold. `changed` is called when `inventory` has something new to say.
    `cards`: the GPUs that the kernel sees, with or without a driver."""

    def __init__(
        self,
        *,
        inventory: Inventory,
        locks: DeviceLocks,
        assigned: Callable[[], Mapping[AttemptId, Sequence[DeviceShare]]],
        changed: Callable[[], None],
        cards: Sequence[PciGpu] = (),
    ) -> None:
        self.inventory = inventory
        self._locks = locks
        self._assigned = assigned
        self._changed = changed
        self._cards = cards
        self._child = NvmlChild()
        self._users = DeviceUsers()
        self._holds: dict[AttemptId, tuple[Hold, ...]] = {}
        self._unlocked: dict[AttemptId, Sequence[DeviceShare]] = {}
        """Attempts that run on devices whose lock was lost while no daemon was there, and is somebody else's now."""
        self._awaited: set[AttemptId] = set()
        """Attempts whose living shim has their locks, and has not given us copies yet."""
        self._elsewhere: dict[str, Elsewhere] = {}
        self._left: dict[str, _Left] = {}
        """Devices on which processes are that outlived their lock."""
        self._given_back: dict[str, float] = {}
        """When a device was given back, whose lock its shim may keep for a moment more."""
        self.renewed: Callable[[AttemptId], None] = lambda _: None
        """Hears that an attempt's locks are held through other descriptors now, which its shim is to hold, too."""
        self._troubles: dict[str, tuple[float, str]] = {}
        """Per device until when its lock is taken for unusable, and why."""
        self._lost: dict[AttemptId, str] = {}
        """Attempts that run on devices whose lock somebody else has, and who."""
        self._listed: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._has_driver = False
        self._absent_until = -1.0
        self._readings = 0
        self._begun = 0
        self._wanted = trio.Event()
        self._looked = trio.lowlevel.ParkingLot()
        self._told: object = None
        self._logged: dict[str, Accelerator] = {}
        self._logged_detect: GpuDetect | None = None

    # --- asking -----------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. The locks are given back by the end of the process, not by this."""
        task_status.started()
        try:
            while True:
                self._wanted = trio.Event()
                next_at = trio.current_time() + LOOK_SECONDS
                await self._look()
                with trio.move_on_at(next_at):
                    await self._wanted.wait()
        finally:
            with trio.CancelScope(shield=True):
                await self._child.aclose()

    async def look_now(self) -> None:
        """Returns when a look that was begun after this call is through."""
        wanted = self._begun + 1
        self._wanted.set()
        while self._readings < wanted:
            await self._looked.park()

    async def first_look(self) -> bool:
        """Whether the devices were judged once; waits for it, for a bounded time."""
        with trio.move_on_after(FIRST_READING_SECONDS_MAX):
            while self._readings == 0:
                await self._looked.park()
        return self._readings > 0

    async def _look(self) -> None:
        self._begun += 1
        begun = self._begun
        now = trio.current_time()
        if self._has_driver or now >= self._absent_until:
            await self._ask_driver()
            if not self._has_driver:
                self._absent_until = now + ABSENT_LOOK_SECONDS - LOOK_SECONDS / 2
        self._keep_locks()
        self._look_at_locks()
        await self._name_holders()
        self._readings = begun
        self._looked.unpark_all()
        said = (
            self.inventory.accelerators,
            self.inventory.undetected,
            self.inventory.gpu_detect,
            self.inventory.drivers,
            self.warnings,
        )
        if said != self._told:
            self._told = said
            self._log_news()
            self._changed()

    def _log_news(self) -> None:
        """One line for each thing that happened to a device, in the daemon's own log."""
        inventory = self.inventory
        if inventory.gpu_detect != self._logged_detect:
            self._logged_detect = inventory.gpu_detect
            if inventory.gpu_detect == "error":
                log.warning("devices.not_detected", reasons=list(inventory.undetected))
            else:
                count, excluded = len(inventory.accelerators), len(inventory.excluded)
                log.info("devices.detected", count=count, excluded=excluded, drivers=dict(inventory.drivers))
        now = {device.uuid: device for device in inventory.accelerators}
        for uuid, device in now.items():
            before = self._logged.get(uuid)
            if device.unhealthy != (before.unhealthy if before is not None else ""):
                if device.unhealthy:
                    log.warning("device.unhealthy", device=uuid, index=device.index, reason=device.unhealthy)
                else:
                    log.info("device.well", device=uuid, index=device.index)
            if device.foreign != (before.foreign if before is not None else ""):
                event = "device.used_by_others" if device.foreign else "device.free_of_others"
                log.info(event, device=uuid, index=device.index, who=device.foreign or None)
        for uuid in self._logged.keys() - now.keys():
            log.info("device.gone", device=uuid)
        self._logged = now

    async def _ask_driver(self) -> None:
        result: Reading | ReadingFailed
        if self._has_driver or driver_is_likely():
            result = await self._child.read()
        else:
            result = NO_DRIVER
        has_driver = not isinstance(result, ReadingFailed) or result.code != "no_driver"
        if not has_driver:
            await self._child.aclose()
        self._has_driver = has_driver
        evidence: tuple[str, ...] = ()
        if isinstance(result, ReadingFailed):
            evidence = tuple(f"NVIDIA card {card.bus_id}" for card in self._cards if card.vendor == "nvidia")
        else:
            result = replace(result, notes=(*result.notes, *self._not_listed(result)))
        held = frozenset(share.uuid for shares in self._assigned().values() for share in shares)
        processes: Mapping[int, SeenProcess] = {}
        if isinstance(result, Reading):
            result, processes = await self._with_users(result)
        event = DevicesRead(result=result, processes=processes, held=held, evidence=evidence)
        self.inventory.step(event, Instant(trio.current_time()))

    def _not_listed(self, reading: Reading) -> tuple[str, ...]:
        """Cards that the kernel has and the driver does not tell of. Looked for when what it tells has changed."""
        listed = tuple(device.pci_bus_id for device in reading.devices)
        if self._listed is None or self._listed[0] != listed:
            self._listed = listed, tuple(cards_not_listed(reading, self._cards))
        return self._listed[1]

    async def _with_users(self, reading: Reading) -> tuple[Reading, Mapping[int, SeenProcess]]:
        reading = without_strange_pids(reading)
        pids = pids_of(reading)
        if len(pids) > PROCESSES_AT_ONCE_MAX or not self._users.knows(pids):
            return reading, await trio.to_thread.run_sync(self._users.look, pids)
        return reading, self._users.look(pids)

    # --- locks ------------------------------------------------------------------------------------------------------

    def _keep_locks(self) -> None:
        """Those whose file was removed, and those that could not be taken up again when the daemon started."""
        for attempt, holds in list(self._holds.items()):
            for hold in holds:
                if not hold.is_in_place():
                    self._renew(attempt, hold)
        for attempt, shares in list(self._unlocked.items()):
            self.take_again(attempt, shares)
            if attempt not in self._unlocked:
                self.renewed(attempt)

    def _look_at_locks(self) -> None:
        elsewhere: dict[str, Elsewhere] = {}
        troubles = {uuid: why for uuid, (until, why) in self._troubles.items() if trio.current_time() < until}
        for device in self.inventory.accelerators:
            try:
                milli = self._milli_elsewhere(device.uuid)
            except GpulayerError as error:
                troubles[device.uuid] = error.message
                continue
            before = self._elsewhere.get(device.uuid)
            left = self._left.get(device.uuid)
            if left is not None and left.pids & self.inventory.pids_on(device.uuid):
                elsewhere[device.uuid] = Elsewhere(milli=MILLI, text=left.text)
            elif milli > 0:
                is_as_before = before is not None and before.milli == milli
                elsewhere[device.uuid] = before if before is not None and is_as_before else Elsewhere(milli=milli)
        self._left = {uuid: left for uuid, left in self._left.items() if uuid in elsewhere}
        self._elsewhere = elsewhere
        now = Instant(trio.current_time())
        self.inventory.step(ElsewhereSeen(elsewhere=elsewhere), now)
        self.inventory.step(LockTrouble(troubles=troubles), now)

    def _milli_elsewhere(self, uuid: str) -> int:
        """How much of it is locked by none of ours. StorageFailed: that cannot be read."""
        device = self.inventory.device(uuid)
        if device is None:
            return 0
        own = [hold for holds in self._holds.values() for hold in holds]
        milli = self._locks.held_by_others(uuid, own, parent=device.parent, is_declared=device.source == "declared")
        # Ours as well, though we have no copy of its lock: its shim has not answered yet.
        for attempt in self._awaited - self._holds.keys():
            milli -= sum(share.milli for share in self.assigned(attempt) if share.uuid == uuid)
        return max(milli, 0)

    async def _name_holders(self) -> None:
        """Who it is that has what others hold, as soon as that is news: a walk through /proc, in a thread."""
        unnamed = [uuid for uuid, each in self._elsewhere.items() if each.text == Elsewhere(milli=1).text]
        for uuid in unnamed:
            device = self.inventory.device(uuid)
            path = self._locks.path(uuid, is_declared=device is not None and device.source == "declared")
            text = await trio.to_thread.run_sync(_text_of, Held(milli_free=0, path=path))
            self._elsewhere[uuid] = replace(self._elsewhere[uuid], text=text)
        if unnamed:
            self.inventory.step(ElsewhereSeen(elsewhere=self._elsewhere), Instant(trio.current_time()))

    def _renew(self, attempt: AttemptId, hold: Hold) -> None:
        """Its file was removed under it: where somebody else has locked the new one already, two hold one device."""
        try:
            held = hold.renew()
        except GpulayerError as error:
            if attempt not in self._lost:
                log.error("device.lock_lost", attempt=str(attempt), device=hold.uuid, reason=error.message)
            self._lost[attempt] = error.message
            return
        if held is None:
            self._lost.pop(attempt, None)
            log.warning("device.lock_renewed", attempt=str(attempt), device=hold.uuid)
            self.renewed(attempt)
        elif attempt not in self._lost:
            self._lost[attempt] = f"{hold.uuid} is held by another gpulayer"
            log.error("device.lock_lost", attempt=str(attempt), device=hold.uuid, reason=self._lost[attempt])

    @property
    def warnings(self) -> tuple[str, ...]:
        removed = [f"the lock of what {attempt} runs on was removed: {why}" for attempt, why in self._lost.items()]
        gone = [f"what {attempt} runs on cannot be locked: others hold it" for attempt in self._unlocked]
        return (*sorted(removed), *sorted(gone))

    async def take(self, attempt: AttemptId, shares: Sequence[DeviceShare]) -> NotTaken | None:
        """Locks them for the attempt, unless it has them already; None when it is done. The node's own last word
        (P3): a device that is not well or on which others are is not taken, whatever the order says."""
        # Also of what has run already: somebody may have taken what it had while no daemon was there, or the lock file
        # was removed.
        missing = self._missing(attempt, shares)
        if not missing:
            # A next run is not begun on a device that has failed under the one before.
            unwell = [device for share in shares if (device := self.inventory.device(share.uuid)) and device.unhealthy]
            if not unwell:
                return None
            self.release(attempt)
            return self._not_taken(shares, f"{unwell[0].label} is unhealthy: {unwell[0].unhealthy}")
        with trio.move_on_after(TAKE_SECONDS_MAX):
            return await self._take(attempt, shares, missing)
        self.release(attempt)
        return self._not_taken(shares, f"it could not be had within {TAKE_SECONDS_MAX:g} s")

    async def _take(
        self, attempt: AttemptId, shares: Sequence[DeviceShare], missing: Sequence[DeviceShare]
    ) -> NotTaken | None:
        if not await self.first_look():
            return self._not_taken(shares, "the driver has not answered yet")
        if obstacle := self._obstacle(missing):
            return self._not_taken(shares, obstacle)
        not_taken = await self._lock(attempt, missing)
        if not_taken is not None or not self.can_tell(missing):
            return not_taken
        # Now that nobody else can begin on them: is somebody there all the same? What was seen before may be a second
        # old, and a process may have outlived its lock.
        await self.look_now()
        if obstacle := self._obstacle(missing) or self._leftover(missing):
            self.release(attempt)
            return self._not_taken(shares, obstacle)
        return None

    def _missing(self, attempt: AttemptId, shares: Iterable[DeviceShare]) -> list[DeviceShare]:
        """Of these what it does not hold, or only in a file that others do not find."""
        there = {hold.uuid for hold in self._holds.get(attempt, ()) if hold.is_in_place()}
        return [share for share in shares if share.uuid not in there]

    async def _lock(self, attempt: AttemptId, shares: Sequence[DeviceShare]) -> NotTaken | None:
        deadline = trio.current_time() + GIVING_BACK_SECONDS_MAX
        while True:
            found = self._try_to_take(shares)
            if isinstance(found, list):
                before = self._holds.get(attempt, ())
                replaced = {hold.uuid for hold in found}
                _close(hold for hold in before if hold.uuid in replaced)
                self._holds[attempt] = (*(hold for hold in before if hold.uuid not in replaced), *found)
                self._lost.pop(attempt, None)
                return None
            if isinstance(found, str):
                return self._not_taken(shares, found)
            share, held = found
            now = trio.current_time()
            is_given_back = now < self._given_back.get(share.uuid, -math.inf) + GIVING_BACK_SECONDS_MAX
            milli = self._milli_elsewhere(share.uuid)
            if now >= deadline or (milli and not is_given_back):
                text = await trio.to_thread.run_sync(_text_of, held)  # walks through /proc
                seen = {share.uuid: Elsewhere(milli=milli, text=text)} if milli else {}
                self.inventory.step(ElsewhereSeen(elsewhere=seen, only=frozenset((share.uuid,))), Instant(now))
                return self._not_taken(shares, f"{self._called(share.uuid)} is {text}")
            await trio.sleep(TAKE_PAUSE_SECONDS)

    def _leftover(self, shares: Iterable[DeviceShare]) -> str:
        """A process on a device that is all ours now and on which nothing of ours has begun, below a shim though it
        is."""
        for share in shares:
            pids = sorted(self.inventory.pids_on(share.uuid)) if share.milli == MILLI else []
            found = DeviceUsers().look(pids)
            left = [f"pid {pid} ({who.name})" for pid, who in found.items() if who.kind == "managed"]
            if left:
                text = f"still used by {', '.join(left[:PROCESSES_NAMED])}"
                self._left[share.uuid] = _Left(frozenset(pids), text)
                self._look_at_locks()
                return f"{self._called(share.uuid)} is {text}"
        return ""

    def _try_to_take(self, shares: Sequence[DeviceShare]) -> list[Hold] | tuple[DeviceShare, Held] | str:
        taken: list[Hold] = []
        for share in shares:
            device = self.inventory.device(share.uuid)
            if device is None:
                _close(taken)
                return f"{share.uuid} is not a device of this node any more"
            try:
                found = self._locks.acquire(
                    share.uuid, share.milli, parent=device.parent, is_declared=device.source == "declared"
                )
            except GpulayerError as error:
                _close(taken)
                self._troubles[share.uuid] = trio.current_time() + TROUBLE_SECONDS, error.message
                self._look_at_locks()
                return error.message
            if isinstance(found, Held):
                _close(taken)
                return share, found
            taken.append(found)
        return taken

    def _obstacle(self, shares: Iterable[DeviceShare]) -> str:
        for share in shares:
            device = self.inventory.device(share.uuid)
            if device is None:
                return f"{share.uuid} is not a device of this node any more"
            if device.unhealthy:
                return f"{device.label} is unhealthy: {device.unhealthy}"
            users = self.inventory.users_of(share.uuid)
            if users:
                return f"{device.label} is used by others: {users}"
        return ""

    def _not_taken(self, shares: Sequence[DeviceShare], why: str) -> NotTaken:
        observed = [self.inventory.device(share.uuid) for share in shares]
        wanted = format_gpus(sum(share.milli for share in shares))
        reason = Reason(
            code="device_unavailable",
            text=f"the {wanted} GPU of its order cannot be had: {why}",
            hint="it waits for its turn again; `gpulayer status` shows who holds what",
        )
        self._changed()
        return NotTaken(reason, tuple(device for device in observed if device is not None))

    def assigned(self, attempt: AttemptId) -> tuple[DeviceShare, ...]:
        """What its order gives it, if there is one."""
        return tuple(self._assigned().get(attempt, ()))

    def shared_fds(self, attempt: AttemptId) -> dict[str, int]:
        """By name the descriptors that keep the attempt's locks, for its shim to hold, too."""
        return {name: fd for hold in self._holds.get(attempt, ()) for name, fd in hold.fds.items()}

    def kinds(self, shares: Iterable[DeviceShare]) -> frozenset[str]:
        """Kinds of accelerator among these, as `cuda`."""
        found = (self.inventory.device(share.uuid) for share in shares)
        return frozenset(device.kind for device in found if device is not None)

    def can_tell(self, shares: Iterable[DeviceShare]) -> bool:
        """Whether a driver is there that lists the processes on any of these."""
        return any(self.inventory.can_tell(share.uuid) for share in shares)

    def take_up(self, attempt: AttemptId, fds: Mapping[str, int]) -> None:
        """What its shim has held while no daemon was there. Takes the descriptors over, used or not."""
        self._awaited.discard(attempt)
        found = self._locks.adopt(fds)
        if attempt in self._holds:
            _close(found)
        else:
            self._holds[attempt] = tuple(found)

    def await_locks(self, attempt: AttemptId) -> None:
        """A living shim of it was found, which has not said yet what it holds."""
        self._awaited.add(attempt)

    def take_again(self, attempt: AttemptId, shares: Sequence[DeviceShare]) -> None:
        """For what runs, and whose lock died with its shim while no daemon was there: nothing may come between. Where
        something has, it is tried again every second."""
        self._awaited.discard(attempt)
        is_news = attempt not in self._unlocked
        self._unlocked.pop(attempt, None)
        taken = list(self._holds.get(attempt, ()))
        there = {hold.uuid for hold in taken}
        for share in shares:
            if share.uuid in there:
                continue
            device = self.inventory.device(share.uuid)
            try:
                found = self._locks.acquire(
                    share.uuid,
                    share.milli,
                    parent=device.parent if device is not None else "",
                    is_declared=device is not None and device.source == "declared",
                )
            except GpulayerError as error:
                found, why = None, error.message
            else:
                why = "others hold it"
            if isinstance(found, Hold):
                taken.append(found)
                continue
            self._unlocked[attempt] = shares
            if is_news:
                log.error("device.not_locked_again", attempt=str(attempt), device=share.uuid, reason=why)
        self._holds[attempt] = tuple(taken)

    def release(self, attempt: AttemptId) -> None:
        """Nothing of it is left. Its shim gives its copies back when it ends, or is told to."""
        for hold in self._holds.pop(attempt, ()):
            hold.close()
            self._given_back[hold.uuid] = trio.current_time()
        self._lost.pop(attempt, None)
        self._unlocked.pop(attempt, None)
        self._awaited.discard(attempt)

    async def wait_clear(self, shares: Iterable[DeviceShare], tell: Callable[[str], None]) -> None:
        """All processes of a run have ended: returns when the driver, where it can tell, lists none any more on its
        devices, or has not confirmed that in time; then the device is unhealthy. `tell` hears what is waited for."""
        left = [share.uuid for share in shares if self.inventory.can_tell(share.uuid)]
        # Those of this run are among the ones that are gone at the first look; what others leave later on a device that
        # is shared is not waited for.
        ours: dict[str, frozenset[int]] = {}
        deadline = trio.current_time() + CONFIRM_SECONDS
        pause = CONFIRM_PAUSE_SECONDS[0]
        while left:
            await self.look_now()
            for uuid in list(left):
                gone = self.inventory.gone_on(uuid)
                if gone is not None:
                    gone = frozenset(pid for pid in gone if not self._users.was_foreign(pid))
                    ours[uuid] = ours[uuid] & gone if uuid in ours else gone
                if not self.inventory.can_tell(uuid) or (gone is not None and not ours[uuid]):
                    left.remove(uuid)
            if not left:
                return
            whys = {uuid: self._why_not_clear(uuid) for uuid in left}
            if trio.current_time() >= deadline:
                for uuid, why in whys.items():
                    self.inventory.step(NotConfirmed(uuid=uuid, why=why), Instant(trio.current_time()))
                    log.error("device.not_confirmed_free", device=uuid, reason=why)
                self._changed()
                return
            if pause >= CONFIRM_PAUSE_SECONDS[1]:
                tell("; ".join(whys.values()))
            await trio.sleep(pause)
            pause = min(pause * 2, CONFIRM_PAUSE_SECONDS[1])

    def _called(self, uuid: str) -> str:
        """As people read it: `GPU 2 (GPU-ecdd1234)`."""
        device = self.inventory.device(uuid)
        return device.label if device is not None else uuid

    def _why_not_clear(self, uuid: str) -> str:
        failure = self.inventory.failure
        if failure is not None:
            return f"{failure.text}, so nobody can say whether {uuid} is free"
        if self.inventory.gone_on(uuid) is None:
            device = self.inventory.device(uuid)
            why = f": {device.unhealthy}" if device is not None and device.unhealthy else ""
            return f"the driver does not tell who is on {uuid}{why}"
        return f"the driver still lists a process on {uuid} that is gone"


def _text_of(held: Held) -> str:
    return held.text


def _close(holds: Iterable[Hold]) -> None:
    for hold in holds:
        hold.close()
