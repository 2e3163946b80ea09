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

from aserve_kernels.cpu.bf16 import Float32s, Floats, widen

LANES = 16
Lanes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# An intrinsic: its signature, and what writes its instructions.
Emitted: TypeAlias = tuple[Any, Callable[..., Any]]

FLOATS = ir.VectorType(ir.FloatType(), LANES)
BITS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
INDEX = ir.IntType(64)


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


def greater(a: Lanes, b: Lanes) -> Lanes:
    """Of each pair of lanes, the greater one; that of b where they do not compare."""
    return np.where(a > b, a, b)


def greatest(lanes: Lanes) -> np.float32:
    most: np.float32 = lanes.max()
    return most


def splat(value: np.float32) -> Lanes:
    return np.full(LANES, value, np.float32)


def dot_products(line: Float32s, start: int, lines: Float32s, first: int, width: int) -> Lanes:
    """Of `line` from `start` on with each of 16 `lines`, which follow each other from `first` on;
    all are `width` long, a multiple of 16. Summed in any order."""
    many = lines[first : first + LANES * width].reshape(LANES, width)
    products: Lanes = many @ line[start : start + width]
    return products


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


KIND = _LanesType()


@register_model(_LanesType)
class _LanesModel(PrimitiveModel):  # type: ignore[misc]  # numba has no types
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def address_of(context: Any, builder: Any, array: Any, value: Any, start: Any, vector: Any) -> Any:
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
        address = address_of(context, builder, source, args[0], args[1], vector)
        loaded = builder.load(address, align=align)
        if not is_half:
            return loaded
        shift = ir.Constant(BITS, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(loaded, BITS), shift), FLOATS)

    return KIND(source, types.intp), emit


@intrinsic
def _store(typing: Any, lanes: Any, target: Any, start: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, target, args[1], args[2], FLOATS)
        builder.store(args[0], address, align=4)
        return context.get_dummy_value()

    return types.void(KIND, target, types.intp), emit


@intrinsic
def _prefetch(typing: Any, source: Any, start: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flag, byte = ir.IntType(32), ir.IntType(8)
        address = address_of(context, builder, source, args[0], args[1], byte)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), flag, flag, flag])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [address, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(source, types.intp), emit


@intrinsic
def _add_product(typing: Any, a: Any, b: Any, c: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fused(builder, args[1], args[2], args[0])

    return KIND(KIND, KIND, KIND), emit


@intrinsic
def _greater(typing: Any, a: Any, b: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _chosen(builder, args[0], args[1])

    return KIND(KIND, KIND), emit


@intrinsic
def _greatest(typing: Any, lanes: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = args[0]
        for distance in (8, 4, 2, 1):
            rotated = [lane ^ distance for lane in range(LANES)]
            other = builder.shuffle_vector(left, left, ir.Constant(BITS, rotated))
            left = _chosen(builder, left, other)
        return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

    return types.float32(KIND), emit


def _chosen(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def _splat(typing: Any, value: Any) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(FLOATS, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, undefined, ir.Constant(BITS, [0] * LANES))

    return KIND(types.float32), emit


@intrinsic
def _dot_products(
    typing: Any, line: Any, start: Any, lines: Any, first: Any, width: Any
) -> Emitted:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = address_of(context, builder, line, args[0], args[1], FLOATS)
        right = address_of(context, builder, lines, args[2], args[3], FLOATS)
        num_vectors = builder.lshr(args[4], INDEX(LANES.bit_length() - 1))
        rights = [right]
        while len(rights) < LANES:
            rights.append(builder.gep(rights[-1], [num_vectors]))
        zero = ir.Constant(FLOATS, None)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in rights]
        with cgutils.for_range(builder, num_vectors, intp=INDEX) as loop:
            part = builder.load(builder.gep(left, [loop.index]), align=4)
            for variable, line_start in zip(sums, rights, strict=True):
                other = builder.load(builder.gep(line_start, [loop.index]), align=4)
                total = _fused(builder, part, other, builder.load(variable))
                builder.store(total, variable)
        return _folded(builder, [builder.load(variable) for variable in sums])

    return KIND(line, types.intp, lines, types.intp, types.intp), emit


def _folded(builder: Any, vectors: list[Any]) -> Any:
    """Lane i of the result is the sum of all lanes of vector i. Sixteen are folded in 15 additions,
    each of two vectors that were shuffled into each other; alone they would take four each."""
    distance = LANES // 2
    while distance:
        low, high = between(distance)
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [_added(builder, a, b, low, high) for a, b in pairs]
        distance //= 2
    return vectors[0]


def between(distance: int) -> tuple[list[int], list[int]]:
    """Two shuffles of a pair of vectors: a lane whose number has the bit `distance` takes from the
    second; the first shuffle takes lanes without that bit, the other those with it."""
    low = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
    return low, [lane + distance for lane in low]


def _added(builder: Any, a: Any, b: Any, low: list[int], high: list[int]) -> Any:
    left = builder.shuffle_vector(a, b, ir.Constant(BITS, low))
    return builder.fadd(left, builder.shuffle_vector(a, b, ir.Constant(BITS, high)))


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


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


@overload(greater, inline="always", strict=False)
def _of_greater(a: Any, b: Any) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda a, b: _greater(a, b)


@overload(greatest, inline="always", strict=False)
def _of_greatest(lanes: Any) -> Callable[[Lanes], np.float32]:
    return lambda lanes: _greatest(lanes)


@overload(splat, inline="always", strict=False)
def _of_splat(value: Any) -> Callable[[np.float32], Lanes]:
    return lambda value: _splat(value)


@overload(dot_products, inline="always", strict=False)
def _of_dot_products(
    line: Any, start: Any, lines: Any, first: Any, width: Any
) -> Callable[..., Lanes]:
    return lambda line, start, lines, first, width: _dot_products(line, start, lines, first, width)
