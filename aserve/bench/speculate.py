"""`aserve bench speculate` compares speculative decoding with plain decoding of the same prompts.

Each engine runs in a process of its own (speculate_engine.py). They take turns, every second time
in the opposite order, so that a slow moment of the machine hits all of them. Only decoding is
timed. Two of the engines are plain ones. The others are compared with the mean of both, and the
second with the first.

PERF: processes of the same engine differ by up to 5 % as long as they live, because their memory
lies elsewhere: four plain engines of one run decoded at 0.97, 0.98, 1.02 and 1.04 of their mean.
So where less than that matters, several processes run each engine (`--processes`), and count
together.

The predicted gain is that of the scheduler's best choice (scheduling/step_times.py), for the step
times that were measured at the start and the acceptance of this run.

The costs are times over a plain step. `verify_cost` is that of a step whose windows are as wide and
whose drafts are looked up, which takes next to no time, and `draft_cost` is the rest of a window:
the drafter's forwards before and after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from aserve.bench.options import SpeculateOptions, integers
from aserve.bench.result import BenchResult, Table, mean, median, spread
from aserve.bench.speculate_engine import Run, SpeculateEngine, run_in_turns
from aserve.config import Resolved, SpeculativeOptions
from aserve.errors import ConfigError
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.scheduling.step_times import WindowTimes

LOOK_UP = "NGRAM"  # the drafter without a model
TITLE = "speculative decoding over plain decoding"
CONTROL = "the second plain engine over the first"
NOTE = "The scheduler and the executor alone: no actors, no text, no HTTP; prefix cache off."
PLAINS = ("plain", "plain again")


def run(options: SpeculateOptions, resolved: Resolved) -> BenchResult:
    counts = integers(options.rows, flag="--rows")
    kv = dataclasses.replace(resolved.kv, no_prefix_cache=True)
    scheduler = dataclasses.replace(resolved.scheduler, max_num_seqs=max(counts))
    resolved = dataclasses.replace(resolved, kv=kv, scheduler=scheduler)
    algorithms = _algorithms(options, resolved)
    engines: dict[str, SpeculateEngine] = {}
    names = (PLAINS[0], *algorithms, PLAINS[1])
    processes: dict[str, SpeculateEngine] = {}
    with contextlib.ExitStack() as stack:
        for number, name in itertools.product(range(options.processes), names):
            given = SpeculativeOptions(None)
            if name not in PLAINS:
                given = dataclasses.replace(resolved.speculative, speculative_algorithm=name)
            engine = SpeculateEngine(options, dataclasses.replace(resolved, speculative=given))
            stack.callback(engine.close)
            engines.setdefault(name, engine)
            processes[f"{name} {number}"] = engine
        verifying = {
            name: _verify_times(engines[name], options, resolved)
            for name in algorithms
            if name != LOOK_UP
        }
        by_process = run_in_turns(processes, counts, repeats=options.repeats, title=TITLE)
    found = {num_rows: joined(runs, names) for num_rows, runs in by_process.items()}
    lines = [
        _line(name, num_rows, _Times(engines[name].times, verifying.get(name)), runs)
        for name in algorithms
        for num_rows, runs in found.items()
    ]
    rows = [[_cell(value) for value in line.values()] for line in lines]
    controls = [_control(num_rows, runs) for num_rows, runs in found.items()]
    tables = (
        Table(TITLE, list(lines[0]), rows),
        Table(CONTROL, list(controls[0]), [[f"{value}" for value in c.values()] for c in controls]),
    )
    notes = tuple(f"{name}: {engine.ready.about}" for name, engine in engines.items())
    return BenchResult({"batches": lines, "controls": controls}, tables, (*notes, NOTE))


def joined(runs: Mapping[str, Sequence[Run]], names: Sequence[str]) -> dict[str, list[Run]]:
    """Returns the runs of each engine, those of its processes in one repeat as one. `runs` are by
    process, whose name is that of the engine and a number."""
    processes = {
        name: [runs[key] for key in runs if key.rpartition(" ")[0] == name] for name in names
    }
    return {
        name: [_as_one(each) for each in zip(*own, strict=True)] for name, own in processes.items()
    }


def _as_one(runs: Sequence[Run]) -> Run:
    return Run(
        decode_s=sum(run.decode_s for run in runs),
        num_tokens=sum(run.num_tokens for run in runs),
        step_s=median([run.step_s for run in runs]),
        num_decodes=sum(run.num_decodes for run in runs),
        windows=tuple(window for run in runs for window in run.windows),
    )


def _algorithms(options: SpeculateOptions, resolved: Resolved) -> list[str]:
    names = (options.algorithms or resolved.speculative.speculative_algorithm or "").split(",")
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise ConfigError(f"--algorithms {unknown[0]}: must be among {', '.join(ALGORITHMS)}")
    return names


def _verify_times(
    engine: SpeculateEngine, options: SpeculateOptions, resolved: Resolved
) -> WindowTimes:
    """Returns the times of an engine without a draft model whose windows are as wide."""
    given = SpeculativeOptions(LOOK_UP, speculative_num_steps=engine.times.max_drafts)
    beside = SpeculateEngine(options, dataclasses.replace(resolved, speculative=given))
    try:
        return beside.times
    finally:
        beside.close()


class _Times(NamedTuple):
    own: WindowTimes
    verifying: WindowTimes | None  # without a draft model; None: the drafter has none

    def costs(self, num_rows: int) -> dict[str, float]:
        """Returns what draft and verify of a window take over a plain step."""
        window = _window_cost(self.own, num_rows)
        # NOTE: both were measured at the start of engines of their own, and are not exact.
        beside = window if self.verifying is None else _window_cost(self.verifying, num_rows)
        verify = min(beside, window)
        return {
            "draft_cost": round(window - verify, 2),
            "verify_cost": round(verify, 2),
            "window_cost": round(window, 2),
        }


def _window_cost(times: WindowTimes, num_rows: int) -> float:
    price_us = times.price(num_rows, num_drafting=num_rows, num_drafts=times.max_drafts)
    return 1 + price_us / float(times.plain[num_rows])


def _control(num_rows: int, runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    pairs = zip(*(runs[name][1:] for name in PLAINS), strict=True)
    ratios = [second.rate / first.rate for first, second in pairs]
    return {
        "rows": num_rows,
        "ratio": round(median(ratios), 3),
        "ratio_spread": round(spread(ratios), 3),
    }


def _line(
    name: str, num_rows: int, times: _Times, runs: Mapping[str, Sequence[Run]]
) -> dict[str, str | float | list[float]]:
    """`runs` are those of all engines. The first of each warms up."""
    own = runs[name][1:]
    plain = [*zip(*(runs[engine][1:] for engine in PLAINS), strict=True)]
    windows = [window for one in own for window in one.windows]
    gains = [
        ours.rate / mean([theirs.rate for theirs in both])
        for ours, both in zip(own, plain, strict=True)
    ]
    accept_len = mean([float(num_tokens) for _, num_tokens in windows])
    longest = max((num_drafts for num_drafts, _ in windows), default=0)
    return {
        "drafter": name,
        "rows": num_rows,
        "accept_len": round(accept_len, 2),
        "by_position": [round(_acceptance(windows, place), 2) for place in range(longest)],
        "plain_step_ms": round(median([one.step_s for both in plain for one in both]) * 1e3, 3),
        **times.costs(num_rows),
        "drafting": round(len(windows) / sum(one.num_decodes for one in own), 2),
        "predicted_gain": round(times.own.best(np.full(num_rows, _chance(windows))).gain, 2),
        "gain": round(median(gains), 2),
        "gain_spread": round(spread(gains), 2),
    }


def _chance(windows: Sequence[tuple[int, int]]) -> float:
    """The probability that a draft is accepted if those before it were."""
    num_accepted = sum(num_tokens - 1 for _, num_tokens in windows)
    num_rejected = sum(num_tokens <= num_drafts for num_drafts, num_tokens in windows)
    return num_accepted / max(num_accepted + num_rejected, 1)


def _acceptance(windows: Sequence[tuple[int, int]], place: int) -> float:
    """The part of the windows with a draft at this place that accepted it."""
    reached = [num_tokens - 1 > place for num_drafts, num_tokens in windows if num_drafts > place]
    return mean([float(is_accepted) for is_accepted in reached])


def _cell(value: str | float | list[float]) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value}"
