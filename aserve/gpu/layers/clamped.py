"""The clamped activation of a gated MLP, with g = min(gate, limit):

    y = (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g)

Reference: modeling_gpt_oss.py in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ClampedActivation:
    """An `Activation`."""

    __slots__ = ("alpha", "limit")

    def __init__(self, alpha: float, limit: float) -> None:
        self.alpha = alpha
        self.limit = limit

    def __call__(self, joined: Tensor) -> Tensor:
        """joined [rows, 2 * size], gate before up -> [rows, size]."""
        gate, up = joined.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
