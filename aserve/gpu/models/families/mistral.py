"""Mistral: the Llama decoder with one sliding window in all layers, unless the config says null.
Mistral Small 3 has it behind an encoder of pictures.

Reference: modeling_mistral.py and modeling_mistral3.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
SMALL3_DEFAULTS = {"num_key_value_heads": 8}


def mistral(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(config, windows=one_window(config.fields))


def mistral3(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if (kind := fields.text("model_type", default="mistral")) != "mistral":
        fields.refuse("model_type", expected=f"mistral in text_config: {kind} is not supported")
    return mistral(config)
