"""Grouped linear layers: the rows of each expert are multiplied by that expert's weight.

    y[r] = x[r] W[e]^T + b[e]    for the rows starts[e] <= r < ends[e]

The bounds stay on the device, and the grid follows from the shapes alone, so the product may be
captured in a graph. Each expert's rows are cut into tiles of their own; a program looks up which
expert its tile belongs to, and the programs behind the last tile do nothing. A row's sum has one
order, whatever other rows there are, so a token's result does not depend on its batch.

Source: the grouped product of MegaBlocks, https://arxiv.org/abs/2211.15841
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.dot import dot_add

# NOTE: not measured. In decode an expert has one or a few rows.
BLOCK_M = 16
BLOCK_N = 64


def grouped_linear(
    x: Tensor, weights: Tensor, biases: Tensor | None, starts: Tensor, ends: Tensor
) -> Tensor:
    """x [rows, in], weights [experts, out, in] and biases [experts, out], all float32, bfloat16 or
    float16, with contiguous rows; starts and ends int32 [experts] -> [rows, out]. The accumulation
    is float32. Rows outside of the groups are undefined."""
    num_experts, num_outputs, num_inputs = weights.shape
    out = x.new_empty((len(x), num_outputs))
    if not len(x):
        return out
    # Every expert has at most one tile that is not full.
    num_tiles = min(triton.cdiv(len(x), BLOCK_M) + num_experts, len(x))
    is_16_bit = x.dtype.itemsize == 2
    _multiply[(num_tiles, triton.cdiv(num_outputs, BLOCK_N))](
        x, weights, biases, out, starts, ends, x.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_POWER=triton.next_power_of_2(num_experts),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=64 if is_16_bit else 32,
        num_warps=4,
        num_stages=4 if is_16_bit else 2,
    )  # fmt: skip
    return out


def grouped_linear_ref(
    x: Tensor, weights: Tensor, biases: Tensor | None, starts: Tensor, ends: Tensor
) -> Tensor:
    out = torch.zeros(len(x), weights.shape[1], dtype=x.dtype)
    for expert, weight in enumerate(weights):
        own = slice(int(starts[expert]), int(ends[expert]))
        bias = None if biases is None else biases[expert].float()
        out[own] = functional.linear(x[own].float(), weight.float(), bias).to(x.dtype)
    return out


@triton.jit
def _multiply(
    x: tl.tensor, weights: tl.tensor, biases: tl.tensor | None, out: tl.tensor,
    starts: tl.tensor, ends: tl.tensor, x_stride: int,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One program computes one [BLOCK_M rows, BLOCK_N outputs] tile of one expert."""
    expert, rows, has_row = rows_of_tile(
        starts, ends, NUM_EXPERTS, EXPERTS_POWER=EXPERTS_POWER, BLOCK_M=BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_output = outputs < NUM_OUTPUTS
    inputs = tl.arange(0, BLOCK_K)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight = weights + expert.to(tl.int64) * NUM_OUTPUTS * NUM_INPUTS
    weight_rows = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        columns = (start + inputs)[None, :]
        a = tl.load(x_rows + columns, mask=has_row & (columns < NUM_INPUTS), other=0.0)
        b = tl.load(
            weight_rows + columns, mask=has_output[:, None] & (columns < NUM_INPUTS), other=0.0
        )
        acc = dot_add(acc, a, tl.trans(b))
    if biases is not None:
        bias = tl.load(biases + expert * NUM_OUTPUTS + outputs, mask=has_output, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_addresses = out + rows.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_addresses, acc.to(out.dtype.element_ty), mask=has_row & has_output[None, :])


@triton.jit
def rows_of_tile(
    starts: tl.tensor, ends: tl.tensor, NUM_EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Returns the expert of this program's tile, NUM_EXPERTS behind the last tile, the tile's rows
    [BLOCK_M], and which of them are the expert's [BLOCK_M, 1]."""
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_POWER)
    first_rows = tl.load(starts + experts, mask=experts < NUM_EXPERTS, other=0)
    last_rows = tl.load(ends + experts, mask=experts < NUM_EXPERTS, other=0)
    num_tiles = tl.cdiv(last_rows - first_rows, BLOCK_M)
    tiles_until = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tiles_until <= tile).to(tl.int32), 0)
    is_own = experts == expert
    tile_of_expert = tile - tl.sum(tl.where(is_own, tiles_until - num_tiles, 0), 0)
    rows = tl.sum(tl.where(is_own, first_rows, 0), 0) + tile_of_expert * BLOCK_M
    rows += tl.arange(0, BLOCK_M)
    return expert, rows, (rows < tl.sum(tl.where(is_own, last_rows, 0), 0))[:, None]
