"""Seed-OSS: the Llama decoder with biases on queries, keys and values, and a switch of its own for
the bias of attention's output.

Reference: modeling_seed_oss.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec

DEFAULTS = {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8}


def seed_oss(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(
            qkv=config.attention_bias,
            attention_out=config.fields.flag("attention_out_bias"),
            mlp=config.mlp_bias,
        ),
    )
