"""Logits in slices: logprobs, scores and embeddings equal those of a naive recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import aserve.gpu.device.cpu.device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.models.base import Attend
from aserve.messages.base import array_f32, array_i32
from aserve.messages.requests import AdmitRequest
from aserve.messages.results import RowLogprobs, SampleResult, StepResult
from aserve.messages.step import RowInit, Sample
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.batch_builder import greedy, running, tokens_of
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.naive_sampler import Floats, naive_logits, naive_token
from tests.gpu.plain_engine import plain_outputs
from tests.gpu.prompt_checks import assert_prompt
from tests.gpu.test_traces import STEM
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


def mixture() -> list[AdmitRequest]:
    """All kinds, in steps with each other and with rows that generate."""
    return [
        request("scored", STEM[:19], prompt_logprobs=2, max_tokens=0),
        request("embedded", STEM[3:20], embeds=True),
        request("both", STEM[5:18], prompt_logprobs=0, embeds=True),
        request("goes on", STEM[7:21], prompt_logprobs=5, logprobs=2, n=2),
        request("held", STEM[9:20], prompt_logprobs=1, grammar=TOY),
        request("short", STEM[2:3], prompt_logprobs=1, embeds=True),
        request("plain", STEM[1:9]),
        request("greater than the vocabulary", STEM[4:9], prompt_logprobs=VOCAB + 9, max_tokens=1),
    ]


@pytest.mark.parametrize("rows_per_slice", [1, 3])
def test_scores_do_not_depend_on_how_the_logits_are_sliced(
    rows_per_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserve.gpu.device.cpu.device, "LOGITS_ELEMENTS", rows_per_slice * VOCAB)
    served = serve(make_executor(HashModel(), max_batched_tokens=16), mixture())
    for each in mixture():
        for child in range(each.sampling.n):
            outputs = served.outputs.get((each.request_id, child), [])
            assert outputs == plain_outputs(HashModel(), each, child)
            assert_prompt(HashModel(), each, child, served)


class CountingModel(HashModel):
    def __init__(self) -> None:
        super().__init__()
        self.most_logits = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.most_logits = max(self.most_logits, len(hidden))
        return super().logits(hidden)


def test_no_more_than_a_slice_of_logits_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aserve.gpu.device.cpu.device, "LOGITS_ELEMENTS", 4 * VOCAB)
    model = CountingModel()
    executor = make_executor(model, device=CpuDevice())
    serve(executor, [request("a", STEM[:30], prompt_logprobs=1, max_tokens=0)])
    assert model.most_logits == 4


class BrokenModel(HashModel):
    """Where it sees a token of 36 its hidden state is not a number."""

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = super().hidden(input_ids, positions, attend)
        return torch.where((input_ids == 36)[:, None], torch.nan, hidden)


@pytest.mark.parametrize(
    "bad",
    [
        request("bad", [1, 2, 36], embeds=True),
        request("bad", [1, 36, 2], prompt_logprobs=0, max_tokens=0),
    ],
)
def test_values_that_are_no_numbers_fail_their_request_and_no_other(bad: AdmitRequest) -> None:
    good = request("good", STEM[:9], embeds=True, prompt_logprobs=2)
    served = serve(make_executor(BrokenModel()), [bad, good])
    assert served.reasons == {("bad", 0): ["error"], ("good", 0): ["length"]}
    assert_prompt(HashModel(), good, 0, served)
