"""RMS norm of few tokens on the CPU, in one compiled call instead of half a dozen torch operators.

y = x / sqrt(mean(x^2) + eps) * weight
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, widen
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, size] float32 or bfloat16, weight float32 [size], on the CPU -> a contiguous
    tensor like x. `rms_norm_ref` is the reference."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    _norm(as_array(rows), weight.numpy(), eps, as_array(out))
    return out


def compile_rms_norm(dtype: torch.dtype) -> None:
    """Compiles the kernels of this dtype."""
    rows = types.Array(numba_type(dtype), 2, "C")
    compile_ahead(_norm, rows, types.Array(types.float32, 1, "C"), types.float64, rows)


# WHY: not nogil. A call takes microseconds; getting the GIL back may take milliseconds.
@cached_njit(fastmath=FASTMATH)
def _norm(x: Floats, weight: Float32s, eps: float, out: Floats) -> None:
    size = x.shape[1]
    row = np.empty(size, np.float32)
    for token in range(x.shape[0]):
        widen(x[token], row)
        total = np.float32(0)
        for i in range(size):
            total += row[i] * row[i]
        scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + np.float32(eps)))
        for i in range(size):
            row[i] = row[i] * scale * weight[i]
        narrow(row, out[token])
