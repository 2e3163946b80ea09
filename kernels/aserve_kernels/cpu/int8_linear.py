"""A weight-only int8 linear layer for few tokens on the CPU.

    y[t, o] = scales[o] * sum_i x[t, i] * weight[o, i]

Decode reads every weight once, so memory bandwidth is the limit, and int8 weights take half the
bytes of bfloat16. The arithmetic is float32.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, widen
from aserve_kernels.cpu.precompile import FASTMATH, cached_njit, compile_ahead

Int8s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int8]]


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [tokens, in] float32 or bfloat16, weight int8 [out, in], scales float32 [out], all on the
    CPU -> [tokens, out] like x."""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype)
    num_workers = torch.get_num_threads()
    _multiply(as_array(x.contiguous()), weight.numpy(), scales.numpy(), as_array(out), num_workers)
    return out


def int8_linear_ref(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    product = x.float() @ weight.float().t()
    return (product * scales).to(x.dtype)


def compile_int8_linear(dtype: torch.dtype) -> None:
    floats = types.Array(types.uint16 if dtype == torch.bfloat16 else types.float32, 2, "C")
    compile_ahead(
        _multiply,
        floats,
        types.Array(types.int8, 2, "C"),
        types.Array(types.float32, 1, "C"),
        floats,
        types.int64,
    )


@cached_njit(parallel=True, nogil=True)
def _multiply(x: Floats, weight: Int8s, scales: Float32s, out: Floats, num_workers: int) -> None:
    num_tokens, num_in = x.shape
    x_float = np.empty((num_tokens, num_in), np.float32)
    for token in range(num_tokens):
        widen(x[token], x_float[token])
    num_out = weight.shape[0]
    block = -(-num_out // num_workers)
    for worker in prange(num_workers):
        _multiply_rows(
            x_float, weight, scales, out, worker * block, min(num_out, (worker + 1) * block)
        )


@njit(nogil=True, fastmath=FASTMATH)
def _multiply_rows(
    x: Float32s, weight: Int8s, scales: Float32s, out: Floats, first: int, last: int
) -> None:
    num_tokens, num_in = x.shape
    row = np.empty(num_in, np.float32)
    sums = np.empty(num_tokens, np.float32)
    for output in range(first, last):
        for i in range(num_in):
            row[i] = np.float32(weight[output, i])
        for token in range(num_tokens):
            product = np.float32(0)
            for i in range(num_in):
                product += x[token, i] * row[i]
            sums[token] = product * scales[output]
        narrow(sums, out[:, output])
