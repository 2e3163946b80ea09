"""Matrix products that compiled code calls by their address.

A forward calls the product of each linear layer: of weights in tiles, or of 8 or 4 bits. The record
of a layer names its product by an address, so a forward needs to know none of them.

WHY: LLVM compiles a kernel once more in every function that contains it, so that a forward which
contained all products would take twice as long to compile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.memory import FLOAT32_LIKE, UINT16_LIKE
from aserve_kernels.cpu.precompile import Callback, compile_callback
from aserve_kernels.cpu.simd import Intrinsic

# The record of a linear layer: its product; the addresses of its packed weight, its float32 bias
# [out] and its factors; its sizes; and the group of a QuantWeight, what it has for each, and the
# unit of its factors (0 for other weights).
PRODUCT: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("product", "weight", "bias", "factors")],
        *[(name, np.int64) for name in ("num_in", "num_out", "group", "per_group")],
        ("unit", np.float64),
    ],
    align=True,
)
NO_PRODUCT = (0,) * len(PRODUCT)
# The address of the record, x [tokens, in] and the number of tokens, out float32 [tokens, out], the
# worker and the number of workers.
NUM_ARGUMENTS = 6
C_PRODUCT = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * NUM_ARGUMENTS)
RECORD_LIKE = np.empty(0, PRODUCT)  # for `array_at`
LIKE: Mapping[torch.dtype, Floats] = {
    torch.float32: FLOAT32_LIKE,
    torch.bfloat16: UINT16_LIKE,
}


def compile_product(product: Callable[[int, int, int, int, int, int], None]) -> Callback:
    """Compiles a product, or reads it from the cache."""
    return compile_callback(product, C_PRODUCT, types.void(*[types.int64] * NUM_ARGUMENTS))


def multiply_by(layer: Any, x: Floats, out: Float32s, worker: int, num_workers: int) -> None:
    """Calls the product of a linear layer, a record of PRODUCT: a worker's share of the outputs for
    all rows. x [tokens, in] -> out [tokens, out], contiguous."""
    record = np.array(layer, PRODUCT)
    address = record.ctypes.data
    C_PRODUCT(int(layer["product"]))(
        address, x.ctypes.data, len(x), out.ctypes.data, worker, num_workers
    )


@intrinsic
def _call(
    typing: Any, layer: Any, x: Any, num_tokens: Any, out: Any, worker: Any, num_workers: Any
) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        record, *others = args
        product = builder.load(builder.bitcast(record, word.as_pointer()))  # the first field
        kind = ir.FunctionType(ir.VoidType(), [word] * NUM_ARGUMENTS)
        address = builder.ptrtoint(record, word)
        builder.call(builder.inttoptr(product, kind.as_pointer()), [address, *others])
        return context.get_dummy_value()

    return types.void(layer, *[types.int64] * (NUM_ARGUMENTS - 1)), emit


@overload(multiply_by, strict=False)
def _overload_multiply_by(
    layer: Any, x: Any, out: Any, worker: Any, num_workers: Any
) -> Callable[..., None]:
    return lambda layer, x, out, worker, num_workers: _call(
        layer, x.ctypes.data, x.shape[0], out.ctypes.data, worker, num_workers
    )
