"""QK norm, RoPE and the KV store in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.reference import rope_and_store_kv_ref
from aserve_kernels.rope_and_store_kv import ELEMENTS, rope_and_store_kv
from tests.kernels.rope_case import (
    SHAPES,
    assert_equals_reference,
    assert_rounds_as_torch,
    assert_shares_a_slot,
    draw_cos_sin,
    draw_slots,
    make_pools,
)
from tests.kernels.tolerance import TOLERANCES, draw

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MODES = {
    "store": {"is_rotary": False},
    "rope and store": {"is_rotary": True},
    "norm, rope and store": {"is_normed": True},
}


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_shape_equals_the_reference(
    mode: dict[str, bool],
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    num_tokens: int,
) -> None:
    assert_equals_reference(rope_and_store_kv, shape, num_tokens, dtype, **mode)


@pytest.mark.parametrize("is_rotary", [False, True])
def test_bfloat16_is_rounded_where_torch_rounds_it(*, is_rotary: bool) -> None:
    assert_rounds_as_torch(rope_and_store_kv, is_rotary=is_rotary)


def test_tokens_of_no_page_share_a_slot_and_disturb_no_other() -> None:
    assert_shares_a_slot(rope_and_store_kv)


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


def test_a_token_of_more_heads_than_one_program_takes_is_stored_whole() -> None:
    num_kv_heads, head_dim = ELEMENTS // 128 + 1, 128
    heads = draw(2, 3 * num_kv_heads, head_dim)
    pools = make_pools(num_kv_heads, head_dim, torch.float32)
    rope_and_store_kv(heads, torch.tensor([1, 0]), pools, cos_sin=None)
    for pool, part in zip(pools, heads.split(num_kv_heads, dim=1)[1:], strict=True):
        assert torch.equal(pool[:2], part.flip(0))
