"""Metrics that are written for every token: how many were sent, and the times between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aserve.observability.recent import RequestRecord

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600, 1800)


class TokenMetrics(Collector):
    """PERF: a counter and a histogram of prometheus_client take 3 us for each token. Here numbers
    are added up, and become metrics when they are scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft_s = Histogram(
            "aserve_time_to_first_token_seconds",
            "Arrival to first token, queue included",
            buckets=LONG_S,
            registry=registry,
        )
        self._counts = [0] * (len(SHORT_S) + 1)  # of times between tokens, by bucket
        self._sum_s = 0.0
        self._num_tokens = 0
        registry.register(self)

    def add_sent(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def note_times(self, record: RequestRecord, now: float, *, num_tokens: int) -> None:
        """Counts the times of tokens of a request that came together."""
        if not record.first_token_s:
            record.first_token_s = now
            self._ttft_s.observe(now - record.received_s)
        else:
            gap_s = now - record.last_token_s
            self._counts[bisect_left(SHORT_S, gap_s / num_tokens)] += num_tokens
            self._sum_s += gap_s
        record.last_token_s = now

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "aserve_generation_tokens", "Tokens that clients were sent", value=self._num_tokens
        )
        bounds = [*map(str, map(float, SHORT_S)), "+Inf"]
        yield HistogramMetricFamily(
            "aserve_inter_token_latency_seconds",
            "Between two tokens of a request",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )
