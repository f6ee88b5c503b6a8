"""Frames on a byte stream, cut anywhere, and within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.wire.codec import DecodeError, EncodeError
from gpulayer.wire.frames import FIRST_BYTES_MAX, FRAME_BYTES_MAX, HEADER_BYTES, FrameReader, encode_frame
from gpulayer.wire.peer import Goodbye, GossipFrame, Hello, PeerFrame

HELLO = Hello(use="peer", protocol=(1, 1), cluster_id="c-1", run=Run(NodeId("n-1"), 1, 2**64 - 1), addresses=())


def frames_of(reader: FrameReader) -> list[PeerFrame]:
    found = []
    while (frame := reader.next_frame()) is not None:
        found.append(frame)
    return found


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_come_out_as_they_went_in_however_the_stream_was_cut(payloads: list[bytes], step: int) -> None:
    sent = [GossipFrame(payload=payload) for payload in payloads]
    data = b"".join(map(encode_frame, sent))
    reader, received = FrameReader(), []
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
        received += frames_of(reader)
    assert received == sent
    assert reader.buffered_bytes == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_decode_error(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    try:
        frames_of(reader)
    except DecodeError:
        pass


@pytest.mark.parametrize("size", [0, FIRST_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_by_its_header(size: int) -> None:
    reader = FrameReader()
    reader.feed(size.to_bytes(HEADER_BYTES, "big"))
    with pytest.raises(DecodeError, match=f"a frame of {size} bytes"):
        reader.next_frame()


def test_the_bound_may_be_raised_between_two_frames() -> None:
    large = GossipFrame(payload=bytes(FIRST_BYTES_MAX))
    reader = FrameReader()
    reader.feed(encode_frame(HELLO) + encode_frame(large))
    assert reader.next_frame() == HELLO
    reader.bytes_max = FRAME_BYTES_MAX
    assert reader.next_frame() == large


def test_a_stage_takes_only_its_own_kind() -> None:
    reader = FrameReader(kind=Hello)
    reader.feed(encode_frame(Goodbye()))
    with pytest.raises(DecodeError, match="expected Hello, found text 'Goodbye'"):
        reader.next_frame()


def test_a_frame_that_no_reader_would_take_is_not_made() -> None:
    with pytest.raises(EncodeError, match="GossipFrame has"):
        encode_frame(GossipFrame(payload=bytes(FRAME_BYTES_MAX)))
