"""The state of a timed request after each tick: why it waits, and what is done for it."""

from __future__ import annotations

import msgspec
import pytest

from aserve.actors.request_states import RequestStates
from aserve.messages.executor import EngineSpec, SchedulerEffect, SchedulerEvent
from aserve.messages.requests import AdmitRequest
from aserve.observability.latency import STATES
from aserve.observability.reports import RequestState, SchedulerTick
from aserve.scheduling.finish import retract
from aserve.scheduling.scheduler import Scheduler
from tests.fakes.toy_device import TOY
from tests.scheduling.stage import request, spec
from tests.scheduling.step_counter import StepCounter


class Watched(StepCounter):
    def __init__(self, engine: EngineSpec) -> None:
        super().__init__(Scheduler(engine, debug_checks=True))
        self.reports: list[RequestState] = []
        self.watch = RequestStates(self.scheduler.state, self.reports.append, lambda: 7.0)

    def play(self, *events: SchedulerEvent) -> list[SchedulerEffect]:
        effects = super().play(*events)
        self.watch.on_tick(SchedulerTick(list(events), effects))
        return effects

    def states(self) -> list[str]:
        """The states that were entered, in their order."""
        names = [report.state for report in self.reports]
        return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def timed(made: AdmitRequest) -> AdmitRequest:
    return msgspec.structs.replace(made, tokenized_s=6.0)


SERVED = ["prefill", "decode", "flush"]
OTHER = [50, 51, 52]
WAITS: dict[str, tuple[EngineSpec, list[AdmitRequest]]] = {
    "queue_rows": (spec(max_rows=1), [request("a", OTHER)]),
    "queue_pages": (spec(num_pages=8), [request("a", OTHER, max_tokens=20)]),
    "queue_share": (
        spec(max_rows=2),
        [request("a", OTHER, client="me"), request("b", [60, 61], client="b")],
    ),
    "queue_prefix": (spec(depth=3), [request("a", list(range(12)))]),
}


@pytest.mark.parametrize("reason", WAITS)
def test_a_request_that_waits_says_why(reason: str) -> None:
    engine, others = WAITS[reason]
    run = Watched(engine)
    run.send(*others)
    run.send(timed(request("mine", list(range(12)), client="me")))
    assert run.states() == [reason]
    run.run()
    assert run.states()[0] == reason
    assert [state for state in run.states() if state != "retracted"][-2:] == SERVED[-2:]
    assert "prefill" in run.states()
    assert {report.request_id for report in run.reports} == {"mine"}


def test_prompts_are_counted_in_chunks_and_other_requests_cost_no_report() -> None:
    run = Watched(spec(max_batched_tokens=8))
    run.send(request("a", OTHER), timed(request("mine", list(range(20)), n=2)))
    run.run()
    assert run.states() == SERVED
    num_chunks = sum(report.num_chunks for report in run.reports)
    assert num_chunks == 3 + 1, "of the first child, then of what the second one does not share"
    assert set(STATES) >= set(run.states())
    num_reports = len(run.reports)
    run.send(request("b", OTHER))
    run.run()
    assert len(run.reports) == num_reports


def test_masks_and_retractions_are_states_of_their_own() -> None:
    run = Watched(spec())
    run.send(timed(request("mine", [1, 2, 3], grammar=TOY)))
    assert run.states() == ["grammar_compile", "prefill"]
    run.run(1)  # its logits are there, and nobody gave its mask
    assert run.states() == ["grammar_compile", "prefill", "grammar"]
    other = Watched(spec())
    other.send(timed(request("mine", [1, 2, 3])))
    other.run(3)
    (sequence,) = other.scheduler.state.running.values()
    retract(other.scheduler.state, sequence)
    other.run()
    assert other.states() == ["prefill", "decode", "retracted", *SERVED]
