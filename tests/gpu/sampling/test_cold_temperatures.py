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
COLD = [1e-6, 1e-12, 1e-30, 1e-40, 1e-45]  # with the smallest one as many as there are rows
LIMITS: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.1}]
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
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_likeliest_token_comes_at_every_cold_temperature(
    sampler: str, limits: dict[str, Any]
) -> None:
    temperatures = [SMALLEST_TEMPERATURE, *COLD]
    rows = range(1, len(temperatures) + 1)
    generator = torch.Generator().manual_seed(5)
    logits = 300 * torch.randn((len(temperatures), VOCAB), generator=generator)
    inits = [init_of(row, temperatures[row - 1], limits) for row in rows]
    drawn = [DrawAt(row, 3) for row in rows]
    got = run_sampler(logits, inits, [[1, 2, 3]] * len(rows), drawn, ops=SAMPLERS[sampler]())
    assert got.tokens.tolist() == logits.argmax(dim=1).tolist()
    assert got.is_valid.all()


@pytest.mark.parametrize("temperature", [9.9e-6, *COLD, 5e-324])
def test_a_cold_temperature_of_the_models_own_defaults_is_greedy_too(temperature: float) -> None:
    defaults = GenerationDefaults(temperature=temperature)
    asked = sampling_of(
        GenerationBody(), max_tokens=1, logprobs=None, draw_seed=lambda: 1, defaults=defaults
    )
    assert asked.temperature == 0
