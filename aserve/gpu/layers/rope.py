"""Rotary position embedding (RoPE): the table of cosines and sines, and its application to heads.

With frequencies f_i (rope_scaling.py), position p and angle a_i = p * f_i, the elements i and
i + rotary_dim / 2 of a head form a pair, as in GPT-NeoX:

    y_i                  = x_i * cos(a_i)                  - x_{i + rotary_dim/2} * sin(a_i)
    y_{i + rotary_dim/2} = x_{i + rotary_dim/2} * cos(a_i) + x_i * sin(a_i)

Some checkpoints rotate neighbours, the elements 2 i and 2 i + 1, as GPT-J does. Their projections
are loaded with the rows of each head in another order (models/heads.py), which makes them pairs
as above. Scores do not depend on the elements' order.

Elements from rotary_dim on are unchanged. Models of images and video give each token a position on
several axes (time, height, width), and each pair of elements uses one of them (M-RoPE, Qwen2-VL).
Source: https://arxiv.org/abs/2104.09864, https://arxiv.org/abs/2409.12191
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope_scaling import QueryScale, Rope, attention_factor, inverse_frequencies

SLICE = 1 << 16  # positions whose angles are computed at once


class Rotary:
    """The table of cosines and sines of one RoPE, computed once when the model is built."""

    __slots__ = ("_axes", "query_factors", "table")

    def __init__(
        self,
        rope: Rope,
        rotary_dim: int,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        pair_axes: Sequence[int] = (),
        query_scale: QueryScale | None = None,
    ) -> None:
        """`pair_axes`: the axis that each pair uses; empty for one axis. With a `query_scale`,
        `at` also returns the factor of each token's query, behind its sines."""
        # [rotary_dim], or [0]
        self._axes = torch.tensor(2 * [*pair_axes], dtype=torch.int64, device=device)
        self.query_factors: Tensor | None = None  # [max_model_len, 1]
        if query_scale is not None:
            self.query_factors = query_scale.table(max_model_len, dtype=dtype).to(device)
        # [max_model_len, rotary_dim]: cosines, then sines
        if device.type == "meta" and max_model_len == 1:
            # An inventory's model never runs, and nobody has checked its sizes yet.
            self.table = torch.empty(max_model_len, rotary_dim, dtype=dtype, device=device)
            return
        table = torch.empty(max_model_len, rotary_dim, dtype=dtype)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = inverse_frequencies(
            rope, rotary_dim, max_model_len=max_model_len, dtype=exact
        )
        for start in range(0, max_model_len, SLICE):
            rows = table[start : start + SLICE]
            angles = torch.outer(torch.arange(start, start + len(rows)).to(exact), frequencies)
            rows.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope))
        self.table = table.to(device)

    def at(self, positions: Tensor) -> Tensor:
        """positions int64 [tokens] or [axes, tokens], below max_model_len -> [tokens, rotary_dim],
        for all layers of one forward that share this table."""
        if positions.dim() == 1:
            rows = self.table.index_select(0, positions)
            if self.query_factors is None:
                return rows
            return torch.cat((rows, self.query_factors.index_select(0, positions)), dim=1)
        by_axis = self.table[positions]  # [axes, tokens, rotary_dim]
        return by_axis.gather(0, self._axes.expand(1, positions.shape[1], -1)).squeeze(0)


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """The inputs of the rotation of query and key heads before attention, which follows the head
    norms if the layer has them.
    """

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
    # Rolling by half of rotary_dim puts each element's partner in its place.
    rotated = torch.addcmul(rotated * cos, rotated.roll(rotary_dim // 2, dims=-1), signed)
    if heads.shape[-1] == rotary_dim:
        return rotated
    return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
