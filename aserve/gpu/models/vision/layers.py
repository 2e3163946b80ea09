"""The norms, MLPs and mergers of vision transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import ACTIVATIONS, Activation, GatedMlp
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.vision.encoder import Layer, VisionSpec
from aserve.gpu.weights.source import WeightSource


def quick_gelu(x: Tensor) -> Tensor:
    """`y = x * sigmoid(1.702 x)`."""
    return x * torch.sigmoid(1.702 * x)


VISION_ACTIVATIONS: Mapping[str, Activation] = {**ACTIVATIONS, "quick_gelu": quick_gelu}


def activation_of(fields: Fields, name: str, default: str) -> str:
    """Returns the activation that a field names. Raises a ConfigError for an unknown one."""
    known = fields.text(name, default=default)
    if known not in VISION_ACTIVATIONS:
        fields.refuse(name, expected=" or ".join(VISION_ACTIVATIONS))
    return known


def layer_norm(
    prefix: str, spec: VisionSpec, weights: WeightSource, /, *, size: int | None = None
) -> Layer:
    shape = (size or spec.hidden_size,)
    weight, bias = (weights.tensor(f"{prefix}.{name}", shape) for name in ("weight", "bias"))

    def norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, shape, weight, bias, spec.norm_eps)

    return norm


def rms_norm(prefix: str, spec: VisionSpec, weights: WeightSource, /) -> Layer:
    weight = weights.tensor(f"{prefix}.weight", (spec.hidden_size,))
    return weights.elementwise.norm(weight, eps=spec.norm_eps)


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
        weights.linear(parts, in_features=spec.hidden_size, bias=spec.has_bias),
        weights.linear(
            {f"{prefix}.down_proj": spec.hidden_size}, in_features=spec.mlp_size, bias=spec.has_bias
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


class PatchMerger:
    """Norms the hidden states of patches, and makes one token of those of each square."""

    __slots__ = ("joined", "mlp", "norm", "size", "square")

    def __init__(
        self, norm: Layer, joined: LinearOp, mlp: PlainMlp, *, size: int, square: int
    ) -> None:
        self.norm = norm
        self.joined = joined
        self.mlp = mlp
        self.size = size  # of a patch's hidden state
        self.square = square  # patches of a square

    def __call__(self, hidden: Tensor) -> Tensor:
        """[patches, hidden] -> [tokens, out]."""
        squares = self.norm(hidden).view(-1, self.square, self.size)
        # All patches' first elements come first, as `unfold` joins them.
        return self.mlp(self.joined(squares.transpose(1, 2).flatten(1)))


def patch_merger(
    prefix: str,
    spec: VisionSpec,
    weights: WeightSource,
    /,
    *,
    eps: float,
    activation: str,
    bias: bool,
) -> Layer:
    """The projector of Mistral Small 3 (modeling_mistral3.py in transformers)."""
    size, square = spec.hidden_size, spec.merge_size**2
    joined, up, down = (
        f"{prefix}.{name}" for name in ("patch_merger.merging_layer", "linear_1", "linear_2")
    )
    norm = weights.tensor(f"{prefix}.norm.weight", (size,))
    return PatchMerger(
        weights.elementwise.norm(norm, eps=eps),
        weights.linear({joined: size}, in_features=size * square, bias=False),
        PlainMlp(
            weights.linear({up: spec.out_size}, in_features=size, bias=bias),
            VISION_ACTIVATIONS[activation],
            weights.linear({down: spec.out_size}, in_features=spec.out_size, bias=bias),
        ),
        size=size,
        square=square,
    )


class PooledMerger:
    """Norms the hidden states of patches, and makes one token of the mean of those of a square."""

    __slots__ = ("norm", "post_norm", "projection", "square")

    def __init__(self, post_norm: Layer, norm: Layer, projection: Tensor, *, square: int) -> None:
        self.post_norm = post_norm
        self.norm = norm
        self.projection = projection  # [hidden, out]
        self.square = square  # patches of a square

    def __call__(self, hidden: Tensor) -> Tensor:
        """[patches, hidden] -> [tokens, out]."""
        means = self.post_norm(hidden).unflatten(0, (-1, self.square)).mean(dim=1)
        return self.norm(means) @ self.projection


def pooled_merger(prefix: str, spec: VisionSpec, weights: WeightSource, /) -> Layer:
    """The projector of Gemma 3 (modeling_gemma3.py in transformers)."""
    size = spec.hidden_size
    norm = weights.tensor(f"{prefix}.norm.weight", (size,), offset=1.0)
    return PooledMerger(
        layer_norm(f"{prefix}.post_norm", spec, weights),
        weights.elementwise.norm(norm, eps=spec.norm_eps),
        weights.tensor(f"{prefix}.projection", (size, spec.out_size)),
        square=spec.merge_size**2,
    )
