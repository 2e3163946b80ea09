"""DeepSeek-V2, V3, V3.2, Kimi K2, GLM-4.7-Flash and GLM-5: latent attention, and experts behind the
first layers.

V2 chooses experts by their softmax scores, among all of them (`greedy`) or in the groups that have
the best experts (`group_limited_greedy`). V3 has sigmoid scores, and a bias corrects the choice.
V3.2 and GLM-5 are V3 with sparse attention: each layer has an indexer (models/indexer.py).

Reference: modeling_deepseek_v2.py, _v3.py and _v32.py in transformers.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec, MakeMlp
from aserve.gpu.models.families.glm4_moe import corrected_experts, mlps_by_layer
from aserve.gpu.models.indexer import IndexShape
from aserve.gpu.models.latent_attention import LatentAttention, LatentShape
from aserve.gpu.moe.layer import ExpertsSpec
from aserve.gpu.moe.routing import Routing, checked_top_k, expert_groups

LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V2_DEFAULTS = {
    **LATENT_DEFAULTS,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
V3_DEFAULTS = {
    **LATENT_DEFAULTS,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}

GLM4_LITE_DEFAULTS = {
    **V3_DEFAULTS,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
}
V32_DEFAULTS = {**V3_DEFAULTS, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}

GLM5_DEFAULTS = {
    **V32_DEFAULTS,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
}
# Fields that say which layers have indexers.
KINDS, PERIOD, PATTERN = "indexer_types", "index_topk_freq", "index_topk_pattern"


def deepseek_v2(config: ModelConfig) -> DecoderSpec:
    return _deepseek(config, _softmax_experts(config))


def deepseek_v3(config: ModelConfig) -> DecoderSpec:
    return _deepseek(config, corrected_experts(config))


def deepseek_v32(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if not fields.has("q_lora_rank"):
        fields.refuse("q_lora_rank", expected="a number: the indexer reads compressed queries")
    _refuse_shared_choices(fields)
    rope_dim = fields.integer("qk_rope_head_dim")
    index_shape = IndexShape.of(fields, rope_dim=rope_dim)
    return _deepseek(config, corrected_experts(config), index_shape)


def _refuse_shared_choices(fields: Fields) -> None:
    """Refuses layers that attend to the keys which the indexer of another layer has chosen."""
    expected = "an indexer in each layer: layers that share the choice of another are not supported"
    if fields.has(KINDS) and {*fields.texts(KINDS)} != {"full"}:
        fields.refuse(KINDS, expected=expected)
    if fields.integer(PERIOD, default=1) != 1:
        fields.refuse(PERIOD, expected=expected)
    if fields.has(PATTERN) and {*fields.text(PATTERN)} != {"F"}:
        fields.refuse(PATTERN, expected=expected)


def _deepseek(
    config: ModelConfig, experts: MakeMlp, index_shape: IndexShape | None = None
) -> DecoderSpec:
    fields, num_layers = config.fields, config.num_layers
    if fields.integer("moe_layer_freq", default=1) != 1:
        fields.refuse("moe_layer_freq", expected="1: experts in all layers but the first")
    shape = LatentShape.of(fields)
    # Rope rotates the heads of q_pe and k_pe; other heads have no meaning here.
    rope_dim = shape.qk_rope_head_dim
    return DecoderSpec(
        dataclasses.replace(config, head_dim=rope_dim, rotary_dim=rope_dim),
        windows=(None,) * num_layers,
        mixers=(partial(LatentAttention, shape=shape, index_shape=index_shape),) * num_layers,
        mlps=mlps_by_layer(config, experts),
    )


def _softmax_experts(config: ModelConfig) -> ExpertsSpec:
    fields = config.fields
    count = fields.integer("n_routed_experts")
    size = fields.integer("moe_intermediate_size")
    if fields.flag("norm_topk_prob"):
        fields.refuse("norm_topk_prob", expected="false: the weights of experts are not normalised")
    groups = None
    match fields.text("topk_method"):
        case "greedy":
            pass
        case "group_limited_greedy":
            groups = expert_groups(fields, count, num_summed=1)
        case _:
            fields.refuse("topk_method", expected="greedy or group_limited_greedy")
    factor = fields.number("routed_scaling_factor")
    return ExpertsSpec(
        count=count,
        size=size,
        routing=Routing(checked_top_k(fields, count), groups=groups, factor=factor),
        shared_size=size * fields.integer("n_shared_experts", minimum=0),
    )
