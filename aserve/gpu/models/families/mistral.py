"""Mistral: the Llama decoder with one sliding window in all layers, unless the config says null.
Ministral 3 has queries that their positions scale. Mistral Small 3 and newer files of Ministral 3
have one of them behind the vision transformer of Pixtral, which has norms and MLPs as Llama,
frequencies of their own for columns, and a projector that joins patches after a norm.

Reference: modeling_mistral.py, modeling_ministral3.py, modeling_mistral3.py and modeling_pixtral.py
in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.config.rope import query_scale
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.vision.encoder import VisionRope, VisionSpec
from aserve.gpu.models.vision.layers import activation_of, gated_mlp, patch_merger, rms_norm
from aserve.gpu.weights.renamed import renamed

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
SMALL3_DEFAULTS = {"num_key_value_heads": 8}
MINISTRAL3_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
PIXTRAL_NORM_EPS = 1e-5
LAST_LAYER = -1
RENAMED = {
    r"^language_model\.": "",
    r"^(model\.)?multi_modal_projector\.": "visual.merger.",
    r"^(model\.)?vision_tower\.": "visual.",
    r"^visual\.patch_conv\.": "visual.patch_embed.proj.",
    r"^visual\.ln_pre\.": "visual.first_norm.",
    r"^visual\.transformer\.layers\.": "visual.blocks.",
    r"^(visual\.blocks\.\d+)\.attention_norm\.": r"\1.norm1.",
    r"^(visual\.blocks\.\d+)\.ffn_norm\.": r"\1.norm2.",
    r"^(visual\.blocks\.\d+)\.attention\.o_proj\.": r"\1.attn.proj.",
    r"^(visual\.blocks\.\d+)\.attention\.": r"\1.attn.",
    r"^(visual\.blocks\.\d+)\.feed_forward\.": r"\1.mlp.",
}


def mistral(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(config, windows=one_window(config.fields))


def ministral3(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(mistral(config), query_scale=query_scale(config.fields))


# By the type of the text model.
TEXT_MODELS: Mapping[str, Callable[[ModelConfig], DecoderSpec]] = {
    "mistral": mistral,
    "ministral3": ministral3,
}


def mistral3(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    kind = fields.text("model_type", default="mistral")
    if kind not in TEXT_MODELS:
        fields.refuse("model_type", expected=f"{' or '.join(TEXT_MODELS)} in text_config")
    return TEXT_MODELS[kind](config)


def pixtral(config: ModelConfig) -> VisionSpec:
    fields = config.fields
    if fields.integer("vision_feature_layer", default=LAST_LAYER, minimum=LAST_LAYER) != LAST_LAYER:
        fields.refuse("vision_feature_layer", expected=f"{LAST_LAYER}, the last layer")
    vision = fields.section("vision_config")
    if (kind := vision.text("model_type", default="pixtral")) != "pixtral":
        vision.refuse("model_type", expected=f"pixtral: {kind} is not supported")
    make_merger = partial(
        patch_merger,
        eps=config.rms_norm_eps,
        activation=activation_of(fields, "projector_hidden_act", "gelu"),
        bias=fields.flag("multimodal_projector_bias"),
    )
    return VisionSpec(
        hidden_size=vision.integer("hidden_size", default=1024),
        num_heads=vision.integer("num_attention_heads", default=16),
        num_layers=vision.integer("num_hidden_layers", default=24),
        mlp_size=vision.integer("intermediate_size", default=4096),
        out_size=config.hidden_size,
        patch_size=vision.integer("patch_size", default=14),
        merge_size=fields.integer("spatial_merge_size", default=2),
        activation=activation_of(vision, "hidden_act", "gelu"),
        norm=rms_norm,
        mlp=gated_mlp,
        merger=make_merger,
        norm_eps=PIXTRAL_NORM_EPS,
        rope=VisionRope(theta=_theta(vision), has_column_frequencies=True),
        qkv=("q_proj", "k_proj", "v_proj"),
        has_bias=False,
        has_first_norm=True,
    )


def own_name(name: str) -> str:
    """Returns the name that a tensor of Mistral Small 3 has here."""
    return renamed(name, RENAMED)


def _theta(vision: Fields) -> float:
    """Newer configurations have it in a section."""
    place = vision.section("rope_parameters") if vision.has("rope_parameters") else vision
    return place.number("rope_theta", default=10_000.0)
