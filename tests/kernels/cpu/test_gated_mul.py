"""The gated activation of many tokens against its reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.gated_mul import KINDS, compile_gated_mul, gated_mul
from aserve_kernels.gated_mul import gated_mul_ref


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9])
@pytest.mark.parametrize("size", [1, 7, 64, 130])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, activation: str, size: int, num_tokens: int
) -> None:
    compile_gated_mul(dtype)
    generator = torch.Generator().manual_seed(0)
    joined = (4 * torch.randn((num_tokens, 2 * size), generator=generator)).to(dtype)
    got, expected = gated_mul(joined, activation, num_workers=2), gated_mul_ref(joined, activation)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7  # one step of bfloat16
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=1e-5)  # 1 + erf cancels


def test_extreme_gates_are_what_torch_says() -> None:
    compile_gated_mul(torch.float32)
    gates = torch.tensor([[-torch.inf, -200.0, 0.0, 200.0, torch.nan]])
    joined = torch.cat((gates, torch.ones_like(gates)), dim=1)
    got = gated_mul(joined, "silu", num_workers=2)
    torch.testing.assert_close(got[:, 1:], gated_mul_ref(joined, "silu")[:, 1:], equal_nan=True)
