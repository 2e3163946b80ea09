"""Qwen2 and Qwen2.5: biases on queries, keys and values, and sliding windows in the upper layers if
the config enables them.

Reference: modeling_qwen2.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import switched_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec

DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def qwen2(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(config, windows=switched_windows(config.fields), biases=Biases(qkv=True))
