"""The router's own metrics. Those of the replicas are added up beside them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aserve.router.balancer import Balancer

OVERHEAD_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0)


class RouterMetrics:
    def __init__(self, balancer: Balancer) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "aserve_router_requests",
            "Requests sent to a replica, retries included.",
            ["replica"],
            registry=self.registry,
        )
        self.retries = Counter(
            "aserve_router_retries",
            "Requests sent again after a failure before the first byte.",
            registry=self.registry,
        )
        self.broken = Counter(
            "aserve_router_broken_answers",
            "Answers that a replica did not finish.",
            ["replica"],
            registry=self.registry,
        )
        self.limited = Counter(
            "aserve_router_rate_limited", "Requests over a rate limit.", registry=self.registry
        )
        self.overhead = Histogram(
            "aserve_router_overhead_seconds",
            "From the head of a request to its sending; later tries include those before.",
            buckets=OVERHEAD_S,
            registry=self.registry,
        )
        self.registry.register(_States(balancer))


class _States(Collector):
    """The state of the balancer at the time of a scrape."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "aserve_router_replica_healthy", "1 if the replica gets requests.", labels=["replica"]
        )
        loads = GaugeMetricFamily(
            "aserve_router_replica_load",
            "Open requests of the replica, those of other clients included.",
            labels=["replica"],
        )
        for replica in self._balancer.replicas():
            states.add_metric([replica.name], float(replica.state == "healthy"))
            loads.add_metric([replica.name], replica.load)
        hits = self._balancer.hits
        about = "Blocks of 256 bytes of prompts."
        yield states
        yield loads
        yield CounterMetricFamily("aserve_router_prefix_blocks", about, value=hits.num_blocks)
        about = "Blocks of prompts that their replica was believed to have cached."
        yield CounterMetricFamily("aserve_router_prefix_hits", about, value=hits.num_matched)
