"""QK norm, RoPE and the KV store against the reference and the torch layers; no other slot is
written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope import RopeInputs, apply_rope
from aserve_kernels.reference import rope_and_store_kv_ref
from aserve_kernels.rope_and_store_kv import ELEMENTS, rope_and_store_kv
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

NUM_SLOTS = 40
EPS = 1e-6
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MODES = ["store", "rope and store", "norm, rope and store"]
UNTOUCHED = 7.0


def draw_cos_sin(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    angles = 6 * torch.rand((num_tokens, rotary_dim // 2), generator=generator)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def draw_slots(num_tokens: int) -> Tensor:
    return torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:num_tokens]


def make_pools(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pools = torch.full((2, NUM_SLOTS, num_kv_heads, head_dim), UNTOUCHED).to(dtype)
    return pools[0], pools[1]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 16, 17])
@pytest.mark.parametrize(
    ("num_queries", "num_kv_heads", "head_dim", "rotary_dim"),
    [(1, 1, 2, 2), (6, 2, 10, 6), (20, 5, 96, 96), (5, 5, 128, 128), (6, 1, 256, 64)],
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_shape_equals_the_reference(
    mode: str,
    dtype: torch.dtype,
    num_queries: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    num_tokens: int,
) -> None:
    num_rotated = num_queries + num_kv_heads
    joined = draw(num_tokens, num_rotated + num_kv_heads + 1, head_dim, dtype=dtype)
    heads = joined[:, :-1]  # tokens need not be adjacent
    cos_sin = None if mode == MODES[0] else draw_cos_sin(num_tokens, rotary_dim, dtype)
    weight = draw(num_rotated, head_dim, seed=1) if mode == MODES[2] else None
    slots = draw_slots(num_tokens)
    pools, expected = (make_pools(num_kv_heads, head_dim, dtype) for _ in range(2))
    queries = rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin, weight=weight, eps=EPS)
    expected_queries = rope_and_store_kv_ref(
        heads, slots, expected, cos_sin=cos_sin, weight=weight, eps=EPS
    )
    assert_close(queries, expected_queries)
    assert_close(pools[0], expected[0])
    assert torch.equal(pools[1], expected[1])
    assert torch.equal(pools[1][slots], heads[:, num_rotated:])
    if cos_sin is None:
        assert torch.equal(pools[0], expected[0])
    else:
        assert queries.is_contiguous()
        norms = None if weight is None else HeadNorms(weight, eps=EPS)
        in_torch = apply_rope(heads[:, :num_rotated], RopeInputs(cos_sin, norms))
        assert_close(torch.cat((queries, pools[0][slots]), dim=1), in_torch)


@pytest.mark.parametrize("mode", MODES[:2])
def test_bfloat16_is_rounded_where_torch_rounds_it(mode: str) -> None:
    heads, cos_sin = draw(8, 6, 32, dtype=torch.bfloat16), draw_cos_sin(8, 32, torch.bfloat16)
    given = cos_sin if mode == MODES[1] else None
    pools, expected = (make_pools(1, 32, torch.bfloat16) for _ in range(2))
    queries = rope_and_store_kv(heads, draw_slots(8), pools, cos_sin=given)
    assert torch.equal(
        queries, rope_and_store_kv_ref(heads, draw_slots(8), expected, cos_sin=given)
    )
    assert torch.equal(torch.stack(pools), torch.stack(expected))


@pytest.mark.parametrize("pool_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_rotary", [False, True])
def test_eight_bit_pools_are_scaled_and_saturate(
    is_rotary: bool, dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    """Keys are scaled by 2, values by 1/2; a rotation by 0 keeps the numbers exact."""
    bound = torch.finfo(pool_dtype).max
    values = torch.tensor([0.0, 1.1, -2.5, 0.019, 1e9, -1e9, bound, 2 * bound])
    heads = values.view(1, 1, 8).repeat(2, 4, 1).to(dtype)
    heads[:, 3] *= -1
    cos_sin = torch.tensor([[1.0] * 4 + [0.0] * 4] * 2).to(dtype) if is_rotary else None
    slots = torch.tensor([5, 0])
    pools, expected = (make_pools(1, 8, pool_dtype) for _ in range(2))
    queries = rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin, scales=(2.0, 0.5))
    rope_and_store_kv_ref(heads, slots, expected, cos_sin=cos_sin, scales=(2.0, 0.5))
    for got, wanted in zip(pools, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        assert got.float().abs().amax() == bound
    assert torch.equal(queries, heads[:, :2])


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float32, *FP8], ids=str)
def test_keys_are_rounded_to_the_models_dtype_before_they_are_to_the_pools(
    pool_dtype: torch.dtype,
) -> None:
    heads, cos_sin = draw(4, 5, 16, dtype=torch.bfloat16), draw_cos_sin(4, 16, torch.bfloat16)
    pools, exact = make_pools(1, 16, pool_dtype), make_pools(1, 16, torch.bfloat16)
    rope_and_store_kv(heads, draw_slots(4), pools, cos_sin=cos_sin)
    rope_and_store_kv(heads, draw_slots(4), exact, cos_sin=cos_sin)
    for got, whole in zip(pools, exact, strict=True):
        assert torch.equal(got.float(), whole.to(pool_dtype).float())


def test_tokens_of_no_page_share_a_slot_and_disturb_no_other() -> None:
    """Padding rows, and tokens outside a layer's window, all have slot 0."""
    heads, cos_sin = draw(5, 4, 16), draw_cos_sin(5, 16, torch.float32)
    slots = torch.tensor([0, 9, 0, 16, 0])
    pools, expected = (make_pools(1, 16, torch.float32) for _ in range(2))
    queries = rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin)
    assert_close(queries, rope_and_store_kv_ref(heads, slots, expected, cos_sin=cos_sin))
    written = (pools[0] != UNTOUCHED).any(dim=(1, 2)).nonzero().flatten()
    assert written.tolist() == [0, 9, 16]
    for got, wanted in zip(pools, expected, strict=True):
        assert_close(got[1:], wanted[1:])


def test_a_token_of_more_heads_than_one_program_takes_is_stored_whole() -> None:
    num_kv_heads, head_dim = ELEMENTS // 128 + 1, 128
    heads = draw(2, 3 * num_kv_heads, head_dim)
    pools = make_pools(num_kv_heads, head_dim, torch.float32)
    rope_and_store_kv(heads, torch.tensor([1, 0]), pools, cos_sin=None)
    for pool, part in zip(pools, heads.split(num_kv_heads, dim=1)[1:], strict=True):
        assert torch.equal(pool[:2], part.flip(0))
