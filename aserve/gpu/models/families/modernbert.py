"""ModernBERT: every third layer sees the whole text, and the others a window of it on both sides.

With a classification head, where c is the hidden state of the first token, or the mean of all:

    logits = W_out norm(act(W c)) + b_out

Reference: modeling_modernbert.py in transformers.
"""

from __future__ import annotations

from torch import Tensor

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import ACTIVATIONS, Activation
from aserve.gpu.models.config.layer_types import Windows, named_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.encoder import LayerNorm
from aserve.gpu.models.modern_encoder import ModernEncoderSpec
from aserve.gpu.models.pooling import PoolingMode
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "rope_theta": 160_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 8192,
    "classifier_activation": "gelu",
    "classifier_pooling": "cls",
}


def modernbert(config: ModelConfig) -> ModernEncoderSpec:
    fields = config.fields
    return ModernEncoderSpec(
        config,
        windows=_windows(config),
        norm_eps=fields.number("norm_eps"),
        has_norm_bias=fields.flag("norm_bias"),
        head_pooling=_head_pooling(config),
    )


def _windows(config: ModelConfig) -> Windows:
    """A window of 128 tokens has 64 on either side of a token."""
    fields = config.fields
    period = fields.integer("global_attn_every_n_layers")
    return named_windows(
        fields,
        window=fields.integer("local_attention") // 2 + 1,
        is_full=[index % period == 0 for index in range(config.num_layers)],
    )


def _head_pooling(config: ModelConfig) -> PoolingMode:
    match config.fields.text("classifier_pooling"):
        case "cls":
            return "cls"
        case "mean":
            return "mean"
        case _:
            config.fields.refuse("classifier_pooling", expected="cls or mean")


class ClassificationHead:
    __slots__ = ("activation", "dense", "norm", "out")

    def __init__(
        self, dense: LinearOp, activation: Activation, norm: LayerNorm, out: LinearOp
    ) -> None:
        self.dense = dense
        self.activation = activation
        self.norm = norm
        self.out = out

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, labels]."""
        return self.out(self.norm(self.activation(self.dense(x))))


def modernbert_head(
    config: ModelConfig, weights: WeightSource, num_labels: int
) -> ClassificationHead:
    fields, size = config.fields, config.hidden_size
    activation = fields.text("classifier_activation")
    if activation not in ACTIVATIONS:
        fields.refuse("classifier_activation", expected=" or ".join(ACTIVATIONS))
    has_bias = fields.flag("classifier_bias")
    return ClassificationHead(
        weights.linear({"head.dense": size}, in_features=size, bias=has_bias),
        ACTIVATIONS[activation],
        modernbert(config).norm("head.norm", weights),
        weights.linear({"classifier": num_labels}, in_features=size, bias=True),
    )
