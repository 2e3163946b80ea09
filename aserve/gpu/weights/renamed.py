"""A weight source under other names, for a model whose checkpoint names its layers differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor

from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.weights.source import WeightSource

# Newer checkpoints of models with several parts put these before the names of each part.
PARTS = {"model.language_model.": "model.", "model.visual.": "visual."}


def older_name(name: str) -> str:
    """Returns the name that a tensor has in older checkpoints, by which it is known here."""
    part = next((part for part in PARTS if name.startswith(part)), "")
    return PARTS.get(part, "") + name.removeprefix(part)


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Returns a tensor's name with parts of it replaced. `names` are what takes the place of these
    regular expressions, in this order."""
    for stored, own in names.items():
        name = re.sub(stored, own, name)
    return name


class RenamedWeights:
    """A `WeightSource`. `rename` maps the names that a layer asks for to those of the checkpoint,
    so messages about missing tensors have the checkpoint's names."""

    __slots__ = ("_rename", "_source", "device", "dtype", "elementwise")

    def __init__(self, source: WeightSource, rename: Callable[[str], str]) -> None:
        self._source = source
        self._rename = rename
        self.device = source.device
        self.dtype = source.dtype
        self.elementwise = source.elementwise

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        return self._source.tensor(self._rename(name), shape, offset=offset, is_wide=is_wide)

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        return self._source.number(tuple(map(self._rename, names)), default=default)

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        renamed = {self._rename(name): num_rows for name, num_rows in parts.items()}
        return self._source.linear(renamed, in_features=in_features, bias=bias, row_order=row_order)

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> ExpertWeights:
        renamed = self._rename(name)
        return self._source.stacked(renamed, parts, count=count, in_features=in_features)

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        return self._source.grouped(weights, biases)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        return self._source.tied_linear(self._rename(name), weight)
