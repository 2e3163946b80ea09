"""`aserve bench request-memory` measures the host memory of requests that run and that wait.

The engine is embedded and its device only sleeps, so the requests stand in all that a server keeps
of them but their connections: the gateway, the text side and the scheduler. What they take is
counted by tracemalloc, as far as aserve's own files allocated it. The tokens, 4 bytes each, are
taken off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np

from aserve.bench.options import RequestMemoryOptions
from aserve.bench.result import BenchResult, Table, progress
from aserve.bench.sleeping_engine import SleepingExecutor
from aserve.config import Resolved
from aserve.engine import Engine
from aserve.gpu.step.ticket import StepTicket
from aserve.host.threads import new_event_loop
from aserve.load import Loaded
from aserve.messages.base import VALUE_BYTES, num_values
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.output import OutputChunk
from aserve.messages.step import ScheduleBatch
from aserve.text.load import TextSide, load_tokenizer
from aserve.tiny import MODEL_DIR

TITLE = "host memory of a request beside its tokens"
NOTE = (
    "Bytes that aserve's files have allocated for each request, without its connection, and "
    f"without {VALUE_BYTES} bytes for each token of its prompt and its outputs."
)
PAGE_SIZE = 16
PROMPT_LEN = 64
MAX_TOKENS = 4096  # nobody ends
STEP_S = 0.01
# PERF: while requests begin to wait, steps take longer. A tick with a step of 1,024 rows takes half
# a second under tracemalloc and receives 4 requests, and one without a step receives 32.
LONG_STEP_S = 2.0
PACKAGE = Path(__file__).parents[1]


def run(options: RequestMemoryOptions, resolved: Resolved) -> BenchResult:
    with asyncio.Runner(loop_factory=new_event_loop) as runner, progress(TITLE, 1) as done:
        running, waiting = runner.run(measure(options, resolved))
        done()
    figures = {"running_bytes": round(running), "waiting_bytes": round(waiting)}
    counts = ("requests", str(options.running), str(options.waiting))
    sizes = ("bytes", *map(str, figures.values()))
    table = Table(TITLE, ("", *figures), (counts, sizes))
    return BenchResult(figures, (table,), (NOTE,))


async def measure(options: RequestMemoryOptions, resolved: Resolved) -> tuple[float, float]:
    """Returns the bytes of a running request, and of a waiting one."""
    tokenizer = load_tokenizer(MODEL_DIR)
    device = _Device(_spec(options, tokenizer.vocab_size), step_s=STEP_S)
    loaded = Loaded(device, TextSide(tokenizer))
    async with (
        Engine(_resolved_for(options, resolved), loader=lambda _: loaded) as engine,
        asyncio.TaskGroup() as group,
    ):
        readers = _Readers(engine, device, group)
        await readers.open(1)  # what the first request builds for all
        tracemalloc.start()
        try:
            await readers.open(options.running - 1)
            running = _own_bytes() - VALUE_BYTES * readers.num_tokens
            num_before = readers.num_tokens
            device.lengthen(LONG_STEP_S)
            await readers.open(options.waiting)
            more = VALUE_BYTES * (readers.num_tokens - num_before)
            waiting = _own_bytes() - more - running - VALUE_BYTES * num_before
        finally:
            tracemalloc.stop()
            device.lengthen(0.0)
            readers.close()
    return running / max(options.running - 1, 1), waiting / options.waiting


class _Device(SleepingExecutor):
    """Counts the requests that the scheduler has."""

    num_requests = 0

    def lengthen(self, step_s: float) -> None:
        """Sets the seconds that each later step takes."""
        self._step_s = step_s

    def launch(self, *batches: ScheduleBatch) -> StepTicket:
        self.num_requests = batches[0].stats.num_running + batches[0].stats.num_waiting
        return super().launch(*batches)


class _Readers:
    """Reads the answers of requests, and drops what it has read."""

    def __init__(self, engine: Engine, device: _Device, group: asyncio.TaskGroup) -> None:
        self._engine = engine
        self._group = group
        self._device = device
        self._numbers = np.random.default_rng(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._has_news = asyncio.Event()
        self.num_tokens = 0  # of the prompts and of what came

    async def open(self, num_requests: int) -> None:
        """Opens requests, and returns when the scheduler has all of them."""
        for _ in range(num_requests):
            prompt = self._numbers.integers(300, 500, size=PROMPT_LEN).tolist()
            chunks = self._engine.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            self._tasks.append(self._group.create_task(self._read(chunks)))
        self.num_tokens += PROMPT_LEN * num_requests
        while self._device.num_requests < len(self._tasks):
            self._has_news.clear()
            await self._has_news.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read(self, chunks: AsyncGenerator[OutputChunk, None]) -> None:
        async for chunk in chunks:
            self.num_tokens += num_values(chunk.token_ids)
            self._has_news.set()


def _own_bytes() -> int:
    """Returns what the files of aserve have allocated, without those of the benchmarks."""
    gc.collect()
    kept = (
        tracemalloc.Filter(True, str(PACKAGE / "*")),
        tracemalloc.Filter(False, str(PACKAGE / "bench" / "*")),
    )
    found = tracemalloc.take_snapshot().filter_traces(kept)
    return sum(each.size for each in found.statistics("filename"))


def _spec(options: RequestMemoryOptions, vocab_size: int) -> EngineSpec:
    """There are pages for the running requests alone."""
    max_len = PROMPT_LEN + MAX_TOKENS
    return EngineSpec(
        page_size=PAGE_SIZE,
        groups=(GroupSpec("full", 1 + options.running * (max_len // PAGE_SIZE + 1)),),
        max_rows=options.running,
        max_model_len=max_len,
        max_batched_tokens=8192,
        vocab_size=vocab_size,
        max_waiting=2 * options.waiting,
    )


def _resolved_for(options: RequestMemoryOptions, resolved: Resolved) -> Resolved:
    return dataclasses.replace(
        resolved,
        scheduler=dataclasses.replace(
            resolved.scheduler, max_num_seqs=options.running, max_queue=2 * options.waiting
        ),
        grammar=dataclasses.replace(resolved.grammar, grammar_workers=0),
        debug=dataclasses.replace(resolved.debug, log_level=resolved.debug.log_level or "warning"),
    )
