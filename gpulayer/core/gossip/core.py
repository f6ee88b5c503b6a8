"""Gossip: who is in the cluster and alive, and what each says of itself, without anybody who would have to know all.

One machine for one node: events in, effects out, nothing of time or chance of its own. It is made of smaller ones:
Members (the table), Detection (probes and suspicions), Spread (rumours), Copies (records and comparison of tables),
Contacts (looking for others, links), Departure (leaving). Here is what each kind of message and event means to them.

Late wake: whoever was stopped, or had its process stand still, has missed answers. Every step first looks whether it
comes later than was asked for, and then blames nobody for what could not be read (Lifeguard §2 has the reason).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import assert_never

from gpulayer.core.base import Tick
from gpulayer.core.gossip.contacts import Contacts
from gpulayer.core.gossip.copies import Copies
from gpulayer.core.gossip.departure import Departure
from gpulayer.core.gossip.detection import Detection
from gpulayer.core.gossip.health import Health
from gpulayer.core.gossip.members import Accusation, Members, News
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
from gpulayer.core.gossip.profile import Profile
from gpulayer.core.gossip.records import Records
from gpulayer.core.gossip.spread import Spread
from gpulayer.core.gossip.suspicion import Suspicions
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId
from gpulayer.model.member import DUPLICATE, RESTARTING, Member, Run
from gpulayer.model.units import NEVER, Instant

# Accusations of nodes that are not known here: kept for when they are, the oldest goes first.
STRANGERS_MAX = 64
# How often a subject is told by us what is held against it, beside what its own packets are answered with.
TELL_INTERVAL = 0.2


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
        self._strangers: OrderedDict[NodeId, Accusation] = OrderedDict()
        self._told: dict[NodeId, Instant] = {}
        """When a subject was last told by us that it is accused."""
        self._gossip_at: Instant = Instant(0.0)
        """Not before: rumours alone make packets at this pace."""
        self._due: Instant = NEVER
        """The deadline as it was given after the last step."""
        self._awake_at: Instant = Instant(0.0)
        """Lateness before this has been dealt with."""
        self._now: Instant = Instant(0.0)
        self._heard_at: Instant = Instant(0.0)

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
        return self._heard_at

    @property
    def is_isolated(self) -> bool:
        """Others are known, or should be found, and nothing has been heard from any of them for a while."""
        if not len(self._members.all) > 1 and not self._contacts.has_seeds:
            return False
        if self._contacts.is_alone:
            return True
        return self._now - self._heard_at > self._profile.suspicion_min + self._profile.probe_interval

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
            self._contacts,
            self._departure,
        ):
            part.check()
        assert len(self._strangers) <= STRANGERS_MAX
        assert not self._strangers.keys() & self._members.all.keys()

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
                self._set_self(event, now)
            case SetRegistry(nodes=nodes):
                self._set_registry(nodes, now)
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
            self._speak(now)
            self._copies.open_sync(self._outbox.some_live(1)[0], now)

    # --- packets ------------------------------------------------------------------------------------------------------

    def _receive(self, event: Received, now: Instant) -> None:
        source, at = event.source, event.at
        if self._members.is_removed(source.node):
            self._outbox.counters["packets_of_removed"] += 1
            return
        if source.node == self.own.id:
            if source != self.own.run:
                self._notice_double(source, now)
            return
        self._heard_at = now
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
        if member.state in ("dead", "suspect"):
            self._tell_subject(member, at, now, by_link=at is None)

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
                self._hear_alive(message, source, now)
            case Suspect() | Dead() | Left():
                self._hear_accusation(message, source, at, now)
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
                self._hear_members(message, source, now)
            case _:
                assert_never(message)

    def _headline(self, run: Run, version: int, source: NodeId, now: Instant) -> None:
        """A probe says, by the way, how far its sender's record is."""
        member = self._members.get(run.node)
        if member is not None and member.run.epoch == run.epoch and version > member.version[1]:
            self._copies.hear_version(run.node, run.epoch, (member.version[0], version), source, now)

    # --- words about members ------------------------------------------------------------------------------------------

    def _hear_alive(self, alive: Alive, source: Run, now: Instant, *, is_passed_on: bool = True) -> None:
        node = alive.run.node
        if node == self.own.id:
            self._hear_own_word(alive, now)
            return
        before = self._members.get(node)
        news = self._members.hear_alive(alive, now)
        match news:
            case News.JOINED:
                self._joined(before, node, now)
            case News.CHANGED:
                assert before is not None
                self._detection.alive_again(node)
                text = (
                    "alive" if before.state == "alive" else f"alive again: it has answered to being held {before.state}"
                )
                self._outbox.changed(before, node, f"{text} (incarnation {alive.incarnation})", now)
                if before.state not in ("alive", "suspect"):
                    self._detection.joined(node, now)
            case News.STALE:
                member = self._members.all[node]
                if source != alive.run:
                    self._tell_subject(member, None, now)
            case News.CLONE:
                assert before is not None
                self._notice_clone(before, alive, source, now)
                return
            case News.FULL:
                self._outbox.warn("members_too_many", "", f"the table is full: {node} is not taken in", now)
                return
            case News.OLD | News.PENDING:
                self._outbox.counters[f"words_{news.name.lower()}"] += 1
                return
            case News.KNOWN:
                pass
            case _:
                assert_never(news)
        if news in (News.JOINED, News.CHANGED) and is_passed_on:
            self._spread.add(self._members.word_of(node), now)
        self._copies.hear_version(node, alive.run.epoch, (alive.gc_version, alive.version), source.node, now)
        if news is News.JOINED and (stranger := self._strangers.pop(node, None)):
            self._hear_accusation(stranger, source, None, now)

    def _joined(self, before: Member | None, node: NodeId, now: Instant) -> None:
        """Somebody new; or a new run, which ends the old one whatever its state was."""
        after = self._members.all[node]
        if before is not None:
            self._detection.gone(node)
            self._spread.forget(node)
            self._told.pop(node, None)
            if before.state in ("alive", "suspect"):
                text = f"replaced by its epoch {after.run.epoch}"
                self._outbox.tell(node, text, now)
                self._outbox.do(MemberChanged(before=before, after=replace(before, state="left"), text=text))
        self._outbox.changed(None, node, f"joined (epoch {after.run.epoch})", now)
        self._detection.joined(node, now)
        self._copies.joined(now)

    def _hear_accusation(self, word: Accusation, source: Run, at: Address | None, now: Instant) -> None:
        if word.node == self.own.id:
            self._hear_of_ourselves(word, source, at, now)
            return
        member = self._members.get(word.node)
        if member is None:
            self._keep_stranger(word, now)
            return
        if word.epoch != member.run.epoch or self._members.accuses_too_far(word, member):
            self._outbox.counters["accusations_refused"] += word.epoch >= member.run.epoch
            return
        if isinstance(word, Left):
            if member.state != "left":
                self._left(member, word, now)
        elif self._members.is_live(word.node) and word.incarnation >= member.incarnation:
            if isinstance(word, Dead):
                self._detection.hear_dead(word, now)
            else:
                self._detection.hear_suspect(word, now)

    def _left(self, before: Member, word: Left, now: Instant) -> None:
        self._detection.gone(before.id)
        self._members.leave(before.id, word.incarnation, now)
        self._spread.add(word, now)
        self._outbox.changed(before, before.id, "left by its own will", now)
        self._outbox.do(CloseLink(node=before.id))

    def _keep_stranger(self, word: Accusation, now: Instant) -> None:
        """Passed on once, so that it reaches a subject that others know, and answers."""
        if not self._members.is_admitted(word.node) or self._strangers.get(word.node) == word:
            return
        is_first = word.node not in self._strangers
        self._strangers[word.node] = word
        if len(self._strangers) > STRANGERS_MAX:
            self._strangers.popitem(last=False)
        if is_first:
            for node in self._outbox.some_live(1):
                self._outbox.datagram(node, [word], now)

    def _hear_members(self, told: SyncMembers, source: Run, now: Instant) -> None:
        """A merge is no probe: who is gone there becomes a suspect here, and may refute that."""
        for alive, state, _ in told.members:
            self._hear_alive(alive, source, now, is_passed_on=state == "alive")
            member = self._members.get(alive.run.node)
            if member is None or member.run != alive.run or state == "alive" or member.id == self.own.id:
                continue
            if state == "left":
                word = Left(node=member.id, epoch=member.run.epoch, incarnation=alive.incarnation)
                self._hear_accusation(word, source, None, now)
            elif self._members.is_live(member.id) and alive.incarnation >= member.incarnation:
                suspect = Suspect(
                    node=member.id,
                    epoch=member.run.epoch,
                    incarnation=alive.incarnation,
                    cause="timeout",
                    reporter=source.node,
                )
                self._detection.hear_suspect(suspect, now, merged=state)

    def _tell_subject(self, member: Member, at: Address | None, now: Instant, *, by_link: bool = False) -> None:
        """It is held to be suspect or dead, and seems not to know."""
        if now < self._told.get(member.id, Instant(-TELL_INTERVAL)) + TELL_INTERVAL:
            return
        self._told[member.id] = now
        if by_link:
            self._outbox.frame(member.id, [])
        else:
            self._outbox.datagram(member.id, [], now, at)

    # --- ourselves ----------------------------------------------------------------------------------------------------

    def _speak(self, now: Instant, *, above: int = -1, flags: int | None = None, **said: object) -> None:
        """A new word about ourselves, which overrides whatever is said at the present incarnation or at `above`."""
        own = self.own
        incarnation = max(own.incarnation, above) + 1
        flags = own.flags if flags is None else flags
        self._members.set_own(replace(own, incarnation=incarnation, flags=flags, **said))  # type: ignore[arg-type]
        self._spread.add(self._members.word_of(own.id), now)

    def _hear_of_ourselves(self, word: Accusation, source: Run, at: Address | None, now: Instant) -> None:
        own = self.own
        if own.state == "left":
            return
        if word.epoch > own.run.epoch:
            self._notice_double(Run(own.id, word.epoch, 0), now)
            return
        if self._members.accuses_too_far(word, own):
            self._outbox.counters["accusations_refused"] += 1
            return
        if word.epoch == own.run.epoch and word.incarnation >= own.incarnation:
            self._health.worse()
            self._outbox.counters["refutations"] += 1
            self._outbox.tell(own.id, f"accused ({type(word).__name__.lower()}) by {source.node}, and refuted it", now)
            self._speak(now, above=word.incarnation)
            if not isinstance(word, Left) and word.reporter != source.node and self._members.is_live(word.reporter):
                self._outbox.datagram(word.reporter, [self._members.word_of(own.id)], now)
        # The way it came: where datagrams are blocked, the answer is else never read.
        if at is None:
            self._outbox.frame(source.node, [self._members.word_of(own.id)])
        else:
            self._outbox.send(source.node, [self._members.word_of(own.id)], now, at)

    def _hear_own_word(self, alive: Alive, now: Instant) -> None:
        own = self.own
        if alive.run.epoch >= own.run.epoch and alive.run != own.run:
            self._notice_double(alive.run, now)
        elif alive.run == own.run:
            self._copies.outbid((alive.gc_version, alive.version), now)
            if alive.incarnation > own.incarnation and own.state == "alive":
                # Nobody but us makes these: a copy of this process does.
                self._speak(now, above=alive.incarnation)

    def _notice_double(self, other: Run, now: Instant) -> None:
        own = self.own
        text = f"another daemon uses this node's identity {own.id} (its epoch {other.epoch}, ours {own.run.epoch})"
        self._outbox.warn("duplicate_id", own.id, text, now)
        if not own.flags & DUPLICATE and own.state == "alive":
            self._outbox.tell(own.id, text, now)
            self._speak(now, flags=own.flags | DUPLICATE)

    def _notice_clone(self, held: Member, alive: Alive, source: Run, now: Instant) -> None:
        """Two runs of one id and epoch: each should know of the other, and nothing may be placed on either."""
        if self._members.mark(held.id, DUPLICATE):
            self._outbox.changed(held, held.id, "two runs claim its identity", now)
        self._outbox.warn("duplicate_id", held.id, f"two daemons claim to be {held.id}", now)
        if now < self._told.get(held.id, Instant(-TELL_INTERVAL)) + TELL_INTERVAL:
            return
        self._told[held.id] = now
        self._outbox.datagram(held.id, [alive], now)
        for address in alive.addresses[:1]:
            self._outbox.datagram(held.id, [self._members.word_of(held.id)], now, address)

    def _set_self(self, event: SetSelf, now: Instant) -> None:
        own = self.own
        flags = (own.flags | event.flags_on) & ~event.flags_off
        said = replace(
            own,
            flags=flags,
            addresses=own.addresses if event.addresses is None else event.addresses[:4],
            key_ids=own.key_ids if event.key_ids is None else event.key_ids,
        )
        if said == own:
            return
        self._speak(now, flags=said.flags, addresses=said.addresses, key_ids=said.key_ids)
        self._outbox.changed(own, own.id, "said anew what it is", now)
        if event.flags_on & RESTARTING:
            # There may be no next tick.
            self._outbox.gossip(now)

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
        if self._members.is_removed(node):
            return
        if node == self.own.id:
            if event.run != self.own.run:
                self._notice_double(event.run, now)
            return
        self._heard_at = now
        said = self._members.admit(node)
        member = self._members.get(node)
        if said is not None and said.run == event.run:
            self._hear_alive(said, event.run, now)
        elif member is None or member.run.epoch < event.run.epoch:
            # All else of it comes with its first word; until then this much is enough to be a member.
            alive = Alive(run=event.run, incarnation=0, addresses=event.addresses)
            if self._members.meet(alive, now) is News.JOINED:
                self._joined(member, node, now)
        self._contacts.link_up(node, now, is_ours=event.is_ours)
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

    def _set_registry(self, nodes: frozenset[NodeId] | None, now: Instant) -> None:
        dropped, admitted = self._members.set_registry(nodes)
        for node in dropped:
            self._members.forget(node)
            self._outbox.do(CloseLink(node=node))
            self._forget(node, "taken out of the cluster", now)
        for alive in admitted:
            self._hear_alive(alive, alive.run, now)

    def _forget(self, node: NodeId, why: str, now: Instant) -> None:
        """It is in the table no more."""
        self._detection.gone(node)
        self._spread.forget(node)
        self._copies.forget(node)
        self._told.pop(node, None)
        self._outbox.forgotten(node, why, now)
