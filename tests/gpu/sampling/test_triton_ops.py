"""The sampling kernels in the sampler's place, and temperatures that no float32 can divide by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cpu.ops import compiled_sample_ops
from aserve.gpu.device.cuda.ops import triton_sample_ops
from aserve.gpu.sampling.ops import PLAIN_OPS, SHAPED_OPS, SampleOps
from aserve.gpu.sampling.sampler import Sampled
from aserve.http.openai.call import SMALLEST_TEMPERATURE, sampling_of
from aserve.http.openai.schema import GenerationBody
from aserve.messages.step import RowInit
from aserve.text.defaults import NEUTRAL, GenerationDefaults
from aserve_kernels import sample as kernel
from aserve_kernels import token_set
from tests.gpu.batch_builder import greedy
from tests.gpu.sampler_run import DrawAt, run_sampler
from tests.kernels.sample_case import Row, draw_logits, make_tables

VOCAB = 70
SPLIT = 512  # the interpreter is slow
HISTORY = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
NOISY: dict[str, Any] = {"temperature": 0.8}
LIMITED: dict[str, Any] = {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.01}
PENALISED: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.7,
    "prompt_len": 6,
}
STEPS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}],
    "noisy": [{}, NOISY, NOISY],
    "limited": [{}, NOISY, LIMITED, {**LIMITED, "top_p": 0.0}],
    "penalised": [PENALISED, {}, {**NOISY, **PENALISED}],
    "scored": [{"num_logprobs": 3}, {**NOISY, "num_logprobs": 1, "raw_logprobs": True}],
    "all": [{**LIMITED, **PENALISED, "allowed_ids": tuple(range(50)), "num_logprobs": 2}, {}],
}


def run(
    ops: SampleOps,
    params: list[dict[str, Any]],
    *,
    is_masked: bool,
    dtypes: tuple[torch.dtype, ...] = (),
) -> Sampled:
    """`dtypes`: what logits pass through."""
    generator = torch.Generator().manual_seed(len(params))
    logits = 2 * torch.randn((len(params), VOCAB), generator=generator)
    for dtype in dtypes:
        logits = logits.to(dtype)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (len(params), 3), generator=generator).int()
    return run_sampler(
        logits,
        [greedy(row, seed=row, **given) for row, given in enumerate(params, 1)],
        [HISTORY[: 7 + row] for row in range(len(params))],
        [DrawAt(row, 6 + row) for row in range(1, len(params) + 1)],
        mask=words if is_masked else None,
        ops=ops,
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_kernels_draw_the_tokens_of_torch(step: str, is_masked: bool) -> None:
    params = STEPS[step]
    got = run(triton_sample_ops(torch.float32), params, is_masked=is_masked)
    expected = run(PLAIN_OPS, params, is_masked=is_masked)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.is_valid, expected.is_valid)
    torch.testing.assert_close(got.top_logprobs, expected.top_logprobs)


@pytest.mark.parametrize("step", STEPS)
def test_halves_are_widened_only_where_something_is_added(step: str) -> None:
    ops, drawn_from = triton_sample_ops(torch.bfloat16), []

    def draw(logits: Tensor, *given: Any) -> Any:
        drawn_from.append(logits.dtype)
        return ops.draw(logits, *given)

    seeing = dataclasses.replace(ops, draw=draw)
    half, params = (torch.bfloat16,), STEPS[step]
    got = run(seeing, params, is_masked=False, dtypes=half)
    in_torch = run(PLAIN_OPS, params, is_masked=False, dtypes=half)
    expected = run(PLAIN_OPS, params, is_masked=False, dtypes=(*half, torch.float32))
    assert drawn_from == [torch.float32 if step in ("penalised", "all") else torch.bfloat16]
    assert got.tokens.tolist() == in_torch.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(got.top_logprobs, expected.top_logprobs)


def test_common_limits_are_settled_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is exact but slow; what it is asked for is counted."""
    search = Mock(side_effect=token_set._last_member)
    monkeypatch.setattr(token_set, "_last_member", search)
    rows = [Row(temperature=0.7, top_k=20, top_p=0.8), Row(temperature=0.8, top_p=0.95)] * 8
    indices, *tables = make_tables(rows)
    given = (draw_logits(len(rows), 700), indices, indices, *tables)
    got, _ = kernel.sample(*given, has_noise=True, has_limits=True)
    assert torch.equal(got, kernel.sample_ref(*given, has_noise=True, has_limits=True)[0])
    assert search.call_count <= 2


LIMITS: list[dict[str, Any]] = [{}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.1}]
SAMPLERS: dict[str, Callable[[], SampleOps]] = {
    "torch": lambda: PLAIN_OPS,
    "torch in shapes of graphs": lambda: SHAPED_OPS,
    "compiled": compiled_sample_ops,
    "triton": lambda: triton_sample_ops(torch.float32),
}


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SPLIT", SPLIT)
    monkeypatch.setattr(token_set, "SPLIT", SPLIT, raising=False)


def init_of(row: int, temperature: float, limits: dict[str, Any]) -> RowInit:
    """As a request with this temperature reaches the device."""
    body = GenerationBody(temperature=temperature, seed=row, **limits)
    asked = sampling_of(body, max_tokens=1, logprobs=None, draw_seed=lambda: 1, defaults=NEUTRAL)
    return greedy(row, seed=row, temperature=asked.temperature, **limits)


@pytest.mark.usefixtures("small_splits")
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
