"""An executor without threads: a FakeDevice that runs on the loop, when the test lets it.

By default each command runs in the next turn of the loop; with `is_manual` the test runs them one
by one with `run_next`. The tokens are those of the plain engine
(tests.fakes.toy_device.expected_outputs).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Generator
from typing import Any

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.messages.changes import EngineJob, LoadLora, LoadWeights, Profile
from aserve.messages.executor import EngineSpec, GroupSpec, TokenFuture
from aserve.messages.results import SampleResult, SeqLens, StepFailed, StepResult
from aserve.messages.step import Resync, Sample, ScheduleBatch
from tests.fakes.toy_device import FakeDevice

SPEC = EngineSpec(
    page_size=4,
    groups=(GroupSpec("full", 65),),
    max_rows=8,
    max_model_len=64,
    max_batched_tokens=32,
    vocab_size=320,
)


class FakeTicket:
    """Completed by hand, through `result`; nobody asks it for less than that."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.result: asyncio.Future[StepResult | SampleResult | StepFailed] = asyncio.Future()

    @property
    def seq_lens(self) -> Awaitable[SeqLens]:
        raise NotImplementedError

    def __getitem__(self, row: int) -> TokenFuture:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, StepResult | SampleResult | StepFailed]:
        return self.result.__await__()


class FakeExecutor:
    about = "a fake"

    def __init__(
        self,
        spec: EngineSpec = SPEC,
        *,
        device: FakeDevice | None = None,
        is_manual: bool = False,
    ) -> None:
        self.spec = spec
        self.device = FakeDevice(spec) if device is None else device
        self.commands: list[ScheduleBatch | Sample | Resync] = []  # all that were ever given
        self.is_manual = is_manual
        self.is_closed = False
        self.jobs: list[LoadLora | LoadWeights] = []
        self._queue: deque[tuple[ScheduleBatch | Sample | Resync, FakeTicket | None]] = deque()
        self._was_given = asyncio.Event()
        self.is_warm = asyncio.Event()
        self.died: asyncio.Future[BaseException]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.died = loop.create_future()

    def die(self, error: BaseException) -> None:
        self.died.set_result(error)

    async def warm_up(self) -> None:
        self.is_warm.set()

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        """Refuses a path that says so."""
        if isinstance(job, LoadLora | LoadWeights):
            self.jobs.append(job)
        elif not isinstance(job, Profile):
            return InvalidRequest("this executor only loads and profiles").info()
        return InvalidRequest("no adapter").info() if job.path == "broken" else None

    def close(self) -> None:
        self.is_closed = True

    def launch(self, *batches: ScheduleBatch) -> FakeTicket:
        [batch] = batches
        return self._put(batch, batch.iteration)

    def sample(self, sample: Sample) -> FakeTicket:
        return self._put(sample, sample.iteration)

    def resync(self, resync: Resync) -> None:
        self.commands.append(resync)
        self._queue.append((resync, None))
        self._schedule()

    async def until_given(self, count: int) -> None:
        while len(self.commands) < count:
            self._was_given.clear()
            await self._was_given.wait()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def run_next(self) -> None:
        command, ticket = self._queue.popleft()
        result = self.device.run(command)
        if ticket is not None:
            assert result is not None
            ticket.result.set_result(result)

    def _put(self, command: ScheduleBatch | Sample, iteration: int) -> FakeTicket:
        ticket = FakeTicket(iteration)
        self.commands.append(command)
        self._queue.append((command, ticket))
        self._schedule()
        return ticket

    def _schedule(self) -> None:
        self._was_given.set()
        if not self.is_manual:
            asyncio.get_running_loop().call_soon(self.run_next)
