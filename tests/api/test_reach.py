"""Whether somebody still listens on a node that is away: one try a second for everybody, and a refusal is final."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from gpulayer.api.reach import Reach
from gpulayer.model.ids import NodeId
from gpulayer.model.replica import Endpoint

AWAY = NodeId("n-1")


@contextmanager
def listening(port: int = 0) -> Iterator[tuple[socket.socket, Endpoint]]:
    with socket.create_server(("127.0.0.1", port), backlog=16) as listener:
        yield listener, Endpoint(address="127.0.0.1", port=listener.getsockname()[1])


def connections(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


async def is_reached(reach: Reach, endpoint: Endpoint) -> bool:
    with trio.fail_after(10):
        return bool(await reach.reached([(AWAY, endpoint)]))


def test_who_listens_is_reached_and_everybody_is_answered_from_one_try() -> None:
    async def check() -> None:
        reach = Reach()
        with listening() as (listener, endpoint):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(is_reached, reach, endpoint)
            assert await is_reached(reach, endpoint)
            assert connections(listener) == 1

    trio.run(check)


def test_one_that_refused_is_not_tried_again_before_its_node_has_been_back() -> None:
    async def check() -> None:
        reach = Reach()
        with listening() as (_, endpoint):
            pass
        assert not await is_reached(reach, endpoint)
        with listening(endpoint.port) as (listener, _):
            reach.forget_but(frozenset({AWAY}))
            await trio.sleep(1.1)
            assert not await is_reached(reach, endpoint)
            assert connections(listener) == 0
            reach.forget_but(frozenset())
            assert await is_reached(reach, endpoint)

    trio.run(check)


def test_one_who_asks_and_goes_away_leaves_nobody_waiting() -> None:
    async def check() -> None:
        reach = Reach()
        with listening() as (listener, endpoint):
            # A full queue: the kernel answers no further connection.
            listener.listen(0)
            kept = [socket.socket() for _ in range(3)]
            for each in kept:
                each.setblocking(False)
                each.connect_ex((endpoint.address, endpoint.port))
            await trio.sleep(0.05)
            with trio.move_on_after(0.1):
                await reach.reached([(AWAY, endpoint)])
            began = trio.current_time()
            assert not await is_reached(reach, endpoint)
            assert trio.current_time() - began < 8
            for each in kept:
                each.close()

    trio.run(check)


def test_what_is_no_address_is_not_reached() -> None:
    async def check() -> None:
        assert not await is_reached(Reach(), Endpoint(address="no address", port=80))

    trio.run(check)
