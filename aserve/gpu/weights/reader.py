"""Reads a model's weights from a checkpoint: the second of the two sources it is built from.

It knows no model. That everything is there, in the right shape, has been checked before
(`inventory.check_fit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.source import LoadProgress, Target


class WeightReader:
    """One layer at a time: beside the model itself, memory holds the layer that is being read."""

    __slots__ = (
        "_checkpoint",
        "_progress",
        "_target",
        "device",
        "dtype",
        "elementwise",
    )

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        dtype: torch.dtype,
        progress: LoadProgress,
    ) -> None:
        self.device = target.device
        self.dtype = dtype
        self.elementwise = target.elementwise
        self._checkpoint = checkpoint
        self._target = target
        self._progress = progress

    def tensor(self, name: str, shape: tuple[int, ...], *, offset: float = 0.0) -> Tensor:
        tensor = self._read([name]).to(self.device, self.dtype)
        self._progress.advance(tensor.numel())
        if offset == 0.0:
            return tensor
        return tensor.to(torch.promote_types(self.dtype, torch.float32)) + offset

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        for name in names:
            if name in self._checkpoint.tensors:
                return float(self._checkpoint.read(name))
        return default

    def linear(self, parts: Mapping[str, int], *, in_features: int, bias: bool) -> LinearOp:
        linear = Linear(
            self._read(f"{name}.weight" for name in parts),
            self._read(f"{name}.bias" for name in parts) if bias else None,
        )
        prepared = self._target.prepare(linear, self.device, dtype=self.dtype)
        num_biases = 0 if linear.bias is None else linear.bias.numel()
        self._progress.advance(linear.weight.numel() + num_biases)
        return prepared

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        copy = f"{name}.weight"
        if copy in self._checkpoint.tensors:
            self._check_copy(copy, weight)
        return self._target.prepare(Linear(weight), self.device, dtype=self.dtype)

    def _read(self, names: Iterable[str]) -> Tensor:
        """Rows of the tensors, one after the other, in memory of their own: the files may change
        after the load.
        """
        return torch.cat([self._checkpoint.read(name) for name in names])

    def _check_copy(self, name: str, weight: Tensor) -> None:
        if not torch.equal(self._checkpoint.read(name).to(self.device, self.dtype), weight):
            raise ConfigError(
                f"{self._checkpoint.directory}: the config ties the embeddings, but {name} "
                "differs from them; if it is meant to, set tie_word_embeddings to false there"
            )
