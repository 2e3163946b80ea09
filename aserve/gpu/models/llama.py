"""Llama (2, 3 and what keeps their architecture): the shared decoder as it is.

It knows no other family. Every layer sees everything, whatever the file says of windows: so does
the reference.
"""

from __future__ import annotations

from aserve.gpu.models.config import ModelConfig
from aserve.gpu.models.decoder import Decoder, DecoderSpec
from aserve.gpu.weights.source import WeightSource


def build_llama(config: ModelConfig, weights: WeightSource, *, max_model_len: int) -> Decoder:
    spec = DecoderSpec(config, windows=(None,) * config.num_layers)
    return Decoder(spec, weights, max_model_len=max_model_len)
