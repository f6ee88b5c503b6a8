"""Entries and snapshots of the log, as a voter reads them from its disk and, later, from a peer."""

from __future__ import annotations

from gpulayer.core.cluster.commands import Command, LogEntry
from gpulayer.model.cluster import ClusterState
from gpulayer.wire.codec import DecodeError, decode, encode

KINDS = (LogEntry, Command, ClusterState)


def one(data: bytes) -> None:
    for kind in KINDS:
        try:
            value = decode(kind, data)
        except DecodeError:
            continue
        # What was read can be written, and every node writes it alike.
        written = encode(value)
        assert encode(decode(kind, written)) == written
