"""The devices that a node had last, kept over restarts: one that its driver lists no more is missed, and not forgotten.

Of a node that holds the log they are in the log; this is for one that follows. A hint and no more: what the driver says
counts. A file that cannot be read is an empty one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import trio

from gpulayer.model.node import Accelerator
from gpulayer.runtime.identity import atomic_write
from gpulayer.wire.codec import DecodeError, decode, encode

log = structlog.get_logger()

FILE_NAME = "devices.last"
# Some hundred devices take a tenth of this.
FILE_BYTES_MAX = 1024 * 1024
# A device that comes and goes is not written down each time: a write is a sync.
LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    devices: tuple[Accelerator, ...] = ()


class KnownDevices:
    """`accelerators`, as they were kept; `run` keeps them."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        self._kept = _read(self._path)

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        return self._kept.devices

    async def run(self, now: Callable[[], tuple[Accelerator, ...]]) -> None:
        """For good. `now()`: what there is."""
        while True:
            await self.keep(now())
            await trio.sleep(LOOK_SECONDS)

    async def keep(self, devices: Iterable[Accelerator]) -> None:
        """Make it durable, if it is news. Where it cannot be written that is logged, and it is news again."""
        found = _Kept(devices=tuple(map(_lasting, devices)))
        if found == self._kept:
            return
        try:
            await trio.to_thread.run_sync(atomic_write, self._path, encode(found), abandon_on_cancel=True)
            self._kept = found
        except OSError as error:
            log.warning("devices.not_kept", path=str(self._path), reason=error.strerror or str(error))


def _lasting(device: Accelerator) -> Accelerator:
    """Without what somebody else holds of it, which is another one's to know after a restart."""
    return replace(device, foreign="", foreign_milli=0)


def _read(path: Path) -> _Kept:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES_MAX:
                raise DecodeError(f"larger than {FILE_BYTES_MAX} bytes")
            return decode(_Kept, file.read())
    except FileNotFoundError:
        return _Kept()
    except (OSError, DecodeError) as error:
        log.warning("devices.forgotten", path=str(path), reason=str(error))
        return _Kept()
