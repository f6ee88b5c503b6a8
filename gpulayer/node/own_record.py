"""What this node publishes of itself: what it has, what runs on it, how busy it is.

Into gossip for everybody, and to the leader's plans where it leads itself. A change is told at once, and
again with the next one where gossip could not take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from gpulayer import __version__
from gpulayer.model.address import Address
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.node import Capabilities
from gpulayer.model.record import Load, NodeFacts, NodeRecord, ReplicaRecord
from gpulayer.model.replica import ReplicaStatus
from gpulayer.node.config import Config
from gpulayer.node.place import Place
from gpulayer.node.voting import Voting
from gpulayer.runtime.accelerators.devices import Devices
from gpulayer.runtime.accelerators.nvml import PciGpu
from gpulayer.runtime.accelerators.survey import cards_of_other_vendors
from gpulayer.runtime.host import Host
from gpulayer.runtime.load import LoadMeter
from gpulayer.runtime.watch import Watch
from gpulayer.wire.record import changes, entries_of

# A change of the record waits so long for others that come with it: a replica's start is three within milliseconds.
PUBLISH_SECONDS = 0.02
LOAD_SECONDS = 10.0


class OwnRecord:
    """`run` it; whoever changes something of it calls `say`."""

    def __init__(
        self,
        *,
        node: NodeId,
        config: Config,
        data_dir: Path,
        host: Host,
        cards: list[PciGpu],
        devices: Devices,
        statuses: Callable[[], Mapping[AttemptId, ReplicaStatus]],
        place: Place,
        on_said: Callable[[], None],
    ) -> None:
        """`cards`: that the kernel sees. `statuses`: of what runs here. `on_said`: the record may have changed."""
        self.api_address: Address | None = None
        """Where this node serves its API to others."""
        self._node, self._config, self._data_dir = node, config, data_dir
        self._host, self._cards, self._devices = host, cards, devices
        self._statuses, self._place, self._on_said = statuses, place, on_said
        self._load: Load | None = None
        self._said: Watch[int] = Watch(0)

    def say(self) -> None:
        """It may have changed."""
        self._said.set(self._said.value + 1)
        self._on_said()

    def capabilities(self) -> Capabilities:
        host, inventory = self._host, self._devices.inventory
        return Capabilities(
            accelerators=inventory.accelerators,
            cpus_milli=self._config.cpus_milli or host.cpus_milli,
            memory_mib=self._config.memory_mib or host.memory_mib,
            labels=self._config.labels,
            undetected=(
                *host.undetected,
                *inventory.undetected,
                *cards_of_other_vendors(self._cards, inventory.accelerators),
            ),
            gpu_detect=inventory.gpu_detect,
            # The module's own version, where the library does not tell: after an upgrade they may differ.
            drivers=tuple(sorted({**dict(host.drivers), **dict(inventory.drivers)}.items())),
            disk_mib=host.disk_mib,
            gpus_excluded=len(inventory.excluded),
            numa=host.numa,
        )

    def facts(self) -> NodeFacts:
        return NodeFacts(
            name=self._config.name,
            advertise=self._config.advertise,
            capabilities=self.capabilities(),
            api=self.api_address,
            gpulayer_version=__version__,
            is_voter=self._place.is_voter,
            warnings=self._devices.warnings,
        )

    def now(self) -> NodeRecord:
        replicas = {}
        orders = self._place.orders
        for attempt, status in self._statuses().items():
            order = orders.get(attempt)
            if order is None:
                continue  # a leftover that is being ended
            replicas[attempt] = ReplicaRecord(
                status=status,
                job_name=order.job_name,
                kind=order.spec.kind,
                revision=order.assignment.revision,
                devices=order.assignment.devices,
                cpus_milli=order.assignment.cpus_milli,
                memory_mib=order.assignment.memory_mib,
            )
        return NodeRecord(facts=self.facts(), load=self._load, replicas=replicas)

    async def run(self) -> None:
        """Publishes what has changed. For good."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._measure_load)
            seen = -1
            while True:
                seen = await self._said.wait_for(lambda value, seen=seen: value != seen)  # type: ignore[misc]
                self._publish()
                self.tell_leader()
                await trio.sleep(PUBLISH_SECONDS)

    def tell_leader(self) -> None:
        """Where this node leads itself its plans go by the record, which no gossip brings."""
        if isinstance(self._place.half, Voting):
            self._place.half.node_said(self._node, self.facts(), frozenset(self._statuses()), is_heard=True)

    def _publish(self) -> None:
        mesh = self._place.mesh
        if mesh is None:
            return
        record = self.now()
        entries = entries_of(facts=record.facts, load=record.load, replicas=record.replicas.values())
        # Against what gossip took, so that what was too large once is tried again.
        changed = changes(mesh.gossip.record(self._node), entries)
        if changed:
            mesh.publish(changed)

    async def _measure_load(self) -> None:
        meter = LoadMeter(self._data_dir)
        while True:
            await trio.sleep(LOAD_SECONDS)
            load = meter.look()
            if load != self._load:
                self._load = load
                self.say()
