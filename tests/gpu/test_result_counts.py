"""Steps that give their rows no tokens, or any number of tokens, and steps without rows."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.step.future_map import LAST_TOKEN
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed, pack, pack_nothing
from aserve.messages.base import array_i32
from aserve.messages.results import StepResult
from aserve.messages.step import RowInit
from aserve.tiny import MODEL_DIR
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.batch_builder import greedy, running
from tests.gpu.drive import make_executor


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
