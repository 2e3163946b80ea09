"""Qwen3-MoE: Qwen3 with a mixture of experts in every `decoder_sparse_step`-th layer.

Reference: modeling_qwen3_moe.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import gated_mlp
from aserve.gpu.models.decoder_spec import DecoderSpec, MakeMlp
from aserve.gpu.models.families.qwen3 import qwen3
from aserve.gpu.moe.layer import ExpertsSpec
from aserve.gpu.moe.routing import Routing, checked_top_k

SPARSE_DEFAULTS = {"decoder_sparse_step": 1, "sliding_window": 4096, "max_window_layers": 28}
DEFAULTS = {
    **SPARSE_DEFAULTS,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}


def qwen3_moe(config: ModelConfig) -> DecoderSpec:
    experts = sparse_experts(config)
    return msgspec.structs.replace(qwen3(config), mlps=sparse_mlps(config, experts))


def sparse_experts(config: ModelConfig) -> ExpertsSpec:
    fields = config.fields
    count = fields.integer("num_local_experts", default=fields.integer("num_experts"))
    return ExpertsSpec(
        count=count,
        size=fields.integer("moe_intermediate_size"),
        routing=Routing(checked_top_k(fields, count), is_normalised=fields.flag("norm_topk_prob")),
    )


def sparse_mlps(config: ModelConfig, experts: MakeMlp) -> tuple[MakeMlp, ...]:
    """One per layer: experts in every `decoder_sparse_step`-th layer, except those that
    `mlp_only_layers` names."""
    fields = config.fields
    step = fields.integer("decoder_sparse_step")
    dense = fields.integers("mlp_only_layers", may_be_empty=True)
    return tuple(
        gated_mlp if index in dense or (index + 1) % step else experts
        for index in range(config.num_layers)
    )
