"""Stores keys and values in the model's dtype, in another one, or in fp8 with a scale.

An fp8 element stands for `element * scale`. The scale is one number per layer for keys and one for
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.layers.rope import RopeInputs, apply_rope

Scales = tuple[float, float]  # of keys and of values
FP8 = torch.float8_e4m3fn
KV_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": FP8,
}


class RopeAndStoreKv(Protocol):
    """Applies rope to queries and keys, and stores keys and values in the pools."""

    def __call__(
        self,
        heads: Tensor,
        rope: RopeInputs | None,
        slots: Tensor,
        pools: tuple[Tensor, Tensor],
        scales: Scales,
        /,
    ) -> Tensor:
        """heads [tokens, num_heads + 2 * kv_heads, head_dim]: queries, keys, values, of any
        strides; slots int64 [tokens]; pools of keys and of values [num_slots, kv_heads, head_dim].
        Returns the queries [tokens, num_heads, head_dim]. If several tokens have the same slot, any
        of them may win.
        """


def rope_then_store_kv(
    heads: Tensor,
    rope: RopeInputs | None,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: Scales,
    /,
) -> Tensor:
    """The reference `RopeAndStoreKv`, in plain torch."""
    num_kv_heads = pools[0].shape[1]
    rotated, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if rope is not None:
        rotated = apply_rope(rotated, rope)
    queries, keys = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    for stored, pool, scale in zip((keys, values), pools, scales, strict=True):
        _store(stored, slots, pool, scale)
    return queries


def store_latents(heads: Tensor, slots: Tensor, pool: Tensor, scale: float) -> Tensor:
    """heads [tokens, num_heads + kv_heads, head_dim]: queries, then latents, which are stored in
    pool [num_slots, kv_heads, head_dim]. Returns the queries."""
    num_kv_heads = pool.shape[1]
    _store(heads[:, -num_kv_heads:], slots, pool, scale)
    return heads[:, :-num_kv_heads]


def _store(heads: Tensor, slots: Tensor, pool: Tensor, scale: float) -> None:
    byte_view(pool).index_copy_(0, slots, byte_view(to_kv_dtype(heads, pool.dtype, scale)))


def to_kv_dtype(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Converts to the stored dtype. For fp8 the result is x / scale, clamped to the finite range
    because a conversion beyond it would give NaN."""
    if dtype.itemsize == 1:
        bound = torch.finfo(dtype).max
        x = (x / scale).clamp(-bound, bound)
    return x.to(dtype)


def from_kv_dtype(stored: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    x = stored.to(dtype)
    return x if scale == 1.0 else x * scale


def byte_view(pool: Tensor) -> Tensor:
    """fp8 tensors as uint8, because torch's index operators lack fp8; zero is zero in both. Other
    dtypes are returned as they are."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def kv_dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that --kv-cache-dtype names: a key of KV_DTYPES, or `auto` for the model's
    dtype.
    """
    return KV_DTYPES.get(name, model_dtype)


def kv_dtype_name(dtype: torch.dtype) -> str:
    names = {dtype: name for name, dtype in KV_DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))
