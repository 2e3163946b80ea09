"""The norm of few rows against its reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm
from aserve_kernels.reference import rms_norm_ref


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9])
@pytest.mark.parametrize("size", [1, 7, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_shape_equals_the_reference(
    num_workers: int, dtype: torch.dtype, size: int, num_tokens: int
) -> None:
    compile_rms_norm(dtype)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn((num_tokens, 2 * size), generator=generator).to(dtype)
    x, weight = wide[:, :size], torch.randn(size, generator=generator)  # rows of another stride
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # one step of bfloat16
    got = rms_norm(x, weight, 1e-3, num_workers=num_workers)
    expected = rms_norm_ref(x, weight, 1e-3)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=1e-6)


def test_infinities_and_nan_stay_in_their_row() -> None:
    compile_rms_norm(torch.float32)
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [3.0, 3.0]])
    got = rms_norm(x, torch.ones(2), 0.0)
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1:], torch.tensor([[torch.nan, 0.0], [1, 1]]), equal_nan=True)
