"""The names of metrics: what Prometheus expects, what peers call them, and who reads them."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import GenerateRequest, SamplingParams, TokenPrompt
from aserve.observability.compat_metrics import COMPAT, with_compat
from aserve.observability.loop_delay import LoopDelay
from aserve.observability.metrics import Metrics
from aserve.observability.reports import LaunchedSteps, TickReport
from tests.architecture.source import ROOT

NAME = re.compile(r"\baserve_[a-z_]+\b")
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


def used() -> Metrics:
    """Metrics after one finished request of 5 cached and 3 generated tokens, and one cancelled."""
    metrics = Metrics()
    for name in ("a", "b", "c"):
        request = GenerateRequest(name, TokenPrompt((1,)), SamplingParams(seed=0))
        metrics.received(request)
    usage = Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=5)
    metrics.delivered(OutputChunk("a", 0, "", b"", usage, finish_reason="length", is_last=True))
    metrics.delivered(OutputChunk("b", 0, "", b"", Usage(), finish_reason="stop", is_last=True))
    gone = OutputChunk("c", 0, "", b"", Usage(), finish_reason="cancelled", is_last=True)
    metrics.delivered(gone)
    launched = LaunchedSteps(1, 1, 9, 2, 40)
    metrics.on_report(TickReport(launched=launched, num_running=1, num_waiting=4, used_pages=10))
    return metrics


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Of the text that Prometheus reads."""
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return {
        sample.name + "".join(sorted(f" {k}={v}" for k, v in sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def families_of(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


def test_names_follow_prometheus_conventions() -> None:
    """The rules of promtool's linter."""
    registry = Metrics().registry
    LoopDelay(registry)
    for family in registry.collect():
        assert family.documentation
        assert re.fullmatch(r"aserve_[a-z_]+", family.name)
        assert not family.name.endswith(SUFFIXES), family.name
        assert not re.search(r"_(ms|milliseconds|minutes|counter|gauge|histogram)$", family.name)
        if family.name.endswith("_seconds"):
            assert family.type in ("histogram", "gauge")


@pytest.mark.parametrize("compat", sorted(COMPAT))
def test_compat_adds_every_name_of_the_table_and_changes_none_of_ours(compat: str) -> None:
    ours = used().registry
    both = with_compat(ours, compat, model_name="m")
    assert families_of(both) == families_of(ours) | set(COMPAT[compat])
    shown = samples(both)
    labels = {"vllm": " engine=0 model_name=m", "sglang": " model_name=m"}[compat]
    names = {name for name in shown if name.startswith(compat)}
    assert all("model_name=m" in name for name in names)
    expected = {
        "vllm": {
            "vllm:num_requests_running": 1,
            "vllm:num_requests_waiting": 4,
            "vllm:kv_cache_usage_perc": 0.25,
            "vllm:num_preemptions_total": 2,
            "vllm:prompt_tokens_total": 9,
            "vllm:prefix_cache_hits_total": 5,
            "vllm:generation_tokens_total": 3,
            "vllm:e2e_request_latency_seconds_count": 3,
        },
        "sglang": {
            "sglang:num_running_reqs": 1,
            "sglang:token_usage": 0.25,
            "sglang:num_requests_total": 3,
            "sglang:num_aborted_requests_total": 1,
            "sglang:e2e_request_latency_seconds_count": 3,
        },
    }[compat]
    assert {name: shown[name + labels] for name in expected} == expected
    assert {name: value for name, value in shown.items() if name.startswith("aserve")} == samples(
        ours
    )


def test_compat_keeps_reasons_and_buckets_apart() -> None:
    shown = samples(with_compat(used().registry, "vllm", model_name="m"))
    labels = " engine=0 finished_reason={} model_name=m"
    success = {name: v for name, v in shown.items() if name.startswith("vllm:request_success_to")}
    assert success == {
        f"vllm:request_success_total{labels.format('length')}": 1,
        f"vllm:request_success_total{labels.format('stop')}": 1,
    }
    bucket = "vllm:e2e_request_latency_seconds_bucket engine=0 le=+Inf model_name=m"
    assert shown[bucket] == 3


@pytest.mark.parametrize("path", ["docs/grafana.json", "docs/operations.md", "docs/api.md"])
def test_a_dashboard_and_the_documentation_name_metrics_that_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    registry = Metrics().registry
    LoopDelay(registry)
    known = families_of(registry)
    named = {
        next((name.removesuffix(each) for each in SUFFIXES if name.endswith(each)), name)
        for name in NAME.findall(text)
    }
    assert named
    assert named <= known
    if path.endswith(".json"):
        assert len(named) > 10
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
    else:
        peers = set(re.findall(r"\b(?:vllm|sglang):[a-z_0-9]+", text))
        assert {name.removesuffix("_total") for name in peers} <= {
            *COMPAT["vllm"],
            *COMPAT["sglang"],
        }
