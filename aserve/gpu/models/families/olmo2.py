"""OLMo 2: norms after the sublayers instead of before them, and one RMS norm over all query heads
together and one over all key heads.

Reference: modeling_olmo2.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import NORMS_AFTER, Biases, DecoderSpec, QkNorm

DEFAULTS = {"rms_norm_eps": 1e-5}


def olmo2(config: ModelConfig) -> DecoderSpec:
    bias = config.attention_bias
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias),
        norms=NORMS_AFTER,
        qk_norm=QkNorm(is_joint=True),
    )
