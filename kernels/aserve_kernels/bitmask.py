"""A grammar's mask over logits: what a bit does not allow becomes minus infinity.

It knows no grammar.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 64  # of a program
BITS: tl.constexpr = tl.constexpr(32)


def apply_bitmask(logits: Tensor, mask: Tensor) -> None:
    """logits [n, vocab] of any float dtype, the tokens of a row side by side, in place; mask int32
    [n, ceil(vocab / 32)], the words of a row side by side: bit i of word w allows token 32 w + i.
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
    """Only what is banned is written; nothing is read but the mask."""
    place = tl.program_id(0).to(tl.int64)
    numbers = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[:, None]
    bits = tl.arange(0, BITS)[None, :]
    tokens = numbers * BITS + bits
    is_in = tokens < vocab_size
    words = tl.load(mask + place * mask_stride + numbers, mask=numbers * BITS < vocab_size, other=0)
    is_banned = ((words >> bits) & 1) == 0
    banned = tl.full(is_banned.shape, float("-inf"), tl.float32)
    indices = logits + place * stride + tokens
    tl.store(indices, banned.to(logits.dtype.element_ty), mask=is_in & is_banned)
