"""The product with weights of a byte against its reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.int8_linear import compile_int8_linear, int8_linear, int8_linear_ref


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (3, 7), (33, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, num_out: int, num_in: int, num_tokens: int
) -> None:
    compile_int8_linear(dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (num_out, num_in), generator=generator, dtype=torch.int8)
    scales = torch.rand(num_out, generator=generator)
    wide = torch.randn((num_tokens, 2 * num_in), generator=generator).to(dtype)
    x = wide[:, :num_in]  # rows of another stride
    got = int8_linear(x, weight, scales)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        got, int8_linear_ref(x, weight, scales), rtol=tolerance, atol=tolerance
    )
