"""`aserve bench host-step` measures the scheduler's time per step.

It times one call of `Scheduler.step`. The input is a StepResult and the requests that have arrived,
and the output is all effects, among them the next Launch with its arrays. The device answers at
once. There is no event loop, no thread and no torch.

Where there are several ranks, each Launch is sent to them: `rank_us` is the time to encode it,
write it to a socket, read it there and decode it, in one process and for one rank.
"""

from __future__ import annotations

import gc
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, cast

import msgspec
import numpy as np

from aserve import frames
from aserve.bench.options import HostStepOptions, integers
from aserve.bench.result import BenchResult, Table, mean, median, percentile, progress, spread
from aserve.bench.step_driver import result_of
from aserve.cache.page_keys import prompt_keys
from aserve.config import Resolved
from aserve.frames import FrameSplitter
from aserve.messages.executor import EngineSpec, GroupSpec, SchedulerEffect, SchedulerEvent
from aserve.messages.output import Retired
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.step import Launch, ScheduleBatch
from aserve.parallel.topology import ToRank
from aserve.scheduling.scheduler import Scheduler

TITLE = "scheduler, time per step"
VOCAB_SIZE = 32_000
PROMPT_LEN = 64
MAX_OUTPUT_LEN = 128  # lengths are drawn from 1 to this, so that rows always end and join
PAGE_SIZE = 16
MAX_BATCHED_TOKENS = 8192
LONGEST_BYTES = 1 << 20  # of a message, which are some tens of KB
ROWS_PER_WAITING = 8  # rows for each waiting request


NOTE = (
    "Scheduler.step alone: a StepResult and new requests in, all effects out; depth 2, "
    f"pages of {PAGE_SIZE}, prefix cache on, prompts of {PROMPT_LEN} random tokens."
)


def run(options: HostStepOptions, _resolved: Resolved) -> BenchResult:
    found = measure(options)
    lines = [_summary(num_rows, repeats) for num_rows, repeats in found.items()]
    figures = {
        "rows": {str(line["rows"]): line["median_us"] for line in lines},
        "details": lines,
        "cached_tokens": sum(one.num_cached for repeats in found.values() for one in repeats),
    }
    rows = [[str(value) for value in line.values()] for line in lines]
    return BenchResult(figures, (Table(TITLE, list(lines[0]), rows),), (NOTE,))


def measure(options: HostStepOptions) -> dict[int, list[Measured]]:
    """Returns the repeats by number of rows. The sizes alternate, so that a slow moment of the
    machine hits all of them.
    """
    sizes = integers(options.rows, flag="--rows")
    found: dict[int, list[Measured]] = {num_rows: [] for num_rows in sizes}
    plan = [(num_rows, seed) for seed in range(options.repeats) for num_rows in sizes]
    with progress(TITLE, len(plan)) as done:
        for num_rows, seed in plan:
            found[num_rows].append(Load(num_rows, seed=seed).measure(options.steps))
            done()
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    times_us: list[float]
    cpu_us: list[float]  # CPU time of the same steps, which other processes do not affect
    rank_us: list[float]  # of the message to a rank
    num_running: list[int]
    num_joins: int
    num_cached: int  # prompt tokens in the prefix cache, which must be 0: no prompts repeat

    @property
    def median_us(self) -> float:
        return median(self.times_us)


def _summary(num_rows: int, repeats: list[Measured]) -> dict[str, float]:
    medians = [one.median_us for one in repeats]
    times = [took for one in repeats for took in one.times_us]
    num_joins = sum(one.num_joins for one in repeats)
    return {
        "rows": num_rows,
        "median_us": round(median(medians), 1),
        "cpu_us": round(median([median(one.cpu_us) for one in repeats]), 1),
        "rank_us": round(median([median(one.rank_us) for one in repeats]), 1),
        "p99_us": round(percentile(times, 99), 1),
        "spread": round(spread(medians), 3),
        "us_per_row": round(median(medians) / num_rows, 2),
        "running": round(mean([count for one in repeats for count in one.num_running]), 1),
        "joins_per_step": round(num_joins / len(times), 2),
    }


class Load:
    """A load in which all rows always run and a few requests wait. Each request that ends is
    replaced by a new one.
    """

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows = num_rows
        self._scheduler = Scheduler(_spec(num_rows))
        self._numbers = np.random.default_rng((num_rows, seed))
        self._in_flight: deque[ScheduleBatch] = deque()
        self._arrivals: list[SchedulerEvent] = []
        self._num_requests = 0
        self._launches: list[Launch] = []
        self._num_running: list[int] = []  # in each launch
        self._num_joins = 0
        self._num_cached = 0

    def measure(self, num_steps: int) -> Measured:
        """Times `num_steps` steps. A warm-up first spreads the rows over all output lengths."""
        for _ in range(self._num_rows + self._num_rows // ROWS_PER_WAITING + 1):
            self._arrive()
        for _ in range(self._num_rows * PROMPT_LEN // MAX_BATCHED_TOKENS + MAX_OUTPUT_LEN):
            self._step()
        self._num_joins = 0
        self._num_running.clear()
        self._launches.clear()
        gc.collect()
        times_us, cpu_us = zip(*(self._step() for _ in range(num_steps)), strict=True)
        return Measured(
            list(times_us),
            list(cpu_us),
            trips_us(self._launches),
            self._num_running,
            self._num_joins,
            self._num_cached,
        )

    def _step(self) -> tuple[float, float]:
        """Runs one scheduler step and returns its wall time and its CPU time in us."""
        events, self._arrivals = self._arrivals, []
        if self._in_flight:
            events.append(result_of(self._in_flight.popleft(), vocab_size=VOCAB_SIZE))
        start_ns, cpu_start_ns = time.perf_counter_ns(), time.thread_time_ns()
        effects = self._scheduler.step(events)
        took_ns, cpu_ns = time.perf_counter_ns() - start_ns, time.thread_time_ns() - cpu_start_ns
        self._perform(effects)
        return took_ns / 1e3, cpu_ns / 1e3

    def _perform(self, effects: Sequence[SchedulerEffect]) -> None:
        for effect in effects:
            match effect:
                case Launch(batches=(batch,)):
                    self._launches.append(effect)
                    self._in_flight.append(batch)
                    self._num_running.append(batch.stats.num_running)
                    self._num_joins += len(batch.row_inits)
                    self._num_cached += batch.stats.num_cached_tokens
                case Retired():
                    self._arrive()
                case _:
                    pass

    def _arrive(self) -> None:
        self._num_requests += 1
        prompt = self._numbers.integers(VOCAB_SIZE, size=PROMPT_LEN, dtype=np.int32)
        max_tokens = int(self._numbers.integers(1, MAX_OUTPUT_LEN + 1))
        sampling = SamplingParams(seed=self._num_requests, max_tokens=max_tokens)
        keys = prompt_keys(prompt.tobytes(), page_size=PAGE_SIZE, namespace="")
        self._arrivals.append(
            AdmitRequest(str(self._num_requests), prompt.tobytes(), sampling, page_keys=keys)
        )


def trips_us(launches: Sequence[Launch]) -> list[float]:
    """Returns how long each message is on its way to a rank."""
    splitter, decoder = FrameSplitter(), msgspec.msgpack.Decoder(ToRank)
    ours, theirs = socket.socketpair()
    found = []
    with ours, theirs, cast(IO[bytes], ours.makefile("rwb")) as stream:
        for launch in launches:
            start_ns = time.perf_counter_ns()
            frames.send(stream, launch)
            [frame] = splitter.feed(theirs.recv(LONGEST_BYTES))
            decoder.decode(frame)
            found.append((time.perf_counter_ns() - start_ns) / 1e3)
    return found


def _spec(num_rows: int) -> EngineSpec:
    """There are twice as many pages as the rows need, so there is eviction but no retraction."""
    pages_per_row = (PROMPT_LEN + MAX_OUTPUT_LEN) // PAGE_SIZE + 1
    return EngineSpec(
        page_size=PAGE_SIZE,
        groups=(GroupSpec("full", 1 + 2 * num_rows * pages_per_row),),
        max_rows=num_rows,
        max_model_len=PROMPT_LEN + MAX_OUTPUT_LEN,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        vocab_size=VOCAB_SIZE,
        max_waiting=2 * num_rows,
    )
