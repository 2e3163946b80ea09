"""Logits of a step in slices, and logprobs all the way out: those of a naive recomputation."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch

import aserve.gpu.device.cpu.device
from aserve.gpu.decode.base import DecodeMode
from aserve.messages.base import array_f32, array_i32, pack_i32
from aserve.messages.results import RowLogprobs, SampleResult, StepResult
from aserve.messages.step import RowInit, Sample, ScheduleBatch, VerifyPlan
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.batch_builder import BatchBuilder, greedy
from tests.gpu.drive import make_executor
from tests.gpu.naive_sampler import Floats, naive_logits, naive_token
from tests.parity.dense_attend import DenseAttend

HISTORY = [3, 1, 4, 1, 5, 9, 2, 6, 5]
INITS = [
    greedy(1, num_logprobs=2, presence_penalty=1.0, prompt_len=4),
    greedy(2),
    greedy(3, num_logprobs=0, temperature=1.0, seed=5, top_k=3),
    greedy(4, num_logprobs=5, temperature=1.0, seed=6, logit_bias=((7, 2.0),)),
    greedy(5, num_logprobs=3, raw_logprobs=True, repetition_penalty=1.5, logit_bias=((7, 9.0),)),
]


def naive_logprobs(history: list[int], init: RowInit) -> Floats:
    """[vocab], of the token after the history."""
    logits = _logits(history)
    scored = logits if init.raw_logprobs else naive_logits(logits, history, init)
    logprobs: Floats = scored - np.logaddexp.reduce(scored)
    return logprobs


def _logits(history: list[int]) -> Floats:
    model = HashModel()
    ids, positions = torch.tensor(history), torch.arange(len(history))
    return np.asarray(model.logits(model.forward(ids, positions, DenseAttend())[-1:])[0].numpy())


async def results_of(*batches: ScheduleBatch, mode: DecodeMode | None = None) -> list[StepResult]:
    executor = make_executor(HashModel(), mode=mode)
    executor.start(asyncio.get_running_loop())
    try:
        outcomes = [await ticket for ticket in [executor.launch(batch) for batch in batches]]
    finally:
        executor.close()
    return [outcome for outcome in outcomes if isinstance(outcome, StepResult)]


def assert_naive(record: RowLogprobs, place: int, *, token: int, expected: Floats) -> None:
    """One token of a row's record."""
    assert array_f32(record.chosen)[place] == pytest.approx(expected[token], abs=1e-5)
    num_tokens = len(array_f32(record.chosen))
    top_ids = array_i32(record.top_ids).reshape(num_tokens, -1)[place]
    best = np.argsort(-expected, kind="stable")[: len(top_ids)]
    assert top_ids.tolist() == best.tolist()
    top = array_f32(record.top_logprobs).reshape(num_tokens, -1)[place]
    assert top.tolist() == pytest.approx(expected[best].tolist(), abs=1e-5)


@pytest.mark.parametrize("rows_per_slice", [1, 3, 100])
async def test_each_row_gets_its_logprobs_however_the_logits_are_sliced(
    rows_per_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserve.gpu.device.cpu.device, "LOGITS_ELEMENTS", rows_per_slice * VOCAB)
    histories = {init.row: [*HISTORY, init.row] for init in INITS}
    builder = BatchBuilder(make_executor(HashModel()).spec)
    [result] = await results_of(builder.batch(histories, sampling=histories, inits=INITS))
    tokens = array_i32(result.tokens).tolist()
    assert [record.row for record in result.logprobs] == [1, 3, 4, 5]
    for record in result.logprobs:
        init = INITS[record.row - 1]
        expected = naive_logprobs(histories[record.row], init)
        assert_naive(record, 0, token=tokens[record.row - 1], expected=expected)
        assert len(array_i32(record.top_ids)) == init.num_logprobs


@pytest.mark.parametrize("rows_per_slice", [1, 3, 100])
async def test_held_rows_are_sampled_alike_however_their_logits_are_sliced(
    rows_per_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserve.gpu.device.cpu.device, "LOGITS_ELEMENTS", rows_per_slice * VOCAB)
    histories = {init.row: [*HISTORY, init.row] for init in INITS}
    executor = make_executor(HashModel())
    builder = BatchBuilder(executor.spec)
    step = builder.batch(histories, sampling=[], held=histories, inits=INITS)
    executor.start(asyncio.get_running_loop())
    try:
        executor.launch(step)
        result = await executor.sample(Sample(1, step.rows, b"\xff" * 8 * len(INITS)))
    finally:
        executor.close()
    assert isinstance(result, SampleResult)
    tokens = array_i32(result.tokens).tolist()
    for init, token in zip(INITS, tokens, strict=True):
        processed = naive_logits(_logits(histories[init.row]), histories[init.row], init)
        assert token == naive_token(processed, len(histories[init.row]), init)
    assert [record.row for record in result.logprobs] == [1, 3, 4, 5]
    for record in result.logprobs:
        expected = naive_logprobs(histories[record.row], INITS[record.row - 1])
        assert_naive(record, 0, token=tokens[record.row - 1], expected=expected)


async def test_an_accepted_draft_has_logprobs_and_a_rejected_one_has_none() -> None:
    """Row 1's draft of an even position is the model's own token; the other's is not."""
    mode = TwoTokens()
    builder = BatchBuilder(make_executor(HashModel(), mode=mode).spec)
    prompts = {1: HISTORY[:8], 3: HISTORY}  # the drafts stand at positions 9 and 10
    inits = [greedy(row, num_logprobs=2) for row in prompts]
    first = builder.batch(prompts, sampling=prompts, inits=inits)
    query_lens = {row: [-row, -row] for row in prompts}
    window = builder.batch(query_lens, sampling=prompts)
    verify = _verifying(window)
    prefill, result = await results_of(first, verify, mode=mode)
    assert array_i32(result.counts).tolist() == [2, 1]
    tokens = array_i32(result.tokens).tolist()
    first_tokens = dict(zip((1, 3), array_i32(prefill.tokens).tolist(), strict=True))
    by_row = {1: tokens[:2], 3: tokens[2:]}
    for record, init in zip(result.logprobs, inits, strict=True):
        history = [*prompts[record.row], first_tokens[record.row]]
        assert len(array_f32(record.chosen)) == len(by_row[record.row])
        for place, token in enumerate(by_row[record.row]):
            expected = naive_logprobs([*history, *by_row[record.row][:place]], init)
            assert_naive(record, place, token=token, expected=expected)


def _verifying(window: ScheduleBatch) -> ScheduleBatch:
    """The last token of each row's span is a draft."""
    return msgspec.structs.replace(window, verify=VerifyPlan(pack_i32([1, 1])))
