"""The agreed state on a real disk: nothing acknowledged is lost, and every way back gives the same state."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gpulayer.core.cluster.apply import Accepted, apply
from gpulayer.core.cluster.commands import AdmitNode, Command, CreateCluster, CreateToken, LogEntry, StopJob, SubmitJob
from gpulayer.model.cluster import ClusterState
from gpulayer.model.errors import InvalidRequest, Refused, StorageFailed
from gpulayer.model.event import Event
from gpulayer.model.ids import NodeId, TokenId, job_id
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Capabilities
from gpulayer.model.replica import Reason
from gpulayer.node.voter import SoleVoter, open_voter
from gpulayer.runtime import failpoints
from gpulayer.runtime.log_store import open_store
from gpulayer.wire.codec import decode, digest

NODE = NodeId("n-1")


def spec(name: str) -> JobSpec:
    return JobSpec(kind="service", name=name, argv=("sleep", "1"))


def some_commands(count: int, seed: int) -> list[Command]:
    rng = random.Random(seed)
    ids = [job_id(rng.randbytes(8)) for _ in range(count)]
    commands: list[Command] = [
        CreateCluster(cluster_id="c-1"),
        AdmitNode(
            node=NODE, name="n1", advertise="127.0.0.1", capabilities=Capabilities(cpus_milli=4000, memory_mib=1)
        ),
    ]
    for number, job in enumerate(ids):
        commands.append(SubmitJob(job=job, spec=spec(f"job-{number}"), idempotency_key=f"k{number}"))
        if rng.random() < 0.5:
            commands.append(StopJob(job=rng.choice(ids[: number + 1]), reason=Reason(code="cancelled")))
        if rng.random() < 0.2:
            commands.append(CreateToken(token=TokenId(f"t-{number}"), role="read", digest="0" * 64))
    return commands


@asynccontextmanager
async def running_voter(path: Path, snapshot_every: int = 10_000) -> AsyncIterator[tuple[SoleVoter, list[Event]]]:
    events: list[Event] = []
    ticks = iter(range(10_000))

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    voter = await open_voter(
        path,
        node_id=NODE,
        now_utc=lambda: 1000.0 + next(ticks),
        snapshot_every=snapshot_every,
        disk_free_min_mib=0,
        before_snapshot=nothing,
        on_events=events.extend,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(voter.run)
        yield voter, events
        nursery.cancel_scope.cancel()
    await voter.store.close()


async def propose_all(voter: SoleVoter, commands: list[Command]) -> None:
    for command in commands:
        try:
            await voter.propose(command)
        except Refused:
            pass  # the random sequence cancels some twice


async def test_replay_from_the_first_entry_and_from_a_snapshot_give_the_same_state(tmp_path: Path) -> None:
    commands = some_commands(60, seed=4)
    async with running_voter(tmp_path / "whole.db") as (voter, _):
        await propose_all(voter, commands)
        lived = digest(voter.state.value)
    async with running_voter(tmp_path / "cut.db", snapshot_every=7) as (voter, _):
        await propose_all(voter, commands)
        assert digest(voter.state.value) == lived
        assert voter.store.stats().snapshot_index > 50
    for name in ("whole.db", "cut.db"):
        async with running_voter(tmp_path / name) as (voter, _):
            assert digest(voter.state.value) == lived, name


async def test_the_log_alone_says_everything(tmp_path: Path) -> None:
    """What apply makes of the stored entries, one by one, is the state that was served."""
    async with running_voter(tmp_path / "log.db") as (voter, _):
        await propose_all(voter, some_commands(20, seed=1))
        lived = digest(voter.state.value)
    store, recovered = await open_store(tmp_path / "log.db", node_id=NODE)
    await store.close()
    state = ClusterState()
    for stored in recovered.entries:
        state = apply(state, decode(LogEntry, stored.payload)).state
    assert digest(state) == lived


async def test_a_refused_command_leaves_no_entry(tmp_path: Path) -> None:
    async with running_voter(tmp_path / "log.db") as (voter, _):
        await propose_all(voter, some_commands(1, seed=2)[:3])
        index = voter.state.value.index
        with pytest.raises(Refused, match="job-0"):
            await voter.propose(SubmitJob(job=job_id(b"another1"), spec=spec("job-0")))
        assert voter.state.value.index == index == voter.store.stats().last_index


async def test_a_command_that_the_log_cannot_hold_is_refused_and_the_others_are_not(tmp_path: Path) -> None:
    """Text that is none, from a script's first line, ended the daemon, and each one after it."""
    async with running_voter(tmp_path / "log.db") as (voter, _):
        await voter.propose(CreateCluster(cluster_id="c-1"))
        first = voter.propose_nowait(SubmitJob(job=job_id(b"12345678"), spec=spec("a")))
        reason = Reason(code="cancelled", text="\ud800")
        bad = voter.propose_nowait(StopJob(job=job_id(b"12345678"), reason=reason))
        after = voter.propose_nowait(SubmitJob(job=job_id(b"abcdefgh"), spec=spec("b")))
        await first.wait()
        with pytest.raises(InvalidRequest, match="cannot hold"):
            await bad.wait()
        await after.wait()
        assert [job.stopping for job in voter.state.value.jobs.values()] == [None, None]


async def test_the_same_idempotency_key_gets_the_first_answer_and_no_entry(tmp_path: Path) -> None:
    async with running_voter(tmp_path / "log.db") as (voter, _):
        first = await voter.propose(SubmitJob(job=job_id(b"12345678"), spec=spec("a"), idempotency_key="k"))
        index = voter.state.value.index
        again = await voter.propose(SubmitJob(job=job_id(b"abcdefgh"), spec=spec("a"), idempotency_key="k"))
        assert isinstance(again, Accepted)
        assert again.replayed
        assert again.job == first.job
        assert voter.state.value.index == index


async def test_a_retry_is_not_answered_before_its_first_request_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: while the disk was slow a client asked again, and both requests came into one batch. The second was answered
    with the job of the first, which was not written yet."""
    async with running_voter(tmp_path / "log.db") as (voter, _):
        await voter.propose(CreateCluster(cluster_id="c-1"))
        monkeypatch.setattr(failpoints, "_armed", failpoints.parse("log.before_commit=error"))
        asked = [
            voter.propose_nowait(SubmitJob(job=job_id(entropy), spec=spec("a"), idempotency_key="k"))
            for entropy in (b"12345678", b"abcdefgh")
        ]
        for proposal in asked:
            with pytest.raises(StorageFailed):
                await proposal.wait()
    monkeypatch.setattr(failpoints, "_armed", {})
    async with running_voter(tmp_path / "log.db") as (voter, _):
        assert not voter.state.value.jobs


async def test_a_retry_in_one_batch_with_its_first_request_gets_the_same_job(tmp_path: Path) -> None:
    async with running_voter(tmp_path / "log.db") as (voter, _):
        await voter.propose(CreateCluster(cluster_id="c-1"))
        first, again, other = [
            voter.propose_nowait(SubmitJob(job=job_id(entropy), spec=spec("a"), idempotency_key=key))
            for entropy, key in ((b"12345678", "k"), (b"abcdefgh", "k"), (b"87654321", "l"))
        ]
        assert (await again.wait()).job == (await first.wait()).job
        with pytest.raises(Refused, match="in use"):
            await other.wait()
        assert len(voter.state.value.jobs) == 1


async def test_replayed_entries_tell_their_events_under_the_same_numbers(tmp_path: Path) -> None:
    async with running_voter(tmp_path / "log.db") as (voter, first):
        await propose_all(voter, some_commands(10, seed=3))
    async with running_voter(tmp_path / "log.db") as (_, again):
        assert again == first


async def test_many_at_once_share_commits_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    answers: dict[int, str] = {}
    async with running_voter(tmp_path / "log.db") as (voter, _):

        async def submit(number: int) -> None:
            accepted = await voter.propose(SubmitJob(job=job_id(bytes([number] * 8)), spec=spec(f"s{number}")))
            answers[number] = accepted.name

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(submit, number)
        assert answers == {number: f"s{number}" for number in range(100)}
        assert voter.store.stats().commits < 50


async def test_the_term_rises_with_every_start(tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        async with running_voter(tmp_path / "log.db") as (voter, _):
            terms.append(voter.term)
    assert terms == sorted(set(terms))
