"""What happens on this node, for people: into its feed, from which events are passed on (event_relay.py)."""

from __future__ import annotations

import time

import structlog

from gpulayer.core.gossip.messages import MemberChanged
from gpulayer.core.replica.messages import Announce
from gpulayer.model.event import Event
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.runtime.event_store import EventStore

log = structlog.get_logger()


class OwnEvents:
    """Numbered in the order in which they happen, of one run of the daemon."""

    def __init__(self, events: EventStore, *, node: NodeId, name: str, epoch: int) -> None:
        self._events, self._node, self._name, self._epoch = events, node, name, epoch
        self._seq = 0

    def announce(self, attempt: AttemptId, said: Announce, *, to_feed: bool) -> None:
        """What a life cycle says. Not `to_feed`: somebody else tells it, and here it is logged alone."""
        replica = attempt.replica
        log.info(said.kind, job=replica.job, replica=replica.index, attempt=attempt.attempt, text=said.text)
        if to_feed:
            data = (*said.data, ("attempt", str(attempt.attempt)))
            self._add(said.kind, said.text, self._name, data, job=replica.job, replica=replica.index)

    def tell_of_member(self, change: MemberChanged, name: str) -> None:
        """By the voter alone, so that each change is told once. `name`: what the member is called."""
        before, after = change.before, change.after
        if before is not None and before.state == after.state and before.run == after.run:
            return
        kind = {"dead": "unsupervised" if after.cause == "daemon" else "silent"}.get(after.state, after.state)
        data = (("id", after.id), ("epoch", str(after.run.epoch)))
        self._add(f"node.{kind}", f"node {name} is {kind}: {change.text}", name, data)

    def _add(
        self,
        kind: str,
        text: str,
        node: str,
        data: tuple[tuple[str, str], ...],
        *,
        job: str = "",
        replica: int | None = None,
    ) -> None:
        self._seq += 1
        self._events.add(
            [
                Event(
                    source=self._node,
                    epoch=self._epoch,
                    seq=self._seq,
                    at_utc=time.time(),
                    kind=kind,
                    job=job,
                    replica=replica,
                    node=node,
                    text=text,
                    data=data,
                )
            ]
        )
