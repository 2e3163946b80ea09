"""A launch of several data-parallel ranks, of which some have nothing to do."""

from __future__ import annotations

import asyncio

from aserve.channel import Codec
from aserve.errors import ErrorInfo
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.step.ticket import StepTicket
from aserve.messages.executor import SchedulerEffect
from aserve.messages.requests import LoadLora
from aserve.messages.results import StepResult
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import BatchBuilder
from tests.gpu.drive import make_executor, request, serve

EFFECTS = Codec(SchedulerEffect)


class OneBusyRank:
    """An executor of two data-parallel ranks. Every launch is widened to two batches, of which that
    of the other rank is idle."""

    def __init__(self, busy: TorchExecutor, idle: TorchExecutor) -> None:
        self.spec = busy.spec
        self.about = busy.about
        self.ranks = (busy, idle)
        self.idle_results: list[StepTicket] = []
        self._builder = BatchBuilder(idle.spec)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        for rank in self.ranks:
            rank.start(loop)
        self.died = self.ranks[0].died

    async def warm_up(self) -> None:
        for rank in self.ranks:
            await rank.warm_up()

    async def load_lora(self, load: LoadLora) -> ErrorInfo | None:
        errors = [await rank.load_lora(load) for rank in self.ranks]
        return errors[0]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def launch(self, *batches: ScheduleBatch) -> StepTicket:
        launch = Launch((*batches, self._builder.batch({}, sampling=[])))
        batches = EFFECTS.round_trip(launch).batches
        tickets = [rank.launch(batch) for rank, batch in zip(self.ranks, batches, strict=True)]
        self.idle_results.append(tickets[1])
        return tickets[0]

    def sample(self, sample: Sample) -> StepTicket:
        return self.ranks[0].sample(sample)

    def resync(self, resync: Resync) -> None:
        for rank in self.ranks:
            rank.resync(resync)


def test_a_launch_of_two_ranks_runs_an_idle_batch_on_the_rank_without_work() -> None:
    asked = [request(f"r{number}", [number, 5, 3], max_tokens=6) for number in range(3)]
    ranks = OneBusyRank(make_executor(HashModel()), make_executor(HashModel()))
    served = serve(ranks, asked)
    assert served.outputs == serve(make_executor(HashModel()), asked).outputs
    results = [ticket.outcome.result() for ticket in ranks.idle_results]
    assert len(results) == len(served.batches)
    for batch, outcome in zip(served.batches, results, strict=True):
        assert outcome == StepResult(batch.iteration, b"", b"", b"")
