"""Random weights for a configuration alone: a source that has every name, in any shape.

It knows no model and reads no file. What such a model says means nothing; what it costs is real.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.weights.source import LoadProgress, Target

STD = 0.02  # transformers' usual initializer_range


class DummyWeights:
    """A tensor depends on its name and shape alone: not on dtype, nor on what was asked before."""

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

    def tensor(self, name: str, shape: tuple[int, ...], *, offset: float = 0.0) -> Tensor:
        """What stands for a sum: the offset is in it already."""
        drawn = self._drawn(name, shape)
        return drawn.to(torch.promote_types(self.dtype, torch.float32)) if offset else drawn

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        return default

    def linear(self, parts: Mapping[str, int], *, in_features: int, bias: bool) -> LinearOp:
        weights = [
            self._drawn(f"{name}.weight", (rows, in_features)) for name, rows in parts.items()
        ]
        biases = [self._drawn(f"{name}.bias", (rows,)) for name, rows in parts.items() if bias]
        linear = Linear(torch.cat(weights), torch.cat(biases) if bias else None)
        return self._target.prepare(linear, self.device, dtype=self.dtype)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        return self._target.prepare(Linear(weight), self.device, dtype=self.dtype)

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Vectors that are no biases scale something: they lie around 1."""
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        is_scale = len(shape) == 1 and not name.endswith(".bias")
        drawn = torch.empty(shape, device=self.device)
        drawn.normal_(1.0 if is_scale else 0.0, STD, generator=generator)
        self._progress.advance(math.prod(shape))
        return drawn.to(self.dtype)
