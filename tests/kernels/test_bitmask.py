"""Masks over logits against the reference and the sampler in torch."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.sampling.token_masks import allow
from aserve_kernels.bitmask import apply_bitmask, apply_bitmask_ref
from tests.kernels.tolerance import draw


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2048, 4133])
@pytest.mark.parametrize("num", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_mask_leaves_out_becomes_minus_infinity(
    dtype: torch.dtype, num: int, vocab_size: int
) -> None:
    joined = draw(num, vocab_size + 5, dtype=dtype)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (num, -(-vocab_size // 32) + 1)).int()
    got, expected, of_sampler = (joined.clone() for _ in range(3))
    apply_bitmask(got[:, :vocab_size], words)
    apply_bitmask_ref(expected[:, :vocab_size], words)
    allow(of_sampler[:, :vocab_size], words)
    assert torch.equal(got, expected)
    assert torch.equal(got, of_sampler)
    assert not got[:, vocab_size:].isinf().any()
