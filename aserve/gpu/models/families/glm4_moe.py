"""GLM-4.5, the Llama decoder with half of each head rotated, and a mixture of experts with
DeepSeek-V3's routing in all layers but the first; and dots.llm1 and Solar Open, which have whole
heads rotated.

Reference: modeling_glm4_moe.py, modeling_dots1.py and modeling_solar_open.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.layer_types import Windows, named_windows, one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import gated_mlp
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, MakeMlp, QkNorm
from aserve.gpu.moe.layer import ExpertsSpec
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k, expert_groups

DEFAULTS = {
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
DOTS1_DEFAULTS = {
    "first_k_dense_replace": 0,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}

SOLAR_DEFAULTS = {
    **DEFAULTS,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1280,
    "partial_rotary_factor": 1.0,
    "rope_theta": 1e6,
    # All layers have experts, so that config.json has no size of other MLPs.
    "intermediate_size": 1280,
}


def glm4_moe(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    return DecoderSpec(
        config,
        windows=one_window(fields),
        mlps=mlps_by_layer(config, corrected_experts(config)),
        biases=Biases(qkv=config.attention_bias),
        qk_norm=QkNorm() if fields.flag("use_qk_norm") else None,
        has_partial_rotary=True,
    )


def dots1(config: ModelConfig) -> DecoderSpec:
    fields, num_layers, bias = config.fields, config.num_layers, config.attention_bias
    windows: Windows = (None,) * num_layers
    if fields.has("sliding_window"):
        num_full = fields.integer("max_window_layers", minimum=0)
        is_full = [index < num_full for index in range(num_layers)]
        windows = named_windows(fields, window=fields.integer("sliding_window"), is_full=is_full)
    return msgspec.structs.replace(
        glm4_moe(config),
        windows=windows,
        biases=Biases(qkv=bias, attention_out=bias),
        qk_norm=QkNorm(),
        has_partial_rotary=False,
    )


def mlps_by_layer(config: ModelConfig, experts: MakeMlp) -> tuple[MakeMlp, ...]:
    """The layers that `mlp_layer_types` names have experts, or else all but the first ones."""
    fields, name = config.fields, "mlp_layer_types"
    if not fields.has(name):
        num_dense = min(fields.integer("first_k_dense_replace", minimum=0), config.num_layers)
        return (gated_mlp,) * num_dense + (experts,) * (config.num_layers - num_dense)
    makers: dict[str, MakeMlp] = {"dense": gated_mlp, "sparse": experts}
    kinds = fields.texts(name, length=config.num_layers)
    if not {*kinds} <= {*makers}:
        fields.refuse(name, expected=f"{' or '.join(makers)} for each layer")
    return tuple(makers[kind] for kind in kinds)


def corrected_experts(config: ModelConfig) -> ExpertsSpec:
    """The mixture of DeepSeek-V3: sigmoid scores, and a bias that corrects the choice alone."""
    fields = config.fields
    count = fields.integer("n_routed_experts")
    size = fields.integer("moe_intermediate_size")
    return ExpertsSpec(
        count=count,
        size=size,
        routing=Routing(
            checked_top_k(fields, count),
            scores=Scores.SIGMOID,
            groups=expert_groups(fields, count, num_summed=2),
            is_normalised=fields.flag("norm_topk_prob"),
            factor=fields.number("routed_scaling_factor"),
        ),
        shared_size=size * fields.integer("n_shared_experts", minimum=0),
        has_score_bias=True,
    )
