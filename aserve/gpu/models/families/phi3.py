"""Phi-3 and Phi-4: the checkpoint joins q, k and v, and gate and up; rope may rotate only a part of
each head.

Reference: modeling_phi3.py in transformers.
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
        has_joined_qkv=True,
        has_joined_gate_up=True,
        has_partial_rotary=True,
    )
