"""Falcon-H1: the Llama decoder with Mamba-2 beside the attention of each layer, and factors on the
inputs and outputs of nearly every part.

    h = h + m_1 mamba(m_2 norm(h)) + m_3 attention(m_4 norm(h))
    h = h + m_5 W_down (act(m_6 W_gate norm(h)) * W_up norm(h))

Keys have a factor, which is one on the scores of attention here, and so have embeddings and logits.

Reference: modeling_falcon_h1.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.layers.mlp import ACTIVATIONS
from aserve.gpu.layers.scaled_mlp import ScaledMlp
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention, gated_mlp
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, EmbeddingScale, MakeMlp
from aserve.gpu.models.mamba2 import (
    MAMBA2_DEFAULTS,
    BesideFactors,
    GateNorm,
    Mamba2Spec,
    MambaBeside,
    mamba2_spec,
)
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    **MAMBA2_DEFAULTS,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


def falcon_h1(config: ModelConfig) -> DecoderSpec:
    fields, bias, num_layers = config.fields, config.attention_bias, config.num_layers
    factors = BesideFactors(
        mamba_in=_factor(fields, "ssm_in_multiplier"),
        mamba_out=_factor(fields, "ssm_out_multiplier"),
        other_in=_factor(fields, "attention_in_multiplier"),
        other_out=_factor(fields, "attention_out_multiplier"),
    )
    mamba = _mamba2(fields)

    def mixer(index: int, spec: DecoderSpec, weights: WeightSource, /) -> MambaBeside:
        attention = Attention(index, spec, weights)
        return MambaBeside(mamba(index, spec, weights), attention, factors)

    return DecoderSpec(
        config,
        windows=(None,) * num_layers,
        mixers=(mixer,) * num_layers,
        mlps=(_mlp(fields),) * num_layers,
        biases=Biases(qkv=bias, attention_out=bias, mlp=config.mlp_bias),
        attention_scale=config.head_dim**-0.5 * _factor(fields, "key_multiplier"),
        embedding_scale=EmbeddingScale(_factor(fields, "embedding_multiplier")),
        logit_divisor=1.0 / _factor(fields, "lm_head_multiplier"),
    )


def _factor(fields: Fields, name: str) -> float:
    return fields.number(name, default=1.0)


def _mamba2(fields: Fields) -> Mamba2Spec:
    size = fields.integer("mamba_d_ssm") if fields.has("mamba_d_ssm") else None
    spec = mamba2_spec(fields, inner_size=size)
    norm = None
    if fields.flag("mamba_rms_norm"):
        is_before_gate = fields.flag("mamba_norm_before_gate")
        norm = GateNorm(spec.shape.num_groups, is_before_gate=is_before_gate)
    factors: tuple[float, ...] = ()
    if fields.has("ssm_multipliers"):
        factors = fields.numbers("ssm_multipliers", length=5)
    return msgspec.structs.replace(
        spec, norm=norm, factors=factors, has_out_bias=fields.flag("projectors_bias")
    )


def _mlp(fields: Fields) -> MakeMlp:
    factors = (1.0, 1.0)
    if fields.has("mlp_multipliers"):
        gate, down = fields.numbers("mlp_multipliers", length=2)
        factors = gate, down
    if factors == (1.0, 1.0):
        return gated_mlp

    def make(index: int, spec: DecoderSpec, weights: WeightSource, /) -> ScaledMlp:
        mlp, (gate, down) = gated_mlp(index, spec, weights), factors
        activation = ACTIVATIONS[spec.config.activation]
        return ScaledMlp(mlp, activation, gate_factor=gate, factor=down)

    return make
