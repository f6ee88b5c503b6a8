"""One line of the cluster's event feed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change, said once. Ordered per source: the log (by index), or a node (by epoch and seq)."""

    source: str
    """`log`, or the id of the node that reports."""
    epoch: int
    seq: int
    at_utc: float
    kind: str
    """noun.verb, as in `replica.ready`."""
    job: str = ""
    replica: int | None = None
    node: str = ""
    text: str = ""
    data: tuple[tuple[str, str], ...] = ()
