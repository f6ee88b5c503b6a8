"""What must hold of gossip whatever happens, checked while a cluster is simulated.

What an event touched is checked after it; what takes a look at everything, once a simulated second. A broken promise
raises Broken, which names the promise and tells the story of the node in question.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpulayer.core.gossip.messages import (
    Alive,
    Dead,
    Delta,
    GossipEffect,
    GossipEvent,
    Left,
    MemberChanged,
    MemberForgotten,
    Message,
    Newer,
    Ping,
    Received,
    SendDatagram,
    SetOwn,
    Suspect,
    Vouch,
)
from gpulayer.core.gossip.suspicion import VOUCH_ECHO, VOUCH_INTERVAL
from gpulayer.model.ids import NodeId
from gpulayer.model.member import Member, Run
from gpulayer.model.record import RECORD_BYTES_MAX
from gpulayer.model.units import Instant
from gpulayer.wire.datagram import OVERHEAD
from gpulayer.wire.gate import Opened

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.processes import Host, Process

RANK = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}
LOOK_EVERY = 1.0
# A node that was just woken knows too little to bury anybody.
AFTER_PAUSE = 0.5
# Averaged over BUDGET_WINDOW seconds; a table sync or a join is allowed its peak.
BUDGET_WINDOW = 20
BYTES_PER_SECOND_MAX = 150_000
PACKETS_PER_SECOND_MAX = 400
# What is told again after so long is said anew, not passed on still.
RUMOUR_LIFE = 20.0
# A queue of rumours is about members and their records: not more than some for each.
SENDS_PER_RUMOUR = 4


class Broken(AssertionError):
    """A promise of the protocol, by what it says, and how it was broken."""


@dataclass(slots=True)
class _Owned:
    """What the owner of a run has said of itself so far."""

    incarnation: int = 0
    version: tuple[int, int] = (0, 0)
    key_versions: dict[str, int] = field(default_factory=dict)
    values: dict[str, bytes | None] = field(default_factory=dict)
    ever: set[tuple[str, bytes]] = field(default_factory=set)


@dataclass(slots=True)
class _Held:
    """What an observer's subscribers have been told of a node."""

    member: Member
    suspect_since: Instant
    """On the observer's clock."""


class Checks:
    def __init__(self, bytes_per_second_max: int = BYTES_PER_SECOND_MAX) -> None:
        self.due_at = LOOK_EVERY
        self.bytes_per_second_max = bytes_per_second_max
        self.excused_until: dict[int, float] = {}
        """Hosts that may be thought dead although they live, by index."""
        self.all_excused_until = 0.0
        self._cluster: Cluster | None = None
        self._owned: dict[Run, _Owned] = {}
        self._held: dict[Process, dict[NodeId, _Held]] = {}
        self._left: set[Run] = set()
        self._buried: set[tuple[Run, int]] = set()
        self._woken_at: dict[Process, float] = {}
        self._sends: dict[tuple[Process, Message, int], int] = {}
        self._asked: dict[Process, int] = {}
        """Packets and frames that a word of the receiver about itself answers."""
        self._looked_at: dict[tuple[Process, NodeId], tuple[Run, int, tuple[int, int]]] = {}
        self._spent: dict[int, deque[tuple[int, int]]] = {}

    def watch(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    def excuse(self, hosts: Sequence[int], until: float) -> None:
        """These may be thought dead until then."""
        if len(hosts) >= len(self.cluster.hosts):
            self.all_excused_until = max(self.all_excused_until, until)
        for host in hosts:
            self.excused_until[host] = max(self.excused_until.get(host, 0.0), until)

    # --- after each event ---------------------------------------------------------------------------------------

    def stepped(self, process: Process, event: GossipEvent, effects: Sequence[GossipEffect]) -> None:
        if isinstance(event, SetOwn):
            self._note_own_values(process, event)
        self._note_own(process)
        if isinstance(event, Received) and any(_asks_for_own_word(message, process) for message in event.messages):
            self._asked[process] = self._asked.get(process, 0) + 1
        only_records = (
            isinstance(event, Received)
            and bool(event.messages)
            and all(isinstance(message, Delta) for message in event.messages)
        )
        for effect in effects:
            match effect:
                case MemberChanged():
                    self._changed(process, effect, only_records)
                case MemberForgotten(node=node):
                    self._held.get(process, {}).pop(node, None)
                case SendDatagram(to=to, messages=messages):
                    self._sent(process, to, messages)

    def injected(self, process: Process, data: bytes, opened: Opened) -> None:
        """What nobody sent just now is without effect and without an answer, save the question who is there."""
        promise = "a replayed or damaged packet changes nothing"
        if opened.received:
            raise self._broken(promise, process, None, f"it was taken: {opened.received}")
        if len(opened.replies) > 1 or any(len(reply) > len(data) + OVERHEAD for reply in opened.replies):
            raise self._broken(promise, process, None, "it was answered with more than one question")

    def _note_own_values(self, process: Process, event: SetOwn) -> None:
        """One key at a time, so that each has a version of its own that is known here."""
        assert len(event.values) == 1, "the simulator sets one key at a time"
        owned = self._owned.setdefault(process.run, _Owned())
        version = process.gossip.own.version
        for key, value in event.values.items():
            if version != owned.version and owned.values.get(key) != value:
                owned.key_versions[key] = version[1]
                owned.values[key] = value
                if value is not None:
                    owned.ever.add((key, value))

    def _note_own(self, process: Process) -> None:
        owned = self._owned.get(process.run)
        own = process.gossip.own
        if owned is None:
            owned = self._owned[process.run] = _Owned()
        if own.incarnation < owned.incarnation or own.version < owned.version:
            raise self._broken(
                "what a node says of itself never goes back", process, process.host, f"{own} after {owned}"
            )
        owned.incarnation, owned.version = own.incarnation, own.version

    def _changed(self, process: Process, effect: MemberChanged, only_records: bool) -> None:
        after = effect.after
        if after.run == process.run:
            return
        subject = self._host_of(after.run)
        held = self._held.setdefault(process, {})
        before = held.get(after.id)
        told = None if before is None else before.member
        if effect.before is None:
            is_next = told is None or (told.run.epoch < after.run.epoch and told.state in ("dead", "left"))
        else:
            is_next = told is not None and _key(effect.before) == _key(told)
        if not is_next:
            raise self._broken(
                "a subscriber sees every step, joined first", process, subject, f"{effect.before} where {told} was told"
            )
        self._check_owner(process, subject, after)
        if told is not None:
            self._check_order(process, subject, told, after)
        if only_records and told is not None and (told.run, told.state) != (after.run, after.state):
            raise self._broken("a record says nothing about life", process, subject, f"{told.state} -> {after.state}")
        now = process.local_now
        since = now
        if after.state == "suspect" and told is not None and told.state == "suspect":
            assert before is not None
            since = now if told.incarnation != after.incarnation or told.run != after.run else before.suspect_since
        if after.state == "left":
            self._left.add(after.run)
        if after.state == "dead" and (told is None or told.state != "dead"):
            self._died(process, subject, before, after)
        if before is not None and after.state == "dead":
            since = before.suspect_since
        held[after.id] = _Held(after, since)

    def _check_owner(self, process: Process, subject: Host | None, after: Member) -> None:
        owned = self._owned.get(after.run)
        if owned is None:
            raise self._broken("a member has been a run", process, subject, f"nobody ever was {after.run}")
        if after.incarnation > owned.incarnation or after.version > owned.version:
            raise self._broken(
                "only the owner raises its incarnation and its version",
                process,
                subject,
                f"{after.incarnation}, {after.version} held; {owned.incarnation}, {owned.version} said",
            )

    def _check_order(self, process: Process, subject: Host | None, told: Member, after: Member) -> None:
        if after.run.epoch < told.run.epoch:
            raise self._broken("an older epoch changes nothing", process, subject, f"{told.run} -> {after.run}")
        if told.run != after.run:
            return
        if told.state == "left" and after.state != "left":
            raise self._broken("who left does not come back in that epoch", process, subject, f"left -> {after.state}")
        if (after.incarnation, RANK[after.state]) < (told.incarnation, RANK[told.state]):
            raise self._broken(
                "a member's state never goes back at one incarnation",
                process,
                subject,
                f"{told.state} at {told.incarnation} -> {after.state} at {after.incarnation}",
            )

    def _died(self, process: Process, subject: Host | None, before: _Held | None, after: Member) -> None:
        cluster = self.cluster
        is_first = (after.run, after.incarnation) not in self._buried
        self._buried.add((after.run, after.incarnation))
        if is_first and after.cause == "silent":
            least = cluster.profile.suspicion_bounds(1)[0]
            waited = (
                0.0 if before is None or before.member.state != "suspect" else process.local_now - before.suspect_since
            )
            if waited < least - 0.01:
                raise self._broken(
                    "a suspicion runs for its whole time, anew at each incarnation",
                    process,
                    subject,
                    f"declared dead {waited:.3f} s after it was suspected at {after.incarnation}; {least:g} s at least",
                )
        if subject is None or subject.process is None or subject.process.run != after.run or not subject.is_on:
            return
        if subject.process.departed is not None or subject.process.is_leaving:
            return
        now = cluster.timeline.now
        if now < self.all_excused_until or now < self.excused_until.get(subject.index, 0.0):
            return
        raise self._broken(
            "a node that is there, and is heard by most, is never thought dead",
            process,
            subject,
            f"{process} holds {subject.name} as dead ({after.cause})",
        )

    def _sent(self, process: Process, to: NodeId, messages: Sequence[Message]) -> None:
        """No rumour echoes: one node tells one rumour so many times and not more."""
        size = len(self.cluster.hosts)
        times = self.cluster.profile.transmissions(size)
        for message in messages:
            if not isinstance(message, Alive | Suspect | Dead | Left | Newer | Vouch):
                continue
            most = SENDS_PER_RUMOUR * times + 8 * size
            if isinstance(message, Alive) and message.run == process.run:
                member = process.gossip.member(to)
                if member is None or member.heard_at == 0.0:
                    continue  # who has never heard of it is told who it is
                # An answer to whoever accuses it, one for each such packet.
                most += self._asked.get(process, 0)
            elif isinstance(message, Vouch):
                # It is said anew while it lasts.
                sayings = RUMOUR_LIFE / (VOUCH_INTERVAL if message.witness == process.run.node else VOUCH_ECHO)
                most += int(sayings) * times
            key = (process, message, int(self.cluster.now / RUMOUR_LIFE))
            self._sends[key] = count = self._sends.get(key, 0) + 1
            if count > most:
                raise self._broken("a rumour dies out", process, None, f"told {count} times: {message}")

    # --- once a second ------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        if now < self.due_at:
            return
        self.due_at += LOOK_EVERY
        cluster = self.cluster
        size_max = cluster.profile.packet_bytes_max
        if cluster.network.packet_bytes_max > size_max:
            raise Broken(
                f"no packet is larger than {size_max} bytes: one of {cluster.network.packet_bytes_max} was sent"
            )
        for process in cluster.processes():
            process.gossip.check()
            process.gate.check()
            self._check_records(process)
        self._check_budget()
        if len(self._sends) > 200_000:
            self._sends.clear()

    def _check_records(self, process: Process) -> None:
        """What is held of a record is what its owner had once, whole up to the version of the copy."""
        for node, member in process.gossip.members().items():
            owned = self._owned.get(member.run)
            if owned is None or node == process.run.node:
                continue
            epoch, _, version = process.gossip._records.version_of(node)
            if epoch != member.run.epoch or version == 0:
                continue
            # Neither the copy nor the original has changed since the last look.
            looked_at = (member.run, version, owned.version)
            if self._looked_at.get((process, node)) == looked_at:
                continue
            self._looked_at[process, node] = looked_at
            record = process.gossip.record(node)
            if sum(map(len, record.values())) > RECORD_BYTES_MAX:
                raise self._broken(
                    "what is held of a record is bounded", process, self._host_of(member.run), "too large"
                )
            for key, value in record.items():
                if (key, value) not in owned.ever:
                    raise self._broken(
                        "a record holds what its owner wrote",
                        process,
                        self._host_of(member.run),
                        f"{key} is not its own",
                    )
            for key, at in owned.key_versions.items():
                if at <= version and record.get(key) != owned.values[key]:
                    raise self._broken(
                        "a copy of a record is whole up to its version",
                        process,
                        self._host_of(member.run),
                        f"{key} of version {at} is not in a copy of version {version}",
                    )

    def _check_budget(self) -> None:
        for host in self.cluster.hosts:
            spent = self._spent.setdefault(host.index, deque(maxlen=BUDGET_WINDOW + 1))
            spent.append((host.bytes_sent, host.packets_sent))
            if len(spent) <= BUDGET_WINDOW:
                continue
            size, packets = ((spent[-1][i] - spent[0][i]) / BUDGET_WINDOW for i in (0, 1))
            if size > self.bytes_per_second_max or packets > PACKETS_PER_SECOND_MAX:
                raise Broken(
                    f"a node keeps within its budget: {host.name} sent {size:.0f} bytes and {packets:.0f} packets a "
                    f"second for {BUDGET_WINDOW} s\n{self.cluster.tail()}"
                )

    # --- saying it ----------------------------------------------------------------------------------------------

    def _host_of(self, run: Run) -> Host | None:
        """The host of that very run where it lives, else any that has the node."""
        having = [host for host in self.cluster.hosts if host.disk.node == run.node]
        for host in having:
            if host.process is not None and host.process.run == run:
                return host
        return having[0] if having else None

    def _broken(self, promise: str, process: Process, subject: Host | None, how: str) -> Broken:
        cluster = self.cluster
        lines = [f"at {cluster.now:.3f} s: {promise}: {how}"]
        if subject is not None:
            lines.append(f"what {process} remembers of {subject.name}:\n{cluster.history(process.host, subject)}")
        lines.append(f"the last that happened:\n{cluster.tail()}")
        return Broken("\n".join(lines))


def _asks_for_own_word(message: Message, process: Process) -> bool:
    """Whether it accuses the process, or means another that was there before."""
    if isinstance(message, Suspect | Dead | Left):
        return message.node == process.run.node
    return isinstance(message, Ping) and (message.target, message.epoch) != (process.run.node, process.run.epoch)


def _key(member: Member) -> tuple[Run, int, str]:
    return member.run, member.incarnation, member.state
