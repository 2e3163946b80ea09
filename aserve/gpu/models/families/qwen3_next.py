"""Qwen3-Next and Qwen3.5: three of four layers are Gated DeltaNets, and the fourth has attention
with a gated output. Rope rotates a quarter of each head, and the weights of norms have an offset
of 1.

Qwen3-Next and Qwen3.5-MoE have experts beside a shared MLP, as Qwen2-MoE. Qwen3.5 also reads
pictures, with the vision transformer of Qwen3-VL and rotary positions of three axes.

Reference: modeling_qwen3_next.py, modeling_qwen3_5.py and modeling_qwen3_5_moe.py in transformers.
"""

from __future__ import annotations

from functools import partial

import msgspec

from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL, LINEAR
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, MakeMixer, QkNorm
from aserve.gpu.models.families.qwen2_moe import shared_experts
from aserve.gpu.models.families.qwen3_moe import SPARSE_DEFAULTS, sparse_mlps
from aserve.gpu.models.gated_attention import GatedAttention
from aserve.gpu.models.gated_delta import (
    HAS_GROUPS,
    DeltaShape,
    GatedDeltaNet,
    GroupedProjection,
    JoinedProjection,
    MakeProjection,
)

DEFAULTS = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
NEXT_DEFAULTS = {
    **SPARSE_DEFAULTS,
    **DEFAULTS,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
MOE_DEFAULTS = {**NEXT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8}


def qwen3_next(config: ModelConfig) -> DecoderSpec:
    mlps = sparse_mlps(config, shared_experts(config))
    project: MakeProjection = GroupedProjection.of
    if not config.fields.flag(HAS_GROUPS, default=True):
        project = partial(JoinedProjection.of, narrow_names=("in_proj_ba",))
    return msgspec.structs.replace(_hybrid(config, project), mlps=mlps)


def qwen3_5(config: ModelConfig) -> DecoderSpec:
    return _hybrid(config, JoinedProjection.of)


def qwen3_5_moe(config: ModelConfig) -> DecoderSpec:
    return msgspec.structs.replace(
        qwen3_5(config), mlps=(shared_experts(config),) * config.num_layers
    )


def _hybrid(config: ModelConfig, project: MakeProjection) -> DecoderSpec:
    fields, bias = config.fields, config.attention_bias
    linear = partial(GatedDeltaNet, shape=DeltaShape.of(fields), project=project)
    mixers: tuple[MakeMixer, ...] = tuple(
        linear if kind == LINEAR else GatedAttention for kind in _kinds(fields, config.num_layers)
    )
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        mixers=mixers,
        biases=Biases(qkv=bias, attention_out=bias),
        norm_offset=1.0,
        qk_norm=QkNorm(),
        has_partial_rotary=True,
    )


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The layers' kinds are those of `layer_types`, or else every `full_attention_interval`-th has
    attention."""
    if not fields.has("layer_types"):
        interval = fields.integer("full_attention_interval")
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
    kinds = tuple(fields.texts("layer_types", length=num_layers))
    if not {*kinds} <= {LINEAR, FULL} or FULL not in kinds:
        fields.refuse("layer_types", expected=f"{LINEAR} or {FULL}, which at least one layer has")
    return kinds
