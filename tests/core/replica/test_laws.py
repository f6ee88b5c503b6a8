"""What holds in every order of events, for an agent and all its attempts.

The world around the agent is a small honest model: shims that do what they are asked, late, and may be killed;
processes that exit when they like, with children that stay, on devices that stay busy for a while; starts that the
host refuses; a log that loses proposals, and places again what was refused; a daemon that is killed and comes back at
any moment; a host that reboots. The laws are asserted where effects arrive and where the log commits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulayer.core.agent import Agent
from gpulayer.core.base import Tick
from gpulayer.core.replica import backoff
from gpulayer.core.replica.messages import (
    AgentEvent,
    AttemptEvent,
    AttemptsFound,
    DevicesNotClear,
    Discard,
    FoundAttempt,
    FoundRun,
    ListenerFound,
    ListenerMissing,
    Order,
    OrdersChanged,
    ReplicaEffect,
    ReplicaEvent,
    Report,
    ReportRefused,
    ReportReleased,
    RunExited,
    RunStarted,
    ShimDied,
    StartFailed,
    StartRefused,
    StartRun,
    StopRun,
    TreeGone,
)
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import REASON_CODES, Assignment, Exit, Outcome, Reason
from gpulayer.model.units import Instant

EPOCH_UTC = 1_700_000_000.0
REPLICAS_MAX = 3
ATTEMPTS_MAX = 2
NODE = NodeId("n-1")
# The common more often than the rare, so that the rare meets something.
HAPPENINGS = (
    *("quick", "carry out", "deliver", "a moment", "exit 1", "listener", "daemon killed") * 3,
    *("a start fails", "a while", "exit 0", "tree ends", "commit", "restart", "shim killed") * 2,
    *("a start is refused", "placed again") * 2,
    *("withdraw", "given up", "reboot"),
    *("orders lapse", "orders are current", "orders are current", "daemon killed alone"),
)


@dataclass
class Host:
    """One attempt as it really is on the host: sandbox, shim, process, tree, and what is on the way to and from it."""

    requests: deque[StartRun | StopRun] = field(default_factory=deque)
    events: deque[ReplicaEvent] = field(default_factory=deque)
    has_sandbox: bool = False
    shim: bool = False
    is_swept: bool = False
    """Someone ends what a dead shim left."""
    marker: StartRun | None = None
    asked: StartRun | None = None
    """The last start that this daemon has asked for, or the newest that an earlier one left on disk."""
    process: bool = False
    tree: bool = False
    """A process of the run is left, or the driver lists one."""
    is_not_clear: bool = False
    """No process is left, the driver lists one all the same, and that was told."""
    exit: Exit | None = None
    started: float = 0.0
    ended: float = 0.0
    """When the newest run ended."""
    failed: float = 0.0
    """When the agent heard of a start that failed. Nothing on disk tells the next daemon of it."""
    stopping: str = ""
    executions: int = 0
    listed_run: int | None = None
    """The run whose listener the agent has heard of last, and heard nothing against since."""
    is_discarded: bool = False
    is_refused: bool = False
    """The agent has said that its node cannot have it."""
    was_dead: bool = False
    """A daemon that had no current orders yet found it without a process, or without a shim."""

    @property
    def run(self) -> int:
        return self.marker.run if self.marker is not None else 0

    @property
    def is_starting(self) -> bool:
        return any(isinstance(request, StartRun) for request in self.requests)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.agent = Agent(NODE, "10.0.0.5")
        self.hosts: dict[AttemptId, Host] = {}
        self.log: dict[AttemptId, Order] = {}
        self.heard: dict[AttemptId, Order] = {}
        """The log as this node heard it last, and keeps it over its restarts."""
        self.is_current = True
        self.specs: dict[AttemptId, JobSpec] = {}
        self.outcomes: dict[AttemptId, Outcome] = {}
        self.proposals: deque[tuple[AttemptId, Report | ReportReleased | ReportRefused]] = deque()
        self.waiting: dict[ReplicaId, AttemptId] = {}
        """What was refused, and may be placed again."""
        self.submitted = 0
        self.hear(OrdersChanged(orders=()))
        self.hear(AttemptsFound(found=()))

    # --- the agent and its effects ------------------------------------------------------------------------------

    def hear(self, event: AgentEvent) -> None:
        for told in self.agent.step(event, Instant(self.now)):
            host = self.hosts.setdefault(told.attempt, Host())
            if isinstance(event, OrdersChanged) and not self.is_current:
                assert not isinstance(told.effect, StopRun | ReportRefused), "stopped by orders that are not current"
                # What its policy does not start again has ended, and is found so.
                is_over = told.attempt in self.heard and host.executions > 0 and not host.process
                assert not isinstance(told.effect, Report | Discard) or is_over, "ended by orders that are not current"
            self.obey(told.attempt, host, told.effect)
        self.agent.check()

    def obey(self, attempt: AttemptId, host: Host, effect: ReplicaEffect) -> None:
        match effect:
            case StartRun():
                self.may_start(attempt, host, effect)
                host.requests.append(effect)
                host.asked = effect
            case StopRun():
                assert host.tree or host.events, "a stop for nothing that was known to be over"
                assert effect.run == host.run
                assert not host.stopping or not host.shim, "the same run is not stopped twice"
                host.listed_run = None
                host.requests.append(effect)
            case Report(released=released):
                assert not released or not host.tree, "P7: released, and something is left"
                assert not host.is_refused, "one end is enough"
                assert attempt in self.heard
                self.proposals.append((attempt, effect))
            case ReportReleased():
                assert not host.tree, "P7: released, and something is left"
                self.proposals.append((attempt, effect))
            case ReportRefused():
                assert not host.tree, "P7: refused, and something is left"
                assert attempt in self.heard
                host.is_refused = True
                self.proposals.append((attempt, effect))
            case Discard():
                assert not host.tree
                assert not host.is_starting
                host.is_discarded = True
            case _:
                assert not host.is_discarded or not host.process

    def may_start(self, attempt: AttemptId, host: Host, start: StartRun) -> None:
        spec = self.specs[attempt]
        assert not host.tree, "P3: a new run never meets the old one"
        assert not host.is_starting, "one at a time"
        assert not host.is_discarded
        assert start.run > host.run
        attempts = [other for id, other in self.hosts.items() if id.replica == attempt.replica]
        executions = sum(other.executions for other in attempts)
        assert spec.kind == "service" or executions == 0, "P4: a batch is executed once, whichever attempt it is"
        assert not any(other.tree or other.is_starting for other in attempts), "P3: nor beside an attempt before it"
        assert not host.is_refused, "what was refused is begun as another attempt only"
        assert attempt in self.heard
        if self.is_current:
            assert not self.heard[attempt].outcome_known
            assert self.heard[attempt].assignment.withdrawn is None
        else:
            assert spec.kind == "service", "P4: executed without current orders"
            assert host.asked is not None, "begun without current orders"
            assert not host.was_dead, "P4: a start of a daemon begins nothing before it has current orders"
        if host.asked is not None and start.restarts > host.asked.restarts:
            assert self.now >= max(host.ended, host.failed) + backoff.delay(start.failures) - 1e-6, "before its delay"
        assert spec.max_restarts is None or start.restarts <= spec.max_restarts

    def orders_changed(self) -> None:
        if self.is_current:
            self.heard = dict(self.log)
            self.hear(OrdersChanged(orders=tuple(self.log.values())))

    def orders_lapse(self) -> None:
        self.is_current = False
        self.hear(OrdersChanged(orders=tuple(self.heard.values()), is_current=False))

    def orders_are_current(self) -> None:
        self.is_current = True
        for host in self.hosts.values():
            host.was_dead = False
        self.orders_changed()

    def pick(self, number: int) -> tuple[AttemptId, Host] | None:
        ids = sorted(self.hosts)
        return (ids[number % len(ids)], self.hosts[ids[number % len(ids)]]) if ids else None

    # --- what people and the log do ------------------------------------------------------------------------------

    @initialize()
    def begins_with_a_service(self) -> None:
        self.submit("service", "always", None, True, None)

    @precondition(lambda self: self.submitted < REPLICAS_MAX)
    @rule(
        kind=st.sampled_from(["service", "service", "batch"]),
        restart=st.sampled_from(["always", "on_failure", "never"]),
        max_restarts=st.sampled_from([None, 0, 2]),
        port=st.booleans(),
        start_timeout=st.sampled_from([None, 3.0]),
    )
    def submit(
        self, kind: Any, restart: Any, max_restarts: int | None, port: bool, start_timeout: float | None
    ) -> None:
        if kind == "batch":
            spec = JobSpec(kind="batch", name="x", argv=("x",), restart="never", port=port)
        else:
            spec = JobSpec(
                kind="service",
                name="x",
                argv=("x",),
                restart=restart,
                max_restarts=max_restarts,
                port=port,
                start_timeout_seconds=start_timeout,
            )
        self.submitted += 1
        self.place(ReplicaId(JobId(f"j-{self.submitted}"), 0), 1, spec)

    def place(self, replica: ReplicaId, attempt: int, spec: JobSpec) -> None:
        assignment = Assignment(replica=replica, attempt=attempt, node=NODE, revision=1)
        self.specs[assignment.id] = spec
        self.hosts[assignment.id] = Host()
        self.log[assignment.id] = Order(assignment=assignment, spec=spec, job_name="x")
        self.orders_changed()

    def place_again(self) -> None:
        for replica, before in sorted(self.waiting.items()):
            if before.attempt < ATTEMPTS_MAX:
                self.place(replica, before.attempt + 1, self.specs[before])
        self.waiting.clear()

    def withdraw(self, number: int) -> None:
        self.change(number, withdrawn=Reason(code="cancelled", text="by hand"))

    def request_restart(self, number: int) -> None:
        picked = self.pick(number)
        if picked is not None and picked[0] in self.log:
            self.change(number, restart_serial=self.log[picked[0]].assignment.restart_serial + 1)

    def change(self, number: int, **changes: Any) -> None:
        picked = self.pick(number)
        if picked is None or picked[0] not in self.log:
            return
        order = self.log[picked[0]]
        self.log[picked[0]] = replace(order, assignment=replace(order.assignment, **changes))
        self.orders_changed()

    def give_up_for_lost(self, number: int, really: bool) -> None:
        """The log moved it elsewhere without asking."""
        picked = self.pick(number)
        if really and picked is not None and self.log.pop(picked[0], None) is not None:
            self.orders_changed()

    def commit(self, is_lost: bool) -> None:
        if not self.proposals:
            return
        attempt, proposal = self.proposals.popleft()
        order = self.log.get(attempt)
        if is_lost or order is None:
            return
        host = self.hosts[attempt]
        if isinstance(proposal, ReportRefused):
            assert not host.tree, "P7"
            assert not host.is_starting
            del self.log[attempt]
            if attempt not in self.outcomes and order.assignment.withdrawn is None:
                self.waiting[attempt.replica] = attempt
            self.orders_changed()
            return
        if isinstance(proposal, Report):
            first = self.outcomes.setdefault(attempt, proposal.outcome)
            if self.specs[attempt].kind == "batch" and host.executions and first.exit is not None:
                assert first.exit.code == (host.exit.code if host.exit is not None else None), "the exit as it was"
        elif attempt not in self.outcomes:
            return  # the report itself was lost; it will be said again
        if isinstance(proposal, ReportReleased) or proposal.released:
            assert not host.tree, "P7"
            del self.log[attempt]
        else:
            self.log[attempt] = replace(order, outcome_known=True)
        self.orders_changed()

    # --- what happens on the host --------------------------------------------------------------------------------

    def carry_out(self, number: int, fails: bool = False, is_refused: bool = False) -> None:
        picked = self.pick(number)
        if picked is not None and picked[1].requests:
            self.do(picked[1], picked[1].requests.popleft(), fails, is_refused)

    def do(self, host: Host, request: StartRun | StopRun, fails: bool, is_refused: bool = False) -> None:
        match request:
            case StartRun(run=run):
                if is_refused:
                    reason = Reason(code="device_unavailable", text="GPU-0 is used by others")
                    host.events.append(StartRefused(run=run, reason=reason))
                    return
                host.has_sandbox = True
                if fails:
                    reason = Reason(code="bad_command", text="no such file")
                    host.events.append(StartFailed(run=run, reason=reason, at_utc=self.utc))
                    return
                host.marker, host.exit, host.started, host.stopping = request, None, self.now, ""
                host.shim = host.process = host.tree = True
                host.is_swept = False
                host.executions += 1
                host.events.append(RunStarted(run=run, pid=run, port=20000 + run, at_utc=self.utc))
            case StopRun(run=run, why=why):
                if run != host.run or not host.tree:
                    return  # it was over before
                if host.shim:
                    host.stopping = host.stopping or why
                else:
                    host.is_swept = True

    @property
    def utc(self) -> float:
        return EPOCH_UTC + self.now

    def process_exits(self, number: int, code: int, leaves: bool, is_heard: bool = False) -> None:
        picked = self.pick(number)
        if picked is None or not (picked[1].process and picked[1].shim):
            return
        host = picked[1]
        host.process, host.ended = False, self.now
        host.exit = Exit(
            run=host.run,
            code=code,
            ended_by=f"stop:{host.stopping}" if host.stopping else "itself",
            ended_at_utc=self.utc,
            uptime_seconds=self.now - host.started,
        )
        host.events.append(RunExited(exit=host.exit))
        if not leaves:
            self.tree_ends(number)
        if is_heard:
            self.all_is_quick(number, listens=False)

    def tree_ends(self, number: int, is_not_clear: bool = False) -> None:
        picked = self.pick(number)
        if picked is None or not picked[1].tree:
            return
        host = picked[1]
        if host.shim and host.process:
            return
        if not host.shim and not host.is_swept:
            return
        if is_not_clear and not host.is_not_clear:
            host.process, host.is_not_clear = False, True
            host.events.append(DevicesNotClear(run=host.run, text="the driver still lists pid 7 on GPU-0"))
            return
        host.process = host.tree = host.is_not_clear = False
        host.events.append(TreeGone(run=host.run))

    def shim_is_killed(self, number: int) -> None:
        picked = self.pick(number)
        if picked is not None and picked[1].shim:
            host = picked[1]
            host.shim, host.is_swept, host.stopping = False, True, ""
            if host.process:
                host.ended = self.now
            host.events.append(ShimDied(run=host.run, at_utc=self.utc))

    def listener_is_checked(self, number: int, is_found: bool, is_heard: bool) -> None:
        picked = self.pick(number)
        if picked is None or not (picked[1].process and picked[1].shim):
            return
        host = picked[1]
        if is_found:
            host.events.append(ListenerFound(run=host.run, at_utc=self.utc))
        else:
            host.events.append(ListenerMissing(run=host.run, reason=Reason(code="not_listening")))
        if is_heard:
            self.all_is_quick(number, listens=False)

    def deliver(self, number: int, is_doubled: bool = False) -> None:
        picked = self.pick(number)
        if picked is None or not picked[1].events:
            return
        attempt, host = picked
        event = host.events.popleft()
        for _ in range(2 if is_doubled else 1):
            match event:
                case ListenerFound(run=run):
                    host.listed_run = run
                case StartFailed():
                    host.failed = self.now
                case ListenerMissing() | RunExited() | ShimDied():
                    host.listed_run = None
                case _:
                    pass
            self.hear(AttemptEvent(attempt=attempt, event=event))

    def all_is_quick(self, number: int, listens: bool) -> None:
        """What is on the way arrives, in both directions, and maybe it comes up."""
        picked = self.pick(number)
        while picked is not None and (picked[1].requests or picked[1].events):
            self.carry_out(number)
            self.deliver(number)
        if listens:
            self.listener_is_checked(number, is_found=True, is_heard=False)
            self.deliver(number)

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.agent.deadline <= self.now:
            self.hear(Tick())
            assert self.agent.deadline > self.now, "a Tick leaves nothing undone"

    # --- the daemon ----------------------------------------------------------------------------------------------

    def daemon_is_killed(self, finishes: bool, orders_first: bool) -> None:
        for host in self.hosts.values():
            if finishes:
                for request in host.requests:
                    self.do(host, request, fails=False)
            host.requests.clear()
            host.events.clear()
            host.listed_run = None
            host.failed = 0.0
            host.is_swept = False
            host.is_discarded = host.is_refused = host.is_not_clear = False
            host.asked = host.marker
        self.proposals.clear()
        self.agent = Agent(NODE, "10.0.0.5")
        found = tuple(self.found(attempt, host) for attempt, host in self.hosts.items() if host.has_sandbox)
        if self.is_current:
            self.heard = dict(self.log)
        for host in self.hosts.values():
            host.was_dead = not self.is_current and not (host.shim and host.process)
        orders = OrdersChanged(orders=tuple(self.heard.values()), is_current=self.is_current)
        told: list[AgentEvent] = [orders, AttemptsFound(found=found)] if orders_first else [AttemptsFound(found=found)]
        for event in told:
            assert not self.hosts or not any(host.requests for host in self.hosts.values()), "with half of the picture"
            self.hear(event)
        if not orders_first:
            assert not any(host.requests for host in self.hosts.values()), "with half of the picture"
            self.hear(orders)

    def found(self, attempt: AttemptId, host: Host) -> FoundAttempt:
        last = None
        if host.marker is not None:
            exit = host.exit
            if exit is None and not host.process:
                exit = Exit(run=host.run, ended_by="supervisor_killed")
            last = FoundRun(
                run=host.run,
                pid=host.run,
                port=20000 + host.run,
                started_at_utc=EPOCH_UTC + host.started,
                started_seconds_ago=self.now - host.started,
                restarts=host.marker.restarts,
                failures=host.marker.failures,
                restart_serial=host.marker.restart_serial,
                alive=host.process,
                exit=exit,
                gone=not host.tree,
                stopping=host.stopping if host.tree else "",
            )
        return FoundAttempt(attempt=attempt, shim_alive=host.shim, first_started_seconds_ago=None, last=last)

    def host_reboots(self) -> None:
        for host in self.hosts.values():
            if host.process:
                host.ended = self.now
                host.exit = Exit(run=host.run, ended_by="interrupted")
            host.requests.clear()
            host.shim = host.process = host.tree = False
            host.stopping = ""
        self.daemon_is_killed(finishes=False, orders_first=True)

    # Hypothesis turns whole rules off for an example (swarm testing), which leaves too few of those in which a replica
    # comes up at all: so what happens is one rule that chooses.
    @rule(what=st.sampled_from(HAPPENINGS), number=st.integers(0, 5), flag=st.booleans(), is_heard=st.booleans())
    def happens(self, what: str, number: int, flag: bool, is_heard: bool) -> None:
        match what:
            case "quick":
                self.all_is_quick(number, listens=flag)
            case "carry out":
                self.carry_out(number)
            case "a start fails":
                self.carry_out(number, fails=True)
            case "a start is refused":
                self.carry_out(number, is_refused=True)
                if is_heard:
                    self.deliver(number, is_doubled=flag)
                    self.commit(is_lost=False)
                    self.place_again()
            case "placed again":
                self.place_again()
            case "deliver":
                self.deliver(number, is_doubled=flag)
            case "a moment":
                to_deadline = self.agent.deadline - self.now
                self.time_passes(to_deadline if flag and 0.0 < to_deadline < 60.0 else 0.1)
            case "a while":
                self.time_passes(70.0 if flag else 5.0)
            case "exit 0":
                self.process_exits(number, 0, leaves=flag, is_heard=is_heard)
            case "exit 1":
                self.process_exits(number, 1, leaves=flag, is_heard=is_heard)
            case "tree ends":
                self.tree_ends(number, is_not_clear=flag)
                if is_heard:
                    self.all_is_quick(number, listens=False)
            case "listener":
                self.listener_is_checked(number, is_found=flag, is_heard=is_heard)
            case "commit":
                self.commit(is_lost=flag and is_heard)
            case "withdraw":
                self.withdraw(number)
            case "restart":
                self.request_restart(number)
            case "given up":
                self.give_up_for_lost(number, really=flag)
            case "shim killed":
                self.shim_is_killed(number)
            case "daemon killed":
                self.daemon_is_killed(finishes=flag, orders_first=is_heard)
            case "reboot":
                self.is_current = self.is_current and flag
                self.host_reboots()
            case "orders lapse":
                self.orders_lapse()
            case "orders are current":
                self.orders_are_current()
            case "daemon killed alone":
                self.is_current = False
                self.daemon_is_killed(finishes=flag, orders_first=is_heard)
            case _:
                raise AssertionError(what)

    # --- laws ----------------------------------------------------------------------------------------------------

    @invariant()
    def listed_only_while_it_listens(self) -> None:
        for attempt, status in self.agent.statuses().items():
            if status.endpoint is not None:
                assert status.state == "ready"
                assert self.hosts[attempt].listed_run == status.run == status.endpoint.port - 20000, "P5"

    @invariant()
    def every_state_has_a_reason(self) -> None:
        for status in self.agent.statuses().values():
            assert status.state == "ready" or (status.reason is not None and status.reason.code in REASON_CODES), "P9"

    @invariant()
    def nothing_is_said_to_be_in_the_way_when_nothing_is_left(self) -> None:
        for attempt, status in self.agent.statuses().items():
            if status.reason is not None and status.reason.code == "devices_not_clear":
                host = self.hosts[attempt]
                assert host.tree or TreeGone(run=host.run) in host.events

    def teardown(self) -> None:
        """Everything is cancelled, and everyone does what they owe: then nothing is left, anywhere."""
        self.orders_are_current()
        for number in range(len(self.hosts)):
            self.withdraw(number)
        for _ in range(40):
            for number in range(len(self.hosts)):
                while self.hosts[sorted(self.hosts)[number]].requests:
                    self.carry_out(number)
                if self.hosts[sorted(self.hosts)[number]].stopping:
                    self.process_exits(number, code=0, leaves=True)
                self.tree_ends(number)
                while self.hosts[sorted(self.hosts)[number]].events:
                    self.deliver(number)
            while self.proposals:
                self.commit(is_lost=False)
            self.time_passes(5.0)
        assert not self.log, self.agent.statuses()
        assert not any(host.tree for host in self.hosts.values()), "P7"
        assert self.agent.statuses() == {}
        super().teardown()


World.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLaws = World.TestCase
