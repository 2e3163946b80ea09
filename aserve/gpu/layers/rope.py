"""Rotary positions: a table of cosines and sines, and the rotation of heads by it.

It knows no configuration and no request; the table is written once, when the model is built. Halves
are paired as in neox: element i turns with element i + rotary_dim / 2. Elements of a head from
rotary_dim on don't turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope_scaling import Rope, attention_factor, inverse_frequencies


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

    def at(self, positions: Tensor) -> Tensor:
        """positions: int64 [tokens], below max_model_len -> [tokens, rotary_dim], the turns of one
        forward's tokens: for all layers that have the same Rotary."""
        return self.table.index_select(0, positions)


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """What becomes of a layer's query and key heads before they meet: each is normed, if there are
    norms, then turned."""

    cos_sin: Tensor  # [tokens, rotary_dim], in the model's dtype: cosines, then sines
    norms: HeadNorms | None = None


def apply_rope(heads: Tensor, rope: RopeInputs) -> Tensor:
    """heads [tokens, heads, head_dim], of any strides -> a new tensor of the same shape."""
    if rope.norms is not None:
        heads = rope.norms(heads)
    rotary_dim = rope.cos_sin.shape[1]
    cos, sin = rope.cos_sin.unsqueeze(1).chunk(2, dim=-1)
    cos, signed = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    rotated = heads[..., :rotary_dim]
    # Rolling by half puts each element's partner in its place.
    rotated = torch.addcmul(rotated * cos, rotated.roll(rotary_dim // 2, dims=-1), signed)
    if heads.shape[-1] == rotary_dim:
        return rotated
    return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
