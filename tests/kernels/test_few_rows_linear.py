"""Products of a few tokens, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels import few_rows_linear as kernel
from aserve_kernels.few_rows_linear import FEW_ROWS, few_rows_linear, few_rows_linear_ref
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

# (inputs, outputs): less than a tile, whole tiles, and more than one; sums that are split or not.
SHAPES = [(8, 8), (128, 16), (300, 70), (1000, 33)]


@pytest.mark.parametrize("num_programs", [1, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_number_of_rows_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_programs: int,
) -> None:
    """With few programs a sum is not split. Rows of x may be a part of wider ones."""
    monkeypatch.setattr(kernel, "NUM_PROGRAMS", num_programs)
    num_ins, num_outs = shape
    weight = draw(num_outs, num_ins, dtype=dtype, seed=1) / num_ins**0.5
    for num_rows in range(FEW_ROWS + 1):
        x = draw(num_rows, num_ins + 3, dtype=dtype)[:, :num_ins]
        for bias in (None, draw(num_outs, dtype=dtype, seed=2)):
            got, expected = (op(x, weight, bias) for op in (few_rows_linear, few_rows_linear_ref))
            assert_close(got, expected)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x, weight = draw(FEW_ROWS, 300), draw(70, 300, seed=1)
    expected = few_rows_linear(x, weight)
    assert torch.equal(few_rows_linear(x[:2], weight), expected[:2])
    assert torch.equal(few_rows_linear(x[1:], weight), expected[1:])
