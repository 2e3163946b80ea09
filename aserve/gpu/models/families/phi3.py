"""Phi-3 and Phi-4: joined projections in the checkpoint, and positions that may turn only a part of
each head.

It knows no other family.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec

DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}


def phi3(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        config,
        windows=one_window(config.fields),
        has_joined_weights=True,
        has_partial_rotary=True,
    )
