"""Nemotron-H: each layer has a single sublayer, which is Mamba-2, attention without positions, an
MLP or a mixture of experts. The MLPs have no gates: y = relu(x W_up^T)^2 W_down^T.

The bounds of Mamba's steps are those of `time_step_limit`. transformers bounds the steps of prompts
by `time_step_min` instead, but not those of decodes, which this engine could not tell apart.

Reference: modeling_nemotron_h.py in transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from aserve.gpu.layers.no_sublayer import NO_SUBLAYER, NoSublayer
from aserve.gpu.layers.plain_mlp import RELU2, PlainMlp
from aserve.gpu.layers.rope_scaling import NoRope
from aserve.gpu.models.config.fields import Fields, interval
from aserve.gpu.models.config.layer_types import FULL, LINEAR
from aserve.gpu.models.config.model import LAYER_KINDS, ModelConfig
from aserve.gpu.models.decoder import Attention
from aserve.gpu.models.decoder_spec import (
    Biases,
    DecoderSpec,
    LayerNorms,
    MakeMixer,
    MakeMlp,
)
from aserve.gpu.models.mamba2 import GateNorm, Mamba2Spec, SpaceShape
from aserve.gpu.moe.layer import ExpertsSpec
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k, expert_groups
from aserve.gpu.weights.renamed import renamed
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    "conv_kernel": 4,
    "head_dim": 128,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "mlp_hidden_act": RELU2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 8,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "routed_scaling_factor": 1.0,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, math.inf],
    "topk_group": 1,
    "use_conv_bias": True,
}
MLP, EXPERTS = "mlp", "moe"
PATTERN = "hybrid_override_pattern"
# The kinds of layers by their letters in the pattern.
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
# The checkpoint's names, as regular expressions, and those of the decoder.
RENAMED = {
    r"^backbone\.": "model.",
    r"^model\.embeddings\.": "model.embed_tokens.",
    r"^model\.norm_f\.": "model.norm.",
    r"\.mixer\.(?=[qkvo]_proj\.)": ".self_attn.",
    r"\.mixer\.(?=(in_proj|out_proj|conv1d|norm|A_log|D|dt_bias)\b)": ".mamba.",
    r"\.mixer\.": ".mlp.",
}


def nemotron_h(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if fields.text("mlp_hidden_act") != RELU2:
        fields.refuse("mlp_hidden_act", expected=RELU2)
    kinds = _kinds(fields, config.num_layers)
    mixers: dict[str, MakeMixer] = {FULL: Attention}
    mlps: dict[str, MakeMlp] = {MLP: _mlp}
    if LINEAR in kinds:
        mixers[LINEAR] = _mamba2(fields)
    if EXPERTS in kinds:
        mlps[EXPERTS] = _experts(fields)
    own = dataclasses.replace(
        config, rope=NoRope(), rms_norm_eps=fields.number("layer_norm_epsilon")
    )
    return DecoderSpec(
        own,
        windows=(None,) * config.num_layers,
        mixers=tuple(mixers.get(kind, _no_sublayer) for kind in kinds),
        mlps=tuple(mlps.get(kind, _no_sublayer) for kind in kinds),
        biases=Biases(mlp=config.mlp_bias),
        norms=LayerNorms(before_attention="norm"),
    )


def own_name(name: str) -> str:
    """The name that a decoder's layers have for a tensor of a checkpoint."""
    return renamed(name, RENAMED)


def _kinds(fields: Fields, num_layers: int) -> Sequence[str]:
    if fields.has(LAYER_KINDS):
        names: Sequence[str] = fields.texts(LAYER_KINDS, length=num_layers)
        kinds = [OLDER_KINDS.get(name, name) for name in names]
    else:
        names = fields.text(PATTERN)
        kinds = [LETTERS.get(letter, letter) for letter in names]
    if len(kinds) != num_layers or not {*kinds} <= {*LETTERS.values()} or FULL not in kinds:
        expected = f"{num_layers} of {', '.join(LETTERS)}, with at least one *"
        fields.refuse(LAYER_KINDS if fields.has(LAYER_KINDS) else PATTERN, expected=expected)
    return kinds


def _mamba2(fields: Fields) -> Mamba2Spec:
    num_heads, num_groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    if num_heads % num_groups:
        fields.refuse("n_groups", expected=f"a divisor of mamba_num_heads, {num_heads}")
    bias = fields.flag("use_bias")
    return Mamba2Spec(
        SpaceShape(
            num_heads,
            fields.integer("mamba_head_dim"),
            num_groups,
            fields.integer("ssm_state_size"),
            fields.integer("conv_kernel", minimum=2),
        ),
        GateNorm(num_groups),
        limits=interval(fields, "time_step_limit"),
        has_conv_bias=fields.flag("use_conv_bias"),
        has_in_bias=bias,
        has_out_bias=bias,
    )


def _no_sublayer(_index: int, _spec: DecoderSpec, _weights: WeightSource, /) -> NoSublayer:
    return NO_SUBLAYER


def _mlp(index: int, spec: DecoderSpec, weights: WeightSource, /) -> PlainMlp:
    prefix, config = f"model.layers.{index}.mlp", spec.config
    size, hidden_size, bias = config.intermediate_size, config.hidden_size, spec.biases.mlp
    up = weights.linear({f"{prefix}.up_proj": size}, in_features=hidden_size, bias=bias)
    down = weights.linear({f"{prefix}.down_proj": hidden_size}, in_features=size, bias=bias)
    return PlainMlp(up, down, RELU2)


def _experts(fields: Fields) -> ExpertsSpec:
    if fields.has("moe_latent_size"):
        fields.refuse("moe_latent_size", expected="null: experts see whole hidden states")
    if fields.flag("mlp_bias"):
        fields.refuse("mlp_bias", expected="false beside experts")
    count = fields.integer("n_routed_experts")
    return ExpertsSpec(
        count=count,
        size=fields.integer("moe_intermediate_size"),
        routing=Routing(
            checked_top_k(fields, count),
            scores=Scores.SIGMOID,
            groups=expert_groups(fields, count, num_summed=2),
            is_normalised=fields.flag("norm_topk_prob"),
            factor=fields.number("routed_scaling_factor"),
        ),
        shared_size=fields.integer("moe_shared_expert_intermediate_size"),
        has_score_bias=True,
        plain_activation=RELU2,
    )
