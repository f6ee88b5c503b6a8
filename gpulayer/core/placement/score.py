"""Which of several places that fit is best: the one that leaves the rest of the cluster most useful.

Integers compared field by field, so that the same state gives the same choice on every node (P6), and `job explain` can
show what decided. What is equal in all of them is decided by name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Score:
    """Lower is better; the first field that differs decides."""

    own_replicas: int
    """Replicas of the same job there: one node down should take as little of it along as possible."""
    share_left_milli: int
    """Of the GPU that would be shared, what is left then: full ones are filled up, so whole ones stay free."""
    device_memory_mib: int
    """Of all devices taken: the smallest that do, so that large ones stay for those who need them."""
    gpus_left_milli: int
    """Free on the node afterwards: nodes in use are filled up, so that one stays for what needs many GPUs, and work
    without a GPU goes where none is waiting for some."""
    replicas_there: int
    """Of any job: CPUs and memory that nobody asked for are shared evenly."""


def told(score: Score) -> str:
    """The terms in order: `own_replicas=0 share_left_milli=500 …`."""
    return " ".join(f"{field.name}={getattr(score, field.name)}" for field in fields(score))
