"""Mixtral: Mistral with a mixture of experts in every layer.

Reference: modeling_mixtral.py in transformers. Paper: https://arxiv.org/abs/2401.04088
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families.mistral import mistral
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec
from aserve.gpu.moe.routing import Routing, checked_top_k

DEFAULTS = {
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1e6,
}
NAMES = ExpertNames(mlp="block_sparse_moe", gate="w1", up="w3", down="w2")


def mixtral(config: ModelConfig) -> DecoderSpec:
    count = config.fields.integer("num_local_experts")
    experts = ExpertsSpec(
        count=count,
        size=config.intermediate_size,
        routing=Routing(checked_top_k(config.fields, count), is_normalised=True),
        names=NAMES,
    )
    return msgspec.structs.replace(mistral(config), mlps=(experts,) * config.num_layers)
