"""Qwen3: an RMS norm of each query and key head, and sliding windows in the upper layers if the
config enables them.

Reference: modeling_qwen3.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import switched_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, QkNorm

DEFAULTS = {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}


def qwen3(config: ModelConfig) -> DecoderSpec:
    bias = config.attention_bias
    return DecoderSpec(
        config,
        windows=switched_windows(config.fields),
        biases=Biases(qkv=bias, attention_out=bias),
        qk_norm=QkNorm(),
    )
