"""GET /metrics: Prometheus text, made from the node's state at each scrape. Counts and keeps nothing by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gpulayer import __version__
from gpulayer.api.requests import LocalRoute, Moment, moment_of
from gpulayer.wire.nodes import gpu_stock, resources_to_json


async def metrics(request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(moment_of(request)))
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Scrape:
    """prometheus_client's Collector, of one moment."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        node, state = self._moment.node, self._moment.state
        yield _gauges(
            "gpulayer_info", "The daemon that answers.", ("version", "node"), {(__version__, node.node_name): 1}
        )
        yield _gauge("gpulayer_uptime_seconds", "Since the daemon started.", self._moment.now_utc - node.started_at_utc)
        yield _gauge("gpulayer_ready", "1 if the node serves.", 0 if node.not_ready else 1)
        yield _gauge("gpulayer_log_index", "Index of the newest applied log entry.", state.index)
        yield _gauge("gpulayer_nodes", "Nodes that are seen or known.", len(self._moment.stock))
        yield from self._jobs()
        stock = gpu_stock(self._moment.stock)
        for word in ("all", "free"):
            counts: dict[tuple[str, ...], float] = {(each["model"],): each[word] for each in stock}
            yield _gauges(f"gpulayer_gpus_{word}", f"GPUs by model, {word}; shares count as such.", ("model",), counts)
        yield self._gpus()
        yield from self._store()
        yield from self._peers()

    def _gpus(self) -> Metric:
        """As `gpulayer resources` counts them: what is unhealthy is that, whoever uses it."""
        counts: Counter[tuple[str, ...]] = Counter()
        for stock in resources_to_json(self._moment.stock)["models"]:
            for state in ("idle", "held", "foreign", "unhealthy", "away"):
                counts[stock["model"], state] += stock[state]
        return _gauges("gpulayer_gpus", "GPUs by model and state; each counts once.", ("model", "state"), counts)

    def _jobs(self) -> Iterator[Metric]:
        jobs: Counter[tuple[str, ...]] = Counter()
        replicas: Counter[tuple[str, ...]] = Counter()
        restarts = 0
        for job in self._moment.state.jobs.values():
            if job.outcome is not None:  # thousands of them may be kept: no view is made of each
                jobs[(job.outcome.result,)] += 1
                restarts += job.outcome.restarts
                replicas[("ended",)] += len(job.replicas)
                continue
            seen = self._moment.view(job)
            jobs[(seen.state,)] += 1
            restarts += seen.restarts
            for replica in seen.replicas:
                replicas[(replica.state,)] += 1
        yield _gauges("gpulayer_jobs", "Jobs that are kept, by state.", ("state",), jobs)
        yield _gauges("gpulayer_replicas", "Replicas of kept jobs, by state.", ("state",), replicas)
        total = CounterMetricFamily("gpulayer_replica_restarts", "Restarts of the replicas of kept jobs.")
        total.add_metric([], restarts)
        yield total

    def _store(self) -> Iterator[Metric]:
        """Whatever numbers the log store tells about itself."""
        stats = self._moment.node.store_stats()
        if stats is None:
            return
        for name in sorted(field.name for field in fields(stats)):
            value = getattr(stats, name)
            if isinstance(value, (int, float)):
                yield _gauge(f"gpulayer_store_{name}", f"The log store's {name.replace('_', ' ')}.", float(value))

    def _peers(self) -> Iterator[Metric]:
        """The cluster as this node sees it, and what that takes."""
        node = self._moment.node
        states: Counter[tuple[str, ...]] = Counter((seen.state,) for seen in node.table().nodes.values())
        yield _gauges("gpulayer_nodes_seen", "Nodes as this one sees them, by state.", ("state",), states)
        lag: dict[tuple[str, ...], float] = {(f"{part:g}",): node.loop_lag_seconds(part) for part in (0.5, 0.99, 1.0)}
        yield _gauges("gpulayer_loop_lag_seconds", "Lateness of the event loop in a minute.", ("quantile",), lag)
        total = CounterMetricFamily("gpulayer_peer", "What happened between this node and others.", labels=("what",))
        for what, count in sorted(node.counters().items()):
            total.add_metric([what], count)
        yield total


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for named, number in sorted(values.items()):
        family.add_metric(named, number)
    return family


ROUTES = [LocalRoute("/metrics", metrics)]
