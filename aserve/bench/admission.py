"""`aserve bench admission` measures the scheduler's CPU time per tick under the heaviest loads.

All requests of a load arrive at once. A tick is one call of `Scheduler.step`. Its input is the
oldest StepResult and as many new requests as the intake admits. The device takes no time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aserve.bench.options import AdmissionOptions
from aserve.bench.result import BenchResult, Table, mean, percentile, progress
from aserve.bench.step_driver import result_of
from aserve.cache.prefix_tree import prompt_keys
from aserve.config import Resolved
from aserve.errors import BugError
from aserve.host.environment import set_up_collector
from aserve.messages.executor import EngineSpec, GroupSpec, SchedulerEvent
from aserve.messages.output import Refused
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.step import Launch, ScheduleBatch
from aserve.scheduling.scheduler import Scheduler
from aserve.scheduling.turn import Intake

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
    "Scheduler.step alone, depth 2, "
    f"{MAX_ROWS} rows, {MAX_BATCHED_TOKENS} tokens per step, pages of {PAGE_SIZE}, prefix cache "
    f"on, {MAX_TOKENS} tokens per answer; the page keys are computed before."
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
    found: dict[str, list[float]] = {load.name: [] for load in LOADS}
    plan = [(load, seed) for seed in range(options.repeats) for load in LOADS]
    with progress(TITLE, len(plan)) as done:
        for load, seed in plan:
            found[load.name] += measure(load, seed=seed)
            done()
    lines = {name: _summary(times_ms) for name, times_ms in found.items()}
    headings = ["load", *next(iter(lines.values()))]
    rows = [[name, *(str(value) for value in line.values())] for name, line in lines.items()]
    return BenchResult({"loads": lines}, (Table(TITLE, headings, rows),), (NOTE,))


def measure(load: Load, *, seed: int) -> list[float]:
    """Returns the CPU time of each tick in ms, from the arrival of the load to its end."""
    scheduler = Scheduler(SPEC)
    requests = load.prompts(np.random.default_rng(seed))
    if load.is_repeated:
        _serve(scheduler, requests)
    set_up_collector()
    return _serve(scheduler, requests)


def _serve(scheduler: Scheduler, requests: Sequence[AdmitRequest]) -> list[float]:
    times_ms: list[float] = []
    in_flight: deque[ScheduleBatch] = deque()
    events: list[SchedulerEvent] = list(requests)
    intake = Intake()
    num_idle = 0
    while events or in_flight or intake or not scheduler.is_idle:
        num_running = len(scheduler.state.running)
        start_ns = time.thread_time_ns()
        effects = scheduler.step(intake.next_turn(events, num_running=num_running))
        times_ms.append((time.thread_time_ns() - start_ns) / 1e6)
        for effect in effects:
            match effect:
                case Launch(batches=(batch,)):
                    in_flight.append(batch)
                case Refused():
                    raise BugError(f"the bench's own request was refused: {effect.error.message}")
                case _:
                    pass
        num_idle = 0 if events or effects or scheduler.has_more else num_idle + 1
        if num_idle > MAX_IDLE_TICKS:
            raise BugError(f"the scheduler did nothing for {MAX_IDLE_TICKS} ticks")
        events = [result_of(in_flight.popleft(), vocab_size=VOCAB_SIZE)] if in_flight else []
    return times_ms


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
