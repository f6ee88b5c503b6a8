"""Brings what lies on other nodes into a merge of logs: one question at a time for each node, about all of its logs.

Asking again, and not a stream from there, follows a log: it costs a millisecond on a link that is kept, nothing has to
be undone when a job ends or a reader goes, and it is what the merge does with the files of its own node, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from gpulayer.api.facade import NodeFacade
from gpulayer.api.owners import LOGS_PATH, NODES_AT_A_TIME_MAX, Owners
from gpulayer.api.remote_log import RemoteLog
from gpulayer.model.errors import GpulayerError, Unreachable
from gpulayer.model.ids import NodeId

# A log may be read from a disk that is busy.
ANSWER_SECONDS_MAX = 5.0
# A node that did not answer is not asked again at once: whoever follows others would wait for it each time.
PAUSE_SECONDS = 10.0


class Fetching:
    """For one reader."""

    def __init__(self, node: NodeFacade, owners: Owners) -> None:
        self._node = node
        self._owners = owners
        self._not_before: dict[NodeId, float] = {}

    async def look(self, logs: Iterable[RemoteLog]) -> None:
        """For news in logs that had come to their end."""
        await self._fetch([log for log in logs if log.is_worth_a_look])

    async def fill(self, logs: Iterable[RemoteLog]) -> None:
        """Until the next line of each is here, or it is known that there is none now."""
        await self._fetch([log for log in logs if log.is_behind and log.has_room])

    async def _fetch(self, logs: Sequence[RemoteLog]) -> None:
        by_node: dict[NodeId, list[RemoteLog]] = {}
        for log in logs:
            by_node.setdefault(log.node, []).append(log)
        if not by_node:
            return
        limit = trio.CapacityLimiter(NODES_AT_A_TIME_MAX)

        async def ask(node: NodeId, of: list[RemoteLog]) -> None:
            async with limit:
                await self._ask(node, of)

        async with trio.open_nursery() as nursery:
            for node, of in sorted(by_node.items()):
                nursery.start_soon(ask, node, of)

    async def _ask(self, node: NodeId, logs: list[RemoteLog]) -> None:
        if trio.current_time() < self._not_before.get(node, 0.0):
            for log in logs:
                log.is_behind = False
            return
        try:
            answer = await self._owners.ask(node, LOGS_PATH, [log.question() for log in logs], ANSWER_SECONDS_MAX)
            try:
                for log, each in zip(logs, answer["of"], strict=True):
                    log.answered(each)
            except (LookupError, TypeError, ValueError) as error:
                raise Unreachable("what it answers is no answer", hint="upgrade the older node") from error
        except GpulayerError as error:
            self._not_before[node] = trio.current_time() + PAUSE_SECONDS
            for log in logs:
                said = f"the output of {log.attempt.replica} is missing here: {self._owners.silence_of(node, error)}"
                log.missing(said, self._node.now_utc())
