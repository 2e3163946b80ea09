"""An engine with a drafter measures its steps at the start, which leaves no trace in its tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import aserve.measure_steps
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.step.ticket import StepTicket
from aserve.measure_steps import warm_up
from aserve.messages.base import array_i32
from aserve.messages.results import StepTimes
from aserve.messages.step import ScheduleBatch
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.drive import request, serve

ASKED = [
    request("greedy", [1, 9, 4, 33], max_tokens=30),
    request("hot", [1, 7, 7], max_tokens=30, temperature=1.0, seed=3),
]


def make(
    algorithm: str | None,
    *,
    num_pages: int = 160,
    max_model_len: int | None = None,
    **options: Any,
) -> TorchExecutor:
    given = SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR, **options) if algorithm else None
    settings = BuildOptions(
        MODEL_DIR, num_pages=num_pages, max_rows=6, max_model_len=max_model_len, speculative=given
    )
    return build_executor(settings)


def measured(executor: TorchExecutor) -> list[StepTimes]:
    async def run() -> list[StepTimes]:
        executor.start(asyncio.get_running_loop())
        try:
            return await warm_up(executor)
        finally:
            executor.close()

    return asyncio.run(run())


@pytest.mark.parametrize("algorithm", ["NEXTN", "STANDALONE"])
def test_tokens_after_the_measurement_are_those_of_plain_decoding(algorithm: str) -> None:
    served = serve(make(algorithm), ASKED, measures=True)
    assert served.outputs == serve(make(None), ASKED).outputs
    assert served.num_resyncs == 0


@pytest.mark.parametrize(("num_pages", "num_counts"), [(3, 0), (12, 1), (30, 1)])
def test_a_pool_that_holds_hardly_a_row_is_measured_as_far_as_it_goes(
    num_pages: int, num_counts: int
) -> None:
    """A row without room for the steps of one kind is not measured at all."""
    counts = [len(times.num_rows) for times in measured(make("STANDALONE", num_pages=num_pages))]
    assert counts == [num_counts] * (num_counts > 0)


def test_each_kind_of_step_is_measured_for_as_many_rows_as_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock goes on by what each step would cost: 1 ms, 10 for the drafter to catch up with it,
    and 100 for each row of it that drafts. One step has to wait for a second."""
    executor, now_ms, num_launches = make("STANDALONE"), 0, 0
    launch = executor.launch
    wanted: set[int] = set()

    def timed(batch: ScheduleBatch) -> StepTicket:
        nonlocal now_ms, num_launches
        num_launches += 1
        drafts = [] if batch.verify is None else array_i32(batch.verify.num_drafts).tolist()
        wanted.update(num for num in drafts if num)
        num_drafting = sum(num > 0 for num in drafts)
        now_ms += 1 + 10 * (not batch.skips_drafter) + 100 * num_drafting
        now_ms += 1000 * (num_launches == 16)
        return launch(batch)

    clock = SimpleNamespace(perf_counter=lambda: now_ms / 1000)
    monkeypatch.setattr(executor, "launch", timed)
    monkeypatch.setattr(aserve.measure_steps, "time", clock)
    monkeypatch.setattr(aserve.measure_steps, "LONGEST_S", 1e9)
    [times] = measured(executor)
    assert times.num_rows == (1, 4)
    assert times.plain_us == pytest.approx((1e3, 1e3))
    assert list(times.window_us) == [0, 4]
    assert times.window_us[0] == pytest.approx((11e3, 11e3))
    assert times.window_us[4] == pytest.approx((111e3, 411e3))
    assert times.first_us[4] == pytest.approx((111e3, 111e3))
    assert wanted == {4}


@pytest.mark.parametrize("max_model_len", [None, 64])
def test_rows_whose_drafts_are_all_accepted_begin_anew(
    max_model_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fast machine all turns are taken, and rows reach their end before the last one."""
    monkeypatch.setattr(aserve.measure_steps, "TURNS_S", 60.0)
    [times] = measured(make("STANDALONE", max_model_len=max_model_len))
    assert min(times.plain_us) > 0


def test_a_context_without_room_for_the_measurement_is_not_measured() -> None:
    assert measured(make("STANDALONE", max_model_len=32)) == []


@pytest.mark.parametrize(("algorithm", "how"), [(None, {}), ("EAGLE3", {"verification": "block"})])
def test_engines_without_a_choice_measure_nothing(
    algorithm: str | None, how: dict[str, Any]
) -> None:
    assert measured(make(algorithm, **how)) == []
