"""`aserve bench relay` measures the time from a step's event on the device to its awaited token.

The bundled model runs on the CPU, with an idle event loop and with a saturated one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType

from torch import Tensor

from aserve.bench.options import RelayOptions
from aserve.bench.result import BenchResult, Table, median, percentile, progress
from aserve.bench.step_driver import running
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.errors import BugError
from aserve.gpu.build import BuildOptions, build_on
from aserve.gpu.device.base import Event
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.executor import TorchExecutor
from aserve.host.threads import in_thread, new_event_loop
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.results import StepResult
from aserve.messages.step import Launch, ScheduleBatch
from aserve.scheduling.scheduler import Scheduler
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR

TITLE = "from a step's event to the awaited token"
PROMPT_LEN = 16
PAGE_SIZE = 16
BUSY_S = 0.5e-3  # one callback of a busy loop
NOTE = (
    f"idle: the loop only awaits; saturated: callbacks of {BUSY_S * 1e3:g} ms without a pause. "
    "A token waits for two of them: the one that runs and the one before its awaiter. "
    "Targets: 300 us at p50 of an idle loop, 2,000 us at p99 of a saturated one."
)


def run(options: RelayOptions, _resolved: Resolved) -> BenchResult:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(_measure(options))
    figures = {name: times.figures() for name, times in found.items()}
    columns = list(figures["idle"])
    rows = [[name, *(f"{one[column]:,.0f}" for column in columns)] for name, one in figures.items()]
    details = {"rows": options.rows, "steps": options.steps * options.repeats}
    table = Table(TITLE, ("loop", *columns), rows)
    return BenchResult({**figures, **details}, (table,), (NOTE,))


@dataclass(slots=True)
class Times:
    """The times of all steps. `resolve_us` is from the event to the token on the loop. `step_us` is
    from the launch to the event.
    """

    resolve_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "resolve_p50_us": round(median(self.resolve_us), 1),
            "resolve_p99_us": round(percentile(self.resolve_us, 99), 1),
            "resolve_min_us": round(min(self.resolve_us), 1),
            "step_p50_us": round(median(self.step_us), 1),
            "step_p99_us": round(percentile(self.step_us, 99), 1),
            "num_steps": len(self.step_us),
        }


async def _measure(options: RelayOptions) -> dict[str, Times]:
    device = TimedCpu()
    executor = await in_thread(lambda: _build(device, options), name="load")
    relay = Relay(executor, device, options)
    async with running(executor):
        return await _alternate(relay, num_repeats=options.repeats)


async def _alternate(relay: Relay, *, num_repeats: int) -> dict[str, Times]:
    found = {"idle": Times(), "saturated": Times()}
    with progress(TITLE, num_repeats) as done:
        for _ in range(num_repeats):
            await relay.run(found["idle"])
            with BusyLoop():
                await relay.run(found["saturated"])
            done()
    return found


class TimedCpu(CpuDevice):
    """A CPU device that records the time of its last event. The executor thread writes it, and the
    loop reads it between two steps. NOTE: a CPU event has completed when it is recorded.
    """

    __slots__ = ("last_event_s",)

    def __init__(self) -> None:
        super().__init__()
        self.last_event_s = 0.0  # in seconds of `time.perf_counter`

    def mark(self) -> Event:
        self.last_event_s = time.perf_counter()
        return super().mark()

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        event = super().copy_out(values, host)
        self.last_event_s = time.perf_counter()
        return event


class Relay:
    """Runs the scheduler's steps one at a time."""

    def __init__(self, executor: TorchExecutor, device: TimedCpu, options: RelayOptions) -> None:
        self._executor = executor
        self._device = device
        self._options = options
        self._windows = TokenWindows(load_tokenizer(MODEL_DIR), seed=0)
        self._scheduler = Scheduler(executor.spec)

    async def run(self, times: Times) -> None:
        """Decodes all rows together. The first step, which is the prefill, is not counted."""
        counted = Times()
        events: list[SchedulerEvent] = [
            self._request(number) for number in range(self._options.rows)
        ]
        while (batch := self._next(events)) is not None:
            events = [await self._step(batch, counted)]
            counted = times
        while self._scheduler.has_more:
            self._scheduler.step([])

    def _next(self, events: list[SchedulerEvent]) -> ScheduleBatch | None:
        launches = [effect for effect in self._scheduler.step(events) if isinstance(effect, Launch)]
        return launches[0].batches[0] if launches else None

    async def _step(self, batch: ScheduleBatch, times: Times) -> StepResult:
        launched_s = time.perf_counter()
        ticket = self._executor.launch(batch)
        await ticket[int(array_i32(batch.sample_rows)[0])]
        resolved_s = time.perf_counter()
        event_s = self._device.last_event_s
        times.resolve_us.append((resolved_s - event_s) * 1e6)
        times.step_us.append((event_s - launched_s) * 1e6)
        result = await ticket
        if not isinstance(result, StepResult):
            raise BugError(f"step {batch.iteration} failed: {result}")
        return result

    def _request(self, number: int) -> AdmitRequest:
        """Returns a request with one token from the prefill and one from each step to count."""
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=self._options.steps + 1)
        return AdmitRequest(f"row-{number}", pack_i32(self._windows.ids(PROMPT_LEN)), sampling)


class BusyLoop:
    """Keeps the running loop busy with callbacks while the context is open."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    def __enter__(self) -> BusyLoop:
        self._loop.call_soon(self._work)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True

    def _work(self) -> None:
        end_s = time.perf_counter() + BUSY_S
        while time.perf_counter() < end_s:
            pass
        self.num_rounds += 1
        if not self._is_over:
            self._loop.call_soon(self._work)


def _build(device: TimedCpu, options: RelayOptions) -> TorchExecutor:
    """Builds an executor of the bundled model with one step in flight."""
    build_options = BuildOptions(
        model_dir=MODEL_DIR,
        page_size=PAGE_SIZE,
        num_pages=1 + options.rows * ((PROMPT_LEN + options.steps) // PAGE_SIZE + 2),
        prefix_cache=False,
        max_rows=options.rows,
        depth=1,
        lead=1,
    )
    return build_on(device, build_options)
