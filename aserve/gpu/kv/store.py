"""How keys and values lie in their pools: in the dtype of the model, in another, or in eight bits
that are multiplied by a scale when they are read.

It knows no page and no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.layers.rope import RopeInputs, apply_rope

Scales = tuple[float, float]  # of keys and of values
KV_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


class RopeAndStoreKv(Protocol):
    def __call__(
        self,
        heads: Tensor,
        rope: RopeInputs | None,
        slots: Tensor,
        pools: tuple[Tensor, Tensor],
        scales: Scales,
        /,
    ) -> Tensor:
        """heads [tokens, heads, head_dim] of queries, then keys, then values, of any strides; slots
        int64 [tokens]; pools of keys and of values [num_slots, kv_heads, head_dim] -> the queries.
        Queries and keys are turned, if they have to be. Of tokens with the same slot any may win.
        """


def rope_then_store_kv(
    heads: Tensor,
    rope: RopeInputs | None,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: Scales,
    /,
) -> Tensor:
    """A `RopeAndStoreKv` in torch."""
    num_kv_heads = pools[0].shape[1]
    rotated, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if rope is not None:
        rotated = apply_rope(rotated, rope)
    queries, keys = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    for given, pool, scale in zip((keys, values), pools, scales, strict=True):
        plain_bytes(pool).index_copy_(0, slots, plain_bytes(narrowed(given, pool.dtype, scale)))
    return queries


def narrowed(given: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """As it is stored. What eight bits cannot hold is cut at their range: it would be NaN."""
    if dtype.itemsize == 1:
        bound = torch.finfo(dtype).max
        given = (given / scale).clamp(-bound, bound)
    return given.to(dtype)


def widened(stored: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    wide = stored.to(dtype)
    return wide if scale == 1.0 else wide * scale


def plain_bytes(pool: Tensor) -> Tensor:
    """torch moves eight-bit floats as bytes only; zero is zero in both."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def kv_dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """`name` is an option's: auto, or a key of KV_DTYPES."""
    return KV_DTYPES.get(name, model_dtype)


def kv_dtype_name(dtype: torch.dtype) -> str:
    names = {dtype: name for name, dtype in KV_DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))
