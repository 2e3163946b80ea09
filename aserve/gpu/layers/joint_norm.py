"""RMS norms of queries and keys that span all heads of a token, as in OLMo 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class JointNorm:
    """One RMS norm over all query heads of a token together, and one over all its key heads."""

    q_norm: Norm
    k_norm: Norm
    sizes: tuple[int, int, int]  # the numbers of heads of q, k and v

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [tokens, q + k + v, head_dim] -> the same shape."""
        q, k, v = (part.flatten(1) for part in heads.split(self.sizes, dim=1))
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1).view(heads.shape)


@dataclass(frozen=True, slots=True)
class DividedJointNorm:
    """The same norms where heads are divided among ranks: `y = x / sqrt(m + eps) * w` with m the
    mean of x^2 over the heads of all ranks. All ranks have equally many heads, so m is the mean of
    their own means. Key heads that several ranks share change no mean."""

    weights: Tensor  # [q + k heads, head_dim], of this rank's heads
    eps: float
    sizes: tuple[int, int, int]
    mean: Callable[[Tensor], Tensor]  # over the ranks

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [tokens, q + k + v, head_dim] -> the same shape and dtype, rounded once."""
        num_q, num_k, num_v = self.sizes
        normed, values = heads.split((num_q + num_k, num_v), dim=1)
        wide = normed.to(torch.promote_types(heads.dtype, torch.float32))
        parts = wide.square().split((num_q, num_k), dim=1)
        means = self.mean(torch.stack([part.mean(dim=(1, 2)) for part in parts], dim=1))
        q_scale, k_scale = torch.rsqrt(means + self.eps)[:, :, None, None].unbind(1)
        q, k = wide.split((num_q, num_k), dim=1)
        scaled = torch.cat((q * q_scale, k * k_scale), dim=1) * self.weights
        return torch.cat((scaled.to(heads.dtype), values), dim=1)
