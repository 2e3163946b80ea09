"""The activations of MLPs on the CPU: out = activation(gate) * up, in one pass that threads share.
`aserve_kernels.gated_mul` has the formulas and their source.

Compiled steps know two more (`apply_gate`): the clamped one of gpt-oss, and relu2 of MLPs that have
no gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array, narrow, numba_type, rounded, widen
from aserve_kernels.cpu.exp2 import LOG2_E, power_of_two
from aserve_kernels.cpu.memory import FLOAT32_LIKE, scratch
from aserve_kernels.cpu.precompile import FASTMATH, NO_REFCOUNT, cached_njit, compile_ahead

SILU, GELU, GELU_TANH, CLAMPED, RELU2 = range(5)
KINDS: Mapping[str, int] = {"silu": SILU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH}
GELU_SCALE = np.float32(math.sqrt(2 / math.pi))
GELU_CUBE = np.float32(0.044715)
ONE = np.float32(1)


class Gate(NamedTuple):
    """The activation of an MLP in a compiled step."""

    kind: int
    factor: np.float32  # of the gates, and of a CLAMPED one in the sigmoid alone
    limit: np.float32  # of a CLAMPED one


def gated_mul(gate_up: Tensor, activation: str, *, num_workers: int) -> Tensor:
    """gate_up [tokens, 2 * size], contiguous, float32 or bfloat16 on the CPU, the gates first;
    `activation` is one of KINDS -> [tokens, size] of the same dtype.

    The activation is computed in float32, and rounded to the dtype before the product.
    `aserve_kernels.gated_mul.gated_mul_ref` is the reference.
    """
    out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    _gated(as_array(gate_up), KINDS[activation], as_array(out), num_workers)
    return out


def compile_gated_mul(dtype: torch.dtype) -> None:
    rows = types.Array(numba_type(dtype), 2, "C")
    compile_ahead(_gated, rows, types.int64, rows, types.int64)


@cached_njit(parallel=True, nogil=True)
def _gated(gate_up: Floats, activation: int, out: Floats, num_workers: int) -> None:
    for worker in prange(num_workers):
        first, last = len(out) * worker // num_workers, len(out) * (worker + 1) // num_workers
        size = out.shape[1]
        both = scratch((2 * size,), FLOAT32_LIKE)
        for token in range(first, last):
            widen(gate_up[token], both)
            activate(both[:size], both[size:], activation, out)
            narrow(both[:size], out[token])


# PERF: numba's default error model checks divisors for zero, which prevents vectorisation.
@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **NO_REFCOUNT)
def activate(row: Float32s, up: Float32s, activation: int, like: Floats) -> None:
    """row = activation(row) * up, the activation rounded to the dtype of `like`. All are [size]."""
    size = np.uint64(row.shape[0])  # PERF: unsigned, as in rope_and_store_kv.py
    if activation == SILU:
        for i in range(size):
            row[i] = rounded(row[i] * sigmoid(row[i]), like) * up[i]
    elif activation == GELU_TANH:
        for i in range(size):
            x = row[i]
            # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
            inner = GELU_SCALE * (x + GELU_CUBE * x * x * x)
            row[i] = rounded(x * sigmoid(np.float32(2) * inner), like) * up[i]
    else:
        for i in range(size):
            x = row[i]
            part = np.float32(math.erf(x * np.float32(math.sqrt(0.5))))
            row[i] = rounded(np.float32(0.5) * x * (np.float32(1) + part), like) * up[i]


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **NO_REFCOUNT)
def apply_gate(row: Float32s, up: Float32s, gate: Gate) -> None:
    """row = activation(factor * row) * up. Of an MLP without gates `row` is up itself:

    clamped: (min(max(up, -limit), limit) + 1) * g * sigmoid(factor * g)    g = min(row, limit)
    relu2:   max(row, 0)^2
    """
    size = np.uint64(row.shape[0])
    if gate.kind == CLAMPED:
        for i in range(size):
            g, u = min(row[i], gate.limit), min(max(up[i], -gate.limit), gate.limit)
            row[i] = (u + ONE) * g * sigmoid(gate.factor * g)
    elif gate.kind == RELU2:
        for i in range(size):
            g = max(row[i], np.float32(0))
            row[i] = g * g
    else:
        if gate.factor != ONE:
            for i in range(size):
                row[i] *= gate.factor
        activate(row, up, gate.kind, row)


@njit(inline="always")
def num_inner_parts(kind: int) -> int:
    """Returns how many outputs of an MLP's first product each inner element is made of."""
    return 1 if kind == RELU2 else 2


@njit(inline="always")
def sigmoid(x: np.float32) -> np.float32:
    power = power_of_two(-abs(x) * np.float32(LOG2_E))
    part = np.float32(1) / (np.float32(1) + power)
    return part if x >= 0 else power * part
