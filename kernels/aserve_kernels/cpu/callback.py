"""Compiled functions of C, and calls of them from other compiled code by their address.

WHY: numba and LLVM compile a function once more in each one that contains it. One that is called by
its address is compiled once, however many contain the call.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils, config, event
from numba.core.types import containers
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.precompile import CompileLogger, compile_lock
from aserve_kernels.cpu.simd import Intrinsic

logger = logging.getLogger(__name__)


class Callback(NamedTuple):
    """A function for compiled code. Its address is valid as long as this object lives."""

    address: int
    function: Any


def compile_callback(function: Callable[..., None], num_arguments: int) -> Callback:
    """Compiles a function of so many int64 as one of C, or reads it from the cache. With
    NUMBA_DISABLE_JIT=1 it is the plain function."""
    name = function.__name__
    if config.DISABLE_JIT:
        callback = _kind_of(num_arguments)(function)
        return Callback(ctypes.cast(callback, ctypes.c_void_p).value or 0, callback)
    signature = types.void(*[types.int64] * num_arguments)
    with compile_lock(name), event.install_listener("numba:compile", CompileLogger(name)):
        try:
            compiled = cfunc(signature, cache=bool(config.CACHE_DIR))(function)
        except OSError as error:
            logger.warning("a compiled kernel cannot be kept for later starts: %s", error)
            compiled = cfunc(signature)(function)
    address: Any = compiled.address  # None only before it is compiled
    return Callback(address, compiled)


def call_at(address: int, arguments: tuple[int, ...]) -> None:
    """Calls the function at this address with arguments of int64."""
    _kind_of(len(arguments))(int(address))(*arguments)


def _kind_of(num_arguments: int) -> Any:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)


@intrinsic
def _call(typing: Any, address: Any, arguments: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(arguments))
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, containers.UniTuple(types.int64, len(arguments))), emit


@overload(call_at, strict=False)
def _overload_call_at(address: Any, arguments: Any) -> Callable[..., None]:
    return lambda address, arguments: _call(address, arguments)
