"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a vision transformer before a text model of Qwen
whose rotary positions have three axes.

Qwen2.5-VL has RMS norms, gated MLPs and attention windows in its vision transformer. Qwen3-VL has
learnt positions there, and adds the hidden states of some of its blocks in the first layers of the
text model (deepstack); its axes are interleaved over the rotary pairs. Qwen3.5 has both but for
deepstack.

Reference: modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py and
modeling_qwen3_5.py in transformers.
"""

from __future__ import annotations

from functools import partial

import msgspec

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.config.rope import rope_axes
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families import qwen2, qwen3, qwen3_next
from aserve.gpu.models.vision.encoder import VisionSpec
from aserve.gpu.models.vision.layers import (
    activation_of,
    gated_mlp,
    layer_norm,
    merger,
    plain_mlp,
    rms_norm,
)
from aserve.picture import NUM_AXES

QWEN2_DEFAULTS = {**qwen2.DEFAULTS, "rope_theta": 1_000_000.0}
QWEN3_DEFAULTS = {**qwen3.DEFAULTS, "rope_theta": 5_000_000.0}
OLD_MERGER = ("ln_q", "mlp.0", "mlp.2")
NEW_MERGER = ("norm", "linear_fc1", "linear_fc2")


def qwen2_text(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(qwen2.qwen2(config), rope_axes=_axes(config))


def qwen3_text(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(qwen3.qwen3(config), rope_axes=_axes(config))


def qwen3_5_text(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(qwen3_next.qwen3_5(config), rope_axes=_axes(config))


def qwen3_5_moe_text(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(qwen3_next.qwen3_5_moe(config), rope_axes=_axes(config))


def qwen2_vision(config: ModelConfig) -> VisionSpec:
    fields = config.fields.section("vision_config")
    hidden_size = fields.integer("embed_dim", default=1280)
    make_merger = partial(merger, names=OLD_MERGER)
    return VisionSpec(
        hidden_size=hidden_size,
        num_heads=fields.integer("num_heads", default=16),
        num_layers=fields.integer("depth", default=32),
        mlp_size=int(hidden_size * fields.number("mlp_ratio", default=4.0)),
        out_size=config.hidden_size,
        patch_size=fields.integer("patch_size", default=14),
        frames=fields.integer("temporal_patch_size", default=2),
        merge_size=fields.integer("spatial_merge_size", default=2),
        activation=activation_of(fields, "hidden_act", "quick_gelu"),
        norm=layer_norm,
        mlp=partial(plain_mlp, names=("fc1", "fc2")),
        merger=make_merger,
        deep_merger=make_merger,
    )


def qwen2_5_vision(config: ModelConfig) -> VisionSpec:
    fields = config.fields.section("vision_config")
    patch_size = fields.integer("patch_size", default=14)
    merge_size = fields.integer("spatial_merge_size", default=2)
    make_merger = partial(merger, names=OLD_MERGER)
    full_layers: tuple[int, ...] = (7, 15, 23, 31)
    if fields.has("fullatt_block_indexes"):
        full_layers = fields.integers("fullatt_block_indexes", may_be_empty=True)
    return VisionSpec(
        hidden_size=fields.integer("hidden_size", default=1280),
        num_heads=fields.integer("num_heads", default=16),
        num_layers=fields.integer("depth", default=32),
        mlp_size=fields.integer("intermediate_size", default=3420),
        out_size=config.hidden_size,
        patch_size=patch_size,
        frames=fields.integer("temporal_patch_size", default=2),
        merge_size=merge_size,
        activation=activation_of(fields, "hidden_act", "silu"),
        norm=rms_norm,
        mlp=gated_mlp,
        merger=make_merger,
        deep_merger=make_merger,
        window=fields.integer("window_size", default=112) // merge_size // patch_size,
        full_layers=full_layers,
    )


def qwen3_vision(config: ModelConfig) -> VisionSpec:
    fields = config.fields.section("vision_config")
    deep_layers: tuple[int, ...] = (8, 16, 24)
    if fields.has("deepstack_visual_indexes"):
        deep_layers = fields.integers("deepstack_visual_indexes", may_be_empty=True)
    return VisionSpec(
        hidden_size=fields.integer("hidden_size", default=1152),
        num_heads=fields.integer("num_heads", default=16),
        num_layers=fields.integer("depth", default=27),
        mlp_size=fields.integer("intermediate_size", default=4304),
        out_size=config.hidden_size,
        patch_size=fields.integer("patch_size", default=16),
        frames=fields.integer("temporal_patch_size", default=2),
        merge_size=fields.integer("spatial_merge_size", default=2),
        activation=activation_of(fields, "hidden_act", "gelu_pytorch_tanh"),
        norm=layer_norm,
        mlp=partial(plain_mlp, names=("linear_fc1", "linear_fc2")),
        merger=partial(merger, names=NEW_MERGER),
        deep_merger=partial(merger, names=NEW_MERGER, is_joined_first=True),
        has_patch_bias=True,
        num_positions=fields.integer("num_position_embeddings", default=2304),
        deep_layers=deep_layers,
    )


def qwen3_5_vision(config: ModelConfig) -> VisionSpec:
    return msgspec.structs.replace(qwen3_vision(config), deep_layers=())


def _axes(config: ModelConfig) -> tuple[int, ...]:
    return rope_axes(config.fields, num_pairs=config.rotary_dim // 2, axes=NUM_AXES)
