"""Gemma 2: RMS norms y = x / rms(x) * (1 + w) before and after both sublayers, a sliding window in
every other layer, soft caps on scores and logits, and embeddings scaled by sqrt(hidden_size).

Reference: modeling_gemma2.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import NORMS_AROUND, Biases, DecoderSpec, EmbeddingScale

DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def gemma2(config: ModelConfig) -> DecoderSpec:
    fields, bias = config.fields, config.attention_bias
    return DecoderSpec(
        config,
        windows=periodic_windows(fields, period=2),
        biases=Biases(qkv=bias, attention_out=bias),
        norms=NORMS_AROUND,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.number_if_any("attn_logit_softcapping"),
        embedding_scale=EmbeddingScale(config.hidden_size**0.5, is_rounded=True),
        logit_softcap=fields.number_if_any("final_logit_softcapping"),
    )
