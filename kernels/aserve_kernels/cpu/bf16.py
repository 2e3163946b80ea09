"""bfloat16 for numba, which has no such type: arrays of uint16 hold its bits.

A kernel is written once for all dtypes, with `widen` and `narrow` at its loads and stores. The
plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads, by dtype. KV may be
fp8 as well (fp8.py), whose bits are in arrays of uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numba import from_dtype, njit, types
from numba.extending import overload
from torch import Tensor

from aserve_kernels.cpu.fp8 import GREATEST, fp8_bits, from_fp8

Float32s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# float32, the bits of bfloat16 as uint16, or those of fp8 as uint8.
Floats: TypeAlias = (
    Float32s
    | np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
)

BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
ELEMENTS: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
}


def numba_type(dtype: torch.dtype) -> types.Type:
    """Returns the type of the elements of such an array."""
    found: types.Type = from_dtype(np.dtype(ELEMENTS.get(dtype, np.float32)))
    return found


def as_array(tensor: Tensor) -> Floats:
    """Returns a view of a float32, bfloat16 or fp8 tensor on the CPU."""
    if tensor.dtype in BITS:
        bits: Floats = tensor.view(BITS[tensor.dtype]).numpy()
        return bits
    array: Floats = tensor.numpy()
    return array


def empty_array(shape: tuple[int, ...], dtype: torch.dtype) -> Floats:
    """Returns memory for a tensor of this dtype."""
    array: Floats = np.empty(shape, ELEMENTS[dtype])
    return array


def as_tensor(array: Floats, dtype: torch.dtype) -> Tensor:
    """Returns the tensor of which `array` is a view."""
    return torch.from_numpy(array).view(dtype)


def widen(source: Floats, target: Float32s, /) -> None:
    """target[:] = source, converted to float32. Both are [n]."""
    if source.dtype == np.uint16:
        target[:] = (source.astype(np.uint32) << 16).view(np.float32)
    elif source.dtype == np.uint8:
        target[:] = torch.from_numpy(source).view(torch.float8_e4m3fn).float().numpy()
    else:
        target[:] = source


def narrow(source: Float32s, target: Floats, /) -> None:
    """target[:] = source, rounded to the nearest, ties to even; NaN stays NaN. Both are [n].
    What is beyond the greatest element of fp8 becomes that."""
    if target.dtype == np.uint8:
        clamped = torch.from_numpy(source).clamp(-GREATEST, GREATEST)
        target[:] = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    elif target.dtype == np.uint16:
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

    if source.dtype == types.uint8:

        def from_fp8_bits(source: Floats, target: Float32s) -> None:
            for i in range(target.shape[0]):
                target[i] = from_fp8(source[i])

        return from_fp8_bits

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

    if target.dtype == types.uint8:

        def to_fp8_bits(source: Float32s, target: Floats) -> None:
            for i in range(target.shape[0]):
                target[i] = fp8_bits(source[i])

        return to_fp8_bits

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
