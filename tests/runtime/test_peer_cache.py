"""Where others were seen is known after a restart, whatever state they were in; a damaged file is an empty one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import trio

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.runtime.peer_cache import PEERS_MAX, CachedPeer, PeerCache


def peer(number: int, *, epoch: int = 1) -> CachedPeer:
    return CachedPeer(
        id=NodeId(f"n-{number}"),
        name=f"n{number}",
        addresses=(Address("10.0.0.1", 1000 + number), Address("fd00::1", 1000 + number)),
        epoch=epoch,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "peers.json"


def test_what_was_seen_is_there_after_a_restart(path: Path) -> None:
    cache = PeerCache(path)
    assert cache.peers == ()
    cache.update([peer(1), peer(2)])
    cache.write()
    assert PeerCache(path).peers == (peer(1), peer(2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_restarted_daemon_that_sees_nobody_forgets_nobody(path: Path) -> None:
    cache = PeerCache(path)
    cache.update([peer(1), peer(2)])
    cache.update([])
    cache.update([peer(2, epoch=2)])
    assert cache.peers == (peer(2, epoch=2), peer(1))


def test_of_a_cluster_that_was_left_nothing_is_written_any_more(path: Path) -> None:
    cache = PeerCache(path)
    cache.update([peer(1)])
    cache.write()
    cache.forget()
    cache.update([peer(2)])
    cache.write()
    assert not path.exists()


def test_who_has_left_is_forgotten(path: Path) -> None:
    cache = PeerCache(path)
    cache.update([peer(1), peer(2)])
    cache.update([], gone=[NodeId("n-1")])
    assert cache.peers == (peer(2),)


def test_so_many_are_kept_and_no_more_the_newest_first(path: Path) -> None:
    cache = PeerCache(path)
    cache.update([peer(number) for number in range(PEERS_MAX)])
    cache.update([peer(1000)])
    cache.write()
    kept = PeerCache(path).peers
    assert len(kept) == PEERS_MAX
    assert kept[0] == peer(1000)


async def test_changes_are_written_at_once_and_then_once_in_a_while(path: Path) -> None:
    cache = PeerCache(path)

    async def wait_for(*peers: CachedPeer) -> float:
        with trio.fail_after(10):
            while PeerCache(path).peers != peers:  # noqa: ASYNC110 - it is the file that is looked at
                await trio.sleep(0.01)
        return trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.run, 0.5)
        cache.update([peer(1)])
        first = await wait_for(peer(1))
        cache.update([peer(2)])
        second = await wait_for(peer(2), peer(1))
        nursery.cancel_scope.cancel()
    assert second - first > 0.4


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"peers": 1}',
        b'{"peers": [{}]}',
        b'{"peers": [{"id": "n", "name": "n", "epoch": 1, "addresses": []}]}',
        b'{"peers": [{"id": "n", "name": "n", "epoch": 1, "addresses": [["x", 1]]}]}',
        b'{"peers": [{"id": "n", "name": "n", "epoch": 1, "addresses": [["10.0.0.1", 99999]]}]}',
        b'{"peers": [{"id": "n", "name": "n", "epoch": 1, "addresses": ["ab"]}]}',
        b"\xff\x00" * 100,
        b"[" * 100_000,
    ],
)
def test_a_damaged_cache_is_empty(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    assert PeerCache(path).peers == ()


def test_a_cache_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    cache = PeerCache(tmp_path / "gone" / "peers.json")
    cache.update([peer(1)])
    cache.write()
    assert cache.peers == (peer(1),)
