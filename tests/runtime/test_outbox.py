"""What waits for a peer: in order, in lanes, within bounds."""

from __future__ import annotations

import trio
import trio.testing

from gpulayer.runtime.outbox import Outbox


def outbox(frames: int = 3, bytes_max: int = 1000, kept_frames: int = 3, kept_bytes: int = 1000) -> Outbox:
    return Outbox(frames=frames, bytes_max=bytes_max, kept_frames=kept_frames, kept_bytes=kept_bytes)


def test_a_full_lane_loses_its_oldest_gossip() -> None:
    box = outbox()
    assert [box.put_gossip(b"%d" % number) for number in range(5)] == [0, 0, 0, 1, 1]
    assert box.take_all() == b"234"


def test_a_large_frame_makes_room_for_itself_by_bytes() -> None:
    box = outbox(bytes_max=10)
    box.put_gossip(b"aaaa")
    box.put_gossip(b"bbbb")
    assert box.put_gossip(b"c" * 9) == 2
    assert box.waiting_bytes == 9


def test_what_is_kept_is_refused_when_there_is_no_room_and_never_dropped() -> None:
    box = outbox()
    assert [box.put_kept(b"%d" % number) for number in range(4)] == [True, True, True, False]
    for _ in range(9):
        box.put_gossip(b"g")
    assert box.take_all() == b"012ggg"


def test_a_single_frame_above_the_bound_is_still_sent() -> None:
    box = outbox(kept_bytes=1, bytes_max=1)
    assert box.put_kept(b"long")
    box.put_gossip(b"gossip")
    assert box.take_all() == b"longgossip"


async def test_urgent_frames_go_first_and_then_what_is_kept() -> None:
    box = outbox()
    box.put_gossip(b"1")
    box.put_kept(b"2")
    box.put_gossip(b"3", urgent=True)
    assert await box.take(lambda: False) == b"321"
    assert len(box) == 0


async def test_a_write_takes_some_frames_together_and_not_everything() -> None:
    box = outbox(frames=100, bytes_max=10**9)
    for _ in range(10):
        box.put_gossip(bytes(30_000))
    assert len(await box.take(lambda: False)) == 90_000


async def test_who_waits_to_take_is_woken_by_news_and_by_the_end() -> None:
    box, is_over, taken = outbox(), trio.Event(), []

    async def take() -> None:
        while data := await box.take(is_over.is_set):
            taken.append(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        box.put_gossip(b"news")
        await trio.testing.wait_all_tasks_blocked()
        is_over.set()
        box.wake()
    assert taken == [b"news"]
