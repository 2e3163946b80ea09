"""RMS norm of each token (Zhang and Sennrich, 2019), alone or fused with the residual addition.

    y = x / sqrt(mean(x^2) + eps) * weight

One program normalises one token, so a token's result does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.early_launch import launches_early, wait_for_inputs
from aserve_kernels.reference import rms_norm_ref


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, size] with contiguous rows, float32, bfloat16 or float16; weight [size] -> a
    contiguous tensor like x.

    The sum and the products are float32; the result is rounded once. `rms_norm_ref` is the
    reference.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block, warps = _shape(x.shape[1])
    if len(x):
        early = launches_early(x)
        _norm[(len(x),)](
            *(x, weight, out, x.stride(0), x.shape[1], eps, block, early),
            num_warps=warps,
            launch_pdl=early,
        )
    return out


def add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns `total = hidden + scale * added`, rounded to the dtype of hidden, and the RMS norm
    of `total`.

    hidden and added [tokens, size], contiguous, of one dtype; weight [size].
    """
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    size = hidden.shape[1]
    block, warps = _shape(size)
    if len(hidden):
        early = launches_early(hidden)
        _add_norm[(len(hidden),)](
            *(hidden, added, weight, total, out, size, eps, scale, block, early),
            num_warps=warps,
            launch_pdl=early,
        )
    return total, out


def add_rms_norm_ref(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    total = torch.add(hidden, added, alpha=scale)
    return total, rms_norm_ref(total, weight, eps)


def _shape(size: int) -> tuple[int, int]:
    """Returns the block size that holds a token, and the warps: each thread has 16 bytes of
    bfloat16.
    """
    block = triton.next_power_of_2(size)
    return block, min(16, max(1, block // 256))


@triton.jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride: int,
    size: int,
    eps: float,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    values = tl.load(x + token * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = values / rms * factors
    tl.store(out + token * size + columns, normed.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _add_norm(
    hidden: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    scale: float,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    wait_for_inputs(IS_EARLY)
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    values = tl.load(hidden + start + columns, mask=is_in, other=0.0).to(tl.float32)
    addend = tl.load(added + start + columns, mask=is_in, other=0.0).to(tl.float32)
    rounded = (values + addend * scale).to(total.dtype.element_ty)
    tl.store(total + start + columns, rounded, mask=is_in)
    values = rounded.to(tl.float32)
    factors = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = values / rms * factors
    tl.store(out + start + columns, normed.to(out.dtype.element_ty), mask=is_in)
