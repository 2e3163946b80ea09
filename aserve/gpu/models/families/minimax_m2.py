"""MiniMax-M2: the Llama decoder with a part of each head rotated, one RMS norm over all query heads
together and one over all key heads, and experts in all layers, chosen by corrected sigmoid scores.

Reference: modeling_minimax_m2.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec, QkNorm
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k

DEFAULTS = {
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rope_theta": 5e6,
}
NAMES = ExpertNames(
    mlp="block_sparse_moe", gate="w1", up="w3", down="w2", bias="e_score_correction_bias"
)


def minimax_m2(config: ModelConfig) -> DecoderSpec:
    count = config.fields.integer("num_local_experts")
    top_k = checked_top_k(config.fields, count)
    experts = ExpertsSpec(
        count=count,
        size=config.intermediate_size,
        routing=Routing(top_k, scores=Scores.SIGMOID, is_normalised=True),
        has_score_bias=True,
        names=NAMES,
    )
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        mlps=(experts,) * config.num_layers,
        qk_norm=QkNorm(is_joint=True),
        has_partial_rotary=True,
    )
