"""EXAONE 4.0: norms after the sublayers and of each query and key head. If some layers have a
window, the others do not rotate heads.

Reference: modeling_exaone4.py in transformers. Paper: https://arxiv.org/abs/2507.11407
"""

from __future__ import annotations

import dataclasses

from aserve.gpu.layers.rope_scaling import NoRope
from aserve.gpu.models.config.layer_types import Windows, periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import NORMS_AFTER, DecoderSpec, QkNorm

PERIOD = 4  # one of so many layers is without a window, if the file does not list them
DEFAULTS = {"rms_norm_eps": 1e-5}


def exaone4(config: ModelConfig) -> DecoderSpec:
    if not config.fields.has("sliding_window"):
        windows: Windows = (None,) * config.num_layers
    else:
        windows = periodic_windows(config.fields, period=PERIOD)
        config = dataclasses.replace(config, rope=NoRope())
    return DecoderSpec(config, windows=windows, norms=NORMS_AFTER, qk_norm=QkNorm())
