"""What metrics hear of a turn: sums over its events and effects, small enough for a socket."""

from __future__ import annotations

import msgspec

from aserve.errors import StepError
from aserve.messages.results import StepFailed, StepResult
from aserve.messages.step import Launch, ScheduleBatch, StepStats
from aserve.observability.metrics import Metrics
from aserve.observability.reports import (
    EngineReport,
    GrammarCompiled,
    GrammarKnown,
    LaunchedSteps,
    SchedulerTick,
    Seat,
    TurnReport,
    report_of,
)


def launch(iteration: int, *, num_prefill_tokens: int, num_retracted: int) -> Launch:
    stats = StepStats(
        num_prefill_tokens=num_prefill_tokens, num_retracted=num_retracted, total_pages=9
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
    seats=(Seat("a", 0, 1, 4), Seat("b", 1, 2, 5)),
    num_running=2,
    num_waiting=3,
    used_pages=4,
)
REPORT = TurnReport(("a", "b"), 2, 1, LaunchedSteps(2, 5, 7, 1, 9), 2, 3, 4)


def test_a_turn_is_reported_as_its_sums() -> None:
    assert report_of(TURN) == REPORT
    assert report_of(SchedulerTick(events=[], effects=[])) == TurnReport()


def test_reports_cross_msgpack() -> None:
    decoder = msgspec.msgpack.Decoder(EngineReport)
    for report in (REPORT, TurnReport(), GrammarKnown(), GrammarCompiled("ok", 0.5)):
        assert decoder.decode(msgspec.msgpack.encode(report)) == report


def test_metrics_show_what_was_reported() -> None:
    metrics = Metrics()
    for report in (REPORT, TurnReport(num_finished=1, num_running=1)):
        metrics.heard(report)
    expected = {
        "aserve_steps_launched_total": 2,
        "aserve_steps_finished_total": 3,
        "aserve_steps_failed_total": 1,
        "aserve_forward_iteration": 5,
        "aserve_prefill_tokens_total": 7,
        "aserve_retractions_total": 1,
        "aserve_kv_pages_total": 9,
        "aserve_sequences_running": 1,
        "aserve_sequences_waiting": 0,
        "aserve_kv_pages_used": 0,
    }
    found = {name: metrics.registry.get_sample_value(name) for name in expected}
    assert found == expected
