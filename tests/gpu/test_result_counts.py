"""Steps that give their rows no tokens, or any number of tokens, and steps without rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.tiny import MODEL_DIR
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.batch_builder import BatchBuilder, greedy
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


@asynccontextmanager
async def running(executor: TorchExecutor) -> AsyncIterator[BatchBuilder]:
    executor.start(asyncio.get_running_loop())
    try:
        yield BatchBuilder(executor.spec)
    finally:
        executor.close()


def is_result(outcome: StepResult | SampleResult | StepFailed) -> StepResult:
    assert isinstance(outcome, StepResult), outcome
    return outcome


@pytest.mark.parametrize("debug_checks", [False, True])
async def test_a_step_that_gives_no_tokens_is_a_result_without_rows(*, debug_checks: bool) -> None:
    executor = make_executor(HashModel(), mode=MiddleStage(), debug_checks=debug_checks)
    async with running(executor) as builder:
        logprobs = greedy(2, num_logprobs=1)
        batch = builder.batch({2: [3, 4], 3: [5]}, sampling=[2, 3], inits=[logprobs])
        result = is_result(await executor.launch(batch))
    assert (result.rows, result.counts, result.tokens) == (b"", b"", b"")
    assert result.logprobs == ()
    assert result.iteration == 1


async def test_a_step_may_give_each_row_any_number_of_tokens() -> None:
    plain, executor = make_executor(HashModel()), make_executor(HashModel(), mode=SomeTokens())
    prompts = {row: [row, 7, 2 * row] for row in (1, 2, 3, 4)}
    results = []
    for each in (plain, executor):
        async with running(each) as builder:
            inits = [greedy(row, num_logprobs=1) for row in prompts]
            batch = builder.batch(prompts, sampling=list(prompts), inits=inits)
            results.append(is_result(await each.launch(batch)))
    one, some = results
    first = array_i32(one.tokens).tolist()
    assert array_i32(some.rows).tolist() == [1, 2, 3, 4]
    assert array_i32(some.counts).tolist() == [1, 2, 0, 1]
    assert array_i32(some.tokens).tolist() == [
        first[0],
        *(first[1], (first[1] + 1) % VOCAB),
        first[3],
    ]


@pytest.mark.parametrize("kind", ["eager", "debug", "fused"])
async def test_an_idle_batch_is_a_step_without_rows(kind: str) -> None:
    """A rank without work gets one beside the batches of other ranks."""
    executor = _executor(kind)
    async with running(executor) as builder:
        first = is_result(await executor.launch(builder.batch({2: [3, 4]}, sampling=[2])))
        empty = builder.batch({}, sampling=[])
        assert not empty.rows
        result = is_result(await executor.launch(empty))
        assert (result.rows, result.counts, result.tokens) == (b"", b"", b"")
        second = is_result(await executor.launch(builder.batch({2: [-2]}, sampling=[2])))
    alone = _executor(kind)
    async with running(alone) as builder:
        expected = [
            is_result(await alone.launch(builder.batch(query_lens, sampling=[2]))).tokens
            for query_lens in ({2: [3, 4]}, {2: [-2]})
        ]
    assert [first.tokens, second.tokens] == expected


def _executor(kind: str) -> TorchExecutor:
    if kind != "fused":
        return make_executor(HashModel(), debug_checks=kind == "debug")
    executor = build_executor(BuildOptions(MODEL_DIR, num_pages=65, max_rows=5))
    assert executor._runner._parts.fused_step is not None
    return executor
