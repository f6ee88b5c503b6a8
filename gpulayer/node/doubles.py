"""Two daemons that are one node: a data directory that was copied with its host, as in an image of a disk.

The copy starts with a higher epoch than the original has, so that everybody would take it for the original, restarted.
Hence a node that comes back asks some of its peers before it looks after anything or says a word: one that still hears
the run before, from an address of its own, says so, and the newcomer ends. A restart is not kept waiting by that: where
the run before had the same address nobody else can be there now, and one that is gone answers nobody.

Where none of them answers it looks after what it has, and goes on asking: until one has answered it calls nobody, so
that no epoch of a copy is heard by those who know better.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import trio

from gpulayer.core.gossip.core import Gossip
from gpulayer.core.gossip.messages import Ping
from gpulayer.model.address import Address
from gpulayer.model.errors import Refused
from gpulayer.model.member import RESTARTING, Member
from gpulayer.runtime.frame_stream import LinkEnded
from gpulayer.runtime.gossip_socket import GossipSocket
from gpulayer.runtime.peer_links import PeerLinks
from gpulayer.wire.peer import Goodbye, Hello

log = structlog.get_logger()

CODE = "duplicate_id"
# One would do; the others are asked for the case that it has just started itself, and knows nobody yet.
ASKED_MAX = 3
# Where nobody has answered nothing waits for an answer, and each is asked in turn.
ASKED_LATER_MAX = 16
# To connect, be greeted, and wait for what the peer waits for. Where nobody answers replicas are to be looked after.
ASKED_SECONDS = 1.5
# Of the run before. On a local network an answer takes a millisecond, on a host that is starved some hundred.
ANSWER_SECONDS = 0.6
PINGS = 3
LOOK_SECONDS = 0.02


async def objection(hello: Hello, gossip: Gossip, socket: GossipSocket) -> Goodbye | None:
    """Words for a run that greets us, where another one of its node lives and is somewhere else. `gossip` has to run
    meanwhile, or it is nobody that is known to it."""
    held = gossip.member(hello.run.node)
    if held is None or held.run == hello.run or held.state in ("dead", "left") or held.flags & RESTARTING:
        return None
    if not held.addresses or held.addresses[0] in hello.addresses or not await _answers(held, gossip, socket):
        return None
    return Goodbye(
        code=CODE,
        message=f"node {held.id} runs already, at {held.addresses[0]}",
        hint=_HINT,
    )


async def make_sure(links: PeerLinks, peers: Sequence[Sequence[Address]]) -> bool:
    """Ask whoever of the cluster is at these addresses, those of each peer, whether this node runs elsewhere. Refused
    (code `duplicate_id`): it does, by one of them. False: none has answered, and nobody knows."""
    said: list[LinkEnded | None] = []
    with trio.move_on_after(ASKED_SECONDS):
        async with trio.open_nursery() as nursery:
            for addresses in peers:
                nursery.start_soon(_ask, links, addresses, said)
    for ended in said:
        if ended is not None:
            raise Refused(f"this data directory is a copy: {ended.message}", hint=_HINT, code=CODE)
    return bool(said)


_HINT = (
    "start here as a node of its own with --abandon-state, and make images of disks without a data directory; "
    "if that other one is the copy, stop it first"
)


async def _ask(links: PeerLinks, addresses: Sequence[Address], said: list[LinkEnded | None]) -> None:
    """Adds what was answered; None: nothing is wrong."""
    try:
        stream = await links.open_stream(None, addresses)
    except LinkEnded as ended:
        if ended.code == CODE:
            said.append(ended)
        else:
            log.debug("double.not_told", asked=[str(each) for each in addresses], reason=ended.message)
    else:
        said.append(None)
        await stream.aclose()


async def _answers(held: Member, gossip: Gossip, socket: GossipSocket) -> bool:
    """Whether this run, and no later one at its address, is heard now."""
    asked_at = trio.current_time()
    own = gossip.own
    # Of no round of probes: it is the packet that counts, whatever it says.
    ping = Ping(seq=0, target=held.id, epoch=held.run.epoch, incarnation=own.incarnation, version=own.version[1])
    for _ in range(PINGS):
        socket.send(held.id, held.addresses[0], (ping,))
        with trio.move_on_after(ANSWER_SECONDS / PINGS):
            while True:
                await trio.sleep(LOOK_SECONDS)
                now = gossip.member(held.id)
                if now is None or now.run != held.run or now.state == "left":
                    return False
                if now.heard_at > asked_at:
                    return True
    return False
