"""A node's record as the bytes that gossip carries, key by key, and back.

The daemon gives gossip (SetOwn) what changes() finds between two of entries_of(); what gossip has of another node
becomes a NodeRecord by read(), again after each change, at the cost of the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpulayer.model.ids import AttemptId
from gpulayer.model.record import LOAD_KEY, NODE_KEY, REPLICA_KEYS, Load, NodeFacts, NodeRecord, ReplicaRecord
from gpulayer.wire.codec import DecodeError, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A key whose value could not be read: of a later version, or damaged. The rest of the record holds."""

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """A record, and what it was read from."""

    record: NodeRecord = field(default_factory=NodeRecord)
    unreadable: tuple[Unreadable, ...] = ()
    """By key. Keys of a kind that this version does not know are passed over, and not among these."""
    values: Mapping[str, bytes] = field(default_factory=dict)


def key_of(attempt: AttemptId) -> str:
    return f"{REPLICA_KEYS}{attempt}"


def entries_of(
    *, facts: NodeFacts | None = None, load: Load | None = None, replicas: Iterable[ReplicaRecord] = ()
) -> dict[str, bytes]:
    """The record of these parts, or the part of a record that they are."""
    entries: dict[str, bytes] = {}
    if facts is not None:
        entries[NODE_KEY] = encode(facts)
    for replica in replicas:
        entries[key_of(replica.status.attempt)] = encode(replica)
    if load is not None:
        entries[LOAD_KEY] = encode(load)
    return entries


def changes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """What turns one record into the other; None deletes."""
    found: dict[str, bytes | None] = {key: value for key, value in after.items() if before.get(key) != value}
    return found | {key: None for key in sorted(before.keys() - after.keys())}


def read(values: Mapping[str, bytes], before: ReadRecord | None = None) -> ReadRecord:
    """The record of these values. With what was read `before` of the same node, only what differs is decoded."""
    before = before or ReadRecord()
    if values is before.values:
        return before
    facts, load = None, None
    replicas: dict[AttemptId, ReplicaRecord] = {}
    unreadable = []
    known = {key_of(attempt): replica for attempt, replica in before.record.replicas.items()}
    for key, value in values.items():
        is_same = before.values.get(key) == value
        try:
            if key == NODE_KEY:
                facts = before.record.facts if is_same and before.record.facts else decode(NodeFacts, value)
            elif key == LOAD_KEY:
                load = before.record.load if is_same and before.record.load else decode(Load, value)
            elif key.startswith(REPLICA_KEYS):
                replica = known.get(key) if is_same else None
                if replica is None:
                    replica = _replica(key, value)
                replicas[replica.status.attempt] = replica
        except DecodeError as exc:
            unreadable.append(Unreadable(key=key, why=str(exc)))
    return ReadRecord(
        record=NodeRecord(facts=facts, load=load, replicas=replicas),
        unreadable=tuple(sorted(unreadable, key=lambda one: one.key)),
        values=values,
    )


def node_record(values: Mapping[str, bytes]) -> NodeRecord:
    """read(), where nobody asks what could not be read."""
    return read(values).record


def _replica(key: str, value: bytes) -> ReplicaRecord:
    replica = decode(ReplicaRecord, value)
    if key != key_of(replica.status.attempt):
        # Else one value could stand for several attempts, and hide the true one of another.
        raise DecodeError(f"it is of attempt {str(replica.status.attempt)!r:.80}")
    return replica
