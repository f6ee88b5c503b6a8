"""The cluster as one node sees it: gossip's members, their records and the registry, made into one table.

Pure, and cheap enough for every request: nothing is decoded here. Who calls it keeps the NodeRecords, by node, and
reads one again (wire/record.py) when gossip says RecordChanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gpulayer.model.ids import NodeId
from gpulayer.model.member import DISK_LOW, DUPLICATE, IMPAIRED, RESTARTING, SLUGGISH, TCP_IMPAIRED, Member
from gpulayer.model.record import NodeRecord
from gpulayer.model.seen import NodeSeen, NodeState, Table
from gpulayer.model.units import format_duration

_CONDITIONS = (
    (SLUGGISH, "sluggish"),
    (IMPAIRED, "impaired"),
    (TCP_IMPAIRED, "tcp_impaired"),
    (RESTARTING, "restarting"),
    (DUPLICATE, "duplicate"),
    (DISK_LOW, "disk_low"),
)
_NO_RECORD = NodeRecord()


def make_table(
    *,
    own: NodeId,
    members: Mapping[NodeId, Member],
    records: Mapping[NodeId, NodeRecord],
    registry: Mapping[NodeId, str] | None,
    now: float,
    heard_at: float,
    is_isolated: bool,
    listening_since: float = 0.0,
    leader: NodeId | None = None,
    stale: Iterable[NodeId] = (),
    announced: Mapping[NodeId, int] = MappingProxyType({}),
) -> Table:
    """`registry`: names of the admitted nodes; None where it is not known here yet. `heard_at`: when anything
    authenticated was last heard of any other node. `listening_since`: when this node began to listen. `leader`: the
    node that is to be asked; the table has it only while it may be there. `stale`: nodes whose record is that of an
    older run, or not here; `announced`: versions of records that are on their way here. Instants are of one
    monotonic clock, in seconds. Nodes come sorted by id.
    """
    names = registry or {}
    unverified = frozenset(stale)
    nodes: dict[NodeId, NodeSeen] = {}
    for node in sorted({own, *members, *names}):
        member = members.get(node)
        record = records.get(node, _NO_RECORD)
        is_self = node == own
        state: NodeState
        state, reason = ("alive", "") if is_self else _state_of(member, now, listening_since)
        if is_isolated and not is_self and member is not None and state in ("alive", "suspect"):
            # It may be this node that is deaf, so gossip accuses nobody; but of none of them anything is certain now.
            state, reason = "silent", _unheard(member, now)
        if is_self:
            age = 0.0
        elif state == "alive":
            age = now - heard_at
        else:
            age = now - (_quiet_since(member) if member else listening_since)
        conditions = _conditions_of(member)
        facts = record.facts
        nodes[node] = NodeSeen(
            id=node,
            name=facts.name if facts else names.get(node, node),
            state=state,
            reason=reason,
            age_seconds=max(0.0, age),
            facts=facts,
            load=record.load,
            replicas=record.replicas,
            conditions=(*conditions, "isolated") if is_self and is_isolated else conditions,
            is_self=is_self,
            is_voter=facts.is_voter if facts else False,
            epoch=member.run.epoch if member else 0,
            incarnation=member.incarnation if member else 0,
            peer_address=member.addresses[0] if member and member.addresses else None,
            is_stale=not is_self and node in unverified,
            announced_version=0 if is_self else announced.get(node, 0),
        )
    return Table(seen_by=own, nodes=nodes, leader=leader if _is_there(nodes.get(leader) if leader else None) else None)


def _state_of(member: Member | None, now: float, listening_since: float) -> tuple[NodeState, str]:
    """Its state in the words that people see, and why it is not alive."""
    if member is None:
        heard_for = _ago(now, listening_since)
        return "silent", f"nothing of it has been heard in the {heard_for} since this node began to listen"
    if member.state == "left":
        return "left", f"it left the cluster {_ago(now, member.changed_at)} ago"
    quiet = _ago(now, _quiet_since(member))
    if member.flags & RESTARTING:
        if member.state == "dead":
            return "unsupervised", f"its daemon said that it restarts, and has not been back for {quiet}"
        return "unsupervised", "its daemon said that it restarts; its replicas go on meanwhile"
    if member.state == "alive":
        return "alive", ""
    if member.cause == "daemon" and member.state == "dead":
        return "unsupervised", f"its host is up, but its daemon is not: nothing of it has answered for {quiet}"
    return "suspect" if member.state == "suspect" else "silent", f"nothing of it has answered for {quiet}"


def _unheard(member: Member, now: float) -> str:
    if not member.heard_at:
        return "this node hears no other node, and has never heard this one"
    return f"this node hears no other node any more, and this one was heard {_ago(now, member.heard_at)} ago"


def _quiet_since(member: Member) -> float:
    # In a large cluster it was others who heard it last, up to when it was doubted: the time since then is certain.
    return max(member.heard_at, member.doubted_at)


def _ago(now: float, then: float) -> str:
    return format_duration(max(0, round(now - then)))


def _conditions_of(member: Member | None) -> tuple[str, ...]:
    if member is None or not member.flags:
        return ()
    return tuple(word for flag, word in _CONDITIONS if member.flags & flag)


def _is_there(seen: NodeSeen | None) -> bool:
    return seen is not None and seen.state in ("alive", "suspect")
