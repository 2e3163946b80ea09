"""Received = finished + refused + failed + cancelled + in flight, at any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import EngineDead, ErrorInfo, QueueFull, StepError
from aserve.messages.base import FinishReason, pack_i32
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import GenerateRequest, SamplingParams, TokenPrompt
from aserve.observability.metrics import Metrics
from aserve.observability.reports import TurnReport

OUTCOMES = ("finished", "refused", "failed", "cancelled")


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id, TokenPrompt((1, 2)), SamplingParams(seed=0))


def chunk(request_id: str, *, tokens: int, total: int, reason: FinishReason | None) -> OutputChunk:
    return OutputChunk(
        request_id,
        0,
        "x" * tokens,
        pack_i32([1] * tokens),
        Usage(prompt_tokens=2, completion_tokens=total, cached_tokens=1),
        finish_reason=reason,
        is_last=reason is not None,
    )


def failure(request_id: str, error: ErrorInfo) -> OutputChunk:
    reason: FinishReason = "error"
    return OutputChunk(
        request_id, 0, "", b"", Usage(), finish_reason=reason, error=error, is_last=True
    )


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def ended(metrics: Metrics, outcome: str) -> float:
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "aserve_requests_ended_total" and sample.labels["outcome"] == outcome
    )


def reconciles(metrics: Metrics) -> bool:
    done = sum(ended(metrics, outcome) for outcome in OUTCOMES)
    in_flight = value(metrics, "aserve_requests_in_flight")
    return value(metrics, "aserve_requests_received_total") == done + in_flight


ACTION = st.tuples(
    st.sampled_from(["receive", "seat", "token", "stop", "cancel", "refuse", "fail", "die"]),
    st.integers(0, 4),
)


@given(st.lists(ACTION, max_size=30))
def test_every_received_request_is_counted_in_exactly_one_place(
    actions: list[tuple[str, int]],
) -> None:
    metrics, known = Metrics(clock=ManualClock()), set[str]()
    for action, number in actions:
        name = f"r{number}"
        if action == "receive" and name not in known:
            known.add(name)
            metrics.received(request(name))
        elif action == "seat":
            metrics.heard(TurnReport(seated=(name,)))
        elif action == "token":
            metrics.delivered(chunk(name, tokens=1, total=1, reason=None))
        elif action == "stop":
            metrics.delivered(chunk(name, tokens=0, total=1, reason="stop"))
        elif action == "cancel":
            metrics.delivered(chunk(name, tokens=0, total=1, reason="cancelled"))
        elif action in ("refuse", "fail"):
            error = QueueFull("full").info() if action == "refuse" else StepError("step").info()
            metrics.delivered(failure(name, error))
        elif action == "die":
            metrics.all_ended(EngineDead.code)
        assert reconciles(metrics)


def test_a_request_is_refused_before_it_ran_and_failed_after() -> None:
    metrics = Metrics()
    for name in ("queued", "running"):
        metrics.received(request(name))
    metrics.heard(TurnReport(seated=("running",)))
    for name, error in (("queued", QueueFull("full")), ("running", StepError("step"))):
        metrics.delivered(failure(name, error.info()))
    labels = {"outcome": "refused", "reason": "queue_full"}
    assert value(metrics, "aserve_requests_ended_total", **labels) == 1
    labels = {"outcome": "failed", "reason": "step_failed"}
    assert value(metrics, "aserve_requests_ended_total", **labels) == 1


def test_times_and_tokens_are_counted_from_the_requests_own_ends() -> None:
    clock = ManualClock()
    metrics = Metrics(clock=clock)
    metrics.received(request("a"))
    clock.now_s += 2
    metrics.heard(TurnReport(seated=("a", "a")))
    metrics.heard(TurnReport(seated=("a",)))  # again
    clock.now_s += 1
    metrics.delivered(chunk("a", tokens=1, total=1, reason=None))
    clock.now_s += 4
    metrics.delivered(chunk("a", tokens=2, total=3, reason=None))
    metrics.delivered(chunk("a", tokens=0, total=4, reason="stop"))  # eos has no text
    sums = {
        "aserve_queue_seconds_sum": 2,
        "aserve_queue_seconds_count": 1,
        "aserve_time_to_first_token_seconds_sum": 3,
        "aserve_inter_token_latency_seconds_sum": 4,
        "aserve_inter_token_latency_seconds_count": 2,
        "aserve_request_seconds_sum": 7,
        "aserve_prompt_tokens_total": 2,
        "aserve_cached_tokens_total": 1,
        "aserve_generation_tokens_total": 4,
    }
    assert {name: value(metrics, name) for name in sums} == pytest.approx(sums)
