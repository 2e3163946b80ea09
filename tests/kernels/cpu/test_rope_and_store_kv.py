"""QK norm, RoPE and the KV store on the CPU against the reference; no other slot is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve_kernels.cpu.rope_and_store_kv import (
    compile_rope_and_store_kv,
    rope_and_store_kv,
)
from aserve_kernels.reference import rope_and_store_kv_ref

NUM_SLOTS = 20
UNTOUCHED = 7.0


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def draw_cos_sin(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    angles = 6 * draw(num_tokens, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def make_pools(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pools = torch.full((2, NUM_SLOTS, num_kv_heads, head_dim), UNTOUCHED, dtype=dtype)
    return pools[0], pools[1]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
@pytest.mark.parametrize(("num_queries", "num_kv_heads"), [(1, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (10, 6), (32, 32), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
def test_every_shape_equals_the_reference(
    is_normed: bool,
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    num_queries: int,
    num_kv_heads: int,
    num_tokens: int,
) -> None:
    compile_rope_and_store_kv(dtype)
    num_rotated = num_queries + num_kv_heads
    joined = draw(num_tokens, num_rotated + num_kv_heads + 1, head_dim, dtype=dtype)
    heads = joined[:, :-1]  # tokens need not be adjacent
    cos_sin = draw_cos_sin(num_tokens, rotary_dim, dtype)
    weight = draw(num_rotated, head_dim) if is_normed else None
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:num_tokens]
    pools, expected = (make_pools(num_kv_heads, head_dim, dtype) for _ in range(2))
    got = rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin, weight=weight, eps=1e-6)
    expected_queries = rope_and_store_kv_ref(
        heads, slots, expected, cos_sin=cos_sin, weight=weight, eps=1e-6
    )
    assert got.is_contiguous()
    # The sum of squares may end one step of float32 off; rounding makes one step of bfloat16 of it.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, expected_queries, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(pools[0], expected[0], rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(pools[1], expected[1])


def test_bfloat16_is_rounded_where_torch_rounds_it() -> None:
    """All but a few bits in ten thousand are the same."""
    compile_rope_and_store_kv(torch.bfloat16)
    heads, cos_sin = draw(64, 5, 32).bfloat16(), draw_cos_sin(64, 32, torch.bfloat16)
    slots, weight = torch.arange(64) % NUM_SLOTS, draw(4, 32)
    pools, expected = (make_pools(1, 32, torch.bfloat16) for _ in range(2))
    got = rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin, weight=weight, eps=1e-6)
    expected_queries = rope_and_store_kv_ref(
        heads, slots, expected, cos_sin=cos_sin, weight=weight, eps=1e-6
    )
    assert (got != expected_queries).sum() <= 2


def test_heads_without_a_norm_are_rounded_as_in_torch() -> None:
    compile_rope_and_store_kv(torch.bfloat16)
    heads, cos_sin = draw(16, 5, 32).bfloat16(), draw_cos_sin(16, 32, torch.bfloat16)
    pools, expected = (make_pools(1, 32, torch.bfloat16) for _ in range(2))
    got = rope_and_store_kv(heads, torch.arange(16), pools, cos_sin=cos_sin)
    assert torch.equal(
        got, rope_and_store_kv_ref(heads, torch.arange(16), expected, cos_sin=cos_sin)
    )
    assert torch.equal(torch.stack(pools), torch.stack(expected))


def test_tokens_of_one_slot_disturb_no_other() -> None:
    """Tokens outside a layer's window all have slot 0."""
    compile_rope_and_store_kv(torch.float32)
    heads, cos_sin = draw(4, 4, 8), draw_cos_sin(4, 8, torch.float32)
    slots, pools = torch.tensor([0, 9, 0, 16]), make_pools(1, 8, torch.float32)
    rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin)
    written = (pools[0] != UNTOUCHED).any(dim=(1, 2)).nonzero().flatten()
    assert written.tolist() == [0, 9, 16]
    assert torch.equal(pools[1][slots[1:], 0], heads[1:, 3])
