"""Measures the same batches on several engines alternately, and compares their figures.

The first engine is aserve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from aserve.bench.batch_times import WARM_UP_LEN, BatchTimes, Generate, Scenario
from aserve.bench.result import BenchResult, Table, progress
from aserve.bench.windows import TokenWindows

TimesBy: TypeAlias = Mapping[str, Mapping[str, BatchTimes]]  # by scenario, by engine

OURS = "aserve"
NOTE = "others: the largest share of CPU time that other processes used during a timed run"
RATES = ("prefill_tok_s", "decode_tok_s", "out_tok_s")
COLUMNS = {
    "ttft_ms": "TTFT ms",
    "decode_ms_per_step": "ms/step",
    "prefill_tok_s": "prefill/s",
    "decode_tok_s": "decode/s",
    "out_tok_s": "out/s",
    "spread": "spread",
    "foreign_cpu": "others",
}


async def measure_batches(
    scenarios: Sequence[Scenario],
    engines: Mapping[str, Generate],
    windows: TokenWindows,
    *,
    repeats: int,
) -> TimesBy:
    found = {}
    num_runs = sum(len(scenario.lengths) for scenario in scenarios) * repeats
    with progress("batches", num_runs) as done:
        for scenario in scenarios:
            for generate in engines.values():
                await generate(_draw(windows, scenario), min(WARM_UP_LEN, scenario.output_len))
            times = found[scenario.name] = {name: BatchTimes(scenario) for name in engines}
            for num_new in scenario.lengths * repeats:
                await _add_all(times, engines, _draw(windows, scenario), num_new=num_new)
                done()
    return found


async def _add_all(
    times: Mapping[str, BatchTimes],
    engines: Mapping[str, Generate],
    prompts: Sequence[list[int]],
    *,
    num_new: int,
) -> None:
    """Times one run on each engine. WHY alternately: a slow moment of the machine hits all."""
    for name, generate in engines.items():
        await times[name].add(generate, prompts, num_new)


def _draw(windows: TokenWindows, scenario: Scenario) -> list[list[int]]:
    return [windows.ids(scenario.input_len) for _ in range(scenario.num_prompts)]


def batch_result(found: TimesBy, *, beside: str | None) -> BenchResult:
    """Builds the result. The ratios are our rates divided by those of the engine `beside`."""
    figures = {
        scenario: {name: times.figures() for name, times in by_engine.items()}
        for scenario, by_engine in found.items()
    }
    rows = [
        _row(scenario, name, of_engine)
        for scenario, by_engine in figures.items()
        for name, of_engine in by_engine.items()
    ]
    result: dict[str, object] = {"scenarios": figures}
    if beside:
        ratios = {name: _ratio(one[OURS], one[beside]) for name, one in figures.items()}
        rows += [_row(scenario, f"{OURS} / {beside}", ratio) for scenario, ratio in ratios.items()]
        result["ratios"] = ratios
    table = Table("batches", ("", "engine", *COLUMNS.values()), rows)
    return BenchResult(result, (table,), (NOTE,))


def _ratio(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    return {rate: round(ours[rate] / theirs[rate], 3) for rate in RATES if rate in theirs}


def _row(scenario: str, name: str, figures: Mapping[str, float]) -> list[str]:
    shown = [f"{figures[key]:,.2f}" if key in figures else "" for key in COLUMNS]
    return [scenario, name, *shown]
