"""RMS norm on the CPU, in one compiled call instead of half a dozen torch operators.

y = x / sqrt(mean(x^2) + eps) * weight
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, widen
from aserve_kernels.cpu.memory import scratch
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, num_workers: int = 1) -> Tensor:
    """x [tokens, size] float32 or bfloat16, weight float32 [size], on the CPU -> a contiguous
    tensor like x. Several workers divide the tokens. `rms_norm_ref` is the reference."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    if num_workers == 1:
        _norm_alone(as_array(rows), weight.numpy(), eps, as_array(out))
    else:
        _norm_shared(as_array(rows), weight.numpy(), eps, as_array(out), num_workers)
    return out


def compile_rms_norm(dtype: torch.dtype) -> None:
    """Compiles the kernels of this dtype."""
    rows = types.Array(numba_type(dtype), 2, "C")
    arguments = (rows, types.Array(types.float32, 1, "C"), types.float64, rows)
    compile_ahead(_norm_alone, *arguments)
    compile_ahead(_norm_shared, *arguments, types.int64)


# WHY: not nogil. A call takes microseconds; getting the GIL back may take milliseconds.
@cached_njit(fastmath=FASTMATH)
def _norm_alone(x: Floats, weight: Float32s, eps: float, out: Floats) -> None:
    _norm(x, weight, eps, out)


@cached_njit(parallel=True, nogil=True)
def _norm_shared(x: Floats, weight: Float32s, eps: float, out: Floats, num_workers: int) -> None:
    for worker in prange(num_workers):
        first, last = len(x) * worker // num_workers, len(x) * (worker + 1) // num_workers
        _norm(x[first:last], weight, eps, out[first:last])


@njit(fastmath=FASTMATH)
def _norm(x: Floats, weight: Float32s, eps: float, out: Floats) -> None:
    size = x.shape[1]
    row = scratch((size,), weight)
    for token in range(x.shape[0]):
        widen(x[token], row)
        total = np.float32(0)
        for i in range(size):
            total += row[i] * row[i]
        scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + np.float32(eps)))
        for i in range(size):
            row[i] = row[i] * scale * weight[i]
        narrow(row, out[token])
