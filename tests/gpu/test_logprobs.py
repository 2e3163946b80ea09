"""Logits of a step in slices, and logprobs all the way out: those of a naive recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import aserve.gpu.device.cpu.device
from aserve.messages.base import array_f32, array_i32
from aserve.messages.results import RowLogprobs, SampleResult, StepResult
from aserve.messages.step import RowInit, Sample
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.batch_builder import greedy, running, tokens_of
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


def assert_naive(record: RowLogprobs, *, token: int, expected: Floats) -> None:
    assert array_f32(record.chosen).tolist() == pytest.approx([expected[token]], abs=1e-5)
    top_ids = array_i32(record.top_ids)
    best = np.argsort(-expected, kind="stable")[: len(top_ids)]
    assert top_ids.tolist() == best.tolist()
    assert array_f32(record.top_logprobs).tolist() == pytest.approx(expected[best], abs=1e-5)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("rows_per_slice", [1, 3, 100])
async def test_each_row_gets_its_token_and_logprobs_however_the_logits_are_sliced(
    rows_per_slice: int, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserve.gpu.device.cpu.device, "LOGITS_ELEMENTS", rows_per_slice * VOCAB)
    histories = {init.row: [*HISTORY, init.row] for init in INITS}
    executor = make_executor(HashModel())
    async with running(executor) as builder:
        if is_held:
            step = builder.batch(histories, sampling=[], held=histories, inits=INITS)
            executor.launch(step)
            outcome = await executor.sample(Sample(1, step.rows, b"\xff" * 8 * len(INITS)))
        else:
            step = builder.batch(histories, sampling=histories, inits=INITS)
            outcome = await executor.launch(step)
    assert isinstance(outcome, StepResult | SampleResult)
    tokens = tokens_of(outcome)
    for init, token in zip(INITS, tokens, strict=True):
        history = histories[init.row]
        processed = naive_logits(_logits(history), history, init)
        assert token == naive_token(processed, len(history), init)
    assert [record.row for record in outcome.logprobs] == [1, 3, 4, 5]
    for record in outcome.logprobs:
        init = INITS[record.row - 1]
        expected = naive_logprobs(histories[record.row], init)
        assert_naive(record, token=tokens[record.row - 1], expected=expected)
        assert len(array_i32(record.top_ids)) == init.num_logprobs
