"""Bamba: the Llama decoder with Mamba-2 in all layers but those that `attn_layer_indices` names.
Rope rotates half of each head.

Reference: modeling_bamba.py in transformers.
"""

from __future__ import annotations

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec
from aserve.gpu.models.mamba2 import MAMBA2_DEFAULTS, mamba2_spec
from aserve.gpu.weights.renamed import renamed

DEFAULTS = {
    **MAMBA2_DEFAULTS,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}
# The checkpoint's names, and those of the decoder.
RENAMED = {
    r"\.feed_forward\.": ".mlp.",
    r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
    r"\.final_layernorm\.": ".norm.",
}


def bamba(config: ModelConfig) -> DecoderSpec:
    fields, bias, num_layers = config.fields, config.attention_bias, config.num_layers
    with_attention = {*fields.integers("attn_layer_indices")}
    if not with_attention <= {*range(num_layers)}:
        fields.refuse("attn_layer_indices", expected=f"numbers of layers below {num_layers}")
    linear = mamba2_spec(fields)
    return DecoderSpec(
        config,
        windows=(None,) * num_layers,
        mixers=tuple(Attention if i in with_attention else linear for i in range(num_layers)),
        biases=Biases(qkv=bias, attention_out=bias, mlp=config.mlp_bias),
        has_partial_rotary=True,
    )


def own_name(name: str) -> str:
    """The name that a decoder's layers have for a tensor of a checkpoint."""
    return renamed(name, RENAMED)
