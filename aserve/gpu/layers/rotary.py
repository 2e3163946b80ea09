"""Rotary positions: a table of cosines and sines, and the rotation of heads by it.

It knows no configuration and no request; the table is written once, when the model is built. Halves
are paired as in neox: element i turns with element i + rotary_dim / 2. Elements of a head from
rotary_dim on don't turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.rope import Rope, attention_factor, inverse_frequencies


class Rotation:
    """The turns of one forward's tokens; shared by all layers that have the same Rotary."""

    __slots__ = ("cos", "half", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [tokens, rotary_dim / 2], in the model's dtype."""
        self.half = cos.shape[-1]
        self.cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)  # [tokens, 1, rotary_dim]
        self.sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [tokens, heads, head_dim] -> a new tensor of the same shape."""
        rotary_dim = 2 * self.half
        if heads.shape[-1] == rotary_dim:
            return self._turned(heads)
        return torch.cat((self._turned(heads[..., :rotary_dim]), heads[..., rotary_dim:]), dim=-1)

    def _turned(self, heads: Tensor) -> Tensor:
        # Rolling by half puts each element's partner in its place; the sign is in `sin`.
        return torch.addcmul(heads * self.cos, heads.roll(self.half, dims=-1), self.sin)


class Rotary:
    __slots__ = ("table",)

    def __init__(
        self,
        rope: Rope,
        rotary_dim: int,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = inverse_frequencies(
            rope, rotary_dim, max_model_len=max_model_len, dtype=exact
        )
        angles = torch.outer(torch.arange(max_model_len).to(exact), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)
        self.table = table.to(device, dtype)  # [max_model_len, rotary_dim]: cosines, then sines

    def at(self, positions: Tensor) -> Rotation:
        """positions: int64 [tokens], below max_model_len."""
        return Rotation(*self.table.index_select(0, positions).chunk(2, dim=-1))
