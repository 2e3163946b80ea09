"""Both ways to attend within a prompt, against a softmax written out."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.attention.fresh_prompt import BLOCK, FreshPrompt, fused, in_blocks


@pytest.mark.parametrize("function", [fused, in_blocks])
@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
def test_every_token_sees_itself_and_what_came_before(
    heads: tuple[int, int], num_tokens: int, function: FreshPrompt
) -> None:
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, num_heads + 2 * num_kv_heads, 8)
    qkv = torch.randn(shape, generator=generator, dtype=torch.float64)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    wide_k, wide_v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * 0.4
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("hqk,khd->qhd", weights, wide_v)
    torch.testing.assert_close(function(q, k, v, scale=0.4), expected)
