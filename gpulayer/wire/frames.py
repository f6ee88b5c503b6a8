"""Peer frames on a byte stream: four bytes of length, then the CBOR of one PeerFrame. Sans-IO and bounded by stage.

Before the hello of a link was checked little is read (FIRST_BYTES_MAX), afterwards what a frame may be at most. The
length is judged before anything of the frame is kept.
"""

from __future__ import annotations

import struct
from typing import Any, cast

from gpulayer.wire.codec import DecodeError, EncodeError, decode, encode
from gpulayer.wire.peer import PeerFrame

HEADER_BYTES = 4
# A hello with its four addresses has some 400 bytes.
FIRST_BYTES_MAX = 16 * 1024
# A joiner has shown no certificate. Its capabilities, with 64 devices, have some 30 KiB.
JOIN_BYTES_MAX = 256 * 1024
# A MiB of content and what is around it. More would hold the loop for longer than heartbeats should wait.
FRAME_BYTES_MAX = 1024 * 1024 + 64 * 1024

_LENGTH = struct.Struct(">I")


def encode_frame(frame: PeerFrame) -> bytes:
    """Length and content. EncodeError: it breaks its type hints, or has more than FRAME_BYTES_MAX bytes."""
    content = encode(frame)
    if len(content) > FRAME_BYTES_MAX:
        raise EncodeError(f"{type(frame).__name__} has {len(content)} bytes, a frame at most {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(content)) + content


class FrameReader:
    """Bytes in, frames out. `kind` and `bytes_max` say what the next frame may be, and may be changed between two.

    After a DecodeError the stream is out of step and there is no way on: close it.
    """

    def __init__(self, *, kind: Any = PeerFrame, bytes_max: int = FIRST_BYTES_MAX) -> None:
        self.kind = kind
        self.bytes_max = bytes_max
        self._buffer = bytearray()
        self._start = 0

    @property
    def has_header(self) -> bool:
        """Whether the length of the next frame is there."""
        return len(self._buffer) - self._start >= HEADER_BYTES

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer) - self._start

    def feed(self, data: bytes | bytearray) -> None:
        """What the stream gave. Take all frames before feeding more: that bounds the buffer."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next_frame(self) -> PeerFrame | None:
        """The next whole frame; None: feed more. DecodeError: too long, or not of `kind`."""
        if not self.has_header:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer, self._start)
        if not 0 < size <= self.bytes_max:
            raise DecodeError(f"a frame of {size} bytes, 1 to {self.bytes_max} may be")
        end = self._start + HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        content = bytes(memoryview(self._buffer)[self._start + HEADER_BYTES : end])
        self._start = end
        return cast(PeerFrame, decode(self.kind, content, bytes_max=self.bytes_max))
