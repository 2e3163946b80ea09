"""Counts of speculative decoding: how many drafts were verified, and how many were accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aserve.messages.base import Record, num_values
from aserve.messages.executor import SchedulerEffect
from aserve.messages.output import StepOutput

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24)  # upper bounds of the histogram's buckets


class DraftCounts(Record, frozen=True):
    """The windows with drafts whose results came back in one tick. `by_position[i]` of them have
    accepted more than `i` drafts.
    """

    num_windows: int = 0
    num_drafts: int = 0
    by_position: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(self.by_position)

    @property
    def accept_len(self) -> float:
        """Returns the mean number of tokens of a window."""
        return 1 + self.num_accepted / self.num_windows

    @property
    def rates(self) -> list[float]:
        """Returns the part of the windows that accepted their first draft, their second, ..."""
        return [accepted / self.num_windows for accepted in self.by_position]

    @property
    def histogram(self) -> list[int]:
        """Returns the number of windows that accepted no draft, one, two, ..."""
        at_least = (self.num_windows, *self.by_position)
        more = (*self.by_position, 0)
        return [num - num_more for num, num_more in zip(at_least, more, strict=True)]

    def __add__(self, other: DraftCounts) -> DraftCounts:
        both = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return DraftCounts(
            self.num_windows + other.num_windows,
            self.num_drafts + other.num_drafts,
            tuple(map(sum, both)),
        )


def count_drafts(effects: Iterable[SchedulerEffect]) -> DraftCounts | None:
    """Returns the counts of these outputs, or None if none of them is of a window with drafts."""
    windows = [
        (output.num_drafts, num_values(output.token_ids) - 1)
        for effect in effects
        if isinstance(effect, StepOutput)
        for output in effect.sequences
        if output.num_drafts
    ]
    if not windows:
        return None
    longest = max([accepted for _, accepted in windows])
    return DraftCounts(
        num_windows=len(windows),
        num_drafts=sum([drafts for drafts, _ in windows]),
        by_position=tuple(
            sum([accepted > place for _, accepted in windows]) for place in range(longest)
        ),
    )


class DraftMetrics(Collector):
    """Three counters, and the histogram of the accepted drafts of a window, which follows from them
    whenever it is scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = DraftCounts()
        self._windows = Counter(
            "aserve_draft_windows", "Decodes that verified drafts", registry=registry
        )
        self._drafts = Counter("aserve_draft_tokens", "Drafts verified", registry=registry)
        self._accepted = Counter(
            "aserve_draft_tokens_accepted",
            "Drafts accepted, by their position behind the last known token",
            ["position"],
            registry=registry,
        )
        registry.register(self)

    def on_counts(self, counts: DraftCounts) -> None:
        self._total += counts
        self._windows.inc(counts.num_windows)
        self._drafts.inc(counts.num_drafts)
        for place, accepted in enumerate(counts.by_position):
            self._accepted.labels(place).inc(accepted)

    def collect(self) -> Iterator[Metric]:
        total = self._total.num_windows
        longer = dict(enumerate(self._total.by_position))  # windows that accepted more than so many
        buckets = [(str(float(most)), total - longer.get(most, 0)) for most in LENGTHS]
        yield HistogramMetricFamily(
            "aserve_draft_window_accepted_tokens",
            "Drafts that a decode with drafts accepted",
            buckets=[*buckets, ("+Inf", total)],
            sum_value=self._total.num_accepted,
        )
