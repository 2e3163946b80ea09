"""Gemma 2: norms around both sublayers that multiply by 1 + w, windows in every other layer, caps
on scores and logits, a scale for queries and one for embeddings.

It knows no other family.
"""

from __future__ import annotations

from aserve.gpu.models.config.layer_types import windows_in_turn
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
        windows=windows_in_turn(fields, period=2),
        biases=Biases(qkv=bias, attention_out=bias),
        norms=NORMS_AROUND,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.number_if_any("attn_logit_softcapping"),
        embedding_scale=EmbeddingScale(config.hidden_size**0.5, is_rounded=True),
        logit_softcap=fields.number_if_any("final_logit_softcapping"),
    )
