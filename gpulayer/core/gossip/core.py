"""Gossip: who is in the cluster and alive, and what each says of itself, without anybody who would have to know all.

One machine for one node: events in, effects out, nothing of time or chance of its own. It is made of smaller ones:
Members (the table), Detection (probes and suspicions), Words and OwnWord (what is said of members, and of ourselves),
Spread (rumours), Copies (records and comparison of tables), Contacts (looking for others, links), Streams (whether
connections work), Departure (leaving). Here is which of them each kind of message and event goes to.

Late wake: whoever was stopped, or had its process stand still, has missed answers. Every step first looks whether it
comes later than was asked for, and then blames nobody for what could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import assert_never

from gpulayer.core.base import Tick
from gpulayer.core.gossip.contacts import Contacts
from gpulayer.core.gossip.copies import Copies
from gpulayer.core.gossip.departure import Departure
from gpulayer.core.gossip.detection import Detection
from gpulayer.core.gossip.health import Health
from gpulayer.core.gossip.members import Members, News
from gpulayer.core.gossip.messages import (
    Ack,
    Alive,
    CloseLink,
    DatagramRefused,
    Dead,
    Delta,
    GossipEffect,
    GossipEvent,
    LeaveWanted,
    Left,
    LinkDown,
    LinkUp,
    MemberChanged,
    Message,
    Nack,
    Newer,
    Ping,
    PingRequest,
    Pull,
    Received,
    SendFailed,
    SendFrame,
    SetLeader,
    SetOwn,
    SetRegistry,
    SetSeeds,
    SetSelf,
    Suspect,
    Suspended,
    SyncBuckets,
    SyncDigests,
    SyncMembers,
    Vouch,
)
from gpulayer.core.gossip.outbox import Outbox
from gpulayer.core.gossip.own_word import OwnWord
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.records import Records
from gpulayer.core.gossip.spread import Spread
from gpulayer.core.gossip.streams import Streams
from gpulayer.core.gossip.suspicion import Suspicions
from gpulayer.core.gossip.words import Words
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member, Run
from gpulayer.model.units import NEVER, Instant


class Gossip:
    """`own`: this run. `addresses`: where it is reached, four at most, the preferred one first. `random`: all chance
    there is. `size_of`: bytes of a message in a packet; `room`: bytes of messages that one packet takes.
    `incarnation`: of its first word. `key_ids`, `protocol`: what it says of itself."""

    def __init__(
        self,
        *,
        own: Run,
        addresses: tuple[Address, ...],
        profile: Profile,
        random: Random,
        size_of: Callable[[Message], int],
        room: int,
        incarnation: int = 0,
        key_ids: tuple[int, ...] = (),
        protocol: tuple[int, int] = (1, 1),
    ) -> None:
        def stream() -> Random:
            return Random(random.getrandbits(64))

        member = Member(
            run=own,
            incarnation=incarnation,
            state="alive",
            addresses=addresses[:4],
            key_ids=key_ids,
            protocol=protocol,
        )
        self._profile = profile
        self._random = stream()
        self._members = Members(member, profile)
        self._suspicions = Suspicions(profile)
        self._spread = Spread(profile, size_of)
        self._health = Health(profile)
        self._records = Records(own, profile)
        self._outbox = Outbox(
            self._members, self._suspicions, self._spread, profile, size_of=size_of, room=room, rng=stream()
        )
        self._detection = Detection(
            self._members,
            self._suspicions,
            self._spread,
            self._outbox,
            self._health,
            profile,
            rng=stream(),
            order=stream(),
        )
        self._copies = Copies(
            self._members, self._outbox, self._spread, self._records, profile, size_of=size_of, rng=stream()
        )
        self._contacts = Contacts(self._members, self._outbox, profile, stream())
        self._departure = Departure(self._members, self._outbox, profile)
        self._own_word = OwnWord(self._members, self._spread, self._copies, self._outbox, self._health)
        self._streams = Streams(self._members, self._contacts, self._outbox, self._own_word)
        self._words = Words(self._members, self._detection, self._spread, self._copies, self._outbox, self._own_word)
        self._gossip_at: Instant = Instant(0.0)
        """Not before: rumours alone make packets at this pace."""
        self._due: Instant = NEVER
        """The deadline as it was given after the last step."""
        self._awake_at: Instant = Instant(0.0)
        """Lateness before this has been dealt with."""
        self._now: Instant = Instant(0.0)

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def own(self) -> Member:
        return self._members.own

    @property
    def deadline(self) -> Instant:
        return self._due

    @property
    def health(self) -> int:
        """0 is well; from Profile.health_unreliable on our word counts for nothing."""
        return self._health.score

    @property
    def heard_at(self) -> Instant:
        """When the last packet or frame came from anybody; 0.0: never."""
        return self._members.heard_anybody_at

    @property
    def is_isolated(self) -> bool:
        """Others are known, or should be found, and nothing has been heard from any of them for a while."""
        return self._contacts.is_isolated(self._now)

    def members(self) -> Mapping[NodeId, Member]:
        """Ourselves, the living, and the dead and those who left until their tombstones end."""
        return self._members.all

    def member(self, node: NodeId) -> Member | None:
        return self._members.get(node)

    def record(self, node: NodeId) -> Mapping[str, bytes]:
        """The values of its record; of a new run the old run's, until the new one's is here."""
        return self._records.values(node)

    def is_stale(self, node: NodeId) -> bool:
        """Whether record() is that of an older run, or none at all."""
        return self._records.is_stale(node)

    def announced_version(self, node: NodeId) -> int:
        """The version of its record that it, or somebody, has announced and that record() has not reached yet; 0: there
        is none, and record() is all that is known of."""
        return self._records.announced_version(node)

    def behind_since(self, node: NodeId) -> Instant | None:
        """Since when record() has lacked something that was announced; None: it lacks nothing."""
        return self._copies.behind_since(node)

    def history(self, node: NodeId) -> tuple[tuple[Instant, str], ...]:
        """What happened to it, as seen from here: the last lines of its story."""
        return self._outbox.story(node)

    def counters(self) -> Mapping[str, int]:
        """What was done since the start, by name, and how many rumours wait."""
        return {**self._outbox.counters, "rumours": len(self._spread), "suspected": len(self._suspicions)}

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        for part in (
            self._members,
            self._spread,
            self._detection,
            self._records,
            self._copies,
            self._words,
            self._contacts,
            self._streams,
            self._departure,
        ):
            part.check()

    # --- events -------------------------------------------------------------------------------------------------------

    def step(self, event: GossipEvent, now: Instant) -> list[GossipEffect]:
        """Instants never go back. Effects are to be done in their order."""
        assert now >= self._now, (now, self._now)
        self._now = now
        self._notice_late_wake(now)
        match event:
            case Received():
                self._receive(event, now)
            case LinkUp():
                self._link_up(event, now)
            case LinkDown():
                self._link_down(event, now)
            case DatagramRefused(address=address):
                self._detection.datagram_refused(address, now)
            case SendFailed(address=address):
                self._detection.send_failed(address, now)
            case SetOwn(values=values):
                self._copies.set_own(values, now)
            case SetSelf():
                self._own_word.set(event, now)
            case SetRegistry():
                self._set_registry(event, now)
            case SetLeader(node=node):
                self._copies.leader = node
                self._contacts.set_leader(node, now)
            case SetSeeds(addresses=addresses):
                self._contacts.set_seeds(addresses, now)
            case Suspended(seconds=seconds):
                self._paused(seconds, now, is_clock_stopped=True)
            case LeaveWanted():
                self._leave(now)
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)
        effects = self._outbox.take()
        if any(isinstance(effect, MemberChanged) for effect in effects):
            self._contacts.noticed(now)
        for effect in effects:
            if isinstance(effect, SendFrame):
                self._contacts.used(effect.to, now)
            elif isinstance(effect, CloseLink):
                self._contacts.link_down(effect.node, now)
        due = self._next_deadline()
        # What was due before this event is still due since then; what this event made due is due now.
        self._due = max(due, min(self._due, now))
        return effects

    def _next_deadline(self) -> Instant:
        gossip = self._gossip_at if self._spread.is_pressing and self._members.live else NEVER
        return Instant(
            min(
                gossip,
                self._detection.deadline,
                self._copies.deadline,
                self._contacts.deadline,
                self._streams.deadline,
                self._departure.deadline,
                self._members.reap_at,
            )
        )

    def _tick(self, now: Instant) -> None:
        for node in self._members.reap(now):
            self._forget(node, "its tombstone is over", now)
        self._detection.tick(now)
        self._copies.tick(now)
        self._contacts.tick(now)
        self._streams.tick(now)
        self._departure.tick(now)
        if self._spread.is_pressing and self._members.live and self._gossip_at <= now:
            self._gossip_at = Instant(now + self._profile.gossip_interval)
            self._outbox.gossip(now)

    def _notice_late_wake(self, now: Instant) -> None:
        late = now - max(self._due, self._awake_at)
        if late > self._profile.late_wake:
            self._paused(late, now, is_clock_stopped=False)

    def _paused(self, seconds: float, now: Instant, *, is_clock_stopped: bool) -> None:
        self._awake_at = now
        self._outbox.counters["pauses"] += 1
        self._outbox.tell(self.own.id, f"this process stood still for {seconds:.1f} s", now)
        self._detection.paused(seconds, now, is_clock_stopped=is_clock_stopped)
        least, _ = self._profile.suspicion_bounds(self._members.count)
        if seconds > least and self.own.state == "alive" and self._members.live:
            self._own_word.speak(self.own, now)
            self._copies.open_sync(self._outbox.some_live(1)[0], now)

    # --- packets ------------------------------------------------------------------------------------------------------

    def _receive(self, event: Received, now: Instant) -> None:
        source, at = event.source, event.at
        if self._members.is_let_go(source):
            self._outbox.counters["packets_of_removed"] += 1
            return
        if source.node == self.own.id:
            if source != self.own.run:
                self._own_word.notice_double(source, now)
            return
        self._detection.heard_anybody(now)
        if at is None:
            self._contacts.used(source.node, now)
        member = self._members.get(source.node)
        if member is not None and source.epoch < member.run.epoch:
            self._outbox.counters["packets_of_old_runs"] += 1
            if any(isinstance(message, Ping) for message in event.messages):
                self._outbox.send(source.node, [self._members.word_of(source.node)], now, at)
            return
        self._heard(source, at, now)
        joined = 0
        for message in event.messages:
            if isinstance(message, Alive | Delta | Newer):
                self._spread.heard_again(message, self._members.count)
            if at is not None and isinstance(message, Alive) and self._members.get(message.run.node) is None:
                joined += 1
                if joined > self._profile.new_members_per_packet:
                    self._outbox.counters["newcomers_dropped"] += 1
                    continue
            self._hear(message, source, at, now)
        if member is None or member.run != source:
            self._heard(source, at, now)

    def _heard(self, source: Run, at: Address | None, now: Instant) -> None:
        member = self._members.get(source.node)
        if member is None or member.run != source:
            return
        if at is not None:
            self._outbox.observed_at(source.node, at)
        self._detection.heard(source.node, now)
        if member.state != "alive":
            # Its link was closed, and is not opened again for whoever is leaving.
            self._words.tell_subject(member, at, now, by_link=at is None and member.state != "left")

    def _hear(self, message: Message, source: Run, at: Address | None, now: Instant) -> None:
        match message:
            case Ping():
                self._headline(source, message.version, source.node, now)
                self._detection.hear_ping(message, source, at, now)
            case Ack():
                self._headline(Run(message.node, message.epoch, 0), message.version, source.node, now)
                self._departure.hear_ack(message, source)
                self._detection.hear_ack(message, source, at, now)
            case PingRequest():
                self._detection.hear_ping_request(message, source, now)
            case Nack():
                self._detection.hear_nack(message, source)
            case Alive():
                self._words.hear_alive(message, source, now)
            case Suspect() | Dead() | Left():
                self._words.hear_accusation(message, source, at, now)
            case Vouch():
                self._detection.hear_vouch(message, source, now)
            case Delta():
                self._copies.hear_delta(message, source.node, now)
            case Newer():
                self._copies.hear_newer(message, source.node, now)
            case Pull():
                self._copies.hear_pull(message, source.node, at, now)
            case SyncBuckets():
                self._copies.hear_buckets(message, source.node, at, now)
            case SyncDigests():
                self._copies.hear_digests(message, source.node, at, now)
            case SyncMembers():
                self._words.hear_members(message, source, now)
            case _:
                assert_never(message)

    def _headline(self, run: Run, version: int, source: NodeId, now: Instant) -> None:
        """A probe says, by the way, how far its sender's record is."""
        member = self._members.get(run.node)
        if member is not None and member.run.epoch == run.epoch and version > member.version[1]:
            self._copies.hear_version(run.node, run.epoch, (member.version[0], version), source, now)

    # --- ourselves ----------------------------------------------------------------------------------------------------

    def _leave(self, now: Instant) -> None:
        own = self.own
        if own.state == "left":
            return
        self._members.leave(own.id, own.incarnation, now)
        self._outbox.changed(own, own.id, "leaving", now)
        self._spread.forget(own.id)
        word = Left(node=own.id, epoch=own.run.epoch, incarnation=own.incarnation)
        self._spread.add(word, now)
        self._detection.stop()
        self._departure.begin(word, now, self._detection.probes.next_seq)

    # --- links and registry -------------------------------------------------------------------------------------------

    def _link_up(self, event: LinkUp, now: Instant) -> None:
        node = event.run.node
        if self._members.is_let_go(event.run):
            self._outbox.do(CloseLink(node=node))
            return
        if node == self.own.id:
            if event.run != self.own.run:
                self._own_word.notice_double(event.run, now)
            return
        self._detection.heard_anybody(now)
        said = self._members.admit(node)
        member = self._members.get(node)
        if said is not None and said.run == event.run:
            self._words.hear_alive(said, event.run, now)
        elif member is None or member.run.epoch < event.run.epoch:
            # All else of it comes with its first word; until then this much is enough to be a member.
            alive = Alive(run=event.run, incarnation=0, addresses=event.addresses)
            if self._members.meet(alive, now) is News.JOINED:
                self._words.joined(member, node, now)
        self._contacts.link_up(node, now, is_ours=event.is_ours)
        self._streams.opened(now)
        self._heard(event.run, None, now)
        if event.is_ours:
            self._copies.open_sync(node, now, by_link=True)
        else:
            self._outbox.frame(node, [self._members.word_of(self.own.id)])

    def _link_down(self, event: LinkDown, now: Instant) -> None:
        if event.node is None:
            return
        self._contacts.link_down(event.node, now)
        member = self._members.get(event.node)
        if member is None or not self._members.is_live(event.node):
            return
        if event.why == "refused":
            self._detection.stream_refused(event.node, now)
        elif event.why == "closed":
            self._detection.probe_now(event.node, now)
        elif event.why in ("timeout", "failed"):
            self._streams.failed(event.node, now)

    def _set_registry(self, event: SetRegistry, now: Instant) -> None:
        dropped, admitted = self._members.set_registry(event.nodes, event.parting)
        for node in dropped:
            self._members.forget(node)
            self._outbox.do(CloseLink(node=node))
            self._forget(node, "taken out of the cluster", now)
        for alive in admitted:
            self._words.hear_alive(alive, alive.run, now)

    def _forget(self, node: NodeId, why: str, now: Instant) -> None:
        """It is in the table no more."""
        self._detection.gone(node)
        self._spread.forget(node)
        self._copies.forget(node)
        self._words.forget(node)
        self._outbox.forgotten(node, why, now)
