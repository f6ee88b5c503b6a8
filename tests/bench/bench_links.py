"""What links cost: a handshake with both certificates, and frames over one that stands.

    python -m tests.bench.bench_links [HANDSHAKES] [FRAMES]

Both ends run in this one process, so what is printed is the CPU of the two together; a daemon pays half of it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import trio

from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.trust import KeyRing
from gpulayer.runtime import trust
from gpulayer.runtime.frame_stream import FrameStream, LinkEnded
from gpulayer.runtime.peer_links import PeerLinks
from gpulayer.runtime.peer_sockets import bind_peer_sockets
from gpulayer.runtime.trust import Contexts
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.peer import PROTOCOL, GossipFrame, Hello, JoinRejected, JoinRequest, PeerFrame, Use

AUTHORITY = trust.new_authority("c-1")


def contexts_of(directory: Path, node: str) -> Contexts:
    directory.mkdir()
    keys, files = trust.new_key_pair(), TrustFiles(directory)
    files.write(
        certificate_pem=trust.issue(AUTHORITY, NodeId(node), "c-1", keys.public_pem, ["127.0.0.1"]),
        private_key_pem=keys.private_pem,
        ca_certificate_pem=AUTHORITY.certificate_pem,
        key_ring=KeyRing(),
    )
    return files.contexts()


class End:
    def __init__(self, directory: Path, node: str, port: int) -> None:
        self.run = Run(NodeId(node), 1, 1)
        self.address = Address("127.0.0.1", port)
        self.received = 0
        self.news = trio.lowlevel.ParkingLot()
        contexts = contexts_of(directory / node, node)
        self.links = PeerLinks(
            hello=self._hello,
            contexts=lambda: contexts,
            is_allowed=lambda node: True,
            on_up=lambda hello, address, is_ours: None,
            on_down=lambda node, address, why: None,
            on_frame=self._count,
            on_join=self._join,
            on_bulk=self._bulk,
        )

    def _hello(self, use: Use) -> Hello:
        return Hello(use=use, protocol=PROTOCOL, cluster_id="c-1", run=self.run, addresses=(self.address,))

    def _count(self, run: Run, frame: PeerFrame) -> None:
        self.received += 1
        self.news.unpark_all()

    async def _join(self, request: JoinRequest, observed: Address) -> JoinRejected:
        return JoinRejected(code="refused", message="")

    async def _bulk(self, run: Run, stream: FrameStream) -> None:
        try:
            await stream.receive_frame()
        except LinkEnded:
            pass


async def bench(handshakes: int, frames: int) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        bind_peer_sockets(["127.0.0.1"], 0) as first,
        bind_peer_sockets(["127.0.0.1"], 0) as second,
    ):
        a, b = End(Path(directory), "n1", first.port), End(Path(directory), "n2", second.port)
        async with trio.open_nursery() as nursery:
            await nursery.start(a.links.run, first.links)
            await nursery.start(b.links.run, second.links)
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(handshakes):
                await (await a.links.open_stream(b.run.node, (b.address,))).aclose()
            print(
                f"handshake, hellos, goodbye: {(time.process_time() - cpu) / handshakes * 1e3:.2f} ms CPU of both, "
                f"{(time.perf_counter() - began) / handshakes * 1e3:.2f} ms wall"
            )
            for size in (100, 1200, 64 * 1024):
                many = frames if size < 10_000 else frames // 20
                done, frame = b.received + many, GossipFrame(payload=bytes(size))
                began, cpu = time.perf_counter(), time.process_time()
                sent = 0
                while b.received < done:
                    while sent < many and sent - (b.received - done + many) < 20:
                        a.links.send(b.run.node, (b.address,), frame)
                        sent += 1
                    await b.news.park()
                wall, cpu = time.perf_counter() - began, time.process_time() - cpu
                print(
                    f"frames of {size} B: {many / wall:,.0f} a second, {many * size / wall / 2**20:,.0f} MiB/s, "
                    f"{cpu / many * 1e6:.1f} µs CPU of both ends"
                )
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(bench, *map(int, [*sys.argv[1:], "200", "20000"][:2]))
