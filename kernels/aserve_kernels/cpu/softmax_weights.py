"""Weights of the softmax, sixteen at a time, in bfloat16: the operands of attention's products.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads, for processors
with AVX512-bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow
from aserve_kernels.cpu.exp2 import C1, C2, C3, C4, C5
from aserve_kernels.cpu.simd import (
    FLOAT32X16,
    INT16X16,
    LANES,
    LANES_TYPE,
    Intrinsic,
    Lanes,
    address_of,
    emit_call,
    emit_splat,
)

# A power of two below is zero: less than half of the smallest float32.
MIN_EXPONENT = -200.0
SCALE = "llvm.x86.avx512.mask.scalef.ps.512"
ALL_LANES, NEAREST = ir.IntType(16)(-1), ir.IntType(32)(8)  # and no exceptions


def store_weights(
    scores: Float32s, start: int, factor: np.float32, row_max: np.float32, weights: Floats
) -> Lanes:
    """Returns w = 2^(factor * s - row_max), float32, for the sixteen scores s from scores[start]
    on, and writes it to `weights`, as bfloat16, ties to even, from the same index on.

    The exponents are at most about 0. A score of -inf has the weight 0, and a NaN a NaN.
    """
    own = slice(start, start + LANES)
    exact: Lanes = np.exp2(factor * scores[own] - row_max).astype(np.float32)
    narrow(exact, weights[own])
    return exact


@intrinsic
def _store_weights(
    typing: Any, scores: Any, start: Any, factor: Any, row_max: Any, weights: Any
) -> Intrinsic:
    """PERF: exponents become bits by vscalefps, and bfloat16 by vcvtneps2bf16: 512 scores of 32
    queries take half as long as by integers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(value: float | np.float32) -> Any:
            return ir.Constant(FLOAT32X16, [float(value)] * LANES)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return emit_call(builder, f"llvm.fmuladd.v{LANES}f32", a, b, c)

        source = address_of(context, builder, scores, args[0], args[1], FLOAT32X16)
        largest = emit_splat(builder, builder.fneg(args[3]))
        exponent = fma(builder.load(source, align=4), emit_splat(builder, args[2]), largest)
        least = constant(MIN_EXPONENT)
        is_less = builder.fcmp_ordered("<", exponent, least)  # of NaN not
        exponent = builder.select(is_less, least, exponent)
        whole = emit_call(builder, f"llvm.rint.v{LANES}f32", exponent)
        fraction = builder.fsub(exponent, whole)
        power = constant(C5)
        for coefficient in (C4, C3, C2, C1, 1):
            power = fma(power, fraction, constant(coefficient))
        power = emit_call(builder, SCALE, power, whole, power, ALL_LANES, NEAREST)
        kind = ir.FunctionType(INT16X16, [FLOAT32X16])
        narrow_ = builder.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [power], False)
        target = address_of(context, builder, weights, args[4], args[1], INT16X16)
        builder.store(narrow_, target, align=2)
        return power

    return LANES_TYPE(scores, types.intp, types.float32, types.float32, weights), emit


@overload(store_weights, inline="always", strict=False)
def _overload_store_weights(
    scores: Any, start: Any, factor: Any, row_max: Any, weights: Any
) -> Callable[..., Lanes]:
    return lambda scores, start, factor, row_max, weights: _store_weights(
        scores, start, factor, row_max, weights
    )
