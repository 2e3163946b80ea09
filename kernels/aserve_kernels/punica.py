"""LoRA for few tokens with different adapters, as Triton kernels: see lora.py for the formulas.

One program computes one token, so a token's result is the same in every batch.

Source: https://arxiv.org/abs/2310.18547
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.lora import LoraStack

INPUTS = 256  # that the shrink multiplies at a time
OUTPUTS = 256  # of one program of the expand


def add_lora(y: Tensor, x: Tensor, slots: Tensor, stack: LoraStack) -> None:
    """Adds to y [tokens, out] in place. x [tokens, in], slots int64 [tokens]. The two launches
    depend on nothing but shapes, so they can be captured in a graph."""
    num_tokens, num_in = x.shape
    num_parts, rank = stack.a.shape[1:3]
    num_out = y.shape[1]
    if not num_tokens:
        return
    h = torch.empty((num_tokens, num_parts, rank), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(rank)
    _shrink[(num_tokens, num_parts)](
        x, slots, stack.a, h, x.stride(0), num_in, num_parts, rank, width, INPUTS
    )
    _expand[(num_tokens, triton.cdiv(num_out, OUTPUTS))](
        y, slots, stack.b, h, stack.part_of, y.stride(0), num_out, num_parts, rank, width, OUTPUTS
    )


@triton.jit
def _shrink(
    x: tl.tensor, slots: tl.tensor, a: tl.tensor, h: tl.tensor, x_stride: int,
    num_in: int, num_parts: int, rank: int, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot > 0:
        ranks = tl.arange(0, WIDTH)
        is_rank = ranks < rank
        rows = a + ((slot * num_parts + part) * rank + ranks[:, None]) * num_in
        total = tl.zeros([WIDTH], tl.float32)
        for start in range(0, num_in, INPUTS):
            columns = start + tl.arange(0, INPUTS)
            is_in = columns < num_in
            values = tl.load(x + token * x_stride + columns, mask=is_in, other=0).to(tl.float32)
            is_both = is_rank[:, None] & is_in[None, :]
            weights = tl.load(rows + columns[None, :], mask=is_both, other=0).to(tl.float32)
            total += tl.sum(weights * values[None, :], axis=1)
        tl.store(h + (token * num_parts + part) * rank + ranks, total, mask=is_rank)


@triton.jit
def _expand(
    y: tl.tensor, slots: tl.tensor, b: tl.tensor, h: tl.tensor, part_of: tl.tensor, y_stride: int,
    num_out: int, num_parts: int, rank: int, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot > 0:
        columns = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_out = columns < num_out
        ranks = tl.arange(0, WIDTH)
        is_both = (ranks < rank)[:, None] & is_out[None, :]
        parts = tl.load(part_of + columns, mask=is_out, other=0)
        shrunk = h + (token * num_parts + parts[None, :]) * rank + ranks[:, None]
        rows = b + (slot * rank + ranks[:, None]) * num_out
        weights = tl.load(rows + columns[None, :], mask=is_both, other=0).to(tl.float32)
        delta = tl.sum(tl.load(shrunk, mask=is_both, other=0) * weights, axis=0)
        target = y + token * y_stride + columns
        before = tl.load(target, mask=is_out, other=0).to(tl.float32)
        tl.store(target, (before + delta).to(y.dtype.element_ty), mask=is_out)
