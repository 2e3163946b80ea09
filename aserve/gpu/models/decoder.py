"""The decoder that Llama and its many relatives share. `DecoderSpec` says how a family differs.

The residual stream h of one layer, with the norms that the spec names (an absent norm is the
identity) and its residual scale s:

    h = h + s * after_attention(mixer(before_attention(h)))
    h = h + s * after_mlp(mlp(before_mlp(h)))

A layer may have only one of the two sublayers, with one norm before it. The mixer is `Attention`
and the MLP is `gated_mlp`, unless the spec makes others for a layer:

    heads  = rope(qk_norm(x W_qkv^T + b));  y = attend(heads) W_o^T + b      (attention)
    y      = (act(x W_gate^T) * (x W_up^T)) W_down^T                         (gated MLP)

Around the layers: h = embeddings[ids] * factor, and logits = cap(norm(h) W_head^T / divisor) with
cap(z) = softcap * tanh(z / softcap). The norms are RMS norms: y = x / rms(x) * (offset + w).

The formulas are those of modeling_llama.py, modeling_gemma2.py, ... in transformers; the parity
tests compare each family with its reference there. The decoder is written for one device: pages,
batches and shards are not visible here. Weights are set while it is built, and never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.no_sublayer import NO_SUBLAYER
from aserve.gpu.layers.norm import AddNorm, Norm, SumAndNorm
from aserve.gpu.layers.rope import RopeInputs, Rotary
from aserve.gpu.layers.rope_scaling import Rope
from aserve.gpu.models.base import Attend, HiddenCapture, wide_logits
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.heads import head_norms, joint_norm, row_order, scale_queries
from aserve.gpu.models.recurrent import recurrent_specs
from aserve.gpu.weights.source import WeightSource, kv_scales


class Decoder:
    """A `CausalModel`. A device's fused step reads its parts, which are public for that reason."""

    __slots__ = (
        "blocks",
        "dtype",
        "embedding_factor",
        "embeddings",
        "first_norm",
        "head",
        "hidden_size",
        "layers",
        "max_model_len",
        "recurrent_layers",
        "rotaries",
        "spec",
        "vocab_size",
    )

    def __init__(self, spec: DecoderSpec, weights: WeightSource, *, max_model_len: int) -> None:
        config = spec.config
        _refuse_partial_rotary(spec)
        self.spec = spec
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = max_model_len
        self.dtype = weights.dtype
        own_ropes = _ropes(spec)
        ropes = tuple(dict.fromkeys(own_ropes))
        self.rotaries = tuple(
            Rotary(
                rope,
                config.rotary_dim,
                max_model_len=max_model_len,
                dtype=weights.dtype,
                device=weights.device,
                pair_axes=spec.rope_axes,
                query_scale=spec.query_scale,
            )
            for rope in ropes
        )
        self.embeddings = weights.tensor(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        self.embedding_factor = _embedding_factor(spec, weights.dtype)
        self.first_norm = _norm(weights, _entry_norm(spec, 0), spec)
        self.blocks = tuple(
            Block(index, spec, weights, rotary=ropes.index(rope))
            for index, rope in enumerate(own_ropes)
        )
        self.layers = tuple(b.mixer.layer for b in self.blocks if b.mixer.layer is not None)
        self.recurrent_layers = recurrent_specs(block.mixer for block in self.blocks)
        self.head = _head(config, self.embeddings, weights)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        return self.run(self.embed(input_ids), positions, attend, capture)

    def run(
        self, hidden: Tensor, positions: Tensor, attend: Attend, capture: HiddenCapture | None
    ) -> Tensor:
        """Does what `forward` does, from embeddings [tokens, hidden]."""
        cos_sin = [rotary.at(positions) for rotary in self.rotaries]
        normed = self.first_norm(hidden)
        for index, block in enumerate(self.blocks):
            hidden, normed = block(hidden, normed, cos_sin[block.rotary], attend)
            if capture is not None and index in capture.layer_ids:
                capture.layers.append(hidden)
        if capture is not None and capture.wants_before_norm:
            capture.before_norm = hidden
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self.spec.logit_divisor != 1.0:
            logits = wide_logits(logits) / self.spec.logit_divisor
        if (cap := self.spec.logit_softcap) is not None:
            logits = torch.tanh(wide_logits(logits) / cap) * cap
        return logits

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden = functional.embedding(input_ids, self.embeddings)
        return hidden if self.embedding_factor == 1.0 else hidden * self.embedding_factor


class Block:
    """One decoder layer. A residual sum and the norm after it are one fused operator, so a layer
    owns the first norm of the next layer, and the last layer owns the model's final norm."""

    __slots__ = (
        "after_attention",
        "after_mlp",
        "before_mlp",
        "before_next",
        "mixer",
        "mlp",
        "rotary",
    )

    def __init__(
        self, index: int, spec: DecoderSpec, weights: WeightSource, *, rotary: int
    ) -> None:
        prefix = f"model.layers.{index}"

        def below(name: str | None) -> str | None:
            return None if name is None else f"{prefix}.{name}"

        self.rotary = rotary  # index into Decoder.rotaries
        self.mixer = spec.mixer(index, default=Attention)(index, spec, weights)
        self.after_attention = _norm(weights, below(spec.norms.after_attention), spec)
        self.before_mlp = _add_norm(weights, below(spec.norms.before_mlp), spec)
        self.mlp = spec.mlp(index, default=gated_mlp)(index, spec, weights)
        self.after_mlp = _norm(weights, below(spec.norms.after_mlp), spec)
        self.before_next = _add_norm(weights, _entry_norm(spec, index + 1), spec)

    def __call__(
        self, hidden: Tensor, normed: Tensor, cos_sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """hidden: the residual stream; normed: before_attention(hidden); both [tokens, hidden].
        cos_sin [tokens, rotary_dim]. Returns the same two for the next layer."""
        if self.mlp is NO_SUBLAYER:
            changed = self.after_attention(self.mixer(normed, cos_sin, attend))
            return self.before_next(hidden, changed)
        if self.mixer is not NO_SUBLAYER:
            hidden, normed = self.attended(hidden, normed, cos_sin, attend)
        return self.before_next(hidden, self.after_mlp(self.mlp(normed)))

    def attended(
        self, hidden: Tensor, normed: Tensor, cos_sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The layer up to its MLP: the residual stream, and the MLP's input."""
        return self.before_mlp(hidden, self.after_attention(self.mixer(normed, cos_sin, attend)))


class Attention:
    """Grouped-query attention with rotary positions: the `Mixer` of most models."""

    __slots__ = ("has_query_scale", "head_norms", "joint_norm", "layer", "out", "qkv", "sinks")

    def __init__(
        self, index: int, spec: DecoderSpec, weights: WeightSource, /, *, width: int | None = None
    ) -> None:
        """`width` is the size of the input; None: the hidden size."""
        hidden_size = spec.config.hidden_size
        prefix = f"model.layers.{index}.self_attn"
        self.layer = layer = layer_spec(index, spec, weights)
        q_size = layer.num_heads * layer.head_dim
        kv_size = layer.num_kv_heads * layer.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        if spec.has_joined_qkv:
            parts = {"qkv_proj": q_size + 2 * kv_size}
        self.qkv = weights.linear(
            _below(prefix, parts),
            in_features=width or hidden_size,
            bias=spec.biases.qkv,
            row_order=row_order(layer, spec),
        )
        self.head_norms = self.joint_norm = None
        if spec.qk_norm is not None and spec.qk_norm.is_joint:
            self.joint_norm = joint_norm(layer, spec, weights)
        elif spec.qk_norm is not None:
            self.head_norms = head_norms(layer, spec, weights)
        self.has_query_scale = spec.query_scale is not None
        self.sinks = None
        if spec.has_sinks:
            self.sinks = weights.tensor(f"{prefix}.sinks", (layer.num_heads,), is_wide=True)
        self.out = weights.linear(
            {f"{prefix}.o_proj": hidden_size}, in_features=q_size, bias=spec.biases.attention_out
        )

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        layer = self.layer
        num_heads = layer.num_heads + layer.num_stored_heads
        heads = self.qkv(x).view(x.shape[0], num_heads, layer.head_dim)  # of q, k and v
        if self.joint_norm is not None:
            heads = self.joint_norm(heads)
        if self.has_query_scale:
            cos_sin = scale_queries(heads, cos_sin, layer.num_heads)
        inputs = AttentionInputs(heads, RopeInputs(cos_sin, self.head_norms), self.sinks)
        return self.out(attend(layer, inputs).flatten(1))


def _embedding_factor(spec: DecoderSpec, dtype: torch.dtype) -> float:
    scale = spec.embedding_scale
    return float(torch.tensor(scale.factor, dtype=dtype)) if scale.is_rounded else scale.factor


def _unchanged(x: Tensor) -> Tensor:
    return x


def layer_spec(index: int, spec: DecoderSpec, weights: WeightSource) -> LayerSpec:
    config = spec.config
    return LayerSpec(
        index=index,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
        window=spec.windows[index],
        softcap=spec.attention_softcap,
        kv_scales=kv_scales(weights, index),
        has_sinks=spec.has_sinks,
    )


def _ropes(spec: DecoderSpec) -> Sequence[Rope]:
    full, sliding = spec.config.rope, spec.config.sliding_rope
    return spec.ropes or [full if window is None else sliding for window in spec.windows]


def _entry_norm(spec: DecoderSpec, index: int) -> str | None:
    """Returns the name of the norm before the attention of layer `index`. After the last layer this
    is the model's final norm.
    """
    if index == len(spec.windows):
        return "model.norm"
    name = spec.norms.before_attention
    return None if name is None else f"model.layers.{index}.{name}"


def _norm(weights: WeightSource, name: str | None, spec: DecoderSpec) -> Norm:
    """An RMS norm over the hidden size; the identity without a name."""
    if name is None:
        return _unchanged
    return weights.elementwise.norm(_norm_weight(weights, name, spec), eps=spec.config.rms_norm_eps)


def _add_norm(weights: WeightSource, name: str | None, spec: DecoderSpec) -> SumAndNorm:
    if name is None:
        return AddNorm(_unchanged, scale=spec.residual_scale)
    weight = _norm_weight(weights, name, spec)
    eps = spec.config.rms_norm_eps
    return weights.elementwise.add_norm(weight, eps=eps, scale=spec.residual_scale)


def _norm_weight(weights: WeightSource, name: str, spec: DecoderSpec) -> Tensor:
    return weights.tensor(f"{name}.weight", (spec.config.hidden_size,), offset=spec.norm_offset)


def gated_mlp(
    index: int, spec: DecoderSpec, weights: WeightSource, /, *, name: str = "mlp"
) -> GatedMlp:
    """The gated MLP of layer `index`, which is the MLP of most models. `name`: the checkpoint's."""
    prefix = f"model.layers.{index}.{name}"
    hidden_size, size = spec.config.hidden_size, spec.config.intermediate_size
    parts = {"gate_proj": size, "up_proj": size}
    if spec.has_joined_gate_up:
        parts = {"gate_up_proj": 2 * size}
    gate_up = weights.linear(_below(prefix, parts), in_features=hidden_size, bias=spec.biases.mlp)
    down = weights.linear(
        {f"{prefix}.down_proj": hidden_size}, in_features=size, bias=spec.biases.mlp
    )
    return GatedMlp(gate_up, down, weights.elementwise.gated(spec.config.activation))


def _below(prefix: str, parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{prefix}.{name}": num_rows for name, num_rows in parts.items()}


def _head(config: ModelConfig, embeddings: Tensor, weights: WeightSource) -> LinearOp:
    if config.tie_word_embeddings:
        return weights.tied_linear("lm_head", embeddings)
    return weights.linear(
        {"lm_head": config.vocab_size}, in_features=config.hidden_size, bias=False
    )


def _refuse_partial_rotary(spec: DecoderSpec) -> None:
    config = spec.config
    if config.rotary_dim != config.head_dim and not spec.has_partial_rotary:
        raise ConfigError(
            f"{config.fields.source}: partial_rotary_factor rotates {config.rotary_dim} of "
            f"{config.head_dim} elements of a head; {config.architecture} rotates whole heads"
        )
