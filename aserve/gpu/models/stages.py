"""Divides a decoder's layers among the stages of a pipeline, from outside the model files.

A stage builds the whole decoder, from a weight source that gives it the weights of its own layers
alone. What belongs to other stages lies on the meta device: it takes no memory and never runs. A
layer owns the first norm of the next one, so a stage also has the norms of the layer behind its
own. The first stage has the embeddings, and the last one the final norm and the head. If that reads
the embeddings, or a drafter does, the last stage has them as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp, linear_per_expert
from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.weights.source import Stage, Target, WeightSource, wide_dtype

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDINGS = "model.embed_tokens.weight"
META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers `first` to `end` - 1 of `count`, and the weights around them."""

    first: int
    end: int
    count: int
    embeds_last: bool  # the last stage has the embeddings as well

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.count

    def has(self, layer: int) -> bool:
        return self.first <= layer < self.end

    def holds(self, name: str) -> bool:
        """Returns whether this stage has the weight, or the part of the model, of this name."""
        layer = layer_of(name)
        if layer is not None:
            is_norm_behind = layer == self.end and name.endswith("norm.weight")
            return self.has(layer) or is_norm_behind
        if name == EMBEDDINGS:
            return self.is_first or (self.is_last and self.embeds_last)
        return self.is_last


def layer_of(name: str) -> int | None:
    found = LAYER.match(name)
    return None if found is None else int(found[1])


def stage_layers(stage: Stage, config: ModelConfig) -> StageLayers:
    """Divides the layers evenly. Of what is left over the first stages get one each, because the
    last one also computes the logits. Raises ConfigError if a stage would be without a layer."""
    count = config.num_layers
    if stage.count > count:
        raise ConfigError(
            f"{config.fields.source}: {count} layers cannot be divided among {stage.count} stages "
            "(--pipeline-parallel-size)",
            param="pipeline_parallel_size",
        )
    size, rest = divmod(count, stage.count)
    first, end = (n * size + min(n, rest) for n in (stage.number, stage.number + 1))
    return StageLayers(first, end, count, config.tie_word_embeddings or stage.has_drafter)


def for_stage(target: Target, config: ModelConfig) -> Target:
    """Returns the target that a stage's part of a decoder is built for."""
    if target.stage.count == 1:
        return target
    layers = stage_layers(target.stage, config)
    return replace(target, part=lambda source: StageWeights(source, layers))


class StageWeights:
    """A `WeightSource` of one stage around one that reads the weights."""

    __slots__ = ("_layers", "_source", "device", "dtype", "elementwise")

    def __init__(self, source: WeightSource, layers: StageLayers) -> None:
        self._source = source
        self._layers = layers
        self.device = source.device
        self.dtype = source.dtype
        self.elementwise = source.elementwise

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        if self._layers.holds(name):
            return self._source.tensor(name, shape, offset=offset, is_wide=is_wide)
        is_wide = is_wide or offset != 0.0
        return torch.empty(
            shape, dtype=wide_dtype(self.dtype) if is_wide else self.dtype, device=META
        )

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        """NOTE: also of other stages' layers: all compare all scales of new weights with those of
        the model, so that all refuse them, or none.
        """
        return self._source.number(names, default=default)

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        if all(map(self._layers.holds, parts)):
            return self._source.linear(
                parts, in_features=in_features, bias=bias, row_order=row_order
            )
        shape = (sum(parts.values()), in_features)
        return Linear(torch.empty(shape, dtype=self.dtype, device=META))

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> ExpertWeights:
        if self._layers.holds(name):
            return self._source.stacked(name, parts, count=count, in_features=in_features)
        shape = (count, sum(parts.values()), in_features)
        return torch.empty(shape, dtype=self.dtype, device=META)

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        if isinstance(weights, Tensor) and weights.is_meta:
            return linear_per_expert(weights, biases, prepare)
        return self._source.grouped(weights, biases)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        if self._layers.holds(name):
            return self._source.tied_linear(name, weight)
        return Linear(weight)
