"""When a leader plans, and what it lets the cluster forget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulayer.core import leader as leader_module
from gpulayer.core.base import Tick
from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    CommitPlan,
    ForgetJobs,
    ReplicaAccepted,
    ReplicaRefused,
    ReplicaReleased,
    StopJob,
    WithdrawUnaccepted,
)
from gpulayer.core.cluster.node_changes import OBSERVED_SECONDS
from gpulayer.core.leader import (
    ANSWERS_KEPT_SECONDS,
    ENDED_JOBS_KEPT_SECONDS,
    ENDED_JOBS_MAX,
    FORGET_BATCH,
    FORGET_INTERVAL,
    REFUSED_DELAY,
    RETRY_DELAY,
    Leader,
    NodeSaid,
    PlaceableChanged,
    ProposalFailed,
    StateAdvanced,
    overdue,
)
from gpulayer.core.orders.acceptance import ACCEPT_SECONDS
from gpulayer.model.cluster import ClusterState, Job
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.node import Accelerator
from gpulayer.model.record import NodeFacts
from gpulayer.model.replica import Reason
from gpulayer.model.units import NEVER, Instant
from tests.core.cluster.states import (
    CANCELLED,
    Act,
    Cluster,
    admit,
    capabilities,
    ended,
    failed,
    gpu,
    histories,
    refused,
    service,
    submit,
)

NOW = Instant(1000.0)


class Led:
    """A cluster with its leader; what it proposes is committed only when the test says so."""

    def __init__(self, *commands: Command) -> None:
        self.cluster = Cluster()
        self.leader = Leader()
        self.proposed: list[Command] = []
        self.now = NOW
        self.do(*commands)

    def do(self, *commands: Command) -> None:
        for command in commands:
            self.cluster.do(command)
            self.step(StateAdvanced(state=self.cluster.state))

    def step(self, event: StateAdvanced | PlaceableChanged | NodeSaid | ProposalFailed | Tick) -> None:
        self.proposed += [effect.command for effect in self.leader.step(event, self.now)]
        self.leader.check()
        assert not isinstance(event, Tick) or self.leader.deadline > self.now, "a Tick leaves nothing undone"

    def commit(self) -> Command:
        command = self.proposed.pop(0)
        self.do(command)
        return command


def test_a_submitted_job_is_placed_by_one_plan() -> None:
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    assert len(led.proposed) == 1
    led.commit()
    assert led.cluster.job().replicas[0].assignment is not None
    assert not led.proposed


def test_one_plan_is_in_flight_at_a_time() -> None:
    led = Led(admit("n1"), submit(service("a")), submit(service("b")), submit(service("c")))
    assert len(led.proposed) == 1
    led.commit()
    (second,) = led.proposed
    assert isinstance(second, CommitPlan)
    assert [placement.job for placement in second.placements] == ["j-b", "j-c"]


def test_a_job_that_waits_is_planned_again_only_when_something_it_waits_for_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    led = Led(admit("n1", gpu("g0")), submit(service("a", gpus=1)))
    led.commit()
    led.do(submit(service("b", gpus=1)))
    with monkeypatch.context() as nothing_is_computed:
        nothing_is_computed.setattr(leader_module, "plan", None)
        for _ in range(3):
            led.now = Instant(led.now + 100)
            led.step(Tick())
            led.step(StateAdvanced(state=led.cluster.state))
    led.do(ended(failed(), job="j-a", released=False))
    assert not led.proposed, "its end is known, but the GPU is not free yet"
    led.do(ReplicaReleased(job=JobId("j-a"), replica=0, attempt=1))
    assert len(led.proposed) == 1


def refuse(led: Led, *observed: Accelerator) -> None:
    """Its node cannot carry out the newest attempt, and says what it sees."""
    led.do(refused(*observed, attempt=led.cluster.job().replicas[0].attempts))


def test_a_refused_replica_is_planned_at_once_where_there_is_another_place() -> None:
    led = Led(admit("n1", gpu("g0")), admit("n2", gpu("g1", gib=90)), submit(service(gpus=1)))
    led.commit()
    refuse(led, gpu("g0", foreign_milli=1000))
    led.commit()
    assignment = led.cluster.job().replicas[0].assignment
    assert assignment is not None
    assert (assignment.node, assignment.attempt) == ("n-n2", 2)


def test_what_was_refused_is_planned_again_when_its_node_changes_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan, a refusal, a plan, a refusal …: two entries of the log each, as fast as the disk allows."""
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    led.commit()
    in_use = gpu("g0", foreign_milli=1000)
    refuse(led, in_use)
    assert not led.proposed
    with monkeypatch.context() as nothing_is_computed:
        nothing_is_computed.setattr(leader_module, "plan", None)
        for _ in range(5):
            led.now = Instant(led.now + 10)
            led.do(admit("n1", in_use))  # its node says again what it has said with the refusal
            led.step(Tick())
    led.do(admit("n1", replace(in_use, foreign="pid 8")))
    assert not led.proposed, "looked at, and still in use"
    led.do(admit("n1", gpu("g0")))
    (made,) = led.proposed
    assert isinstance(made, CommitPlan)
    assert [placement.attempt for placement in made.placements] == [2]


def test_a_node_that_refuses_whatever_it_gets_gets_one_plan_for_each_change_of_its_record() -> None:
    led = Led(admit("n1", gpu("g0"), gpu("g1")), submit(service(gpus=1)))
    plans = 0
    for change in range(3):
        while led.proposed:
            led.commit()
            plans += 1
            assignment = led.cluster.job().replicas[0].assignment
            assert assignment is not None
            refuse(led, *(gpu(share.uuid, unhealthy=f"fault {change}") for share in assignment.devices))
        assert plans == 2 * (change + 1), "one for each device"
        led.do(admit("n1", gpu("g0"), gpu("g1")))
    assert led.cluster.job().replicas[0].attempts == 6


def test_a_refusal_that_says_nothing_new_is_not_answered_by_the_same_plan_at_once() -> None:
    """A node that does not know a device any more has nothing to tell of it, and its record follows only after seconds:
    until then the same plan was made again and refused again, as fast as the disk allows."""
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    led.commit()
    refuse(led)
    assert not led.proposed
    assert led.leader.deadline <= led.now + 60
    for _ in range(3):
        attempts = led.cluster.job().replicas[0].attempts
        led.now = led.leader.deadline
        led.step(Tick())
        led.commit()
        assert led.cluster.job().replicas[0].attempts == attempts + 1
        refuse(led)
        assert not led.proposed
    led.do(submit(service("other")))
    assert led.proposed, "what changed is planned at once"


def test_a_plan_and_its_refusal_that_are_told_as_one_are_not_missed() -> None:
    """The state is the same as before, and the replica waited until something else changed."""
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    led.cluster.do(led.proposed.pop(0), refused())
    led.step(StateAdvanced(state=led.cluster.state))
    led.now = led.leader.deadline
    led.step(Tick())
    led.commit()
    assert led.cluster.job().replicas[0].assignment is not None


def test_replicas_that_are_refused_in_turn_do_not_make_the_leader_spin() -> None:
    led = Led(admit("n1", gpu("g0"), gpu("g1")), submit(service(replicas=2, gpus=1, spread="any")))
    for _ in range(30):
        if led.proposed:
            led.commit()
        index = max((0, 1), key=lambda index: led.cluster.job().replicas[index].assignment is not None)
        led.do(refused(replica=index, attempt=led.cluster.job().replicas[index].attempts))
    assert not led.proposed
    assert sum(replica.attempts for replica in led.cluster.job().replicas) <= 10


def test_a_node_that_opens_is_planned_for() -> None:
    led = Led()
    led.step(PlaceableChanged(placeable={NodeId("n-n1"): "starting"}))
    led.do(admit("n1"), submit(service()))
    assert not led.proposed
    led.step(PlaceableChanged(placeable={NodeId("n-n1"): ""}))
    assert len(led.proposed) == 1


def test_nothing_is_placed_on_a_node_that_was_let_in_and_has_not_been_seen_yet() -> None:
    """It may have died in its join; a replica that went there would wait for it for ever."""
    led = Led(admit("n1", gpu("g0")))
    led.step(PlaceableChanged(placeable={NodeId("n-n1"): ""}))
    led.do(admit("n2", gpu("g1"), gpu("g2")), submit(service(gpus=2)))
    assert not led.proposed
    led.step(PlaceableChanged(placeable={NodeId("n-n1"): "", NodeId("n-n2"): ""}))
    assert len(led.proposed) == 1


def test_a_plan_that_failed_is_made_again_after_a_moment() -> None:
    led = Led(admit("n1"), submit(service()))
    failed_plan = led.proposed.pop()
    led.step(ProposalFailed(command=failed_plan))
    assert not led.proposed, "not at once: a full disk would make it spin"
    assert led.leader.deadline == NOW + RETRY_DELAY
    led.now = led.leader.deadline
    led.step(Tick())
    assert len(led.proposed) == 1


def test_a_plan_that_was_dropped_whole_is_not_made_again_from_the_same_state() -> None:
    led = Led(admit("n1"), submit(service()))
    made = led.proposed.pop()
    led.cluster.do(StopJob(job=JobId("j-web"), reason=CANCELLED), made)
    led.step(StateAdvanced(state=led.cluster.state))
    assert not led.proposed
    led.do(submit(service("next")))
    assert len(led.proposed) == 1, "what came of the plan is known, the next one may be made"


def test_an_idle_leader_has_no_deadline() -> None:
    assert Led(admit("n1")).leader.deadline == NEVER


def test_ended_jobs_and_old_answers_are_forgotten_after_their_keeping_time() -> None:
    led = Led(
        submit(service("a"), idempotency_key="k", request_digest="d"), StopJob(job=JobId("j-a"), reason=CANCELLED)
    )
    assert not led.proposed
    led.cluster.do(submit(service("b")), seconds_later=ANSWERS_KEPT_SECONDS)
    led.now = Instant(NOW + FORGET_INTERVAL)
    led.step(StateAdvanced(state=led.cluster.state))
    assert led.proposed == [ForgetJobs(answers=("k",))]
    led.commit()
    led.cluster.do(submit(service("c")), seconds_later=ENDED_JOBS_KEPT_SECONDS)
    led.step(StateAdvanced(state=led.cluster.state))
    assert not led.proposed, "looked a moment ago"
    led.now = led.leader.deadline
    led.step(Tick())
    assert led.proposed == [ForgetJobs(jobs=(JobId("j-a"),))]
    led.commit()
    assert not led.proposed


def test_beyond_their_number_the_oldest_ended_jobs_go_first_in_batches() -> None:
    made = Cluster(submit(service("a")), StopJob(job=JobId("j-a"), reason=CANCELLED)).job("j-a")
    jobs: dict[JobId, Job] = {}
    for number in range(ENDED_JOBS_MAX + FORGET_BATCH + 5):
        job_id = JobId(f"j-{number}")
        jobs[job_id] = replace(made, id=job_id, ended_at_utc=float(number))
    state = ClusterState(index=5, jobs=jobs)
    command = overdue(state)
    assert command.jobs == tuple(JobId(f"j-{number}") for number in range(FORGET_BATCH))
    leader = Leader()
    (first,) = leader.step(StateAdvanced(state=state), NOW)
    assert first.command == command
    left = {job_id: job for job_id, job in jobs.items() if job_id not in command.jobs}
    (second,) = leader.step(StateAdvanced(state=replace(state, index=6, jobs=left)), NOW)
    assert isinstance(second.command, ForgetJobs)
    assert len(second.command.jobs) == 5, "the batch was full: the rest follows without waiting a minute"


# --- what nodes say ------------------------------------------------------------------------------------------------

N1 = NodeId("n-n1")


def facts(name: str, *gpus: Accelerator, advertise: str = "127.0.0.1") -> NodeFacts:
    return NodeFacts(name=name, advertise=advertise, capabilities=capabilities(*gpus))


def says(led: Led, *attempts: AttemptId, about: NodeFacts | None = None, is_heard: bool = True) -> None:
    led.step(NodeSaid(node=N1, facts=about, attempts=frozenset(attempts), is_heard=is_heard))


def wait(led: Led, seconds: float) -> list[Command]:
    """Ticks when they are due; what was proposed meanwhile."""
    before, end = len(led.proposed), led.now + seconds
    while led.leader.deadline <= end:
        led.now = max(led.now, led.leader.deadline)
        led.step(Tick())
    led.now = Instant(end)
    return led.proposed[before:]


def placed() -> tuple[Led, AttemptId]:
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    led.commit()
    assignment = led.cluster.job().replicas[0].assignment
    assert assignment is not None
    return led, assignment.id


def test_an_order_that_its_node_says_nothing_of_is_recalled_after_five_seconds() -> None:
    led, attempt = placed()
    says(led)
    assert wait(led, ACCEPT_SECONDS - 0.1) == []
    [command] = wait(led, 0.2)
    assert isinstance(command, WithdrawUnaccepted)
    assert (command.job, command.replica, command.attempt) == (attempt.replica.job, 0, 1)
    assert command.reason.code == "not_accepted"
    assert "n1 is alive and has said nothing of this order for 5 s" in command.reason.text
    led.commit()
    assert wait(led, 60.0) == [], "said once; what follows is its node's answer"


def test_an_order_that_is_in_its_nodes_record_is_not_recalled() -> None:
    led, attempt = placed()
    says(led)
    wait(led, 1.0)
    says(led, attempt)
    assert wait(led, 60.0) == []
    says(led)
    assert wait(led, 60.0) == [], "it was taken up; what became of it is not told by its absence"


def test_an_order_that_was_taken_up_before_its_commit_was_heard_of_is_not_recalled() -> None:
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    says(led, AttemptId(ReplicaId(JobId("j-web"), 0), 1))
    led.commit()
    assert wait(led, 60.0) == []


def test_orders_of_a_node_that_is_not_heard_stay_and_get_their_time_when_it_is_back() -> None:
    led, _ = placed()
    assert wait(led, 60.0) == [], "nothing was heard of it yet"
    says(led)
    wait(led, 3.0)
    says(led, is_heard=False)
    assert wait(led, 60.0) == []
    says(led)
    assert wait(led, ACCEPT_SECONDS - 0.1) == []
    assert len(wait(led, 0.2)) == 1


def test_a_withdrawn_order_is_not_recalled_too() -> None:
    led, _ = placed()
    says(led)
    led.do(StopJob(job=JobId("j-web"), reason=CANCELLED))
    assert wait(led, 60.0) == []


def test_a_recall_that_did_not_get_into_the_log_is_tried_again() -> None:
    led, _ = placed()
    says(led)
    [command] = wait(led, ACCEPT_SECONDS)
    led.proposed.clear()
    led.step(ProposalFailed(command=command))
    assert wait(led, ACCEPT_SECONDS - 0.1) == []
    assert wait(led, 0.2) == [command]


def test_a_recalled_replica_is_placed_again_when_its_node_has_refused_and_stays_when_it_has_begun() -> None:
    for answer in (
        ReplicaRefused(job=JobId("j-web"), replica=0, attempt=1, reason=Reason(code="not_accepted")),
        ReplicaAccepted(job=JobId("j-web"), replica=0, attempt=1),
    ):
        led, attempt = placed()
        says(led)
        wait(led, ACCEPT_SECONDS)
        led.commit()
        if isinstance(answer, ReplicaAccepted):
            says(led, attempt)
        led.do(answer)
        wait(led, 60.0)
        assert [type(command) for command in led.proposed] == [CommitPlan] * isinstance(answer, ReplicaRefused)


def test_recalls_of_a_node_that_does_nothing_any_more_are_all_made() -> None:
    led = Led(admit("n1", cpus=1000), submit(service(replicas=200, cpus_milli=1000, spread="any")))
    led.commit()
    says(led)
    recalled = wait(led, ACCEPT_SECONDS)
    assert len({(command.replica) for command in recalled if isinstance(command, WithdrawUnaccepted)}) == 200


def test_a_node_that_changed_is_committed_at_once_and_then_once_in_ten_seconds() -> None:
    led = Led(admit("n1", gpu("g0")))
    says(led, about=facts("n1", gpu("g0")))
    assert not led.proposed
    says(led, about=facts("n1", gpu("g0", unhealthy="lost")))
    assert led.commit() == AdmitNode(
        node=N1, name="n1", advertise="127.0.0.1", capabilities=capabilities(gpu("g0", unhealthy="lost"))
    )
    for text in ("a", "b", "c"):
        led.now = Instant(led.now + 1.0)
        says(led, about=facts("n1", gpu("g0", unhealthy=text)))
    assert not led.proposed
    assert led.leader.deadline == NOW + OBSERVED_SECONDS
    assert (
        wait(led, 20.0)
        == [AdmitNode(node=N1, name="n1", advertise="127.0.0.1", capabilities=capabilities(gpu("g0", unhealthy="c")))]
        * 2
    ), "and once more, for it is not in the log yet"
    led.commit()
    assert led.proposed.pop() is not None
    assert wait(led, 60.0) == []


def test_a_device_that_comes_and_goes_between_two_entries_is_none() -> None:
    led = Led(admit("n1", gpu("g0")))
    says(led, about=facts("n1"))
    led.commit()
    says(led, about=facts("n1", gpu("g0")))
    says(led, about=facts("n1"))
    assert wait(led, 60.0) == []


def test_what_a_refusal_has_put_into_the_log_does_not_stay_when_it_is_over() -> None:
    led = Led(admit("n1", gpu("g0")), submit(service(gpus=1)))
    led.commit()
    says(led, AttemptId(ReplicaId(JobId("j-web"), 0), 1), about=facts("n1", gpu("g0")))
    refuse(led, gpu("g0", foreign_milli=1000))
    assert led.cluster.state.nodes[N1].capabilities.accelerators[0].foreign_milli == 1000
    assert isinstance(led.commit(), AdmitNode)
    assert led.cluster.state.nodes[N1].capabilities.accelerators[0].foreign_milli == 0


def test_a_node_that_is_not_heard_or_not_admitted_is_not_committed() -> None:
    led = Led(admit("n1", gpu("g0")))
    says(led, about=facts("n1"), is_heard=False)
    led.step(NodeSaid(node=NodeId("n-new"), facts=facts("new"), attempts=frozenset()))
    assert wait(led, 60.0) == []
    led.do(admit("n-new"))
    assert not led.proposed, "another id"


def test_nothing_is_proposed_before_the_whole_log_is_applied() -> None:
    """The rest of it may hold the very plan, or the end of what is planned for."""
    cluster = Cluster(admit("n1"), submit(service()))
    leader = Leader(log_end=4)
    assert leader.step(StateAdvanced(state=cluster.state), NOW) == []
    assert leader.deadline == NEVER
    assert leader.step(NodeSaid(node=N1, facts=facts("n1"), attempts=frozenset()), NOW) == []
    cluster.do(submit(service("b")))
    assert leader.step(StateAdvanced(state=cluster.state), NOW) == []
    cluster.do(submit(service("c")))
    [proposal, *_] = [each for each in leader.step(StateAdvanced(state=cluster.state), NOW)]
    commands = [each.command for each in leader.step(Tick(), NOW)]
    assert isinstance(proposal.command, AdmitNode | CommitPlan)
    assert commands == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.lists(st.sampled_from(["commit", "fail", "wait", "tick"]), min_size=1, max_size=10))
def test_whatever_happens_nothing_that_fits_waits_in_the_end(history: list[Act], fates: list[str]) -> None:
    """Proposals that are late, lost or overtaken; once they get through, the queue holds only what has no place."""
    led = Led(admit("n1", gpu("g0")))
    for number, act in enumerate(history):
        led.do(act(led.cluster.state))
        match fates[number % len(fates)]:
            case "commit" if led.proposed:
                led.commit()
            case "fail" if led.proposed:
                led.step(ProposalFailed(command=led.proposed.pop(0)))
            case "tick":
                led.now = Instant(led.now + 0.5)
                led.step(Tick())
    for _ in range(20):
        led.now = Instant(led.now + REFUSED_DELAY)
        led.step(Tick())
        if led.proposed:
            led.commit()
    assert not led.proposed
    assert not leader_module.plan(led.cluster.state, {}).placements
