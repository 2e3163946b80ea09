"""Heads, pools and slots for the rope-and-store kernels, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope import RopeInputs, apply_rope
from aserve_kernels.reference import rope_and_store_kv_ref
from tests.kernels.tolerance import assert_close, draw

NUM_SLOTS = 40
UNTOUCHED = 7.0
Op = Callable[..., Tensor]
# (queries, KV heads, head_dim, rotary_dim)
SHAPES = [(1, 1, 2, 2), (6, 2, 10, 6), (20, 5, 96, 96), (6, 1, 256, 64)]


def draw_cos_sin(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    angles = 6 * torch.rand((num_tokens, rotary_dim // 2), generator=generator)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def draw_slots(num_tokens: int) -> Tensor:
    return torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:num_tokens]


def make_pools(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pools = torch.full((2, NUM_SLOTS, num_kv_heads, head_dim), UNTOUCHED).to(dtype)
    return pools[0], pools[1]


def assert_equals_reference(
    op: Op,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    dtype: torch.dtype,
    *,
    is_rotary: bool = True,
    is_normed: bool = False,
) -> None:
    """And the torch layers; no other slot is written."""
    num_queries, num_kv_heads, head_dim, rotary_dim = shape
    num_rotated = num_queries + num_kv_heads
    joined = draw(num_tokens, num_rotated + num_kv_heads + 1, head_dim, dtype=dtype)
    heads = joined[:, :-1]  # tokens need not be adjacent
    cos_sin = draw_cos_sin(num_tokens, rotary_dim, dtype) if is_rotary else None
    weight = draw(num_rotated, head_dim, seed=1) if is_normed else None
    slots = draw_slots(num_tokens)
    pools, expected = (make_pools(num_kv_heads, head_dim, dtype) for _ in range(2))
    given: dict[str, Any] = {"cos_sin": cos_sin, "weight": weight, "eps": 1e-6}
    queries = op(heads, slots, pools, **given)
    assert_close(queries, rope_and_store_kv_ref(heads, slots, expected, **given))
    assert_close(pools[0], expected[0])
    assert torch.equal(pools[1], expected[1])
    assert torch.equal(pools[1][slots], heads[:, num_rotated:])
    if cos_sin is None:
        assert torch.equal(pools[0], expected[0])
    else:
        assert queries.is_contiguous()
        norms = None if weight is None else HeadNorms(weight, eps=1e-6)
        in_torch = apply_rope(heads[:, :num_rotated], RopeInputs(cos_sin, norms))
        assert_close(torch.cat((queries, pools[0][slots]), dim=1), in_torch)


def assert_rounds_as_torch(op: Op, *, is_rotary: bool = True) -> None:
    """All bits of bfloat16 are the same, without a norm."""
    heads = draw(16, 6, 32, dtype=torch.bfloat16)
    cos_sin = draw_cos_sin(16, 32, torch.bfloat16) if is_rotary else None
    pools, expected = (make_pools(1, 32, torch.bfloat16) for _ in range(2))
    queries = op(heads, draw_slots(16), pools, cos_sin=cos_sin)
    in_torch = rope_and_store_kv_ref(heads, draw_slots(16), expected, cos_sin=cos_sin)
    assert torch.equal(queries, in_torch)
    assert torch.equal(torch.stack(pools), torch.stack(expected))


def assert_shares_a_slot(op: Op) -> None:
    """Padding rows, and tokens outside a layer's window, all have slot 0: others are as ever."""
    heads, cos_sin = draw(5, 4, 16), draw_cos_sin(5, 16, torch.float32)
    slots = torch.tensor([0, 9, 0, 16, 0])
    pools, expected = (make_pools(1, 16, torch.float32) for _ in range(2))
    queries = op(heads, slots, pools, cos_sin=cos_sin)
    assert_close(queries, rope_and_store_kv_ref(heads, slots, expected, cos_sin=cos_sin))
    written = (pools[0] != UNTOUCHED).any(dim=(1, 2)).nonzero().flatten()
    assert written.tolist() == [0, 9, 16]
    for got, wanted in zip(pools, expected, strict=True):
        assert_close(got[1:], wanted[1:])
