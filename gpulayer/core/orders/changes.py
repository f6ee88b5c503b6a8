"""Orders as a state has them, and what becomes of them between two states: which node has which order, new or gone.

Pure functions. A state costs what changed in it: jobs are frozen and shared between states, so one that is the same
object is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpulayer.core.replica.messages import Order
from gpulayer.model.cluster import ClusterState, Job, Replica
from gpulayer.model.ids import AttemptId, NodeId

# Names of fields, ids, devices; a plain order has some 400 bytes.
ORDER_BYTES = 600


@dataclass(slots=True)
class OrderChanges:
    """Of one node: orders that are new or not as they were, and attempts that have none any more."""

    changed: dict[AttemptId, Order] = field(default_factory=dict)
    gone: list[AttemptId] = field(default_factory=list)


def orders_of(state: ClusterState, node: NodeId) -> tuple[Order, ...]:
    """What that node shall run, and release. Looks at every replica there is."""
    return tuple(
        order
        for job in state.jobs.values()
        if job.is_live
        for replica in job.replicas
        if replica.assignment is not None and replica.assignment.node == node
        if (order := _order(job, replica)) is not None
    )


def all_orders(state: ClusterState) -> dict[NodeId, dict[AttemptId, Order]]:
    """By node; a node without any is left out."""
    found: dict[NodeId, dict[AttemptId, Order]] = {}
    for job in state.jobs.values():
        for replica in job.replicas:
            if (order := _order(job, replica)) is not None:
                found.setdefault(order.assignment.node, {})[order.assignment.id] = order
    return found


def _order(job: Job, replica: Replica) -> Order | None:
    if not job.is_live or replica.assignment is None:
        return None
    return Order(
        assignment=replica.assignment, spec=job.spec, job_name=job.name, outcome_known=replica.outcome is not None
    )


def bytes_of(order: Order) -> int:
    """About how much it takes on a link. What a job may have of other words is bounded, and small beside this."""
    spec = order.spec
    words = sum(len(word.encode()) for word in spec.argv)
    variables = sum(len(key.encode()) + len(value.encode()) for key, value in spec.env)
    return ORDER_BYTES + words + variables


def order_changes(before: ClusterState, after: ClusterState) -> dict[NodeId, OrderChanges]:
    """By node; a node that nothing changed for is left out. States between the two may be skipped."""
    found: dict[NodeId, OrderChanges] = {}
    if after.jobs is before.jobs:
        return found
    for job_id, job in after.jobs.items():
        old = before.jobs.get(job_id)
        if old is not job:
            _compare(old, job, found)
    for job_id in before.jobs.keys() - after.jobs.keys():
        _compare(before.jobs[job_id], None, found)
    return found


def _compare(old: Job | None, new: Job | None, found: dict[NodeId, OrderChanges]) -> None:
    is_same_job = (
        old is not None
        and new is not None
        and old.spec is new.spec
        and old.name == new.name
        and old.is_live == new.is_live
    )
    old_replicas = old.replicas if old is not None else ()
    new_replicas = new.replicas if new is not None else ()
    for index in range(max(len(old_replicas), len(new_replicas))):
        was = old_replicas[index] if index < len(old_replicas) else None
        now = new_replicas[index] if index < len(new_replicas) else None
        if was is now and is_same_job:
            continue
        before = _order(old, was) if old is not None and was is not None else None
        after = _order(new, now) if new is not None and now is not None else None
        if before == after:
            continue
        if before is not None and (after is None or before.assignment.id != after.assignment.id):
            found.setdefault(before.assignment.node, OrderChanges()).gone.append(before.assignment.id)
        if after is not None:
            found.setdefault(after.assignment.node, OrderChanges()).changed[after.assignment.id] = after
