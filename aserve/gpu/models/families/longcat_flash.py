"""LongCat-Flash: latent attention and a dense MLP twice in each layer, beside one shortcut of
experts, some of which are identities. LongCat-Flash-Lite has n-gram embeddings as well.

Reference: modeling_longcat_flash.py in transformers.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import msgspec

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.latent_attention import LatentAttention, LatentShape
from aserve.gpu.models.ngram_embedding import NgramEmbedding, NgramModel
from aserve.gpu.moe.layer import ExpertNames, ExpertsSpec
from aserve.gpu.moe.routing import Routing, checked_top_k
from aserve.gpu.moe.shortcut_decoder import ShortcutDecoder
from aserve.gpu.weights.renamed import RenamedWeights
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    "head_dim": 64,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 512,
    "num_experts_per_tok": 12,
    "num_hidden_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "routed_scaling_factor": 6.0,
    "v_head_dim": 128,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
}
NAMES = ExpertNames(router="router.classifier", bias="router.e_score_correction_bias")


def longcat_flash(
    config: ModelConfig, weights: WeightSource, *, max_model_len: int
) -> ShortcutDecoder:
    spec, experts = longcat_spec(config), _experts(config)
    sublayers = RenamedWeights(weights, sublayer_name)
    decoder = Decoder(spec, sublayers, max_model_len=max_model_len)
    shortcuts = [experts(index, spec, weights) for index in range(_num_layers(config))]
    return ShortcutDecoder(decoder, shortcuts)


def longcat_flash_lite(
    config: ModelConfig, weights: WeightSource, *, max_model_len: int
) -> NgramModel:
    text = longcat_flash(config, weights, max_model_len=max_model_len)
    return NgramModel(text, NgramEmbedding(config, weights))


def longcat_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of the decoder without its shortcuts, which has two layers for each layer of the
    checkpoint."""
    fields, num_layers = config.fields, 2 * _num_layers(config)
    if fields.flag("attention_bias"):
        fields.refuse("attention_bias", expected="false")
    shape = LatentShape.of(fields)
    if shape.q_lora_rank is None:
        fields.refuse("q_lora_rank", expected="a rank: queries are compressed")
    shape = msgspec.structs.replace(
        shape,
        query_factor=_factor(config, "mla_scale_q_lora", shape.q_lora_rank),
        latent_factor=_factor(config, "mla_scale_kv_lora", shape.kv_lora_rank),
    )
    # Rope rotates the heads of q_pe and k_pe; other heads have no meaning here.
    rope_dim = shape.qk_rope_head_dim
    return DecoderSpec(
        dataclasses.replace(config, head_dim=rope_dim, rotary_dim=rope_dim, num_layers=num_layers),
        windows=(None,) * num_layers,
        mixers=(partial(LatentAttention, shape=shape),) * num_layers,
    )


def _num_layers(config: ModelConfig) -> int:
    """Some configurations have `num_hidden_layers` as well, the number of attentions."""
    return config.fields.integer("num_layers", default=config.num_layers)


def _factor(config: ModelConfig, name: str, rank: int) -> float:
    return (config.hidden_size / rank) ** 0.5 if config.fields.flag(name) else 1.0


def _experts(config: ModelConfig) -> ExpertsSpec:
    fields = config.fields
    count = fields.integer("n_routed_experts")
    num_identity = fields.integer("zero_expert_num", minimum=0)
    if fields.text("zero_expert_type") != "identity":
        fields.refuse("zero_expert_type", expected="identity")
    if fields.flag("router_bias"):
        fields.refuse("router_bias", expected="false")
    return ExpertsSpec(
        count=count,
        size=fields.integer("moe_intermediate_size"),
        routing=Routing(
            checked_top_k(fields, count + num_identity),
            factor=fields.number("routed_scaling_factor"),
        ),
        has_score_bias=True,
        num_identity=num_identity,
        names=NAMES,
    )


SUBLAYER = re.compile(
    r"model\.layers\.(\d+)\.(self_attn|mlp|input_layernorm|post_attention_layernorm)(\..*)"
)


def sublayer_name(name: str) -> str:
    """Returns the checkpoint's name of a weight of the decoder with twice as many layers."""
    match = SUBLAYER.fullmatch(name)
    if match is None:
        return name
    layer, part = divmod(int(match[1]), 2)
    kind = "mlps" if match[2] == "mlp" else match[2]
    return f"model.layers.{layer}.{kind}.{part}{match[3]}"
