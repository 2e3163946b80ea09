"""Requests received = finished + refused + failed + cancelled + in flight; a turn's sums."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Gauge, generate_latest

from aserve.errors import AserveError, EngineDead, QueueFull, StepError
from aserve.messages.base import FinishReason, pack_i32
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.output import OutputChunk, SequenceOutput, StepOutput, Usage
from aserve.messages.requests import GenerateRequest, SamplingParams, TokenPrompt
from aserve.messages.results import StepFailed, StepResult
from aserve.messages.step import Launch, ScheduleBatch, StepStats
from aserve.observability.metric_sums import summed
from aserve.observability.metrics import Metrics
from aserve.observability.recent import MAX_SPANS, WATCH_S, RequestRecord, Span
from aserve.observability.reports import (
    Admitted,
    EngineDown,
    LaunchedSteps,
    RequestState,
    SchedulerTick,
    TickReport,
    TickReporter,
    report_of,
)


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


def failure(request_id: str, error: AserveError) -> OutputChunk:
    info = error.info()
    return OutputChunk(
        request_id, 0, "", b"", Usage(), finish_reason="error", error=info, is_last=True
    )


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def reconciles(metrics: Metrics) -> bool:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    done = sum(each.value for each in samples if each.name == "aserve_requests_ended_total")
    in_flight = value(metrics, "aserve_requests_in_flight")
    return value(metrics, "aserve_requests_received_total") == done + in_flight


ACTION = st.tuples(
    st.sampled_from(["receive", "seat", "token", "stop", "cancel", "refuse", "fail", "die"]),
    st.integers(0, 4),
)


@settings(max_examples=40)
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
            metrics.on_report(TickReport(admitted=(name,)))
        elif action == "token":
            metrics.delivered(chunk(name, tokens=1, total=1, reason=None))
        elif action in ("stop", "cancel"):
            reason: FinishReason = "stop" if action == "stop" else "cancelled"
            metrics.delivered(chunk(name, tokens=0, total=1, reason=reason))
        elif action in ("refuse", "fail"):
            error = QueueFull("full") if action == "refuse" else StepError("step")
            metrics.delivered(failure(name, error))
        elif action == "die":
            metrics.all_ended(EngineDead.code)
        assert reconciles(metrics)


def test_a_request_is_refused_before_it_ran_and_failed_after() -> None:
    metrics = Metrics()
    for name in ("queued", "running"):
        metrics.received(request(name))
    metrics.on_report(TickReport(admitted=("running",)))
    for name, error in (("queued", QueueFull("full")), ("running", StepError("step"))):
        metrics.delivered(failure(name, error))
    labels = {"outcome": "refused", "reason": "queue_full"}
    assert value(metrics, "aserve_requests_ended_total", **labels) == 1
    labels = {"outcome": "failed", "reason": "step_failed"}
    assert value(metrics, "aserve_requests_ended_total", **labels) == 1


def test_times_and_tokens_are_counted_from_the_requests_own_ends() -> None:
    clock = ManualClock()
    metrics = Metrics(clock=clock)
    metrics.received(request("a"))
    clock.now_s += 2
    metrics.on_report(TickReport(admitted=("a", "a")))
    metrics.on_report(TickReport(admitted=("a",)))  # again
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


def launch(iteration: int, *, num_prefill_tokens: int, num_retracted: int) -> Launch:
    stats = StepStats(
        num_prefill_rows=1,
        num_prefill_tokens=num_prefill_tokens,
        num_decode_rows=iteration,
        num_retracted=num_retracted,
        total_pages=9,
    )
    empty = (b"",) * 8
    return Launch((ScheduleBatch(iteration, *empty, stats=stats),))


TURN = SchedulerTick(
    events=[
        StepResult(1, b"", b"", b""),
        StepFailed(2, StepError("no").info()),
        StepResult(3, b"", b"", b""),
    ],
    effects=[
        launch(4, num_prefill_tokens=5, num_retracted=0),
        launch(5, num_prefill_tokens=2, num_retracted=1),
    ],
    admitted=(Admitted("a", 0, 1, 4), Admitted("b", 1, 2, 5)),
    num_running=2,
    num_waiting=3,
    used_pages=4,
    num_waiting_clients=2,
    cached_pages=6,
)
REPORT = TickReport(("a", "b"), 2, 1, LaunchedSteps(2, 5, 7, 1, 9, 1, 5, 9), 2, 3, 4, 2, 6)


def test_a_turn_is_reported_as_its_sums() -> None:
    assert report_of(TURN) == REPORT
    assert report_of(SchedulerTick(events=[], effects=[])) == TickReport()


def test_a_step_takes_from_its_launch_or_from_the_end_of_the_one_before() -> None:
    """Overlapped steps share no time, and a failed step takes some, too."""
    clock, reports = ManualClock(), list[TickReport]()
    reporter = TickReporter(reports.append, clock=clock)
    launches: list[SchedulerEffect] = [
        launch(i, num_prefill_tokens=0, num_retracted=0) for i in (1, 2, 3)
    ]
    back = StepResult(1, b"", b"", b"")
    ticks: list[tuple[float, list[SchedulerEvent], list[SchedulerEffect]]] = [
        (101, [], launches[:2]),  # 1 and 2
        (103, [back], []),
        (104, [StepFailed(2, StepError("no").info())], []),
        (110, [], launches[2:]),
        (112, [StepResult(3, b"", b"", b"")], []),
    ]
    for clock.now_s, events, effects in ticks:
        reporter.on_tick(SchedulerTick(events, effects, began_s=clock.now_s - 0.5))
    assert [report.device_s for report in reports] == [0, 2, 1, 0, 2]
    assert {report.host_s for report in reports} == {0.5}


def test_metrics_show_what_was_reported() -> None:
    metrics = Metrics()
    for report in (
        REPORT,
        TickReport(num_finished=1, num_running=1, num_waiting_clients=5, cached_pages=3),
    ):
        metrics.on_report(report)
    expected = {
        "aserve_steps_launched_total": 2,
        "aserve_steps_finished_total": 3,
        "aserve_steps_failed_total": 1,
        "aserve_forward_iteration": 5,
        "aserve_prefill_tokens_total": 7,
        "aserve_decodes_total": 9,
        "aserve_retractions_total": 1,
        "aserve_kv_pages": 9,
        "aserve_sequences_running": 1,
        "aserve_sequences_waiting": 0,
        "aserve_clients_waiting": 5,
        "aserve_kv_pages_used": 0,
        "aserve_kv_pages_cached": 3,
    }
    found = {name: metrics.registry.get_sample_value(name) for name in expected}
    assert found == expected


def test_steps_are_counted_by_how_they_ran_where_devices_have_graphs() -> None:
    metrics = Metrics()
    events: list[SchedulerEvent] = [
        StepResult(n, b"", b"", b"", ran=ran) for n, ran in enumerate(("pieces", "", "pieces"))
    ]
    metrics.on_report(report_of(SchedulerTick(events, [])))
    assert metrics.registry.get_sample_value("aserve_steps_ran_total", {"how": "pieces"}) == 2
    assert metrics.registry.get_sample_value("aserve_steps_ran_total", {"how": ""}) is None


def outputs(*windows: tuple[int, int]) -> StepOutput:
    """Outputs of windows, each with its numbers of drafts and of tokens."""
    sequences = [
        SequenceOutput("r", 0, 0, pack_i32([7] * tokens), 0, num_drafts=drafts)
        for drafts, tokens in windows
    ]
    return StepOutput(1, tuple(sequences))


def test_drafts_are_counted_by_what_was_accepted_of_them() -> None:
    tick = SchedulerTick([], [outputs((4, 1), (0, 1), (4, 3)), outputs((2, 3))])
    metrics = Metrics()
    metrics.on_report(report_of(tick))
    names = ("aserve_draft_windows_total", "aserve_draft_tokens_total")
    assert [metrics.registry.get_sample_value(name) for name in names] == [3, 10]
    accepted = [
        metrics.registry.get_sample_value(
            "aserve_draft_tokens_accepted_total", {"position": str(place)}
        )
        for place in range(3)
    ]
    assert accepted == [2, 2, None]
    histogram = "aserve_draft_window_accepted_tokens"
    below = [
        metrics.registry.get_sample_value(f"{histogram}_bucket", {"le": most})
        for most in ("0.0", "1.0", "2.0", "24.0", "+Inf")
    ]
    assert below == [1, 1, 3, 3, 3]
    assert [metrics.registry.get_sample_value(f"{histogram}_{of}") for of in ("sum", "count")] == [
        4,
        3,
    ]
    assert report_of(SchedulerTick([], [outputs((0, 1))])).drafts is None


def test_recent_requests_and_steps_have_their_times() -> None:
    clock = ManualClock()
    metrics = Metrics(clock=clock)
    metrics.received(request("a"))
    clock.now_s += 1
    launched = LaunchedSteps(1, 7, 2, 0, 9, num_decode_rows=1)
    for ids, steps in (((), None), (("a",), launched), (("a",), None)):
        metrics.on_report(TickReport(ids, launched=steps, num_running=1, host_s=1, device_s=2))
    clock.now_s += 1
    metrics.delivered(chunk("a", tokens=1, total=1, reason=None))
    metrics.received(request("b"))
    clock.now_s += 1
    metrics.delivered(chunk("a", tokens=2, total=3, reason="length"))
    seen = metrics.recent.snapshot()
    done, waiting = seen.requests
    assert (done.received_s, done.admitted_s, done.first_token_s, done.ended_s) == (
        100,
        101,
        102,
        103,
    )
    assert (done.outcome, done.completion_tokens, done.cached_tokens) == ("finished", {0: 3}, 1)
    assert (waiting.request_id, waiting.ended_s) == ("b", 0)
    assert done.num_admissions == 2, "it was retracted once"
    assert [
        (step.iteration, step.num_decode_rows, step.host_ms, step.device_ms) for step in seen.steps
    ] == [(7, 1, 2000, 4000)], "with the times of the tick that launched nothing"
    later = metrics.recent.snapshot(since_s=103.5)
    assert [record.request_id for record in later.requests] == ["b"]
    assert not later.steps


def test_states_and_chunks_are_recorded_of_what_arrives_while_somebody_watches() -> None:
    clock = ManualClock()
    metrics = Metrics(clock=clock)
    early = request("early")
    assert metrics.received(early) is early, "nobody watches"
    metrics.recent.snapshot()
    timed = metrics.received(request("seen"))
    assert timed.started_s == 100
    for name in ("early", "seen"):
        for state, at_s, num_chunks in (
            ("prefill", 99, 1),
            ("prefill", 102, 1),
            ("decode", 103, 0),
        ):
            metrics.on_report(RequestState(name, state, at_s, num_chunks))
    shown = json.loads(msgspec.json.encode(metrics.recent.snapshot()))["requests"]
    assert [record["spans"] for record in shown] == [
        [],
        [["tokenize", 100, 0], ["prefill", 100, 1], ["prefill", 102, 1], ["decode", 103, 0]],
    ]
    last = metrics.delivered(chunk("seen", tokens=1, total=1, reason="stop"))
    assert not last.timings, "its client did not ask"
    clock.now_s += WATCH_S
    late = request("late")
    assert metrics.received(late) is late


def test_a_long_request_keeps_its_longest_spans_and_all_its_chunks() -> None:
    record = RequestRecord("a", 0, spans=(Span("tokenize", 0),))
    now_s = 0.0
    for number in range(1000):
        is_long = number % 100 == 0
        record.enter(RequestState("a", ("prefill", "grammar")[number % 2], now_s, 1 - number % 2))
        now_s += 50 if is_long else number % 7
    starts = [span.started_s for span in record.spans]
    assert 2 < len(starts) <= MAX_SPANS
    assert starts == sorted(starts)
    assert (record.spans[0].state, record.spans[-1].state) == ("tokenize", "grammar")
    assert sum(span.num_chunks for span in record.spans) == 500
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    assert sum(length >= 50 for length in lengths) >= 10, "the long ones are there"


def test_an_engine_that_was_started_again_counts_from_0_and_the_sums_go_on() -> None:
    metrics = Metrics()
    metrics.received(request("a"))
    for report in (REPORT, EngineDown("it was killed", is_restart=True), REPORT):
        metrics.on_report(report)
    assert value(metrics, "aserve_engine_restarts_total") == 1
    assert value(metrics, "aserve_retractions_total") == 2
    assert value(metrics, "aserve_steps_launched_total") == 4
    assert value(metrics, "aserve_queue_seconds_count") == 1
    assert reconciles(metrics)
    metrics.on_report(EngineDown("it was killed", is_restart=True))
    gauges = ("aserve_sequences_running", "aserve_sequences_waiting", "aserve_kv_pages_used")
    assert [value(metrics, name) for name in gauges] == [0, 0, 0]


def test_the_metrics_of_several_processes_add_up_and_the_longest_delay_is_the_longest() -> None:
    one, other = Metrics(clock=ManualClock()), Metrics(clock=ManualClock())
    for metrics, count, delay_s in ((one, 2, 0.5), (other, 3, 0.25)):
        gauge = Gauge("any_max_delay_seconds", "longest", registry=metrics.registry)
        gauge.set(delay_s)
        for number in range(count):
            metrics.received(request(f"r{number}"))
        metrics.delivered(chunk("r0", tokens=2, total=2, reason="stop"))
    other.on_report(TickReport(num_running=4))
    texts = [generate_latest(metrics.registry) for metrics in (one, other)]
    whole = generate_latest(one.registry).decode().splitlines()
    lines = summed(texts).decode().splitlines()
    named = [line for line in lines if line.startswith("#")]
    assert sorted(named) == sorted(line for line in whole if line.startswith("#"))
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["aserve_requests_received_total"]) == 5
    assert float(values["aserve_requests_in_flight"]) == 3
    assert float(values['aserve_requests_ended_total{outcome="finished",reason="stop"}']) == 2
    assert float(values['aserve_request_seconds_bucket{le="+Inf"}']) == 2
    assert float(values["aserve_sequences_running"]) == 4
    assert float(values["any_max_delay_seconds"]) == 0.5
