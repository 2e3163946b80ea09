"""Packs bfloat16 into the pairs that the AVX-512 BF16 dot product (vdpbf16ps) takes as operands.

Sixteen 32-bit words, each of two adjacent bfloat16, are moved at a time. The plain functions run
with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.simd import INT16X16, INT32X16, LANES, Intrinsic, address_of, blend_masks

Bf16Bits: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def transpose_pairs(
    source: Bf16Bits, indices: Int64s, target: Bf16Bits, start: int, stride: int
) -> None:
    """Transposes a 16 x 16 block of pairs: pair k of the 32 values from source[indices[i]] on
    becomes pair i of the 32 values from target[start + k * stride] on. All arrays are [n],
    contiguous."""
    for i, first in enumerate(indices):
        for k in range(LANES):
            pair = start + k * stride + 2 * i
            target[pair : pair + 2] = source[first + 2 * k : first + 2 * k + 2]


def interleave(source: Bf16Bits, even: int, odd: int, target: Bf16Bits, start: int) -> None:
    """Interleaves source[even : even + 16] and source[odd : odd + 16] into 32 values of target."""
    target[start : start + 2 * LANES : 2] = source[even : even + LANES]
    target[start + 1 : start + 2 * LANES : 2] = source[odd : odd + LANES]


@intrinsic
def _transpose_pairs(
    typing: Any, source: Any, indices: Any, target: Any, start: Any, stride: Any
) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = ir.IntType(64)
        first = context.make_array(indices)(context, builder, args[1]).data
        vectors = []
        for i in range(LANES):
            offset = builder.load(builder.gep(first, [index(i)]))
            pairs = address_of(context, builder, source, args[0], offset, INT32X16)
            vectors.append(builder.load(pairs, align=2))
        distance = LANES // 2
        while distance:
            low, high = blend_masks(distance)
            for i in range(LANES):
                if not i & distance:
                    a, b = vectors[i], vectors[i + distance]
                    vectors[i] = builder.shuffle_vector(a, b, ir.Constant(INT32X16, low))
                    vectors[i + distance] = builder.shuffle_vector(
                        a, b, ir.Constant(INT32X16, high)
                    )
            distance //= 2
        for k, vector in enumerate(vectors):
            offset = builder.add(args[3], builder.mul(args[4], index(k)))
            pairs = address_of(context, builder, target, args[2], offset, INT32X16)
            builder.store(vector, pairs, align=2)
        return context.get_dummy_value()

    return types.void(source, indices, target, types.intp, types.intp), emit


@intrinsic
def _interleave(
    typing: Any, source: Any, even: Any, odd: Any, target: Any, start: Any
) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def load_words(start: Any) -> Any:
            address = address_of(context, builder, source, args[0], start, INT16X16)
            return builder.zext(builder.load(address, align=2), INT32X16)

        high_words = builder.shl(load_words(args[2]), ir.Constant(INT32X16, [16] * LANES))
        address = address_of(context, builder, target, args[3], args[4], INT32X16)
        builder.store(builder.or_(load_words(args[1]), high_words), address, align=2)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp), emit


@overload(transpose_pairs, inline="always", strict=False)
def _overload_transpose_pairs(
    source: Any, indices: Any, target: Any, start: Any, stride: Any
) -> Callable[..., None]:
    return lambda source, indices, target, start, stride: _transpose_pairs(
        source, indices, target, start, stride
    )


@overload(interleave, inline="always", strict=False)
def _overload_interleave(
    source: Any, even: Any, odd: Any, target: Any, start: Any
) -> Callable[..., None]:
    return lambda source, even, odd, target, start: _interleave(source, even, odd, target, start)
