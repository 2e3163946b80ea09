"""OLMoE: the Llama decoder with one RMS norm over all query heads together and one over all key
heads, and a mixture of experts in every layer.

Reference: modeling_olmoe.py in transformers. Paper: https://arxiv.org/abs/2409.02060
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, QkNorm
from aserve.gpu.moe.layer import ExpertsSpec
from aserve.gpu.moe.routing import Routing, checked_top_k

DEFAULTS = {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}


def olmoe(config: ModelConfig) -> DecoderSpec:
    fields, bias = config.fields, config.attention_bias
    if fields.has("clip_qkv"):
        fields.refuse("clip_qkv", expected="null: queries, keys and values are not clipped")
    count = fields.integer("num_experts")
    experts = ExpertsSpec(
        count=count,
        size=config.intermediate_size,
        routing=Routing(checked_top_k(fields, count), is_normalised=fields.flag("norm_topk_prob")),
    )
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        mlps=(experts,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias),
        qk_norm=QkNorm(is_joint=True),
    )
