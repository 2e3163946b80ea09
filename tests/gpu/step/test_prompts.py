"""Scores and embeddings of prompts, all the way out: those of one forward of the prompt alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import aserve.gpu.device.cpu.device
from aserve.gpu.models.base import Attend, HiddenCapture
from aserve.messages.requests import AdmitRequest
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs
from tests.gpu.prompt_checks import assert_prompt
from tests.gpu.test_traces import STEM


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
    serve(make_executor(model), [request("a", STEM[:30], prompt_logprobs=1, max_tokens=0)])
    assert model.most_logits == 4


class BrokenModel(HashModel):
    """Where it sees a token of 36 its hidden state is not a number."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        hidden = super().forward(input_ids, positions, attend, capture=capture)
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
