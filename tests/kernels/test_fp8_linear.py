"""Activations and weights in fp8, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.fp8_linear import (
    GROUP,
    LARGEST,
    fp8_linear,
    fp8_linear_ref,
    quantize_rows,
    quantize_rows_ref,
)
from tests.kernels.test_weight_only_linear import Case, matrix_of
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

CASES = [
    Case("e4m3", 100, 70, 70),
    Case("e4m3", 130, 300, 128, rows=128),
    Case("e4m3", 40, 512, 256, rows=16),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
@pytest.mark.parametrize(("num_ins", "group"), [(300, GROUP), (256, GROUP), (100, 100)])
@pytest.mark.parametrize("is_given", [False, True])
def test_rows_are_quantised_as_in_torch(
    is_given: bool, num_ins: int, group: int, num_tokens: int, dtype: torch.dtype
) -> None:
    """With a given scale, values beyond the range become the largest ones."""
    x = draw(num_tokens, num_ins + 5, dtype=dtype)[:, :num_ins]
    x[:1, :200] = 0
    given = torch.tensor([0.004]) if is_given else None
    got, expected = quantize_rows(x, group, given), quantize_rows_ref(x, group, given)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.elements.float(), expected.elements.float())
    if is_given and num_tokens > 1:
        assert got.elements.float().abs().max() == LARGEST


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 65])
@pytest.mark.parametrize("has_groups", [False, True])
def test_a_product_is_that_of_the_numbers_that_the_elements_stand_for(
    has_groups: bool, num_tokens: int, case: Case, dtype: torch.dtype
) -> None:
    group = GROUP if has_groups else case.num_ins
    rows = quantize_rows_ref(draw(num_tokens, case.num_ins), group)
    bias = draw(case.num_outs, dtype=dtype, seed=2)
    weight = matrix_of(case)
    for own_bias in (bias, None):
        got = fp8_linear(rows, weight, own_bias, dtype=dtype)
        assert_close(got, fp8_linear_ref(rows, weight, own_bias, dtype=dtype))
