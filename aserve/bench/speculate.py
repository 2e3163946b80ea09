"""`aserve bench speculate` compares speculative decoding with plain decoding of the same prompts.

The engines take turns, so that a slow moment of the machine hits all of them. Only decoding is
timed. The predicted gain follows from the acceptance and the medians of the steps:

    predicted = tokens per window * plain step / step with drafts
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aserve.bench.options import SpeculateOptions, integers
from aserve.bench.result import BenchResult, Table, mean, median, progress, spread
from aserve.bench.step_driver import StepDriver, StepTime, running
from aserve.config import Resolved, SpeculativeOptions
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.host.threads import new_event_loop
from aserve.load import load
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest, SamplingParams

TITLE = "speculative decoding over plain decoding"
NOTE = "The scheduler and the executor alone: no actors, no text, no HTTP; prefix cache off."
PLAIN = "plain"
HEROES = ("hen", "Leo"), ("pig", "Anna"), ("squirrel", "Rose"), ("bear", "Ivy"), ("cat", "Noah")
OPENINGS = tuple(f"Once upon a time, there was a {kind} named {name}." for kind, name in HEROES)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch's decoding by one engine."""

    decode_s: float
    num_tokens: int
    step_s: float  # the median step, with drafts if any step has drafts
    windows: tuple[tuple[int, int], ...]  # drafts, and tokens that came of them

    @property
    def rate(self) -> float:
        return self.num_tokens / self.decode_s


def run(options: SpeculateOptions, resolved: Resolved) -> BenchResult:
    counts = integers(options.rows, flag="--rows")
    kv = dataclasses.replace(resolved.kv, no_prefix_cache=True)
    scheduler = dataclasses.replace(resolved.scheduler, max_num_seqs=max(counts))
    resolved = dataclasses.replace(resolved, kv=kv, scheduler=scheduler)
    algorithms = _algorithms(options, resolved)
    plain = load(dataclasses.replace(resolved, speculative=SpeculativeOptions(None)))
    engines = {PLAIN: plain.executor}
    for name in algorithms:
        given = dataclasses.replace(resolved.speculative, speculative_algorithm=name)
        engines[name] = load(dataclasses.replace(resolved, speculative=given)).executor
    tokenizer = plain.text.tokenizer
    openings = (options.prompt,) if options.prompt else OPENINGS
    prompts = [tokenizer.encode(text, with_special=True) for text in openings]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(_measure(engines, counts, prompts, options))
    lines = [
        _line(name, num_rows, runs[name][1:], runs[PLAIN][1:])
        for name in algorithms
        for num_rows, runs in found.items()
    ]
    rows = [[_cell(value) for value in line.values()] for line in lines]
    notes = tuple(f"{name}: {executor.about}" for name, executor in engines.items())
    return BenchResult({"batches": lines}, (Table(TITLE, list(lines[0]), rows),), (*notes, NOTE))


def _algorithms(options: SpeculateOptions, resolved: Resolved) -> list[str]:
    names = (options.algorithms or resolved.speculative.speculative_algorithm or "").split(",")
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise ConfigError(f"--algorithms {unknown[0]}: must be among {', '.join(ALGORITHMS)}")
    return names


async def _measure(
    engines: Mapping[str, LocalExecutor],
    counts: Sequence[int],
    prompts: Sequence[list[int]],
    options: SpeculateOptions,
) -> dict[int, dict[str, list[Run]]]:
    """Returns each engine's runs by number of rows. The first run of each warms up."""
    drivers = {name: StepDriver(executor) for name, executor in engines.items()}
    found: dict[int, dict[str, list[Run]]] = {
        num_rows: {name: [] for name in engines} for num_rows in counts
    }
    async with contextlib.AsyncExitStack() as stack:
        for executor in engines.values():
            await stack.enter_async_context(running(executor))
        turns = list(itertools.product(range(options.repeats + 1), counts, drivers))
        with progress(TITLE, len(turns)) as done:
            for repeat, num_rows, name in turns:
                requests = _requests(prompts, num_rows, repeat, options)
                found[num_rows][name].append(_summarize(await drivers[name].run(requests)))
                done()
    return found


def _requests(
    prompts: Sequence[list[int]], num_rows: int, repeat: int, options: SpeculateOptions
) -> list[AdmitRequest]:
    return [
        AdmitRequest(
            f"row-{number}",
            pack_i32(prompts[(number + repeat) % len(prompts)]),
            SamplingParams(
                seed=number, temperature=options.temperature, max_tokens=options.output_len
            ),
        )
        for number in range(num_rows)
    ]


def _summarize(times: Sequence[StepTime]) -> Run:
    last_prefill = max(number for number, step in enumerate(times) if step.stats.num_prefill_tokens)
    decoding = times[last_prefill + 1 :]
    ends = [times[last_prefill].done_s, *(step.done_s for step in decoding)]
    took = [end - start for start, end in itertools.pairwise(ends)]
    drafting = [each for each, step in zip(took, decoding, strict=True) if step.windows]
    return Run(
        decode_s=sum(took),
        num_tokens=sum(step.num_tokens for step in decoding),
        step_s=median(drafting or took),
        windows=tuple(window for step in decoding for window in step.windows),
    )


def _line(
    name: str, num_rows: int, runs: Sequence[Run], plain: Sequence[Run]
) -> dict[str, str | float | list[float]]:
    windows = [window for one in runs for window in one.windows]
    gains = [ours.rate / theirs.rate for ours, theirs in zip(runs, plain, strict=True)]
    costs = [ours.step_s / theirs.step_s for ours, theirs in zip(runs, plain, strict=True)]
    accept_len = mean([float(num_tokens) for _, num_tokens in windows])
    longest = max((num_drafts for num_drafts, _ in windows), default=0)
    return {
        "drafter": name,
        "rows": num_rows,
        "accept_len": round(accept_len, 2),
        "by_position": [round(_acceptance(windows, place), 2) for place in range(longest)],
        "plain_step_ms": round(median([one.step_s for one in plain]) * 1e3, 3),
        "step_cost": round(median(costs), 2),
        "predicted_gain": round(accept_len / median(costs), 2),
        "gain": round(median(gains), 2),
        "gain_spread": round(spread(gains), 2),
    }


def _acceptance(windows: Sequence[tuple[int, int]], place: int) -> float:
    """The part of the windows with a draft at this place that accepted it."""
    reached = [num_tokens - 1 > place for num_drafts, num_tokens in windows if num_drafts > place]
    return mean([float(is_accepted) for is_accepted in reached])


def _cell(value: str | float | list[float]) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value}"
