"""RMS norms of queries and keys that span all heads of a token, as in OLMo 2."""

from __future__ import annotations

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
