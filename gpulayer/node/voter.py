"""The agreed state of a cluster of one voter: propose, make durable, apply, publish; and the way back after a crash.

Nothing is seen by anyone before it is durable. Every command goes through the log as it would with more voters; what
is different is only that a majority of one needs nobody's answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import trio

from gpulayer.core.cluster.apply import Accepted, Rejected, apply, check
from gpulayer.core.cluster.commands import (
    Command,
    ForgetJobs,
    LogEntry,
    RemoveNode,
    ReplicaAccepted,
    ReplicaEnded,
    ReplicaRefused,
    ReplicaReleased,
    RevokeToken,
    StopJob,
)
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import BY_CODE, GpulayerError, InvalidRequest, NotFound, Refused, StorageFailed
from gpulayer.model.event import Event
from gpulayer.model.ids import NodeId
from gpulayer.runtime.failpoints import failpoint
from gpulayer.runtime.log_store import Entry, HardState, LogStore, open_store
from gpulayer.runtime.watch import Watch
from gpulayer.wire.codec import DecodeError, EncodeError, decode, digest, encode

log = structlog.get_logger()

# Entries of one transaction: what is queued while the last one was written goes together.
BATCH_ENTRIES_MAX = 256
# Proposals that wait to be written. The HTTP server lets fewer requests in; more than this is a loop gone wild.
QUEUE_MAX = 10_000
# Entries kept behind a snapshot: nobody else needs them yet, people who explain a decision do.
TRAILING_ENTRIES = 2_000


# Commands that are accepted on a full disk too: with them people and nodes get rid of what fills it.
ENDING = (
    StopJob,
    ReplicaEnded,
    ReplicaReleased,
    ReplicaRefused,
    ReplicaAccepted,
    RemoveNode,
    ForgetJobs,
    RevokeToken,
)


@dataclass(slots=True, eq=False)
class Proposal:
    """A command on its way into the log."""

    command: Command
    _done: trio.Event = field(default_factory=trio.Event)
    _answer: Accepted | GpulayerError | None = None

    @property
    def is_resolved(self) -> bool:
        return self._done.is_set()

    def resolve(self, answer: Accepted | GpulayerError) -> None:
        self._answer = answer
        self._done.set()

    async def wait(self) -> Accepted:
        """The answer, or its error. A caller that is cancelled loses the answer, not the commit."""
        await self._done.wait()
        if isinstance(self._answer, GpulayerError):
            raise self._answer
        assert self._answer is not None
        return self._answer


class SoleVoter:
    """Owns the log and the state. `state` may be read by anyone at any time."""

    def __init__(
        self,
        store: LogStore,
        state: ClusterState,
        term: int,
        snapshot_index: int,
        *,
        now_utc: Callable[[], float],
        snapshot_every: int,
        on_events: Callable[[tuple[Event, ...]], None],
        before_snapshot: Callable[[], Awaitable[None]],
    ) -> None:
        self.state: Watch[ClusterState] = Watch(state)
        self.failed: StorageFailed | None = None
        self._store = store
        self._term = term
        self.now_utc = now_utc
        self._snapshot_every = snapshot_every
        self._snapshot_index = snapshot_index
        self._on_events = on_events
        self._before_snapshot = before_snapshot
        self._queue: deque[Proposal] = deque()
        self._wakeup = trio.Event()

    @property
    def term(self) -> int:
        return self._term

    @property
    def store(self) -> LogStore:
        return self._store

    async def propose(self, command: Command) -> Accepted:
        """Commit a command. Returns once it is durable and applied.

        Raises what a Rejected says (nothing was written), or StorageFailed (it is not known to have happened).
        """
        return await self.propose_nowait(command).wait()

    def propose_nowait(self, command: Command) -> Proposal:
        """Queue a command: the order of the calls is the order in the log. The answer is the proposal's to tell."""
        proposal = Proposal(command)
        if self.failed is not None:
            proposal.resolve(_again(self.failed))
        elif len(self._queue) >= QUEUE_MAX:
            words = f"{QUEUE_MAX} commands wait for the disk already"
            proposal.resolve(StorageFailed(words, hint="try again when it has caught up"))
        else:
            self._queue.append(proposal)
            self._wakeup.set()
        return proposal

    async def run(self) -> None:
        """Write what is queued, batch after batch, for good. After a storage failure every proposal is refused."""
        while True:
            if not self._queue:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
            batch = [self._queue.popleft() for _ in range(min(BATCH_ENTRIES_MAX, len(self._queue)))]
            error = await self._attempt(batch)
            ending = [
                proposal for proposal in batch if isinstance(proposal.command, ENDING) and not proposal.is_resolved
            ]
            if error is not None and error.code == "disk_full" and len(ending) < len(batch):
                # What ends something still has room, and must not fail for the company that it came in.
                error = await self._attempt(ending) or error
            for proposal in batch:
                if not proposal.is_resolved:
                    assert error is not None
                    proposal.resolve(_again(error))

    async def _attempt(self, batch: list[Proposal]) -> StorageFailed | None:
        try:
            await self._commit(batch)
        except StorageFailed as error:
            if error.code != "disk_full" and self.failed is None:
                self.failed = error
                log.error("voter.storage_failed", reason=error.message, hint=error.hint)
            return error
        return None

    async def _commit(self, batch: list[Proposal]) -> None:
        if self.failed is not None:
            raise _again(self.failed)
        state, entries, events = self.state.value, list[Entry](), list[Event]()
        answers: list[tuple[Proposal, Accepted | GpulayerError]] = []
        ends_something = True
        stamp = max(state.time_utc, self.now_utc())
        for proposal in batch:
            entry = LogEntry(index=state.index + 1, term=self._term, at_utc=stamp, command=proposal.command)
            # On a value of our own that nobody sees until it is durable; so a command that makes no sense is refused
            # without a place in the log. So is one that was done before; but what it was done by may be an entry of
            # this batch, so no answer is given before those are durable.
            result = (applied := apply(state, entry)).result
            answers.append((proposal, error_of(result) if isinstance(result, Rejected) else result))
            if isinstance(result, Rejected) or result.replayed:
                continue
            try:
                payload = encode(entry)
            except EncodeError as error:
                # One command that is no good must not take the voter away from all others.
                answers[-1] = (proposal, InvalidRequest(f"the log cannot hold it: {error}", hint="report it, please"))
                continue
            state = applied.state
            events.extend(applied.events)
            entries.append(Entry(index=entry.index, term=entry.term, kind="command", payload=payload))
            ends_something = ends_something and isinstance(proposal.command, ENDING)
        if not entries:
            _resolve(answers)
            return
        # Cancellation must not leave it open whether the write that was begun is in the state (bounded by the disk;
        # a hung one is seen by the watchdog of the process).
        with trio.CancelScope(shield=True):
            await self._store.append(entries, ends_something=ends_something)
        failpoint("voter.after_append")
        self.state.set(state)
        self._on_events(tuple(events))
        _resolve(answers)
        if state.index - self._snapshot_index >= self._snapshot_every:
            await self.snapshot()

    async def snapshot(self) -> None:
        """Write the whole state and drop old entries. Only the task of `run` may call it while that runs."""
        state = self.state.value
        if state.index == self._snapshot_index:
            return
        with trio.CancelScope(shield=True):
            # Events of entries that the snapshot replaces could not be derived again.
            await self._before_snapshot()
            # In a thread: 10,000 jobs take a quarter of a second to encode. The value is frozen.
            blob = await trio.to_thread.run_sync(encode, state)
            await self._store.save_snapshot(state.index, state.term, blob, keep_entries=TRAILING_ENTRIES)
        self._snapshot_index = state.index
        log.info("voter.snapshot", index=state.index, jobs=len(state.jobs))


async def open_voter(
    path: Path,
    *,
    node_id: NodeId,
    now_utc: Callable[[], float],
    snapshot_every: int,
    disk_free_min_mib: int,
    before_snapshot: Callable[[], Awaitable[None]],
    on_events: Callable[[tuple[Event, ...]], None],
) -> SoleVoter:
    """Read the disk, replay, raise the term (a start of the only voter is an election it wins), and be ready to run.

    `on_events` gets the events of every replayed entry again, under the numbers they had: who keeps them knows which
    it has; `before_snapshot` has to make them durable. Raises StorageFailed for whatever the disk holds that is not a
    log of this node.
    """
    store, recovered = await open_store(path, node_id=node_id, disk_free_min_bytes=disk_free_min_mib * 2**20)
    state, snapshot_index = ClusterState(), 0
    if recovered.snapshot is not None:
        snapshot_index, _, blob = recovered.snapshot
        try:
            state = decode(ClusterState, blob)
        except DecodeError as error:
            raise _unreadable(path, f"snapshot at index {snapshot_index}", error) from error
    for stored in recovered.entries:
        try:
            entry = decode(LogEntry, stored.payload)
        except DecodeError as error:
            raise _unreadable(path, f"entry {stored.index}", error) from error
        if entry.index <= state.index:
            continue  # Kept behind the snapshot, for people.
        applied = apply(state, entry)
        state = applied.state
        on_events(applied.events)
    check(state)
    hard = recovered.hard_state
    term = (hard.term if hard is not None else 0) + 1
    await store.append([], hard_state=HardState(cluster_id=state.cluster_id, term=term, voted_for=node_id))
    log.info("voter.recovered", index=state.index, term=term, snapshot=snapshot_index, digest=digest(state)[:16])
    return SoleVoter(
        store,
        state,
        term,
        snapshot_index,
        now_utc=now_utc,
        snapshot_every=snapshot_every,
        on_events=on_events,
        before_snapshot=before_snapshot,
    )


def _resolve(answers: Iterable[tuple[Proposal, Accepted | GpulayerError]]) -> None:
    for proposal, answer in answers:
        proposal.resolve(answer)


def error_of(rejected: Rejected) -> GpulayerError:
    kinds = {"not_found": NotFound, "invalid_request": InvalidRequest}
    kind = kinds.get(rejected.code, BY_CODE.get(rejected.code, Refused))
    return kind(rejected.message, hint=rejected.hint, code=rejected.code)


def _again(error: StorageFailed) -> StorageFailed:
    """A new exception with the same words, because one raised twice collects both callers' tracebacks."""
    return StorageFailed(error.message, hint=error.hint, code=error.code)


def _unreadable(path: Path, what: str, error: Exception) -> StorageFailed:
    return StorageFailed(
        f"{path}: {what} cannot be read: {error}",
        hint="it was written by another version of gpulayer, or damaged; start that version, or restore a backup",
    )
