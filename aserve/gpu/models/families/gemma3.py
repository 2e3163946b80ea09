"""Gemma 3: as Gemma 2, with a norm of each query and key head and without soft caps. Every sixth
layer has full attention; the other five have a window and a rope theta of their own. Pictures are
read by SigLIP, of whose patches squares are averaged, and the tokens of a picture see each other.

Reference: modeling_gemma3.py and modeling_siglip.py in transformers.
"""

from __future__ import annotations

import math
from functools import partial

from aserve.gpu.models.config.layer_types import periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import NORMS_AROUND, Biases, DecoderSpec, EmbeddingScale, QkNorm
from aserve.gpu.models.vision.encoder import VisionSpec
from aserve.gpu.models.vision.layers import activation_of, layer_norm, plain_mlp, pooled_merger
from aserve.gpu.weights.renamed import renamed

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
RENAMED = {
    r"^language_model\.": "",
    r"^(model\.)?vision_tower\.(vision_model\.)?": "visual.",
    r"^(model\.)?multi_modal_projector\.mm_soft_emb_norm\.": "visual.merger.norm.",
    r"^(model\.)?multi_modal_projector\.mm_input_projection_weight$": "visual.merger.projection",
    r"^visual\.post_layernorm\.": "visual.merger.post_norm.",
    r"^visual\.embeddings\.patch_embedding\.": "visual.patch_embed.proj.",
    r"^visual\.embeddings\.position_embedding\.": "visual.pos_embed.",
    r"^visual\.encoder\.layers\.": "visual.blocks.",
    r"^(visual\.blocks\.\d+)\.layer_norm([12])\.": r"\1.norm\2.",
    r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.": r"\1.attn.proj.",
    r"^(visual\.blocks\.\d+)\.self_attn\.": r"\1.attn.",
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


def siglip(config: ModelConfig) -> VisionSpec:
    fields = config.fields
    vision = fields.section("vision_config")
    patch_size = vision.integer("patch_size", default=14)
    per_side = vision.integer("image_size", default=896) // patch_size
    num_tokens = fields.integer("mm_tokens_per_image", default=256)
    merge_size = per_side // math.isqrt(num_tokens)
    if merge_size * merge_size * num_tokens != per_side * per_side:
        fields.refuse("mm_tokens_per_image", expected=f"a square of a divisor of {per_side}")
    if any(window is not None and window < num_tokens for window in gemma3(config).windows):
        fields.refuse("sliding_window", expected=f"at least the {num_tokens} tokens of a picture")
    return VisionSpec(
        hidden_size=vision.integer("hidden_size", default=1152),
        num_heads=vision.integer("num_attention_heads", default=16),
        num_layers=vision.integer("num_hidden_layers", default=27),
        mlp_size=vision.integer("intermediate_size", default=4304),
        out_size=config.hidden_size,
        patch_size=patch_size,
        merge_size=merge_size,
        activation=activation_of(vision, "hidden_act", "gelu_pytorch_tanh"),
        norm=layer_norm,
        mlp=partial(plain_mlp, names=("fc1", "fc2")),
        merger=pooled_merger,
        norm_eps=vision.number("layer_norm_eps", default=1e-6),
        rope=None,
        qkv=("q_proj", "k_proj", "v_proj"),
        has_patch_bias=True,
        num_positions=per_side * per_side,
        sees_itself=True,
    )


def own_name(name: str) -> str | None:
    """Returns the name that a tensor of a checkpoint with pictures has here. None: SigLIP's head,
    which is not used."""
    own = renamed(name, RENAMED)
    return None if own.startswith("visual.head.") else own
