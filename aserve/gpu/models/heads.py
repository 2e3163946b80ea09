"""The heads of attention, as a spec describes them: the norms of queries and keys, the order in
which the rows of their projections are loaded, and factors of queries by position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.joint_norm import DividedJointNorm, JointNorm
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.weights.source import WeightSource


def joint_norm(
    layer: LayerSpec, spec: DecoderSpec, weights: WeightSource
) -> JointNorm | DividedJointNorm:
    """One RMS norm over all query heads of a token, and one over all its key heads."""
    sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q_weight, k_weight = (
        _norm_weight(name, num_heads * layer.head_dim, layer, spec, weights)
        for name, num_heads in zip(("q_norm", "k_norm"), sizes, strict=False)
    )
    eps, norm, mean = spec.config.rms_norm_eps, weights.elementwise.norm, weights.elementwise.mean
    if mean is not None:
        parts = (part.view(-1, layer.head_dim) for part in (q_weight, k_weight))
        return DividedJointNorm(_by_head(layer, *parts), eps, sizes, mean)
    return JointNorm(norm(q_weight, eps=eps), norm(k_weight, eps=eps), sizes)


def head_norms(layer: LayerSpec, spec: DecoderSpec, weights: WeightSource) -> HeadNorms:
    """An RMS norm of each head alone: all query heads share one weight, all key heads another."""
    q, k = (
        _norm_weight(name, layer.head_dim, layer, spec, weights) for name in ("q_norm", "k_norm")
    )
    return HeadNorms(_by_head(layer, q, k), eps=spec.config.rms_norm_eps)


def _by_head(layer: LayerSpec, q: Tensor, k: Tensor) -> Tensor:
    """Returns the weights of all query heads and key heads, [q + k heads, head_dim]. q and k are
    those of each head, or of all.

    PERF: they are joined without torch.cat. On the meta device, on which the memory check builds a
    model, it imports torch._dynamo: 1.3 s of a start, a third of what a rank needs.
    """
    weights = q.new_empty(layer.num_heads + layer.num_kv_heads, layer.head_dim)
    weights[: layer.num_heads], weights[layer.num_heads :] = q, k
    return weights


def _norm_weight(
    name: str, size: int, layer: LayerSpec, spec: DecoderSpec, weights: WeightSource
) -> Tensor:
    prefix = f"model.layers.{layer.index}.self_attn"
    return weights.tensor(f"{prefix}.{name}.weight", (size,), offset=spec.norm_offset)


def row_order(layer: LayerSpec, spec: DecoderSpec) -> Tensor | None:
    """Returns the row of the checkpoint for each row of the joined projections, int64 [rows], where
    rope rotates neighbours there: the elements 2 i and 2 i + 1 of a head become i and i + half.
    None for the checkpoint's own order."""
    if not spec.rotates_neighbours:
        return None
    rotary_dim, head_dim = spec.config.rotary_dim, layer.head_dim
    of_head = torch.arange(head_dim)
    of_head[:rotary_dim] = of_head[:rotary_dim].view(-1, 2).T.reshape(-1)
    order = torch.arange((layer.num_heads + 2 * layer.num_kv_heads) * head_dim).view(-1, head_dim)
    num_rotated = layer.num_heads + layer.num_kv_heads
    order[:num_rotated] = order[:num_rotated, :1] + of_head
    return order.flatten()


def scale_queries(heads: Tensor, cos_sin: Tensor, num_q: int) -> Tensor:
    """Multiplies the queries of heads [tokens, q + k + v, head_dim] in place by the factors of
    their positions, the last column of cos_sin [tokens, rotary_dim + 1]. Returns the others."""
    cos_sin, factors = cos_sin.tensor_split((-1,), dim=1)
    heads[:, :num_q] *= factors[:, :, None]
    return cos_sin.contiguous()


def neighbours_to_halves(heads: Tensor, rotary_dim: int) -> Tensor:
    """Returns heads [..., head_dim] with the elements 2 i and 2 i + 1 of the first `rotary_dim` at
    i and i + half, where `apply_rope` has a pair."""
    rotated, rest = heads.tensor_split((rotary_dim,), dim=-1)
    halves = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((halves, rest), dim=-1) if rest.shape[-1] else halves
