"""Arrays of compiled code: over memory given by its address, and as scratch memory.

The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import config
from numba.core.types import CPointer  # type: ignore[attr-defined]  # set at import
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray

from aserve_kernels.cpu.simd import Intrinsic

Like = TypeVar("Like", bound=npt.NDArray[Any])
Function = TypeVar("Function", bound=Callable[..., Any])

STACK_BYTES = 1 << 15
LINE_BYTES = 64  # of a cache
# Empty arrays that stand for their dtypes in calls of compiled code.
FLOAT32_LIKE, FLOAT64_LIKE = np.empty(0, np.float32), np.empty(0, np.float64)
INT8_LIKE, INT32_LIKE = np.empty(0, np.int8), np.empty(0, np.int32)
INT64_LIKE, UINT16_LIKE = np.empty(0, np.int64), np.empty(0, np.uint16)
UINT8_LIKE, UINT32_LIKE = np.empty(0, np.uint8), np.empty(0, np.uint32)


def array_at(address: int, shape: tuple[int, ...], like: Like) -> Like:
    """Returns a contiguous array of `shape` at `address`, with the dtype of `like`. The caller
    keeps alive what it is part of: a record of a model has the addresses of many tensors."""
    size_bytes = int(np.prod(shape)) * like.itemsize
    memory = memoryview((ctypes.c_char * size_bytes).from_address(int(address))).cast("B")
    array: Like = np.ndarray(shape, like.dtype, memory)  # type: ignore[assignment]  # as `like`
    return array


def compiled_as(intrinsic_: Any) -> Callable[[Function], Function]:
    """Returns a decorator of the plain function for which compiled code has an intrinsic.

    WHY not an overload: it is a function of its own, with whose end the memory of its stack ends;
    and numba inlines one wrongly into functions that are inlined as well.
    """
    return lambda plain: plain if config.DISABLE_JIT else intrinsic_


@intrinsic
def _scratch(typing: Any, shape: Any, like: Any) -> Intrinsic:
    pointer = CPointer(like.dtype)
    array = types.Array(like.dtype, len(shape), "C")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # not in a loop, where each pass would take more
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), STACK_BYTES))
        memory.align = LINE_BYTES
        stack = builder.bitcast(memory, context.get_value_type(pointer))
        inner = array(pointer, shape, like)
        return context.compile_internal(builder, _stack_or_heap, inner, [stack, *args])

    return array(shape, like), emit


def _stack_or_heap(stack: Any, shape: tuple[int, ...], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    size = 1
    for length in shape:
        size *= length
    if size * like.itemsize <= STACK_BYTES:
        return carray(stack, shape)
    # PERF: numba aligns an array to 32 bytes. Products of AMX whose rows cross cache lines take 1.6
    # times as long.
    memory = np.empty(size + LINE_BYTES // like.itemsize, like.dtype)
    first = -memory.ctypes.data % LINE_BYTES // like.itemsize
    return memory[first : first + size].reshape(shape)


@compiled_as(_scratch)
def scratch(shape: tuple[int, ...], like: Like) -> Like:
    """Returns an array of `shape`, with the dtype of `like` and undefined elements. It is on the
    stack of the function that calls this, if it has at most STACK_BYTES, so that it may not be
    returned, and in a loop is the same one in each pass.

    WHY: threads of a team come from a meeting at the same moment, and all would ask malloc at once.
    Its lock makes them sleep. PERF: a step of Qwen3-0.6B with weights of 8 bits slept 95 times, for
    a tenth of its time (a Xeon, 2 threads).
    """
    array: Like = np.empty(shape, like.dtype)  # type: ignore[assignment]  # as `like`
    return array


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Intrinsic:
    pointer = CPointer(like.dtype)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), emit


@overload(array_at, strict=False)
def _array_at(address: Any, shape: Any, like: Any) -> Callable[..., npt.NDArray[Any]]:
    return lambda address, shape, like: carray(_pointer(address, like), shape)
