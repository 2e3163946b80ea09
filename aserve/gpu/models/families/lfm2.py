"""LFM2: most layers have a short convolution with gates in place of attention, the others grouped
attention with norms of queries and keys. LFM2-MoE has experts in all layers but the first ones,
chosen by corrected sigmoid scores.

Reference: modeling_lfm2.py and modeling_lfm2_moe.py in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention, gated_mlp
from aserve.gpu.models.decoder_spec import DecoderSpec, MakeMixer, QkNorm
from aserve.gpu.models.short_conv import ShortConv
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k
from aserve.gpu.weights.renamed import renamed

CONV = "conv"
SHARED_DEFAULTS = {
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
}
DEFAULTS = {
    **SHARED_DEFAULTS,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
MOE_DEFAULTS = {
    **SHARED_DEFAULTS,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}
# The checkpoint's names, as regular expressions, and those of the decoder.
RENAMED = {
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.embedding_norm\.": ".norm.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.(q|k)_layernorm\.": r".\1_norm.",
    r"\.feed_forward\.": ".mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.",
    r"\.w3\.": ".up_proj.",
}


def lfm2(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    stated = size = fields.integer("intermediate_size")
    if fields.has("block_ff_dim"):
        size = fields.integer("block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim"):
        size = int(fields.number("block_ffn_dim_multiplier") * int(2 * size / 3))
        multiple = fields.integer("block_multiple_of")
        size = -(-size // multiple) * multiple
    num_ranks = stated // config.intermediate_size  # among which the whole MLP is divided
    return _hybrid(dataclasses.replace(config, intermediate_size=size // num_ranks))


def lfm2_moe(config: ModelConfig) -> DecoderSpec:
    num_dense = min(config.fields.integer("num_dense_layers", minimum=0), config.num_layers)
    experts = (_experts(config.fields),) * (config.num_layers - num_dense)
    return msgspec.structs.replace(_hybrid(config), mlps=((gated_mlp,) * num_dense + experts))


def own_name(name: str) -> str:
    """The name that a decoder's layers have for a tensor of a checkpoint."""
    return renamed(name, RENAMED)


def _hybrid(config: ModelConfig) -> DecoderSpec:
    mixers: tuple[MakeMixer, ...] = tuple(
        Attention if kind == FULL else ShortConv for kind in _kinds(config.fields)
    )
    fields = config.fields
    is_tied = fields.flag("tie_embedding", default=fields.flag("tie_word_embeddings", default=True))
    own = dataclasses.replace(
        config, rms_norm_eps=fields.number("norm_eps"), tie_word_embeddings=is_tied
    )
    return DecoderSpec(own, windows=(None,) * config.num_layers, mixers=mixers, qk_norm=QkNorm())


def _kinds(fields: Fields) -> Sequence[str]:
    """The layers' kinds are those of `layer_types`, or else `full_attn_idxs` have attention."""
    numbers = range(fields.integer("num_hidden_layers"))
    full = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else numbers
    kinds = tuple(FULL if number in full else CONV for number in numbers)
    if fields.has("layer_types"):
        kinds = tuple(fields.texts("layer_types", length=len(kinds)))
    if not {*kinds} <= {CONV, FULL} or FULL not in kinds:
        fields.refuse("layer_types", expected=f"{CONV} or {FULL}, which at least one layer has")
    return kinds


def _experts(fields: Fields) -> ExpertsSpec:
    count = fields.integer("num_experts")
    return ExpertsSpec(
        count=count,
        size=fields.integer("moe_intermediate_size"),
        routing=Routing(
            checked_top_k(fields, count),
            scores=Scores.SIGMOID,
            is_normalised=fields.flag("norm_topk_prob"),
            factor=fields.number("routed_scaling_factor"),
        ),
        has_score_bias=fields.flag("use_expert_bias"),
        names=ExpertNames(bias="expert_bias"),
    )
