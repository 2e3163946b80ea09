"""Llama 2 and 3, and other models with their architecture: the shared decoder without additions.

Reference: modeling_llama.py in transformers. As there, windows in the configuration are ignored.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec
from aserve.gpu.models.ngram_embedding import NgramEmbedding, NgramModel
from aserve.gpu.weights.source import WeightSource


def llama(config: ModelConfig) -> DecoderSpec:
    bias = config.attention_bias
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias, mlp=config.mlp_bias),
    )


def llama_with_ngrams(
    config: ModelConfig, weights: WeightSource, *, max_model_len: int
) -> NgramModel:
    """Llama's layers with the embedding of LongCat-Flash-Lite."""
    decoder = Decoder(llama(config), weights, max_model_len=max_model_len)
    return NgramModel(decoder, NgramEmbedding(config, weights))
