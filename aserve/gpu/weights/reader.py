"""Reads a model's weights from a checkpoint: the weight source of a model's second build.

`inventory.check_fit` has checked before that every tensor is there, in the right shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.experts import StoredExperts, stored_experts
from aserve.gpu.weights.fp8 import whole
from aserve.gpu.weights.quantized import QuantizedLinear, QuantizedWeight, joined, reordered
from aserve.gpu.weights.source import LoadProgress, Target, expert_parts, wide_dtype

Shapes = Mapping[str, tuple[int, ...]]  # by the tensor's name


class WeightReader:
    """A `WeightSource` that reads one layer at a time, so that memory holds only the model and the
    layer that is being read. Of a sharded weight it reads this shard's part."""

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

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        dtype = wide_dtype(self.dtype) if is_wide else self.dtype
        tensor = self._read_rows({name: shape}).to(self.device, dtype)
        self._progress.advance(tensor.numel())
        return tensor if offset == 0.0 else tensor.to(wide_dtype(dtype)) + offset

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        for name in names:
            if name in self._checkpoint.tensors:
                return float(self._checkpoint.read(name))
        return default

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        shapes = _weight_shapes(parts, in_features)
        biases = {f"{name}.bias": (n,) for name, n in parts.items()}
        bias_values = _in_order(self._read_rows(biases), row_order) if bias else None
        stored = self._read_quantized(shapes)
        if stored is not None and row_order is not None:
            stored = reordered(stored, row_order)
        if stored is None:
            linear = Linear(_in_order(self._read_rows(shapes), row_order), bias_values)
        else:
            linear = QuantizedLinear(stored, bias_values)
        prepared = self._target.prepare(linear, self.device, dtype=self.dtype)
        self._progress.advance(sum(parts.values()) * (in_features + bias))
        return prepared

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> ExpertWeights:
        experts = self._target.shard.held_experts(count)
        kept = self._stored_experts(name, parts, experts, in_features=in_features)
        if kept is not None:
            return kept
        shape = (len(experts), sum(parts.values()), in_features)
        stack = torch.empty(shape, dtype=self.dtype, device=self.device)
        for own, expert in zip(stack, experts, strict=True):
            layers = expert_parts(name, parts, expert)
            own.copy_(self._read_rows(_weight_shapes(layers, in_features)))
            self._progress.advance(own.numel())
        return stack

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        return self._target.prepare_grouped(weights, biases, self._target.prepare)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        copy = f"{name}.weight"
        if copy in self._checkpoint.tensors:
            self._check_copy(copy, weight)
        return self._target.prepare(Linear(weight), self.device, dtype=self.dtype)

    def _read_rows(self, shapes: Shapes) -> Tensor:
        """Returns the tensors' rows, joined. They are copied, because the files may change
        later.
        """
        return torch.cat(
            [
                self._checkpoint.read_part(name, piece)
                for name, shape in shapes.items()
                for piece in self._pieces(name, shape)
            ]
        )

    def _read_quantized(self, shapes: Shapes) -> QuantizedWeight | None:
        """Returns the weights of a layer as they are stored, joined; None for a layer that is not
        quantized, or that cannot be one weight."""
        parts: list[QuantizedWeight] = []
        for name, shape in shapes.items():
            for piece in self._pieces(name, shape):
                part = self._checkpoint.read_quantized(name, piece)
                if part is None:
                    return None
                parts.append(part)
        return joined(parts)

    def _stored_experts(
        self, name: str, parts: Mapping[str, int], experts: Sequence[int], *, in_features: int
    ) -> StoredExperts | None:
        """Returns the experts as they are stored, if all are quantized in one way. Those that are
        moved between ranks are widened."""
        if self._target.shard.moves_experts:
            return None
        names = [expert_parts(name, parts, expert) for expert in experts]
        shapes = [_weight_shapes(each, in_features) for each in names]
        if not all(map(self._checkpoint.stored_bits, itertools.chain(*shapes))):
            return None
        kept = stored_experts(map(self._read_quantized, shapes), self.device, self.dtype)
        if kept is not None:
            self._progress.advance(math.prod(kept.shape))
        return kept

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
        if self._checkpoint.tensors[name].shape == shape:
            return [whole(shape)]
        return self._target.shard.pieces(name, shape)

    def _check_copy(self, name: str, weight: Tensor) -> None:
        stored = self._read_rows({name: tuple(weight.shape)})
        if not torch.equal(stored.to(self.device, self.dtype), weight):
            raise ConfigError(
                f"{self._checkpoint.directory}: the config ties the embeddings, but {name} "
                "differs from them; if it is meant to, set tie_word_embeddings to false there"
            )


def _in_order(rows: Tensor, row_order: Tensor | None) -> Tensor:
    return rows if row_order is None else rows[row_order.to(rows.device)]


def _weight_shapes(parts: Mapping[str, int], in_features: int) -> Shapes:
    return {f"{name}.weight": (num_rows, in_features) for name, num_rows in parts.items()}
