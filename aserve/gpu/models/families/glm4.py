"""GLM-4 (dense): the Llama decoder with half of each head rotated, in pairs of neighbouring
elements, and gate and up of the MLP joined. The models from 2025 on (GLM-4-0414, GLM-Z1) also have
norms behind the sublayers.

Reference: modeling_glm.py and modeling_glm4.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, LayerNorms

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def glm(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=config.attention_bias),
        has_joined_gate_up=True,
        has_partial_rotary=True,
        rotates_neighbours=True,
    )


def glm4(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(glm(config), norms=NORMS)
