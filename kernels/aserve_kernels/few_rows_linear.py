"""A linear layer for up to FEW_ROWS tokens, as a batch of matrix-vector products.

    y = x W^T + b

Such a product takes as long as its weight takes to be read. It uses no tensor cores, whose tiles of
16 tokens would be mostly empty: each weight is read once, and multiplied with every token in
float32. The sum over `in` is split among programs, so that small weights occupy the whole device,
and a second kernel adds the parts in a fixed order (split-K). Sizes are arguments and no constants,
so all layers share two compiled kernels of each kind.

NOTE: the sizes of tiles and the number of programs are not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.early_launch import launches_early, wait_for_inputs

FEW_ROWS = 4
BLOCK_N = 16  # outputs of a program
BLOCK_K = 128  # inputs of a step
NUM_PROGRAMS = 512  # about four for each multiprocessor of a large GPU
PER_SUM = 1024  # outputs that a program adds the parts of


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] of at most FEW_ROWS tokens, weight [out, in] and bias [out], all float32,
    bfloat16 or float16, with contiguous rows -> [tokens, out]. The accumulation is float32."""
    num_tokens, num_inputs = x.shape
    num_outputs = len(weight)
    out = x.new_empty((num_tokens, num_outputs))
    if not num_tokens:
        return out
    num_steps, num_tiles = triton.cdiv(num_inputs, BLOCK_K), triton.cdiv(num_outputs, BLOCK_N)
    steps = min(num_steps, max(1, triton.cdiv(num_steps * num_tiles, NUM_PROGRAMS)))
    num_splits = triton.cdiv(num_steps, steps)
    is_split, early = num_splits > 1, launches_early(x)
    parts = x.new_empty((num_splits, *out.shape), dtype=torch.float32) if is_split else out
    _multiply_rows[(num_tiles, num_splits)](
        *(x, weight, None if is_split else bias, parts),
        *(num_tokens, num_outputs, num_inputs, x.stride(0), weight.stride(0), steps),
        TOKENS=1 if num_tokens == 1 else FEW_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        IS_EARLY=early,
        num_warps=4,
        num_stages=4,
        launch_pdl=early,
    )
    if is_split:
        _add_parts[(num_tokens, triton.cdiv(num_outputs, PER_SUM))](
            *(parts, bias, out, num_outputs, num_splits, parts.stride(0)),
            BLOCK=PER_SUM,
            IS_EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
    return out


def few_rows_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    float_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), float_bias).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def _multiply_rows(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor | None, out: tl.tensor, num_tokens: int,
    num_outputs: int, num_inputs: int, x_stride: int, weight_stride: int, steps: int,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program computes BLOCK_N outputs of all tokens, over `steps` steps of the inputs."""
    wait_for_inputs(IS_EARLY)
    split = tl.program_id(1)
    tokens = tl.arange(0, TOKENS)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_token, has_output = tokens < num_tokens, outputs < num_outputs
    inputs = tl.arange(0, BLOCK_K)[None, :]
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros((TOKENS, BLOCK_N, BLOCK_K), tl.float32)
    first = split * steps * BLOCK_K
    for start in range(first, tl.minimum(first + steps * BLOCK_K, num_inputs), BLOCK_K):
        at = start + inputs
        a = tl.load(x_rows + at, mask=has_token[:, None] & (at < num_inputs), other=0.0)
        b = tl.load(weight_rows + at, mask=has_output[:, None] & (at < num_inputs), other=0.0)
        acc += a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :]
    total = tl.sum(acc, 2)
    if bias is not None:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    rows = (split * num_tokens + tokens).to(tl.int64)
    addresses = out + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(addresses, total.to(out.dtype.element_ty), mask=has_token[:, None] & has_output)


@triton.jit(do_not_specialize=["num_splits"])
def _add_parts(
    parts: tl.tensor, bias: tl.tensor | None, out: tl.tensor, num_outputs: int, num_splits: int,
    split_stride: int, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program adds the parts of BLOCK outputs of one token."""
    wait_for_inputs(IS_EARLY)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_output = outputs < num_outputs
    at = tl.program_id(0).to(tl.int64) * num_outputs + outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        total += tl.load(parts + split * split_stride + at, mask=has_output, other=0.0)
    if bias is not None:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_output)
