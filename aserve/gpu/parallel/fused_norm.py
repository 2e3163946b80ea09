"""The sum over ranks of a row-parallel product, fused with the residual sum and the norm behind it:

    s = hidden + sum_r x_r
    y = s / rms(s) * w

A device's kernel does it in one launch, where three would write and read s twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.gpu.layers.norm import SumAndNorm
from aserve.gpu.layers.ops import Elementwise
from aserve.gpu.parallel.collectives import Collectives

# (x, hidden, weight, eps) -> (s, y), or None for tensors that it does not take. x is this rank's
# part [tokens, hidden]. All ranks decide alike, by shapes and dtypes.
FusedSumNorm: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor] | None]


def sum_norm_ref(
    ranks: Collectives, x: Tensor, hidden: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The reference in plain torch, of any dtype."""
    total = hidden + ranks.sum(x.clone())
    return total, torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, eps)


class RankAddNorm:
    """The contract of `AddNorm`. Once it is `fused`, `added` is this rank's part of a sum."""

    __slots__ = ("_plain", "_ranks", "eps", "fused", "scale", "weight")

    def __init__(
        self, plain: SumAndNorm, weight: Tensor, ranks: Collectives, *, eps: float, scale: float
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.scale = scale
        self.fused: FusedSumNorm | None = None
        self._plain = plain
        self._ranks = ranks

    def __call__(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused is None:
            return self._plain(hidden, added)
        found = self.fused(added, hidden, self.weight, self.eps)
        return found or self._plain(hidden, self._ranks.sum(added))


def with_fusable_norms(elementwise: Elementwise, ranks: Collectives) -> Elementwise:
    """The operators of a rank, whose residual sums may be fused with sums over ranks."""

    def add_norm(weight: Tensor, /, *, eps: float, scale: float) -> RankAddNorm:
        plain = elementwise.add_norm(weight, eps=eps, scale=scale)
        return RankAddNorm(plain, weight, ranks, eps=eps, scale=scale)

    return replace(elementwise, add_norm=add_norm)
