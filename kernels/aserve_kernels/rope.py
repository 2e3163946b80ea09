"""What norms and rotary positions make of heads, in torch: the part of their reference that the
kernels that turn and store have in common.

It knows no pool.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope_ref(
    heads: Tensor, *, cos_sin: Tensor | None, weight: Tensor | None, eps: float
) -> Tensor:
    """heads [tokens, heads, head_dim], turns [tokens, rotary_dim]: cosines, then sines; weight
    float32 [heads, head_dim] -> like heads, rounded wherever torch rounds."""
    if weight is not None:
        wide = heads.float()
        root = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        heads = (wide / root * weight).to(heads.dtype)
    if cos_sin is None:
        return heads
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    left, right = heads[..., :rotary_dim].chunk(2, dim=-1)
    turned_left = torch.addcmul(left * cos, right, sin, value=-1)
    turned_right = torch.addcmul(right * cos, left, sin)
    return torch.cat((turned_left, turned_right, heads[..., rotary_dim:]), dim=-1)
