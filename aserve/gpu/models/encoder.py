"""The bidirectional encoder of BERT and its relatives. `EncoderSpec` says how a family differs.

Every token sees all tokens of its text. With segment s of token t at position p:

    h = norm(word[t] + position[p + offset] + segment[s])
    h = norm(h + attention(h))                                 attention and MLP have biases
    h = norm(h + W_out act(W_in h + b_in) + b_out)             y = (x - mean) / std * w + b

A model with several segments takes the token t of segment s as the id `s * vocab_size + t`, so that
the segments of a pair of texts travel with its tokens.

The formulas are those of modeling_bert.py and modeling_roberta.py in transformers.
"""

from __future__ import annotations

import msgspec
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import ACTIVATIONS
from aserve.gpu.models.base import Attend, HiddenCapture
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.pooling import PoolingMode
from aserve.gpu.weights.source import WeightSource


class EncoderSpec(msgspec.Struct, frozen=True):
    config: ModelConfig
    norm_eps: float
    num_positions: int  # rows of the table of positions
    first_position: int = 0  # the row of a text's first token
    num_segments: int = 1

    @property
    def max_model_len(self) -> int:
        return self.num_positions - self.first_position

    @property
    def head_pooling(self) -> PoolingMode:
        return "cls"

    def build(self, weights: WeightSource, *, max_model_len: int) -> Encoder:
        return Encoder(self, weights, max_model_len=max_model_len)


class Encoder:
    """A `CausalModel` by its interface; its layers have no causal mask, and it has no head of a
    language model."""

    __slots__ = (
        "blocks",
        "dtype",
        "hidden_size",
        "layers",
        "max_model_len",
        "norm",
        "positions",
        "segments",
        "spec",
        "vocab_size",
        "words",
    )

    def __init__(self, spec: EncoderSpec, weights: WeightSource, *, max_model_len: int) -> None:
        config, prefix = spec.config, "embeddings"
        if max_model_len > spec.max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but {config.architecture} learnt positions for "
                f"{spec.max_model_len} tokens"
            )

        def table(name: str, num_rows: int) -> Tensor:
            shape = (num_rows, config.hidden_size)
            return weights.tensor(f"{prefix}.{name}_embeddings.weight", shape)

        self.spec = spec
        self.vocab_size = config.vocab_size * spec.num_segments
        self.hidden_size = config.hidden_size
        self.max_model_len = max_model_len
        self.dtype = weights.dtype
        self.words = table("word", config.vocab_size)
        self.positions = table("position", spec.num_positions)
        self.segments = table("token_type", spec.num_segments)
        self.norm = LayerNorm(f"{prefix}.LayerNorm", config.hidden_size, weights, eps=spec.norm_eps)
        self.blocks = tuple(
            EncoderBlock(index, spec, weights) for index in range(config.num_layers)
        )
        self.layers = tuple(block.layer for block in self.blocks)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        assert capture is None, "nothing is drafted from an encoder"
        num_words = self.spec.config.vocab_size
        hidden = functional.embedding(input_ids % num_words, self.words)
        hidden = hidden + functional.embedding(input_ids // num_words, self.segments)
        hidden = hidden + functional.embedding(positions + self.spec.first_position, self.positions)
        hidden = self.norm(hidden)
        for block in self.blocks:
            hidden = block(hidden, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """All tokens are equally likely, since nothing is generated. Only the steps that warm an
        engine up ask for them."""
        return hidden.new_zeros(len(hidden), self.vocab_size)


class LayerNorm:
    """y = (x - mean) / sqrt(variance + eps) * w + b over the last dimension."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(
        self, name: str, size: int, weights: WeightSource, *, eps: float, has_bias: bool = True
    ) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.bias = weights.tensor(f"{name}.bias", (size,)) if has_bias else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class EncoderBlock:
    __slots__ = ("activation", "after_attention", "after_mlp", "down", "layer", "out", "qkv", "up")

    def __init__(self, index: int, spec: EncoderSpec, weights: WeightSource) -> None:
        config, prefix = spec.config, f"encoder.layer.{index}"
        hidden_size, inner_size = config.hidden_size, config.intermediate_size
        self.layer = LayerSpec(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            mask=Mask.NONE,
        )

        def linear(parts: tuple[str, ...], num_rows: int, in_features: int) -> LinearOp:
            names = {f"{prefix}.{part}": num_rows for part in parts}
            return weights.linear(names, in_features=in_features, bias=True)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(f"{prefix}.{name}", hidden_size, weights, eps=spec.norm_eps)

        qkv = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
        self.qkv = linear(qkv, hidden_size, hidden_size)
        self.out = linear(("attention.output.dense",), hidden_size, hidden_size)
        self.after_attention = norm("attention.output.LayerNorm")
        self.up = linear(("intermediate.dense",), inner_size, hidden_size)
        self.activation = ACTIVATIONS[config.activation]
        self.down = linear(("output.dense",), hidden_size, inner_size)
        self.after_mlp = norm("output.LayerNorm")

    def __call__(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [tokens, hidden] -> the same shape."""
        heads = self.qkv(hidden).view(len(hidden), -1, self.layer.head_dim)  # of q, k and v
        attended = attend(self.layer, AttentionInputs(heads))
        hidden = self.after_attention(hidden + self.out(attended.flatten(1)))
        return self.after_mlp(hidden + self.down(self.activation(self.up(hidden))))
