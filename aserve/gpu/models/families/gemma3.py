"""Gemma 3 (text): as Gemma 2, with a norm of each query and key head and without soft caps. Every
sixth layer has full attention; the other five have a window and a rope theta of their own.

Reference: modeling_gemma3.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import NORMS_AROUND, Biases, DecoderSpec, EmbeddingScale, QkNorm

DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
# The files of models with pictures leave out what is as in the first one of them.
TEXT_DEFAULTS = {
    **DEFAULTS,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "vocab_size": 262_208,
}


def gemma3(config: ModelConfig) -> DecoderSpec:
    fields, bias = config.fields, config.attention_bias
    if fields.has("attn_logit_softcapping"):
        fields.refuse("attn_logit_softcapping", expected="null: Gemma 3 has no soft cap on scores")
    return DecoderSpec(
        config,
        windows=periodic_windows(fields, period=fields.integer("sliding_window_pattern")),
        biases=Biases(qkv=bias, attention_out=bias),
        norms=NORMS_AROUND,
        norm_offset=1.0,
        qk_norm=QkNorm(),
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=EmbeddingScale(config.hidden_size**0.5, is_rounded=True),
        logit_softcap=fields.number_if_any("final_logit_softcapping"),
    )
