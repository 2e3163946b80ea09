"""The norm against its definition, in each dtype."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.layers.norm import RmsNorm

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_the_norm_is_weight_times_x_over_its_root_mean_square(
    dtype: torch.dtype, size: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (size * torch.randn(5, 16, generator=generator)).to(dtype)
    weight = torch.randn(16, generator=generator).to(dtype)
    exact = x.double()
    expected = weight * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed = RmsNorm(weight, eps=1e-5)(x)
    assert normed.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(normed.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_weight_wider_than_its_input_is_not_rounded_before_it_multiplies() -> None:
    """1.001 is 1.0 in bfloat16; times 256 or so the difference shows."""
    x = torch.tensor([[3.0, -4.0, 250.0, 256.0]], dtype=torch.bfloat16)
    weight = torch.full((4,), 1.004)
    normed = RmsNorm(weight, eps=1e-6)(x)
    assert normed.dtype == torch.bfloat16
    wide = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(normed, (wide * weight).to(torch.bfloat16))
    assert not torch.equal(normed, RmsNorm(weight.to(torch.bfloat16), eps=1e-6)(x))
