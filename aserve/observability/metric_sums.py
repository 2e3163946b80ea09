"""Adds up the metrics of several processes, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]

# What the value of the whole server is, where it is not the sum: by the end of the name.
NOT_ADDED = {"_created": min, "_max_delay_seconds": max}


def summed(texts: Iterable[bytes]) -> bytes:
    """Adds up the samples with the same name and labels. A text of another format counts as empty.

    NOTE: a gauge that only one process sets is 0 in the others, so that the sum is its value.
    """
    families: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, Labels], float]] = {}
    for text in texts:
        for family in _families_in(text):
            families.setdefault(family.name, family)
            known = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                known[key] = joined(sample.name, known.get(key), sample.value)
    registry = CollectorRegistry()
    registry.register(_Sums(families, sums))
    return generate_latest(registry)


def _families_in(text: bytes) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text.decode()))
    except (ValueError, IndexError):  # what the parser raises; a replica may be any server
        return []


def joined(name: str, known: float | None, value: float) -> float:
    if known is None:
        return value
    for ending, join in NOT_ADDED.items():
        if name.endswith(ending):
            return join(known, value)
    return known + value


class _Sums(Collector):
    def __init__(
        self,
        families: Mapping[str, Metric],
        sums: Mapping[str, Mapping[tuple[str, Labels], float]],
    ) -> None:
        self._families = families
        self._sums = sums

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            made = Metric(name, family.documentation, family.type)
            for (sample_name, labels), value in self._sums[name].items():
                made.add_sample(sample_name, dict(labels), value)
            yield made
