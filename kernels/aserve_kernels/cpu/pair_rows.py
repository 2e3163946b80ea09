"""Rows of bfloat16 as they are stored, for attention over few queries: dot products of pairs
(vdpbf16ps), and loads that widen one element of each pair.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Floats, narrow, widen
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.simd import (
    FLOAT32X16,
    INDEX,
    INT32X16,
    LANES,
    LANES_TYPE,
    Intrinsic,
    Lanes,
    address_of,
    horizontal_sums,
)
from aserve_kernels.cpu.tiles import TileEmitter

PAIRS = 2 * LANES  # elements of a vector


def pair_dot_products(
    x: Floats, start: int, rows: Floats, starts: Int64s, first: int, width: int
) -> Lanes:
    """Sixteen dot products: of x[start : start + width] with rows[s : s + width] for the 16 values
    s of `starts` from `first` on. `width` is a multiple of 32. All arrays are flat."""
    sums = np.zeros(LANES, np.float32)
    wide, other = np.empty(width, np.float32), np.empty(width, np.float32)
    widen(x[start : start + width], wide)
    for lane, row in enumerate(starts[first : first + LANES]):
        widen(rows[row : row + width], other)
        sums[lane] = wide @ other
    return sums


def load_even(source: Floats, start: int) -> Lanes:
    """Returns the even elements of source[start : start + 32], widened to float32."""
    return _every_other(source, start)


def load_odd(source: Floats, start: int) -> Lanes:
    """Returns the odd elements of source[start : start + 32], widened to float32."""
    return _every_other(source, start + 1)


def store_pairs(even: Lanes, odd: Lanes, target: Floats, start: int) -> None:
    """target[start : start + 32] = the elements of both, in turn, rounded to bfloat16."""
    wide = np.stack((even, odd), axis=1).reshape(-1)
    narrow(wide, target[start : start + PAIRS])


def _every_other(source: Floats, start: int) -> Lanes:
    chosen: Floats = source[start : start + PAIRS - 1 : 2].copy()
    lanes = np.empty(LANES, np.float32)
    widen(chosen, lanes)
    return lanes


class _Pairs(TileEmitter):
    def dot_product(self, total: Any, left: Any, right: Any) -> Any:
        return self._add_product(total, left, right)

    def even(self, pairs: Any) -> Any:
        return self._low(pairs)

    def odd(self, pairs: Any) -> Any:
        return self._high(pairs)

    def joined(self, even: Any, odd: Any) -> Any:
        builder = self._builder
        low, high = (builder.zext(self._rounded(each), INT32X16) for each in (even, odd))
        return builder.or_(low, builder.shl(high, ir.Constant(INT32X16, [16] * LANES)))


@intrinsic
def _pair_dot_products(
    typing: Any, x: Any, start: Any, rows: Any, starts: Any, first: Any, width: Any
) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = _Pairs(builder, is_paired=True)
        left = address_of(context, builder, x, args[0], args[1], INT32X16)
        places = context.make_array(starts)(context, builder, args[3]).data
        rights = []
        for lane in range(LANES):
            at = builder.load(builder.gep(places, [builder.add(args[4], INDEX(lane))]))
            rights.append(address_of(context, builder, rows, args[2], at, INT32X16))
        zero = ir.Constant(FLOAT32X16, None)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in rights]
        num_vectors = builder.udiv(args[5], INDEX(PAIRS))
        with cgutils.for_range(builder, num_vectors, intp=INDEX) as loop:
            part = builder.load(builder.gep(left, [loop.index]), align=2)
            for variable, row in zip(sums, rights, strict=True):
                other = builder.load(builder.gep(row, [loop.index]), align=2)
                total = pairs.dot_product(builder.load(variable), part, other)
                builder.store(total, variable)
        return horizontal_sums(builder, [builder.load(variable) for variable in sums])

    return LANES_TYPE(x, types.intp, rows, starts, types.intp, types.intp), emit


@intrinsic
def _load_even(typing: Any, source: Any, start: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, source, args[0], args[1], INT32X16)
        return _Pairs(builder, is_paired=True).even(builder.load(address, align=2))

    return LANES_TYPE(source, types.intp), emit


@intrinsic
def _load_odd(typing: Any, source: Any, start: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, source, args[0], args[1], INT32X16)
        return _Pairs(builder, is_paired=True).odd(builder.load(address, align=2))

    return LANES_TYPE(source, types.intp), emit


@intrinsic
def _store_pairs(typing: Any, even: Any, odd: Any, target: Any, start: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, target, args[2], args[3], INT32X16)
        builder.store(_Pairs(builder, is_paired=True).joined(args[0], args[1]), address, align=2)
        return context.get_dummy_value()

    return types.void(LANES_TYPE, LANES_TYPE, target, types.intp), emit


@overload(pair_dot_products, inline="always", strict=False)
def _overload_pair_dot_products(
    x: Any, start: Any, rows: Any, starts: Any, first: Any, width: Any
) -> Callable[..., Lanes]:
    return lambda x, start, rows, starts, first, width: _pair_dot_products(
        x, start, rows, starts, first, width
    )


@overload(load_even, inline="always", strict=False)
def _overload_load_even(source: Any, start: Any) -> Callable[[Floats, int], Lanes]:
    return lambda source, start: _load_even(source, start)


@overload(load_odd, inline="always", strict=False)
def _overload_load_odd(source: Any, start: Any) -> Callable[[Floats, int], Lanes]:
    return lambda source, start: _load_odd(source, start)


@overload(store_pairs, inline="always", strict=False)
def _overload_store_pairs(
    even: Any, odd: Any, target: Any, start: Any
) -> Callable[[Lanes, Lanes, Floats, int], None]:
    return lambda even, odd, target, start: _store_pairs(even, odd, target, start)
