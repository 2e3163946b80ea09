"""LLaDA2: a diffusion language model. Its layers are those of Ling: a part of each head is rotated,
queries and keys are normalised per head, and experts are chosen as in DeepSeek-V3.

A position sees the blocks before its own and the whole of its own. Row i of the logits predicts the
token at position i itself. The configuration does not say how long blocks are, nor which token is
the mask: LLaDA2.0 has 32 and 156895.

Reference: modeling_llada2_moe.py of inclusionAI/LLaDA2.0-mini, and llada2.py in SGLang.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.kv.layer_groups import Mask
from aserve.gpu.models.config.layer_types import one_window
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention, gated_mlp
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, QkNorm
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k, expert_groups
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    "block_size": 32,
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "mask_token_id": 156895,
    "moe_intermediate_size": 1408,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_shared_experts": 0,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "sliding_window": None,
    "topk_group": 4,
    "use_qk_norm": True,
}
# The decoder's names, and those of the checkpoint.
RENAMED = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
}


def llada2(config: ModelConfig) -> DecoderSpec:
    fields, num_layers = config.fields, config.num_layers
    if fields.flag("norm_head"):
        fields.refuse("norm_head", expected="false: the head is used as it is stored")
    if fields.has("sliding_window"):
        fields.refuse("sliding_window", expected="null: blocks have no windows")
    num_dense = min(fields.integer("first_k_dense_replace", minimum=0), num_layers)
    experts = (_experts(config),) * (num_layers - num_dense) if num_dense < num_layers else ()
    return DecoderSpec(
        config,
        windows=one_window(fields),
        mixers=(block_attention,) * num_layers,
        mlps=(gated_mlp,) * num_dense + experts,
        biases=Biases(
            qkv=fields.flag("use_qkv_bias"),
            attention_out=fields.flag("use_bias"),
            mlp=fields.flag("use_bias"),
        ),
        qk_norm=QkNorm() if fields.flag("use_qk_norm") else None,
        has_joined_qkv=True,
        has_partial_rotary=True,
    )


def block_attention(index: int, spec: DecoderSpec, weights: WeightSource, /) -> Attention:
    """Attention that sees whole blocks."""
    attention = Attention(index, spec, weights)
    block_len = spec.config.fields.integer("block_size", minimum=2)
    attention.layer = msgspec.structs.replace(
        attention.layer, mask=Mask.BLOCK_CAUSAL, block_len=block_len
    )
    return attention


def own_name(name: str) -> str:
    """The name that a decoder's layers have for a tensor of a checkpoint."""
    for own, stored in RENAMED.items():
        name = name.replace(stored, own)
    return name


def _experts(config: ModelConfig) -> ExpertsSpec:
    fields = config.fields
    if fields.text("score_function") != "sigmoid":
        fields.refuse("score_function", expected="sigmoid")
    count, size = fields.integer("num_experts"), fields.integer("moe_intermediate_size")
    shared_size = fields.integer("moe_shared_expert_intermediate_size", default=size)
    return ExpertsSpec(
        count=count,
        size=size,
        routing=Routing(
            checked_top_k(fields, count),
            scores=Scores.SIGMOID,
            groups=expert_groups(fields, count, num_summed=2),
            is_normalised=fields.flag("norm_topk_prob"),
            factor=fields.number("routed_scaling_factor"),
        ),
        shared_size=shared_size * fields.integer("num_shared_experts", minimum=0),
        has_score_bias=True,
        names=ExpertNames(bias="gate.expert_bias"),
    )
