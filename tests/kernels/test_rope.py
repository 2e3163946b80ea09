"""Turned heads, normed or not, against the reference and the layers in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.head_norms import HeadNorms
from aserve.gpu.layers.rotary import TurnedBy
from aserve_kernels.rope import rope, rope_ref
from tests.kernels.tolerance import TOLERANCES, assert_close, draw


def draw_turns(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    angles = 6 * torch.rand((num_tokens, rotary_dim // 2), generator=generator)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


@pytest.mark.parametrize(("num_tokens", "num_heads"), [(0, 3), (1, 1), (3, 20)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (10, 6), (128, 128), (256, 64)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
def test_every_shape_equals_the_reference(
    is_normed: bool,
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    num_tokens: int,
    num_heads: int,
) -> None:
    joined = draw(num_tokens, num_heads + 2, head_dim, dtype=dtype)
    heads = joined[:, :num_heads]  # as they lie in a projection of q, k and v
    turns = draw_turns(num_tokens, rotary_dim, dtype)
    weight = draw(num_heads, head_dim, seed=1) if is_normed else None
    got = rope(heads, turns, weight, 1e-6)
    assert got.is_contiguous()
    assert_close(got, rope_ref(heads, turns, weight, 1e-6))
    norms = None if weight is None else HeadNorms(weight, eps=1e-6)
    assert_close(got, TurnedBy(turns)(heads, norms))


def test_bfloat16_is_rounded_where_torch_rounds_it() -> None:
    heads, turns = draw(8, 4, 32, dtype=torch.bfloat16), draw_turns(8, 32, torch.bfloat16)
    assert torch.equal(rope(heads, turns), rope_ref(heads, turns))
