"""Words of two bfloat16 side by side, sixteen at a time, as products of pairs want their operands.

It knows no operation. The plain functions are what runs with NUMBA_DISABLE_JIT=1; compiled code
takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.simd import BITS, HALVES, LANES, Emitted, address_of, between

Halves: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
Places: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


def transpose_pairs(
    source: Halves, indices: Places, target: Halves, start: int, stride: int
) -> None:
    """From each of 16 places on, source has 16 pairs. Their k-th pairs stand side by side in
    target, from start + k * stride on. All are [n], contiguous."""
    for i, place in enumerate(indices):
        for k in range(LANES):
            own = start + k * stride + 2 * i
            target[own : own + 2] = source[place + 2 * k : place + 2 * k + 2]


def interleave(source: Halves, even: int, odd: int, target: Halves, start: int) -> None:
    """Sixteen of source from `even` on and sixteen from `odd` on take turns in target."""
    target[start : start + 2 * LANES : 2] = source[even : even + LANES]
    target[start + 1 : start + 2 * LANES : 2] = source[odd : odd + LANES]


@intrinsic
def _transpose_pairs(
    typing: Any, source: Any, indices: Any, target: Any, start: Any, stride: Any
) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = ir.IntType(64)
        first = context.make_array(indices)(context, builder, args[1]).data
        vectors = []
        for i in range(LANES):
            place = builder.load(builder.gep(first, [index(i)]))
            pairs = address_of(context, builder, source, args[0], place, BITS)
            vectors.append(builder.load(pairs, align=2))
        distance = LANES // 2
        while distance:
            low, high = between(distance)
            for i in range(LANES):
                if not i & distance:
                    a, b = vectors[i], vectors[i + distance]
                    vectors[i] = builder.shuffle_vector(a, b, ir.Constant(BITS, low))
                    vectors[i + distance] = builder.shuffle_vector(a, b, ir.Constant(BITS, high))
            distance //= 2
        for k, vector in enumerate(vectors):
            own = builder.add(args[3], builder.mul(args[4], index(k)))
            pairs = address_of(context, builder, target, args[2], own, BITS)
            builder.store(vector, pairs, align=2)
        return context.get_dummy_value()

    return types.void(source, indices, target, types.intp, types.intp), emit


@intrinsic
def _interleave(typing: Any, source: Any, even: Any, odd: Any, target: Any, start: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def halves(start: Any) -> Any:
            address = address_of(context, builder, source, args[0], start, HALVES)
            return builder.zext(builder.load(address, align=2), BITS)

        above = builder.shl(halves(args[2]), ir.Constant(BITS, [16] * LANES))
        address = address_of(context, builder, target, args[3], args[4], BITS)
        builder.store(builder.or_(halves(args[1]), above), address, align=2)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp), emit


@overload(transpose_pairs, inline="always", strict=False)
def _of_transpose_pairs(
    source: Any, indices: Any, target: Any, start: Any, stride: Any
) -> Callable[..., None]:
    return lambda source, indices, target, start, stride: _transpose_pairs(
        source, indices, target, start, stride
    )


@overload(interleave, inline="always", strict=False)
def _of_interleave(
    source: Any, even: Any, odd: Any, target: Any, start: Any
) -> Callable[..., None]:
    return lambda source, even, odd, target, start: _interleave(source, even, odd, target, start)
