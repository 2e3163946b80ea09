"""Grouped linear layers whose weights are stored in 8 or 4 bits, and multiplied in the dtype of x.

    y[r] = x[r] W[e]^T + b[e]    for the rows starts[e] <= r < ends[e]
    W[e, o, i] = scales[e, i // group, o // rows] * code[e, o, i] + offsets[e, i // group, o]

Rows find their expert as in grouped_linear.py, and codes lie, are decoded and are scaled as in
weight_only_linear.py: tensor cores multiply codes, which are exact in bfloat16 and float16, and the
sum of each step of inputs is scaled in float32. A row's sum has one order, whatever other rows
there are, so a token's result does not depend on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.grouped_linear import BLOCK_M, BLOCK_N, grouped_linear_ref, rows_of_tile
from aserve_kernels.weight_only_linear import (
    CodedMatrix,
    add_step,
    bits_of,
    block_of,
    kind_of,
    widened_ref,
)


class CodedExperts(NamedTuple):
    """Weights W [experts, out, in] of 8 or 4 bits. The fields are those of a `CodedMatrix` for each
    expert, and contiguous."""

    codes: Tensor  # float8_e4m3fn or int8 [experts, out, in], or uint8 [experts, out, in / 2]
    scales: Tensor  # float32 [experts, groups, out / rows, rounded up]
    offsets: Tensor | None  # float32 [experts, groups, out]; `rows` is 1
    num_inputs: int
    group: int  # inputs with one scale, as block_of supports it
    rows: int = 1  # outputs with one scale
    is_e2m1: bool = False


def grouped_coded_linear(
    x: Tensor, weights: CodedExperts, biases: Tensor | None, starts: Tensor, ends: Tensor
) -> Tensor:
    """x [rows, in] with contiguous rows and biases [experts, out], both float32, bfloat16 or
    float16; starts and ends int32 [experts] -> [rows, out]. The accumulation is float32. Rows
    outside of the groups are undefined."""
    num_experts, num_outputs, row_bytes = weights.codes.shape
    out = x.new_empty((len(x), num_outputs))
    if not len(x):
        return out
    block = block_of(weights.num_inputs, weights.group)
    assert block is not None
    # Every expert has at most one tile that is not full.
    num_tiles = min(triton.cdiv(len(x), BLOCK_M) + num_experts, len(x))
    _multiply_experts[(num_tiles, triton.cdiv(num_outputs, BLOCK_N))](
        x, bits_of(weights.codes), weights.scales, weights.offsets, biases, out, starts, ends,
        x.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_POWER=triton.next_power_of_2(num_experts),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=weights.num_inputs,
        ROW_BYTES=row_bytes,
        KIND=kind_of(weights.codes, is_e2m1=weights.is_e2m1),
        GROUP=weights.group,
        ROWS=weights.rows,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block,
        num_warps=4,
        num_stages=4 if x.dtype.itemsize == 2 else 2,
    )  # fmt: skip
    return out


def grouped_coded_linear_ref(
    x: Tensor, weights: CodedExperts, biases: Tensor | None, starts: Tensor, ends: Tensor
) -> Tensor:
    offsets = (None,) * len(weights.codes) if weights.offsets is None else weights.offsets
    wide = [
        widened_ref(CodedMatrix(codes, scales, own, *weights[3:]))
        for codes, scales, own in zip(weights.codes, weights.scales, offsets, strict=True)
    ]
    return grouped_linear_ref(x, torch.stack(wide), biases, starts, ends)


@triton.jit
def _multiply_experts(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, offsets: tl.tensor | None,
    biases: tl.tensor | None, out: tl.tensor, starts: tl.tensor, ends: tl.tensor, x_stride: int,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One program computes one [BLOCK_M rows, BLOCK_N outputs] tile of one expert."""
    num_scales: tl.constexpr = (NUM_OUTPUTS + ROWS - 1) // ROWS
    num_groups: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    num_steps: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    expert, rows, has_row = rows_of_tile(
        starts, ends, NUM_EXPERTS, EXPERTS_POWER=EXPERTS_POWER, BLOCK_M=BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_output = outputs < NUM_OUTPUTS
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    number = expert.to(tl.int64)
    code_rows = codes + (number * NUM_OUTPUTS + outputs)[:, None] * ROW_BYTES
    scales += number * num_groups * num_scales
    if offsets is not None:
        offsets += number * num_groups * NUM_OUTPUTS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(num_steps):
        acc = add_step(
            acc, x_rows, code_rows, scales, offsets, has_row, outputs, step,
            NUM_OUTPUTS=NUM_OUTPUTS, NUM_INPUTS=NUM_INPUTS, KIND=KIND, GROUP=GROUP, ROWS=ROWS,
            BLOCK_K=BLOCK_K,
        )  # fmt: skip
    if biases is not None:
        bias = tl.load(biases + expert * NUM_OUTPUTS + outputs, mask=has_output, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    addresses = out + rows.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(addresses, acc.to(out.dtype.element_ty), mask=has_row & has_output[None, :])
