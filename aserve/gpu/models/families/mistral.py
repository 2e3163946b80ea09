"""Mistral: the Llama decoder with one sliding window in all layers, unless the config says null.

Reference: modeling_mistral.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def mistral(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(config, windows=one_window(config.fields))
