"""The weights of experts as their checkpoint has quantized them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear
from aserve.gpu.weights.fp8 import Fp8Weight
from aserve.gpu.weights.mxfp4 import Mxfp4Weight
from aserve.gpu.weights.quantized import QuantizedLinear, QuantizedWeight


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The `QuantizedExperts` of a checkpoint, all of one shape and format."""

    weights: tuple[QuantizedWeight, ...]
    device: torch.device
    dtype: torch.dtype  # of the model

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.weights), *self.weights[0].shape

    def linears(self, biases: Iterable[Tensor | None]) -> Iterator[Linear]:
        return map(QuantizedLinear, self.weights, biases)

    def widened(self) -> Tensor:
        wide = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for own, weight in zip(wide, self.weights, strict=True):
            own.copy_(weight.widened())
        return wide


def stored_experts(
    weights: Iterable[QuantizedWeight | None], device: torch.device, dtype: torch.dtype
) -> StoredExperts | None:
    """Returns the experts; None if one of them is not quantized, or not as the others."""
    found: list[QuantizedWeight] = []
    for weight in weights:
        if weight is None or (found and _form(weight) != _form(found[0])):
            return None
        found.append(weight)
    return StoredExperts((*found,), device, dtype)


def _form(weight: QuantizedWeight) -> Hashable:
    """Returns what the weights of all experts must have in common."""
    if isinstance(weight, Mxfp4Weight):
        return weight.shape
    if isinstance(weight, Fp8Weight):
        return weight.shape, weight.block
    return weight.shape, weight.bits, weight.scales.shape, weight.offsets.shape
