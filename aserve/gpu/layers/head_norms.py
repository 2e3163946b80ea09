"""The norm of each query and key head by itself.

It knows no positions: whoever turns heads applies it first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class HeadNorms:
    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, *, eps: float) -> None:
        """weight [heads, head_dim]; held in float32, or wider if it is."""
        self.weight = weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
        self.eps = eps

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [tokens, heads, head_dim] -> the same shape and dtype; rounded once, at the end."""
        wide = heads.to(self.weight.dtype)
        normed = functional.rms_norm(wide, (heads.shape[-1],), eps=self.eps)
        return (normed * self.weight).to(heads.dtype)
