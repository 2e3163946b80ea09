"""Granite: the Llama decoder with factors on embeddings, attention scores and sublayer outputs, and
a divisor of the logits.

Reference: modeling_granite.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, EmbeddingScale


def granite(config: ModelConfig) -> DecoderSpec:
    fields, bias = config.fields, config.attention_bias
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias, mlp=config.mlp_bias),
        attention_scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=EmbeddingScale(fields.number("embedding_multiplier", default=1.0)),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logit_divisor=fields.number("logits_scaling", default=1.0),
    )
