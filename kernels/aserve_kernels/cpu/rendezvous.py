"""The meeting of processes in shared memory: each raises its own flag and waits for all others.

A flag has a cache line of its own. It is written with release order and read with acquire order, so
what a process has written to the shared memory before its flag is seen by those that saw the flag.
The plain functions run with NUMBA_DISABLE_JIT=1; compiled code takes the overloads.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.precompile import cached_njit
from aserve_kernels.cpu.simd import Intrinsic

FLAGS_PER_LINE = 8  # int64 in the 64 bytes of a cache line

Flags: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def read_flag(flags: Flags, rank: int) -> int:
    return int(flags[rank, 0])


def write_flag(flags: Flags, rank: int, value: int) -> None:
    flags[rank, 0] = value


def pause() -> None:
    """Tells the processor that a loop waits for memory."""


@cached_njit(nogil=True)
def meet(flags: Flags, rank: int, number: int, max_looks: int) -> bool:
    """Raises the flag of `rank` to `number`, and looks `max_looks` times at the others. flags int64
    [ranks, 8], of which the first column is used. Returns whether all have come so far."""
    write_flag(flags, rank, number)
    for other in range(len(flags)):
        num_looks = 0
        while read_flag(flags, other) < number:
            num_looks += 1
            if num_looks > max_looks:
                return False
            pause()
    return True


@intrinsic
def _read_flag(typing: Any, flags: Any, rank: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, signature, args)
        return builder.load_atomic(pointer, "acquire", align=8)

    return types.int64(flags, rank), emit


@intrinsic
def _write_flag(typing: Any, flags: Any, rank: Any, value: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, signature, args)
        builder.store_atomic(args[2], pointer, "release", align=8)
        return context.get_dummy_value()

    return types.void(flags, rank, types.int64), emit


@intrinsic
def _pause(typing: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), emit


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """The address of the first element of a row."""
    kind = signature.args[0]
    array = context.make_array(kind)(context, builder, args[0])
    zero = ir.Constant(ir.IntType(64), 0)
    return cgutils.get_item_pointer(context, builder, kind, array, [args[1], zero])


@overload(read_flag, strict=False)
def _overload_read(flags: Any, rank: Any) -> Callable[..., int]:
    return lambda flags, rank: _read_flag(flags, rank)


@overload(write_flag, strict=False)
def _overload_write(flags: Any, rank: Any, value: Any) -> Callable[..., None]:
    return lambda flags, rank, value: _write_flag(flags, rank, value)


@overload(pause, strict=False)
def _overload_pause() -> Callable[..., None]:
    return lambda: _pause()
