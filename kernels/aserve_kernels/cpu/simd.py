"""SIMD vectors of sixteen float32 as numba intrinsics, for loops that LLVM would not vectorise.

WHY: LLVM's vectoriser moves no store past a load that may alias it, and leaves short loops scalar.
The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads, which emit LLVM
IR. LLVM splits a vector into the registers of the machine: one with AVX-512, two with AVX2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, overload, register_model

from aserve_kernels.cpu.bf16 import Float32s, Floats, widen
from aserve_kernels.cpu.processor import HAS_AVX512

binding.initialize_native_asmparser()  # for instructions in LLVM IR

LANES = 16
SUMS_AT_ONCE = 16 if HAS_AVX512 else 4  # vectors of sums that registers hold beside their operands
Lanes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# What a numba intrinsic returns: its signature, and the function that emits its instructions.
Intrinsic: TypeAlias = tuple[Any, Callable[..., Any]]

FLOAT32X16 = ir.VectorType(ir.FloatType(), LANES)
INT32X16 = ir.VectorType(ir.IntType(32), LANES)
INT16X16 = ir.VectorType(ir.IntType(16), LANES)
INT8X16 = ir.VectorType(ir.IntType(8), LANES)
INT16X32, INT8X32 = (ir.VectorType(ir.IntType(bits), 2 * LANES) for bits in (16, 8))
INT8X64 = ir.VectorType(ir.IntType(8), 4 * LANES)
# Vectors that fill one register. WHY: the sums of some loops and their operands just fit into all
# registers. Of two halves of a vector LLVM may load both at once, and spills.
FLOATS, WORDS = (
    ir.VectorType(kind, 16 if HAS_AVX512 else 8) for kind in (ir.FloatType(), ir.IntType(32))
)
FLOAT16X16 = ir.VectorType(ir.HalfType(), LANES)
INDEX = ir.IntType(64)
BYTE = ir.IntType(8)
IN_L1, IN_L2 = 3, 2  # how near to the processor a prefetched line is brought


def element(source: npt.NDArray[Any], index: int) -> Any:
    """source[index], for an index of 0 or more. `source` is contiguous.

    PERF: numba looks whether an index is negative whenever it reads an array.
    """
    return source[index]


def zeros() -> Lanes:
    return np.zeros(LANES, np.float32)


def load(source: Floats, start: int) -> Lanes:
    """source[start : start + 16], widened to float32. source [n] is contiguous."""
    lanes = zeros()
    widen(source[start : start + LANES], lanes)
    return lanes


def store(lanes: Lanes, target: Float32s, start: int) -> None:
    target[start : start + LANES] = lanes


def prefetch(source: Floats, start: int) -> None:
    """Prefetches the cache line of source[start], which may lie beyond the array."""


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a + b * c, fused where the machine has FMA."""
    return a + b * c


def maximum(a: Lanes, b: Lanes) -> Lanes:
    """Returns the maximum of each pair of lanes; the lane of b if one is NaN."""
    return np.where(a > b, a, b)


def reduce_max(lanes: Lanes) -> np.float32:
    result: np.float32 = lanes.max()
    return result


def reduce_sum(lanes: Lanes) -> np.float32:
    """The order of the sums is unspecified."""
    result: np.float32 = lanes.sum()
    return result


def splat(value: np.float32) -> Lanes:
    return np.full(LANES, value, np.float32)


def dot_products(x: Float32s, start: int, rows: Float32s, first: int, width: int) -> Lanes:
    """Sixteen dot products: of x[start : start + width] with each of 16 contiguous rows of `rows`,
    from `first` on. `width` is a multiple of 16. The order of the sums is unspecified."""
    matrix = rows[first : first + LANES * width].reshape(LANES, width)
    products: Lanes = matrix @ x[start : start + width]
    return products


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = _LanesType()


@register_model(_LanesType)
class _LanesModel(PrimitiveModel):  # type: ignore[misc]  # numba has no types
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOAT32X16)


def address_of(context: Any, builder: Any, array: Any, value: Any, start: Any, vector: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


@intrinsic
def _element(typing: Any, source: Any, index: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(source)(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return source.dtype(source, types.intp), emit


@intrinsic
def _zeros(typing: Any) -> Intrinsic:
    return LANES_TYPE(), lambda context, builder, signature, args: ir.Constant(FLOAT32X16, None)


@intrinsic
def _load(typing: Any, source: Any, start: Any) -> Intrinsic:
    vector, align, widen_lanes = {
        types.uint8: (INT8X16, 1, _emit_fp8_widened),
        types.uint16: (INT16X16, 2, _emit_bf16_widened),
    }.get(source.dtype, (FLOAT32X16, 4, lambda builder, loaded: loaded))

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, source, args[0], args[1], vector)
        return widen_lanes(builder, builder.load(address, align=align))

    return LANES_TYPE(source, types.intp), emit


def _emit_bf16_widened(builder: Any, loaded: Any) -> Any:
    shift = ir.Constant(INT32X16, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(loaded, INT32X16), shift), FLOAT32X16)


def _emit_fp8_widened(builder: Any, loaded: Any) -> Any:
    """By way of float16, whose exponent is biased by 8 more. NOTE: NaN becomes 480.

    PERF: a conversion of float16 is one instruction, and as fast for subnormal elements.
    """
    shifted = builder.shl(builder.sext(loaded, INT16X16), ir.Constant(INT16X16, [7] * LANES))
    halves = builder.and_(shifted, ir.Constant(INT16X16, [0xBF80] * LANES))
    floats = builder.fpext(builder.bitcast(halves, FLOAT16X16), FLOAT32X16)
    return builder.fmul(floats, ir.Constant(FLOAT32X16, [2.0**8] * LANES))


@intrinsic
def _store(typing: Any, lanes: Any, target: Any, start: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, target, args[1], args[2], FLOAT32X16)
        builder.store(args[0], address, align=4)
        return context.get_dummy_value()

    return types.void(LANES_TYPE, target, types.intp), emit


@intrinsic
def _prefetch(typing: Any, source: Any, start: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, source, args[0], args[1], ir.IntType(8))
        emit_prefetch(builder, address, IN_L1)
        return context.get_dummy_value()

    return types.void(source, types.intp), emit


def emit_prefetch(builder: Any, address: Any, level: int) -> None:
    """Prefetches the cache line at an address, which may be no address of the process, into the L1
    or the L2 cache."""
    flag, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.bitcast(address, byte), flag(0), flag(level), flag(1)])


@intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_fma(builder, args[1], args[2], args[0])

    return LANES_TYPE(LANES_TYPE, LANES_TYPE, LANES_TYPE), emit


@intrinsic
def _maximum(typing: Any, a: Any, b: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_maximum(builder, args[0], args[1])

    return LANES_TYPE(LANES_TYPE, LANES_TYPE), emit


@intrinsic
def _reduce_max(typing: Any, lanes: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = args[0]
        for distance in (8, 4, 2, 1):
            swapped = [lane ^ distance for lane in range(LANES)]
            other = builder.shuffle_vector(left, left, ir.Constant(INT32X16, swapped))
            left = _emit_maximum(builder, left, other)
        return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

    return types.float32(LANES_TYPE), emit


@intrinsic
def _reduce_sum(typing: Any, lanes: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        [total] = [horizontal_sums(builder, [args[0]])]
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(LANES_TYPE), emit


def _emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def _splat(typing: Any, value: Any) -> Intrinsic:
    return LANES_TYPE(types.float32), lambda context, builder, signature, args: emit_splat(
        builder, args[0]
    )


def emit_splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """Returns a vector of `lanes` times a value, of any type."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, undefined, zeros)


@intrinsic
def _dot_products(typing: Any, x: Any, start: Any, rows: Any, first: Any, width: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = address_of(context, builder, x, args[0], args[1], FLOAT32X16)
        right = address_of(context, builder, rows, args[2], args[3], FLOAT32X16)
        num_vectors = builder.lshr(args[4], INDEX(LANES.bit_length() - 1))
        rights = [right]
        while len(rights) < LANES:
            rights.append(builder.gep(rights[-1], [num_vectors]))
        sums: list[Any] = []
        for first in range(0, LANES, SUMS_AT_ONCE):
            some = rights[first : first + SUMS_AT_ONCE]
            sums += _emit_dot_products(builder, left, some, num_vectors)
        return horizontal_sums(builder, sums)

    return LANES_TYPE(x, types.intp, rows, types.intp, types.intp), emit


def _emit_dot_products(builder: Any, left: Any, rights: list[Any], num_vectors: Any) -> list[Any]:
    """Returns one vector of sums for the products of `left` with each row."""
    zero = ir.Constant(FLOAT32X16, None)
    sums = [cgutils.alloca_once_value(builder, zero) for _ in rights]
    with cgutils.for_range(builder, num_vectors, intp=INDEX) as loop:
        part = builder.load(builder.gep(left, [loop.index]), align=4)
        for variable, row_start in zip(sums, rights, strict=True):
            other = builder.load(builder.gep(row_start, [loop.index]), align=4)
            total = _emit_fma(builder, part, other, builder.load(variable))
            builder.store(total, variable)
    return [builder.load(variable) for variable in sums]


def horizontal_sums(builder: Any, vectors: list[Any]) -> Any:
    """Sums 2, 4, 8 or 16 vectors, of which each has at least as many lanes, horizontally at once:
    lane i of the result, which has as many lanes as there are vectors, is the sum of vector i. How
    many there are changes no sum.

    A tree of additions of two vectors that are first blended into each other, 15 for sixteen
    vectors; one by one, each vector would take four.
    """
    lanes = vectors[0].type.count
    distance, step = lanes // 2, lanes // len(vectors)
    while len(vectors) > 1:
        masks = blend_masks(distance, lanes)
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [_emit_blended_sum(builder, a, b, *masks) for a, b in pairs]
        distance //= 2
    [total] = vectors
    while distance:
        swapped = _lanes(lane ^ distance for lane in range(lanes))
        total = builder.fadd(total, builder.shuffle_vector(total, total, swapped))
        distance //= 2
    return builder.shuffle_vector(total, total, _lanes(range(0, lanes, step)))


def blend_masks(distance: int, num_lanes: int = LANES) -> tuple[list[int], list[int]]:
    """Two shuffle masks for a pair of vectors. In both results, lanes whose index has the bit
    `distance` come from the second vector, the others from the first. The first mask takes source
    lanes without that bit, the second mask those with it."""
    low = [
        lane if not lane & distance else lane - distance + num_lanes for lane in range(num_lanes)
    ]
    return low, [lane + distance for lane in low]


def _emit_blended_sum(builder: Any, a: Any, b: Any, low: list[int], high: list[int]) -> Any:
    left = builder.shuffle_vector(a, b, _lanes(low))
    return builder.fadd(left, builder.shuffle_vector(a, b, _lanes(high)))


def _lanes(numbers: Iterable[int]) -> Any:
    """The numbers of lanes by which LLVM shuffles vectors."""
    lanes = [*numbers]
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def _emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""
    return emit_call(builder, f"llvm.fmuladd.v{LANES}f32", a, b, c)


def emit_call(builder: Any, name: str, *args: Any, result: ir.Type = FLOAT32X16) -> Any:
    """Calls a function of LLVM."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@overload(element, inline="always", strict=False)
def _overload_element(source: Any, index: Any) -> Callable[..., Any]:
    return lambda source, index: _element(source, index)


@overload(zeros, inline="always", strict=False)
def _overload_zeros() -> Callable[[], Lanes]:
    return lambda: _zeros()


@overload(load, inline="always", strict=False)
def _overload_load(source: Any, start: Any) -> Callable[[Floats, int], Lanes]:
    return lambda source, start: _load(source, start)


@overload(store, inline="always", strict=False)
def _overload_store(lanes: Any, target: Any, start: Any) -> Callable[[Lanes, Float32s, int], None]:
    return lambda lanes, target, start: _store(lanes, target, start)


@overload(prefetch, inline="always", strict=False)
def _overload_prefetch(source: Any, start: Any) -> Callable[[Floats, int], None]:
    return lambda source, start: _prefetch(source, start)


@overload(fma, inline="always", strict=False)
def _overload_fma(a: Any, b: Any, c: Any) -> Callable[[Lanes, Lanes, Lanes], Lanes]:
    return lambda a, b, c: _fma(a, b, c)


@overload(maximum, inline="always", strict=False)
def _overload_maximum(a: Any, b: Any) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda a, b: _maximum(a, b)


@overload(reduce_max, inline="always", strict=False)
def _overload_reduce_max(lanes: Any) -> Callable[[Lanes], np.float32]:
    return lambda lanes: _reduce_max(lanes)


@overload(reduce_sum, inline="always", strict=False)
def _overload_reduce_sum(lanes: Any) -> Callable[[Lanes], np.float32]:
    return lambda lanes: _reduce_sum(lanes)


@overload(splat, inline="always", strict=False)
def _overload_splat(value: Any) -> Callable[[np.float32], Lanes]:
    return lambda value: _splat(value)


@overload(dot_products, inline="always", strict=False)
def _overload_dot_products(
    x: Any, start: Any, rows: Any, first: Any, width: Any
) -> Callable[..., Lanes]:
    return lambda x, start, rows, first, width: _dot_products(x, start, rows, first, width)
