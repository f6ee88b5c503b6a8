"""The life of one attempt, told as stories: what is heard, what is done, what people see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from gpulayer.core.base import Tick
from gpulayer.core.replica import lifecycle
from gpulayer.core.replica.messages import (
    Announce,
    DevicesNotClear,
    Discard,
    FoundAttempt,
    FoundRun,
    ListenerFound,
    ListenerMissing,
    Note,
    Order,
    ReplicaEffect,
    ReplicaEvent,
    Report,
    ReportRefused,
    ReportReleased,
    RestartRequested,
    RunExited,
    RunStarted,
    ShimDied,
    StartFailed,
    StartRefused,
    StartRun,
    StopRun,
    TreeGone,
    Unkillable,
    Withdrawn,
)
from gpulayer.model.ids import JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.node import Accelerator
from gpulayer.model.replica import REASON_CODES, Assignment, Endpoint, Exit, Reason, ReplicaStatus
from gpulayer.model.units import NEVER, Instant

EPOCH_UTC = 1_700_000_000.0
CANCELLED = Reason(code="cancelled", text="cancelled by ann")
E = TypeVar("E")


def service(**changes: Any) -> JobSpec:
    return JobSpec(kind="service", name="chat", argv=("serve",), **changes)


def batch(**changes: Any) -> JobSpec:
    return JobSpec(kind="batch", name="train", argv=("train",), restart="never", **changes)


def order(spec: JobSpec, *, serial: int = 0, withdrawn: Reason | None = None, outcome_known: bool = False) -> Order:
    replica = ReplicaId(JobId("j-aaaaaaaaaa"), 0)
    assignment = Assignment(
        replica=replica, attempt=1, node=NodeId("n-1"), revision=1, restart_serial=serial, withdrawn=withdrawn
    )
    return Order(assignment=assignment, spec=spec, job_name=spec.name, outcome_known=outcome_known)


def found_run(**changes: Any) -> FoundRun:
    told: dict[str, Any] = dict(
        run=1,
        pid=100,
        port=20001,
        started_at_utc=EPOCH_UTC - 100.0,
        started_seconds_ago=100.0,
        restarts=0,
        failures=0,
        restart_serial=0,
        alive=True,
    )
    return FoundRun(**(told | changes))


class Story:
    """A life cycle with its clock and everything that it has asked for."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        found: FoundRun | None = None,
        shim_alive: bool = True,
        first_started_seconds_ago: float | None = None,
        **ordered: Any,
    ):
        self.order = order(spec, **ordered)
        self.now = 1000.0
        self.all: list[ReplicaEffect] = []
        self.started = self.now - (found.started_seconds_ago if found is not None else 0.0)
        if found is None:
            stepped = lifecycle.begin(self.order, Instant(self.now), advertise="10.0.0.5")
        else:
            attempt = FoundAttempt(
                attempt=self.order.assignment.id,
                shim_alive=shim_alive,
                first_started_seconds_ago=first_started_seconds_ago,
                last=found,
            )
            stepped = lifecycle.adopt(self.order, attempt, Instant(self.now), advertise="10.0.0.5")
        self.life, self.effects = stepped
        self.all += self.effects

    @property
    def utc(self) -> float:
        return EPOCH_UTC + self.now - 1000.0

    @property
    def status(self) -> ReplicaStatus:
        return lifecycle.status(self.life)

    def hear(self, *events: ReplicaEvent) -> list[ReplicaEffect]:
        """The effects of these events, which are also kept in `effects`."""
        self.effects = []
        for event in events:
            self.life, effects = lifecycle.step(self.life, event, Instant(self.now))
            self.effects += effects
        self.all += self.effects
        return self.effects

    def wait(self, seconds: float) -> list[ReplicaEffect]:
        """Time passes, with a Tick at each deadline on the way."""
        until, effects = self.now + seconds, []
        while (due := lifecycle.deadline(self.life)) <= until:
            self.now = max(self.now, due)
            effects += self.hear(Tick())
        self.now = until
        self.effects = effects
        return effects

    def asked(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def announced(self) -> list[str]:
        return [effect.kind for effect in self.effects if isinstance(effect, Announce)]

    def start(self, **changes: Any) -> None:
        """The run that was asked for is executed."""
        run, self.started = self.life.run, self.now
        told: dict[str, Any] = dict(run=run, pid=100 + run, port=20000 + run, at_utc=self.utc)
        self.hear(RunStarted(**(told | changes)))

    def ready(self) -> None:
        self.start()
        self.hear(ListenerFound(run=self.life.run, at_utc=self.utc))

    def exit(self, code: int | None = None, *, after: float = 0.3, **changes: Any) -> list[ReplicaEffect]:
        """The run's process ends, `after` seconds from now."""
        self.now += after
        uptime = self.now - self.started
        ended = Exit(run=self.life.run, code=code, ended_at_utc=self.utc, uptime_seconds=uptime, **changes)
        return self.hear(RunExited(exit=ended))

    def gone(self) -> list[ReplicaEffect]:
        return self.hear(TreeGone(run=self.life.run))

    def crash(self, code: int | None = 1, **changes: Any) -> None:
        """A whole run: started, and over with everything it had."""
        self.start()
        self.exit(code, **changes)
        self.gone()


# --- starting and being ready --------------------------------------------------------------------------------------


def test_a_new_assignment_starts_run_1_at_once() -> None:
    story = Story(service())
    assert story.asked(StartRun) == [StartRun(run=1, cause="first start", restarts=0, failures=0, restart_serial=0)]
    assert story.announced() == ["replica.starting"]
    assert story.status.state == "starting"


def test_a_service_is_ready_and_listed_when_its_own_process_listens() -> None:
    story = Story(service())
    story.start()
    assert (story.status.state, story.status.endpoint, story.status.port) == ("starting", None, 20001)
    assert story.status.reason is not None
    assert story.status.reason.code == "not_listening"
    story.hear(ListenerFound(run=1, at_utc=story.utc))
    assert story.status.state == "ready"
    assert story.status.endpoint == Endpoint(address="10.0.0.5", port=20001)
    assert story.status.ready_since_utc == story.utc


def test_an_endpoint_is_withdrawn_in_the_step_that_hears_that_nobody_listens_any_more() -> None:
    story = Story(service())
    story.ready()
    story.hear(ListenerMissing(run=1, reason=Reason(code="not_listening", text="port 20001 was closed")))
    assert (story.status.state, story.status.endpoint) == ("unready", None)
    assert story.announced() == ["replica.unready"]
    story.hear(ListenerFound(run=1, at_utc=story.utc))
    assert (story.status.state, story.status.endpoint is None) == ("ready", False)
    assert story.asked(StartRun) == story.asked(StopRun) == []


@pytest.mark.parametrize("code", ["listens_elsewhere", "port_taken"])
def test_a_service_that_loads_is_told_apart_from_one_that_will_never_be_found(code: str) -> None:
    story = Story(service())
    story.start()
    story.hear(ListenerMissing(run=1, reason=Reason(code="not_listening")))
    assert story.announced() == []
    trouble = Reason(code=code, text="it listens on 127.0.0.1:8000")
    story.hear(ListenerMissing(run=1, reason=trouble))
    assert story.announced() == ["replica.port_trouble"]
    story.hear(ListenerMissing(run=1, reason=trouble))
    assert story.announced() == []  # once is enough
    assert (story.status.state, story.status.reason) == ("starting", trouble)


@pytest.mark.parametrize("spec", [service(port=False), batch(), batch(port=True)], ids=["service", "batch", "port"])
def test_without_a_port_alive_for_a_second_is_ready(spec: JobSpec) -> None:
    story = Story(spec)
    story.start(port=None)
    story.wait(0.9)
    assert story.status.state == "starting"
    assert story.status.reason is not None
    story.wait(0.2)
    assert (story.status.state, story.status.endpoint) == ("ready", None)


def test_a_run_that_is_not_ready_in_time_is_stopped_and_restarted_with_its_cause() -> None:
    story = Story(service(start_timeout_seconds=60.0, restart="on_failure"))
    story.start()
    elsewhere = Reason(code="listens_elsewhere", text="it listens on 127.0.0.1:8000")
    story.hear(ListenerMissing(run=1, reason=elsewhere))
    story.wait(59.0)
    assert story.asked(StopRun) == []
    story.wait(1.0)
    assert [(stop.why, stop.signal, stop.grace_seconds) for stop in story.asked(StopRun)] == [
        ("never_ready", "TERM", 10)
    ]
    assert story.status.state == "stopping"
    # That it exits with 0 when it is told to stop does not make it a success.
    story.exit(0, after=0.1, ended_by="stop:never_ready")
    story.gone()
    reason = story.status.reason
    assert story.status.state == "backing_off"
    assert reason is not None
    assert reason.code == "never_ready"
    assert "127.0.0.1:8000" in reason.text
    story.wait(1.0)
    assert [start.run for start in story.asked(StartRun)] == [2]


def test_a_service_that_was_ready_is_not_ended_for_its_start_timeout() -> None:
    story = Story(service(start_timeout_seconds=60.0))
    story.ready()
    story.hear(ListenerMissing(run=1, reason=Reason(code="not_listening")))
    assert story.wait(600.0) == []


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_crashed_service_is_restarted_after_a_second_and_says_why() -> None:
    story = Story(service(max_restarts=3))
    story.start()
    effects = story.exit(1)
    assert [e.text for e in effects if isinstance(e, Note)] == ["restarts in 1 s (0 of 3 restarts used)"]
    assert story.announced() == ["replica.exited", "replica.backing_off"]
    assert story.status.next_start_at_utc == story.utc + 1.0
    story.gone()
    story.wait(0.99)
    assert story.asked(StartRun) == []
    story.wait(0.02)
    [start] = story.asked(StartRun)
    assert (start.run, start.cause, start.restarts, start.failures) == (
        2,
        "exit code 1 after 0.3 s; restart 1 of 3",
        1,
        1,
    )


def test_a_service_that_always_fails_starts_four_times_and_then_has_failed() -> None:
    """Delays of 1, 2 and 4 seconds, then the exit code, the count and the reason are there to be read."""
    story, starts = Story(service(max_restarts=3)), [1000.0]
    for _ in range(3):
        story.crash(1)
        ended = story.now
        story.wait(lifecycle.deadline(story.life) - story.now)
        assert len(story.asked(StartRun)) == 1
        starts.append(story.now - ended)
    assert [round(delay, 6) for delay in starts[1:]] == [1.0, 2.0, 4.0]
    story.start()
    story.exit(1)
    [report] = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason.code, report.released) == ("failed", "exit_nonzero", False)
    assert report.outcome.reason.text == "exit code 1 after 0.3 s, after 3 restarts"
    assert (report.outcome.restarts, report.outcome.exit is not None) == (3, True)
    assert story.gone() == [ReportReleased(), Discard()]
    assert lifecycle.deadline(story.life) == NEVER


def test_a_new_run_never_meets_what_is_left_of_the_old_one() -> None:
    story = Story(service())
    story.start()
    story.exit(1)
    assert story.wait(20.0) == []
    assert [start.run for start in story.gone() if isinstance(start, StartRun)] == [2]


def test_the_delay_counts_from_the_exit_and_not_from_the_last_child() -> None:
    story = Story(service())
    story.start()
    story.exit(1)
    story.wait(0.8)
    story.gone()
    story.wait(0.2)
    assert len(story.asked(StartRun)) == 1


def test_a_run_that_was_up_for_long_starts_again_from_one_second() -> None:
    story = Story(service())
    for _ in range(4):
        story.crash(1)
        story.wait(10.0)
    story.start()
    story.exit(1, after=61.0)
    assert story.status.next_start_at_utc == story.utc + 1.0
    assert story.life.failures == 1


@pytest.mark.parametrize(
    ("restart", "code", "signal", "result"),
    [
        ("always", 0, None, None),
        ("always", 1, None, None),
        ("on_failure", 0, None, "succeeded"),
        ("on_failure", 1, None, None),
        ("on_failure", None, 9, None),
        ("never", 0, None, "succeeded"),
        ("never", 3, None, "failed"),
        ("never", None, 9, "failed"),
    ],
)
def test_the_policy_decides_what_follows_an_exit(
    restart: Any, code: int | None, signal: int | None, result: str | None
) -> None:
    story = Story(service(restart=restart))
    story.start()
    story.exit(code, signal=signal)
    story.gone()
    outcomes = [effect.outcome.result for effect in story.all if isinstance(effect, Report)]
    assert outcomes == ([result] if result else [])
    assert story.status.state == ("ended" if result else "backing_off")


def test_always_with_restarts_used_up_has_succeeded_if_its_last_exit_was_zero() -> None:
    story = Story(service(max_restarts=0))
    story.start()
    story.exit(0)
    assert [report.outcome.result for report in story.asked(Report)] == ["succeeded"]


def test_a_start_that_fails_is_tried_again_because_a_missing_program_may_come_back() -> None:
    story = Story(service(restart="on_failure"))
    missing = Reason(code="bad_command", text="serve: not found")
    story.hear(StartFailed(run=1, reason=missing, at_utc=story.utc))
    assert story.status.state == "backing_off"
    assert story.status.reason is not None
    assert story.status.reason.code == "bad_command"
    assert story.status.next_start_at_utc == story.utc + 1.0
    story.wait(1.0)
    assert [start.cause for start in story.asked(StartRun)] == ["serve: not found; restart 1"]


@pytest.mark.parametrize("spec", [service(restart="never"), batch()], ids=["service", "batch"])
def test_a_start_that_fails_without_a_restart_is_the_end_with_its_own_reason(spec: JobSpec) -> None:
    story = Story(spec)
    missing = Reason(code="bad_workdir", text="/data is no directory")
    story.hear(StartFailed(run=1, reason=missing, at_utc=story.utc))
    [report] = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason, report.released) == ("failed", missing, True)
    assert story.effects[-1] == Discard()


def test_every_kind_of_failure_has_a_reason_of_its_own() -> None:
    """A "FAILED" without a cause helps nobody."""
    seen = set()
    for changes in (
        {"code": 3},
        {"signal": 9},
        {"ended_by": "timeout", "signal": 15},
        {"ended_by": "interrupted"},
        {"ended_by": "supervisor_killed"},
    ):
        story = Story(batch(timeout_seconds=90.0))
        story.start()
        story.exit(**changes)
        [report] = story.asked(Report)
        assert report.outcome.result == "failed"
        assert report.outcome.reason.text
        seen.add(report.outcome.reason.code)
    assert seen == {"exit_nonzero", "signal", "timeout", "interrupted", "supervisor_killed"}
    assert seen <= set(REASON_CODES)


def test_the_timeout_ends_a_service_for_good_whatever_its_policy() -> None:
    story = Story(service(timeout_seconds=90.0))
    story.ready()
    story.exit(0, after=90.0, ended_by="timeout")
    [report] = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason.code) == ("failed", "timeout")
    assert "90s" in report.outcome.reason.text


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_ends_with_its_exit_code_and_is_not_executed_again() -> None:
    story = Story(batch())
    story.start(port=None)
    story.exit(3)
    [report] = story.asked(Report)
    assert report.outcome.exit is not None
    assert (report.outcome.result, report.outcome.exit.code, report.released) == ("failed", 3, False)
    assert story.gone() == [ReportReleased(), Discard()]
    assert story.wait(3600.0) == []


def test_an_end_whose_tree_is_gone_already_is_one_report() -> None:
    story = Story(batch())
    story.start(port=None)
    story.gone()
    story.exit(0)
    assert [report.released for report in story.asked(Report)] == [True]
    assert (story.asked(ReportReleased), story.effects[-1]) == ([], Discard())


def test_what_a_batch_left_in_the_background_is_said_with_what_to_do() -> None:
    story = Story(batch())
    story.start(port=None)
    story.exit(0, left_background=2, left_names=("python", "tee"))
    [report] = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason.code) == ("succeeded", "left_background_processes")
    assert "2 processes in the background (python, tee)" in report.outcome.reason.text
    assert "exec" in report.outcome.reason.hint


def test_a_failure_keeps_its_own_reason_beside_what_it_left() -> None:
    story = Story(batch())
    story.start(port=None)
    story.exit(1, left_background=1)
    [report] = story.asked(Report)
    assert report.outcome.reason.code == "exit_nonzero"
    assert "1 process in the background" in report.outcome.reason.text


def test_a_service_that_daemonises_itself_is_warned_about_while_it_restarts() -> None:
    story = Story(service())
    story.crash(0, left_background=1, left_names=("nginx",))
    story.wait(1.0)
    story.start()
    assert story.status.warning is not None
    assert story.status.warning.code == "left_background_processes"


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_withdrawn_replica_is_stopped_its_way_and_released_when_nothing_is_left() -> None:
    story = Story(service(stop_signal="INT", stop_grace_seconds=30.0))
    story.ready()
    story.hear(Withdrawn(reason=CANCELLED))
    assert story.asked(StopRun) == [StopRun(run=1, signal="INT", grace_seconds=30.0, why="cancelled")]
    assert (story.status.state, story.status.reason, story.status.endpoint) == ("stopping", CANCELLED, None)
    story.exit(0, ended_by="stop:cancelled")
    assert story.asked(Report) == []
    effects = story.gone()
    [report] = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason, report.released) == ("cancelled", CANCELLED, True)
    assert effects[-1] == Discard()


def test_withdrawn_while_backing_off_ends_at_once() -> None:
    story = Story(service())
    story.crash(1)
    story.hear(Withdrawn(reason=CANCELLED))
    assert [report.released for report in story.asked(Report)] == [True]
    assert story.asked(StopRun) == []
    assert story.wait(60.0) == []


def test_withdrawn_between_exit_and_the_end_of_the_tree_waits_for_the_tree() -> None:
    story = Story(service())
    story.start()
    story.exit(1)
    assert story.hear(Withdrawn(reason=CANCELLED)) == []
    assert story.status.state == "stopping"
    story.gone()
    [report] = story.asked(Report)
    assert (report.outcome.result, report.released) == ("cancelled", True)


def test_a_cancel_that_meets_a_start_stops_the_run_as_soon_as_there_is_one() -> None:
    story = Story(service())
    assert story.hear(Withdrawn(reason=CANCELLED)) == []
    assert story.status.state == "stopping"
    story.start()
    assert [stop.run for stop in story.asked(StopRun)] == [1]
    assert story.status.state == "stopping"


def test_a_cancel_that_meets_a_failing_start_leaves_nothing() -> None:
    story = Story(service())
    story.hear(Withdrawn(reason=CANCELLED))
    story.hear(StartFailed(run=1, reason=Reason(code="bad_command"), at_utc=story.utc))
    assert [(report.outcome.result, report.released) for report in story.asked(Report)] == [("cancelled", True)]
    assert story.effects[-1] == Discard()


def test_a_batch_that_was_faster_than_its_cancel_keeps_its_outcome() -> None:
    story = Story(batch())
    story.start(port=None)
    story.hear(Withdrawn(reason=CANCELLED))
    story.exit(0)
    assert [report.outcome.result for report in story.asked(Report)] == ["succeeded"]


def test_a_cancel_during_a_restart_on_request_needs_no_second_signal() -> None:
    story = Story(service())
    story.ready()
    story.hear(RestartRequested(serial=1))
    assert story.hear(Withdrawn(reason=CANCELLED)) == []
    story.exit(0, ended_by="stop:restart_requested")
    story.gone()
    assert [report.outcome.result for report in story.asked(Report)] == ["cancelled"]
    assert story.asked(StartRun) == []


def test_what_cannot_be_killed_keeps_the_replica_stopping_and_is_named() -> None:
    story = Story(service())
    story.ready()
    story.hear(Withdrawn(reason=CANCELLED))
    story.exit(None, signal=9)
    story.hear(Unkillable(run=1, pids=(4711,)))
    assert story.announced() == ["replica.unkillable"]
    assert story.hear(Unkillable(run=1, pids=(4711,))) == []
    assert story.status.state == "stopping"
    assert story.status.reason is not None
    assert (story.status.reason.code, "4711" in story.status.reason.text) == ("unkillable", True)
    assert story.wait(3600.0) == []
    story.gone()
    assert story.status.reason == CANCELLED


# --- restart on request ----------------------------------------------------------------------------------------------


def test_a_requested_restart_stops_the_run_and_starts_the_next_without_waiting_or_counting() -> None:
    story = Story(service(max_restarts=1))
    story.ready()
    story.hear(RestartRequested(serial=1))
    assert [stop.why for stop in story.asked(StopRun)] == ["restart_requested"]
    assert story.status.endpoint is None
    story.exit(0, ended_by="stop:restart_requested")
    assert story.asked(StartRun) == []
    story.gone()
    [start] = story.asked(StartRun)
    assert (start.run, start.restarts, start.failures, start.restart_serial) == (2, 0, 0, 1)


def test_a_request_while_backing_off_starts_now() -> None:
    story = Story(service())
    for _ in range(5):
        story.crash(1)
        story.wait(30.0)
    story.crash(1)
    story.hear(RestartRequested(serial=1))
    [start] = story.asked(StartRun)
    assert (start.cause, start.restarts, start.failures) == ("a restart was requested", 5, 0)


def test_a_request_that_was_carried_out_is_not_carried_out_again() -> None:
    story = Story(service(), serial=4)
    story.ready()
    assert story.hear(RestartRequested(serial=4), RestartRequested(serial=3)) == []
    assert len(story.hear(RestartRequested(serial=5), RestartRequested(serial=5))) > 0
    assert len(story.asked(StopRun)) == 1


def test_a_request_that_meets_a_start_replaces_that_run() -> None:
    story = Story(service())
    story.hear(RestartRequested(serial=1))
    assert story.effects == []
    story.start()
    assert [stop.why for stop in story.asked(StopRun)] == ["restart_requested"]


def test_a_batch_is_not_restarted_on_request() -> None:
    story = Story(batch())
    story.start(port=None)
    assert story.hear(RestartRequested(serial=1)) == []


# --- late, doubled, killed -------------------------------------------------------------------------------------------


def test_a_late_check_of_an_older_process_is_ignored() -> None:
    story = Story(service())
    story.crash(1)
    story.wait(1.0)
    story.start()
    assert story.hear(ListenerFound(run=1, at_utc=story.utc)) == []
    assert (story.status.state, story.status.endpoint) == ("starting", None)
    old = Exit(run=1, code=1)
    assert story.hear(TreeGone(run=1), RunExited(exit=old), ShimDied(run=1, at_utc=story.utc)) == []


def test_what_is_heard_twice_is_done_once() -> None:
    story = Story(service())
    story.start()
    story.start()
    assert story.effects == []
    story.exit(1)
    assert story.exit(1) == []
    story.gone()
    assert story.gone() == []
    story.wait(1.0)
    assert story.life.run == 2


def test_an_exit_that_overtakes_its_start_is_an_exit() -> None:
    story = Story(batch())
    story.exit(0)
    assert [report.outcome.result for report in story.asked(Report)] == ["succeeded"]
    story.start(port=None)
    assert story.effects == []


def test_a_killed_supervisor_takes_the_endpoint_and_the_run_follows_when_the_tree_is_gone() -> None:
    story = Story(service(restart="on_failure"))
    story.ready()
    story.now += 5.0
    story.hear(ShimDied(run=1, at_utc=story.utc))
    assert (story.status.state, story.status.endpoint) == ("backing_off", None)
    assert story.announced()[0] == "replica.supervisor_killed"
    assert story.status.last_exit == Exit(
        run=1, ended_by="supervisor_killed", ended_at_utc=story.utc, uptime_seconds=5.0
    )
    assert story.wait(5.0) == []
    story.gone()
    assert [start.restarts for start in story.asked(StartRun)] == [1]


def test_a_batch_whose_supervisor_was_killed_has_failed_and_is_not_executed_again() -> None:
    story = Story(batch())
    story.start(port=None)
    story.hear(ShimDied(run=1, at_utc=story.utc))
    [report] = story.asked(Report)
    assert (report.outcome.reason.code, report.released) == ("supervisor_killed", False)
    assert story.gone() == [ReportReleased(), Discard()]


def test_a_supervisor_that_is_killed_during_a_start_counts_as_having_started() -> None:
    story = Story(batch())
    story.hear(ShimDied(run=1, at_utc=story.utc))
    assert [report.outcome.reason.code for report in story.asked(Report)] == ["supervisor_killed"]


# --- a daemon that comes back ----------------------------------------------------------------------------------------


def test_a_run_that_went_on_without_its_daemon_is_adopted_with_its_pid_and_its_counts() -> None:
    story = Story(service(), found=found_run(run=4, restarts=2, failures=1, pid=99))
    assert story.announced() == ["replica.adopted"]
    assert story.asked(StartRun) == story.asked(StopRun) == []
    assert (story.status.state, story.status.pid, story.status.restarts, story.status.run) == ("starting", 99, 2, 4)
    assert story.status.endpoint is None  # not before it was seen to listen
    story.hear(ListenerFound(run=4, at_utc=story.utc))
    assert story.status.endpoint == Endpoint(address="10.0.0.5", port=20001)
    story.exit(1, after=100.0)
    story.gone()
    story.wait(1.0)
    assert [(start.run, start.restarts) for start in story.asked(StartRun)] == [(5, 3)]


def test_an_adopted_replica_without_a_port_is_ready_at_once() -> None:
    story = Story(service(port=False), found=found_run(port=None))
    assert story.status.state == "ready"
    assert story.status.ready_since_utc == EPOCH_UTC - 99.0


def test_an_adopted_service_is_not_ended_for_a_start_that_lies_hours_back() -> None:
    story = Story(service(start_timeout_seconds=60.0), found=found_run(started_seconds_ago=7200.0))
    assert story.wait(2.0) == []
    story.hear(ListenerFound(run=1, at_utc=story.utc))
    assert story.wait(120.0) == []


def test_an_exit_without_a_daemon_is_treated_as_of_its_own_time() -> None:
    """It exited 1.5 s ago with a delay of two: half a second is left, not two."""
    exit = Exit(run=3, code=1, ended_at_utc=EPOCH_UTC - 1.5, uptime_seconds=8.5)
    story = Story(
        service(),
        found=found_run(run=3, alive=False, gone=True, exit=exit, failures=1, restarts=2, started_seconds_ago=10.0),
    )
    assert story.status.state == "backing_off"
    assert story.status.next_start_at_utc == EPOCH_UTC + 0.5
    story.wait(0.49)
    assert story.asked(StartRun) == []
    story.wait(0.02)
    assert [(start.run, start.restarts, start.failures) for start in story.asked(StartRun)] == [(4, 3, 2)]


def test_an_exit_whose_delay_is_over_starts_the_next_run_with_the_adoption() -> None:
    exit = Exit(run=1, code=1, ended_at_utc=EPOCH_UTC - 60, uptime_seconds=40.0)
    story = Story(service(), found=found_run(alive=False, gone=True, exit=exit))
    assert [start.run for start in story.asked(StartRun)] == [2]


def test_an_exit_without_a_daemon_whose_tree_is_not_gone_waits_for_it() -> None:
    exit = Exit(run=1, code=1, ended_at_utc=EPOCH_UTC - 60, uptime_seconds=40.0)
    story = Story(service(), found=found_run(alive=False, exit=exit))
    assert story.asked(StartRun) == story.asked(StopRun) == []  # its shim sweeps
    story.gone()
    assert [start.run for start in story.asked(StartRun)] == [2]


def test_a_batch_that_ended_without_a_daemon_has_its_outcome() -> None:
    exit = Exit(run=1, code=0, ended_at_utc=EPOCH_UTC - 60, uptime_seconds=40.0)
    story = Story(batch(), found=found_run(alive=False, gone=True, exit=exit), shim_alive=False)
    [report] = story.asked(Report)
    assert (report.outcome.result, report.released) == ("succeeded", True)
    assert story.asked(StartRun) == []


def test_after_a_reboot_a_service_runs_again_uncounted_and_a_batch_does_not() -> None:
    exit = Exit(run=1, ended_by="interrupted")
    found = found_run(alive=False, gone=True, exit=exit)
    story = Story(service(max_restarts=0), found=found, shim_alive=False)
    assert [(start.run, start.restarts) for start in story.asked(StartRun)] == [(2, 0)]
    story = Story(batch(), found=found, shim_alive=False)
    assert [report.outcome.reason.code for report in story.asked(Report)] == ["interrupted"]
    assert story.asked(StartRun) == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_whose_supervisor_is_dead_is_swept_before_anything_follows(alive: bool) -> None:
    story = Story(service(), found=found_run(alive=alive), shim_alive=False)
    assert [(stop.signal, stop.why) for stop in story.asked(StopRun)] == [("KILL", "supervisor_killed")]
    assert story.asked(StartRun) == []
    story.wait(1.0)
    story.gone()
    assert [start.run for start in story.asked(StartRun)] == [2]


def test_a_batch_whose_supervisor_died_without_a_daemon_is_swept_and_not_executed_again() -> None:
    story = Story(batch(), found=found_run(), shim_alive=False)
    assert [(r.outcome.reason.code, r.released) for r in story.asked(Report)] == [("supervisor_killed", False)]
    assert len(story.asked(StopRun)) == 1
    assert story.gone() == [ReportReleased(), Discard()]


def test_the_wait_after_an_end_that_nobody_saw_counts_from_now() -> None:
    exit = Exit(run=1, ended_by="supervisor_killed")
    story = Story(service(), found=found_run(alive=False, gone=True, exit=exit), shim_alive=False)
    assert story.asked(StartRun) == []
    assert story.status.next_start_at_utc == story.utc + 1.0


def test_a_sandbox_without_a_marker_means_that_nothing_was_executed() -> None:
    begun = order(batch())
    found = FoundAttempt(attempt=begun.assignment.id, shim_alive=True, first_started_seconds_ago=None, last=None)
    _, effects = lifecycle.adopt(begun, found, Instant(5.0), advertise="10.0.0.5")
    assert [effect.run for effect in effects if isinstance(effect, StartRun)] == [1]


def test_what_was_withdrawn_while_the_daemon_was_away_is_stopped() -> None:
    """After a restart of the daemon a stop still reaches the process."""
    story = Story(service(), found=found_run(), withdrawn=CANCELLED)
    assert [stop.why for stop in story.asked(StopRun)] == ["cancelled"]
    story.exit(0, ended_by="stop:cancelled")
    story.gone()
    assert [report.outcome.result for report in story.asked(Report)] == ["cancelled"]


def test_a_stop_that_is_on_its_way_is_not_sent_again() -> None:
    story = Story(service(), found=found_run(stopping="cancelled"), withdrawn=CANCELLED)
    assert story.asked(StopRun) == []
    assert story.status.state == "stopping"
    story.exit(0, ended_by="stop:cancelled")
    story.gone()
    assert [report.outcome.result for report in story.asked(Report)] == ["cancelled"]
    story = Story(service(), found=found_run(stopping="restart_requested", restart_serial=0), serial=1)
    assert story.asked(StopRun) == []
    story.exit(0, ended_by="stop:restart_requested")
    story.gone()
    assert [(start.restarts, start.restart_serial) for start in story.asked(StartRun)] == [(0, 1)]


def test_a_restart_requested_while_the_daemon_was_away_is_carried_out() -> None:
    story = Story(service(), found=found_run(restart_serial=1), serial=2)
    assert [stop.why for stop in story.asked(StopRun)] == ["restart_requested"]


def test_of_an_attempt_whose_end_is_in_the_log_only_the_release_is_owed() -> None:
    exit = Exit(run=1, code=1)
    story = Story(service(), found=found_run(alive=False, gone=True, exit=exit), outcome_known=True)
    assert story.effects == [ReportReleased(), Discard()]
    story = Story(service(), found=found_run(alive=False, exit=exit), outcome_known=True)
    assert story.effects == []
    assert story.gone() == [ReportReleased(), Discard()]
    story = Story(service(), outcome_known=True)
    assert story.effects == [ReportReleased(), Discard()]


def test_numbers_of_a_damaged_marker_are_bounded() -> None:
    story = Story(service(max_restarts=3), found=found_run(restarts=10**9, failures=-4))
    assert story.life.restarts == 0
    story.life.check()


# --- its story -------------------------------------------------------------------------------------------------------


def test_a_replica_can_tell_its_story_within_bounds() -> None:
    story = Story(service())
    for _ in range(40):
        story.crash(1)
        story.wait(30.0)
    assert len(story.life.history) == lifecycle.HISTORY_MAX
    assert "exited with code 1" in " ".join(text for _, text in story.life.history)


def test_a_status_has_a_reason_wherever_a_replica_is_not_ready() -> None:
    story = Story(service())
    seen = [story.status]
    story.start()
    seen.append(story.status)
    story.exit(1)
    seen.append(story.status)
    story.gone()
    seen.append(story.status)
    story.hear(Withdrawn(reason=CANCELLED))
    seen.append(story.status)
    assert [status.state for status in seen] == ["starting", "starting", "backing_off", "backing_off", "ended"]
    for status in seen:
        assert status.reason is not None
        assert status.reason.code in REASON_CODES
    assert replace(seen[-1]).reason == CANCELLED


# --- the attempt's timeout, between two runs ------------------------------------------------------------------------


def test_a_timeout_ends_the_waiting_for_a_restart_too() -> None:
    """The shim ends a run; where there was none, the service was refused its next start again and again, for ever."""
    story = Story(service(timeout_seconds=4.0, port=False))
    for delay in (1.0, 2.0):
        story.crash(after=0.1)
        story.wait(delay)
    story.crash(after=0.0)
    assert story.status.state == "backing_off"
    effects = story.wait(2.0)
    assert story.status.state == "ended"
    assert story.status.reason is not None
    assert story.status.reason.code == "timeout"
    (report,) = [effect for effect in effects if isinstance(effect, Report)]
    assert (report.outcome.result, report.outcome.reason.code, report.released) == ("failed", "timeout", True)
    assert report.outcome.exit is not None
    assert report.outcome.exit.code == 1
    assert lifecycle.deadline(story.life) == NEVER


def test_a_timeout_that_ends_the_waiting_still_waits_for_the_tree() -> None:
    story = Story(service(timeout_seconds=1.0))
    story.start()
    story.exit(1, after=0.5)
    effects = story.wait(1.0)
    (report,) = [effect for effect in effects if isinstance(effect, Report)]
    assert not report.released
    assert story.gone() == [ReportReleased(), Discard()]


def test_a_start_that_is_refused_because_the_time_is_over_is_the_end() -> None:
    story = Story(service(timeout_seconds=4.0))
    story.crash()
    story.wait(1.0)
    story.hear(StartFailed(run=2, reason=Reason(code="timeout", text="the attempt's 4 s are over"), at_utc=story.utc))
    assert story.status.state == "ended"
    assert story.asked(Report)[0].outcome.reason.code == "timeout"


def test_the_time_goes_on_while_the_daemon_is_away() -> None:
    ended = Exit(run=1, code=1, ended_at_utc=EPOCH_UTC, uptime_seconds=99.5)
    found = found_run(alive=False, gone=True, exit=ended)
    story = Story(service(timeout_seconds=100.2), found=found, first_started_seconds_ago=100.0)
    assert story.status.state == "backing_off"
    story.wait(0.3)
    assert story.status.state == "ended"
    assert story.status.reason is not None
    assert story.status.reason.code == "timeout"


# --- a run that was not executed, found by the next daemon ----------------------------------------------------------

BAD = Reason(code="bad_command", text="command 'x' was not found", hint="check it")


def not_executed(**changes: Any) -> FoundRun:
    ended = Exit(run=3, ended_by="spawn_failed", ended_at_utc=EPOCH_UTC - 1.0)
    told = dict(run=3, restarts=2, failures=2, alive=False, gone=True, exit=ended, started_seconds_ago=1.0)
    return found_run(**(told | {"start_failure": BAD} | changes))


def test_why_a_run_was_not_executed_survives_the_daemon() -> None:
    """After a restart of the daemon `bad_command` had become a `spawn_failed` with the hint to look at ulimits."""
    story = Story(service(), found=not_executed(), shim_alive=True)
    assert story.status.state == "backing_off"
    assert story.status.reason is not None
    assert story.status.reason.code == "bad_command"
    assert (story.status.restarts, story.status.last_exit) == (2, None)
    assert story.wait(2.9) == [], "the third failure: 4 s from the failed start, a second of which is over"
    story.wait(0.2)
    assert story.asked(StartRun)[0].run == 4


def test_a_batch_that_was_not_executed_fails_with_its_reason() -> None:
    story = Story(batch(), found=not_executed(run=1, restarts=0, failures=0), shim_alive=True)
    (report,) = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason.code) == ("failed", "bad_command")


def test_an_order_that_was_taken_back_meanwhile_is_cancelled_all_the_same() -> None:
    story = Story(service(), found=not_executed(), withdrawn=CANCELLED)
    (report,) = story.asked(Report)
    assert (report.outcome.result, report.released) == ("cancelled", True)


# --- a start that its node refuses ---------------------------------------------------------------------------------

IN_USE = Reason(code="device_unavailable", text="GPU-0 is used by others: pid 7", hint="it waits for its turn again")
SEEN = Accelerator(
    uuid="GPU-0", kind="cuda", vendor="nvidia", model="H100", memory_mib=1024, foreign="pid 7", foreign_milli=1000
)


def refused(run: int = 1) -> StartRefused:
    return StartRefused(run=run, reason=IN_USE, observed=(SEEN,))


@pytest.mark.parametrize("spec", [service(), service(restart="never"), service(max_restarts=0), batch()])
def test_a_start_that_is_refused_is_reported_as_such_and_is_no_failure_whatever_the_policy(spec: JobSpec) -> None:
    story = Story(spec)
    story.hear(refused())
    assert story.announced() == ["replica.refused"]
    assert story.asked(ReportRefused) == [ReportRefused(reason=IN_USE, observed=(SEEN,))]
    assert story.asked(Report) == story.asked(ReportReleased) == story.asked(StartRun) == []
    assert isinstance(story.effects[-1], Discard)
    assert [note.text for note in story.asked(Note)] == [
        "run 1 is not started here: GPU-0 is used by others: pid 7; it waits to be placed again"
    ]
    assert (story.status.state, story.status.reason) == ("waiting", IN_USE)
    assert (story.status.pid, story.status.port, story.status.endpoint) == (None, None, None)
    assert IN_USE.code in REASON_CODES
    assert lifecycle.is_over(story.life)
    assert lifecycle.deadline(story.life) == NEVER


def test_what_was_refused_is_over_whatever_is_heard_afterwards() -> None:
    story = Story(batch())
    story.hear(refused())
    later = (
        refused(),
        RunStarted(run=1, pid=101, port=20001, at_utc=story.utc),
        StartFailed(run=1, reason=Reason(code="bad_command"), at_utc=story.utc),
        RunExited(exit=Exit(run=1, code=0)),
        ShimDied(run=1, at_utc=story.utc),
        DevicesNotClear(run=1, text="the driver lists pid 7"),
        Unkillable(run=1, pids=(7,)),
        TreeGone(run=1),
        RestartRequested(serial=1),
        Withdrawn(reason=CANCELLED),
        Tick(),
    )
    assert story.hear(*later) == []
    assert story.wait(1000.0) == []
    assert (story.status.state, story.status.reason) == ("waiting", IN_USE)


def test_a_refusal_is_owed_until_the_log_shows_it_and_a_release_where_the_end_is_known() -> None:
    story = Story(service())
    assert lifecycle.owed(story.life, outcome_known=False) is None
    story.hear(refused())
    assert lifecycle.owed(story.life, outcome_known=False) == ReportRefused(reason=IN_USE, observed=(SEEN,))
    assert lifecycle.owed(story.life, outcome_known=True) == ReportReleased()


def test_a_start_that_was_cancelled_and_is_refused_is_cancelled() -> None:
    story = Story(service())
    story.hear(Withdrawn(reason=CANCELLED), refused())
    [report] = story.asked(Report)
    assert (report.outcome.result, report.outcome.reason, report.released) == ("cancelled", CANCELLED, True)
    assert story.asked(ReportRefused) == []
    assert isinstance(story.effects[-1], Discard)
    assert story.status.state == "ended"


def test_a_restart_that_is_refused_sends_the_replica_to_the_queue_with_what_is_known_of_it() -> None:
    story = Story(service())
    story.crash(3)
    story.wait(1.0)
    assert story.life.run == 2
    story.hear(refused(run=2))
    assert len(story.asked(ReportRefused)) == 1
    assert (story.status.state, story.status.restarts) == ("waiting", 1)
    assert story.status.last_exit is not None
    assert story.status.last_exit.code == 3


def test_a_restart_on_request_that_is_refused_waits_too() -> None:
    story = Story(service())
    story.ready()
    story.hear(RestartRequested(serial=1))
    story.exit(0)
    story.gone()
    story.hear(refused(run=2))
    assert story.status.state == "waiting"
    assert len(story.asked(ReportRefused)) == 1


def test_a_refusal_of_an_older_run_is_ignored() -> None:
    story = Story(service())
    story.crash()
    story.wait(1.0)
    assert story.hear(refused(run=1)) == []
    assert story.status.state == "starting"


@pytest.mark.parametrize("phase", ["starting", "ready", "unready", "stopping", "backing_off", "ended"])
def test_a_refusal_of_what_was_started_is_ignored(phase: str) -> None:
    """Twice the same answer, or one to a question that was never asked: what runs goes on."""
    story = Story(service(restart="never" if phase == "ended" else "always"))
    story.start() if phase == "starting" else story.ready()
    match phase:
        case "unready":
            story.hear(ListenerMissing(run=1, reason=Reason(code="not_listening")))
        case "stopping":
            story.hear(Withdrawn(reason=CANCELLED))
        case "backing_off" | "ended":
            story.exit(1)
        case _:
            pass
    before = story.life
    assert story.status.state == phase
    assert story.hear(refused()) == []
    assert story.life == before


def test_a_refusal_that_the_log_has_not_heard_of_when_the_daemon_ends_is_begun_again() -> None:
    """Nothing was executed and no marker made, so this is safe for a batch too."""
    spec = batch()
    found = FoundAttempt(attempt=order(spec).assignment.id, shim_alive=True, first_started_seconds_ago=None, last=None)
    life, effects = lifecycle.adopt(order(spec), found, Instant(1.0), advertise="10.0.0.5")
    assert [effect.run for effect in effects if isinstance(effect, StartRun)] == [1]
    life, effects = lifecycle.step(life, refused(), Instant(2.0))
    assert [effect for effect in effects if isinstance(effect, ReportRefused)]


def test_a_refused_restart_that_the_log_has_not_heard_of_is_tried_again_by_the_next_daemon() -> None:
    ended = Exit(run=1, code=3, ended_at_utc=EPOCH_UTC, uptime_seconds=10.0)
    story = Story(service(), found=found_run(alive=False, gone=True, exit=ended), shim_alive=False)
    assert [start.run for start in story.asked(StartRun)] == [2]
    story.hear(refused(run=2))
    assert story.status.state == "waiting"


# --- devices that are not clear ------------------------------------------------------------------------------------


def not_clear(run: int = 1, pid: int = 7) -> DevicesNotClear:
    return DevicesNotClear(run=run, text=f"the driver still lists pid {pid} on GPU-0")


def test_a_cancelled_run_is_stopping_until_its_devices_are_clear_and_says_what_it_waits_for() -> None:
    """A GPU is free when the driver says so."""
    story = Story(service())
    story.ready()
    story.hear(Withdrawn(reason=CANCELLED))
    story.exit(signal=15, ended_by="stop:cancelled")
    story.hear(not_clear())
    assert story.announced() == ["replica.devices_not_clear"]
    reason = story.status.reason
    assert reason is not None
    assert (story.status.state, reason.code) == ("stopping", "devices_not_clear")
    assert reason.text == "all its processes have ended, and the driver still lists pid 7 on GPU-0"
    assert reason.code in REASON_CODES
    assert reason.hint
    assert story.wait(60.0) == []
    story.gone()
    assert [report.released for report in story.asked(Report)] == [True]
    assert story.status.state == "ended"
    assert story.status.reason == CANCELLED


def test_the_next_run_waits_for_the_devices_of_the_one_before() -> None:
    story = Story(service())
    story.ready()
    story.exit(1)
    story.hear(not_clear())
    assert story.status.state == "stopping"
    assert story.status.reason is not None
    assert story.status.reason.code == "devices_not_clear"
    assert story.wait(60.0) == []
    story.gone()
    assert [start.run for start in story.asked(StartRun)] == [2]
    assert story.status.state == "starting"
    assert story.life.not_clear == ""


def test_a_run_that_waits_out_its_delay_with_clear_devices_backs_off_and_says_why_it_ended() -> None:
    story = Story(service())
    story.ready()
    story.exit(1)
    story.hear(not_clear())
    story.gone()
    assert story.status.state == "backing_off"
    assert story.status.reason is not None
    assert story.status.reason.code == "exit_nonzero"


def test_a_batch_that_has_ended_is_released_only_when_its_devices_are_clear() -> None:
    story = Story(batch())
    story.start()
    story.exit(0)
    assert [report.released for report in story.asked(Report)] == [False]
    story.hear(not_clear())
    assert story.asked(ReportReleased) == story.asked(Discard) == []
    assert story.status.state == "stopping"
    assert story.status.reason is not None
    assert story.status.reason.code == "devices_not_clear"
    story.gone()
    assert story.effects == [ReportReleased(), Discard()]
    assert story.status.state == "ended"
    assert story.status.reason is not None
    assert story.status.reason.code == "exit_zero"


def test_what_is_in_the_way_is_announced_once_and_again_when_it_is_something_else() -> None:
    story = Story(service())
    story.ready()
    story.exit(1)
    story.hear(not_clear(), not_clear(), not_clear(pid=8), not_clear(pid=8))
    assert story.announced() == ["replica.devices_not_clear"] * 2
    assert story.status.reason is not None
    assert "pid 8" in story.status.reason.text


def test_a_late_word_about_the_devices_of_an_older_run_is_ignored() -> None:
    story = Story(service())
    story.crash()
    assert story.hear(not_clear()) == [], "they are clear by now"
    story.wait(1.0)
    assert story.hear(not_clear(run=1)) == []
    assert story.status.state == "starting"


def test_devices_that_are_not_clear_before_the_exit_is_heard_say_so_afterwards() -> None:
    story = Story(service())
    story.ready()
    story.hear(not_clear())
    assert story.status.state == "ready", "its end is not known yet"
    story.exit(1)
    assert story.status.state == "stopping"
    story.gone()
    assert story.status.state == "backing_off"


def test_a_cancel_while_the_devices_are_not_clear_needs_no_stop_and_ends_with_them() -> None:
    story = Story(service())
    story.ready()
    story.exit(1)
    story.hear(not_clear(), Withdrawn(reason=CANCELLED))
    assert story.asked(StopRun) == story.asked(Report) == []
    assert story.status.reason is not None
    assert story.status.reason.code == "devices_not_clear"
    story.gone()
    assert [report.outcome.result for report in story.asked(Report)] == ["cancelled"]


def test_processes_that_could_be_killed_in_the_end_are_not_named_any_more() -> None:
    story = Story(service())
    story.ready()
    story.hear(Withdrawn(reason=CANCELLED))
    story.exit(signal=9, ended_by="stop:cancelled")
    story.hear(Unkillable(run=1, pids=(4711,)), not_clear())
    assert story.status.reason is not None
    assert story.status.reason.code == "devices_not_clear"
