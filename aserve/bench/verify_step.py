"""`aserve bench verify` compares a step that verifies drafts with a step of plain decoding.

One engine runs both, in turns, so that a slow moment of the machine hits both. The rows of one kind
of step all have as many drafts as the drafter gives at most, and those of the other kind have none
and skip the drafter. So the ratio of both times is the number of tokens that a window must give on
average before it pays.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from aserve.bench.one_batch import Shape, requests_of
from aserve.bench.options import VerifyOptions, integers
from aserve.bench.result import BenchResult, Table, mean, median, progress
from aserve.bench.step_driver import StepDriver, StepTime, running
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.host.threads import new_event_loop
from aserve.load import load
from aserve.messages.requests import AdmitRequest

TITLE = "a step that verifies drafts, over a decode step"
NOTE = "The scheduler and the executor alone: no actors, no text, no HTTP; prefix cache off."
SKIPS_DRAFTER = -1  # as in `DraftChoice.fix`


def run(options: VerifyOptions, resolved: Resolved) -> BenchResult:
    if resolved.speculative.speculative_algorithm is None:
        raise ConfigError("name the drafter of the windows with --speculative-algorithm")
    counts = integers(options.rows, flag="--rows")
    kv = dataclasses.replace(resolved.kv, no_prefix_cache=True)
    scheduler = dataclasses.replace(resolved.scheduler, max_num_seqs=max(counts))
    loaded = load(dataclasses.replace(resolved, kv=kv, scheduler=scheduler))
    windows = TokenWindows(loaded.text.tokenizer, seed=0)
    shapes = [Shape(count, options.input_len, options.output_len) for count in counts]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(_measure(shapes, loaded.executor, windows, repeats=options.repeats))
    lines = [_line(shape, steps) for shape, steps in found.items()]
    rows = [[f"{value:,}" for value in line.values()] for line in lines]
    notes = (f"{resolved.model_name}: {loaded.executor.about}", NOTE)
    return BenchResult({"batches": lines}, (Table(TITLE, list(lines[0]), rows),), notes)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of one kind, in all turns."""

    num_drafts: int  # of each row
    times_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # of a row's window


async def _measure(
    shapes: Sequence[Shape], executor: LocalExecutor, windows: TokenWindows, *, repeats: int
) -> dict[Shape, tuple[_Steps, _Steps]]:
    """Returns plain steps and those with windows. The first turn of each shape warms up."""
    caps = executor.spec.decode
    driver = StepDriver(executor)
    most = caps.max_tokens_per_step - caps.root_len
    found = {shape: (_Steps(0), _Steps(most)) for shape in shapes}
    runs: dict[Shape, list[list[list[StepTime]]]] = {shape: [] for shape in shapes}
    async with running(executor):
        with progress(TITLE, (repeats + 1) * len(shapes)) as done:
            for shape in [*shapes] * (repeats + 1):
                requests = requests_of(shape, windows)
                times = [await _run(driver, shape, requests, each) for each in found[shape]]
                runs[shape].append(times)
                done()
    for shape, (_, *turns) in runs.items():
        for times in turns:
            _add(shape, found[shape], times)
    return found


async def _run(
    driver: StepDriver, shape: Shape, requests: Sequence[AdmitRequest], steps: _Steps
) -> list[StepTime]:
    driver.fix_drafts(shape.num_rows, steps.num_drafts or SKIPS_DRAFTER)
    return await driver.run(requests)


def _add(shape: Shape, found: Sequence[_Steps], times: Sequence[Sequence[StepTime]]) -> None:
    """Adds the steps in which every row has as many drafts as it should have: its last window may
    be narrower."""
    for steps, own in zip(found, times, strict=True):
        expected = [steps.num_drafts] * shape.num_rows * (steps.num_drafts > 0)
        for before, step in itertools.pairwise(own):
            is_decode = step.stats.num_decode_rows == shape.num_rows
            if is_decode and [num_drafts for num_drafts, _ in step.windows] == expected:
                steps.times_s.append(step.done_s - before.done_s)
                steps.num_tokens.extend(count for _, count in step.windows)


def _line(shape: Shape, found: tuple[_Steps, _Steps]) -> dict[str, float]:
    plain_s, verify_s = (median(steps.times_s) for steps in found)
    _, windows = found
    return {
        "rows": shape.num_rows,
        "input_len": shape.input_len,
        "tokens_of_a_window": 1 + windows.num_drafts,
        "plain_steps": len(found[0].times_s),
        "verify_steps": len(windows.times_s),
        "accepted": round(mean(windows.num_tokens) - 1, 2),
        "plain_ms": round(plain_s * 1e3, 2),
        "verify_ms": round(verify_s * 1e3, 2),
        "ratio": round(verify_s / plain_s, 3),
    }
