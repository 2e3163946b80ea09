"""Normed and turned heads of few tokens against the reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.turn_heads import compile_turn_heads, turn_heads, turn_heads_ref


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (10, 6), (32, 32), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, num_tokens: int
) -> None:
    compile_turn_heads(dtype)
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn((num_tokens, 5, head_dim), generator=generator).to(dtype)
    heads = joined[:, :3]  # as they lie in a projection of q, k and v
    angles = 6 * torch.rand((num_tokens, rotary_dim // 2), generator=generator)
    turns = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    weight = torch.randn((3, head_dim), generator=generator)
    got = turn_heads(heads, turns, weight, 1e-6)
    assert got.is_contiguous()
    # The sum of squares may end one step of float32 off; rounding makes one step of bfloat16 of it.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    expected = turn_heads_ref(heads, turns, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=4 * tolerance)


def test_bfloat16_is_rounded_where_torch_rounds_it() -> None:
    """All but a few bits in ten thousand are the same."""
    compile_turn_heads(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn((64, 4, 32), generator=generator).bfloat16()
    angles = 6 * torch.rand((64, 16), generator=generator)
    turns = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()
    weight = torch.randn((4, 32), generator=generator)
    got = turn_heads(heads, turns, weight, 1e-6)
    differs = got != turn_heads_ref(heads, turns, weight, 1e-6)
    assert differs.sum() <= 2
