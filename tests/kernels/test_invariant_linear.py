"""Products whose bits do not depend on the number of tokens, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.invariant_linear import (
    BLOCK_M,
    WIDE_FROM,
    invariant_linear,
    invariant_linear_ref,
)
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

# (tokens, inputs, outputs)
SHAPES = [(0, 8, 8), (1, 100, 33), (64, 64, 32), (65, 128, 100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_torch(
    has_bias: bool, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    num_tokens, num_ins, num_outs = shape
    x = draw(num_tokens, num_ins + 3, dtype=dtype)[:, :num_ins]
    weight = draw(num_outs, num_ins, dtype=dtype, seed=1) / num_ins**0.5
    bias = draw(num_outs, dtype=dtype, seed=2) if has_bias else None
    got = invariant_linear(x, weight, bias)
    assert_close(got, invariant_linear_ref(x, weight, bias))


def test_a_product_with_very_many_outputs_is_that_of_torch() -> None:
    x, weight = draw(2, 8), draw(WIDE_FROM + 3, 8, seed=1)
    assert_close(invariant_linear(x, weight), invariant_linear_ref(x, weight))


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_alone_and_among_any_number(dtype: torch.dtype) -> None:
    x, weight = draw(2 * BLOCK_M + 3, 70, dtype=dtype), draw(40, 70, dtype=dtype, seed=1)
    expected = invariant_linear(x, weight)
    for sizes in ([1, 2, BLOCK_M, BLOCK_M], [BLOCK_M - 1, 3, BLOCK_M + 1]):
        parts = [invariant_linear(part, weight) for part in x.split(sizes)]
        assert torch.equal(torch.cat(parts), expected)
