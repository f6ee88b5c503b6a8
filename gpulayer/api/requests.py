"""What handlers have in common: the node behind a request, its body, one moment's view, and answers in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import cast

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.facade import NodeFacade
from gpulayer.api.owners import Owners
from gpulayer.api.problems import JSON
from gpulayer.api.reach import Reach
from gpulayer.core.cluster.view import JobView, job_view
from gpulayer.core.placement.plan import waiting_reasons
from gpulayer.core.placement.stock import NodeStock, stock_of
from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.ids import AttemptId, JobId, NodeId
from gpulayer.model.replica import Reason, ReplicaStatus
from gpulayer.model.seen import Table
from gpulayer.wire.http import Json, dump
from gpulayer.wire.nodes import node_to_json

# Keys of the ASGI scope, set by app.py once a request may be served.
MOMENTS = "gpulayer.moments"
BODY = "gpulayer.body"
ASKED_BY_PEER = "gpulayer.asked_by_peer"
"""The RequestHead of a request that came from another node."""
REFUSED_LATER = "gpulayer.refused_later"
"""Waits until the token that let the request in is good no more; not there on the trusted side."""


# What is said of all nodes takes long to put together: of 200 with eight GPUs each, 25 ms. Whoever asks meanwhile
# gets the same.
LATELY_SECONDS = 0.05


class LocalRoute(Route):
    """Answered by whichever node is asked, from what it knows itself (facade.table(), its host). Any other route needs
    the log: a node that does not have it passes the request on."""


class Moment:
    """State and statuses as they were when it was made. A handler takes one and goes on with it."""

    def __init__(self, node: NodeFacade, owners: Owners, waiting: WaitingReasons) -> None:
        self.node = node
        self.owners = owners
        self.version = node.version_of_view
        self.state: ClusterState = node.observed_state
        self.statuses: Mapping[AttemptId, ReplicaStatus] = node.statuses()
        self.now_utc = node.now_utc()
        self.node_names: dict[NodeId, str] = {known.id: known.name for known in self.state.nodes.values()}
        self._waiting = waiting

    @cached_property
    def table(self) -> Table:
        return self.node.table()

    @cached_property
    def stock(self) -> Sequence[NodeStock]:
        """Every node, by name, and what is free of it: by the log where it is here, else by the records."""
        return stock_of(self.table, self.state if self.node.is_voter else None)

    @cached_property
    def node_documents(self) -> Sequence[Json]:
        return [node_to_json(each) for each in self.stock]

    def view(self, job: Job) -> JobView:
        return job_view(
            job,
            self.statuses,
            self._reason_to_wait(job.id),
            node_names=self.node_names,
            nodes=self.state.nodes,
            seen=self.table.nodes,
            now_utc=self.now_utc,
        )

    def _reason_to_wait(self, job: JobId) -> WaitingReason:
        return WaitingReason(self._waiting, self.state, job)


class WaitingReasons:
    """Why what waits does. It takes a whole plan to know, so that it is made once per state, when somebody asks."""

    def __init__(self, node: NodeFacade) -> None:
        self._node = node
        self._state: ClusterState | None = None
        self._placeable: dict[NodeId, str] = {}
        self._reasons: Mapping[tuple[JobId, int], Reason] = {}

    def of(self, state: ClusterState) -> Mapping[tuple[JobId, int], Reason]:
        placeable = dict(self._node.placeable())
        if state is not self._state or placeable != self._placeable:
            self._reasons = waiting_reasons(state, placeable)
            self._state, self._placeable = state, placeable
        return self._reasons


class WaitingReason:
    """As core/cluster/view.py asks for it: only where a replica waits."""

    def __init__(self, reasons: WaitingReasons, state: ClusterState, job: JobId) -> None:
        self._reasons = reasons
        self._state = state
        self._job = job

    def __call__(self, replica: int) -> Reason | None:
        return self._reasons.of(self._state).get((self._job, replica))


class Moments:
    """Makes them; one for each application, for as long as it lives."""

    def __init__(self, node: NodeFacade) -> None:
        self.node = node
        self.owners = Owners(node)
        self.reach = Reach()
        self._lately: tuple[float, Moment] | None = None
        self._waiting = WaitingReasons(node)

    def now(self) -> Moment:
        return Moment(self.node, self.owners, self._waiting)

    def lately(self) -> Moment:
        """One that may be LATELY_SECONDS old, if nothing has changed since."""
        made = self._lately
        now = trio.current_time()
        if made is None or now - made[0] > LATELY_SECONDS or made[1].version != self.node.version_of_view:
            made = self._lately = now, self.now()
        return made[1]


def moments_of(request: Request) -> Moments:
    return cast(Moments, request.scope[MOMENTS])


def node_of(request: Request) -> NodeFacade:
    return moments_of(request).node


def moment_of(request: Request) -> Moment:
    return moments_of(request).now()


def body_of(request: Request) -> bytes:
    """Read already, within its bounds."""
    return cast(bytes, request.scope[BODY])


def answer(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(document), status_code=status, headers=headers, media_type=JSON)
