"""Temperatures that float32 cannot divide by are greedy for every sampler; the coldest one that is
drawn with is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aserve.gpu.device.cpu.ops import compiled_sample_ops
from aserve.gpu.device.cuda.ops import triton_sample_ops
from aserve.gpu.sampling.ops import PLAIN_OPS, SHAPED_OPS, SampleOps
from aserve.http.openai.call import SMALLEST_TEMPERATURE, sampling_of
from aserve.http.openai.schema import GenerationBody
from aserve.messages.step import RowInit
from aserve.text.defaults import NEUTRAL, GenerationDefaults
from aserve_kernels import sample as kernel
from aserve_kernels import token_set
from tests.gpu.batch_builder import greedy
from tests.gpu.sampler_run import DrawAt, run_sampler

VOCAB = 70
SPLIT = 512  # the interpreter is slow
LIMITS: list[dict[str, Any]] = [{}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.1}]
SAMPLERS: dict[str, Callable[[], SampleOps]] = {
    "torch": lambda: PLAIN_OPS,
    "torch in shapes of graphs": lambda: SHAPED_OPS,
    "compiled": compiled_sample_ops,
    "triton": lambda: triton_sample_ops(torch.float32),
}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SPLIT", SPLIT)
    monkeypatch.setattr(token_set, "SPLIT", SPLIT, raising=False)


def init_of(row: int, temperature: float, limits: dict[str, Any]) -> RowInit:
    """As a request with this temperature reaches the device."""
    body = GenerationBody(temperature=temperature, seed=row, **limits)
    asked = sampling_of(body, max_tokens=1, logprobs=None, draw_seed=lambda: 1, defaults=NEUTRAL)
    return greedy(row, seed=row, temperature=asked.temperature, **limits)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_likeliest_token_comes_at_every_cold_temperature(sampler: str) -> None:
    cases = [(cold, limits) for limits in LIMITS for cold in (SMALLEST_TEMPERATURE, 1e-45)]
    rows = range(1, len(cases) + 1)
    logits = 300 * torch.randn((len(cases), VOCAB), generator=torch.Generator().manual_seed(5))
    inits = [init_of(row, *case) for row, case in zip(rows, cases, strict=True)]
    drawn = [DrawAt(row, 3) for row in rows]
    got = run_sampler(logits, inits, [[1, 2, 3]] * len(rows), drawn, ops=SAMPLERS[sampler]())
    assert got.tokens.tolist() == logits.argmax(dim=1).tolist()
    assert got.is_valid.all()


@pytest.mark.parametrize("temperature", [9.9e-6, 1e-30, 5e-324])
def test_a_cold_temperature_of_a_request_or_of_the_models_defaults_is_greedy(
    temperature: float,
) -> None:
    defaults = GenerationDefaults(temperature=temperature)
    for body, given in (
        (GenerationBody(), defaults),
        (GenerationBody(temperature=temperature), NEUTRAL),
    ):
        asked = sampling_of(body, max_tokens=1, logprobs=None, draw_seed=lambda: 1, defaults=given)
        assert asked.temperature == 0
