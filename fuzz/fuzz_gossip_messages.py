"""Payloads of gossip, as they come in datagrams and in frames of peers that hold the cluster's key."""

from __future__ import annotations

from gpulayer.wire.codec import DecodeError
from gpulayer.wire.gossip import HEAD_BYTES, decode_and_count, encode, size_of


def one(data: bytes) -> None:
    try:
        messages, ignored = decode_and_count(data)
    except DecodeError:
        return
    assert ignored >= 0
    # What was read can be passed on, and is the same for the next reader.
    written = encode(messages)
    assert len(written) == HEAD_BYTES + sum(map(size_of, messages))
    assert decode_and_count(written) == (messages, 0)
