"""Streams of peer frames, as they come over a link: before and after its hello was checked."""

from __future__ import annotations

from gpulayer.wire.codec import DecodeError
from gpulayer.wire.frames import FIRST_BYTES_MAX, FRAME_BYTES_MAX, HEADER_BYTES, FrameReader, encode_frame
from gpulayer.wire.peer import Hello, JoinRequest, PeerFrame

STAGES = ((Hello, FIRST_BYTES_MAX), (JoinRequest, FIRST_BYTES_MAX), (PeerFrame, FRAME_BYTES_MAX))
PIECE_BYTES = 997


def one(data: bytes) -> None:
    for kind, bytes_max in STAGES:
        _read(FrameReader(kind=kind, bytes_max=bytes_max), data, bytes_max)
        # As one frame, whose length is right: most mutations of a stream break that first.
        _read(FrameReader(kind=kind, bytes_max=bytes_max), len(data).to_bytes(HEADER_BYTES, "big") + data, bytes_max)


def _read(reader: FrameReader, data: bytes, bytes_max: int) -> None:
    for at in range(0, len(data), PIECE_BYTES):
        reader.feed(data[at : at + PIECE_BYTES])
        try:
            while (frame := reader.next_frame()) is not None:
                _written_again(frame)
        except DecodeError:
            return
        assert reader.buffered_bytes <= HEADER_BYTES + bytes_max + PIECE_BYTES


def _written_again(frame: PeerFrame) -> None:
    written = encode_frame(frame)
    reader = FrameReader(bytes_max=FRAME_BYTES_MAX)
    reader.feed(written)
    read = reader.next_frame()
    assert read is not None
    assert encode_frame(read) == written
