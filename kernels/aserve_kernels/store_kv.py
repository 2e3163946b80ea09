"""Keys and values of a step's tokens into one layer's paged pools, by slot.

It knows no page table: whoever calls has the slots. A pool of 8-bit floats holds values divided by
a scale, cut at the type's range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def store_kv(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """keys, values [tokens, kv_heads, head_dim], the heads of a token side by side; slots int64
    [tokens]; pools of keys and of values [num_slots, kv_heads, head_dim], contiguous, in any float
    dtype. What is stored is divided by its scale. Of tokens with the same slot any may win.
    """
    size = keys.shape[1] * keys.shape[2]
    if not len(slots):
        return
    of_keys, of_values = pools
    _store[(len(slots), triton.cdiv(size, BLOCK))](
        keys,
        values,
        slots,
        of_keys,
        of_values,
        keys.stride(0),
        values.stride(0),
        size,
        scales[0],
        scales[1],
        torch.finfo(of_keys.dtype).max,
        of_keys.dtype.itemsize == 1,
        BLOCK,
    )


def store_kv_ref(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    for given, pool, scale in zip((keys, values), pools, scales, strict=True):
        if pool.dtype.itemsize == 1:
            bound = torch.finfo(pool.dtype).max
            narrow = (given.float() / scale).clamp(-bound, bound).to(pool.dtype)
            pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))
        else:
            pool.index_copy_(0, slots, (given.float() / scale).to(pool.dtype))


@triton.jit
def _store(
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    key_stride: int,
    value_stride: int,
    size: int,
    key_scale: float,
    value_scale: float,
    bound: float,
    IS_CUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    places = tl.load(slots + token) * size + columns
    key = tl.load(keys + token * key_stride + columns, mask=is_in).to(tl.float32) / key_scale
    value = tl.load(values + token * value_stride + columns, mask=is_in).to(tl.float32)
    value = value / value_scale
    if IS_CUT:
        key = tl.minimum(tl.maximum(key, -bound), bound)
        value = tl.minimum(tl.maximum(value, -bound), bound)
    tl.store(key_pool + places, key.to(key_pool.dtype.element_ty), mask=is_in)
    tl.store(value_pool + places, value.to(value_pool.dtype.element_ty), mask=is_in)
