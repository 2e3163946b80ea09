"""A pool that is full: few tokens are computed twice, and clients share the pages."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import DecodeCaps, EngineSpec, GroupSpec
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.scheduling.scheduler import Scheduler
from tests.scheduling.stage import request, spec
from tests.scheduling.step_counter import StepCounter
from tests.traces import Trace, TraceRun


def engine(*, num_pages: int, max_rows: int, page_size: int = 4) -> EngineSpec:
    few = spec(num_pages=num_pages, max_rows=max_rows, page_size=page_size, max_batched_tokens=256)
    return msgspec.structs.replace(few, max_waiting=2_000, max_model_len=4_000)


def asked(name: str, numbers: random.Random, *, prompt_len: int, max_tokens: int) -> AdmitRequest:
    prompt = [numbers.randrange(99) for _ in range(prompt_len)]
    return request(name, prompt, max_tokens=max_tokens, client=name.split("/")[0])


@pytest.mark.parametrize(
    ("num_pages", "max_rows", "prompts", "outputs"),
    [(129, 32, (8, 40), (20, 120)), (129, 64, (4, 12), (40, 80)), (257, 64, (30, 60), (100, 200))],
)
def test_a_full_pool_computes_few_tokens_twice(
    num_pages: int, max_rows: int, prompts: tuple[int, int], outputs: tuple[int, int]
) -> None:
    """Without caution between 50 and 83 % more tokens are computed than the answers need."""
    numbers = random.Random(1)
    requests = [
        asked(
            f"r/{number}",
            numbers,
            prompt_len=numbers.randint(*prompts),
            max_tokens=numbers.randint(*outputs),
        )
        for number in range(60)
    ]
    run = StepCounter(Scheduler(engine(num_pages=num_pages, max_rows=max_rows)))
    run.send(*requests)
    run.run()
    assert run.scheduler.is_idle
    needed = sum(
        len(array_i32(each.prompt_ids)) + (each.sampling.max_tokens or 0) - 1 for each in requests
    )
    computed = sum(sum(array_i32(batch.query_lens).tolist()) for batch in run.batches)
    assert computed - needed < 0.25 * needed


def test_a_flood_that_holds_all_pages_leaves_the_first_token_of_others_soon() -> None:
    """Rows are free, and pages are not."""
    numbers = random.Random(1)
    run = StepCounter(Scheduler(engine(num_pages=200, max_rows=64, page_size=16)))
    flood = [
        asked(f"flood/{number}", numbers, prompt_len=16, max_tokens=200) for number in range(200)
    ]
    run.send(*flood)
    run.run(60)
    state = run.scheduler.state
    assert state.rows.num_free > 20
    light = [asked(f"light{n}/0", numbers, prompt_len=16, max_tokens=16) for n in range(9)]
    assert max(run.steps_to_first(*light)) <= 10
    again = asked("light0/1", numbers, prompt_len=16, max_tokens=16)
    assert run.steps_to_first(again)[0] <= 5


def test_long_prompts_that_are_computed_do_not_keep_a_light_client_waiting_for_a_row() -> None:
    """A row is free; the prompts of the flood would fill the next steps."""
    few = msgspec.structs.replace(engine(num_pages=2_000, max_rows=8), max_batched_tokens=32)
    run = StepCounter(Scheduler(few))
    numbers = random.Random(1)
    flood = [asked(f"flood/{n}", numbers, prompt_len=600, max_tokens=9) for n in range(2)]
    run.send(*flood)
    run.run(4)
    light = asked("light/0", numbers, prompt_len=8, max_tokens=9)
    assert run.steps_to_first(light)[0] <= 4


def test_clients_do_not_retract_each_other_for_ever() -> None:
    """Steps of one token, prefills without decodes beside them, and a pool of five pages: a row
    that is retracted for a sequence that then does not fit comes back, and has lost its tokens.
    """

    def admit(number: int, prompt: list[int], **options: Any) -> AdmitRequest:
        sampling = SamplingParams(seed=number, max_tokens=options.pop("max_tokens"))
        sampling = msgspec.structs.replace(sampling, n=options.pop("n", 1))
        return AdmitRequest(f"r{number}", pack_i32(prompt), sampling, **options)

    def before(count: int) -> tuple[bytes, ...]:
        return (pack_i32([1] * count),) * 2

    long = [0, 10, 1, 6, 3, 3, 6, 1, 10, 0, 4, 0, 10, 1, 6]
    trace = Trace(
        spec=msgspec.structs.replace(
            spec(depth=1, lead=1, page_size=8, max_rows=3, max_batched_tokens=1),
            groups=(GroupSpec("full", 6),),
            max_model_len=64,
            vocab_size=11,
            max_waiting=64,
            decode=DecodeCaps(mixes_prefill=False),
        ),
        requests=(
            admit(0, [0, 10, 1], max_tokens=11, n=2, outputs=before(3)),
            admit(1, [0], max_tokens=0),
            admit(2, [0], max_tokens=0),
            admit(3, long, max_tokens=4, n=2, outputs=before(1), client="a"),
        ),
        seed=1,
    )
    TraceRun(trace).run()
