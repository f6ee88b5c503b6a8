"""What only the node that runs, or ran, a replica can say of it, asked from there: output, history, sandbox.

A node that cannot be reached is a sentence in the answer, and no failure of the rest of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from gpulayer.api.facade import NodeFacade
from gpulayer.api.forwarding import ask_node
from gpulayer.api.last_lines import last_output
from gpulayer.model.errors import GpulayerError, Unreachable
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.wire.http import Json, dump
from gpulayer.wire.peer import RequestHead

# What nodes ask one another (local.py).
LOCAL_PREFIX = "/v1/local/"
ATTEMPTS_PATH = LOCAL_PREFIX + "attempts"
KEPT_PATH = LOCAL_PREFIX + "kept"
LOGS_PATH = LOCAL_PREFIX + "logs"

# A status is waited for by a person.
STATUS_SECONDS_MAX = 2.0
NODES_AT_A_TIME_MAX = 32
ROOTS_MAX = 4096

_threads = trio.CapacityLimiter(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What the owner says of one attempt."""

    sandbox: str | None = None
    history: tuple[tuple[float, str], ...] = ()
    lines: tuple[str, ...] = ()
    missing: str = ""
    """Why the rest is empty, as a sentence."""


class Owners:
    """Asks them for one node; kept as long as its application, for what need not be asked again."""

    def __init__(self, node: NodeFacade) -> None:
        self._node = node
        self._roots: dict[tuple[NodeId, int], str] = {}
        """(node, epoch) -> what its sandboxes' paths begin with."""

    async def sandboxes(self, wanted: Mapping[AttemptId, NodeId]) -> dict[AttemptId, str | None]:
        """Where each attempt's sandbox is, on its node; None where it cannot be asked."""
        others = {each: owner for each, owner in wanted.items() if owner != self._node.node_id}
        # One of each node is enough to know the others.
        first = {owner: each for each, owner in others.items() if self._root(owner) is None}
        if first:
            await self.details({each: (owner, None) for owner, each in first.items()})
        found: dict[AttemptId, str | None] = {
            each: str(self._node.sandbox(each)) for each in wanted.keys() - others.keys()
        }
        for each, owner in others.items():
            root = self._root(owner)
            found[each] = None if root is None else f"{root}{each}"
        return found

    async def details(self, wanted: Mapping[AttemptId, tuple[NodeId, int | None]]) -> dict[AttemptId, Details]:
        """By attempt, whose owner and run (None: no lines of output) is given."""
        by_owner: dict[NodeId, dict[AttemptId, int | None]] = {}
        for attempt, (owner, run) in wanted.items():
            by_owner.setdefault(owner, {})[attempt] = run
        found: dict[AttemptId, Details] = {}
        limit = trio.CapacityLimiter(NODES_AT_A_TIME_MAX)

        async def ask(owner: NodeId, of: dict[AttemptId, int | None]) -> None:
            async with limit:
                found.update(await self._details(owner, of))

        async with trio.open_nursery() as nursery:
            for owner, of in sorted(by_owner.items()):
                nursery.start_soon(ask, owner, of)
        return found

    async def kept(self, wanted: Mapping[NodeId, Sequence[AttemptId]]) -> dict[AttemptId, NodeId]:
        """Whose logs are still there, and where."""
        found: dict[AttemptId, NodeId] = {}
        limit = trio.CapacityLimiter(NODES_AT_A_TIME_MAX)

        async def ask(owner: NodeId, attempts: Sequence[AttemptId]) -> None:
            async with limit:
                for attempt in await self._kept(owner, attempts):
                    found[attempt] = owner

        async with trio.open_nursery() as nursery:
            for owner, attempts in sorted(wanted.items()):
                nursery.start_soon(ask, owner, attempts)
        return found

    # --- one node ---------------------------------------------------------------------------------------------------

    async def _details(self, owner: NodeId, of: Mapping[AttemptId, int | None]) -> dict[AttemptId, Details]:
        if owner == self._node.node_id:
            return await self._own_details(of)
        try:
            answer = await self.ask(
                owner, ATTEMPTS_PATH, [[str(each), run] for each, run in of.items()], STATUS_SECONDS_MAX
            )
            found = {each: _details_from(answer.get(str(each))) for each in of}
        except GpulayerError as error:
            return {each: Details(missing=self.silence_of(owner, error)) for each in of}
        for attempt, details in found.items():
            self._note_root(owner, attempt, details.sandbox or "")
        return found

    async def _own_details(self, of: Mapping[AttemptId, int | None]) -> dict[AttemptId, Details]:
        node = self._node
        logs_of = {each: (node.log_dir(each), run) for each, run in of.items() if run is not None}
        lines: dict[AttemptId, tuple[str, ...]] = {}
        if logs_of:
            # A disk that hangs must not hang the daemon; the thread is left behind when the client goes.
            lines = await trio.to_thread.run_sync(
                partial(_last_outputs, logs_of), limiter=_threads, abandon_on_cancel=True
            )
        return {
            each: Details(sandbox=str(node.sandbox(each)), history=tuple(node.history(each)), lines=lines.get(each, ()))
            for each in of
        }

    async def _kept(self, owner: NodeId, attempts: Sequence[AttemptId]) -> Iterable[AttemptId]:
        if owner == self._node.node_id:
            places = [(each, self._node.log_dir(each)) for each in attempts]
            return await trio.to_thread.run_sync(partial(_existing, places), limiter=_threads, abandon_on_cancel=True)
        try:
            answer = await self.ask(owner, KEPT_PATH, [str(each) for each in attempts], STATUS_SECONDS_MAX)
        except GpulayerError:
            return ()  # who reads the log of its newest attempt is told why
        kept = answer.get("kept")
        return [each for each in attempts if isinstance(kept, list) and str(each) in kept]

    async def ask(self, owner: NodeId, path: str, of: object, seconds: float) -> Json:
        """The answer to a question of this node's own; Unreachable where there is none in time."""
        self._check_there(owner)
        head = RequestHead(
            method="POST",
            path=path,
            query="",
            headers=(("content-type", "application/json"),),
            role="node",
            body=dump({"of": of}),
        )
        with trio.move_on_after(seconds):
            found: Any = json.loads(await ask_node(self._node, owner, head))
            if isinstance(found, dict):
                return found
            raise Unreachable("what it answers is no answer", hint="upgrade the older node")
        raise Unreachable(f"no answer within {seconds:g} s", hint="see its daemon's log")

    def _check_there(self, owner: NodeId) -> None:
        """What is known to be away is not waited for."""
        seen = self._node.table().nodes.get(owner)
        if seen is None:
            raise Unreachable("it is no node of the cluster any more", hint="gpulayer node list shows the nodes")
        if seen.state not in ("alive", "suspect"):
            raise Unreachable(f"it is {seen.state}", hint="gpulayer node list says since when")

    def name_of(self, owner: NodeId) -> str:
        seen = self._node.table().nodes.get(owner)
        return seen.name if seen is not None and seen.name else str(owner)

    def silence_of(self, owner: NodeId, error: GpulayerError) -> str:
        return f"{self.name_of(owner)} cannot be asked: {error.message}"

    def _root(self, owner: NodeId) -> str | None:
        return self._roots.get((owner, self._epoch(owner)))

    def _note_root(self, owner: NodeId, attempt: AttemptId, sandbox: str) -> None:
        if sandbox and len(self._roots) < ROOTS_MAX:
            self._roots[owner, self._epoch(owner)] = sandbox.removesuffix(str(attempt))

    def _epoch(self, owner: NodeId) -> int:
        seen = self._node.table().nodes.get(owner)
        return seen.epoch if seen is not None else 0


def _details_from(answer: Any) -> Details:
    try:
        return Details(
            sandbox=str(answer["sandbox"]),
            history=tuple((float(ago), str(text)) for ago, text in answer["history"]),
            lines=tuple(str(line) for line in answer["lines"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise Unreachable("what it answers is no answer", hint="upgrade the older node") from error


def _last_outputs(logs_of: Mapping[AttemptId, tuple[Path, int]]) -> dict[AttemptId, tuple[str, ...]]:
    return {attempt: tuple(last_output(directory, run)) for attempt, (directory, run) in logs_of.items()}


def _existing(places: Sequence[tuple[AttemptId, Path]]) -> list[AttemptId]:
    return [attempt for attempt, path in places if path.is_dir()]
