"""References in plain torch that a Triton kernel and a CPU kernel share.

They import no triton, so that the CPU kernels run where triton is not installed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`y = x / sqrt(mean(x^2) + eps) * weight` in float32, rounded once to the dtype of x.

    x [..., size]; weight [size], or any shape that broadcasts to x.
    """
    wide = x.float()
    rms = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return (wide / rms * weight).to(x.dtype)


def apply_rope_ref(
    heads: Tensor, *, cos_sin: Tensor | None, weight: Tensor | None, eps: float
) -> Tensor:
    """The RMS norm of each head if there is a `weight`, then RoPE if there is a `cos_sin`.

    heads [tokens, heads, head_dim]; cos_sin [tokens, rotary_dim], cosines then sines; weight
    float32 [heads, head_dim]. Returns a tensor like heads, rounded wherever torch rounds.
    """
    if weight is not None:
        heads = rms_norm_ref(heads, weight, eps)
    if cos_sin is None:
        return heads
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    x1, x2 = heads[..., :rotary_dim].chunk(2, dim=-1)
    y1 = torch.addcmul(x1 * cos, x2, sin, value=-1)
    y2 = torch.addcmul(x2 * cos, x1, sin)
    return torch.cat((y1, y2, heads[..., rotary_dim:]), dim=-1)


def rope_and_store_kv_ref(
    heads: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    cos_sin: Tensor | None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """The same as `rope_and_store_kv` of rope_and_store_kv.py."""
    num_kv_heads = pools[0].shape[1]
    rotated, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    rotated = apply_rope_ref(rotated, cos_sin=cos_sin, weight=weight, eps=eps)
    queries, keys = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    for source, pool, scale in zip((keys, values), pools, scales, strict=True):
        scaled = source.float() / scale
        if pool.dtype.itemsize == 1:
            bound = torch.finfo(pool.dtype).max
            narrow = scaled.clamp(-bound, bound).to(pool.dtype)
            pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))
        else:
            pool.index_copy_(0, slots, scaled.to(pool.dtype))
    return queries
