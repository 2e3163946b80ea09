"""Llama (2, 3 and what keeps their architecture): the shared decoder as it is.

It knows no other family. Every layer sees everything, whatever the file says of windows: so does
the reference.
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
