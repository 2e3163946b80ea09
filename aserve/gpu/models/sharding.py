"""Divides a model among tensor-parallel ranks, from outside the model files.

A rank's model is the model of a smaller configuration: with the heads and the inner elements of
one rank. The tables here say along which axis the checkpoint's tensors are divided, and the weight
source adds the collectives (gpu/parallel). `check_sharding` compares the shapes of the rank's model
with those of the whole one, and refuses a model of which a tensor is not in the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from aserve.errors import ConfigError
from aserve.gpu.models.config.fields import replaced
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.gated_delta import HAS_GROUPS, DeltaShape
from aserve.gpu.models.short_conv import CHANNELS
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.source import Shard

HEAD = "lm_head"
# By the last component of a layer's name. Mixtral's experts have w1, w2 and w3.
COLUMN_PARALLEL = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "k_b_proj", "v_b_proj"),
        *("gate_proj", "up_proj"),
        *("w1", "w3"),
        *("gate_up_proj", "in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        *("in_proj_qkvz", "in_proj_ba", "conv", "conv1d"),
    }
)
KV_HEADS = frozenset({"k_proj", "v_proj"})
ROW_PARALLEL = frozenset({"o_proj", "out_proj", "down_proj", "w2"})
BY_HEAD = ("self_attn.sinks", "linear_attn.A_log", "linear_attn.dt_bias")  # one number per head
QUERY_NORM, KEY_NORM = "q_norm.weight", "k_norm.weight"
# Whole on each rank: the encoder of pictures, and Mamba-2, whose groups of heads share B and C.
ON_EVERY_RANK = ("visual.", ".mamba.")
# Fields of the configuration beside `ModelConfig`'s own that are sizes of inner layers.
EXPERT_SIZE = "moe_intermediate_size"
SHARED_SIZE = "shared_intermediate_size"  # of Granite 4's MLP beside experts, or in their place
INNER_SIZES = (
    EXPERT_SIZE,
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    SHARED_SIZE,
)
# Fields of recurrent layers, whose names only the configurations of their families have.
DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
CONV_TAPS = "conv_L_cache"


def can_divide(size: int, num_ranks: int) -> bool:
    return size % num_ranks == 0


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the configuration of one rank's model. Raises ConfigError for sizes that the number
    of ranks does not divide."""
    num_ranks = shard.num_ranks
    if num_ranks == 1:
        return config
    inner = {name: config.fields.integer(name) for name in INNER_SIZES if config.fields.has(name)}
    mlp_size = {"intermediate_size": config.intermediate_size}
    if shard.experts is not None:
        # Without a size of their own, experts have that of the MLPs, whose place they take.
        mlp_size = mlp_size if EXPERT_SIZE in inner else {}
        inner = {}
    heads = {} if shard.has_own_rows else {"num_attention_heads": config.num_heads}
    recurrent = {} if shard.has_own_rows else _recurrent_sizes(config)
    sizes = {**heads, **inner, **mlp_size, **recurrent}
    for name, size in sizes.items():
        if not can_divide(size, num_ranks):
            _refuse(config, f"{name} is {size}", num_ranks)
    own = {name: size // num_ranks for name, size in {**inner, **recurrent}.items()}
    divided = dataclasses.replace(
        config,
        intermediate_size=config.intermediate_size // (num_ranks if mlp_size else 1),
        fields=replaced(config.fields, own),
    )
    if shard.has_own_rows:
        return divided
    num_kv_heads = config.num_kv_heads
    if not (can_divide(num_kv_heads, num_ranks) or can_divide(num_ranks, num_kv_heads)):
        _refuse(config, f"num_key_value_heads is {num_kv_heads}", num_ranks)
    return dataclasses.replace(
        divided,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, num_kv_heads // num_ranks),
    )


def _recurrent_sizes(config: ModelConfig) -> dict[str, int]:
    """The heads of queries, keys and values of a Gated DeltaNet, and the channels of a short
    convolution."""
    fields = config.fields
    sizes = {name: fields.integer(name) for name in DELTA_HEADS if fields.has(name)}
    return sizes | ({CHANNELS: config.hidden_size} if fields.has(CONV_TAPS) else {})


def shard_of(config: ModelConfig, shard: Shard, shapes: Mapping[str, tuple[int, ...]]) -> Shard:
    """Returns `shard` with the axes of a model of the whole configuration `config`, whose tensors
    have these shapes."""
    axes = dict.fromkeys(BY_HEAD, 0)
    axes |= {f"{name}.{kind}": 0 for name in COLUMN_PARALLEL for kind in ("weight", "bias")}
    axes |= {f"{name}.weight": 1 for name in ROW_PARALLEL}
    if can_divide(config.vocab_size, shard.num_ranks):
        axes[f"{HEAD}.weight"] = 0
    num_parts = min(shard.num_ranks, config.num_kv_heads)
    kv_parts = {f"{name}.{kind}": num_parts for name in KV_HEADS for kind in ("weight", "bias")}
    if (config.num_heads * config.head_dim,) in _ending(shapes, f".{QUERY_NORM}"):  # of all heads
        axes |= {QUERY_NORM: 0, KEY_NORM: 0}
        kv_parts[KEY_NORM] = num_parts
    sections = _sections(config)
    return dataclasses.replace(
        shard, axes=axes, num_parts=kv_parts, sections=sections, whole=ON_EVERY_RANK
    )


def _ending(shapes: Mapping[str, tuple[int, ...]], end: str) -> set[tuple[int, ...]]:
    return {shape for name, shape in shapes.items() if name.endswith(end)}


def _sections(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The sections of joined tensors: gate and up of an MLP, q, k and v of a Gated DeltaNet, and [b
    ; c ; u] of a short convolution. Qwen3-Next's joined projections have none, because each key
    head's rows of all kinds stand together there."""
    mlp_size = config.fields.integer(SHARED_SIZE, default=config.intermediate_size)
    sections: dict[str, tuple[int, ...]] = {"gate_up_proj.weight": (mlp_size, mlp_size)}
    if all(map(config.fields.has, DELTA_HEADS)):
        shape = DeltaShape.of(config.fields)
        qkv = (shape.key_size, shape.key_size, shape.value_size)
        sections |= {"in_proj_qkv.weight": qkv, "conv1d.weight": qkv}
        if not config.fields.flag(HAS_GROUPS, default=True):
            sections["in_proj_ba.weight"] = (shape.linear_num_value_heads,) * 2
    if config.fields.has(CONV_TAPS):
        channels = (config.hidden_size,) * 3
        sections |= {"in_proj.weight": channels, "in_proj.bias": channels}
    return sections


def check_sharding(whole: Inventory, rank: Inventory, *, num_ranks: int) -> None:
    """Raises ConfigError if the ranks' parts of a tensor are not the whole tensor."""
    wrong = _differing(whole.shapes, rank.shapes) or _differing(whole.copies, rank.copies)
    if wrong:
        raise ConfigError(
            f"this model cannot be divided among {num_ranks} ranks: no rule says how to divide "
            f"{wrong}",
            param="tensor_parallel_size",
        )


def _differing(
    whole: Mapping[str, tuple[int, ...]], rank: Mapping[str, tuple[int, ...]]
) -> str | None:
    names = sorted(whole.keys() | rank.keys())
    return next((name for name in names if whole.get(name) != rank.get(name)), None)


def _refuse(config: ModelConfig, what: str, num_ranks: int) -> None:
    raise ConfigError(
        f"{config.fields.source}: {what}, which cannot be divided among {num_ranks} ranks "
        "(--tensor-parallel-size)",
        param="tensor_parallel_size",
    )
