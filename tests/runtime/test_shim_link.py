"""Links to peers that are no good shims, played by a socket here; good ones are in test_supervisor.py."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from gpulayer.runtime.shim_link import ShimGone, ShimLink, ShimProcess, ShimSilent, Spawner, SpawnFailed, living_shim
from gpulayer.shim import tree

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def ourselves() -> ShimProcess:
    stat = tree.process_stat(os.getpid())
    assert stat is not None
    return ShimProcess(stat.pid, stat.start_time)


async def play(nursery: trio.Nursery, directory: Path, shim: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
    """Listens in the directory as a shim would, and plays one for the first who comes."""
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(directory)  # a socket's path has 107 bytes at most
    await listener.bind("shim.sock")
    os.chdir(here)
    listener.listen()

    async def serve() -> None:
        peer, _ = await listener.accept()
        await shim(trio.SocketStream(peer))

    nursery.start_soon(serve)


async def linked(nursery: trio.Nursery, directory: Path, on_event: Callable[[dict[str, Any]], None]) -> ShimLink:
    link = await ShimLink.connect(directory, ourselves(), on_event)
    nursery.start_soon(link.run)
    return link


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def test_replies_and_events_are_heard_in_the_order_of_sending(nursery: trio.Nursery, tmp_path: Path) -> None:
    """All in one packet, and the exit before whoever asked for the start has run again."""

    async def shim(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        early = line(event="exited", run=0)
        await stream.send_all(early + line(id=1, ok=True))
        await stream.receive_some(4096)
        await stream.send_all(line(id=2, ok=True, pid=7) + line(event="exited", run=1) + line(event="gone", run=1))
        await trio.sleep_forever()

    await play(nursery, tmp_path, shim)
    heard: list[object] = []
    link = await linked(nursery, tmp_path, lambda event: heard.append(event["event"]))
    await link.hello()
    await link.request("start", timeout_seconds=5, on_reply=lambda reply: heard.append(reply["pid"]))
    with trio.fail_after(5):
        while len(heard) < 3:  # noqa: ASYNC110 - a list has no event
            await trio.sleep(0.01)
    # What came before the answer to hello is in that answer, and is not told again.
    assert heard == [7, "exited", "gone"]
    nursery.cancel_scope.cancel()


async def test_a_peer_that_is_not_the_shim_is_not_spoken_to(nursery: trio.Nursery, tmp_path: Path) -> None:
    heard: list[int] = []

    async def shim(stream: trio.SocketStream) -> None:
        heard.append(len(await stream.receive_some(4096)))

    await play(nursery, tmp_path, shim)
    with pytest.raises(ShimGone, match=f"belongs to pid {os.getpid()}"):
        await ShimLink.connect(tmp_path, ShimProcess(1, 1), lambda event: None)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert heard in ([], [0])


@pytest.mark.parametrize("garbage", [b"hello\n", b"[1,2]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
async def test_a_peer_that_talks_nonsense_is_hung_up_on(nursery: trio.Nursery, tmp_path: Path, garbage: bytes) -> None:
    async def shim(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        await stream.send_all(garbage)
        await trio.sleep_forever()

    await play(nursery, tmp_path, shim)
    link = await linked(nursery, tmp_path, lambda event: None)
    with pytest.raises(ShimGone):
        await link.hello()
    assert link.ended.is_set()
    nursery.cancel_scope.cancel()


async def test_unknown_words_are_passed_over(nursery: trio.Nursery, tmp_path: Path) -> None:
    async def shim(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        await stream.send_all(line(id="x", ok=True) + line(weather="fine") + line(id=1, ok=True, more=[1]))
        await trio.sleep_forever()

    await play(nursery, tmp_path, shim)
    link = await linked(nursery, tmp_path, lambda event: None)
    assert (await link.hello())["more"] == [1]
    nursery.cancel_scope.cancel()


async def test_silence_is_not_waited_for_for_ever(nursery: trio.Nursery, tmp_path: Path) -> None:
    async def shim(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    await play(nursery, tmp_path, shim)
    link = await linked(nursery, tmp_path, lambda event: None)
    with trio.fail_after(5), pytest.raises(ShimSilent, match=r"'pids' within 0\.1 s"):
        await link.request("pids", timeout_seconds=0.1)
    nursery.cancel_scope.cancel()


async def test_who_waits_hears_that_the_shim_has_gone(nursery: trio.Nursery, tmp_path: Path) -> None:
    async def shim(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        await stream.aclose()

    await play(nursery, tmp_path, shim)
    link = await linked(nursery, tmp_path, lambda event: None)
    with trio.fail_after(5), pytest.raises(ShimGone):
        await link.request("start", timeout_seconds=float("inf"))
    with pytest.raises(ShimGone):
        await link.request("pids", timeout_seconds=1)


async def test_what_is_given_to_a_shim_is_what_it_was_when_that_was_asked_for(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """While it waits for its turn to be sent the device may be given back, and the descriptor's number be another's:
    the shim would keep somebody else's lock for as long as it lives."""
    given: list[str] = []
    may_read = trio.Event()

    async def shim(stream: trio.SocketStream) -> None:
        await may_read.wait()
        received = b""
        while True:
            part, ancillary, _, _ = await stream.socket.recvmsg(65536, socket.CMSG_SPACE(4))
            for _, _, content in ancillary:
                (fd,) = struct.unpack("i", content)
                given.append(os.readlink(f"/proc/self/fd/{fd}"))
                os.close(fd)
            *lines, received = (received + part).split(b"\n")
            for each in lines:
                await stream.send_all(line(id=json.loads(each)["id"], ok=True))

    await play(nursery, tmp_path, shim)
    link = await linked(nursery, tmp_path, lambda _: None)
    lock, other = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("lock", "other"))
    with trio.fail_after(10):
        async with trio.open_nursery() as waiting:
            waiting.start_soon(partial(link.request, "log", timeout_seconds=5, text="x" * 2_000_000))
            await trio.testing.wait_all_tasks_blocked()
            waiting.start_soon(partial(link.hold, {"GPU-1": lock}, timeout_seconds=5))
            await trio.testing.wait_all_tasks_blocked()
            os.dup2(other, lock)
            may_read.set()
    os.close(lock)
    os.close(other)
    assert given == [str(tmp_path / "lock")]
    nursery.cancel_scope.cancel()


async def test_a_descriptor_that_cannot_be_given_is_no_end_of_the_daemon(nursery: trio.Nursery, tmp_path: Path) -> None:
    async def shim(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    await play(nursery, tmp_path, shim)
    link = await linked(nursery, tmp_path, lambda _: None)
    closed = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.close(closed)
    with pytest.raises(ShimSilent):
        await link.hold({"GPU-1": closed}, timeout_seconds=5)
    nursery.cancel_scope.cancel()


async def test_where_nobody_listens_there_is_no_shim(tmp_path: Path) -> None:
    with pytest.raises(ShimGone):
        await ShimLink.connect(tmp_path, ourselves(), lambda event: None)
    with pytest.raises(ShimGone):
        await ShimLink.connect(tmp_path / "missing", ourselves(), lambda event: None)


def test_only_a_living_process_of_this_boot_with_that_start_time_is_the_shim() -> None:
    me = ourselves()
    good = {"pid": me.pid, "start_time": me.start_time, "boot_id": BOOT}
    assert living_shim(good, BOOT) == me
    for change in (
        {"boot_id": "another"},
        {"start_time": me.start_time + 1},
        {"pid": None},
        {"pid": True},
        {"pid": -1},
        {"pid": 0},
        {"start_time": str(me.start_time)},
        {"pid": 2**22 + 1},
    ):
        assert living_shim({**good, **change}, BOOT) is None
    assert living_shim(None, BOOT) is None
    assert living_shim({}, BOOT) is None


async def test_the_spawner_says_what_is_wrong_with_a_directory(tmp_path: Path) -> None:
    spawner = Spawner()
    try:
        with pytest.raises(SpawnFailed) as failed:
            await spawner.spawn(tmp_path / "missing")
        assert failed.value.code == "shim_failed"
        with pytest.raises(SpawnFailed) as failed:
            await spawner.spawn(tmp_path)
        assert failed.value.code == "bad_attempt"
        pid = spawner.pid
        assert pid is not None
    finally:
        await spawner.aclose()
    assert tree.process_stat(pid) is None
