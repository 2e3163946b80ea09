"""The decoder of the Llama family: pre-norm attention with rotary positions, then a gated MLP.

Single-device mathematics: it knows no pages, batches, devices or shards, and no family by name:
what differs between them is in `DecoderSpec`. Its weights are set while it is built, and never
change.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.gated_mlp import GatedMlp
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.norm import RmsNorm
from aserve.gpu.layers.rotary import Rotary, Rotation
from aserve.gpu.models.attend import Attend
from aserve.gpu.models.config import ModelConfig
from aserve.gpu.models.hidden_capture import HiddenCapture
from aserve.gpu.models.layer_spec import LayerSpec
from aserve.gpu.weights.source import WeightSource


class DecoderSpec(msgspec.Struct, frozen=True):
    config: ModelConfig
    windows: tuple[int | None, ...]  # per layer
    has_qk_norm: bool = False


class Decoder:
    """A `CausalModel`."""

    __slots__ = (
        "_embeddings",
        "_head",
        "_layers",
        "_norm",
        "_rotary",
        "dtype",
        "hidden_size",
        "layers",
        "max_model_len",
        "vocab_size",
    )

    def __init__(self, spec: DecoderSpec, weights: WeightSource, *, max_model_len: int) -> None:
        config = spec.config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = max_model_len
        self.dtype = weights.dtype
        self.layers = _layer_specs(spec)
        self._rotary = Rotary(
            config.rope,
            config.head_dim,
            max_model_len=max_model_len,
            dtype=weights.dtype,
            device=weights.device,
        )
        self._embeddings = weights.tensor(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        self._layers = tuple(_Layer(layer, spec, weights) for layer in self.layers)
        self._norm = _norm(weights, "model.norm", config.hidden_size, spec)
        self._head = _head(config, self._embeddings, weights)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        rotation = self._rotary.at(positions)
        hidden = functional.embedding(input_ids, self._embeddings)
        for layer in self._layers:
            hidden = layer(hidden, rotation, attend)
            if capture is not None and layer.spec.index in capture.layer_ids:
                capture.layers.append(hidden)
        if capture is not None and capture.wants_before_norm:
            capture.before_norm = hidden
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        return logits if self.dtype == torch.float64 else logits.float()


class _Layer:
    __slots__ = ("attention", "input_norm", "mlp", "mlp_norm", "spec")

    def __init__(self, layer: LayerSpec, spec: DecoderSpec, weights: WeightSource) -> None:
        prefix = f"model.layers.{layer.index}"
        hidden_size = spec.config.hidden_size
        self.spec = layer
        self.input_norm = _norm(weights, f"{prefix}.input_layernorm", hidden_size, spec)
        self.attention = _Attention(layer, spec, weights)
        self.mlp_norm = _norm(weights, f"{prefix}.post_attention_layernorm", hidden_size, spec)
        self.mlp = _mlp(f"{prefix}.mlp", spec.config, weights)

    def __call__(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), rotation, attend)
        return hidden + self.mlp(self.mlp_norm(hidden))


class _Attention:
    __slots__ = ("heads_norm", "layer", "out", "qkv")

    def __init__(self, layer: LayerSpec, spec: DecoderSpec, weights: WeightSource) -> None:
        config = spec.config
        prefix = f"model.layers.{layer.index}.self_attn"
        q_size = layer.num_heads * layer.head_dim
        kv_size = layer.num_kv_heads * layer.head_dim
        self.layer = layer
        self.qkv = weights.linear(
            {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size},
            in_features=config.hidden_size,
            bias=config.attention_bias,
        )
        self.heads_norm = _HeadsNorm(layer, spec, weights) if spec.has_qk_norm else None
        self.out = weights.linear(
            {f"{prefix}.o_proj": config.hidden_size},
            in_features=q_size,
            bias=config.attention_bias,
        )

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]. Queries and keys are rotated together."""
        layer = self.layer
        num_rotated = layer.num_heads + layer.num_kv_heads
        num_heads = num_rotated + layer.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], num_heads, layer.head_dim)  # of q, k and v
        rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.heads_norm is not None:
            rotated = self.heads_norm(rotated)
        rotated = rotation(rotated)
        q, k = rotated[:, : layer.num_heads], rotated[:, layer.num_heads :]
        return self.out(attend(layer, q, k, v).flatten(1))


class _HeadsNorm:
    """Norms each query head and each key head, with one weight for queries and one for keys."""

    __slots__ = ("k_norm", "num_heads", "q_norm")

    def __init__(self, layer: LayerSpec, spec: DecoderSpec, weights: WeightSource) -> None:
        prefix = f"model.layers.{layer.index}.self_attn"
        self.num_heads = layer.num_heads
        self.q_norm = _norm(weights, f"{prefix}.q_norm", layer.head_dim, spec)
        self.k_norm = _norm(weights, f"{prefix}.k_norm", layer.head_dim, spec)

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [tokens, q + k, head_dim] -> the same shape."""
        q, k = heads[:, : self.num_heads], heads[:, self.num_heads :]
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)


def _layer_specs(spec: DecoderSpec) -> tuple[LayerSpec, ...]:
    config = spec.config
    return tuple(
        LayerSpec(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=window,
        )
        for index, window in enumerate(spec.windows)
    )


def _norm(weights: WeightSource, name: str, size: int, spec: DecoderSpec) -> RmsNorm:
    return RmsNorm(weights.tensor(f"{name}.weight", (size,)), eps=spec.config.rms_norm_eps)


def _mlp(prefix: str, config: ModelConfig, weights: WeightSource) -> GatedMlp:
    size = config.intermediate_size
    gate_up = weights.linear(
        {f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size},
        in_features=config.hidden_size,
        bias=config.mlp_bias,
    )
    down = weights.linear(
        {f"{prefix}.down_proj": config.hidden_size}, in_features=size, bias=config.mlp_bias
    )
    return GatedMlp(gate_up, down)


def _head(config: ModelConfig, embeddings: Tensor, weights: WeightSource) -> LinearOp:
    if config.tie_word_embeddings:
        return weights.tied_linear("lm_head", embeddings)
    return weights.linear(
        {"lm_head": config.vocab_size}, in_features=config.hidden_size, bias=False
    )
