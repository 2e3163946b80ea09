"""bfloat16 for numba, which has no such type: arrays of uint16 hold its bits.

A kernel is written once for both dtypes, with `widen` and `narrow` at its loads and stores. The
plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads, by dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

Float32s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# float32, or the bits of bfloat16 as uint16.
Floats: TypeAlias = Float32s | np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def as_array(tensor: Tensor) -> Floats:
    """Returns a view of a float32 or bfloat16 tensor on the CPU."""
    if tensor.dtype == torch.bfloat16:
        bits: Floats = tensor.view(torch.uint16).numpy()
        return bits
    array: Floats = tensor.numpy()
    return array


def widen(source: Floats, target: Float32s, /) -> None:
    """target[:] = source, converted to float32. Both are [n]."""
    if source.dtype == np.uint16:
        target[:] = (source.astype(np.uint32) << 16).view(np.float32)
    else:
        target[:] = source


def narrow(source: Float32s, target: Floats, /) -> None:
    """target[:] = source, rounded to the nearest, ties to even; NaN stays NaN. Both are [n]."""
    if target.dtype == np.uint16:
        target[:] = torch.from_numpy(source).to(torch.bfloat16).view(torch.uint16).numpy()
    else:
        target[:] = source


def widened(value: np.float32 | np.uint16, /) -> np.float32:
    """Returns an element of an array of this kind as float32."""
    target = np.empty(1, np.float32)
    widen(np.array([value]), target)
    result: np.float32 = target[0]
    return result


def rounded(value: np.float32, like: Floats, /) -> np.float32:
    """Returns the value rounded to the dtype of `like`."""
    through = np.empty(1, like.dtype)
    narrow(np.full(1, value, np.float32), through)
    back = np.empty(1, np.float32)
    widen(through, back)
    result: np.float32 = back[0]
    return result


@njit(inline="always")
def _from_bits(bits: np.uint16) -> np.float32:
    wide: np.float32 = np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    return wide


@njit(inline="always")
def bf16_bits(value: np.float32) -> np.uint16:
    bits = np.float32(value).view(np.uint32)
    to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + to_even) >> np.uint32(16))
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@overload(widen, strict=False)
def _widen(source: types.Array, target: types.Array) -> Callable[[Floats, Float32s], None]:
    if source.dtype == types.uint16:

        def from_bits(source: Floats, target: Float32s) -> None:
            for i in range(target.shape[0]):
                target[i] = _from_bits(source[i])

        return from_bits

    def copy(source: Floats, target: Float32s) -> None:
        for i in range(target.shape[0]):
            target[i] = source[i]

    return copy


@overload(narrow, strict=False)
def _narrow(source: types.Array, target: types.Array) -> Callable[[Float32s, Floats], None]:
    if target.dtype == types.uint16:

        def to_bits(source: Float32s, target: Floats) -> None:
            for i in range(target.shape[0]):
                target[i] = bf16_bits(source[i])

        return to_bits

    def copy(source: Float32s, target: Floats) -> None:
        for i in range(target.shape[0]):
            target[i] = source[i]

    return copy


@overload(widened, inline="always", strict=False)
def _widened(value: types.Number) -> Callable[[np.float32 | np.uint16], np.float32]:
    if value == types.uint16:
        return lambda value: _from_bits(np.uint16(value))
    return lambda value: np.float32(value)


@overload(rounded, strict=False)
def _rounded(value: types.Float, like: types.Array) -> Callable[[np.float32, Floats], np.float32]:
    if like.dtype == types.uint16:
        return lambda value, like: _from_bits(bf16_bits(value))
    return lambda value, like: value
