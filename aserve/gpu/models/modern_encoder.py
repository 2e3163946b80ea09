"""The bidirectional encoder of ModernBERT. `ModernEncoderSpec` has its configuration.

Unlike in BERT's encoder, a layer normalises its inputs, positions are rotary and MLPs are gated:

    h = norm(word[t])
    h = h + W_o attention(rope(W_qkv norm(h)))                the first layer has no norm here
    h = h + W_out (act(a) * g)   with   (a, g) = W_in norm(h)
    y = norm(h)

Every token sees all tokens of its text in some layers. In the others it sees those that are less
than the layer's window away, on both sides. Most norms have no bias.

The formulas are those of modeling_modernbert.py in transformers; https://arxiv.org/abs/2412.13663
"""

from __future__ import annotations

import msgspec
from torch import Tensor
from torch.nn import functional

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.rope import RopeInputs, Rotary
from aserve.gpu.models.base import Attend, HiddenCapture
from aserve.gpu.models.config.layer_types import Windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.encoder import LayerNorm
from aserve.gpu.models.pooling import PoolingMode
from aserve.gpu.weights.source import WeightSource


class ModernEncoderSpec(msgspec.Struct, frozen=True):
    config: ModelConfig
    windows: Windows
    norm_eps: float
    has_norm_bias: bool
    head_pooling: PoolingMode

    @property
    def max_model_len(self) -> int:
        return self.config.max_position_embeddings

    def build(self, weights: WeightSource, *, max_model_len: int) -> ModernEncoder:
        return ModernEncoder(self, weights, max_model_len=max_model_len)

    def norm(self, name: str, weights: WeightSource) -> LayerNorm:
        return LayerNorm(
            name,
            self.config.hidden_size,
            weights,
            eps=self.norm_eps,
            has_bias=self.has_norm_bias,
        )


class ModernEncoder:
    """A `CausalModel` by its interface; its layers have no causal mask, and it has no head of a
    language model."""

    __slots__ = (
        *("blocks", "dtype", "final_norm", "hidden_size", "layers", "max_model_len", "norm"),
        *("rotaries", "spec", "vocab_size", "words"),
    )

    def __init__(
        self, spec: ModernEncoderSpec, weights: WeightSource, *, max_model_len: int
    ) -> None:
        config = spec.config
        self.spec = spec
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = max_model_len
        self.dtype = weights.dtype
        self.rotaries = tuple(
            Rotary(
                rope,
                config.head_dim,
                max_model_len=max_model_len,
                dtype=weights.dtype,
                device=weights.device,
            )
            for rope in (config.rope, config.sliding_rope)
        )
        shape = (config.vocab_size, config.hidden_size)
        self.words = weights.tensor("embeddings.tok_embeddings.weight", shape)
        self.norm = spec.norm("embeddings.norm", weights)
        self.blocks = tuple(ModernBlock(index, spec, weights) for index in range(config.num_layers))
        self.final_norm = spec.norm("final_norm", weights)
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
        full, sliding = (RopeInputs(rotary.at(positions)) for rotary in self.rotaries)
        hidden = self.norm(functional.embedding(input_ids, self.words))
        for block in self.blocks:
            hidden = block(hidden, full if block.layer.window is None else sliding, attend)
        return self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """All tokens are equally likely, since nothing is generated. Only the steps that warm an
        engine up ask for them."""
        return hidden.new_zeros(len(hidden), self.vocab_size)


class ModernBlock:
    __slots__ = ("before_attention", "before_mlp", "layer", "mlp", "out", "qkv")

    def __init__(self, index: int, spec: ModernEncoderSpec, weights: WeightSource) -> None:
        config, prefix = spec.config, f"layers.{index}"
        hidden_size, inner_size = config.hidden_size, config.intermediate_size
        self.layer = LayerSpec(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=spec.windows[index],
            mask=Mask.NONE,
        )
        attention, mlp = config.attention_bias, config.mlp_bias
        qkv = {f"{prefix}.attn.Wqkv": 3 * hidden_size}
        out, up, down = (f"{prefix}.{name}" for name in ("attn.Wo", "mlp.Wi", "mlp.Wo"))
        self.before_attention = spec.norm(f"{prefix}.attn_norm", weights) if index else None
        self.qkv = weights.linear(qkv, in_features=hidden_size, bias=attention)
        self.out = weights.linear({out: hidden_size}, in_features=hidden_size, bias=attention)
        self.before_mlp = spec.norm(f"{prefix}.mlp_norm", weights)
        self.mlp = GatedMlp(
            weights.linear({up: 2 * inner_size}, in_features=hidden_size, bias=mlp),
            weights.linear({down: hidden_size}, in_features=inner_size, bias=mlp),
            weights.elementwise.gated(config.activation),
        )

    def __call__(self, hidden: Tensor, rope: RopeInputs, attend: Attend) -> Tensor:
        """hidden [tokens, hidden] -> the same shape."""
        normed = hidden if self.before_attention is None else self.before_attention(hidden)
        heads = self.qkv(normed).view(len(hidden), -1, self.layer.head_dim)  # of q, k and v
        attended = attend(self.layer, AttentionInputs(heads, rope))
        hidden = hidden + self.out(attended.flatten(1))
        return hidden + self.mlp(self.before_mlp(hidden))
