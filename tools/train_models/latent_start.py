"""Turns the attention of the bundled model into latent attention, approximately.

A head of the bundled model turns 32 pairs of dimensions by rope, pair j by the frequency
10000^(-j/32). The latent head keeps pairs 16 to 31, which turn slowly, as its part without rope.
Pairs 0 to 15 of both KV heads become the 32 pairs of the part with rope, whose keys all heads
share: pair 2j + k comes from pair j of KV head k, and heads that use the other KV head ignore it.
Its frequency is 10000^(-(2j+k)/64), which is exact for k = 0 and near for k = 1. The part without
rope and the values come from a latent vector of low rank.
"""

from typing import Any

import torch
from torch import Tensor

from tools.train_models.starts import low_rank
from tools.train_tiny.network import Layer

HEAD_DIM = 64
HALF = HEAD_DIM // 2
FAST = HALF // 2
KV_HEADS = 2
# The frequencies of 32 pairs of this base are those of the first 32 of 64 pairs of base 10000.
ROPE_THETA = 100.0
SLOW = torch.cat((torch.arange(FAST, HALF), torch.arange(HALF + FAST, HEAD_DIM)))


def fill_attention(attention: Any, source: Layer, inputs: Tensor) -> None:
    """`inputs` [tokens, hidden] are a sample of what enters the attention."""
    # The scores are divided by the root of the size of a head, which has grown.
    grown = (attention.qk_head_dim / HEAD_DIM) ** 0.5
    queries = heads_of(source.self_attn.q_proj.weight) * grown
    keys = heads_of(source.self_attn.k_proj.weight)
    values = heads_of(source.self_attn.v_proj.weight)
    kv_of_head = torch.arange(len(queries)) * len(keys) // len(queries)
    rope_queries = [rope_rows(q, own=int(kv)) for q, kv in zip(queries, kv_of_head, strict=True)]
    wide = torch.cat((queries[:, SLOW], torch.stack(rope_queries)), dim=1).flatten(0, 1)
    down, up = low_rank(wide, inputs, attention.q_lora_rank)
    attention.q_a_proj.weight.copy_(down)
    attention.q_b_proj.weight.copy_(up)
    down, up = low_rank(
        torch.cat((keys[:, SLOW], values), dim=1).flatten(0, 1), inputs, attention.kv_lora_rank
    )
    rope_key = rope_rows(keys[0], own=0) + rope_rows(keys[1], own=1)
    attention.kv_a_proj_with_mqa.weight.copy_(torch.cat((down, rope_key)))
    attention.kv_b_proj.weight.copy_(up.unflatten(0, (len(keys), -1))[kv_of_head].flatten(0, 1))
    attention.o_proj.weight.copy_(source.self_attn.o_proj.weight)


def heads_of(weight: Tensor) -> Tensor:
    heads: Tensor = weight.unflatten(0, (-1, HEAD_DIM))
    return heads


def rope_rows(head: Tensor, *, own: int) -> Tensor:
    """Returns the rows [2 * pairs, hidden] of the part with rope, in interleaved pairs.

    Only the pairs of the KV head `own` are not zero. head: [head_dim, hidden].
    """
    rows = torch.zeros(FAST, KV_HEADS, 2, head.shape[1])
    rows[:, own, 0] = head[:FAST]
    rows[:, own, 1] = head[HALF : HALF + FAST]
    return rows.flatten(0, 2)
