"""The norms, MLPs and mergers of vision transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import ACTIVATIONS, Activation, GatedMlp
from aserve.gpu.models.vision.encoder import NORM_EPS, Layer, VisionSpec
from aserve.gpu.weights.source import WeightSource


def quick_gelu(x: Tensor) -> Tensor:
    """`y = x * sigmoid(1.702 x)`."""
    return x * torch.sigmoid(1.702 * x)


VISION_ACTIVATIONS: Mapping[str, Activation] = {**ACTIVATIONS, "quick_gelu": quick_gelu}


def layer_norm(
    prefix: str, spec: VisionSpec, weights: WeightSource, /, *, size: int | None = None
) -> Layer:
    shape = (size or spec.hidden_size,)
    weight, bias = (weights.tensor(f"{prefix}.{name}", shape) for name in ("weight", "bias"))

    def norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, shape, weight, bias, NORM_EPS)

    return norm


def rms_norm(prefix: str, spec: VisionSpec, weights: WeightSource, /) -> Layer:
    weight = weights.tensor(f"{prefix}.weight", (spec.hidden_size,))
    return weights.elementwise.norm(weight, eps=NORM_EPS)


class PlainMlp:
    """`y = W2 act(W1 x)`."""

    __slots__ = ("activation", "down", "up")

    def __init__(self, up: LinearOp, activation: Activation, down: LinearOp) -> None:
        self.up = up
        self.activation = activation
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def plain_mlp(
    prefix: str, spec: VisionSpec, weights: WeightSource, /, *, names: tuple[str, str]
) -> Layer:
    up, down = (f"{prefix}.{name}" for name in names)
    return PlainMlp(
        weights.linear({up: spec.mlp_size}, in_features=spec.hidden_size, bias=True),
        VISION_ACTIVATIONS[spec.activation],
        weights.linear({down: spec.hidden_size}, in_features=spec.mlp_size, bias=True),
    )


def gated_mlp(prefix: str, spec: VisionSpec, weights: WeightSource, /) -> Layer:
    parts = {f"{prefix}.{name}": spec.mlp_size for name in ("gate_proj", "up_proj")}
    return GatedMlp(
        weights.linear(parts, in_features=spec.hidden_size, bias=True),
        weights.linear(
            {f"{prefix}.down_proj": spec.hidden_size}, in_features=spec.mlp_size, bias=True
        ),
        weights.elementwise.gated(spec.activation),
    )


class Merger:
    """Joins the hidden states of each square of patches, and makes one token of them."""

    __slots__ = ("is_joined_first", "mlp", "norm", "size")

    def __init__(self, norm: Layer, mlp: PlainMlp, size: int, *, is_joined_first: bool) -> None:
        self.norm = norm
        self.mlp = mlp
        self.size = size  # of the joined hidden states
        self.is_joined_first = is_joined_first  # before the norm

    def __call__(self, hidden: Tensor) -> Tensor:
        """[patches, hidden] -> [tokens, out]."""
        if self.is_joined_first:
            return self.mlp(self.norm(hidden.reshape(-1, self.size)))
        return self.mlp(self.norm(hidden).reshape(-1, self.size))


def merger(
    prefix: str,
    spec: VisionSpec,
    weights: WeightSource,
    /,
    *,
    names: tuple[str, str, str],
    is_joined_first: bool = False,
) -> Layer:
    """`names` are those of the norm and of the two linear layers."""
    size = spec.hidden_size * spec.merge_size**2
    norm, up, down = (f"{prefix}.{name}" for name in names)
    wide_norm = partial(layer_norm, size=size)
    return Merger(
        (wide_norm if is_joined_first else spec.norm)(norm, spec, weights),
        PlainMlp(
            weights.linear({up: size}, in_features=size, bias=True),
            functional.gelu,
            weights.linear({down: spec.out_size}, in_features=size, bias=True),
        ),
        size,
        is_joined_first=is_joined_first,
    )
