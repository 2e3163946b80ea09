"""Conversions between numpy, torch and MLX arrays, and the dtypes of both libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.messages.base import ArrayI32

Floats: TypeAlias = npt.NDArray[np.float64]

DTYPES: Mapping[torch.dtype, mx.Dtype] = {
    torch.float64: mx.float64,
    torch.float32: mx.float32,
    torch.bfloat16: mx.bfloat16,
    torch.float16: mx.float16,
}


def from_torch(values: Tensor) -> mx.array:
    """Copies a tensor of the host. The bits stay the same."""
    is_half = values.dtype == torch.bfloat16  # which numpy does not have
    shown = values.contiguous().view(torch.int16) if is_half else values
    copied = mx.array(shown.numpy(), dtype=mx.int16 if is_half else DTYPES[values.dtype])
    if is_half:
        copied = copied.view(mx.bfloat16)
    mx.eval(copied)  # here, because another thread may not compute what this one has begun
    return copied


def ints(values: npt.NDArray[np.integer] | Sequence[int]) -> mx.array:
    """int32, which holds every row, slot, position and token id."""
    return mx.array(np.asarray(values, np.int32))


def floats(values: Floats | Sequence[float], dtype: mx.Dtype) -> mx.array:
    """NOTE: without a dtype, MLX makes float32 of numpy's float64."""
    return mx.array(np.asarray(values, np.float64), dtype=dtype)


def is_wide(dtype: mx.Dtype) -> bool:
    return dtype in (mx.float32, mx.float64)


def widen(values: mx.array) -> mx.array:
    """Converts values to float32, unless they are that wide already. The conversion is exact."""
    return values if is_wide(values.dtype) else values.astype(mx.float32)


def with_rows(table: mx.array, rows: mx.array, values: mx.array) -> mx.array:
    """Returns a new table with values [n, ...] in rows [n]. The old one stays as it is, which the
    item assignment of MLX does not leave so.
    """
    changed = mx.array(table)
    changed[rows] = values
    return changed


def as_words(values: mx.array) -> mx.array:
    """Flat int32 words of a packed result. Floats become float32 and keep these bits."""
    flat = values.reshape(-1)
    if mx.issubdtype(flat.dtype, mx.floating):
        return flat.astype(mx.float32).view(mx.int32)
    return flat.astype(mx.int32)


def to_host(words: mx.array) -> ArrayI32:
    """Waits until int32 words are computed, and returns a copy of them."""
    mx.eval(words)
    return np.array(words)
