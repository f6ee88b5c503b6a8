"""The loop that runs every core, and the value that tasks wait on."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from gpulayer.core.base import Tick
from gpulayer.model.units import Instant
from gpulayer.runtime.drive import Inbox, InboxFull, drive
from gpulayer.runtime.watch import Watch


class Countdown:
    """Says back what it hears; `alarm` wants a Tick two seconds later."""

    def __init__(self) -> None:
        self.deadline = math.inf
        self.steps = 0

    def step(self, event: str | Tick, now: Instant) -> list[tuple[str, float]]:
        self.steps += 1
        if isinstance(event, Tick):
            self.deadline = math.inf
            return [("tick", now)]
        if event == "alarm":
            self.deadline = now + 2
        return [(event, now), (event + "!", now)]


async def test_effects_come_in_the_order_of_events(nursery: trio.Nursery) -> None:
    inbox: Inbox[str] = Inbox()
    done: list[tuple[str, float]] = []
    nursery.start_soon(drive, Countdown(), inbox, done.append)
    for word in ("a", "b", "c"):
        inbox.put_nowait(word)
    await trio.testing.wait_all_tasks_blocked()
    assert [word for word, _ in done] == ["a", "a!", "b", "b!", "c", "c!"]


async def test_a_tick_comes_at_the_deadline_and_an_idle_core_is_left_alone(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    inbox: Inbox[str] = Inbox()
    core = Countdown()
    done: list[tuple[str, float]] = []
    nursery.start_soon(drive, core, inbox, done.append)
    start = trio.current_time()
    inbox.put_nowait("alarm")
    await trio.sleep(3600)
    assert done[-1][0] == "tick"
    assert done[-1][1] == pytest.approx(start + 2)
    assert core.steps == 2


async def test_events_that_wait_are_heard_before_a_deadline_that_has_passed(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A loop that was stopped for a while reads what came meanwhile before it concludes anything from silence."""
    inbox: Inbox[str] = Inbox()
    core = Countdown()
    core.deadline = trio.current_time() - 5
    done: list[tuple[str, float]] = []
    inbox.put_nowait("late")
    nursery.start_soon(drive, core, inbox, done.append)
    await trio.sleep(1)
    assert [word for word, _ in done] == ["late", "late!", "tick"]


async def test_a_full_inbox_refuses() -> None:
    inbox: Inbox[int] = Inbox(most=2)
    inbox.put_nowait(1)
    inbox.put_nowait(2)
    with pytest.raises(InboxFull, match="2 events"):
        inbox.put_nowait(3)
    assert await inbox.take(at_most=10, until=math.inf) == [1, 2]


async def test_take_gives_no_more_than_asked_for() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(5):
        inbox.put_nowait(number)
    assert await inbox.take(at_most=3, until=math.inf) == [0, 1, 2]
    assert len(inbox) == 2


async def test_waiting_for_a_state_ends_when_it_is_reached(nursery: trio.Nursery) -> None:
    watch = Watch(0)
    seen: list[int] = []

    async def wait() -> None:
        seen.append(await watch.wait_for(lambda value: value >= 2))

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    watch.set(1)
    await trio.testing.wait_all_tasks_blocked()
    assert not seen
    watch.set(3)
    await trio.testing.wait_all_tasks_blocked()
    assert seen == [3]
    assert watch.value == 3


async def test_a_state_that_holds_already_is_not_waited_for() -> None:
    with trio.fail_after(1):
        assert await Watch("ready").wait_for(lambda value: value == "ready") == "ready"
