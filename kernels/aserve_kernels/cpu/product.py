"""Matrix products that compiled code calls by their address.

A forward calls the product of each linear layer: of weights in tiles, or of 8 or 4 bits. The record
of a layer names its product by an address, so a forward needs to know none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.callback import Callback, call_at, compile_callback
from aserve_kernels.cpu.memory import FLOAT32_LIKE, UINT16_LIKE
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
RECORD_LIKE = np.empty(0, PRODUCT)  # for `array_at`
LIKE: Mapping[torch.dtype, Floats] = {
    torch.float32: FLOAT32_LIKE,
    torch.bfloat16: UINT16_LIKE,
}


def compile_product(product: Callable[[int, int, int, int, int, int], None]) -> Callback:
    """Compiles a product, or reads it from the cache."""
    return compile_callback(product, NUM_ARGUMENTS)


def multiply_by(layer: Any, x: Floats, out: Float32s, worker: int, num_workers: int) -> None:
    """Calls the product of a linear layer, a record of PRODUCT: a worker's share of the outputs for
    all rows. x [tokens, in] -> out [tokens, out], contiguous."""
    record = np.array(layer, PRODUCT)
    arguments = (record.ctypes.data, x.ctypes.data, len(x), out.ctypes.data, worker, num_workers)
    call_at(layer["product"], arguments)


@intrinsic
def _address_of(typing: Any, record: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(record), emit


@overload(multiply_by, strict=False)
def _overload_multiply_by(
    layer: Any, x: Any, out: Any, worker: Any, num_workers: Any
) -> Callable[..., None]:
    return lambda layer, x, out, worker, num_workers: call_at(
        layer.product,
        (_address_of(layer), x.ctypes.data, x.shape[0], out.ctypes.data, worker, num_workers),
    )
