"""Rotary positions of query and key heads, each normed by itself before, where it has a norm.

Halves are paired as in neox: element i turns with element i + rotary_dim / 2; elements from
rotary_dim on don't turn. It knows no layer and no table of positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# PERF: a program's heads fill a few thousand elements: decoding has few tokens, and many
# processors to read them.
ELEMENTS = 2048


def rope(heads: Tensor, turns: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """heads [tokens, heads, head_dim], the heads of a token side by side; turns [tokens,
    rotary_dim], contiguous: cosines, then sines, both of the same dtype; weight float32 [heads,
    head_dim], or None for no norm -> like heads, contiguous. Rounded where torch rounds.
    """
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    num_tokens, num_heads, head_dim = heads.shape
    if not num_tokens:
        return out
    block = triton.next_power_of_2(head_dim)
    group = max(1, ELEMENTS // block)
    _rope[(num_tokens, triton.cdiv(num_heads, group))](
        heads,
        turns,
        heads if weight is None else weight,
        out,
        heads.stride(0),
        num_heads,
        eps,
        weight is not None,
        head_dim,
        turns.shape[1],
        group,
        block,
    )
    return out


def rope_ref(
    heads: Tensor, turns: Tensor, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    if weight is not None:
        wide = heads.float()
        root = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        heads = (wide / root * weight).to(heads.dtype)
    rotary_dim = turns.shape[1]
    cos, sin = turns.unsqueeze(1).chunk(2, dim=-1)
    left, right = heads[..., :rotary_dim].chunk(2, dim=-1)
    turned_left = torch.addcmul(left * cos, right, sin, value=-1)
    turned_right = torch.addcmul(right * cos, left, sin)
    return torch.cat((turned_left, turned_right, heads[..., rotary_dim:]), dim=-1)


@triton.jit
def _rope(
    heads: tl.tensor,
    turns: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride: int,
    num_heads: int,
    eps: float,
    IS_NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each element is read beside its partner: twice, the second time from the cache."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    numbers = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    is_in = (numbers < num_heads) & (columns < HEAD_DIM)
    is_turned = columns < ROTARY_DIM
    partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
    of_own, of_partners = numbers * HEAD_DIM + columns, numbers * HEAD_DIM + partners
    first = heads + token * stride
    own = tl.load(first + of_own, mask=is_in, other=0.0).to(tl.float32)
    partner = tl.load(first + of_partners, mask=is_in & is_turned, other=0.0).to(tl.float32)
    if IS_NORMED:
        root = tl.sqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        factors = tl.load(weight + of_own, mask=is_in, other=0.0)
        of_pairs = tl.load(weight + of_partners, mask=is_in & is_turned, other=0.0)
        own = (own / root * factors).to(dtype).to(tl.float32)
        partner = (partner / root * of_pairs).to(dtype).to(tl.float32)
    angles = turns + token * ROTARY_DIM + tl.where(columns < HALF, columns, columns - HALF)
    cos = tl.load(angles, mask=is_turned, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=is_turned, other=0.0).to(tl.float32)
    near = (own * cos).to(dtype).to(tl.float32)
    turned = near + tl.where(columns < HALF, -partner, partner) * sin
    result = tl.where(is_turned, turned, own).to(dtype)
    tl.store(out + token * num_heads * HEAD_DIM + of_own, result, mask=is_in)
