"""Random weights: the source of a model of which only the configuration is there.

The tokens of such a model mean nothing, but its memory and its speed are those of the real one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.weights.source import LoadProgress, Target, expert_parts, wide_dtype

STD = 0.02  # transformers' usual initializer_range


class DummyWeights:
    """A `WeightSource` that has every name in any shape. A tensor depends on its name and on its
    shape in the checkpoint alone; so a shard is a part of the whole, and dtypes differ only by
    rounding."""

    __slots__ = (
        "_progress",
        "_target",
        "device",
        "dtype",
        "elementwise",
    )

    def __init__(
        self,
        target: Target,
        *,
        dtype: torch.dtype,
        progress: LoadProgress,
    ) -> None:
        self.device = target.device
        self.dtype = dtype
        self.elementwise = target.elementwise
        self._target = target
        self._progress = progress

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        """The drawn values already include the offset."""
        drawn = self._drawn(name, shape)
        return drawn.to(wide_dtype(self.dtype)) if offset or is_wide else drawn

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        return default

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        # Rows are drawn, so their order does not matter.
        weights = [
            self._drawn(f"{name}.weight", (rows, in_features)) for name, rows in parts.items()
        ]
        biases = [self._drawn(f"{name}.bias", (rows,)) for name, rows in parts.items() if bias]
        linear = Linear(torch.cat(weights), torch.cat(biases) if bias else None)
        return self._target.prepare(linear, self.device, dtype=self.dtype)

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> Tensor:
        experts = self._target.shard.held_experts(count)
        drawn = [
            self._drawn(f"{part}.weight", (num_rows, in_features))
            for expert in experts
            for part, num_rows in expert_parts(name, parts, expert).items()
        ]
        return torch.cat(drawn).view(len(experts), -1, in_features)

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        assert isinstance(weights, Tensor)
        return self._target.prepare_grouped(weights, biases, self._target.prepare)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        return self._target.prepare(Linear(weight), self.device, dtype=self.dtype)

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Normal values of mean 0; of mean 1 for vectors that are no biases, because these scale
        something."""
        shard = self._target.shard
        whole = shard.whole_shape(name, shape)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        is_scale = len(shape) == 1 and not name.endswith(".bias")
        drawn = torch.empty(whole, device=self.device)
        drawn.normal_(1.0 if is_scale else 0.0, STD, generator=generator)
        self._progress.advance(math.prod(shape))
        pieces = [drawn[piece].to(self.dtype) for piece in shard.pieces(name, shape)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
