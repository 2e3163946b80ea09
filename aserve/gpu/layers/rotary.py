"""Rotary positions: a table of cosines and sines, and the rotation of heads by it.

It knows no configuration and no request; the table is written once, when the model is built. Halves
are paired as in neox: element i turns with element i + rotary_dim / 2. Elements of a head from
rotary_dim on don't turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.layers.head_norms import HeadNorms
from aserve.gpu.layers.rope import Rope, attention_factor, inverse_frequencies


class Rotation(Protocol):
    """The turns of one forward's tokens; shared by all layers that have the same Rotary."""

    def __call__(self, heads: Tensor, norms: HeadNorms | None = None) -> Tensor:
        """heads [tokens, heads, head_dim], normed first -> a new tensor of the same shape."""


class TurnedBy:
    """A `Rotation` in torch."""

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(self, turns: Tensor) -> None:
        """turns: [tokens, rotary_dim], in the model's dtype: cosines, then sines."""
        cos, sin = turns.chunk(2, dim=-1)
        self._half = cos.shape[-1]
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)  # [tokens, 1, rotary_dim]
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def __call__(self, heads: Tensor, norms: HeadNorms | None = None) -> Tensor:
        if norms is not None:
            heads = norms(heads)
        rotary_dim = 2 * self._half
        if heads.shape[-1] == rotary_dim:
            return self._turned(heads)
        return torch.cat((self._turned(heads[..., :rotary_dim]), heads[..., rotary_dim:]), dim=-1)

    def _turned(self, heads: Tensor) -> Tensor:
        # Rolling by half puts each element's partner in its place; the sign is in `sin`.
        return torch.addcmul(heads * self._cos, heads.roll(self._half, dims=-1), self._sin)


class Rotary:
    __slots__ = ("_rotation", "table")

    def __init__(
        self,
        rope: Rope,
        rotary_dim: int,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        rotation: Callable[[Tensor], Rotation] = TurnedBy,
    ) -> None:
        self._rotation = rotation
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = inverse_frequencies(
            rope, rotary_dim, max_model_len=max_model_len, dtype=exact
        )
        angles = torch.outer(torch.arange(max_model_len).to(exact), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)
        self.table = table.to(device, dtype)  # [max_model_len, rotary_dim]: cosines, then sines

    def at(self, positions: Tensor) -> Rotation:
        """positions: int64 [tokens], below max_model_len."""
        return self._rotation(self.table.index_select(0, positions))
