"""Products with weights that were packed once, against their reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aserve_kernels.cpu.bf16 import Floats
from aserve_kernels.cpu.gemm import (
    compile_grouped_linear,
    compile_packed_linear,
    pack,
    packed_grouped_linear,
    packed_linear,
    packed_linear_ref,
)
from aserve_kernels.cpu.tiles import OUTPUTS, ROWS
from aserve_kernels.cpu.wide_tiles import WIDE_ROWS

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # bfloat16: one step of it
# The dtypes of inputs and of weights.
KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize(
    "num_tokens", [0, 1, 2, ROWS - 1, ROWS, 8, 16, 17, 2 * WIDE_ROWS + 3, 3 * ROWS + 7, 33]
)
@pytest.mark.parametrize("num_out", [1, OUTPUTS, 3 * OUTPUTS, 2 * OUTPUTS + 5])
@pytest.mark.parametrize("num_in", [2, 34, 128])
@pytest.mark.parametrize(("dtype", "stored"), KINDS, ids=str)
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, stored: torch.dtype, num_in: int, num_out: int, num_tokens: int
) -> None:
    compile_packed_linear(dtype, stored=stored)
    weight, x = draw(num_out, num_in, dtype=stored), draw(num_tokens, 2 * num_in, dtype=dtype)
    packed, bias = pack(weight), draw(num_out, dtype=torch.float32).numpy()
    rows = x[:, :num_in]  # of another stride
    got, expected = packed_linear(rows, packed, bias), packed_linear_ref(rows, packed, bias)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    plain = rows.double() @ weight.double().t() + torch.from_numpy(bias)
    torch.testing.assert_close(got.double(), plain, rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("num_tokens", [7, 8, 13, 15, 17, 40])
@pytest.mark.parametrize(("dtype", "stored"), KINDS, ids=str)
def test_a_row_is_the_same_whatever_stands_beside_it(
    dtype: torch.dtype, stored: torch.dtype, num_tokens: int
) -> None:
    compile_packed_linear(dtype, stored=stored)
    x, bias = draw(num_tokens, 64, dtype=dtype), np.zeros(40, np.float32)
    packed = pack(draw(40, 64, dtype=stored))
    together = packed_linear(x, packed, bias)
    for row in range(len(x)):
        assert torch.equal(packed_linear(x[row : row + 1], packed, bias)[0], together[row])


@pytest.mark.parametrize("num_tokens", [1, 300])  # more than pass over the weights together
@pytest.mark.parametrize("num_out", [OUTPUTS - 1, 2 * OUTPUTS + 5, 7 * OUTPUTS])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_threads_share_a_product_and_change_no_bit(
    dtype: torch.dtype, num_out: int, num_tokens: int
) -> None:
    stored, num_in = torch.bfloat16, 640
    for num_workers in (1, 2):
        compile_packed_linear(dtype, num_workers, stored)
    packed, bias = pack(draw(num_out, num_in, dtype=stored)), draw(num_out, dtype=torch.float32)
    x = draw(num_tokens, num_in, dtype=dtype)
    alone = packed_linear(x, packed, bias.numpy())
    assert distance(alone, packed_linear_ref(x, packed, bias.numpy())) < TOLERANCES[dtype]
    for num_workers in (2, 3):
        shared = packed_linear(x, packed, bias.numpy(), num_workers=num_workers)
        assert torch.equal(shared, alone)


@pytest.mark.parametrize("num_tokens", [1, 20, 300])
def test_rows_with_nan_and_infinities_change_no_other_row(num_tokens: int) -> None:
    dtype = torch.bfloat16
    compile_packed_linear(dtype)
    packed, bias = pack(draw(40, 64, dtype=dtype)), np.zeros(40, np.float32)
    x = draw(num_tokens, 64, dtype=dtype)
    finite = packed_linear(x, packed, bias)
    x[-1, 3], x[0, 5] = torch.inf, torch.nan
    got = packed_linear(x, packed, bias)
    assert got[0].isnan().all()
    assert not got[-1].isfinite().any()
    assert torch.equal(got[1:-1], finite[1:-1])


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_experts_rows_are_those_of_its_own_product(dtype: torch.dtype) -> None:
    compile_grouped_linear(dtype)
    weights, x = draw(3, 40, 34, dtype=dtype), draw(15, 34, dtype=dtype)
    biases = draw(3, 40, dtype=torch.float32).numpy()
    packed: Floats = np.array([pack(weight) for weight in weights])
    starts, ends = np.array([2, 5, 5], np.int32), np.array([4, 5, 14], np.int32)
    y = packed_grouped_linear(x, packed, biases, starts, ends)
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = packed_linear(x[start:end], packed[expert], biases[expert])
        assert torch.equal(y[start:end], own)
