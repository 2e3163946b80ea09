"""OLMo 2 and 3: norms after the sublayers instead of before them, and one RMS norm over all query
heads together and one over all key heads. Three of four layers of OLMo 3 have a window, whose rope
is never scaled.

Reference: modeling_olmo2.py and modeling_olmo3.py in transformers.
"""

from __future__ import annotations

import dataclasses

import msgspec

from aserve.gpu.layers.rope_scaling import DefaultRope
from aserve.gpu.models.config.layer_types import periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import NORMS_AFTER, Biases, DecoderSpec, QkNorm

DEFAULTS = {"rms_norm_eps": 1e-5}
DEFAULTS_3 = {**DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096}


def olmo2(config: ModelConfig) -> DecoderSpec:
    bias = config.attention_bias
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias),
        norms=NORMS_AFTER,
        qk_norm=QkNorm(is_joint=True),
    )


def olmo3(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if fields.has("rope_scaling"):  # in newer files, each kind of layer has a rope of its own
        unscaled = DefaultRope(fields.number("rope_theta"))
        config = dataclasses.replace(config, sliding_rope=unscaled)
    return msgspec.structs.replace(olmo2(config), windows=periodic_windows(fields, period=4))
