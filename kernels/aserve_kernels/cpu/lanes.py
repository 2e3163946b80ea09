"""Sixteen float32 side by side, for compiled code whose inner loops must not be left to chance: no
vectoriser may move a store past a load that could alias, and none takes a loop of 32 steps.

It knows no operation. The plain functions are what runs with NUMBA_DISABLE_JIT=1; compiled code
takes the overloads. LLVM cuts the vector to the registers of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, overload, register_model

from aserve_kernels.cpu.half import Float32s, Floats, widen

LANES = 16
Lanes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# An intrinsic: its signature, and what writes its instructions.
Emitted: TypeAlias = tuple[Any, Callable[..., Any]]

FLOATS = ir.VectorType(ir.FloatType(), LANES)
BITS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)


def zeros() -> Lanes:
    return np.zeros(LANES, np.float32)


def load(source: Floats, start: int) -> Lanes:
    """source [n], contiguous; at least 16 of it from `start` on."""
    lanes = zeros()
    widen(source[start : start + LANES], lanes)
    return lanes


def store(lanes: Lanes, target: Float32s, start: int) -> None:
    target[start : start + LANES] = lanes


def prefetch(source: Floats, start: int) -> None:
    """Asks for the cache line of source[start], which need not exist."""


def add_product(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a + b * c."""
    return a + b * c


def splat(value: np.float32) -> Lanes:
    return np.full(LANES, value, np.float32)


def total(lanes: Lanes) -> np.float32:
    """In any order."""
    return np.float32(lanes.sum())


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


KIND = _LanesType()


@register_model(_LanesType)
class _LanesModel(PrimitiveModel):  # type: ignore[misc]  # numba has no types
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def _address(context: Any, builder: Any, array: Any, value: Any, start: Any, vector: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


@intrinsic
def _zeros(typing: Any) -> Emitted:
    return KIND(), lambda context, builder, signature, args: ir.Constant(FLOATS, None)


@intrinsic
def _load(typing: Any, source: Any, start: Any) -> Emitted:
    is_half = source.dtype == types.uint16
    vector, align = (HALVES, 2) if is_half else (FLOATS, 4)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, source, args[0], args[1], vector)
        loaded = builder.load(address, align=align)
        if not is_half:
            return loaded
        shift = ir.Constant(BITS, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(loaded, BITS), shift), FLOATS)

    return KIND(source, types.intp), emit


@intrinsic
def _store(typing: Any, lanes: Any, target: Any, start: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, target, args[1], args[2], FLOATS)
        builder.store(args[0], address, align=4)
        return context.get_dummy_value()

    return types.void(KIND, target, types.intp), emit


@intrinsic
def _prefetch(typing: Any, source: Any, start: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flag, byte = ir.IntType(32), ir.IntType(8)
        address = _address(context, builder, source, args[0], args[1], byte)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), flag, flag, flag])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [address, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(source, types.intp), emit


@intrinsic
def _add_product(typing: Any, a: Any, b: Any, c: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        fused = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(fused, [args[1], args[2], args[0]])

    return KIND(KIND, KIND, KIND), emit


@intrinsic
def _splat(typing: Any, value: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(FLOATS, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, undefined, ir.Constant(BITS, [0] * LANES))

    return KIND(types.float32), emit


@intrinsic
def _total(typing: Any, lanes: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), FLOATS])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        reduced = cgutils.get_or_insert_function(builder.module, kind, name)
        zero = ir.Constant(ir.FloatType(), -0.0)
        return builder.call(reduced, [zero, args[0]], fastmath=("reassoc",))

    return types.float32(KIND), emit


@overload(zeros, inline="always", strict=False)
def _of_zeros() -> Callable[[], Lanes]:
    return lambda: _zeros()


@overload(load, inline="always", strict=False)
def _of_load(source: Any, start: Any) -> Callable[[Floats, int], Lanes]:
    return lambda source, start: _load(source, start)


@overload(store, inline="always", strict=False)
def _of_store(lanes: Any, target: Any, start: Any) -> Callable[[Lanes, Float32s, int], None]:
    return lambda lanes, target, start: _store(lanes, target, start)


@overload(prefetch, inline="always", strict=False)
def _of_prefetch(source: Any, start: Any) -> Callable[[Floats, int], None]:
    return lambda source, start: _prefetch(source, start)


@overload(add_product, inline="always", strict=False)
def _of_add_product(a: Any, b: Any, c: Any) -> Callable[[Lanes, Lanes, Lanes], Lanes]:
    return lambda a, b, c: _add_product(a, b, c)


@overload(splat, inline="always", strict=False)
def _of_splat(value: Any) -> Callable[[np.float32], Lanes]:
    return lambda value: _splat(value)


@overload(total, inline="always", strict=False)
def _of_total(lanes: Any) -> Callable[[Lanes], np.float32]:
    return lambda lanes: _total(lanes)
