"""What waits to be sent to one peer: bounded, in three lanes. Putting never waits; the link's writer takes.

Gossip loses its oldest frames when it is full, because newer ones say more. What must arrive (orders, reports, keys) is
kept or refused as a whole. Urgent frames (probes) go ahead of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

# Frames that are there together go out in one write, which is one TLS record and one system call.
WRITE_BYTES = 64 * 1024


class Outbox:
    def __init__(self, *, frames: int, bytes_max: int, kept_frames: int, kept_bytes: int) -> None:
        self._gossip = _Lane(frames, bytes_max)
        self._urgent = _Lane(frames, bytes_max)
        self._kept = _Lane(kept_frames, kept_bytes)
        self._news = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._gossip.frames) + len(self._urgent.frames) + len(self._kept.frames)

    @property
    def waiting_bytes(self) -> int:
        return self._gossip.bytes + self._urgent.bytes + self._kept.bytes

    def put_gossip(self, frame: bytes, *, urgent: bool = False) -> int:
        """How many older frames made room for it."""
        lane = self._urgent if urgent else self._gossip
        dropped = 0
        while lane.frames and not lane.has_room(frame):
            lane.take()
            dropped += 1
        lane.put(frame)
        self._news.unpark_all()
        return dropped

    def put_kept(self, frame: bytes) -> bool:
        """False: there is no room, and it was not put. A single frame always has room."""
        if self._kept.frames and not self._kept.has_room(frame):
            return False
        self._kept.put(frame)
        self._news.unpark_all()
        return True

    def take_all(self) -> bytes:
        """Everything, in the order in which it would be sent."""
        frames = [*self._urgent.frames, *self._kept.frames, *self._gossip.frames]
        for lane in (self._urgent, self._kept, self._gossip):
            lane.clear()
        return b"".join(frames)

    async def take(self, until: Callable[[], bool]) -> bytes:
        """What is to be sent next, some frames together; empty once `until` holds (say wake() then)."""
        while not until():
            chosen: list[bytes] = []
            size = 0
            while (lane := self._first_lane()) is not None and (not chosen or size < WRITE_BYTES):
                frame = lane.take()
                chosen.append(frame)
                size += len(frame)
            if chosen:
                return b"".join(chosen)
            await self._news.park()
        return b""

    def wake(self) -> None:
        """Whoever takes shall look at its condition again."""
        self._news.unpark_all()

    def _first_lane(self) -> _Lane | None:
        for lane in (self._urgent, self._kept, self._gossip):
            if lane.frames:
                return lane
        return None


class _Lane:
    __slots__ = ("_bytes_max", "_frames_max", "bytes", "frames")

    def __init__(self, frames_max: int, bytes_max: int) -> None:
        self.frames: deque[bytes] = deque()
        self.bytes = 0
        self._frames_max = frames_max
        self._bytes_max = bytes_max

    def has_room(self, frame: bytes) -> bool:
        return len(self.frames) < self._frames_max and self.bytes + len(frame) <= self._bytes_max

    def put(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.bytes += len(frame)

    def take(self) -> bytes:
        frame = self.frames.popleft()
        self.bytes -= len(frame)
        return frame

    def clear(self) -> None:
        self.frames.clear()
        self.bytes = 0
