"""Qwen3: the shared decoder with normed queries and keys, and windows in some layers if the file
says so.

It knows no other family.
"""

from __future__ import annotations

from aserve.gpu.models.config import ModelConfig
from aserve.gpu.models.decoder import Decoder, DecoderSpec
from aserve.gpu.weights.source import WeightSource


def build_qwen3(config: ModelConfig, weights: WeightSource, *, max_model_len: int) -> Decoder:
    spec = DecoderSpec(config, windows=config.windows, has_qk_norm=True)
    return Decoder(spec, weights, max_model_len=max_model_len)
