"""Which datagrams are let in: sealed by a run of this cluster, each once, and none that is only a recording. Pure.

A sliding window per run refuses what came before. It cannot know that of a run that was never heard, so a packet of
such a run is kept, unread, while the run is asked to send back a token; only who can seal as that run now can do that.
A recording thus neither raises the dead nor speaks for those who restarted, and no clocks are compared. A run that has
shown its certificate on a link needs no asking.

The gate tells what to send and what came in; it never waits, and all that it holds is bounded.
"""

from __future__ import annotations

import hmac
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpulayer.core.gossip.messages import Message, Received
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Run
from gpulayer.model.trust import KeyRing
from gpulayer.wire.codec import DecodeError, EncodeError
from gpulayer.wire.datagram import (
    ANSWER,
    CHALLENGE,
    DATAGRAM_BYTES_MAX,
    MESSAGES,
    OVERHEAD,
    Header,
    RunCipher,
    RunKeys,
    packed_run,
    read_header,
)
from gpulayer.wire.gossip import decode_and_count, encode
from gpulayer.wire.replay import ReplayWindow

# As many nodes as a cluster may have (Profile.members_max); above it, who was silent for longest is asked again.
KNOWN_MAX = 4096
UNKNOWN_MAX = 256
KEPT_PACKETS_MAX = 4
KEPT_SECONDS = 2.0
CHALLENGE_SECONDS = 0.1
# A token is good for this long and as long again: more than any round trip, and nothing to collect.
TOKEN_SECONDS = 2.0
UNKNOWN_KEY_SECONDS = 1.0
_MARK_SECONDS = 0.25
_TOKEN_BYTES = 16
_ANSWER = struct.Struct(f">{_TOKEN_BYTES}sQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What came of one datagram; all empty where it is not to be heeded."""

    received: tuple[Received, ...] = ()
    """In the order in which they arrived."""
    replies: tuple[bytes, ...] = ()
    """Datagrams for the address that it came from."""
    unknown_key: int | None = None
    """It says that it was sealed with this gossip key, which is not on the ring: is there a newer ring? Said once a
    second at most, and not proved."""
    duplicate: Run | None = None
    """This run lives, although another run has its node and epoch; or it has our own node. Proved by its answer."""


_NOTHING = Opened()


@dataclass(slots=True)
class _Known:
    run: Run
    window: ReplayWindow
    heard_at: float
    ciphers: dict[int, RunCipher] = field(default_factory=dict)
    """By key id; only of keys under which a packet of it was opened."""


@dataclass(slots=True)
class _Kept:
    counter: int
    body: bytes
    at: Address


@dataclass(slots=True)
class _Unknown:
    since: float
    kept: list[_Kept] = field(default_factory=list)
    challenged_at: float = float("-inf")
    answered_at: float = float("-inf")
    answered: list[int] = field(default_factory=list)
    """Counters of its challenges that were answered: they count as seen once it is known."""


class PacketGate:
    """One per daemon. Who may be heard at all is `allow`'s to say, before anything is opened."""

    def __init__(
        self,
        own: Run,
        cluster_id: str,
        ring: KeyRing,
        challenge_secret: bytes,
        *,
        allow: Callable[[NodeId], bool] | None = None,
        packet_bytes_max: int = DATAGRAM_BYTES_MAX,
    ) -> None:
        """`challenge_secret`: 32 bytes of chance, of this process alone."""
        assert len(challenge_secret) >= 32, "a short secret can be guessed"
        self._own = own
        self._own_packed = packed_run(own)
        self._cluster_id = cluster_id
        self._secret = challenge_secret
        self._allow = allow
        self.packet_bytes_max = packet_bytes_max
        self._sent = 0
        self._known: dict[NodeId, _Known] = {}
        self._unknown: dict[Run, _Unknown] = {}
        self._marks: deque[tuple[float, int]] = deque()
        self._opened_at = 0.0
        self._key_told_at = float("-inf")
        self._counters: dict[str, int] = {}
        self.set_ring(ring)

    # --- what it is told ------------------------------------------------------------------------------------------

    def set_ring(self, ring: KeyRing) -> None:
        """From now on the first key seals, all of them open. While a key is being installed it is the last one."""
        assert ring.keys, "a ring without a key seals nothing"
        self._keys = {key.id: RunKeys(key, self._cluster_id) for key in ring.keys}
        self._sealing = self._keys[ring.keys[0].id].cipher(self._own)
        for known in self._known.values():
            known.ciphers.clear()

    def set_allowed(self, allow: Callable[[NodeId], bool] | None) -> None:
        """Who may be heard; None: whoever holds a key."""
        self._allow = allow

    def link_verified(self, run: Run, datagrams_sent: int) -> bool:
        """A link has shown by certificate that this run lives, and has sent so many datagrams, which from now on count
        as seen. False, and nothing changes: a newer run of that node is known, or another one with the same epoch."""
        known = self._known.get(run.node)
        if known is not None and known.run == run:
            return True
        if run.node == self._own.node or (known is not None and run.epoch <= known.run.epoch):
            return False
        self._learn(run, ReplayWindow(above=datagrams_sent), self._opened_at)
        return True

    def forget(self, node: NodeId) -> None:
        """It left, or is no longer in the registry: it would have to answer again."""
        self._known.pop(node, None)
        for run in [run for run in self._unknown if run.node == node]:
            del self._unknown[run]

    # --- what it tells --------------------------------------------------------------------------------------------

    @property
    def datagrams_sent(self) -> int:
        """Of this run, so far: what a Hello says."""
        return self._sent

    def is_known(self, run: Run) -> bool:
        known = self._known.get(run.node)
        return known is not None and known.run == run

    def counters(self) -> dict[str, int]:
        """How many datagrams were sealed, opened, and passed over, by reason."""
        return {"sealed": self._sent, **self._counters}

    def is_own(self, packet: bytes) -> bool:
        """Whether these bytes begin as one of our datagrams does: of what the network sends back with an error. The
        64 random bits of our run are in it, so who has not seen a datagram of ours cannot make one up."""
        header = read_header(packet)
        return isinstance(header, Header) and header.run == self._own and 0 < header.counter <= self._sent

    def check(self) -> None:
        assert len(self._known) <= KNOWN_MAX
        assert len(self._unknown) <= UNKNOWN_MAX
        assert all(len(unknown.kept) <= KEPT_PACKETS_MAX for unknown in self._unknown.values())
        assert all(node == known.run.node and node != self._own.node for node, known in self._known.items())
        assert all(known.ciphers.keys() <= self._keys.keys() for known in self._known.values())
        assert not any(self.is_known(run) for run in self._unknown)
        assert all(len(unknown.answered) <= KEPT_SECONDS / CHALLENGE_SECONDS + 1 for unknown in self._unknown.values())

    # --- out ------------------------------------------------------------------------------------------------------

    def seal(self, messages: Sequence[Message], to: NodeId) -> bytes:
        """A datagram with these, which nobody but `to` can open. EncodeError: they do not fit into one, or break their
        types; our mistake."""
        body = encode(messages)
        if OVERHEAD + len(body) > self.packet_bytes_max:
            raise EncodeError(
                f"{len(messages)} messages make a datagram of {OVERHEAD + len(body)} bytes, {self.packet_bytes_max} "
                "at most"
            )
        return self._sealed(MESSAGES, body, to)

    def _sealed(self, kind: int, body: bytes, to: NodeId) -> bytes:
        self._sent += 1
        return self._sealing.seal(kind, self._sent, body, to)

    # --- in -------------------------------------------------------------------------------------------------------

    def open(self, data: bytes, at: Address, now: float) -> Opened:
        """What to make of a datagram that came from `at`. Never raises, whatever the bytes."""
        if len(data) > self.packet_bytes_max:
            return self._passed_over("oversize")
        header = read_header(data)
        if not isinstance(header, Header):
            return self._passed_over(header)
        run = header.run
        if run == self._own:
            return self._passed_over("own")
        if self._allow is not None and not self._allow(run.node):
            return self._passed_over("not_allowed")
        newest = self._known.get(run.node)
        if newest is not None and run.epoch < newest.run.epoch:
            return self._passed_over("old_epoch")
        known = newest if newest is not None and newest.run == run else None
        if known is not None and not known.window.is_fresh(header.counter):
            return self._passed_over("replayed")
        keys = self._keys.get(header.key_id)
        if keys is None:
            return self._with_unknown_key(data, header, now)
        cipher = (known.ciphers.get(header.key_id) if known is not None else None) or keys.cipher(run)
        body = cipher.open(data, header.counter, self._own.node)
        if body is None:
            return self._passed_over("forged")
        self._count("opened")
        self._opened_at = now
        self._mark(now)
        if known is None:
            return self._from_unknown(header, body, at, now)
        known.ciphers[header.key_id] = cipher
        known.window.accept(header.counter)
        known.heard_at = now
        return self._from_known(header, body, at, now)

    def _with_unknown_key(self, data: bytes, header: Header, now: float) -> Opened:
        # In vain, so that the time it takes does not tell which keys are on the ring.
        self._sealing.open(data, header.counter, self._own.node)
        self._count("unknown_key")
        if now < self._key_told_at + UNKNOWN_KEY_SECONDS:
            return _NOTHING
        self._key_told_at = now
        return Opened(unknown_key=header.key_id)

    def _from_known(self, header: Header, body: bytes, at: Address, now: float) -> Opened:
        if header.kind == MESSAGES:
            received = self._read(header.run, body, at)
            return _NOTHING if received is None else Opened(received=(received,))
        if header.kind == CHALLENGE:
            return Opened(received=(_sign_of_life(header.run, at),), replies=self._answer(header.run, body, now))
        if header.kind == ANSWER:
            return Opened(received=(_sign_of_life(header.run, at),))
        return self._passed_over("unknown_kind")

    def _from_unknown(self, header: Header, body: bytes, at: Address, now: float) -> Opened:
        if header.kind == ANSWER:
            return self._answered(header, body, at, now)
        unknown = self._unknown_run(header.run, now)
        if header.kind == CHALLENGE:
            if now < unknown.answered_at + CHALLENGE_SECONDS:
                return self._passed_over("challenged_again")
            unknown.answered_at = now
            unknown.answered.append(header.counter)
            return Opened(replies=self._answer(header.run, body, now))
        if header.kind != MESSAGES:
            return self._passed_over("unknown_kind")
        if len(unknown.kept) < KEPT_PACKETS_MAX:
            unknown.kept.append(_Kept(header.counter, body, at))
            self._count("kept")
        else:
            self._count("kept_too_many")
        if now < unknown.challenged_at + CHALLENGE_SECONDS:
            return _NOTHING
        unknown.challenged_at = now
        self._count("challenged")
        return Opened(replies=(self._sealed(CHALLENGE, self._token(header.run, at, now), header.run.node),))

    def _answer(self, to: Run, body: bytes, now: float) -> tuple[bytes, ...]:
        """Not longer than the challenge was, so that it multiplies nothing that is sent under a false address."""
        if len(body) < _ANSWER.size:
            self._count("undecodable")
            return ()
        return (self._sealed(ANSWER, _ANSWER.pack(body[:_TOKEN_BYTES], self._recent_from(now)), to.node),)

    def _answered(self, header: Header, body: bytes, at: Address, now: float) -> Opened:
        run = header.run
        if len(body) < _ANSWER.size:
            return self._passed_over("undecodable")
        token, recent_from = _ANSWER.unpack_from(body)
        if not self._is_token(token, run, at, now) or header.counter <= recent_from:
            return self._passed_over("wrong_token")
        self._expire(now)
        other = self._known.get(run.node)
        if run.node == self._own.node or (other is not None and other.run.epoch == run.epoch):
            self._unknown.pop(run, None)
            self._count("duplicate")
            return Opened(duplicate=run)
        unknown = self._unknown.pop(run, None) or _Unknown(now)
        window = ReplayWindow(above=recent_from)
        for counter in (header.counter, *unknown.answered):
            window.accept(counter)
        self._learn(run, window, now)
        received = [
            self._read(run, each.body, each.at)
            for each in unknown.kept
            # From elsewhere it may have been sent on by somebody else, and is not worth a reply to that address.
            if each.at == at and window.accept(each.counter)
        ]
        return Opened(received=tuple(each for each in received if each is not None) or (_sign_of_life(run, at),))

    def _read(self, run: Run, body: bytes, at: Address) -> Received | None:
        try:
            messages, ignored = decode_and_count(body)
        except DecodeError:
            self._count("undecodable")
            return None
        if ignored:
            self._count("unknown_messages", ignored)
        return Received(source=run, messages=messages, at=at)

    # --- who is known ---------------------------------------------------------------------------------------------

    def _learn(self, run: Run, window: ReplayWindow, heard_at: float) -> None:
        self._known.pop(run.node, None)
        if len(self._known) >= KNOWN_MAX:
            del self._known[min(self._known.values(), key=lambda known: known.heard_at).run.node]
        self._known[run.node] = _Known(run, window, heard_at)
        self._unknown.pop(run, None)

    def _unknown_run(self, run: Run, now: float) -> _Unknown:
        self._expire(now)
        if run not in self._unknown and len(self._unknown) >= UNKNOWN_MAX:
            del self._unknown[next(iter(self._unknown))]
        return self._unknown.setdefault(run, _Unknown(now))

    def _expire(self, now: float) -> None:
        while self._unknown:
            oldest, unknown = next(iter(self._unknown.items()))
            if now < unknown.since + KEPT_SECONDS:
                return
            del self._unknown[oldest]

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _token(self, run: Run, at: Address, now: float, ago: int = 0) -> bytes:
        """Nothing is remembered of it: it can be made again from the run, its address, the time and our secret."""
        period = int(now // TOKEN_SECONDS) - ago
        about = b"".join((packed_run(run), str(at).encode(), period.to_bytes(8, "big", signed=True)))
        # Padded, so that a challenge is never shorter than its answer.
        return hmac.digest(self._secret, about, "sha256")[:_TOKEN_BYTES] + bytes(_ANSWER.size - _TOKEN_BYTES)

    def _is_token(self, token: bytes, run: Run, at: Address, now: float) -> bool:
        return any(hmac.compare_digest(token, self._token(run, at, now, ago)[:_TOKEN_BYTES]) for ago in (0, 1))

    def _mark(self, now: float) -> None:
        """Remember how many datagrams had been sent when, back to the last that is older than one can be kept."""
        if not self._marks or now >= self._marks[-1][0] + _MARK_SECONDS:
            self._marks.append((now, self._sent))
            while len(self._marks) > 1 and self._marks[1][0] <= now - KEPT_SECONDS:
                self._marks.popleft()

    def _recent_from(self, now: float) -> int:
        """A counter of ours from before anything that may still be kept elsewhere: what we sent by then is a recording
        wherever it arrives now."""
        return max((sent for marked_at, sent in self._marks if marked_at <= now - KEPT_SECONDS), default=0)

    # --- counting -------------------------------------------------------------------------------------------------

    def _passed_over(self, reason: str) -> Opened:
        self._count(reason)
        return _NOTHING

    def _count(self, what: str, by: int = 1) -> None:
        self._counters[what] = self._counters.get(what, 0) + by


def _sign_of_life(run: Run, at: Address) -> Received:
    return Received(source=run, messages=(), at=at)
