"""Keys and values in the slots of their pools, and nothing else changed."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.store_kv import BLOCK, store_kv, store_kv_ref
from tests.kernels.tolerance import draw

SLOTS = 40
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 37])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 1), (2, 96), (5, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_are_stored_as_they_are(
    dtype: torch.dtype, kv_heads: int, head_dim: int, num_tokens: int
) -> None:
    joined = draw(num_tokens, 3 * kv_heads, head_dim, dtype=dtype)
    keys, values = joined[:, kv_heads : 2 * kv_heads], joined[:, 2 * kv_heads :]
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:num_tokens]
    pools = torch.full((2, SLOTS, kv_heads, head_dim), 7.0, dtype=dtype)
    expected = pools.clone()
    store_kv(keys, values, slots, (pools[0], pools[1]))
    store_kv_ref(keys, values, slots, (expected[0], expected[1]))
    assert torch.equal(pools, expected)
    assert torch.equal(pools[1][slots], values)


@pytest.mark.parametrize("pool_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_bit_pools_are_scaled_and_cut_at_their_range(
    dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    bound = torch.finfo(pool_dtype).max
    keys = torch.tensor([0.0, 1.1, -2.5, 0.019, 1e9, -1e9, bound, 2 * bound]).to(dtype)
    keys = keys.view(1, 2, 4).repeat(2, 1, 1)
    slots = torch.tensor([5, 0])
    pools = torch.zeros((2, SLOTS, 2, 4)).to(pool_dtype)
    expected = pools.clone()
    store_kv(keys, -keys, slots, (pools[0], pools[1]), (2.0, 0.5))
    store_kv_ref(keys, -keys, slots, (expected[0], expected[1]), (2.0, 0.5))
    assert torch.equal(pools.view(torch.uint8), expected.view(torch.uint8))
    assert pools.float().abs().amax() == bound


def test_a_token_longer_than_a_block_is_stored_whole() -> None:
    keys = draw(1, BLOCK // 128 + 1, 128)
    pools = torch.zeros((2, 2, *keys.shape[1:]))
    store_kv(keys, 2 * keys, torch.tensor([1]), (pools[0], pools[1]))
    assert torch.equal(pools[:, 1], torch.stack((keys[0], 2 * keys[0])))
