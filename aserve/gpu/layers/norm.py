"""Root mean square norms: `y = x / sqrt(mean(x^2) + eps) * w`, the mean over the last dimension.

For models whose checkpoints store `w - 1`, the loader has added the offset to `w`.
Source: https://arxiv.org/abs/1910.07467
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

        The mean of a half type is taken in float32. If the weight is wider than x, the product is
        computed in the weight's dtype and rounded once.
        """
        if x.dtype == self.weight.dtype:
            return functional.rms_norm(x, self.shape, self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        return functional.rms_norm(wide, self.shape, self.weight, self.eps).to(x.dtype)


class AddNorm:
    """`s = hidden + scale * added; y = norm(s)`: the residual sum after a sublayer, and the input
    of the next one."""

    __slots__ = ("norm", "scale")

    def __init__(self, norm: Norm, *, scale: float) -> None:
        self.norm = norm
        self.scale = scale

    def __call__(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """hidden, added [tokens, size] -> (s, y). The norm is computed from s as rounded to the
        dtype of hidden."""
        total = torch.add(hidden, added, alpha=self.scale)
        return total, self.norm(total)


def add_rms_norm(weight: Tensor, /, *, eps: float, scale: float) -> AddNorm:
    return AddNorm(RmsNorm(weight, eps=eps), scale=scale)


class HeadNorms:
    """The norm of each query and key head (QK-norm): `y_h = x_h / rms(x_h) * w_h`."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, *, eps: float) -> None:
        """weight [heads, head_dim], is kept in float32 or in its own dtype if that is wider."""
        self.weight = weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
        self.eps = eps

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [tokens, heads, head_dim] -> the same shape and dtype, rounded once at the end."""
        wide = heads.to(self.weight.dtype)
        normed = functional.rms_norm(wide, (heads.shape[-1],), eps=self.eps)
        return (normed * self.weight).to(heads.dtype)
