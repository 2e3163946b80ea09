"""Qwen2-MoE: Qwen2 with a mixture of experts in every `decoder_sparse_step`-th layer, beside an MLP
that all tokens share behind a gate of its own.

Reference: modeling_qwen2_moe.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.layer_types import switched_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec
from aserve.gpu.models.families.qwen3_moe import SPARSE_DEFAULTS, sparse_experts, sparse_mlps
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec

DEFAULTS = {
    **SPARSE_DEFAULTS,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 5632,
}


def qwen2_moe(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    return DecoderSpec(
        config,
        windows=switched_windows(fields),
        mlps=sparse_mlps(config, shared_experts(config)),
        biases=Biases(qkv=fields.flag("qkv_bias")),
    )


def shared_experts(config: ModelConfig) -> ExpertsSpec:
    """The experts of one layer, beside the MLP that all tokens share."""
    return msgspec.structs.replace(
        sparse_experts(config),
        shared_size=config.fields.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )
