"""`aserve bench admission` measures the scheduler's CPU time per tick under the heaviest loads.

All requests of a load arrive at once. A tick is one call of `SchedulerActor.handle`: the oldest
StepResult and new requests in, all effects performed, observers told. The device takes no time.
Every repeat runs the same ticks, and a tick's time is the median of its repeats, so that what other
processes do to the machine counts less.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aserve.actors.scheduler import SchedulerActor, SchedulerPorts, SchedulerWatch
from aserve.bench.options import AdmissionOptions
from aserve.bench.result import BenchResult, Table, mean, median, percentile, progress
from aserve.bench.step_driver import result_of
from aserve.cache.page_keys import prompt_keys
from aserve.channel import Channel
from aserve.config import Resolved
from aserve.errors import BugError
from aserve.gpu.step.ticket import StepTicket
from aserve.host.memory import set_up_collector
from aserve.messages.executor import EngineSpec, GroupSpec, SchedulerEvent, Ticket
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.step import Resync, Sample, ScheduleBatch
from aserve.observability.reports import TickReporter
from aserve.observability.step_log import StepLog
from aserve.observability.trace import Trace
from aserve.scheduling.scheduler import Scheduler

TITLE = "scheduler, CPU time per tick"
VOCAB_SIZE = 32_000
PAGE_SIZE = 16
NUM_PAGES = 131_072
MAX_ROWS = 256
MAX_BATCHED_TOKENS = 8192
MAX_TOKENS = 32
LONG_LEN = 100_000
MEDIUM_LEN = 16_384
SHORT_LEN = 64
OWN_LEN = 256  # tokens of a prompt after the shared prefix
MAX_IDLE_TICKS = 10_000

NOTE = (
    f"SchedulerActor.handle, depth 2, {MAX_ROWS} rows, {MAX_BATCHED_TOKENS} tokens per step, pages "
    f"of {PAGE_SIZE}, prefix cache on, {MAX_TOKENS} tokens per answer; the page keys are computed "
    "before. Each tick is the median of its repeats."
)

Prompts = Callable[[np.random.Generator], list[AdmitRequest]]


@dataclass(frozen=True, slots=True)
class Load:
    """A set of requests. With `is_repeated` the same prompts were served before, so they are in the
    prefix cache.
    """

    name: str
    prompts: Prompts
    is_repeated: bool = False


def run(options: AdmissionOptions, _resolved: Resolved) -> BenchResult:
    repeats: dict[str, list[list[float]]] = {load.name: [] for load in LOADS}
    with progress(TITLE, options.repeats * len(LOADS)) as done:
        for _ in range(options.repeats):
            for load in LOADS:
                repeats[load.name].append(asyncio.run(measure(load)))
                done()
    lines = {name: _summary(_medians(times)) for name, times in repeats.items()}
    headings = ["load", *next(iter(lines.values()))]
    rows = [[name, *(str(value) for value in line.values())] for name, line in lines.items()]
    return BenchResult({"loads": lines}, (Table(TITLE, headings, rows),), (NOTE,))


async def measure(load: Load) -> list[float]:
    """Returns the CPU time of each tick in ms, from the arrival of the load to its end."""
    engine = _Engine()
    requests = load.prompts(np.random.default_rng(0))
    if load.is_repeated:
        engine.serve(requests)
    set_up_collector()
    try:
        return engine.serve(requests)
    finally:
        await engine.actor.stop()


class _Engine:
    """The scheduler actor, whose neighbours are channels that nobody reads in between."""

    def __init__(self) -> None:
        self._device = _Device()
        self._scheduler = Scheduler(SPEC)
        self._text: Channel[DetokenizerEvent] = Channel()
        self._tickets: Channel[Ticket] = Channel()
        reporter = TickReporter(lambda _: None)
        self.actor = SchedulerActor(
            self._scheduler,
            SchedulerPorts(self._device, self._tickets, self._text),
            watch=SchedulerWatch(Trace(), (reporter, StepLog())),
            inbox=Channel(),
        )

    def serve(self, requests: Sequence[AdmitRequest]) -> list[float]:
        """NOTE: it never awaits, so that the ticks which the actor adds by itself do not run."""
        times_ms: list[float] = []
        in_flight = self._device.in_flight
        events: list[SchedulerEvent] = list(requests)
        num_idle = 0
        while events or in_flight or self.actor.backlog() or not self._scheduler.is_idle:
            start_ns = time.thread_time_ns()
            self.actor.handle(events)
            times_ms.append((time.thread_time_ns() - start_ns) / 1e6)
            self._tickets.take()
            answers = self._text.take()
            for answer in answers:
                if isinstance(answer, Refused):
                    raise BugError(f"the bench's own request was refused: {answer.error.message}")
            num_idle = 0 if events or answers or in_flight else num_idle + 1
            if num_idle > MAX_IDLE_TICKS:
                raise BugError(f"the scheduler did nothing for {MAX_IDLE_TICKS} ticks")
            events = [result_of(in_flight.popleft(), vocab_size=VOCAB_SIZE)] if in_flight else []
        return times_ms


class _Device:
    """An Executor that keeps the batches."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.in_flight: deque[ScheduleBatch] = deque()

    def launch(self, *batches: ScheduleBatch) -> Ticket:
        self.in_flight.extend(batches)
        return StepTicket(batches[0].iteration, asyncio.get_running_loop())

    def sample(self, sample: Sample) -> Ticket:
        raise BugError(f"step {sample.iteration} has held rows, but this load has no grammars")

    def resync(self, resync: Resync) -> None:
        raise BugError(f"step {resync.iteration} follows a failure, but this device never fails")


def _medians(repeats: list[list[float]]) -> list[float]:
    """Returns the median of each tick over the repeats."""
    return [median(list(times_ms)) for times_ms in zip(*repeats, strict=True)]


def _summary(times_ms: list[float]) -> dict[str, float]:
    return {
        "longest_ms": round(max(times_ms), 2),
        "p99_ms": round(percentile(times_ms, 99), 2),
        "mean_ms": round(mean(times_ms), 3),
        "ticks": len(times_ms),
    }


def _one_group(numbers: np.random.Generator) -> list[AdmitRequest]:
    return [_request(0, _tokens(numbers, LONG_LEN), n=128)]


def _shared(numbers: np.random.Generator) -> list[AdmitRequest]:
    prefix = _tokens(numbers, MEDIUM_LEN - OWN_LEN)
    prompts = [np.concatenate([prefix, _tokens(numbers, OWN_LEN)]) for _ in range(500)]
    return [_request(number, prompt) for number, prompt in enumerate(prompts)]


def _distinct(numbers: np.random.Generator) -> list[AdmitRequest]:
    return [_request(number, _tokens(numbers, MEDIUM_LEN)) for number in range(64)]


def _many(numbers: np.random.Generator) -> list[AdmitRequest]:
    return [_request(number, _tokens(numbers, SHORT_LEN)) for number in range(10_000)]


def _tokens(numbers: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return numbers.integers(VOCAB_SIZE, size=count, dtype=np.int32)


def _request(
    number: int, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], *, n: int = 1
) -> AdmitRequest:
    prompt_ids = prompt.tobytes()
    return AdmitRequest(
        request_id=str(number),
        prompt_ids=prompt_ids,
        sampling=SamplingParams(seed=number, max_tokens=MAX_TOKENS, n=n),
        page_keys=prompt_keys(prompt_ids, page_size=PAGE_SIZE, namespace=""),
    )


LOADS = (
    Load("n = 128, prompt of 100,000", _one_group),
    Load("n = 128, prompt of 100,000, cached", _one_group, is_repeated=True),
    Load("500 x 16,384, shared prefix, cold", _shared),
    Load("500 x 16,384, shared prefix, cached", _shared, is_repeated=True),
    Load("64 x 16,384, distinct", _distinct),
    Load("10,000 waiting", _many),
)

SPEC = EngineSpec(
    page_size=PAGE_SIZE,
    groups=(GroupSpec("full", NUM_PAGES),),
    max_rows=MAX_ROWS,
    max_model_len=LONG_LEN + MAX_TOKENS,
    max_batched_tokens=MAX_BATCHED_TOKENS,
    vocab_size=VOCAB_SIZE,
    max_waiting=10_000,
)
