"""Steps whose rows get no token or several, launches of several ranks, and trees of drafts."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aserve.errors import ErrorInfo
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.step.future_map import LAST_TOKEN
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed, pack, pack_nothing
from aserve.gpu.step.ticket import StepTicket
from aserve.messages.base import array_i32
from aserve.messages.changes import EngineJob
from aserve.messages.executor import SchedulerEffect
from aserve.messages.results import StepResult
from aserve.messages.step import DraftTree, Launch, Resync, RowInit, Sample, ScheduleBatch
from aserve.tiny import MODEL_DIR
from tests.fakes.drafters import StumblingTree, speculative
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.packed_channel import Codec
from tests.gpu.batch_builder import BatchBuilder, greedy, running
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs


class MiddleStage(Autoregressive):
    """A middle stage of a pipeline: it computes hidden states, and gives no tokens."""

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        hidden = runner.forward(step.batch)
        return pack_nothing(hidden.device)


class SomeTokens(Autoregressive):
    """Gives row r r % 3 tokens, as a mode whose blocks finish at different times does."""

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        sampled = runner.sample(step, runner.forward(step.batch))
        rows = step.arrays.ints("sample_rows")
        runner.relay.stash(rows, {LAST_TOKEN: sampled.tokens}, iteration=step.iteration)
        tokens = torch.stack((sampled.tokens, (sampled.tokens + 1) % VOCAB), dim=1)
        return pack(tokens, rows % 3, sampled)


async def results_of(
    executor: TorchExecutor, *steps: dict[int, list[int]], inits: list[RowInit] | None = None
) -> list[StepResult]:
    """The results of steps in which every row samples."""
    async with running(executor) as builder:
        batches = [builder.batch(rows, sampling=rows, inits=inits or ()) for rows in steps]
        outcomes = [await executor.launch(batch) for batch in batches]
    results = [outcome for outcome in outcomes if isinstance(outcome, StepResult)]
    assert len(results) == len(steps)
    return results


@pytest.mark.parametrize("debug_checks", [False, True])
async def test_a_step_that_gives_no_tokens_is_a_result_without_rows(*, debug_checks: bool) -> None:
    executor = make_executor(HashModel(), mode=MiddleStage(), debug_checks=debug_checks)
    inits = [greedy(2, num_logprobs=1)]
    [result] = await results_of(executor, {2: [3, 4], 3: [5]}, inits=inits)
    assert (result.rows, result.counts, result.tokens) == (b"", b"", b"")
    assert result.logprobs == ()
    assert result.iteration == 1


async def test_a_step_may_give_each_row_any_number_of_tokens() -> None:
    prompts = {row: [row, 7, 2 * row] for row in (1, 2, 3, 4)}
    inits = [greedy(row, num_logprobs=1) for row in prompts]
    [one] = await results_of(make_executor(HashModel()), prompts, inits=inits)
    executor = make_executor(HashModel(), mode=SomeTokens())
    [some] = await results_of(executor, prompts, inits=inits)
    first = array_i32(one.tokens).tolist()
    assert array_i32(some.rows).tolist() == [1, 2, 3, 4]
    assert array_i32(some.counts).tolist() == [1, 2, 0, 1]
    second_of_row_2 = (first[1] + 1) % VOCAB
    assert array_i32(some.tokens).tolist() == [first[0], first[1], second_of_row_2, first[3]]


@pytest.mark.parametrize("kind", ["debug", "fused"])
async def test_an_idle_batch_is_a_step_without_rows(kind: str) -> None:
    """A rank without work gets one beside the batches of other ranks."""
    first, idle, second = await results_of(_executor(kind), {2: [3, 4]}, {}, {2: [-2]})
    assert (idle.rows, idle.counts, idle.tokens) == (b"", b"", b"")
    expected = await results_of(_executor(kind), {2: [3, 4]}, {2: [-2]})
    assert [first.tokens, second.tokens] == [each.tokens for each in expected]


def _executor(kind: str) -> TorchExecutor:
    if kind != "fused":
        return make_executor(HashModel(), debug_checks=kind == "debug")
    executor = build_executor(BuildOptions(MODEL_DIR, num_pages=65, max_rows=5))
    assert executor._runner._parts.fused_step is not None
    return executor


EFFECTS = Codec(SchedulerEffect)


class OneBusyRank:
    """An executor of two data-parallel ranks. Every launch is widened to two batches, of which that
    of the other rank is idle."""

    def __init__(self, busy: TorchExecutor, idle: TorchExecutor) -> None:
        self.spec = busy.spec
        self.about = busy.about
        self.ranks = (busy, idle)
        self.idle_results: list[StepTicket] = []
        self._builder = BatchBuilder(idle)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        for rank in self.ranks:
            rank.start(loop)
        self.died = self.ranks[0].died

    async def warm_up(self) -> None:
        for rank in self.ranks:
            await rank.warm_up()

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        errors = [await rank.run_job(job) for rank in self.ranks]
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
        assert isinstance(outcome, StepResult)
        assert outcome == StepResult(batch.iteration, b"", b"", b"", took_us=outcome.took_us)


STEM = [(7 * i * i + 3 * i) % VOCAB for i in range(20)]


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_paths_of_a_tree_give_the_tokens_of_the_plain_engine(
    depth: int, lead: int, temperature: float
) -> None:
    mode = speculative(StumblingTree())
    asked = [
        request(f"r{number}", STEM[number : number + 7], max_tokens=24, temperature=temperature)
        for number in range(3)
    ]
    executor = make_executor(
        HashModel(), mode=mode, attention="torch-ref", depth=depth, lead=lead, page_size=4
    )
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    windows = [batch.verify for batch in served.batches if batch.verify]
    assert all(window.tree == DraftTree(max_depth=2) for window in windows)
    num_windows = sum(int((array_i32(window.num_drafts) > 0).sum()) for window in windows)
    assert 0 < num_windows < 3 * 23 / 2  # the accepted nodes are not those behind the root
