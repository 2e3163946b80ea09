"""GLM-4.5: the Llama decoder with half of each head rotated, and a mixture of experts with
DeepSeek-V3's routing in all layers but the first.

Reference: modeling_glm4_moe.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import gated_mlp
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, QkNorm
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


def glm4_moe(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    num_dense = fields.integer("first_k_dense_replace", minimum=0)
    return DecoderSpec(
        config,
        windows=one_window(fields),
        mlps=tuple(
            gated_mlp if index < num_dense else corrected_experts(config)
            for index in range(config.num_layers)
        ),
        biases=Biases(qkv=config.attention_bias),
        qk_norm=QkNorm() if fields.flag("use_qk_norm") else None,
        has_partial_rotary=True,
    )


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
