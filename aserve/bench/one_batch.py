"""`aserve bench one-batch` measures prefill and decode of one batch, without actors and text.

The scheduler plans the steps, and their tickets are awaited directly. The rates are compared with
the machine's limits.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from aserve.bench.options import OneBatchOptions, integers
from aserve.bench.result import BenchResult, Table, median, progress, spread
from aserve.bench.roofline import Roofline, make_roofline
from aserve.bench.step_driver import StepDriver, StepTime, running
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.host.threads import new_event_loop
from aserve.load import load
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.requests import AdmitRequest, SamplingParams

TITLE = "one batch"
MAX_ROWS = 1 << 16  # as --max-num-seqs
NOTE = "The scheduler and the executor alone: no actors, no text, no HTTP; prefix cache off."


@dataclass(frozen=True, slots=True)
class Shape:
    num_rows: int
    input_len: int
    output_len: int

    def excess(self, spec: EngineSpec) -> str | None:
        """Says by what a row exceeds the context, or all rows the KV cache; None if they fit."""
        num_tokens = self.input_len + self.output_len
        num_pages = -(-num_tokens // spec.page_size) * self.num_rows
        room = spec.groups[0].num_pages - 1  # page 0 is padding
        if num_tokens > spec.max_model_len:
            return f"{num_tokens} tokens of a row, and the context has {spec.max_model_len}"
        return f"{num_pages} pages, and the KV cache has {room}" if num_pages > room else None


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one run. The prefill ends when the last row has its first token, and the decode
    steps follow.
    """

    prefill_s: float
    decode_s: float
    num_steps: int
    num_cached: int

    @property
    def step_s(self) -> float:
        return self.decode_s / self.num_steps


def run(options: OneBatchOptions, resolved: Resolved) -> BenchResult:
    shapes = [
        Shape(num_rows, input_len, options.output_len)
        for num_rows in integers(options.batch_sizes, flag="--batch-sizes", high=MAX_ROWS)
        for input_len in integers(options.input_lens, flag="--input-lens")
    ]
    roofline = make_roofline(resolved, limits_file=options.limits)
    found = measure(shapes, resolved, repeats=options.repeats, prompt_seed=options.prompt_seed)
    lines = [_line(shape, repeats, roofline) for shape, repeats in found.batches.items()]
    rows = [[f"{value:,}" for value in line.values()] for line in lines]
    figures = {
        "batches": lines,
        "cached_tokens": sum(
            one.num_cached for repeats in found.batches.values() for one in repeats
        ),
        "limits": roofline,
        "engine": found.about,
    }
    notes = (f"{resolved.model_name}: {found.about}", str(roofline), NOTE)
    return BenchResult(figures, (Table(TITLE, list(lines[0]), rows),), notes)


@dataclass(frozen=True, slots=True)
class Found:
    """The runs of each shape. `left_out` are shapes that do not fit in the context or KV cache."""

    about: str
    batches: dict[Shape, list[Measured]]
    left_out: list[Shape]


def measure(
    shapes: list[Shape],
    resolved: Resolved,
    *,
    repeats: int,
    prompt_seed: int,
    may_leave_out: bool = False,
) -> Found:
    """Measures all shapes alternately, so that a slow moment of the machine hits all of them."""
    kv = dataclasses.replace(resolved.kv, no_prefix_cache=True)
    most_rows = max(shape.num_rows for shape in shapes)
    scheduler = dataclasses.replace(resolved.scheduler, max_num_seqs=most_rows)
    loaded = load(dataclasses.replace(resolved, kv=kv, scheduler=scheduler))
    left_out = []
    for shape in shapes:
        if (excess := shape.excess(loaded.executor.spec)) is None:
            continue
        if not may_leave_out:
            raise ConfigError(
                f"a batch of {shape.num_rows} prompts of {shape.input_len} tokens, with answers of "
                f"{shape.output_len}, takes {excess}"
            )
        left_out.append(shape)
    kept = [shape for shape in shapes if shape not in left_out]
    windows = TokenWindows(loaded.text.tokenizer, seed=prompt_seed)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        batches = runner.run(_measure(kept, loaded.executor, windows, repeats=repeats))
    return Found(loaded.executor.about, batches, left_out)


async def _measure(
    shapes: list[Shape], executor: LocalExecutor, windows: TokenWindows, *, repeats: int
) -> dict[Shape, list[Measured]]:
    driver = StepDriver(executor)
    found: dict[Shape, list[Measured]] = {shape: [] for shape in shapes}
    async with running(executor):
        for shape in shapes:
            await driver.run(requests_of(dataclasses.replace(shape, output_len=2), windows))
        with progress(TITLE, repeats * len(shapes)) as done:
            for shape in shapes * repeats:
                found[shape].append(summarize(await driver.run(requests_of(shape, windows))))
                done()
    return found


def requests_of(shape: Shape, windows: TokenWindows) -> list[AdmitRequest]:
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=shape.output_len)
    return [
        AdmitRequest(f"row-{number}", pack_i32(windows.ids(shape.input_len)), sampling)
        for number in range(shape.num_rows)
    ]


def summarize(times: Sequence[StepTime]) -> Measured:
    last_prefill = max(number for number, step in enumerate(times) if step.stats.num_prefill_tokens)
    prefill_end_s = times[last_prefill].done_s
    return Measured(
        prefill_s=prefill_end_s - times[0].launched_s,
        decode_s=times[-1].done_s - prefill_end_s,
        num_steps=len(times) - 1 - last_prefill,
        num_cached=sum(step.stats.num_cached_tokens for step in times),
    )


def _line(shape: Shape, repeats: Sequence[Measured], roofline: Roofline) -> dict[str, float]:
    prefill_s = median([one.prefill_s for one in repeats])
    steps_s = [one.step_s for one in repeats]
    step_s = median(steps_s)
    num_tokens = shape.num_rows * shape.input_len
    return {
        "rows": shape.num_rows,
        "input_len": shape.input_len,
        "prefill_ms": round(prefill_s * 1e3, 3),
        "prefill_tok_s": round(num_tokens / prefill_s, 1),
        "matmul_share": round(
            roofline.matmul_share(num_tokens, prefill_s, num_rows=shape.num_rows), 3
        ),
        "decode_ms_per_step": round(step_s * 1e3, 3),
        "decode_tok_s": round(shape.num_rows / step_s, 1),
        "read_share": round(roofline.read_share(step_s), 3),
        "spread": round(spread(steps_s), 3),
    }
