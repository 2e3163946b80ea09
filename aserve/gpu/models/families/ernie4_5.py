"""ERNIE 4.5: the Llama decoder, whose rope rotates neighbouring elements of a head. The larger
models have a mixture of experts in most layers, chosen by corrected softmax scores.

Reference: modeling_ernie4_5.py and modeling_ernie4_5_moe.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import gated_mlp
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, MakeMlp
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec
from aserve.gpu.moe.routing import Routing, checked_top_k

SHARED_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
DEFAULTS = {**SHARED_DEFAULTS, "head_dim": 128, "num_key_value_heads": 2}
LAST = "moe_layer_end_index"
MOE_DEFAULTS = {
    **SHARED_DEFAULTS,
    LAST: -1,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_key_value_heads": 4,
}
PREDICTORS = "model.mtp_"
NAMES = ExpertNames(bias="moe_statics.e_score_correction_bias")


def ernie4_5(config: ModelConfig) -> DecoderSpec:
    bias = config.fields.flag("use_bias")
    return DecoderSpec(
        config,
        windows=(None,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias, mlp=bias),
        rotates_neighbours=True,
    )


def ernie4_5_moe(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    if fields.flag("use_bias"):
        fields.refuse("use_bias", expected="false: experts have no biases")
    experts, interval = _experts(fields), fields.integer("moe_layer_interval")
    with_experts = _layers_between(fields, config.num_layers)
    mlps: list[MakeMlp] = [
        experts if index in with_experts and (index + 1) % interval == 0 else gated_mlp
        for index in range(config.num_layers)
    ]
    return msgspec.structs.replace(ernie4_5(config), mlps=tuple(mlps))


def own_name(name: str) -> str | None:
    """Leaves out the modules of multi-token prediction."""
    return None if name.startswith(PREDICTORS) else name


def _layers_between(fields: Fields, num_layers: int) -> range:
    """The first layer that may have experts, to the last one."""
    first = fields.integer("moe_layer_start_index", minimum=0)
    last = fields.integer(LAST, minimum=-1)
    return range(first, num_layers if last == -1 else last + 1)


def _experts(fields: Fields) -> ExpertsSpec:
    count, size = fields.integer("moe_num_experts"), fields.integer("moe_intermediate_size")
    return ExpertsSpec(
        count=count,
        size=size,
        routing=Routing(checked_top_k(fields, count, name="moe_k"), is_normalised=True),
        shared_size=size * fields.integer("moe_num_shared_experts", minimum=0),
        has_score_bias=True,
        has_bias_row=True,
        names=NAMES,
    )
