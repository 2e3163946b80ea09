"""An executor whose device only sleeps, for as long as a real step would run.

It sleeps in a thread without the interpreter lock, so the host is as free as beside a GPU. A step's
result arrives after its sleep. Only the device's thread writes `naps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from aserve.errors import BugError, ErrorInfo, InvalidRequest
from aserve.gpu.step.ticket import StepTicket
from aserve.host.threads import SWITCH_INTERVAL_S, Worker
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import EngineJob
from aserve.messages.executor import EngineSpec
from aserve.messages.results import StepResult
from aserve.messages.step import Resync, Sample, ScheduleBatch
from aserve.processes.engine import main

FIRST_TOKEN = 256  # lower ids may be special tokens, which have no text


@dataclass(frozen=True, slots=True)
class Nap:
    """One step on the device, in seconds of `time.perf_counter`. `cpu_s` is the CPU time of its
    process until it wakes, without that of the steps themselves.
    """

    num_rows: int
    start_s: float
    wake_s: float
    cpu_s: float


class SleepingExecutor:
    """A LocalExecutor that samples arbitrary tokens."""

    def __init__(self, spec: EngineSpec, *, step_s: float) -> None:
        self.spec = spec
        self.about = "a sleeping device"
        self.naps: list[Nap] = []
        self.died: asyncio.Future[BaseException]
        self._step_s = step_s
        self._is_closing = threading.Event()
        self._inbox: queue.SimpleQueue[tuple[ScheduleBatch, StepTicket] | None] = (
            queue.SimpleQueue()
        )
        self._worker = Worker("sleeping-device", self._run, on_end=self._ended)
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = loop
        self.died = loop.create_future()
        self._worker.start()

    async def warm_up(self) -> None:
        """Does nothing, because the device has nothing to warm up."""

    def launch(self, *batches: ScheduleBatch) -> StepTicket:
        [batch] = batches
        ticket = StepTicket(batch.iteration, self._loop)
        self._inbox.put((batch, ticket))
        return ticket

    def sample(self, sample: Sample) -> StepTicket:
        raise BugError(f"step {sample.iteration} has held rows, but this load has no grammars")

    def resync(self, resync: Resync) -> None:
        raise BugError(f"step {resync.iteration} follows a failure, but this device never fails")

    async def run_job(self, _job: EngineJob) -> ErrorInfo:
        return InvalidRequest("an engine that only sleeps loads nothing").info()

    def close(self) -> None:
        self._is_closing.set()
        self._inbox.put(None)
        self._worker.join()

    def _run(self) -> None:
        steps_cpu_s = 0.0
        while (job := self._inbox.get()) is not None:
            batch, ticket = job
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            result = _result_of(batch, self.spec)  # a device would make it in this time
            self._is_closing.wait(start_s + self._step_s - time.perf_counter())
            wake_s = time.perf_counter()
            steps_cpu_s += time.thread_time() - start_cpu_s
            self._loop.call_soon_threadsafe(ticket.complete, result)
            cpu_s = time.process_time() - steps_cpu_s
            self.naps.append(Nap(len(batch.rows) // 4, start_s, wake_s, cpu_s))

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._report_death, error)

    def _report_death(self, error: BaseException) -> None:
        if not self.died.done():
            self.died.set_result(error)


def _result_of(batch: ScheduleBatch, spec: EngineSpec) -> StepResult:
    """Returns one token for each row that samples. Each step has another token."""
    num_samples = len(array_i32(batch.sample_rows))
    token = FIRST_TOKEN + batch.iteration % (spec.vocab_size - FIRST_TOKEN)
    return StepResult(
        iteration=batch.iteration,
        rows=batch.sample_rows,
        counts=pack_i32([1] * num_samples),
        tokens=np.full(num_samples, token, np.int32).tobytes(),
    )


class Settings(msgspec.Struct, frozen=True):
    """The settings of the engine process, which its command line has as JSON. It writes its naps to
    `naps_path` at the end.
    """

    spec: EngineSpec
    step_s: float
    naps_path: str


def command(settings: Settings) -> tuple[str, ...]:
    text = msgspec.json.encode(settings).decode()
    return (sys.executable, "-m", "aserve.bench.sleeping_engine", text)


def run(settings: Settings) -> int:
    executor = SleepingExecutor(settings.spec, step_s=settings.step_s)
    code = main(lambda *_: executor)
    Path(settings.naps_path).write_bytes(msgspec.json.encode(executor.naps))
    return code


if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(sys.argv[1], type=Settings)))
