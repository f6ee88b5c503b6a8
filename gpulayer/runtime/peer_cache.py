"""Where other nodes were seen last, kept over restarts: so a cluster that was all off comes back in any order.

Dead and suspect members are remembered like living ones: after an outage of everything, nobody is alive. It is a hint
and no more: who is at such an address is told by its certificate. A file that cannot be read is an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import structlog
import trio

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.runtime.identity import atomic_write

log = structlog.get_logger()

PEERS_MAX = 64
ADDRESSES_MAX = 4
# Members come and go by dozens when a rack starts; each write is a sync.
WRITE_SECONDS = 10.0
# 64 peers of four addresses take a fifth of this.
_FILE_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPeer:
    id: NodeId
    name: str
    addresses: tuple[Address, ...]
    """The preferred one first."""
    epoch: int = 0


class PeerCache:
    """`update` it with what is seen; `run` writes. One for each data directory."""

    def __init__(self, path: Path) -> None:
        """`path`: of the file, usually peers.json in the data directory."""
        self._path = path
        self._peers = _read(path)
        self._written = self._peers
        self._changed = trio.Event()
        self._is_over = False

    @property
    def peers(self) -> tuple[CachedPeer, ...]:
        """The newest first."""
        return self._peers

    def update(self, seen: Iterable[CachedPeer], *, gone: Collection[NodeId] = ()) -> None:
        """Remember these before all others, the first ones first; forget those that have left."""
        known = {peer.id: peer for peer in seen if peer.addresses}
        for peer in self._peers:
            known.setdefault(peer.id, peer)
        peers = tuple(peer for peer in known.values() if peer.id not in gone)[:PEERS_MAX]
        if set(peers) != set(self._peers):  # another order alone is no news
            self._peers = peers
            self._changed.set()

    async def run(self, seconds: float = WRITE_SECONDS) -> None:
        """Writes what has changed: at once, then once in so many seconds at most. Never returns."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await trio.to_thread.run_sync(self.write)
            await trio.sleep(seconds)

    def forget(self) -> None:
        """The file is gone, and is not written any more: the node has left, and others' cluster is none of its."""
        self._is_over = True
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("peers.not_forgotten", path=str(self._path), reason=error.strerror)

    def write(self) -> None:
        """Now, if there is something to write: for the end of the daemon."""
        peers = self._peers
        if self._is_over or peers == self._written:
            return
        try:
            atomic_write(self._path, json.dumps({"peers": [_to_json(peer) for peer in peers]}).encode() + b"\n")
        except OSError as error:
            # A full disk must not end what works; the next change tries again.
            log.warning("peers.not_remembered", path=str(self._path), reason=error.strerror)
            return
        self._written = peers


def _read(path: Path) -> tuple[CachedPeer, ...]:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_FILE_BYTES_MAX))
        return tuple(_from_json(each) for each in record["peers"][:PEERS_MAX])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("peers.not_read", path=str(path), reason=str(error))
        return ()


def _to_json(peer: CachedPeer) -> dict[str, object]:
    addresses = [[address.host, address.port] for address in peer.addresses[:ADDRESSES_MAX]]
    return {"id": peer.id, "name": peer.name, "addresses": addresses, "epoch": peer.epoch}


def _from_json(record: dict[str, object]) -> CachedPeer:
    """ValueError or TypeError for what is none."""
    id, name, epoch, addresses = record["id"], record["name"], record["epoch"], record["addresses"]
    if not (isinstance(id, str) and isinstance(name, str) and type(epoch) is int and isinstance(addresses, list)):
        raise ValueError("a peer that is none")
    found = tuple(_address(host, port) for host, port in addresses[:ADDRESSES_MAX])
    if not id or not found:
        raise ValueError("a peer without an id or without an address")
    return CachedPeer(id=NodeId(id), name=name, addresses=found, epoch=epoch)


def _address(host: object, port: object) -> Address:
    if not isinstance(host, str) or type(port) is not int or not 1 <= port <= 65535:
        raise ValueError(f"{host!r:.80} and {port!r:.80} are no address")
    return Address(str(ip_address(host)), port)
