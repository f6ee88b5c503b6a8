"""A whole cluster in one thread: hosts, daemons and the network between them, on simulated time, from one seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from gpulayer.core.gossip.core import Gossip
from gpulayer.core.gossip.messages import MemberChanged, RecordChanged, SetLeader, SetRegistry
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.address import Address
from gpulayer.model.ids import NodeId, node_id
from gpulayer.model.member import MemberState, Run
from gpulayer.model.trust import GossipKey, KeyRing
from tests.sim.network import Network
from tests.sim.processes import CoreMaker, Disk, Host, Process
from tests.sim.timeline import Timeline

if TYPE_CHECKING:
    from tests.sim.checkers import Checks

PORT = 7451
STORY_LINES = 5000
# Between two looks at what is waited for.
LOOK = 0.02
LARGE, LARGE_LOOK = 150, 1.0


class Cluster:
    """`size` hosts, each running. Chance comes in streams of their own, so that one more draw in one place changes
    nothing elsewhere."""

    def __init__(
        self,
        seed: int | str,
        size: int,
        *,
        profile: Profile | None = None,
        checks: Checks | None = None,
        make_core: CoreMaker = Gossip,
        has_registry: bool = True,
        has_leader: bool = True,
        clock_rates: Callable[[random.Random], float] | None = None,
    ) -> None:
        self.seed = seed
        self.profile = profile or Profile()
        self.make_core = make_core
        self.timeline = Timeline()
        self.chance = self.stream("cluster")
        self.network = Network(self.timeline, self.stream("network"))
        self.id = f"c-{self.chance.getrandbits(64):016x}"
        self.ring = KeyRing(version=1, keys=(self._new_key(),))
        self.hosts: list[Host] = []
        self.registry: set[NodeId] | None = set() if has_registry else None
        self.leader: Host | None = None
        self.has_leader = has_leader
        self.story: deque[tuple[float, str]] = deque(maxlen=STORY_LINES)
        self.change_listeners: list[Callable[[Process, MemberChanged], None]] = []
        self.record_listeners: list[Callable[[Process, RecordChanged], None]] = []
        self.checks = checks
        if checks is not None:
            checks.watch(self)
        rates = self.stream("clock rates")
        for _ in range(size):
            host = self.add_host()
            if clock_rates is not None:
                host.clock.rate = clock_rates(rates)

    def stream(self, use: str) -> random.Random:
        return random.Random(f"{self.seed}/{use}")

    # --- what happened ------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.timeline.now

    def say(self, text: str) -> None:
        self.story.append((self.timeline.now, text))

    def tell_change(self, process: Process, effect: MemberChanged) -> None:
        before, after = effect.before, effect.after
        if before is None or before.state != after.state or before.run != after.run:
            was = "" if before is None else f"{before.state} -> "
            self.say(f"{process}: {self.name_of(after.run)} {was}{after.state} at {after.incarnation}: {effect.text}")
        for listener in self.change_listeners:
            listener(process, effect)

    def tell_record(self, process: Process, effect: RecordChanged) -> None:
        for listener in self.record_listeners:
            listener(process, effect)

    def name_of(self, run: Run) -> str:
        for host in self.hosts:
            if host.disk.node == run.node:
                return f"{host.name}/{run.epoch}"
        return f"{run.node}/{run.epoch}"

    def history(self, host: Host, of: Host) -> str:
        """What `host` remembers of `of`, a line each."""
        if host.process is None:
            return f"{host.name} does not run"
        lines = host.process.gossip.history(of.disk.node)
        return "\n".join(f"  {host.clock.due(at):9.3f} {text}" for at, text in lines)

    # --- hosts --------------------------------------------------------------------------------------------------

    def add_host(self, disk: Disk | None = None) -> Host:
        """A machine more; `disk` is given to clone one."""
        index = len(self.hosts)
        disk = disk or Disk(node=node_id(self.chance.randbytes(8)), ring=self.ring)
        host = Host(self, index, disk, Address(f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}", PORT))
        self.hosts.append(host)
        self.network.attach(host)
        return host

    def start(self, host: Host, seeds: tuple[Address, ...] | None = None) -> Process:
        """Its daemon starts: a new epoch, a new run. `seeds` None: the first three hosts."""
        assert host.process is None, f"{host.name} runs already"
        host.is_on = True
        host.disk.epoch += 1
        chance = self.stream(f"run {host.index} {host.disk.epoch}")
        run = Run(node=host.disk.node, epoch=host.disk.epoch, run_id=chance.getrandbits(64))
        host.process = Process(host, run, chance)
        if self.has_leader and self.leader is None:
            self.leader = host
        self.admit(host.disk.node)
        self.say(f"{host.process}: starts")
        host.process.start(tuple(each.address for each in self.hosts[:3]) if seeds is None else seeds)
        return host.process

    def start_all(self, within: float = 0.5) -> None:
        starts = self.stream("starts")
        for host in self.hosts:
            if host.process is None:
                wait = 0.0 if host.index == 0 else starts.random() * within
                self.timeline.after(wait, self._start_once, host)
        self.run(within + 0.001)

    def _start_once(self, host: Host) -> None:
        if host.process is None:
            self.start(host)

    def kill(self, host: Host) -> None:
        """kill -9 of the daemon; the host stays up and refuses what comes."""
        if host.process is not None:
            self.say(f"{host.process}: is killed")
            host.process.end()

    def power_off(self, host: Host) -> None:
        """Nothing answers any more."""
        self.say(f"{host.name}: loses power")
        host.is_on = False
        if host.process is not None:
            host.process.remember_peers()
            host.process.has_ended = True
            host.process = None

    def wipe(self, host: Host) -> None:
        """Its data directory is gone: the next start is another node. The old one is taken off the registry by hand."""
        self.kill(host)
        self.expel(host.disk.node)
        host.disk = Disk(node=node_id(self.chance.randbytes(8)), ring=self.ring)

    def pause(self, host: Host, seconds: float) -> None:
        if host.process is not None:
            self.say(f"{host.process}: is stopped for {seconds:.2f} s")
            host.process.pause(seconds)

    def suspend(self, host: Host, seconds: float) -> None:
        if host.process is not None:
            self.say(f"{host.process}: its host sleeps for {seconds:.2f} s")
            host.process.suspend(seconds)

    def leave(self, host: Host) -> None:
        if host.process is not None:
            self.say(f"{host.process}: leaves")
            host.process.leave()

    def admit(self, node: NodeId) -> None:
        if self.registry is not None and node not in self.registry:
            self.registry.add(node)
            self._tell_registry()

    def expel(self, node: NodeId) -> None:
        if self.registry is not None and node in self.registry:
            self.registry.remove(node)
            self._tell_registry()

    def _tell_registry(self) -> None:
        assert self.registry is not None
        event = SetRegistry(nodes=frozenset(self.registry))
        for process in self.processes():
            process.tell(event)

    def set_leader(self, host: Host) -> None:
        self.leader = host
        for process in self.processes():
            process.tell(SetLeader(node=host.disk.node))

    def processes(self) -> list[Process]:
        return [host.process for host in self.hosts if host.process is not None]

    # --- keys ---------------------------------------------------------------------------------------------------

    def _new_key(self) -> GossipKey:
        secret = self.chance.randbytes(32)
        return GossipKey(id=int.from_bytes(sha256(secret).digest()[:4], "big"), secret=secret)

    def set_ring(self, ring: KeyRing, at: Host) -> None:
        """As agreed; `at` is the first to have it, and passes it on."""
        self.ring = ring
        assert at.process is not None
        at.process.take_ring(ring)

    def rotation(self) -> tuple[KeyRing, KeyRing, KeyRing]:
        """The rings of a rotation: the new key is installed, then used, then the old one is gone."""
        old, new, version = self.ring.keys[0], self._new_key(), self.ring.version
        return (
            KeyRing(version=version + 1, keys=(old, new), rotation="installing"),
            KeyRing(version=version + 2, keys=(new, old), rotation="using"),
            KeyRing(version=version + 3, keys=(new,)),
        )

    # --- records ------------------------------------------------------------------------------------------------

    def first_record(self, host: Host) -> Mapping[str, bytes]:
        return {"node": f"{host.name}/{host.disk.epoch}".encode().ljust(200, b".")}

    # --- time ---------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self._run_until(self.timeline.now + seconds)

    def _run_until(self, end: float) -> None:
        while self.timeline.now < end:
            if self.checks is None:
                self.timeline.run_until(end)
            else:
                self.timeline.run_until(min(end, self.checks.due_at))
                self.checks.look(self.timeline.now)

    def wait_for(self, is_so: Callable[[], bool], seconds: float, look: float = LOOK) -> float:
        """Runs until `is_so()`, looked at every `look` seconds; how long that took. AssertionError after `seconds`."""
        began = self.timeline.now
        while not is_so():
            assert self.timeline.now - began < seconds, f"not within {seconds:g} s\n{self.tail()}"
            self._run_until(self.timeline.now + look)
        return self.timeline.now - began

    def tail(self, lines: int = 40) -> str:
        return "\n".join(f"  {at:9.3f} {text}" for at, text in list(self.story)[-lines:])

    def settle(self, seconds: float = 30.0) -> float:
        # Each look compares every pair.
        look = LOOK if len(self.hosts) <= LARGE else LARGE_LOOK
        return self.wait_for(lambda: self.disagreement() == "", seconds, look)

    # --- what they hold -----------------------------------------------------------------------------------------

    def state(self, observer: Host, subject: Host) -> MemberState | None:
        """What `observer` holds of `subject`'s node."""
        assert observer.process is not None
        member = observer.process.gossip.member(subject.disk.node)
        return None if member is None else member.state

    def everyone_holds(self, subject: Host, *states: MemberState | None) -> bool:
        """Whether every live daemon but its own holds `subject` in one of these states."""
        return all(
            self.state(host, subject) in states
            for host in self.hosts
            if host.is_live and host.disk.node != subject.disk.node
        )

    def disagreement(self) -> str:
        """The first thing that keeps all live daemons from one view, equal records included; else empty."""
        live = [host for host in self.hosts if host.is_live]
        ids = {host.disk.node for host in live}
        subjects = []
        for host in live:
            assert host.process is not None
            own = host.process.gossip.own
            subjects.append((host, own, host.process.gossip.record(own.id)))
        for observer in live:
            assert observer.process is not None
            gossip = observer.process.gossip
            for subject, own, record in subjects:
                if subject is observer:
                    continue
                member = gossip.member(own.id)
                if member is None:
                    return f"{observer.name} does not know {subject.name}"
                held = (member.run, member.state, member.incarnation, member.flags, member.version)
                true = (own.run, "alive", own.incarnation, own.flags, own.version)
                if held != true:
                    return f"{observer.name} holds {subject.name} as {held}, it is {true}"
                if gossip.record(own.id) != record:
                    return f"{observer.name} holds another record of {subject.name}"
            for node, member in gossip.members().items():
                if node not in ids and member.state in ("alive", "suspect"):
                    return f"{observer.name} holds {self.name_of(member.run)} as {member.state}, it does not run"
        return ""
