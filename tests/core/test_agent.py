"""My assignments against my attempts: what a node begins, adopts, ends, reports and forgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from gpulayer.core.agent import CLOSED_MAX, REPORT_AGAIN_AFTER, Agent
from gpulayer.core.base import Tick
from gpulayer.core.replica.messages import (
    AgentEffect,
    AgentEvent,
    AttemptEvent,
    AttemptsFound,
    DevicesNotClear,
    Discard,
    FoundAttempt,
    FoundRun,
    ListenerFound,
    Order,
    OrdersChanged,
    ReplicaEvent,
    Report,
    ReportAccepted,
    ReportRefused,
    ReportReleased,
    RunExited,
    RunStarted,
    ShimDied,
    StartRefused,
    StartRun,
    StopRun,
    TreeGone,
    Unkillable,
)
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Accelerator
from gpulayer.model.replica import Assignment, Endpoint, Exit, Reason
from gpulayer.model.units import NEVER, Instant

E = TypeVar("E")
NODE = NodeId("n-1")
SERVICE = JobSpec(kind="service", name="chat", argv=("serve",))
BATCH = JobSpec(kind="batch", name="train", argv=("train",), restart="never")
CANCELLED = Reason(code="cancelled", text="cancelled by ann")


def order(name: str = "j-a", spec: JobSpec = SERVICE, *, known: bool = False, **assigned: Any) -> Order:
    told: dict[str, Any] = dict(replica=ReplicaId(JobId(name), 0), attempt=1, node=NODE, revision=1)
    return Order(assignment=Assignment(**(told | assigned)), spec=spec, job_name=spec.name, outcome_known=known)


def found(ordered: Order, *, shim_alive: bool = True, run: int = 1, **changes: Any) -> FoundAttempt:
    told: dict[str, Any] = dict(
        run=run,
        pid=99,
        port=20001,
        started_at_utc=1_700_000_000.0,
        started_seconds_ago=50.0,
        restarts=0,
        failures=0,
        restart_serial=0,
        alive=True,
    )
    last = FoundRun(**(told | changes)) if run else None
    return FoundAttempt(attempt=ordered.assignment.id, shim_alive=shim_alive, first_started_seconds_ago=50.0, last=last)


class Table:
    """An agent with its clock. It has begun, with these orders and these sandboxes, unless it is told to wait."""

    def __init__(
        self,
        *orders: Order,
        found: tuple[FoundAttempt, ...] = (),
        begins: bool = True,
        is_current: bool = True,
    ):
        self.agent = Agent(NODE, "10.0.0.5")
        self.now = 100.0
        self.effects: list[AgentEffect] = []
        if begins:
            first = self.hear(OrdersChanged(orders=orders, is_current=is_current))
            self.effects = [*first, *self.hear(AttemptsFound(found=found))]

    def hear(self, event: AgentEvent) -> list[AgentEffect]:
        self.effects = self.agent.step(event, Instant(self.now))
        self.agent.check()
        return self.effects

    def tell(self, ordered: Order, *events: ReplicaEvent) -> list[AgentEffect]:
        effects: list[AgentEffect] = []
        for event in events:
            effects += self.hear(AttemptEvent(attempt=ordered.assignment.id, event=event))
        self.effects = effects
        return effects

    def orders(self, *orders: Order, is_current: bool = True) -> list[AgentEffect]:
        return self.hear(OrdersChanged(orders=orders, is_current=is_current))

    def wait(self, seconds: float) -> list[AgentEffect]:
        self.now += seconds
        return self.hear(Tick()) if self.agent.deadline <= self.now else []

    def asked(self, kind: type[E]) -> list[tuple[AttemptId, E]]:
        return [(told.attempt, told.effect) for told in self.effects if isinstance(told.effect, kind)]

    def state(self, ordered: Order) -> str:
        return self.agent.statuses()[ordered.assignment.id].state


def started(run: int = 1) -> RunStarted:
    return RunStarted(run=run, pid=100 + run, port=20000 + run, at_utc=1_700_000_000.0)


def exited(code: int = 1, run: int = 1, uptime: float = 0.3) -> RunExited:
    return RunExited(exit=Exit(run=run, code=code, ended_at_utc=1_700_000_001.0, uptime_seconds=uptime))


def test_nothing_is_done_with_half_of_the_picture() -> None:
    a, b = order("j-a"), order("j-b")
    for events in (
        (OrdersChanged(orders=(a,)), AttemptsFound(found=(found(b),))),
        (AttemptsFound(found=(found(b),)), OrdersChanged(orders=(a,))),
    ):
        table = Table(begins=False)
        assert table.hear(events[0]) == []
        assert not table.agent.has_begun
        assert table.agent.statuses() == {}
        table.hear(events[1])
        assert [attempt for attempt, _ in table.asked(StartRun)] == [a.assignment.id]
        assert [attempt for attempt, _ in table.asked(StopRun)] == [b.assignment.id]


def test_an_assignment_is_begun_with_what_the_shell_must_know_of_it() -> None:
    a = order()
    table = Table()
    table.orders(a)
    [told] = [told for told in table.effects if isinstance(told.effect, StartRun)]
    assert (told.attempt, told.order) == (a.assignment.id, a)
    assert table.orders(a) == []  # said before
    assert table.state(a) == "starting"


def test_orders_of_another_node_are_none_of_ours() -> None:
    table = Table(order(node=NodeId("n-2")))
    assert table.effects == []


def test_what_runs_already_is_adopted_and_not_started() -> None:
    """The node comes back: no second replica is started, and none is stopped."""
    a = order()
    table = Table(a, found=(found(a),))
    assert table.asked(StartRun) == table.asked(StopRun) == []
    table.tell(a, ListenerFound(run=1, at_utc=1.0))
    assert table.agent.statuses()[a.assignment.id].endpoint == Endpoint(address="10.0.0.5", port=20001)


def test_what_was_found_is_looked_at_once() -> None:
    a = order()
    table = Table(a)
    table.tell(a, started())
    assert table.hear(AttemptsFound(found=(found(a, run=7),))) == []
    assert table.agent.statuses()[a.assignment.id].run == 1


def test_one_replica_that_crashes_does_not_touch_another() -> None:
    a, b = order("j-a"), order("j-b")
    table = Table(a, b)
    table.tell(b, started(), ListenerFound(run=1, at_utc=1.0))
    table.tell(a, started(), exited(), TreeGone(run=1))
    assert (table.state(a), table.state(b)) == ("backing_off", "ready")
    assert table.agent.deadline == 101.0
    table.wait(1.0)
    assert [(attempt, start.run) for attempt, start in table.asked(StartRun)] == [(a.assignment.id, 2)]


def test_an_event_about_an_unknown_attempt_changes_nothing() -> None:
    table = Table()
    assert table.tell(order(), started(), exited(), TreeGone(run=1)) == []


def test_a_withdrawal_stops_it_once() -> None:
    a = order()
    table = Table(a)
    table.tell(a, started())
    withdrawn = order(withdrawn=CANCELLED)
    table.orders(withdrawn)
    assert len(table.asked(StopRun)) == 1
    assert table.orders(withdrawn) == []


def test_a_raised_serial_is_a_new_run_once() -> None:
    a = order()
    table = Table(a)
    table.tell(a, started())
    again = order(restart_serial=1)
    table.orders(again)
    assert len(table.asked(StopRun)) == 1
    table.orders(again)
    assert table.effects == []
    table.tell(a, exited(0), TreeGone(run=1))
    assert [start.restart_serial for _, start in table.asked(StartRun)] == [1]
    assert table.orders(again) == []


def test_an_attempt_is_forgotten_when_its_release_is_in_the_log_but_its_story_is_kept() -> None:
    a = order(spec=BATCH)
    table = Table(a)
    table.tell(a, started(), exited(0), TreeGone(run=1))
    assert [report.released for _, report in table.asked(Report)] == [False]
    assert len(table.asked(ReportReleased)) == len(table.asked(Discard)) == 1
    assert table.state(a) == "ended"
    assert table.orders() == []
    assert table.agent.statuses() == {}
    assert table.agent.deadline == NEVER
    assert "exited with code 0" in " ".join(text for _, text in table.agent.history(a.assignment.id))


def test_a_report_that_the_log_does_not_show_is_repeated_one_at_a_time() -> None:
    a = order(spec=BATCH)
    table = Table(a)
    table.tell(a, started(), exited(3))
    assert table.wait(REPORT_AGAIN_AFTER - 0.1) == []
    table.wait(0.2)
    assert [(report.outcome.result, report.released) for _, report in table.asked(Report)] == [("failed", False)]
    assert table.wait(1.0) == []
    # The tree ends meanwhile: the next repetition says both in one.
    table.tell(a, TreeGone(run=1))
    table.wait(REPORT_AGAIN_AFTER)
    assert [report.released for _, report in table.asked(Report)] == [True]
    assert len(table.effects) == 1


def test_when_the_log_has_the_outcome_only_the_release_is_repeated() -> None:
    a = order(spec=BATCH)
    table = Table(a)
    table.tell(a, started(), exited(3))
    table.orders(order(spec=BATCH, known=True))
    assert table.agent.deadline == NEVER  # nothing is owed before the tree is gone
    table.tell(a, TreeGone(run=1))
    table.wait(REPORT_AGAIN_AFTER)
    assert [told.effect for told in table.effects] == [ReportReleased()]


def test_an_order_whose_end_is_known_is_never_started() -> None:
    a = order(known=True)
    table = Table(a)
    assert [told.effect for told in table.effects] == [ReportReleased(), Discard()]
    table.wait(REPORT_AGAIN_AFTER)
    assert [told.effect for told in table.effects] == [ReportReleased()]


def test_what_runs_although_its_end_is_known_is_ended_and_released() -> None:
    a = order(known=True)
    table = Table(a, found=(found(a),))
    assert len(table.asked(StopRun)) == 1
    table.tell(a, exited(0), TreeGone(run=1))
    assert [told.effect for told in table.effects] == [ReportReleased(), Discard()]


def test_a_run_whose_end_was_decided_elsewhere_is_stopped() -> None:
    a = order()
    table = Table(a)
    table.tell(a, started())
    table.orders(order(known=True))
    assert [stop.why for _, stop in table.asked(StopRun)] == ["replica_ended"]


# --- what nobody ordered -------------------------------------------------------------------------------------------


def test_a_leftover_is_ended_with_grace_and_discarded_and_not_reported() -> None:
    stray = order("j-old")
    table = Table(found=(found(stray),))
    [(_, stop)] = table.asked(StopRun)
    assert (stop.run, stop.signal, stop.grace_seconds) == (1, "TERM", 10.0)
    assert all(told.order is None for told in table.effects)
    assert table.state(stray) == "stopping"
    table.tell(stray, exited(0))
    assert table.effects == []
    table.tell(stray, Unkillable(run=1, pids=(4711,)))
    reason = table.agent.statuses()[stray.assignment.id].reason
    assert reason is not None
    assert reason.code == "unkillable"
    table.tell(stray, TreeGone(run=1))
    assert len(table.asked(Discard)) == 1
    assert table.asked(Report) == table.asked(ReportReleased) == []
    assert table.agent.statuses() == {}


@pytest.mark.parametrize(
    ("changes", "stops"),
    [({"stopping": "cancelled"}, []), ({"alive": False}, []), ({"shim_alive": False}, ["KILL"])],
    ids=["is being stopped", "its shim sweeps", "its shim is dead"],
)
def test_a_leftover_is_stopped_only_as_far_as_nobody_does_it_already(changes: Any, stops: list[str]) -> None:
    stray = order("j-old")
    table = Table(found=(found(stray, **changes),))
    assert [stop.signal for _, stop in table.asked(StopRun)] == stops
    table.tell(stray, TreeGone(run=1))
    assert len(table.asked(Discard)) == 1


@pytest.mark.parametrize("run", [0, 1], ids=["never ran", "is gone"])
def test_a_leftover_of_which_nothing_is_left_is_discarded(run: int) -> None:
    stray = order("j-old")
    table = Table(found=(found(stray, run=run, alive=False, gone=True),))
    assert [told.effect for told in table.effects] == [Discard()]
    assert table.agent.statuses() == {}


def test_an_assignment_that_was_given_up_for_lost_is_ended_without_a_report() -> None:
    a = order()
    table = Table(a)
    table.tell(a, started(), ListenerFound(run=1, at_utc=1.0))
    table.orders()
    assert len(table.asked(StopRun)) == 1
    assert table.agent.statuses()[a.assignment.id].endpoint is None
    table.tell(a, exited(0), TreeGone(run=1))
    assert table.asked(Report) == []
    assert len(table.asked(Discard)) == 1
    assert table.agent.statuses() == {}


def test_an_assignment_that_is_given_up_during_its_start_leaves_nothing() -> None:
    a = order()
    table = Table(a)
    assert table.orders() == []
    table.tell(a, started())
    assert len(table.asked(StopRun)) == 1
    table.tell(a, exited(0), TreeGone(run=1))
    assert table.agent.statuses() == {}


def test_a_batch_that_was_ended_as_a_leftover_is_not_executed_again_should_an_order_appear() -> None:
    late = order(spec=BATCH)
    table = Table(found=(found(late),))
    assert table.orders(late) == []  # it is being ended
    table.tell(late, exited(0), TreeGone(run=1))
    assert table.asked(StartRun) == []
    assert [(r.outcome.result, r.outcome.reason.code, r.released) for _, r in table.asked(Report)] == [
        ("failed", "interrupted", True)
    ]


def test_the_next_attempt_of_a_replica_is_independent_of_the_one_before() -> None:
    first, second = order(withdrawn=CANCELLED), order(attempt=2)
    table = Table(replace(first, assignment=replace(first.assignment, withdrawn=None)))
    table.tell(first, started())
    table.orders(first, second)
    assert [attempt.attempt for attempt, _ in table.asked(StopRun)] == [1]
    assert [attempt.attempt for attempt, _ in table.asked(StartRun)] == [2]


def test_stories_of_closed_attempts_are_bounded() -> None:
    table = Table()
    for number in range(CLOSED_MAX + 5):
        a = order(f"j-{number}", withdrawn=CANCELLED)
        table.orders(a)
        table.orders()
    assert table.agent.history(order("j-0").assignment.id) == ()
    assert table.agent.history(order(f"j-{CLOSED_MAX + 4}").assignment.id) != ()


# --- what is refused here ------------------------------------------------------------------------------------------

IN_USE = Reason(code="device_unavailable", text="GPU-0 is used by others: pid 7")
SEEN = Accelerator(uuid="GPU-0", kind="cuda", vendor="nvidia", model="H100", memory_mib=1024, unhealthy="GPU is lost")


def refused(run: int = 1) -> StartRefused:
    return StartRefused(run=run, reason=IN_USE, observed=(SEEN,))


@pytest.mark.parametrize("spec", [SERVICE, BATCH])
def test_a_refusal_is_repeated_until_the_log_shows_it_and_nothing_is_executed(spec: JobSpec) -> None:
    a = order(spec=spec)
    table = Table(a)
    table.tell(a, refused())
    refusal = ReportRefused(reason=IN_USE, observed=(SEEN,))
    assert table.asked(ReportRefused) == [(a.assignment.id, refusal)]
    assert table.state(a) == "waiting"
    assert table.wait(REPORT_AGAIN_AFTER - 0.1) == []
    for _ in range(3):
        table.wait(REPORT_AGAIN_AFTER)
        assert [told.effect for told in table.effects] == [refusal]
        assert table.orders(a) == []
    assert table.orders() == []
    assert table.agent.statuses() == {}
    assert table.agent.deadline == NEVER
    assert "is not started here" in " ".join(text for _, text in table.agent.history(a.assignment.id))


def test_the_next_attempt_begins_although_the_one_before_was_refused_here() -> None:
    a, again = order(spec=BATCH), order(spec=BATCH, attempt=2)
    table = Table(a)
    table.tell(a, refused())
    table.orders(again)
    assert [(attempt.attempt, start.run) for attempt, start in table.asked(StartRun)] == [(2, 1)]
    table.tell(again, started(), exited(0), TreeGone(run=1))
    assert table.state(again) == "ended"


def test_a_refused_attempt_that_is_cancelled_meanwhile_is_reported_all_the_same() -> None:
    """The log makes an end of it: the replica is cancelled, and its devices are free."""
    a = order()
    table = Table(a)
    table.tell(a, refused())
    assert table.orders(order(withdrawn=CANCELLED)) == []
    table.wait(REPORT_AGAIN_AFTER)
    assert len(table.asked(ReportRefused)) == 1
    table.orders(order(known=True))
    table.wait(REPORT_AGAIN_AFTER)
    assert [told.effect for told in table.effects] == [ReportReleased()]


def test_an_assignment_that_is_given_up_during_a_start_that_is_refused_leaves_nothing() -> None:
    a = order()
    table = Table(a)
    assert table.orders() == []
    table.tell(a, refused())
    assert table.asked(ReportRefused) == table.asked(Report) == []
    assert len(table.asked(Discard)) == 1
    assert table.agent.statuses() == {}


@pytest.mark.parametrize("has_sandbox", [True, False])
def test_a_refusal_that_was_not_committed_is_forgotten_with_the_daemon_and_begun_again(has_sandbox: bool) -> None:
    a = order(spec=BATCH)
    table = Table(a, found=(found(a, run=0),) if has_sandbox else ())
    assert [start.run for _, start in table.asked(StartRun)] == [1]
    table.tell(a, refused())
    assert table.state(a) == "waiting"


def test_one_replica_that_is_refused_does_not_touch_another() -> None:
    a, b = order("j-a"), order("j-b")
    table = Table(a, b)
    table.tell(b, started(), ListenerFound(run=1, at_utc=1.0))
    table.tell(a, refused())
    assert (table.state(a), table.state(b)) == ("waiting", "ready")
    assert {attempt for attempt, _ in table.asked(Discard)} == {a.assignment.id}


def test_devices_that_are_not_clear_keep_the_release_back() -> None:
    a = order(spec=BATCH)
    table = Table(a)
    table.tell(a, started(), exited(0), DevicesNotClear(run=1, text="the driver still lists pid 7 on GPU-0"))
    assert [report.released for _, report in table.asked(Report)] == [False]
    table.orders(order(spec=BATCH, known=True))
    assert table.agent.deadline == NEVER
    assert table.state(a) == "stopping"
    table.tell(a, TreeGone(run=1))
    assert [told.effect for told in table.effects] == [ReportReleased(), Discard()]


# --- orders that are not current -----------------------------------------------------------------------------------


def test_before_orders_are_current_nothing_new_is_begun_and_nothing_is_ended() -> None:
    """What waits may be placed elsewhere by now, what nobody ordered may be wanted: the leader knows."""
    waiting, stray = order("j-a"), order("j-old")
    table = Table(waiting, order("j-b", BATCH), found=(found(stray),), is_current=False)
    assert table.effects == []
    assert table.wait(60.0) == []
    table.orders(waiting)
    assert [attempt for attempt, _ in table.asked(StartRun)] == [waiting.assignment.id]
    assert [attempt for attempt, _ in table.asked(StopRun)] == [stray.assignment.id]


def test_a_service_that_runs_is_adopted_and_restarted_by_its_policy_without_current_orders() -> None:
    a = order()
    table = Table(a, found=(found(a),), is_current=False)
    table.tell(a, ListenerFound(run=1, at_utc=1.0))
    assert table.state(a) == "ready"
    table.tell(a, exited(uptime=50.0), TreeGone(run=1))
    assert table.state(a) == "backing_off"
    table.wait(5.0)
    assert [start.run for _, start in table.asked(StartRun)] == [2]


def test_a_service_that_ended_while_the_daemon_was_away_is_restarted_only_by_current_orders() -> None:
    """It may have been given back for want of its device, and be placed elsewhere, before that daemon ended."""
    a = order()
    table = Table(a, found=(found(a, alive=False, gone=True, exit=Exit(run=1, code=1)),), is_current=False)
    assert table.effects == []
    assert table.wait(60.0) == []
    table.orders(a)
    assert [start.run for _, start in table.asked(StartRun)] == [2]


def test_a_batch_is_not_executed_without_current_orders_whatever_is_left_of_it() -> None:
    for here in ((), (found(order(spec=BATCH), run=0),)):
        table = Table(order(spec=BATCH), found=here, is_current=False)
        table.wait(60.0)
        assert table.effects == []
        assert table.agent.statuses() == {}
        table.orders(order(spec=BATCH))
        assert len(table.asked(StartRun)) == 1


def test_the_end_of_a_batch_is_reported_although_orders_are_not_current() -> None:
    a = order(spec=BATCH)
    table = Table(a, found=(found(a),), is_current=False)
    table.tell(a, exited(0), TreeGone(run=1))
    assert len(table.asked(Report)) == 1


def test_when_orders_stop_being_current_what_they_change_waits() -> None:
    a, b, c = order("j-a"), order("j-b"), order("j-c")
    table = Table(a, b)
    table.tell(a, started())
    table.tell(b, started())
    changed = (order("j-a", withdrawn=CANCELLED), order("j-b", restart_serial=1), c)
    assert table.orders(*changed, is_current=False) == []
    assert table.orders(is_current=False) == []
    table.tell(a, exited(), TreeGone(run=1))
    assert table.state(a) == "backing_off", "its policy goes on"
    table.orders(*changed)
    assert [attempt for attempt, _ in table.asked(StartRun)] == [c.assignment.id]
    assert [attempt for attempt, _ in table.asked(StopRun)] == [b.assignment.id]
    assert table.state(a) == "ended"


@pytest.mark.parametrize(
    "kept", [order(withdrawn=CANCELLED), order(known=True)], ids=["taken back", "its end is known"]
)
def test_what_runs_although_it_was_taken_back_is_neither_stopped_nor_restarted_before_orders_are_current(
    kept: Order,
) -> None:
    table = Table(kept, found=(found(kept),), is_current=False)
    assert table.effects == []
    reason = table.agent.statuses()[kept.assignment.id].reason
    assert reason is not None
    assert reason.code == "no_current_orders"
    table.orders(kept)
    assert len(table.asked(StopRun)) == 1


def test_a_restart_that_is_wanted_waits_for_current_orders() -> None:
    wanted = order(restart_serial=1)
    table = Table(wanted, found=(found(wanted),), is_current=False)
    assert table.asked(StopRun) == []
    table.orders(wanted)
    assert [stop.why for _, stop in table.asked(StopRun)] == ["restart_requested"]


def test_what_has_no_supervisor_any_more_is_swept_and_started_again_only_by_current_orders() -> None:
    """After a reboot of the host it may run elsewhere; and what lives on without its shim still serves."""
    a = order()
    table = Table(a, found=(found(a, shim_alive=False),), is_current=False)
    assert table.effects == []
    table.orders(a)
    assert [stop.signal for _, stop in table.asked(StopRun)] == ["KILL"]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_what_happens_to_what_was_found_is_known_when_it_is_judged(is_ordered: bool) -> None:
    """The events of a leftover that ended meanwhile do not come again: it must not wait for them for ever."""
    a = order(spec=BATCH)
    table = Table(found=(found(a),), is_current=False)
    table.tell(a, exited(0, uptime=51.0))
    table.now += 3.0
    table.tell(a, TreeGone(run=1))
    assert table.effects == []
    assert table.agent.statuses() == {}
    table.now += 7.0
    table.orders(*((a,) if is_ordered else ()))
    assert table.asked(StartRun) == table.asked(StopRun) == []
    if is_ordered:
        assert [(r.outcome.result, r.released) for _, r in table.asked(Report)] == [("succeeded", True)]
    else:
        assert [told.effect for told in table.effects] == [Discard()]


def test_a_run_whose_shim_died_before_it_was_judged_ended_then() -> None:
    a = order(spec=BATCH)
    table = Table(found=(found(a),), is_current=False)
    table.tell(a, ShimDied(run=1, at_utc=1_700_000_060.0))
    table.orders(a)
    assert [stop.signal for _, stop in table.asked(StopRun)] == ["KILL"]
    [(_, report)] = table.asked(Report)
    assert report.outcome.exit is not None
    assert (report.outcome.exit.ended_by, report.outcome.exit.uptime_seconds) == ("supervisor_killed", 60.0)


def test_time_that_passes_before_it_is_judged_counts() -> None:
    limited = order(spec=replace(SERVICE, timeout_seconds=80.0))
    table = Table(found=(found(limited),), is_current=False)
    table.now += 20.0
    table.orders(limited)
    table.tell(limited, exited(uptime=70.0))
    # Its tree is waited for, until its time is over: begun 70 s ago, in ten.
    assert table.agent.deadline == table.now + 10.0


# --- what was recalled ---------------------------------------------------------------------------------------------

RECALLED = Reason(code="not_accepted", text="n1 is alive and has said nothing of this order for 5 s")


@pytest.mark.parametrize("spec", [SERVICE, BATCH])
@pytest.mark.parametrize("has_sandbox", [True, False])
def test_a_recalled_order_that_was_not_begun_is_refused(spec: JobSpec, has_sandbox: bool) -> None:
    a = order(spec=spec, recalled=RECALLED)
    table = Table(a, found=(found(a, run=0),) if has_sandbox else ())
    assert table.asked(StartRun) == []
    assert table.asked(ReportRefused) == [(a.assignment.id, ReportRefused(reason=RECALLED))]
    table.wait(REPORT_AGAIN_AFTER)
    assert len(table.asked(ReportRefused)) == 1
    assert table.orders() == []
    assert table.agent.statuses() == {}


@pytest.mark.parametrize("is_started", [True, False])
def test_a_recalled_order_that_was_begun_goes_on_and_that_is_said_until_the_log_shows_it(is_started: bool) -> None:
    a, recalled = order(), order(recalled=RECALLED)
    table = Table(a)
    if is_started:
        table.tell(a, started())
    accepted = [told.effect for told in table.orders(recalled)]
    assert accepted == [ReportAccepted()]
    assert table.orders(recalled) == []
    table.wait(REPORT_AGAIN_AFTER)
    assert [told.effect for told in table.effects] == [ReportAccepted()]
    assert table.orders(a) == []
    assert table.wait(REPORT_AGAIN_AFTER * 3) == []
    assert table.state(a) in ("starting", "ready")


def test_a_recalled_order_that_is_found_running_goes_on() -> None:
    recalled = order(recalled=RECALLED)
    table = Table(recalled, found=(found(recalled),))
    assert table.asked(StopRun) == []
    assert len(table.asked(ReportAccepted)) == 1


def test_a_recalled_order_that_has_ended_is_reported_as_ended() -> None:
    a = order(spec=BATCH)
    table = Table(a)
    table.tell(a, started(), exited(0), TreeGone(run=1))
    assert table.orders(order(spec=BATCH, recalled=RECALLED)) == []
    table.wait(REPORT_AGAIN_AFTER)
    assert [report.released for _, report in table.asked(Report)] == [True]
    assert table.asked(ReportAccepted) == []


def test_a_recalled_order_that_is_cancelled_too_is_stopped() -> None:
    a = order()
    table = Table(a)
    table.tell(a, started())
    table.orders(order(recalled=RECALLED, withdrawn=CANCELLED))
    assert len(table.asked(StopRun)) == 1
    assert table.asked(ReportAccepted) == []


def test_a_recall_is_not_answered_by_orders_that_are_not_current() -> None:
    a = order(recalled=RECALLED)
    table = Table(a, is_current=False)
    assert table.effects == []
    table.orders(a)
    assert len(table.asked(ReportRefused)) == 1
