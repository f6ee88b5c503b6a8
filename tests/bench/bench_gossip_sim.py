"""How fast and how dear gossip is, on simulated time: python -m tests.bench.bench_gossip_sim [what …] [options].

what: power (a host loses power), kill (kill -9 of a daemon), bytes (idle; one phase change a second; starved and loss),
record (a change at everybody), join (all started together), heal (a partition), hours (false deaths, for long). All of
them where none is named. Every number is of the product's core, codec and sealing; only the network and the clock are
simulated: 0.5 to 1.5 ms of latency, 1 % loss unless a row says otherwise.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpulayer.core.gossip.messages import RecordChanged
from tests.sim.cluster import Cluster
from tests.sim.faults import Partition, Starve
from tests.sim.processes import Host, Process
from tests.sim.watch import Opinions, first, last_of_each, percentile

KEY = "r/j-aaaaaaaaaa.0.1"


def settled(seed: int, size: int, loss: float = 0.01, idle: float = 5.0) -> Cluster:
    cluster = Cluster(seed, size)
    cluster.start_all(within=1.0 + size / 100)
    cluster.settle(120.0)
    cluster.network.weather.loss = loss
    cluster.run(idle)
    return cluster


def row(name: str, size: int, values: list[float], unit: str, node_seconds: float, spent: float) -> None:
    """Median, p99 and spread of all values, and what it took: simulated node-seconds, and as many per second of CPU."""
    print(
        f"{name:44} N={size:<5} p50 {percentile(values, 0.5):7.3f}  p99 {percentile(values, 0.99):7.3f}  "
        f"{min(values):.3f}-{max(values):.3f} {unit:5} of {len(values)}  "
        f"{node_seconds:.0f} node-seconds, {node_seconds / max(spent, 1e-9):.0f}/s",
        flush=True,
    )


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    began = time.process_time()
    yield lambda: time.process_time() - began


def deaths(size: int, times: int, seed: int, end: Callable[[Cluster, Host], None], name: str) -> None:
    """One after another in one cluster; each host is started again before the next."""
    cluster = settled(seed, size)
    began_at, suspected, everywhere, each, false = cluster.now, [], [], [], 0
    chance = cluster.stream("victims")
    with timed() as spent:
        for _ in range(times):
            opinions = Opinions(cluster)
            host = cluster.hosts[chance.randrange(1, size)]
            cluster.run(chance.random())
            began = cluster.now
            end(cluster, host)
            cluster.wait_for(lambda host=host: cluster.everyone_holds(host, "dead"), 60.0)  # type: ignore[misc]
            cluster.run(0.1)
            found = opinions.of(host.disk.node, "dead", since=began)
            suspected.append(first(opinions.of(host.disk.node, "suspect", "dead", since=began)) - began)
            everywhere.append(last_of_each(found) - began)
            each += [opinion.at - began for opinion in found]
            false += len(opinions.false_deaths())
            cluster.change_listeners.clear()
            cluster.start(host)
            cluster.settle(60.0)
            cluster.run(2.0)
        node_seconds = (cluster.now - began_at) * size
        row(f"{name}: first suspicion", size, suspected, "s", node_seconds, spent())
        row(f"{name}: dead at each observer", size, each, "s", node_seconds, spent())
        row(f"{name}: dead at every observer", size, everywhere, "s", node_seconds, spent())
    print(f"{'':44} false deaths: {false}")


def measured_bytes(cluster: Cluster, seconds: float) -> list[float]:
    before = [host.bytes_sent for host in cluster.hosts]
    cluster.run(seconds)
    return [(host.bytes_sent - was) / seconds for host, was in zip(cluster.hosts, before, strict=True)]


def cost(size: int, seed: int) -> None:
    with timed() as spent:
        cluster = settled(seed, size, loss=0.0, idle=60.0)
        row(
            "bytes a second, nothing changed for 60 s", size, measured_bytes(cluster, 30.0), "B/s", 30.0 * size, spent()
        )
    for change in (300, 8000):
        with timed() as spent:
            chance = cluster.stream("changes")
            for second in range(30):
                process = chance.choice(cluster.hosts).process
                assert process is not None
                value = bytes((second,)) * change
                cluster.timeline.after(second + chance.random(), process.set_own, {KEY: value})
            row(
                f"bytes a second, a change of {change} B a second",
                size,
                measured_bytes(cluster, 30.0),
                "B/s",
                30.0 * size,
                spent(),
            )
    with timed() as spent:
        opinions = Opinions(cluster)
        cluster.network.weather.loss = 0.05
        for host in cluster.hosts[: max(1, size // 10)]:
            Starve(at=0.0, seconds=60.0, host=host.index).begin(cluster)
        row("bytes a second, 10 % starved, 5 % loss", size, measured_bytes(cluster, 60.0), "B/s", 60.0 * size, spent())
        print(f"{'':44} false deaths: {len(opinions.false_deaths())}")


class Arrivals:
    """When each other host had the next change of a process's record, by index, in seconds from now."""

    def __init__(self, cluster: Cluster, owner: Process) -> None:
        self.at: dict[int, float] = {}
        self._owner, self._began, self._cluster = owner, cluster.now, cluster
        cluster.record_listeners.append(self._changed)

    def _changed(self, process: Process, effect: RecordChanged) -> None:
        if effect.node == self._owner.run.node and process is not self._owner and KEY in effect.keys:
            self.at.setdefault(process.host.index, self._cluster.now - self._began)


def records(size: int, times: int, seed: int) -> None:
    cluster = settled(seed, size)
    for change in (300, 8000):
        everywhere, leader = [], []
        chance, began_at = cluster.stream(f"records {change}"), cluster.now
        with timed() as spent:
            for number in range(times):
                host = cluster.hosts[chance.randrange(1, size)]
                value = bytes((number,)) * change
                process = host.process
                assert process is not None
                arrivals = Arrivals(cluster, process)
                process.set_own({KEY: value})
                cluster.wait_for(lambda seen=arrivals: len(seen.at) >= size - 1, 30.0)  # type: ignore[misc]
                cluster.record_listeners.clear()
                everywhere.append(max(arrivals.at.values()))
                leader.append(arrivals.at[0])
                cluster.run(1.0)
            node_seconds = (cluster.now - began_at) * size
            row(f"a change of {change} B at the leader", size, leader, "s", node_seconds, spent())
            row(f"a change of {change} B everywhere", size, everywhere, "s", node_seconds, spent())


def joins(size: int, times: int, seed: int) -> None:
    found, node_seconds = [], 0.0
    with timed() as spent:
        for number in range(times):
            cluster = Cluster(f"{seed}/{number}", size)
            cluster.start_all(within=0.5)
            found.append(cluster.settle(120.0))
            node_seconds += cluster.now * size
            del cluster
            gc.collect()
        row("all started within 0.5 s: one view after", size, found, "s", node_seconds, spent())


def heals(size: int, seed: int) -> None:
    found, cluster = [], settled(seed, size)
    began_at = cluster.now
    with timed() as spent:
        for seconds in (1.0, 5.0, 20.0, 60.0, 600.0):
            side = frozenset(range(size // 3))
            cut = Partition(at=0.0, sources=side, targets=frozenset(range(size)) - side)
            cut.begin(cluster)
            cluster.run(seconds)
            cut.end(cluster)
            found.append(cluster.settle(120.0))
        row("cut of 1, 5, 20, 60, 600 s: one view after", size, found, "s", (cluster.now - began_at) * size, spent())


def hours(size: int, seconds: float, seed: int, loss: float, is_stressed: bool) -> None:
    cluster = settled(seed, size, loss)
    opinions, chance, began_at = Opinions(cluster), cluster.stream("stress"), cluster.now
    with timed() as spent:
        if is_stressed:
            for host in cluster.hosts[: size // 10]:
                Starve(at=0.0, seconds=seconds, host=host.index).begin(cluster)
        while cluster.now < began_at + seconds:
            if is_stressed:
                for host in cluster.hosts[size // 10 : size // 5]:
                    # Two that touch would be one longer than a node is to be forgiven.
                    cluster.timeline.after(chance.uniform(0.0, 6.5), cluster.pause, host, chance.uniform(0.5, 2.5))
            cluster.run(10.0)
        node_seconds = (cluster.now - began_at) * size
        suspicions = sum(opinion.state == "suspect" for opinion in opinions.all)
        stress = ", 10 % starved, 10 % stalled to 2.5 s" if is_stressed else ""
        print(
            f"{seconds:.0f} s, {loss:.0%} loss{stress}: N={size}: {len(opinions.false_deaths())} false deaths, "
            f"{suspicions} suspicions held; {node_seconds:.0f} node-seconds, {node_seconds / spent():.0f}/s "
            f"({seconds / spent():.0f} x real time of one CPU)",
            flush=True,
        )
        if opinions.false_deaths():
            print(opinions.told(opinions.false_deaths()[:20]))


WHAT = ("power", "kill", "bytes", "record", "join", "heal", "hours")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_gossip_sim", description=__doc__)
    parser.add_argument("what", nargs="*", default=WHAT, choices=[*WHAT, []])
    parser.add_argument("--sizes", default="16,100")
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of `hours`")
    parser.add_argument("--loss", type=float, default=0.01, help="of `hours`")
    parser.add_argument("--stressed", action="store_true", help="of `hours`: starved and stalled nodes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for size in map(int, arguments.sizes.split(",")):
        if "power" in arguments.what:
            deaths(size, arguments.times, arguments.seed, Cluster.power_off, "power off")
        if "kill" in arguments.what:
            deaths(size, arguments.times, arguments.seed, Cluster.kill, "kill -9")
        if "bytes" in arguments.what:
            cost(size, arguments.seed)
        if "record" in arguments.what:
            records(size, arguments.times, arguments.seed)
        if "join" in arguments.what:
            joins(size, min(arguments.times, 20), arguments.seed)
        if "heal" in arguments.what:
            heals(size, arguments.seed)
        if "hours" in arguments.what:
            hours(size, arguments.seconds, arguments.seed, arguments.loss, arguments.stressed)


if __name__ == "__main__":
    main()
