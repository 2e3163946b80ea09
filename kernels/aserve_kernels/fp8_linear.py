"""A linear layer with weights and activations in fp8 (E4M3), which tensor cores multiply as they
are (W8A8).

    y = x W^T + b,  W[o, i] = scales[i // group, o // rows] * element[o, i]
    x[t, i] = x_scales[t, i // x_group] * element[t, i]

Activations are quantised for each layer, for a whole token or for each group of 128 inputs:

    x_scales[t, g] = max |x[t, i]| / 448 of the group,  element = x / x_scales rounded to E4M3

or by the one scale that a checkpoint gives. The products of 128 inputs are summed by the tensor
cores, and these sums are scaled and added in float32, because tensor cores add products of fp8 with
fewer bits.

Source: the fine-grained quantisation of DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.dot import dot_add
from aserve_kernels.tile_order import tile_at
from aserve_kernels.weight_only_linear import CodedMatrix, widened_ref

GROUP = 128  # inputs of activations with one scale, and inputs of a step
LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 1e-12  # of groups that are zero
# NOTE: the sizes of tiles are not measured.
BLOCK_M = 64
BLOCK_N = 128
ELEMENTS = 4096  # that a program quantises, where groups are short


class Fp8Rows(NamedTuple):
    """Activations in fp8."""

    elements: Tensor  # float8_e4m3fn [tokens, in]
    scales: Tensor  # float32 [tokens, groups]


def quantize_rows(x: Tensor, group: int, given: Tensor | None = None) -> Fp8Rows:
    """x [tokens, in], float32, bfloat16 or float16, with contiguous rows; `group` is GROUP, or `in`
    for one scale per token. The last group may be shorter. `given`, float32 [1], is the scale of
    all rows, if it is known."""
    num_tokens, num_inputs = x.shape
    num_groups = triton.cdiv(num_inputs, group)
    elements = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=x.device)
    if not num_tokens:
        return Fp8Rows(elements, scales)
    power = triton.next_power_of_2(group)
    per_program = min(triton.next_power_of_2(num_groups), max(1, ELEMENTS // power))
    _quantize[(num_tokens, triton.cdiv(num_groups, per_program))](
        x, given, elements, scales, x.stride(0),
        NUM_INPUTS=num_inputs,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group,
        GROUP_POWER=power,
        PER_PROGRAM=per_program,
        BOUND=LARGEST,
        LEAST=SMALLEST_SCALE,
        num_warps=16 if power > 1 << 14 else 8 if power > 1 << 12 else 4,
    )  # fmt: skip
    return Fp8Rows(elements, scales)


def quantize_rows_ref(x: Tensor, group: int, given: Tensor | None = None) -> Fp8Rows:
    num_inputs = x.shape[1]
    num_groups = -(-num_inputs // group)
    padded = functional.pad(x.float(), (0, num_groups * group - num_inputs))
    groups = padded.unflatten(1, (num_groups, group))
    scales = (groups.abs().amax(dim=2) / LARGEST).clamp(min=SMALLEST_SCALE)
    if given is not None:
        scales = given.expand_as(scales).contiguous()
    elements = (groups / scales[:, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Rows(elements.flatten(1)[:, :num_inputs].contiguous(), scales)


def fp8_linear(
    x: Fp8Rows, weight: CodedMatrix, bias: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """x with a scale for each GROUP inputs, or for each token; weight of fp8 whose group is a
    multiple of GROUP, or all inputs; bias [out] -> `dtype` [tokens, out]."""
    num_tokens, num_inputs = x.elements.shape
    num_outputs = len(weight.codes)
    out = torch.empty((num_tokens, num_outputs), dtype=dtype, device=x.elements.device)
    if not num_tokens:
        return out
    num_tiles = triton.cdiv(num_tokens, BLOCK_M) * triton.cdiv(num_outputs, BLOCK_N)
    _multiply_fp8[(num_tiles,)](
        x.elements, x.scales, weight.codes, weight.scales, bias, out, num_tokens,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        GROUP_SIZE=weight.group,
        ROWS=weight.rows,
        HAS_GROUP_SCALES=x.scales.shape[1] > 1,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=GROUP,
        num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return out


def fp8_linear_ref(
    x: Fp8Rows, weight: CodedMatrix, bias: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    num_inputs = x.elements.shape[1]
    group = GROUP if x.scales.shape[1] > 1 else num_inputs
    by_input = x.scales.repeat_interleave(group, dim=1)[:, :num_inputs]
    wide = x.elements.float() * by_input
    float_bias = None if bias is None else bias.float()
    return functional.linear(wide, widened_ref(weight), float_bias).to(dtype)


@triton.jit
def _quantize(
    x: tl.tensor, given: tl.tensor | None, elements: tl.tensor, scales: tl.tensor, x_stride: int,
    NUM_INPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_POWER: tl.constexpr, PER_PROGRAM: tl.constexpr, BOUND: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """One program quantises PER_PROGRAM groups of one token."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    in_group = tl.arange(0, GROUP_POWER)[None, :]
    columns = groups[:, None] * GROUP_SIZE + in_group
    is_there = (in_group < GROUP_SIZE) & (columns < NUM_INPUTS)
    values = tl.load(x + token * x_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    if given is None:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 1), BOUND), LEAST)
    else:
        scale = tl.load(given + groups * 0)
    shrunk = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    shrunk = tl.minimum(tl.maximum(shrunk, -BOUND), BOUND)
    tl.store(
        elements + token * NUM_INPUTS + columns, shrunk.to(elements.dtype.element_ty),
        mask=is_there,
    )  # fmt: skip
    tl.store(scales + token * NUM_GROUPS + groups, scale, mask=groups < NUM_GROUPS)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_fp8(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor,
    bias: tl.tensor | None, out: tl.tensor, num_tokens: int,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr, HAS_GROUP_SCALES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One program computes one [BLOCK_M tokens, BLOCK_N outputs] tile."""
    num_blocks: tl.constexpr = (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N
    num_scales: tl.constexpr = (NUM_OUTPUTS + ROWS - 1) // ROWS
    num_x_scales: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K if HAS_GROUP_SCALES else 1
    token_block, output_block = tile_at(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), num_blocks)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = output_block * BLOCK_N + tl.arange(0, BLOCK_N)
    has_token, has_output = tokens < num_tokens, outputs < NUM_OUTPUTS
    inputs = tl.arange(0, BLOCK_K)
    x_rows = x + tokens.to(tl.int64)[:, None] * NUM_INPUTS
    weight_rows = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS
    scale_rows = tokens * num_x_scales
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        columns = (start + inputs)[None, :]
        a = tl.load(x_rows + columns, mask=has_token[:, None] & (columns < NUM_INPUTS), other=0.0)
        b = tl.load(
            weight_rows + columns, mask=has_output[:, None] & (columns < NUM_INPUTS), other=0.0
        )
        products = dot_add(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), a, tl.trans(b))
        x_group = start // BLOCK_K if HAS_GROUP_SCALES else 0
        x_scale = tl.load(x_scales + scale_rows + x_group, mask=has_token, other=0.0)
        scale = tl.load(
            scales + start // GROUP_SIZE * num_scales + outputs // ROWS, mask=has_output, other=0.0
        )
        acc += products * (x_scale[:, None] * scale[None, :])
    if bias is not None:
        acc += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    addresses = out + tokens.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    mask = has_token[:, None] & has_output[None, :]
    tl.store(addresses, acc.to(out.dtype.element_ty), mask=mask)
