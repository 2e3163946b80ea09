"""Gemma, the first one: the Llama decoder with RMS norms y = x / rms(x) * (1 + w), and embeddings
scaled by sqrt(hidden_size).

Reference: modeling_gemma.py in transformers.
"""

from __future__ import annotations

import dataclasses

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, EmbeddingScale

TANH = "gelu_pytorch_tanh"
DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": TANH,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}


def gemma(config: ModelConfig) -> DecoderSpec:
    bias = config.attention_bias
    # The first files say gelu, and mean its approximation.
    activation = TANH if config.activation == "gelu" else config.activation
    return DecoderSpec(
        dataclasses.replace(config, activation=activation),
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias),
        norm_offset=1.0,
        embedding_scale=EmbeddingScale(config.hidden_size**0.5, is_rounded=True),
    )
