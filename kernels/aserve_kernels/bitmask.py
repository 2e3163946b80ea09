"""Applies a grammar's token bitmask: the logits of forbidden tokens become minus infinity.

    logits[r, t] = -inf  where bit (t mod 32) of mask[r, t // 32] is 0

The layout of the mask is xgrammar's (https://github.com/mlc-ai/xgrammar).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 64  # mask words that one program applies
BITS: tl.constexpr = tl.constexpr(32)


def apply_bitmask(logits: Tensor, mask: Tensor) -> None:
    """Writes the logits in place.

    logits [n, vocab] of any float dtype with contiguous rows; mask int32 [n, ceil(vocab / 32)] with
    contiguous rows: bit i of word w allows token 32 w + i.
    """
    num, vocab_size = logits.shape
    if num:
        grid = (num, triton.cdiv(vocab_size, WORDS * BITS.value))
        _mask[grid](logits, mask, logits.stride(0), mask.stride(0), vocab_size, WORDS)


def apply_bitmask_ref(logits: Tensor, mask: Tensor) -> None:
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (mask[:, token_ids // 32] >> (token_ids % 32)) & 1
    logits.masked_fill_(is_allowed == 0, -torch.inf)


@triton.jit
def _mask(
    logits: tl.tensor,
    mask: tl.tensor,
    stride: int,
    mask_stride: int,
    vocab_size: int,
    WORDS: tl.constexpr,
) -> None:
    """Reads the mask alone, and writes the forbidden logits alone."""
    row = tl.program_id(0).to(tl.int64)
    word_ids = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[:, None]
    bits = tl.arange(0, BITS)[None, :]
    tokens = word_ids * BITS + bits
    in_bounds = tokens < vocab_size
    words = tl.load(mask + row * mask_stride + word_ids, mask=word_ids * BITS < vocab_size, other=0)
    is_banned = ((words >> bits) & 1) == 0
    banned = tl.full(is_banned.shape, float("-inf"), tl.float32)
    indices = logits + row * stride + tokens
    tl.store(indices, banned.to(logits.dtype.element_ty), mask=in_bounds & is_banned)
