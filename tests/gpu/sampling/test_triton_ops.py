"""The sampler with Triton's kernels, in the interpreter, against the same in torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cuda.ops import triton_sample_ops
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.sampling.sampler import Sampled
from aserve_kernels import sample as kernel
from aserve_kernels import token_set
from tests.gpu.batch_builder import greedy
from tests.gpu.sampler_run import DrawAt, run_sampler
from tests.kernels.sample_case import Row, draw_logits, make_tables

VOCAB = 70
SPLIT = 512  # of what is counted: the interpreter is slow
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


def watched(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size_of: Callable[..., int]
) -> list[int]:
    """The size of each call of a function of the kernel."""
    sizes: list[int] = []
    real = getattr(owner, name)

    def noted(*given: Any) -> Any:
        sizes.append(size_of(*given))
        return real(*given)

    monkeypatch.setattr(owner, name, noted)
    return sizes


def test_common_limits_are_settled_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is exact but slow; what it is asked for is counted."""
    searches = watched(monkeypatch, token_set, "_last_member", lambda *_given: 1)
    rows = [Row(temperature=0.7, top_k=20, top_p=0.8), Row(temperature=0.8, top_p=0.95)] * 8
    assert_draws(draw_logits(len(rows), 700), rows)
    assert len(searches) <= 2


def assert_draws(logits: Tensor, rows: list[Row]) -> None:
    indices, *tables = make_tables(rows)
    given = (logits, indices, indices, *tables)
    got, _ = kernel.sample(*given, has_noise=True, has_limits=True)
    assert torch.equal(got, kernel.sample_ref(*given, has_noise=True, has_limits=True)[0])


def test_ranking_reads_no_split_that_is_below_all_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of the four splits hold something. Rows without limits need no ranking at all; those of
    which the best token was drawn have it ranked among the equals of its split."""
    monkeypatch.setattr(kernel, "SPLIT", SPLIT)
    sizes = watched(
        monkeypatch,
        kernel,
        "load_scaled",
        lambda _logits, columns, *_given: columns.numel.value if hasattr(columns, "numel") else 1,
    )
    logits = draw_logits(1, 4 * SPLIT)
    logits[:, : 2 * SPLIT] -= 100.0
    peaked = Row(temperature=0.01, top_p=0.9)
    for row, num_splits in (
        (Row(temperature=0.0), 0),
        (Row(), 0),
        (peaked, 1),
        (Row(top_p=0.3), 2),
    ):
        sizes.clear()
        assert_draws(logits, [row])
        assert sizes.count(kernel.TILE) == num_splits * SPLIT // kernel.TILE


def test_a_set_is_searched_for_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a flat row's thousands of tokens, of which noise mostly lifts others."""
    monkeypatch.setattr(kernel, "SPLIT", SPLIT)
    lengths = watched(monkeypatch, kernel, "search", lambda *given: int(given[2]))
    rows = [Row(top_k=5), Row(top_k=20, top_p=0.5), Row(min_p=0.5)] * 2
    assert_draws(draw_logits(1, 4 * SPLIT, spread=1.0).repeat(len(rows), 1), rows)
    assert lengths
    assert max(lengths) < SPLIT
