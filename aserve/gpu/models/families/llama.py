"""Llama 2 and 3, and other models with their architecture: the shared decoder without additions.

Reference: modeling_llama.py in transformers. As there, windows in the configuration are ignored.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec


def llama(config: ModelConfig) -> DecoderSpec:
    bias = config.attention_bias
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias, mlp=config.mlp_bias),
    )
