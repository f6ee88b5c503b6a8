"""GET /v1/jobs/JOB/logs: what the replicas wrote, merged by time, and followed while the job lives."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.facade import NodeFacade
from gpulayer.api.log_fetch import Fetching
from gpulayer.api.log_merge import REPLICAS_MAX, Merge, Place, Wanted, parse_offset
from gpulayer.api.owners import Owners
from gpulayer.api.query import Query
from gpulayer.api.remote_log import RemoteLog
from gpulayer.api.requests import moments_of, node_of
from gpulayer.api.streams import KEEPALIVE, KEEPALIVE_SECONDS, Item, Stream, last_event_id
from gpulayer.core.cluster.resolve import resolve_job_or_replica
from gpulayer.model.cluster import Job, Replica
from gpulayer.model.errors import InvalidRequest, NotFound
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.job import REPLICAS_MAX as JOB_REPLICAS_MAX
from gpulayer.model.replica import ReplicaStatus
from gpulayer.wire.http import Json

# How often the files are looked at: soon after a line, less often the longer it is quiet.
POLL_SECONDS_LEAST, POLL_SECONDS_MOST = 0.1, 0.5
# The view of a busy node changes hundreds of times a second; the files are not looked at that often.
PAUSE_SECONDS, PAUSE_SECONDS_PER_REPLICA = 0.02, 0.001
TAIL_MAX = 1_000_000
# Further back than a replica is re-placed by default, nothing is looked for.
ATTEMPTS_KEPT = 20
NODES_ASKED_MAX = 64

T = TypeVar("T")

# Readers share few threads, so that a disk that hangs takes these and no others. Python runs one at a time anyway, and
# the event loop waits for its turn among them: with four, 100 readers of long logs held up all else twice as long.
_threads = trio.CapacityLimiter(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    job: JobId
    replicas: tuple[int, ...]
    previous: bool
    run: int | None
    since_utc: float | None
    tail: int | None
    follow: bool
    after: dict[int, Place]
    running: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """With `previous`: attempt and number of the run that is on, by replica; it and what follows is left out."""

    def is_wanted(self, line: Json) -> bool:
        running = self.running.get(line["replica"])
        return running is None or (line["attempt"], line["run"]) < running


async def logs(request: Request) -> Response:
    node = node_of(request)
    query = Query(request, ("replica", "previous", "run", "since", "tail", "follow", "after"))
    job, index = resolve_job_or_replica(node.state, request.path_params["job"])
    asked = _asked(request, query, job, index)
    # The table changes in the trio thread: one that is read elsewhere has to be a copy.
    statuses = dict(node.statuses())
    if asked.previous:
        asked = replace(asked, running=_running(job, asked.replicas, statuses))
    owners = moments_of(request).owners
    places = await _find(node, owners, job, asked.replicas)
    return Stream(request, _lines(node, owners, asked, places, _first_wanted(places, job, asked)))


def _asked(request: Request, query: Query, job: Job, index: int | None) -> _Asked:
    named = query.count("replica", most=JOB_REPLICAS_MAX - 1)
    if named is not None and index is not None and named != index:
        raise InvalidRequest(f"replica: {named} and {job.name}.{index} name two replicas", hint="leave out one of them")
    if named is not None and named >= len(job.replicas):
        raise NotFound(f"job {job.name} has no replica {named}", hint=f"it has {len(job.replicas)}, counted from 0")
    chosen = named if named is not None else index
    replicas = tuple(range(len(job.replicas))) if chosen is None else (chosen,)
    if len(replicas) > REPLICAS_MAX:
        raise InvalidRequest(
            f"{job.name} has {len(replicas)} replicas, logs of at most {REPLICAS_MAX} are merged",
            hint=f"ask for one of them: gpulayer job logs {job.name} --replica 0 (over HTTP: replica=0)",
        )
    previous, run = query.flag("previous"), query.count("run", least=1, most=2**31)
    if previous and run is not None:
        raise InvalidRequest("previous and run exclude each other", hint="leave out one of them")
    after = query.text("after")
    last_seen = parse_offset(last_event_id(request))
    return _Asked(
        job=job.id,
        replicas=replicas,
        previous=previous,
        run=run,
        since_utc=query.number("since"),
        tail=query.count("tail", most=TAIL_MAX),
        # A run that is over has no more to say.
        follow=query.flag("follow") and not previous,
        after=last_seen if after is None else parse_offset(after),
    )


def _running(
    job: Job, replicas: Sequence[int], statuses: Mapping[AttemptId, ReplicaStatus]
) -> dict[int, tuple[int, int]]:
    """Attempt and number of the run that is on, or just begins, of each replica that has one."""
    found: dict[int, tuple[int, int]] = {}
    for index in replicas:
        attempt = job.replicas[index].attempts
        status = statuses.get(AttemptId(ReplicaId(job.id, index), attempt))
        if status is not None and (status.pid is not None or status.state in ("starting", "ready", "unready")):
            found[index] = (attempt, status.run)
    return found


class _Places:
    """Where the log of each attempt is, or was to be."""

    def __init__(self, node: NodeFacade, kept: Mapping[AttemptId, NodeId]) -> None:
        self._node = node
        self._kept = kept

    def is_kept(self, attempt: AttemptId) -> bool:
        return attempt in self._kept

    def wanted(self, job: Job, index: int, attempt: int, run: int | None) -> Wanted:
        each = AttemptId(ReplicaId(job.id, index), attempt)
        # Of one that is not kept anywhere nothing is found here either.
        at = self._kept.get(each, self._node.node_id)
        if attempt == job.replicas[index].attempts:
            at = _owner(job.replicas[index]) or at
        where = self._node.log_dir(each) if at == self._node.node_id else RemoteLog(each, at)
        return Wanted(replica=index, attempt=attempt, where=where, run=run)

    def oldest_kept(self, job: JobId, index: int, newest: int) -> int:
        for attempt in range(max(1, newest - ATTEMPTS_KEPT), newest):
            if self.is_kept(AttemptId(ReplicaId(job, index), attempt)):
                return attempt
        return newest


async def _find(node: NodeFacade, owners: Owners, job: Job, replicas: Sequence[int]) -> _Places:
    wanted: dict[NodeId, list[AttemptId]] = {}
    others: list[AttemptId] = []
    for index in replicas:
        replica = job.replicas[index]
        if not replica.attempts:
            continue  # it was never placed, so there is nothing of it anywhere
        newest = AttemptId(ReplicaId(job.id, index), replica.attempts)
        wanted.setdefault(_owner(replica) or node.node_id, []).append(newest)
        earlier = range(max(1, replica.attempts - ATTEMPTS_KEPT), replica.attempts)
        others += [AttemptId(newest.replica, attempt) for attempt in earlier]
    if others:
        # Where an earlier attempt was is not in the log any more: everybody is asked.
        seen = [each.id for each in node.table().nodes.values() if each.state in ("alive", "suspect")]
        for owner in {node.node_id, *sorted(seen)[:NODES_ASKED_MAX]}:
            wanted.setdefault(owner, []).extend(others)
    return _Places(node, await owners.kept(wanted))


def _owner(replica: Replica) -> NodeId | None:
    return replica.assignment.node if replica.assignment is not None else replica.last_node


def _first_wanted(places: _Places, job: Job, asked: _Asked) -> list[Wanted]:
    """Where to begin, per replica that has been placed yet."""
    wanted = []
    for index in asked.replicas:
        newest = job.replicas[index].attempts
        if newest == 0:
            continue
        first: int | None = newest
        if asked.previous:
            first = _first_ended(places, job.id, index, newest, asked.running.get(index), is_all=asked.tail is None)
        elif asked.run is None and asked.tail is None:
            first = places.oldest_kept(job.id, index, newest)
        place = asked.after.get(index)
        if place is not None and first is not None and first < place.attempt <= newest:
            first = place.attempt
        if first is not None:
            wanted.append(places.wanted(job, index, first, asked.run))
    if asked.previous and not wanted:
        raise NotFound(f"no run of {job.name} has ended yet", hint="leave out --previous to see the one that is on")
    return wanted


def _first_ended(
    places: _Places, job: JobId, index: int, newest: int, running: tuple[int, int] | None, *, is_all: bool
) -> int | None:
    """Where the runs begin that have ended: with the oldest attempt that is kept, or with the last that has one."""
    last = newest if running is None or running[1] > 1 else newest - 1
    if last < 1 or not places.is_kept(AttemptId(ReplicaId(job, index), last)):
        return None
    return places.oldest_kept(job, index, newest) if is_all else last


class _Reader:
    """The merge, with what lies on other nodes brought in before it is read."""

    def __init__(self, node: NodeFacade, owners: Owners, asked: _Asked) -> None:
        self.merge = Merge(since_utc=asked.since_utc, places=asked.after)
        self._fetching = Fetching(node, owners)
        self._is_wanted = asked.is_wanted

    async def add(self, wanted: Wanted, *, tail: int | None = None) -> None:
        await _in_thread(partial(self.merge.add, wanted, tail=tail))

    async def until_now(self) -> None:
        await _in_thread(self.merge.until_now)

    async def look(self) -> None:
        await self._fetching.look(self.merge.remote)

    async def lines(self) -> list[Json] | None:
        """The next ones that are wanted, perhaps none of these; None where there are no more now."""
        await self._fetching.fill(self.merge.remote)
        batch = await _in_thread(self.merge.batch)
        return list(filter(self._is_wanted, batch)) if batch else None

    async def items(self, *, is_last: bool) -> Sequence[Item] | None:
        """As lines(), as JSON, which is made in the thread as all that takes long."""
        await self._fetching.fill(self.merge.remote)

        def read() -> Sequence[Item] | None:
            batch = self.merge.batch() if is_last else self.merge.news()
            return _items(filter(self._is_wanted, batch)) if batch else None

        return await _in_thread(read)

    async def rest(self) -> list[Json]:
        return list(filter(self._is_wanted, await _in_thread(self.merge.rest)))


async def _lines(
    node: NodeFacade, owners: Owners, asked: _Asked, places: _Places, first: list[Wanted]
) -> AsyncIterator[Sequence[Item]]:
    reader = _Reader(node, owners, asked)
    try:
        tail = None if asked.after else asked.tail
        # What is left out at the end is not counted, so the last lines before it may be anywhere.
        from_the_end = None if asked.previous else tail
        for wanted in first:
            await reader.add(wanted, tail=from_the_end)
        if tail is not None and (kept := await _tail(reader, tail, asked)):
            yield _items(kept)
        if tail is not None and not asked.follow:
            return
        interval, quiet_since = POLL_SECONDS_LEAST, trio.current_time()
        while True:
            version = node.version_of_view
            # Asked before the files are read: what a job wrote before it ended is there when it has ended.
            is_last = not asked.follow or _is_over(node, asked)
            if is_last:
                await reader.until_now()
            else:
                await reader.look()
            while (items := await reader.items(is_last=is_last)) is not None:
                yield items
                interval, quiet_since = POLL_SECONDS_LEAST, trio.current_time()
            if await _go_to_newer_attempts(node, owners, asked, places, reader):
                continue
            if is_last:
                if rest := await reader.rest():
                    yield _items(rest)
                return
            if trio.current_time() - quiet_since >= KEEPALIVE_SECONDS:
                quiet_since = trio.current_time()
                yield KEEPALIVE
            await trio.sleep(PAUSE_SECONDS + PAUSE_SECONDS_PER_REPLICA * len(asked.replicas))
            with trio.move_on_after(interval):
                await node.wait_for_change(version)
            interval = min(POLL_SECONDS_MOST, interval * 1.5)
    finally:
        reader.merge.close()


async def _tail(reader: _Reader, count: int, asked: _Asked) -> list[Json]:
    """The last `count` lines of what is there. Each log was opened about that far from its end. Where it is not
    followed nothing will be read after them, so a line that was only begun is one."""
    kept: deque[Json] = deque(maxlen=count)
    await reader.until_now()
    while (lines := await reader.lines()) is not None:
        kept.extend(lines)
    if not asked.follow:
        kept.extend(await reader.rest())
    await _in_thread(reader.merge.go_on)
    return list(kept)


async def _go_to_newer_attempts(
    node: NodeFacade, owners: Owners, asked: _Asked, places: _Places, reader: _Reader
) -> bool:
    """Once an attempt's log is read to its end: True if there is a later one to go on with."""
    job = node.state.jobs.get(asked.job)
    attempts = reader.merge.attempts
    if job is None or (asked.run is not None and attempts):
        return False
    newer: list[tuple[int, int]] = []
    for index in asked.replicas:
        at, newest = attempts.get(index, 0), job.replicas[index].attempts
        if at < newest and (at or asked.follow):
            newer.append((index, at + 1 if at else newest))
    if any(attempt < job.replicas[index].attempts for index, attempt in newer):
        places = await _find(node, owners, job, [index for index, _ in newer])
    for index, attempt in newer:
        await reader.add(places.wanted(job, index, attempt, asked.run))
    return bool(newer)


def _is_over(node: NodeFacade, asked: _Asked) -> bool:
    """Nothing more will be written to any of the logs that are followed."""
    job = node.state.jobs.get(asked.job)
    if job is None or job.outcome is not None:
        return True
    return all(_has_ended(node, job, index, asked.run) for index in asked.replicas)


def _has_ended(node: NodeFacade, job: Job, index: int, run: int | None) -> bool:
    replica = job.replicas[index]
    if replica.outcome is not None:
        return replica.assignment is None
    status = node.statuses().get(AttemptId(ReplicaId(job.id, index), replica.attempts))
    return run is not None and status is not None and status.run > run


def _items(lines: Iterable[Json]) -> Sequence[Item]:
    return [Item.of(line, line["offset"]) for line in lines]


async def _in_thread(call: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(call, limiter=_threads, abandon_on_cancel=True)


ROUTES = [Route("/v1/jobs/{job}/logs", logs, methods=["GET"])]
