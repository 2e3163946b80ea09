"""The metrics under the names of vLLM or SGLang, for dashboards and autoscalers made for those.

Each is computed from aserve's own when it is scraped, so both always agree. Only names that aserve
can fill truthfully are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Families = Mapping[str, Metric]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A metric of aserve under another name. Only samples with the labels `where` count, and
    `labels` are the ones that are kept, with their other names; the samples that then have equal
    labels are added up.
    """

    ours: str
    where: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A gauge that is the quotient of two of aserve's, 0 where the second is 0."""

    part: str
    whole: str


KV_USAGE = Ratio("aserve_kv_pages_used", "aserve_kv_pages")
COMPAT: Mapping[str, Mapping[str, Renamed | Ratio]] = {
    "vllm": {
        "vllm:num_requests_running": Renamed("aserve_sequences_running"),
        "vllm:num_requests_waiting": Renamed("aserve_sequences_waiting"),
        "vllm:kv_cache_usage_perc": KV_USAGE,
        "vllm:num_preemptions": Renamed("aserve_retractions"),
        "vllm:prompt_tokens": Renamed("aserve_prompt_tokens"),
        "vllm:prompt_tokens_cached": Renamed("aserve_cached_tokens"),
        "vllm:prefix_cache_queries": Renamed("aserve_prompt_tokens"),
        "vllm:prefix_cache_hits": Renamed("aserve_cached_tokens"),
        "vllm:generation_tokens": Renamed("aserve_generation_tokens"),
        "vllm:request_success": Renamed(
            "aserve_requests_ended", {"outcome": "finished"}, {"reason": "finished_reason"}
        ),
        "vllm:time_to_first_token_seconds": Renamed("aserve_time_to_first_token_seconds"),
        "vllm:inter_token_latency_seconds": Renamed("aserve_inter_token_latency_seconds"),
        "vllm:e2e_request_latency_seconds": Renamed("aserve_request_seconds"),
        "vllm:request_queue_time_seconds": Renamed("aserve_queue_seconds"),
        "vllm:spec_decode_num_drafts": Renamed("aserve_draft_windows"),
        "vllm:spec_decode_num_draft_tokens": Renamed("aserve_draft_tokens"),
        "vllm:spec_decode_num_accepted_tokens": Renamed("aserve_draft_tokens_accepted"),
        "vllm:spec_decode_num_accepted_tokens_per_pos": Renamed(
            "aserve_draft_tokens_accepted", labels={"position": "position"}
        ),
    },
    "sglang": {
        "sglang:num_running_reqs": Renamed("aserve_sequences_running"),
        "sglang:num_queue_reqs": Renamed("aserve_sequences_waiting"),
        "sglang:token_usage": KV_USAGE,
        "sglang:num_retracted_requests": Renamed("aserve_retractions"),
        "sglang:prompt_tokens": Renamed("aserve_prompt_tokens"),
        "sglang:cached_tokens": Renamed("aserve_cached_tokens"),
        "sglang:generation_tokens": Renamed("aserve_generation_tokens"),
        "sglang:num_requests": Renamed("aserve_requests_received"),
        "sglang:num_aborted_requests": Renamed("aserve_requests_ended", {"outcome": "cancelled"}),
        "sglang:num_grammar_cache_hit": Renamed("aserve_grammar_cache_hits"),
        "sglang:grammar_compilation_time_seconds": Renamed("aserve_grammar_compile_seconds"),
        "sglang:time_to_first_token_seconds": Renamed("aserve_time_to_first_token_seconds"),
        "sglang:inter_token_latency_seconds": Renamed("aserve_inter_token_latency_seconds"),
        "sglang:e2e_request_latency_seconds": Renamed("aserve_request_seconds"),
        "sglang:queue_time_seconds": Renamed("aserve_queue_seconds"),
    },
}


def with_compat(
    registry: CollectorRegistry, compat: str | None, *, model_name: str
) -> CollectorRegistry:
    """Returns a registry that also has the metrics of `compat`, or `registry` for None."""
    if compat is None:
        return registry
    both = CollectorRegistry()
    labels = {"model_name": model_name} | ({"engine": "0"} if compat == "vllm" else {})
    both.register(_Both(registry.collect, COMPAT[compat], labels))
    return both


class _Both(Collector):
    def __init__(
        self,
        source: Callable[[], Iterable[Metric]],
        table: Mapping[str, Renamed | Ratio],
        labels: Mapping[str, str],
    ) -> None:
        self._source = source
        self._table = table
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._source()}
        yield from families.values()
        for name, rule in self._table.items():
            if isinstance(rule, Renamed):
                yield renamed(families[rule.ours], name, rule, self._labels)
            else:
                yield ratio(families, name, rule, self._labels)


def renamed(family: Metric, name: str, rule: Renamed, labels: Mapping[str, str]) -> Metric:
    made = Metric(name, family.documentation, family.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        is_value = not sample.name.endswith("_created")
        if is_value and rule.where.items() <= sample.labels.items():
            kept = {rule.labels[key]: v for key, v in sample.labels.items() if key in rule.labels}
            if "le" in sample.labels:
                kept["le"] = sample.labels["le"]
            key = (sample.name.removeprefix(family.name), tuple(({**labels, **kept}).items()))
            sums[key] = sums.get(key, 0.0) + sample.value
    for (suffix, pairs), value in sums.items():
        made.add_sample(name + suffix, dict(pairs), value)
    return made


def ratio(families: Families, name: str, rule: Ratio, labels: Mapping[str, str]) -> Metric:
    part, whole = (families[each].samples[0].value for each in (rule.part, rule.whole))
    documentation = f"{families[rule.part].documentation}, as a part of all"
    made = GaugeMetricFamily(name, documentation, labels=list(labels))
    made.add_metric(list(labels.values()), part / whole if whole else 0.0)
    return made
