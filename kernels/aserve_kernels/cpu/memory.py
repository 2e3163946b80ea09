"""Arrays over memory given by its address, for compiled code that reads many tensors through one
record of addresses.

The caller keeps the tensors alive. The plain function runs with NUMBA_DISABLE_JIT=1; compiled code
takes the overload.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core.types import CPointer  # type: ignore[attr-defined]  # set at import
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray

from aserve_kernels.cpu.simd import Intrinsic

Like = TypeVar("Like", bound=npt.NDArray[Any])


def array_at(address: int, shape: tuple[int, ...], like: Like) -> Like:
    """Returns a contiguous array of `shape` at `address`, with the dtype of `like`."""
    size_bytes = int(np.prod(shape)) * like.itemsize
    memory = memoryview((ctypes.c_char * size_bytes).from_address(int(address))).cast("B")
    array: Like = np.ndarray(shape, like.dtype, memory)  # type: ignore[assignment]  # as `like`
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
