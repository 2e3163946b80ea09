"""A request's story is complete, in order, and bounded."""

from __future__ import annotations

from aserve.messages.base import pack_i32
from aserve.messages.output import OutputChunk, Retired, SequenceOutput, StepOutput, Usage
from aserve.messages.requests import AdmitRequest, Cancel, SamplingParams
from aserve.observability.reports import Admitted, SchedulerTick
from aserve.observability.trace import Trace


def test_a_story_names_everything_that_happened_in_order() -> None:
    trace = Trace(clock=iter([1.0, 1.5, 2.0, 2.5, 3.0]).__next__)
    admit = AdmitRequest("a", prompt_ids=pack_i32([1, 2]), sampling=SamplingParams(seed=0))
    trace.on_tick(SchedulerTick(events=[admit], effects=[], admitted=(Admitted("a", 0, 3, 17),)))
    output = SequenceOutput("a", 0, position=0, token_ids=pack_i32([5]), cached_len=0)
    trace.on_tick(SchedulerTick(events=[], effects=[StepOutput(17, (output,))]))
    cancel = Cancel("a", None, 0, "cancelled")
    trace.on_tick(SchedulerTick(events=[cancel], effects=[Retired("a", 0, "cancelled", 1)]))
    last = OutputChunk("a", 0, "", b"", Usage(), finish_reason="cancelled", is_last=True)
    trace.delivered(last)
    assert trace.story("a").splitlines() == [
        "request a:",
        "  +0.0 ms admission requested, 2 tokens",
        "  +500.0 ms child 0 runs in row 3 from step 17",
        "  +1000.0 ms cancel of all children: cancelled",
        "  +1500.0 ms child 0 retired: cancelled, 1 tokens",
        "  +2000.0 ms answered: cancelled",
        "  child 0 has 1 tokens, the last from step 17",
    ]


def test_neither_many_requests_nor_a_long_one_grow_without_bound() -> None:
    trace = Trace(max_requests=2, max_events=3)
    for request_id in ("a", "b", "c"):
        for number in range(10):
            trace.note(request_id, f"event {number}")
    assert trace.story("a") == "request a: no events are known"
    assert [line.split(" ms ")[1] for line in trace.story("c").splitlines()[1:]] == [
        "event 7",
        "event 8",
        "event 9",
    ]
