"""Orders as they cross a link: the same on the other side, and never larger than a frame."""

from __future__ import annotations

import pytest

from gpulayer.core.cluster.commands import ReplicaAccepted, ReplicaEnded
from gpulayer.core.leader import StateAdvanced
from gpulayer.core.orders.book import Asked, Led, OrderBook
from gpulayer.core.orders.changes import bytes_of
from gpulayer.core.orders.messages import (
    Orders,
    OrdersAsked,
    OrdersConfirmed,
    OrdersDelta,
    OrdersDenied,
    OrdersHeard,
    OrderStamp,
    ReportAnswered,
    Reported,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.job import COMMAND_BYTES_MAX, STRING_BYTES_MAX, JobSpec
from gpulayer.model.replica import Assignment, DeviceShare, Reason
from gpulayer.model.units import Instant
from gpulayer.wire.codec import decode, encode
from gpulayer.wire.frames import encode_frame
from gpulayer.wire.peer import PeerFrame
from tests.core.cluster.states import Cluster, admit, service, submit, succeeded

STAMP = OrderStamp(1, 3, 17)
N1 = NodeId("n-n1")


def order(index: int = 0, env: tuple[tuple[str, str], ...] = ()) -> Order:
    assignment = Assignment(
        replica=ReplicaId(JobId("j-abcdefghij"), index),
        attempt=1,
        node=NodeId("n-0123456789abcdef"),
        revision=1,
        devices=(DeviceShare(uuid="GPU-8a1f9c1e-5b7e-4c0f-9d43-0a4d4c1a7f11", milli=1000),),
        cpus_milli=4000,
        memory_mib=65536,
        recalled=Reason(code="not_accepted", text="n1 has said nothing"),
    )
    spec = JobSpec(kind="service", name="chat", argv=("python", "-m", "server"), env=env)
    return Order(assignment=assignment, spec=spec, job_name="chat")


@pytest.mark.parametrize(
    "message",
    [
        OrdersAsked(serial=4, heard=STAMP),
        OrdersHeard(stamp=STAMP),
        Reported(
            serial=1,
            report=ReplicaEnded(job=JobId("j-a"), replica=0, attempt=2, outcome=succeeded(), released=True),
        ),
        Reported(serial=2, report=ReplicaAccepted(job=JobId("j-a"), replica=0, attempt=2)),
        Orders(serial=4, stamp=STAMP, orders=(order(), order(1)), registry=(N1,), part=0, parts=2),
        OrdersDelta(
            after=STAMP,
            stamp=OrderStamp(1, 3, 18),
            changed=(order(),),
            gone=(AttemptId(ReplicaId(JobId("j-a"), 0), 1),),
            admitted=(N1,),
            removed=(NodeId("n-n2"),),
        ),
        OrdersConfirmed(stamp=STAMP),
        OrdersDenied(serial=4, leader=N1),
        ReportAnswered(serial=1, code="refused", message="no"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_is_the_same_on_the_other_side(message: PeerFrame) -> None:
    assert decode(PeerFrame, encode(message)) == message


def test_what_an_order_is_said_to_take_is_what_it_takes() -> None:
    for each in (order(), order(env=(("K", "é" * 60_000),)), order(env=tuple((f"V{n}", "x" * 9) for n in range(99)))):
        assert len(encode(each)) <= bytes_of(each) + 4 * len(each.spec.env)


def test_the_largest_orders_there_may_be_cross_a_link_in_frames() -> None:
    value = "x" * (STRING_BYTES_MAX - 10)
    env = tuple((f"V{number}", value) for number in range(COMMAND_BYTES_MAX // STRING_BYTES_MAX - 1))
    cluster = Cluster(admit("n1"), *(submit(service(f"s{number}", env=env)) for number in range(6)))
    cluster.plan()
    book = OrderBook()
    book.step(StateAdvanced(state=cluster.state), Instant(0.0))
    book.step(Led(term=1), Instant(0.0))
    answers = book.step(Asked(node=N1, message=OrdersAsked(serial=1, heard=OrderStamp(0, 0, 0))), Instant(0.0))
    parts = [answer.message for answer in answers]
    assert len(parts) > 1
    for part in parts:
        encode_frame(part)  # EncodeError, if it were too large
    assert sum(len(part.orders) for part in parts if isinstance(part, Orders)) == 6


def test_a_thousand_plain_orders_are_less_than_a_mebibyte() -> None:
    assert len(encode(Orders(serial=1, stamp=STAMP, orders=tuple(map(order, range(1000)))))) < 2**20
