"""Granite 4: Granite with Mamba-2 layers between those with attention, which mostly know no
positions. Each layer has an MLP that all tokens share, and in larger models experts beside it.
Granite 3 MoE has attention and experts alone, or experts beside such an MLP.

Reference: modeling_granitemoehybrid.py and modeling_granitemoe.py in transformers.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import msgspec

from aserve.gpu.layers.rope_scaling import NoRope
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL, LINEAR
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention, gated_mlp
from aserve.gpu.models.decoder_spec import DecoderSpec, MakeMixer, MakeMlp
from aserve.gpu.models.families.granite import granite
from aserve.gpu.models.mamba2 import MAMBA2_DEFAULTS, mamba2_spec
from aserve.gpu.moe.layer import ExpertsSpec
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k
from aserve.gpu.weights.renamed import renamed

MAMBA, ATTENTION = "mamba", "attention"  # the kinds of layers in older files
OLDER_KINDS = {MAMBA: LINEAR, ATTENTION: FULL}
NO_POSITIONS = "nope"
SHARED = "mlp.shared_experts"
DEFAULTS = {
    **MAMBA2_DEFAULTS,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
}
MOE_DEFAULTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
# The checkpoint's names, and those of the decoder, with and without experts.
RENAMED = {
    r"\.block_sparse_moe\.input_linear\.weight": ".mlp.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight": ".mlp.experts.down_proj",
    r"\.block_sparse_moe\.router\.layer\.": ".mlp.gate.",
    r"\.shared_mlp\.input_linear\.": f".{SHARED}.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": f".{SHARED}.down_proj.",
}


def granite_hybrid(config: ModelConfig) -> DecoderSpec:
    fields, num_layers = config.fields, config.num_layers
    size = fields.integer("shared_intermediate_size")
    has_experts = fields.integer("num_local_experts", minimum=0) > 0
    has_rope = fields.text("position_embedding_type", default=NO_POSITIONS) == "rope"
    own = dataclasses.replace(
        config,
        rope=config.rope if has_rope else NoRope(),
        intermediate_size=config.intermediate_size if has_experts else size,
    )
    mlp: MakeMlp = partial(gated_mlp, name=SHARED)
    if has_experts:
        mlp = _experts(config, shared_size=size)
    return msgspec.structs.replace(
        granite(own),
        mixers=_mixers(fields, num_layers),
        mlps=(mlp,) * num_layers,
        has_joined_gate_up=_has_joined_shared(fields),
    )


def granite_moe(config: ModelConfig) -> DecoderSpec:
    size = config.fields.integer("shared_intermediate_size", default=0, minimum=0)
    mlp = _experts(config, shared_size=size)
    return msgspec.structs.replace(granite(config), mlps=(mlp,) * config.num_layers)


def own_name(name: str) -> str:
    """The name that a decoder's layers have for a tensor of a checkpoint."""
    return renamed(name, RENAMED)


def _mixers(fields: Fields, num_layers: int) -> tuple[MakeMixer, ...]:
    names = fields.texts("layer_types", length=num_layers)
    kinds = tuple(OLDER_KINDS.get(name, name) for name in names)
    if not {*kinds} <= {LINEAR, FULL} or FULL not in kinds:
        expected = f"{MAMBA} or {ATTENTION}, which at least one layer has"
        fields.refuse("layer_types", expected=expected)
    if LINEAR not in kinds:
        return (Attention,) * num_layers
    linear = mamba2_spec(fields)
    return tuple(linear if kind == LINEAR else Attention for kind in kinds)


def _has_joined_shared(fields: Fields) -> bool:
    """A checkpoint may have gate and up of the shared MLP apart, as it has those of experts."""
    return fields.flag("has_joined_shared", default=True)


def _experts(config: ModelConfig, *, shared_size: int) -> ExpertsSpec:
    count = config.fields.integer("num_local_experts")
    return ExpertsSpec(
        count=count,
        size=config.intermediate_size,
        routing=Routing(checked_top_k(config.fields, count), scores=Scores.LOGITS),
        shared_size=shared_size,
        has_joined_shared=_has_joined_shared(config.fields),
    )
