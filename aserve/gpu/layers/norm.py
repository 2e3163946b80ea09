"""Root mean square norm over the last dimension, of what is given or of a residual sum.

It knows nothing of what it norms: hidden states, or all heads of a token together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Norm: TypeAlias = Callable[[Tensor], Tensor]
SumAndNorm: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RmsNorm:
    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, /, *, eps: float) -> None:
        self.weight = weight  # [size]
        self.eps = eps
        self.shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, size] -> the same shape and dtype.

        Half types are summed in float32, and multiplied in the weight's dtype before they are
        rounded.
        """
        if x.dtype == self.weight.dtype:
            return functional.rms_norm(x, self.shape, self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        return functional.rms_norm(wide, self.shape, self.weight, self.eps).to(x.dtype)


class AddNorm:
    """The residual stream after a sublayer, and its norm for the next one."""

    __slots__ = ("norm", "scale")

    def __init__(self, norm: Norm, *, scale: float) -> None:
        self.norm = norm
        self.scale = scale

    def __call__(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """hidden, added [tokens, size] -> hidden + scale * added, rounded to their dtype, and the
        norm of that.
        """
        total = torch.add(hidden, added, alpha=self.scale)
        return total, self.norm(total)


def add_rms_norm(weight: Tensor, /, *, eps: float, scale: float) -> AddNorm:
    return AddNorm(RmsNorm(weight, eps=eps), scale=scale)


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
